"""Compare two recordings in the order of a step, and find the first tensor that differs, with its module.

Earlier differences cause later ones, so the first one found is the one to diagnose. The order is: data, forward module
by module, loss, gradients from the last module back, settings, updated parameters, buffers, optimizer state.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from tutti.config.verdict import Stage, TensorDifference
from tutti.parallel.layout import TensorShard
from tutti.verification.alignment import (
    Alignment,
    RankShard,
    covers_whole,
    in_double,
    sampled_part,
)
from tutti.verification.compare_forward import BatchLayout, MicrobatchRecords, compare_forward, is_padded_otherwise
from tutti.verification.compare_inputs import InputComparison, compare_inputs, layout_of, ranks_padded_otherwise
from tutti.verification.recording import Evaluation, RankRecord, StepRecord, Values
from tutti.verification.tolerance import ToleranceChecker, difference, number_difference, rms

SETTING_TOLERANCE = 1e-9
"""Largest relative difference of equal settings: plain Python computes them alike everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDifference:
    """The first difference between two recordings.

    Attributes:
        difference: the tensor and its difference.
        alignment: pairs of the tensor's rows on one device and on the ranks; None if it has no rows of samples.
        decisive: whether it is a fault on its own. Rows that are not samples, and padding, may differ without effect.
        of_samples: whether its rows are samples, so that it is the cause of decisive differences that follow.
        call: the module call whose tensor differs; None outside forward.
        unread: tensors of the batch that were not compared row by row, because they depend on which samples are
            collated together.
        ragged: whether rows of the batch are not samples, or in another order, so that draws cannot be matched by rows.
    """

    difference: TensorDifference
    alignment: Alignment | None = None
    decisive: bool = True
    of_samples: bool = True
    call: tuple[str, int] | None = None
    unread: tuple[str, ...] = ()
    ragged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecordings:
    """One step on one device (the reference) and on every rank in order.

    Attributes:
        head, heads: records of the whole run, of one device and of the ranks.
        reference, ranks: their records of this step.
    """

    head: RankRecord
    heads: tuple[RankRecord, ...]
    reference: StepRecord
    ranks: tuple[StepRecord, ...]

    @property
    def rank_shards(self) -> tuple[RankShard, ...]:
        """The part of the model that each rank holds."""
        return tuple(head.rank_shard for head in self.heads)

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
            rank_shard = self.heads[rank].rank_shard
            if name in (rank_shard.state_names if entry else rank_shard.names):
                got = tensors.get(entry or name)
                shard = (rank_shard.states if entry else rank_shard.tensors).get(name)
                differences[rank] = _gap(_part(expected, shard, got), got, scale, _part(where, shard, got))
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
    return FirstDifference(difference=first) if first else _uncovered(head, heads, checker)


def _uncovered(head: RankRecord, heads: Sequence[RankRecord], checker: ToleranceChecker) -> FirstDifference | None:
    """Return a difference for the first tensor that the ranks' shards together do not cover, or None."""
    for name, shape in head.shapes.items():
        shards = [rank.rank_shard.tensors.get(name) for rank in heads if name in rank.rank_shard.names]
        if not shards or not covers_whole(shape, shards):
            module = head.owners.get(name, "") or head.model
            missing: dict[int | None, float] = {None: math.inf}
            first = checker.judge(missing, stage="parameter", step=-1, module=module, tensor=_last_name(name))
            return FirstDifference(difference=first) if first else None
    return None


def compare_step(recordings: StepRecordings, checker: ToleranceChecker) -> FirstDifference | None:
    """Compare one step of all ranks with one device's; return None if everything agrees."""
    inputs = tuple(compare_inputs(recordings.reference, recordings.ranks, recordings.rank_shards, checker))
    layout = layout_of(inputs, recordings.reference)
    checks: tuple[Callable[[StepRecordings, ToleranceChecker], Iterator[FirstDifference]], ...] = (
        _between, _order, partial(_inputs, inputs), partial(_forward, layout), _loss, _gradients, _settings, _used,
        _after,
    )  # fmt: skip
    undecided: list[FirstDifference] = []
    for first in (found for check in checks for found in check(recordings, checker)):
        if first.decisive:
            causes = (earlier for earlier in undecided if _has_caused(earlier, first, undecided))
            return replace(next(causes, first), unread=_unread(inputs), ragged=bool(layout.values))
        undecided.append(first)
    for first in undecided:
        why = "it differs only in padding" if first.of_samples else "its rows are not samples"
        checker.skip(f"{first.difference.tensor} of {first.difference.module} ({why})")
    return None


