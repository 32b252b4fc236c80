"""Build the model, cluster and plan that a published row describes, and the step time that it measured."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from tutti.config.cluster import ClusterSpec, DeviceSpec, LinkSpec, NodeSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import BatchPlan, LayoutRule, PipelinePlan, Plan, ShardingPlan, SyncPlan
from tutti.config.vocabulary import AxisName, Precision
from tutti.errors import PlanError
from tutti.profile.architectures import architecture
from tutti.profile.catalog import device, parts
from tutti.validation.published_rows import PublishedRow, Uncosted

AT_THE_END = 2**50
"""Size in bytes of a bucket that holds all gradients, so that reduction starts only after backward."""


def plan_of(row: PublishedRow, model: ModelSpec) -> Plan:
    """Return the plan that a row ran.

    Raises:
        Uncosted: the row does not determine a valid plan.
    """
    precision = precision_of(row)
    mesh, sharding = _mesh(row)
    ranks = math.prod(mesh.values())
    if ranks != row.gpus:
        raise Uncosted("the product of the printed degrees is not n_gpus")
    data = math.prod(mesh.get(axis, 1) for axis in ("replicate", "shard", "expert"))
    microbatch = batch_of(row, precision) if row.family == "dle" else row.whole("micro_batch", _usual_microbatch(row))
    samples = row.whole("global_batch", microbatch * data)
    if samples % data:
        raise Uncosted("the global batch is not a multiple of the data-parallel ranks")
    microbatches = max(1, round(samples / (data * microbatch)))
    precisions: dict[str, Precision] = {"tf32": "tf32", "mixed": "float16"}
    stages = row.whole("vp", 1)
    try:
        return Plan(
            batch=BatchPlan(global_batch_size=samples, num_microbatches=microbatches),
            mesh=mesh,
            layout=_layout(row, model),
            precision=precisions.get(precision, "full"),
            sharding=sharding,
            pipeline=PipelinePlan(
                schedule="interleaved" if stages > 1 and mesh.get("stage", 1) > 1 else "1f1b",
                stages_per_rank=stages if mesh.get("stage", 1) > 1 else 1,
                cuts=_cuts(row, model, mesh.get("stage", 1) * (stages if mesh.get("stage", 1) > 1 else 1)),
            ),
            sync=SyncPlan(bucket_nbytes=AT_THE_END) if is_early(row) else SyncPlan(),
        )
    except PlanError as error:
        raise Uncosted(str(error)) from None


def _cuts(row: PublishedRow, model: ModelSpec, stages: int) -> tuple[str, ...]:
    """Return the blocks at which pipeline stages begin; empty for one stage, or where they are not at blocks.

    Megatron gives each stage the same number of blocks, and the last one the output layer as well. AMP's logs print the
    boundaries in DeepSpeed's layers, of which two precede the first block.
    """
    if stages == 1:
        return ()
    boundaries = re.search(r"stage boundaries \[([\d, ]+)\]", row.text("notes"))
    if boundaries is None:
        count = len({module.block for module in model.modules if module.block >= 0})
        ends = 1 if row.family == "bloom" else 0  # BigScience counts embedding and output layer as blocks
        cuts = [(count + 2 * ends) * stage // stages - ends for stage in range(1, stages)]
        return tuple(f"blocks.{cut}" for cut in cuts) if count >= stages else ()
    inner = [int(text) for text in boundaries[1].split(",")][1:-1]
    blocks = [min(max(0, at - 2), row.whole("layers") - 1) for at in inner]
    if len(inner) != stages - 1 or len(set(blocks)) != len(blocks) or 0 in blocks:
        return ()  # stages that hold only embeddings or only the head do not begin at a block
    return tuple(f"blocks.{block}" for block in blocks)


def _usual_microbatch(row: PublishedRow) -> int | None:
    """Return the microbatch of rows that print none: one sample in Megatron's H100 tables; other rows must print it."""
    return 1 if row.family == "mcoreh100" else None


