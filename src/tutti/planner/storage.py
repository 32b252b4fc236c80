"""Whether loaders and storage can feed a plan's step, in words: what the prediction's wait for data is due to."""

import math
import re
from dataclasses import replace

from tutti.config.cluster import ClusterSpec
from tutti.config.model import Loading, ModelSpec
from tutti.config.plan import Plan
from tutti.config.prediction import Prediction
from tutti.cost_model.data import Load, host_cores, storage_known
from tutti.cost_model.placement import place
from tutti.cost_model.step import load_of, predict
from tutti.cost_model.words import nbytes, seconds

_TOLD = 0.02
"""Waits below this part of a step are not told."""

_WORTH = 0.95
"""More workers are advised where a step with them takes less than this part."""

_MOST_WORKERS = 16
"""More workers of a rank are not advised; and as many cores a host counts as having where nobody knows."""


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
    load, rest_s = load_of(model, cluster, plan), step_s - data_s
    why = _because(model.loading, load, rest_s)
    return f"A step waits {seconds(data_s)} for data ({data_s / step_s:.0%} of it): {why}" + _with_more(
        model, cluster, plan, load, rest_s
    )


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
    """Which station is slower than the rest of the step."""
    if load.storage_s >= max(load.loaders_s, rest_s):
        return f"storage gives a batch every {seconds(load.storage_s)}; quicker storage or smaller files would help"
    if not load.ahead:
        return "ranks load between steps"
    if load.loaders_s > rest_s and loading.stream:
        return "every rank reads the whole stream; a data set with __len__ and __getitem__ is shared"
    if load.loaders_s > rest_s:
        return f"a rank's workers give a batch every {seconds(load.loaders_s)}"
    return "loaders' workers and ranks share the same cores; samples that cost less to decode would help"


def _with_more(model: ModelSpec, cluster: ClusterSpec, plan: Plan, load: Load, rest_s: float) -> str:
    """What as many workers as would keep up, or as there are cores for, make of the step; empty where it is little."""
    assert model.loading is not None
    seats = place(cluster, plan.world_size)
    most = min((host_cores(seat) or _MOST_WORKERS) // seat.ranks_per_host for seat in seats)
    now = max(1, model.loading.workers)
    workers = 1 if model.loading.stream else max(1, min(math.ceil(now * load.loaders_s / rest_s), most, _MOST_WORKERS))
    if workers <= model.loading.workers:
        return ""
    ahead = replace(model, loading=replace(model.loading, workers=workers))
    now_s, then_s = (predict(one, cluster, plan).step_time_s.value for one in (model, ahead))
    return (
        f"; with prepare(..., num_workers={workers}) it would take {seconds(then_s)}" if then_s < _WORTH * now_s else ""
    )
