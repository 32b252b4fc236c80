"""Bytes of tensors alive on the ranks of a pipeline, cut between blocks and inside them, and what is predicted."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from harness import run_ranks
from matrix.described import described, nbytes_of_tensors, peak_of_a_step
from matrix.foreseen import HOST
from parallel.pipeline_subjects import GPT
from tutti.config import serialization
from tutti.config.plan import BatchPlan, PipelinePlan, Plan
from tutti.cost_model import predict

pytestmark = pytest.mark.long

WIDTH, TOKENS, BATCH = 192, 16, 64


def language(blocks: int) -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(0)
    tokens = torch.randint(1, 64, (2, 2 * BATCH, TOKENS))
    return GPT(vocabulary=64, width=WIDTH, blocks=blocks), TensorDataset(tokens[0], tokens[1])


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def peak(blocks: int, plan: Path) -> int:
    return peak_of_a_step(*language(blocks), loss_fn, batch=BATCH, plan=plan)


@pytest.mark.parametrize(
    ("blocks", "schedule", "chunks"),
    [(4, "1f1b", 1), (4, "interleaved", 2), (2, "interleaved", 2), (1, "interleaved", 2)],
)
def test_what_ranks_hold_is_predicted_wherever_stages_are_cut(
    blocks: int, schedule: str, chunks: int, tmp_path: Path
) -> None:
    pipeline = PipelinePlan(schedule=schedule, stages_per_rank=chunks)  # type: ignore[arg-type]
    batch = BatchPlan(global_batch_size=BATCH, num_microbatches=4)
    plan = Plan(batch=batch, mesh={"stage": 2}, pipeline=pipeline)
    memory = predict(described(*language(blocks), loss_fn, batch=BATCH, name="gpt"), HOST, plan).memory
    held = max(run_ranks(peak, 2, blocks, serialization.save(plan, tmp_path / "plan.json")))
    assert 0.92 <= nbytes_of_tensors(memory) / held <= 1.08