def _has_caused(earlier: FirstDifference, first: FirstDifference, undecided: Sequence[FirstDifference]) -> bool:
    """Return whether an undecided difference in forward has caused a decisive one.

    What differs in padding has reached the loss only if it has reached the model's output.
    """
    reaches = any(other.call is not None and not other.call[0] for other in undecided)
    in_loss = first.difference.stage in ("loss", "gradient")
    return _is_inside(earlier, first) or (earlier.of_samples and in_loss and reaches)


def _is_inside(inner: FirstDifference, outer: FirstDifference) -> bool:
    """Return whether a difference lies in a submodule of the module of another, whose output it has changed."""
    return inner.difference.module.startswith(f"{outer.difference.module}.")


def compare_evaluation(
    expected: Evaluation, results: Sequence[Evaluation | None], checker: ToleranceChecker
) -> FirstDifference | None:
    """Compare one device's results of an evaluation with every rank's."""
    floor = checker.floor * max(map(abs, expected.values.values()), default=0.0)
    for name, value in expected.values.items():
        gaps = {
            rank: number_difference(value, result.values.get(name, math.nan), floor)
            if result is not None and (result.step, result.name) == (expected.step, expected.name)
            else math.inf
            for rank, result in enumerate(results)
        }
        first = checker.judge(
            gaps, stage="evaluation", step=expected.step - 1, tensor=f"{name} of the evaluation {expected.name!r}"
        )
        if first is not None:
            return FirstDifference(difference=first)
    return None


def _between(recordings: StepRecordings, checker: ToleranceChecker) -> Iterator[FirstDifference]:
    """Compare what the script itself did to the state after the last update."""
    for kind in ("parameters", "buffers", "optimizer"):
        expected: Values = getattr(recordings.reference.between, kind)
        got: list[Values] = [getattr(step.between, kind) for step in recordings.ranks]
        after: Values = getattr(recordings.reference.after, kind)
        for name in dict.fromkeys(name for values in (expected, *got) for name in values):
            zero = torch.zeros((), dtype=torch.float64)
            tensor = expected.get(name, zero.expand(after[name].shape) if name in after else zero)
            scale = max(rms([tensor]), rms([after[name]]) if name in after else 0.0, 1e-6)
            owner_name = name.partition(".")[2].rpartition(".")[0] if kind == "optimizer" else name
            entry = name if kind == "optimizer" else ""
            changed = [
                {name: values.get(name, _no_change(step, kind, name))}
                for values, step in zip(got, recordings.ranks, strict=True)
            ]
            gaps = recordings.gaps(owner_name, tensor, changed, scale, entry=entry)
            yield from _judged(
                checker, gaps, "between steps", recordings, recordings.owner(owner_name), _last_name(name)
            )


def _no_change(step: StepRecord, kind: str, name: str) -> torch.Tensor | None:
    after: torch.Tensor | None = getattr(step.after, kind).get(name)
    return None if after is None else torch.zeros_like(after)


def _order(recordings: StepRecordings, checker: ToleranceChecker) -> Iterator[FirstDifference]:
    """Compare which samples make up the global batch, and their order."""
    gaps = {
        rank: 0.0
        if (step.indices, step.batch_size) == (recordings.reference.indices, recordings.reference.batch_size)
        else math.inf
        for rank, step in enumerate(recordings.ranks)
    }
    yield from _judged(checker, gaps, "data order", recordings, "", "indices of the global batch")


def _unread(inputs: Sequence[InputComparison]) -> tuple[str, ...]:
    """Return the names of the tensors of the batch that were not compared though the samples are equal."""
    return tuple(dict.fromkeys(one.name for one in inputs if one.reading == "unread" and one.samples_equal))


def _inputs(
    inputs: Sequence[InputComparison], recordings: StepRecordings, checker: ToleranceChecker
) -> Iterator[FirstDifference]:
    for one in inputs:
        if one.gap is not None:
            yield from _judged(checker, one.gap.gaps, "input", recordings, "", one.name, one.gap.alignment)
        elif one.samples_equal:
            checker.skip_grouped(one.name)
        else:
            checker.skip(one.name)


