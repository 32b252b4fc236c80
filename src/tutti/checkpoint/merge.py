"""What all ranks contribute becomes one index and one small state."""

import io
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from tutti.checkpoint.collect import KEPT, MODEL, Contribution, Group, Key, Piece
from tutti.checkpoint.index import Entry, Index, Part, index_to_text, rank_file
from tutti.errors import CheckpointError
from tutti.trainer.run_state import Run


def refusal(contributions: list[Contribution]) -> str | None:
    """Why no checkpoint can be made of these, the same on every rank; None when one can."""
    for rank, theirs in enumerate(contributions):
        if theirs.failure is not None:
            return f"rank {rank}: {theirs.failure}" if len(contributions) > 1 else theirs.failure
    digests: dict[Key, str] = {}
    for theirs in contributions:
        for key, digest in theirs.digests.items():
            if digests.setdefault(key, digest) != digest:
                return (
                    f"the optimizer's state {key[2]!r} of {key[1]} is not of the parameter's shape and differs between "
                    "ranks, so that no other number of ranks could take it up; use an optimizer whose state has the "
                    "shape of the parameter, or a plan that leaves this parameter whole"
                )
    return None


def merge(run: Run, contributions: list[Contribution]) -> tuple[str, bytes]:
    """The text of index.json and the bytes of run.pt. Raises CheckpointError for state that is no plain value."""
    entries: dict[Key, list[tuple[int, Piece]]] = {}
    for rank, theirs in enumerate(contributions):
        for piece in theirs.pieces:
            entries.setdefault(piece.key, []).append((rank, piece))
    tied = {name: first for theirs in contributions for name, first in theirs.tied.items()}
    held = {name for theirs in contributions for name in theirs.order}
    names = [name for name in dict.fromkeys([*run.layout.names, *contributions[0].order]) if name in held]
    optimizers: list[dict[str, dict[str, Entry]]] = [{} for _ in run.optimizers]
    kept: dict[str, dict[str, Entry]] = {}
    for key, pieces in entries.items():
        if key[0] == KEPT:
            kept.setdefault(key[1], {})[key[2]] = _entry(pieces)
        elif key[0] != MODEL:
            optimizers[key[0]].setdefault(key[1], {})[key[2]] = _entry(pieces)
    index = Index(
        step=run.progress.step,
        world_size=run.world.world_size,
        mesh={str(axis): degree for axis, degree in run.mesh.degrees.items()},
        made=uuid4().hex,
        model={name: _entry(entries[(MODEL, name, "")]) for name in names},
        tied=tied,
        optimizers=tuple(optimizers),
        kept=kept,
    )
    return index_to_text(index), _bytes(_small(run, contributions))


def _entry(pieces: list[tuple[int, Piece]]) -> Entry:
    """Parts of one tensor; what two ranks wrote alike is named once."""
    first = pieces[0][1]
    parts: dict[Any, Part] = {}
    for rank, piece in pieces:
        parts.setdefault(piece.cuts, Part(file=rank_file(rank), key=piece.stored_as, cuts=piece.cuts))
    return Entry(shape=first.shape, dtype=first.dtype, parts=tuple(parts.values()), anywhere=first.anywhere)


def _small(run: Run, contributions: list[Contribution]) -> dict[str, Any]:
    progress, batch = run.progress, run.plan.batch
    return {
        "seed": run.settings.seed,
        "batch": [batch.global_batch_size, batch.unit],
        "ramp": [list(pair) for pair in batch.ramp],
        "step": progress.step,
        "samples_seen": progress.samples_seen,
        "tokens_seen": progress.tokens_seen,
        "base_steps": progress.base_steps,
        "epoch": run.loader.epoch,
        "position": run.loader.position,
        "before": run.loader.before,
        "world_size": run.world.world_size,
        "optimizers": [_optimizer(run, number, contributions) for number in range(len(run.optimizers))],
        "scheduler": None if run.scheduler is None else run.scheduler.state_dict(),
        "scaler": run.scaler.state_dict(),
        "noise": asdict(run.noise.averages),
        "extra_state": {name: state for theirs in contributions[::-1] for name, state in theirs.extra_state.items()},
        "generators": [theirs.generators for theirs in contributions],
        "kept": [theirs.kept for theirs in contributions],
        "mode": run.plan.sync.mode,
        "replicas": [theirs.replica for theirs in contributions],
    }


def _optimizer(run: Run, number: int, contributions: list[Contribution]) -> dict[str, Any]:
    """Groups in the user's order, scalars of every parameter once, and what is not of a parameter as rank 0 has it."""
    known = run.layout.states.groups
    groups: list[Group] = []
    for place, (settings, _) in enumerate(contributions[0].groups[number]):
        stated = known[number][place] if number < len(known) and place < len(known[number]) else []
        here = {run.layout.first_name(n): None for theirs in contributions for n in theirs.groups[number][place][1]}
        order = dict.fromkeys([*(name for name in stated if name in here), *here])
        groups.append((settings, list(order)))
    scalars: dict[str, dict[str, Any]] = {}
    for theirs in contributions:
        for name, values in theirs.scalars[number].items():
            scalars[name] = {**values, **scalars.get(name, {})}
    beside = contributions[0].beside[number]
    return {"groups": [[settings, names] for settings, names in groups], "scalars": scalars, "beside": beside}


def _bytes(small: dict[str, Any]) -> bytes:
    """As torch.save writes it; refused if torch.load(weights_only=True) would not read it back."""
    buffer = io.BytesIO()
    try:
        torch.save(small, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"state beside the tensors is not of plain values and could not be read again ({reason}); keep numbers, "
            "strings, lists, dicts and tensors in the state of optimizers, the scheduler and modules"
        ) from None
    return buffer.getvalue()


def read_small(file: Path) -> dict[str, Any]:
    """What a file of plain values and tensors holds. Raises CheckpointError."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{file} cannot be read: {reason}; name an earlier checkpoint") from None
