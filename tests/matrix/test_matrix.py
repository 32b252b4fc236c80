"""The quick half of the matrix is exact, cell by cell; and the matrix sees what is wrong."""

import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from against_one import Trained
from matrix.cell import Comparison, Outcome, Reference
from matrix.launch import judge
from matrix.plans import columns
from tutti.parallel.layout import Layout
from tutti.parallel.mesh import Mesh

RUN = Path(__file__).parent / "run.py"
CELLS = [(row, column.name) for column in columns().values() for row in column.quick]
FIRST = CELLS[::6]
LATER = [cell for cell in CELLS if cell not in FIRST]


@functools.cache
def quick(group: int | None) -> dict[tuple[str, str], dict[str, Any]]:
    """Cells of the quick half, made by the command itself: the first ones, or a group of the later ones."""
    only = [f"--only={family}:{plan}" for family, plan in (FIRST if group is None else LATER[group::4])]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cells.json"
        command = [sys.executable, str(RUN), "--quick", *only, "--limit", "60", "--json", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        assert path.exists(), done.stdout + done.stderr
        return {(cell["family"], cell["plan"]): cell for cell in json.loads(path.read_text())["cells"]}


@pytest.mark.parametrize(("family", "plan"), [*FIRST, *(pytest.param(*cell, marks=pytest.mark.long) for cell in LATER)])
def test_a_quick_cell_is_exact(family: str, plan: str) -> None:
    """Every sixth of them, plan by plan, in `make test`; the others in `make long`, whose PART=1/4 has one group."""
    group = None if (family, plan) in FIRST else LATER.index((family, plan)) % 4
    cell = quick(group)[family, plan]
    if cell["verdict"] == "not built":
        pytest.skip(f"no mechanism for {cell['detail']}")
    assert cell["verdict"] == "exact", cell["detail"]


def done(gap: float, where: str = "step 1: gradient of a") -> Outcome:
    return Outcome(kind="done", gap=gap, excess=gap, where=where)


REFUSED = Outcome(kind="refused", sentence="mesh.space = 2: module head has no image; use replicate")
PEER = Outcome(kind="failed", sentence="Traceback ...\nRuntimeError: Connection closed by peer [127.0.0.1]:1")


@pytest.mark.parametrize(
    ("outcomes", "verdict", "words"),
    [
        ([done(1e-15), done(2e-13)], "exact", "step 1"),
        ([done(1e-15), done(1e-6, "after step 5: b")], "WRONG", "after step 5: b"),
        ([done(float("inf"), "b: no rank holds all of it")], "WRONG", "no rank"),
        ([REFUSED, REFUSED], "refused", "no image"),
        ([REFUSED, PEER], "CRASH", "closed by peer"),
        ([REFUSED, done(0.0)], "CRASH", "not all ranks"),
        ([PEER, Outcome(kind="failed", sentence="Traceback ...\nKeyError: 'x'")], "CRASH", "KeyError"),
        ([Outcome(kind="failed", sentence="HANG: rank-1: trainer/step.py:80 finish")], "HANG", "step.py:80"),
    ],
)
def test_one_verdict_from_all_ranks(outcomes: list[Outcome], verdict: str, words: str) -> None:
    got, detail, _ = judge(outcomes, 1e-11)
    assert got == verdict
    assert words in detail


def compared(part: torch.Tensor, name: str, parts: list[tuple[int, int]], counts: bool = True) -> Comparison:
    """A rank's part compared with one device's weight 0 .. 5, and whether the ranks' `parts` cover it."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.arange(6.0))
    layouts = []
    for start, stop in parts:
        layouts.append(Layout.of(model, Mesh({}, 0)))
        layouts[-1].cut("weight", 0, (start, stop))
    whole = {"weight": torch.arange(6.0)}
    comparison = Comparison(Reference(trained=Trained([], [], whole, {})))
    comparison.parts(layouts[0], iter([(name, part)]), whole, "after")
    everyone = [[("weight", layout.shard_of("weight"), counts)] for layout in layouts]
    world = SimpleNamespace(gather=lambda mine: everyone)
    run = SimpleNamespace(parallel=SimpleNamespace(layout=layouts[0], world=world))
    comparison.covers(run, ["weight"], whole, "after", once=True)
    return comparison


def test_parts_that_agree_and_cover_the_whole() -> None:
    assert compared(torch.arange(3.0), "weight", [(0, 3), (3, 6)]).gap == 0.0


@pytest.mark.parametrize(
    ("part", "name", "parts", "counts", "words"),
    [
        (torch.tensor([0.0, 1.0, 2.1]), "weight", [(0, 3), (3, 6)], True, "after weight"),
        (torch.tensor([0.0, float("nan"), 2.0]), "weight", [(0, 3), (3, 6)], True, "after weight"),
        (torch.arange(4.0), "weight", [(0, 3), (3, 6)], True, "shape (4,) instead of (3,)"),
        (torch.arange(3.0), "other", [(0, 3), (3, 6)], True, "one device has none"),
        (torch.arange(3.0), "weight", [(0, 3), (4, 6)], True, "no rank holds all"),
        (torch.arange(3.0), "weight", [(0, 3), (2, 6)], True, "not counted once"),
        (torch.arange(3.0), "weight", [(0, 3), (3, 6)], False, "not counted once"),
    ],
)
def test_what_is_wrong_is_seen(
    part: torch.Tensor, name: str, parts: list[tuple[int, int]], counts: bool, words: str
) -> None:
    comparison = compared(part, name, parts, counts)
    assert comparison.excess > 1e-3
    assert words in comparison.where


def test_noise_of_low_precision_is_allowed_and_no_more() -> None:
    whole = {"weight": torch.ones(3)}
    comparison = Comparison(Reference(trained=Trained([], [], whole, {}), noise={"weight": 0.02}))
    comparison.values(torch.ones(3) * 1.05, whole["weight"], 0.0, "after", "weight")
    assert comparison.excess == 0.0
    comparison.values(torch.ones(3) * 1.2, whole["weight"], 0.0, "after", "weight")
    assert comparison.excess == pytest.approx(0.2 - 3 * 0.02, rel=1e-3)
