"""Which plans and models torch's fully_shard runs, how a plan says so, and what becomes a unit: one process."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from parallel import shard_subjects as subjects
from tutti.comm.world import World
from tutti.config.compression import parse_compression
from tutti.config.plan import BatchPlan, Plan, ShardingPlan, SyncPlan
from tutti.config.refusals import check_plan
from tutti.config.shard_engine import describe_engine, with_sharding
from tutti.config.sync_notation import parse_sync
from tutti.errors import PlanError, ScriptError
from tutti.parallel.layout import Layout
from tutti.parallel.mesh import Mesh
from tutti.parallel.sharding import fsdp2_units
from tutti.parallel.sharding.engine_choice import with_engine
from tutti.parallel.sharding.fsdp2_comm import MOST_DEFERRED, RankAgreement
from tutti.parallel.sharding.fsdp2_units import plan_units


def plan(engine: str = "fsdp2", level: int = 3, **fields: Any) -> Plan:
    sharding = ShardingPlan(level=level, engine=engine)  # type: ignore[arg-type]
    return Plan(batch=BatchPlan(global_batch_size=8), **{"mesh": {"shard": 2}, "sharding": sharding, **fields})


REFUSED = {
    "fsdp2-with-axis": plan(mesh={"shard": 2, "split": 2}),
    "fsdp2-at-level-1": plan(level=1),
    "fsdp2-with-codec": plan(sync=SyncPlan(compress=parse_compression("bfloat16"))),
    "fsdp2-with-mode": plan(sync=parse_sync("local:8")),
}


@pytest.mark.parametrize("code", REFUSED)
def test_what_fsdp2_cannot_run_is_refused_if_it_is_asked_for(code: str) -> None:
    refused = REFUSED[code]
    with pytest.raises(PlanError, match="engine = fsdp2 with") as error:
        check_plan(refused)
    assert error.value.code == code
    unstated = replace(refused, sharding=replace(refused.sharding, engine="auto"))
    assert with_engine(unstated, nn.Linear(2, 2), gpus()).sharding == replace(refused.sharding, engine="tutti")


def test_without_a_shard_axis_the_engine_says_nothing() -> None:
    check_plan(plan(mesh={"replicate": 2}, level=1))


def world(backend: str, device: str) -> World:
    return World(
        rank=0,
        world_size=2,
        local_rank=0,
        local_world_size=2,
        host="host",
        device=torch.device(device),
        backend=backend,
        launcher="tutti",
        rendezvous_s=0.0,
    )


def gpus() -> World:
    return world("nccl", "cuda")


def test_the_engine_is_chosen_by_the_devices_and_the_model() -> None:
    model = subjects.Convolutions()
    chosen = [with_engine(plan("auto"), each, gpus()).sharding.engine for each in (subjects.Tied(), model)]
    assert chosen == ["fsdp2", "tutti"]  # the second has a weight in channels_last
    assert with_engine(plan("auto"), subjects.Tied(), world("gloo", "cpu")).sharding.engine == "tutti"
    assert with_engine(plan("tutti"), subjects.Tied(), gpus()).sharding.engine == "tutti"
    assert with_engine(plan(), subjects.Tied(), world("gloo", "cpu")).sharding.engine == "fsdp2"
    with pytest.raises(PlanError, match=r"'body\.0\.0\.weight' is not contiguous"):
        with_engine(plan(), model, gpus())
    with pytest.raises(PlanError, match="exchange by gloo, and FSDP2 needs NCCL there"):
        with_engine(plan(), subjects.Tied(), world("gloo", "cuda"))


def test_the_option_states_the_sharding() -> None:
    stated = with_sharding(plan("auto"), "level=2, engine=fsdp2,offload=parameters").sharding
    assert stated == ShardingPlan(level=2, engine="fsdp2", offload="parameters")
    assert with_sharding(plan(), None) == plan()
    files = with_sharding(plan("auto"), "offload=nvme,nvme_path=/local_nvme").sharding
    assert files == ShardingPlan(offload="optimizer", offload_device="nvme", nvme_path="/local_nvme")


@pytest.mark.parametrize("text", ["offload=none", "offload_device=cpu", "offload=none,offload_device=cpu"])
def test_the_option_takes_state_off_a_plan_s_disk(text: str) -> None:
    sharding = ShardingPlan(offload="optimizer", offload_device="nvme", nvme_path="/nvme")
    on_disk = replace(plan("auto"), sharding=sharding)
    stated = with_sharding(on_disk, text).sharding
    assert (stated.on_disk, stated.nvme_path) == (False, "")
    assert stated.offload == ("none" if "none" in text else "optimizer")


def test_a_level_or_an_engine_needs_a_shard_axis() -> None:
    whole = Plan(batch=BatchPlan(global_batch_size=4), mesh={"split": 2})
    for text in ("level=2", "engine=fsdp2", "level=3,offload=optimizer"):
        with pytest.raises(PlanError, match="with mesh split=2, which has no shard axis"):
            with_sharding(whole, text)
    assert with_sharding(whole, "offload=none") == whole


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("engine=fsdp", "engine = 'fsdp'; give auto, tutti, fsdp2"),
        ("level=4", "level = '4'; give 1, 2, 3"),
        ("fsdp2", "'fsdp2' is not a setting; give level, offload, engine"),
        ("level=2,level=3", "level appears twice"),
        ("offload_device=disk", "offload_device = 'disk'; give cpu, nvme"),
        ("nvme_path=", "nvme_path = ''; give a folder"),
    ],
)
def test_a_wrong_option_is_refused(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        with_sharding(plan(), text)


def test_the_engine_in_words() -> None:
    assert describe_engine(plan("auto"), gpus=False) == "tutti"
    assert describe_engine(plan("auto")) == "fsdp2 (torch's fully_shard) where ranks have GPUs with NCCL, else tutti"
    assert describe_engine(plan("auto", mesh={"shard": 2, "split": 2})) == "tutti"
    assert describe_engine(plan("fsdp2")) == "fsdp2 (torch's fully_shard)"
    assert describe_engine(plan(level=1)) == ""


def units_of(model: nn.Module, precision: Any = "full") -> dict[str, list[str]]:
    layout = Layout.of(model, Mesh({"shard": 2}, 0))
    return {unit.name + "*" * unit.lowered: list(unit.members) for unit in plan_units(model, layout, precision)}


def test_blocks_that_share_a_weight_belong_to_the_root() -> None:
    units = units_of(subjects.Repeating())
    assert list(units) == ["blocks.2", "head.0", "head.2", ""]
    assert {"blocks.0.norm.weight", "blocks.0.wide.weight", "blocks.1.wide.weight", "embed.weight"} <= set(units[""])


def test_large_layers_are_gathered_in_lower_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that autocast casts anyway; norms, embeddings and tied weights keep their own format."""
    monkeypatch.setattr(fsdp2_units, "LEAST_LOWERED_NUMEL", 100)
    units = units_of(subjects.Tied(), "bfloat16")
    layers = [f"blocks.{block}.{layer}*" for block in range(3) for layer in ("wide", "narrow")]
    assert [name for name in units if name.endswith("*")] == layers
    assert units["blocks.1"] == ["blocks.1.norm.weight", "blocks.1.norm.bias"]
    assert "embed.weight" in units[""]
    assert units_of(subjects.Tied(), "full").keys() == {"blocks.0", "blocks.1", "blocks.2", ""}


class Arrival:
    """An event on a device."""

    def __init__(self, ready: bool) -> None:
        self.ready, self.waited = ready, False

    def query(self) -> bool:
        return self.ready

    def synchronize(self) -> None:
        self.waited = not self.ready


def test_what_ranks_said_is_read_when_it_has_arrived_or_is_old() -> None:
    agreement: Any = object.__new__(RankAgreement)
    events = [Arrival(False) for _ in range(MOST_DEFERRED + 1)]
    agreement._deferred = [(torch.tensor([1, n, 5, -5]), event) for n, event in enumerate(events)]
    assert [*agreement.deferred()] == [[1, 0]]
    assert events[0].waited
    assert [*agreement.deferred()] == []
    events[1].ready = True
    assert [*agreement.deferred()] == [[1, 1]]
    agreement._deferred = [(torch.tensor([1, 5, -4]), Arrival(True))]
    with pytest.raises(ScriptError, match="in an earlier step, ranks ran different blocks"):
        list(agreement.deferred())
