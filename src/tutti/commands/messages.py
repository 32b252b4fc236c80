"""What commands say while they work. A command line shows it on standard error; the functions show it only if asked."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from rich.console import Console

console = Console(stderr=True, highlight=False, force_jupyter=False)
"""Everything that is not a result goes to standard error, so that --json leaves one document on standard output."""


@contextmanager
def messages(*, shown: bool) -> Iterator[None]:
    """Show what commands say while the context lasts, or not."""
    before, console.quiet = console.quiet, not shown
    try:
        yield
    finally:
        console.quiet = before


def status(words: str) -> AbstractContextManager[Any]:
    """Show what is being done on one line, on a terminal, while the context lasts."""
    return nullcontext() if console.quiet else console.status(words)


def warn(words: str) -> None:
    """Say something that the user should know, and that stops nothing."""
    console.print(words, style="yellow", markup=False, soft_wrap=True)
