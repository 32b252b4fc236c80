"""Plans and the other specs: frozen, keyword-only, and what they derive."""

import dataclasses
import importlib
import pkgutil

import pytest

import tutti.config
from tutti.config.cluster import ClusterSpec, DeviceSpec, LinkSpec, NodeSpec
from tutti.config.model import ModelSpec, ModuleSpec, OpCost
from tutti.config.pipeline_schedule import Action
from tutti.config.plan import BatchPlan, LayoutRule, Plan, SyncPlan
from tutti.config.prediction import DEVICE_PARTS, RankMemory
from tutti.config.run_folder import RunFolder
from tutti.errors import PlanError, SpecError

MODULES = [importlib.import_module(f"tutti.config.{info.name}") for info in pkgutil.iter_modules(tutti.config.__path__)]
CLASSES = sorted(
    {
        value
        for module in MODULES
        for value in vars(module).values()
        if dataclasses.is_dataclass(value) and isinstance(value, type) and value.__module__ == module.__name__
    },
    key=lambda cls: cls.__qualname__,
)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_specs_are_frozen_slotted_and_keyword_only(cls: type) -> None:
    assert cls.__dataclass_params__.frozen
    assert "__slots__" in vars(cls)
    if cls not in (RunFolder, Action):  # a path with names for its parts; what schedules are made of, by the thousand
        assert all(field.kw_only for field in dataclasses.fields(cls))


def test_world_size_is_the_product_of_the_mesh() -> None:
    plan = Plan(batch=BatchPlan(global_batch_size=8), mesh={"replicate": 6})
    assert plan.world_size == plan.data_parallel_degree == 6
    assert Plan(batch=BatchPlan(global_batch_size=8)).world_size == 1


def divided(*shares: float) -> Plan:
    return Plan(batch=BatchPlan(global_batch_size=4), mesh={"split": 2}, split_shares=shares)


def test_equal_split_shares_are_no_weights() -> None:
    assert divided(2.0, 2.0).split_weights == divided().split_weights == ()
    assert divided(2.0, 1.0).split_weights == (2.0, 1.0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: BatchPlan(global_batch_size=0), "global_batch_size = 0; give a number of 1 or more"),
        (lambda: BatchPlan(global_batch_size=4, num_microbatches=0), "num_microbatches = 0"),
        (lambda: BatchPlan(global_batch_size=4, num_microbatches=5), "set num_microbatches to at most 4"),
        (lambda: SyncPlan(bucket_nbytes=-1), "bucket_nbytes = -1"),
        (lambda: LayoutRule(modules=""), "modules is empty; write '*'"),
        (lambda: Plan(batch=BatchPlan(global_batch_size=4), mesh={}), "mesh is empty"),
        (lambda: Plan(batch=BatchPlan(global_batch_size=4), mesh={"replicate": -2}), "mesh.replicate = -2"),
        (lambda: Plan(batch=BatchPlan(global_batch_size=4), shares=(1, 1)), "the mesh has 1 data-parallel ranks"),
        (lambda: Plan(batch=BatchPlan(global_batch_size=4), shares=(float("inf"),)), "every share must be"),
        (lambda: divided(1.0, 2.0, 3.0), "3 entries, but mesh.split = 2"),
        (lambda: divided(1.0, 0.0), "every share must be a number above 0"),
        (lambda: divided(1.0, float("nan")), "every share must be a number above 0"),
    ],
)
def test_a_plan_that_means_nothing_cannot_be_made(build: object, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        build()  # type: ignore[operator]
    assert message in str(caught.value)


def test_a_batch_of_tokens_may_have_more_microbatches_than_any_count_of_samples() -> None:
    assert BatchPlan(global_batch_size=4, unit="tokens", num_microbatches=8).num_microbatches == 8


def device() -> DeviceSpec:
    return DeviceSpec(
        name="d",
        kind="cpu",
        memory_nbytes=1,
        memory_bandwidth_bytes_per_s=1.0,
        peak_flops_per_s={},
        source="test",
        evidence="assumed",
    )


def test_cluster_counts_devices_and_finds_links() -> None:
    link = LinkSpec(tier="node", latency_s=1e-5, bandwidth_bytes_per_s=1e9, source="test", evidence="assumed")
    cluster = ClusterSpec(
        name="two kinds",
        devices={"d": device()},
        nodes=(
            NodeSpec(name="a", device="d", devices_per_node=4, count=3, memory_nbytes=1),
            NodeSpec(name="b", device="d", memory_nbytes=1),
        ),
        links=(link,),
    )
    assert cluster.device_count == 13
    assert cluster.link("node") is link
    assert cluster.link("network") is None


def test_cluster_needs_nodes_whose_devices_it_describes() -> None:
    with pytest.raises(SpecError, match="nodes is empty; a cluster has at least one node"):
        ClusterSpec(name="c", devices={"d": device()}, nodes=(), links=())
    node = NodeSpec(name="n", device="e", memory_nbytes=1)
    with pytest.raises(SpecError, match=r"'e', which is not in devices \(d\); add it there"):
        ClusterSpec(name="c", devices={"d": device()}, nodes=(node,), links=())


def test_a_model_is_the_sum_of_its_modules() -> None:
    def module(name: str, parameters: int, **more: bool) -> ModuleSpec:
        op = OpCost(
            kind="gemm",
            flops_forward=parameters * 2,
            flops_backward=parameters * 4,
            nbytes_forward=0,
            nbytes_backward=0,
        )
        return ModuleSpec(name=name, kind="Linear", parameters=parameters, ops=(op, op), **more)

    model = ModelSpec(name="m", modules=(module("a", 3), module("b", 5)))
    assert (model.parameters, model.flops_forward, model.flops_backward) == (8, 32, 64)
    assert not model.batch_statistics
    assert ModelSpec(name="m", modules=(module("a", 3), module("n", 1, batch_statistics=True))).batch_statistics


def test_memory_total_counts_every_part_once() -> None:
    memory = RankMemory(**{name: 2.0**i for i, name in enumerate(DEVICE_PARTS)}, host=0.5)
    assert memory.total == 2 ** len(DEVICE_PARTS) - 1
