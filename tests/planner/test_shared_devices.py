"""Plans whose ranks share devices."""

from typing import Any

import pytest

import tutti
from tutti.errors import PlanError
from tutti.planner import difference


def _plan(**options: Any) -> Any:
    return tutti.plan("gpt2", global_batch_size=8, data_parallel=True, precision="full", seconds=2, **options)


def test_a_plan_for_ranks_that_share_a_device_says_so() -> None:
    shared = _plan(cluster="1x1:h100-sxm5-80gb", nproc=2, share_device=True)
    assert shared.plan.share_device
    assert shared.plan.mesh == {"replicate": 2}
    assert "2 ranks share 1 device" in shared.choice.remarks[0]
    assert "not for speed" in shared.choice.remarks[0]
    alone = _plan(cluster="1x1:h100-sxm5-80gb")
    assert shared.choice.prediction.step_time_s.value > alone.choice.prediction.step_time_s.value
    assert any("may share devices" in sentence for sentence in difference(alone.plan, shared.plan))


def test_ranks_with_devices_of_their_own_share_none() -> None:
    planned = _plan(cluster="1x2:h100-sxm5-80gb,nvlink4", nproc=2, share_device=True)
    assert not planned.plan.share_device


def test_the_number_of_ranks_that_share_must_be_given() -> None:
    with pytest.raises(PlanError, match=r"--share-device leaves open how many ranks .*; add --nproc N, or --mesh"):
        _plan(cluster="1x1:h100-sxm5-80gb", share_device=True)
