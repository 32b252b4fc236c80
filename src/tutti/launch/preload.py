"""What the fork server imports, once for all ranks: loading this module loads it. For that process alone.

Collection of garbage is paused meanwhile (there is next to none, and looking for it takes a quarter of the time), and
what was loaded is then set apart from it, so that a rank's collections do not copy pages that all ranks share.
"""

import contextlib
import gc
import importlib

MODULES = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch._dynamo",  # or the first optimizer step would load it, in every rank
    "numpy",
    "tutti.runtime.job",
    "tutti.launch.rank_main",
)


def _load() -> None:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for name in MODULES:
            with contextlib.suppress(ImportError):  # the script itself will say, if it needs it
                importlib.import_module(name)
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


_load()
