"""What is verified of a plan whose replicas may differ, and what is said of the rest."""

from tutti.cli.verify import _summed
from tutti.spec.plan import BatchPlan, Plan, Sync
from tutti.spec.sync_words import parse_sync, with_mode

PLAN = Plan(batch=BatchPlan(global_batch_size=8), mesh={"replicate": 2}, sync=Sync(bucket_nbytes=1000))


def test_replicas_that_differ_are_compared_with_summed_gradients() -> None:
    plan, notes = _summed(with_mode(PLAN, parse_sync("local:4")))
    assert plan == PLAN
    assert len(notes) == 1
    assert "sync local:period=4" in notes[0]
    assert "Not compared" in notes[0]


def test_nothing_is_said_of_replicas_that_are_equal() -> None:
    assert _summed(PLAN) == (PLAN, ())
    assert _summed(None) == (None, ())
