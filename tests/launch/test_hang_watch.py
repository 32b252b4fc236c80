"""Which ranks hang before their time-out, and what a verdict says of records that no live run leaves."""

import json
import os
import re
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tutti.commands.why import _stack, explained, write_trace
from tutti.config.run_folder import RunFolder
from tutti.errors import ReportError
from tutti.event_record import FILE_NAME, EventRecorder, RecordState, place_in_script, read_state
from tutti.launch.failure import hang, sentence
from tutti.launch.hang_verdict import caught_error, does, judge, mismatch_of
from tutti.launch.hang_watch import LEAST_S, STEPS, HangWatch, is_idle, limit
from tutti.launch.launcher import LaunchSpec
from tutti.launch.rank_views import ObservedRank, ProcessState, view_ranks
from tutti.process_stacks import frames_of_dump, frames_of_traceback, places_of_dump


@pytest.fixture
def recorders(tmp_path: Path) -> list[EventRecorder]:
    """Those of three ranks, all of this process."""
    made = []
    for rank in range(3):
        RunFolder(tmp_path).rank(rank).mkdir(parents=True)
        made.append(EventRecorder(RunFolder(tmp_path).rank(rank) / FILE_NAME, rank, 3))
    return made


def looked_at(folder: Path) -> list[ObservedRank]:
    return view_ranks(RunFolder(folder), range(3), ask=False)


def state(folder: Path, rank: int) -> RecordState:
    return read_state(RunFolder(folder).rank(rank) / FILE_NAME)


def test_the_limit_is_ten_of_the_slowest_step(tmp_path: Path, recorders: list[EventRecorder]) -> None:
    for recorder in recorders[:2]:
        for seconds in (100.0, 0.5, 7.0, 1.0):  # the first is not counted
            recorder.step_ended("job.step", seconds)
    states = [state(tmp_path, rank) for rank in range(3)]
    assert limit(states, 600.0) == 600.0, "one rank has made no step yet"
    assert limit(states[:2], 600.0) == STEPS * 7.0
    assert limit(states[:2], 50.0) == 50.0
    assert limit([replace(each, slowest_s=0.1) for each in states[:2]], 600.0) == LEAST_S
    assert limit([], 600.0) == 600.0


def test_a_rank_that_works_is_not_idle() -> None:
    before = ProcessState(pid=1, letter="S", cpu_s=10.0, switches=100, nbytes=5000)
    assert is_idle(before, before, 30.0, waits=False)
    assert is_idle(before, replace(before, cpu_s=10.5, nbytes=50_000, switches=150), 30.0, waits=False)
    assert not is_idle(before, replace(before, cpu_s=12.0), 30.0, waits=False)
    assert not is_idle(before, replace(before, nbytes=1_000_000), 30.0, waits=False)
    assert not is_idle(before, replace(before, switches=400), 30.0, waits=False)
    assert is_idle(before, replace(before, switches=400), 30.0, waits=True), "shared memory is waited for in turns"


def test_nothing_is_said_of_ranks_that_do_not_wait(tmp_path: Path, recorders: list[EventRecorder]) -> None:
    watch = HangWatch(LaunchSpec(target="train.py", folder=tmp_path, ranks_per_node=(3,), timeout_s=0.01))
    for recorder in recorders:
        recorder.begin("operation", "job.step", (0, 1))
    assert judge(looked_at(tmp_path), time.time()).kind == "none"
    for _ in range(3):
        assert watch.look() is None


def test_all_in_one_collective_are_cut_off(tmp_path: Path, recorders: list[EventRecorder]) -> None:
    for recorder in recorders:
        recorder.begin_collective("barrier", (0, "0,1,2#0"), None, blocking=True)
    verdict = judge(looked_at(tmp_path), time.time() + 60)
    assert (verdict.kind, verdict.waiting, verdict.missing) == ("stuck", (0, 1, 2), ())
    assert verdict.message.startswith(
        "ranks 0, 1 and 2 wait for 60 s in barrier 1 of ranks 0, 1, 2, to which all have "
    )
    spec = LaunchSpec(target="train.py", folder=tmp_path, ranks_per_node=(3,))
    assert sentence(spec, hang(verdict)) == f"all 3 ranks on host {socket.gethostname()} hang: {verdict.message}"


def test_who_waits_for_whom_over_groups(tmp_path: Path, recorders: list[EventRecorder]) -> None:
    recorders[0].begin_collective("broadcast", (1, "0,1#1"), None, blocking=True)
    recorders[1].begin_collective("broadcast", (2, "1,2#2"), None, blocking=True)
    verdict = judge(looked_at(tmp_path), time.time())
    assert (verdict.kind, verdict.missing, verdict.waiting) == ("missing", (2,), (0, 1))
    assert "rank 2 has not come" in verdict.message


def test_the_ends_of_a_message_are_named(tmp_path: Path, recorders: list[EventRecorder]) -> None:
    recorders[2].begin_collective("recv", (-4, "0>2#"), None, blocking=True)
    verdict = judge(looked_at(tmp_path), time.time())
    assert "in recv 1 from rank 0 to rank 2; rank 0 has not come" in verdict.message


