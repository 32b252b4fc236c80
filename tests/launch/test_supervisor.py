"""What the supervisor says where two things happen at once: nothing that the user must know gets lost."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from tutti.config import serialization
from tutti.config.run_folder import RunFolder
from tutti.errors import LaunchError
from tutti.launch import supervisor
from tutti.launch.hang_verdict import HangVerdict
from tutti.launch.hang_watch import HangWatch
from tutti.launch.launcher import LaunchSpec, RankError
from tutti.launch.rank_watch import Silent
from tutti.launch.supervisor import Interrupts, Outcome, Restart, supervise

HANG = HangVerdict(kind="missing", message="rank 1 is missing", waiting=(0,), missing=(1,), ranks={})


class Played:
    """Two ranks whose exits are `exits`, one after the other."""

    def __init__(self, *exits: dict[int, int]) -> None:
        self.exits = [*exits]

    def wait(self, timeout_s: float) -> dict[int, int]:
        return self.exits.pop(0) if len(self.exits) > 1 else self.exits[0]

    def stop(self, grace_s: float, hurry: Callable[[], bool] = lambda: False) -> None:
        pass


class Again:
    """Starts the ranks again, whatever happens."""

    def __init__(self, spec: LaunchSpec) -> None:
        self.spec = spec

    def begin(self, spec: LaunchSpec) -> LaunchSpec:
        return spec

    def may_restart(self, error: RankError) -> bool:
        return True

    def called_off(self) -> Literal[""]:
        return ""

    def after(self, *about: object) -> Restart:
        return Restart(spec=self.spec, delay_s=0.0, message="again")


@pytest.fixture
def spec(tmp_path: Path) -> LaunchSpec:
    for rank in range(2):
        RunFolder(tmp_path).rank(rank).mkdir(parents=True)
    return LaunchSpec(target="t.py", folder=tmp_path, ranks_per_node=(2,))


def supervised(spec: LaunchSpec, *exits: dict[int, int]) -> Outcome:
    return supervise(lambda _: Played(*exits), spec, Silent(), Interrupts())


def test_a_rank_that_is_killed_while_ranks_are_judged_is_the_cause(
    spec: LaunchSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HangWatch, "look", lambda watch: HANG)
    killed = supervised(spec, {}, {1: -9}).failure
    assert killed is not None
    assert "killed by signal 9" in killed.message
    hangs = supervised(spec, {}).failure
    assert hangs is not None
    assert hangs.verdict == HANG.message


def test_a_rank_that_is_killed_as_another_times_out_is_the_cause(
    spec: LaunchSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed_out(_: LaunchSpec) -> Played:
        error = RankError(rank=0, host="a", time_s=1.0, kind="peer", exit_code=1, message="timed out")
        serialization.save(error, RunFolder(spec.folder).rank(0) / "error.json")
        return Played({0: 1, 1: -9})

    monkeypatch.setattr(supervisor, "explain_timeout", lambda spec, told: HANG)
    outcome = supervise(timed_out, spec, Silent(), Interrupts())
    assert outcome.failure is not None
    assert "killed by signal 9" in outcome.failure.message


def test_a_failure_is_told_though_the_next_start_fails(spec: LaunchSpec) -> None:
    starts = iter([Played({0: 3, 1: 3})])

    def start(_: LaunchSpec) -> Played:
        for handle in starts:
            return handle
        raise LaunchError("the fork server died")

    outcome = supervise(start, spec, Silent(), Interrupts(), recovery=Again(spec))
    assert outcome.failure is not None
    assert "exit code 3" in outcome.failure.message
    assert outcome.given_up == "the ranks could not be started again: the fork server died"
    with pytest.raises(LaunchError, match="the fork server died"):
        supervise(start, spec, Silent(), Interrupts(), recovery=Again(spec))
