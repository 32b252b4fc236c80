"""State in the memory of one device's host: what fits, what it costs, and what it is compared with."""

import dataclasses

import pytest

from tutti.config.cluster import ClusterSpec, DiskSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import BatchPlan, LayoutRule, Plan, ShardingPlan
from tutti.config.vocabulary import Offload
from tutti.cost_model.step_time import predict
from tutti.errors import PlanError
from tutti.planner.objectives import nvme_path
from tutti.planner.plan_explanation import explain
from tutti.planner.plan_request import PlanRequest
from tutti.planner.plan_search import choose
from tutti.profile.architectures import GPT
from tutti.profile.catalog import cluster_from_parts

GIB = 2**30
SEQUENCE = 1024
RECOMPUTED = (LayoutRule(modules="blocks.*", recompute=True),)


def v100(host_gib: int, link: str = "PCIe3-x16") -> ClusterSpec:
    return cluster_from_parts("one V100", "V100-SXM2-32GB", node_memory_nbytes=host_gib * GIB, host_link=link)


def language(layers: int, hidden: int, heads: int) -> ModelSpec:
    model = GPT(layers=layers, hidden=hidden, heads=heads, seq_len=SEQUENCE, vocab=50257).build()
    return dataclasses.replace(model, optimizer="AdamW")


def stated(offload: Offload, samples: int = 16, microbatches: int = 16, precision: str = "float16") -> Plan:
    return Plan(
        batch=BatchPlan(global_batch_size=samples, num_microbatches=microbatches),
        precision=precision,  # type: ignore[arg-type]
        sharding=ShardingPlan(offload=offload),
        layout=RECOMPUTED,
    )


@pytest.mark.long
def test_13_billion_parameters_train_on_one_32_gb_v100_with_enough_host_memory() -> None:
    model, script = language(40, 5120, 40), Plan(batch=BatchPlan(global_batch_size=512), precision="float16")
    choice = choose(model, v100(384), PlanRequest(script=script, scope="all"))
    assert choice.prediction.fits
    assert choice.best.world_size == 1
    assert choice.best.sharding.offload != "none"
    assert choice.prediction.memory.total < 32 * GIB
    parameters = sum(module.parameters for module in model.modules)
    assert choice.prediction.memory.host == pytest.approx(18 * parameters, rel=0.03), "16 bytes, and half copies"
    tokens_per_s = choice.prediction.throughput_per_s * SEQUENCE
    assert 300 < tokens_per_s < 1000, "ZeRO-Offload publishes 40 TFLOP/s for 10 billion parameters, about 500 tokens/s"
    assert "on the host" in explain(choice)
    with pytest.raises(PlanError):
        choose(model, v100(192), PlanRequest(script=script, scope="all"))


def test_memory_and_time_of_what_is_on_the_host_follow_from_bytes() -> None:
    model = language(12, 1024, 16)
    here = predict(model, v100(64), stated("none"))
    optimizer, everything = (predict(model, v100(64), stated(what)) for what in ("optimizer", "parameters"))
    slow = predict(model, v100(64, "PCIe3-x16"), stated("parameters"))
    quick = predict(model, v100(64, "PCIe5-x16"), stated("parameters"))
    assert optimizer.memory.optimizer == everything.memory.optimizer == 0
    assert everything.memory.parameters == 0 < optimizer.memory.parameters < here.memory.parameters
    assert everything.memory.total < optimizer.memory.total < here.memory.total
    assert here.memory.host == 0 < optimizer.memory.host == everything.memory.host
    assert here.phases["optimizer"] < optimizer.phases["optimizer"]
    copied = optimizer.phases["exposed_communication"], everything.phases["exposed_communication"]
    assert 0 < copied[0] < copied[1], "parameters are copied for each pass of each microbatch"
    assert quick.step_time_s.value < slow.step_time_s.value
    assert any("offload: " in note for note in optimizer.notes)


def test_a_plan_that_fits_is_not_offloaded() -> None:
    model, script = language(12, 1024, 16), Plan(batch=BatchPlan(global_batch_size=16), precision="float16")
    assert choose(model, v100(64), PlanRequest(script=script, scope="all")).best.sharding.offload == "none"


