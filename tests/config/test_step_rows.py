"""Short rows of steps are filled in to what they were before, whatever is in them, and are small."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.config import run_folder
from tutti.config.run_folder import last_rows
from tutti.config.step_rows import WHOLE_EVERY, StepRowFiller, StepRowShortener

PHASES = ("data", "forward", "backward", "exposed_communication", "optimizer", "other")


def step_row(step: int, **fields: Any) -> dict[str, Any]:
    """A row as a data-parallel run of two ranks has it, with times of 18 digits."""
    times = {phase: 0.0012345678901234567 * (step % 7 + place) for place, phase in enumerate(PHASES, 1)}
    exchange = {"axes": "replicate", "count": 1, "nbytes": 848}
    gradients = {"carried": "gradients", "in_progress_s": 0.0126891 + step * 1e-7, "exposed_s": {"backward": 4.01e-05}}
    scalars = {"carried": "scalars", "in_progress_s": None, "exposed_s": {"exposed_communication": 4.61e-05}}
    return {
        "kind": "step",
        "step": step,
        "wall_s": sum(times.values()),
        "phases": times,
        "samples_seen": 8 * step,
        "epoch": step // 50,
        "same_batch": None,
        "total_steps": 1000,
        "loss": 1.4604172110557556 + step / 3,
        "learning_rate": 0.001,
        "samples": 8,
        "grad_norm": None,
        "skipped": False,
        "loss_scale": None,
        "sent_nbytes": 848,
        "communication": [exchange | gradients, exchange | scalars],
        "timed": True,
        "time_s": 1.29109 + step,
        **fields,
    }


def through_file(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a reader gets of rows that were shortened and written as JSON."""
    shortener, filler = StepRowShortener(), StepRowFiller()
    return [filler.fill(json.loads(json.dumps(shortener.shorten(row)))) for row in rows]


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the digits that its times keep."""
    return StepRowShortener().shorten(row)


def test_readers_see_the_rows_as_they_were() -> None:
    rows = [step_row(step) for step in range(1, 3 * WHOLE_EVERY)]
    assert through_file(rows) == [rounded(row) for row in rows]
    assert [row["loss"] for row in through_file(rows)] == [row["loss"] for row in rows]
    assert rounded(rows[0])["phases"]["data"] == 0.002469


def test_a_row_has_at_most_300_bytes_on_average() -> None:
    shortener = StepRowShortener()
    sizes = [len(json.dumps(shortener.shorten(step_row(step)), separators=(",", ":"))) for step in range(1, 1001)]
    assert sum(sizes) / len(sizes) <= 300


values = st.none() | st.booleans() | st.integers(0, 3) | st.floats(0, 2, allow_nan=False) | st.text(max_size=3)
seconds = st.floats(0, 10, allow_nan=False)
exchanges = st.lists(
    st.fixed_dictionaries(
        {
            "axes": st.sampled_from(("replicate", "shard")),
            "carried": st.sampled_from(("gradients", "scalars")),
            "count": st.integers(1, 2),
            "nbytes": st.integers(0, 2),
            "in_progress_s": st.none() | seconds,
            "exposed_s": st.dictionaries(st.sampled_from((*PHASES, "unknown")), seconds, max_size=3),
        }
    ),
    max_size=3,
)
changes = st.fixed_dictionaries(
    {},
    optional={
        "communication": exchanges,
        "phases": st.dictionaries(st.sampled_from(PHASES), seconds),
        "samples": st.integers(1, 2),
        "samples_seen": st.integers(0, 40),
        "tokens": values,
        "skipped": values,
        "gain": values,
        "loss": st.none() | seconds,
    },
)


@given(st.lists(changes, max_size=6))
@settings(deadline=None, max_examples=300)
def test_any_rows_are_filled_in_as_they_were(drawn: list[dict[str, Any]]) -> None:
    rows = [step_row(step) | change for step, change in enumerate(drawn, 1)]
    assert through_file(rows) == [rounded(row) for row in rows]


def test_a_missing_whole_row_leaves_what_was_written() -> None:
    shortener, filler = StepRowShortener(), StepRowFiller()
    shortener.shorten(step_row(1))
    filled = filler.fill(shortener.shorten(step_row(2)))
    assert filled["loss"] == step_row(2)["loss"]
    assert "samples" not in filled
    assert filled["phases"] == {}


json_values = st.recursive(
    values | st.integers(-(10**20), 10**20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.fixed_dictionaries({"as": json_values, "phases": json_values, "communication": json_values}))
@settings(deadline=None, max_examples=200)
def test_damaged_rows_are_read_without_an_error(row: dict[str, Any]) -> None:
    filler = StepRowFiller()
    filler.fill({"kind": "step", "step": 1, "phases": row["phases"], "communication": row["communication"]})
    filler.fill({"kind": "step", "step": 2, **row})
    filler.fill({"kind": "step", "step": 2, **row, "as": 1})


def test_the_last_rows_of_a_file_are_read_wholly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "metrics.jsonl"
    assert last_rows(file) == []
    lines = [b'{"step": 1}\n', b"[" * 100_000 + b"\n", b'{"step": 2}\n', b"[3]\n", b'{"step": 4']
    file.write_bytes(b"".join(lines))
    assert last_rows(file) == [{"step": 1}, {"step": 2}]
    assert last_rows(file, len(lines[0])) == [{"step": 2}]
    assert last_rows(file, 0, len(lines[0])) == [{"step": 1}]
    monkeypatch.setattr(run_folder, "TAIL_NBYTES", 30)
    assert last_rows(file) == [{"step": 2}]
