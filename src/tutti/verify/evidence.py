"""Evidence: what the rules of diagnosis look at, and how it is read from two recordings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tutti.verify.compare import Found, Sides
from tutti.verify.measure import rms
from tutti.verify.recording import LossRecord, PartRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a rule sees. `sides`: the step of the difference, None before the first step. `later`: the first differences
    of later steps. `world_size`: ranks compared with one device; `repeated`: both sides are one device.
    """

    found: Found
    sides: Sides | None
    world_size: int
    later: tuple[Found, ...] = ()
    repeated: bool = False

    @property
    def stage(self) -> str:
        return self.found.first.stage

    @property
    def where(self) -> str:
        """The module in words."""
        return f"module {self.found.first.module!r}" if self.found.first.module else "the script"

    @property
    def parts(self) -> Iterator[PartRecord]:
        """All microbatches of the step, of all ranks and of one device."""
        if self.sides is not None:
            for step in (self.sides.one, *self.sides.ranks):
                yield from step.parts


def plain_losses(case: Case) -> list[tuple[float, list[float]]]:
    """(one device's loss, counting ranks' losses) of every microbatch of every recorded step that is a plain mean."""
    if case.sides is None:
        return []
    found = []
    heads = case.sides.heads
    for step, parts in enumerate(case.sides.head.losses):
        for index, (_, one) in enumerate(parts):
            others = [
                head.losses[step][index] for head in heads if step < len(head.losses) and index < len(head.losses[step])
            ]
            real = [loss for part, loss in others if part.count]
            if _is_mean(one) and all(_is_mean(loss) for loss in real):
                found.append((one.total, [loss.total for loss in real if loss]))  # type: ignore[union-attr]
    return found


def _is_mean(loss: LossRecord | None) -> bool:
    return loss is not None and loss.count is None


def moments_agree(case: Case) -> bool:
    """Whether the mean or the mean square over a rank's rows is the same on all ranks, though rows differ."""
    pairs = case.found.alignment or []
    tensors = [pair.got.double() for pair in pairs if pair.got.dim() and pair.got.numel() > pair.got.shape[-1]]
    if len(tensors) < len(pairs) or any(tensor.isnan().any() for tensor in tensors):
        return False
    scale = rms(tensors)
    for channel in (1, -1, None):
        for power in (1, 2):
            moments = [_moment(tensor, channel, power) for tensor in tensors]
            if all(_near(moments[0], other, scale**power) for other in moments[1:]) and len(moments) > 1:
                return True
    return False


def _moment(tensor: torch.Tensor, channel: int | None, power: int) -> torch.Tensor:
    """Mean of a power over all dims but the channel's."""
    if channel is None or tensor.dim() < 2:
        return (tensor**power).mean()
    kept = channel % tensor.dim()
    return (tensor**power).mean([dim for dim in range(tensor.dim()) if dim != kept])


def _near(one: torch.Tensor, other: torch.Tensor, scale: float) -> bool:
    return one.shape == other.shape and float((one - other).abs().max()) <= 1e-3 * scale


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors agree but for rounding."""
    return one.shape == other.shape and torch.allclose(one.double(), other.double(), rtol=1e-6, atol=1e-12)


def padded_less(sides: Sides) -> tuple[int, ...]:
    """Ranks whose batch has a tensor with fewer entries a sample than one device's."""
    found = []
    for rank, step in enumerate(sides.ranks):
        for name, expected in sides.one.inputs.items():
            mine = step.inputs.get(name)
            if mine is not None and mine.dim() == expected.dim() and mine.shape[1:] != expected.shape[1:]:
                found.append(rank)
                break
    return tuple(found)


def words(ranks: Sequence[int]) -> str:
    """Ranks in words."""
    if not ranks:
        return "the ranks"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
