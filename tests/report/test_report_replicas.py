"""Replicas that differ in a report: drift, staleness, bytes on average; nothing where replicas were equal."""

import io
import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from report.run_folders import Story, write_run
from tutti.config import serialization
from tutti.config.plan import Plan
from tutti.config.sync_notation import parse_sync, with_mode
from tutti.reporting.build_report import build_report
from tutti.reporting.html_report import boxes
from tutti.reporting.terminal_report import report_table


def with_replicas(path: Path) -> Path:
    """A run whose rows of every fourth step have a measurement, and which sends 1000 bytes there."""
    folder = write_run(path, Story())
    metrics, lines = folder / "metrics.jsonl", []
    for line in metrics.read_text().splitlines():
        row = json.loads(line)
        if row["kind"] == "step":
            drift = {"max": 0.5 if row["step"] == 8 else 0.25, "mean": 0.125, "parameters": 10}
            exchanged = row["step"] % 4 == 0
            row["replicas"] = {"staleness": row["step"] % 4, "disagreement": drift if exchanged else None}
            row["sent_nbytes"] = 1000 if exchanged else 0
        lines.append(json.dumps(row))
    metrics.write_text("\n".join(lines) + "\n")
    plan = folder / "plan.json"
    if plan.exists():
        serialization.save(with_mode(serialization.load(Plan, plan), parse_sync("local:4")), plan)
    return folder


def test_the_report_says_how_far_replicas_drifted(tmp_path: Path) -> None:
    report = build_report(with_replicas(tmp_path))
    found = report.replicas
    assert found["disagreement"].value == 0.125
    assert found["largest disagreement"].value == 0.5
    assert found["staleness"].value == 3
    assert found["bytes sent"].value == 250
    assert {one.evidence for one in found.values()} == {"measured"}
    assert dict(dict(boxes(report))["Recipe"])["replicas' disagreement"] == found["disagreement"]
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(report_table(report))
    assert "replicas' largest disagreement" in console.export_text()
    assert report.plan is None or "replicas local:period=4" in report.plan
    assert serialization.loads(type(report), serialization.dumps(report)) == report


def test_what_evaluations_measured_counts_where_no_step_can(tmp_path: Path) -> None:
    folder = write_run(tmp_path, Story())
    metrics, lines = folder / "metrics.jsonl", []
    for line in metrics.read_text().splitlines():
        row = json.loads(line)
        if row["kind"] == "evaluate":
            row["replicas"] = {"disagreement": {"max": 0.75, "mean": 0.5}}
        lines.append(json.dumps(row))
    metrics.write_text("\n".join(lines) + "\n")
    found = build_report(folder).replicas
    assert found["largest disagreement"].value == 0.75
    assert found["staleness"].value is None


def test_a_run_whose_replicas_were_equal_says_nothing(tmp_path: Path) -> None:
    report = build_report(write_run(tmp_path, Story()))
    assert report.replicas == {}
    assert report == replace(report, replicas={})
    assert "replicas'" not in dict(dict(boxes(report))["Recipe"])
