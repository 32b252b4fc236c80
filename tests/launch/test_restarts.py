"""What follows a failure is decided from the failure, the place and the checkpoints, without any rank."""

import json
from pathlib import Path

import pytest

from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan
from tutti.config.run_folder import RunFolder
from tutti.launch.failure import Failure, shortened
from tutti.launch.launcher import ErrorKind, LaunchSpec, RankError
from tutti.launch.restarts import RestartPolicy, Restarts, full_plan, smaller
from tutti.launch.supervisor import Outcome, Restart
from tutti.launch.survival import Survivors, Waiting
from tutti.surviving_rank import LeftBehind


class Rig:
    """A run folder into which steps and checkpoints are written as by ranks."""

    def __init__(self, folder: Path, ranks: int = 4, environment: dict[str, str] | None = None, **policy: object):
        self.folder = folder
        self.spec = LaunchSpec(target="t.py", folder=folder, ranks_per_node=(ranks,), environment=environment or {})
        self.restarts = Restarts(RestartPolicy(**policy), self.spec)  # type: ignore[arg-type]

    def rows(self, *rows: dict[str, object]) -> None:
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def steps(self, first: int, last: int) -> None:
        self.rows({"kind": "start", "resumed_at_step": first - 1})
        self.rows(*({"kind": "step", "step": step} for step in range(first, last + 1)))

    def checkpoint(self, step: int) -> None:
        folder = self.folder / f"checkpoints/step-{step:08}"
        folder.mkdir(parents=True)
        (folder / "index.json").touch()

    def lose(self, rank: int, waiting: dict[int, Waiting], written: dict[int, LeftBehind] | None = None) -> Restart:
        failure = Failure(
            ranks=(rank,), first=rank, hosts=("a",), message="m", traceback="", exit_code=1, kind="killed"
        )
        outcome = Outcome(status="failed", exit_code=1, failure=failure, waiting=waiting)
        decided = self.restarts.after(self.spec, outcome, (written or {}).get)
        assert isinstance(decided, Restart)
        self.spec = decided.spec
        return decided

    def fail(self, rank: int = 1, message: str = "boom", kind: ErrorKind = "exception") -> Restart | str:
        failure = Failure(
            ranks=(rank,), first=rank, hosts=("a",), message=message, traceback="", exit_code=1, kind=kind
        )
        decided = self.restarts.after(self.spec, Outcome(status="failed", exit_code=1, failure=failure))
        if isinstance(decided, Outcome):
            return decided.given_up
        self.spec = decided.spec
        return decided


def at(step: int | None, *, drawn: bool = False, refusal: str = "", again: str = "") -> Waiting:
    error = RankError(rank=0, host="a", time_s=0.0, kind="peer", exit_code=1, message="closed")
    return Waiting(error=error, step=step, drawn=drawn, refusal=refusal, again=again)


def left(step: int, *, drawn: bool = False) -> LeftBehind:
    return LeftBehind(step=step, drawn=drawn)


def test_the_newest_state_in_memory_is_gone_on_from(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_restarts=9)
    rig.steps(1, 8)
    decided = rig.lose(1, {0: at(7), 2: at(8), 3: at(8)})
    assert decided.survivors == Survivors(ranks={0: 0, 2: 2, 3: 3}, holder=2, step=8)
    assert "4 ranks go on after step 8 from the memory of rank 2" in decided.message


def test_fewer_ranks_are_numbered_anew(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_restarts=9, on_failure="shrink")
    rig.steps(1, 8)
    decided = rig.lose(1, {0: at(7), 2: at(7), 3: at(8)})
    assert decided.spec.world_size == 3
    assert decided.survivors == Survivors(ranks={0: 0, 1: 2, 2: 3}, holder=2, step=8)


