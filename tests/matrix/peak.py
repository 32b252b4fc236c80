"""The most bytes of tensors that are alive at once while something runs, from the allocations that torch records."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.autograd.profiler import profile

_MARK = 12_345_677
"""Bytes of an allocation that says where in the record the peak is looked for."""


@contextmanager
def recorded_peak(facts: dict[str, int], name: str) -> Iterator[Callable[[int], None]]:
    """Note under `name` the peak from the moment at which what is given is called, with the bytes alive then.

    What was allocated before the record began is not seen to go: begin a step earlier, so that the gradients of that
    step are seen to make room for those of the next.
    """
    alive = most = 0

    def begin(nbytes: int) -> None:
        nonlocal alive
        alive = nbytes
        torch.empty(_MARK, dtype=torch.uint8)

    with profile(profile_memory=True) as recorded:
        yield begin
    events = recorded.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    start = max(at for at, (_, nbytes) in enumerate(changes) if _MARK <= -nbytes < _MARK + 4096)
    most = alive
    for _, nbytes in changes[start + 1 :]:
        alive += nbytes
        most = max(most, alive)
    facts[name] = most
