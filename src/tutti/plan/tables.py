"""Totals of a model by the degrees that divide it, looked up row by row: what bounds and estimates are made of."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tutti.errors import PlanError
from tutti.predict import compute, constants
from tutti.predict.placement import Seat, place
from tutti.spec.cluster import ClusterSpec
from tutti.spec.model import ModelSpec, ModuleSpec
from tutti.spec.words import Precision

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


def by_kind(columns: tuple[Ints, ...], function: Callable[..., tuple[float, ...]]) -> tuple[Array, ...]:
    """`function(*row)` for each row of `columns`, called once for equal rows; its values as columns."""
    keys = np.stack(columns, axis=1)
    kinds, where = np.unique(keys, axis=0, return_inverse=True)
    values = np.array([function(*kind) for kind in kinds.tolist()], dtype=np.float64)
    return tuple(np.ascontiguousarray(column) for column in values[where.reshape(-1)].T)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What a number of ranks stands on. `best`: a worker as good as the best seat in every respect; `speed`: mean
    speed of the ranks as a part of that, at most; `memory_nbytes`: of the roomiest rank; `least_nbytes`: of the
    tightest; `hosts`."""

    best: compute.Worker
    speed: float
    memory_nbytes: float
    least_nbytes: float
    hosts: int


class Tables:
    """Totals of one model on one cluster in one precision. Everything is per sample unless it says otherwise."""

    def __init__(self, model: ModelSpec, cluster: ClusterSpec, precision: Precision) -> None:
        self.model, self.cluster, self.precision = model, cluster, precision
        self.half = precision in ("bfloat16", "float16")
        self._table = compute.op_table(model)
        self._grounds: dict[object, Ground] = {}
        self._worlds: dict[int, Ground] = {}
        experts = np.array([module.expert for module in model.modules], dtype=np.bool_)
        self._of_experts = experts[self._table.module]
        self._of_tables = np.array([module.table for module in model.modules], dtype=np.bool_)[self._table.module]
        self._seconds: dict[tuple[float, int, int, int], tuple[float, float, float]] = {}
        self.width = 0.5 if self.half else 1.0

    def ground(self, world: int) -> Ground:
        """What `world` ranks stand on. Raises PlanError where the cluster has too few devices."""
        if world not in self._worlds:
            seats = place(self.cluster, world)
            self._worlds[world] = self._of_seats(seats)
        return self._worlds[world]

    def _of_seats(self, seats: tuple[Seat, ...]) -> Ground:
        key = tuple((seat.device.name, seat.node.name, seat.sharing, seat.threads, seat.ranks) for seat in seats)
        alike = tuple(dict.fromkeys(part[:4] for part in key))
        workers = [compute.worker(seat, self.model.dtype, self.precision) for seat in _first(seats)]
        best = _best(workers)
        speeds = [min(1.0, _relative(worker, best)) for worker in workers]
        of = dict(zip(alike, speeds, strict=True))
        ranks = sum(seat.ranks for seat in seats)
        memory = [seat.memory_nbytes for seat in seats]
        return Ground(
            best=best,
            speed=sum(of[part[:4]] * part[4] for part in key) / ranks,
            memory_nbytes=max(memory),
            least_nbytes=min(memory),
            hosts=sum(seat.hosts for seat in seats),
        )

    def seconds(self, samples: float, expert: int, table: int, world: int) -> tuple[float, float, float]:
        """(forward, backward, both passes' operator calls) of one microbatch of `samples` samples, undivided but for
        experts and tables, on the best worker of `world` ranks."""
        best = self.ground(world).best
        key = (samples, expert, table, id(best))
        if key not in self._seconds:
            count, own = len(self.model.modules), self._divided(expert, table)
            ahead = compute.forward(own, best, samples, count)  # type: ignore[arg-type]
            back = compute.backward(own, best, samples, count)  # type: ignore[arg-type]
            calls = ahead.overhead_s + back.overhead_s
            self._seconds[key] = (float(ahead.seconds.sum()), float(back.seconds.sum()), calls)
        return self._seconds[key]

    def _divided(self, expert: int, table: int) -> compute.OpTable:
        """The operators with a rank's part of experts and tables: their weights, but as many samples."""
        if expert == table == 1:
            return self._table
        part = np.where(self._of_experts, 1.0 / expert, 1.0) * np.where(self._of_tables, 1.0 / table, 1.0)
        return replace(self._table, weight_nbytes=self._table.weight_nbytes * part)

    def state(self, split: int, expert: int, table: int) -> tuple[float, float, float]:
        """Bytes of (parameters, gradients, optimizer state), whole, for one rank of these axes."""
        totals = [0.0, 0.0, 0.0]
        for module in self.model.modules:
            if module.parameter_nbytes:
                part = 1.0 / (
                    split_of(module, split) * (expert if module.expert else 1) * (table if module.table else 1)
                )
                totals[0] += part * module.parameter_nbytes
                totals[1] += part * module.gradient_nbytes
                totals[2] += part * module.optimizer_nbytes
        return totals[0], totals[1], totals[2]

    def activations(self, split: int, context: int, space: int) -> tuple[float, float, float]:
        """Bytes that one sample keeps for backward on one rank (whole model), without recompute and with all of its
        blocks recomputed, and the largest block's."""
        kept, block_out, inside = 0.0, dict[int, float](), dict[int, float]()
        outside = 0.0
        for module in self.model.modules:
            part = 1.0 / context / (space if module.spatial else 1)
            part /= split if module.split or module.sequence else 1
            own = part * module.activation_nbytes * (self.width if multiplies(module) else 1.0)
            kept += own
            if module.block >= 0:
                inside[module.block] = inside.get(module.block, 0.0) + own
                block_out[module.block] = part * module.output_nbytes
            else:
                outside += own
        largest = max(inside.values(), default=0.0)
        return kept, (outside + sum(block_out.values())) if inside else kept, largest

    def traffic(self, split: int, context: int, space: int) -> tuple[float, float, float, float, float, float]:
        """Bytes of one sample's exchanges, forward and backward together: sums over split, keys and values over
        context, tokens of experts, rows of tables, halos over space, and one boundary between stages."""
        sums = keys = routed = rows = halos = 0.0
        boundary = 0.0
        for module in self.model.modules:
            if module.split in ("row", "vocabulary") or (module.split == "heads" and module.parameters):
                sums += module.output_nbytes
            sums += module.input_nbytes if module.split else 0.0
            keys += 2 * module.key_value_nbytes
            routed += 4 * module.routed_nbytes
            rows += 2 * module.output_nbytes if module.table else 0.0
            halos += 2 * module.halo_nbytes_per_cut
            if module.block >= 0:
                boundary = module.output_nbytes
        part = self.width / context
        halved = 1.0 / space
        return sums * part * halved, keys * self.width, routed * part, rows, halos, 2 * boundary * part * halved


