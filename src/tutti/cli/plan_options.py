"""The options of `tutti plan` on the command line."""

from pathlib import Path
from typing import Any

import click

from tutti.cli.options import hosts_option, request_option
from tutti.commands.plan_options import OBJECTIVES
from tutti.config.option_syntax import BYTES, SECONDS, parse_quantity


def searching(function: Any) -> Any:
    """Add the options that say what to search for, and within which limits."""
    options = (
        click.option("--data-parallel", is_flag=True, help="Consider only data parallelism."),
        click.option("--objective", type=click.Choice(OBJECTIVES), default="throughput", show_default=True,
                     help="What the best plan minimises (throughput: the time of a step)."),
        click.option("--epochs", type=click.FloatRange(0, min_open=True), help="Length of training in epochs."),
        click.option("--samples", type=click.FloatRange(0, min_open=True),
                     help="Length of training in the unit of the batch (samples or tokens)."),
        click.option("--memory", type=SIZE, help="Limit on the memory of a rank, such as 60gb."),
        click.option("--budget", type=click.FloatRange(0, min_open=True), help="Limit on the cost of training."),
        click.option("--deadline", type=DURATION, help="Limit on the time of training, such as 12h or 3d."),
        click.option("--critical-batch", type=click.FloatRange(0, min_open=True),
                     help="For time-to-quality: the batch size at which twice the least samples are needed."),
        click.option("--least-samples", type=click.FloatRange(0, min_open=True),
                     help="For time-to-quality: samples needed to reach the quality with very small batches."),
        click.option("--noise-from", type=click.Path(path_type=Path), metavar="RUN",
                     help="For time-to-quality: take both from a run that measured them (Job(noise_every=...))."),
        click.option("--target-quality", metavar="NAME.METRIC=VALUE",
                     help="With --noise-from or --samples-from: the quality to reach, such as test.accuracy=0.9."),
        click.option("--samples-from", multiple=True, type=click.Path(path_type=Path), metavar="RUN",
                     help="For --relax: a run whose samples to --target-quality count; name an exact run and others."),
        click.option("--seconds", type=click.FloatRange(0.1),
                     help="Time limit of the search in seconds; 7 if not given, 40 if devices differ."),
        click.option("--what-if", multiple=True, metavar="CHANGE",
                     help="Plan for another cluster: link=10gbit, devices=256, memory=80gb, speed=2x, storage=2GB/s."),
        click.option("--diff", nargs=2, type=click.Path(path_type=Path), metavar="A B",
                     help="Print how two plan files differ; nothing is planned."),
        click.option("--top", type=click.IntRange(1), default=10, show_default=True,
                     help="Number of alternatives to show."),
    )  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


def showing(function: Any) -> Any:
    """Add the options that show or measure more."""
    options = (
        click.option("--html", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
                     help="Write a page with the timeline of a step, memory and alternatives."),
        click.option("--scaling", is_flag=True,
                     help="Show the best plan's speed against the number of devices, and where more stop paying."),
        click.option("--try", "tries", type=click.IntRange(1), metavar="N",
                     help="Run the N best plans on this machine for a few steps, and choose by the measurements."),
        click.option("--try-steps", type=click.IntRange(1), default=8, show_default=True,
                     help="Steps of each plan that is tried; the first 2 are not counted."),
    )  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


def on_cluster(function: Any) -> Any:
    """Add the options that ask a cluster what it has."""
    options = (
        click.option("--on", metavar="NAME",
                     help="Ask this cluster what it has, and plan for it: slurm, ssh or kubernetes."),
        click.option("--nnodes", type=click.IntRange(1), help="With --on: plan for so many nodes."),
        request_option,
        hosts_option,
        click.option("--links", metavar="LINK,...",
                     help="With --on: what joins devices and nodes, such as nvlink3,8*ib-hdr."),
        click.option("--price", "prices", multiple=True, metavar="NAME=PRICE", callback=_prices,
                     help="With --on: price of a device and hour, by partition or kind of GPU."),
    )  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


def _prices(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> tuple[tuple[str, float], ...]:
    found = []
    for text in texts:
        name, _, price = text.rpartition("=")
        try:
            found.append((name, float(price)))
        except ValueError:
            found.append(("", 0.0))
        if not found[-1][0] or not 0 <= found[-1][1] < float("inf"):
            raise click.BadParameter(f"{text!r} is no price; write it like gpu=2.10")
    return tuple(found)


class QuantityType(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions of click only
    """A number with a unit, such as "60gb"; the value is in the base unit of the table of units."""

    def __init__(self, name: str, units: dict[str, float], example: str) -> None:
        self.name, self._units, self._example = name, units, example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number in the base unit; fail with an example if the text is not understood."""
        if isinstance(value, float):
            return value
        number = parse_quantity(str(value), self._units)
        if number is None or number <= 0:
            self.fail(f"{value!r} is not understood; write it like {self._example}", param, ctx)
        return number


SIZE = QuantityType("size", BYTES, "60gb")
DURATION = QuantityType("duration", SECONDS, "12h")
