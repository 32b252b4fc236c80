"""Bad inputs end in a sentence or in a correct result: the short form of `make fuzz`, always with the same inputs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from fuzz import changes, laws
from fuzz.subjects import SUBJECTS
from tutti.errors import SpecError

COUNTS = {"specs": 60, "run-folders": 40, "reports": 1, "checkpoints": 30, "environments": 100, "command-lines": 25,
          "prepared-environments": 10, "published-rows": 15}  # fmt: skip
"""Inputs of each kind: what takes the time of two seconds each."""


@pytest.mark.parametrize("name", SUBJECTS)
def test_bad_inputs_break_no_law(name: str, tmp_path: Path) -> None:
    numbers = iter(range(10_000))

    @seed(2)
    @settings(
        max_examples=COUNTS[name],
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def one(data: st.DataObject) -> None:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        SUBJECTS[name](data, folder)

    one()


def test_laws_can_be_broken() -> None:
    def too_much() -> bytearray:
        return bytearray(laws.MOST_MEMORY_NBYTES + 2**30)

    def without_end() -> None:
        while True:
            pass

    def echoes() -> None:
        raise SpecError("0 " * 1000)

    def crashes() -> int:
        return int("x")

    most, laws.MOST_CPU_S = laws.MOST_CPU_S, 0.2
    try:
        for function, law in (
            (too_much, "MemoryError"),
            (without_end, "computes for more"),
            (echoes, "letters"),
            (crashes, "ValueError"),
        ):
            with pytest.raises(laws.BrokenLaw, match=law):
                laws.call(function)
    finally:
        laws.MOST_CPU_S = most
    for said in (laws.Said(0, "NaN", ""), laws.Said(0, "", "\x1b[31m"), laws.Said(3, "", ""), laws.Said(2, "", "")):
        with pytest.raises(laws.BrokenLaw):
            laws._check(said, as_json=True)


def test_changes_reach_every_part() -> None:
    document = {"name": "x", "parts": [{"size": 1}, {"size": 2.5}], "none": None}
    seen: set[str] = set()

    @seed(0)
    @settings(max_examples=120, deadline=None, database=None, phases=(Phase.generate,))
    @given(changes.changed(document))
    def one(changed: object) -> None:
        seen.add(changes.written(changed).decode(errors="replace")[:2000])

    one()
    assert len(seen) > 80
    assert document == {"name": "x", "parts": [{"size": 1}, {"size": 2.5}], "none": None}, "the valid one stays"
    for name, raw in changes.RAW_TEXTS.items():
        assert changes.written([name, float("nan")]) == f"[{raw}, NaN]".encode()


@pytest.mark.parametrize(
    ("words", "environ", "sentence"),
    [
        (("plan", "x" * 300), {}, "is too long"),
        (("predict", "deep.json", "--model", "deep.json", "--json"), {"TMPDIR": "/" + "x" * 200}, "nested too deeply"),
    ],
)
def test_real_command_lines_refuse_in_a_sentence(
    tmp_path: Path, words: tuple[str, ...], environ: dict[str, str], sentence: str
) -> None:
    (tmp_path / "deep.json").write_bytes(changes.written("raw text deep"))
    command = (sys.executable, "-m", "tutti.cli.main", *words)
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **environ}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert sentence in done.stderr
    assert max(map(len, done.stderr.split("\n"))) < laws.MOST_LETTERS
    if "--json" in words:
        assert json.loads(done.stdout)["exit_code"] == 2
