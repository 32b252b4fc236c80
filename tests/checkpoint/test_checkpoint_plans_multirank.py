"""A checkpoint written under any plan goes on under any other, exactly as if one device had never stopped.

Here every plan resumes what one device and two other plans wrote; all pairs: tests/matrix/checkpoints.py.
"""

from pathlib import Path

import pytest

from checkpoint.checkpoint_variants import PLANS, Way, resume_all, save_everywhere
from harness import run_ranks

pytestmark = pytest.mark.long

BUILT_PLANS = [way for way in PLANS if not way.missing]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Checkpoints of every way, and what failed."""
    folder = tmp_path_factory.mktemp("ways")
    return folder, save_everywhere(BUILT_PLANS, folder)


def some_sources(way: Way) -> list[Way]:
    """One device, and the two plans before this one in the table."""
    family = [one for one in BUILT_PLANS if one.family == way.family]
    place = family.index(way)
    chosen = dict.fromkeys([0, place - 1, place - 2, *([place] if way.plan.world_size > 1 else [])])
    return [family[number] for number in chosen if abs(number) < len(family)]


@pytest.mark.parametrize("way", PLANS, ids=lambda way: way.name)
def test_checkpoints_of_other_plans_go_on_under_this_one(way: Way, saved: tuple[Path, dict[str, str]]) -> None:
    if way.missing:
        pytest.skip(f"no mechanism for mesh.{way.missing[0]} yet")
    folder, failures = saved
    assert way.name not in failures, failures[way.name]
    sources = [one.name for one in some_sources(way) if one.name not in failures]
    for differences in run_ranks(resume_all, way.plan.world_size, way, sources, folder, 1e-12):
        assert not differences, "\n".join(differences)
