"""Compare two recordings in the order of a step, and find the first tensor that differs, with its module.

Earlier differences cause later ones, so the first one found is the one to diagnose. The order is: data, forward module
by module, loss, gradients from the last module back, settings, updated parameters, buffers, optimizer state.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from tutti.config.verdict import Stage, TensorDifference
from tutti.parallel.layout import TensorShard
from tutti.verify.alignment import (
    Alignment,
    MeshPosition,
    RankShard,
    RankTensor,
    batch_alignments,
    counted,
    covers_whole,
    guessed_alignments,
    part_alignments,
    sample_alignments,
    sampled_part,
)
from tutti.verify.recording import MicrobatchRecord, ModuleCall, RankRecord, StepRecord, Values
from tutti.verify.tolerance import ToleranceChecker, difference, number_difference, rms

EXACT = 1e-9
"""Largest relative difference between settings that count as equal: plain Python computes them alike everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDifference:
    """The first difference between two recordings.

    Attributes:
        first: the tensor and its difference.
        alignment: pairs of the tensor's rows on one device and on the ranks; None if it has no rows of samples.
    """

    first: TensorDifference
    alignment: Alignment | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecordings:
    """One step on one device and on every rank in order.

    Attributes:
        head, heads: records of one device and of the ranks for the whole run.
        one, ranks: their records of this step.
    """

    head: RankRecord
    heads: tuple[RankRecord, ...]
    one: StepRecord
    ranks: tuple[StepRecord, ...]

    @property
    def holdings(self) -> tuple[RankShard, ...]:
        return tuple(head.holding for head in self.heads)

    def gaps(
        self,
        name: str,
        expected: torch.Tensor | None,
        values: Sequence[Mapping[str, torch.Tensor | None]],
        scale: float,
        *,
        entry: str = "",
        where: torch.Tensor | None = None,
    ) -> dict[int | None, float]:
        """Return the difference of each rank's part of a tensor from one device's.

        Args:
            name: the parameter or buffer.
            expected: one device's tensor.
            values: each rank's tensors by name.
            scale: the size that differences are relative to.
            entry: name of the optimizer state to compare; "" to compare the parameter or buffer itself.
            where: mask of the elements to compare; all by default.

        Returns:
            Differences by rank, for the ranks that hold a part. If no rank holds one, an infinite difference under
            None.
        """
        differences: dict[int | None, float] = {}
        for rank, tensors in enumerate(values):
            holding = self.heads[rank].holding
            if name in (holding.state_names if entry else holding.names):
                got = tensors.get(entry or name)
                held = (holding.states if entry else holding.tensors).get(name)
                differences[rank] = _gap(_part(expected, held, got), got, scale, _part(where, held, got))
        return differences or {None: math.inf}

    def owner(self, name: str) -> str:
        """Return the module that holds a parameter or buffer; the model's class name for the model itself."""
        return self.head.owners.get(name, "") or self.head.model


def compare_start(head: RankRecord, heads: Sequence[RankRecord], checker: ToleranceChecker) -> FirstDifference | None:
    """Compare seeds, batch sizes, and the model as each rank built it.

    Args:
        head: the record of one device.
        heads: the records of the ranks.
        checker: judges the differences.

    Returns:
        The first difference, or None.
    """
    seeds = {rank.rank: 0.0 if rank.seed == head.seed else math.inf for rank in heads}
    sizes = {rank.rank: number_difference(head.global_batch_size, rank.global_batch_size) for rank in heads}
    first = checker.judge(seeds, stage="seed", step=-1, tensor="Job(seed=...)")
    first = first or checker.judge(sizes, stage="batch size", step=-1, tensor="Job(global_batch_size=...)")
    floor = checker.floor * rms(head.initial.values())
    for name, expected in head.initial.items():
        scale = max(rms([expected]), floor)
        gaps = {rank.rank: _gap(expected, rank.initial.get(name), scale) for rank in heads}
        module = head.owners.get(name, "") or head.model
        first = first or checker.judge(gaps, stage="initial state", step=-1, module=module, tensor=_last_name(name))
    return FirstDifference(first=first) if first else _uncovered(head, heads, checker)


def _uncovered(head: RankRecord, heads: Sequence[RankRecord], checker: ToleranceChecker) -> FirstDifference | None:
    """Return a difference for the first tensor that the parts on all ranks do not cover; None if all are covered."""
    for name, shape in head.shapes.items():
        parts = [rank.holding.tensors.get(name) for rank in heads if name in rank.holding.names]
        if not parts or not covers_whole(shape, parts):
            module = head.owners.get(name, "") or head.model
            missing: dict[int | None, float] = {None: math.inf}
            first = checker.judge(missing, stage="parameter", step=-1, module=module, tensor=_last_name(name))
            return FirstDifference(first=first) if first else None
    return None


