"""Devices of unequal speed: how fast each computes, and shares in proportion to that."""

import numpy as np

from tutti.config.cluster import ClusterSpec
from tutti.config.model import ModelSpec
from tutti.config.vocabulary import Precision
from tutti.cost_model import compute
from tutti.cost_model.placement import Seat, place
from tutti.cost_model.table import model_table
from tutti.cost_model.worker import worker_at
from tutti.planner.tables import Array

ROUNDS = 4
"""How often shares are found anew for the speeds that devices have at them: what a rank reads whatever its share is,
its weights, weighs more in a small one."""


def speeds(model: ModelSpec, seats: tuple[Seat, ...], precision: Precision, loads: Array) -> Array:
    """Samples a second of the whole model on every rank, relative to the fastest, where rank r computes `loads[r]`."""
    table, modules = model_table(model).ops, len(model.modules)
    found, known, first = np.ones(len(loads)), {}, 0
    for seat in seats:
        worker = worker_at(seat, model.dtype, precision)
        own = np.maximum(1, np.round(loads[first : first + seat.ranks])).astype(np.int64)
        for count in np.unique(own).tolist():
            key = (seat.device.name, seat.sharing, seat.threads, count)
            if key not in known:
                passes = (compute.forward, compute.backward)
                whole = sum(float(one(table, worker, count, modules).seconds.sum()) for one in passes)
                known[key] = count / whole if whole > 0 else 1.0
            found[first : first + seat.ranks][own == count] = known[key]
        first += seat.ranks
    return np.asarray(found / found.max(), dtype=np.float64)


def proportional_shares(
    model: ModelSpec, cluster: ClusterSpec, ranks: int, precision: Precision, samples: int
) -> tuple[float, ...]:
    """A share for each rank such that all finish together, the fastest's 1; empty where all ranks are alike.

    `samples`: of one slice.
    """
    seats, loads = place(cluster, ranks), np.full(ranks, samples / ranks)
    for _ in range(ROUNDS):
        rates = speeds(model, seats, precision, loads)
        loads = rates / rates.sum() * samples
    return listed(loads)


def listed(loads: Array) -> tuple[float, ...]:
    """Loads as the shares of a plan: relative to the largest, in thousandths; empty where all are equal."""
    shares = tuple(round(float(load), 3) for load in loads / loads.max())
    return shares if min(shares) < 1 else ()
