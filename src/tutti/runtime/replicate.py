"""Data parallel: replicas whose gradients are summed in buckets while backward still runs.

The engine is torch's DistributedDataParallel; tutti adds the weights (losses are scaled so that a plain sum over
ranks is the global gradient, whatever each rank's share) and notes when the last bucket was ready.
"""

import inspect
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tutti.errors import ScriptError
from tutti.runtime.world import World
from tutti.spec.plan import Plan

_ARGUMENTS = inspect.signature(DistributedDataParallel.__init__).parameters
_NO_BUFFER_SYNC: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _ARGUMENTS else "broadcast_buffers": False
}
"""Buffers stay as forward leaves them: tutti's batch statistics are equal anyway (the argument's name changed)."""

LossFunction = Callable[[nn.Module, Any], Any]
"""fn(model, batch) -> loss (a mean over samples, or Weighted)."""


class Forward(nn.Module):
    """Runs a user's function over the model inside one forward call, which is what DDP watches.

    `idle` is never used: DDP, told to expect unused parameters, writes a warning on every rank where there are none.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.idle = nn.Parameter(torch.zeros_like(next(model.parameters()).detach().reshape(-1)[:1]))

    def forward(self, function: LossFunction, batch: Any) -> Any:
        return function(self.model, batch)


class Replica:
    """This rank's replica: `loss` runs forward; gradients of the last microbatch's backward are summed over ranks."""

    def __init__(self, model: nn.Module, world: World, plan: Plan) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.parameters:
            raise ScriptError("the model has no parameter that requires a gradient; unfreeze at least one")
        self.last_bucket_at = 0.0
        self.forward: nn.Module = Forward(model)
        if world.world_size > 1:
            self.forward = self._distributed(self.forward, world, plan)

    def loss(self, function: LossFunction, batch: Any) -> Any:
        """fn(model, batch), watched for gradients."""
        return self.forward(function, batch)

    def accumulating(self) -> AbstractContextManager[None]:
        """While open, backward keeps gradients on this rank."""
        if isinstance(self.forward, DistributedDataParallel):
            return self.forward.no_sync()
        return nullcontext()

    def unused(self, model: nn.Module) -> list[str]:
        """Names of parameters that got no gradient on any rank."""
        return [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]

    def _distributed(self, forward: nn.Module, world: World, plan: Plan) -> DistributedDataParallel:
        replica = DistributedDataParallel(
            forward,
            device_ids=[world.device] if world.device.type == "cuda" else None,
            init_sync=False,
            **_NO_BUFFER_SYNC,
            bucket_cap_mb=plan.sync.bucket_nbytes / 2**20,
            gradient_as_bucket_view=True,
            find_unused_parameters=True,  # a parameter may be unused on one rank only; without it that is a hang
        )
        replica.register_comm_hook(self, _sum_bucket)
        return replica


def _sum_bucket(
    replica: Replica,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Start the all-reduce (sum) of one bucket, and note when it was ready."""
    replica.last_bucket_at = time.perf_counter()
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(_first)  # type: ignore[no-any-return]


def _first(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]


def ring_sent_nbytes(parameters: list[nn.Parameter], world_size: int) -> int:
    """Bytes one rank sends to sum these gradients by ring all-reduce: 2 (P - 1) / P of their size."""
    nbytes = sum(p.numel() * p.element_size() for p in parameters)
    return 2 * (world_size - 1) * nbytes // world_size
