"""Consistency modes: how far replicas may differ between the moments at which they are brought together.

An entry is the part of a mode that needs no torch: its name in plans, its parameters, and what the cost model needs.
The part that needs torch is a factory, imported when a run starts. A mode of another package calls
`register_consistency_mode`:

    register_consistency_mode(
        ConsistencyMode(
            name="averaged-twice",
            parameters={"period": Parameter(allowed=lambda period: period >= 1, requirement="1 or more")},
            traffic=ReplicaTraffic(sent_vectors=lambda p: 4 * (p - 1) / p, pattern="all-reduce", passes=lambda p: 12.0),
            make="my_package.averaged_twice:make",
        )
    )

The papers that the modes follow are listed in docs/consistency.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any, Final, Literal

from tutti.config.registry import REQUIRED, Parameter, Registry, Value
from tutti.errors import PlanError

OptimizerStateRule = Literal["own", "averaged", "corrected"]
"""What happens to the optimizer state where replicas are averaged.

- own: each replica keeps its own.
- averaged: it is averaged too.
- corrected: each replica keeps its own, with second moments reduced by the noise that comes from computing on a part of
  the batch.
"""

TrafficPattern = Literal[
    "all-reduce", "neighbours", "other-half", "exponential", "adasum", "parameter-servers", "pairs", "none"
]
"""Who sends to whom in one exchange.

- all-reduce: all replicas to all.
- neighbours: each replica to both neighbours on a ring.
- other-half: to a partner in the other half of the replicas.
- exponential: to a replica at distance 1, 2, 4, ... in turn.
- adasum: Adasum's recursive doubling.
- parameter-servers: parts of a change to the ranks that serve them, and parameters back.
- pairs: two replicas at a time, while others compute.
- none: nobody sends.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTraffic:
    """What an exchange between replicas costs, in vectors of the size of the trained parameters.

    Attributes:
        sent_vectors: (replicas) -> vectors that one replica sends in an exchange.
        pattern: who sends to whom, from which the cost model derives the time.
        overlapped: the exchange runs behind the forward and backward passes of the next step.
        skipped_when_late: an exchange that has not ended by then is not waited for, so fewer exchanges are made.
        passes: (replicas) -> additional reads and writes of a vector in memory, counted in the code.
        held: vectors kept between steps.
        transient: additional vectors during an exchange.
    """

    sent_vectors: Callable[[int], float]
    pattern: TrafficPattern
    overlapped: bool = False
    skipped_when_late: bool = False
    passes: Callable[[int], float]
    held: int = 0
    transient: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsistencyMode:
    """One mode.

    Attributes:
        name: the mode's name in plan files and on the command line.
        summary: what replicas do, in a few words.
        parameters: parameters by name, in the order in which the command line takes unnamed values.
        traffic: what an exchange costs; None where replicas never differ.
        asynchronous: ranks do not wait for each other in every step, and know only their own loss.
        compresses_changes: replicas reduce their changes, which a codec may compress.
        never_exchanges: no exchange is made before training ends.
        pairs_of_replicas: the mode needs an even number of replicas.
        shares_memory: replicas must be CPU ranks of one host.
        make: (ReplicaGroup, ModeArguments) -> Consistency, or "module:function" of it; None for synchronous training.
    """

    name: str
    summary: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    traffic: ReplicaTraffic | None = None
    asynchronous: bool = False
    compresses_changes: bool = False
    never_exchanges: bool = False
    pairs_of_replicas: bool = False
    shares_memory: bool = False
    make: str | Callable[..., Any] | None = None


CONSISTENCY_MODES: Registry[ConsistencyMode] = Registry("mode", "sync.mode")
"""Every mode that a plan may name."""


