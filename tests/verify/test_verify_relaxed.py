"""What is verified of a plan whose replicas may differ, and what is said of the rest."""

from dataclasses import fields, replace

import pytest

from tutti.commands.verify import VerifyOptions, _summed
from tutti.config.compression import parse_compression
from tutti.config.plan import BatchPlan, Plan, SyncPlan
from tutti.config.sync_notation import parse_sync, with_mode
from tutti.errors import PlanError

PLAN = Plan(batch=BatchPlan(global_batch_size=8), mesh={"replicate": 2}, sync=SyncPlan(bucket_nbytes=1000))


OPTIONS = VerifyOptions(**{field.name: None for field in fields(VerifyOptions)})


def test_replicas_that_differ_are_compared_with_summed_gradients() -> None:
    plan, _, notes = _summed(with_mode(PLAN, parse_sync("local:4")), OPTIONS)
    assert plan == PLAN
    assert len(notes) == 1
    assert "sync local:period=4)" in notes[0]
    assert "Not verified" in notes[0]


@pytest.mark.parametrize("of_plan", [True, False])
def test_what_they_tell_each_other_in_a_code_is_no_sum_of_gradients(of_plan: bool) -> None:
    how, local = parse_compression("qsgd,bits=4"), with_mode(PLAN, parse_sync("local:4"))
    asked = OPTIONS if of_plan else replace(OPTIONS, compress=how)
    plan, options, notes = _summed(local.compressed(how) if of_plan else local, asked)
    assert (plan, options.compress) == (PLAN, None)
    assert "sync local:period=4 in qsgd,bits=4)" in notes[0]
    with pytest.raises(PlanError, match="no reduction that a codec could compress"):
        _summed(with_mode(PLAN, parse_sync("ring")), replace(OPTIONS, compress=how))


def test_nothing_is_said_of_replicas_that_are_equal() -> None:
    assert _summed(PLAN, OPTIONS) == (PLAN, OPTIONS, ())
    assert _summed(None, OPTIONS) == (None, OPTIONS, ())
