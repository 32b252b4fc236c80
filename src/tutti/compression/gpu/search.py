"""The largest sums of values and what was kept: a sample says where to look, one pass adds and looks there."""

import torch
from torch import Tensor

from tutti.compression.gpu import top
from tutti.compression.topk import SAMPLE, Momentum, largest, most_above, threshold_ranks


def largest_sums(values: Tensor, old: Tensor, new: Tensor, momentum: Momentum, count: int) -> Tensor | None:
    """new = old + values, or old + u and u with it; its `count` largest places, rising; None where the sample told too
    little. It waits for the device once, to learn how many there are.
    """
    n, whole = values.numel(), torch.int32 if values.dtype is torch.float32 else torch.int64
    keys = torch.empty(min(n, SAMPLE), dtype=whole, device=values.device)
    factor, old_u, new_u = momentum
    top.sample(values, old, factor, old_u, keys)
    keys = keys.sort().values
    above = torch.empty(most_above(n, count), dtype=torch.int32, device=values.device)
    for rank in threshold_ranks(count / n * keys.numel()):
        at = keys.numel() - rank
        threshold = keys[at : at + 1] if at >= 0 else torch.full_like(keys[:1], -1)
        counts = torch.zeros(2, dtype=torch.int32, device=values.device)
        top.collect(values, old, new, factor, old_u, new_u, threshold, above, counts)
        over, same = counts.tolist()
        if over > above.numel():
            return None
        if over + same >= count:
            return _chosen(above[:over].sort().values.long(), new, threshold, count)
    return None


def _chosen(above: Tensor, kept: Tensor, threshold: Tensor, count: int) -> Tensor:
    """Of the places above a threshold, rising, and those equal to it, the `count` largest, rising."""
    if above.numel() >= count:
        return above[largest(kept[above], count)]
    equal = (kept.view(threshold.dtype) & torch.iinfo(threshold.dtype).max == threshold).nonzero()[:, 0]
    return torch.cat([above, equal[: count - above.numel()]]).sort().values
