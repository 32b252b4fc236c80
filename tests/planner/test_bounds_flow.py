"""Bounds are admissible for models whose flow of values is described: skip connections, residuals, rotations."""

from collections.abc import Callable

import numpy as np
import pytest

from against_one import Subject
from cost_model.examples import cluster, cpu
from cost_model.flows import spec_of
from matrix import language, volumes
from planner import test_bounds as bounds_of_plans
from planner.machines import cards
from tutti.config.cluster import ClusterSpec
from tutti.cost_model.stage_cuts import stages_of
from tutti.planner.plan_description import plan_words

SUBJECTS: dict[str, tuple[Callable[[], Subject], ClusterSpec]] = {
    "gpt": (language.gpt, cluster(cpu(), count=4)),
    "unet": (volumes.unet, cards(1)),
}


@pytest.mark.parametrize("name", SUBJECTS)
def test_no_prediction_is_below_its_bounds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, machines = SUBJECTS[name]
    spec = spec_of(make())
    monkeypatch.setitem(bounds_of_plans.CASES, name, (spec, machines, 24, "full"))
    bounds, (coarse_s, coarse_nbytes), rows = bounds_of_plans.rows_of(name, 60)
    staged, near = 0, []
    for row, mesh, intended, prediction in rows:
        step_s, nbytes = prediction.step_time_s.value * (1 + 1e-9), prediction.memory.total * (1 + 1e-9)
        assert bounds.step_s[row] <= step_s, plan_words(intended)
        assert coarse_s[mesh] <= step_s, plan_words(intended)
        assert coarse_nbytes[mesh] <= nbytes, plan_words(intended)
        assert bounds.emptiest_nbytes[row] <= nbytes, plan_words(intended)
        if len(machines.nodes) == 1:
            assert bounds.fullest_nbytes[row] <= nbytes, plan_words(intended)
        if intended.degree("stage") > 1:
            staged += 1
            near.append(bounds.fullest_nbytes[row] / prediction.memory.total)
            assert stages_of(spec, intended).sent.any()
    assert staged >= 10
    assert np.median(near) > 0.99
