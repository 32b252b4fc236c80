"""Hogwild: the ranks of one host train one model in shared memory, without locks (Niu et al. 2011, arXiv 1106.5730).

Parameters are in shared memory from the start, and the optimizers' state once every rank has made its first update.
Each replica makes its own update for every global batch, so its learning rate is divided by the number of replicas:
together they move as far as one update would.
"""

import os
import select
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from tutti.async_sgd.asynchronous_replicas import AsynchronousReplicas, peer_ended_error
from tutti.comm.shared_segment import SharedSegment, attach_segment, host_identity
from tutti.errors import PlanError
from tutti.local_sgd.consistency import ModeArguments
from tutti.local_sgd.diverged_replicas import average_optimizer_states
from tutti.local_sgd.replica_group import FlatVectors, ReplicaGroup
from tutti.parallel.parallel_model import ParallelModel

_LINE = 64
"""Tensors begin at multiples of this many bytes, the size of a cache line."""

_REMEDY = 'use CPU ranks of one host that run as one user, or sync.mode = "asynchronous"'


class Hogwild(AsynchronousReplicas):
    """Replicas that all write to the same parameters.

    Args:
        replicas: the group.

    Attributes:
        counted: number of updates by each rank, in shared memory.
        leaves: nonzero for each rank that has ended without an error, in shared memory.
    """

    def __init__(self, replicas: ReplicaGroup) -> None:
        super().__init__(replicas)
        self.learning_rate_scale = 1 / replicas.size
        self.counts["rounds"] = 0
        self._rooms: list[SharedSegment] = []
        self._handles: dict[int, int] = {}
        self._seen = 0
        self._shared: dict[int, torch.Tensor] = {}
        self.counted = self.leaves = torch.zeros(0, dtype=torch.int64)

    def begin(self, parallel: ParallelModel, step: int) -> None:
        self._check_host(parallel)
        super().begin(parallel, step)
        self._share(list(parallel.model.parameters()), parallel)
        self._track_parameters(parallel)
        table = torch.zeros(2, self.replicas.size, dtype=torch.int64)
        self._share([table], parallel)
        self.counted, self.leaves = table

    def restart(self) -> None:
        pass

    def exchange(self, parallel: ParallelModel) -> None:
        index = self.replicas.index
        self.counted[index] += 1
        total = self._of_others()
        self.staleness, self._seen = total - self._seen, total
        if not self.counts["rounds"]:
            with self.quiesced(parallel):
                pass
        self.counts["rounds"] += 1
        self._watch()

    def final_parameters(self) -> FlatVectors:
        return self.vectors.read()

    @contextmanager
    def quiesced(self, parallel: ParallelModel) -> Iterator[None]:
        self.barrier()
        self._share_states(parallel)
        self._seen = self._of_others()
        yield
        self.barrier()

    def on_resumed(self, parallel: ParallelModel, tensors: dict[str, torch.Tensor]) -> None:
        super().on_resumed(parallel, tensors)
        self._share_states(parallel)

    def on_exit(self, parallel: ParallelModel) -> None:
        if self.leaves.numel():
            self.leaves[self.replicas.index] = 1
        while self._handles:
            os.close(self._handles.popitem()[1])

    def _of_others(self) -> int:
        """Return the number of updates that the other replicas have made."""
        return int(self.counted.sum()) - int(self.counted[self.replicas.index])

    def _check_host(self, parallel: ParallelModel) -> None:
        """Raise PlanError on all ranks if they cannot share memory."""
        if self.replicas.size == 1:
            return
        if parallel.world.device.type != "cpu":
            kind = parallel.world.device.type
            raise PlanError(f'sync.mode = "hogwild" on {kind} devices, which share no memory; {_REMEDY}')
        hosts = parallel.world.gather(host_identity())
        if "" in hosts or len(set(hosts)) > 1:
            raise PlanError(f'sync.mode = "hogwild" on several hosts, which share no memory; {_REMEDY}')

    def _share(self, tensors: list[torch.Tensor], parallel: ParallelModel) -> None:
        """Move tensors into memory of replica 0, whose values all ranks then have. Collective.

        The tensors must have the same shapes and dtypes on all ranks.
        """
        if self.replicas.size == 1 or not tensors:
            return
        places, nbytes = [], 0
        for tensor in tensors:
            places.append(nbytes)
            nbytes += -(-tensor.numel() * tensor.element_size() // _LINE) * _LINE
        segment = SharedSegment(nbytes) if self.replicas.index == 0 else None
        table = parallel.world.gather((os.getpid(), segment.file if segment is not None else -1))
        self._handles = self._handles or {
            peer: os.pidfd_open(process) for peer, (process, _) in enumerate(table) if peer != self.replicas.index
        }
        if segment is not None:
            self._rooms.append(segment)
        memory = segment.memory if segment is not None else None
        with suppress(OSError):
            memory = memory or attach_segment(*table[0], nbytes)
        seen = all(parallel.world.gather(memory is not None))
        if memory is None or not seen:
            raise PlanError(f'sync.mode = "hogwild", but some rank cannot open the memory of rank 0; {_REMEDY}')
        for tensor, place in zip(tensors, places, strict=True):
            if not tensor.numel():
                continue
            flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=place)
            view = flat.as_strided(tensor.shape, torch.empty_like(tensor).stride())
            if segment is not None:
                view.copy_(tensor.detach())
            tensor.data = view
        self.barrier()

    def _share_states(self, parallel: ParallelModel) -> None:
        """Share the optimizer state that all ranks have. Collective.

        The first time, the state is set to its mean over the ranks; state that appears later takes replica 0's values.
        """
        local_states = {}
        for number, names in parallel.layout.state_names(parallel.model, parallel.optimizers).items():
            for parameter, name in names.items():
                for key, value in parallel.optimizers[number].state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor) and value.is_floating_point() and id(value) not in self._shared:
                        local_states[f"optimizer-{number}/{name}/{key}"] = value
        everyone = parallel.world.gather(
            [(name, tuple(value.shape), value.dtype) for name, value in local_states.items()]
        )
        common = set(everyone[0]).intersection(*everyone[1:])
        tensors = [local_states[entry[0]] for entry in everyone[0] if entry in common]
        if not tensors:
            return
        if not self._shared:
            average_optimizer_states(parallel, self.replicas)
        self._share(tensors, parallel)
        self._shared.update((id(tensor), tensor) for tensor in tensors)

    def _watch(self) -> None:
        """Raise TrainingError if another rank's process has ended by an error."""
        poll = select.poll()
        for handle in self._handles.values():
            poll.register(handle, select.POLLIN)
        over = {handle for handle, _ in poll.poll(0)}
        for peer, handle in self._handles.items():
            if handle in over and not int(self.leaves[peer]):
                raise peer_ended_error("hogwild", self.replicas.ranks[peer])


def make_hogwild(replicas: ReplicaGroup, arguments: ModeArguments) -> Hogwild:
    """Make the Hogwild mode; a plan has no parameters for it."""
    return Hogwild(replicas)
