"""What an exchange keeps of a flat gradient, by the tensors that lie in it: it outlives the exchange.

A tensor may move to another bucket, and the next run may have other ranks. What workers and servers keep back is one
sum over ranks by meaning, so a server's part becomes its rank's own: nothing is lost, and nothing is sent for it.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from tutti.compression.exchange import Exchange, Place, Span

Kept = dict[str, Tensor]
"""Of one tensor of the gradient: flat values of its size by name (residual, momentum), and its part of what ranks
share (shared.q)."""


def kept_of(exchange: Exchange, sizes: Sequence[int]) -> list[Kept]:
    """What `exchange` keeps now, for tensors of `sizes` one behind the other; copies."""
    return divided_by_tensor(exchange.tensors(), exchange.spans, exchange.places, sizes)


def keep(exchange: Exchange, sizes: Sequence[int], kept: Iterable[Mapping[str, Tensor]], count: int = 0) -> None:
    """Make `exchange`, which is new, go on with what was kept of its tensors; what it has no use for is left out.

    `count`: steps that counted so far, so that no random number is drawn twice.
    """
    rows = [row for row in zip(_starts(sizes), sizes, kept, strict=True) if row[1]]
    for state in exchange.states.values():
        state.count = count
    worker = exchange.states["worker"]
    for name, old in worker.old.items():
        whole = old.new_zeros(exchange.numel)
        for start, size, one in rows:
            if name in one:
                whole[start : start + size] = one[name]
        parts = [whole[begin:end] for begin, end in exchange.spans["worker"]]
        if parts:
            old.copy_(torch.cat(parts))
            worker.new[name].copy_(old)
    by_start = {start: one for start, _, one in rows}
    for name, places in exchange.places.items():
        for start, begin, end in places:
            part = by_start[start].get(f"shared.{name}")
            if part is not None and part.numel() == end - begin:
                exchange.shared[name][begin:end] = part


def divided_by_tensor(
    tensors: Mapping[str, Tensor],
    spans: Mapping[str, Sequence[Span]],
    places: Mapping[str, Sequence[Place]],
    sizes: Sequence[int],
) -> list[Kept]:
    """The tensors of an exchange (`Exchange.tensors`), cut by the tensors of the gradient."""
    numel, found = sum(sizes), [Kept() for _ in sizes]
    for key, tensor in tensors.items():
        who, _, name = key.partition(".")
        if who == "shared":
            at = {start: tensor[begin:end] for start, begin, end in places[name]}
            for one, start, size in zip(found, _starts(sizes), sizes, strict=True):
                if size and start in at:
                    one[key] = at[start].clone()
        elif name != "count":
            whole, offset = tensor.new_zeros(numel), 0
            for begin, end in spans[who]:
                whole[begin:end] = tensor[offset : offset + end - begin]
                offset += end - begin
            for one, part in zip(found, torch.split(whole, list(sizes)), strict=True):
                one[name] = one[name] + part if name in one else part.clone()
    return found


def _starts(sizes: Sequence[int]) -> list[int]:
    starts, at = [], 0
    for size in sizes:
        starts.append(at)
        at += size
    return starts
