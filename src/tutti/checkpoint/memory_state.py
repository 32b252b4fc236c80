"""The training state in a rank's memory, in the form of a checkpoint: ranks that lack it get it from one that has it.

It is collected and loaded by the code that writes and loads checkpoints, but the tensors stay where they are.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from tutti.checkpoint.contribution import Collected, Contribution, collect, run_state_of
from tutti.checkpoint.index import Key
from tutti.checkpoint.load import load_source
from tutti.checkpoint.sources import in_memory
from tutti.checkpoint.training_state import TrainingState
from tutti.comm.world import World
from tutti.errors import CheckpointError
from tutti.parallel.layout import TensorShard
from tutti.parallel.saved_values import parse_dtype


@dataclass(frozen=True, slots=True)
class MemoryState:
    """A whole training state.

    Attributes:
        tensors: the model's and the optimizers' tensors, by key.
        tied: further names of these tensors -> the first name.
        run_state: what a checkpoint has in run.pt; the generators are this rank's alone.
    """

    tensors: dict[Key, torch.Tensor]
    tied: dict[str, str]
    run_state: dict[str, Any]


_Described = tuple[list[tuple[Key, tuple[int, ...], str]], dict[str, str], dict[str, Any]]
"""Keys, shapes and dtypes of tensors, and the rest of a MemoryState."""


@dataclass(slots=True)
class _Kept(Collected):
    """Collects tensors themselves instead of how they are written."""

    kept: dict[Key, torch.Tensor] = field(default_factory=dict)

    def add(self, key: Key, shard: TensorShard, tensor: torch.Tensor, *, replicated: bool = False) -> None:
        """Keep a tensor.

        Raises:
            CheckpointError: it is not whole.
        """
        if shard.cuts or tuple(tensor.shape) != shard.shape:
            raise CheckpointError(f"{key[1]} is divided among the ranks; continue from a checkpoint")
        self.kept[key] = tensor.detach()


def collect_in_memory(training: TrainingState) -> MemoryState:
    """Collect the state of a rank that has all of it, without communication. The tensors are the run's own.

    Raises:
        CheckpointError: a part of it is on other ranks only, or is not made of plain values.
    """
    collected = _Kept(Contribution())
    collect(training, collected, everything=True)
    return MemoryState(collected.kept, collected.contribution.tied, run_state_of(training, [collected.contribution]))


def load_from_memory(
    training: TrainingState,
    own: MemoryState | None,
    holder: int,
    generators: Callable[[dict[str, Any]], dict[str, Any]],
    say: Callable[[str], None],
) -> None:
    """Put the state that one rank has in memory into the prepared run of all ranks. Collective.

    Args:
        training: the prepared state.
        own: the same state, where this rank has it; None where another rank sends it.
        holder: the rank that sends it.
        generators: this rank's states of random generators, for those of the holder.
        say: called with a sentence about each part of the state that this run cannot use.

    Raises:
        CheckpointError: on every rank, if the state does not fit.
    """
    world = training.parallel.world
    described: _Described | None = None
    if world.rank == holder:
        assert own is not None
        shapes = [(key, tuple(tensor.shape), str(tensor.dtype)) for key, tensor in own.tensors.items()]
        described = (shapes, own.tied, own.run_state)
    gathered = world.gather((own is None, described))
    shapes, tied, run_state = cast(_Described, gathered[holder][1])
    lacking = [rank for rank, (lacks, _) in enumerate(gathered) if lacks]
    tensors = _exchange(world, own, shapes, holder, lacking)
    run_state = {**run_state, "generators": [generators(run_state["generators"][0])]}
    source = replace(in_memory(Path(f"the memory of rank {holder}"), tensors, run_state), tied=tied)
    load_source(training, source, say)


def _exchange(
    world: World,
    own: MemoryState | None,
    shapes: list[tuple[Key, tuple[int, ...], str]],
    holder: int,
    lacking: list[int],
) -> dict[Key, torch.Tensor]:
    """Send the tensors from the holder to the ranks that lack them; return this rank's."""
    if world.rank == holder:
        assert own is not None
        for rank in lacking:
            for tensor in own.tensors.values():
                if tensor.numel():
                    dist.send(tensor.contiguous().reshape(-1).view(torch.uint8), dst=rank)
    if own is not None:
        return own.tensors
    received = {}
    for key, shape, dtype in shapes:
        tensor = torch.empty(shape, dtype=parse_dtype(dtype.removeprefix("torch.")))
        if tensor.numel():
            dist.recv(tensor.reshape(-1).view(torch.uint8), src=holder)
        received[key] = tensor
    return received