@pytest.mark.parametrize(
    ("waiting", "written", "said"),
    [
        ({0: at(None, refusal="it is divided")}, {}, "not from memory: it is divided"),
        ({0: at(8, again="a thread runs")}, {}, "not from memory: a thread runs"),
        ({0: at(8, drawn=True), 2: at(7), 3: at(8)}, {1: left(8)}, "those of a rank are lost"),
        ({0: at(8, drawn=True), 2: at(8), 3: at(8)}, {1: left(7)}, "those of a rank are lost"),
        ({0: at(8), 2: at(8), 3: at(8)}, {1: left(7, drawn=True)}, "those of a rank are lost"),
        ({0: at(8, drawn=True), 2: at(8), 3: at(8)}, {}, "those of a rank are lost"),
    ],
)
def test_a_state_that_is_not_whole_is_not_gone_on_from(
    tmp_path: Path, waiting: dict[int, Waiting], written: dict[int, LeftBehind], said: str
) -> None:
    rig = Rig(tmp_path, max_restarts=9)
    rig.steps(1, 8)
    rig.checkpoint(4)
    decided = rig.lose(1, waiting, written)
    assert decided.survivors is None
    assert "go on from step-00000004" in decided.message
    assert said in decided.message


def test_draws_of_all_ranks_are_known(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_restarts=9)
    rig.steps(1, 8)
    assert rig.lose(1, {0: at(8, drawn=True), 2: at(8), 3: at(8)}, {1: left(8)}).survivors is not None


@pytest.mark.parametrize("kind", ["exception", "user"])
def test_a_script_that_cannot_run_twice_gets_new_processes(tmp_path: Path, kind: ErrorKind) -> None:
    rig = Rig(tmp_path, max_restarts=1, environment={"TUTTI_RECOVER": "memory"})
    rig.steps(1, 8)
    rig.lose(1, {0: at(8), 2: at(8), 3: at(8)})
    decided = rig.fail(rank=2, message="already registered", kind=kind)
    assert isinstance(decided, Restart)
    assert "in new processes from here on" in decided.message
    assert "TUTTI_RECOVER" not in decided.spec.environment


def test_without_restarts_nothing_follows(tmp_path: Path) -> None:
    assert Rig(tmp_path).fail() == ""


def test_a_mistake_of_the_user_is_not_repeated(tmp_path: Path) -> None:
    assert Rig(tmp_path, max_restarts=3).fail(kind="user") == ""


def test_the_number_of_restarts_is_bounded(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_restarts=2)
    for step in (3, 5):
        rig.steps(step, step)
        assert isinstance(rig.fail(), Restart)
    rig.steps(7, 7)
    assert "started again 2 times" in str(rig.fail())


def test_ranks_continue_from_the_newest_checkpoint_of_this_run(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_restarts=9)
    rig.steps(1, 3)
    first = rig.fail()
    assert isinstance(first, Restart)
    assert "from the beginning" in first.message
    assert "TUTTI_RESUME" not in first.spec.environment
    rig.checkpoint(4)
    rig.checkpoint(8)
    rig.steps(1, 9)
    second = rig.fail()
    assert isinstance(second, Restart)
    assert "from step-00000008" in second.message
    assert second.spec.environment["TUTTI_RESUME"] == str(tmp_path)


def test_a_checkpoint_that_was_left_behind_is_not_continued_from(tmp_path: Path) -> None:
    before = Rig(tmp_path)
    before.checkpoint(4)
    before.checkpoint(8)
    source = str(tmp_path / "checkpoints/step-00000004")
    rig = Rig(tmp_path, max_restarts=9, environment={"TUTTI_RESUME": source})
    rig.steps(5, 5)
    first = rig.fail()
    assert isinstance(first, Restart)
    assert first.spec.environment["TUTTI_RESUME"] == source
    rig.checkpoint(6)
    rig.steps(5, 6)
    second = rig.fail()
    assert isinstance(second, Restart)
    assert second.spec.environment["TUTTI_RESUME"] == str(tmp_path / "checkpoints/step-00000006")


def test_the_same_failure_in_the_same_step_ends_the_run(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_restarts=9)
    rig.steps(1, 8)
    rig.checkpoint(8)
    assert isinstance(rig.fail(), Restart)
    rig.rows({"kind": "start", "resumed_at_step": 8})  # the step of the checkpoint is the last one, again
    assert "failed in step 9" in str(rig.fail())


@pytest.mark.parametrize("other", [{"rank": 2}, {"message": "other"}])
def test_another_failure_in_the_same_step_does_not(tmp_path: Path, other: dict[str, object]) -> None:
    rig = Rig(tmp_path, max_restarts=9)
    rig.steps(1, 8)
    assert isinstance(rig.fail(), Restart)
    rig.steps(1, 8)
    assert isinstance(rig.fail(**other), Restart)  # type: ignore[arg-type]


