"""docs/claims.md and the README say what their result files say, and what they name is there."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "claims.md"
RESULTS_LIMIT_NBYTES = 2_000_000
RESULTS = ROOT / "benchmarks" / "results"
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
    value = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))
    assert value["quick"] is False
    for key in keys:
        value = value[key]
    return value


ROWS = measured_rows(PAGE.read_text(encoding="utf-8"))


def test_the_page_has_its_tables() -> None:
    assert len(ROWS) >= 80


def test_results_are_small_and_each_is_cited() -> None:
    """Every file in benchmarks/results is named by a document or a source file; together they stay under 2 MB."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    cited = set(re.findall(r"20\d\d-\d\d-\d\d-[a-z_]+(?:-\d+)?", text))
    files = list(RESULTS.glob("*.json"))
    assert {path.stem for path in files} == cited
    assert sum(path.stat().st_size for path in files) < RESULTS_LIMIT_NBYTES


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
        if len(cells) == 4 and (aim := re.fullmatch(r"(≥ )?([\d.]+)", cells[2])):
            figure, limit = float(cells[1].split(" ")[0]), float(aim[2])
            assert (figure < limit if aim[1] else figure > limit) is missed, line


MODELS = {"mlp": "MLP", "cnn": "CNN", "gpt": "GPT"}
RATES = {"unlimited": "unlimited", "1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}


def newest_cells() -> dict[str, tuple[str, dict[str, Any]]]:
    """By cell of `pays`, as the page names it: the newest file that has it, and its verdict."""

    def age(path: Path) -> tuple[str, int]:
        date, _, number = path.stem.partition("-pays")
        return date, int(number.lstrip("-") or 1)

    found = {}
    for path in sorted(RESULTS.glob("*-pays*.json"), key=age):
        for cell, verdict in json.loads(path.read_text(encoding="utf-8"))["summary"]["verdicts"].items():
            model, hosts, rate = re.fullmatch(r"(\w+)-(\d)@(\w+)", cell).groups()  # type: ignore[union-attr]
            found[f"{MODELS[model]}, {hosts} hosts, {RATES[rate]}"] = (path.stem, verdict)
    return found


def in_words(value: float, aim: float | None) -> str:
    """A ratio as a cell's row has it: bold where it misses its aim."""
    return f"**{value:.2f}**" if aim is not None and round(value, 2) > aim else f"{value:.2f}"


def test_cells_have_the_figures_of_their_newest_file_and_are_bold_where_they_miss() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [[part.strip() for part in line.strip("| ").split("|")] for line in lines if line.startswith("| ")]
    said = {cells[0]: tuple(cells[2:]) for cells in rows if len(cells) == 6}
    for cell, (file, verdict) in newest_cells().items():
        best = verdict["best_of_others"].removeprefix("ddp ")
        assert said.get(cell) == (
            in_words(verdict["of_floor"], verdict.get("aim")),
            f"{in_words(verdict['of_best_of_others'], 1.0)} {best}",
            in_words(verdict["of_ddp"], 1.0),
            f"`{file}`",
        ), cell


def test_the_readme_has_the_newest_figures() -> None:
    """Of an MLP between two hosts at 1 Gbit/s, and of a GPT at 100 Mbit/s."""
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    found = re.search(r"in ([\d.]+) of DDP's time, and in ([\d.]+) of the time of the best other method \((\w+)", text)
    assert found is not None
    mlp, gpt = (newest_cells()[cell][1] for cell in ("MLP, 2 hosts, 1 Gbit/s", "GPT, 2 hosts, 100 Mbit/s"))
    said = (f"{mlp['of_ddp']:.2f}", f"{mlp['of_best_of_others']:.2f}", mlp["best_of_others"])
    assert (found[1], found[2], found[3].lower()) == said
    assert f"A GPT at 100 Mbit/s took {gpt['of_floor']:.2f} times as long as training that sends nothing" in text


def test_files_and_tests_that_are_named_are_there() -> None:
    text = PAGE.read_text(encoding="utf-8")
    named = re.findall(r"`((?:tests|docs|benchmarks)/[\w./-]+?\.(?:py|json))", text)
    assert len(named) > 20
    assert not [path for path in named if not (ROOT / path).exists()]


def test_the_matrix_has_the_cells_that_are_claimed() -> None:
    matrix = json.loads((ROOT / "docs" / "matrix.json").read_text(encoding="utf-8"))
    counts, cells = matrix["counts"], matrix["cells"]
    families, plans = (len({cell[name] for cell in cells}) for name in ("family", "plan"))
    for page in (PAGE, ROOT / "README.md"):
        text = " ".join(page.read_text(encoding="utf-8").split())
        assert f"{families} model families under {plans} plans" in text
        assert f"{counts['exact']} cells exact, {counts['refused']} refused" in text
    assert set(counts) == {"exact", "refused"}