def _mesh(row: PublishedRow) -> tuple[dict[AxisName, int], ShardingPlan]:
    """Return the degrees by axis, and how parameters are sharded.

    Axes are listed from the outermost to the innermost; the split axis is innermost, as Megatron places it.
    """
    split, stage, context, expert = (row.whole(name, 1) for name in ("tp", "pp", "cp", "ep"))
    rest = row.gpus // max(1, split * stage * context)
    data = row.whole("dp", rest)
    if expert > data:
        raise Uncosted("the expert degree exceeds the data-parallel ranks")
    zero = row.text("zero")
    level = int(zero) if zero in ("1", "2", "3") else 3 if "fsdp=" in zero and "fsdp=0" not in zero else 0
    data_axis: AxisName = "shard" if level else "replicate"
    mesh: dict[AxisName, int] = {"stage": stage, data_axis: data // expert, "expert": expert, "context": context,
                                 "split": split}  # fmt: skip
    degrees = {axis: degree for axis, degree in mesh.items() if degree > 1} or {data_axis: 1}
    return degrees, replace(ShardingPlan(), level=level or 3)  # type: ignore[arg-type]


def _layout(row: PublishedRow, model: ModelSpec) -> tuple[LayoutRule, ...]:
    """Return what is recomputed: whole blocks, the core of attention, or a selection."""
    text = row.text("recompute")
    if text == "full":
        return (LayoutRule(modules="blocks.*", recompute=True),)
    if text.startswith("selective") and row.text("arch") == "gpt":
        return (LayoutRule(modules="blocks.*.attention", recompute=True),)
    if text == "selective-layer":  # every second block, whole
        blocks = sorted({module.block for module in model.modules if module.block >= 0})
        return tuple(LayoutRule(modules=f"blocks.{block}", recompute=True) for block in blocks[::2])
    if text.startswith("selective"):
        return (LayoutRule(modules="blocks.*", recompute="selective"),)
    return (LayoutRule(),)


_GPUS = (
    ("GB300", "GB300-278GB"),
    ("GB200", "GB200-186GB"),
    ("B300", "B300-SXM-270GB"),
    ("B200", "B200-SXM-180GB"),
    ("H200", "H200-SXM-141GB"),
    ("H100.*HBM2E", "H100-SXM5-96GB-HBM2e"),
    ("H100", "H100-SXM5-80GB"),
    ("A100.*40", "A100-SXM4-40GB"),
    ("A100", "A100-SXM4-80GB"),
    ("V100.*16|P3\\.8XLARGE|DGX-1 16G", "V100-SXM2-16GB"),
    ("V100|DGX-[12]", "V100-SXM2-32GB"),
    ("P100", "P100-SXM2-16GB"),
    ("K80", "K80"),
    ("T4|G4DN", "T4"),
)
"""Pattern of a printed device name, and the catalog's name; the first pattern that matches wins."""

_NODE_LINKS = {"K80": "PCIe3-x16", "P100": "NVLink1", "V100": "NVLink2", "T4": "PCIe3-x16", "A100": "NVLink3",
               "H100": "NVLink4", "H200": "NVLink4", "B": "NVLink5", "GB": "NVLink5"}  # fmt: skip
_NETWORKS = {"V100": 50e9, "A100": 200e9, "H100": 400e9, "H200": 400e9, "B": 400e9, "GB": 400e9}
"""Bytes per second of a node's network where a row prints none.

DGX-1 and DGX-2 have 4 and 8 EDR ports (the lower is taken), DGX A100 has 8 HDR ports, DGX H100 and later have 8 NDR
ports.
"""

_RACK = 64
"""GPUs of a GB200 or GB300 rack (one NVLink domain) that jobs use whose number of GPUs is a power of two."""

_JOINED = re.compile(r"\+|,|;|&|\band\b")
"""Separators between the nodes of different kinds that one job ran on."""

