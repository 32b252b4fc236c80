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
    """A method of writing a flat gradient as bytes.

    A codec holds settings only; what changes between steps is in the `CodecState`. Values that are not finite decode to
    values that are not finite, so every rank sees them. Scales and values in a message are float32, also for float64
    gradients; error feedback keeps the rounding. Numba kernels and torch give the same bits in float32 and float64.
    Triton kernels decode any message to the same bits; `gpu_kernels` says where a scale that they write may differ.
    Other dtypes are computed in float32. `implementation` says which of the three computes on a device.
    """

    __slots__ = ()

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state's tensors of the gradient's size. Each is, by meaning, summed over ranks."""
        return ()

    def at_step(self, count: int) -> Self:
        """This codec after `count` steps that counted; most codecs do not change."""
        return self

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Bytes of a message of `numel` values: a multiple of 4 that never falls with `numel`."""

    @abstractmethod
    def encode_by_torch(self, values: Tensor, state: CodecState, message: Tensor) -> None:
        """The plain reference of `encode`."""

    @abstractmethod
    def decode_add_by_torch(self, message: Tensor, into: Tensor) -> None:
        """The plain reference of `decode_add`."""

    def encode_by_numba(self, values: Tensor, state: CodecState, message: Tensor) -> None:
        """`encode` in one pass; codecs without a kernel use the reference."""
        self.encode_by_torch(values, state, message)

    def decode_add_by_numba(self, message: Tensor, into: Tensor) -> None:
        """`decode_add` in one pass; codecs without a kernel use the reference."""
        self.decode_add_by_torch(message, into)

    @property
    def has_triton_kernels(self) -> bool:
        """Whether Triton kernels exist for these settings; otherwise a GPU uses the reference."""
        return False

    def encode_by_triton(self, values: Tensor, state: CodecState, message: Tensor) -> None:
        """`encode` in one pass on a GPU."""
        self.encode_by_torch(values, state, message)

    def decode_add_by_triton(self, message: Tensor, into: Tensor) -> None:
        """`decode_add` in one pass on a GPU."""
        self.decode_add_by_torch(message, into)

    def state(self, numel: int, *, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> CodecState:
        """The state before the first step."""
        return CodecState.zeros(self.state_names, numel, dtype=dtype, device=device, seed=seed)

    def encode(self, values: Tensor, state: CodecState, message: Tensor | None = None) -> Tensor:
        """The message of the flat `values` and of the residual in `state`; the new residual goes into `state.new`.

        Args:
            values: (numel,) gradient.
            state: of this codec and size.
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
        """Add the values of a message to `into`, which is flat, contiguous, and float32 or float64."""
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
    """Consecutive views of a message, (dtype, count) each; the widest dtypes come first."""
    views, offset = [], 0
    for dtype, count in wanted:
        nbytes = count * dtype.itemsize
        views.append(message[offset : offset + nbytes].view(dtype))
        offset += nbytes
    return views


def arrays(*tensors: Tensor) -> list[Any]:
    """The tensors' memory as numpy arrays."""
    return [tensor.detach().numpy() for tensor in tensors]


def residuals(state: CodecState, values: Tensor) -> tuple[Tensor, Tensor]:
    """(old, new) residuals; two empty tensors of the values' dtype where the codec keeps none."""
    if "residual" in state.old:
        return state.old["residual"], state.new["residual"]
    return values[:0], values[:0]


Implementation = TypeVar("Implementation")

_TRIED = 5000
"""Values of a trial: whole blocks of every codec's default, and a rest."""


def implementation(
    codec: "Codec",
    device: torch.device,
    *,
    by_numba: Implementation,
    by_triton: Implementation,
    by_torch: Implementation,
) -> Implementation:
    """The implementation that encodes or decodes on `device`; messages mean the same with any of them."""
    if device.type == "cpu":
        return by_numba
    if device.type == "cuda" and codec.has_triton_kernels and _triton_verified(type(codec), device):
        return by_triton
    return by_torch


@cache
def _triton_verified(kind: "type[Codec]", device: torch.device) -> bool:
    """Whether Triton kernels of this codec compile and run on `device` and give the bits of their reference.

    Tried once in a process. A warning gives the reason for a failure: Triton needs a C compiler and a writable folder,
    for example.
    """
    if find_spec("triton") is None:
        return False
    try:
        by_triton_kernels = _trial(kind(), device, "triton")
    except Exception as error:  # Triton's errors have no class in common; whatever it is, torch can do the work
        warnings.warn(
            f"Triton cannot compute {kind.__name__} on {device}, torch does it instead, in more passes over memory: "
            f"{type(error).__name__}: {error}",
            RuntimeWarning,
        )
        return False
    same = all(
        torch.equal(actual, expected)
        for actual, expected in zip(by_triton_kernels, _trial(kind(), device, "torch"), strict=True)
    )
    if not same:
        warnings.warn(
            f"Triton's {kind.__name__} on {device} is not what torch computes there; torch does it instead: report it",
            RuntimeWarning,
        )
    return same


def _trial(codec: "Codec", device: torch.device, backend: Literal["triton", "torch"]) -> list[Tensor]:
    """(message, decoded, new residuals) of whole numbers, whose sums are exact in any order."""
    numel = _TRIED
    counted = torch.arange(numel, device=device)
    state = codec.state(numel, dtype=torch.float32, device=device)
    for kept in state.old.values():
        kept.copy_(counted * 101 % 23 - 11)
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
