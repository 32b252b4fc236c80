"""The mode that a plan says, made."""

from collections.abc import Callable

from tutti.runtime.consistency.adasum import Adasum
from tutti.runtime.consistency.average import NEVER, Averaged, DiLoCo
from tutti.runtime.consistency.elastic import Elastic
from tutti.runtime.consistency.ensemble import Ensemble
from tutti.runtime.consistency.gossip import Mixed, Push, one_peer, ring, shift_one
from tutti.runtime.consistency.hogwild import Hogwild
from tutti.runtime.consistency.mode import Consistency
from tutti.runtime.consistency.pairs import Pairs
from tutti.runtime.consistency.servers import Servers
from tutti.runtime.consistency.vectors import Replicas
from tutti.runtime.consistency.wire import Wire
from tutti.runtime.consistency.zero_one import ZeroOneApart
from tutti.runtime.layout import Layout
from tutti.spec.compression import ZERO_ONE
from tutti.spec.plan import Sync
from tutti.spec.relaxed import Relaxed, settled
from tutti.spec.words import SyncMode


def make_consistency(sync: Sync, layout: Layout, seed: int = 0) -> Consistency:
    """What `sync` says, among the ranks along `replicate`. `seed`: of what a mode draws. Collective."""
    make = _MODES.get(sync.mode)
    lane, figures = layout.lane("parameters", "replicate"), layout.lane("scalars", "replicate")
    if sync.compress is not None and sync.compress.method == ZERO_ONE:
        return ZeroOneApart(Replicas.of(layout.mesh, lane, figures), sync.compress)
    if make is None:
        return Consistency()
    return make(Replicas.of(layout.mesh, lane, figures), settled(sync.mode, sync.relaxed), seed)


def _averaged(replicas: Replicas, told: Relaxed, seed: int) -> Consistency:
    states = told.optimizer_state == "averaged"
    return Averaged(replicas, told.period or NEVER, after=told.after or 0, states=states)


def _diloco(replicas: Replicas, told: Relaxed, seed: int) -> Consistency:
    assert told.outer_rate is not None
    assert told.outer_momentum is not None
    return DiLoCo(replicas, _period(told), rate=told.outer_rate, momentum=told.outer_momentum)


def _elastic(replicas: Replicas, told: Relaxed, seed: int) -> Consistency:
    assert told.pull is not None
    return Elastic(replicas, _period(told), told.pull)


def _period(told: Relaxed) -> int:
    assert told.period is not None
    return told.period


_MODES: dict[SyncMode, Callable[[Replicas, Relaxed, int], Consistency]] = {
    "local": _averaged,
    "post-local": _averaged,
    "one-shot": _averaged,
    "diloco": _diloco,
    "adasum": lambda replicas, told, seed: Adasum(replicas, _period(told)),
    "ring": lambda replicas, told, seed: Mixed(replicas, _period(told), ring),
    "shift-one": lambda replicas, told, seed: Mixed(replicas, _period(told), shift_one),
    "push": lambda replicas, told, seed: Push(replicas, _period(told), one_peer),
    "elastic": _elastic,
    "stale": lambda replicas, told, seed: Servers(replicas, Wire(replicas), "stale", told.bound),
    "asynchronous": lambda replicas, told, seed: Servers(replicas, Wire(replicas), "asynchronous", None),
    "ad-psgd": lambda replicas, told, seed: Pairs(replicas, Wire(replicas), seed),
    "hogwild": lambda replicas, told, seed: Hogwild(replicas),
    "ensemble": lambda replicas, told, seed: Ensemble(replicas),
}
