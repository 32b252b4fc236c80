"""The matrix: every family by every plan against one device. `make matrix` writes docs/matrix.md and docs/matrix.json.

Exit code 1 if a cell is wrong, crashes or hangs.
"""

import argparse
import json
import sys
import tempfile
import time
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from matrix.families import Family, families  # noqa: E402
from matrix.launch import Cell, Runner  # noqa: E402
from matrix.page import facts, page  # noqa: E402
from matrix.plans import Column, columns  # noqa: E402


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only",
        action="append",
        metavar="FAMILY:PLAN",
        help="globs over names; a part may be left out; may be given several times",
    )
    parser.add_argument("--quick", action="store_true", help="the cells that must be exact")
    parser.add_argument("--jobs", type=int, default=2, help="cells at a time")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for a cell")
    parser.add_argument("--json", type=Path, help="write the cells here")
    parser.add_argument("--merge", type=Path, help="cells of an earlier run (its --json) that stay where not made now")
    parser.add_argument("--page", type=Path, help="write the page here")
    parser.add_argument("--list", action="store_true", help="names of rows and columns, and nothing else")
    return parser.parse_args()


def wanted(only: list[str], quick: bool) -> list[tuple[Family, Column]]:
    """The cells asked for, plan by plan."""
    globs = [(family or "*", plan or "*") for family, _, plan in (words.partition(":") for words in only)]
    return [
        (row, column)
        for column in columns().values()
        for row in families().values()
        if any(fnmatchcase(row.name, family) and fnmatchcase(column.name, plan) for family, plan in globs)
        if not quick or row.name in column.quick
    ]


def merged(earlier: Path, made: list[Cell], seconds: float) -> tuple[list[Cell], float]:
    """The cells of an earlier run with those made now in their places, and the seconds of both."""
    before = json.loads(earlier.read_text())
    new = {(cell.family, cell.plan): cell for cell in made}
    old = [Cell(**cell) for cell in before["cells"]]
    return [new.pop((cell.family, cell.plan), cell) for cell in old] + list(new.values()), before["seconds"] + seconds


def main() -> int:
    args = parse_arguments()
    if args.list:
        print("\n".join(["rows:", *families(), "", "columns:", *columns()]))
        return 0
    cells = wanted(args.only or ["*"], args.quick)
    if not cells:
        print(f"no cell matches {', '.join(args.only)!r}; --list names rows and columns")
        return 2
    started = time.time()

    def say(cell: Cell) -> None:
        gap = "" if cell.gap is None else f" {cell.gap:.1e}"
        print(f"{cell.verdict:9}{gap:8} {cell.family} | {cell.plan} ({cell.seconds:.1f} s) {cell.detail}", flush=True)

    with tempfile.TemporaryDirectory(prefix="tutti-matrix-") as folder:
        results = Runner(Path(folder), args.limit, foresee=not args.quick).run(cells, args.jobs, say)
    seconds = time.time() - started
    if args.merge:
        results, seconds = merged(args.merge, results, seconds)
    summary = facts(seconds, results)
    if args.json:
        args.json.write_text(json.dumps({**summary, "cells": [cell.json() for cell in results]}, indent=1) + "\n")
    if args.page:
        args.page.write_text(page(summary, results))
    print(", ".join(f"{count} {verdict}" for verdict, count in summary["counts"].items()), flush=True)
    return 1 if any(cell.bad for cell in results) else 0


if __name__ == "__main__":
    sys.exit(main())
