"""Latency and bandwidth of the links between ranks, from real collectives and messages of several sizes."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tutti.describe.probe import timing
from tutti.describe.probe.effort import Effort
from tutti.describe.probe.fit import Transfer, fit_link
from tutti.spec.cluster import LinkPoint, LinkSpec, LinkTier

_ITEM_NBYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Party:
    """The ranks that share a tier of links, as one of them sees them. `ranks`: their numbers in the whole world."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    device: torch.device
    backend: str

    @property
    def position(self) -> int:
        return self.ranks.index(dist.get_rank())

    def largest(self, values: Sequence[float]) -> list[float]:
        """Element by element the largest value of all ranks: what all of them go by."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return [float(value) for value in tensor.tolist()]


def measure(party: Party, tier: LinkTier, effort: Effort, where: str) -> tuple[LinkSpec, ...]:
    """The tier's links: fitted to all-reduces of all its ranks first, then to messages between the first two.

    Called by every rank of `party`. `where`: in words, which hosts.
    """
    return (
        _link(party, tier, effort, "all_reduce", f"all-reduce of {len(party.ranks)} ranks {where}, ring formula"),
        _link(party, tier, effort, "send", f"half a round trip between two ranks {where}"),
    )


def _link(party: Party, tier: LinkTier, effort: Effort, transfer: Transfer, what: str) -> LinkSpec:
    points = _points(party, effort, _all_reduce if transfer == "all_reduce" else _round_trip)
    ranks = len(party.ranks) if transfer == "all_reduce" else 2
    if transfer == "send":
        points = tuple(LinkPoint(nbytes=point.nbytes, time_s=point.time_s / 2) for point in points)
    fitted = fit_link(points, transfer=transfer, ranks=ranks)
    return LinkSpec(
        tier=tier,
        latency_s=fitted.latency_s,
        bandwidth_bytes_per_s=fitted.bandwidth_bytes_per_s,
        backend=party.backend,
        residual=fitted.residual,
        ranks=ranks,
        fitted_to=transfer,
        points=points,
        source=f"tutti probe: {what}",
        evidence="measured",
    )


def _points(
    party: Party, effort: Effort, transfer: Callable[[Party, torch.Tensor], Callable[[], object]]
) -> tuple[LinkPoint, ...]:
    """Median times by size, the slowest rank's. Sizes predicted to exceed the budget are left out, never the first
    two. Every rank takes the same decisions, because they rest on agreed times."""
    points: list[LinkPoint] = []
    for nbytes in effort.link_nbytes:
        if len(points) > 1:
            last = points[-1]
            if last.time_s * nbytes / last.nbytes > effort.link_budget_s:
                break
        tensor = torch.zeros(nbytes // _ITEM_NBYTES, dtype=torch.float32, device=party.device)
        call = transfer(party, tensor)
        call()  # connections are made, memory is touched
        estimate = max(party.largest([timing.once(call, party.device)])[0], 1e-7)
        inner = max(1, min(50, int(timing.SAMPLE_S / estimate)))
        sample = estimate * inner
        repeats = max(2, min(effort.link_repeats, int(effort.link_budget_s / sample)), timing.cheap_samples(sample))
        samples = [timing.once(lambda: _in_a_row(call, inner), party.device) / inner for _ in range(repeats)]  # noqa: B023
        points.append(LinkPoint(nbytes=nbytes, time_s=statistics.median(party.largest(samples))))
    return tuple(points)


def _in_a_row(call: Callable[[], object], count: int) -> None:
    for _ in range(count):
        call()


def _all_reduce(party: Party, tensor: torch.Tensor) -> Callable[[], object]:
    return lambda: dist.all_reduce(tensor, group=party.group)


def _round_trip(party: Party, tensor: torch.Tensor) -> Callable[[], object]:
    """A message from the first rank to the second and back; the others do nothing."""
    first, second = party.ranks[:2]

    def there() -> None:
        dist.send(tensor, second, group=party.group)
        dist.recv(tensor, second, group=party.group)

    def back() -> None:
        dist.recv(tensor, first, group=party.group)
        dist.send(tensor, first, group=party.group)

    return (there, back, lambda: None)[min(party.position, 2)]
