"""Data parallel: replicas whose gradients are summed in buckets while backward still runs.

The engine is torch's DistributedDataParallel, without a communication hook: one in Python may call back on Gloo's
threads after the interpreter has gone. DDP averages over ranks; `weight` undoes that, so that losses that are already
weighted by samples add up to the global gradient, whatever each rank's share.
"""

import inspect
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tutti.errors import ScriptError
from tutti.runtime.world import World
from tutti.spec.plan import Plan, Sync

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
        self.sent_nbytes = ring_sent_nbytes(self.parameters, world.world_size)
        self.weight = float(world.world_size)
        self.computed_at = 0.0
        self.forward: nn.Module = Forward(model)
        if world.world_size > 1:
            self.forward = self._distributed(self.forward, world, plan)

    def loss(self, function: LossFunction, batch: Any) -> Any:
        """fn(model, batch), watched for gradients."""
        return self.forward(function, batch)

    def watch(self, loss: torch.Tensor) -> None:
        """Note when the last gradient of this loss's backward is computed, before DDP waits for the others."""
        if isinstance(self.forward, DistributedDataParallel):
            loss.register_hook(self._backward_begins)  # type: ignore[no-untyped-call]

    def accumulating(self) -> AbstractContextManager[None]:
        """While open, backward keeps gradients on this rank."""
        if isinstance(self.forward, DistributedDataParallel):
            return self.forward.no_sync()
        return nullcontext()

    def unused(self, model: nn.Module) -> list[str]:
        """Names of parameters that got no gradient on any rank."""
        return [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]

    def _backward_begins(self, gradient: torch.Tensor) -> None:
        """Queued first, so called before DDP's own callback, which waits for its buckets."""
        torch.autograd.Variable._execution_engine.queue_callback(self._gradients_computed)

    def _gradients_computed(self) -> None:
        self.computed_at = time.perf_counter()

    def _distributed(self, forward: nn.Module, world: World, plan: Plan) -> DistributedDataParallel:
        return DistributedDataParallel(
            forward,
            device_ids=[world.device] if world.device.type == "cuda" else None,
            init_sync=False,
            **_NO_BUFFER_SYNC,
            bucket_cap_mb=None if plan.sync == Sync() else plan.sync.bucket_nbytes / 2**20,  # None: a small first one
            gradient_as_bucket_view=True,
            find_unused_parameters=True,  # a parameter may be unused on one rank only; without it that is a hang
        )


def ring_sent_nbytes(parameters: list[nn.Parameter], world_size: int) -> int:
    """Bytes one rank sends to sum these gradients by ring all-reduce: 2 (P - 1) / P of their size."""
    nbytes = sum(p.numel() * p.element_size() for p in parameters)
    return 2 * (world_size - 1) * nbytes // world_size
