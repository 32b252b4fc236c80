"""Rows of activations that change ranks: every rank of a group has samples of its own, and a part of features.

Between "my rows, all features" and "all ranks' rows, my features" (or "all rows, all features") there are two pairs of
exchanges, each the other's backward: `everyone` and `summed`, `my_features` and `my_rows`. Ranks may have different
numbers of rows, and features need not divide. All ranks of the group call them alike.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tutti.parallel.all_to_all import Route, plain_exchange
from tutti.parallel.embedding.lookup import Peers

HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """`counts[i]`: rows of rank i; `bounds`: rank i has features bounds[i] .. bounds[i + 1] - 1."""

    peers: Peers
    counts: tuple[int, ...]
    bounds: tuple[int, ...]

    @property
    def mine(self) -> int:
        return self.counts[self.peers.own]

    @property
    def widths(self) -> list[int]:
        return [stop - start for start, stop in pairwise(self.bounds)]

    def exchange(self, values: Tensor, send: list[int], receive: list[int]) -> Tensor:
        return plain_exchange(values, Route(self.peers.group, self.peers.own, send, receive, self.peers.vectors))


def rows_of(count: int, bounds: tuple[int, ...], peers: Peers, device: torch.device) -> Rows:
    """Tell the others how many rows this rank has."""
    each = [1] * peers.size
    mine = torch.full((peers.size,), count, dtype=torch.int64, device=device)
    counts = plain_exchange(mine, Route(peers.group, peers.own, each, each, peers.indices)).tolist()
    return Rows(peers=peers, counts=tuple(counts), bounds=bounds)


def everyone(x: Tensor, rows: Rows) -> Tensor:
    """(my rows, f) -> (all rows, f)."""
    return _Move.apply(x, _everyone, _summed, rows)  # type: ignore[no-any-return, no-untyped-call]


def summed(terms: Tensor, rows: Rows) -> Tensor:
    """(all rows, f) -> (my rows, f), the sum of all ranks' terms."""
    return _Move.apply(terms, _summed, _everyone, rows)  # type: ignore[no-any-return, no-untyped-call]


def my_features(x: Tensor, rows: Rows) -> Tensor:
    """(my rows, features) -> (all rows, my features)."""
    return _Move.apply(x, _my_features, _my_rows, rows)  # type: ignore[no-any-return, no-untyped-call]


def my_rows(part: Tensor, rows: Rows) -> Tensor:
    """(all rows, my features) -> (my rows, features)."""
    return _Move.apply(part, _my_rows, _my_features, rows)  # type: ignore[no-any-return, no-untyped-call]


def _everyone(x: Tensor, rows: Rows) -> Tensor:
    return rows.exchange(x.repeat(rows.peers.size, 1), [rows.mine] * rows.peers.size, list(rows.counts))


def _summed(terms: Tensor, rows: Rows) -> Tensor:
    """As many bytes as a ring's reduce-scatter; every rank adds in the order of ranks, half precisions in float32."""
    came = rows.exchange(terms, list(rows.counts), [rows.mine] * rows.peers.size)
    stacked = came.view(rows.peers.size, rows.mine, terms.shape[1])
    return stacked.sum(0, dtype=torch.float32).to(terms.dtype) if terms.dtype in HALVES else stacked.sum(0)


def _my_features(x: Tensor, rows: Rows) -> Tensor:
    width = rows.widths[rows.peers.own]
    parts = torch.cat([part.reshape(-1) for part in torch.split(x, rows.widths, 1)])
    came = rows.exchange(parts, [rows.mine * one for one in rows.widths], [count * width for count in rows.counts])
    return came.view(-1, width)


def _my_rows(part: Tensor, rows: Rows) -> Tensor:
    sizes = [rows.mine * one for one in rows.widths]
    came = rows.exchange(part.reshape(-1), [count * part.shape[1] for count in rows.counts], sizes)
    return torch.cat([one.view(rows.mine, -1) for one in torch.split(came, sizes)], 1)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        there: Callable[[Tensor, Rows], Tensor],
        back: Callable[[Tensor, Rows], Tensor],
        rows: Rows,
    ) -> Tensor:
        ctx.way = back, rows
        return there(values, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        back, rows = ctx.way
        return back(gradient.contiguous(), rows), None, None, None