def compare_step(sides: StepRecordings, checker: ToleranceChecker) -> FirstDifference | None:
    """Compare one step of all ranks with one device's; return None if everything agrees."""
    checks: tuple[Callable[[StepRecordings, ToleranceChecker], Iterator[FirstDifference]], ...] = (
        _between, _order, _inputs, _forward, _loss, _gradients, _settings, _used, _after,
    )  # fmt: skip
    return next((difference for check in checks for difference in check(sides, checker)), None)


def _between(sides: StepRecordings, checker: ToleranceChecker) -> Iterator[FirstDifference]:
    """Compare what the script itself did to the state after the last update."""
    for kind in ("parameters", "buffers", "optimizer"):
        expected: Values = getattr(sides.one.between, kind)
        got: list[Values] = [getattr(step.between, kind) for step in sides.ranks]
        after: Values = getattr(sides.one.after, kind)
        for name in dict.fromkeys(name for values in (expected, *got) for name in values):
            zero = torch.zeros((), dtype=torch.float64)
            tensor = expected.get(name, zero.expand(after[name].shape) if name in after else zero)
            scale = max(rms([tensor]), rms([after[name]]) if name in after else 0.0, 1e-6)
            owned = name.partition(".")[2].rpartition(".")[0] if kind == "optimizer" else name
            entry = name if kind == "optimizer" else ""
            changed = [
                {name: values.get(name, _no_change(step, kind, name))}
                for values, step in zip(got, sides.ranks, strict=True)
            ]
            gaps = sides.gaps(owned, tensor, changed, scale, entry=entry)
            yield from _judged(checker, gaps, "between steps", sides, sides.owner(owned), _last_name(name))


def _no_change(step: StepRecord, kind: str, name: str) -> torch.Tensor | None:
    after: torch.Tensor | None = getattr(step.after, kind).get(name)
    return None if after is None else torch.zeros_like(after)


def _order(sides: StepRecordings, checker: ToleranceChecker) -> Iterator[FirstDifference]:
    gaps = {
        rank: 0.0 if (step.indices, step.batch_size) == (sides.one.indices, sides.one.batch_size) else math.inf
        for rank, step in enumerate(sides.ranks)
    }
    yield from _judged(checker, gaps, "data order", sides, "", "indices of the global batch")


def _inputs(sides: StepRecordings, checker: ToleranceChecker) -> Iterator[FirstDifference]:
    for name, module_gap in compare_inputs(sides.one, sides.ranks, sides.holdings, checker):
        if module_gap is None:
            checker.skip(name)
        else:
            yield from _judged(checker, module_gap.gaps, "input", sides, "", name, module_gap.alignment)


def _forward(sides: StepRecordings, checker: ToleranceChecker) -> Iterator[FirstDifference]:
    for index in range(min(len(step.parts) for step in (sides.one, *sides.ranks))):
        parts = [step.parts[index] for step in sides.ranks]
        if not any(part.calls for part in parts):
            continue
        for place, gap in compare_forward(sides.one.parts[index], MicrobatchRecords.of(parts, sides.holdings), checker):
            module = place.module or sides.head.model
            if gap is None:
                checker.skip(f"{place.tensor} of {module}")
            else:
                yield from _judged(checker, gap.gaps, "forward", sides, module, place.tensor, gap.alignment)


def _loss(sides: StepRecordings, checker: ToleranceChecker) -> Iterator[FirstDifference]:
    gaps = {rank: number_difference(sides.one.loss, step.loss) for rank, step in enumerate(sides.ranks)}
    yield from _judged(checker, gaps, "loss", sides, "", "loss")


def _gradients(sides: StepRecordings, checker: ToleranceChecker) -> Iterator[FirstDifference]:
    known = [gradient for gradient in sides.one.gradients.values() if gradient is not None]
    floor = checker.floor * rms(known)
    for name in _backward_order(sides):
        expected = sides.one.gradients[name]
        scale = max(rms([expected] if expected is not None else []), floor)
        gaps = sides.gaps(name, expected, [step.gradients for step in sides.ranks], scale)
        yield from _judged(checker, gaps, "gradient", sides, sides.owner(name), f"gradient of {_last_name(name)}")


def _backward_order(sides: StepRecordings) -> list[str]:
    """Return the parameters with gradients, those of the module that ran last first."""
    last = {call.module: number for part in sides.one.parts[:1] for number, call in enumerate(part.calls)}

    def when(name: str) -> int:
        owner = sides.head.owners.get(name, "")
        while owner and owner not in last:
            owner = owner.rpartition(".")[0]
        return last.get(owner, len(last))

    return sorted(sides.one.gradients, key=when, reverse=True)


