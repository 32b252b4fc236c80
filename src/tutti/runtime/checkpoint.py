"""Checkpoints: everything a run resumes from, at any number of ranks; written whole or not at all."""

import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tutti.errors import CheckpointError
from tutti.runtime.state import Run

_FORMAT = 1


def save_checkpoint(run: Run) -> tuple[Path, int]:
    """Write a checkpoint of the run as it stands; returns its folder and size in bytes.

    Rank 0 writes into a temporary folder, which then takes its name in one atomic step, so a kill or a full disk
    leaves the previous checkpoints whole. Raises CheckpointError on every rank if rank 0 fails.
    """
    generators = run.world.gather(_generators())
    failure, nbytes = None, 0
    path = run.folder.checkpoints / f"step-{run.progress.step:08d}"
    if run.world.is_main:
        try:
            nbytes = _write(path, _state(run, generators))
            _prune(run.folder.checkpoints, run.settings.keep_checkpoints)
        except (OSError, RuntimeError) as error:
            failure = str(error).splitlines()[0]
    failure, nbytes = run.world.broadcast((failure, nbytes))
    if failure is not None:
        last = latest_checkpoint(run.folder.path)
        raise CheckpointError(
            f"checkpoint of step {run.progress.step} could not be written to {path}: {failure}; earlier checkpoints "
            f"are whole ({last.name if last else 'there is none'}). Free space or name another folder, then resume"
        )
    return path, nbytes


def load_checkpoint(run: Run, path: Path) -> None:
    """Put a checkpoint's state into a prepared run. Raises CheckpointError when it does not fit, naming what."""
    found = run.world.gather((path / "state.pt").exists())
    state = _read(path / "state.pt") if found[run.world.rank] else None
    if not all(found):  # hosts that share no disk get rank 0's
        state = run.world.broadcast(state)
    if state is None:
        raise CheckpointError(f"{path} holds no checkpoint (no state.pt); name a run folder or a checkpoint in it")
    _check_fits(run, state, path)
    run.model.load_state_dict(state["model"])
    for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    if run.scheduler is not None and state["scheduler"] is not None:
        run.scheduler.load_state_dict(state["scheduler"])
    run.scaler.load_state_dict(state["scaler"])
    run.loader.epoch, run.loader.position = state["epoch"], state["position"]
    for name in ("step", "samples_seen", "tokens_seen"):
        setattr(run.progress, name, state[name])
    _restore_generators(state["generators"][run.world.rank % len(state["generators"])])


def _read(file: Path) -> dict[str, Any]:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{file} cannot be read: {reason}; name an earlier checkpoint") from None


def latest_checkpoint(path: Path) -> Path | None:
    """The newest whole checkpoint of a run folder, or `path` itself if it is one."""
    if (path / "state.pt").exists():
        return path
    found = sorted(p for p in (path / "checkpoints").glob("step-*") if (p / "state.pt").exists())
    return found[-1] if found else None


def _state(run: Run, generators: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "seed": run.settings.seed,
        "batch": [run.plan.batch.global_batch_size, run.plan.batch.unit],
        "step": run.progress.step,
        "samples_seen": run.progress.samples_seen,
        "tokens_seen": run.progress.tokens_seen,
        "epoch": run.loader.epoch,
        "position": run.loader.position,
        "world_size": run.world.world_size,
        "model": run.model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "scheduler": None if run.scheduler is None else run.scheduler.state_dict(),
        "scaler": run.scaler.state_dict(),
        "generators": generators,
    }


def _write(path: Path, state: dict[str, Any]) -> int:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.mkdir(parents=True, exist_ok=True)
    try:
        with (temporary / "state.pt").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
            nbytes = file.tell()
        if path.exists():
            path.rename(temporary / "replaced")
        temporary.rename(path)
        shutil.rmtree(path / "replaced", ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return nbytes


def _prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints; the newest one always stays."""
    for old in sorted(folder.glob("step-*"))[: -max(keep, 1)]:
        shutil.rmtree(old, ignore_errors=True)


def _check_fits(run: Run, state: dict[str, Any], path: Path) -> None:
    batch = [run.plan.batch.global_batch_size, run.plan.batch.unit]
    if state["batch"] != batch:
        raise CheckpointError(
            f"{path} was made with global_batch_size = {state['batch'][0]} {state['batch'][1]}, the Job says "
            f"{batch[0]} {batch[1]}; a run resumes with the batch it began with"
        )
    if state["seed"] != run.settings.seed:
        raise CheckpointError(
            f"{path} was made with seed = {state['seed']}, the Job says {run.settings.seed}; the order of the data "
            "would change: use the same seed"
        )
    own, saved = run.model.state_dict(), state["model"]
    for name in [*own, *saved]:
        if name not in own or name not in saved or own[name].shape != saved[name].shape:
            raise CheckpointError(
                f"{path} does not fit the model at {name!r}: checkpoint {_shape(saved, name)}, model "
                f"{_shape(own, name)}; build the model the checkpoint was made from"
            )
    if len(state["optimizers"]) != len(run.optimizers):
        raise CheckpointError(
            f"{path} holds {len(state['optimizers'])} optimizers, prepare got {len(run.optimizers)}; pass the same"
        )


def _shape(state: dict[str, Any], name: str) -> str:
    return f"has shape {tuple(state[name].shape)}" if name in state else "does not have it"


def _generators() -> dict[str, Any]:
    """This rank's generator states, as plain numbers and tensors."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }


def _restore_generators(state: dict[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
