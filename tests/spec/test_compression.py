"""Compression in words: said and read back, and refused where a plan cannot mean it."""

import pytest

from tutti.errors import TuttiError
from tutti.spec import codec
from tutti.spec.compression import Compression, compression_in_words, parse_compression
from tutti.spec.plan import BatchPlan, Plan, Sharding, Sync
from tutti.spec.refusals import check_plan

BATCH = BatchPlan(global_batch_size=8)


@pytest.mark.parametrize(
    "words",
    [
        "one-bit",
        "top-k,density=0.05",
        "dgc,density=0.01,momentum=0.5",
        "powersgd,rank=4",
        "qsgd,bits=8",
        "bytegrad,feedback=true",
    ],
)
def test_words_are_read_back_and_travel_in_plans(words: str) -> None:
    how = parse_compression(words)
    assert compression_in_words(how) == words
    plan = Plan(batch=BATCH).compressed(how)
    assert plan.sync.compress == how
    assert codec.loads(Plan, codec.dumps(plan)) == plan
    assert plan.compressed(None) == plan


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("two-bit", "method"),
        ("one-bit,density=0.1", "density is a setting of top-k, dgc"),
        ("top-k,density=2", "above 0 and at most 1"),
        ("qsgd,bits=3", "bits"),
        ("powersgd,rank=0", "rank = 0"),
        ("top-k,density", "is no setting"),
        ("top-k,density=0.1,density=0.2", "twice"),
        ("dgc,momentum=1", "momentum = 1"),
    ],
)
def test_what_no_method_means_is_refused(words: str, said: str) -> None:
    with pytest.raises(TuttiError, match=said):
        parse_compression(words)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"mesh": {"shard": 2}, "sharding": Sharding(level=2)}, "use sharding.level = 1"),
        ({"mesh": {"replicate": 2, "shard": 2}}, "sharding.level = 3"),
        ({"mesh": {"replicate": 2}, "precision": "float16"}, 'use precision = "bfloat16"'),
    ],
)
def test_plans_that_do_not_go_with_it_are_refused(fields: dict[str, object], said: str) -> None:
    plan = Plan(batch=BATCH, sync=Sync(compress=Compression(method="one-bit")), **fields)  # type: ignore[arg-type]
    with pytest.raises(TuttiError, match=said):
        check_plan(plan)


def test_defaults_are_said_only_where_they_are_asked_for() -> None:
    assert Compression(method="top-k").settings == {"density": 0.01}
    assert Compression(method="one-bit").keeps
    assert not Compression(method="bfloat16").keeps
    assert Compression(method="bfloat16", feedback=True).keeps
