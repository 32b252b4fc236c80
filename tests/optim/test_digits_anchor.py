"""Epochs that the digits take at each batch, by learning-rate rule, beside an anchor that shares no code with tutti."""

import json
import os
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from harness import run_ranks

ANCHOR: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "digits_batch_anchor.json").read_text())
ROWS: dict[str, dict[str, Any]] = {f"{row['rule']} {row['batch']}": row for row in ANCHOR["rows"]}
SCALES = {"linear": "linear", "sqrt": "sqrt", "fixed": "none"}
REACHED = ("linear 64", "linear 256", "linear 512", "linear 1024", "sqrt 64", "sqrt 256")
SEEDS = 10


def digits() -> tuple[TensorDataset, TensorDataset]:
    from sklearn.datasets import load_digits

    found = load_digits()
    x, y = torch.tensor(found.data / 16, dtype=torch.float32), torch.tensor(found.target)
    return TensorDataset(x[:1437], y[:1437]), TensorDataset(x[1437:], y[1437:])


def correct(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).float()


def epochs_to_target(row: dict[str, Any], seed: int, most: int) -> int | None:
    """Epochs until 90 % of the test part are right; None where `most` are not enough."""
    rule = tutti.LRRule(base_lr=ANCHOR["base_lr"], base_batch_size=ANCHOR["base_batch_size"], scale=SCALES[row["rule"]])  # type: ignore[arg-type]
    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"{row['rule']}-{row['batch']}-{seed}")
    job = tutti.Job(global_batch_size=row["batch"], seed=seed, lr_rule=rule, last_batch="drop", keep_checkpoints=0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    for layer in (model[0], model[2]):
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
    train, test = digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, optimizer, loader = job.prepare(model, optimizer, train, nn.functional.cross_entropy)
    for epoch in job.epochs(most):
        for batch in loader:
            job.step(batch)
        if job.evaluate(test, {"accuracy": correct})["accuracy"] >= 0.9:
            return epoch + 1
    return None


def trained(name: str, most: int) -> list[int | None]:
    return [epochs_to_target(ROWS[name], seed, most) for seed in range(SEEDS)]


def olympic(epochs: list[int]) -> tuple[float, float]:
    """Mean and deviation without the best and the worst."""
    kept = sorted(epochs)[1:-1]
    return mean(kept), stdev(kept)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", REACHED)
def test_epochs_are_those_of_the_anchor(name: str) -> None:
    """The means of eight seeds agree within three standard errors of their difference."""
    (found,) = run_ranks(trained, 1, name, ANCHOR["most_epochs"], timeout_s=550)
    assert None not in found
    got, deviation = olympic(found)
    row = ROWS[name]
    error = ((deviation**2 + row["olympic_std"] ** 2) / (SEEDS - 2)) ** 0.5
    assert abs(got - row["olympic_mean"]) <= 3 * error, f"{got:.2f} +- {deviation:.2f} epochs: {found}"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_rate_that_does_not_grow_with_the_batch_fails_where_the_anchor_fails() -> None:
    """512 samples at the rate of 32: not within 80 epochs, in no seed."""
    (found,) = run_ranks(trained, 1, "fixed 512", ANCHOR["most_epochs"], timeout_s=550)
    assert found == [None] * SEEDS