def test_a_message_that_crosses_a_collective_is_a_different_order(
    tmp_path: Path, recorders: list[EventRecorder]
) -> None:
    recorders[0].begin_collective("all_reduce", (0, "0,1,2#0"), None, blocking=True)
    recorders[2].begin_collective("recv", (-4, "0>2#"), None, blocking=True)
    verdict = judge(looked_at(tmp_path), time.time())
    assert verdict.kind == "mismatch"
    assert "rank 0 waits in all-reduce 1 of ranks 0, 1, 2 while rank 2 waits in recv 1 from rank 0 to rank 2" in (
        verdict.message
    )


DUMPS = {
    "faulthandler": """\
Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/scripts/loading.py", line 3 in read

Current thread 0x00007f2 (most recent call first):
  File "/venv/site-packages/torch/functional.py", line 12 in matmul
  File "/scripts/train.py", line 40 in forward
  File "/usr/lib/python3.11/runpy.py", line 88 in _run_code
""",
    "py-spy": """\
Process 12: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 12 (active): "MainThread"
    matmul (/venv/site-packages/torch/functional.py:12)
    forward (/scripts/train.py:40)
Thread 14 (idle): "tutti-stack-watch"
    wait (threading.py:320)
""",
}


@pytest.mark.parametrize("kind", DUMPS)
def test_the_main_thread_of_a_dump_is_shown(kind: str) -> None:
    matmul, forward, *_ = frames_of_dump(DUMPS[kind])
    assert (forward.file, forward.line, forward.function) == ("/scripts/train.py", 40, "forward")
    stack = _stack(ObservedRank(rank=0, native=DUMPS[kind]))
    assert stack == (f"{matmul.file}:12 in matmul", "/scripts/train.py:40 in forward")


