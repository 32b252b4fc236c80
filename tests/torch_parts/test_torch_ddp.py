"""DistributedDataParallel: what docs/decisions/ddp.md says it cannot do."""

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from harness import run_ranks
from torch_parts.limits import attempt, join_gloo, still_limited

RECORD = "ddp"


def different_parameters() -> Any:
    """Rank r's parameter is r, as an expert's or a divided table's would be."""
    rank, _ = join_gloo()
    layer = nn.Linear(2, 1, bias=False)
    nn.init.constant_(layer.weight, float(rank))
    DistributedDataParallel(layer)
    return layer.weight.tolist()


def test_ddp_overwrites_parameters_that_belong_to_one_rank() -> None:
    kept = run_ranks(different_parameters, 2)
    still_limited(kept[1] == kept[0], RECORD, "lets parameters differ between the ranks of one DDP model")


def unfrozen() -> Any:
    rank, _ = join_gloo()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    ddp = DistributedDataParallel(model)
    model[0].requires_grad_(True)
    ddp(torch.ones(1, 2) * (rank + 1)).sum().backward()
    return [model[place].weight.grad.tolist() for place in (0, 1)]


def test_ddp_leaves_out_a_parameter_that_is_unfrozen_later() -> None:
    one, two = run_ranks(unfrozen, 2)
    assert one[1] == two[1]
    still_limited(one[0] != two[0], RECORD, "reduces gradients of parameters that are unfrozen after its making")


class Branch(nn.Module):
    """A layer that only some ranks use, as with layer drop."""

    def __init__(self, uses: bool) -> None:
        super().__init__()
        self.first, self.second, self.uses = nn.Linear(2, 1), nn.Linear(2, 1), uses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + (self.second(x) if self.uses else 0)


def different_branches() -> Any:
    rank, _ = join_gloo()
    ddp = DistributedDataParallel(Branch(rank == 0))

    def two_steps() -> str:
        for _ in range(2):
            ddp(torch.ones(1, 2)).sum().backward()
        return "done"

    return attempt(two_steps)


def test_ddp_stops_where_a_parameter_is_unused_on_one_rank() -> None:
    results = run_ranks(different_branches, 2)
    still_limited(
        any("Expected to have finished reduction" in result for result in results),
        RECORD,
        "trains without find_unused_parameters where ranks take different branches",
    )


def unequal_shares() -> Any:
    rank, _ = join_gloo()
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    samples = torch.ones(3, 1) if rank == 0 else torch.full((1, 1), 5.0)
    ddp(samples).mean().backward()
    return float(ddp.module.weight.grad)


def test_ddp_averages_over_ranks_and_not_over_samples() -> None:
    averages = run_ranks(unequal_shares, 2)
    assert averages == [3.0, 3.0]  # the mean over the four samples is 2
    still_limited(averages[0] != 2.0, RECORD, "weighs ranks by their samples")


def compressed() -> Any:
    join_gloo()
    ddp = DistributedDataParallel(nn.Linear(2, 1))
    return attempt(lambda: ddp.register_comm_hook(None, bf16_compress_hook))


def test_ddp_refuses_bf16_compression_on_gloo() -> None:
    results = run_ranks(compressed, 2)
    still_limited(
        "BF16 all reduce communication hook required" in str(results[0]), RECORD, "compresses to bf16 on Gloo"
    )
