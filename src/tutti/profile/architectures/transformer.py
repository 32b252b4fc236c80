"""Transformers of every kind: GPT, Llama, BERT, ViT, T5, and those with experts, from one description of a block."""

from dataclasses import dataclass, replace

from tutti.config.model import ModuleSpec
from tutti.profile.architectures.building_blocks import (
    AttentionKind,
    Heads,
    MaskedWork,
    Numbers,
    at,
    attention,
    cross_entropy,
    elementwise,
    embedding,
    linear,
    norm,
    work,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerBlock:
    """One transformer block on `tokens` vectors of width `hidden`.

    Attributes:
        rms: RMSNorm instead of LayerNorm.
        gated: three products in the MLP (SwiGLU) instead of two.
        relu: the MLP has ReLU, whose result alone is saved.
        joint: one product computes query, key and value.
        rotary: rotary positions.
        dropout: masks of both residual sums are saved.
        post_norm: norms come after attention and MLP instead of before.
        kind, masked: how attention is computed and counted.
        fused_norms: RMSNorm and SwiGLU are one kernel each.
        cross: encoder tokens that a second attention attends to; 0 for none.
        experts: number of experts of a mixture that replaces the MLP; 0 for an MLP.
        top_k: experts that each token uses.
        expert_ffn: width of an expert; 0 for `ffn`.
        shared: experts that process every token.
        latent: ranks of query and key-value in DeepSeek's attention.
        rotary_dim: width of its rotary part.
        sequence: whether ranks of the split axis divide norms and residual sums by tokens (Korthikanti et al. 2022), or
            each computes them for all tokens.
    """

    tokens: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    rms: bool = False
    gated: bool = False
    relu: bool = False
    bias: bool = True
    attention_bias: bool = True
    norm_bias: bool = True
    joint: bool = False
    causal: bool = False
    rotary: bool = False
    dropout: bool = False
    post_norm: bool = False
    kind: AttentionKind = "fused"
    masked: MaskedWork = "counted"
    fused_norms: bool = False
    cross: int = 0
    experts: int = 0
    top_k: int = 2
    expert_ffn: int = 0
    shared: int = 0
    latent: tuple[int, int] = (0, 0)
    rotary_dim: int = 0
    sequence: bool = True

    def norm(self, name: str, numbers: Numbers) -> ModuleSpec:
        return norm(
            name,
            numbers,
            self.tokens,
            self.hidden,
            rms=self.rms,
            bias=self.norm_bias,
            fused=self.fused_norms,
            sequence=self.sequence,
        )


def block(name: str, number: int, shape: TransformerBlock, numbers: Numbers) -> list[ModuleSpec]:
    """Return the modules of a block in order of execution.

    Args:
        name: name of the block.
        number: number of the repeated block.
        shape: sizes of the block.
        numbers: bytes of parameters and values.
    """
    width, values = numbers.width, shape.tokens * shape.hidden
    sums = 3 if shape.cross else 2
    dropped = 2 * shape.tokens * shape.hidden if shape.dropout else 0  # one byte an element of each mask
    whole = ModuleSpec(
        name=name,
        kind="TransformerBlock",
        output_nbytes=float(values * width),
        activation_nbytes=float(dropped),
        ops=(
            work("elementwise", float(sums * values), 3.0 * sums * values * width + dropped, back=1.0,
                 back_nbytes=3.0 * sums * values * width + dropped, calls=sums),
        ),
        sequence=shape.sequence,
    )  # fmt: skip
    inner = _latent(name, shape, numbers) if shape.latent[1] else _attention(name, shape, numbers)
    first, second = shape.norm(f"{name}.norm1", numbers), shape.norm(f"{name}.norm2", numbers)
    modules = [whole]
    modules += [*inner, first] if shape.post_norm else [first, *inner]
    if shape.cross:
        modules += [shape.norm(f"{name}.norm_cross", numbers), *_cross(name, shape, numbers)]
    mlp = _mixture(name, shape, numbers) if shape.experts else _mlp(f"{name}.mlp", shape, numbers, shape.ffn)
    modules += [*mlp, second] if shape.post_norm else [second, *mlp]
    return [at(module, number) for module in modules]


def _attention(name: str, shape: TransformerBlock, numbers: Numbers) -> list[ModuleSpec]:
    tokens, hidden, limit = shape.tokens, shape.hidden, shape.kv_heads
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    bias = shape.attention_bias
    modules = []
    if shape.joint:
        modules.append(
            linear(f"{name}.qkv", numbers, tokens, hidden, queries + 2 * keys, bias=bias, split="column", limit=limit)
        )
    else:
        for index, (part, size) in enumerate((("query", queries), ("key", keys), ("value", keys))):
            first = index == 0
            modules.append(
                linear(f"{name}.{part}", numbers, tokens, hidden, size, bias=bias, keeps=first, split="column",
                       limit=limit, copied=first)
            )  # fmt: skip
    if shape.rotary:
        modules.append(
            elementwise(f"{name}.rotary", "Rotary", numbers, tokens * (queries + keys), reads=2.0, keeps=0.0, calls=8,
                        split="heads", limit=limit)
        )  # fmt: skip
    heads = Heads(
        heads=shape.heads, kv_heads=shape.kv_heads, dim=shape.head_dim, value_dim=shape.head_dim, query=tokens,
        key=tokens,
    )  # fmt: skip
    modules.append(
        attention(f"{name}.attention", numbers, heads, kind=shape.kind, causal=shape.causal, masked=shape.masked,
                  dropout=shape.dropout)
    )  # fmt: skip
    modules.append(_merge(f"{name}.merge", shape, numbers, queries))
    return modules


def _merge(name: str, shape: TransformerBlock, numbers: Numbers, inputs: int) -> ModuleSpec:
    return linear(
        name, numbers, shape.tokens, inputs, shape.hidden, bias=shape.attention_bias, keeps=False, split="row",
        limit=shape.kv_heads,
    )  # fmt: skip


def _cross(name: str, shape: TransformerBlock, numbers: Numbers) -> list[ModuleSpec]:
    """Return the attention of the decoder's tokens to the encoder's."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    parts = (("query", shape.tokens, queries), ("key", shape.cross, keys), ("value", shape.cross, keys))
    modules = [
        linear(f"{name}.cross_{part}", numbers, tokens, shape.hidden, size, bias=shape.attention_bias,
               keeps=part == "query", split="column", limit=shape.kv_heads, copied=part != "value")
        for part, tokens, size in parts
    ]  # fmt: skip
    heads = Heads(
        heads=shape.heads, kv_heads=shape.kv_heads, dim=shape.head_dim, value_dim=shape.head_dim, query=shape.tokens,
        key=shape.cross,
    )  # fmt: skip
    core = attention(f"{name}.cross_attention", numbers, heads, kind=shape.kind, dropout=shape.dropout)
    return [*modules, core, _merge(f"{name}.cross_merge", shape, numbers, queries)]


def _latent(name: str, shape: TransformerBlock, numbers: Numbers) -> list[ModuleSpec]:
    """Return multi-head latent attention (DeepSeek-AI 2024): low-rank products, one rotary key shared by all heads."""
    tokens, hidden, (query_rank, rank) = shape.tokens, shape.hidden, shape.latent
    dim = shape.head_dim + shape.rotary_dim
    source, modules = (hidden, []) if not query_rank else (
        query_rank,
        [
            linear(f"{name}.query_down", numbers, tokens, hidden, query_rank, bias=False),
            norm(f"{name}.query_norm", numbers, tokens, query_rank, rms=True),
        ],
    )  # fmt: skip
    limit = shape.heads
    modules += [
        linear(f"{name}.query", numbers, tokens, source, shape.heads * dim, bias=False, split="column", limit=limit),
        linear(f"{name}.key_value_down", numbers, tokens, hidden, rank + shape.rotary_dim, bias=False, keeps=False),
        norm(f"{name}.key_value_norm", numbers, tokens, rank, rms=True),
        linear(f"{name}.key_value", numbers, tokens, rank, 2 * shape.heads * shape.head_dim, bias=False,
               split="column", limit=limit),
    ]  # fmt: skip
    heads = Heads(heads=shape.heads, kv_heads=shape.heads, dim=dim, value_dim=shape.head_dim, query=tokens, key=tokens)
    modules.append(
        attention(f"{name}.attention", numbers, heads, kind=shape.kind, causal=shape.causal, masked=shape.masked)
    )
    return [*modules, _merge(f"{name}.merge", shape, numbers, shape.heads * shape.head_dim)]


def _mlp(name: str, shape: TransformerBlock, numbers: Numbers, ffn: int) -> list[ModuleSpec]:
    tokens, hidden = shape.tokens, shape.hidden
    values = tokens * ffn
    modules = [linear(f"{name}.up", numbers, tokens, hidden, ffn, bias=shape.bias, split="column")]
    if shape.gated:
        gate = linear(f"{name}.gate", numbers, tokens, hidden, ffn, bias=shape.bias, keeps=False, split="column",
                      copied=False)  # fmt: skip
        # Saved: the gate before and after SiLU, and what it multiplies; if fused, only the first and the last.
        modules += [
            gate,
            elementwise(f"{name}.act", "SiLU", numbers, values, reads=1.5 if shape.fused_norms else 2.5,
                        keeps=2.0 if shape.fused_norms else 3.0, calls=1 if shape.fused_norms else 2, split="column",
                        limit=ffn),
        ]  # fmt: skip
    else:
        modules.append(elementwise(f"{name}.act", "GELU", numbers, values, split="column", limit=ffn))
    modules.append(
        linear(f"{name}.down", numbers, tokens, ffn, hidden, bias=shape.bias, keeps=not shape.relu, split="row")
    )
    return modules


def _mixture(name: str, shape: TransformerBlock, numbers: Numbers) -> list[ModuleSpec]:
    """Return a mixture of experts: the router, the shared experts that process every token, and the chosen experts."""
    tokens, hidden, ffn = shape.tokens, shape.hidden, shape.expert_ffn or shape.ffn
    products, routed = 3 if shape.gated else 2, tokens * shape.top_k
    size = products * hidden * ffn
    width = numbers.width
    router = linear(f"{name}.router", numbers, tokens, hidden, shape.experts, bias=False)
    flops = 2.0 * routed * size
    inner = products * ffn  # up, gate and their product, which down keeps
    kept = routed * (hidden + (inner + (ffn if shape.gated else 0))) * width
    moved = routed * (2 * hidden + inner) * width
    experts = ModuleSpec(
        name=f"{name}.experts",
        kind="Experts",
        **numbers.held(shape.experts * (size + (ffn + hidden if shape.bias else 0))),
        activation_nbytes=float(kept),
        output_nbytes=float(tokens * hidden * width),
        ops=(
            work("gemm", flops, float(moved), weight_nbytes=float(shape.experts * size * width), calls=products),
            work("elementwise", float(routed * ffn), 3.0 * routed * ffn * width, calls=2),
            # Tokens are sorted by expert and restored to their order.
            work("other", 0.0, 4.0 * routed * hidden * width, back=1.0, calls=4),
        ),
        expert=True,
        routed_nbytes=float(routed * hidden * width),
    )
    shared = _mlp(f"{name}.shared", shape, numbers, shape.shared * ffn) if shape.shared else []
    return [router, *shared, experts]


def vocabulary_parts(
    numbers: Numbers,
    tokens: int,
    hidden: int,
    vocab: int,
    *,
    tied: bool,
    positions: int = 0,
) -> tuple[list[ModuleSpec], list[ModuleSpec]]:
    """Return the first and the last modules of a language model.

    Args:
        numbers: bytes of parameters and values.
        tokens: tokens of a sample.
        hidden: width of a token.
        vocab: rows of the vocabulary.
        tied: whether the output layer shares the weight of the embedding.
        positions: rows of the table of positions; 0 for none.

    Returns:
        (embeddings, output product and loss).
    """
    first = [embedding("tokens", numbers, tokens, vocab, hidden, split="vocabulary")]
    if positions:
        first.append(replace(embedding("positions", numbers, 0, positions, hidden, indices=False), sequence=True))
    head = linear(
        "head", numbers, tokens, hidden, vocab, bias=False, split="column", limit=vocab,
        tied_to="tokens" if tied else None,
    )  # fmt: skip
    return first, [head, cross_entropy("loss", numbers, tokens, vocab, split="column")]
