"""Durations, options about restarts that contradict each other, and which node prints a failure."""

from types import SimpleNamespace
from typing import Any

import pytest

from tutti.cli.run import _prints_failure
from tutti.commands.run_options import RunOptions, check_restarts, duration_s
from tutti.errors import LaunchError
from tutti.launch.failure import LOST_NODE


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("90s", 90), ("90", 90), (1.5, 1.5), ("45m", 2700), ("2h30m", 9000), ("1d", 86400), ("1h 5s", 3605)],
)
def test_durations(given: str | float, seconds: float) -> None:
    assert duration_s(given) == seconds


@pytest.mark.parametrize("given", ["", "0", "-3", "2x", "1m2h", "h", "nan", "inf", "0s"])
def test_what_is_no_duration_is_refused(given: str) -> None:
    with pytest.raises(LaunchError, match="is no duration above 0"):
        duration_s(given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"min_ranks": 2}, "--min-ranks says how a run goes on"),
        ({"on_failure": "shrink"}, "--on-failure says how a run goes on"),
        ({"max_restarts": 1, "nnodes": 2}, "a run folder that all nodes see; name it with --folder"),
        ({"memory_checkpoint_every": 5}, "ranks that are started again; allow that with --max-restarts N"),
        ({"memory_checkpoint_every": 5, "max_restarts": 1, "launcher": "pods"}, "leave it out, or --on pods"),
    ],
)
def test_options_about_restarts_must_agree(given: dict[str, object], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        check_restarts(RunOptions(target=("t.py",), **given))  # type: ignore[arg-type]


def test_options_about_restarts() -> None:
    check_restarts(RunOptions(target=("t.py",), max_restarts=2, min_ranks=1, on_failure="shrink"))


@pytest.mark.parametrize(
    ("node", "first", "error", "tells"),
    [
        (0, 1, "ValueError", True),
        (1, 1, "ValueError", False),
        (0, 3, LOST_NODE, True),
        (1, 5, LOST_NODE, False),
        (1, 0, LOST_NODE, True),
    ],
)
def test_one_node_prints_a_failure(node: int, first: int, error: str, tells: bool) -> None:
    """Of three nodes with two ranks each; every node prints the loss of node 0, which decides for all."""
    ended: Any = SimpleNamespace(is_first=node == 0, spec=SimpleNamespace(ranks=range(2 * node, 2 * node + 2)))
    failure: Any = SimpleNamespace(first=first, error=error)
    assert _prints_failure(ended, failure) == tells
