"""Optimizer scalars and dtypes as plain values, for checkpoints and for replicas that exchange their state."""

from typing import Any

import torch

from tutti.errors import CheckpointError


def pack_scalar(value: Any) -> Any:
    """Convert a value of optimizer state to a list for checkpoints.

    A real one-element tensor becomes ["tensor", dtype, number, shape]. Any other value becomes ["value", value]; a
    tensor in it is moved to the CPU.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return ["tensor", str(value.dtype).removeprefix("torch."), value.item(), list(value.shape)]
    return ["value", value.cpu() if isinstance(value, torch.Tensor) else value]


def unpack_scalar(packed: Any) -> Any:
    """Return the value that `pack_scalar` packed.

    Raises:
        CheckpointError: it packed nothing like this.
    """
    match packed:
        case ["value", value]:
            return value
        case ["tensor", str(dtype), bool() | int() | float() as number, [*shape]] if all(size == 1 for size in shape):
            try:
                return torch.full(shape, number, dtype=parse_dtype(dtype))
            except (RuntimeError, OverflowError):
                pass
    raise CheckpointError("a value of the optimizer's state is not as it was saved; name another checkpoint")


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name such as "float32".

    Raises:
        CheckpointError: this torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{name!r} is not a dtype of this torch ({torch.__version__}); use a newer torch")
    return dtype
