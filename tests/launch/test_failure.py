"""The primary cause is found from what ranks left behind, whatever the order in which they were heard."""

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch._utils import ExceptionWrapper

from tutti.data import samples
from tutti.errors import CheckpointError, DataError
from tutti.launch.failure import killed, primary, sentence
from tutti.launch.launcher import ErrorKind, LaunchSpec, RankError
from tutti.launch.rank_main import failure_of, is_peer_error


def spec(*ranks_per_node: int) -> LaunchSpec:
    rendezvous = "a:1" if len(ranks_per_node) > 1 else None
    return LaunchSpec(target="t.py", folder=Path("run"), ranks_per_node=ranks_per_node, rendezvous=rendezvous)


def error(
    rank: int, kind: ErrorKind, time_s: float, message: str = "m", *, host: str = "a", trace: str = ""
) -> RankError:
    return RankError(rank=rank, host=host, time_s=time_s, kind=kind, exit_code=1, message=message, traceback=trace)


def by_rank(*errors: RankError) -> dict[int, RankError]:
    return {one.rank: one for one in errors}


@pytest.mark.parametrize("kind", ["user", "run", "exception", "killed"])
def test_a_lost_peer_is_never_the_cause_however_early(kind: ErrorKind) -> None:
    found = primary(spec(3), by_rank(error(0, "peer", 1.0), error(1, kind, 3.0), error(2, "peer", 2.0)), {})
    assert found.ranks == (1,)


def test_of_several_causes_the_earliest_counts() -> None:
    errors = by_rank(error(0, "exception", 3.0, "late"), error(1, "exception", 2.0, "early"), error(2, "peer", 1.0))
    assert primary(spec(3), errors, {}).message == "early"


def test_equal_messages_are_one_cause_of_several_ranks_and_hosts() -> None:
    errors = by_rank(error(0, "run", 2.0, "NaN"), error(1, "run", 1.0, "NaN", host="b"), error(2, "run", 0.5, "other"))
    errors[2] = error(2, "peer", 0.1)
    found = primary(spec(2, 1), errors, {})
    assert found.ranks == (0, 1)
    assert sentence(spec(2, 1), found) == "ranks 0 and 1 on hosts a, b failed: NaN"


def test_a_silent_rank_is_named_when_all_others_lost_it() -> None:
    found = primary(spec(3), by_rank(error(0, "peer", 1.0), error(2, "peer", 1.1)), {0: 1, 2: 1})
    assert found.ranks == (1,)
    assert "hangs" in found.message


def test_a_peer_lost_on_another_node_sends_the_reader_there() -> None:
    found = primary(spec(1, 1), by_rank(error(0, "peer", 1.0, "Connection closed by peer")), {0: 1})
    assert found.ranks == (0,)
    assert "another node" in found.message


def test_the_traceback_is_shown_for_exceptions_only() -> None:
    raised = primary(spec(2), by_rank(error(0, "exception", 1.0, "ValueError: x", trace="T\nValueError: x\n")), {})
    assert sentence(spec(2), raised) == "rank 0 on host a failed:\nT\nValueError: x"
    meant = primary(spec(2), by_rank(error(0, "user", 1.0, "say which", trace="T\n")), {})
    assert sentence(spec(2), meant) == "rank 0 on host a failed: say which"


def test_a_termination_from_outside_is_named() -> None:
    assert "signal 15 (SIGTERM)" in killed(1, -int(signal.SIGTERM)).message
    assert "exit code 143" in killed(1, 128 + signal.SIGTERM).message


def test_a_silent_exit_keeps_its_code() -> None:
    assert killed(0, 7).exit_code == 7


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1", True),
        ("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 8000ms for recv operation to complete", True),
        ("Connection reset by peer", True),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_what_a_lost_peer_sounds_like(message: str, expected: bool) -> None:
    assert is_peer_error(RuntimeError(message)) is expected


def test_an_error_that_follows_a_lost_peer_is_no_cause() -> None:
    lost = RuntimeError("Connection closed by peer")
    following, caused, replaced = CheckpointError("a"), CheckpointError("b"), CheckpointError("c")
    following.__context__ = lost  # raised while the loss was handled
    caused.__cause__ = lost  # raise ... from lost
    replaced.__context__, replaced.__suppress_context__ = lost, True  # raise ... from None: said on purpose
    assert [failure_of(0, error).kind for error in (following, caused, replaced)] == ["peer", "peer", "run"]


@pytest.mark.parametrize(
    ("raised", "kind", "code"),
    [(DataError("d"), "user", 2), (CheckpointError("c"), "run", 1), (KeyError("k"), "exception", 1)],
)
def test_kind_and_exit_code_follow_the_error(raised: Exception, kind: str, code: int) -> None:
    failure = failure_of(3, raised)
    assert (failure.rank, failure.kind, failure.exit_code) == (3, kind, code)


def test_an_error_of_a_loaders_worker_shows_the_scripts_lines_only() -> None:
    def read_again() -> None:
        worker = f"""Caught OSError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/venv/torch/utils/data/_utils/worker.py", line 374, in _worker_loop
    data = fetcher.fetch(index)
  File "{samples.__file__}", line 92, in _seeded
    return self.dataset[index]
  File "/home/train.py", line 20, in __getitem__
    raise OSError("no such row")
OSError: no such row
"""
        raised = SimpleNamespace(exc_type=OSError, exc_msg=worker, where="in DataLoader worker process 0")
        ExceptionWrapper.reraise(raised)  # type: ignore[arg-type]

    with pytest.raises(OSError, match="no such row") as caught:
        read_again()
    shown = failure_of(0, caught.value).traceback
    assert (
        'File "/home/train.py", line 20, in __getitem__\n    raise OSError("no such row")\nOSError: no such row'
        in shown
    )
    assert "in read_again" in shown
    assert not any(each in shown for each in ("_seeded", "self.dataset", "_worker_loop", "in reraise"))


def test_a_script_may_lose_a_connection_of_its_own() -> None:
    def raised(file: str) -> BaseException:
        try:
            exec(compile("raise ConnectionResetError(104, 'Connection reset by peer')", file, "exec"))
        except OSError as error:
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            return error
        raise AssertionError

    assert not is_peer_error(raised("train.py"))
    assert not is_peer_error(raised("/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py"))
    assert is_peer_error(raised("/venv/lib/python3.11/site-packages/torch/distributed/rendezvous.py"))
