"""Loading: put a checkpoint's state into a prepared run, whatever plan either has. Each rank reads its shards."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tutti.checkpoint.checksums import printable
from tutti.checkpoint.contribution import (
    extra_states,
    named_tensors,
    parameter_numbers,
    restore_generators,
    shard_here,
    state_shard_here,
)
from tutti.checkpoint.index import MODEL, RUN_STATE, candidate_checkpoints, checkpoint_step
from tutti.checkpoint.integrity import check_together
from tutti.checkpoint.node_memory import HeldCheckpoint, NodeMemory
from tutti.checkpoint.plain_state import is_dcp, open_weights, with_tied_names
from tutti.checkpoint.rank_state import load_replica_state, load_residuals
from tutti.checkpoint.sources import LoadTarget, Source, open_checkpoint, shared_source, transfer
from tutti.checkpoint.store import CheckpointStore
from tutti.checkpoint.training_state import OptimizerClock, TrainingState
from tutti.comm.world import World
from tutti.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError, TuttiError
from tutti.optim.gradient_noise_scale import NoiseAverages
from tutti.parallel.layout import Layout, to_local
from tutti.parallel.part_guards import reading_parts
from tutti.parallel.saved_values import parse_dtype, unpack_scalar

Candidate = Path | str | HeldCheckpoint
"""A checkpoint that a run may go on from: its folder, its name in a store, or one in memory."""


def load_checkpoint(
    training: TrainingState, path: Path, say: Callable[[str], None], *, rolls_back: bool = False
) -> None:
    """Put a checkpoint's state into a prepared run. Collective.

    Args:
        training: the prepared state, under any plan and number of ranks.
        path: the checkpoint's folder.
        say: called with a sentence about each part of the checkpoint that this run cannot use.
        rolls_back: whether only the model and the optimizers go back to it: steps, data and schedules go on.

    Raises:
        DamagedCheckpointError: on every rank, if the checkpoint is not what was saved; nothing has been loaded then.
        CheckpointError: on every rank, if the checkpoint does not fit; the message names what does not.
    """
    source = shared_source(training.parallel.world, path, open_checkpoint)
    check_together(training.parallel.world, source)
    load_source(training, source, say, rolls_back=rolls_back)


def load_source(
    training: TrainingState, source: Source, say: Callable[[str], None], *, rolls_back: bool = False
) -> None:
    """Put the state of a source into a prepared run. Collective.

    Args:
        training: the prepared state, under any plan and number of ranks.
        source: a whole training state.
        say: called with a sentence about each part of the source that this run cannot use.
        rolls_back: whether only the model and the optimizers go back to it.

    Raises:
        CheckpointError: on every rank, if the source does not fit; the message names what does not.
    """
    with _restoring(source):
        mismatch = _run_mismatch(training, source) or model_mismatch(training, source)
        mismatch = mismatch or _optimizer_mismatch(training, source)
    raise_together(training, mismatch)
    load_model(training, source)
    state = source.run_state
    with _restoring(source):
        _load_optimizers(training, source)
        if state["scaler"]:  # empty if the checkpoint's run had none; then this run starts with its initial scale
            training.scaler.load_state_dict(state["scaler"])
        load_residuals(training, source, say)
    for name, module in extra_states(training.parallel.model):
        if name in state["extra_state"]:
            module.set_extra_state(state["extra_state"][name])
    if rolls_back:
        return
    with _restoring(source):
        _load_progress(training, state)
    if training.callbacks is not None:
        training.callbacks.load_state_dict(state.get("callbacks", {}))
    with _restoring(source):
        load_replica_state(training, source, say)
    with _restoring(source, RuntimeError):
        restore_generators(state["generators"][training.parallel.world.rank % len(state["generators"])])


@contextmanager
def _restoring(source: Source, *also: type[Exception]) -> Iterator[None]:
    """Refuse a part of the run state that does not have the form that its owner saved.

    Args:
        source: the checkpoint.
        also: further errors by which the owner refuses. A RuntimeError of a collective passes through.

    Raises:
        CheckpointError: the part cannot be restored.
    """
    refusals: tuple[type[Exception], ...] = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, *also)
    try:
        yield
    except TuttiError:
        raise
    except refusals as error:
        raise CheckpointError(
            f"{source.path} cannot be restored: {RUN_STATE} holds a state that its owner did not save "
            f"({type(error).__name__}: {printable(error)}); resume from another checkpoint"
        ) from error


def _load_progress(training: TrainingState, state: dict[str, Any]) -> None:
    """Continue at the step, the batch and the learning rate at which the checkpoint was saved."""
    training.schedules.load_state_dict(state["schedules"])
    training.noise.averages = NoiseAverages(**state["noise"])
    training.loader.go_to(state["epoch"], state["position"], state["before"])
    for name in ("step", "samples_seen", "tokens_seen"):
        setattr(training.progress, name, state[name])
    training.progress.recent_losses = {name: list(each) for name, each in state.get("recent_losses", {}).items()}
    training.progress.clocks = [OptimizerClock(*counters) for counters in state["clocks"]]
    clocks = zip(training.parallel.optimizers, training.progress.clocks, strict=False)
    training.schedules.resumed([optimizer for optimizer, clock in clocks if clock.updates])
    training.raised_microbatches = state.get("raised_microbatches")


def load_newest(
    training: TrainingState,
    path: Path | None,
    say: Callable[[str], None],
    *,
    store: CheckpointStore | None = None,
    folder: Path | None = None,
    patient: bool = False,
    rolls_back: bool = False,
    memory: NodeMemory | None = None,
) -> tuple[Candidate, dict[Candidate, str]]:
    """Put the newest sound checkpoint into a prepared run. Collective.

    Args:
        training: the prepared state, under any plan and number of ranks.
        path: a run folder, or a checkpoint, which then must be sound; None: only the store has checkpoints.
        say: called with a sentence about each part of the checkpoint that this run cannot use.
        store: an object store that has checkpoints, too, or has the only ones. Of two of one step, that of `path` is
            taken.
        folder: where a checkpoint of the store is brought to: the folder of this run's checkpoints.
        patient: whether a store that cannot be read is left out, and only said, where `path` has checkpoints.
        rolls_back: whether only the model and the optimizers go back to it.
        memory: has checkpoints, too, or has the only ones. Of two of one step, that in memory is taken.

    Returns:
        The checkpoint, and what is wrong with newer ones that are damaged.

    Raises:
        DamagedCheckpointError: on every rank, if no checkpoint is sound.
        CheckpointError: on every rank, if there is none, or it does not fit.
    """
    held = [] if memory is None else memory.held()
    candidates, unread = _candidates(training.parallel.world, path, store, held, patient=patient)
    if unread is not None:
        say(f"{unread}; only the checkpoints of {path} count")
    passed_over: dict[Candidate, str] = {}
    for candidate in candidates:
        try:
            checkpoint = candidate
            if isinstance(checkpoint, HeldCheckpoint):
                assert memory is not None
                source, damaged_copies = memory.open(checkpoint)
                for finding in damaged_copies:
                    say(f"{checkpoint.name}: {finding}")
                load_source(training, source, say, rolls_back=rolls_back)
                return checkpoint, passed_over
            if not isinstance(checkpoint, Path):
                assert store is not None
                assert folder is not None
                checkpoint = _downloaded(training.parallel.world, store, checkpoint, folder, say)
            load_checkpoint(training, checkpoint, say, rolls_back=rolls_back)
            return checkpoint, passed_over
        except DamagedCheckpointError as error:
            if len(candidates) == 1:
                raise
            passed_over[candidate] = error.finding
    findings = "; ".join(f"{name_of_candidate(each)}: {finding}" for each, finding in passed_over.items())
    place = path or (store.address if store is not None else "")
    raise DamagedCheckpointError(f"no checkpoint of {place} is sound: {findings}; resume another run")


def _candidates(
    world: World, path: Path | None, store: CheckpointStore | None, held: list[HeldCheckpoint], *, patient: bool
) -> tuple[list[Candidate], CheckpointError | None]:
    """Return what may be resumed from, the newest first: paths, names in the store, and what is in memory. Collective.

    Returns:
        They, and why the store was left out, if it was.
    """
    found: tuple[list[Path | str], CheckpointError | None] = ([], None)
    if world.is_main and not (held and path is None and store is None):
        try:
            found = (_candidates_here(path, store), None)
        except CheckpointError as error:
            local = [*candidate_checkpoints(path)] if path is not None and patient else []
            found = ([*local], error)
    candidates, failure = world.broadcast(found)
    if failure is not None and not candidates and not held:
        raise failure
    return sorted([*held, *candidates], key=lambda each: -_step_of(each)), failure


def _step_of(candidate: Candidate) -> int:
    if isinstance(candidate, HeldCheckpoint):
        return candidate.step
    return checkpoint_step(candidate if isinstance(candidate, Path) else Path(candidate.partition(".")[0]))


def name_of_candidate(candidate: Candidate) -> str:
    """Return how messages call a checkpoint: the name of its folder, or of its place in memory."""
    return candidate.name if isinstance(candidate, HeldCheckpoint) else Path(candidate).name


def _candidates_here(path: Path | None, store: CheckpointStore | None) -> list[Path | str]:
    local = [] if path is None else candidate_checkpoints(path)
    if store is None or (path is not None and local == [path]):
        return [*local] or [path or ""]
    stored = store.complete()[::-1]
    if not local and not stored:
        place = " or ".join(str(each) for each in (path, store.address) if each)
        raise NoCheckpointError(f"{place} holds no checkpoint; name a run folder, or a checkpoint in one")
    both: list[tuple[int, int, Path | str]] = [(-checkpoint_step(each), 0, each) for each in local]
    both += [(-each.step, 1, each.name) for each in stored]
    return [candidate for _, _, candidate in sorted(both, key=lambda item: item[:2])]


def _downloaded(world: World, store: CheckpointStore, name: str, folder: Path, say: Callable[[str], None]) -> Path:
    """Bring a checkpoint of the store into a folder, on rank 0; return its path. Collective."""
    brought: tuple[Path | None, CheckpointError | None] = (None, None)
    if world.is_main:
        try:
            checkpoint = next((each for each in store.checkpoints() if each.name == name), None)
            if checkpoint is None:
                raise NoCheckpointError(f"{store.address}/{name} was removed meanwhile; resume again")
            before = time.perf_counter()
            path = store.download(checkpoint, folder)
            seconds = time.perf_counter() - before
            say(f"downloaded {store.address}/{name}: {checkpoint.nbytes / 1e6:,.1f} MB in {seconds:.1f} s")
            brought = (path, None)
        except CheckpointError as error:
            brought = (None, error)
    arrived, failure = world.broadcast(brought)
    if failure is not None:
        raise failure
    assert arrived is not None
    return arrived


def load_weights(training: TrainingState, path: Path) -> None:
    """Give the model the values of a plain state_dict, under any plan. Collective.

    Each rank reads its shards. The names must be exactly the model's; a tied tensor may be stored under any of its
    names.

    Args:
        training: the prepared state.
        path: a .safetensors or .pt file, or a folder in torch's distributed checkpoint format.

    Raises:
        CheckpointError: on every rank, if the file cannot be read or does not fit.
    """
    source = shared_source(training.parallel.world, path, _open_weights)
    source = with_tied_names(source, training.parallel.layout.tied)
    raise_together(training, model_mismatch(training, source))
    load_model(training, source)


def _open_weights(path: Path) -> Source:
    if is_dcp(path):
        from tutti.checkpoint.dcp import open_dcp  # torch.distributed.checkpoint takes 0.2 s to import

        return open_dcp(path)
    return open_weights(path)


def load_model(training: TrainingState, source: Source) -> None:
    """Give parameters and buffers the values of a source that fits. Collective.

    Args:
        training: the prepared state.
        source: a source with no `model_mismatch`.
    """
    targets: dict[int, LoadTarget] = {}
    for name, _, tensor in named_tensors(training.parallel.model, training.parallel.layout):
        key = source.model_key(name)
        if key is not None and id(tensor) not in targets:
            part = to_local(tensor.detach())
            targets[id(tensor)] = LoadTarget(
                key=key, out=part, cuts=shard_here(training.parallel.layout, name, part).cuts
            )
    transfer(training.parallel.world, source, list(targets.values()))
    for update_copies in training.parallel.layout.states.after_load:
        update_copies()


def raise_together(training: TrainingState, mismatch: str | None) -> None:
    """Raise CheckpointError on every rank if any rank has a mismatch. Collective.

    Args:
        training: the prepared state.
        mismatch: this rank's mismatch as a sentence, or None.
    """
    mismatches = [message for message in training.parallel.world.gather(mismatch) if message is not None]
    if mismatches:
        raise CheckpointError(mismatches[0])


def _run_mismatch(training: TrainingState, source: Source) -> str | None:
    """Return a sentence about a setting of the run that must equal the checkpoint's and does not; None if all agree."""
    batch = [training.parallel.plan.batch.global_batch_size, training.parallel.plan.batch.unit]
    saved = source.run_state["batch"]
    if saved != batch:
        return (
            f"{source.path} was made with global_batch_size = {saved[0]} {saved[1]}, the Job says {batch[0]} "
            f"{batch[1]}; resume with the batch that the run started with"
        )
    ramp, saved_ramp = [list(pair) for pair in training.parallel.plan.batch.ramp], source.run_state["ramp"]
    if ramp != saved_ramp:
        return (
            f"{source.path} was made with batch_ramp = {saved_ramp}, the Job says {ramp}; the batches would differ: "
            "use the same batch_ramp"
        )
    if source.run_state["seed"] != training.parallel.seed:
        return (
            f"{source.path} was made with seed = {source.run_state['seed']}, the Job says {training.parallel.seed}; "
            "the order of the data would change: use the same seed"
        )
    return None


