"""Finds losses that are not means over samples, so that they depend on how many ranks share the samples.

A mean over tokens that a script takes by hand, in-batch negatives of a contrastive loss, boxes per batch, a router's
auxiliary loss: one device computes something else than the mean of the ranks' losses. The loss of some samples is
compared with that of their halves. The model is in evaluation mode for that, and is left as it was.
"""

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tutti.data.batches import BatchShare
from tutti.data.microbatches import split_batch, to_device
from tutti.data.seeds import preserved_generators, seed_device, seed_everything
from tutti.nn.annotations import read_synchronization
from tutti.nn.mixture import take_tallies
from tutti.parallel.data.replicate import LossFunction
from tutti.parallel.losses import as_weighted
from tutti.parallel.script_hooks import has_script_hooks
from tutti.parallel.sharding.parameter_sharding import Parameters
from tutti.trainer.run_state import Run

SMALL = 0.1
"""Losses below this are compared as if they were as large: rounding is that of what they were computed from."""


@dataclass(frozen=True, slots=True)
class Coupling:
    """A loss of samples beside that of their halves.

    Attributes:
        rank: whose samples.
        samples: how many.
        whole: the loss of all of them.
        halves: the loss that the halves give together.
    """

    rank: int
    samples: int
    whole: float
    halves: float


def coupling_of(run: Run, loss_of_batch: LossFunction, pieces: list[Any], share: BatchShare) -> str:
    """Return a sentence if ranks or microbatches change the loss, else an empty one. Collective.

    Nothing is said where it cannot be seen: the model is divided over ranks, has hooks of the script or is compiled,
    its loss draws random numbers in evaluation mode, or a batch cannot be cut.
    """
    if not _is_visible(run, len(pieces)):
        return ""
    coupling = _coupling(run, loss_of_batch, pieces[0], share.parts[0].loaded)
    first = next((each for each in run.parallel.world.gather(coupling) if each is not None), None)
    if first is None:
        return ""
    divisions = [f"{run.parallel.world.world_size} ranks"] if run.parallel.world.world_size > 1 else []
    divisions += [f"{len(pieces)} microbatches"] if len(pieces) > 1 else []
    return (
        f"the loss depends on how samples are divided: for {first.samples} samples of rank {first.rank} it is "
        f"{first.whole:.6g}, but their halves together give {first.halves:.6g}, so that {' and '.join(divisions)} do "
        "not train as one device does. If it is a mean over tokens, boxes or the like, return tutti.Weighted(total, "
        "count) from the loss function; if it compares samples with each other (negatives in the batch, a router's "
        "balance), it is one of each rank's own samples"
    )


def _is_visible(run: Run, microbatches: int) -> bool:
    parallel = run.parallel
    whole = parallel.mesh.degree("replicate", "shard") == parallel.world.world_size
    if not whole or isinstance(parallel.replica.shards, Parameters) or run.loop.pipeline is not None:
        return False
    if parallel.world.world_size * microbatches == 1:
        return False
    return not any(map(_is_opaque, parallel.model.modules()))


def _is_opaque(module: nn.Module) -> bool:
    """Whether calling a module more often may be seen outside of it, or takes part in what all ranks do."""
    by_batch = getattr(module, "track_running_stats", True) is False and not isinstance(
        module, nn.modules.instancenorm._InstanceNorm
    )
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    return by_batch or compiled or has_script_hooks(module) or read_synchronization(module) is not None


def _coupling(run: Run, loss_of_batch: LossFunction, piece: Any, samples: int) -> Coupling | None:
    """Compare the loss of a microbatch with that of its halves; None if they agree or cannot be compared."""
    if samples < 2:
        return None
    sizes = [samples // 2, samples - samples // 2]
    try:
        parts = [to_device(part, run.parallel.world.device) for part in (piece, *split_batch(piece, sizes))]
        whole, again, *halves = (
            _loss(run, loss_of_batch, part, size, seed)
            for part, size, seed in zip([parts[0], *parts], [samples, samples, *sizes], (1, 2, 1, 1), strict=True)
        )
    except Exception:  # the script's own code; the step itself reports what matters
        return None
    total, count = (sum(values) for values in zip(*halves, strict=True))
    if whole != again or not (whole[1] > 0 and count > 0 and all(map(math.isfinite, (*whole, total, count)))):
        return None
    of_all, of_halves = whole[0] / whole[1], total / count
    dtypes = [parameter.dtype for parameter in run.parallel.model.parameters() if parameter.is_floating_point()]
    tolerance = max((torch.finfo(dtype).eps for dtype in dtypes), default=1e-7) * 1000
    if abs(of_all - of_halves) <= tolerance * max(abs(of_all), abs(of_halves), SMALL):
        return None
    return Coupling(run.parallel.world.rank, samples, of_all, of_halves)


def _loss(run: Run, loss_of_batch: LossFunction, part: Any, samples: int, seed: int) -> tuple[float, float]:
    """The loss as (total, count)."""
    device = run.parallel.world.device
    with preserved_generators(), _left_as_it_was(run.parallel.model):
        seed_everything(seed)
        seed_device(seed, device)
        loss = as_weighted(loss_of_batch(run.parallel.model, part), samples)
    return float(loss.total.detach()), float(loss.count)


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode; afterwards restore modes, buffers, gradients and what its modules keep."""
    modules = list(model.modules())
    modes = [module.training for module in modules]
    buffers = [
        (module, key, buffer, None if buffer is None or buffer.is_meta else buffer.clone())
        for module in modules
        for key, buffer in module._buffers.items()
    ]
    kept = [(module, {key: _noted(value) for key, value in _own(module).items()}) for module in modules]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    model.eval()
    try:
        yield
    finally:
        for module, training in zip(modules, modes, strict=True):
            module.training = training
        for module, key, buffer, value in buffers:
            module._buffers[key] = buffer
            if buffer is not None and value is not None:
                with torch.no_grad():
                    buffer.copy_(value)
        for module, attributes in kept:
            _restore(module, attributes)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        take_tallies(model)


_TORCHS_OWN = frozenset(vars(nn.Module()))


def _own(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are not torch's."""
    return {key: value for key, value in vars(module).items() if key not in _TORCHS_OWN}


def _noted(value: Any) -> tuple[Any, Any]:
    """A value, and a copy of what it holds if that may change in place."""
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        return value, value.detach().clone()
    return value, value.copy() if type(value) in (list, dict, set, deque) else None


def _restore(module: nn.Module, attributes: dict[str, tuple[Any, Any]]) -> None:
    for key in _own(module).keys() - attributes.keys():
        del module.__dict__[key]
    for key, (value, content) in attributes.items():
        module.__dict__[key] = value
        if content is None:
            continue
        if isinstance(value, torch.Tensor):
            with torch.no_grad():
                value.copy_(content)
        else:
            value.clear()
            (value.extend if isinstance(value, list | deque) else value.update)(content)
