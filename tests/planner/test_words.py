"""Differences between two plans, between a plan's model and a changed one, and clusters changed on request."""

import dataclasses

import pytest

from cost_model.examples import cluster, cpu, linear, link, mlp, plan
from planner.machines import cards, mixed
from tutti.config import serialization
from tutti.config.model import ModelSpec
from tutti.config.model_fingerprint import _spread
from tutti.config.plan import LayoutRule, PipelinePlan, Plan, ShardingPlan
from tutti.errors import PlanError
from tutti.planner import PlanRequest, changed_modules, choose, difference, explain, stamp, what_if
from tutti.planner.plan_description import plan_words


def test_equal_plans_differ_in_nothing() -> None:
    assert difference(plan(64), plan(64)) == ()


def test_every_difference_is_a_sentence() -> None:
    old = plan(64, layout=(LayoutRule(modules="head", placement="column"),))
    new = dataclasses.replace(
        plan(128, microbatches=4),
        mesh={"stage": 2, "shard": 2, "split": 2},
        precision="bfloat16",
        sharding=ShardingPlan(level=1),
        pipeline=PipelinePlan(schedule="zero-bubble"),
        layout=(LayoutRule(modules="blocks.*", recompute=True),),
    )
    differences = difference(old, new, ("old.json", "new.json"))
    assert "Ranks: 1 in old.json, 8 in new.json" in differences
    assert "Split: none in old.json, 2 in new.json" in differences
    assert "The global batch: 64 in old.json, 128 in new.json (changes results)" in differences
    assert "Microbatches: 1 in old.json, 4 in new.json" in differences
    assert "Precision: full in old.json, bfloat16 in new.json (changes results)" in differences
    assert "Recompute: none in old.json, full in new.json" in differences
    assert "new.json uses ZeRO-1, zero-bubble, recompute" in differences
    assert "Only old.json has a rule for modules head: column" in differences


def test_the_order_of_axes_and_settings_of_shared_axes_are_told() -> None:
    old = dataclasses.replace(plan(64), mesh={"shard": 2, "split": 2})
    new = dataclasses.replace(old, mesh={"split": 2, "shard": 2}, sharding=ShardingPlan(level=1))
    differences = difference(old, new)
    assert "Order of axes, outermost first: shard, split in A, split, shard in B" in differences
    assert "Sharding: level 3 in A, level 1 in B" in differences


def test_a_plan_in_one_phrase() -> None:
    mesh_plan = dataclasses.replace(plan(64, microbatches=2), mesh={"replicate": 2, "shard": 4})
    assert plan_words(mesh_plan) == "replicate 2 x shard 4 with ZeRO-3, 2 microbatches"
    assert plan_words(plan(64)) == "1 rank, 1 microbatch"


def layered(count: int, width: int = 4) -> ModelSpec:
    modules = [linear(f"layers.{index}.{part}", width, width) for index in range(count) for part in ("up", "down")]
    return ModelSpec(name="m", modules=(linear("embed", 8, width), *modules))


def test_a_stamp_gathers_equal_siblings_and_spreads_again() -> None:
    made = stamp(layered(12))
    assert made == {"embed": "Linear 32", "layers.0-11.up": "Linear 16", "layers.0-11.down": "Linear 16"}
    assert len(_spread(made)) == 25


def test_a_changed_model_is_noticed_in_words() -> None:
    made = dataclasses.replace(plan(64), made_for=stamp(layered(12)))
    assert changed_modules(made, layered(12)) == ""
    assert "was made for another model: layers.12 is new; plan again" in changed_modules(made, layered(13))
    assert "layers.11 is gone" in changed_modules(made, layered(11))
    wider = layered(12)
    wider = dataclasses.replace(wider, modules=(linear("embed", 16, 4), *wider.modules[1:]))
    assert "embed (Linear 32 then, Linear 64 now) is different" in changed_modules(made, wider)
    assert changed_modules(plan(64), layered(13)) == ""


def test_a_stamped_plan_round_trips_and_old_plans_are_read() -> None:
    made = dataclasses.replace(plan(64), made_for=stamp(layered(2)))
    assert serialization.loads(Plan, serialization.dumps(made)) == made
    data = serialization.to_data(plan(64))
    del data["made_for"]
    assert serialization.from_data(Plan, data) == plan(64)


