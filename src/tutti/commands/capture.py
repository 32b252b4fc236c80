"""Run a user's script up to its `Job.prepare`, in this process, to see what it would train."""

import ast
import io
import os
import random
import runpy
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from tutti.commands.messages import console
from tutti.errors import ScriptError, TrainingError, TuttiError

if TYPE_CHECKING:
    from tutti.trainer.capture import CapturedScript

SCRIPT_TIMEOUT_S = 600.0
"""Seconds that a script has to reach `Job.prepare`, where nobody states a time limit."""

_LIBRARIES = (sys.prefix, str(Path(__file__).parent.parent))


class _OutOfTime(BaseException):
    """Raised in a script that takes too long. No `except Exception` of the script may stop it."""


def capture_script(
    script: Path, arguments: tuple[str, ...], *, timeout_s: float = SCRIPT_TIMEOUT_S
) -> "CapturedScript":
    """Run a script up to `Job.prepare` and return what it was given; the model's parameters stay on the meta device.

    What the script prints goes to standard error, or nowhere if messages are not shown. A script with
    `forward_backward` in its text runs through its first step, which shows its losses but computes nothing.

    Args:
        script: the script's path.
        arguments: the script's own arguments.
        timeout_s: seconds that the script has.

    Raises:
        ScriptError: the script fails or ends without calling prepare.
        TrainingError: the script takes longer than `timeout_s`.
    """
    from tutti.launch.preload import load_modules
    from tutti.launch.rank_main import user_traceback
    from tutti.launch.script_path import check_script
    from tutti.profile.meta_device import parameters_on_meta
    from tutti.profile.step_trace import first_line
    from tutti.trainer.capture import capturing

    check_script(script)
    load_modules()
    hidden = io.StringIO()
    with capturing(follow=_computes_losses(script)) as capture:
        try:
            with _time_limit(script, timeout_s), _as_main(script, arguments), _output(hidden), parameters_on_meta():
                runpy.run_path(str(script), run_name="__main__")
        except _OutOfTime as error:
            raise TrainingError(str(error)) from None
        except SystemExit as error:
            if error.code not in (0, None) and capture.captured is None:
                words = hidden.getvalue().strip().rpartition("\n")[2]
                reason = f" ({words})" if words else "; run it with python to see why"
                raise ScriptError(f"{script} ended with exit code {error.code} before job.prepare{reason}") from None
        except Exception as error:  # a followed script may fail where it needs values
            if capture.captured is None and isinstance(error, TuttiError):
                raise
            if capture.captured is None:
                words = user_traceback(error).rstrip()
                raise ScriptError(f"{script} failed before its Job was prepared:\n{words}") from None
            capture.captured = replace(capture.captured, failed=first_line(error))
    if capture.captured is not None:
        return capture.captured
    raise ScriptError(
        f"{script} ended without calling job.prepare; make a tutti.Job and pass model, optimizer, data and loss to its "
        "prepare (docs/tutorial.md shows the three lines)"
    )


def _computes_losses(script: Path) -> bool:
    """Return whether the script's text calls `forward_backward`."""
    try:
        tree = ast.parse(script.read_bytes())
    except (SyntaxError, ValueError):  # running it says what is wrong
        return False
    return any(isinstance(node, ast.Attribute) and node.attr == "forward_backward" for node in ast.walk(tree))


@contextmanager
def _as_main(script: Path, arguments: tuple[str, ...]) -> Iterator[None]:
    """Set sys.argv and sys.path as `python script arguments` has them, while the context lasts."""
    argv, path = sys.argv, sys.path[:]
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


@contextmanager
def _output(hidden: io.StringIO) -> Iterator[None]:
    """Send what the script prints to standard error; `hidden` receives it if messages are not shown."""
    with ExitStack() as stack:
        if console.quiet:
            stack.enter_context(redirect_stderr(hidden))
        stack.enter_context(redirect_stdout(sys.stderr))
        yield


@contextmanager
def _time_limit(script: Path, timeout_s: float) -> Iterator[None]:
    """Raise _OutOfTime in the script after `timeout_s` seconds. Only a process' main thread can be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_alarm(signum: int, frame: FrameType | None) -> None:
        raise _OutOfTime(
            f"{script} did not get as far as job.prepare within {timeout_s:g} s{_place(script, frame)}; correct what "
            "it waits for, or raise --timeout"
        )

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _place(script: Path, frame: FrameType | None) -> str:
    """Return where in its own files a script is, as ", but was in train.py, line 3"."""
    folder = str(script.resolve().parent)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_file() and str(path.resolve()).startswith(folder + os.sep):
            return f", but was in {path.name}, line {frame.f_lineno}"
        frame = frame.f_back
    return ""


@contextmanager
def process_restored(script: Path | None) -> Iterator[None]:
    """Undo what a script that runs in this process changes in it: random numbers, torch's defaults, modules, folder."""
    modules, folder = set(sys.modules), Path.cwd()
    numbers, torch_state = random.getstate(), _torch_state()
    try:
        yield
    finally:
        random.setstate(numbers)
        _restore_torch(torch_state)
        os.chdir(folder)
        beside = f"{script.resolve().parent}{os.sep}" if script is not None else ""
        for name in set(sys.modules) - modules if beside else ():
            path = getattr(sys.modules[name], "__file__", None) or ""
            if path.startswith(beside) and not path.startswith(_LIBRARIES):
                del sys.modules[name]  # another script may have a module of that name beside it


def _torch_state() -> "tuple[object, ...] | None":
    if "torch" not in sys.modules:
        return None
    import numpy as np
    import torch

    device = torch.get_default_device()
    return torch.get_rng_state(), np.random.get_state(), torch.get_default_dtype(), device, torch.is_grad_enabled()


def _restore_torch(state: "tuple[object, ...] | None") -> None:
    if "torch" not in sys.modules:
        return
    import numpy as np
    import torch

    dtype, device, grad = (torch.float32, torch.device("cpu"), True) if state is None else state[2:]
    if state is not None:
        torch.set_rng_state(state[0])  # type: ignore[arg-type]
        np.random.set_state(state[1])  # type: ignore[arg-type]
    torch.set_default_dtype(dtype)  # type: ignore[arg-type]
    torch.set_grad_enabled(grad)  # type: ignore[arg-type]
    if torch.get_default_device() != device:
        torch.set_default_device(device)  # type: ignore[arg-type]
