"""What tutti must do with any input: a clear error or a correct result, within bounds of time and memory."""

import io
import json
import logging
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from tutti.cli.main import main
from tutti.errors import TuttiError

MOST_CPU_S = 30.0
"""Processor time of one input, which does not depend on what else the machine does."""
MOST_MEMORY_NBYTES = 3 * 2**30
MOST_LETTERS = 700


class BrokenLaw(AssertionError):
    """What an input made tutti do that no input may."""


class _OutOfTime(BaseException):
    """Raised in a command that computes for too long. No `except Exception` stops it."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


@contextmanager
def _bounded() -> Iterator[None]:
    """Bound the processor time and the memory of what runs."""

    def out_of_time(_signal: int, _frame: FrameType | None) -> None:
        raise _OutOfTime

    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGVTALRM, out_of_time)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MOST_MEMORY_NBYTES, hard))
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, before)


def command(*words: str) -> Said:
    """Run `tutti WORDS` in this process.

    Raises:
        BrokenLaw: it ends with a traceback, computes without end, or asks for memory without bound.
    """
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    code: Any = 0
    sys.argv = ["tutti", *words]
    try:
        with redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings(), _bounded():
            warnings.simplefilter("ignore")
            main()
    except SystemExit as ended:
        code = ended.code
    except _OutOfTime:
        raise BrokenLaw(f"it computes for more than {MOST_CPU_S:.0f} s") from None
    except Exception as error:
        raise BrokenLaw(f"it ends with a traceback: {type(error).__name__}: {str(error)[:300]}") from error
    finally:
        sys.argv = before
    said = Said(int(code or 0), out.getvalue(), err.getvalue())
    _check(said, as_json="--json" in words)
    return said


def call(function: Callable[[], Any]) -> None:
    """Call a function that may refuse its input.

    Raises:
        BrokenLaw: it raises anything but a TuttiError in one sentence.
    """
    try:
        with _bounded(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            function()
    except TuttiError as error:
        _check_sentence(str(error))
    except _OutOfTime:
        raise BrokenLaw(f"it computes for more than {MOST_CPU_S:.0f} s") from None
    except Exception as error:
        raise BrokenLaw(f"it raises {type(error).__name__}: {str(error)[:300]}") from error


def _check(said: Said, *, as_json: bool) -> None:
    if said.code not in (0, 1, 2):
        raise BrokenLaw(f"the exit code is {said.code}")
    if "Traceback" in said.err or "Traceback" in said.out:
        raise BrokenLaw(f"it prints a traceback: {said.err[-600:]}")
    for text in (said.out, said.err):
        if "\x1b" in text or "\0" in text:
            at = max(text.find("\x1b"), text.find("\0"))
            raise BrokenLaw(f"it prints control characters: {text[max(0, at - 200) : at + 40]!r}")
    if said.code == 2 and "Usage:" not in said.err:
        _check_sentence(said.err)
    if as_json and said.code == 0:
        _check_json(said.out)


def _check_sentence(text: str) -> None:
    if not text.strip():
        raise BrokenLaw("it refuses without a word")
    longest = max(text.split("\n"), key=len)
    if len(longest) > MOST_LETTERS:
        raise BrokenLaw(f"it refuses with {len(longest):,} letters: {longest[:400]!r}")


def _check_json(text: str) -> None:
    def refuse(name: str) -> None:
        raise BrokenLaw(f"--json prints {name}")

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError as error:
        raise BrokenLaw(f"--json prints no JSON document ({error}): {text[:200]!r}") from None


logging.getLogger("hypothesis").setLevel(logging.ERROR)
