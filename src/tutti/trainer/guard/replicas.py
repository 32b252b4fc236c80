"""Compares models before training, and weights, gradients and optimizer state while training, between ranks."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from tutti.comm.world import World
from tutti.config.vocabulary import AxisName
from tutti.errors import RankMismatchError
from tutti.parallel.layout import to_local
from tutti.trainer.guard.findings import has_whole_modules, warn
from tutti.trainer.run_state import Run
from tutti.trainer.state_check import Summary, summary_of

Held = dict[str, tuple[int, torch.Tensor | None]]
"""Tensors of a rank, by what messages call them; with a number that ranks which must hold equal ones share.

An entry whose name is only a kind, such as "the weights", says the number of this kind.
"""

Checksums = dict[str, tuple[int, int | float | None]]
"""The same, with a checksum in place of the tensor."""

_REMEDIES = {
    "the weights": "change weights on all ranks alike, and only between steps",
    "the gradient": "what changes gradients after forward_backward (hooks, clipping, zero_grad, an assignment to "
    "grad) must do the same on all ranks",
    "the state": "reset, load or change the state of an optimizer on all ranks alike",
}


def named_optimizers(optimizers: Sequence[Optimizer]) -> dict[str, Optimizer]:
    """The optimizers by the names of their classes, with their numbers if there are several."""
    numbers = [f" (optimizer {number})" if len(optimizers) > 1 else "" for number in range(len(optimizers))]
    return {type(each).__name__ + number: each for each, number in zip(optimizers, numbers, strict=True)}


def weights_of(run: Run) -> Held:
    """The parameters that this rank holds."""
    copies: tuple[AxisName, ...] = ("replicate", "shard") if run.parallel.plan.sharding.level == 1 else ("replicate",)
    place = run.parallel.mesh.ranks(*copies)[0]
    held: Held = {"the weights": (place, None)}
    return held | {f"the weights of {name!r}": (place, p) for name, p in run.parallel.model.named_parameters()}


def states_of(run: Run) -> Held:
    """The tensors of the optimizers' state on this rank; only numbers of state in files, which would all be read."""
    place = run.parallel.mesh.ranks("replicate")[0]
    held: Held = {"the state": (place, None)}
    on_disk = run.parallel.plan.sharding.on_disk
    names = run.parallel.layout.state_names(run.parallel.model, run.parallel.optimizers)
    for number, (kind, optimizer) in enumerate(named_optimizers(run.parallel.optimizers).items()):
        for parameter, name in names[number].items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and not (on_disk and value.dim()):
                    held[f"the state {key!r} of {name!r} in {kind}"] = place, value
    return held


def check_update(run: Run, optimizers: Sequence[Optimizer], loss: float) -> None:
    """Refuse gradients that differ between replicas at an update; warn if there are none. Collective.

    Raises:
        RankMismatchError: on every rank.
    """
    place = run.parallel.mesh.ranks("replicate")[0]
    held: Held = {"the gradient": (place, None)}
    held |= {f"the gradient of {name!r}": (place, p.grad) for name, p in run.parallel.trained_by(optimizers)}
    sparse = any(tensor is not None and tensor.layout is not torch.strided for _, tensor in held.values())
    gathered: list[tuple[Checksums, bool]] = run.loop.watch.gather("gradients", (checksums(held), sparse))
    everyone = [sums for sums, _ in gathered]
    some = any(sparse or any(value for _, value in sums.values()) for sums, sparse in gathered)
    if has_whole_modules(run) and loss and not some:
        kinds = " and ".join(named_optimizers(optimizers))
        warn(
            run,
            f"{kinds} updates nothing: every gradient is zero or None, but the loss is not zero; call update after "
            "forward_backward and before anything that zeroes gradients",
        )
    refuse_unequal(run, f"step {run.state.progress.step + 1}", everyone, held)


def checksums(held: Held) -> Checksums:
    """The sum of the bits of each dense tensor, read as integers; of the optimizers' state, its norm."""
    found: dict[str, tuple[int, Any]] = {}
    bits, norms = {}, {}
    for name, (place, tensor) in held.items():
        if tensor is None:
            found[name] = place, None
        elif not tensor.is_meta and tensor.layout is torch.strided and tensor.numel():
            value = tensor.detach()
            value = torch.view_as_real(value) if value.is_complex() else value
            if name.startswith("the state"):
                norms[name] = value if value.is_floating_point() else value.double()
            else:
                bits[name] = _sum_of_bits(value).cpu()
    sizes = [norm.double().cpu() for norm in torch._foreach_norm([*norms.values()])] if norms else []
    for names, values in ((bits, [*bits.values()]), (norms, sizes)):
        numbers = torch.stack(values).tolist() if values else []
        found |= {name: (held[name][0], number) for name, number in zip(names, numbers, strict=True)}
    return found


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sum_of_bits(value: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's bits, read as integers of 64 bits where they are so aligned: that is as fast as reading."""
    flat = value.contiguous().reshape(-1)
    packed = 8 // flat.element_size()
    if flat.numel() % packed == 0 and flat.storage_offset() % packed == 0:
        return flat.view(torch.int64).sum()
    return flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64)


