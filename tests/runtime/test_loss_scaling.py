"""Loss scaling where not every optimizer has something to do on every rank."""

import math
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from harness import run_ranks


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
