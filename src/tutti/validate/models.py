"""The model of a row as a named architecture, in the numbers and kernels of the framework that ran it."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from tutti.config.model import ModelSpec
from tutti.profile.architectures import architecture
from tutti.validate.examples import example_of
from tutti.validate.rows import Row, Uncosted

_PRESETS = {
    "llama370b": "llama3-70b",
    "llama31405b": "llama3-405b",
    "llama38b": "llama3-8b",
    "qwen330ba3b": "qwen3-30b-a3b",
    "qwen3235ba22b": "qwen3-235b-a22b",
    "gptoss120b": "gpt-oss-120b",
    "deepseekv3": "deepseek-v3",
}
"""Models that rows name without sizes."""

_SIZES = {"layers": "layers", "hidden": "hidden", "heads": "heads", "kv_heads": "kv_heads", "ffn": "ffn",
          "seq_len": "seq_len", "vocab": "vocab"}  # fmt: skip
_EARLY = re.compile(r"Megatron-LM 202[0-2]|Megatron-DeepSpeed|DeepSpeed\+Megatron")


def precision_of(row: Row) -> str:
    """fp32, tf32, half (16 bits throughout), mixed (autocast over float32), fp8 or fp4, as far as the row says."""
    text = row.text("precision").lower()
    if "fp4" in text:
        return "fp4"
    if "fp8" in text:
        return "fp8"
    if text in ("fp32", "tf32", "mixed"):
        return text
    if text.startswith(("fp16", "bf16", "amp_bf16", "amp_fp16")):
        return "half"
    raise Uncosted("the precision is not printed" if not text else f"precision {text!r} is not known")


def is_early(row: Row) -> bool:
    """Megatron before FlashAttention: scores are written, dropout masks kept, gradients summed after backward."""
    return _EARLY.match(row.text("framework")) is not None


def model_of(row: Row) -> ModelSpec:
    """The ModelSpec of a row. Raises Uncosted where its model cannot be told, or has no architecture here."""
    name, options = _named(row)
    return _built(name, tuple(sorted(options.items())))


@cache
def _built(name: str, options: tuple[tuple[str, Any], ...]) -> ModelSpec:
    return architecture(name, dict(options))


def _named(row: Row) -> tuple[str, Mapping[str, Any]]:
    arch = row.text("arch")
    precision = precision_of(row)
    if precision in ("fp8", "fp4"):
        raise Uncosted("matrix products in 8 or 4 bits are no precision of a plan")
    if row.family == "dle":
        return example_of(row, precision)
    numbers: dict[str, Any] = {"dtype": "float32"}
    if precision == "half":
        # Megatron adds gradients up in float32 beside bfloat16; fully sharded, a parameter takes 16 bytes.
        wide = "bf16" in row.text("precision") and row.text("framework").startswith("Megatron")
        numbers = {"dtype": "bfloat16" if "bf16" in row.text("precision") else "float16", "wide_gradients": wide}
    if arch == "llm":
        key = re.sub(r"[^a-z0-9]", "", row.text("model").lower())
        if key not in _PRESETS:
            raise Uncosted(f"no architecture is known for model {row.text('model')!r}")
        return _PRESETS[key], {**numbers, "seq_len": row.whole("seq_len"), "masked": "skipped", "fused": True}
    sizes = {field: row.whole(column) for column, field in _SIZES.items() if row.text(column)}
    if arch in ("gpt", "gpt2", "mpt", "llama", "bert"):
        for needed in ("layers", "hidden", "seq_len", *(() if arch == "bert" else ("vocab",))):
            row.whole(needed)  # a default would be another model
    early = is_early(row)
    # Norms and sums shared by tokens came with Korthikanti et al. 2022.
    shared = not early or row.text("recompute").endswith("+SP")
    kernels = {"attention": "plain", "dropout": True, "sequence": shared} if early else {"masked": "skipped"}
    if arch in ("gpt", "gpt2"):
        sizes.setdefault("heads", max(1, sizes.get("hidden", 64) // 64))
        return "gpt", {**sizes, **numbers, **kernels}
    if arch == "mpt":
        return "gpt", {**sizes, **numbers, "masked": "skipped", "bias": False}
    if arch == "llama":
        return "llama", {**sizes, **numbers, "masked": "skipped", "fused": "compile" in row.text("precision")}
    if arch == "bert":
        return "bert", {**sizes, **numbers, **kernels}
    if arch == "cnn" and row.text("model").startswith("ResNet-101"):
        return "resnet", {"depth": 101}
    if arch == "cnn" and row.text("model").startswith("ResNet-50"):
        return "resnet", {"depth": 50}
    raise Uncosted(f"no architecture is known for model {row.text('model')!r}")
