"""Loss scaling where not every optimizer has something to do on every rank."""

import math
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from harness import run_ranks
from tutti.errors import TrainingError


class OneOfTwo(nn.Module):
    """Two layers, of which one is used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)  # type: ignore[no-any-return]


def losses_on_rank(mesh: str) -> list[float]:
    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / "run")
    os.environ["TUTTI_MESH"] = mesh
    job = tutti.Job(global_batch_size=4, precision="float16")
    model = OneOfTwo()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.used, model.idle)]
    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(8, 3, generator=draw), torch.arange(8) % 3)
    _, _, loader = job.prepare(model, optimizers, data, nn.functional.cross_entropy)
    return [job.step(batch) for _ in job.epochs(2) for batch in loader]


def test_an_optimizer_without_gradients_steps_with_the_others() -> None:
    one = run_ranks(losses_on_rank, 1, "replicate=1")[0]
    assert all(math.isfinite(loss) for loss in one)
    for mesh in ("replicate=2", "shard=2"):
        for losses in run_ranks(losses_on_rank, 2, mesh):
            assert all(abs(a - b) < 0.02 * abs(b) for a, b in zip(losses, one, strict=True))


def never_finite(mesh: str) -> tuple[int, str]:
    """Steps until the run stops, and what it says; the loss is finite, its gradient is not, on the last rank."""
    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / "run")
    os.environ["TUTTI_MESH"] = mesh
    job = tutti.Job(global_batch_size=4, precision="float16", on_nonfinite="skip")
    model, data = nn.Linear(3, 3), TensorDataset(torch.ones(8, 3), torch.arange(8) % 3)
    model, _, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    run = job._run()

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        output = model(batch[0])
        if run.parallel.world.rank == run.parallel.world.world_size - 1:
            output.register_hook(lambda gradient: gradient * math.nan)
        return nn.functional.cross_entropy(output, batch[1])

    try:
        for _ in job.epochs(30):
            for batch in loader:
                job.forward_backward(loss, batch)
                job.update()
    except TrainingError as error:
        return run.state.progress.step, str(error)
    return run.state.progress.step, "trained"


@pytest.mark.parametrize("mesh", ["replicate=1", "replicate=2", "shard=2"])
def test_gradients_that_are_finite_at_no_scale_stop_the_run(mesh: str) -> None:
    """It used to skip for ever, with a scale that went to 0."""
    for steps, said in run_ranks(never_finite, int(mesh[-1]), mesh):
        assert steps == 20
        assert said.startswith("the loss is finite, but the gradient of weight is NaN at step 21")
        assert "at every loss scale down to 0.002" in said
        assert "parameters are as they were after step 20" in said
