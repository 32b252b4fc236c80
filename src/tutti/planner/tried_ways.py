"""A way to send less, costed: what it is counted with, and how far its prediction may be wrong in its favour."""

from dataclasses import dataclass, replace

from tutti.config.cluster import ClusterSpec, scale_bandwidth
from tutti.config.vocabulary import Evidence
from tutti.cost_model.compressed import slowed
from tutti.cost_model.placement import place
from tutti.planner.choice import Totals
from tutti.planner.explore import Costed
from tutti.planner.ways import WORTH, WORTH_IN_TURNS, Way


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A plan that goes a way, counted with `samples` times the samples of exact training; `counted`: the objective's
    value with them."""

    way: Way
    one: Costed
    samples: float
    evidence: Evidence
    totals: Totals

    @property
    def counted(self) -> float:
        return self.one.value * self.samples

    @property
    def worth(self) -> float:
        """The part by which it must beat exact sums."""
        if self.way.dial == "exact":
            return 0.0
        if self.way.compress is None:
            return WORTH  # it computes nothing more than exact sums do
        seats = place(self.one.cluster, self.one.plan.world_size)
        in_turns = any(seat.slowdown > 1 for seat in seats)
        return WORTH + (WORTH_IN_TURNS - WORTH) / (self.way.relaxed.period or 1) if in_turns else WORTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """How far a prediction may be wrong in a way's favour: links so many times faster, its kernels so many slower."""

    links: float
    kernels: float

    def of(self, cluster: ClusterSpec) -> ClusterSpec:
        """The cluster where both are so."""
        devices = {name: slowed(device, self.kernels) for name, device in cluster.devices.items()}
        return replace(cluster, devices=devices).relinked(
            lambda link: replace(scale_bandwidth(link, self.links), latency_s=link.latency_s / self.links)
        )
