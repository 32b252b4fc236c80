"""The benchmarks' arithmetic: ratios block by block, spreads, and files that never overwrite one another."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders that `benchmarks/run.py` adds for itself."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), str(ROOT / "examples"), *sys.path])


def module(name: str) -> Any:
    return importlib.import_module(name)


def samples(tutti: list[float], ddp: list[float]) -> dict[str, Any]:
    return {
        "step_s": {"tutti": [[t, t, 9.0] for t in tutti], "ddp": [[t, t, 9.0] for t in ddp], "compute only": [[0.5]]},
        "ddp_alone_s": [1.0],
        "all_reduce_s": [0.1, 0.2, 0.9],
        "gradient_nbytes": 1000,
        "sent_nbytes": 1000,
        "launches": 1,
    }


def test_the_ratio_is_the_median_of_ratios_of_neighbouring_blocks() -> None:
    """A machine that slows down half-way changes both loops alike and the ratio not at all."""
    result = module("ddp").summary("mlp", samples(tutti=[1.1, 2.2, 4.4], ddp=[1.0, 2.0, 4.0]))
    assert result["ratio"] == pytest.approx(1.1)
    assert (result["ratio_min"], result["ratio_max"]) == (pytest.approx(1.1), pytest.approx(1.1))
    assert (result["tutti_s"], result["ddp_s"]) == (2.2, 2.0)  # medians, so the slow step of each block is left out


def test_the_floors_of_a_step() -> None:
    result = module("ddp").summary("mlp", samples(tutti=[1.0], ddp=[1.0]))
    assert result["compute_floor_s"] == 0.5
    assert result["bare_all_reduce_s"] == 0.2
    assert result["limit_s"] == 0.5
    assert result["sent_bytes_per_s"] == pytest.approx(5000)


def test_spread() -> None:
    assert module("record").spread([1.0, 2.0, 4.0]) == 1.5


def test_a_second_result_of_a_day_gets_a_number(tmp_path: Path) -> None:
    free_path = module("record").free_path
    assert free_path(tmp_path, "2026-01-01-ddp").name == "2026-01-01-ddp.json"
    (tmp_path / "2026-01-01-ddp.json").touch()
    assert free_path(tmp_path, "2026-01-01-ddp").name == "2026-01-01-ddp-2.json"
    (tmp_path / "2026-01-01-ddp-2.json").touch()
    assert free_path(tmp_path, "2026-01-01-ddp").name == "2026-01-01-ddp-3.json"


def test_samples_are_summarised_and_the_summary_is_not() -> None:
    steps = [0.4, 0.1, 0.2, 0.3, 0.5]
    document = {"summary": {"steps": steps}, "few": [1.0, 2.0], "samples": {"tutti": steps, "blocks": [steps, steps]}}
    found = module("record").summarised(document)
    quartiles = {"n": 5, "min": 0.1, "q1": 0.2, "median": 0.3, "q3": 0.4, "max": 0.5}
    assert found["summary"] == document["summary"]
    assert found["few"] == [1.0, 2.0]
    assert found["samples"]["tutti"] == quartiles
    assert found["samples"]["blocks"]["n"] == 10
    assert "summarised" in found["samples"]["note"]


def test_rows_of_one_form_become_one_and_others_stay() -> None:
    rows = [{"kind": "a", "step_s": float(i)} for i in range(5)]
    named = [{**row, "kind": str(i)} for i, row in enumerate(rows)]
    summarised = module("record").summarised
    assert summarised({"rows": rows})["rows"]["each"] == {
        "kind": "a",
        "step_s": {"n": 5, "min": 0.0, "q1": 1.0, "median": 2.0, "q3": 3.0, "max": 4.0},
    }
    assert summarised({"rows": named})["rows"] == named


def test_a_document_is_written_as_the_json_it_is() -> None:
    document = {"long": {f"key {i}": [i, 2 * i] for i in range(40)}, "empty": [], "text": "a" * 200}
    assert json.loads(module("record").as_text(document)) == document


def test_conditions_say_what_a_number_depends_on() -> None:
    found = module("record").conditions(load_at_start=1.5)
    assert found["load_at_start"] == 1.5
    assert found["cores_granted"] >= 1
    assert set(found["versions"]) >= {"torch", "tutti"}
    assert all(found[name] is not None for name in ("processor", "memory_nbytes", "platform", "python", "load_at_end"))


@pytest.mark.parametrize(
    ("name", "millions"), [("mlp", 10.02), ("cnn", 2.733), ("cnn-batchnorm", 2.735), ("gpt", 6.417)]
)
def test_the_timed_models_have_the_stated_sizes_and_take_their_data(name: str, millions: float) -> None:
    workload = module("workloads").WORKLOADS[name]
    model = workload.model()
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=1e-3)
    inputs, target = workload.data(2)[:]
    assert workload.loss(model(inputs), target).isfinite()


def test_what_compute_hides_is_a_ratio_of_medians_and_lanes_without_a_start_are_left_out() -> None:
    def row(in_progress_s: float, exposed_s: float) -> dict[str, Any]:
        halos = {"carried": "halos", "count": 2, "nbytes": 100, "in_progress_s": in_progress_s}
        scalars = {"carried": "scalars", "count": 1, "nbytes": 8, "in_progress_s": None, "exposed_s": {}}
        halves = {"forward": exposed_s / 2, "backward": exposed_s / 2}
        return {"wall_s": 1.0, "communication": [{**halos, "exposed_s": halves}, scalars]}

    result = module("overlap").summary([row(0.4, 0.1), row(0.4, 0.1), row(9.0, 9.0)])
    assert result == {
        "step_s": 1.0,
        "lanes": {"halos": {"exchanges": 2, "nbytes": 100, "in_progress_s": 0.4, "exposed_s": 0.1, "hidden": 0.75}},
    }
    header, table = module("overlap").rows({"summary": {"space": {"interior while halos travel": result}}})
    assert table[1] == ["  halos", "", "2", "0.1", "400.00", "100.00", "75%"]
    assert all(len(line) == len(header) for line in table)
