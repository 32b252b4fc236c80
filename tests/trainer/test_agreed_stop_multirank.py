"""A signal, a time limit or a file on one rank: all ranks stop at one step with a checkpoint, and a run goes on."""

import atexit
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from harness import run_ranks
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan, ShardingPlan
from tutti.errors import RESUMABLE, LaunchError, PlanError
from tutti.trainer.metrics import read_rows

PLANS: dict[str, dict[str, Any]] = {
    "one": {"mesh": {"replicate": 1}},
    "replicate": {"mesh": {"replicate": 2}},
    "three": {"mesh": {"replicate": 3}},
    "ZeRO-2": {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=2)},
    "stage": {"mesh": {"stage": 2}},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """`how` rank 1 (or the only one) asks to stop, at update `at`; `where`: in the step, evaluation or checkpoint."""

    folder: str
    plan: str = "replicate"
    how: str = ""
    where: str = "step"
    at: int = 4
    deferred: bool = False
    resume: bool = False


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The exit code, how far the training came, the weights, and the handlers that were left."""

    code: int
    step: int
    losses: dict[int, float]
    weights: dict[str, torch.Tensor]
    handlers_back: bool


class Asks(tutti.Callback):
    """Asks to stop on one rank, as the case says."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def on_step_end(self, job: tutti.Job, step: int, loss: float) -> None:
        if self.case.where == "step":
            self.ask(job)

    def on_evaluate_end(self, job: tutti.Job, results: dict[str, float]) -> None:
        if self.case.where == "evaluation":
            self.ask(job)

    def ask(self, job: tutti.Job) -> None:
        if job.rank != job.world_size - 1 or job.global_step != self.case.at:
            return
        if self.case.how == "file":
            (Path(self.case.folder) / "stop").touch()
            job._run().loop.stopping._looked_at_s = -10.0  # as if a second had gone
        elif self.case.how == "limit":
            job._run().loop.stopping._stop_at_s = time.time()
        elif self.case.how:
            os.kill(os.getpid(), getattr(signal, self.case.how))


