"""Mixed precision: autocast, loss scaling for float16, and TF32."""

from contextlib import AbstractContextManager, nullcontext

import torch

from tutti.config.vocabulary import Precision
from tutti.errors import PlanError

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which forward and loss run."""
    if precision in _DTYPES:
        return torch.autocast(device.type, dtype=_DTYPES[precision])
    return nullcontext()


def loss_scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler:
    """Return dynamic loss scaling for float16; for other precisions it does nothing."""
    return torch.amp.GradScaler(device.type, enabled=precision == "float16", init_scale=2.0**12)


def set_matmul_precision(precision: Precision, device: torch.device) -> None:
    """Allow TF32 on CUDA devices where the plan asks for it, and nowhere else.

    By default torch allows it for convolutions: on an H100 their relative error is then 3e-4.

    Raises:
        PlanError: the plan asks for TF32 and the device does not have it.
    """
    wanted = precision == "tf32"
    if wanted and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0)):
        raise PlanError("precision = tf32 needs an NVIDIA GPU of compute capability 8.0 or more; use 'full'")
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = wanted
        torch.backends.cudnn.allow_tf32 = wanted
