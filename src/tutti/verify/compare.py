"""Two recordings compared, in the order things happen: the first tensor that differs is found, with its module.

What comes first is to blame for what comes after, so the order is the diagnosis: data, then forward module by module,
loss, gradients from the last module back, settings, updated parameters, buffers, optimizer state.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from tutti.config.verdict import Stage, TensorDifference
from tutti.parallel.layout import Held
from tutti.verify.align import Alignment
from tutti.verify.forward import Pieces, compare_forward, compare_inputs
from tutti.verify.gauge import Gauge
from tutti.verify.measure import difference, number_difference, rms
from tutti.verify.parts import Holding, covered, part_of
from tutti.verify.recording import RankRecord, StepRecord, Values

EXACT = 1e-9
"""Settings are computed alike everywhere, in Python: they may not differ at all, but for the last bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The first difference. `alignment`: of the tensor that differs, where samples have rows in it."""

    first: TensorDifference
    alignment: Alignment | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """One step on one device, and on every rank in order; the heads of both recordings."""

    head: RankRecord
    heads: tuple[RankRecord, ...]
    one: StepRecord
    ranks: tuple[StepRecord, ...]

    @property
    def holdings(self) -> tuple[Holding, ...]:
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
        """By rank: the difference of its part of `name`, in `values[rank]`, from one device's tensor. `entry`: the
        optimizer's state that is meant. Ranks that hold nothing of it are left out; if all are, that is the difference.
        """
        found: dict[int | None, float] = {}
        for rank, mine in enumerate(values):
            holding = self.heads[rank].holding
            if name in (holding.state_names if entry else holding.names):
                got = mine.get(entry or name)
                held = (holding.states if entry else holding.tensors).get(name)
                found[rank] = _gap(_part(expected, held, got), got, scale, _part(where, held, got))
        return found or {None: math.inf}

    def owner(self, name: str) -> str:
        """The module that holds a parameter or buffer; the model's class name for the model itself."""
        return self.head.owners.get(name, "") or self.head.model


def compare_start(head: RankRecord, heads: Sequence[RankRecord], gauge: Gauge) -> Found | None:
    """Seeds, batch sizes, and the model as each rank built it."""
    seeds = {rank.rank: 0.0 if rank.seed == head.seed else math.inf for rank in heads}
    sizes = {rank.rank: number_difference(head.global_batch_size, rank.global_batch_size) for rank in heads}
    first = gauge.judge(seeds, stage="seed", step=-1, tensor="Job(seed=...)")
    first = first or gauge.judge(sizes, stage="batch size", step=-1, tensor="Job(global_batch_size=...)")
    floor = gauge.floor * rms(head.initial.values())
    for name, expected in head.initial.items():
        scale = max(rms([expected]), floor)
        gaps = {rank.rank: _gap(expected, rank.initial.get(name), scale) for rank in heads}
        module = head.owners.get(name, "") or head.model
        first = first or gauge.judge(gaps, stage="initial state", step=-1, module=module, tensor=_own(name))
    return Found(first=first) if first else _uncovered(head, heads, gauge)


def _uncovered(head: RankRecord, heads: Sequence[RankRecord], gauge: Gauge) -> Found | None:
    """A tensor of which no rank holds some part."""
    for name, shape in head.shapes.items():
        parts = [rank.holding.tensors.get(name) for rank in heads if name in rank.holding.names]
        if not parts or not covered(shape, parts):
            module = head.owners.get(name, "") or head.model
            none: dict[int | None, float] = {None: math.inf}
            first = gauge.judge(none, stage="parameter", step=-1, module=module, tensor=_own(name))
            return Found(first=first) if first else None
    return None


def compare_step(sides: Sides, gauge: Gauge) -> Found | None:
    """One step of all ranks against one device's; None if all that was compared agrees."""
    checks: tuple[Callable[[Sides, Gauge], Iterator[Found]], ...] = (
        _between, _order, _inputs, _forward, _loss, _gradients, _settings, _used, _after,
    )  # fmt: skip
    return next((found for check in checks for found in check(sides, gauge)), None)


def _between(sides: Sides, gauge: Gauge) -> Iterator[Found]:
    """What the script itself did to the state after the last update."""
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
            yield from _judged(gauge, gaps, "between steps", sides, sides.owner(owned), _own(name))


