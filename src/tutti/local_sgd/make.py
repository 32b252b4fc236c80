"""The mode that a plan says, made."""

from collections.abc import Callable
from typing import NamedTuple

from tutti.config.compression import ZERO_ONE, Compression
from tutti.config.plan import SyncPlan
from tutti.config.relaxed import Relaxed, settled
from tutti.config.vocabulary import SyncMode
from tutti.local_sgd.adasum import Adasum
from tutti.local_sgd.average import NEVER, Averaged, DiLoCo
from tutti.local_sgd.delayed import Delayed
from tutti.local_sgd.elastic import Elastic
from tutti.local_sgd.ensemble import Ensemble
from tutti.local_sgd.gossip import Mixed, Push, one_peer, ring, shift_one
from tutti.local_sgd.hogwild import Hogwild
from tutti.local_sgd.mode import Consistency
from tutti.local_sgd.pairs import Pairs
from tutti.local_sgd.servers import Servers
from tutti.local_sgd.vectors import Replicas
from tutti.local_sgd.wire import Wire
from tutti.local_sgd.zero_one import ZeroOneApart
from tutti.parallel.layout import Layout


def make_consistency(sync: SyncPlan, layout: Layout, seed: int = 0) -> Consistency:
    """What `sync` says, among the ranks along `replicate`. `seed`: of what a mode draws. Collective."""
    make = _MODES.get(sync.mode)
    channel, figures = layout.channel("parameters", "replicate"), layout.channel("scalars", "replicate")
    if sync.compress is not None and sync.compress.method == ZERO_ONE:
        return ZeroOneApart(Replicas.of(layout.mesh, channel, figures), sync.compress)
    if make is None:
        return Consistency()
    return make(Replicas.of(layout.mesh, channel, figures), Told(settled(sync.mode, sync.relaxed), sync.compress, seed))


class Told(NamedTuple):
    """What a mode is told: its parameters, the code of what its replicas sum, and the seed of what it draws."""

    relaxed: Relaxed
    how: Compression | None
    seed: int

    @property
    def period(self) -> int:
        assert self.relaxed.period is not None
        return self.relaxed.period


def _averaged(replicas: Replicas, told: Told) -> Consistency:
    own, after = told.relaxed, told.relaxed.after or 0
    states, corrects = own.optimizer_state == "averaged", own.optimizer_state == "corrected"
    if own.delay:
        return Delayed(replicas, told.period, own.delay, after=after, corrects=corrects, how=told.how)
    return Averaged(replicas, own.period or NEVER, after=after, states=states, corrects=corrects, how=told.how)


def _diloco(replicas: Replicas, told: Told) -> Consistency:
    rate, momentum = told.relaxed.outer_rate, told.relaxed.outer_momentum
    assert rate is not None
    assert momentum is not None
    return DiLoCo(replicas, told.period, rate=rate, momentum=momentum, how=told.how)


def _elastic(replicas: Replicas, told: Told) -> Consistency:
    assert told.relaxed.pull is not None
    return Elastic(replicas, told.period, told.relaxed.pull)


_MODES: dict[SyncMode, Callable[[Replicas, Told], Consistency]] = {
    "local": _averaged,
    "post-local": _averaged,
    "one-shot": _averaged,
    "diloco": _diloco,
    "adasum": lambda replicas, told: Adasum(replicas, told.period),
    "ring": lambda replicas, told: Mixed(replicas, told.period, ring),
    "shift-one": lambda replicas, told: Mixed(replicas, told.period, shift_one),
    "push": lambda replicas, told: Push(replicas, told.period, one_peer),
    "elastic": _elastic,
    "stale": lambda replicas, told: Servers(replicas, Wire(replicas), "stale", told.relaxed.bound),
    "asynchronous": lambda replicas, told: Servers(replicas, Wire(replicas), "asynchronous", None),
    "ad-psgd": lambda replicas, told: Pairs(replicas, Wire(replicas), told.seed),
    "hogwild": lambda replicas, told: Hogwild(replicas),
    "ensemble": lambda replicas, told: Ensemble(replicas),
}
