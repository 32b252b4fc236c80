"""Hogwild: the ranks of one host train one model in memory that they share, without locks (Niu et al. 2011, arXiv
1106.5730).

Parameters are the same memory on all ranks from the start, the optimizers' state from the moment at which every rank
has made its first update. A replica's learning rate is divided by the replicas: each of them makes its own update for
every global batch, and together they go as far as one.
"""

import os
import select
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from tutti.comm.shared_segment import SharedSegment, attach_segment, host_identity
from tutti.errors import PlanError
from tutti.local_sgd.alone import Alone
from tutti.local_sgd.states import average_states
from tutti.local_sgd.vectors import Flats, Replicas
from tutti.local_sgd.wire import ended
from tutti.trainer.run_state import Run

_LINE = 64
"""Bytes at whose multiples tensors begin."""

_REMEDY = 'use ranks of one host that run as one user, or sync.mode = "asynchronous"'


class Hogwild(Alone):
    """All ranks write to one x. `counted`: updates that each rank has made, which all see; `leaves`: who ended well."""

    def __init__(self, replicas: Replicas) -> None:
        super().__init__(replicas)
        self.pace = 1 / replicas.size
        self.counts["rounds"] = 0
        self._rooms: list[SharedSegment] = []
        self._handles: dict[int, int] = {}
        self._seen = 0
        self._shared: dict[int, torch.Tensor] = {}
        self.counted = self.leaves = torch.zeros(0, dtype=torch.int64)

    def begin(self, run: Run) -> None:
        self._check_host(run)
        super().begin(run)
        self._share(list(run.model.parameters()), run)
        self._take(run)
        table = torch.zeros(2, self.replicas.size, dtype=torch.int64)
        self._share([table], run)
        self.counted, self.leaves = table

    def restart(self) -> None:
        pass

    def exchange(self, run: Run) -> None:
        index = self.replicas.index
        self.counted[index] += 1
        total = self._of_others()
        self.staleness, self._seen = total - self._seen, total
        if not self.counts["rounds"]:
            with self.still(run):
                pass
        self.counts["rounds"] += 1
        self._watch()

    def ending(self) -> Flats:
        return self.vectors.read()

    @contextmanager
    def still(self, run: Run) -> Iterator[None]:
        self.meet()
        self._share_states(run)
        self._seen = self._of_others()
        yield
        self.meet()

    def resumed(self, run: Run, tensors: dict[str, torch.Tensor]) -> None:
        super().resumed(run, tensors)
        self._share_states(run)

    def left(self, run: Run) -> None:
        if self.leaves.numel():
            self.leaves[self.replicas.index] = 1
        while self._handles:
            os.close(self._handles.popitem()[1])

    def _of_others(self) -> int:
        """Updates that the other replicas have made."""
        return int(self.counted.sum()) - int(self.counted[self.replicas.index])

    def _check_host(self, run: Run) -> None:
        """Raise PlanError, on all ranks, where they cannot share memory."""
        if self.replicas.size == 1:
            return
        if run.world.device.type != "cpu":
            kind = run.world.device.type
            raise PlanError(f'sync.mode = "hogwild" with {kind} devices: their memory is their own; {_REMEDY}')
        hosts = run.world.gather(host_identity())
        if "" in hosts or len(set(hosts)) > 1:
            raise PlanError(f'sync.mode = "hogwild" on several hosts: they have no memory in common; {_REMEDY}')

    def _share(self, tensors: list[torch.Tensor], run: Run) -> None:
        """Put tensors, alike on all ranks, into memory of replica 0. Collective; replica 0's values count."""
        if self.replicas.size == 1 or not tensors:
            return
        places, nbytes = [], 0
        for tensor in tensors:
            places.append(nbytes)
            nbytes += -(-tensor.numel() * tensor.element_size() // _LINE) * _LINE
        room = SharedSegment(nbytes) if self.replicas.index == 0 else None
        table = run.world.gather((os.getpid(), room.file if room is not None else -1))
        self._handles = self._handles or {
            peer: os.pidfd_open(process) for peer, (process, _) in enumerate(table) if peer != self.replicas.index
        }
        if room is not None:
            self._rooms.append(room)
        memory = room.memory if room is not None else None
        with suppress(OSError):
            memory = memory or attach_segment(*table[0], nbytes)
        seen = all(run.world.gather(memory is not None))
        if memory is None or not seen:
            raise PlanError(f'sync.mode = "hogwild": a rank may not see the memory of another; {_REMEDY}')
        for tensor, place in zip(tensors, places, strict=True):
            if not tensor.numel():
                continue
            flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=place)
            view = flat.as_strided(tensor.shape, torch.empty_like(tensor).stride())
            if room is not None:
                view.copy_(tensor.detach())
            tensor.data = view
        self.meet()

    def _share_states(self, run: Run) -> None:
        """Optimizers' state that all ranks have and that is not shared yet begins as the mean, and is shared."""
        mine = {}
        for number, names in run.layout.state_names(run.model, run.optimizers).items():
            for parameter, name in names.items():
                for key, value in run.optimizers[number].state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor) and value.is_floating_point() and id(value) not in self._shared:
                        mine[f"optimizer-{number}/{name}/{key}"] = value
        everyone = run.world.gather([(name, tuple(value.shape), value.dtype) for name, value in mine.items()])
        common = set(everyone[0]).intersection(*everyone[1:])
        tensors = [mine[one[0]] for one in everyone[0] if one in common]
        if not tensors:
            return
        if not self._shared:
            average_states(run, self.replicas)
        self._share(tensors, run)
        self._shared.update((id(one), one) for one in tensors)

    def _watch(self) -> None:
        """Raise TrainingError if another rank's process has ended, and not well."""
        poll = select.poll()
        for handle in self._handles.values():
            poll.register(handle, select.POLLIN)
        over = {handle for handle, _ in poll.poll(0)}
        for peer, handle in self._handles.items():
            if handle in over and not int(self.leaves[peer]):
                raise ended("hogwild", self.replicas.ranks[peer])