def _forward(layout: BatchLayout, recordings: StepRecordings, checker: ToleranceChecker) -> Iterator[FirstDifference]:
    padded = bool(ranks_padded_otherwise(recordings.reference, recordings.ranks))
    for index in range(min(len(step.microbatches) for step in (recordings.reference, *recordings.ranks))):
        records = [step.microbatches[index] for step in recordings.ranks]
        if not any(record.calls for record in records):
            continue
        groups = MicrobatchRecords.of(records, recordings.rank_shards)
        otherwise = padded or is_padded_otherwise(recordings.reference.microbatches[index], groups)
        for forward_tensor, gap in compare_forward(recordings.reference.microbatches[index], groups, checker, layout):
            module = forward_tensor.module or recordings.head.model
            if gap is None:
                checker.skip(f"{forward_tensor.tensor} of {module}")
            else:
                found = _judged(checker, gap.gaps, "forward", recordings, module, forward_tensor.tensor, gap.alignment)
                of_samples = forward_tensor.of_samples
                yield from (
                    replace(
                        first, decisive=of_samples and not otherwise, of_samples=of_samples, call=forward_tensor.call
                    )
                    for first in found
                )


def _loss(recordings: StepRecordings, checker: ToleranceChecker) -> Iterator[FirstDifference]:
    gaps = {rank: number_difference(recordings.reference.loss, step.loss) for rank, step in enumerate(recordings.ranks)}
    yield from _judged(checker, gaps, "loss", recordings, "", "loss")
    of_update = recordings.reference.update_loss
    if of_update is not None:
        gaps = {
            rank: math.inf if step.update_loss is None else number_difference(of_update, step.update_loss)
            for rank, step in enumerate(recordings.ranks)
        }
        yield from _judged(checker, gaps, "loss", recordings, "", "loss of the update")


def _gradients(recordings: StepRecordings, checker: ToleranceChecker) -> Iterator[FirstDifference]:
    known = [gradient for gradient in recordings.reference.gradients.values() if gradient is not None]
    floor = checker.floor * rms(known)
    for name in _backward_order(recordings):
        expected = recordings.reference.gradients[name]
        scale = max(rms([expected] if expected is not None else []), floor)
        gaps = recordings.gaps(name, expected, [step.gradients for step in recordings.ranks], scale)
        yield from _judged(
            checker, gaps, "gradient", recordings, recordings.owner(name), f"gradient of {_last_name(name)}"
        )


def _backward_order(recordings: StepRecordings) -> list[str]:
    """Return the parameters with gradients, those of the module that ran last first."""
    last = {
        call.module: number
        for record in recordings.reference.microbatches[:1]
        for number, call in enumerate(record.calls)
    }

    def when(name: str) -> int:
        owner = recordings.head.owners.get(name, "")
        while owner and owner not in last:
            owner = owner.rpartition(".")[0]
        return last.get(owner, len(last))

    return sorted(recordings.reference.gradients, key=when, reverse=True)


def _settings(recordings: StepRecordings, checker: ToleranceChecker) -> Iterator[FirstDifference]:
    names = dict.fromkeys(name for step in (recordings.reference, *recordings.ranks) for name in step.hyper_parameters)
    for name in names:
        expected = recordings.reference.hyper_parameters.get(name, math.nan)
        others = [step.hyper_parameters.get(name, math.nan) for step in recordings.ranks]
        stage: Stage = "learning rate" if name.endswith(".lr") else "hyper-parameter"
        yield from _exact(
            checker,
            expected,
            others,
            stage,
            recordings,
            f"{name.rpartition('.')[2]} of optimizer {name.partition('.')[0]}",
        )
    rates = [step.learning_rate for step in recordings.ranks]
    yield from _exact(
        checker, recordings.reference.learning_rate, rates, "learning rate", recordings, "learning rate of the update"
    )


def _exact(
    checker: ToleranceChecker,
    expected: float,
    others: Sequence[float],
    stage: Stage,
    recordings: StepRecordings,
    name: str,
) -> Iterator[FirstDifference]:
    """Compare a setting by `SETTING_TOLERANCE`, however large the checker's tolerance is."""
    gaps = {rank: number_difference(expected, other) for rank, other in enumerate(others)}
    strict = {rank: max(gap, 2 * checker.tolerance) if gap > SETTING_TOLERANCE else 0.0 for rank, gap in gaps.items()}
    yield from _judged(checker, strict, stage, recordings, "", name)


