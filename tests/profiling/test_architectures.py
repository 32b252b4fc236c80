"""Named architectures against the same models in torch: parameters exactly, FLOPs within 1 %, activations within a
stated tolerance; and against published sizes and formulas."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from matrix.language import gpt_example
from matrix.vision import ResNet
from tutti.config.model import ModelSpec
from tutti.errors import SpecError
from tutti.profile import describe_model
from tutti.profile.architectures import architecture, names, presets

SAMPLES = 4


def _words(count: int, length: int) -> Tensor:
    return torch.arange(SAMPLES * length).reshape(SAMPLES, length) % count


def _token_loss(output: Any, target: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def _traced(model: nn.Module, kwargs: dict[str, Tensor], target: Tensor, sgd: bool = False) -> ModelSpec:
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9) if sgd else AdamW(model.parameters())
    return describe_model(model, (), kwargs, target, _token_loss, optimizer, samples=SAMPLES)


def _gpt() -> ModelSpec:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = gpt_example().GPT(layers=3, width=64, heads=4, context=32, vocabulary=120)

        def forward(self, tokens: Tensor) -> Any:
            return self.inner(tokens)

    tokens = _words(120, 32)
    return _traced(Named(), {"tokens": tokens}, tokens)


def _llama() -> ModelSpec:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=120, tie_word_embeddings=False, max_position_embeddings=64,
    )  # fmt: skip
    tokens = _words(120, 32)
    return _traced(LlamaForCausalLM(config), {"input_ids": tokens}, tokens)


def _mixtral() -> ModelSpec:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=120, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    tokens = _words(120, 32)
    return _traced(MixtralForCausalLM(config), {"input_ids": tokens}, tokens)


def _bert() -> ModelSpec:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=500, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    tokens = _words(500, 32)
    return _traced(BertForMaskedLM(config), {"input_ids": tokens}, tokens)


def _t5() -> ModelSpec:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=500, d_model=64, d_kv=16, d_ff=256, num_layers=2, num_decoder_layers=2, num_heads=4,
        decoder_start_token_id=0, dropout_rate=0.0,
    )  # fmt: skip
    tokens = _words(500, 32)
    model = T5ForConditionalGeneration(config)
    return _traced(model, {"input_ids": tokens, "decoder_input_ids": tokens}, tokens)


def _vit() -> ModelSpec:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256, image_size=32, patch_size=8,
        num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    pixels = torch.zeros(SAMPLES, 3, 32, 32)
    return _traced(ViTForImageClassification(config), {"pixel_values": pixels}, _words(10, 1)[:, 0])


def _resnet() -> ModelSpec:
    pixels = torch.zeros(SAMPLES, 3, 64, 64)
    return _traced(ResNet(channels=3, classes=10), {"x": pixels}, _words(10, 1)[:, 0], sgd=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A torch model, the named one, and how far apart their activations may be, relative."""

    traced: Callable[[], ModelSpec]
    name: str
    options: dict[str, Any]
    activations: float
    parameters_beside: int = 0  # that only the torch model has


_SMALL = {"hidden": 64, "seq_len": 32}
CASES = {
    "gpt": Case(
        traced=_gpt, name="gpt", activations=0.01,
        options={**_SMALL, "layers": 3, "heads": 4, "vocab": 120},
    ),
    "llama": Case(
        traced=_llama, name="llama", activations=0.02,
        options={**_SMALL, "layers": 3, "heads": 8, "kv_heads": 2, "ffn": 160, "vocab": 120},
    ),
    # Tracing bounds from above what depends on the router's values, so only parameters are held exactly there.
    "mixtral": Case(
        traced=_mixtral, name="moe", activations=1.0,
        options={**_SMALL, "layers": 2, "heads": 8, "kv_heads": 4, "ffn": 96, "vocab": 120, "experts": 4, "top_k": 2},
    ),
    "bert": Case(
        traced=_bert, name="bert", activations=0.02,
        options={**_SMALL, "layers": 3, "heads": 4, "vocab": 500, "positions": 64, "dropout": False,
                 "attention": "fused"},
    ),
    "t5": Case(
        traced=_t5, name="t5", activations=0.15,
        options={**_SMALL, "layers": 2, "heads": 4, "head_dim": 16, "ffn": 256, "vocab": 500,
                 "dropout": False},
    ),
    "vit": Case(
        traced=_vit, name="vit", activations=0.02,
        options={"hidden": 64, "layers": 3, "heads": 4, "image": 32, "patch": 8, "classes": 10},
    ),
    "resnet": Case(
        traced=_resnet, name="resnet", activations=0.02, options={"depth": 50, "image": 64, "classes": 10},
    ),
}  # fmt: skip


def _sum(model: ModelSpec, field: str) -> float:
    return float(sum(getattr(module, field) for module in model.modules))


