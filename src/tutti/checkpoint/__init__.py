"""Checkpoints: everything a run resumes from, under any plan and number of ranks; written whole or not at all."""

from tutti.checkpoint.index import latest_checkpoint
from tutti.checkpoint.last import end_saving
from tutti.checkpoint.load import load_checkpoint
from tutti.checkpoint.plain import load_weights, to_safetensors, to_state_dict
from tutti.checkpoint.save import finish_saving, save_checkpoint, save_when_due

__all__ = [
    "end_saving",
    "finish_saving",
    "latest_checkpoint",
    "load_checkpoint",
    "load_weights",
    "save_checkpoint",
    "save_when_due",
    "to_safetensors",
    "to_state_dict",
]
