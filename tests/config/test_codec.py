"""The codec: every spec survives JSON, equal specs have equal digests, and every refusal names place and remedy."""

import dataclasses
import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from config.strategies import clusters, of_version, plans
from tutti.config import serialization
from tutti.config.cluster import ClusterSpec, DeviceSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import BatchPlan, Plan
from tutti.config.prediction import Estimate, Prediction
from tutti.config.run_folder import RunHeader
from tutti.errors import PlanError, SpecError, TuttiError

quick = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))

SPECS = {
    "plan": plans(),
    "cluster": clusters(),
    "model": of_version(ModelSpec),
    "prediction": of_version(Prediction),
    "run header": of_version(RunHeader),
}
BATCH = {"global_batch_size": 8}


# Round trips


@pytest.mark.parametrize("kind", SPECS)
def test_every_spec_survives_json(kind: str) -> None:
    @quick
    @given(SPECS[kind])
    def check(value: Any) -> None:
        text = serialization.dumps(value)
        again = serialization.loads(type(value), text)
        assert again == value
        assert type(again) is type(value)
        assert serialization.dumps(again) == text
        assert serialization.digest(again) == serialization.digest(value)

    check()


@pytest.mark.parametrize("kind", SPECS)
def test_the_plain_form_is_plain(kind: str) -> None:
    @quick
    @given(SPECS[kind])
    def check(value: Any) -> None:
        data = serialization.to_data(value)
        assert json.loads(json.dumps(data, allow_nan=False)) == data
        assert set(data) == {field.name for field in dataclasses.fields(value)}

    check()


@quick
@given(plans(), plans())
def test_digests_are_equal_exactly_for_equal_plans(one: Plan, other: Plan) -> None:
    assert (serialization.digest(one) == serialization.digest(other)) == (one == other)


def test_the_order_of_keys_in_a_file_does_not_matter() -> None:
    one = serialization.from_data(Plan, {"batch": BATCH, "precision": "bfloat16"})
    other = serialization.from_data(Plan, {"precision": "bfloat16", "batch": BATCH})
    assert serialization.digest(one) == serialization.digest(other)


def test_the_order_of_entries_in_a_spec_does_not_matter() -> None:
    one, other = (
        DeviceSpec(
            name="d",
            kind="cpu",
            memory_nbytes=1,
            memory_bandwidth_bytes_per_s=1.0,
            peak_flops_per_s=rates,
            source="test",
            evidence="assumed",
        )
        for rates in ({"float32": 1.0, "bfloat16": 4.0}, {"bfloat16": 4.0, "float32": 1.0})
    )
    assert one == other
    assert serialization.digest(one) == serialization.digest(other)


def test_what_a_file_leaves_out_has_its_default() -> None:
    assert serialization.from_data(Plan, {"batch": BATCH}) == Plan(batch=BatchPlan(global_batch_size=8))


def test_whole_numbers_stand_for_real_ones_but_not_the_reverse() -> None:
    assert serialization.from_data(Estimate, {"value": 1, "low": 0, "high": 2}) == Estimate(
        value=1.0, low=0.0, high=2.0
    )
    with pytest.raises(SpecError, match=r"batch\.global_batch_size = 8\.0"):
        serialization.from_data(Plan, {"batch": {"global_batch_size": 8.0}})


def test_a_file_is_written_with_its_parents_and_read_back(tmp_path: Path) -> None:
    plan = Plan(batch=BatchPlan(global_batch_size=12), mesh={"replicate": 3}, shares=(3, 1, 0))
    path = serialization.save(plan, tmp_path / "a" / "b" / "plan.json")
    assert serialization.load(Plan, path) == plan
    assert path.read_text(encoding="utf-8").endswith("}\n")


def test_readers_never_see_half_a_file(tmp_path: Path) -> None:
    plan, file = Plan(batch=BatchPlan(global_batch_size=12)), tmp_path / "plan.json"
    link = tmp_path / "link.json"
    link.symlink_to(serialization.save(plan, file))
    with ThreadPoolExecutor(1) as other:
        saves = other.submit(_save_often, plan, link)
        while not saves.done():
            assert serialization.load(Plan, file) == plan
        saves.result()
    assert link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [link, file]


def _save_often(plan: Plan, file: Path) -> None:
    for _ in range(2000):
        serialization.save(plan, file)


def test_text_beyond_ascii_survives(tmp_path: Path) -> None:
    device = DeviceSpec(
        name="ringförmig µ-batch 🙂",
        kind="cpu",
        memory_nbytes=1,
        memory_bandwidth_bytes_per_s=1.0,
        peak_flops_per_s={},
        source='a "quoted" \\ path\nline',
        evidence="assumed",
    )
    assert serialization.load(DeviceSpec, serialization.save(device, tmp_path / "d.json")) == device


# Refusals: each names the source, the path of the field, and the remedy


