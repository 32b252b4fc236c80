"""Several trainings in one launch: a launch costs more than a small training."""

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from against_one import Subject, Trained, on_one, train
from harness import run_ranks

Case = tuple[Callable[[], Subject], dict[str, Any]]
"""A subject, and the fields of its plan."""


def train_cases(cases: dict[str, Case], steps: int, look: Callable[[Any], dict[str, Any]] | None) -> dict[str, Trained]:
    """Every case, one after another in the same ranks."""
    results = {}
    for number, (name, (make, plan)) in enumerate(cases.items()):
        os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{number}")
        results[name] = train(make, plan, steps, torch.float64, look)
    return results


def on_ranks(
    cases: dict[str, Case], world_size: int, *, steps: int = 4, look: Callable[[Any], dict[str, Any]] | None = None
) -> list[dict[str, Trained]]:
    """Every case on `world_size` ranks, one result a rank."""
    return run_ranks(train_cases, world_size, cases, steps, look)


@functools.cache
def once(make: Callable[[], Subject], num_microbatches: int = 2, steps: int = 4) -> Trained:
    """The same on one device, trained once however many plans are compared with it."""
    return on_one(make, steps=steps, batch={"num_microbatches": num_microbatches})


def refusals(cases: list[Case], steps: int = 1) -> list[str]:
    """What each case says on this rank instead of training so many steps."""
    said = []
    for make, plan in cases:
        try:
            train(make, plan, steps, torch.float64)
            said.append("trained")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def assert_refused(ranks: list[list[str]], words: Sequence[str]) -> None:
    """On every rank each case was refused with its words."""
    for rank in ranks:
        for said, got in zip(words, rank, strict=True):
            assert got.startswith("PlanError"), got
            assert said in got, got
