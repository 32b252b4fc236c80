"""What a row measured, as seconds of a step: rows print times, tokens or samples a second, or FLOPs a second."""

from tutti.config.model import ModelSpec
from tutti.config.plan import Plan
from tutti.validate.examples import units_per_sample
from tutti.validate.rows import Row, Uncosted


def step_s(row: Row, model: ModelSpec, plan: Plan) -> float:
    """Seconds of a step of `plan` as the row measured it. Raises Uncosted for a metric that says no time.

    FLOPs a second follow the source's convention: "hardware" counts a recomputed forward (Narayanan et al. 2021,
    equation 3), "model" does not; both count attention as if nothing were masked.
    """
    metric, value = row.text("metric"), row.value
    samples = plan.batch.global_batch_size
    if value <= 0:
        raise Uncosted("the value is not above 0")
    if metric == "iteration_time":
        return value / (1000.0 if row.text("unit").startswith("ms") else 1.0)
    if metric == "tokens_per_s_per_gpu":
        return samples * row.whole("seq_len") / (value * row.gpus)
    if metric == "throughput_total" or metric in ("images_per_s", "samples_per_s"):
        return samples * units_per_sample(row) / value
    if metric in ("hardware_tflops_per_gpu", "model_tflops_per_gpu"):
        again = 1 if metric.startswith("hardware") and row.text("recompute") == "full" else 0
        return samples * _flops(row, again) / (value * 1e12 * row.gpus)
    raise Uncosted(f"metric {metric} says no time of a step")


def _flops(row: Row, again: int) -> float:
    """FLOPs of one sample of a GPT with its backward and `again` forwards of the blocks."""
    layers, hidden, seq, vocab = (row.whole(name) for name in ("layers", "hidden", "seq_len", "vocab"))
    blocks = 24.0 * seq * layers * hidden**2 * (1 + seq / (6 * hidden))
    return (3 + again) * blocks + 6.0 * seq * hidden * vocab
