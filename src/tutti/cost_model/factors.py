"""Sufficient factors of linear layers: for which modules of a plan they are fewer bytes, and what their sums take.

A ModelSpec knows no shapes: of a linear layer, rows and features follow from its FLOPs (2 rows in out), its output
(rows out) and its gradient (in out, and out of a bias).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tutti.config.compression import FACTORS, Compression, factors_pay, factors_sent_nbytes
from tutti.config.model import ModelSpec
from tutti.config.plan import Plan
from tutti.config.vocabulary import AxisName
from tutti.cost_model.groups import Group
from tutti.cost_model.placement import Seat
from tutti.cost_model.table import ModelTable, model_table
from tutti.cost_model.worker import best_rate

_VALUE_NBYTES = 4

_NOT_OVER: tuple[AxisName, ...] = ("split", "stage", "space")
"""Sums over these axes are of gradients (runtime.compressed.factored)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsOf:
    """A linear layer's weight. `rows`: of its factors over all ranks in a step; `width`: bytes of their values."""

    module: int
    rows: float
    out_features: float
    in_features: float
    ranks: int
    width: int

    @property
    def nbytes(self) -> float:
        """Of the weight's gradient."""
        return self.out_features * self.in_features * _VALUE_NBYTES

    @property
    def sent_nbytes(self) -> float:
        """Of one rank in a step, where all have as many rows."""
        return factors_sent_nbytes(self.rows / self.ranks, self.out_features, self.in_features, self.ranks, self.width)

    def sum_s(self, plan: Plan, group: Group, seat: Seat) -> tuple[float, float]:
        """(seconds, seconds of one thread in them) in which `group` sums it: every rank gets all rows, and multiplies
        those of the others beside its own."""
        device = seat.device
        share = min(1.0, seat.threads / max(1, device.cores)) if device.kind == "cpu" else 1.0
        rate = (best_rate(device, "float32") or max(device.peak_flops_per_s.values(), default=0.0)) * share
        others = self.rows * (self.ranks - 1) / self.ranks
        product = seat.slowdown * 2 * others * self.out_features * self.in_features / rate if rate else 0.0
        return self.wire_s(group) + product, product * (seat.threads if device.kind == "cpu" else 1)

    def wire_s(self, group: Group) -> float:
        """Seconds in which `group` exchanges rows, having told each other how many they are."""
        values = self.rows * (self.out_features + self.in_features)
        return group.all_to_all(8 * self.ranks) + group.all_to_all(values * self.width)


def by_factors(
    columns: ModelTable, plan: Plan, ranks: int, axes: tuple[AxisName, ...], modules: Iterable[int]
) -> list[RowsOf]:
    """Of `modules`, which so many ranks along `axes` sum, those whose weights go by factors under `plan`."""
    how = plan.sync.compress
    if how is None or how.method != FACTORS or ranks == 1:
        return []
    if any(plan.degree(axis) > 1 for axis in axes if axis in _NOT_OVER):
        return []
    samples = plan.batch.global_batch_size / (max(columns.tokens, 1) if plan.batch.unit == "tokens" else 1)
    half = 2 if plan.precision in ("bfloat16", "float16") else _VALUE_NBYTES
    found = []
    for module in modules:
        shape = _shape(columns, module)
        if shape is None:
            continue
        rows, out_features, in_features = shape
        if factors_pay(rows * samples, out_features, in_features, _VALUE_NBYTES, half):
            found.append(
                RowsOf(
                    module=module,
                    rows=rows * samples,
                    out_features=out_features,
                    in_features=in_features,
                    ranks=ranks,
                    width=half,
                )
            )
    return found


def may_pay(model: ModelSpec, plan: Plan) -> bool:
    """Whether any layer's factors would be fewer bytes, on however many ranks."""
    columns = model_table(model)
    wanted = replace(plan, sync=replace(plan.sync, compress=Compression(method=FACTORS)), mesh={"replicate": 2})
    return bool(by_factors(columns, wanted, 2, ("replicate",), range(len(columns))))


def _shape(columns: ModelTable, module: int) -> tuple[float, float, float] | None:
    """(rows a sample, out, in) of a linear layer whose weight is its own; None for others."""
    gradient = columns.gradients[module] / _VALUE_NBYTES
    outputs, flops = columns.outputs[module] / _VALUE_NBYTES, columns.flops[module]
    if columns.classes[module] != "Linear" or min(gradient, outputs, flops) <= 0:
        return None
    if any(columns.classes[other] != "Linear" for other in (columns.owner == module).nonzero()[0]):
        return None  # an embedding's has more than factors
    in_features = flops / 2 / outputs
    biased = gradient / (in_features + 1)
    out_features = biased if abs(biased - round(biased)) < 1e-6 else gradient / in_features
    return float(outputs / out_features), float(out_features), float(in_features)
