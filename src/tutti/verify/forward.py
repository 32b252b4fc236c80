"""Inputs and forward outputs of all ranks against one device's, module call by module call."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from tutti.verify.align import (
    Alignment,
    Piece,
    batch_alignments,
    counted,
    guessed_alignments,
    part_alignments,
    sample_alignments,
)
from tutti.verify.gauge import Gauge
from tutti.verify.measure import difference, rms
from tutti.verify.parts import Holding, Place
from tutti.verify.recording import Call, PartRecord, StepRecord

ALONE = Holding()
"""Of a rank whose samples no other rank computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The difference of one tensor, by rank, in the alignment in which it is smallest."""

    gaps: dict[int | None, float]
    alignment: Alignment

    @property
    def largest(self) -> float:
        return max(self.gaps.values(), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """A tensor of the forward pass. `module`: the one to blame if it differs, "" for the model itself."""

    module: str
    tensor: str


@dataclass(frozen=True, slots=True)
class Pieces:
    """One microbatch on the ranks of one place, which share its samples: in order of samples, their numbers and
    records; calls by key, so that one device's call finds the ranks'.
    """

    ranks: tuple[int, ...]
    parts: tuple[PartRecord, ...]
    calls: tuple[dict[tuple[str, int], Call], ...]
    holding: Holding

    @classmethod
    def of(cls, parts: Sequence[PartRecord], holdings: Sequence[Holding]) -> "list[Pieces]":
        """The pieces of one microbatch's records of all ranks, in order of rank; one for every place."""
        places: dict[Place, list[int]] = {}
        for rank, holding in enumerate(holdings):
            places.setdefault(holding.place, []).append(rank)
        groups = [tuple(sorted(ranks, key=lambda rank: holdings[rank].data_index)) for ranks in places.values()]
        return [
            cls(
                ranks,
                tuple(parts[rank] for rank in ranks),
                tuple({call.key: call for call in parts[rank].calls} for rank in ranks),
                holdings[ranks[0]],
            )
            for ranks in groups
        ]

    def tensors(self, call: Call, attribute: str, position: int) -> list[Piece] | None:
        """A tensor of a call on every rank whose samples count; None if one of them did not make this call."""
        found = []
        for rank, part, calls in zip(self.ranks, self.parts, self.calls, strict=True):
            if part.part.count == 0:
                continue
            values = getattr(calls[call.key], attribute) if call.key in calls else ()
            if position >= len(values):
                return None
            held = calls[call.key].parts.get((attribute, position))
            found.append(Piece(rank=rank, part=part.part, value=values[position], held=held))
        return found


def compare_forward(one: PartRecord, places: Sequence[Pieces], gauge: Gauge) -> Iterator[tuple[Spot, Gap | None]]:
    """(place, gap) of every recorded output in order of execution; gap None where it could not be compared."""
    for call in one.calls:
        for position, expected in enumerate(call.outputs):
            place = Spot(module=call.module, tensor="output" if len(call.outputs) == 1 else f"output {position + 1}")
            scale = max(rms([expected]), gauge.floor * rms(call.inputs))
            gaps: list[tuple[Pieces, Gap]] = []
            for pieces in places:
                found = pieces.tensors(call, "outputs", position)
                gap = smallest_gap(expected, found, scale, gauge, pieces.holding) if found else None
                gaps += [(pieces, gap)] if gap is not None else []
            far = next((pieces for pieces, gap in gaps if gap.largest > gauge.tolerance), None)
            blamed = _blamed(call, far, gauge) if far is not None else None
            yield blamed or (place, _merged([gap for _, gap in gaps]))


def _merged(gaps: Sequence[Gap]) -> Gap | None:
    """The gaps of all places as one, in the alignment of the largest; None for none."""
    if not gaps:
        return None
    worst = max(gaps, key=lambda gap: gap.largest)
    by_rank = sorted(
        (pair for gap in gaps for pair in gap.gaps.items()), key=lambda pair: -1 if pair[0] is None else pair[0]
    )
    return Gap(gaps=dict(by_rank), alignment=worst.alignment)


def _blamed(call: Call, pieces: Pieces, gauge: Gauge) -> tuple[Spot, Gap] | None:
    """If a call's inputs differ already, the module around it is to blame: it computed them itself."""
    parent = call.module.rpartition(".")[0]
    for position, expected in enumerate(call.inputs):
        found = pieces.tensors(call, "inputs", position)
        gap = smallest_gap(expected, found, rms([expected]), gauge, pieces.holding) if found else None
        if gap is not None and gap.largest > gauge.tolerance:
            return Spot(module=parent, tensor=f"input of {call.module}" if call.module else "input"), gap
    return None


def smallest_gap(
    expected: torch.Tensor, pieces: Sequence[Piece], scale: float, gauge: Gauge, holding: Holding = ALONE
) -> Gap | None:
    """The gap in the first alignment that is tolerated, else in the best one; None where nothing can be said.

    Values without rows of samples (a mean inside the model) may rightly differ: None unless they agree. So may what
    ranks compute of which each has a part.
    """
    real = counted(pieces)
    if not real:
        return None
    best: Gap | None = None
    shared = bool(holding.place)
    known = part_alignments(expected, real, holding.order) if shared else sample_alignments(expected, real)
    for alignment in known:
        best = _better(best, _measured(alignment, scale))
        if best.largest <= gauge.tolerance:
            return best
    if best is None:
        for alignment in chain(guessed_alignments(expected, real, holding.order), batch_alignments(expected, real)):
            gap = _measured(alignment, scale)
            if gap.largest <= gauge.tolerance:
                return gap
    return best


def _better(one: Gap | None, other: Gap) -> Gap:
    return other if one is None or other.largest < one.largest else one


def _measured(alignment: Alignment, scale: float) -> Gap:
    return Gap(gaps={p.rank: difference(p.expected, p.got, scale) for p in alignment}, alignment=alignment)


def compare_inputs(
    one: StepRecord, ranks: Sequence[StepRecord], holdings: Sequence[Holding], gauge: Gauge
) -> Iterator[tuple[str, Gap | None]]:
    """(name, gap) of every tensor of the batch, microbatch by microbatch."""
    for name, expected in one.inputs.items():
        for index, part in enumerate(one.parts):
            whole = _rows(expected, one, index)
            if part.part.count == 0 or any(name not in r.inputs or index >= len(r.parts) for r in ranks):
                yield name, None
                continue
            for pieces in Pieces.of([step.parts[index] for step in ranks], holdings):
                found = [
                    Piece(rank=rank, part=part.part, value=_rows(ranks[rank].inputs[name], ranks[rank], index))
                    for rank, part in zip(pieces.ranks, pieces.parts, strict=True)
                ]
                yield name, smallest_gap(whole, found, rms([whole]), gauge, pieces.holding)


def _rows(value: torch.Tensor, step: StepRecord, index: int) -> torch.Tensor:
    """One microbatch's rows of a batch tensor; all of it where there is one microbatch, or no row a sample."""
    sizes = [part.part.loaded for part in step.parts]
    if value.dim() == 0 or value.shape[0] != sum(sizes):
        return value
    return value.narrow(0, sum(sizes[:index]), sizes[index])
