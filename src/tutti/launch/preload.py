"""Modules that every rank needs. A fork server imports them once: importing this module loads them, but only there.

Garbage collection is paused during the imports: there is next to no garbage, and searching for it takes a quarter of
the time. Loaded objects are then frozen, so that a rank's collections do not copy pages that all ranks share.
"""

import atexit
import contextlib
import gc
import importlib
import os
import sys
from multiprocessing import forkserver

MODULES = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch._dynamo",  # otherwise the first optimizer step would load it, in every rank
    "numpy",
    "tutti.trainer.job",
    "tutti.launch.rank_main",
)


def load_modules() -> None:
    """Import what every rank needs, whatever its script does."""
    for name in MODULES:
        with contextlib.suppress(ImportError):  # a script that needs it will raise the error itself
            importlib.import_module(name)


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
    """End the server without unloading torch: it has nothing to save, and someone may wait for it to end."""
    if os.getpid() == server:  # ranks inherit this function
        os._exit(0)


if getattr(sys.modules["__main__"], "main", None) is forkserver.main:
    _load()
    atexit.register(_leave_at_once, os.getpid())