def _no_change(step: StepRecord, kind: str, name: str) -> torch.Tensor | None:
    after: torch.Tensor | None = getattr(step.after, kind).get(name)
    return None if after is None else torch.zeros_like(after)


def _order(sides: Sides, gauge: Gauge) -> Iterator[Found]:
    gaps = {
        rank: 0.0 if (step.indices, step.batch_size) == (sides.one.indices, sides.one.batch_size) else math.inf
        for rank, step in enumerate(sides.ranks)
    }
    yield from _judged(gauge, gaps, "data order", sides, "", "indices of the global batch")


def _inputs(sides: Sides, gauge: Gauge) -> Iterator[Found]:
    for name, module_gap in compare_inputs(sides.one, sides.ranks, sides.holdings, gauge):
        if module_gap is None:
            gauge.skip(name)
        else:
            yield from _judged(gauge, module_gap.gaps, "input", sides, "", name, module_gap.alignment)


def _forward(sides: Sides, gauge: Gauge) -> Iterator[Found]:
    for index in range(min(len(step.parts) for step in (sides.one, *sides.ranks))):
        parts = [step.parts[index] for step in sides.ranks]
        if not any(part.calls for part in parts):
            continue
        for place, gap in compare_forward(sides.one.parts[index], Pieces.of(parts, sides.holdings), gauge):
            module = place.module or sides.head.model
            if gap is None:
                gauge.skip(f"{place.tensor} of {module}")
            else:
                yield from _judged(gauge, gap.gaps, "forward", sides, module, place.tensor, gap.alignment)


def _loss(sides: Sides, gauge: Gauge) -> Iterator[Found]:
    gaps = {rank: number_difference(sides.one.loss, step.loss) for rank, step in enumerate(sides.ranks)}
    yield from _judged(gauge, gaps, "loss", sides, "", "loss")


def _gradients(sides: Sides, gauge: Gauge) -> Iterator[Found]:
    known = [gradient for gradient in sides.one.gradients.values() if gradient is not None]
    floor = gauge.floor * rms(known)
    for name in _backward_order(sides):
        expected = sides.one.gradients[name]
        scale = max(rms([expected] if expected is not None else []), floor)
        gaps = sides.gaps(name, expected, [step.gradients for step in sides.ranks], scale)
        yield from _judged(gauge, gaps, "gradient", sides, sides.owner(name), f"gradient of {_own(name)}")


def _backward_order(sides: Sides) -> list[str]:
    """Parameters with gradients, those of the module that ran last first."""
    last = {call.module: number for part in sides.one.parts[:1] for number, call in enumerate(part.calls)}

    def when(name: str) -> int:
        owner = sides.head.owners.get(name, "")
        while owner and owner not in last:
            owner = owner.rpartition(".")[0]
        return last.get(owner, len(last))

    return sorted(sides.one.gradients, key=when, reverse=True)


def _settings(sides: Sides, gauge: Gauge) -> Iterator[Found]:
    names = dict.fromkeys(name for step in (sides.one, *sides.ranks) for name in step.hyper_parameters)
    for name in names:
        expected = sides.one.hyper_parameters.get(name, math.nan)
        others = [step.hyper_parameters.get(name, math.nan) for step in sides.ranks]
        stage: Stage = "learning rate" if name.endswith(".lr") else "hyper-parameter"
        yield from _exact(
            gauge, expected, others, stage, sides, f"{name.rpartition('.')[2]} of optimizer {name.partition('.')[0]}"
        )
    rates = [step.learning_rate for step in sides.ranks]
    yield from _exact(gauge, sides.one.learning_rate, rates, "learning rate", sides, "learning rate of the update")


def _exact(
    gauge: Gauge, expected: float, others: Sequence[float], stage: Stage, sides: Sides, name: str
) -> Iterator[Found]:
    gaps = {rank: number_difference(expected, other) for rank, other in enumerate(others)}
    strict = {rank: max(gap, 2 * gauge.tolerance) if gap > EXACT else 0.0 for rank, gap in gaps.items()}
    yield from _judged(gauge, strict, stage, sides, "", name)


