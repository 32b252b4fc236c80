"""`make bench`: measures tutti against plain PyTorch and writes a dated file for each suite.

python benchmarks/run.py                  all suites
python benchmarks/run.py ddp --quick      one suite, a short run (written to benchmarks/out)
python benchmarks/run.py ddp --set launches=8 --set workloads=mlp,gpt      with other sizes
python benchmarks/run.py plan --resume                                     continue an interrupted run
"""

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# The tests' harness starts ranks, and the examples define the GPT; neither is part of the package.
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples"), str(ROOT / "tests")]

import record  # noqa: E402

SUITES = (
    "ddp",
    "mechanisms",
    "overlap",
    "attention",
    "memory",
    "startup",
    "loading",
    "compress",
    "buckets",
    "plan_search",
    "guard",
    "events",
    "host",
)
ON_REQUEST = (
    "allowances",
    "cluster_start",
    "crossing",
    "faults",
    "links",
    "mixed",
    "nvme",
    "plan",
    "pays",
    "recover",
    "threads",
    "tiers",
    "trades",
)
"""Suites that run only when they are named: they need root, or many minutes."""


def run(suite: str, *, quick: bool, settings: list[str], resume: bool = False, samples: bool = False) -> Path:
    """Measure one suite, print its table and return the file that was written."""
    from importlib import import_module

    module = import_module(suite)
    sizes = changed(module.QUICK if quick else module.Sizes(), settings)
    load_at_start = record.load()
    print(f"{suite}: load {load_at_start:.1f} at start, {dataclasses.asdict(sizes)}", file=sys.stderr)
    more = {"resume": resume} if hasattr(module, "RESUMABLE") else {}
    result: dict[str, Any] = module.measure(sizes, **more)
    _print_table(f"{suite}: {module.__doc__.splitlines()[0]}", *module.rows(result))
    return record.write(suite, result, dataclasses.asdict(sizes), load_at_start, quick=quick, samples=samples)


def changed(sizes: Any, settings: list[str]) -> Any:
    """Return `sizes` with "field=value" settings: integers, or words separated by commas; by semicolons if words
    contain commas.
    """
    values: dict[str, Any] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in {field.name for field in dataclasses.fields(sizes)}:
            raise SystemExit(f"--set {setting}: this suite has no size {name!r}; its sizes are {sizes}")
        words = value.strip(";").split(";" if ";" in value else ",")
        values[name] = tuple(words) if isinstance(getattr(sizes, name), tuple) else int(value)
    return dataclasses.replace(sizes, **values)


def _print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    for position, column in enumerate(header):
        table.add_column(column, justify="right" if position else "left")
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.width = max(console.width, 160)  # no figure is cut short, even in a log
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "suites",
        nargs="*",
        metavar="SUITE",
        help=f"any of {', '.join(SUITES)} (default: all of these), or {', '.join(ON_REQUEST)}",
    )
    parser.add_argument("--quick", action="store_true", help="run few steps, only to see that a suite works")
    parser.add_argument("--set", action="append", default=[], metavar="SIZE=VALUE", help="change a suite's size")
    parser.add_argument("--samples", action="store_true", help="write every sample instead of quartiles")
    parser.add_argument("--resume", action="store_true", help="plan and pays only: continue an interrupted run")
    arguments = parser.parse_args()
    unknown = set(arguments.suites) - {*SUITES, *ON_REQUEST}
    if unknown:
        parser.error(f"unknown suite {', '.join(sorted(unknown))}; choose from {', '.join((*SUITES, *ON_REQUEST))}")
    if arguments.resume and arguments.suites not in (["plan"], ["pays"]):
        parser.error("--resume continues only plan or pays: name exactly one of them")
    for suite in arguments.suites or SUITES:
        written = run(
            suite, quick=arguments.quick, settings=arguments.set, resume=arguments.resume, samples=arguments.samples
        )
        print(f"written: {written.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
