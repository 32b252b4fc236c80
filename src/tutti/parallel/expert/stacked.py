"""Experts of `transformers` models: stacked parameters, called with the experts that a router has chosen.

Mixtral, Qwen-MoE and their kin (transformers 5) route without capacity, so a rank needs no other to decide; only rows
travel. Their own forward computes the experts that are here.
"""

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tutti.comm.traffic import CommChannel
from tutti.parallel.data.batchnorm import BatchScope
from tutti.parallel.expert.slice import Holders, SharedSlice, Sharers
from tutti.parallel.layout import Layout

_ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]


def is_stacked(module: nn.Module) -> bool:
    """Whether `module` is a layer of stacked experts: its parameters' first dim is the expert, its forward takes
    (rows, chosen experts, their weights)."""
    count = getattr(module, "num_experts", None)
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    if not isinstance(count, int) or not own or any(p.dim() < 2 or p.shape[0] != count for p in own):
        return False
    return list(inspect.signature(module.forward).parameters)[:3] == _ARGUMENTS


def travel_to_experts(module: nn.Module, holders: Holders, sizes: Sequence[int], layout: Layout) -> None:
    """Make `module`, which has this rank's experts by now, send rows to the ranks that have the others'.

    `sizes`: how many experts each rank has.
    """
    module.forward = Travelling(
        module, holders, layout.channel("tokens", "expert"), layout.channel("routing", "expert")
    )
    setattr(module, "num_experts", sizes[holders.own])  # noqa: B010 (an attribute that nn.Module does not declare)


class Travelling:
    """The forward of one layer of stacked experts over a group of ranks."""

    def __init__(self, module: nn.Module, holders: Holders, channel: CommChannel, routing: CommChannel) -> None:
        self.module, self.holders, self.channel, self.routing = module, holders, channel, routing

    def __deepcopy__(self, memo: dict[int, Any]) -> "Travelling":
        return Travelling(memo.get(id(self.module), self.module), self.holders, self.channel, self.routing)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (type(self.module).forward, self.module)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(n, width), (n, k), (n, k) -> (n, width)."""
        chosen, holders = top_k_index.reshape(-1), self.holders
        counts = torch.bincount(chosen, minlength=holders.bounds[-1])
        everyone = [torch.empty_like(counts) for _ in range(len(holders.bounds) - 1)]
        with self.routing.waiting((len(everyone) - 1) * counts.numel() * counts.element_size()):
            dist.all_gather(everyone, counts, group=holders.group)
        slots = torch.argsort(chosen, stable=True)
        tokens = slots.div(top_k_index.shape[1], rounding_mode="floor")
        alone = Sharers(size=1, rank=0, group=None, scope=BatchScope())
        slice = SharedSlice(alone, holders, self.channel)
        results = slice.divided(self, hidden_states.index_select(0, tokens), torch.stack(everyone).cpu(), holders)
        weighted = results * top_k_weights.reshape(-1).index_select(0, slots).unsqueeze(1)
        return torch.zeros_like(hidden_states).index_add(0, tokens, weighted.to(hidden_states.dtype))

    def run_experts(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """Results of rows that are ordered by expert, `sizes[i]` for the i-th one here."""
        expert = torch.arange(len(sizes), device=rows.device)
        chosen = expert.repeat_interleave(torch.tensor(sizes, device=rows.device)).unsqueeze(1)
        results: Tensor = type(self.module).forward(self.module, rows, chosen, rows.new_ones(len(rows), 1))
        if len(rows) == 0:  # forward loops over rows: gradients are to be 0, not absent, and backward must pass here
            linked = [rows, *(p.reshape(-1)[:1] for p in self.module.parameters(recurse=False))]
            results = results + sum(one.sum() for one in linked) * 0.0
        return results
