"""Devices of unequal speed: how fast each computes, and shares in proportion to that."""

import numpy as np

from tutti.plan.tables import Array
from tutti.predict import compute
from tutti.predict.placement import Seat, place
from tutti.predict.table import model_table
from tutti.spec.cluster import ClusterSpec
from tutti.spec.model import ModelSpec
from tutti.spec.words import Precision


def speeds(model: ModelSpec, seats: tuple[Seat, ...], precision: Precision, samples: int) -> Array:
    """How fast every rank computes the whole model on so many samples, relative to the fastest."""
    found: list[float] = []
    known: dict[object, float] = {}
    table, modules = model_table(model).ops, len(model.modules)
    for seat in seats:
        key = (seat.device.name, seat.sharing, seat.threads)
        if key not in known:
            worker = compute.worker(seat, model.dtype, precision)
            passes = (compute.forward, compute.backward)
            whole = sum(float(one(table, worker, samples, modules).seconds.sum()) for one in passes)
            known[key] = 1.0 / whole if whole > 0 else 1.0
        found += [known[key]] * seat.ranks
    rates = np.array(found)
    return np.asarray(rates / rates.max(), dtype=np.float64)


def proportional_shares(
    model: ModelSpec, cluster: ClusterSpec, ranks: int, precision: Precision, samples: int
) -> tuple[float, ...]:
    """A share for each rank such that all finish together, the fastest's 1; empty where all ranks are alike.

    `samples`: of one slice. Speeds are those at an equal share.
    """
    return listed(speeds(model, place(cluster, ranks), precision, max(1, samples // ranks)))


def listed(loads: Array) -> tuple[float, ...]:
    """Loads as the shares of a plan: relative to the largest, in thousandths; empty where all are equal."""
    shares = tuple(round(float(load), 3) for load in loads / loads.max())
    return shares if min(shares) < 1 else ()
