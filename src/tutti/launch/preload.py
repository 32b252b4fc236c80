"""Modules that every rank needs. A fork server imports them once: importing this module loads them, but only there.

Garbage collection is paused during the imports: there is next to no garbage, and searching for it takes a quarter of
the time. Loaded objects are then frozen, so that a rank's collections do not copy pages that all ranks share.
"""

import atexit
import contextlib
import gc
import importlib
import os
import signal
import sys
import warnings
from multiprocessing import forkserver

from tutti.launch import process_tree

MODULES = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch._dynamo",  # otherwise the first optimizer step would load it, in every rank
    "numpy",
    "numpy.ma",  # numpy.unique loads it, and looking at the data calls that
    "tutti.trainer.job",
    "tutti.launch.rank_main",
)


def load_modules() -> None:
    """Import what every rank needs, whatever its script does."""
    for name in MODULES:
        with contextlib.suppress(ImportError):  # a script that needs it will raise the error itself
            importlib.import_module(name)
    with contextlib.suppress(ImportError):
        _prepare_specifications()


def _prepare_specifications() -> None:
    """Build the validators of what every rank reads or writes: once here instead of in each rank."""
    from tutti.config import serialization
    from tutti.config.plan import Plan
    from tutti.config.run_folder import Recipe, RunHeader

    serialization.build_validators(Plan, RunHeader, Recipe)


def _load() -> None:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        load_modules()
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


def _leave_at_once(server: int) -> None:
    """End the server with everything below it, without unloading torch: someone may wait for it to end.

    It ends once nobody can start ranks any more, also because the launcher was killed. Ranks then cannot end themselves
    if they are stopped.
    """
    if os.getpid() == server:  # ranks inherit this function
        process_tree.kill_all(process_tree.descendants([server]))
        os._exit(0)


def _outlive_signals(server: int) -> None:
    """Leave some signals to the launcher: a closed terminal or a scheduler sends them to all processes at once.

    The server would end, and all ranks with it, before they have saved a checkpoint. Ranks handle them as before.
    """
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}

    def restore() -> None:
        if os.getppid() == server:
            for number, handler in before.items():
                signal.signal(number, handler)

    os.register_at_fork(after_in_child=restore)


if getattr(sys.modules["__main__"], "main", None) is forkserver.main:
    _outlive_signals(os.getpid())
    process_tree.adopt_orphans()
    warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")  # those adopted
    _load()
    atexit.register(_leave_at_once, os.getpid())