def _train(case: Case) -> Trained:
    serialization.save(Plan(batch=BatchPlan(global_batch_size=6), **PLANS[case.plan]), Path("plan.json"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUTTI_PLAN", "plan.json")
        patch.setenv("TUTTI_RUN_FOLDER", case.folder)
        if case.resume:
            patch.setenv("TUTTI_RESUME", case.folder)
        handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
        every = 2 if case.where == "checkpoint" else None
        job = tutti.Job(global_batch_size=6, seed=3, callbacks=Asks(case), checkpoint_every=every)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        data = TensorDataset(torch.randn(30, 6, dtype=torch.float64), torch.arange(30) % 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, _, loader = job.prepare(model, optimizer, data, nn.functional.cross_entropy)
        run = job._run()
        run.loop.device_decides = case.deferred
        if case.where == "checkpoint":
            _ask_while_saving(job, case)
        losses, code = {}, 0
        try:
            for _ in job.epochs(3):
                for batch in loader:
                    losses[job.global_step] = float(job.step(batch))
                job.evaluate(data)
        except SystemExit as ended:
            code = ended.code
        step = job.global_step
        back = (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == handlers
        weights = {} if code else {name: value.clone() for name, value in job.state_dict().items()}
        return Trained(code=code, step=step, losses=losses, weights=weights, handlers_back=back)


def _ask_while_saving(job: tutti.Job, case: Case) -> None:
    """Ask while a checkpoint is being written in the background."""
    checkpoints = job._run().output.checkpoints
    begin = checkpoints._begin

    def asking(*, background: bool) -> Any:
        pending = begin(background=background)
        Asks(case).ask(job)
        return pending

    checkpoints._begin = asking


def _goes_on(case: Case, world_size: int, other: str, other_size: int) -> list[Trained]:
    """Train, be stopped, and go on under another plan; compare with a run that nobody has disturbed."""
    stopped = run_ranks(_train, world_size, case)
    assert [rank.code for rank in stopped] == [RESUMABLE] * world_size
    assert len({rank.step for rank in stopped}) == 1
    assert all(rank.handlers_back for rank in stopped)
    rest = run_ranks(_train, other_size, Case(folder=case.folder, plan=other, resume=True))
    whole = run_ranks(_train, 1, Case(folder=f"{case.folder}-whole", plan="one"))[0]
    assert [rank.code for rank in rest] == [0] * other_size
    losses = stopped[0].losses | rest[0].losses
    assert stopped[0].losses.keys() & rest[0].losses.keys() == set()
    assert losses.keys() == whole.losses.keys()
    torch.testing.assert_close(losses, whole.losses, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(rest[0].weights, whole.weights, atol=1e-12, rtol=1e-12)
    return stopped


def test_a_signal_on_one_rank_stops_all_and_another_plan_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stopped = _goes_on(Case(folder=str(folder), how="SIGTERM"), 2, "three", 3)
    assert stopped[0].step == 5  # agreed in the step after the signal
    row = next(row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "preempted")
    assert (row["step"], row["reason"]) == (5, "rank 1 got SIGTERM")


@pytest.mark.parametrize("plan", ["ZeRO-2", "stage"])
def test_plans_that_divide_the_model_stop_and_go_on(plan: str, tmp_path: Path) -> None:
    _goes_on(Case(folder=str(tmp_path / "run"), plan=plan, how="SIGUSR1"), 2, "one", 1)


@pytest.mark.parametrize("where", ["evaluation", "checkpoint"])
def test_a_signal_in_an_evaluation_or_a_checkpoint_stops_after_the_next_step(where: str, tmp_path: Path) -> None:
    at = {"evaluation": 5, "checkpoint": 6}[where]
    stopped = _goes_on(Case(folder=str(tmp_path / "run"), how="SIGTERM", where=where, at=at), 2, "one", 1)
    assert stopped[0].step == at + 1


@pytest.mark.parametrize("how", ["file", "limit"])
def test_a_file_and_a_time_limit_stop_one_process(how: str, tmp_path: Path) -> None:
    _goes_on(Case(folder=str(tmp_path / "run"), plan="one", how=how), 1, "replicate", 2)
    assert not (tmp_path / "run" / "stop").exists()


def test_where_the_device_decides_ranks_stop_a_step_later(tmp_path: Path) -> None:
    stopped = _goes_on(Case(folder=str(tmp_path / "run"), how="SIGTERM", at=2, deferred=True), 2, "one", 1)
    assert stopped[0].step == 4


def test_a_stop_in_the_last_step_lets_the_run_end(tmp_path: Path) -> None:
    trained = run_ranks(_train, 1, Case(folder=str(tmp_path / "run"), plan="one", how="SIGTERM", at=15))[0]
    assert (trained.code, trained.step, trained.handlers_back) == (0, 15, True)


def _signals(own: bool, off: bool) -> tuple[bool, bool, int]:
    """Train with a SIGUSR1 handler of the script's own, or without any; return what handles signals in the loop."""

    def mine(*_: Any) -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        if off:
            patch.setenv("TUTTI_STOP_SIGNALS", "0")
        before = signal.signal(signal.SIGUSR1, mine) if own else signal.getsignal(signal.SIGUSR1)
        ended = []
        signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
        term = signal.getsignal(signal.SIGTERM)
        jobs = [tutti.Job(global_batch_size=4, folder=f"run-{number}") for number in range(2)]
        loaders = []
        for job in jobs:
            model = nn.Linear(2, 1)
            data = TensorDataset(torch.ones(16, 2), torch.ones(16, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loaders.append(job.prepare(model, optimizer, data, nn.functional.mse_loss)[2])
        expected = (True, True) if off else (own, False)
        for batches in zip(*loaders, strict=True):
            for job, batch in zip(jobs, batches, strict=True):
                job.step(batch)
            user = signal.getsignal(signal.SIGUSR1)
            assert (user == (mine if own else before), signal.getsignal(signal.SIGTERM) is term) == expected
        back = signal.getsignal(signal.SIGTERM) is term
        code = 0
        loader = iter(loaders[0])
        next(loader)
        os.kill(os.getpid(), signal.SIGTERM)
        if not off:
            assert not ended
            os.kill(os.getpid(), signal.SIGTERM)  # the second has its usual effect
        return back, len(ended) == 1, code


@pytest.mark.parametrize(("own", "off"), [(True, False), (False, False), (False, True)])
def test_handlers_of_the_script_stay_and_come_back(own: bool, off: bool) -> None:
    assert run_ranks(_signals, 1, own, off) == [(True, True, 0)]


def _several(folder: str, how: str) -> tuple[int, list[bool]]:
    """Train two Jobs in turn until a signal stops them, or the first one's time limit while signals are left alone."""
    if how == "time limit":
        os.environ["TUTTI_STOP_SIGNALS"] = "0"
    jobs, loaders = [], []
    for number in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TUTTI_RUN_FOLDER", f"{folder}/{number}")
            model = nn.Linear(2, 1)
            data = TensorDataset(torch.ones(16, 2), torch.ones(16, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            job = tutti.Job(global_batch_size=4, time_limit=3600.0)
            loaders.append(job.prepare(model, optimizer, data, nn.functional.mse_loss)[2])
        jobs.append(job)
    code = 0
    try:
        for number, batches in enumerate(zip(*loaders, strict=True)):
            if number == 1 and how == "SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)
            elif number == 1:
                jobs[0]._run().loop.stopping._stop_at_s = time.time()
            for job, batch in zip(jobs, batches, strict=True):
                job.step(batch)
    except SystemExit as ended:
        code = ended.code
    atexit._run_exitfuncs()
    return code, [(Path(folder) / str(number) / "checkpoints" / "step-00000002").exists() for number in range(2)]


@pytest.mark.parametrize("how", ["SIGTERM", "time limit"])
def test_all_jobs_that_train_are_saved_and_have_stopped(tmp_path: Path, how: str) -> None:
    assert run_ranks(_several, 1, str(tmp_path), how) == [(RESUMABLE, [True, True])]
    ends = [[row for row in read_rows(tmp_path / name / "metrics.jsonl") if row["kind"] == "end"] for name in "01"]
    assert [[row["status"] for row in rows] for rows in ends] == [["stopped"]] * 2


def _limited() -> str:
    os.environ["TUTTI_SYNC"] = "asynchronous"
    job = tutti.Job(global_batch_size=4, time_limit=60.0)
    data = TensorDataset(torch.ones(16, 2), torch.ones(16, 1))
    model = nn.Linear(2, 1)
    try:
        job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, nn.functional.mse_loss)
    except PlanError as error:
        return str(error)
    return "nothing"


def test_a_limit_of_replicas_without_common_steps_is_refused() -> None:
    for said in run_ranks(_limited, 2):
        assert "time_limit = 60 with replicas that step asynchronously" in said


def test_limits_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match="time_limit = 0"):
        tutti.Job(global_batch_size=4, time_limit=0)
    monkeypatch.setenv("TUTTI_STOP_AT_S", "soon")
    with pytest.raises(LaunchError, match="TUTTI_STOP_AT_S='soon'"):
        tutti.Job(global_batch_size=4)
