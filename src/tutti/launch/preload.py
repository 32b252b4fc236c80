"""What every rank needs. A fork server imports it once for all: loading this module loads it, there only.

Collection of garbage is paused meanwhile (there is next to none, and looking for it takes a quarter of the time), and
what was loaded is then set apart from it, so that a rank's collections do not copy pages that all ranks share.
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
    "torch._dynamo",  # or the first optimizer step would load it, in every rank
    "numpy",
    "tutti.trainer.job",
    "tutti.launch.rank_main",
)


def load_modules() -> None:
    """Load what every rank needs, whatever its script."""
    for name in MODULES:
        with contextlib.suppress(ImportError):  # the script itself will say, if it needs it
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
    """End the server without taking torch apart: it has nothing to save, and someone may wait for its end."""
    if os.getpid() == server:  # ranks inherit this function
        os._exit(0)


if getattr(sys.modules["__main__"], "main", None) is forkserver.main:
    _load()
    atexit.register(_leave_at_once, os.getpid())
