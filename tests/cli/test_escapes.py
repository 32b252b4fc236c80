"""Names with escape sequences: nothing that tutti prints or writes into a report controls a terminal."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from tutti.reporting.html_report import environment
from tutti.reporting.terminal_report import as_text
from tutti.terminal import PlainConsole

EVIL = "evil\x1b]0;owned\x07\x1b[31m\x1b[2Jname"


def test_a_console_prints_no_escapes_but_its_own() -> None:
    file = io.StringIO()
    console = PlainConsole(file=file, force_terminal=True, color_system="standard", width=80, legacy_windows=False)
    table = Table(title=EVIL)
    table.add_column(EVIL)
    table.add_row(EVIL)
    console.print(EVIL, style="bold", markup=False)
    console.print(Text.from_ansi("\x1b[32mgreen\x1b[0m"))
    console.print(table)
    shown = file.getvalue()
    assert "\x1b[1mevilname" in shown
    assert "\x1b[32mgreen" in shown  # a rank's own colours
    assert not [part for part in ("\x1b]0", "\x1b[2J", "\x07") if part in shown]


def test_tables_as_text_and_pages_have_none() -> None:
    table = Table()
    table.add_column(EVIL)
    assert "evilname" in as_text(table)
    page = environment().from_string("<b>{{ name }}</b> {{ '<i>'|safe }}").render(name=EVIL + "<script>")
    assert page == "<b>evilname&lt;script&gt;</b> <i>"


@pytest.mark.parametrize("arguments", [("run", EVIL + ".py"), ("report", EVIL), ("run", "--" + EVIL), (EVIL,)])
def test_messages_have_none(arguments: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tutti.cli.main", *arguments]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "evil" in ended.stderr
    assert "\x1b" not in ended.stderr + ended.stdout
    assert "\x07" not in ended.stderr + ended.stdout
