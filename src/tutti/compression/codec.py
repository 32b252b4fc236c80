"""The interface of every codec: flat values in, a message of exactly known size out."""

import warnings
from abc import ABC, abstractmethod
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor

from tutti.compression.codec_state import CodecState

FLOATS = (torch.float32, torch.float64)


class Codec(ABC):
    """Encodes a flat gradient as bytes.

    A codec holds settings only; everything that changes between steps is in the `CodecState`. Values that are not
    finite decode to values that are not finite, so every rank sees them. Scales and values in a message are float32,
    also for float64 gradients; error feedback keeps the rounding error. Other dtypes than these two are computed in
    float32.

    Three implementations exist, and `implementation` chooses one for a device. Numba kernels and plain torch give the
    same bits. Triton kernels decode any message to the same bits; `gpu_kernels` says where a scale that they write may
    differ.
    """

    __slots__ = ()

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state's tensors, each of the gradient's size. The meaningful value is their sum over ranks."""
        return ()

    def at_step(self, count: int) -> Self:
        """Return this codec after `count` committed steps; most codecs do not change."""
        return self

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Return the size in bytes of a message of `numel` values.

        It is a multiple of 4, and never falls as `numel` grows.
        """

    @abstractmethod
    def encode_by_torch(self, values: Tensor, state: CodecState, message: Tensor) -> None:
        """Encode with plain torch, the reference of `encode`."""

    @abstractmethod
    def decode_add_by_torch(self, message: Tensor, into: Tensor) -> None:
        """Decode with plain torch, the reference of `decode_add`."""

    def encode_by_numba(self, values: Tensor, state: CodecState, message: Tensor) -> None:
        """Encode in one pass on a CPU; codecs without a kernel use the reference."""
        self.encode_by_torch(values, state, message)

    def decode_add_by_numba(self, message: Tensor, into: Tensor) -> None:
        """Decode in one pass on a CPU; codecs without a kernel use the reference."""
        self.decode_add_by_torch(message, into)

    @property
    def has_triton_kernels(self) -> bool:
        """Whether Triton kernels exist for these settings; otherwise a GPU uses the reference."""
        return False

    def encode_by_triton(self, values: Tensor, state: CodecState, message: Tensor) -> None:
        """Encode in one pass on a GPU."""
        self.encode_by_torch(values, state, message)

    def decode_add_by_triton(self, message: Tensor, into: Tensor) -> None:
        """Decode in one pass on a GPU."""
        self.decode_add_by_torch(message, into)

    def state(self, numel: int, *, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> CodecState:
        """Make the state before the first step.

        Args:
            numel: number of values in the flat gradient.
            dtype: dtype of the gradient.
            device: device of the gradient.
            seed: seed of this rank's random numbers.
        """
        return CodecState.zeros(self.state_names, numel, dtype=dtype, device=device, seed=seed)

    def encode(self, values: Tensor, state: CodecState, message: Tensor | None = None) -> Tensor:
        """Encode the flat `values` plus the residual in `state`; the new residual goes into `state.new`.

        Args:
            values: (numel,) gradient.
            state: the state of this codec for `numel` values.
            message: uint8, `nbytes(numel)` or more, contiguous, aligned to 4 bytes; None: a new tensor.

        Returns:
            The message.
        """
        with torch.no_grad():
            size = self.nbytes(values.numel())
            if message is None:
                message = torch.zeros(size, dtype=torch.uint8, device=values.device)
            values = values.detach().contiguous()
            if values.dtype not in FLOATS:
                values = values.float()
            if values.numel():
                step = implementation(
                    self,
                    values.device,
                    by_numba=self.encode_by_numba,
                    by_triton=self.encode_by_triton,
                    by_torch=self.encode_by_torch,
                )
                step(values, state, message[:size])
        return message

    def decode_add(self, message: Tensor, into: Tensor) -> None:
        """Add the values of a message to `into`.

        Args:
            message: uint8, `nbytes(numel)` or more.
            into: (numel,) contiguous float32 or float64.
        """
        assert into.dtype in FLOATS
        assert into.is_contiguous()
        with torch.no_grad():
            if into.numel():
                step = implementation(
                    self,
                    into.device,
                    by_numba=self.decode_add_by_numba,
                    by_triton=self.decode_add_by_triton,
                    by_torch=self.decode_add_by_torch,
                )
                step(message[: self.nbytes(into.numel())], into)


def parts(message: Tensor, *wanted: tuple[torch.dtype, int]) -> list[Tensor]:
    """Cut a message into consecutive views.

    Args:
        message: uint8.
        wanted: (dtype, count) of each view; the widest dtypes come first, so that all are aligned.
    """
    views, offset = [], 0
    for dtype, count in wanted:
        nbytes = count * dtype.itemsize
        views.append(message[offset : offset + nbytes].view(dtype))
        offset += nbytes
    return views


def arrays(*tensors: Tensor) -> list[Any]:
    """Return numpy arrays that share the tensors' memory."""
    return [tensor.detach().numpy() for tensor in tensors]


def residuals(state: CodecState, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return (old, new) residuals; two empty tensors of the values' dtype where the codec keeps none."""
    if "residual" in state.old:
        return state.old["residual"], state.new["residual"]
    return values[:0], values[:0]


Implementation = TypeVar("Implementation")

_TRIAL_NUMEL = 5000
"""Values of a trial: several whole blocks of every codec's default size, and a remainder."""


def implementation(
    codec: "Codec",
    device: torch.device,
    *,
    by_numba: Implementation,
    by_triton: Implementation,
    by_torch: Implementation,
) -> Implementation:
    """Return the implementation that encodes or decodes on `device`; messages mean the same with any of them."""
    if device.type == "cpu":
        return by_numba
    if device.type == "cuda" and codec.has_triton_kernels and _triton_verified(type(codec), device):
        return by_triton
    return by_torch


@cache
def _triton_verified(kind: "type[Codec]", device: torch.device) -> bool:
    """Return whether this codec's Triton kernels compile and run on `device` and reproduce the bits of their reference.

    Each process tries once. A warning gives the reason for a failure: for example, Triton needs a C compiler and a
    writable folder.
    """
    if find_spec("triton") is None:
        return False
    try:
        by_triton_kernels = _trial(kind(), device, "triton")
    except Exception as error:  # Triton's errors share no base class; after any of them, torch can do the work
        warnings.warn(
            f"Triton cannot compute {kind.__name__} on {device}, so torch does, in more passes over memory; repair "
            f"the Triton installation for full speed: {type(error).__name__}: {error}",
            RuntimeWarning,
        )
        return False
    same = all(
        torch.equal(actual, expected)
        for actual, expected in zip(by_triton_kernels, _trial(kind(), device, "torch"), strict=True)
    )
    if not same:
        warnings.warn(
            f"Triton's result for {kind.__name__} on {device} is not what torch computes there, so torch is used; "
            "please report this",
            RuntimeWarning,
        )
    return same


def _trial(codec: "Codec", device: torch.device, backend: Literal["triton", "torch"]) -> list[Tensor]:
    """Return (message, decoded values, new residuals) of whole numbers, whose sums are exact in any order."""
    numel = _TRIAL_NUMEL
    counted = torch.arange(numel, device=device)
    state = codec.state(numel, dtype=torch.float32, device=device)
    for residual in state.old.values():
        residual.copy_(counted * 101 % 23 - 11)
    values = (counted * 7919 % 5003 - 2501).float()
    message = torch.zeros(codec.nbytes(numel), dtype=torch.uint8, device=device)
    into = (counted % 5).float()
    if backend == "triton":
        codec.encode_by_triton(values, state, message)
        codec.decode_add_by_triton(message, into)
    else:
        codec.encode_by_torch(values, state, message)
        codec.decode_add_by_torch(message, into)
    return [message, into, *state.new.values()]
