"""Attention as named architectures cost it: one fused kernel, or products and softmax with all scores in memory."""

from dataclasses import dataclass
from typing import Any, Literal

from tutti.config.model import ModuleSpec
from tutti.profile.architectures.parts import Numbers, work

AttentionKind = Literal["fused", "plain"]
"""fused: FlashAttention (Dao et al. 2022): scores never reach memory; plain: they are written, normalised, read."""

MaskedWork = Literal["counted", "skipped"]
"""Whether the half of the scores that causal attention masks is counted as work, or skipped as fused kernels do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Shapes of attention: `query` and `key` tokens of a sample; `dim` of queries and keys, `value_dim` of values."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    query: int
    key: int


def attention(
    name: str,
    numbers: Numbers,
    shape: Heads,
    *,
    kind: AttentionKind = "fused",
    causal: bool = False,
    masked: MaskedWork = "counted",
    dropout: bool = False,
) -> ModuleSpec:
    """softmax(Q K^T) V over all heads, no parameters: 2 s t (d + dv) FLOPs a head forward.

    fused: backward takes 2.5 times as much (scores are computed again); kept are query, key, value, result and a
    float32 number a row. plain: twice as much; kept are query, key, value and the scores after softmax, with
    `dropout` its mask and result besides (Korthikanti et al. 2022, eq. 2).
    """
    part = 0.5 if causal and masked == "skipped" and kind == "fused" else 1.0
    flops = 2.0 * part * shape.heads * shape.query * shape.key * (shape.dim + shape.value_dim)
    query = shape.heads * shape.query * shape.dim
    keys = shape.kv_heads * shape.key * (shape.dim + shape.value_dim)
    result = shape.heads * shape.query * shape.value_dim
    width = numbers.width
    common: dict[str, Any] = {
        "name": name,
        "kind": "Attention",
        "output_nbytes": float(result * width),
        "split": "heads",
        "split_limit": shape.kv_heads,
        "key_value_nbytes": float(keys * width),
    }
    if kind == "fused":
        rows = 4 * shape.heads * shape.query
        moved = (query + keys + result) * width + rows
        op = work("attention", flops, moved, back=2.5, back_nbytes=moved + (query + keys + result) * width)
        return ModuleSpec(activation_nbytes=float(moved), ops=(op,), **common)
    scores = shape.heads * shape.query * shape.key
    # Written by the product; scaled, masked and normalised by one kernel; with dropout read and written once more.
    kept = (query + keys) * width + scores * (width + (width + 1 if dropout else 0)) + result * width
    ops = [
        work("attention", flops, float((query + keys + result) * width), calls=2),
        work("exponential", float(scores), float(4 * width * scores)),
    ]
    if dropout:
        ops.append(work("random", float(scores), float((2 * width + 1) * scores)))
    return ModuleSpec(activation_nbytes=float(kept), ops=tuple(ops), **common)
