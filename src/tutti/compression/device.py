"""Who computes what is on a device: Numba on a CPU, Triton on a GPU where it has shown that it can, torch elsewhere."""

import warnings
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tutti.compression.codec import Codec

Step = TypeVar("Step")

_TRIED = 5000
"""Values of a trial: whole blocks of every codec's default, and a rest."""


def way(codec: "Codec", device: torch.device, *, by_numba: Step, by_triton: Step, by_torch: Step) -> Step:
    """Which of three ways writes or reads the codec's messages on `device`; the bytes mean the same whichever it is."""
    if device.type == "cpu":
        return by_numba
    if device.type == "cuda" and codec.in_triton and _shown(type(codec), device):
        return by_triton
    return by_torch


@cache
def _shown(kind: "type[Codec]", device: torch.device) -> bool:
    """Whether this kind's kernels compile and run on `device` and give the bits of their reference there, tried once
    in a process; where not, a warning says why. Triton needs a C compiler and a folder that it may write, for example.
    """
    if find_spec("triton") is None:
        return False
    try:
        found = _trial(kind(), device, "triton")
    except Exception as error:  # Triton's errors have no class in common; whatever it is, torch can do the work
        warnings.warn(
            f"Triton cannot compute {kind.__name__} on {device}, torch does it instead, in more passes over memory: "
            f"{type(error).__name__}: {error}",
            RuntimeWarning,
        )
        return False
    same = all(torch.equal(one, other) for one, other in zip(found, _trial(kind(), device, "torch"), strict=True))
    if not same:
        warnings.warn(
            f"Triton's {kind.__name__} on {device} is not what torch computes there; torch does it instead: report it",
            RuntimeWarning,
        )
    return same


def _trial(codec: "Codec", device: torch.device, way: Literal["triton", "torch"]) -> list[Tensor]:
    """(message, decoded, what is kept back) of whole numbers, whose sums are exact in any order."""
    numel = _TRIED
    counted = torch.arange(numel, device=device)
    state = codec.state(numel, dtype=torch.float32, device=device)
    for kept in state.old.values():
        kept.copy_(counted * 101 % 23 - 11)
    values = (counted * 7919 % 5003 - 2501).float()
    message = torch.zeros(codec.nbytes(numel), dtype=torch.uint8, device=device)
    into = (counted % 5).float()
    if way == "triton":
        codec.encode_by_triton(values, state, message)
        codec.decode_add_by_triton(message, into)
    else:
        codec.encode_by_torch(values, state, message)
        codec.decode_add_by_torch(message, into)
    return [message, into, *state.new.values()]
