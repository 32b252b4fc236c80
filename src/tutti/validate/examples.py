"""The models of NVIDIA's DeepLearningExamples, whose rows print no sizes: those of each repository's default.

Sizes are read in the examples' code and papers; what differs between a repository's runs is in the row's notes.
"""

import re
from collections.abc import Mapping
from typing import Any

from tutti.validate.rows import Row, Uncosted

_BERT_LARGE = {"layers": 24, "hidden": 1024, "heads": 16, "vocab": 30528}
_BERT_BASE = {"layers": 12, "hidden": 768, "heads": 12, "vocab": 30528}
_NNUNET_3D = {"dims": 3, "widths": (32, 64, 128, 256, 320, 320), "image": (128,), "channels": 4, "classes": 4,
              "strided": True}  # fmt: skip
_NNUNET_2D = {"dims": 2, "widths": (32, 64, 128, 256, 512, 512), "image": (192, 160), "channels": 4, "classes": 4,
              "strided": True}  # fmt: skip

_EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "PyTorch/LanguageModeling/BERT": ("bert", _BERT_LARGE),
    "TensorFlow/LanguageModeling/BERT": ("bert", _BERT_LARGE),
    "TensorFlow2/LanguageModeling/BERT": ("bert", _BERT_LARGE),
    "TensorFlow/LanguageModeling/BERT/biobert": ("bert", _BERT_BASE),
    "PyTorch/Segmentation/nnUNet": ("unet", _NNUNET_3D),
    "TensorFlow2/Segmentation/nnUNet": ("unet", _NNUNET_3D),
    "TensorFlow/Segmentation/UNet_3D_Medical": (
        "unet", {"dims": 3, "widths": (32, 64, 128, 256, 320), "image": (128,), "channels": 4, "classes": 4}),
    "TensorFlow/Segmentation/UNet_Medical": (
        "unet", {"dims": 2, "widths": (64, 128, 256, 512, 1024), "image": (512,), "classes": 2, "instance": False}),
    "TensorFlow2/Segmentation/UNet_Medical": (
        "unet", {"dims": 2, "widths": (64, 128, 256, 512, 1024), "image": (512,), "classes": 2, "instance": False}),
    "PyTorch/Recommendation/DLRM": ("dlrm", {"rows": 150_000}),
    "TensorFlow/Translation/GNMT": (
        "lstm", {"layers": 8, "decoder": 8, "hidden": 1024, "seq_len": 27, "vocab": 32320, "optimizer": "Adam"}),
    "PyTorch/Translation/GNMT": (
        "lstm", {"layers": 4, "decoder": 4, "hidden": 1024, "seq_len": 27, "vocab": 32320, "optimizer": "Adam"}),
}  # fmt: skip

_SQUAD_TOKENS = 384
_GNMT_TOKENS = 27  # of a sentence of WMT16 English-German, on average, each side


def example_of(row: Row, precision: str) -> tuple[str, Mapping[str, Any]]:
    """(architecture, sizes) of an example. Raises Uncosted for those that have none here."""
    name = row.text("model")
    if name not in _EXAMPLES:
        raise Uncosted(f"no architecture is known for example {name!r}")
    kind, sizes = _EXAMPLES[name]
    if kind == "bert":
        return kind, {**sizes, **_bert(row)}
    if name.endswith("nnUNet") and re.search(r"row: 2 \|", row.text("notes")):
        return kind, _NNUNET_2D
    return kind, sizes


def _bert(row: Row) -> dict[str, Any]:
    """Pre-training predicts 20 of 128 or 80 of 512 tokens; fine-tuning for questions reads 384 and predicts spans."""
    tokens = row.text("seq_len")
    if tokens == "512" and row.text("model").startswith("PyTorch/"):
        raise Uncosted("sequences of 512 that cannot be full: the table's float32 rows are above their devices' peak")
    if row.text("model").endswith("biobert") and tokens not in ("128", "512"):
        return {"seq_len": 128, "predictions": 1}  # naming entities in 128 tokens
    if "tuning" in row.text("notes").split("row:")[0].split("/")[-1] or tokens not in ("128", "512"):
        return {"seq_len": _SQUAD_TOKENS, "predictions": 1}
    return {"seq_len": int(tokens), "predictions": 20 if tokens == "128" else 80}


def batch_of(row: Row, precision: str) -> int:
    """Samples of a rank at once: one number, or of two the larger for 16 bits, for it takes less memory."""
    text = row.text("micro_batch")
    pattern = r"\d+" if "LanguageModeling" in row.text("model") else r"\d{1,3}(?:,\d{3})+|\d+"
    found = [
        int(match[1].replace(",", "")) * (1024 if match[2] else 1) for match in re.finditer(rf"({pattern})(k?)", text)
    ]
    if not found:
        raise Uncosted("the batch is not printed")
    return max(found) if precision == "mixed" else min(found)


def units_per_sample(row: Row) -> float:
    """What the metric counts, of one sample: 1, or its tokens where it counts tokens."""
    counts_tokens = "tok" in row.text("unit").lower() or "Translation" in row.text("model")
    return 2.0 * _GNMT_TOKENS if counts_tokens else 1.0
