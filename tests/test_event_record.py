"""The record of a rank's last events: what is written can be read, by others and after the rank's death."""

import os
import signal
import struct
import threading
from pathlib import Path

import pytest
import torch

from tutti import event_record
from tutti.errors import EventRecordError
from tutti.event_record import ACTIVE, EventRecorder, open_record, read_record, read_state, recorded


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / event_record.FILE_NAME


def test_events_are_read_as_they_were_written(path: Path) -> None:
    recorder = EventRecorder(path, 3, 8)
    step = recorder.begin("operation", "job.step", (2, 7))
    tensor = torch.ones(4, 5, dtype=torch.bfloat16)
    done = recorder.begin_collective("all_reduce", (0, "0,3#world"), tensor, blocking=True)
    recorder.end(done)
    work = _Work()
    pending = recorder.begin_collective("broadcast", (0, "0,3#world"), torch.ones(2, 1, 1, 1, 1, 9), blocking=False)
    recorder.end_with(pending, work)
    recorder.about(work, "gradients over replicate")
    recorder.wait_begins("gradients over replicate")
    recorder.place("train.py:12", "layers.3")
    recorder.step_ended("job.step", 9.0)
    for seconds in (0.25, 2.0, 0.5):
        recorder.step_ended("job.step", seconds)
    recorder.step_ended("job.evaluate", 50.0)
    recorder.updated(41)

    record = read_record(path)
    state, (first, second, third) = record.state, record.events
    assert (state.rank, state.world_size, state.pid, state.newest, state.ended) == (3, 8, os.getpid(), 3, False)
    assert (state.steps, state.slowest_s, state.latest_s, state.step) == (3, 2.0, 0.5, 41)
    assert state.waits_for == "gradients over replicate"
    assert (first.kind, first.name, first.shape, first.ended_s) == ("operation", "job.step", (2, 7), None)
    assert (second.name, second.group, second.sequence) == ("all_reduce", "0,3#world", 1)
    assert (second.dtype, second.shape, second.nbytes, second.blocking) == ("bfloat16", (4, 5), 40, True)
    assert second.ended_s is not None
    assert second.ended_s >= second.begun_s
    assert second.line == ""
    assert (third.sequence, third.shape, third.nbytes, third.about) == (2, (2, 1, 1, 1, 1), 72, state.waits_for)
    assert (third.ended_s, third.line, third.module) == (None, "train.py:12", "layers.3")

    del work
    recorder.wait_ends((0, 0))
    recorder.end(step, failed=True)
    recorder.close()
    record = read_record(path)
    assert record.events[2].ended_s is not None
    assert (record.events[0].failed, record.events[1].failed) == (True, False)
    assert (record.state.waits_since_s, record.state.ended) == (None, True)


class _Work:
    """Like torch's work handles, this can be referred to weakly."""


def test_a_wait_within_a_wait_leaves_that_one_in_the_record(path: Path) -> None:
    recorder = EventRecorder(path, 0, 2)
    outer = recorder.wait_begins("state")
    inner = recorder.wait_begins("gradients")
    assert read_state(path).waits_for == "gradients"
    recorder.wait_ends(inner)
    assert read_state(path).waits_for == "state"
    recorder.wait_ends(outer)
    assert read_state(path).waits_since_s is None
    recorder.wait_ends(recorder.wait_begins("state"), failed=True)  # and the script catches the error
    assert read_state(path).waits_for == "state"
    recorder.wait_ends(recorder.wait_begins("gradients"))
    assert read_state(path).waits_since_s is None


