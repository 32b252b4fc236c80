"""Pairs of programs: with tutti, the losses, the weights and the printed lines are those of the framework left.

What the frameworks compute was recorded on two processes (coming_from_reference.py). The programs of tutti run on one
rank and on two.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from coming_from_reference import REFERENCE, load_program, sums_of
from test_pairs import run_main

import tutti
from harness import run_ranks

QUICK = ["ddp", "accelerate", "lightning", "deepspeed"]
NAMES = [*QUICK, "hf_trainer"]
Result = tuple[list[float], list[str], dict[str, list[float]]]


def run_tutti(name: str, scale: float = 1.0) -> Result:
    """Run a program of tutti in float64; return its step losses, its lines, and sums over its weights."""
    losses: list[float] = []
    jobs: list[tutti.Job] = []

    class Recorded(tutti.Job):
        def prepare(self, model: Any, optimizer: Any, dataset: Any, loss_fn: Any = None, **options: Any) -> Any:
            jobs.append(self)
            if scale != 1:
                loss_fn = scaled(scale)
            return super().prepare(model, optimizer, dataset, loss_fn, **options)

        def step(self, batch: Any) -> float:
            losses.append(super().step(batch))
            return losses[-1]

    torch.set_default_dtype(torch.float64)
    program = load_program(f"{name}_tutti")
    program.tutti = SimpleNamespace(**{**{key: getattr(tutti, key) for key in tutti.__all__}, "Job": Recorded})
    lines = run_main(program, [])
    return losses, lines, sums_of(jobs[0].state_dict())


def scaled(scale: float) -> Callable[[Any, Any], Any]:
    return lambda outputs, batch: scale * outputs.loss


def run_all(names: Sequence[str]) -> dict[str, Result]:
    return {name: run_tutti(name) for name in names}


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    return json.loads(REFERENCE.read_text(encoding="utf-8"))


def check(name: str, result: Result, expected: dict[str, Any]) -> None:
    losses, lines, sums = result
    assert len(losses) >= 30
    precise = "deepspeed" not in expected["versions"]  # which computes norms in float32
    assert losses == pytest.approx(expected["losses"], rel=1e-9 if precise else 1e-7), name
    assert losses[-1] < 0.9 * losses[0]
    assert len(expected["weights"]) >= 6
    for tensor, values in expected["weights"].items():
        assert sums[tensor] == pytest.approx(values, rel=1e-8 if precise else 1e-5, abs=1e-8 if precise else 1e-5), (
            name,
            tensor,
        )
    assert lines == expected["lines"]


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, QUICK),
        pytest.param(2, ["hf_trainer"], marks=pytest.mark.long),
        pytest.param(1, NAMES, marks=pytest.mark.long),
    ],
)
def test_programs_compute_what_they_did_under_their_frameworks(
    ranks: int, names: list[str], reference: dict[str, Any]
) -> None:
    for name, result in run_ranks(run_all, ranks, names)[0].items():
        check(name, result, reference[name])


@pytest.mark.long
def test_the_trainer_multiplies_losses_by_ranks_and_steps_unless_told_otherwise(reference: dict[str, Any]) -> None:
    """As the page says: for a classification model. Two processes with two accumulation steps make it four times."""
    losses, _, sums = run_ranks(run_tutti, 1, "hf_trainer", 4.0)[0]
    expected = reference["hf_trainer_default"]
    assert losses == pytest.approx(expected["losses"], rel=1e-9)
    assert all(sums[name] == pytest.approx(values, rel=1e-8, abs=1e-8) for name, values in expected["weights"].items())


@pytest.mark.long
@pytest.mark.parametrize(("name", "package"), [("ddp", "torch"), *((name, name) for name in NAMES[1:])])
def test_a_framework_that_is_installed_still_computes_what_was_recorded(
    name: str, package: str, reference: dict[str, Any], tmp_path: Path
) -> None:
    for needed in ("accelerate", "transformers") if name == "hf_trainer" else (package,):
        pytest.importorskip(needed)
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(reference[name]["processes"])]
    script = [str(REFERENCE.with_suffix(".py")), name, str(tmp_path / "now.json")]
    done = subprocess.run(
        [sys.executable, "-m", *launch, *script], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    now = json.loads((tmp_path / "now.json").read_text(encoding="utf-8"))[name]
    assert now["losses"] == pytest.approx(reference[name]["losses"], rel=1e-9)
    assert now["weights"].keys() == reference[name]["weights"].keys()
    for tensor, values in reference[name]["weights"].items():
        assert now["weights"][tensor] == pytest.approx(values, rel=1e-8, abs=1e-8), tensor
