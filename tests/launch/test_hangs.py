"""Planted faults: the run ends within its limit, and one verdict names the right rank, line and cause."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from launch_rig import SCRIPTS, TUTTI, Finished, running, tutti_run, wait_until

from lab.hosts import lab_or_skip
from tutti.config.run_folder import RunFolder
from tutti.errors import EventRecordError
from tutti.event_record import FILE_NAME, read_state

FAULTS = str(SCRIPTS / "faults.py")

TIMEOUT_S = 4.0

WAITS = r"rank 0 waits for \d+ s in .*statistics over replicate in module norm, in job\.step at .*faults\.py:\d+; "
ABSENT = WAITS + "rank 1 has not come: it "
AFTER = r", after job\.step \(epoch 0, batch 6\)"

HANGS: dict[str, str] = {
    "stop": ABSENT
    + r"is stopped by a signal \(SIGSTOP\), process \d+"
    + AFTER
    + r"; let it go on with `kill -CONT \d+`",
    "sleep": ABSENT + r"is at .*faults\.py:\d+ in on_rank_1 \(`time\.sleep\(600\)`\)" + AFTER,
    "lock of the interpreter": ABSENT + r"holds the interpreter's lock in native code: .*faults\.py.*on_rank_1",
    "forward": ABSENT + r"is in job\.step at .*faults\.py:\d+ in Network\.forward \(`time\.sleep\(600\)`\)",
    "loader lock": ABSENT + r"waits \d+ s for its data loader's next batch at .*faults\.py:\d+ in Rows\.__getitem__ "
    r"\(`lock\.acquire\(\)`\)",
    "slow disk": ABSENT + r"waits \d+ s for its data loader's next batch at .*faults\.py:\d+ in Rows\.__getitem__ "
    r"\(`with open\(.pipe",
    "computes": ABSENT + r"(is|computes) at .*faults\.py:\d+ in on_rank_1",
    "extra collective": r"rank 0 waits in .*statistics over replicate in module norm.* while rank 1 waits in "
    r"all-reduce \d+ of float64 \[3\] of ranks 0, 1 at .*faults\.py:\d+.*call the same collectives, in the same order",
    "skipped collective": r"rank 0 waits in barrier \d+ of ranks 0, 1 at .*faults\.py:\d+ while rank 1 waits in .*"
    "statistics over replicate in module norm",
    "skipped functional collective": r"rank 0 waits in all-reduce \d+ of float32 \[3\] of ranks 0, 1 at "
    r".*faults\.py:\d+ while rank 1 waits in .*statistics over replicate in module norm",
    "order": r"with different operations: rank 0 with all-reduce of float32 \[4\] at .*faults\.py:\d+, rank 1 with "
    r"broadcast of float32 \[2\] from rank 0 at .*faults\.py:\d+; call the same collectives",
    "shape": r"different shapes: rank 0 with all-reduce of float32 \[4\].*, rank 1 with all-reduce of float32 \[5\]",
    "dtype": r"different dtypes: rank 0 with all-reduce of float32 \[4\].*, rank 1 with all-reduce of float64 \[4\]",
}
"""Fault -> the verdict."""

REFUSED: dict[str, str] = {
    "swallowed": "step 7: ranks are out of step: rank 0 is in batch 7 of epoch 1",
    "evaluate": r"rank 0 is in job\.step \(epoch 0, batch 7\) while rank 1 is in job\.evaluate",
    "save": r"rank 0 is in job\.step \(epoch 0, batch 7\) while rank 1 is in job\.save",
    "killed worker": r"rank 1 on host \S+ failed:.*worker",
    "uneven data": "rank 1 .*ended there.* while other ranks still waited|rank 0 is in job.* while rank 1 is in ",
    "other model": "last",
}
"""Fault that is noticed before anything hangs -> its sentence."""

QUICK = ("stop", "extra collective")


def run_with(fault: str, folder: Path, *options: str) -> Finished:
    if fault == "slow disk":
        os.mkfifo(folder / "pipe")
    work = ("45",) if fault == "computes" else ()
    return tutti_run(folder, "--nproc", "2", *options, FAULTS, fault, *work, timeout_s=200)


@pytest.mark.parametrize(
    "fault", [fault if fault in QUICK else pytest.param(fault, marks=pytest.mark.long) for fault in HANGS]
)
def test_a_hang_is_explained(fault: str, tmp_path: Path) -> None:
    done = run_with(fault, tmp_path, "--timeout", str(TIMEOUT_S))
    said = " ".join(done.err.split())
    assert done.code in (1, 2), said
    assert re.search(HANGS[fault], said), said
    assert "Traceback" not in said


@pytest.mark.long
@pytest.mark.parametrize("fault", REFUSED)
def test_faults_that_are_noticed_at_once_have_their_own_sentence(fault: str, tmp_path: Path) -> None:
    done = run_with(fault, tmp_path, "--timeout", "30")
    said = " ".join(done.err.split())
    assert done.code in (1, 2), said
    assert re.search(REFUSED[fault], said), said


@pytest.mark.long
def test_a_wrong_world_size_is_refused_before_ranks_start(tmp_path: Path) -> None:
    done = run_with("none", tmp_path, "--mesh", "replicate=3")
    assert done.code == 2
    assert "its mesh has 3 ranks, but --nproc starts 2" in done.err


@pytest.mark.long
def test_unused_parameters_do_not_hang(tmp_path: Path) -> None:
    assert run_with("unused parameters", tmp_path, "--timeout", "30").code == 0


@pytest.mark.long
def test_without_a_time_out_ranks_that_do_nothing_end_early(tmp_path: Path) -> None:
    done = run_with("sleep", tmp_path)
    assert done.code == 1
    assert re.search(HANGS["sleep"], " ".join(done.err.split()))


@pytest.mark.long
@pytest.mark.parametrize("fault", ["stop", "sleep"])
def test_ranks_of_several_hosts_end_early_too(fault: str, tmp_path: Path) -> None:
    with lab_or_skip(2) as lab:
        done = lab.train("--folder", str(tmp_path / "run"), FAULTS, fault, nproc=1, cwd=tmp_path, timeout_s=200)
    for each in done:
        said = " ".join(each.err.split())
        assert each.code == 1, said
        assert re.search(HANGS[fault], said), said
        assert re.search("rank 1 on host host1 hangs", said), said
    assert ("on host" in str(done[0].err).partition("kill -CONT")[2]) == (fault == "stop")
    assert not [*(tmp_path / "run").glob(".idle*")]


@pytest.mark.long
def test_without_a_time_out_a_rank_that_computes_goes_on(tmp_path: Path) -> None:
    assert run_with("computes", tmp_path).code == 0


@pytest.mark.long
def test_why_explains_a_run_that_lives(tmp_path: Path) -> None:
    command = (*TUTTI, "run", "--no-predict", "--nproc", "2", "--folder", "run", FAULTS, "sleep")
    with running(*command, cwd=tmp_path) as run:
        assert wait_until(lambda: _has_begun(tmp_path / "run"), 60)
        assert wait_until(lambda: _why(tmp_path)["status"] == "hangs", 60)
        said = _why(tmp_path)
        run.process.terminate()
        run.finish()
        run.assert_nothing_left()
    assert re.search(HANGS["sleep"], str(said["message"])), said
    assert (said["waiting"], said["missing"], said["kind"], said["step"]) == ([0], [1], "missing", 6)
    assert any("on_rank_1" in frame for frame in said["stacks"]["1"])  # type: ignore[index,call-overload]
    ended = _why(tmp_path)
    assert ended["status"] == "ended"
    assert "the run has ended after step 6" in str(ended["message"])


def _has_begun(folder: Path) -> bool:
    try:
        return all(read_state(RunFolder(folder).rank(rank) / FILE_NAME).step == 6 for rank in range(2))
    except EventRecordError:
        return False


def _why(folder: Path) -> dict[str, object]:
    done = subprocess.run([*TUTTI, "why", "run", "--json"], cwd=folder, capture_output=True, text=True, check=False)
    return json.loads(done.stdout)


@pytest.mark.long
def test_a_cut_link_is_named(tmp_path: Path) -> None:
    with lab_or_skip(2) as lab:
        options = ("--timeout", "25", "--folder", str(tmp_path / "run"), FAULTS, "cut link")
        done = lab.train(*options, nproc=1, cwd=tmp_path, timeout_s=200)
    said = [" ".join(each.err.split()) for each in done]
    assert any(each.code == 1 for each in done), said
    assert any("to which all have come, but no data arrives; look at the network" in each for each in said), said