@pytest.mark.parametrize("name", CASES)
def test_a_named_architecture_costs_what_the_same_model_in_torch_costs(name: str) -> None:
    case = CASES[name]
    traced, named = case.traced(), architecture(case.name, case.options)
    assert named.parameters == traced.parameters
    for field in ("parameter_nbytes", "gradient_nbytes", "optimizer_nbytes"):
        assert _sum(named, field) == _sum(traced, field), field
    assert named.batch_statistics == traced.batch_statistics
    assert named.dtype == traced.dtype
    if name == "mixtral":
        return
    assert named.flops_forward == pytest.approx(traced.flops_forward, rel=0.01)
    assert named.flops_backward == pytest.approx(traced.flops_backward, rel=0.01)
    kept = _sum(traced, "activation_nbytes")
    assert _sum(named, "activation_nbytes") == pytest.approx(kept, rel=case.activations)


def test_every_name_builds_and_says_where_it_is_from() -> None:
    for name in names():
        model = architecture(name, {})
        assert model.parameters > 0
        assert len({module.name for module in model.modules}) == len(model.modules)
        blocks = [module.block for module in model.modules if module.block >= 0]
        assert blocks == sorted(blocks)
    assert all(preset.source for preset in presets().values())


PUBLISHED = {
    "gpt3-175b": 174.6e9,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671.03e9,
    "bert-base": 109_514_298,
    "resnet50": 25_557_032,
    "resnet152": 60_192_808,
    "vit-b16": 86_567_656,
    "t5-base": 222_903_552,
}
"""Parameters as the models' makers or torch count them."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    assert architecture(name, {}).parameters == pytest.approx(PUBLISHED[name], rel=1e-4)


@pytest.mark.parametrize(("layers", "hidden", "heads"), [(48, 6144, 64), (96, 12288, 96), (105, 20480, 128)])
def test_activations_of_a_layer_are_those_of_the_formula(layers: int, hidden: int, heads: int) -> None:
    """Korthikanti et al. 2022, equation 2: a layer in 16 bits keeps s b h (34 + 5 a s / h) bytes."""
    seq = 2048
    model = architecture(
        "gpt",
        {"layers": layers, "hidden": hidden, "heads": heads, "seq_len": seq, "dtype": "float16", "dropout": True,
         "attention": "plain"},
    )  # fmt: skip
    layer = sum(module.activation_nbytes for module in model.modules if module.block == 1)
    assert layer == pytest.approx(seq * hidden * (34 + 5 * heads * seq / hidden), rel=1e-3)


def test_forward_and_backward_flops_are_those_of_the_formula() -> None:
    """Narayanan et al. 2021, equation 3 without recomputing: 72 B s l h^2 (1 + s / 6h + V / 12 l h)."""
    layers, hidden, seq, vocab = 24, 2304, 2048, 51200
    model = architecture("gpt", {"layers": layers, "hidden": hidden, "heads": 24, "seq_len": seq, "vocab": vocab,
                                 "attention": "plain"})  # fmt: skip
    formula = 72 * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (12 * layers * hidden))
    assert model.flops_forward + model.flops_backward == pytest.approx(formula, rel=0.01)


def test_state_is_18_bytes_a_parameter_in_mixed_precision() -> None:
    """Rajbhandari et al. 2020: 2 + 2 + 12; float32 gradients make it 18."""
    model = architecture("gpt", {"dtype": "bfloat16", "wide_gradients": True})
    assert sum(m.parameter_nbytes + m.gradient_nbytes + m.optimizer_nbytes for m in model.modules) == (
        18 * model.parameters
    )


def test_skipping_masked_work_halves_attention_only() -> None:
    counted = architecture("llama", {"seq_len": 4096})
    skipped = architecture("llama", {"seq_len": 4096, "masked": "skipped"})
    scores = 4.0 * 12 * 4096 * 4096 * 768
    assert counted.flops_forward - skipped.flops_forward == pytest.approx(scores / 2)
    assert counted.notes != skipped.notes


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("lama", {}, "llama"),
        ("llama", {"layer": 3}, "layers"),
        ("llama", {"layers": "many"}, "whole number"),
        ("llama", {"hidden": 100, "heads": 8}, "not divisible"),
        ("moe", {"experts": 4, "top_k": 5}, "top_k"),
        ("resnet", {"depth": 51}, "depth"),
        ("unet", {"image": "100"}, "cannot be halved"),
        ("dlrm", {"bottom": "64,32"}, "bottom"),
    ],
)
def test_what_is_wrong_is_said_with_the_remedy(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        architecture(name, options)


def test_torch_is_not_loaded() -> None:
    code = (
        "import sys; from tutti.profile.architectures import architecture; architecture('gpt', {}); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
