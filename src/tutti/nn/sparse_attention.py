"""Block-sparse attention: each block of queries sees only some blocks of keys, and only those are computed.

The patterns of Longformer (Beltagy, Peters and Cohan 2020, arXiv 2004.05150), BigBird (Zaheer et al. 2020, arXiv
2007.14062) and Sparse Transformer (Child et al. 2019, arXiv 1904.10509) are unions of a few simple ones. For a pattern
with a fixed number of key blocks per query block, time and memory grow linearly with the sequence. Forward saves the
output and one log-sum-exp per row; backward computes the probabilities again, tile by tile (Dao et al. 2022, arXiv
2205.14135).
"""

import functools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from tutti.errors import ScriptError
from tutti.nn.flex_blocks import flex, flex_takes
from tutti.nn.visibility import SequenceMask, sequence_parts, whole_length

TILE_ELEMENTS = 2**22
"""Approximate number of scores that are in memory at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPattern:
    """Which keys each query may see, by blocks of `block_size` tokens. `a | b` is the union of two patterns.

    Attributes:
        length: tokens of the sequence; the last block may be short.
        block_size: tokens of a block.
        seen: for each block of queries, the key blocks that it sees, ascending.

    Raises:
        ScriptError: `seen` does not have one ascending tuple per block.

    Examples:
        >>> pattern = sliding_window(64, block_size=8) | global_tokens(64, block_size=8)
        >>> pattern.seen[4]
        (0, 3, 4, 5)
    """

    length: int
    block_size: int
    seen: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        blocks = number_of_blocks(self.length, self.block_size)
        if len(self.seen) != blocks:
            raise ScriptError(
                f"a pattern for {self.length} tokens in blocks of {self.block_size} has {blocks} rows of blocks, but "
                f"seen has {len(self.seen)}; give one tuple for each row"
            )
        for number, row in enumerate(self.seen):
            if list(row) != sorted(set(row)) or (row and not 0 <= row[0] <= row[-1] < blocks):
                raise ScriptError(
                    f"seen[{number}] = {row}; give distinct block numbers from 0 to {blocks - 1} in ascending order"
                )

    def __or__(self, other: "BlockPattern") -> "BlockPattern":
        if (self.length, self.block_size) != (other.length, other.block_size):
            raise ScriptError(
                f"patterns for {self.length} tokens in blocks of {self.block_size} and for {other.length} in blocks of "
                f"{other.block_size} have no union; make both for the same length and block size"
            )
        return replace(self, seen=tuple(_row({*a, *b}) for a, b in zip(self.seen, other.seen, strict=True)))

    @property
    def density(self) -> float:
        """Fraction of all pairs of blocks that is computed, without a causal mask."""
        return sum(map(len, self.seen)) / len(self.seen) ** 2

    def table(self) -> torch.Tensor:
        """Return a (blocks, blocks) tensor, True where a block of queries sees a block of keys."""
        blocks = torch.zeros(len(self.seen), len(self.seen), dtype=torch.bool)
        for number, row in enumerate(self.seen):
            blocks[number, list(row)] = True
        return blocks

    def mask(self, *, causal: bool = False) -> torch.Tensor:
        """Return the pattern as a dense (length, length) mask, True where a query (row) may see a key."""
        tokens = self.table().repeat_interleave(self.block_size, 0).repeat_interleave(self.block_size, 1)
        tokens = tokens[: self.length, : self.length]
        return tokens.tril() if causal else tokens


def number_of_blocks(length: int, block_size: int) -> int:
    """Return how many blocks cover a sequence; the last may be short."""
    if length < 1 or block_size < 1:
        raise ScriptError(f"length = {length}, block_size = {block_size}; give numbers of 1 or more")
    return -(-length // block_size)


def sliding_window(length: int, block_size: int, blocks: int = 1) -> BlockPattern:
    """Return the pattern in which every block sees itself and `blocks` neighbours on either side."""
    count = number_of_blocks(length, block_size)
    rows = (range(max(0, i - blocks), min(count, i + blocks + 1)) for i in range(count))
    return BlockPattern(length=length, block_size=block_size, seen=tuple(map(tuple, rows)))


def global_tokens(length: int, block_size: int, tokens: Iterable[int] = (0,)) -> BlockPattern:
    """Return the pattern in which the blocks that hold `tokens` see everything and are seen by everything."""
    count = number_of_blocks(length, block_size)
    tokens = list(tokens)
    if any(not 0 <= token < length for token in tokens):
        raise ScriptError(f"global tokens {tokens} of a sequence of {length}; give positions from 0 to {length - 1}")
    chosen = _row({token // block_size for token in tokens})
    everything = tuple(range(count))
    rows = (everything if i in chosen else chosen for i in range(count))
    return BlockPattern(length=length, block_size=block_size, seen=tuple(rows))


def random_blocks(length: int, block_size: int, blocks: int, *, seed: int, causal: bool = False) -> BlockPattern:
    """Return the pattern in which every block sees `blocks` random blocks, or all where there are fewer.

    With `causal`, blocks are drawn from those up to and including the block itself.
    """
    count = number_of_blocks(length, block_size)
    draw = random.Random(seed)
    reach = [i + 1 if causal else count for i in range(count)]
    rows = (_row(draw.sample(range(most), min(blocks, most))) for most in reach)
    return BlockPattern(length=length, block_size=block_size, seen=tuple(rows))


def strided(length: int, block_size: int, stride: int) -> BlockPattern:
    """Return the pattern in which blocks see all those a multiple of `stride` away (Child et al. 2019, section 4.2)."""
    count = number_of_blocks(length, block_size)
    if stride < 1:
        raise ScriptError(f"stride = {stride}; give a number of blocks of 1 or more")
    rows = (range(i % stride, count, stride) for i in range(count))
    return BlockPattern(length=length, block_size=block_size, seen=tuple(map(tuple, rows)))


def big_bird(
    length: int, block_size: int, *, window: int = 1, first: int = 1, chosen: int = 3, seed: int = 0
) -> BlockPattern:
    """Return the pattern of BigBird (Zaheer et al. 2020, section 2).

    Args:
        length: tokens of the sequence.
        block_size: tokens of a block.
        window: neighbours that every block sees on either side.
        first: blocks at the start that see everything and are seen by everything.
        chosen: random blocks that every block sees.
        seed: seed of the random blocks.
    """
    whole = range(0, min(first * block_size, length), block_size)
    pattern = sliding_window(length, block_size, window) | global_tokens(length, block_size, whole)
    return pattern | random_blocks(length, block_size, chosen, seed=seed)


def block_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: BlockPattern,
    *,
    causal: bool = False,
    scale: float | None = None,
    keep: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute softmax(q k^T scale) v over the keys that `pattern` lets each query see.

    On GPUs FlexAttention computes it, elsewhere tiles of plain operations. Under a context axis, tensors hold this
    rank's part of the sequences, and `pattern` is that of whole ones.

    Args:
        query: (batch, heads, length, d).
        key: (batch, key_heads, length, d), where key_heads divides heads.
        value: (batch, key_heads, length, d_v).
        pattern: which blocks of keys each block of queries sees.
        causal: whether queries see no later keys.
        scale: factor of the scores; None: 1 / sqrt(d).
        keep: (batch, length), False for padding keys; None: no padding.

    Returns:
        (batch, heads, length, d_v). A query that sees no key gets 0.

    Raises:
        ScriptError: shapes do not fit.

    Examples:
        >>> query = key = value = torch.randn(2, 4, 64, 16)
        >>> block_sparse_attention(query, key, value, sliding_window(64, block_size=8), causal=True).shape
        torch.Size([2, 4, 64, 16])
    """
    values = (query, key, value)
    if has_torch_function(values):
        options: dict[str, Any] = {"causal": causal, "scale": scale, "keep": keep}
        return handle_torch_function(block_sparse_attention, values, *values, pattern, **options)
    parts = sequence_parts()
    _check(query, key, value, pattern, keep, whole_length(query.shape[2]))
    mask = SequenceMask(causal=causal, keep=keep, blocks=table_on(pattern, query.device), block_size=pattern.block_size)
    if parts is not None and query.shape[2] == parts.part:
        return parts.attend(query, key, value, mask, scale)
    return over_blocks(query, key, value, pattern, mask, scale)