def _used(recordings: StepRecordings, checker: ToleranceChecker) -> Iterator[FirstDifference]:
    """Compare norms of the gradients that the optimizer used: after reduction, after clipping, and after the script."""
    floor = checker.floor * max(recordings.reference.used_norms.values(), default=0.0)
    for name, expected in recordings.reference.used_norms.items():
        scale = max(expected, floor, 1e-300)
        gaps = {rank: abs(norm - expected) / scale for rank, norm in _norms(recordings, name).items()}
        yield from _judged(
            checker, gaps, "gradient used", recordings, recordings.owner(name), f"gradient of {_last_name(name)}"
        )


def _norms(recordings: StepRecordings, name: str) -> dict[int | None, float]:
    """Return a gradient's norm by rank, or under None the norm of all parts together if ranks hold parts of it."""
    holders = [rank for rank, rank_shard in enumerate(recordings.rank_shards) if name in rank_shard.names]
    norms: dict[int | None, float] = {r: recordings.ranks[r].used_norms.get(name, math.inf) for r in holders}
    if not any(name in recordings.rank_shards[rank].tensors for rank in holders):
        return norms
    return {None: math.sqrt(sum(norms[rank] ** 2 for rank in holders if name in recordings.rank_shards[rank].counts))}


def _after(recordings: StepRecordings, checker: ToleranceChecker) -> Iterator[FirstDifference]:
    """Compare the state after the update."""
    kinds: tuple[tuple[Stage, str], ...] = (
        ("parameter", "parameters"), ("buffer", "buffers"), ("optimizer state", "optimizer"),
    )  # fmt: skip
    for stage, kind in kinds:
        expected: Values = getattr(recordings.reference.after, kind)
        got: list[Values] = [getattr(step.after, kind) for step in recordings.ranks]
        typical = _typical(expected, by_entry=kind == "optimizer")
        noise = checker.tolerance * rms([g for g in recordings.reference.gradients.values() if g is not None])
        for name, tensor in expected.items():
            scale = max(rms([tensor]), checker.floor * typical[_last_name(name) if kind == "optimizer" else ""], 1e-6)
            where = _above_rounding(recordings.reference.gradients.get(name), noise) if kind == "parameters" else None
            owner_name = name.partition(".")[2].rpartition(".")[0] if kind == "optimizer" else name
            gaps = recordings.gaps(
                owner_name, tensor, got, scale, entry=name if kind == "optimizer" else "", where=where
            )
            words = f"{_last_name(name)} of {_last_name(owner_name)}" if kind == "optimizer" else _last_name(name)
            yield from _judged(checker, gaps, stage, recordings, recordings.owner(owner_name), words)


def _typical(values: Values, *, by_entry: bool) -> dict[str, float]:
    """Return the root mean square of all tensors under "", or of each entry of the optimizer state under its name."""
    groups: dict[str, list[torch.Tensor]] = {}
    for name, tensor in values.items():
        groups.setdefault(_last_name(name) if by_entry else "", []).append(tensor)
    return {name: rms(tensors) for name, tensors in groups.items()}


def _above_rounding(gradient: torch.Tensor | None, noise: float) -> torch.Tensor | None:
    """Return a mask of the elements whose gradient exceeds rounding.

    Elsewhere, Adam and similar optimizers step by the sign of a rounding error.
    """
    return None if gradient is None else in_double(gradient).abs() > noise


def _part(whole: torch.Tensor | None, shard: TensorShard | None, got: torch.Tensor | None) -> torch.Tensor | None:
    """Return the part of one device's tensor that a rank holds as `got`."""
    if whole is None or shard is None or got is None:
        return whole
    return sampled_part(whole, shard, got)


def _gap(
    expected: torch.Tensor | None, got: torch.Tensor | None, scale: float, where: torch.Tensor | None = None
) -> float:
    """Return the difference of two tensors relative to `scale`, where the mask allows; infinite if one is missing."""
    if expected is None or got is None:
        return 0.0 if expected is got else math.inf
    if where is not None and expected.shape == got.shape == where.shape:
        got = torch.where(where, in_double(got), in_double(expected))
    return difference(expected, got, scale)


def _judged(
    checker: ToleranceChecker,
    gaps: Mapping[int, float] | Mapping[int | None, float],
    stage: Stage,
    recordings: StepRecordings,
    module: str,
    tensor: str,
    alignment: Alignment | None = None,
) -> Iterator[FirstDifference]:
    """Yield a difference if the checker does not tolerate it."""
    first = checker.judge(gaps, stage=stage, step=recordings.reference.step, module=module, tensor=tensor)
    if first is not None:
        yield FirstDifference(difference=first, alignment=alignment)


def _last_name(name: str) -> str:
    """Return the last part of a dotted name."""
    return name.rpartition(".")[2]
