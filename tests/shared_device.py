"""Cases of training on 2 ranks that share the second device of the tests, and what they are compared with."""

import os
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import fakegpu
from against_one import Subject, Trained, train
from matrix.cell import difference, floor_of
from matrix.families import families
from matrix.plans import columns
from tutti.config.compression import parse_compression
from tutti.config.plan import SyncPlan
from tutti.config.sync_notation import parse_sync

STEPS = 3
TIMEOUT_S = "30"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row of the matrix by a plan on 2 ranks."""

    family: str
    fields: dict[str, Any]
    subject: dict[str, Any] = field(default_factory=dict)


def of_column(family: str, column: str) -> Case:
    """The matrix' own case."""
    return Case(family=family, fields=columns()[column].plan(families()[family]))


def by_replicas(family: str, *, sync: str = "", compress: str = "", **subject: Any) -> Case:
    """Two replicas in a consistency mode, or with a codec."""
    plan = parse_sync(sync) if sync else SyncPlan()
    plan = replace(plan, compress=parse_compression(compress) if compress else None)
    return Case(family=family, fields={"mesh": {"replicate": 2}, "batch": {}, "sync": plan}, subject=subject)


def trained_on_cpu(cases: dict[str, Case], by_plan: bool) -> dict[str, Trained]:
    """What this rank computes on its CPU: by the cases' plans, or on one device."""
    os.environ["TUTTI_TIMEOUT_S"] = TIMEOUT_S
    results = {}
    for name, case in cases.items():
        fields = case.fields if by_plan else {"batch": case.fields["batch"]}
        results[name] = _trained(case.family, fields, case.subject)
    return results


def trained_on_device(cases: dict[str, Case]) -> tuple[dict[str, Trained], str]:
    """What this rank of 2 computes on the shared device, up to the first case that fails, and its traceback."""
    fakegpu.load()
    os.environ |= {"TUTTI_SHARE_DEVICE": "1", "TUTTI_TIMEOUT_S": TIMEOUT_S}
    results = {}
    for name, case in cases.items():
        try:
            results[name] = _trained(case.family, case.fields, case.subject)
        except Exception:
            return results, f"{name}: {traceback.format_exc()}"
    return results, ""


def _trained(family: str, fields: dict[str, Any], changes: dict[str, Any]) -> Trained:
    made = families()[family].subject

    def make() -> Subject:
        return replace(made(), **changes)

    count = len(list(Path.cwd().glob("run-*")))
    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{count}")
    trained = train(make, fields, STEPS, torch.float64, _facts)
    return Trained(
        trained.losses,
        [{name: value.cpu() for name, value in step.items()} for step in trained.gradients],
        {name: value.cpu() for name, value in trained.state.items()},
        trained.evaluation,
        trained.facts,
    )


def _facts(run: Any) -> dict[str, Any]:
    world = run.parallel.world
    tensors = [*run.parallel.model.parameters(), *run.parallel.model.buffers()]
    states = [v for o in run.parallel.optimizers for entries in o.state.values() for v in entries.values()]
    tensors += [value for value in states if isinstance(value, torch.Tensor) and value.dim()]
    return {
        "backend": world.backend,
        "devices": sorted({tensor.device.type for tensor in tensors}),
        "share_device": run.parallel.plan.share_device,
    }


def assert_agree(expected: Trained, got: Trained, what: str, tolerance: float = 1e-12) -> None:
    """Losses, gradients of all steps, the state and the evaluation agree. A tensor that is zero but for rounding, such
    as the gradient of a bias before batch statistics, is measured against the largest of its kind."""
    pairs = [
        ("losses", {"": torch.tensor(expected.losses)}, {"": torch.tensor(got.losses)}),
        *(
            (f"step {n}: gradient of", *two)
            for n, two in enumerate(zip(expected.gradients, got.gradients, strict=True))
        ),
        ("state", expected.state, got.state),
        *(
            ("evaluation", {n: torch.tensor(v)}, {n: torch.tensor(got.evaluation[n])})
            for n, v in expected.evaluation.items()
        ),
    ]
    for words, wholes, theirs in pairs:
        assert wholes.keys() == theirs.keys(), f"{what}: {words}: {sorted(wholes.keys() ^ theirs.keys())}"
        for name, whole in wholes.items():
            gap = difference(theirs[name], whole, floor_of(wholes))
            assert gap <= tolerance, f"{what}: {words} {name} differs by {gap:.2e}"
