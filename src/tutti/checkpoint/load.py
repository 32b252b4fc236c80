"""Loading: a checkpoint's state becomes a prepared run's, whatever plan either has; each rank reads what it holds."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tutti.checkpoint.collect import MODEL, extra_states, held_of, named_tensors, numbering, unpack
from tutti.checkpoint.generators import restore_generators
from tutti.checkpoint.kept import load_kept
from tutti.checkpoint.old import open_any
from tutti.checkpoint.replica import load_replica
from tutti.checkpoint.source import Source, Target, shared_source, transfer
from tutti.checkpoint.tensors import dtype_of
from tutti.errors import CheckpointError
from tutti.optim.noise import Averages
from tutti.parallel.layout import Layout, local
from tutti.trainer.run_state import Run


def load_checkpoint(run: Run, path: Path) -> None:
    """Put a checkpoint's state into a prepared run. Every rank must call it.

    Raises CheckpointError, on every rank, when it does not fit, naming what.
    """
    source = shared_source(run.world, path, lambda one: open_any(one, run.layout.states.groups))
    _agree(run, _run_misfit(run, source) or model_misfit(run, source) or _optimizer_misfit(run, source))
    load_model(run, source)
    _load_optimizers(run, source)
    small = source.small
    if small["scaler"]:  # else the checkpoint's run had none, and this one begins with its first scale
        run.scaler.load_state_dict(small["scaler"])
    load_kept(run, source)
    for name, module in extra_states(run.model):
        if name in small["extra_state"]:
            module.set_extra_state(small["extra_state"][name])
    if run.scheduler is not None and small["scheduler"] is not None:
        run.scheduler.load_state_dict(small["scheduler"])
    run.noise.averages = Averages(**small.get("noise", {}))
    run.loader.epoch, run.loader.position = small["epoch"], small["position"]
    run.loader.before = small.get("before", 0)
    for name in ("step", "samples_seen", "tokens_seen"):
        setattr(run.progress, name, small[name])
    run.progress.base_steps = small.get("base_steps", float(run.progress.step))
    load_replica(run, source)
    restore_generators(small["generators"][run.world.rank % len(small["generators"])])


def load_model(run: Run, source: Source) -> None:
    """Give parameters and buffers the values of a source that fits."""
    targets: dict[int, Target] = {}
    for name, _, tensor in named_tensors(run.model, run.layout):
        key = source.key_of(name)
        if key is not None and id(tensor) not in targets:
            part = local(tensor.detach())
            targets[id(tensor)] = Target(key=key, out=part, cuts=held_of(run.layout, name, part).cuts)
    transfer(run.world, source, list(targets.values()))
    for follow in run.layout.states.loaded:
        follow()


def _agree(run: Run, misfit: str | None) -> None:
    found = [words for words in run.world.gather(misfit) if words is not None]
    if found:
        raise CheckpointError(found[0])


def _run_misfit(run: Run, source: Source) -> str | None:
    """What of the run itself is not as the checkpoint's."""
    batch = [run.plan.batch.global_batch_size, run.plan.batch.unit]
    saved = source.small["batch"]
    if saved != batch:
        return (
            f"{source.path} was made with global_batch_size = {saved[0]} {saved[1]}, the Job says {batch[0]} "
            f"{batch[1]}; a run resumes with the batch it began with"
        )
    ramp, was = [list(pair) for pair in run.plan.batch.ramp], source.small.get("ramp", [])
    if ramp != was:
        return (
            f"{source.path} was made with batch_ramp = {was}, the Job says {ramp}; the batches would be cut otherwise: "
            "use the same"
        )
    if source.small["seed"] != run.settings.seed:
        return (
            f"{source.path} was made with seed = {source.small['seed']}, the Job says {run.settings.seed}; the order "
            "of the data would change: use the same seed"
        )
    return None


def model_misfit(run: Run, source: Source) -> str | None:
    """The first parameter or buffer that is on one side only, or of another shape."""
    stored = {name: entry.shape for (where, name, _), entry in source.entries.items() if where == MODEL}
    stored.update({name: stored[first] for name, first in source.tied.items()})
    own: dict[str, tuple[int, ...]] = {}
    for name, _, tensor in named_tensors(run.model, run.layout):
        own[name] = held_of(run.layout, name, local(tensor.detach())).shape
    everywhere = {**run.layout.names, **own}  # of what other ranks hold, the layout knows the shape
    for name in [*own, *stored]:
        if name not in everywhere or name not in stored or everywhere[name] != stored[name]:
            return (
                f"{source.path} does not fit the model at {name!r}: checkpoint {_shape(stored, name)}, model "
                f"{_shape(everywhere, name)}; build the model the checkpoint was made from"
            )
    return None