@functools.lru_cache(maxsize=64)
def table_on(pattern: BlockPattern, device: torch.device) -> torch.Tensor:
    """Return `pattern.table()` on a device."""
    return pattern.table().to(device)


def over_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: BlockPattern,
    mask: SequenceMask,
    scale: float | None,
) -> torch.Tensor:
    """Compute `block_sparse_attention` of whole sequences."""
    causal, keep = mask.causal, mask.keep
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    if torch.is_autocast_enabled(query.device.type):
        low = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(low), key.to(low), value.to(low)
    if flex_takes(query, key, value):
        visible = mask.visibility(pattern.length, query.device)
        return flex(query, key, value, visible=visible, scale=scale)
    with torch.autocast(query.device.type, enabled=False):
        return _BlockSparse.apply(  # type: ignore[no-any-return, no-untyped-call]
            query, key, value, keep, pattern, causal, scale
        )


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: BlockPattern,
    *,
    causal: bool = False,
    scale: float | None = None,
    keep: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the same as `block_sparse_attention` with one masked softmax over all pairs of tokens.

    This is the reference; its memory is quadratic in the length.
    """
    _check(query, key, value, pattern, keep, query.shape[2])
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    mask = pattern.mask(causal=causal).to(query.device)
    if keep is not None:
        mask = mask & keep[:, None, None, :]
    scores = (query @ key.transpose(-2, -1) * scale).masked_fill(~mask, -torch.inf)
    blind = ~mask.any(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0) @ value


class BlockSparseSelfAttention(nn.Module):
    """Self-attention over the blocks of a pattern: (batch, seq, width) -> (batch, seq, width).

    Args:
        width: size of a token's vector.
        heads: number of heads.
        pattern: (length) -> the pattern of a sequence, such as functools.partial(big_bird, block_size=64).
        causal: whether queries see no later keys.

    Examples:
        >>> attention = BlockSparseSelfAttention(32, 4, lambda length: big_bird(length, block_size=8))
        >>> attention(torch.randn(2, 64, 32)).shape
        torch.Size([2, 64, 32])
    """

    def __init__(self, width: int, heads: int, pattern: Callable[[int], BlockPattern], *, causal: bool = False) -> None:
        super().__init__()
        if width % heads:
            raise ScriptError(f"width = {width} does not divide into heads = {heads}; make it a multiple")
        self.heads, self.causal = heads, causal
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.pattern = pattern
        self._patterns: dict[int, BlockPattern] = {}

    def forward(self, x: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        """Attend over x (batch, seq, width); `keep`: (batch, seq), False for padding."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        whole = whole_length(length)
        if whole not in self._patterns:
            self._patterns[whole] = self.pattern(whole)
        seen = block_sparse_attention(q, k, v, self._patterns[whole], causal=self.causal, keep=keep)
        return self.merge(seen.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Query blocks that see about equally many key blocks.

    Attributes:
        rows: (n,), numbers of the query blocks.
        columns: (n, slots), the key blocks that each sees; -1 where a slot is empty.
    """

    rows: torch.Tensor
    columns: torch.Tensor


@functools.lru_cache(maxsize=64)
def _groups(pattern: BlockPattern, causal: bool, device: torch.device) -> tuple[_Rows, ...]:
    """Group all query blocks by the number of key blocks they see, up to the next power of 2, to pad little."""
    grouped: dict[int, list[tuple[int, Sequence[int]]]] = {}
    for number, row in enumerate(pattern.seen):
        columns = [column for column in row if column <= number] if causal else row
        if columns:
            grouped.setdefault((len(columns) - 1).bit_length(), []).append((number, columns))
    groups = []
    for members in grouped.values():
        slots = max(len(columns) for _, columns in members)
        table = [[*columns, *[-1] * (slots - len(columns))] for _, columns in members]
        groups.append(_Rows(torch.tensor([n for n, _ in members], device=device), torch.tensor(table, device=device)))
    return tuple(groups)


class _BlockSparse(torch.autograd.Function):
    """Attention on tensors in blocks.

    Keys and values are (batch, key_heads, blocks, tokens of a block, d); queries have group x tokens in place of
    tokens.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keep: torch.Tensor | None,
        pattern: BlockPattern,
        causal: bool,
        scale: float,
    ) -> torch.Tensor:
        size, group = pattern.block_size, query.shape[1] // key.shape[1]
        q, k, v = _blocked(query, size, group), _blocked(key, size), _blocked(value, size)
        dtype = torch.float32 if query.dtype in (torch.bfloat16, torch.float16) else query.dtype
        out = q.new_zeros(*q.shape[:-1], v.shape[-1])
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=dtype, device=q.device)
        for rows, columns in _tiles(pattern, causal, q):
            scores = _scores(q, k, rows, columns, keep, pattern, causal, scale, group)
            lse[:, :, rows] = tile = torch.logsumexp(scores, -1)
            out[:, :, rows] = _probabilities(scores, tile).to(v.dtype) @ _gathered(v, columns)
        ctx.save_for_backward(query, key, value, keep, out, lse)
        ctx.pattern, ctx.causal, ctx.scale = pattern, causal, scale
        return _flat(out, pattern.length, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, keep, out, lse = ctx.saved_tensors  # type: ignore[attr-defined]
        pattern, causal, scale = ctx.pattern, ctx.causal, ctx.scale  # type: ignore[attr-defined]
        size, group = pattern.block_size, query.shape[1] // key.shape[1]
        q, k, v = _blocked(query, size, group), _blocked(key, size), _blocked(value, size)
        grads = _blocked(grad_output, size, group)
        delta = (grads.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
        grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
        for rows, columns in _tiles(pattern, causal, q):
            scores = _scores(q, k, rows, columns, keep, pattern, causal, scale, group)
            probabilities = _probabilities(scores, lse[:, :, rows])
            tile_grads, keys = grads[:, :, rows], _gathered(k, columns)
            slope = (tile_grads @ _gathered(v, columns).transpose(-2, -1)).to(lse.dtype) - delta[:, :, rows, :, None]
            slope = (slope * probabilities * scale).to(q.dtype)
            grad_q[:, :, rows] = (slope @ keys).to(lse.dtype)
            _scatter(grad_k, columns, slope.transpose(-2, -1) @ q[:, :, rows])
            _scatter(grad_v, columns, probabilities.to(v.dtype).transpose(-2, -1) @ tile_grads)
        whole = _flat(grad_q, pattern.length, group), _flat(grad_k, pattern.length), _flat(grad_v, pattern.length)
        return *(grad.to(query.dtype) for grad in whole), None, None, None, None


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: BlockPattern,
    keep: torch.Tensor | None,
    length: int,
) -> None:
    """Check shapes; sequences of `length` tokens may be in parts."""
    shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
    tokens = query.shape[2] if query.dim() == 4 else -1
    if any(x.dim() != 4 or x.shape[2] != tokens for x in (query, key, value)) or length != pattern.length:
        raise ScriptError(
            f"block-sparse attention of query, key, value {shapes} by a pattern for {pattern.length} tokens; give "
            f"(batch, heads, {pattern.length}, d), or make the pattern for their length"
        )
    if key.shape[:3] != value.shape[:3] or query.shape[1] % key.shape[1] or query.shape[0] != key.shape[0]:
        raise ScriptError(
            f"block-sparse attention of query, key, value {shapes}: key and value need the same heads, of which the "
            "query's are a multiple, and all the same batch"
        )
    if keep is not None and keep.shape != (query.shape[0], tokens):
        raise ScriptError(f"keep has shape {tuple(keep.shape)}; give {(query.shape[0], tokens)}, False for padding")


def _tiles(pattern: BlockPattern, causal: bool, q: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (rows, columns), a few rows at a time."""
    for group in _groups(pattern, causal, q.device):
        width = q.shape[0] * q.shape[1] * q.shape[3] * group.columns.shape[1] * pattern.block_size
        count = max(1, TILE_ELEMENTS // width)
        yield from zip(torch.split(group.rows, count), torch.split(group.columns, count), strict=True)


def _scores(
    q: torch.Tensor,
    k: torch.Tensor,
    rows: torch.Tensor,
    columns: torch.Tensor,
    keep: torch.Tensor | None,
    pattern: BlockPattern,
    causal: bool,
    scale: float,
    group: int,
) -> torch.Tensor:
    """Return scores (batch, key_heads, n, group x tokens, slots x tokens), -inf where a query may not see a key."""
    size = pattern.block_size
    scores = q[:, :, rows] @ _gathered(k, columns).transpose(-2, -1)
    scores = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
    within = torch.arange(size, device=q.device)
    keys = (columns[:, :, None] * size + within).flatten(1)  # (n, slots x tokens), below 0 where a slot is empty
    allowed = ((keys >= 0) & (keys < pattern.length))[:, None, :]
    if causal:
        allowed = allowed & (keys[:, None, :] <= (rows[:, None] * size + within)[:, :, None]).repeat(1, group, 1)
    if keep is not None:
        kept = keep[:, keys.clamp(0, pattern.length - 1)]  # (batch, n, slots x tokens)
        allowed = allowed & kept[:, None, :, None, :]
    return scores.mul_(scale).masked_fill_(~allowed, -torch.inf)


def _probabilities(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Compute exp(scores - lse) in place, 0 for rows that see nothing."""
    return scores.sub_(lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp_()


def _gathered(x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Gather the blocks that each row sees, side by side: (batch, heads, n, slots x tokens, d)."""
    return x[:, :, columns.clamp(min=0)].flatten(3, 4)


def _scatter(total: torch.Tensor, columns: torch.Tensor, parts: torch.Tensor) -> None:
    """Add each row's parts to the blocks that it sees; the parts of empty slots are 0."""
    blocks = parts.unflatten(3, (columns.shape[1], -1)).flatten(2, 3)  # type: ignore[no-untyped-call]
    total.index_add_(2, columns.clamp(min=0).flatten(), blocks.to(total.dtype))


def _blocked(x: torch.Tensor, size: int, group: int = 1) -> torch.Tensor:
    """Cut tokens into zero-padded blocks: (batch, heads, length, d) -> (.., heads / group, blocks, group x size, d)."""
    batch, heads, length, width = x.shape
    padded = nn.functional.pad(x, (0, 0, 0, -length % size))
    blocks = padded.reshape(batch, heads // group, group, -1, size, width)
    return blocks.transpose(2, 3).flatten(3, 4)


def _flat(x: torch.Tensor, length: int, group: int = 1) -> torch.Tensor:
    """Reverse `_blocked`."""
    batch, heads, blocks, rows, width = x.shape
    tokens = x.reshape(batch, heads, blocks, group, rows // group, width).transpose(2, 3)
    return tokens.reshape(batch, heads * group, -1, width)[:, :, :length]


def _row(blocks: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(blocks))