def on_disk(cluster: ClusterSpec, gib: int = 1000) -> ClusterSpec:
    disk = DiskSpec(path="/nvme", nbytes=gib * GIB, read_bytes_per_s=3e9, write_bytes_per_s=1.5e9)
    return dataclasses.replace(cluster, nodes=tuple(dataclasses.replace(node, nvme=disk) for node in cluster.nodes))


def test_optimizer_state_goes_to_a_disk_only_where_no_memory_holds_it() -> None:
    model, script = language(24, 1024, 16), Plan(batch=BatchPlan(global_batch_size=4), precision="float16")
    devices = {key: dataclasses.replace(part, memory_nbytes=4 * GIB) for key, part in v100(6).devices.items()}
    tight = dataclasses.replace(v100(6), devices=devices)
    with pytest.raises(PlanError):
        choose(model, tight, PlanRequest(script=script, scope="all"))
    choice = choose(model, on_disk(tight), PlanRequest(script=script, scope="all"))
    assert choice.best.sharding.on_disk
    assert choice.best.sharding.nvme_path == "/nvme"
    assert "On the host's disk (/nvme): optimizer state" in explain(choice)
    with pytest.raises(PlanError):
        choose(model, on_disk(tight, gib=1), PlanRequest(script=script, scope="all"))
    larger = dataclasses.replace(tight.nodes[0], memory_nbytes=64 * GIB)
    choice = choose(
        model, on_disk(dataclasses.replace(tight, nodes=(larger,))), PlanRequest(script=script, scope="all")
    )
    assert choice.best.sharding.offload_device == "cpu", "the host's memory is quicker"


def test_memory_and_time_of_state_on_a_disk_follow_from_bytes() -> None:
    model, cluster = language(12, 1024, 16), on_disk(v100(64))
    host = predict(model, cluster, stated("optimizer"))
    sharding = ShardingPlan(offload="optimizer", offload_device="nvme")
    disk = predict(model, cluster, dataclasses.replace(stated("optimizer"), sharding=sharding))
    state = 8 * sum(module.parameters for module in model.modules)
    assert disk.memory.disk == pytest.approx(state, rel=1e-6)
    assert disk.memory.total == host.memory.total
    largest = 8 * 50257 * 1024
    assert host.memory.host - disk.memory.host == pytest.approx(state - 3 * largest, rel=0.01), "three buffers remain"
    assert disk.phases["optimizer"] == pytest.approx(state * (1 / 3e9 + 1 / 1.5e9), rel=1e-6), "the disk is slower"
    assert any("3.0 GB/s" in note or "/nvme" in note for note in disk.notes)


def test_activations_on_the_host_leave_the_device_and_take_the_link() -> None:
    model = language(12, 1024, 16)
    rules = {offload: (LayoutRule(modules="blocks.*", offload=offload),) for offload in (False, True)}
    batch = BatchPlan(global_batch_size=8)
    plans = {offload: Plan(batch=batch, precision="float16", layout=rule) for offload, rule in rules.items()}
    stays, leaves = (predict(model, v100(64), plans[offload]) for offload in (False, True))
    moved = leaves.memory.host
    assert stays.memory.host == 0 < moved
    # twelve equal blocks, of which two are on the device at once
    assert stays.memory.activations - leaves.memory.activations == pytest.approx(moved * 10 / 12, rel=1e-6)
    assert leaves.step_time_s.value >= stays.step_time_s.value
    node = dataclasses.replace(v100(64).nodes[0], host_link_bytes_per_s=1e9)
    slow = predict(model, dataclasses.replace(v100(64), nodes=(node,)), plans[True])
    copies_s = moved / 1e9
    assert slow.phases["forward"] == pytest.approx(copies_s, rel=1e-6), "forward lasts as long as what leaves"
    assert slow.phases["backward"] == pytest.approx(copies_s, rel=1e-6)


def test_a_disk_is_planned_only_where_all_nodes_name_the_same_folder() -> None:
    disks = [
        DiskSpec(path=path, nbytes=1e12, read_bytes_per_s=1e9, write_bytes_per_s=1e9) for path in ("/nvme", "/scratch")
    ]
    one = v100(64).nodes[0]
    for nvme, expected in [((disks[0], disks[0]), "/nvme"), (disks, ""), ((disks[0], None), "")]:
        nodes = tuple(dataclasses.replace(one, name=f"n{number}", nvme=disk) for number, disk in enumerate(nvme))
        assert nvme_path(dataclasses.replace(v100(64), nodes=nodes)) == expected
