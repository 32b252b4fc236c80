"""docs/claims.md says what its result files say, and what it names is there."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "claims.md"
SCALES = {"%": 100.0, "ms": 1e3, "MB": 1e-6, "MB/s": 1e-6, "": 1.0}

Row = tuple[str, str, str, list[str]]


def measured_rows(text: str) -> list[Row]:
    """(claim, figure, result file, path of keys) of each table row that names an entry of a file."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        for cell in cells[2:]:
            if match := re.fullmatch(r"`([\w.-]+)`: (.+)", cell):
                found.append((cells[0], cells[1], match[1], [key.strip() for key in match[2].split(">")]))
    return found


def agrees(figure: str, value: float) -> bool:
    """Whether a figure, "0.743", "99 %" or "116.3 MB/s", is `value` rounded to as many decimals."""
    number, _, unit = figure.partition(" ")
    decimals = len(number.partition(".")[2])
    return f"{value * SCALES[unit]:.{decimals}f}" == number


def entry(file: str, keys: list[str]) -> Any:
    value = json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text(encoding="utf-8"))
    assert value["quick"] is False
    for key in keys:
        value = value[key]
    return value


ROWS = measured_rows(PAGE.read_text(encoding="utf-8"))


def test_the_page_has_its_tables() -> None:
    assert len(ROWS) >= 20


@pytest.mark.parametrize("row", ROWS, ids=[f"{file}:{keys[-2]}" for _, _, file, keys in ROWS])
def test_a_figure_is_that_of_its_file(row: Row) -> None:
    claim, figure, file, keys = row
    value = entry(file, keys)
    assert agrees(figure, value), f"{claim}: {figure} on the page, {value} in {file}"


@pytest.mark.parametrize(
    ("figure", "value", "same"),
    [
        ("0.743", 0.7427, True),
        ("0.743", 0.7437, False),
        ("99 %", 0.993, True),
        ("98 %", 0.993, False),
        ("116.3 MB/s", 116310131.6, True),
        ("109 ms", 0.1094, True),
    ],
)
def test_figures_are_compared_in_their_units(figure: str, value: float, same: bool) -> None:
    assert agrees(figure, value) is same


def test_met_and_missed_claims_stand_where_they_belong() -> None:
    """Where a row has an aim, at most or (≥) at least, all before "Not met" are within it and all after beyond."""
    missed = False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        missed = missed or line == "## Not met"
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if len(cells) == 5 and (aim := re.fullmatch(r"(≥ )?([\d.]+)", cells[2])):
            figure, limit = float(cells[1].split(" ")[0]), float(aim[2])
            assert (figure < limit if aim[1] else figure > limit) is missed, line


def test_files_and_tests_that_are_named_are_there() -> None:
    text = PAGE.read_text(encoding="utf-8")
    named = re.findall(r"`((?:tests|docs|benchmarks)/[\w./-]+?\.(?:py|json))", text)
    assert len(named) > 20
    assert not [path for path in named if not (ROOT / path).exists()]


def test_the_matrix_has_the_cells_that_are_claimed() -> None:
    counts = json.loads((ROOT / "docs" / "matrix.json").read_text(encoding="utf-8"))["counts"]
    claim = f"{counts['exact']} cells exact, {counts['refused']} refused"
    assert claim in PAGE.read_text(encoding="utf-8")
    assert claim in (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(counts) == {"exact", "refused"}
