"""The interface of every compressor of flat gradients: values in, a message of exactly known size out."""

from abc import ABC, abstractmethod
from typing import Any, Self

import torch
from torch import Tensor

from tutti.compression.device import way
from tutti.compression.state import State

FLOATS = (torch.float32, torch.float64)


class Codec(ABC):
    """A method of writing a flat gradient as bytes. Codecs are plain settings; what changes is in the `State`.

    What is not finite in the values is not finite in what is decoded, so every rank sees it. Scales and values on the
    wire are float32, also of float64 gradients; error feedback keeps the rounding, too. Numba's kernels and torch give
    the same bits in float32 and float64, and Triton's read any message to the same bits (`gpu/` says where a scale may
    differ that they write); other dtypes are computed in float32. `device.way` says who computes on which device.
    """

    __slots__ = ()

    @property
    def keeps(self) -> tuple[str, ...]:
        """Names of the tensors of the gradient's size that its state has; all are summed over ranks by meaning."""
        return ()

    def now(self, count: int) -> Self:
        """This codec as it is after `count` steps that counted; most stay what they are."""
        return self

    @abstractmethod
    def nbytes(self, numel: int) -> int:
        """Bytes of the message of `numel` values: a multiple of 4 that never falls with `numel`."""

    @abstractmethod
    def encode_by_torch(self, values: Tensor, state: State, message: Tensor) -> None:
        """The plain reference of `encode`."""

    @abstractmethod
    def decode_add_by_torch(self, message: Tensor, into: Tensor) -> None:
        """The plain reference of `decode_add`."""

    def encode_by_numba(self, values: Tensor, state: State, message: Tensor) -> None:
        """`encode` in one pass; a method without a kernel takes the reference."""
        self.encode_by_torch(values, state, message)

    def decode_add_by_numba(self, message: Tensor, into: Tensor) -> None:
        """`decode_add` in one pass; a method without a kernel takes the reference."""
        self.decode_add_by_torch(message, into)

    @property
    def in_triton(self) -> bool:
        """Whether there are kernels for a GPU, with these settings; without them it takes the reference."""
        return False

    def encode_by_triton(self, values: Tensor, state: State, message: Tensor) -> None:
        """`encode` in one pass on a GPU."""
        self.encode_by_torch(values, state, message)

    def decode_add_by_triton(self, message: Tensor, into: Tensor) -> None:
        """`decode_add` in one pass on a GPU."""
        self.decode_add_by_torch(message, into)

    def state(self, numel: int, *, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> State:
        """The state before the first step."""
        return State.zeros(self.keeps, numel, dtype=dtype, device=device, seed=seed)

    def encode(self, values: Tensor, state: State, message: Tensor | None = None) -> Tensor:
        """The message of `values` (flat) and of what `state` kept back; writes what is kept back now into `state.new`.

        `message`: uint8, of `nbytes(numel)` or more, contiguous, on a boundary of 4 bytes; made where it is None.
        """
        with torch.no_grad():
            size = self.nbytes(values.numel())
            if message is None:
                message = torch.zeros(size, dtype=torch.uint8, device=values.device)
            values = values.detach().contiguous()
            if values.dtype not in FLOATS:
                values = values.float()
            if values.numel():
                step = way(
                    self,
                    values.device,
                    by_numba=self.encode_by_numba,
                    by_triton=self.encode_by_triton,
                    by_torch=self.encode_by_torch,
                )
                step(values, state, message[:size])
        return message

    def decode_add(self, message: Tensor, into: Tensor) -> None:
        """Add the values of a message to `into`: flat, contiguous, float32 or float64."""
        assert into.dtype in FLOATS
        assert into.is_contiguous()
        with torch.no_grad():
            if into.numel():
                step = way(
                    self,
                    into.device,
                    by_numba=self.decode_add_by_numba,
                    by_triton=self.decode_add_by_triton,
                    by_torch=self.decode_add_by_torch,
                )
                step(message[: self.nbytes(into.numel())], into)


def up_to_4(nbytes: int) -> int:
    """The next multiple of 4."""
    return -(-nbytes // 4) * 4


def parts(message: Tensor, *wanted: tuple[torch.dtype, int]) -> list[Tensor]:
    """Views of a message one after another: (dtype, count) each, the wide ones first."""
    views, offset = [], 0
    for dtype, count in wanted:
        nbytes = count * dtype.itemsize
        views.append(message[offset : offset + nbytes].view(dtype))
        offset += nbytes
    return views


def arrays(*tensors: Tensor) -> list[Any]:
    """The tensors' memory as numpy arrays."""
    return [tensor.detach().numpy() for tensor in tensors]


def residuals(state: State, values: Tensor) -> tuple[Tensor, Tensor]:
    """(old, new) error feedback; two empty tensors of the values' dtype where the method keeps none."""
    if "residual" in state.old:
        return state.old["residual"], state.new["residual"]
    return values[:0], values[:0]
