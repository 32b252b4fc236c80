"""What a script changes in its process, so that the process can run it again from the beginning as a fresh one would.

Modules of the script's own are imported again; those of libraries stay. What cannot be undone is refused: threads that
still run the script's code.
"""

import atexit
import contextlib
import gc
import importlib
import logging
import multiprocessing
import os
import random
import signal
import site
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from tutti.launch import launch_environment, process_tree

_PACKAGE = f"{Path(__file__).parent.parent}{os.sep}"

_KEPT_SIGNALS = (signal.SIGKILL, signal.SIGSTOP)

_THREADS_END_S = 0.5
"""Seconds that threads of the script have to end once nothing refers to what they work for."""


class ScriptProcess:
    """The state of this process before its script has run."""

    def __init__(self) -> None:
        self._modules = set(sys.modules)
        self._paths, self._folder, self._variables = [*sys.path], os.getcwd(), launch_environment.variables()
        self._streams = sys.stdout, sys.stderr, sys.stdin
        self._hooks = sys.excepthook, threading.excepthook, sys.displayhook
        self._warnings = [*warnings.filters]
        self._handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._loggers = {name: (logger.level, [*logger.handlers]) for name, logger in _loggers()}
        self._registered: list[Callable[..., Any]] = []
        self._generators = _generators()
        self._torch = _torch_settings()
        register = atexit.register

        def noting(function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Callable[..., Any]:
            self._registered.append(function)
            return register(function, *arguments, **options)

        atexit.register = noting

    def restore(self, error: BaseException) -> str:
        """Undo what the script has done.

        Args:
            error: what has ended it; its frames are cleared, so that what they refer to is freed.

        Returns:
            Why the script cannot be run again here, as a clause; empty if it can.
        """
        _clear_frames(error)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        own = {name: module for name, module in sys.modules.items() if name not in self._modules and _is_own(module)}
        files = {str(getattr(module, "__file__", None)) for module in own.values()} | {sys.argv[0]}
        self._end_functions(own)
        for name in own:
            del sys.modules[name]
        del own
        importlib.invalidate_caches()
        gc.collect()
        refusal = _running(files)
        _end_children()
        self._restore_settings()
        gc.collect()
        return refusal

    def _end_functions(self, own: dict[str, ModuleType]) -> None:
        """Call the exit functions of the script's own code; those of libraries stay for the end of the process."""
        registered, self._registered = self._registered, []
        for function in reversed(registered):
            owner = getattr(function, "__self__", None)
            module = getattr(function, "__module__", None) or type(owner).__module__
            if module == "__main__" or module in own:
                atexit.unregister(function)
                try:
                    function()
                except Exception:  # as at the end of a process
                    traceback.print_exc()

    def _restore_settings(self) -> None:
        sys.path[:] = self._paths
        with contextlib.suppress(OSError):
            os.chdir(self._folder)
        launch_environment.replace_variables(self._variables)
        sys.stdout, sys.stderr, sys.stdin = self._streams
        sys.excepthook, threading.excepthook, sys.displayhook = self._hooks
        warnings.filters[:] = self._warnings  # type: ignore[index]
        warnings._filters_mutated()  # type: ignore[attr-defined]
        for number, handler in self._handlers.items():
            if number not in _KEPT_SIGNALS and handler is not None and signal.getsignal(number) is not handler:
                with contextlib.suppress(OSError, ValueError):
                    signal.signal(number, handler)
        for name, logger in _loggers():
            level, handlers = self._loggers.get(name, (logging.NOTSET, []))
            logger.setLevel(level)
            logger.handlers[:] = handlers
        multiprocessing.set_start_method(None, force=True)
        _set_generators(self._generators)
        _set_torch(self._torch)


def _is_own(module: ModuleType) -> bool:
    """Whether a module is the script's own: no library's, and none of tutti's."""
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    if not isinstance(file, str):
        return False
    libraries = (sys.prefix, sys.base_prefix, *site.getsitepackages(), site.getusersitepackages())
    return not file.startswith((*libraries, _PACKAGE, "<")) and "-packages" not in file


def _loggers() -> Iterator[tuple[str, logging.Logger]]:
    yield "", logging.getLogger()
    for name, logger in logging.getLogger().manager.loggerDict.items():
        if isinstance(logger, logging.Logger):
            yield name, logger


def _clear_frames(error: BaseException) -> None:
    seen: set[int] = set()
    links: list[BaseException | None] = [error]
    while links:
        link = links.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        links += [link.__cause__, link.__context__]
        link.__traceback__ = link.__cause__ = link.__context__ = None
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        sys.__dict__.pop(name, None)


def _running(files: set[str]) -> str:
    """Say which thread still runs code of these files; empty if none does."""
    until = time.monotonic() + _THREADS_END_S
    while True:
        frames = sys._current_frames()
        names = [
            thread.name
            for thread in threading.enumerate()
            if thread is not threading.current_thread() and _is_in(frames.get(thread.ident or 0), files)
        ]
        if not names:
            return ""
        if time.monotonic() > until:
            return f"the script's thread {names[0]!r} still runs"
        time.sleep(0.01)


def _is_in(frame: FrameType | None, files: set[str]) -> bool:
    while frame is not None:
        if frame.f_code.co_filename in files:
            return True
        frame = frame.f_back
    return False


def _end_children() -> None:
    """End what the script has started, such as workers of data loaders."""
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    process_tree.kill_all(process_tree.descendants([os.getpid()]) - {tracker})
    for child in multiprocessing.active_children():
        child.join(1.0)


def _generators() -> tuple[Any, Any, Any]:
    import numpy as np
    import torch

    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_generators(states: tuple[Any, Any, Any]) -> None:
    import numpy as np
    import torch

    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def _torch_settings() -> dict[str, Any]:
    import torch

    return {
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "anomalies": torch.is_anomaly_enabled(),
        "grad": torch.is_grad_enabled(),
        "mkldnn": torch.backends.mkldnn.enabled,
    }


def _set_torch(settings: dict[str, Any]) -> None:
    import torch

    torch.set_default_dtype(settings["dtype"])
    torch.set_default_device(None)
    torch.set_num_threads(settings["threads"])
    torch.use_deterministic_algorithms(settings["deterministic"])
    torch.set_float32_matmul_precision(settings["precision"])
    torch.autograd.set_detect_anomaly(settings["anomalies"])
    torch.set_grad_enabled(settings["grad"])
    torch.backends.mkldnn.enabled = settings["mkldnn"]
