"""Mixed precision: autocast, loss scaling for float16, and TF32."""

import warnings
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from tutti.config.vocabulary import Precision
from tutti.errors import PlanError
from tutti.float32_precision import allow_tf32, lowered

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which forward and loss run."""
    _keep_float32_precision(precision, device)
    if precision in _DTYPES:
        return torch.autocast(device.type, dtype=_DTYPES[precision])
    return nullcontext()


def loss_scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler:
    """Return dynamic loss scaling for float16; for other precisions it does nothing."""
    return torch.amp.GradScaler(device.type, enabled=precision == "float16", init_scale=2.0**12)


def set_float32_precision(precision: Precision, device: torch.device) -> str:
    """Allow TF32 where the plan asks for it, and nowhere else, whatever the script has set.

    Returns:
        What the user should know; empty if the script has not allowed TF32, or the plan does too.

    Raises:
        PlanError: the plan asks for TF32 and the device does not have it.
    """
    wanted = precision == "tf32"
    of_nvidia = device.type == "cuda" and torch.version.hip is None  # torch calls AMD's GPUs "cuda", too
    if wanted and (not of_nvidia or torch.cuda.get_device_capability(device) < (8, 0)):
        raise PlanError("precision = tf32 needs an NVIDIA GPU of compute capability 8.0 or more; use 'full'")
    said = "products" in lowered(device) and not wanted  # torch itself allows it for the others
    allow_tf32(wanted)
    return _OVERRIDDEN.format(precision=precision) if said else ""


_OVERRIDDEN = (
    "the script allows products of float32 in fewer bits (set_float32_matmul_precision, allow_tf32), but precision = "
    "{precision}, so they are computed exactly; Job(precision='tf32') allows TF32"
)


def _keep_float32_precision(precision: Precision, device: torch.device) -> None:
    """Set again what the plan says if the script has changed it since, and say so once."""
    if precision == "tf32" or not (operations := lowered(device)):
        return
    allow_tf32(False)
    if not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn(
            f"after Job.prepare, the script has allowed {' and '.join(operations)} of float32 in fewer bits, but "
            f"precision = {precision}, so they are computed exactly; Job(precision='tf32') allows TF32",
            stacklevel=3,
        )
