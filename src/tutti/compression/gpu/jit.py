"""How kernels are made: compiled at the first call with dtypes and settings, kept on disk for the next process."""

from collections.abc import Callable
from typing import Any

import triton


def kernel(*, anywhere: tuple[str, ...] = (), any_value: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """A kernel. Triton compiles it anew where an argument is a multiple of 16 bytes, or 1, and where it is not, but not
    for those named: `anywhere`, views into messages, which lie at any multiple of 4; `any_value`, numbers.
    """

    def made(function: Callable[..., Any]) -> Any:
        return triton.jit(function, do_not_specialize_on_alignment=anywhere, do_not_specialize=any_value)

    return made


def inline(function: Callable[..., Any]) -> Any:
    """A function that is compiled into the kernels that call it."""
    return triton.jit(function)
