"""Compares what must be equal on all ranks: hyperparameters, modules, modes, the samples' order and the replicas."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from tutti.data.fingerprint import values_digest
from tutti.errors import RankMismatchError
from tutti.trainer.guard.findings import code_of, has_whole_modules, warn
from tutti.trainer.guard.replicas import (
    Checksums,
    Held,
    buffer_checksums,
    checksums,
    named_optimizers,
    refuse_unequal,
    states_of,
    unequal,
    weights_of,
)
from tutti.trainer.run_state import Run
from tutti.trainer.step_message import StepPlace, describe_places, place_in

_UNCOMPARED = frozenset({"params", "param_names", "fused", "foreach"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """What one rank has, by name; ranks are compared name by name.

    Attributes:
        hyperparameters: of each optimizer's groups.
        modules: type and settings of each module.
        modes: whether each module trains.
        loss: name and code of the loss function.
        place: where the rank is in the data.
        order: digest of the epoch's samples; empty for a stream.
        stream: digest of the values of a stream's first global batch; None for other data.
        tensors: checksums of the weights and of the optimizers' state.
        buffers: checksums of the buffers.
        data_index: ranks with equal ones compute the same samples.
        batch: digest of this rank's microbatches; None where ranks take parts of it.
    """

    hyperparameters: dict[str, Any]
    modules: dict[str, str]
    modes: dict[str, bool]
    loss: dict[str, str]
    place: StepPlace
    order: dict[str, str]
    stream: str | None
    tensors: Checksums = field(repr=False)
    buffers: Checksums = field(repr=False)
    data_index: int
    batch: str | None


def check_agreement(run: Run, loss: Callable[..., Any], pieces: list[Any]) -> None:
    """Compare the ranks, and warn of a model that does not train. Collective.

    Raises:
        RankMismatchError: on every rank, naming what differs, the ranks and the remedy.
    """
    held = {**weights_of(run), **states_of(run)}
    views: list[RankView] = run.loop.watch.gather("agreement of ranks", _view(run, loss, pieces, held))
    _warn_of_modes(run, views)
    difference = next(_differences(views), None)
    if difference is not None:
        raise RankMismatchError(f"step {run.state.progress.step + 1}: {difference}")
    refuse_unequal(run, f"step {run.state.progress.step + 1}", [view.tensors for view in views], held)
    run.loop.guard.unequal_buffers = {name for name, _, _ in unequal([view.buffers for view in views])}


def check_modes(run: Run) -> None:
    """Compare only the modes of modules. Collective.

    Raises:
        RankMismatchError: on every rank.
    """
    everyone: list[dict[str, bool]] = run.loop.watch.gather("modes", _modes(run))
    for rank, modes in enumerate(everyone):
        difference = next(_unequal_modes(everyone[0], modes, rank), None)
        if difference is not None:
            raise RankMismatchError(f"step {run.state.progress.step + 1}: {difference}")


def check_replicas(run: Run, when: str) -> None:
    """Compare hyperparameters, weights and optimizer state. Collective.

    Args:
        run: the run.
        when: what the message begins with.

    Raises:
        RankMismatchError: on every rank.
    """
    held = {**weights_of(run), **states_of(run)}
    views: list[tuple[dict[str, Any], Checksums]] = run.loop.watch.gather(
        when, (_hyperparameters(run), checksums(held))
    )
    for rank, (hyperparameters, _) in enumerate(views):
        difference = next(_unequal_rates(views[0][0], hyperparameters, rank), None)
        if difference is not None:
            raise RankMismatchError(f"{when}: {difference}")
    refuse_unequal(run, when, [sums for _, sums in views], held)


def _view(run: Run, loss: Callable[..., Any], pieces: list[Any], held: Held) -> RankView:
    parallel, whole = run.parallel, has_whole_modules(run)
    modules = dict(parallel.model.named_modules()) if whole else {}
    code = code_of(loss)
    loader = run.state.loader
    epoch = {} if loader.source.is_stream else {"the epoch": loader.epoch_batches(loader.epoch)[0]}
    parts = parallel.mesh.degree("space", "context") > 1
    return RankView(
        hyperparameters=_hyperparameters(run),
        modules={name: _settings(module) for name, module in modules.items()},
        modes=_modes(run),
        loss={} if not hasattr(code, "co_code") else {"the loss function": f"{code.co_name} {_digest(code.co_code)}"},
        place=place_in(loader, run.state.progress.step, len(run.loop.accumulation.results)),
        order={name: _digest(np.ascontiguousarray(indices).tobytes()) for name, indices in epoch.items()},
        stream=loader.stream_digest,
        tensors=checksums(held),
        buffers=buffer_checksums(parallel.model) if whole else {},
        data_index=parallel.mesh.data_index,
        batch=None if parts else values_digest(pieces),
    )


def _hyperparameters(run: Run) -> dict[str, Any]:
    """The settings of the Job and of the optimizers, by name, most telling first."""
    parallel, named = run.parallel, named_optimizers(run.parallel.optimizers)
    settings = {f"{name!r} of the Job": repr(value) for name, value in asdict(run.settings).items()}
    kinds = {f"the class of optimizer {number}": type(one).__name__ for number, one in enumerate(parallel.optimizers)}
    groups = {
        f"{key!r} of group {number} of {name}": _plain(value)
        for name, optimizer in named.items()
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key not in _UNCOMPARED and not callable(value)
    }
    return (
        settings
        | kinds
        | groups
        | (_members(run) if parallel.mesh.degree("replicate") == parallel.world.world_size else {})
    )


def _members(run: Run) -> dict[str, str]:
    """How many parameters each group of the optimizers has, with a digest of their names."""
    names = run.parallel.layout.state_names(run.parallel.model, run.parallel.optimizers)
    found = {}
    for position, (name, optimizer) in enumerate(named_optimizers(run.parallel.optimizers).items()):
        for number, group in enumerate(optimizer.param_groups):
            members = [names[position].get(parameter, "") for parameter in group["params"]]
            found[f"'params' of group {number} of {name}"] = (
                f"{len(members)} parameters ({_digest(' '.join(members).encode())[:4]})"
            )
    return found


def _unequal_rates(first: dict[str, Any], other: dict[str, Any], rank: int) -> Iterator[str]:
    for name, one, another in _unequal(first, other):
        yield (
            f"{name} is {one} on rank 0 and {another} on rank {rank}, so weights would drift apart; set "
            "hyperparameters on all ranks alike"
        )


def _modes(run: Run) -> dict[str, bool]:
    return {n: m.training for n, m in run.parallel.model.named_modules()} if has_whole_modules(run) else {}


def _unequal_modes(first: dict[str, bool], other: dict[str, bool], rank: int) -> Iterator[str]:
    for name, one, another in _unequal(first, other):
        yield (
            f"module {name or 'the model'!r} is in {_mode(one)} mode on rank 0 and in {_mode(another)} mode on "
            f"rank {rank}; call train() and eval() on all ranks alike"
        )


def _differences(views: list[RankView]) -> Iterator[str]:
    """Yield what differs between rank 0 and each other rank, most telling first."""
    for rank, view in enumerate(views):
        yield from _unequal_rates(views[0].hyperparameters, view.hyperparameters, rank)
        for name, first, other in _unequal(views[0].modules, view.modules):
            yield (
                f"module {name or 'the model'!r} is {first} on rank 0 and {other} on rank {rank}; build the same model "
                "on every rank"
            )
        yield from _unequal_modes(views[0].modes, view.modes, rank)
        for _, first, other in _unequal(views[0].loss, view.loss):
            names = first.split()[0], other.split()[0]
            yield (
                f"the loss function is {names[0]!r} on rank 0 and {names[1]!r}, of other code, on rank {rank}; train "
                "with one loss on all ranks"
            )
        for name, _, _ in _unequal(views[0].order, view.order):
            yield (
                f"the order of samples in {name} differs between rank 0 and rank {rank}, so samples are seen twice or "
                "never; seed the sampler the same on every rank"
            )
        if view.place.digest != views[0].place.digest:
            yield describe_places([each.place for each in views])
        if view.stream != views[0].stream:
            yield (
                f"the stream gives other samples on rank {rank} than on rank 0, so samples are seen twice or never; "
                "yield the whole stream in one order on every rank: tutti divides it"
            )
        partner = next(number for number, other in enumerate(views) if other.data_index == view.data_index)
        if view.batch != views[partner].batch:
            yield (
                f"ranks {partner} and {rank} compute the same samples together, but have read other values; make what "
                "the dataset and collate_fn return depend on the sample only, not on the rank"
            )


def _warn_of_modes(run: Run, views: list[RankView]) -> None:
    if all(view.modes and not any(view.modes.values()) for view in views):
        warn(
            run,
            f"{type(run.parallel.model).__name__} is in evaluation mode in training steps on all ranks, so dropout is "
            "off and norms do not follow the data; models from from_pretrained start in it, and model.eval() stays; "
            "call model.train()",
        )


def _unequal(first: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(name, value, other[name]) for name, value in first.items() if name in other and other[name] != value]


def _plain(value: Any) -> Any:
    """A hyperparameter as text, which is equal where the value is."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    return repr(value) if isinstance(value, int | float | str | bool | tuple | list | None) else type(value).__name__


def _settings(module: nn.Module) -> str:
    """The type of a module; with the settings of those of torch, which are numbers."""
    lists = nn.ParameterList | nn.ParameterDict  # which name devices and the sizes of parts
    own = type(module).__module__.startswith("torch.nn.") and not list(module.children())
    own = own and not isinstance(module, lists)
    return f"{type(module).__name__}({module.extra_repr() if own else ''})"


def _mode(training: bool) -> str:
    return "training" if training else "evaluation"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