def test_delays_grow_while_no_step_is_made(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_restarts=9)
    rig.steps(1, 2)
    decided = [rig.fail(), *(rig.fail(message=f"m{number}") for number in range(4))]
    rig.steps(3, 3)
    decided.append(rig.fail())
    assert [one.delay_s for one in decided if isinstance(one, Restart)] == [0, 1, 2, 4, 8, 0]


def test_a_rank_that_twice_fails_on_starting_is_left_out_if_allowed(tmp_path: Path) -> None:
    stuck, rig = Rig(tmp_path, max_restarts=9), Rig(tmp_path, max_restarts=9, min_ranks=3)
    assert isinstance(stuck.fail(rank=3), Restart)
    assert "failed before training began" in str(stuck.fail(rank=3))
    for ranks in (4, 3):
        decided = rig.fail(rank=3)
        assert isinstance(decided, Restart)
        assert decided.spec.world_size == ranks
    rig.fail(rank=1, message="another")
    assert "3 or more are asked for (--min-ranks)" in str(rig.fail(rank=1, message="another"))


def test_a_shrunk_plan_is_in_the_run_folder(tmp_path: Path) -> None:
    given = Plan(batch=BatchPlan(global_batch_size=8), mesh={"replicate": 2, "split": 2})
    file = serialization.save(given, tmp_path / "mine.json")
    rig = Rig(tmp_path, environment={"TUTTI_PLAN": str(file)}, max_restarts=1, on_failure="shrink")
    decided = rig.fail()
    assert isinstance(decided, Restart)
    assert decided.spec.world_size == 2
    assert serialization.load(Plan, Path(decided.spec.environment["TUTTI_PLAN"])).mesh == {"split": 2}
    assert serialization.load(Plan, file) == given


@pytest.mark.parametrize(
    ("environment", "written", "mesh"),
    [
        ({}, None, None),
        ({"TUTTI_MESH": "shard=4", "TUTTI_SHARD": "level=2"}, None, "shard=3"),
        ({}, {"shard": 4}, "shard=3"),  # as the script annotated it
        ({}, {"shard": 2}, None),  # of an earlier run
    ],
)
def test_a_run_without_a_plan_shrinks_its_mesh(
    tmp_path: Path, environment: dict[str, str], written: dict[str, int] | None, mesh: str | None
) -> None:
    if written is not None:
        plan = Plan(batch=BatchPlan(global_batch_size=8), mesh=written)  # type: ignore[arg-type]
        serialization.save(plan, RunFolder(tmp_path).plan)
    decided = Rig(tmp_path, environment=environment, max_restarts=1, on_failure="shrink").fail()
    assert isinstance(decided, Restart)
    assert decided.spec.world_size == 3
    assert decided.spec.environment.get("TUTTI_MESH") == mesh
    assert decided.spec.environment.get("TUTTI_SHARD") == environment.get("TUTTI_SHARD")


@pytest.mark.parametrize(
    ("written", "mesh"),
    [
        ({"split": 2}, {"replicate": 2, "split": 2}),
        ({"replicate": 2, "split": 2}, {"replicate": 2, "split": 2}),
        ({"replicate": 3}, {"replicate": 4}),
    ],
)
def test_ranks_that_come_again_are_replicas_of_the_plan_that_was_written(
    written: dict[str, int], mesh: dict[str, int], tmp_path: Path
) -> None:
    plan = Plan(mesh=written, batch=BatchPlan(global_batch_size=8))  # type: ignore[arg-type]
    serialization.save(plan, RunFolder(tmp_path).plan)
    spec = LaunchSpec(target="t.py", folder=tmp_path, ranks_per_node=(4,))
    found = full_plan(spec)
    assert found is not None
    assert dict(found.mesh) == mesh
    assert dict(smaller(spec, 3, 1, found).environment) == {
        "TUTTI_SHRUNK": "1",
        **({"TUTTI_MESH": "split=2"} if "split" in mesh else {}),
    }


def test_long_texts_of_a_failure_fit_into_a_message() -> None:
    failure = Failure(
        ranks=(0,), first=0, hosts=("a",), message="x" * 10**6, traceback="a" + "y" * 10**6 + "b", exit_code=1
    )
    short = shortened(failure)
    assert max(len(short.message), len(short.traceback)) < 21_000
    assert short.traceback.startswith("a")
    assert short.traceback.endswith("b")
