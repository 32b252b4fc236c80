"""`tutti run --profile N`: a trace of N steps on every rank, which the report's step time leaves out."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tutti
from harness import run_ranks
from trainer.training import Mlp, vectors
from tutti.report.build_report import build_report
from tutti.trainer.metrics import read_rows


def train(folder: Path, steps: int, epochs: int) -> None:
    os.environ["TUTTI_RUN_FOLDER"], os.environ["TUTTI_PROFILE"] = str(folder), str(steps)
    job = tutti.Job(global_batch_size=8, num_microbatches=2)
    torch.set_default_dtype(torch.float64)
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    model, _, loader = job.prepare(model, optimizer, vectors(), nn.functional.cross_entropy)
    for _ in job.epochs(epochs):
        for batch in loader:
            job.step(batch)
    job._finalizer.close()


@pytest.mark.parametrize(("world_size", "steps", "epochs", "kept"), [(2, 3, 2, 3), (1, 30, 1, 4)])
def test_steps_after_the_warm_up_are_traced(
    tmp_path: Path, world_size: int, steps: int, epochs: int, kept: int
) -> None:
    """The second run ends after 7 steps, of which the first 3 are for warming up."""
    run_ranks(train, world_size, tmp_path, steps, epochs)
    for rank in range(world_size):
        with gzip.open(tmp_path / "profile" / f"rank-{rank}.trace.json.gz") as file:
            events: list[dict[str, Any]] = json.load(file)["traceEvents"]
        names = [event["name"] for event in events]
        traced = {name for name in names if name.startswith("ProfilerStep#")}
        assert len(traced) == kept + (kept < steps)  # one more had begun when the run ended
        assert names.count("aten::addmm") >= kept  # the layers
        assert "[memory]" in names  # the timeline of memory
        for table in ("time", "memory"):
            assert "aten::addmm" in (tmp_path / "profile" / f"rank-{rank}.{table}.txt").read_text()
    rows = read_rows(tmp_path / "metrics.jsonl")
    profiled = [row["step"] for row in rows if row["kind"] == "step" and row.get("profiled")]
    assert profiled == [*range(3, 4 + kept)]
    report = build_report(tmp_path)
    others = [row["wall_s"] for row in rows if row["kind"] == "step" and row["step"] > 2 and not row.get("profiled")]
    if others:
        assert min(others) <= (report.time.per_step.value or 0) <= max(others)
        assert f"{len(profiled)} profiled" in report.time.per_step.note
    assert any(finding.code == "PROFILED" for finding in report.findings)
    assert report.time.accounted.value == pytest.approx(1, abs=0.02)


def short_run(folder: Path) -> str:
    train(folder, 5, 0)
    from tutti.trainer.step_profile import StepProfile

    profile = StepProfile(5, folder / "none", 0, torch.device("cpu"))
    for _ in range(3):
        profile.stepped()
    profile.close()
    assert not torch.autograd._profiler_enabled()
    return profile.outcome


def test_a_run_that_is_too_short_says_so(tmp_path: Path) -> None:
    (outcome,) = run_ranks(short_run, 1, tmp_path)
    assert outcome.startswith("nothing was profiled, because the run made 3 steps, of which the first 3")
    assert not (tmp_path / "none").exists()