def _settings(sides: StepRecordings, checker: ToleranceChecker) -> Iterator[FirstDifference]:
    names = dict.fromkeys(name for step in (sides.one, *sides.ranks) for name in step.hyper_parameters)
    for name in names:
        expected = sides.one.hyper_parameters.get(name, math.nan)
        others = [step.hyper_parameters.get(name, math.nan) for step in sides.ranks]
        stage: Stage = "learning rate" if name.endswith(".lr") else "hyper-parameter"
        yield from _exact(
            checker, expected, others, stage, sides, f"{name.rpartition('.')[2]} of optimizer {name.partition('.')[0]}"
        )
    rates = [step.learning_rate for step in sides.ranks]
    yield from _exact(checker, sides.one.learning_rate, rates, "learning rate", sides, "learning rate of the update")


def _exact(
    checker: ToleranceChecker, expected: float, others: Sequence[float], stage: Stage, sides: StepRecordings, name: str
) -> Iterator[FirstDifference]:
    gaps = {rank: number_difference(expected, other) for rank, other in enumerate(others)}
    strict = {rank: max(gap, 2 * checker.tolerance) if gap > EXACT else 0.0 for rank, gap in gaps.items()}
    yield from _judged(checker, strict, stage, sides, "", name)


def _used(sides: StepRecordings, checker: ToleranceChecker) -> Iterator[FirstDifference]:
    """Compare norms of gradients after averaging and clipping; a script may have changed gradients in between."""
    floor = checker.floor * max(sides.one.used_norms.values(), default=0.0)
    for name, expected in sides.one.used_norms.items():
        scale = max(expected, floor, 1e-300)
        gaps = {rank: abs(norm - expected) / scale for rank, norm in _norms(sides, name).items()}
        yield from _judged(checker, gaps, "gradient used", sides, sides.owner(name), f"gradient of {_last_name(name)}")


def _norms(sides: StepRecordings, name: str) -> dict[int | None, float]:
    """Return a gradient's norm by rank, or under None the norm of all parts together if ranks hold parts of it."""
    holders = [rank for rank, holding in enumerate(sides.holdings) if name in holding.names]
    norms: dict[int | None, float] = {r: sides.ranks[r].used_norms.get(name, math.inf) for r in holders}
    if not any(name in sides.holdings[rank].tensors for rank in holders):
        return norms
    return {None: math.sqrt(sum(norms[rank] ** 2 for rank in holders if name in sides.holdings[rank].counts))}


def _after(sides: StepRecordings, checker: ToleranceChecker) -> Iterator[FirstDifference]:
    """Compare the state after the update."""
    kinds: tuple[tuple[Stage, str], ...] = (
        ("parameter", "parameters"), ("buffer", "buffers"), ("optimizer state", "optimizer"),
    )  # fmt: skip
    for stage, kind in kinds:
        expected: Values = getattr(sides.one.after, kind)
        got: list[Values] = [getattr(step.after, kind) for step in sides.ranks]
        typical = _typical(expected, by_entry=kind == "optimizer")
        noise = checker.tolerance * rms([g for g in sides.one.gradients.values() if g is not None])
        for name, tensor in expected.items():
            scale = max(rms([tensor]), checker.floor * typical[_last_name(name) if kind == "optimizer" else ""], 1e-6)
            where = _meaningful(sides.one.gradients.get(name), noise) if kind == "parameters" else None
            owned = name.partition(".")[2].rpartition(".")[0] if kind == "optimizer" else name
            gaps = sides.gaps(owned, tensor, got, scale, entry=name if kind == "optimizer" else "", where=where)
            words = f"{_last_name(name)} of {_last_name(owned)}" if kind == "optimizer" else _last_name(name)
            yield from _judged(checker, gaps, stage, sides, sides.owner(owned), words)


def _typical(values: Values, *, by_entry: bool) -> dict[str, float]:
    """Return the root mean square of all tensors under "", or of each entry of the optimizer state under its name."""
    groups: dict[str, list[torch.Tensor]] = {}
    for name, tensor in values.items():
        groups.setdefault(_last_name(name) if by_entry else "", []).append(tensor)
    return {name: rms(tensors) for name, tensors in groups.items()}


def _meaningful(gradient: torch.Tensor | None, noise: float) -> torch.Tensor | None:
    """Return a mask of the elements whose gradient exceeds rounding.

    Elsewhere, Adam and similar optimizers step by the sign of a rounding error.
    """
    return None if gradient is None else gradient.double().abs() > noise


