"""Shares for devices of unequal speed: in proportion to how fast each computes."""

from tutti.predict import compute
from tutti.predict.placement import place
from tutti.spec.cluster import ClusterSpec
from tutti.spec.model import ModelSpec
from tutti.spec.words import Precision


def proportional_shares(
    model: ModelSpec, cluster: ClusterSpec, ranks: int, precision: Precision, samples: int
) -> tuple[float, ...]:
    """A share for each rank such that all finish together; empty where all ranks are alike.

    `samples`: of one slice. The speed of a rank is samples a second at an equal share; the fastest gets share 1.
    """
    seats = place(cluster, ranks)
    count = max(1, samples // ranks)
    table, modules = compute.op_table(model), len(model.modules)
    speeds: list[float] = []
    for seat in seats:
        worker = compute.worker(seat, model.dtype, precision)
        seconds = (
            compute.forward(table, worker, count, modules).seconds.sum()
            + compute.backward(table, worker, count, modules).seconds.sum()
        )
        speeds += [count / float(seconds) if seconds > 0 else 1.0] * seat.ranks
    fastest = max(speeds)
    shares = tuple(round(speed / fastest, 3) for speed in speeds)
    return shares if min(shares) < 1 else ()