def model_mismatch(training: TrainingState, source: Source) -> str | None:
    """Describe the first parameter or buffer that only one side has, or that has another shape; None if all fit."""
    stored = {name: tensor.shape for (number, name, _), tensor in source.tensors.items() if number == MODEL}
    stored.update({name: stored[first] for name, first in source.tied.items()})
    here: dict[str, tuple[int, ...]] = {}
    for name, _, tensor in named_tensors(training.parallel.model, training.parallel.layout):
        here[name] = shard_here(training.parallel.layout, name, to_local(tensor.detach())).shape
    everywhere = {**training.parallel.layout.names, **here}  # the layout knows the shapes of tensors on other ranks
    for name in [*here, *stored]:
        if name not in everywhere or name not in stored or everywhere[name] != stored[name]:
            return (
                f"{source.path} does not fit the model at {name!r}: checkpoint {_describe_shape(stored, name)}, model "
                f"{_describe_shape(everywhere, name)}; build the model that the checkpoint was made from"
            )
    return None


def _describe_shape(shapes: dict[str, tuple[int, ...]], name: str) -> str:
    return f"has shape {tuple(shapes[name])}" if name in shapes else "does not have it"


def _optimizer_mismatch(training: TrainingState, source: Source) -> str | None:
    """Return a sentence about the first optimizer, group or state that does not fit; None if all fit."""
    saved = source.run_state["optimizers"]
    count = len(training.parallel.optimizers)
    if len(saved) != count:
        return f"{source.path} holds {len(saved)} optimizers, prepare got {count}; pass the same optimizers"
    for number, state in enumerate(saved):
        kind = type(training.parallel.optimizers[number]).__name__
        groups = training.parallel.layout.states.groups[number]
        if len(state["groups"]) != len(groups):
            return (
                f"{source.path}: optimizer {number} ({kind}) was saved with {len(state['groups'])} parameter groups "
                f"and has {len(groups)} now; make it with the same groups"
            )
        for place, ((settings, names), here) in enumerate(zip(state["groups"], groups, strict=True)):
            different = sorted(set(names) ^ {training.parallel.layout.first_name(name) for name in here})
            if different:
                return (
                    f"{source.path}: group {place} of optimizer {number} ({kind}) was saved "
                    f"{'with' if different[0] in names else 'without'} {different[0]!r}; make it with the same groups"
                )
            now = training.parallel.optimizers[number].param_groups[place]
            changed = next((name for name in settings if name in now and not _alike(settings[name], now[name])), None)
            if changed is not None:
                return (
                    f"{source.path}: setting {printable(changed, 40)!r} of optimizer {number} ({kind}) is "
                    f"{printable(repr(settings[changed]), 40)}, where it now is {printable(repr(now[changed]), 40)}; "
                    "make it with settings of the same kind"
                )
    return _state_shape_mismatch(training, source)