def _used(sides: Sides, gauge: Gauge) -> Iterator[Found]:
    """Norms of gradients after averaging and clipping: a script may have changed them in between."""
    floor = gauge.floor * max(sides.one.used_norms.values(), default=0.0)
    for name, expected in sides.one.used_norms.items():
        scale = max(expected, floor, 1e-300)
        gaps = {rank: abs(norm - expected) / scale for rank, norm in _norms(sides, name).items()}
        yield from _judged(gauge, gaps, "gradient used", sides, sides.owner(name), f"gradient of {_own(name)}")


def _norms(sides: Sides, name: str) -> dict[int | None, float]:
    """The norm of a gradient on every rank that holds all of it, or of all ranks' parts together."""
    held = [rank for rank, holding in enumerate(sides.holdings) if name in holding.names]
    norms: dict[int | None, float] = {r: sides.ranks[r].used_norms.get(name, math.inf) for r in held}
    if not any(name in sides.holdings[rank].tensors for rank in held):
        return norms
    return {None: math.sqrt(sum(norms[rank] ** 2 for rank in held if name in sides.holdings[rank].counts))}


def _after(sides: Sides, gauge: Gauge) -> Iterator[Found]:
    """The state after the update."""
    kinds: tuple[tuple[Stage, str], ...] = (
        ("parameter", "parameters"), ("buffer", "buffers"), ("optimizer state", "optimizer"),
    )  # fmt: skip
    for stage, kind in kinds:
        expected: Values = getattr(sides.one.after, kind)
        got: list[Values] = [getattr(step.after, kind) for step in sides.ranks]
        typical = _typical(expected, by_entry=kind == "optimizer")
        noise = gauge.tolerance * rms([g for g in sides.one.gradients.values() if g is not None])
        for name, tensor in expected.items():
            scale = max(rms([tensor]), gauge.floor * typical[_own(name) if kind == "optimizer" else ""], 1e-6)
            where = _meaningful(sides.one.gradients.get(name), noise) if kind == "parameters" else None
            owned = name.partition(".")[2].rpartition(".")[0] if kind == "optimizer" else name
            gaps = sides.gaps(owned, tensor, got, scale, entry=name if kind == "optimizer" else "", where=where)
            words = f"{_own(name)} of {_own(owned)}" if kind == "optimizer" else _own(name)
            yield from _judged(gauge, gaps, stage, sides, sides.owner(owned), words)


def _typical(values: Values, *, by_entry: bool) -> dict[str, float]:
    """Root mean square of all tensors under "", or of those of each entry of the optimizer's state under its name."""
    groups: dict[str, list[torch.Tensor]] = {}
    for name, tensor in values.items():
        groups.setdefault(_own(name) if by_entry else "", []).append(tensor)
    return {name: rms(tensors) for name, tensors in groups.items()}


def _meaningful(gradient: torch.Tensor | None, noise: float) -> torch.Tensor | None:
    """Where a parameter's gradient is more than rounding: elsewhere Adam and its like step by rounding's sign, or by
    rounding over their epsilon."""
    return None if gradient is None else gradient.double().abs() > noise


def _part(whole: torch.Tensor | None, held: Held | None, got: torch.Tensor | None) -> torch.Tensor | None:
    """The part of one device's tensor that a rank holds as `got`."""
    if whole is None or held is None or got is None:
        return whole
    return part_of(whole, held, got)


def _gap(
    expected: torch.Tensor | None, got: torch.Tensor | None, scale: float, where: torch.Tensor | None = None
) -> float:
    if expected is None or got is None:
        return 0.0 if expected is got else math.inf
    if where is not None and expected.shape == got.shape == where.shape:
        got = torch.where(where, got.double(), expected.double())
    return difference(expected, got, scale)


def _judged(
    gauge: Gauge,
    gaps: Mapping[int, float] | Mapping[int | None, float],
    stage: Stage,
    sides: Sides,
    module: str,
    tensor: str,
    alignment: Alignment | None = None,
) -> Iterator[Found]:
    first = gauge.judge(gaps, stage=stage, step=sides.one.step, module=module, tensor=tensor)
    if first is not None:
        yield Found(first=first, alignment=alignment)


def _own(name: str) -> str:
    """The last part of a dotted name."""
    return name.rpartition(".")[2]
