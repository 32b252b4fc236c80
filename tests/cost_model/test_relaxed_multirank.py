"""Bytes per step of replicas that do not wait for each other, as predicted and as ranks count them."""

import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import tutti
from cost_model.examples import cluster, mlp, plan
from harness import run_ranks
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan
from tutti.config.sync_notation import parse_sync
from tutti.cost_model import predict

STEPS, WIDTH, LAYERS = 8, 32, 3
MODES = ("stale:1", "asynchronous", "ad-psgd", "hogwild", "ensemble")


def slow_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Take so long that every transfer in the background is done within its step."""
    time.sleep(0.1)
    return F.cross_entropy(output, target)


def sent(modes: tuple[str, ...]) -> list[list[int]]:
    """Return the bytes of each step of this rank, by mode."""
    sent_by_mode = []
    for number, words in enumerate(modes):
        ranks = int(os.environ["WORLD_SIZE"])
        intended = Plan(batch=BatchPlan(global_batch_size=8), mesh={"replicate": ranks}, sync=parse_sync(words))
        os.environ["TUTTI_PLAN"] = str(serialization.save(intended, Path.cwd() / f"plan-{os.getpid()}.json"))
        os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{number}")
        job = tutti.Job(global_batch_size=8, seed=1)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        data = TensorDataset(torch.randn(8 * STEPS, WIDTH), torch.randint(WIDTH, (8 * STEPS,)))
        model, _, loader = job.prepare(model, torch.optim.Adam(model.parameters()), data, slow_loss)
        run, steps = job._run(), []
        seen = run.parallel.layout.traffic.take

        def taken(seen: object = seen, steps: list[int] = steps) -> object:
            totals = seen()  # type: ignore[operator]
            steps.append(sum(total.nbytes for total in totals if total.row()["carried"] == "parameters"))
            return totals

        run.parallel.layout.traffic.take = taken
        for _ in job.epochs(1):
            for batch in loader:
                job.step(batch)
        sent_by_mode.append(steps)
    return sent_by_mode


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_replicas_that_do_not_wait_send_what_is_predicted(ranks: int) -> None:
    counted = run_ranks(sent, ranks, MODES)
    for place, words in enumerate(MODES):
        prediction = predict(mlp(WIDTH, LAYERS), cluster(), plan(4096, ranks, sync=parse_sync(words)))
        by_rank = [rank[place][1:STEPS] for rank in counted]  # the first step also exchanges optimizer states
        if words == "ad-psgd":  # active ranks ask in every step; whom they ask is drawn
            assert [sum(rank) for rank in by_rank[::2]] == [prediction.sent_nbytes_per_rank * (STEPS - 1)] * (
                ranks // 2
            )
        else:
            mean = sum(map(sum, by_rank)) / (ranks * (STEPS - 1))
            # of each server, one answer, half a step's bytes, may come after its own last step, which is not counted
            one_answer = 0.5 / (STEPS - 1)
            assert mean == pytest.approx(prediction.sent_nbytes_per_rank, rel=one_answer * (1 + 1e-9)), words
