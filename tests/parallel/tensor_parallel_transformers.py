"""Models of the transformers library, built small from configs with random weights, and this project's example GPT."""

import importlib.util
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tensor_parallel_models import Case, by_last, tokens, values
from torch import nn

from tutti.config.plan import LayoutRule

NAMES = ("bert", "gpt2", "llama", "vit", "t5")


def build(kind: str, **options: Any) -> nn.Module:
    """A tiny model of one family; dropout is 0, heads are 12 (divisible by 2, 3 and 4), the vocabulary is odd."""
    import transformers as hf

    common: dict[str, Any] = {"attn_implementation": options.pop("attention", "sdpa"), **options}
    if kind == "bert":
        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return hf.BertForMaskedLM(hf.BertConfig(
            vocab_size=53, hidden_size=24, num_hidden_layers=2, num_attention_heads=12, intermediate_size=22,
            max_position_embeddings=16, **off, **common))  # fmt: skip
    if kind == "gpt2":
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return hf.GPT2LMHeadModel(hf.GPT2Config(
            vocab_size=53, n_embd=24, n_layer=2, n_head=12, n_positions=16, n_inner=22, bos_token_id=0,
            eos_token_id=0, **off, **common))  # fmt: skip
    if kind == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**{
            "vocab_size": 53, "hidden_size": 24, "intermediate_size": 22, "num_hidden_layers": 2,
            "num_attention_heads": 12, "num_key_value_heads": 3, "max_position_embeddings": 16, **common}))  # fmt: skip
    if kind == "vit":
        return hf.ViTForImageClassification(hf.ViTConfig(
            hidden_size=24, num_hidden_layers=2, num_attention_heads=12, intermediate_size=22, image_size=8,
            patch_size=4, num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            **common))  # fmt: skip
    return hf.T5ForConditionalGeneration(hf.T5Config(
        vocab_size=53, d_model=24, d_kv=3, d_ff=22, num_layers=2, num_heads=12, dropout_rate=0.0,
        decoder_start_token_id=0, **common))  # fmt: skip


def example_gpt(**options: Any) -> nn.Module:
    path = Path(__file__).parents[2] / "examples" / "gpt_tutti.py"
    spec = importlib.util.spec_from_file_location("example_gpt", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    gpt: nn.Module = module.GPT(**{"layers": 2, "width": 24, "heads": 12, "context": 8, "vocabulary": 53, **options})
    return gpt


def language(kind: str, divided: tuple[tuple[str, str], ...], **options: Any) -> Case:
    def inputs() -> tuple[tuple[Any, ...], dict[str, Any]]:
        ids = tokens(vocabulary=53)
        mask = torch.ones_like(ids)
        mask[1, -2:] = 0
        more = {"decoder_input_ids": tokens(length=5, vocabulary=53, seed=6)} if kind == "t5" else {}
        return (), {"input_ids": ids, "attention_mask": mask, **more}

    return Case(model=lambda: build(kind, **options), inputs=inputs, loss=by_last, divided=divided)


def own_loss(kind: str) -> Case:
    """The model computes its loss from labels; transformers does so in float32."""

    def inputs() -> tuple[tuple[Any, ...], dict[str, Any]]:
        labels = tokens(vocabulary=53, seed=7)
        labels[0, :2] = -100
        return (), {"input_ids": tokens(vocabulary=53), "labels": labels}

    return Case(model=lambda: build(kind), inputs=inputs, loss=lambda output: output.loss, tolerance=1e-5)


BERT = (
    ("bert.embeddings.word_embeddings", "vocabulary"), ("bert.encoder.layer.0.attention.self.query", "column"),
    ("bert.encoder.layer.0.attention.output.dense", "row"), ("bert.encoder.layer.1.intermediate.dense", "column"),
    ("bert.encoder.layer.1.output.dense", "row"), ("cls.predictions.decoder", "column"),
)  # fmt: skip
GPT2 = (
    ("transformer.wte", "vocabulary"), ("transformer.h.0.attn.c_attn", "column"),
    ("transformer.h.0.attn.c_proj", "row"), ("transformer.h.1.mlp.c_fc", "column"),
    ("transformer.h.1.mlp.c_proj", "row"), ("lm_head", "column"),
)  # fmt: skip
LLAMA = (
    ("model.embed_tokens", "vocabulary"), ("model.layers.0.self_attn.q_proj", "column"),
    ("model.layers.0.self_attn.k_proj", "column"), ("model.layers.0.self_attn.o_proj", "row"),
    ("model.layers.1.mlp.gate_proj", "column"), ("model.layers.1.mlp.up_proj", "column"),
    ("model.layers.1.mlp.down_proj", "row"), ("lm_head", "column"),
)  # fmt: skip
T5 = (
    ("shared", "vocabulary"), ("encoder.block.0.layer.0.SelfAttention.q", "column"),
    ("decoder.block.1.layer.1.EncDecAttention.o", "row"), ("decoder.block.0.layer.2.DenseReluDense.wi", "column"),
    ("decoder.block.0.layer.2.DenseReluDense.wo", "row"), ("lm_head", "column"),
)  # fmt: skip
GPT = (
    ("tokens", "vocabulary"), ("blocks.0.qkv", "column"), ("blocks.0.merge", "row"), ("blocks.1.mlp.0", "column"),
    ("blocks.1.mlp.2", "row"), ("head", "column"),
)  # fmt: skip


def image_loss(output: Any) -> torch.Tensor:
    return F.cross_entropy(output.logits, torch.arange(len(output.logits)) % 5)


def vit(attention: str) -> Case:
    divided = (("vit.layers.0.attention.q_proj", "column"), ("vit.layers.0.mlp.fc1", "column"))
    return Case(
        model=lambda: build("vit", attention=attention), inputs=lambda: ((values(4, 3, 8, 8),), {}), loss=image_loss,
        divided=divided,
    )  # fmt: skip


CASES: dict[str, Case] = {
    "gpt": Case(model=example_gpt, inputs=lambda: ((tokens(vocabulary=53),), {}), loss=by_last, divided=GPT),
    "gpt by tokens": Case(
        model=example_gpt, inputs=lambda: ((tokens(length=7, vocabulary=53),), {}), loss=by_last,
        layout=(LayoutRule(modules="*norm*", placement="row"),), divided=(*GPT, ("blocks.0.norm1", "tokens")),
    ),
    "bert": language("bert", BERT),
    "bert eager": language("bert", BERT, attention="eager"),
    "gpt2": language("gpt2", GPT2),
    "gpt2 eager": language("gpt2", GPT2, attention="eager"),
    "gpt2 cross": language("gpt2", GPT2, add_cross_attention=True),
    "llama": language("llama", LLAMA),
    "llama eager": language("llama", LLAMA, attention="eager"),
    "llama one key head": language("llama", LLAMA, num_key_value_heads=1),
    "llama tied": language("llama", LLAMA, tie_word_embeddings=True, num_key_value_heads=12, attention_bias=True),
    "vit": vit("sdpa"),
    "vit eager": vit("eager"),
    "t5": language("t5", T5),
    "t5 eager": language("t5", T5, attention="eager"),
    "t5 gated": language("t5", T5[:3], feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "bert with labels": own_loss("bert"),
    "gpt2 with labels": own_loss("gpt2"),
    "llama with labels": own_loss("llama"),
    "t5 with labels": own_loss("t5"),
}  # fmt: skip
