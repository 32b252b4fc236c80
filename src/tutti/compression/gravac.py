"""Top-k whose density falls as long as enough of the gradient is sent (GraVAC: Tyagi, Swany 2023, arXiv 2305.12201).

The gain of a codec C is the fraction of the gradient's energy that it sends, |C(g + e)|^2 / |g + e|^2, over all ranks,
where e is the residual. The density is halved if half of it would still reach the wanted gain, and doubled if the
current one does not reach it.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tutti.compression.dense_reducers import AllGatherReducer
from tutti.compression.reducer import GradientReducer, Rounds, SharedSpan
from tutti.compression.sparse_reducer import SparseReducer
from tutti.compression.top_k import TopK
from tutti.config.codec_registry import GAIN_NBYTES
from tutti.config.compression import FIRST_DENSITY, Compression
from tutti.config.registry import load_factory


class GravacReducer(AllGatherReducer):
    """Sums a flat gradient by a top-k whose density lies between that of `codec` and a quarter.

    Training begins with a quarter. Every message begins with its rank's |g + e|^2, |C(g + e)|^2 and the latter at half
    the density. So all ranks decide from the same numbers without another collective. The paper compares the gains of a
    lowest and a higher compression, and sends everything if neither suffices. Here at most a quarter of the values is
    sent: with their positions, more would take more bytes than an exact reduction.

    Args:
        codec: top-k with the lowest density.
        shapes: shapes of the tensors in the flat gradient.
        gain: wanted gain, 0 to 1.
        window: number of steps whose sums of squares are judged together.
        group: process group, None for all ranks.
        dtype: dtype of the gradient.
        device: device of the gradient.
        seed: seed of the codec's random numbers.
    """

    def __init__(
        self,
        codec: TopK,
        shapes: Sequence[Sequence[int]],
        *,
        gain: float,
        window: int,
        group: Any = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        sizes = [torch.Size(shape).numel() for shape in shapes]
        super().__init__(codec, sum(sizes), group=group, dtype=dtype, device=device, seed=seed)
        self._sparsest, self.gain, self.window = codec, gain, window
        self._starts = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True) if size]
        first_density = max(FIRST_DENSITY, codec.density)
        self.shared = {
            "ladder": torch.tensor([first_density, 0, 0, 0, 0], dtype=torch.float64)
        }  # density, steps, the squares
        self._squares, self._pending_ladder = torch.zeros(3, dtype=torch.float64), self.shared["ladder"].clone()

    @property
    def density(self) -> float:
        return float(self.shared["ladder"][0])

    @property
    def shared_spans(self) -> dict[str, list[SharedSpan]]:
        """By shared tensor: every tensor of the gradient has the whole of it."""
        return {"ladder": [(start, 0, self.shared["ladder"].numel()) for start in self._starts]}

    @property
    def step_nbytes(self) -> int:
        return (self.collectives.size - 1) * (GAIN_NBYTES + self._at(self.density).nbytes(self.numel))

    def write(self, flat: Tensor) -> Tensor:
        codec, state = self._at(self.density), self.states["worker"]
        message = torch.zeros(GAIN_NBYTES + codec.nbytes(self.numel), dtype=torch.uint8, device=flat.device)
        codec.encode(flat, state, message[GAIN_NBYTES:])
        message_values = codec.pairs(message[GAIN_NBYTES:], self.numel)[1]
        fewer = message_values.abs().topk(self._at(self._halved(self.density)).count(self.numel)).values
        sent = _square(message_values)
        squares = torch.stack([_square(state.new["residual"]) + sent, sent, _square(fewer)])
        message[:GAIN_NBYTES].view(torch.float64).copy_(squares)
        return message

    def read(self, message: Tensor, total: Tensor) -> None:
        self._squares += message[:GAIN_NBYTES].view(torch.float64).cpu()
        self._at(self.density).decode_add(message[GAIN_NBYTES:], total)

    def rounds(self, flat: Tensor) -> Rounds:
        self._squares.zero_()
        yield from super().rounds(flat)
        self._pending_ladder = self._next_ladder()

    def finish_step(self, finite: bool) -> None:
        if finite:
            self.shared["ladder"].copy_(self._pending_ladder)
        super().finish_step(finite)

    def rescale(self, factor: float) -> None:
        super().rescale(factor)
        for ladder in (self.shared["ladder"], self._pending_ladder):
            ladder[2:] *= factor**2

    def _next_ladder(self) -> Tensor:
        """Return the density, the number of steps and the sums of squares after this step."""
        ladder = self.shared["ladder"].clone()
        ladder[1] += 1
        ladder[2:] += self._squares
        density, steps, whole, sent, fewer = ladder.tolist()
        if steps < self.window:
            return ladder
        if fewer >= self.gain * whole > 0:
            density = self._halved(density)
        elif sent < self.gain * whole:
            density = min(max(FIRST_DENSITY, self._sparsest.density), 2 * density)
        return torch.tensor([density, 0, 0, 0, 0], dtype=torch.float64)

    def _halved(self, density: float) -> float:
        return max(self._sparsest.density, density / 2)

    def _at(self, density: float) -> TopK:
        return replace(self._sparsest, density=density)


def _square(values: Tensor) -> Tensor:
    return torch.dot(values, values).double()


def make_top_k_reducer(
    compression: Compression, shapes: Sequence[Sequence[int]], **options: Any
) -> GradientReducer | None:
    """Make the reducer of top-k or dgc with the setting `sparse` or `gain`.

    Args:
        compression: the plan's compression.
        shapes: shapes of the tensors, in the order in which they lie in the flat gradient.
        **options: group, dtype, device and seed.

    Returns:
        The reducer; None where the usual reducers serve.
    """
    assert compression.entry.make_codec is not None
    codec, settings = load_factory(compression.entry.make_codec)(compression), compression.settings
    if settings["sparse"]:
        return SparseReducer(codec, sum(torch.Size(shape).numel() for shape in shapes), **options)
    if settings.get("gain"):
        return GravacReducer(codec, shapes, gain=settings["gain"], window=int(settings["window"]), **options)
    return None
