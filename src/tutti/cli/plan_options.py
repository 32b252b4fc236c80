"""What `tutti plan` is asked for: its options, and what they were set to."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tutti.config.vocabulary import Relaxation, Unit

if TYPE_CHECKING:
    from tutti.config.compression import Compression
    from tutti.planner import Objective, PrecisionPolicy


from tutti.config.option_syntax import BYTES, SECONDS, parse_quantity

OBJECTIVES = ("throughput", "device-hours", "cost", "energy", "memory", "time-to-quality")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The command line of `tutti plan`."""

    target: tuple[str, ...]
    cluster: Path | None
    model: Path | None
    global_batch_size: int | None
    unit: Unit
    max_devices: int | None
    nproc: int | None
    precision: "PrecisionPolicy | None"
    allow_microbatches: bool
    data_parallel: bool
    objective: "Objective"
    epochs: float | None
    samples: float | None
    memory: float | None
    budget: float | None
    deadline: float | None
    critical_batch: float | None
    least_samples: float | None
    noise_from: Path | None
    target_quality: str | None
    seconds: float | None
    samples_from: tuple[Path, ...]
    what_if: tuple[str, ...]
    diff: tuple[Path, Path] | None
    top: int
    html: Path | None
    scaling: bool
    tries: int | None
    try_steps: int
    output: Path | None
    mesh: str | None
    compress: "Compression | None"
    relax: Relaxation
    plan: Path | None
    explain: bool
    as_json: bool


def searching(function: Any) -> Any:
    """Options of what is searched for, and within which limits."""
    options = (
        click.option("--data-parallel", is_flag=True, help="Consider data parallelism alone."),
        click.option("--objective", type=click.Choice(OBJECTIVES), default="throughput", show_default=True,
                     help="What the best plan has least of (throughput: time of a step)."),
        click.option("--epochs", type=click.FloatRange(0, min_open=True), help="How long training is, in epochs."),
        click.option("--samples", type=click.FloatRange(0, min_open=True),
                     help="How long training is, in what the batch counts (samples or tokens)."),
        click.option("--memory", type=SIZE, help="A rank may take so much, such as 60gb."),
        click.option("--budget", type=click.FloatRange(0, min_open=True), help="The training may cost so much."),
        click.option("--deadline", type=DURATION, help="The training may take so long, such as 12h or 3d."),
        click.option("--critical-batch", type=click.FloatRange(0, min_open=True),
                     help="For time-to-quality: the batch at which twice the least samples are needed."),
        click.option("--least-samples", type=click.FloatRange(0, min_open=True),
                     help="For time-to-quality: samples that the quality takes with very small batches."),
        click.option("--noise-from", type=click.Path(path_type=Path), metavar="RUN",
                     help="For time-to-quality: both as a run measured them (Job(noise_every=...))."),
        click.option("--target-quality", metavar="NAME.METRIC=VALUE",
                     help="With --noise-from or --samples-from: the quality, as test.accuracy=0.9."),
        click.option("--samples-from", multiple=True, type=click.Path(path_type=Path), metavar="RUN",
                     help="For --relax: samples to --target-quality as runs took them, an exact one and others."),
        click.option("--seconds", type=click.FloatRange(0.1), help="End the search after so long (7; mixed 40)."),
        click.option("--what-if", multiple=True, metavar="CHANGE",
                     help="Plan for another cluster: link=10gbit, devices=256, memory=80gb, speed=2x, storage=2GB/s."),
        click.option("--diff", nargs=2, type=click.Path(path_type=Path), metavar="A B",
                     help="Say how two plan files differ; nothing is planned."),
        click.option("--top", type=click.IntRange(1), default=10, show_default=True, help="Alternatives to show."),
    )  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


def showing(function: Any) -> Any:
    """Options of what else is shown, or measured."""
    options = (
        click.option("--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
                     help="Write a page: the step as it falls, memory, alternatives."),
        click.option("--scaling", is_flag=True,
                     help="The best plan's speed against devices, and where they stop paying."),
        click.option("--try", "tries", type=click.IntRange(1), metavar="N",
                     help="Run the N best plans on this machine for a few steps, and choose by what is measured."),
        click.option("--try-steps", type=click.IntRange(1), default=8, show_default=True,
                     help="Steps of a plan that is tried; the first 2 are not counted."),
    )  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


class QuantityType(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """A number with a unit of a table; the value is in the table's base unit."""

    def __init__(self, name: str, units: dict[str, float], example: str) -> None:
        self.name, self._units, self._example = name, units, example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; fails with an example for what is not understood."""
        if isinstance(value, float):
            return value
        found = parse_quantity(str(value), self._units)
        if found is None or found <= 0:
            self.fail(f"{value!r} is not understood; write it like {self._example}", param, ctx)
        return found


SIZE = QuantityType("size", BYTES, "60gb")
DURATION = QuantityType("duration", SECONDS, "12h")