def _part(whole: torch.Tensor | None, held: TensorShard | None, got: torch.Tensor | None) -> torch.Tensor | None:
    """Return the part of one device's tensor that a rank holds as `got`."""
    if whole is None or held is None or got is None:
        return whole
    return sampled_part(whole, held, got)


def _gap(
    expected: torch.Tensor | None, got: torch.Tensor | None, scale: float, where: torch.Tensor | None = None
) -> float:
    if expected is None or got is None:
        return 0.0 if expected is got else math.inf
    if where is not None and expected.shape == got.shape == where.shape:
        got = torch.where(where, got.double(), expected.double())
    return difference(expected, got, scale)


def _judged(
    checker: ToleranceChecker,
    gaps: Mapping[int, float] | Mapping[int | None, float],
    stage: Stage,
    sides: StepRecordings,
    module: str,
    tensor: str,
    alignment: Alignment | None = None,
) -> Iterator[FirstDifference]:
    first = checker.judge(gaps, stage=stage, step=sides.one.step, module=module, tensor=tensor)
    if first is not None:
        yield FirstDifference(first=first, alignment=alignment)


def _last_name(name: str) -> str:
    """Return the last part of a dotted name."""
    return name.rpartition(".")[2]


UNSHARDED = RankShard()
"""The shard of a rank whose samples no other rank computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGap:
    """The difference of one tensor by rank, in the alignment in which it is smallest.

    Attributes:
        gaps: relative difference by rank; the key None stands for all ranks together.
        alignment: the pairs that were compared.
    """

    gaps: dict[int | None, float]
    alignment: Alignment

    @property
    def largest(self) -> float:
        return max(self.gaps.values(), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardTensor:
    """A tensor of the forward pass.

    Attributes:
        module: the module to blame if the tensor differs; "" is the model itself.
        tensor: name of the tensor.
    """

    module: str
    tensor: str


@dataclass(frozen=True, slots=True)
class MicrobatchRecords:
    """One microbatch on the ranks of one mesh position, in order of their samples.

    Attributes:
        ranks, parts: the ranks' numbers and their records.
        calls: each rank's module calls by key; the key matches one device's call.
        holding: what the first rank holds of the model.
    """

    ranks: tuple[int, ...]
    parts: tuple[MicrobatchRecord, ...]
    calls: tuple[dict[tuple[str, int], ModuleCall], ...]
    holding: RankShard

    @classmethod
    def of(cls, parts: Sequence[MicrobatchRecord], holdings: Sequence[RankShard]) -> "list[MicrobatchRecords]":
        """Group the records of one microbatch by mesh position.

        Args:
            parts: the microbatch on every rank, in order of rank.
            holdings: what each rank holds of the model.
        """
        places: dict[MeshPosition, list[int]] = {}
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

    def tensors(self, call: ModuleCall, attribute: str, position: int) -> list[RankTensor] | None:
        """Return one tensor of a call on every rank whose samples count.

        Args:
            call: one device's call.
            attribute: "inputs" or "outputs".
            position: index of the tensor among them.

        Returns:
            The tensors in order of rank; None if a rank did not make this call.
        """
        tensors = []
        for rank, part, calls in zip(self.ranks, self.parts, self.calls, strict=True):
            if part.part.count == 0:
                continue
            values = getattr(calls[call.key], attribute) if call.key in calls else ()
            if position >= len(values):
                return None
            held = calls[call.key].parts.get((attribute, position))
            tensors.append(RankTensor(rank=rank, part=part.part, value=values[position], held=held))
        return tensors


def compare_forward(
    one: MicrobatchRecord, places: Sequence[MicrobatchRecords], checker: ToleranceChecker
) -> Iterator[tuple[ForwardTensor, TensorGap | None]]:
    """Compare every recorded output, in order of execution.

    Args:
        one: the microbatch on one device.
        places: the microbatch on the ranks, by mesh position.
        checker: holds the tolerance.

    Yields:
        (tensor, gap) for each output; the gap is None where the output could not be compared.
    """
    for call in one.calls:
        for position, expected in enumerate(call.outputs):
            place = ForwardTensor(
                module=call.module, tensor="output" if len(call.outputs) == 1 else f"output {position + 1}"
            )
            scale = max(rms([expected]), checker.floor * rms(call.inputs))
            gaps: list[tuple[MicrobatchRecords, TensorGap]] = []
            for pieces in places:
                tensors = pieces.tensors(call, "outputs", position)
                gap = smallest_gap(expected, tensors, scale, checker, pieces.holding) if tensors else None
                gaps += [(pieces, gap)] if gap is not None else []
            far = next((pieces for pieces, gap in gaps if gap.largest > checker.tolerance), None)
            blamed = _blamed(call, far, checker) if far is not None else None
            yield blamed or (place, _merged([gap for _, gap in gaps]))


def _merged(gaps: Sequence[TensorGap]) -> TensorGap | None:
    """Merge the gaps of all mesh positions, with the alignment of the largest gap; None for no gaps."""
    if not gaps:
        return None
    worst = max(gaps, key=lambda gap: gap.largest)
    by_rank = sorted(
        (pair for gap in gaps for pair in gap.gaps.items()), key=lambda pair: -1 if pair[0] is None else pair[0]
    )
    return TensorGap(gaps=dict(by_rank), alignment=worst.alignment)


def _blamed(
    call: ModuleCall, pieces: MicrobatchRecords, checker: ToleranceChecker
) -> tuple[ForwardTensor, TensorGap] | None:
    """Blame the surrounding module if the inputs of a call already differ, because it computed them itself."""
    parent = call.module.rpartition(".")[0]
    for position, expected in enumerate(call.inputs):
        tensors = pieces.tensors(call, "inputs", position)
        gap = smallest_gap(expected, tensors, rms([expected]), checker, pieces.holding) if tensors else None
        if gap is not None and gap.largest > checker.tolerance:
            return ForwardTensor(module=parent, tensor=f"input of {call.module}" if call.module else "input"), gap
    return None


def smallest_gap(
    expected: torch.Tensor,
    pieces: Sequence[RankTensor],
    scale: float,
    checker: ToleranceChecker,
    holding: RankShard = UNSHARDED,
) -> TensorGap | None:
    """Return the gap in the first alignment within the tolerance, or else in the best one.

    Values without rows of samples (a mean inside the model) may rightly differ between ranks, and so may values of
    which each rank has a part. For these the result is None unless they agree.

    Args:
        expected: one device's tensor.
        pieces: the ranks' tensors.
        scale: the size that differences are relative to.
        checker: holds the tolerance.
        holding: what these ranks hold of the model.

    Returns:
        The gap, or None if the tensors cannot be compared.
    """
    real = counted(pieces)
    if not real:
        return None
    best: TensorGap | None = None
    shared = bool(holding.place)
    known = part_alignments(expected, real, holding.order) if shared else sample_alignments(expected, real)
    for alignment in known:
        best = _better(best, _measured(alignment, scale))
        if best.largest <= checker.tolerance:
            return best
    if best is None:
        for alignment in chain(guessed_alignments(expected, real, holding.order), batch_alignments(expected, real)):
            gap = _measured(alignment, scale)
            if gap.largest <= checker.tolerance:
                return gap
    return best


def _better(one: TensorGap | None, other: TensorGap) -> TensorGap:
    return other if one is None or other.largest < one.largest else one


def _measured(alignment: Alignment, scale: float) -> TensorGap:
    return TensorGap(gaps={p.rank: difference(p.expected, p.got, scale) for p in alignment}, alignment=alignment)


def compare_inputs(
    one: StepRecord, ranks: Sequence[StepRecord], holdings: Sequence[RankShard], checker: ToleranceChecker
) -> Iterator[tuple[str, TensorGap | None]]:
    """Compare every tensor of the batch, microbatch by microbatch.

    Args:
        one: the step on one device.
        ranks: the step on every rank.
        holdings: what each rank holds of the model.
        checker: holds the tolerance.

    Yields:
        (name, gap) for each tensor and microbatch; the gap is None where the tensor could not be compared.
    """
    for name, expected in one.inputs.items():
        for index, part in enumerate(one.parts):
            whole = _rows(expected, one, index)
            if part.part.count == 0 or any(name not in r.inputs or index >= len(r.parts) for r in ranks):
                yield name, None
                continue
            for pieces in MicrobatchRecords.of([step.parts[index] for step in ranks], holdings):
                tensors = [
                    RankTensor(rank=rank, part=part.part, value=_rows(ranks[rank].inputs[name], ranks[rank], index))
                    for rank, part in zip(pieces.ranks, pieces.parts, strict=True)
                ]
                yield name, smallest_gap(whole, tensors, rms([whole]), checker, pieces.holding)


def _rows(value: torch.Tensor, step: StepRecord, index: int) -> torch.Tensor:
    """Return one microbatch's rows of a batch tensor; the whole tensor if it has no row per sample."""
    sizes = [part.part.loaded for part in step.parts]
    if value.dim() == 0 or value.shape[0] != sum(sizes):
        return value
    return value.narrow(0, sum(sizes[:index]), sizes[index])
