"""What exchanges keep, when the number of ranks changes: nothing that was kept back is lost.

A worker's error feedback is its share of a sum over ranks; a server's belongs to its chunk of the gradient; what is
shared is the same everywhere.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tutti.compress.two_phase import chunk_length


def merged(ranks: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """One state of the whole world from `Exchange.tensors()` of all ranks, in order."""
    whole = {}
    for name, first in ranks[0].items():
        tensors = [rank[name] for rank in ranks]
        if name.endswith(".count") or name.startswith("shared."):
            whole[name] = first.clone()
        elif name.startswith("server."):
            whole[name] = torch.cat(list(tensors))
        else:
            whole[name] = torch.stack(list(tensors)).sum(dim=0)
    return whole


def divided(whole: Mapping[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """What `rank` of a new world loads of a merged state."""
    found = {}
    for name, tensor in whole.items():
        if name.endswith(".count") or name.startswith("shared."):
            found[name] = tensor.clone()
        elif name.startswith("server."):
            length = chunk_length(tensor.numel(), ranks)
            found[name] = tensor[rank * length : (rank + 1) * length].clone()
        else:
            found[name] = tensor / ranks
    return found
