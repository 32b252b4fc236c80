"""A global batch that grows at stated steps: one order of samples, the same values on any number of ranks, resumed."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import tutti
from harness import run_ranks
from trainer.training import Mlp, vectors
from tutti.data.batches import epoch_order
from tutti.errors import CheckpointError, PlanError
from tutti.trainer.metrics import read_rows

RAMP = ((4, 3), (11, 8))
SIZES = [3] * 4 + [8] * 4 + [6] + [8, 8] + [12, 12, 10] + [12, 12, 12, 12, 2]
"""Of 50 samples an epoch, 3 epochs: the first ends within the second size."""


class Stream(IterableDataset[Any]):
    """The vectors, one after another."""

    def __iter__(self) -> Any:
        return iter(vectors())


def train(epochs: int, resume: str | None, ramp: tuple[tuple[int, int], ...], stream: bool) -> dict[str, Any]:
    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{epochs}-{resume is None}")
    rule = tutti.LRRule(base_lr=0.02, base_batch_size=4)
    job = tutti.Job(global_batch_size=12, batch_ramp=ramp, lr_rule=rule, num_microbatches=2, resume=resume, seed=3)
    torch.manual_seed(1)
    model = Mlp().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    data = Stream() if stream else vectors()
    model, optimizer, loader = job.prepare(model, optimizer, data, nn.functional.cross_entropy)
    batches, losses = [], []
    for _ in job.epochs(epochs):
        for batch in loader:
            batches.append(job._run().state.loader.indices.tolist())
            losses.append(job.step(batch))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    rates = []
    if job.is_main:
        rows = read_rows(Path(os.environ["TUTTI_RUN_FOLDER"]) / "metrics.jsonl")
        rates = [row["learning_rate"] for row in rows if row["kind"] == "step"]
    return {"batches": batches, "losses": losses, "state": state, "rates": rates}


def everything() -> list[dict[str, Any]]:
    """Whole, the first epoch, the rest of it resumed, and from a stream."""
    whole, first = train(3, None, RAMP, False), train(1, None, RAMP, False)
    return [whole, first, train(3, str(Path.cwd() / "run-1-True"), RAMP, False), train(2, None, RAMP, True)]


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_order_is_one_sequence_and_the_rate_follows_the_batch(world_size: int) -> None:
    ranks = run_ranks(everything, world_size)
    whole, first, rest, streamed = ranks[0]
    assert [len(batch) for batch in whole["batches"]] == SIZES
    in_order = [index for batch in whole["batches"] for index in batch]
    assert in_order == [i for epoch in range(3) for i in epoch_order(50, 3, epoch, shuffle=True).tolist()]
    stated = [3] * 4 + [8] * 7 + [12] * 8
    assert whole["rates"] == pytest.approx([0.02 * size / 4 for size in stated], rel=1e-12)
    assert first["batches"] + rest["batches"] == whole["batches"]
    assert first["losses"] + rest["losses"] == whole["losses"]
    assert all(torch.equal(value, rest["state"][name]) for name, value in whole["state"].items())
    assert [len(batch) for batch in streamed["batches"]] == SIZES[:14]
    for other in ranks[1:]:
        assert other[0]["batches"] == whole["batches"]
        assert all(torch.equal(value, other[0]["state"][name]) for name, value in whole["state"].items())


def test_ranks_compute_what_one_device_does() -> None:
    (one, *_), (many, *_) = run_ranks(everything, 1)[0], run_ranks(everything, 2)[0]
    assert many["batches"] == one["batches"]
    for name, value in one["state"].items():
        torch.testing.assert_close(many["state"][name], value, rtol=1e-12, atol=1e-12)


def refusals() -> list[str]:
    said = []
    train(1, None, RAMP, False)
    try:
        train(3, str(Path.cwd() / "run-1-True"), (), False)
    except CheckpointError as error:
        said.append(str(error))
    rule = tutti.LRRule(base_lr=0.02, base_batch_size=4, warmup="gradual", warmup_epochs=2)
    try:
        tutti.Job(global_batch_size=12, batch_ramp=RAMP, lr_rule=rule)
    except PlanError as error:
        said.append(str(error))
    return said


def test_what_would_cut_batches_otherwise_is_refused() -> None:
    other, epochs = run_ranks(refusals, 1)[0]
    assert "was made with batch_ramp = [[4, 3], [11, 8]], the Job says []" in other
    assert "give warmup_steps" in epochs
