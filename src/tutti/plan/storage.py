"""Whether storage could feed a plan's step: the time to read a step's samples, which predictions do not count."""

import math
import re

from tutti.predict.placement import place
from tutti.predict.words import nbytes, seconds
from tutti.spec.cluster import ClusterSpec
from tutti.spec.model import ModelSpec
from tutti.spec.plan import Plan
from tutti.spec.prediction import Prediction


def sample_nbytes(model: ModelSpec) -> float:
    """Bytes of one sample as the model takes it; stored ones may be fewer (compressed) or more."""
    return float(sum(math.prod(each.shape) * _width(each.dtype) for each in model.inputs))


def _width(dtype: str) -> float:
    """Bytes of a value by its type's name: float32, int64, bool."""
    bits = re.search(r"\d+", dtype)
    return int(bits.group()) / 8 if bits else 1.0


def read_s(model: ModelSpec, cluster: ClusterSpec, plan: Plan, samples: float) -> float | None:
    """Seconds in which the hosts that a plan uses together read `samples` once; None where a host's rate is unknown."""
    rates = [(seat.hosts, seat.node.disk_read_bytes_per_s) for seat in place(cluster, plan.world_size)]
    total = sum(hosts * rate for hosts, rate in rates if rate is not None)
    if any(rate is None for _, rate in rates) or not total > 0:
        return None
    return samples * sample_nbytes(model) / total


def starved(model: ModelSpec, cluster: ClusterSpec, plan: Plan, prediction: Prediction) -> str:
    """One sentence where storage is slower than the predicted step; empty where it is not, or its rate is unknown."""
    units = prediction.throughput_per_s * prediction.step_time_s.value
    samples = units / model.tokens_per_sample if plan.batch.unit == "tokens" and model.tokens_per_sample else units
    took = read_s(model, cluster, plan, samples)
    if took is None or took <= prediction.step_time_s.value:
        return ""
    return (
        f"Storage may be slower than that: to read a step's samples takes {seconds(took)} at the hosts' rates, as the "
        f"model takes them ({nbytes(sample_nbytes(model))} each); the prediction holds for data in memory"
    )
