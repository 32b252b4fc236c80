"""torch.nn.MultiheadAttention over the split axis: every rank computes its heads."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tutti.parallel.tensor.exchange import add
from tutti.parallel.tensor.linear import Entry
from tutti.parallel.tensor.parted import Parted, Place, parted, whole
from tutti.parallel.tensor.spread import Spread


@dataclass(slots=True, kw_only=True, eq=False)
class HeadsForward:
    """The forward of one nn.MultiheadAttention. `heads`: the spread of its heads.

    Projections are this rank's heads' part (q, k and v one behind another where they are fused); the output projection
    is divided by its inputs, and its terms are added.
    """

    module: nn.MultiheadAttention
    entry: Entry
    heads: Spread

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        module, group = self.module, self.entry.group
        batched, count = query.dim() == 3, self.heads.local(group.rank)
        q, k, v = self._projected(query, key, value)
        if not batched:
            q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif module.batch_first:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        heads = self._place(1)
        q, k, v = (t.view(*t.shape[:-1], count, module.head_dim).permute(1, 2, 0, 3) for t in (q, k, v))
        q, k, v = parted(q, heads), parted(k, heads), parted(v, heads)
        mask = self._mask(q, k, key_padding_mask, attn_mask)
        out, weights = self._attended(q, k, v, mask, need_weights)
        out = out.permute(2, 0, 1, 3).flatten(2)  # (query, batch, heads x head size)
        if not batched:
            out = out.squeeze(1)
        elif module.batch_first:
            out = out.transpose(0, 1)
        out = module.out_proj(out)
        if weights is None:
            return out, None
        weights = self._averaged(weights) if average_attn_weights else weights
        return out, weights if batched else weights.squeeze(0)

    def _place(self, dim: int, unit: int = 1) -> Place:
        return Place(dim=dim, spread=self.heads.scaled(unit), group=self.entry.group)

    def _projected(self, query: Any, key: Any, value: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        own, entry = self.module._parameters, self.entry
        fused, bias = own.get("in_proj_weight"), own.get("in_proj_bias")
        if fused is not None:
            matrices: list[Any] = list(fused.chunk(3))
        else:
            matrices = [own[f"{letter}_proj_weight"] for letter in "qkv"]
        biases: list[Any] = [None] * 3 if bias is None else list(bias.chunk(3))
        if fused is not None and query is key is value:
            q, k, v = F.linear(entry(query), fused, bias).chunk(3, -1)
            return q, k, v
        q, k, v = (F.linear(entry(x), w, b) for x, w, b in zip((query, key, value), matrices, biases, strict=True))
        return q, k, v

    def _mask(self, q: torch.Tensor, k: torch.Tensor, padding: Any, attention: Any) -> torch.Tensor | None:
        """Both masks as one to add, (batch or 1, heads or 1, query or 1, key), whole."""
        terms = []
        if attention is not None:
            shape = attention.shape
            heads = self.heads.size
            terms.append(attention[None, None] if attention.dim() == 2 else attention.view(-1, heads, *shape[1:]))
        if padding is not None:
            terms.append(padding.view(q.shape[0], 1, 1, k.shape[2]))
        terms = [_to_add(whole(term), q.dtype) for term in terms]
        return None if not terms else terms[0] if len(terms) == 1 else terms[0] + terms[1]

    def _attended(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, need_weights: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rate = self.module.dropout if self.module.training else 0.0
        if not need_weights:
            return F.scaled_dot_product_attention(q, k, v, mask, rate), None
        scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
        weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), rate)
        return weights @ v, weights

    def _averaged(self, weights: torch.Tensor) -> torch.Tensor:
        """The mean over all heads, (batch, query, key)."""
        if not isinstance(weights, Parted):
            return weights.mean(1)
        with torch._C.DisableTorchFunctionSubclass():
            return add(weights.sum(1) / self.heads.size, self.entry.group)


def _to_add(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as values to add to scores; True hides."""
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
    return mask.to(dtype)


def projections(module: nn.MultiheadAttention) -> list[tuple[str, int, int]]:
    """(parameter, dim, how often heads repeat along it) of what is cut by heads, beside the output projection."""
    found = []
    for name, repeats in (("in_proj_weight", 3), ("in_proj_bias", 3)):
        if module._parameters.get(name) is not None:
            found.append((name, 0, repeats))
    if module._parameters.get("in_proj_weight") is None:
        found += [(f"{letter}_proj_weight", 0, 1) for letter in "qkv"]
    return found
