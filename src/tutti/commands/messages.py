"""What commands say while they work. A command line shows it on standard error; the functions show it only if asked."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO

from tutti.terminal import PlainConsole

console = PlainConsole(stderr=True, highlight=False, force_jupyter=False)
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


def short(path: Path) -> str:
    """Return the path relative to the current directory, if it is inside it."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


class GuardedStream:
    """A text stream to which writing never fails: once its reader is gone, what is written is dropped.

    So a terminal that was closed, or the `head` of a pipe that has seen enough, ends no training.

    Args:
        stream: where the text goes.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text, if somebody still reads it."""
        try:
            return self._stream.write(text)
        except (OSError, ValueError) as error:
            self._drop(error)
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Pass on what has been written."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._drop(error)

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        try:
            return self._stream.isatty()
        except (OSError, ValueError):
            return False

    def _drop(self, error: Exception) -> None:
        """Send what comes to nowhere, also what is still buffered, which the interpreter would write at its end."""
        if isinstance(error, OSError) and error.errno not in (None, errno.EPIPE, errno.EIO):
            raise error  # a full disk is no reader that has gone
        if isinstance(error, UnicodeError):
            raise error
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


@contextmanager
def guarded_streams() -> Iterator[None]:
    """Let standard output and error be guarded streams while the context lasts."""
    before = sys.stdout, sys.stderr
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, GuardedStream):
            setattr(sys, name, GuardedStream(stream))
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before
