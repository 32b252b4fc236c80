"""Mixed precision: autocast, loss scaling for float16, and TF32."""

from contextlib import AbstractContextManager, nullcontext

import torch

from tutti.config.vocabulary import Precision
from tutti.errors import PlanError

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The context in which forward and loss run."""
    if precision in _DTYPES:
        return torch.autocast(device.type, dtype=_DTYPES[precision])
    return nullcontext()


def loss_scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler:
    """Dynamic loss scaling for float16; does nothing for the other precisions."""
    return torch.amp.GradScaler(device.type, enabled=precision == "float16", init_scale=2.0**12)


def set_matmul_precision(precision: Precision, device: torch.device) -> None:
    """Allow TF32 where the plan asks for it. Raises PlanError on a device that has none."""
    if precision == "tf32":
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
            raise PlanError("precision = tf32 needs an NVIDIA GPU of compute capability 8.0 or more; use 'full'")
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
