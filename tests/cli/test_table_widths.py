"""Every table of every command fits the width that COLUMNS says, and shortens no number."""

import io
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from report.run_folders import write_run
from tutti.cli.main import cli
from tutti.reporting.fitted_table import FittedTable

CLUSTER = "1x8:a100-80gb,nvlink3"


def rendered(table: FittedTable, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def make_table() -> FittedTable:
    table = FittedTable(title="Plans")
    table.below = ("verdict",)
    table.add_column("plan", overflow="fold")
    for name in ("step", "memory\nper rank"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    table.add_row("replicate 2 x shard 4", "123.456 ms", "98.7 GiB", "slower by 2.61 ms of exposed communication")
    table.add_row("shard 8", "223.456 ms", "18.7 GiB", "")
    return table


@pytest.mark.parametrize("width", [100, 80, 60, 44, 30])
def test_a_table_keeps_every_number_at_every_width(width: int) -> None:
    shown = rendered(make_table(), width)
    assert max(map(len, shown.splitlines())) <= width
    assert all(word in shown for word in ("123.456 ms", "223.456 ms", "98.7 GiB", "18.7 GiB"))
    assert "…" not in shown
    assert ("┏" in shown) is (width >= 60), "borders where they fit"
    words = " ".join(shown.replace("│", " ").split())
    if width < 60:
        assert "slower by 2.61 ms" in words


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, ...]]:
    folder = tmp_path_factory.mktemp("tables")
    plan = str(folder / "plan.json")
    model = ("gpt2", "--layers", "2")
    for name in ("one", "two"):
        write_run(folder / "runs" / name)
    wide = ("--cluster", CLUSTER)
    planning = ("plan", *wide, "--global-batch-size", "64", "--data-parallel", "--seconds", "1", "--output", plan)
    return {
        "describe": ("describe", *model),
        "plan": (*planning, "--scaling", "--what-if", "memory=40gb", *model),
        "predict": ("predict", *wide, plan, *model),
        "probe": ("probe", "--device", CLUSTER, "--output", str(folder / "cluster.json")),
        "parts": ("probe", "--list"),
        "report": ("report", str(folder / "runs" / "one")),
        "comparison": ("report", str(folder / "runs" / "one"), str(folder / "runs" / "two")),
        "history": ("report", "--history", str(folder / "runs")),
        "validate": ("validate", "--family", "sc21t1"),
    }


def test_tables_of_commands_fit(
    commands: dict[str, tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for columns in (80, 60):
        monkeypatch.setenv("COLUMNS", str(columns))
        for name, arguments in commands.items():
            result = CliRunner().invoke(cli, list(arguments))
            assert result.exit_code == 0, (name, result.output, result.exception)
            assert result.stdout, f"{name} prints its result on standard output"
            # Sentences are left to the terminal, so that they can be copied whole; tables, drawings and lists are not.
            wide = [line for line in result.stdout.splitlines() if len(line.rstrip()) > columns and not _prose(line)]
            assert not wide, (name, columns, wide)
            assert "…" not in result.stdout, (name, columns)


def _prose(line: str) -> bool:
    return line.strip()[:1].isalnum() and not set("│┃┏┡├└━─") & set(line) and "  " not in line.strip()
