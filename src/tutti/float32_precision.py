"""How torch computes with float32: exactly, or with fewer bits (TF32 on GPUs, bfloat16 or TF32 on CPUs that have it).

torch has two sets of switches for this. Of the newer ones, an operation without a setting of its own has that of its
back end, or the general one. The older ones (`allow_tf32`, `set_float32_matmul_precision`) raise an error when they are
read while the newer ones say something else. So both are set here, and nothing else in this package sets either.

By default torch computes convolutions and recurrent layers in TF32. On an H100 the relative error of a convolution is
then 3e-4.
"""

from collections.abc import Mapping
from typing import Any

import torch

_BACKENDS: Any = torch.backends
_CPU_SWITCHES: Mapping[str, Any] = {
    "products": _BACKENDS.mkldnn.matmul,
    "convolutions": _BACKENDS.mkldnn.conv,
    "recurrent layers": _BACKENDS.mkldnn.rnn,
}
_CUDNN_SWITCHES: Mapping[str, Any] = {
    "convolutions": _BACKENDS.cudnn.conv,
    "recurrent layers": _BACKENDS.cudnn.rnn,
}
_CPU_OPERATIONS = {"products": "matmul", "convolutions": "conv", "recurrent layers": "rnn"}
_precision_of: Any = torch._C._get_fp32_precision_getter
_LOWER = ("tf32", "bf16")


def allow_tf32(allowed: bool) -> None:
    """Compute float32 products, convolutions and recurrent layers in TF32 on GPUs, or exactly on all devices."""
    cuda, cudnn = _BACKENDS.cuda, _BACKENDS.cudnn
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    cuda.matmul.allow_tf32 = allowed
    cudnn.allow_tf32 = allowed
    precision = "tf32" if allowed else "ieee"
    for switch in (cuda.matmul, *_CUDNN_SWITCHES.values()):
        switch.fp32_precision = precision
    for name, switch in _CPU_SWITCHES.items():
        if name != "products" or not allowed:  # products on CPUs follow set_float32_matmul_precision
            switch.fp32_precision = "ieee"


def lowered(device: torch.device) -> list[str]:
    """Return what torch would compute with fewer bits than float32 has on `device`, for messages."""
    if device.type == "cpu":  # in every microbatch; the switches' own attributes take ten times as long
        return [name for name, operation in _CPU_OPERATIONS.items() if _precision_of("mkldnn", operation) in _LOWER]
    products = ["products"] if _BACKENDS.cuda.matmul.fp32_precision in _LOWER else []
    if not _BACKENDS.cudnn.enabled:
        return products
    return products + [name for name, switch in _CUDNN_SWITCHES.items() if switch.fp32_precision in _LOWER]
