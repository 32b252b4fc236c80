"""fully_shard (FSDP2): what docs/decisions/fsdp.md says it cannot do."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from harness import RankFailed, run_ranks
from torch_parts.limits import attempt, join_gloo, still_limited

RECORD = "fsdp"


def sparse_gradients(mesh: DeviceMesh) -> str:
    table = nn.EmbeddingBag(10, 4, sparse=True, mode="sum")
    fully_shard(table, mesh=mesh)
    table(torch.tensor([[1, 2]])).sum().backward()
    return "done"


def tied_across_blocks(mesh: DeviceMesh) -> str:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8, bias=False))
    model[2].weight = model[0].weight
    for block in (model[0], model[2], model):
        fully_shard(block, mesh=mesh)
    model(torch.arange(4)).sum().backward()
    return "done"


def adafactor(mesh: DeviceMesh) -> str:
    model = nn.Linear(4, 6)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return "done"


def summed_gradients(mesh: DeviceMesh) -> str:
    model = nn.Linear(2, 1, bias=False)
    fully_shard(model, mesh=mesh)
    model.set_gradient_divide_factor(1.0)  # type: ignore[operator]
    model(torch.ones(1, 2)).sum().backward()
    return "done"


def try_all(functions: list[Callable[[DeviceMesh], str]]) -> list[str]:
    _, world_size = join_gloo()
    mesh = init_device_mesh("cpu", (world_size,))
    return [attempt(lambda function=function: function(mesh)) for function in functions]


LIMITS = {
    sparse_gradients: ("chunk_cat", "reduces sparse gradients under fully_shard"),
    tied_across_blocks: ("shared with a parameter", "shards weights that are tied across blocks"),
    adafactor: ("in-place operations", "runs Adafactor on sharded parameters"),
    summed_gradients: ("PREMUL_SUM with Gloo", "sums gradients of fully_shard on Gloo without dividing"),
}


def test_fully_shard_refuses_what_tutti_shards() -> None:
    results = run_ranks(try_all, 2, list(LIMITS))[0]
    for result, (reason, learned) in zip(results, LIMITS.values(), strict=True):
        still_limited(reason in result, RECORD, learned)


class Branch(nn.Module):
    """A block that only rank 0 uses, as with layer drop."""

    def __init__(self, uses: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 6, bias=False), nn.Linear(4, 4)
        self.uses = uses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(x + self.second(x).sum() if self.uses else x)


def different_branches() -> None:
    rank, world_size = join_gloo()
    mesh = init_device_mesh("cpu", (world_size,))
    model = Branch(rank == 0)
    for block in model.children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(torch.ones(1, 4)).sum().backward()


def test_fully_shard_ends_the_process_where_ranks_take_different_branches() -> None:
    try:
        run_ranks(different_branches, 2, timeout_s=30)
    except RankFailed:
        return
    pytest.fail("fully_shard keeps ranks in step that take different branches: reopen docs/decisions/fsdp.md")
