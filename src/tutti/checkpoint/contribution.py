"""Each rank's contribution to a checkpoint, and how all of them become the index and the run state."""

import hashlib
import io
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from tutti.checkpoint.index import (
    AVERAGE,
    MODEL,
    RANK_STATE,
    CheckpointIndex,
    Key,
    StoredPart,
    StoredTensor,
    rank_file,
    stored_as,
)
from tutti.checkpoint.tensor_files import TensorToWrite, dtype_name, tensor_to_write
from tutti.checkpoint.training_state import TrainingState
from tutti.errors import CheckpointError, TuttiError
from tutti.parallel.layout import Cut, Layout, TensorShard, to_local
from tutti.parallel.part_guards import reading_parts
from tutti.parallel.saved_values import pack_scalar

OptimizerGroup = tuple[dict[str, Any], list[str]]
"""Settings of an optimizer's parameter group, and the names of its parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPart:
    """One part of a tensor that a rank writes.

    Attributes:
        shape: shape of the global tensor.
        cuts: which part of it this is.
        replicated: see StoredTensor.
    """

    key: Key
    shape: tuple[int, ...]
    dtype: str
    cuts: tuple[Cut, ...] = ()
    replicated: bool = False

    @property
    def stored_as(self) -> str:
        """The part's key in the rank's file."""
        return stored_as(self.key)


@dataclass(slots=True)
class Contribution:
    """One rank's message to the others about its part of a checkpoint.

    Attributes:
        parts: the parts of tensors that it writes.
        order: names of the model's tensors on this rank, as keys, in order.
        tied: further names of these tensors -> the first name.
        groups: for each optimizer, its parameter groups.
        scalars: for each optimizer, its scalars by parameter and key.
        digests: hashes of optimizer state that must be equal on all ranks.
        other_state: for each optimizer, state that belongs to no parameter.
        extra_state: what modules return from get_extra_state, by name.
        generators: states of this rank's random generators.
        residuals: how the buckets of this rank's error feedback are made up.
        replica: plain values of a diverged replica.
        sees_folder: whether rank 0's temporary folder is visible from this host.
        failure: why this rank cannot contribute.
    """

    parts: list[WrittenPart] = field(default_factory=list)
    order: dict[str, None] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    groups: list[list[OptimizerGroup]] = field(default_factory=list)
    scalars: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    digests: dict[Key, str] = field(default_factory=dict)
    other_state: list[dict[str, Any]] = field(default_factory=list)
    extra_state: dict[str, Any] = field(default_factory=dict)
    generators: dict[str, Any] = field(default_factory=dict)
    residuals: dict[str, Any] | None = None
    replica: dict[str, Any] = field(default_factory=dict)
    sees_folder: bool = True
    failure: str | None = None


@dataclass(slots=True)
class Collected:
    """This rank's contribution, and the tensors that it writes."""

    contribution: Contribution
    tensors: list[TensorToWrite] = field(default_factory=list)

    def add(self, key: Key, shard: TensorShard, tensor: torch.Tensor, *, replicated: bool = False) -> None:
        """Add a tensor to what this rank writes.

        Args:
            key: identifies the global tensor.
            shard: which part of it this rank holds.
            tensor: the values.
            replicated: see StoredTensor.

        Raises:
            CheckpointError: the tensor does not have the shape of the shard.
        """
        if tuple(tensor.shape) != shard.local_shape:
            raise CheckpointError(
                f"{' '.join(filter(None, key[1:]))} has shape {tuple(tensor.shape)} on this rank, its layout says "
                f"{shard.local_shape}; leave the shapes of parameters as prepare made them"
            )
        part = WrittenPart(
            key=key, shape=shard.shape, dtype=dtype_name(tensor.dtype), cuts=shard.cuts, replicated=replicated
        )
        self.contribution.parts.append(part)
        self.tensors.append(tensor_to_write(part.stored_as, tensor))


