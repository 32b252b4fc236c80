"""The plan of a row: its degrees on a mesh, its microbatches, what it shards and what it recomputes."""

import math
import re
from dataclasses import replace

from tutti.config.model import ModelSpec
from tutti.config.plan import BatchPlan, LayoutRule, Pipeline, Plan, Sharding, Sync
from tutti.config.words import AxisName, Precision
from tutti.errors import PlanError
from tutti.validate.examples import batch_of
from tutti.validate.models import is_early, precision_of
from tutti.validate.rows import Row, Uncosted

AT_THE_END = 2**50
"""Bytes of a bucket that holds all gradients: none is summed before the last is there."""


def plan_of(row: Row, model: ModelSpec) -> Plan:
    """The plan that a row ran. Raises Uncosted where it cannot be told."""
    precision = precision_of(row)
    mesh, sharding = _mesh(row)
    ranks = math.prod(mesh.values())
    if ranks != row.gpus:
        raise Uncosted("the printed degrees do not multiply to n_gpus")
    data = math.prod(mesh.get(axis, 1) for axis in ("replicate", "shard", "expert"))
    each = batch_of(row, precision) if row.family == "dle" else row.whole("micro_batch", _usual_microbatch(row))
    samples = row.whole("global_batch", each * data)
    if samples % data:
        raise Uncosted("the global batch does not divide among the data-parallel ranks")
    microbatches = max(1, round(samples / (data * each)))
    words: dict[str, Precision] = {"tf32": "tf32", "mixed": "float16"}
    stages = row.whole("vp", 1)
    try:
        return Plan(
            batch=BatchPlan(global_batch_size=samples, num_microbatches=microbatches),
            mesh=mesh,
            layout=_layout(row, model),
            precision=words.get(precision, "full"),
            sharding=sharding,
            pipeline=Pipeline(
                schedule="interleaved" if stages > 1 and mesh.get("stage", 1) > 1 else "1f1b",
                stages_per_rank=stages if mesh.get("stage", 1) > 1 else 1,
                cuts=_cuts(row, model, mesh.get("stage", 1) * (stages if mesh.get("stage", 1) > 1 else 1)),
            ),
            sync=Sync(bucket_nbytes=AT_THE_END) if is_early(row) else Sync(),
        )
    except PlanError as error:
        raise Uncosted(str(error)) from None


def _cuts(row: Row, model: ModelSpec, stages: int) -> tuple[str, ...]:
    """Where stages begin. Megatron gives each as many blocks, the last one the output layer besides; AMP's logs say it,
    in DeepSpeed's layers, of which two stand before the first block.
    """
    if stages == 1:
        return ()
    found = re.search(r"stage boundaries \[([\d, ]+)\]", row.text("notes"))
    if found is None:
        count = len({module.block for module in model.modules if module.block >= 0})
        ends = 1 if row.family == "bloom" else 0  # BigScience counts embedding and output layer as blocks
        cuts = [(count + 2 * ends) * stage // stages - ends for stage in range(1, stages)]
        return tuple(f"blocks.{cut}" for cut in cuts) if count >= stages else ()
    inner = [int(text) for text in found[1].split(",")][1:-1]
    blocks = [min(max(0, at - 2), row.whole("layers") - 1) for at in inner]
    if len(inner) != stages - 1 or len(set(blocks)) != len(blocks) or 0 in blocks:
        return ()  # stages of embeddings alone, or of the head alone, are not cut at blocks
    return tuple(f"blocks.{block}" for block in blocks)


def _usual_microbatch(row: Row) -> int | None:
    """Where Megatron's tables print no micro-batch, one sample is taken; other rows must print it."""
    return 1 if row.family == "mcoreh100" else None


def _mesh(row: Row) -> tuple[dict[AxisName, int], Sharding]:
    """Degrees by axis, outermost first, the split axis innermost as Megatron places it; and what is sharded."""
    split, stage, context, expert = (row.whole(name, 1) for name in ("tp", "pp", "cp", "ep"))
    rest = row.gpus // max(1, split * stage * context)
    data = row.whole("dp", rest)
    if expert > data:
        raise Uncosted("the expert degree exceeds the data-parallel ranks")
    zero = row.text("zero")
    level = int(zero) if zero in ("1", "2", "3") else 3 if "fsdp=" in zero and "fsdp=0" not in zero else 0
    own: AxisName = "shard" if level else "replicate"
    mesh: dict[AxisName, int] = {"stage": stage, own: data // expert, "expert": expert, "context": context,
                                 "split": split}  # fmt: skip
    kept = {axis: degree for axis, degree in mesh.items() if degree > 1} or {own: 1}
    return kept, replace(Sharding(), level=level or 3)  # type: ignore[arg-type]


def _layout(row: Row, model: ModelSpec) -> tuple[LayoutRule, ...]:
    """What is recomputed: whole blocks, the core of attention, or some of the blocks."""
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
