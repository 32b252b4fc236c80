"""Named language models: gpt, llama, moe, bert, t5, lstm. Fields are the sizes; `build()` returns the ModelSpec."""

from dataclasses import dataclass, replace
from typing import Literal

from tutti.config.model import ModelSpec, ModuleSpec, TensorShape
from tutti.errors import SpecError
from tutti.profile.architectures.building_blocks import (
    AttentionKind,
    MaskedWork,
    Numbers,
    Optimizer,
    at,
    cross_entropy,
    elementwise,
    embedding,
    linear,
    norm,
    with_containers,
    work,
)
from tutti.profile.architectures.transformer import TransformerBlock, block, vocabulary_parts

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
_MASKED_NOTE = "causal attention is counted at full cost, as if nothing were masked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """Fields of all architectures.

    Attributes:
        dtype: dtype of parameters and values.
        optimizer: determines the bytes of optimizer state.
        wide_gradients: keep the gradients of 2-byte parameters in float32.
    """

    dtype: Dtype = "float32"
    optimizer: Optimizer = "AdamW"
    wide_gradients: bool = False

    @property
    def numbers(self) -> Numbers:
        return Numbers(dtype=self.dtype, optimizer=self.optimizer, wide_gradients=self.wide_gradients)

    def spec(
        self,
        name: str,
        modules: list[ModuleSpec],
        inputs: tuple[TensorShape, ...],
        tokens: int = 0,
        notes: tuple[str, ...] = (),
    ) -> ModelSpec:
        return ModelSpec(
            name=name,
            modules=with_containers(modules),
            inputs=inputs,
            dtype=self.dtype,
            optimizer=self.optimizer,
            tokens_per_sample=tokens,
            notes=notes,
        )


def width_of_heads(hidden: int, heads: int, otherwise: str = "") -> int:
    """Return hidden / heads; raise SpecError if that is no whole number.

    Args:
        hidden: width of a token.
        heads: number of heads.
        otherwise: what else the message suggests.
    """
    if hidden % heads:
        raise SpecError(f"hidden = {hidden} is not divisible by heads = {heads}; change one of them{otherwise}")
    return hidden // heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Language(Common):
    """Fields of transformers over tokens.

    Attributes:
        kv_heads: key-value heads; 0 for as many as heads.
        head_dim: width of a head; 0 for hidden / heads.
        ffn: width of the MLP; 0 for the family's usual multiple.
        seq_len: tokens of a sample.
        vocab: rows of the vocabulary.
        attention: fused or plain.
        masked: whether the masked half of causal scores counts as work.
        dropout: whether dropout masks are saved.
        sequence: whether ranks of the split axis divide norms and residual sums by tokens.
    """

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    seq_len: int = 1024
    vocab: int = 50257
    attention: AttentionKind = "fused"
    masked: MaskedWork = "counted"
    dropout: bool = False
    sequence: bool = True

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "heads", "seq_len", "vocab"):
            if getattr(self, field) < 1:
                raise SpecError(f"{field} = {getattr(self, field)}; give a number of 1 or more")
        if not self.head_dim:
            width_of_heads(self.hidden, self.heads, ", or give head_dim")
        if self.heads % (self.kv_heads or self.heads):
            raise SpecError(f"heads = {self.heads} is not divisible by kv_heads = {self.kv_heads}; change one of them")

    def sizes(self, ffn: int) -> TransformerBlock:
        """Return a block of these sizes.

        Args:
            ffn: width of the MLP if the fields give none.
        """
        return TransformerBlock(
            tokens=self.seq_len,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads or self.heads,
            head_dim=self.head_dim or self.hidden // self.heads,
            ffn=self.ffn or ffn,
            kind=self.attention,
            masked=self.masked,
            dropout=self.dropout,
            sequence=self.sequence,
        )

    @property
    def token_inputs(self) -> tuple[TensorShape, ...]:
        return (TensorShape(name="tokens", shape=(self.seq_len,), dtype="int64"),)

    @property
    def masked_notes(self) -> tuple[str, ...]:
        return (_MASKED_NOTE,) if self.masked == "counted" or self.attention == "plain" else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT(Language):
    """GPT-2 and -3 (Radford et al. 2019): LayerNorm before, GELU, biases, learned positions, tied embeddings.

    Attributes:
        tied: whether the output layer shares the weight of the embedding.
        positions: rows of the table of positions; -1: seq_len, 0: none.
    """

    tied: bool = True
    positions: int = -1
    bias: bool = True

    def build(self) -> ModelSpec:
        shape = replace(self.sizes(4 * self.hidden), joint=True, causal=True)
        shape = replace(shape, bias=self.bias, attention_bias=self.bias, norm_bias=self.bias)
        numbers, values = self.numbers, self.seq_len * self.hidden
        rows = self.seq_len if self.positions < 0 else self.positions
        first, last = vocabulary_parts(numbers, self.seq_len, self.hidden, self.vocab, tied=self.tied, positions=rows)
        start = elementwise("sum", "Sum", numbers, values, keeps=0.25 if self.dropout else 0.0)
        modules = [*first, start]
        for index in range(self.layers):
            modules += block(f"blocks.{index}", index, shape, numbers)
        modules += [shape.norm("norm", numbers), *last]
        return self.spec("gpt", modules, self.token_inputs, self.seq_len, self.masked_notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama(Language):
    """Llama 2 and 3 (Touvron et al. 2023): RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases.

    Attributes:
        tied: whether the output layer shares the weight of the embedding.
        fused: norms and SwiGLU are one kernel each, as when compiled or hand-written; otherwise as in transformers.
    """

    vocab: int = 32000
    tied: bool = False
    fused: bool = False
    attention_bias: bool = False

    def shape(self) -> TransformerBlock:
        usual = -(-(8 * self.hidden // 3) // 256) * 256
        return replace(
            self.sizes(usual), rms=True, gated=True, bias=False, attention_bias=False, norm_bias=False, causal=True,
            rotary=True, fused_norms=self.fused,
        )  # fmt: skip

    def build(self) -> ModelSpec:
        shape = self.shape()
        return self.language("llama", [shape] * self.layers)

    def language(self, name: str, shapes: list[TransformerBlock]) -> ModelSpec:
        numbers = self.numbers
        modules, last = vocabulary_parts(numbers, self.seq_len, self.hidden, self.vocab, tied=self.tied)
        for index, shape in enumerate(shapes):
            modules += block(f"blocks.{index}", index, shape, numbers)
        modules += [shapes[-1].norm("norm", numbers), *last]
        return self.spec(name, modules, self.token_inputs, self.seq_len, self.masked_notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoE(Llama):
    """Llama's block with a mixture of experts instead of the MLP: Mixtral, Qwen, DeepSeek (`latent_rank` above 0).

    Attributes:
        experts: number of experts.
        top_k: experts that each token uses.
        expert_ffn: width of an expert; 0 for `ffn`.
        shared: experts that process every token.
        dense_layers: number of first blocks that have an MLP of width `ffn` instead.
        query_rank, latent_rank, rotary_dim: sizes of multi-head latent attention.
    """

    experts: int = 8
    top_k: int = 2
    expert_ffn: int = 0
    shared: int = 0
    dense_layers: int = 0
    query_rank: int = 0
    latent_rank: int = 0
    rotary_dim: int = 0

    def build(self) -> ModelSpec:
        if self.experts < 1:
            raise SpecError(f"experts = {self.experts}; give a number of 1 or more, or name a llama, which has none")
        if not 1 <= self.top_k <= self.experts:
            raise SpecError(f"top_k = {self.top_k} of {self.experts} experts; give a number from 1 to {self.experts}")
        dense = replace(self.shape(), latent=(self.query_rank, self.latent_rank), rotary_dim=self.rotary_dim)
        mixed = replace(dense, experts=self.experts, top_k=self.top_k, expert_ffn=self.expert_ffn, shared=self.shared)
        shapes = [dense if index < self.dense_layers else mixed for index in range(self.layers)]
        return self.language("moe", shapes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bert(Language):
    """BERT (Devlin et al. 2018): norm after, two segments, a masked-language head with a tied output layer.

    Attributes:
        positions: rows of the table of positions.
        predictions: tokens of a sample that the head processes; 0 for all, as transformers computes it.
    """

    seq_len: int = 512
    vocab: int = 30522
    dropout: bool = True
    attention: AttentionKind = "plain"
    positions: int = 512
    predictions: int = 0

    def build(self) -> ModelSpec:
        numbers, tokens, hidden = self.numbers, self.seq_len, self.hidden
        shape = replace(self.sizes(4 * hidden), post_norm=True)
        values = tokens * hidden
        modules = [
            embedding("tokens", numbers, tokens, self.vocab, hidden, split="vocabulary"),
            embedding("segments", numbers, tokens, 2, hidden, indices=False),
            embedding("positions", numbers, 0, self.positions, hidden, indices=False),
            elementwise("sum", "Sum", numbers, values, reads=2.0, keeps=0.0, calls=2),
            norm("norm", numbers, tokens, hidden),
        ]
        if self.dropout:
            modules.append(elementwise("dropout", "Dropout", numbers, values, keeps=0.25))
        for index in range(self.layers):
            modules += block(f"blocks.{index}", index, shape, numbers)
        seen = self.predictions or tokens
        head = linear("head", numbers, seen, hidden, self.vocab, split="column", limit=self.vocab, tied_to="tokens")
        modules += [
            linear("transform", numbers, seen, hidden, hidden),
            elementwise("act", "GELU", numbers, seen * hidden),
            norm("head_norm", numbers, seen, hidden),
            head,
            cross_entropy("loss", numbers, seen, self.vocab, split="column"),
        ]
        return self.spec("bert", modules, self.token_inputs, tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class T5(Language):
    """T5 (Raffel et al. 2019): encoder and decoder of `layers` each, RMSNorm, ReLU, no biases, relative positions.

    Attributes:
        target_len: tokens of the target; 0 for as many as in the source.
        gated: use T5 1.1's GELU gate.
        tied: whether the output layer shares the weight of the embedding.
        buckets: rows of the table of relative positions.
    """

    seq_len: int = 512
    vocab: int = 32128
    target_len: int = 0
    gated: bool = False
    tied: bool = True
    dropout: bool = True
    attention: AttentionKind = "plain"
    buckets: int = 32

    def build(self) -> ModelSpec:
        numbers, target = self.numbers, self.target_len or self.seq_len
        encoder = replace(
            self.sizes(4 * self.hidden), rms=True, bias=False, attention_bias=False, norm_bias=False, gated=self.gated,
            relu=not self.gated,
        )  # fmt: skip
        decoder = replace(encoder, tokens=target, cross=self.seq_len)
        modules = [embedding("tokens", numbers, self.seq_len + target, self.vocab, self.hidden, split="vocabulary")]
        for part, shape, first in (("encoder", encoder, 0), ("decoder", decoder, self.layers)):
            bias = embedding(f"{part}.positions", numbers, 0, self.buckets, self.heads, indices=False)
            modules.append(at(bias, first))
            for index in range(self.layers):
                modules += block(f"{part}.{index}", first + index, shape, numbers)
            modules.append(shape.norm(f"{part}.norm", numbers))
        head = linear(
            "head", numbers, target, self.hidden, self.vocab, bias=False, split="column", limit=self.vocab,
            tied_to="tokens" if self.tied else None,
        )  # fmt: skip
        modules += [head, cross_entropy("loss", numbers, target, self.vocab, split="column")]
        inputs = (
            TensorShape(name="source", shape=(self.seq_len,), dtype="int64"),
            TensorShape(name="target", shape=(target,), dtype="int64"),
        )
        return self.spec("t5", modules, inputs, self.seq_len + target)


@dataclass(frozen=True, slots=True, kw_only=True)
class LSTM(Common):
    """An LSTM over tokens (Sutskever et al. 2014): embedding, `layers` of `hidden` units, output layer.

    Attributes:
        decoder: layers of a decoder that reads the target and attends to the encoder; 0 for a language model.
        width: width of the embedding; 0 for `hidden`.
    """

    layers: int = 2
    decoder: int = 0
    hidden: int = 1024
    width: int = 0
    seq_len: int = 35
    vocab: int = 32000
    bidirectional: bool = False

    def build(self) -> ModelSpec:
        numbers, width = self.numbers, self.width or self.hidden
        names = ["encoder", "decoder"] if self.decoder else ["rnn"]
        modules: list[ModuleSpec] = []
        for name in names:
            count = self.decoder if name == "decoder" else self.layers
            modules.append(embedding(f"{name}_tokens", numbers, self.seq_len, self.vocab, width, split="vocabulary"))
            modules.append(lstm(name, numbers, self.seq_len, width, self.hidden, count, self.bidirectional))
        wide = self.hidden * (2 if self.bidirectional else 1)
        if self.decoder:
            scores = self.seq_len * self.seq_len
            modules += [
                ModuleSpec(
                    name="attention", kind="Attention", output_nbytes=float(self.seq_len * wide * numbers.width),
                    activation_nbytes=float(numbers.width * (scores + 2 * self.seq_len * wide)),
                    ops=(work("attention", 4.0 * scores * wide, 3.0 * self.seq_len * wide * numbers.width, calls=3),),
                ),
                linear("mix", numbers, self.seq_len, 2 * wide, wide),
            ]  # fmt: skip
        modules += [
            linear("head", numbers, self.seq_len, wide, self.vocab, split="column", limit=self.vocab),
            cross_entropy("loss", numbers, self.seq_len, self.vocab, split="column"),
        ]
        inputs = tuple(TensorShape(name=name, shape=(self.seq_len,), dtype="int64") for name in names)
        return self.spec("lstm", modules, inputs, self.seq_len * len(names))


def lstm(
    name: str, numbers: Numbers, steps: int, inputs: int, hidden: int, layers: int, bidirectional: bool = False
) -> ModuleSpec:
    """Return the costs of `nn.LSTM`: 2 x 4 (in + hidden) hidden FLOPs per token and layer.

    Gates, cell and hidden state are saved.

    Args:
        name: name of the module.
        numbers: bytes of parameters and values.
        steps: tokens of a sample.
        inputs: width of the input.
        hidden: units of a layer.
        layers: number of layers.
        bidirectional: whether each layer runs in both directions.
    """
    directions = 2 if bidirectional else 1
    sizes = [4 * hidden * ((inputs if layer == 0 else directions * hidden) + hidden) for layer in range(layers)]
    size = directions * sum(sizes)
    reserve = steps * layers * directions * 6 * hidden
    moved = (steps * (inputs + directions * hidden) + reserve) * numbers.width
    return ModuleSpec(
        name=name,
        kind="LSTM",
        **numbers.held(size + directions * layers * 8 * hidden),
        activation_nbytes=float(moved),
        output_nbytes=float(steps * directions * hidden * numbers.width),
        ops=(
            work("rnn", 2.0 * steps * size, float(moved), weight_nbytes=float(size * numbers.width),
                 calls=2 * steps * layers * directions),
        ),
        split="rnn",
        split_limit=hidden,
        input_nbytes=float(steps * inputs * numbers.width),
    )  # fmt: skip
