"""A request refuses numbers that are not finite and above 0, and wishes that contradict each other."""

import math
from typing import Any, get_args

import pytest

from cost_model.examples import mlp, plan
from planner.machines import cards
from tutti.errors import PlanError
from tutti.planner import NoiseScale, PlanRequest, Scope, choose
from tutti.planner.plan_request import batches_to_try


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 0.0, -1.0])
@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("train_samples", "the length of the whole training"),
        ("memory_nbytes", "a rank may take"),
        ("budget", "the whole training may cost"),
        ("deadline_s", "the whole training may take"),
    ],
)
def test_numbers_are_finite_and_above_0(name: str, meaning: str, value: float) -> None:
    with pytest.raises(PlanError, match=rf"^{name} = {value} \(.*{meaning}.*\); give a finite number above 0$"):
        PlanRequest(script=plan(), **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.inf, math.nan, 0.0])
@pytest.mark.parametrize("name", ["critical_batch", "least_samples"])
def test_a_noise_scale_is_finite_too(name: str, value: float) -> None:
    with pytest.raises(PlanError, match=rf"^{name} = {value} \(.* a quality takes .*\); give a finite number above 0$"):
        NoiseScale(**{"critical_batch": 100.0, "least_samples": 1e4, name: value})
    with pytest.raises(PlanError, match="a number of steps that is too large to count"):
        NoiseScale(critical_batch=1e-300, least_samples=1e10)


def test_however_large_the_critical_batch_few_sizes_are_tried() -> None:
    """No size has more samples than the quality takes at all."""
    assert max(batches_to_try(64, NoiseScale(critical_batch=1e300, least_samples=1e5), 4)) == 65536
    assert len(batches_to_try(64, NoiseScale(critical_batch=1e300, least_samples=1e200), 4)) < 24


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"degree": 4, "max_devices": 2}, "degree asks for exactly 4 ranks, but max_devices = 2 allows"),
        ({"degree": 4, "mesh": {"replicate": 2}}, "exactly 4 ranks, but mesh = replicate=2 has 2; make them agree"),
        ({"max_devices": 1, "mesh": {"replicate": 2}}, "mesh asks for exactly 2 ranks, but max_devices = 1 allows"),
        (
            {"scope": "data", "mesh": {"split": 2}},
            "mesh = split=2 divides the model along split; leave one of the two out",
        ),
    ],
)
def test_wishes_that_contradict_each_other_are_refused(wishes: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        PlanRequest(script=plan(), **{"scope": "all", **wishes})


@pytest.mark.parametrize("scope", get_args(Scope))
def test_wishes_that_agree_are_kept(scope: Any) -> None:
    request = PlanRequest(script=plan(), scope=scope, degree=2, max_devices=2, mesh={"replicate": 2})
    assert choose(mlp(64, 1), cards(), request).best.world_size == 2
