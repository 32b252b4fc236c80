"""Which checkpoints of a run stay: the newest, and the best by a value of the evaluations."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tutti.checkpoint.index import checkpoint_folders, checkpoint_step, complete_checkpoints
from tutti.checkpoint.tensor_files import remove_folder
from tutti.comm.world import World
from tutti.config.run_folder import RunFolder
from tutti.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class BestMetric:
    """The value that tells which checkpoint is best.

    Attributes:
        metric: its name: alone ("accuracy"), or with the name of the evaluation ("val/accuracy", "val_accuracy").
        mode: whether a lower or a higher value is better.
    """

    metric: str
    mode: Literal["min", "max"]

    def value_in(self, values: Mapping[str, float]) -> float | None:
        """Return the value among those of one evaluation, which are called "name/metric"; None if it is not there."""
        for name, value in values.items():
            if self.metric in (name, name.replace("/", "_", 1), name.partition("/")[2]) and not math.isnan(value):
                return value
        return None

    def best_of(self, values: Mapping[int, float]) -> int | None:
        """Return the step with the best value, the earliest of equal ones; None if there is no value."""
        sign = 1 if self.mode == "min" else -1
        return min(values, key=lambda step: (sign * values[step], step), default=None)


def parse_best(text: str, place: str) -> BestMetric:
    """Parse "METRIC:min" or "METRIC:max".

    Args:
        text: the text.
        place: the option, for messages.

    Raises:
        PlanError: it is neither.

    Examples:
        >>> parse_best("val/accuracy:max", "keep_best")
        BestMetric(metric='val/accuracy', mode='max')
    """
    metric, _, mode = text.rpartition(":")
    if not metric or mode not in ("min", "max"):
        raise PlanError(f"{place} = {text[:80]!r}; write the value's name and which is better, such as 'val/loss:min'")
    return BestMetric(metric=metric, mode="min" if mode == "min" else "max")


def values_by_step(run: Path) -> dict[int, dict[str, float]]:
    """Return the results of a run folder's evaluations by step and "name/metric"; torn lines are left out."""
    values: dict[int, dict[str, float]] = {}
    with suppress(OSError), RunFolder(run).metrics.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if '"evaluate"' not in line:
                continue
            with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
                row = json.loads(line)
                if row["kind"] == "evaluate":
                    given = {f"{row['name']}/{name}": float(v) for name, v in row["values"].items() if v is not None}
                    values.setdefault(int(row["step"]), {}).update(given)
    return values


def values_of_checkpoints(run: Path, best: BestMetric) -> dict[int, float]:
    """Return the values of one metric at the steps of a run folder's checkpoints."""
    steps = {checkpoint_step(path) for path in complete_checkpoints(run)}
    found = {step: best.value_in(values) for step, values in values_by_step(run).items() if step in steps}
    return {step: value for step, value in found.items() if value is not None}


@dataclass(slots=True, kw_only=True)
class Retention:
    """Decides which checkpoints of a run folder are removed.

    Attributes:
        keep: how many of the newest checkpoints stay, at least 1.
        best: the value whose best checkpoint stays, too; None: only the newest.
        values: that value by step, as far as it was evaluated.
        passed_over: checkpoints that a resume passed over; they do not count as newest or best ones, and stay: what
            could not be read then may be sound. `tutti checkpoint prune` removes what is damaged.
    """

    keep: int
    best: BestMetric | None = None
    values: dict[int, float] = field(default_factory=dict)
    passed_over: set[Path] = field(default_factory=set)

    def superfluous(self, checkpoints: Sequence[Path], newest: Path | None = None) -> list[Path]:
        """Return which of these checkpoints may be removed.

        Args:
            checkpoints: complete checkpoints, oldest first.
            newest: a checkpoint that stays, whatever its step; None: that of the last step.
        """
        sound = [path for path in checkpoints if path not in self.passed_over and path != newest]
        kept = set(sound[len(sound) - max(self.keep, 1) + (newest is not None) :])
        if self.best is not None:
            there = {checkpoint_step(path): path for path in [*sound, *([newest] if newest else [])]}
            step = self.best.best_of({step: value for step, value in self.values.items() if step in there})
            kept |= set() if step is None else {there[step]}
        return [path for path in sound if path not in kept]

    def improves(self, step: int, values: Mapping[str, float]) -> bool:
        """Note the values of an evaluation; return whether the step is now the best one."""
        value = None if self.best is None else self.best.value_in(values)
        if self.best is None or value is None:
            return False
        self.values[step] = value
        return self.best_step() == step

    def best_step(self) -> int | None:
        """Return the step with the best value so far; None if there is none."""
        return None if self.best is None else self.best.best_of(self.values)


def retention_of(
    world: World,
    run: Path,
    *,
    keep: int,
    best: BestMetric | None,
    stored: Mapping[int, Mapping[str, float]] | None = None,
) -> Retention:
    """Return the retention of a run that begins in a run folder, which may have checkpoints. Collective.

    Args:
        world: the ranks.
        run: the run folder.
        keep: how many of the newest checkpoints stay.
        best: the value whose best checkpoint stays, too.
        stored: on rank 0, the results of evaluations at the steps of checkpoints in a store; None: there is none.
    """
    if best is None:
        return Retention(keep=keep)
    here: dict[int, float] = {}
    if world.is_main and stored is None:
        here = values_of_checkpoints(run, best)
    elif stored is not None:
        by_step = ((step, best.value_in(values)) for step, values in stored.items())
        here = {step: value for step, value in by_step if value is not None}
    values = world.broadcast(here)
    return Retention(keep=keep, best=best, values=values)


def prune(retention: Retention, run: Path, newest: Path | None = None) -> list[Path]:
    """Remove the superfluous checkpoints of a run folder; return those that were removed.

    Args:
        retention: decides which.
        run: the run folder.
        newest: a checkpoint that was completed now, and stays.
    """
    removed = []
    if newest is not None:
        retention.passed_over.discard(newest)  # written again
    complete = complete_checkpoints(run)
    torn = [path for path in checkpoint_folders(run) if path not in complete and path not in retention.passed_over]
    for path in [*torn, *retention.superfluous(complete, newest)]:
        with suppress(OSError):  # the others are valid even if an old one cannot be removed
            remove_folder(path)
            removed.append(path)
    return removed
