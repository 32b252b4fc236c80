"""A mesh may be written with the field's names of its axes, on the command line and in plan files."""

import json
from pathlib import Path

import pytest

from tutti.config import serialization
from tutti.config.mesh_axes import AXIS_ALIASES, describe_axis, format_mesh, parse_mesh
from tutti.config.plan import BatchPlan, Plan
from tutti.errors import PlanError


def plan_file(folder: Path, mesh: dict[str, object]) -> Path:
    data = serialization.to_data(Plan(batch=BatchPlan(global_batch_size=8)))
    file = folder / "plan.json"
    file.write_text(json.dumps(data | {"mesh": mesh}))
    return file


@pytest.mark.parametrize(("alias", "axis"), AXIS_ALIASES.items())
def test_each_alias_means_its_axis(alias: str, axis: str, tmp_path: Path) -> None:
    assert parse_mesh(f"{alias}=2") == {axis: 2}
    assert serialization.load(Plan, plan_file(tmp_path, {alias: 2})).mesh == {axis: 2}


def test_a_mesh_of_aliases_keeps_its_order(tmp_path: Path) -> None:
    expected = {"stage": 2, "replicate": 3, "split": 4}
    assert list(parse_mesh("pp=2,dp=3,tp=4").items()) == list(expected.items())
    loaded = serialization.load(Plan, plan_file(tmp_path, {"pp": 2, "dp": 3, "tp": 4}))
    assert list(loaded.mesh.items()) == list(expected.items())


def test_a_plan_is_written_with_the_axes_own_names(tmp_path: Path) -> None:
    loaded = serialization.load(Plan, plan_file(tmp_path, {"dp": 2, "tp": 2}))
    assert serialization.to_data(loaded)["mesh"] == {"replicate": 2, "split": 2}
    assert format_mesh(loaded.mesh) == "replicate=2,split=2"


@pytest.mark.parametrize("names", [("dp", "replicate"), ("fsdp", "zero"), ("shard", "zero"), ("tp", "split")])
def test_an_axis_under_two_names_is_refused(names: tuple[str, str], tmp_path: Path) -> None:
    first, second = names
    words = f"appears twice, as {first} and as {second}; name each axis once"
    with pytest.raises(PlanError, match=words):
        parse_mesh(f"{first}=2,{second}=2")
    with pytest.raises(PlanError, match=words):
        serialization.load(Plan, plan_file(tmp_path, {first: 2, second: 2}))


def test_an_axis_given_twice_under_one_name_is_refused() -> None:
    with pytest.raises(PlanError, match="tp=2,tp=2': split appears twice; name each axis once"):
        parse_mesh("tp=2,tp=2")


def test_an_unknown_axis_is_refused_with_the_nearest() -> None:
    with pytest.raises(PlanError, match="there is no axis 'replicat'; did you mean 'replicate'"):
        parse_mesh("replicat=2")


def test_a_degree_below_one_in_a_plan_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="mesh"):
        serialization.load(Plan, plan_file(tmp_path, {"tp": 0}))


def test_a_reader_sees_both_names() -> None:
    names = [describe_axis(axis) for axis in parse_mesh("dp=2,tp=4")]
    assert names == ["replicate (data parallel)", "split (tensor parallel)"]
