"""Ranks that must agree are asked whether they do, before the first step."""

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from tutti.comm.world import World
from tutti.errors import RankMismatchError

Entry = tuple[str, tuple[int, ...], str, bool]


def check_same_model(model: nn.Module, world: World) -> None:
    """Raise RankMismatchError, on every rank, naming the first parameter or buffer that differs in form."""
    entries: list[Entry] = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in model.named_parameters()]
    entries += [(n, tuple(b.shape), str(b.dtype), False) for n, b in model.named_buffers()]
    everyone = world.gather(entries)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise RankMismatchError(_difference(everyone[0], theirs, rank))


def _difference(first: Sequence[Entry], other: Sequence[Entry], rank: int) -> str:
    remedy = "build the same model on every rank, from the Job's seed and not from the rank"
    for one, two in zip(first, other, strict=False):
        if one != two:
            return f"models differ: rank 0 has {_words(one)}, rank {rank} has {_words(two)} in its place; {remedy}"
    longer, extra = (0, first[len(other)]) if len(first) > len(other) else (rank, other[len(first)])
    return f"models differ: only rank {longer} has {_words(extra)}; {remedy}"


def _words(entry: Entry) -> str:
    name, shape, dtype, trainable = entry
    return f"{name!r} of shape {shape}, {dtype.removeprefix('torch.')}{'' if trainable else ', without gradient'}"


def differing_values(model: nn.Module, world: World) -> tuple[int, str] | None:
    """The first (rank, parameter or buffer) whose values differ from rank 0's, or None."""
    digests = [(name, tensor_digest(tensor)) for name, tensor in _state(model)]
    everyone = world.gather(digests)
    for rank, theirs in enumerate(everyone):
        for (name, one), (_, two) in zip(everyone[0], theirs, strict=True):
            if one != two:
                return rank, name
    return None


def copy_from_first(model: nn.Module, world: World) -> None:
    """Give every rank rank 0's parameters and buffers."""
    if world.world_size > 1:
        for _, tensor in _state(model):
            dist.broadcast(tensor.detach(), src=0)


def tensor_digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().data if data.numel() else b"").hexdigest()


def _state(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
