"""Time of a rank's own work: a roofline for each operator, with measured rates where the cluster has them.

time = max(FLOPs / rate + weights / weight rate, bytes / bandwidth) + calls * overhead (Williams, Waterman and
Patterson 2009). A matrix operator has the rate of a square product with as many FLOPs per call, N = (FLOPs /
2)^(1/3). A CPU also reads the weights, which is most of the time of a product of few rows. A GPU computes while
its host prepares the next calls, so a module there takes the longer of both times.
"""

from dataclasses import dataclass, fields, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

import tutti.cost_model.cost_constants as cost_constants
from tutti.config.model import ModelSpec, OpCost, OpKind
from tutti.cost_model.worker_speed import KINDS, Array, Worker

ITEM_NBYTES = 4
"""Bytes of a float32 value, in which convolutions are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTable:
    """All operators of a model.

    Equal operators share a row of the other columns, because models repeat their blocks.

    Attributes:
        module: (operators,), index of each operator's module.
        row: (operators,), each operator's row in the other columns.
        matrix: (rows,), whether the operator is a matrix operator.
        kind: (rows,), index of its kind in `KINDS`.
    """

    module: NDArray[np.intp]
    row: NDArray[np.intp]
    matrix: NDArray[np.bool_]
    kind: NDArray[np.intp]
    flops_forward: Array
    flops_backward: Array
    nbytes_forward: Array
    nbytes_backward: Array
    weight_nbytes: Array
    calls: Array

    def divided(self, work: Array, weight: Array) -> "OpTable":
        """Return the same operators for modules that are divided.

        Args:
            work: (modules,), the part of its work that a module does.
            weight: (modules,), the part of its weights that it has.
        """
        first = np.zeros(len(self.calls), dtype=np.intp)
        first[self.row[::-1]] = self.module[::-1]
        table = self
        if not (
            np.array_equal(work[first][self.row], work[self.module])
            and np.array_equal(weight[first][self.row], weight[self.module])
        ):  # equal operators are divided in different ways
            table, first = self._spread(), self.module
        by, of = work[first], weight[first]
        return replace(
            table,
            flops_forward=table.flops_forward * by,
            flops_backward=table.flops_backward * by,
            nbytes_forward=table.nbytes_forward * by,
            nbytes_backward=table.nbytes_backward * by,
            weight_nbytes=table.weight_nbytes * of,
        )

    def _spread(self) -> "OpTable":
        """Return the columns with one row for every operator."""
        columns = {
            column.name: getattr(self, column.name)[self.row]
            for column in fields(self)
            if column.name not in ("module", "row")
        }
        return OpTable(module=self.module, row=np.arange(len(self.row)), **columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCost:
    """Seconds of one pass, by module.

    Attributes:
        limits: (3, modules), the parts of the seconds that are limited by compute, by memory traffic and by
            calls.
    """

    seconds: Array
    limits: Array

    @property
    def compute_s(self) -> float:
        return float(self.limits[0].sum())

    @property
    def memory_s(self) -> float:
        return float(self.limits[1].sum())


def op_table(model: ModelSpec) -> OpTable:
    """Return the operators of `model`, in the order of its modules."""
    rows: dict[tuple[object, ...], int] = {}
    module, row = [], []
    for index, spec in enumerate(model.modules):
        for op in spec.ops:
            module.append(index)
            row.append(rows.setdefault((op.kind, *_costs(op)), len(rows)))
    kinds = [cast(OpKind, key[0]) for key in rows]
    columns = np.array([key[1:] for key in rows], dtype=np.float64).reshape(len(rows), 6)
    return OpTable(
        module=np.array(module, dtype=np.intp),
        row=np.array(row, dtype=np.intp),
        matrix=np.array([kind in cost_constants.MATRIX_KINDS for kind in kinds], dtype=np.bool_),
        kind=np.array([KINDS.index(kind) for kind in kinds], dtype=np.intp),
        flops_forward=columns[:, 0],
        flops_backward=columns[:, 1],
        nbytes_forward=columns[:, 2],
        nbytes_backward=columns[:, 3],
        weight_nbytes=columns[:, 4],
        calls=columns[:, 5],
    )


def _costs(op: OpCost) -> tuple[float, ...]:
    return (
        op.flops_forward,
        op.flops_backward,
        op.nbytes_forward,
        op.nbytes_backward,
        op.weight_nbytes,
        float(op.calls),
    )


def forward(table: OpTable, worker: Worker, samples: int, modules: int, *, weights: bool = True) -> PassCost:
    """Return the cost of one forward pass of `samples` samples.

    Args:
        modules: number of modules.
        weights: count the time of reading the weights.
    """
    # Autocast reads the weights in full and writes them once more at half the size.
    weight = weights * np.where(table.matrix & worker.half, 2.0, 1.0) * table.weight_nbytes
    calls = np.where(table.matrix & worker.half, 3.0, 1.0) * table.calls
    passed = _Pass(
        flops=table.flops_forward,
        nbytes=table.nbytes_forward,
        weight_nbytes=weight,
        weights_s=weights * _over_weights(table, worker.weights.forward_s, worker.convolution_weights.forward_s),
        calls=calls,
        efficiency=_efficiency(table, worker, worker.efficiency.forward),
    )
    return _work(table, worker, samples, modules, passed)


def backward(table: OpTable, worker: Worker, samples: int, modules: int, *, weights: bool = True) -> PassCost:
    """Return the cost of one backward pass of `samples` samples.

    Args:
        modules: number of modules.
        weights: count the time of reading weights and writing their gradients.
    """
    active = (table.flops_backward > 0) | (table.nbytes_backward > 0)
    calls = np.where(active, cost_constants.BACKWARD_CALLS * table.calls, 0.0)
    weight = np.where(active, weights * 2.0 * table.weight_nbytes, 0.0)
    products = np.round(table.flops_backward / np.maximum(table.flops_forward, 1.0))
    passed = _Pass(
        flops=table.flops_backward,
        nbytes=table.nbytes_backward,
        weight_nbytes=weight,
        weights_s=weights
        * _over_weights(table, worker.weights.backward_s, worker.convolution_weights.backward_s)
        * np.clip(products, 0.0, 2.0),
        calls=calls,
        efficiency=_efficiency(table, worker, worker.efficiency.backward),
    )
    return _work(table, worker, samples, modules, passed)


def _efficiency(table: OpTable, worker: Worker, of_kinds: Array) -> Array:
    """Return (rows,): the rate of operators relative to a square product of as many FLOPs.

    Args:
        of_kinds: (kinds,), the relative rate of each kind.
    """
    of_operators: Array = of_kinds[table.kind]
    convolved = table.kind == KINDS.index("conv")
    pixels = table.flops_forward / np.maximum(2.0 * table.weight_nbytes / ITEM_NBYTES, 1.0)
    measured = worker.convolutions.at(table.weight_nbytes) * worker.images.at(pixels)
    return np.where(convolved, of_operators * measured, of_operators)


def _over_weights(table: OpTable, products_s: float, convolutions_s: float) -> Array:
    """Return (rows,): seconds in which one product of each operator reads its weights, from seconds per byte."""
    per_byte_s: Array = np.where(table.kind == KINDS.index("conv"), convolutions_s, products_s)
    return per_byte_s * table.weight_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """The settings of one pass, (rows,) each.

    Attributes:
        weights_s: seconds in which a matrix operator reads its weights, besides its FLOPs.
        efficiency: rate relative to a square product.
    """

    flops: Array
    nbytes: Array
    weight_nbytes: Array
    weights_s: Array
    calls: Array
    efficiency: Array


def _work(table: OpTable, worker: Worker, samples: int, modules: int, passed: _Pass) -> PassCost:
    """Return the roofline of one pass, by module."""
    if samples == 0:
        return PassCost(seconds=np.zeros(modules), limits=np.zeros((3, modules)))
    products = np.maximum(passed.calls, 1.0)
    in_matrix = products * worker.matrix.time(samples * passed.flops / products)
    in_vector = samples * passed.flops / worker.vector_rate
    compute = np.where(table.matrix, in_matrix, in_vector) / passed.efficiency
    weights = np.where(table.matrix & (passed.flops > 0), passed.weights_s, 0.0)
    width = np.where(table.matrix & worker.half, 0.5, 1.0)
    memory = (samples * passed.nbytes * width + passed.weight_nbytes) / worker.bandwidth_bytes_per_s
    limited = compute + weights >= memory
    parts = worker.slowdown * np.array(
        [np.where(limited, compute, 0.0), np.where(limited, weights, memory), passed.calls * worker.call_s]
    )

    def by_module(values: Array) -> Array:
        return np.bincount(table.module, weights=values[table.row], minlength=modules).astype(np.float64)

    limits = np.array([by_module(part) for part in parts])
    if worker.gap_s is not None:
        gaps = by_module(worker.slowdown * worker.gap_s * passed.calls)
        limits[2] = np.maximum(gaps, limits[2] - limits[0] - limits[1])
    return PassCost(seconds=limits.sum(axis=0), limits=limits)


_ACCUMULATION_PASSES = 3.0


def accumulation_s(worker: Worker, gradients: Array) -> Array:
    """Return the seconds in which gradients of so many bytes are read, added to those of the previous microbatch,
    and written.
    """
    return _ACCUMULATION_PASSES * traffic_s(worker, gradients)


def traffic_s(worker: Worker, nbytes: Array) -> Array:
    """Return the seconds of memory traffic of so many bytes."""
    return nbytes * (worker.slowdown / worker.bandwidth_bytes_per_s)


def update_nbytes(model: ModelSpec, gradients: Array, states: Array, *, on_cpu: bool) -> Array:
    """Return the bytes of memory traffic of the optimizer's update.

    It reads state, gradients and parameters, and writes state and parameters.

    Args:
        gradients: bytes of gradients.
        states: bytes of optimizer state.
    """
    if on_cpu and _fused(model):
        return (3.0 * gradients + cost_constants.FUSED_PASSES * states) / cost_constants.FUSED_RATE
    often = cost_constants.OPTIMIZER_PASSES.get(model.optimizer, cost_constants.OPTIMIZER_PASSES_OTHER)
    return 3.0 * gradients + often * states


def update_calls(model: ModelSpec, *, on_cpu: bool) -> float:
    """Return the operator calls of the update for one parameter tensor."""
    if on_cpu and _fused(model):
        return cost_constants.FUSED_CALLS
    return cost_constants.OPTIMIZER_CALLS.get(model.optimizer, cost_constants.OPTIMIZER_CALLS_OTHER)


def update_temporaries(model: ModelSpec) -> float:
    """Return the number of temporary tensors of a parameter's size during an update on a CPU.

    On a GPU the update is not the peak.
    """
    if _fused(model):
        return 0.0
    return cost_constants.OPTIMIZER_TEMPORARIES.get(model.optimizer, cost_constants.OPTIMIZER_TEMPORARIES_OTHER)


def _fused(model: ModelSpec) -> bool:
    """Return whether trainer/update.py uses torch's fused kernels on a CPU, unless the script asked for others."""
    return model.optimizer in cost_constants.FUSED and model.dtype in cost_constants.FUSED_DTYPES
