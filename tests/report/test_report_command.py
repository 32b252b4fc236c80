"""`tutti report` as a user calls it."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from run_folders import Story, write_run

from tutti.cli.main import main


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int | str | None
    stdout: str
    stderr: str


Call = Callable[..., Done]


@pytest.fixture
def tutti(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Call `tutti report` in this process, as the console script does."""

    def call(*arguments: str | Path) -> Done:
        monkeypatch.setattr(sys, "argv", ["tutti", "report", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return Done(ended.value.code, out, err)

    return call


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    write_run(path / "one", Story(name="one", world_size=1, slower=1.8))
    write_run(path / "two", Story(name="two"))
    os.utime(path / "one" / "run.json", (1, 1))
    return path


def test_one_run_is_shown_and_written(tutti: Call, runs: Path) -> None:
    done = tutti(runs / "one", "--target", "test.accuracy=0.9")
    assert done.code == 0, done.stderr
    assert done.stderr.startswith("report: ")
    assert "test accuracy   0.9600" in done.stdout
    assert "reached after 40 steps, 2 epochs" in done.stdout
    assert (runs / "one" / "report" / "report.html").is_file()


def test_json_is_one_document_and_the_newest_run_of_a_folder_is_taken(tutti: Call, runs: Path, tmp_path: Path) -> None:
    done = tutti(runs, "--json", "--output", tmp_path)
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["name"] == "two"
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(done.stdout)


def test_comparison_is_written_on_request(tutti: Call, runs: Path, tmp_path: Path) -> None:
    done = tutti(runs / "one", runs / "two", "--json", "--output", tmp_path)
    assert done.code == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert rows[1]["speedup"]["value"] > 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["comparison.html", "comparison.json", "comparison.txt"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere",), "is not a folder"),
        (("{runs}/one/ranks",), "no run.json"),
        (("{runs}/one", "--target", "test.f1=0.9"), "test.accuracy"),
        (("{runs}/one", "--target", "high"), "NAME.METRIC=VALUE"),
        (("{runs}/one", "--output", "/proc/nothing"), "--output"),
    ],
)
def test_a_users_error_is_one_sentence(tutti: Call, runs: Path, arguments: tuple[str, ...], words: str) -> None:
    done = tutti(*(argument.format(runs=runs) for argument in arguments))
    assert done.code == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
