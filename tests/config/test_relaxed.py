"""Modes of consistency in plans and in words: what is told, what is refused, and why."""

from dataclasses import replace
from typing import Any

import pytest

from tutti.config import serialization
from tutti.config.consistency_modes import CONSISTENCY_MODES, Relaxed, with_mode_defaults
from tutti.config.plan import BatchPlan, Plan, SyncPlan
from tutti.config.refusals import check_plan
from tutti.config.sync_notation import format_sync, parse_sync, with_mode
from tutti.errors import PlanError

SAID = [
    "synchronous",
    "local:period=8",
    "local:period=8,optimizer_state=averaged",
    "local:period=8,delay=8",
    "post-local:period=4,after=100",
    "one-shot",
    "diloco:period=500",
    "diloco:period=500,outer_rate=1.0,outer_momentum=0.0",
    "adasum:period=2",
    "ring",
    "shift-one:period=3",
    "push",
    "elastic:period=10,pull=0.5",
    "stale:bound=3",
    "asynchronous",
    "ad-psgd",
    "hogwild",
    "ensemble",
]


@pytest.mark.parametrize("text", SAID)
def test_words_and_plans_round_trip(text: str) -> None:
    sync = parse_sync(text)
    assert format_sync(sync) == text
    plan = Plan(batch=BatchPlan(global_batch_size=8), mesh={"replicate": 2}, sync=sync)
    assert serialization.loads(Plan, serialization.dumps(plan)) == plan
    check_plan(plan)
    assert with_mode(plan, None) == plan
    assert with_mode(plan, parse_sync("ring")).sync == SyncPlan(mode="ring")


def test_every_mode_is_said_and_has_parameters() -> None:
    assert {parse_sync(text).mode for text in SAID} == set(CONSISTENCY_MODES)


def test_values_without_a_name_come_in_order() -> None:
    assert parse_sync("local:8") == parse_sync("local:period=8")
    assert parse_sync("post-local:8,100") == parse_sync("post-local:period=8,after=100")
    assert parse_sync("diloco:500,1,outer_momentum=0").relaxed.outer_rate == 1


def test_what_nobody_says_is_the_modes_own() -> None:
    assert with_mode_defaults("diloco", Relaxed(period=500)) == Relaxed(period=500, outer_rate=0.7, outer_momentum=0.9)
    assert with_mode_defaults("local", Relaxed(period=3)).optimizer_state == "own"
    assert with_mode_defaults("elastic", Relaxed(pull=0.5)) == Relaxed(period=1, pull=0.5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lokal:8", "there is no mode 'lokal'"),
        ("local", "needs sync.relaxed.period"),
        ("post-local:8", "needs sync.relaxed.after"),
        ("local:eight", "is not a whole number"),
        ("local:2.5", "is not a whole number"),
        ("local:0", "1 or more"),
        ("local:8,period=9", "period appears twice"),
        ("local:8,pull=0.5", "is not a parameter of local, which has period"),
        ("local:8,delay=9", "the next average would begin before the last one ends; give at most 8"),
        ("local:8,delay=-1", "0 or more"),
        ("local:8,delay=0.5", "is not a whole number"),
        ("local:8,averaged,8", "leave one of them out"),
        ("diloco:8,delay=8", "is not a parameter of diloco, which has period"),
        ("one-shot:8", "which has no parameters"),
        ("local:8,optimizer_state=mixed", "write own, averaged or corrected"),
        ("elastic:1,0", "above 0 and at most 1"),
        ("elastic:1,1.5", "above 0 and at most 1"),
        ("diloco:5,-1", "above 0"),
        ("diloco:5,nan", "above 0"),
        ("diloco:5,0.7,1", "below 1"),
        ("post-local:8,after=-1", "0 or more"),
        ("stale", "needs sync.relaxed.bound"),
        ("stale:-1", "0 or more"),
        ("stale:0.5", "is not a whole number"),
        ("asynchronous:3", "which has no parameters"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words.replace("(", r"\(")):
        parse_sync(text)


def test_a_parameter_of_another_mode_is_refused() -> None:
    with pytest.raises(PlanError, match="leave it out"):
        SyncPlan(mode="ring", relaxed=Relaxed(pull=0.5))
    with pytest.raises(PlanError, match="has no parameters"):
        SyncPlan(relaxed=Relaxed(period=5))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mesh": {"replicate": 2, "shard": 2}}, "mesh.shard"),
        ({"mesh": {"expert": 2}}, "mesh.expert"),
        ({"mesh": {"replicate": 2, "table": 2}}, "mesh.table"),
        ({"mesh": {"replicate": 2, "split": 2}}, "mesh.split"),
        ({"mesh": {"replicate": 3}, "sync": parse_sync("shift-one")}, "pairs"),
    ],
)
def test_what_replicas_that_differ_exclude(fields: dict[str, Any], words: str) -> None:
    plan = Plan(batch=BatchPlan(global_batch_size=8), **{"sync": parse_sync("local:4"), **fields})
    with pytest.raises(PlanError, match=words):
        check_plan(plan)


@pytest.mark.parametrize("mode", [mode.name for mode in CONSISTENCY_MODES.values() if mode.asynchronous])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"precision": "float16"}, "loss scale"),
        ({"mesh": {"replicate": 2, "shard": 2}}, "mesh.shard"),
        ({"mesh": {"replicate": 2, "stage": 2}}, "mesh.stage"),
        ({"mesh": {"replicate": 2, "context": 2}}, "mesh.context"),
        ({"mesh": {"space": 2}}, "mesh.space"),
    ],
)
def test_what_modes_without_waiting_exclude(mode: str, fields: dict[str, Any], words: str) -> None:
    relaxed = Relaxed(bound=2) if mode == "stale" else Relaxed()
    plan = Plan(batch=BatchPlan(global_batch_size=8), sync=SyncPlan(mode=mode, relaxed=relaxed), **fields)
    with pytest.raises(PlanError, match=words) as caught:
        check_plan(plan)
    assert f'"{mode}"' in str(caught.value)
    assert "; " in str(caught.value), "with its remedy"
    if "precision" in fields:
        check_plan(replace(plan, precision="bfloat16"))
