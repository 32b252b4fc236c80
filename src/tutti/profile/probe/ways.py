"""The ways on which ranks exchange, as the probe times them: a sum over all, and a message there and back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tutti.comm import HostSum, Receiving, Sending, make_team

ITEM_NBYTES = 4


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


class Ways:
    """What is timed between the ranks of a party: through memory they share, where they do, or their process group."""

    def __init__(self, party: Party) -> None:
        self.party = party
        self.team = team = make_team(party.group)
        if team is not None:
            other = 1 - min(party.position, 1)
            self._sending, self._receiving = Sending(team, other), Receiving(team, other)

    def all_reduce(self, numel: int) -> Callable[[], object]:
        """Sum `numel` float32 values over all ranks, in place."""
        team, party = self.team, self.party
        if team is not None:
            room, _ = team.new_room(numel * ITEM_NBYTES)
            return lambda: HostSum(team, room, numel, torch.float32).wait()
        tensor = torch.zeros(numel, dtype=torch.float32, device=party.device)
        return lambda: dist.all_reduce(tensor, group=party.group)

    def round_trip(self, numel: int) -> Callable[[], object]:
        """A message of `numel` float32 values from the first rank to the second and back; the others do nothing."""
        tensor = torch.zeros(numel, dtype=torch.float32, device=self.party.device)
        first, second = self.party.ranks[:2]

        def send(rank: int) -> None:
            if self.team is not None:
                self._sending.send(tensor)
            else:
                dist.send(tensor, rank, group=self.party.group)

        def receive(rank: int) -> None:
            if self.team is not None:
                self._receiving.receive(tensor).wait()
            else:
                dist.recv(tensor, rank, group=self.party.group)

        def there() -> None:
            send(second)
            receive(second)

        def back() -> None:
            receive(first)
            send(first)

        return (there, back, lambda: None)[min(self.party.position, 2)]