@pytest.mark.parametrize(
    ("data", "path", "remedy"),
    [
        # fields nobody knows
        ({"batch": BATCH, "mess": {}}, "unknown field mess", "did you mean 'mesh'?"),
        ({"batch": {**BATCH, "num_microbatch": 2}}, "unknown field batch.num_microbatch", "'num_microbatches'?"),
        ({"batch": BATCH, "num_microbatches": 2}, "unknown field num_microbatches", "'batch.num_microbatches'?"),
        ({"batch": BATCH, "layout": [{"module": "x"}]}, "unknown field layout.0.module", "did you mean 'modules'?"),
        ({"batch": BATCH, "sync": {"bucket_bytes": 1}}, "unknown field sync.bucket_bytes", "'bucket_nbytes'?"),
        ({"batch": BATCH, "qqqq": 1}, "unknown field qqqq", "remove it"),
        # fields that are not there
        ({}, "field batch is missing", "add it"),
        ({"batch": {}}, "field batch.global_batch_size is missing", "add it"),
        # values of another type or vocabulary
        ({"batch": {"global_batch_size": "8"}}, "batch.global_batch_size = '8'", "correct this field"),
        ({"batch": {"global_batch_size": True}}, "batch.global_batch_size = True", "correct this field"),
        ({"batch": BATCH, "precision": "fp16"}, "precision = 'fp16'", "'full', 'tf32', 'bfloat16' or 'float16'"),
        ({"batch": {**BATCH, "unit": "words"}}, "batch.unit = 'words'", "'samples' or 'tokens'"),
        ({"batch": BATCH, "layout": {"*": "replicate"}}, "layout = ", "correct this field"),
        ({"batch": BATCH, "layout": [{"placement": "halve"}]}, "layout.0.placement = 'halve'", "'replicate'"),
        ({"batch": BATCH, "shares": [1, "x"]}, "shares.1 = 'x'", "correct this field"),
        ({"batch": BATCH, "mesh": {"tensor": 2}}, "mesh.tensor is not allowed", "rename or remove this key"),
        ({"batch": BATCH, "mesh": {"replicate": "2"}}, "mesh.replicate = '2'", "correct this field"),
        ({"batch": BATCH, "sync": None}, "sync = None", "correct this field"),
        ({"batch": BATCH, "shares": [math.nan]}, "shares.0 = nan", "correct this field"),
        ([], "the document = []", "correct this field"),
        (None, "the document = None", "correct this field"),
        # other versions
        ({"batch": BATCH, "version": 2, "new_field": 1}, "version = 2", "make the file again with this tutti"),
        ({"batch": BATCH, "version": "1"}, "version = '1'", "make the file again with this tutti"),
    ],
)
def test_a_wrong_form_is_refused_with_path_and_remedy(data: Any, path: str, remedy: str) -> None:
    with pytest.raises(SpecError) as caught:
        serialization.from_data(Plan, data, source="my.json")
    message = str(caught.value)
    assert message.startswith(f"my.json: {path}"), message
    assert remedy in message
    assert "\n" not in message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("data", "path", "remedy"),
    [
        ({"batch": {"global_batch_size": 0}}, "batch: global_batch_size = 0", "give a number of 1 or more"),
        ({"batch": {**BATCH, "num_microbatches": 9}}, "batch: num_microbatches = 9 exceeds", "to at most 8"),
        ({"batch": BATCH, "layout": [{}, {"modules": ""}]}, "layout.1: modules is empty", "write '*'"),
        ({"batch": BATCH, "sync": {"bucket_nbytes": 0}}, "sync: bucket_nbytes = 0", "1 or more"),
        ({"batch": BATCH, "mesh": {"replicate": 0}}, "mesh.replicate = 0", "1 or more"),
        ({"batch": BATCH, "mesh": {}}, "mesh is empty", '{"replicate": 1}'),
        ({"batch": BATCH, "mesh": {"replicate": 3}, "shares": [1]}, "shares", "or none for equal shares"),
        ({"batch": BATCH, "mesh": {"replicate": 2}, "shares": [0, 0]}, "shares are all 0", "above 0"),
        ({"batch": BATCH, "mesh": {"replicate": 2}, "shares": [2, -1]}, "shares = [2.0, -1.0]", "0 or more"),
    ],
)
def test_what_a_plan_itself_refuses_is_told_with_source_and_path(data: Any, path: str, remedy: str) -> None:
    with pytest.raises(PlanError) as caught:
        serialization.from_data(Plan, data, source="my.json")
    message = str(caught.value)
    assert message.startswith(f"my.json: {path}"), message
    assert remedy in message


def test_a_field_deep_in_a_dict_is_named_by_its_keys() -> None:
    data = {"name": "c", "devices": {"a100": {"name": 1}}, "nodes": [], "links": []}
    with pytest.raises(SpecError, match=r"devices\.a100\.name = 1"):
        serialization.from_data(ClusterSpec, data)


@pytest.mark.parametrize("text", ["", "{", "{'batch': 1}", '{"batch": }', "batch: 8"])
def test_what_is_not_json_is_told_with_line_and_column(text: str) -> None:
    with pytest.raises(SpecError, match=r"^plan\.json is not JSON: .* at line 1, column \d+; repair the file"):
        serialization.loads(Plan, text, source="plan.json")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"none\.json does not exist; name an existing Plan file"):
        serialization.load(Plan, tmp_path / "none.json")
    with pytest.raises(SpecError, match=r"cannot be read .* name a readable Plan file"):
        serialization.load(Plan, tmp_path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match=r"binary\.json cannot be read .* name a readable Plan file"):
        serialization.load(Plan, tmp_path / "binary.json")
    (tmp_path / "wrong.json").write_text('{"batch": 3}', encoding="utf-8")
    with pytest.raises(SpecError, match=r"wrong\.json: batch = 3"):
        serialization.load(Plan, tmp_path / "wrong.json")


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_are_neither_written_nor_read(number: float, tmp_path: Path) -> None:
    value = Estimate(value=1.0, low=0.0, high=number)
    with pytest.raises(SpecError, match="Estimate holds a number that is not finite"):
        serialization.save(value, tmp_path / "e.json")
    assert not (tmp_path / "e.json").exists()
    with pytest.raises(SpecError, match=r"high = .* finite"):
        serialization.loads(Estimate, json.dumps({"value": 1, "low": 0, "high": number}))


@quick
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_no_json_document_does_worse_than_a_spec_error(data: Any) -> None:
    for cls in (Plan, ClusterSpec, ModelSpec, Prediction, RunHeader):
        with pytest.raises(TuttiError):
            serialization.from_data(cls, data)