def split_of(module: ModuleSpec, degree: int) -> int:
    """Into how many parts at most a module is divided over `degree` split ranks."""
    if not module.split:
        return 1
    return degree if module.split_limit == 0 else min(degree, module.split_limit)


def multiplies(module: ModuleSpec) -> bool:
    return any(op.kind in constants.MATRIX_KINDS for op in module.ops)


def _first(seats: tuple[Seat, ...]) -> list[Seat]:
    found: dict[object, Seat] = {}
    for seat in seats:
        found.setdefault((seat.device.name, seat.node.name, seat.sharing, seat.threads), seat)
    return list(found.values())


def _best(workers: list[compute.Worker]) -> compute.Worker:
    """A worker whose every rate is the best of any: no work takes it longer than any of them.

    Its matrix rate never falls with size, so that a part of some work never takes less than its part of the time.
    """
    if not workers:
        raise PlanError("a plan has 1 rank or more")
    flops = np.unique(np.concatenate([worker.matrix.flops for worker in workers]))
    seconds = np.min([worker.matrix.time(flops) - worker.matrix.ramp_s for worker in workers], axis=0)
    rate = np.maximum.accumulate(flops / seconds)
    curve = compute.Curve(flops=flops, seconds=flops / rate, ramp_s=min(worker.matrix.ramp_s for worker in workers))
    return replace(
        workers[0],
        matrix=curve,
        vector_rate=max(worker.vector_rate for worker in workers),
        bandwidth_bytes_per_s=max(worker.bandwidth_bytes_per_s for worker in workers),
        kernel_overhead_s=min(worker.kernel_overhead_s for worker in workers),
        call_s=min(worker.call_s for worker in workers),
        slowdown=min(worker.slowdown for worker in workers),
        half=all(worker.half for worker in workers),
    )


def _relative(worker: compute.Worker, best: compute.Worker) -> float:
    """How fast a worker is beside the best one at what it does best."""
    at = best.matrix.flops
    ratios = [
        float(np.max(best.matrix.time(at) / np.maximum(worker.matrix.time(at), 1e-300))),
        worker.vector_rate / best.vector_rate,
        worker.bandwidth_bytes_per_s / best.bandwidth_bytes_per_s,
    ]
    if worker.call_s > 0:
        ratios.append(best.call_s / worker.call_s)
    if worker.matrix.ramp_s > 0:
        ratios.append(best.matrix.ramp_s / worker.matrix.ramp_s)
    return max(ratios) * best.slowdown / worker.slowdown
