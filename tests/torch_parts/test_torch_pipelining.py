"""torch.distributed.pipelining: what docs/decisions/pipelining.md says it cannot do."""

from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, SplitPoint, pipeline

from harness import run_ranks
from torch_parts.limits import attempt, join_gloo, still_limited

RECORD = "pipelining"
CPU = torch.device("cpu")


def squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


class Tied(nn.Module):
    """Embedding and head with one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body, self.head = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.body(self.embed(x)))


def tied_weights() -> list[bool]:
    """Whether each gradient of the tied weight on this rank is the one that a single process computes."""
    rank, _ = join_gloo()
    torch.manual_seed(1)
    x, target, alone = torch.randint(8, (4, 3)), torch.randn(4, 3, 8), Tied()
    pipe = pipeline(Tied(), mb_args=(x[:2],), split_spec={"body": SplitPoint.BEGINNING})
    schedule = ScheduleGPipe(pipe.build_stage(rank, CPU), 2, loss_fn=squared_error)
    schedule.step(x) if rank == 0 else schedule.step(target=target)
    squared_error(alone(x), target).backward()
    expected = alone.embed.weight.grad
    assert expected is not None
    gradients = [p.grad for p in pipe.get_stage_module(rank).parameters() if p.shape == expected.shape]
    return [torch.allclose(grad, expected) for grad in gradients if grad is not None]


def test_pipelining_does_not_sum_gradients_of_tied_weights() -> None:
    results = run_ranks(tied_weights, 2)
    assert all(results)
    still_limited(not any(same for rank in results for same in rank), RECORD, "sums gradients of tied weights")


class DictOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"hidden": self.layer(x)}


def run_stages(first: type[nn.Module], batch: int) -> Any:
    rank, _ = join_gloo()
    stage = PipelineStage(first() if rank == 0 else nn.Linear(4, 4), rank, 2, CPU)
    schedule = Schedule1F1B(stage, 2, loss_fn=squared_error)
    x = torch.randn(batch, 4)
    return attempt(lambda: schedule.step(x) if rank == 0 else schedule.step(target=x))


class Plain(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)


def test_pipelining_passes_tensors_only_between_stages() -> None:
    result = run_ranks(run_stages, 2, DictOutput, 4)[0]
    still_limited("got dict" in str(result), RECORD, "passes dicts between stages")


def test_pipelining_needs_microbatches_of_one_size() -> None:
    assert "Error" not in str(run_ranks(run_stages, 2, Plain, 4))
    still_limited("Error" in str(run_ranks(run_stages, 2, Plain, 5)), RECORD, "takes microbatches of 3 and 2 samples")


class DataDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        return self.second(x * 2 if x.sum() > 0 else x)


def trace_data_dependent() -> Any:
    join_gloo()
    return attempt(
        lambda: pipeline(DataDependent(), mb_args=(torch.ones(2, 4),), split_spec={"second": SplitPoint.BEGINNING})
    )


def test_the_tracer_refuses_control_flow_that_depends_on_data() -> None:
    result = run_ranks(trace_data_dependent, 1)[0]
    still_limited("cannot capture your model" in str(result), RECORD, "splits models with data-dependent branches")
