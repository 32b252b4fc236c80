"""The guard of a training run: each mistake is named on every rank, and its correct twin raises nothing."""

import functools
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import preload, run_ranks
from trainer.guard_scripts import CORRECT, MISTAKES, Script, said
from tutti.reporting.build_report import build_report

preload("tutti.trainer.guard")


def drawn(count: int) -> list[float]:
    generator = torch.Generator().manual_seed(7)
    return [float(torch.rand((), generator=generator)) for _ in range(count)]


def all_said(scripts: dict[str, Script], ranks: int) -> dict[str, tuple[list[str], list[Any]]]:
    return {name: said(name, script, ranks) for name, script in scripts.items()}


def mistakes_said(ranks: int) -> dict[str, tuple[list[str], list[Any]]]:
    return all_said({name: script for name, (script, _) in MISTAKES.items()}, ranks)


def correct_said(ranks: int) -> dict[str, tuple[list[str], list[Any]]]:
    fitting = {name: script for name, script in CORRECT.items() if ranks == 2 or not script.mesh}
    return all_said(fitting, ranks)


@functools.cache
def of_mistakes(ranks: int) -> dict[str, list[str]]:
    return {name: found for name, (found, _) in run_ranks(mistakes_said, ranks, ranks)[0].items()}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name: str) -> None:
    found = of_mistakes(2)[name]
    assert len(found) == 1
    assert re.match(MISTAKES[name][1], found[0]), found[0]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(3, marks=pytest.mark.long)])
def test_a_correct_program_raises_nothing(ranks: int) -> None:
    for results in run_ranks(correct_said, ranks, ranks):
        assert {name: found for name, (found, _) in results.items() if found} == {}
        calls, seen, count = results["counter"][1][0]
        assert calls == seen == count, "the guard's own forwards leave no trace"
        assert results["counting loss"][1] == [(3, 3, 3.0, 3, 4, drawn(3))], "nor do its calls of the loss"


def reported(folder: str) -> list[str]:
    """Train with a mistake; what the report's findings say."""
    said(folder, MISTAKES["token mean"][0], 2)
    run = Path.cwd() / f"guard-{os.getpid()}-{folder}"
    return [] if int(os.environ["RANK"]) else [f.sentence for f in build_report(run).findings if f.code == "GUARD"]


def test_the_report_says_what_was_found() -> None:
    sentences, other = run_ranks(reported, 2, "reported")
    assert other == []
    assert [sentence.startswith("The loss of Sequential is not a mean over samples") for sentence in sentences] == [
        True
    ]