def test_an_event_that_begins_within_another_stays_the_newest(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, now = EventRecorder(path, 0, 2), event_record.monotonic_ns

    def interrupted() -> int:  # as by a signal's handler
        monkeypatch.setattr(event_record, "monotonic_ns", now)
        recorder.begin("operation", "job.save")
        return now()

    monkeypatch.setattr(event_record, "monotonic_ns", interrupted)
    recorder.begin("operation", "job.step")
    assert (recorder.newest, read_state(path).newest) == (2, 2)


def test_waits_are_events_unless_they_are_very_short(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, now = EventRecorder(path, 0, 2), [5_000_000]
    monkeypatch.setattr(event_record, "monotonic_ns", lambda: now[0])
    monkeypatch.setattr(event_record.time, "monotonic_ns", lambda: now[0])
    for waited_ns in (event_record.SHORTEST_WAIT_NS - 1, 3_000_000):
        outer = recorder.wait_begins("gradients over replicate")
        now[0] += waited_ns
        recorder.wait_ends(recorder.wait_begins("within it"))
        recorder.wait_ends(outer)
    thread = threading.Thread(
        target=lambda: (
            recorder.begin_flat("shared-memory exchange", "pid 1,2#0", torch.float32, 3),
            recorder.wait_ends(recorder.wait_begins("in a thread")),
        )
    )
    thread.start()
    thread.join()
    wait, exchange = read_record(path).events
    assert (wait.kind, wait.name, wait.blocking, wait.in_thread) == ("wait", "gradients over replicate", True, False)
    assert wait.ended_s is not None
    assert wait.ended_s - wait.begun_s == pytest.approx(0.003, abs=1e-6)
    assert (exchange.blocking, exchange.in_thread) == (False, True)
    assert wait.ended_s - read_record(path).clock_offset_s == pytest.approx(now[0] / 1e9, abs=1e-6)


def test_the_ring_keeps_the_newest(path: Path) -> None:
    recorder = EventRecorder(path, 0, 1, capacity=8)
    first = recorder.begin("operation", "job.save")
    for _ in range(20):
        recorder.end(recorder.begin("loader", "next batch"))
    recorder.end(first)  # its place has another event, which stays as it is
    events = read_record(path).events
    assert [event.number for event in events] == list(range(14, 22))
    assert {event.name for event in events} == {"next batch"}


def test_texts_beyond_their_place_are_left_out(path: Path) -> None:
    recorder = EventRecorder(path, 0, 1)
    for number in range(400):
        recorder.end(recorder.begin("operation", f"{number:04}" * 60))
    events = read_record(path).events
    assert events[0].name == "0000" * 60
    assert events[-1].name == ""


def test_the_record_of_a_killed_process_is_whole(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        open_record(tmp_path, 1, 2)
        with recorded("loader", "next batch"):
            pass
        recorder = ACTIVE.recorder
        assert recorder is not None
        recorder.begin("operation", "job.step", (0, 1))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    record = read_record(tmp_path / event_record.FILE_NAME)
    assert record.state.pid == child
    assert [(event.name, event.ended_s is None) for event in record.events] == [
        ("next batch", False),
        ("job.step", True),
    ]


def test_a_forked_worker_writes_nothing(tmp_path: Path) -> None:
    open_record(tmp_path, 0, 1)
    recorder = ACTIVE.recorder
    assert recorder is not None
    number = recorder.begin("operation", "job.step")
    child = os.fork()
    if not child:
        recorder.end(number)
        with recorded("loader", "next batch"):
            os._exit(0)
    os.waitpid(child, 0)
    ACTIVE.recorder = None
    (event,) = read_record(tmp_path / event_record.FILE_NAME).events
    assert event.ended_s is None


def _with(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]


DAMAGES = {
    "another format": lambda data: b"\x89PNG" + data[4:],
    "its header has another checksum": lambda data: _with(data, 12, b"\x07"),
    "it is cut short": lambda data: data[:-1],
    "it names text": lambda data: _with(data, 256 + 24, struct.pack("<H", 999)),
    "contradicts itself": lambda data: _with(data, 256 + 16, struct.pack("<q", 5)),
    "its texts are longer than their place": lambda data: _with(data, 136, struct.pack("<I", 1 << 30)),
    "a text is cut short": lambda data: _with(data, 136, struct.pack("<I", 7)),
}


@pytest.mark.parametrize("reason", DAMAGES)
def test_damaged_and_foreign_files_are_refused(reason: str, path: Path) -> None:
    EventRecorder(path, 0, 2).begin("operation", "job.step")
    path.write_bytes(DAMAGES[reason](path.read_bytes()))
    with pytest.raises(EventRecordError, match=reason):
        read_record(path)


def test_a_file_that_cannot_be_read_is_refused(path: Path) -> None:
    for read in (read_record, read_state):
        with pytest.raises(EventRecordError, match="No such file"):
            read(path)
    path.mkdir()
    with pytest.raises(EventRecordError, match="cannot be read"):
        read_record(path)


def test_without_space_nothing_is_recorded_and_that_is_said(tmp_path: Path) -> None:
    assert "no flight record in" in open_record(tmp_path / "missing", 0, 1)
    assert ACTIVE.recorder is None
    with recorded("loader", "next batch"):
        pass
