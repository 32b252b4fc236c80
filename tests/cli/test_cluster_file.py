"""The cluster file that the planner's page shows is one that can be planned with."""

import json
from pathlib import Path

from click.testing import CliRunner

from tutti.cli import plan as plan_command
from tutti.config import serialization
from tutti.config.cluster import ClusterSpec

PAGE = Path(__file__).parents[2] / "docs" / "planner.md"


def test_the_file_of_the_page_is_read_and_planned_with(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8").partition("```json\n")[2].partition("```")[0]
    cluster = serialization.loads(ClusterSpec, text)
    assert cluster.device_count == 32
    assert cluster.link("network").bandwidth_bytes_per_s == 12.5e9  # type: ignore[union-attr]
    file = serialization.save(cluster, tmp_path / "ours.json")
    asked = [
        "--cluster",
        str(file),
        "--global-batch-size",
        "8",
        "--max-devices",
        "1",
        "--json",
        "bert",
        "--layers",
        "2",
    ]
    found = CliRunner().invoke(plan_command.command, asked)
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["totals"]["cost"] > 0