def collect(training: TrainingState, collected: Collected, *, everything: bool = False) -> None:
    """Collect the model, optimizers and generators of this rank.

    Args:
        training: the state to save.
        collected: what this rank writes; changed in place.
        everything: also what another rank would write.

    Raises:
        CheckpointError: something cannot be written; the message names it.
    """
    contribution = collected.contribution
    contribution.generators = read_generators()
    for name, first, tensor in named_tensors(training.parallel.model, training.parallel.layout):
        if name != first:
            contribution.tied[name] = first
        if first in contribution.order:
            continue
        contribution.order[first] = None
        if everything or training.parallel.layout.counts(name):
            part = to_local(tensor.detach())
            collected.add((MODEL, first, ""), shard_here(training.parallel.layout, name, part), part)
    contribution.extra_state = {
        name: module.get_extra_state() for name, module in extra_states(training.parallel.model)
    }
    names = training.parallel.layout.state_names(training.parallel.model, training.parallel.optimizers)
    for number, optimizer in enumerate(training.parallel.optimizers):
        _collect_optimizer(training.parallel.layout, number, optimizer, names[number], collected, everything)


def _collect_optimizer(
    layout: Layout,
    number: int,
    optimizer: Optimizer,
    names: dict[nn.Parameter, str],
    collected: Collected,
    everything: bool,
) -> None:
    """Collect one optimizer's groups, the state of its parameters, and state that belongs to none of them."""
    with reading_parts():
        contribution, state_dict = collected.contribution, optimizer.state_dict()
    states, groups = state_dict["state"], state_dict["param_groups"]
    numbers = parameter_numbers(optimizer, groups)
    contribution.groups.append([])
    contribution.scalars.append({})
    for group, live in zip(groups, optimizer.param_groups, strict=True):
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        members = [layout.first_name(_name(names, p, optimizer)) for p in live["params"]]
        contribution.groups[-1].append((settings, members))
    for parameter, place in numbers.items():
        if place in states:
            writes = everything or layout.counts_state(names[parameter])
            _collect_state(layout, number, names[parameter], parameter, states[place], collected, writes)
    rest = {key: value for key, value in states.items() if key not in set(numbers.values())}
    others = {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")}
    contribution.other_state.append({"state": rest, **others})


def parameter_numbers(optimizer: Optimizer, groups: list[dict[str, Any]]) -> dict[nn.Parameter, Any]:
    """Return the number that identifies each parameter of the optimizer in a state_dict with these `groups`."""
    return {
        parameter: place
        for live, group in zip(optimizer.param_groups, groups, strict=True)
        for parameter, place in zip(live["params"], group["params"], strict=True)
    }


def _name(names: dict[nn.Parameter, str], parameter: nn.Parameter, optimizer: Optimizer) -> str:
    if parameter not in names:
        raise CheckpointError(
            f"{type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} that is not in the model, "
            "so no checkpoint can name it; register it in the model before prepare"
        )
    return names[parameter]


def _collect_state(
    layout: Layout,
    number: int,
    name: str,
    parameter: nn.Parameter,
    state: dict[str, Any],
    collected: Collected,
    writes: bool,
) -> None:
    """Collect the state of one parameter.

    State of the parameter's shape is cut like it; scalars are written once; other tensors must be equal on all ranks.
    """
    shard = state_shard_here(layout, name, parameter)
    first = layout.first_name(name)
    for key, value in state.items():
        value = to_local(value) if isinstance(value, torch.Tensor) else value
        if isinstance(value, torch.Tensor) and value.dim() and tuple(value.shape) == shard.local_shape:
            if writes:
                collected.add((number, first, str(key)), shard, value)
        elif isinstance(value, torch.Tensor) and value.numel() > 1:
            collected.contribution.digests[(number, first, str(key))] = _digest(value)
            if writes:
                whole = TensorShard(shape=tuple(value.shape))
                collected.add((number, first, str(key)), whole, value, replicated=bool(shard.cuts))
        elif writes:
            collected.contribution.scalars[-1].setdefault(first, {})[key] = pack_scalar(value)


def named_tensors(model: nn.Module, layout: Layout) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield (name, first name of the tensor, tensor) of this rank's parameters and persistent buffers.

    A tied tensor comes once under each of its names.
    """
    seen: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        persistent = {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}
        for key, tensor in [*module._parameters.items(), *persistent.items()]:
            if tensor is not None:
                name = f"{prefix}.{key}" if prefix else key
                first = layout.first_name(name)
                if seen.setdefault(first, tensor) is not tensor:  # was tied at prepare, but is no longer
                    first = name
                yield name, first, tensor


def shard_here(layout: Layout, name: str, part: torch.Tensor) -> TensorShard:
    """Return this rank's shard of a tensor; if no mechanism cut it, the whole tensor in its present shape."""
    return layout.shards.get(name) or TensorShard(shape=tuple(part.shape))


def state_shard_here(layout: Layout, name: str, parameter: nn.Parameter) -> TensorShard:
    """Return this rank's shard of optimizer state of the parameter called `name`."""
    return layout.states.shards.get(name) or shard_here(layout, name, to_local(parameter.detach()))


def extra_states(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name in a state_dict, module) of modules that override get_extra_state."""
    for prefix, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{prefix}._extra_state" if prefix else "_extra_state", module


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()


def read_generators() -> dict[str, Any]:
    """Return this rank's generator states (Python's, NumPy's, torch's), as plain numbers and tensors."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }


def restore_generators(state: dict[str, Any]) -> None:
    """Set the generators to states from `read_generators`."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])


def find_conflict(contributions: list[Contribution]) -> str | None:
    """Return why these contributions make no checkpoint, the same sentence on every rank; None if they do."""
    for rank, contribution in enumerate(contributions):
        if contribution.failure is not None:
            return f"rank {rank}: {contribution.failure}" if len(contributions) > 1 else contribution.failure
    digests: dict[Key, str] = {}
    for contribution in contributions:
        for key, digest in contribution.digests.items():
            if digests.setdefault(key, digest) != digest:
                return (
                    f"the optimizer's state {key[2]!r} of {key[1]} does not have the parameter's shape and differs "
                    "between ranks, so no other number of ranks could resume from it; use an optimizer whose state has "
                    "the shape of the parameter, or a plan that leaves this parameter whole"
                )
    return None


def merge_contributions(
    training: TrainingState, contributions: list[Contribution], identifier: str
) -> tuple[CheckpointIndex, bytes]:
    """Merge all ranks' contributions into one checkpoint's index and run state.

    Args:
        training: the state to save.
        contributions: every rank's, by rank.
        identifier: tells this checkpoint apart from others.

    Returns:
        The index, which lacks the files, and the bytes of run.pt.

    Raises:
        CheckpointError: some state is neither a plain value nor a tensor.
    """
    parts: dict[Key, list[tuple[int, WrittenPart]]] = {}
    for rank, contribution in enumerate(contributions):
        for part in contribution.parts:
            parts.setdefault(part.key, []).append((rank, part))
    present = {name for contribution in contributions for name in contribution.order}
    names = [
        name for name in dict.fromkeys([*training.parallel.layout.names, *contributions[0].order]) if name in present
    ]
    optimizers: list[dict[str, dict[str, StoredTensor]]] = [{} for _ in training.parallel.optimizers]
    rank_state: dict[str, dict[str, StoredTensor]] = {}
    averages: dict[str, dict[str, StoredTensor]] = {}
    for (number, name, state), written in parts.items():
        if number != MODEL:
            target = {RANK_STATE: rank_state, AVERAGE: averages}[number] if number < 0 else optimizers[number]
            target.setdefault(name, {})[state] = _stored_tensor(written)
    index = CheckpointIndex(
        step=training.progress.step,
        world_size=training.parallel.world.world_size,
        mesh={str(axis): degree for axis, degree in training.parallel.mesh.degrees.items()},
        id=identifier,
        model={name: _stored_tensor(parts[(MODEL, name, "")]) for name in names},
        tied={name: first for contribution in contributions for name, first in contribution.tied.items()},
        optimizers=tuple(optimizers),
        rank_state=rank_state,
        averages=averages,
    )
    return index, _to_bytes(run_state_of(training, contributions))


def _stored_tensor(written: list[tuple[int, WrittenPart]]) -> StoredTensor:
    """List the parts of one tensor; if several ranks wrote the same part, the first is listed."""
    first = written[0][1]
    parts: dict[Any, StoredPart] = {}
    for rank, part in written:
        parts.setdefault(part.cuts, StoredPart(file=rank_file(rank), key=part.stored_as, cuts=part.cuts))
    return StoredTensor(shape=first.shape, dtype=first.dtype, parts=tuple(parts.values()), replicated=first.replicated)


def run_state_of(training: TrainingState, contributions: list[Contribution]) -> dict[str, Any]:
    """Return the contents of run.pt, merged from the contributions of some ranks, by rank."""
    progress, batch = training.progress, training.parallel.plan.batch
    return {
        "seed": training.parallel.seed,
        "batch": [batch.global_batch_size, batch.unit],
        "ramp": [list(pair) for pair in batch.ramp],
        "step": progress.step,
        "samples_seen": progress.samples_seen,
        "tokens_seen": progress.tokens_seen,
        "clocks": [[clock.updates, clock.base_steps] for clock in progress.clocks],
        "recent_losses": {name: list(losses) for name, losses in progress.recent_losses.items()},
        "epoch": training.loader.epoch,
        "position": training.loader.position,
        "before": training.loader.before,
        "world_size": training.parallel.world.world_size,
        "optimizers": [
            _optimizer_state(training, number, contributions) for number in range(len(training.parallel.optimizers))
        ],
        "schedules": training.schedules.state_dict(),
        "scaler": training.scaler.state_dict(),
        "noise": asdict(training.noise.averages),
        "callbacks": _callback_states(training),
        "extra_state": {
            name: state for one_rank in contributions[::-1] for name, state in one_rank.extra_state.items()
        },
        "generators": [contribution.generators for contribution in contributions],
        "residuals": [contribution.residuals for contribution in contributions],
        "mode": training.parallel.plan.sync.mode,
        "raised_microbatches": training.raised_microbatches,
        "averages": {name: average.updates for name, average in training.averages.items()},
        "replicas": [contribution.replica for contribution in contributions],
    }


def _callback_states(training: TrainingState) -> dict[str, Any]:
    """Return rank 0's states of the callbacks.

    Raises:
        CheckpointError: a callback failed, which all ranks must learn of.
    """
    try:
        return {} if training.callbacks is None else training.callbacks.state_dict()
    except TuttiError as error:
        raise CheckpointError(str(error)) from error


def _optimizer_state(training: TrainingState, number: int, contributions: list[Contribution]) -> dict[str, Any]:
    """Merge groups in the user's order, scalars of every parameter, and rank 0's state that belongs to none."""
    stated = training.parallel.layout.states.groups
    groups: list[OptimizerGroup] = []
    for place, (settings, _) in enumerate(contributions[0].groups[number]):
        in_order = stated[number][place] if number < len(stated) and place < len(stated[number]) else []
        present = {
            training.parallel.layout.first_name(n): None
            for one_rank in contributions
            for n in one_rank.groups[number][place][1]
        }
        order = dict.fromkeys([*(name for name in in_order if name in present), *present])
        groups.append((settings, list(order)))
    scalars: dict[str, dict[str, Any]] = {}
    for contribution in contributions:
        for name, values in contribution.scalars[number].items():
            scalars[name] = {**values, **scalars.get(name, {})}
    other_state = contributions[0].other_state[number]
    return {"groups": [[settings, names] for settings, names in groups], "scalars": scalars, "other_state": other_state}


def _to_bytes(run_state: dict[str, Any]) -> bytes:
    """Return the bytes that torch.save writes; refuse state that torch.load(weights_only=True) cannot read back."""
    try:
        return _readable_bytes(run_state)
    except Exception as error:
        plain = "keep only numbers, strings, lists, dicts and tensors in"
        for callback, state in run_state["callbacks"].items():
            if (reason := _unreadable(state)) is not None:
                raise CheckpointError(
                    f"what state_dict of callback {callback} returns is not made of plain values and could not be read "
                    f"back ({reason}); {plain} it"
                ) from None
        raise CheckpointError(
            f"state apart from tensors is not made of plain values and could not be read back ({_first_line(error)}); "
            f"{plain} the state of optimizers, the scheduler and modules"
        ) from None


def _readable_bytes(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=True)
    return buffer.getvalue()


def _unreadable(state: Any) -> str | None:
    """Return why a state cannot be saved or read back; None if it can."""
    try:
        _readable_bytes(state)
    except Exception as error:
        return _first_line(error)
    return None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