def _alike(saved: object, now: object) -> bool:
    """Whether an optimizer that has one value of a setting can have the other: numbers for numbers, texts for texts."""
    if saved is None or now is None:
        return True
    for kind in (bool, int | float | torch.Tensor, str, list | tuple, dict):
        if isinstance(now, kind):
            return isinstance(saved, kind) and (kind is bool or not isinstance(saved, bool))
    return True


def _state_shape_mismatch(training: TrainingState, source: Source) -> str | None:
    """Describe optimizer state that lacks its parameter's shape although this plan cuts the parameter; else None."""
    names = training.parallel.layout.state_names(training.parallel.model, training.parallel.optimizers)
    for (number, name, key), stored in source.tensors.items():
        if number < 0 or stored.replicated or stored.shape == training.parallel.layout.names.get(name, stored.shape):
            continue
        here = (n for n in names[number].values() if training.parallel.layout.first_name(n) == name)
        if any(training.parallel.layout.state_shard_of(n).cuts for n in here):
            return (
                f"{source.path}: the optimizer's state {key!r} of {name} has shape {stored.shape}, not the "
                "parameter's, and this plan divides the parameter; resume with a plan that leaves it whole"
            )
    return None


@reading_parts()
def _load_optimizers(training: TrainingState, source: Source) -> None:
    """Give this rank's shards of the state to each optimizer's own load_state_dict. Collective."""
    names = training.parallel.layout.state_names(training.parallel.model, training.parallel.optimizers)
    targets: list[LoadTarget] = []
    state_dicts: list[dict[str, Any]] = []
    for number, optimizer in enumerate(training.parallel.optimizers):
        now, saved = optimizer.state_dict(), source.run_state["optimizers"][number]
        states: dict[Any, dict[str, Any]] = {}
        for parameter, place in parameter_numbers(optimizer, now["param_groups"]).items():
            if parameter in names[number]:
                state = _parameter_state(
                    training.parallel.layout, source, number, names[number][parameter], parameter, targets
                )
                states.update({place: state} if state else {})
        groups = [
            {**settings, "params": group["params"]}
            for (settings, _), group in zip(saved["groups"], now["param_groups"], strict=True)
        ]
        others = saved["other_state"]
        state_dicts.append({**others, "state": {**others.get("state", {}), **states}, "param_groups": groups})
    transfer(training.parallel.world, source, targets)
    for optimizer, state_dict in zip(training.parallel.optimizers, state_dicts, strict=True):
        optimizer.load_state_dict(state_dict)


def _parameter_state(
    layout: Layout, source: Source, number: int, name: str, parameter: nn.Parameter, targets: list[LoadTarget]
) -> dict[str, Any]:
    """Return the state of one parameter: its scalars, and empty tensors that are added to `targets` to be filled."""
    first, shard = layout.first_name(name), state_shard_here(layout, name, parameter)
    scalars = source.run_state["optimizers"][number]["scalars"].get(first, {})
    state = {key: unpack_scalar(packed) for key, packed in scalars.items()}
    for key in source.state_keys(number, first):
        stored = source.tensors[key]
        cuts = shard.cuts if stored.shape == shard.shape else ()
        shape = shard.local_shape if stored.shape == shard.shape else stored.shape
        state[key[2]] = layout.states.allocate(shape, parse_dtype(stored.dtype))
        targets.append(LoadTarget(key=key, out=state[key[2]], cuts=cuts))
    return state
