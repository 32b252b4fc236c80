"""AdaScale: rates and the schedule follow the measured gain, and a resumed run goes on as if nothing had happened."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tutti
from harness import run_ranks
from trainer.training import Mlp, vectors
from tutti.errors import PlanError
from tutti.optim.gradient_noise_scale import NoiseAverages, adascale_gain
from tutti.optim.gradient_noise_scale import NoiseEstimate as One
from tutti.trainer.metrics import read_rows


def train(folder: str, epochs: int, resume: str | None = None) -> dict[str, Any]:
    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / folder)
    rule = tutti.LRRule(base_lr=0.05, base_batch_size=4, scale="adascale")
    job = tutti.Job(global_batch_size=16, lr_rule=rule, num_microbatches=2, resume=resume, seed=3, last_batch="drop")
    torch.manual_seed(1)
    model = Mlp().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 6, gamma=0.5)
    model, optimizer, loader = job.prepare(
        model, optimizer, vectors(), nn.functional.cross_entropy, scheduler=scheduler
    )
    for _ in job.epochs(epochs):
        for batch in loader:
            job.step(batch)
    rows = []
    if job.is_main:
        rows = [row for row in read_rows(Path.cwd() / folder / "metrics.jsonl") if row["kind"] == "step"]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return {"rows": rows, "state": state, "lr": optimizer.param_groups[0]["lr"]}


def whole_and_resumed() -> list[dict[str, Any]]:
    whole, first = train("whole", 4), train("first", 2)
    return [whole, first, train("rest", 4, str(Path.cwd() / "first"))]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_gain_is_that_of_the_steps_before(world_size: int) -> None:
    ranks = run_ranks(whole_and_resumed, world_size)
    whole, first, rest = ranks[0]
    averages, done = NoiseAverages(), 0.0
    for row in whole["rows"]:
        if "noise" in row:
            averages.add(One(square=row["noise"]["square"], variance=row["noise"]["variance"]))
        gain = adascale_gain(averages, 16, 4)
        assert row["gain"] == pytest.approx(gain, rel=1e-12)
        decays = math.floor(done) // 6
        assert row["learning_rate"] == pytest.approx(0.05 * gain * 0.5**decays, rel=1e-12)
        done += gain
        assert row["base_steps"] == pytest.approx(done, rel=1e-12)
    gains = [row["gain"] for row in whole["rows"]]
    assert gains[0] == 1.0
    assert 1.0 < max(gains) <= 4.0
    assert [row["gain"] for row in first["rows"] + rest["rows"]] == pytest.approx(gains, rel=1e-12)
    for name, value in whole["state"].items():
        torch.testing.assert_close(rest["state"][name], value, rtol=1e-12, atol=1e-12)
    for other in ranks[1:]:
        assert all(torch.equal(value, other[0]["state"][name]) for name, value in whole["state"].items())


def in_one_piece() -> str:
    rule = tutti.LRRule(base_lr=0.05, base_batch_size=4, scale="adascale")
    job = tutti.Job(global_batch_size=16, lr_rule=rule)
    model = Mlp().double()
    try:
        job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), vectors(), nn.functional.cross_entropy)
    except PlanError as error:
        return str(error)
    return ""


def test_what_cannot_be_measured_is_refused() -> None:
    assert "needs the gradient noise scale" in run_ranks(in_one_piece, 1)[0]
    with pytest.raises(PlanError, match="leave warmup"):
        tutti.LRRule(base_lr=0.1, base_batch_size=4, scale="adascale", warmup="gradual", warmup_steps=3)
    with pytest.raises(PlanError, match="base_batch_size is missing"):
        tutti.LRRule(base_lr=0.1, scale="adascale")
