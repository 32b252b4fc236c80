"""Checkpoints: everything a run resumes from, under any plan and number of ranks, written completely or not at all."""

from typing import TYPE_CHECKING, Any

from tutti.checkpoint.index import latest_checkpoint
from tutti.checkpoint.load import load_checkpoint, load_newest, load_weights
from tutti.checkpoint.plain_state import to_safetensors, to_state_dict
from tutti.checkpoint.save import CheckpointWriter
from tutti.checkpoint.training_state import Progress, TrainingState

if TYPE_CHECKING:
    from tutti.checkpoint.dcp import export_dcp, import_dcp

__all__ = [
    "CheckpointWriter",
    "Progress",
    "TrainingState",
    "export_dcp",
    "import_dcp",
    "latest_checkpoint",
    "load_checkpoint",
    "load_newest",
    "load_weights",
    "to_safetensors",
    "to_state_dict",
]


def __getattr__(name: str) -> Any:
    if name in ("export_dcp", "import_dcp"):
        from tutti.checkpoint import dcp  # torch.distributed.checkpoint takes 0.2 s to import

        return getattr(dcp, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
