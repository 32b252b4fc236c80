"""What runs took to a quality, by how they exchanged: the factor that a plan counts a way with."""

from dataclasses import replace
from pathlib import Path

import pytest

from report.run_folders import Story, write_run
from tutti.config import serialization
from tutti.config.compression import parse_compression
from tutti.config.plan import BatchPlan, Plan, SyncPlan
from tutti.config.run_folder import RunFolder
from tutti.config.sync_notation import parse_sync
from tutti.errors import ReportError
from tutti.reporting.quality_metrics import parse_target, samples_by_strategy
from tutti.reporting.run_records import Records, read_records

TARGET = parse_target("test.accuracy=0.93")


def run(path: Path, sync: SyncPlan, quality: tuple[float, ...], batch: int = 64) -> Records:
    """A run of 5 epochs of 20 steps, evaluated after each."""
    folder = write_run(path, Story(quality=quality, batch=batch))
    serialization.save(
        Plan(batch=BatchPlan(global_batch_size=batch), mesh={"replicate": 2}, sync=sync), RunFolder(folder).plan
    )
    return read_records(folder)


EXACT = (0.8, 0.9, 0.93, 0.95, 0.96)
LATE = (0.8, 0.85, 0.9, 0.94, 0.95)
NEVER = (0.5, 0.6, 0.7, 0.7, 0.7)
POWERS, LOCAL = SyncPlan(compress=parse_compression("powersgd,rank=1")), parse_sync("local:8")


def test_means_over_runs_of_one_way(tmp_path: Path) -> None:
    told = [(SyncPlan(), EXACT), (SyncPlan(), LATE), (POWERS, LATE), (LOCAL, EXACT), (LOCAL, NEVER)]
    runs = [run(tmp_path / str(number), *one) for number, one in enumerate(told)]
    # exact ones after 3 and 4 epochs
    assert samples_by_strategy(runs, TARGET) == {"powersgd,rank=1": pytest.approx(4 / 3.5), "local:period=8": None}


def test_what_does_not_compare_is_refused(tmp_path: Path) -> None:
    exact, late, other = (
        run(tmp_path / str(number), *one)
        for number, one in enumerate([(SyncPlan(), EXACT), (LOCAL, LATE), (LOCAL, EXACT)])
    )
    with pytest.raises(ReportError, match=r"no exact run reached accuracy 0\.99"):
        samples_by_strategy([exact, late], parse_target("test.accuracy=0.99"))
    with pytest.raises(ReportError, match="no exact run"):
        samples_by_strategy([late, other], TARGET)
    with pytest.raises(ReportError, match="all runs named are exact"):
        samples_by_strategy([exact], TARGET)
    with pytest.raises(ReportError, match="global batches of 32, 64"):
        samples_by_strategy([exact, run(tmp_path / "small", LOCAL, LATE, batch=32)], TARGET)
    with pytest.raises(ReportError, match=r"no plan\.json"):
        samples_by_strategy([exact, replace(late, plan=None)], TARGET)