def register_consistency_mode(mode: ConsistencyMode) -> ConsistencyMode:
    """Make a mode known to plans, the command line, predictions and runs.

    Returns:
        The mode.

    Raises:
        PlanError: a mode of that name is already registered.
    """
    return CONSISTENCY_MODES.register(mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxed:
    """Parameters of a mode in which replicas differ; None stands for the mode's default.

    Attributes:
        period: updates between two exchanges.
        after: number of synchronous updates at the start.
        outer_rate: learning rate of DiLoCo's outer optimizer.
        outer_momentum: momentum of DiLoCo's outer optimizer.
        pull: how far the centre of elastic averaging moves towards the mean of the replicas, 0 to 1. A replica moves
            the fraction pull / replicas of its distance to the centre.
        optimizer_state: what happens to the optimizer state.
        bound: updates that a replica may be ahead of the slowest when it begins the next one.
        delay: updates between the beginning and the end of an average, at most the period; with 0 replicas wait for it.
        options: parameters of modes that other packages register.

    Raises:
        PlanError: a value is not allowed in any mode.
    """

    period: int | None = None
    after: int | None = None
    outer_rate: float | None = None
    outer_momentum: float | None = None
    pull: float | None = None
    optimizer_state: OptimizerStateRule | None = None
    bound: int | None = None
    delay: int | None = None
    options: dict[str, Value] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name, value in self.stated().items():
            if name in _PARAMETERS:
                _PARAMETERS[name].check(f"sync.relaxed.{name}", value)

    def stated(self) -> dict[str, Any]:
        """Return the parameters that were given."""
        given = {name: getattr(self, name) for name in _FIELDS if getattr(self, name) is not None}
        return {**given, **self.options}


_FIELDS: Final = tuple(part.name for part in fields(Relaxed) if part.name != "options")


def check_mode_parameters(mode: str, relaxed: Relaxed) -> None:
    """Check that a mode exists and has the parameters that are given.

    Args:
        mode: name of the mode.
        relaxed: the parameters.

    Raises:
        PlanError: the mode is unknown, a parameter is unknown to it or missing, or two parameters contradict each
            other.
    """
    known = CONSISTENCY_MODES[mode].parameters
    for name, value in relaxed.stated().items():
        if name not in known:
            has = f"has {', '.join(known)}" if known else "has no parameters"
            raise PlanError(f'sync.relaxed.{name} = {value} with sync.mode = "{mode}", which {has}; leave it out')
        known[name].check(f"sync.relaxed.{name}", value)
    for name, parameter in known.items():
        if parameter.default is REQUIRED and name not in relaxed.stated():
            raise PlanError(f'sync.mode = "{mode}" needs sync.relaxed.{name}; give a number of updates')
    if relaxed.delay and relaxed.period is not None and relaxed.delay > relaxed.period:
        raise PlanError(
            f"sync.relaxed.delay = {relaxed.delay} with period = {relaxed.period}: the next average would begin before "
            f"the last one ends; give at most {relaxed.period}"
        )
    if relaxed.delay and relaxed.optimizer_state == "averaged":
        raise PlanError(
            f'sync.relaxed.delay = {relaxed.delay} with optimizer_state = "averaged": only parameters can be averaged '
            "while replicas continue; leave one of them out"
        )


def with_mode_defaults(mode: str, relaxed: Relaxed) -> Relaxed:
    """Return the parameters, with the mode's defaults for those that were not given."""
    defaults = {name: parameter.default for name, parameter in CONSISTENCY_MODES[mode].parameters.items()}
    values: dict[str, Any] = {**defaults, **relaxed.stated()}
    options = {name: value for name, value in values.items() if name not in _FIELDS}
    return Relaxed(**{name: value for name, value in values.items() if name in _FIELDS}, options=options)


def ring_share(replicas: int) -> float:
    """Return how many vectors each replica sends in a ring all-reduce of one vector (Patarasu and Yuan 2009)."""
    return 2 * (replicas - 1) / replicas


def ring_neighbours(replicas: int) -> int:
    """Return how many neighbours a replica has on a ring: of two replicas, each is the other's only neighbour."""
    return min(2, replicas - 1)


def doubling_distances(replicas: int) -> list[int]:
    """Return the powers of two below `replicas`: 1, 2, 4, ..."""
    return [1 << power for power in range((replicas - 1).bit_length())]


def adasum_distances(replicas: int) -> list[int]:
    """Return the distance of each round of Adasum for a replica that takes part in all rounds.

    Beyond a power of two there is one more round before and one after the recursive doubling.
    """
    whole = 1 << (replicas.bit_length() - 1)
    return [*doubling_distances(whole), *([whole] * 2 if replicas > whole else [])]


def _adasum_sent(replicas: int) -> float:
    whole = 1 << (replicas.bit_length() - 1)
    return float(len(doubling_distances(whole)) + (replicas > whole))


def _pairs_sent(replicas: int) -> float:
    """Vectors that the busiest replica of AD-PSGD sends in an exchange.

    Replicas of even number ask once. The others answer as often as they are asked: with an odd number of replicas, more
    than once.
    """
    return max(1.0, -(-replicas // 2) / max(replicas // 2, 1))


def _number_of_updates(least: int, default: int | None) -> Parameter:
    return Parameter(
        default=default,
        allowed=lambda count: count >= least,
        requirement=f"give a number of updates of {least} or more",
    )


_EVERY: Final = _number_of_updates(1, 1)
_OPTIMIZER_STATE: Final = Parameter(default="own")
_DELAY: Final = _number_of_updates(0, 0)

_PARAMETERS: Final = {
    "period": _number_of_updates(1, REQUIRED),
    "after": _number_of_updates(0, REQUIRED),
    "outer_rate": Parameter(  # DiLoCo (Douillard et al. 2023, arXiv 2311.08105)
        default=0.7, allowed=lambda rate: isfinite(rate) and rate > 0, requirement="give a number above 0, such as 0.7"
    ),
    "outer_momentum": Parameter(
        default=0.9, allowed=lambda momentum: 0 <= momentum < 1, requirement="give a number of 0 or more, below 1"
    ),
    "pull": Parameter(  # EASGD (Zhang et al. 2015, arXiv 1412.6651): beta = 0.9
        default=0.9,
        allowed=lambda pull: 0 < pull <= 1,
        requirement="give a number above 0 and at most 1, such as 0.9",
    ),
    "bound": _number_of_updates(0, REQUIRED),
    "delay": _DELAY,
}
"""What is allowed for each field of `Relaxed`, in any mode."""

_AVERAGE: Final = ReplicaTraffic(sent_vectors=ring_share, pattern="all-reduce", passes=lambda p: 6.0, transient=1)
_SERVERS: Final = ReplicaTraffic(sent_vectors=ring_share, pattern="parameter-servers", passes=lambda p: 14.0, held=2)
_NONE: Final = ReplicaTraffic(sent_vectors=lambda p: 0.0, pattern="none", passes=lambda p: 0.0, transient=0)

_ENTRIES: Final = (
    ConsistencyMode(name="synchronous", summary="gradients are reduced in every step: replicas never differ"),
    ConsistencyMode(
        name="local",
        summary="parameters are averaged every so often (local SGD)",
        parameters={"period": _PARAMETERS["period"], "optimizer_state": _OPTIMIZER_STATE, "delay": _DELAY},
        traffic=_AVERAGE,
        compresses_changes=True,
        make="tutti.local_sgd.averaging:make_local_sgd",
    ),
    ConsistencyMode(
        name="post-local",
        summary="synchronous first, then local",
        parameters={
            "period": _PARAMETERS["period"],
            "after": _PARAMETERS["after"],
            "optimizer_state": _OPTIMIZER_STATE,
            "delay": _DELAY,
        },
        traffic=_AVERAGE,
        compresses_changes=True,
        make="tutti.local_sgd.averaging:make_local_sgd",
    ),
    ConsistencyMode(
        name="one-shot",
        summary="parameters are averaged once, at the end",
        traffic=_AVERAGE,
        never_exchanges=True,
        make="tutti.local_sgd.averaging:make_local_sgd",
    ),
    ConsistencyMode(
        name="diloco",
        summary="an outer optimizer uses the averaged change as its gradient",
        parameters={name: _PARAMETERS[name] for name in ("period", "outer_rate", "outer_momentum")},
        traffic=ReplicaTraffic(
            sent_vectors=ring_share, pattern="all-reduce", passes=lambda p: 10.0, held=2, transient=1
        ),
        compresses_changes=True,
        make="tutti.local_sgd.averaging:make_diloco",
    ),
    ConsistencyMode(
        name="adasum",
        summary="changes are added as far as they are orthogonal and averaged as far as they are parallel",
        parameters={"period": _EVERY},
        traffic=ReplicaTraffic(
            sent_vectors=_adasum_sent,
            pattern="adasum",
            passes=lambda p: 12.0 + 25.0 * len(adasum_distances(p)),
            held=1,
            transient=4,
        ),
        make="tutti.local_sgd.adasum:make_adasum",
    ),
    ConsistencyMode(
        name="ring",
        summary="parameters are mixed with both neighbours on a ring (D-PSGD)",
        parameters={"period": _EVERY},
        traffic=ReplicaTraffic(
            sent_vectors=ring_neighbours,
            pattern="neighbours",
            overlapped=True,
            passes=lambda p: 6.0 + 6.0 * ring_neighbours(p),
            held=3,
        ),
        make="tutti.local_sgd.mixing:make_ring",
    ),
    ConsistencyMode(
        name="shift-one",
        summary="parameters are mixed with a partner that changes",
        parameters={"period": _EVERY},
        traffic=ReplicaTraffic(
            sent_vectors=lambda p: 1.0, pattern="other-half", overlapped=True, passes=lambda p: 12.0, held=2
        ),
        pairs_of_replicas=True,
        make="tutti.local_sgd.mixing:make_shift_one",
    ),
    ConsistencyMode(
        name="push",
        summary="parameters are pushed along an exponential graph (stochastic gradient push)",
        parameters={"period": _EVERY},
        traffic=ReplicaTraffic(
            sent_vectors=lambda p: 1.0, pattern="exponential", passes=lambda p: 18.0, held=1, transient=3
        ),
        make="tutti.local_sgd.mixing:make_push",
    ),
    ConsistencyMode(
        name="elastic",
        summary="replicas are drawn to a centre, and the centre to them (EASGD)",
        parameters={"period": _EVERY, "pull": _PARAMETERS["pull"]},
        traffic=ReplicaTraffic(
            sent_vectors=ring_share, pattern="all-reduce", overlapped=True, passes=lambda p: 19.0, held=3
        ),
        make="tutti.local_sgd.mixing:make_elastic",
    ),
    ConsistencyMode(
        name="stale",
        summary="ranks serve parts of the parameters; no rank may be further ahead than a bound",
        parameters={"bound": _PARAMETERS["bound"]},
        traffic=_SERVERS,
        asynchronous=True,
        make="tutti.async_sgd.parameter_servers:make_stale",
    ),
    ConsistencyMode(
        name="asynchronous",
        summary="ranks serve parts of the parameters; stale updates count less",
        traffic=_SERVERS,
        asynchronous=True,
        make="tutti.async_sgd.parameter_servers:make_asynchronous",
    ),
    ConsistencyMode(
        name="ad-psgd",
        summary="pairs of replicas are averaged while others compute (AD-PSGD)",
        traffic=ReplicaTraffic(
            sent_vectors=_pairs_sent,
            pattern="pairs",
            overlapped=True,
            skipped_when_late=True,
            passes=lambda p: 41.0,
            held=2,
            transient=7,
        ),
        asynchronous=True,
        make="tutti.async_sgd.ad_psgd:make_ad_psgd",
    ),
    ConsistencyMode(
        name="hogwild",
        summary="the ranks of one host update shared parameters without locks",
        traffic=_NONE,
        asynchronous=True,
        shares_memory=True,
        make="tutti.async_sgd.hogwild:make_hogwild",
    ),
    ConsistencyMode(
        name="ensemble",
        summary="members train independently; their predictions are averaged",
        traffic=_NONE,
        asynchronous=True,
        never_exchanges=True,
        make="tutti.async_sgd.ensemble:make_ensemble",
    ),
)

for _entry in _ENTRIES:
    register_consistency_mode(_entry)
