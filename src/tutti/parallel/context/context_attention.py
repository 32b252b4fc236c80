"""A call of scaled_dot_product_attention in a model that holds parts of sequences: its meaning, and its result.

The meaning for the whole sequence must follow from the arguments: no mask, `is_causal`, a mask over keys only, or a
mask with a column for every key of the whole sequence. A mask of (part x part) says nothing about the tokens of other
ranks and is refused.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.functional import scaled_dot_product_attention as torch_attention  # the model's is replaced

from tutti.comm.point_to_point import all_to_all
from tutti.comm.traffic import CommChannel, CommHandle
from tutti.errors import ScriptError
from tutti.nn.masked_attention import TORCH_ENGINE, engine_of_whole, over_whole_sequences
from tutti.nn.visibility import SequenceMask
from tutti.parallel.context.ring_attention import Ring, ring_attention
from tutti.parallel.context.sequence_order import SequenceOrder, gather_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Attention over sequences of `length` tokens, of which each rank of `ring` holds a part.

    Attributes:
        ring: the ranks.
        length: tokens of a whole sequence.
        whole: tensors of one value a token that were gathered, with this rank's part, by its identity and version:
            all layers share them.
    """

    ring: Ring
    length: int
    whole: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, compare=False)

    @property
    def order(self) -> SequenceOrder:
        return self.ring.order

    @property
    def part(self) -> int:
        """The number of tokens of a sequence that this rank holds."""
        return self.length // self.order.degree

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """F.scaled_dot_product_attention over the whole sequence, for this rank's queries. Collective.

        Unlike in torch, a mask and `is_causal` may be combined.

        Raises:
            ScriptError: if the arguments do not say what the call means for the whole sequence.
        """
        if isinstance(query, FakeTensor):  # the model is traced for its shapes: nothing is communicated
            return torch_attention(query, key, value, enable_gqa=enable_gqa)
        rows, columns = query.shape[-2], key.shape[-2]
        if rows != self.part and columns != self.part:  # attention over another dim, of which this rank has all
            return torch_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if rows == self.part and columns == self.part:
            return self._over_sequence(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if columns == self.part:
            raise ScriptError(
                f"attention of {rows} queries to {columns} keys, which are this rank's part of a sequence of "
                f"{self.length} tokens: with mesh.context = {self.order.degree} the queries must be parts of sequences "
                "too; drop the context axis for this model"
            )
        if is_causal or (attn_mask is not None and attn_mask.dim() > 1 and attn_mask.shape[-2] != 1):
            raise ScriptError(
                f"attention of a part of a sequence ({rows} of {self.length} tokens) to {columns} keys, with a causal "
                "flag or a mask that differs between queries: it is unknown which queries of the whole sequence the "
                f"rows of the mask belong to (mesh.context = {self.order.degree}); use a mask of shape "
                "(batch, 1, 1, keys), or drop the context axis"
            )
        return torch_attention(query, key, value, attn_mask, dropout_p, scale=scale, enable_gqa=enable_gqa)

    def masked(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: SequenceMask, scale: float | None
    ) -> torch.Tensor:
        """`tutti.nn.attention` over the whole sequence, for this rank's queries. Collective.

        Documents and padding are gathered, one number a token; keys and values go around as without a mask.
        """
        if isinstance(query, FakeTensor):
            return query.new_empty(*query.shape[:-1], value.shape[-1])
        device = query.device
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
        keep = None if mask.keep is None else self.gathered(mask.keep)
        documents = None if mask.documents is None else self.gathered(mask.documents)
        whole = replace(mask, documents=documents, keep=keep)
        if self.order.kind == "ring":
            visible = None
            if not mask.is_plain:  # causality is the ring's own: it skips what is not seen
                visible = replace(whole.visibility(self.length, device), causal=False)
                visible = visible.take_rows(lambda x: self.order.take(x, -1))
            q = query.unflatten(1, (key.shape[1], -1))  # type: ignore[no-untyped-call]
            out = ring_attention(q, key, value, ring=self.ring, scale=scale, causal=mask.causal, visible=visible)
            return out.flatten(1, 2)
        q, k, v = self._as_heads(query, key, value)
        self.ring.engines.add(engine_of_whole(q, k, v, whole))
        return to_tokens(
            over_whole_sequences(q, k, v, whole, scale), self.ring.group, self.order.degree, self.ring.channel
        )

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        """(batch, tokens of this rank) -> (batch, all tokens). Collective at the first call for a tensor."""
        name = (id(part), part._version)
        if name not in self.whole:
            self.whole[name] = part, gather_whole(part, 1, self.order, self.ring.group)
        return self.whole[name][1]

    def _over_sequence(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        dropout: float,
        causal: bool,
        scale: float | None,
        grouped: bool,
    ) -> torch.Tensor:
        device = query.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        q, k, v = _with_heads(query), _with_heads(key), _with_heads(value)
        k, v = (x.expand(q.shape[0], -1, -1, -1) for x in (k, v))
        if not grouped:
            k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
        elif q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1]:
            raise ScriptError(
                f"attention with {q.shape[1]} query heads, {k.shape[1]} key heads and {v.shape[1]} value heads: key "
                "and value heads must be equally many, and the number of query heads a multiple of theirs"
            )
        mask = None if attn_mask is None else self.whole_mask(attn_mask, headless=query.dim() == 3)
        scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
        attention = self._ring if self.order.kind == "ring" else self._all_to_all
        out = attention(q, k, v, mask, dropout, causal, scale)
        return out.reshape(*query.shape[:-1], v.shape[-1])

    def _ring(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float,
        causal: bool,
        scale: float,
    ) -> torch.Tensor:
        heads, part = k.shape[1], self.part
        if mask is not None:
            if mask.shape[-2] == self.length:
                mask = self.order.take(mask, -2)
            mask = mask.view(mask.shape[0], heads, -1, *mask.shape[2:]) if mask.shape[1] > 1 else mask[:, :, None]
        grouped = q.reshape(q.shape[0], heads, -1, *q.shape[2:])
        out = ring_attention(grouped, k, v, ring=self.ring, scale=scale, causal=causal, mask=mask, dropout=dropout)
        return out.reshape(*q.shape[:2], part, v.shape[-1])

    def _all_to_all(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float,
        causal: bool,
        scale: float,
    ) -> torch.Tensor:
        degree, group = self.order.degree, self.ring.group
        q, k, v = self._as_heads(q, k, v)
        if mask is not None:
            if mask.shape[-2] not in (1, self.length):
                mask = gather_whole(mask, mask.dim() - 2, self.order, group)
            if mask.shape[1] > 1:
                mask = mask.chunk(degree, 1)[self.order.index]
            if causal:
                below = torch.ones(self.length, self.length, dtype=torch.bool, device=q.device).tril()
                mask = mask & below if mask.dtype == torch.bool else mask.masked_fill(~below, -torch.inf)
            mask = mask if mask.dtype == torch.bool else mask.to(q.dtype)
        grouped = k.shape[1] != q.shape[1]
        self.ring.engines.add(TORCH_ENGINE)
        out = torch_attention(q, k, v, mask, dropout, causal and mask is None, scale=scale, enable_gqa=grouped)
        return to_tokens(out, group, degree, self.ring.channel)

    def _as_heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values of some heads and all tokens."""
        degree, heads = self.order.degree, q.shape[1]
        if heads % degree:
            raise ScriptError(
                f'attention with {heads} heads cannot divide them over {degree} ranks (context = "all-to-all"); use '
                f'context = "ring", or a context degree that divides {heads}'
            )
        if k.shape[1] % degree:  # the degree does not divide the key heads: repeat them, one for each query head
            k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
        return to_heads((q, k, v), self.ring.group, degree, self.ring.channel)

    def whole_mask(self, mask: torch.Tensor, *, headless: bool) -> torch.Tensor:
        """The mask with 4 dims and a column for every key of the whole sequence.

        It has 1 row, a row for each of this rank's queries, or a row for each query of the whole sequence.

        Raises:
            ScriptError: if the mask needs a gradient, or does not say which keys of other ranks are seen.
        """
        if mask.requires_grad:
            raise ScriptError(
                "an attention mask needs a gradient (a learned bias), which is not computed over parts of sequences "
                f"(mesh.context = {self.order.degree}); drop the context axis for this model"
            )
        mask = mask.detach()
        if mask.dim() == 3:
            mask = mask[:, None] if headless else mask[None]
        while mask.dim() < 4:
            mask = mask[None]
        if mask.shape[-2] > 1 and mask.stride(-2) == 0:  # one row, expanded: a mask over keys
            mask = mask[..., :1, :]
        rows, columns = mask.shape[-2:]
        if columns == self.part and rows == 1:
            mask, columns = gather_whole(mask, 3, self.order, self.ring.group), self.length
        if columns != self.length or rows not in (1, self.part, self.length):
            raise ScriptError(
                f"an attention mask of {rows} x {columns} for a part of {self.part} tokens of sequences of "
                f"{self.length} (mesh.context = {self.order.degree}): it does not say which keys of other ranks this "
                "part's queries see; use is_causal=True, or a mask over keys of shape (batch, 1, 1, keys), or drop "
                "the context axis"
            )
        return mask


def _with_heads(x: torch.Tensor) -> torch.Tensor:
    """Four dims: (batch, heads, tokens, d)."""
    if x.dim() == 3:
        return x[:, None]
    return x if x.dim() == 4 else x.flatten(0, -4)


@dataclass(slots=True, kw_only=True)
class HeadExchange:
    """One tensor's all-to-all, and the reverse all-to-all of its gradient.

    Attributes:
        heads: whether forward gives up heads for tokens; otherwise tokens for heads.
        group: the process group.
        degree: its number of ranks.
        channel: where communication is counted.
        handle: the operation in progress.
        arriving: the buffer that it fills.
    """

    heads: bool
    group: Any
    degree: int
    channel: CommChannel
    handle: CommHandle | None = None
    arriving: torch.Tensor | None = None

    def start(self, x: torch.Tensor, *, heads: bool) -> None:
        """Cut one dim (heads, or else tokens) into a part for each rank, and start sending the parts."""
        sent = torch.stack(x.chunk(self.degree, 1 if heads else 2)).contiguous()
        self.arriving = torch.empty_like(sent)
        work = all_to_all(self.arriving, sent, self.group)
        self.handle = self.channel.start([work], sent[1:].numel() * sent.element_size())

    def finish(self, *, heads: bool) -> torch.Tensor:
        """Wait for the parts, and join them along the other dim, in order of rank."""
        assert self.handle is not None
        assert self.arriving is not None
        self.handle.wait()
        arrived, self.arriving, self.handle = self.arriving, None, None
        return torch.cat(arrived.unbind(0), 2 if heads else 1)


def to_heads(xs: Sequence[torch.Tensor], group: Any, degree: int, channel: CommChannel) -> list[torch.Tensor]:
    """Each (batch, heads, part of the tokens, d) -> (batch, part of the heads, tokens, d).

    The tensors are exchanged concurrently, and so are their gradients.
    """
    exchanges = [HeadExchange(heads=True, group=group, degree=degree, channel=channel) for _ in xs]
    tokens = [_Leave.apply(x, route) for x, route in zip(xs, exchanges, strict=True)]  # type: ignore[no-untyped-call]
    return [_Arrive.apply(x, route) for x, route in zip(tokens, exchanges, strict=True)]  # type: ignore[no-untyped-call]


def to_tokens(x: torch.Tensor, group: Any, degree: int, channel: CommChannel) -> torch.Tensor:
    """(batch, part of the heads, tokens, d) -> (batch, heads, part of the tokens, d)."""
    exchange = HeadExchange(heads=False, group=group, degree=degree, channel=channel)
    return _Arrive.apply(_Leave.apply(x, exchange), exchange)  # type: ignore[no-any-return, no-untyped-call]


class _Leave(torch.autograd.Function):
    """Starts the exchange; its backward finishes the exchange of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: HeadExchange) -> torch.Tensor:
        ctx.exchange = exchange
        exchange.start(x, heads=exchange.heads)
        return _token(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        exchange: HeadExchange = ctx.exchange  # type: ignore[attr-defined]
        return exchange.finish(heads=not exchange.heads), None


class _Arrive(torch.autograd.Function):
    """Finishes the exchange; its backward starts the exchange of the gradient."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, exchange: HeadExchange) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.finish(heads=exchange.heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        exchange: HeadExchange = ctx.exchange  # type: ignore[attr-defined]
        exchange.start(grad, heads=not exchange.heads)
        return _token(grad), None


def _token(like: torch.Tensor) -> torch.Tensor:
    """A scalar that connects the end of an exchange to its start in the autograd graph; its value is not used."""
    return like.new_zeros(())
