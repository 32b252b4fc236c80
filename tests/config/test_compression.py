"""Compression in words: said and read back, and refused where a plan cannot mean it."""

from dataclasses import replace
from typing import Any

import pytest

from tutti.config import serialization
from tutti.config.compression import Compression, bucket_sent_nbytes, format_compression, parse_compression
from tutti.config.plan import BatchPlan, Plan, ShardingPlan, SyncPlan
from tutti.config.refusals import check_plan
from tutti.errors import TuttiError

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
        "top-k,sparse=true",
        "dgc,density=0.001,sparse=true,warmup_steps=400",
        "one-bit-adam,freeze_step=500",
        "one-bit-lamb,freeze_step=1,between=ranks",
        "float32,between=hosts",
    ],
)
def test_words_are_read_back_and_travel_in_plans(words: str) -> None:
    how = parse_compression(words)
    assert format_compression(how) == words
    plan = Plan(batch=BATCH).compressed(how)
    assert plan.sync.compress == how
    assert serialization.loads(Plan, serialization.dumps(plan)) == plan
    assert plan.compressed(None) == plan


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("two-bit", "compress 'two-bit': there is no such codec; choose from float64"),
        ("one-bit,density=0.1", "density is a setting of top-k, dgc"),
        ("top-k,density=2", "above 0 and at most 1"),
        ("qsgd,bits=3", "bits"),
        ("powersgd,rank=0", "rank = 0"),
        ("top-k,density", "is not a setting"),
        ("top-k,density=0.1,density=0.2", "twice"),
        ("dgc,momentum=1", "momentum = 1"),
        ("dgc,warmup_steps=-1", "warmup_steps = -1"),
        ("one-bit-adam", "write one-bit-adam,freeze_step=N"),
        ("byte-adam,freeze_step=0", "1 or more"),
        ("one-bit,freeze_step=5", "freeze_step is a setting of one-bit-adam, byte-adam, one-bit-lamb"),
        ("one-bit,between=racks", "between"),
        ("one-bit,gain=0.5", "gain is a setting of top-k"),
        ("top-k,gain=1.5", "above 0 and below 1"),
        ("top-k,window=8", "with gain"),
        ("top-k,gain=0.5,sparse=true", "leave one of them out"),
    ],
)
def test_what_no_method_means_is_refused(words: str, said: str) -> None:
    with pytest.raises(TuttiError, match=said):
        parse_compression(words)


@pytest.mark.parametrize(
    ("words", "fields", "said"),
    [
        (
            "one-bit-adam,freeze_step=5",
            {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=2)},
            "use sharding.level = 1",
        ),
        ("one-bit,between=hosts", {"mesh": {"replicate": 2, "shard": 2}}, "sharding.level = 3"),
        ("top-k,gain=0.5", {"mesh": {"shard": 2}}, "each rank gets messages of its part only"),
        ("byte-adam,freeze_step=5", {"mesh": {"replicate": 2}, "precision": "float16"}, "compress gradients: bytegrad"),
    ],
)
def test_plans_that_do_not_go_with_it_are_refused(words: str, fields: dict[str, object], said: str) -> None:
    plan = Plan(batch=BATCH, sync=SyncPlan(compress=parse_compression(words)), **fields)  # type: ignore[arg-type]
    with pytest.raises(TuttiError, match=said):
        check_plan(plan)


@pytest.mark.parametrize("words", ["bfloat16", "qsgd", "bfloat16,feedback=true", "one-bit", "top-k", "dgc", "powersgd"])
def test_a_loss_scale_goes_with_codes_of_gradients(words: str) -> None:
    """What they keep back follows the scale (tests/trainer/test_compressed_scaling_multirank.py)."""
    check_plan(
        Plan(batch=BATCH, sync=SyncPlan(compress=parse_compression(words)), precision="float16", mesh={"replicate": 2})
    )


def test_ranks_that_step_alone_need_whole_replicas_and_factors_no_stages() -> None:
    """Other methods of momentum go with parts of the optimizer's state."""
    batch = replace(BATCH, num_microbatches=2)
    alone = SyncPlan(compress=Compression(method="zero-one-adam", freeze_step=5))
    parts: dict[str, Any] = {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=1)}
    check_plan(Plan(batch=BATCH, sync=SyncPlan(compress=Compression(method="byte-adam", freeze_step=5)), **parts))
    with pytest.raises(TuttiError, match=r"mesh\.shard = 2: ranks step independently"):
        check_plan(Plan(batch=BATCH, sync=alone, **parts))
    factors = SyncPlan(compress=Compression(method="factors"))
    check_plan(Plan(batch=BATCH, sync=factors, precision="float16", **parts))
    with pytest.raises(TuttiError, match=r"'factors' with mesh\.stage = 2"):
        check_plan(Plan(batch=batch, sync=factors, mesh={"stage": 2}))
    with pytest.raises(TuttiError, match=r"'factors' with sharding\.level = 2"):
        check_plan(Plan(batch=BATCH, sync=factors, mesh={"shard": 2}, sharding=ShardingPlan(level=2)))


def test_what_is_in_force_follows_the_steps() -> None:
    momenta = Compression(method="one-bit-adam", freeze_step=3)
    assert [momenta.at(step) is None for step in range(5)] == [True, True, True, False, False]
    assert momenta.code == Compression(method="one-bit")
    assert Compression(method="byte-adam", freeze_step=3).code.settings["feedback"]
    ramp = Compression(method="dgc", density=0.001, warmup_steps=8)
    densities = [how.density for how in map(ramp.at, range(0, 12, 2)) if how is not None]
    assert densities == [0.25, 0.0625, 0.015625, 0.00390625, 0.001, 0.001]
    one_bit = Compression(method="one-bit")
    assert one_bit.at(0) is one_bit


def test_bytes_of_sparse_sums_stop_growing_with_ranks() -> None:
    """Places that nobody shares: up to the dense sum; gathered, they grow with the number of ranks."""
    sparse, gathered = (Compression(method="top-k", density=0.05, sparse=is_so) for is_so in (True, False))
    found = [bucket_sent_nbytes(sparse, [(100_000,)], ranks, 4) for ranks in (2, 8, 64)]
    assert found[-1] < 4 * 100_000 + 8 * 5_000 + 64 * 20 * 4
    assert bucket_sent_nbytes(gathered, [(100_000,)], 64, 4) > 5 * found[-1]


def test_defaults_are_said_only_where_they_are_asked_for() -> None:
    assert Compression(method="top-k").settings == {"density": 0.01, "gain": 0, "window": 16, "sparse": False}
    assert Compression(method="one-bit").keeps
    assert not Compression(method="bfloat16").keeps
    assert Compression(method="bfloat16", feedback=True).keeps
