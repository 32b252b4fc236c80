"""`tutti validate` and `tutti calibrate` as a user calls them."""

import csv
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tutti.cli.validate import command
from tutti.errors import DataError
from tutti.validation.published_rows import load_rows
from tutti.validation.validation import CalibrationShare, validate


def test_families_are_scored_apart_and_nothing_is_dropped() -> None:
    rows = [row for row in load_rows(None) if row.family in ("sc21t1", "meg2020", "korthikmem", "titan")]
    result = validate(rows, {"meg2020": CalibrationShare(count=3)})
    assert [family.family for family in result.families] == ["sc21t1", "meg2020", "korthikmem", "titan"]
    for family in result.families:
        parts = [found for score in family.scores for found in (score.calibration, score.test) if found]
        assert sum(part.rows for part in parts) + sum(family.uncosted.values()) == family.rows
    meg = result.families[1]
    assert sum(score.calibration.rows for score in meg.scores if score.calibration) == 3
    assert {row.row_id for row in result.scored}.isdisjoint({f"korthikmem-{index:04}" for index in range(13)})


def test_which_rows_calibrate_does_not_depend_on_their_order() -> None:
    rows = [row for row in load_rows(None) if row.family == "meg2020"]
    tested = [
        {row.row_id for row in validate(order, {"meg2020": CalibrationShare(count=3)}).scored}
        for order in (rows, rows[::-1])
    ]
    assert tested[0] == tested[1]


def test_columns_are_listed_with_an_example() -> None:
    """What the refusal of a table without them tells a user to ask for."""
    shown = CliRunner().invoke(command, ["--columns"], catch_exceptions=False).stdout.splitlines()
    names = [line.partition(":")[0] for line in shown]
    assert names == list(load_rows(None)[0].cells)
    assert "gpus_per_node" in names
    as_json = CliRunner().invoke(command, ["--columns", "--json"], catch_exceptions=False).stdout
    assert list(json.loads(as_json)["cells"]) == names


def test_the_table_and_the_document(tmp_path: Path) -> None:
    rows = [row for row in load_rows(None) if row.family in ("sc21t1", "korthikrel")]
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0].cells))
        writer.writeheader()
        writer.writerows(row.cells for row in rows)
    shown = CliRunner().invoke(command, [str(path), "--fit", "sc21t1=2"])
    assert shown.exit_code == 0, shown.output
    assert "one factor" in shown.output
    assert "not costed, 20: derived from a formula" in shown.output
    document = CliRunner().invoke(command, [str(path), "--json"])
    families = json.loads(document.stdout)["families"]
    assert [family["family"] for family in families] == ["sc21t1", "korthikrel"]
    assert families[0]["scores"][0]["setting"] == "data sheet"


@pytest.mark.parametrize("arguments", [["--fit", "sc21t1"], ["--fit", "none=3"], ["--fit", "sc21t1=3@none"]])
def test_what_is_asked_wrongly_is_said(arguments: list[str]) -> None:
    done = CliRunner().invoke(command, ["--family", "sc21t1", *arguments])
    assert isinstance(done.exception, DataError)


def test_data_sheets_alone_predict_megatrons_tables_within_a_quarter() -> None:
    """The aim for predictions from data sheets, held for the families whose configurations are printed in full."""
    rows = [row for row in load_rows(None) if row.family in ("sc21t1", "meg2020", "korthik5")]
    for family in validate(rows, {}).families:
        for score in family.scores:
            assert score.test is not None
            assert score.test.mean < 0.25


def test_a_family_that_is_not_there_is_answered_with_those_that_are() -> None:
    done = CliRunner().invoke(command, ["--family", "nope"])
    assert isinstance(done.exception, DataError)
    assert str(done.exception).startswith("there are no rows of family 'nope'; there are ")
    assert {row.family for row in load_rows(None)} == set(str(done.exception).partition("there are ")[2]
                                                          .partition("there are ")[2].split(", "))  # fmt: skip
