"""Whether loaders and storage can feed a plan's step, in words: what the prediction's wait for data is due to."""

import math
import re
from dataclasses import replace

from tutti.predict.data import Load, storage_known
from tutti.predict.placement import place
from tutti.predict.step import load_of
from tutti.predict.words import nbytes, seconds
from tutti.spec.cluster import ClusterSpec
from tutti.spec.loading import Loading
from tutti.spec.model import ModelSpec
from tutti.spec.plan import Plan
from tutti.spec.prediction import Prediction

_TOLD = 0.02
"""Waits below this part of a step are not told."""


def sample_nbytes(model: ModelSpec) -> float:
    """Bytes of one sample as the model takes it; stored ones may be fewer (compressed) or more."""
    return float(sum(math.prod(each.shape) * _width(each.dtype) for each in model.inputs))


def _width(dtype: str) -> float:
    """Bytes of a value by its type's name: float32, int64, bool."""
    bits = re.search(r"\d+", dtype)
    return int(bits.group()) / 8 if bits else 1.0


def starved(model: ModelSpec, cluster: ClusterSpec, plan: Plan, prediction: Prediction) -> str:
    """One sentence where a step waits for data, or might where nobody knows what samples cost; else empty."""
    if model.loading is None:
        return _perhaps(model, cluster, plan, prediction)
    step_s, data_s = prediction.step_time_s.value, prediction.phases["data"]
    if data_s <= _TOLD * step_s:
        return ""
    why = _because(model.loading, load_of(model, cluster, plan), step_s - data_s)
    return f"A step waits {seconds(data_s)} for data ({data_s / step_s:.0%} of it): {why}"


def _perhaps(model: ModelSpec, cluster: ClusterSpec, plan: Plan, prediction: Prediction) -> str:
    """Of samples that are stored as the model takes them, loaded ahead by workers that need no time."""
    as_taken = Loading(stored_nbytes=sample_nbytes(model), workers=1)
    batch_s = load_of(replace(model, loading=as_taken), cluster, plan).batch_s
    if not storage_known(cluster, place(cluster, plan.world_size)) or batch_s <= prediction.step_time_s.value:
        return ""
    return (
        f"Storage may be slower than that: to read a step's samples takes {seconds(batch_s)} at the hosts' rates, as "
        f"the model takes them ({nbytes(sample_nbytes(model))} each); the prediction holds for data in memory"
    )


def _because(loading: Loading, load: Load, rest_s: float) -> str:
    """Which station is slower than the rest of the step, and the remedy."""
    slow_storage = f"storage gives a batch every {seconds(load.storage_s)}; quicker storage or smaller files would help"
    if not load.ahead:
        workers = 1 if loading.stream else math.ceil(load.loaders_s / rest_s)
        remedy = f"ranks load between steps; prepare(..., num_workers={workers}) loads ahead, while they compute"
        return remedy + (f", but {slow_storage}" if load.storage_s > rest_s else "")
    if load.storage_s >= max(load.loaders_s, rest_s):
        return slow_storage
    if load.loaders_s > rest_s and loading.stream:
        return "every rank reads the whole stream; a data set with __len__ and __getitem__ is shared"
    if load.loaders_s > rest_s:
        workers = math.ceil(loading.workers * load.loaders_s / rest_s)
        return f"a rank's workers give a batch every {seconds(load.loaders_s)}; num_workers={workers} would keep up"
    return "loaders' workers and ranks share the same cores; samples that cost less to decode would help"