def checksum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a dense tensor's bits as 0-d int64, on its device."""
    value = to_local(tensor).detach()
    return _sum_of_bits(torch.view_as_real(value) if value.is_complex() else value)


def unequal(everyone: Sequence[Checksums]) -> list[tuple[str, int, int]]:
    """What differs between ranks of one place, or one of them does not have: (name, rank, other rank)."""
    first: dict[tuple[str, int], tuple[int, Any]] = {}
    for rank, sums in enumerate(everyone):
        for name, (place, value) in sums.items():
            first.setdefault((name, place), (rank, value))
    found = []
    for rank, sums in enumerate(everyone):
        places = {name: place for name, (place, _) in sums.items() if name in _REMEDIES}
        for (name, place), (origin, expected) in first.items():
            own_place, value = sums.get(name, (places.get(_kind(name)), None))
            if own_place == place and value != expected:
                found.append((name, origin, rank))
    return found


def _kind(name: str) -> str:
    return name.partition(" of ")[0].partition(" '")[0]


def refuse_unequal(run: Run, when: str, everyone: Sequence[Checksums], held: Mapping[str, tuple[int, Any]]) -> None:
    """Refuse what differs between replicas by more than rounding. Collective.

    Raises:
        RankMismatchError: on every rank, naming what differs, the ranks and the remedy.
    """
    different = unequal(everyone)
    if not different:
        return
    names = {name for name, _, _ in different}
    own = {name: summary_of(held[name][1]) for name in names if name in held and held[name][1] is not None}
    summaries: list[dict[str, Summary]] = run.loop.watch.gather("replicas", own)
    certain = [each for each in different if not _agree(*(summaries[rank].get(each[0]) for rank in each[1:]))]
    if not certain:
        return
    name, origin, rank = certain[0]
    also = next((other for other, _, _ in certain if _kind(other) != _kind(name)), None)
    raise RankMismatchError(
        f"{when}: {name} {'differ' if _kind(name) == 'the weights' else 'differs'} between the replicas on ranks "
        f"{origin} and {rank}{f', and so does {also}' if also else ''}; {_REMEDIES[_kind(also or name)]}"
    )


def _agree(one: Summary | None, other: Summary | None) -> bool:
    return one is other if one is None or other is None else one.agrees(other)


def buffer_checksums(model: nn.Module) -> Checksums:
    """The checksum of each buffer that this rank holds."""
    return checksums({name: (0, buffer) for name, buffer in model.named_buffers()})


TensorEntry = tuple[str, tuple[int, ...], str, bool]


def check_same_model(model: nn.Module, world: World) -> None:
    """Compare the names, shapes and dtypes of parameters and buffers between ranks. Collective.

    Raises:
        RankMismatchError: on every rank, naming the first parameter or buffer that differs.
    """
    entries: list[TensorEntry] = [
        (n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in model.named_parameters()
    ]
    entries += [(n, tuple(b.shape), str(b.dtype), False) for n, b in model.named_buffers()]
    everyone = world.gather(entries)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise RankMismatchError(_describe_difference(everyone[0], theirs, rank))


def _describe_difference(first: Sequence[TensorEntry], other: Sequence[TensorEntry], rank: int) -> str:
    remedy = "build the same model on every rank, independent of the rank's number"
    for expected, actual in zip(first, other, strict=False):
        if expected != actual:
            entry_0, entry = _describe_entry(expected), _describe_entry(actual)
            return f"models differ between ranks: rank 0 has {entry_0}, rank {rank} has {entry} in its place; {remedy}"
    longer, extra = (0, first[len(other)]) if len(first) > len(other) else (rank, other[len(first)])
    return f"models differ between ranks: only rank {longer} has {_describe_entry(extra)}; {remedy}"


def _describe_entry(entry: TensorEntry) -> str:
    name, shape, dtype, trainable = entry
    return f"{name!r} of shape {shape}, {dtype.removeprefix('torch.')}{'' if trainable else ', without gradient'}"


def differing_values(model: nn.Module, world: World) -> tuple[int, str] | None:
    """Return the first (rank, tensor name) whose values differ from rank 0's; None if there is none. Collective."""
    digests = [(name, tensor_digest(tensor)) for name, tensor in _parameters_and_buffers(model)]
    everyone = world.gather(digests)
    for rank, theirs in enumerate(everyone):
        for (name, expected), (_, actual) in zip(everyone[0], theirs, strict=True):
            if expected != actual:
                return rank, name
    return None


def broadcast_from_rank_0(model: nn.Module, world: World) -> None:
    """Overwrite every rank's parameters and buffers with rank 0's. Collective."""
    if world.world_size > 1:
        for _, tensor in _parameters_and_buffers(model):
            sent = tensor.detach().to(world.device)
            dist.broadcast(sent, src=0)
            tensor.detach().copy_(sent)


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().data if data.numel() else b"").hexdigest()


def _parameters_and_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
