"""Finds state that the ranks' forwards wrote differently, and refuses it by name before the update.

State is buffers, and parameters that forward writes in place. It is compared before and after the steps of
`is_checked`. What differs between ranks is refused only if training or evaluation depends on it: the
first microbatch is computed again with the state as it was before the step and as it is now, and with the buffers that
forward has registered on another rank. A cache, or a buffer of random draws, gives the same each time.
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tutti.data.batches import BatchShare, MicrobatchShare
from tutti.data.device_copies import to_device
from tutti.data.seeds import preserved_generators, seed_device, seed_everything
from tutti.errors import ScriptError
from tutti.nn.mixture import take_tallies
from tutti.parallel.data.replicate import LossFunction
from tutti.parallel.losses import as_weighted
from tutti.parallel.mixed_precision import autocast
from tutti.trainer.observer import NullObserver
from tutti.trainer.run_state import Run
from tutti.trainer.traceless import own_generators_kept, untouched

Place = tuple[nn.Module, str]
"""A buffer: its module, and its name there."""

Outcome = tuple[float, dict[str, "Summary"]]
"""The loss of a microbatch, and the buffers that forward leaves."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What ranks compare of one tensor: the digest of its bytes and, to tell rounding apart, its size in two norms."""

    shape: tuple[int, ...]
    digest: str
    sizes: tuple[float, ...]
    tolerance: float

    def agrees(self, other: "Summary") -> bool:
        """Return whether two ranks have the same values up to rounding."""
        if self.digest == other.digest:
            return self.shape == other.shape
        if self.shape != other.shape or not self.sizes:
            return False
        pairs = zip(self.sizes, other.sizes, strict=True)
        scale = max(*map(abs, self.sizes), *map(abs, other.sizes))
        return all(abs(a - b) <= self.tolerance * scale or (math.isnan(a) and math.isnan(b)) for a, b in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotedState:
    """The state before a step that is checked.

    Attributes:
        buffers: copies, by name.
        norms: of the parameters.
        versions: how often the whole parameters of each sharded unit were written in place.
    """

    buffers: dict[str, torch.Tensor]
    norms: list[float]
    versions: dict[str, int]


def is_checked(step: int) -> bool:
    """Whether the run checks itself in a step, counted from 0: in the 1st, 2nd, 10th, 100th and each 1000th."""
    return step in (0, 1, 9, 99) or step % 1000 == 999


def note_state(run: Run) -> NotedState | None:
    """A step begins: note the state, or return None if this step is not checked."""
    step, run.loop.steps_begun = run.loop.steps_begun, run.loop.steps_begun + 1
    if not is_checked(step) or run.parallel.world.world_size == 1 or not should_agree(run):
        return None
    tensors = {name: module._buffers[key] for name, (module, key) in _buffers(run.parallel.model).items()}
    return NotedState(
        buffers={name: tensor.clone() for name, tensor in tensors.items() if tensor is not None},
        norms=_norms(run.parallel.model),
        versions=run.parallel.replica.shards.whole_versions(),
    )


def should_agree(run: Run) -> bool:
    """Whether replicas are equal in every step; an observer, such as that of verify, compares them itself."""
    compressor = run.parallel.replica.compressor
    differs = compressor is not None and compressor.momentum_compression is not None  # between exchanges
    return run.parallel.plan.sync.mode == "synchronous" and not differs and isinstance(run.loop.observer, NullObserver)


def check_state(
    run: Run, noted: NotedState | None, loss_of_batch: LossFunction, pieces: list[Any], share: BatchShare
) -> None:
    """After backward: refuse state that forward wrote differently on different ranks. Collective.

    Args:
        run: the run.
        noted: what `note_state` returned when the step began.
        loss_of_batch: (model, batch) -> loss.
        pieces: this rank's microbatches.
        share: this rank's share of the global batch.

    Raises:
        ScriptError: on every rank, naming the module.
    """
    if noted is None:
        return
    world, model = run.parallel.world, run.parallel.model
    lost = [
        unit
        for unit, version in run.parallel.replica.shards.whole_versions().items()
        if noted.versions.get(unit, 0) != version
    ]
    everyone: list[tuple[list[str], list[str]]] = run.loop.watch.gather("state", (lost, _written(model, noted)))
    lost = [unit for theirs, _ in everyone for unit in theirs]
    if lost:
        raise ScriptError(
            f"forward writes parameters of {_describe(model, lost[0])}, of which mesh.shard keeps only a part, "
            "so that the values would be lost; set them before job.prepare, or use sharding level 1"
        )
    before = run.loop.guard.unequal_buffers.intersection(_buffers(model))
    written = {name for _, theirs in everyone for name in theirs}
    names = sorted(written | before)
    if not names:
        return
    summaries: list[dict[str, Summary]] = world.gather(summaries_of(model, names))
    different = [name for name in names if _differ(summaries, name)]
    if not different:
        return
    places = _buffers(model)
    registered: list[dict[str, torch.Tensor]] = world.gather(
        {
            name: _buffer(places[name])
            for name in different
            if name in places and (name in before or name not in noted.buffers)
        }
    )
    known = set(noted.buffers).intersection(different)
    only_buffers = all(names == set(different) for names in world.gather(known | set(registered[world.rank])))
    if not only_buffers or _matters(
        run,
        [
            {name: noted.buffers[name] for name in known},
            # Forward has registered these, or they differ between steps; a cache gives the same whichever rank's it is.
            *([registered[(world.rank + 1) % world.world_size]] if any(registered) else []),
        ],
        loss_of_batch,
        pieces[0],
        share.parts[0],
        unwritten=before - written,
    ):
        raise ScriptError(_refusal(model, [n for n in different if n in written] or different, summaries, written))


def _written(model: nn.Module, noted: NotedState) -> list[str]:
    """Names of the buffers and parameters that forward has changed on this rank."""
    names = [
        name
        for name, (module, key) in _buffers(model).items()
        if name not in noted.buffers or not _same(module._buffers[key], noted.buffers[name])
    ]
    parameters, now = (
        [name for name, parameter in model.named_parameters() if not parameter.is_meta and parameter.numel()],
        _norms(model),
    )
    if len(now) == len(noted.norms):
        names += [name for name, old, new in zip(parameters, noted.norms, now, strict=True) if old != new]
    return names


def _matters(
    run: Run,
    others: list[dict[str, torch.Tensor]],
    loss_of_batch: LossFunction,
    piece: Any,
    part: MicrobatchShare,
    unwritten: set[str],
) -> bool:
    """Whether a loss or the state changes with `others`, other values of buffers.

    Collective; the model is left as it is. The state is the buffers but `unwritten` ones, which forward only reads.

    A pipeline's forward is not repeated: there everything that differs matters.
    """
    if run.loop.pipeline is not None:
        return True
    model = run.parallel.model
    places = _buffers(model)
    now = {name: module._buffers[key] for name, (module, key) in places.items()}
    run.parallel.scope.counts = part.count > 0
    try:
        compared = places.keys() - unwritten
        with own_generators_kept(model, [loss_of_batch]):
            outcomes = [
                _outcomes(run, loss_of_batch, piece, places, values, compared)
                for values in (now, *({**now, **other} for other in others))
            ]
        matters = any(_depends(*pair) for other in outcomes[1:] for pair in zip(outcomes[0], other, strict=True))
    except Exception:  # the script's own code, repeated without gradients
        matters = True
    finally:
        take_tallies(model)
    return any(run.parallel.world.gather(matters))


def _outcomes(
    run: Run,
    loss_of_batch: LossFunction,
    piece: Any,
    places: dict[str, Place],
    values: dict[str, Any],
    compared: Iterable[str],
) -> tuple[Outcome, Outcome]:
    """What a microbatch gives in evaluation and in training mode if buffers have these values."""
    model = run.parallel.model
    modes = [(module, module.training) for module in model.modules()]
    with untouched(model, [loss_of_batch]):
        for name, (module, key) in places.items():
            value = values[name]
            module._buffers[key] = None if value is None else value.clone()
        model.eval()
        evaluated = _outcome(run, loss_of_batch, piece, compared)
        for module, training in modes:
            module.training = training
        return evaluated, _outcome(run, loss_of_batch, piece, compared)


def _depends(one: Outcome, other: Outcome) -> bool:
    """Whether a loss or the values that forward leaves differ; a cache that has grown may have another shape."""
    pairs = [(summary, other[1][name]) for name, summary in one[1].items() if name in other[1]]
    return one[0] != other[0] or any(a.shape == b.shape and a.digest != b.digest for a, b in pairs)


def _outcome(run: Run, loss_of_batch: LossFunction, piece: Any, compared: Iterable[str]) -> Outcome:
    """The loss of a microbatch, and the buffers that forward leaves."""
    model, device = run.parallel.model, run.parallel.world.device
    with (
        preserved_generators(),
        torch.no_grad(),
        run.parallel.sequences.part(to_device(piece, device)) as local_batch,
        autocast(run.parallel.plan.precision, device),
    ):
        seed_everything(run.settings.seed)
        seed_device(run.settings.seed, device)
        loss = as_weighted(loss_of_batch(model, local_batch), 1)
    return float(loss.total), summaries_of(model, compared)


def _buffers(model: nn.Module) -> dict[str, Place]:
    """The buffers that this rank holds, by name."""
    return {
        f"{name}.{key}" if name else key: (module, key)
        for name, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_meta
    }


def _buffer(place: Place) -> torch.Tensor:
    value = place[0]._buffers[place[1]]
    assert value is not None
    return value.detach()


def _norms(model: nn.Module) -> list[float]:
    """The norm of each parameter that this rank holds."""
    held = [parameter.detach() for parameter in model.parameters() if not parameter.is_meta]
    numbers = [tensor.abs() if tensor.is_complex() else tensor for tensor in held if tensor.numel()]
    numbers = [tensor if tensor.is_floating_point() else tensor.double() for tensor in numbers]
    return torch.stack([norm.double().cpu() for norm in torch._foreach_norm(numbers)]).tolist() if numbers else []


def _same(tensor: torch.Tensor | None, before: torch.Tensor) -> bool:
    return tensor is not None and tensor.shape == before.shape and torch.equal(tensor, before)


def _tensors(model: nn.Module, names: Iterable[str]) -> list[tuple[str, torch.Tensor]]:
    tensors = dict([*model.named_buffers(remove_duplicate=False), *model.named_parameters(remove_duplicate=False)])
    return [(name, tensors[name]) for name in names if name in tensors and not tensors[name].is_meta]


def summaries_of(model: nn.Module, names: Iterable[str]) -> dict[str, Summary]:
    """Return what ranks compare of the named parameters and buffers that this rank holds."""
    return {name: summary_of(tensor) for name, tensor in _tensors(model, names)}


def summary_of(tensor: torch.Tensor) -> Summary:
    """Return what ranks compare of a tensor."""
    values = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(values.reshape(-1).view(torch.uint8).numpy().data if values.numel() else b"").hexdigest()
    if not (values.is_floating_point() and values.numel()):
        return Summary(tuple(values.shape), digest, (), 0.0)
    flat = values.double().reshape(-1)
    weights = torch.linspace(1, 2, len(flat), dtype=torch.float64)
    sizes = (float(flat.norm()), float((flat * weights).norm()), float(flat @ weights) / math.sqrt(len(flat)))
    return Summary(tuple(values.shape), digest, sizes, min(100 * torch.finfo(values.dtype).eps, 1e-3))


def _differ(summaries: list[dict[str, Summary]], name: str) -> bool:
    present = [theirs[name] for theirs in summaries if name in theirs]
    return any(not present[0].agrees(other) for other in present[1:])


def _describe(model: nn.Module, name: str) -> str:
    return (
        f"module {name!r} ({type(model.get_submodule(name)).__name__})"
        if name
        else f"the model ({type(model).__name__})"
    )


def _refusal(model: nn.Module, names: list[str], summaries: list[dict[str, Summary]], written: set[str]) -> str:
    owner = names[0].rpartition(".")[0]
    keys = [repr(name.rpartition(".")[2]) for name in names if name.rpartition(".")[0] == owner]
    ranks = [rank for rank, theirs in enumerate(summaries) if names[0] in theirs]
    other = next(rank for rank in ranks if not summaries[ranks[0]][names[0]].agrees(summaries[rank][names[0]]))
    which = " and ".join([", ".join(keys[:-1]), keys[-1]] if len(keys) > 1 else keys)
    if names[0] not in written:
        return (
            f"{_describe(model, owner)} has other values of {which} on rank {other} than on rank {ranks[0]}, and the "
            "loss depends on them; change buffers on all ranks alike"
        )
    return (
        f"{_describe(model, owner)} writes {which} in forward from each rank's own samples: ranks {ranks[0]} and "
        f"{other} differ, and one device would have other values. Say how they are made equal: "
        'tutti.synchronized(module, "gather") computes the module on all ranks\' samples, as one device does; "mean", '
        '"sum" or "first" combines what it wrote'
    )
