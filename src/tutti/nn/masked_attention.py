"""Attention with windows, packed documents and block patterns, as one function for every device and every mesh."""

import math
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as torch_attention  # the model's may be replaced
from torch.overrides import handle_torch_function, has_torch_function

from tutti.errors import ScriptError
from tutti.nn.attention_blocks import AttentionBlock, attend_tiled
from tutti.nn.flex_blocks import flex, flex_takes
from tutti.nn.sparse_attention import BlockPattern, over_blocks, table_on
from tutti.nn.visibility import SequenceMask, sequence_parts, whole_length


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    documents: torch.Tensor | None = None,
    pattern: BlockPattern | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute softmax(q k^T scale) v over the keys that all conditions let each query see.

    The scores are never all in memory. On GPUs the conditions compile to one kernel (FlexAttention), which skips blocks
    of scores that nobody sees; without conditions torch's scaled_dot_product_attention computes it. On CPUs, and for
    float64, it is computed in tiles. Under a context axis the tensors hold this rank's part of the sequences.

    Args:
        query: (batch, heads, tokens, d).
        key: (batch, key_heads, tokens, d), where key_heads divides heads.
        value: (batch, key_heads, tokens, d_v).
        causal: whether queries see no later keys.
        window: queries see keys fewer than this many positions away; None: any distance.
        documents: (batch, tokens), the number of the document of each token, for sequences packed of several
            documents: queries see their own document. Negative numbers mark padding, which sees nothing and is not
            seen. None: one document.
        pattern: which blocks of keys each block of queries sees, for whole sequences; None: all.
        scale: factor of the scores; None: 1 / sqrt(d).

    Returns:
        (batch, heads, tokens, d_v). A query that sees no key gets 0.

    Raises:
        ScriptError: shapes do not fit, or `window` is below 1.

    Examples:
        >>> query = key = value = torch.randn(1, 2, 8, 16)
        >>> documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1]])  # two documents and padding
        >>> out = attention(query, key, value, causal=True, window=4, documents=documents)
        >>> bool(torch.equal(out[:, :, 3], value[:, :, 3])), bool(out[:, :, 7].any())
        (True, False)
    """
    values = (query, key, value)
    if has_torch_function(values):
        options: dict[str, Any] = {
            "causal": causal,
            "window": window,
            "documents": documents,
            "pattern": pattern,
            "scale": scale,
        }
        return handle_torch_function(attention, values, *values, **options)
    _check(query, key, value, window, documents, pattern)
    mask = SequenceMask(
        causal=causal,
        window=window,
        documents=documents,
        blocks=None if pattern is None else table_on(pattern, query.device),
        block_size=1 if pattern is None else pattern.block_size,
    )
    parts = sequence_parts()
    if parts is not None and query.shape[2] == parts.part:
        return parts.attend(query, key, value, mask, scale)
    if pattern is not None and window is None and documents is None:
        return over_blocks(query, key, value, pattern, mask, scale)
    return over_whole_sequences(query, key, value, mask, scale)


TORCH_ENGINE = "scaled_dot_product_attention"
"""Name of torch's own attention, which chooses its kernel itself."""


def engine_of_whole(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: SequenceMask) -> str:
    """The name of what computes `over_whole_sequences` of these tensors."""
    if mask.is_plain:
        return TORCH_ENGINE
    return "flex" if flex_takes(query, key, value) else "tiles"


def over_whole_sequences(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: SequenceMask, scale: float | None
) -> torch.Tensor:
    """Compute attention of whole sequences under a mask; shapes as in `attention`."""
    grouped = query.shape[1] != key.shape[1]
    if mask.is_plain:
        return torch_attention(query, key, value, is_causal=mask.causal, scale=scale, enable_gqa=grouped)
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    device = query.device.type
    if torch.is_autocast_enabled(device):
        low = torch.get_autocast_dtype(device)
        query, key, value = query.to(low), key.to(low), value.to(low)
    visible = mask.visibility(query.shape[2], query.device)
    if flex_takes(query, key, value):
        return flex(query, key, value, visible=visible, scale=scale)
    with torch.autocast(device, enabled=False):
        q = query.unflatten(1, (key.shape[1], -1))  # type: ignore[no-untyped-call]
        return attend_tiled(AttentionBlock(scale=scale, visible=visible), q, key, value).flatten(1, 2)


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    documents: torch.Tensor | None,
    pattern: BlockPattern | None,
) -> None:
    shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
    tokens = query.shape[2] if query.dim() == 4 else -1
    if any(x.dim() != 4 or x.shape[2] != tokens for x in (query, key, value)):
        raise ScriptError(
            f"attention of query, key, value {shapes}; give (batch, heads, tokens, d) with the same tokens, or call "
            "F.scaled_dot_product_attention for queries and keys of different sequences"
        )
    if key.shape[:3] != value.shape[:3] or query.shape[1] % key.shape[1] or query.shape[0] != key.shape[0]:
        raise ScriptError(
            f"attention of query, key, value {shapes}: key and value need the same heads, of which the query's are a "
            "multiple, and all the same batch"
        )
    if window is not None and window < 1:
        raise ScriptError(f"attention with window = {window}; give a number of tokens of 1 or more, or None for all")
    if documents is not None:
        if documents.shape != (query.shape[0], tokens) or documents.is_floating_point():
            raise ScriptError(
                f"documents has shape {tuple(documents.shape)} and dtype {documents.dtype}; give whole numbers of "
                f"shape {(query.shape[0], tokens)}, one for each token"
            )
        if documents.device != query.device and not query.is_meta:  # a model that is described knows small values
            raise ScriptError(
                f"documents is on {documents.device} and query on {query.device}; move documents there with the batch"
            )
    if pattern is not None and pattern.length != whole_length(tokens):
        raise ScriptError(
            f"a pattern for {pattern.length} tokens and sequences of {whole_length(tokens)}; make the pattern for "
            "their length"
        )


def document_numbers(positions: torch.Tensor) -> torch.Tensor:
    """Number the documents of packed sequences by their positions, which begin again at 0 in each document.

    Args:
        positions: (batch, tokens), position of each token in its document, of whole sequences.

    Returns:
        (batch, tokens), for `attention(documents=...)`.

    Raises:
        ScriptError: the sequences are in parts (a context axis).

    Examples:
        >>> document_numbers(torch.tensor([[0, 1, 2, 0, 1, 0]]))
        tensor([[1, 1, 1, 2, 2, 3]])
    """
    parts = sequence_parts()
    if parts is not None and positions.shape[-1] == parts.part:
        raise ScriptError(
            f"document_numbers of the {parts.part} tokens of one rank, of sequences of {parts.length}: documents begin "
            "on other ranks too; number them in the data set or in collate_fn, and pass the numbers to the model"
        )
    return (positions == 0).long().cumsum(-1)
