"""The collectives of fully_shard (FSDP2): counted in the traffic, and only while all ranks are at the same place.

FSDP2 matches its collectives by their order alone. Ranks that run different blocks would exchange the wrong ones, end
the process or hang. So ranks first compare where they are: before each collective on CPUs, and in the first steps on
GPUs, where later steps compare once, at their end.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_api as api

from tutti.comm.point_to_point import ring_all_reduce_nbytes
from tutti.errors import ScriptError
from tutti.parallel.layout import Layout

CHECKED_STEPS = 3
"""Steps on GPUs in which ranks compare where they are before each collective, for which the host waits."""

MOST_DEFERRED = 2
"""Steps on GPUs whose comparison may not have been read: the host is so many steps ahead at most."""


class RankAgreement:
    """What ranks tell each other so that their collectives match.

    Args:
        layout: the layout.
        describe: number of a place -> what happens there.

    Attributes:
        sent_nbytes: bytes that this rank has sent for parameters and gradients in this step.
    """

    def __init__(self, layout: Layout, describe: Callable[[int], str]) -> None:
        self._group = layout.mesh.new_group("replicate", "shard")
        self._ranks = layout.mesh.degree("replicate", "shard")
        self._channel = layout.channel("scalars", "replicate", "shard")
        self._describe = describe
        self._steps, self._seen = 0, 0
        self._deferred: list[tuple[torch.Tensor, torch.Event]] = []
        self.sent_nbytes = 0

    def begin(self) -> None:
        """A step begins."""
        self._steps, self._seen, self.sent_nbytes = self._steps + 1, 0, 0

    def check(self, place: int, device: torch.device) -> None:
        """Check that all ranks are at this place. Collective where it is checked at once.

        Raises:
            ScriptError: on all ranks, naming two places.
        """
        self._seen = zlib.crc32(place.to_bytes(4, "little"), self._seen)
        if device.type != "cpu" and self._steps > CHECKED_STEPS:
            return
        highest, lowest = self._maximum([place, -place], device).tolist()
        if highest != -lowest:
            raise self._mismatch(f"one rank comes to {self._describe(-lowest)}, another to {self._describe(highest)}")

    def start_maximum(self, values: Sequence[int], device: torch.device) -> torch.Tensor:
        """Return the maxima of the ranks' values, for `read`; the host does not wait on GPUs. Collective."""
        return self._maximum([*values, self._seen, -self._seen], device)

    def read(self, maxima: torch.Tensor) -> list[int]:
        """Wait for the maxima.

        Raises:
            ScriptError: ranks were at different places in this step.
        """
        values = [int(value) for value in maxima.tolist()]
        if values[-2] != -values[-1]:
            raise self._mismatch("in an earlier step, ranks ran different blocks, so its values are wrong")
        return values[:-2]

    def defer(self, maxima: torch.Tensor) -> None:
        """Let the maxima come to the host while the GPU computes, for `deferred`."""
        host = maxima.to("cpu", non_blocking=True)
        event = torch.Event(maxima.device)
        event.record()
        self._deferred.append((host, event))

    def deferred(self) -> Iterator[list[int]]:
        """Yield the deferred maxima that have arrived, and wait for those that are MOST_DEFERRED steps old.

        Raises:
            ScriptError: as `read`.
        """
        while self._deferred and (len(self._deferred) > MOST_DEFERRED or self._deferred[0][1].query()):
            host, event = self._deferred.pop(0)
            event.synchronize()
            yield self.read(host)

    def _maximum(self, values: Sequence[int], device: torch.device) -> torch.Tensor:
        row = torch.tensor(values, dtype=torch.int64, device=device)
        with self._channel.waiting(ring_all_reduce_nbytes(row, self._ranks)):
            dist.all_reduce(row, dist.ReduceOp.MAX, group=self._group)
        return row

    def _mismatch(self, what: str) -> ScriptError:
        return ScriptError(
            f"sharding.engine = fsdp2 needs ranks that run the same blocks in the same order, but {what}; use "
            "sharding.engine = tutti, which gathers blocks that a rank skips"
        )


class CheckedAllGather(api.AllGather):
    """Gathers the parameters of one unit; `place` is its number for `RankAgreement`."""

    def __init__(self, agreement: RankAgreement, layout: Layout, place: int) -> None:
        self._agreement, self._place = agreement, place
        self._channel = layout.channel("parameters", "shard")

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self._agreement.check(self._place, input_tensor.device)
        nbytes = (dist.get_world_size(group) - 1) * input_tensor.numel() * input_tensor.element_size()
        self._agreement.sent_nbytes += nbytes
        with self._channel.waiting(nbytes):
            return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class CheckedReduceScatter(api.ReduceScatter):
    """Reduces the gradients of one unit; FSDP2 itself reduces them over replicas afterwards."""

    def __init__(self, agreement: RankAgreement, layout: Layout, place: int) -> None:
        self._agreement, self._place = agreement, place
        self._replicas = layout.mesh.degree("replicate")
        self._channel = layout.channel("gradients", "shard")
        self._over_replicas = layout.channel("gradients", "replicate") if self._replicas > 1 else None

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self._agreement.check(self._place, input_tensor.device)
        nbytes = (dist.get_world_size(group) - 1) * output_tensor.numel() * output_tensor.element_size()
        self._agreement.sent_nbytes += nbytes
        if self._over_replicas is not None:
            after = ring_all_reduce_nbytes(output_tensor, self._replicas)
            self._agreement.sent_nbytes += after
            with self._over_replicas.waiting(after):
                pass
        with self._channel.waiting(nbytes):
            return dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