_RATE = re.compile(r"(?:(\d+)\s*x\s*)?(\d+)\s*Gb(?:ps|/s)\s*(per GPU)?", re.IGNORECASE)


def catalog_name(gpu: str) -> str:
    """Return the catalog's name of a printed device.

    Raises:
        Uncosted: the catalog does not have the device.
    """
    for pattern, name in _GPUS:
        if re.search(pattern, gpu.upper()):
            return name
    raise Uncosted(f"device {gpu!r} is not in the catalog")


@cache
def _part(name: str) -> DeviceSpec:
    """Return a device of the catalog; cached."""
    return device(name)


def cluster_of(row: PublishedRow) -> ClusterSpec:
    """Return the machines of a row, from data sheets.

    Raises:
        Uncosted: the row does not determine them.
    """
    gpus = row.gpus
    groups = _groups(row.text("gpu"))
    if groups:
        return _mixed(row, groups)
    name = catalog_name(row.text("gpu"))
    usual = _RACK if name.startswith("GB") else 8
    per_node = min(gpus, row.whole("gpus_per_node", usual))
    nodes = -(-gpus // per_node)
    part = _part(name)
    return ClusterSpec(
        name=f"{nodes} x {per_node} {part.name}",
        devices={part.name: part},
        nodes=(NodeSpec(name="node", device=part.name, devices_per_node=per_node, count=nodes,
                        memory_nbytes=per_node * part.memory_nbytes),),
        links=_links(row, name, per_node, nodes),
    )  # fmt: skip


def _groups(gpu: str) -> list[tuple[str, int]]:
    """Return (device, number of nodes) for each kind of node in `1x p3.8xlarge(4xV100) + 3x g4dn.12xlarge(4xT4)`.

    Empty where the text names one kind. A kind without a number counts as one node.
    """
    groups = []
    for part in _JOINED.split(gpu):
        try:
            name = catalog_name(part)
        except Uncosted:
            continue
        count = re.match(r"\s*(\d+)\s*x", part)
        groups.append((name, int(count[1]) if count else 1))
    return groups if len(groups) > 1 else []


def _mixed(row: PublishedRow, groups: list[tuple[str, int]]) -> ClusterSpec:
    """Return a cluster that joins nodes of different devices."""
    per_node = row.whole("gpus_per_node", 4)
    if per_node * sum(count for _, count in groups) != row.gpus:
        raise Uncosted("the nodes of mixed devices do not add up to n_gpus")
    links = [link for name, count in groups for link in _links(row, name, per_node, max(2, count))]
    links.sort(key=lambda link: (link.tier != "node", link.bandwidth_bytes_per_s))
    return ClusterSpec(
        name=row.text("gpu"),
        devices={_part(name).name: _part(name) for name, _ in groups},
        nodes=tuple(
            NodeSpec(name=f"node{index}", device=_part(name).name, devices_per_node=per_node, count=count,
                     memory_nbytes=per_node * _part(name).memory_nbytes)
            for index, (name, count) in enumerate(groups)
        ),
        links=tuple(links),
    )  # fmt: skip


def _links(row: PublishedRow, name: str, each: int, nodes: int) -> tuple[LinkSpec, ...]:
    """Return the links inside a node and between nodes; a printed rate replaces the catalog's."""
    links = []
    family = re.match(r"GB|B|[A-Z]+\d+", name)
    key = family[0] if family else name
    if each > 1:
        inner = parts().links[_NODE_LINKS[key]]
        printed = _printed(row.text("intra_net"), name)
        if printed and "NVLink" not in row.text("intra_net"):
            inner = replace(inner, bandwidth_bytes_per_s=printed, source=f"printed: {row.text('intra_net')}")
        links.append(inner)
    if nodes > 1:
        text = row.text("inter_net")
        rate = (_printed(text, name) or 0.0) * (each if "per GPU" in text else 1) or _NETWORKS.get(key)
        if not rate:
            raise Uncosted("the network between nodes is not printed")
        slow = rate < 12e9
        base = parts().links["Ethernet-25G" if slow else "InfiniBand-HDR-200"]
        links.append(
            replace(base, bandwidth_bytes_per_s=rate, evidence="published" if text else "assumed",
                    source=f"printed: {text}" if text else "typical for this device; not printed")
        )  # fmt: skip
    return tuple(links)


def _printed(text: str, name: str) -> float | None:
    """Return a printed rate in bytes per second, summed over ports; None if the text has none.

    If the text has several rates, the one that is marked with the device's cloud instance is taken, else the first.
    """
    rates = list(_RATE.finditer(text))
    if not rates:
        return None
    mark = "(P3)" if name.startswith("V100") else "(G4)"
    match = next((rate for rate in rates if text[rate.end() :].lstrip().startswith(mark)), rates[0])
    return int(match[1] or 1) * int(match[2]) * 1e9 / 8


def step_s(row: PublishedRow, model: ModelSpec, plan: Plan) -> float:
    """Return the seconds of one step of `plan`, as the row measured them.

    FLOP rates follow the source's convention: "hardware" includes a recomputed forward (Narayanan et al. 2021, equation
    3), "model" does not. Both count attention as if nothing were masked.

    Raises:
        Uncosted: the metric does not determine the time of a step.
    """
    metric, value = row.text("metric"), row.value
    samples = plan.batch.global_batch_size
    if value <= 0:
        raise Uncosted("the value is not positive")
    if metric == "iteration_time":
        return value / (1000.0 if row.text("unit").startswith("ms") else 1.0)
    if metric == "tokens_per_s_per_gpu":
        return samples * row.whole("seq_len") / (value * row.gpus)
    if metric == "throughput_total" or metric in ("images_per_s", "samples_per_s"):
        return samples * units_per_sample(row) / value
    if metric in ("hardware_tflops_per_gpu", "model_tflops_per_gpu"):
        again = 1 if metric.startswith("hardware") and row.text("recompute") == "full" else 0
        return samples * _flops(row, again) / (value * 1e12 * row.gpus)
    raise Uncosted(f"metric {metric} does not determine the time of a step")


def _flops(row: PublishedRow, again: int) -> float:
    """Return the FLOPs of one sample of a GPT: forward, backward and `again` recomputed forwards of the blocks."""
    layers, hidden, seq, vocab = (row.whole(name) for name in ("layers", "hidden", "seq_len", "vocab"))
    blocks = 24.0 * seq * layers * hidden**2 * (1 + seq / (6 * hidden))
    return (3 + again) * blocks + 6.0 * seq * hidden * vocab


_PRESETS = {
    "llama370b": "llama3-70b",
    "llama31405b": "llama3-405b",
    "llama38b": "llama3-8b",
    "qwen330ba3b": "qwen3-30b-a3b",
    "qwen3235ba22b": "qwen3-235b-a22b",
    "gptoss120b": "gpt-oss-120b",
    "deepseekv3": "deepseek-v3",
}
"""Architectures of models that rows name without sizes."""

_SIZES = {"layers": "layers", "hidden": "hidden", "heads": "heads", "kv_heads": "kv_heads", "ffn": "ffn",
          "seq_len": "seq_len", "vocab": "vocab"}  # fmt: skip
_EARLY = re.compile(r"Megatron-LM 202[0-2]|Megatron-DeepSpeed|DeepSpeed\+Megatron")


def precision_of(row: PublishedRow) -> str:
    """Return the precision: fp32, tf32, half (16 bits throughout), mixed (autocast over float32), fp8 or fp4.

    Raises:
        Uncosted: the row prints no precision, or an unknown one.
    """
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


def is_early(row: PublishedRow) -> bool:
    """Return whether the row ran Megatron before FlashAttention.

    It writes attention scores and dropout masks to memory, and reduces gradients only after backward.
    """
    return _EARLY.match(row.text("framework")) is not None


def model_of(row: PublishedRow) -> ModelSpec:
    """Return the ModelSpec of a row.

    Raises:
        Uncosted: the row does not determine its model, or no architecture is known for it.
    """
    name, options = _named(row)
    return _built(name, tuple(sorted(options.items())))


@cache
def _built(name: str, options: tuple[tuple[str, Any], ...]) -> ModelSpec:
    """Build a model from its architecture and options; cached."""
    return architecture(name, dict(options))


def _named(row: PublishedRow) -> tuple[str, Mapping[str, Any]]:
    """Return a row's architecture and its options."""
    arch = row.text("arch")
    precision = precision_of(row)
    if precision in ("fp8", "fp4"):
        raise Uncosted("plans have no precision with matrix products in 8 or 4 bits")
    if row.family == "dle":
        return example_of(row, precision)
    numbers: dict[str, Any] = {"dtype": "float32"}
    if precision == "half":
        # Megatron accumulates gradients in float32 beside bfloat16 ones; fully sharded frameworks take 16 bytes a
        # parameter.
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
            row.whole(needed)  # required: a default would describe another model
    early = is_early(row)
    # Sequence parallelism, which shares norms and residual additions by tokens, came with Korthikanti et al. 2022.
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
_GNMT_TOKENS = 27  # average tokens of a WMT16 English-German sentence, in each language


def example_of(row: PublishedRow, precision: str) -> tuple[str, Mapping[str, Any]]:
    """Return the (architecture, options) of an NVIDIA DeepLearningExamples row.

    Raises:
        Uncosted: no architecture is known for the example.
    """
    name = row.text("model")
    if name not in _EXAMPLES:
        raise Uncosted(f"no architecture is known for example {name!r}")
    kind, sizes = _EXAMPLES[name]
    if kind == "bert":
        return kind, {**sizes, **_bert(row)}
    if name.endswith("nnUNet") and re.search(r"row: 2 \|", row.text("notes")):
        return kind, _NNUNET_2D
    return kind, sizes


def _bert(row: PublishedRow) -> dict[str, Any]:
    """Return the sequence length and number of predictions of a BERT row.

    Pre-training predicts 20 of 128 or 80 of 512 tokens. Fine-tuning for questions reads 384 tokens and predicts a span.
    """
    tokens = row.text("seq_len")
    if tokens == "512" and row.text("model").startswith("PyTorch/"):
        raise Uncosted("sequences of 512 cannot be full: the table's float32 rows exceed their devices' peak")
    if row.text("model").endswith("biobert") and tokens not in ("128", "512"):
        return {"seq_len": 128, "predictions": 1}  # named-entity recognition in 128 tokens
    if "tuning" in row.text("notes").split("row:")[0].split("/")[-1] or tokens not in ("128", "512"):
        return {"seq_len": _SQUAD_TOKENS, "predictions": 1}
    return {"seq_len": int(tokens), "predictions": 20 if tokens == "128" else 80}


def batch_of(row: PublishedRow, precision: str) -> int:
    """Return the samples that a rank computes at once.

    Where two numbers are printed, the larger one belongs to 16 bits, which needs less memory.
    """
    text = row.text("micro_batch")
    pattern = r"\d+" if "LanguageModeling" in row.text("model") else r"\d{1,3}(?:,\d{3})+|\d+"
    sizes = [
        int(match[1].replace(",", "")) * (1024 if match[2] else 1) for match in re.finditer(rf"({pattern})(k?)", text)
    ]
    if not sizes:
        raise Uncosted("the batch is not printed")
    return max(sizes) if precision == "mixed" else min(sizes)


def units_per_sample(row: PublishedRow) -> float:
    """Return how many units the metric counts in one sample: its tokens if it counts tokens, else 1."""
    counts_tokens = "tok" in row.text("unit").lower() or "Translation" in row.text("model")
    return 2.0 * _GNMT_TOKENS if counts_tokens else 1.0
