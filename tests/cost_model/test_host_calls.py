"""A GPU computes while its host makes the calls: a module takes the longer time of both, on a CPU their sum."""

from typing import Any

import numpy as np
import pytest

from cost_model.examples import cluster, gpu
from tutti.cost_model import compute_cost, cost_constants
from tutti.cost_model.compute_cost import PassCost
from tutti.cost_model.rank_placement import place_ranks
from tutti.cost_model.worker_speed import worker_at
from tutti.profile.architectures import architecture


def forward(samples: int, **device: Any) -> PassCost:
    model = architecture("gpt", {"layers": 2, "hidden": 1024, "heads": 16, "seq_len": 512, "vocab": 1000})
    worker = worker_at(place_ranks(cluster(gpu(**device)), 1)[0], model.dtype, "full")
    return compute_cost.forward(compute_cost.op_table(model), worker, samples, len(model.modules))


def test_small_work_takes_as_long_as_its_calls() -> None:
    slow = forward(1, kernel_overhead_s=1.0)
    calls = slow.seconds / (1.0 * cost_constants.CALL_FACTOR)
    assert np.allclose(calls, np.round(calls))
    assert slow.seconds.sum() == pytest.approx(forward(2, kernel_overhead_s=1.0).seconds.sum())


def test_large_work_hides_its_calls() -> None:
    few, more = (forward(4096, kernel_overhead_s=overhead).seconds for overhead in (1e-6, 6e-6))
    assert np.allclose(few, more, atol=1e-4)  # the table of positions differs, whose work does not grow


def test_cheaper_calls_never_predict_slower() -> None:
    times = [forward(2, kernel_overhead_s=10.0**power).seconds.sum() for power in range(-8, 0)]
    assert times == sorted(times)


def test_what_limits_adds_up() -> None:
    for samples in (1, 64):
        work = forward(samples, kernel_overhead_s=6e-6)
        assert np.allclose(work.limits.sum(axis=0), work.seconds)
        assert (work.limits >= 0).all()


def test_what_a_device_says_of_a_kind_of_operator_replaces_what_is_assumed() -> None:
    usual, slower = forward(64), forward(64, efficiency={"attention": cost_constants.EFFICIENCY["attention"] / 2})
    grown = slower.seconds - usual.seconds
    model = architecture("gpt", {"layers": 2, "hidden": 1024, "heads": 16, "seq_len": 512, "vocab": 1000})
    kinds = [module.kind for module in model.modules]
    assert [kind for kind, seconds in zip(kinds, grown, strict=True) if seconds > 0] == ["Attention"] * 2