def test_clusters_are_changed_as_asked() -> None:
    now = cards(2, 4)
    faster, words = what_if(now, "link=10gbit")
    assert faster.link("network").bandwidth_bytes_per_s == 1.25e9  # type: ignore[union-attr]
    assert faster.link("node") == now.link("node")
    assert words == "10 Gbit/s on network links"
    assert what_if(now, "node-link=1Tbit/s")[0].link("node").bandwidth_bytes_per_s == 1.25e11  # type: ignore[union-attr]
    assert what_if(now, "devices=32")[0].device_count == 32
    assert what_if(now, "devices=2")[0].device_count == 2
    assert what_if(now, "memory=80gb")[0].devices["d"].memory_nbytes == 80 * 10**9
    assert what_if(now, "speed=2x")[0].devices["d"].peak_flops_per_s["float32"] == 20e12
    host, _ = what_if(cluster(cpu()), "memory=64GiB")
    assert host.nodes[0].memory_nbytes == 64 * 2**30
    assert what_if(cluster(cpu()), "memory=64gb")[0].nodes[0].memory_nbytes == 64 * 10**9
    uncontended = cluster(cpu(), (link("node"),))
    assert what_if(uncontended, "link=1gbit")[0].link("node").bandwidth_bytes_per_s == 1.25e8  # type: ignore[union-attr]


def test_devices_of_several_kinds_change_in_proportion() -> None:
    now = mixed()  # 4 of a, 2 of b
    twice, words = what_if(now, "devices=12")
    assert [(node.name, node.count) for node in twice.nodes] == [("a", 2), ("b", 2)]
    assert words == "12 devices (2 x 4 of a, 2 x 2 of b)"
    # 100 devices would be 66.7 and 33.3: 17 x 4 + 16 x 2 is nearer to that than 16 x 4 + 18 x 2
    assert [node.count for node in what_if(now, "devices=100")[0].nodes] == [17, 16]
    assert [(node.name, node.count) for node in what_if(now, "devices=2")[0].nodes] == [("b", 1)]
    for count in (6, 8, 10, 96, 480, 16384):
        changed = what_if(now, f"devices={count}")[0]
        assert changed.device_count == count
        assert abs(sum(node.count * 4 for node in changed.nodes if node.name == "a") - count * 4 / 6) <= 4
    with pytest.raises(
        PlanError, match=r"cannot be made up of whole nodes of 'mixed', whose kinds have 4 .a., 2 .b. devices"
    ):
        what_if(now, "devices=7")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("colour=red", "there is no 'colour'"),
        ("link=fast", "'fast' is not understood"),
        ("memory=-3gb", "is not understood"),
        ("devices=30", "give a multiple of 4"),
        ("devices=2.5", "is not a number of devices"),
        ("link=10", "'10' is not understood; write it like link=10gbit"),
        ("memory=80", "write it like memory=80gb"),
        ("memory=0.5b", "--what-if memory=0.5b: '0.5b' is less than a byte"),
        ("link=1e400gbit", "is not a finite number above 0; write it like link=10gbit"),
        ("speed=1e400", "is not a finite number above 0; write it like speed=2x"),
        ("speed=0", "is not a finite number above 0"),
        ("devices=1e12", "is not a number of devices up to"),
    ],
)
def test_what_is_not_understood_is_refused(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        what_if(cards(2, 4), text)


def test_models_without_numbers_are_stamped_too() -> None:
    assert set(stamp(mlp(8, 3))) == {"layers.0-2"}


def test_the_first_line_names_each_axis_with_its_parallelism() -> None:
    asked = PlanRequest(script=plan(batch=64), mesh={"stage": 2, "replicate": 2}, scope="all")
    first, *_ = explain(choose(mlp(layers=4), cards(), asked)).splitlines()
    assert "4 ranks as stage (pipeline parallel) 2 x replicate (data parallel) 2" in first
    assert plan_words(plan(ranks=2), common_names=True) == "replicate (data parallel) 2, 1 microbatch"
    assert plan_words(plan(ranks=2)) == "replicate 2, 1 microbatch"