def _shape(shapes: dict[str, tuple[int, ...]], name: str) -> str:
    return f"has shape {tuple(shapes[name])}" if name in shapes else "does not have it"


def _optimizer_misfit(run: Run, source: Source) -> str | None:
    saved = source.small["optimizers"]
    if len(saved) != len(run.optimizers):
        return f"{source.path} holds {len(saved)} optimizers, prepare got {len(run.optimizers)}; pass the same"
    for number, theirs in enumerate(saved):
        kind = type(run.optimizers[number]).__name__
        groups = run.layout.states.groups[number]
        if len(theirs["groups"]) != len(groups):
            return (
                f"{source.path}: optimizer {number} ({kind}) was saved with {len(theirs['groups'])} parameter groups "
                f"and has {len(groups)} now; make it with the same groups"
            )
        for place, ((_, names), here) in enumerate(zip(theirs["groups"], groups, strict=True)):
            different = sorted(set(names) ^ {run.layout.first_name(name) for name in here})
            if different:
                return (
                    f"{source.path}: group {place} of optimizer {number} ({kind}) was saved "
                    f"{'with' if different[0] in names else 'without'} {different[0]!r}; make it with the same groups"
                )
    return _cut_misfit(run, source)


def _cut_misfit(run: Run, source: Source) -> str | None:
    """State that has not the parameter's shape fits only where the parameter is whole."""
    names = run.layout.state_names(run.model, run.optimizers)
    for (number, name, key), entry in source.entries.items():
        if number == MODEL or entry.anywhere or entry.shape == run.layout.names.get(name, entry.shape):
            continue
        if any(run.layout.first_name(n) == name and run.layout.state_of(n).cuts for n in names[number].values()):
            return (
                f"{source.path}: the optimizer's state {key!r} of {name} has shape {entry.shape}, not the parameter's, "
                "and this plan cuts the parameter; resume with a plan that leaves it whole"
            )
    return None


def _load_optimizers(run: Run, source: Source) -> None:
    """Through each optimizer's own load_state_dict, with this rank's parts of the state."""
    names = run.layout.state_names(run.model, run.optimizers)
    targets: list[Target] = []
    said: list[dict[str, Any]] = []
    for number, optimizer in enumerate(run.optimizers):
        now, saved = optimizer.state_dict(), source.small["optimizers"][number]
        states: dict[Any, dict[str, Any]] = {}
        for parameter, place in numbering(optimizer, now["param_groups"]).items():
            if parameter in names[number]:
                state = _state(run.layout, source, number, names[number][parameter], parameter, targets)
                states.update({place: state} if state else {})
        groups = [
            {**settings, "params": group["params"]}
            for (settings, _), group in zip(saved["groups"], now["param_groups"], strict=True)
        ]
        beside = saved["beside"]
        said.append({**beside, "state": {**beside.get("state", {}), **states}, "param_groups": groups})
    transfer(run.world, source, targets)
    for optimizer, state_dict in zip(run.optimizers, said, strict=True):
        optimizer.load_state_dict(state_dict)


def _state(
    layout: Layout, source: Source, number: int, name: str, parameter: nn.Parameter, targets: list[Target]
) -> dict[str, Any]:
    """State of one parameter: its scalars, and empty tensors that `targets` will fill."""
    first = layout.first_name(name)
    held = layout.states.held.get(name) or held_of(layout, name, local(parameter.detach()))
    scalars = source.small["optimizers"][number]["scalars"].get(first, {})
    state = {key: unpack(packed) for key, packed in scalars.items()}
    for key in source.state_keys(number, first):
        entry = source.entries[key]
        cut = held.cuts if entry.shape == held.shape else ()
        shape = held.local_shape if entry.shape == held.shape else entry.shape
        state[key[2]] = torch.empty(shape, dtype=dtype_of(entry.dtype))
        targets.append(Target(key=key, out=state[key[2]], cuts=cut))
    return state