HOLDERS = {
    "faulthandler": f"""\
Thread 0x00007f1 (most recent call first):
  File "{threading.__file__}", line 320 in wait
  File "/scripts/loading.py", line 3 in read

Thread 0x00007f3 (most recent call first):
  File "/scripts/loading.py", line 9 in decode

Current thread 0x00007f2 (most recent call first):
  File "/scripts/train.py", line 40 in <module>
""",
    "py-spy": """\
Thread 12 (idle): "MainThread"
    <module> (/scripts/train.py:40)
Thread 14 (active+gil): "decoder"
    decode (/scripts/loading.py:9)
    run (threading.py:982)
""",
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_a_thread_of_the_script_may_hold_the_lock(kind: str, recorders: list[EventRecorder], tmp_path: Path) -> None:
    assert [frame.line for frame in places_of_dump(HOLDERS[kind])] == ([9] if kind == "py-spy" else [40, 9])
    process = ProcessState(pid=os.getpid(), letter="S", place="futex_wait_queue")
    view = replace(looked_at(tmp_path)[0], process=process, native=HOLDERS[kind])
    assert "holds the interpreter's lock in native code: /scripts/loading.py:9 in decode" in does(view, 0.0)
    asleep = replace(view, process=replace(process, place="hrtimer_nanosleep"))
    assert ("/scripts/train.py:40 in <module> or " in does(asleep, 0.0)) == (kind == "faulthandler")


def begin(recorder: EventRecorder, name: str, at: str = "", about: str = "", dtype: Any = None) -> int:
    """Begin a collective of all ranks; of the script's own, if it has a line."""
    import torch

    tensor = None if dtype is None else torch.ones(2, dtype=dtype)
    number = recorder.begin_collective(name, (0, "0,1,2#0"), tensor, blocking=True)
    if at:
        place_in_script(recorder, number, at, about)
    return number


def test_a_collective_of_the_script_that_meets_another_is_named_by_its_line(
    tmp_path: Path, recorders: list[EventRecorder]
) -> None:
    import torch

    begin(recorders[0], "all_reduce", dtype=torch.float64)
    begin(recorders[1], "all_reduce", "train.py:9", dtype=torch.float32)
    said = judge(looked_at(tmp_path), time.time()).message
    assert said.startswith(
        "ranks 0 and 1 meet in different collectives: rank 0 in all-reduce of float64 [2], rank 1 in all-reduce of "
        "float32 [2] at train.py:9; call the same collectives"
    )
    recorders[0].end(1)  # it has started it only, and waits elsewhere when native code ends rank 1
    assert mismatch_of(looked_at(tmp_path), 1) == said


def test_different_sources_of_a_broadcast_are_side_by_side(tmp_path: Path, recorders: list[EventRecorder]) -> None:
    import torch

    for rank in range(3):
        begin(recorders[rank], "broadcast", "train.py:9", f"from rank {min(rank, 1)}", dtype=torch.float32)
    said = judge(looked_at(tmp_path), time.time()).message
    assert (
        "different src or dst: rank 0 with broadcast of float32 [2] from rank 0 at train.py:9, rank 1 with broadcast"
        in said
    )
    assert said.endswith("float32 [2] from rank 1 at train.py:9; name the same src or dst on every rank")


def test_an_error_that_the_script_has_caught_is_named(tmp_path: Path, recorders: list[EventRecorder]) -> None:
    recorders[0].end(begin(recorders[0], "barrier", "train.py:7"), failed=True)
    assert caught_error(looked_at(tmp_path)) == "", "the script may end by it"
    for recorder in recorders:
        recorder.begin("operation", "job.step", (0, 1))
        recorder.wait_begins("gradients")
    said = judge(looked_at(tmp_path), time.time()).message
    assert "rank 0's barrier 1 of ranks 0, 1, 2 at train.py:7 had failed before, and the script went on" in said
    assert "network" not in said


def test_a_model_in_evaluation_mode_on_one_rank_is_a_hint(tmp_path: Path, recorders: list[EventRecorder]) -> None:
    import torch

    for recorder, about in zip(recorders, ("statistics over replicate", "gradients over replicate"), strict=False):
        recorder.begin("operation", "job.step", (0, 1))
        recorder.begin_flat(about, f"pid {os.getpid()}#{about}", torch.float32, 8)
        recorder.wait_begins(about)
    said = judge(looked_at(tmp_path)[:2], time.time()).message
    assert "batch norms of rank 1 exchange no statistics: look whether its model is in evaluation mode" in said


def test_a_rank_that_waited_too_long_is_told_by_its_line(tmp_path: Path, recorders: list[EventRecorder]) -> None:
    begin(recorders[0], "all_reduce")
    trace = f'File "{__file__}", line 3, in wait\n    here\n  File "{threading.__file__}", line 1, in join\n'
    gone = replace(looked_at(tmp_path)[1], process=None, failed=tuple(frames_of_traceback(trace)))
    verdict = judge([looked_at(tmp_path)[0], gone], time.time())
    assert re.search(r"rank 1 has not come: it waited too long at \S*test_hang_watch\.py:3 in wait ", verdict.message)
    assert "same number of steps" not in verdict.message


def test_processes_of_shared_memory_are_named_as_ranks(tmp_path: Path, recorders: list[EventRecorder]) -> None:
    import torch

    recorders[0].begin_flat("shared-memory exchange", f"pid {os.getpid()}#1", torch.float32, 8)
    recorders[0].wait_begins("statistics over replicate")
    verdict = judge(looked_at(tmp_path)[:1], time.time())
    assert "shared-memory exchange 1 of float32 [8], statistics over replicate" in verdict.message


def test_a_rank_that_has_not_come_to_the_rendezvous_is_missing(tmp_path: Path, recorders: list[EventRecorder]) -> None:
    for recorder in recorders[:2]:
        recorder.begin("operation", "the rendezvous")
    verdict = judge(looked_at(tmp_path), time.time())
    assert (verdict.kind, verdict.waiting, verdict.missing) == ("missing", (0, 1), (2,))
    assert verdict.message.startswith("ranks 0 and 1 wait for 0 s in the rendezvous; rank 2 has not come: it ")
    assert "nothing" not in verdict.message


def test_a_wait_whose_error_was_caught_is_over(tmp_path: Path, recorders: list[EventRecorder]) -> None:
    recorders[0].wait_begins("gradients")
    assert judge(looked_at(tmp_path), time.time()).kind == "missing"
    time.sleep(0.01)
    recorders[0].begin("loader", "next batch")
    assert judge(looked_at(tmp_path), time.time()).kind == "none"


def test_ranks_that_an_earlier_run_left_behind_are_missed_by_nobody(tmp_path: Path) -> None:
    for rank, world_size in ((2, 3), (0, 2), (1, 2)):
        RunFolder(tmp_path).rank(rank).mkdir(parents=True)
        EventRecorder(RunFolder(tmp_path).rank(rank) / FILE_NAME, rank, world_size).begin("operation", "job.step")
    assert list(explained(tmp_path).ranks) == [0, 1]


def test_a_trace_has_the_events_of_all_ranks(tmp_path: Path, recorders: list[EventRecorder]) -> None:
    assert len(json.loads(write_trace(tmp_path, tmp_path / "empty.json").read_text())["traceEvents"]) == 3
    recorders[1].end(recorders[1].begin("operation", "job.step", (0, 2)))
    recorders[2].begin_collective("barrier", (0, "0,1,2#0"), None, blocking=True)
    entries = json.loads(write_trace(tmp_path, tmp_path / "trace.json").read_text())["traceEvents"]
    assert [entry["args"]["name"] for entry in entries if entry["ph"] == "M"] == ["rank 0", "rank 1", "rank 2"]
    step, barrier = [entry for entry in entries if entry["ph"] == "X"]
    assert (step["name"], step["pid"], step["tid"], step["cat"]) == ("job.step", 1, 0, "operation")
    assert abs(step["ts"] / 1e6 - time.time()) < 60
    assert (barrier["pid"], barrier["tid"], barrier["args"]["pending"]) == (2, 1, True)
    with pytest.raises(ReportError, match="cannot be written"):
        write_trace(tmp_path, tmp_path / "missing" / "trace.json")
    with pytest.raises(ReportError, match="no rank of"):
        write_trace(tmp_path / "missing", tmp_path / "trace.json")
