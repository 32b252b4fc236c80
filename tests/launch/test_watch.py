"""Throughput and time left follow from the rows by hand; a person sees output above one live line."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tutti.launch.launcher import LaunchSpec
from tutti.launch.rank_watch import LiveWatcher, Meter, PlainWatcher, watcher_for


def step(number: int, **changed: object) -> dict[str, object]:
    return {"kind": "step", "step": number, "wall_s": 0.5, "samples": 64, "tokens": None, "loss": 1.25} | changed


def test_rate_and_time_left() -> None:
    meter = Meter()
    for number in range(1, 5):
        meter.add(step(number, total_steps=244))
    now = meter.now()
    assert now is not None
    assert now.rate_per_s == pytest.approx(64 / 0.5)
    assert now.left_s == pytest.approx(240 * 0.5)
    assert now.words == "loss 1.25, 128 samples/s, 2:00 left"


def test_a_short_step_counts_by_its_samples_and_old_steps_do_not_count() -> None:
    meter = Meter(window=2)
    meter.add(step(1, wall_s=100.0))
    meter.add(step(2))
    meter.add(step(3, samples=32, wall_s=0.25))
    now = meter.now()
    assert now is not None
    assert now.rate_per_s == pytest.approx(96 / 0.75)
    assert now.left_s is None


def test_tokens_are_the_unit_where_they_are_counted() -> None:
    meter = Meter()
    meter.add({"kind": "evaluate"})
    assert meter.now() is None
    meter.add(step(1, tokens=1000))
    now = meter.now()
    assert now is not None
    assert (now.unit, now.rate_per_s) == ("tokens", pytest.approx(2000))


def spec(folder: Path) -> LaunchSpec:
    (folder / "ranks/0").mkdir(parents=True)
    return LaunchSpec(target="t.py", folder=folder, ranks_per_node=(2,))


def test_a_person_sees_lines_above_a_bar_with_loss_and_throughput(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")  # rich draws nothing live on a dumb terminal
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120, color_system=None)
    stdout = io.StringIO()
    with watcher_for(spec(tmp_path), stdout=stdout, console=console) as watcher:
        assert isinstance(watcher, LiveWatcher)
        (tmp_path / "ranks/0/stderr.log").write_text("10%\r20%\r30%\n[bold]not markup[/bold]\nunfinished")
        (tmp_path / "ranks/0/stdout.log").write_text("a result\n")
        (tmp_path / "metrics.jsonl").write_text(json.dumps(step(3, total_steps=10)) + "\n")
        watcher.update()
    shown = screen.getvalue()
    assert "[bold]not markup[/bold]" in shown
    assert "unfinished" in shown
    assert "30%" in shown
    assert "10%" not in shown
    assert "3/10" in shown
    assert "loss 1.25, 128 samples/s" in shown
    assert stdout.getvalue() == "a result\n", "standard output that is no terminal gets the script's bytes alone"


def test_without_a_terminal_output_passes_unchanged(tmp_path: Path) -> None:
    screen, stdout = io.StringIO(), io.StringIO()
    with watcher_for(spec(tmp_path), stdout=stdout, console=Console(file=screen)) as watcher:
        assert isinstance(watcher, PlainWatcher)
        (tmp_path / "ranks/0/stdout.log").write_text("a\rb\n\x1b[1mbold")
        watcher.update()
        assert stdout.getvalue() == "a\rb\n\x1b[1mbold"
        (tmp_path / "ranks/0/stderr.log").write_text("late")
    assert screen.getvalue() == "late"


def test_a_bar_is_left_out_where_the_command_or_the_script_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen, launched = io.StringIO(), spec(tmp_path)
    console = Console(file=screen, force_terminal=True, width=120, color_system=None)
    assert isinstance(watcher_for(launched, stdout=io.StringIO(), console=console, progress=False), PlainWatcher)
    with watcher_for(launched, stdout=io.StringIO(), console=console) as watcher:
        rows = [{"kind": "start", "progress": False}, step(3, total_steps=10)]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        watcher.update()
    assert "3/10" not in screen.getvalue()
