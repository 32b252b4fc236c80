"""Optimizer scalars and dtypes as plain values, for checkpoints and for replicas that exchange their state."""

from typing import Any

import torch

from tutti.errors import CheckpointError


def pack_scalar(value: Any) -> Any:
    """A scalar of optimizer state as plain values; a tensor of one element becomes a number, dtype and shape."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return ["tensor", str(value.dtype).removeprefix("torch."), value.item(), list(value.shape)]
    return ["value", value.cpu() if isinstance(value, torch.Tensor) else value]


def unpack_scalar(packed: Any) -> Any:
    """The value that `pack_scalar` packed."""
    if packed[0] == "value":
        return packed[1]
    _, dtype, number, shape = packed
    return torch.full(shape, number, dtype=getattr(torch, dtype))


def parse_dtype(name: str) -> torch.dtype:
    """The dtype that `dtype_name` wrote. Raises CheckpointError for an unknown one."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{name!r} is no dtype of this torch ({torch.__version__}); use a newer one")
    return dtype
