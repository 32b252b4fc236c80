"""Callbacks, early stopping and job.should_stop: agreed by all ranks, saved, and the same at any number of ranks."""

import importlib
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tutti
from harness import run_ranks
from trainer.training import Mlp, vectors
from tutti.checkpoint.sources import open_checkpoint
from tutti.errors import CheckpointError, ScriptError
from tutti.trainer.callbacks import JobCallbacks
from tutti.trainer.metrics import read_rows


def start(folder: Path, **options: Any) -> Any:
    """A Job with plain SGD in float64 on 50 samples in batches of 8: 7 steps an epoch."""
    os.environ["TUTTI_RUN_FOLDER"] = str(folder)
    torch.set_default_dtype(torch.float64)
    job = tutti.Job(global_batch_size=8, **options)
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, _, loader = job.prepare(model, optimizer, vectors(), nn.functional.cross_entropy)
    return job, model, loader


def kinds(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == kind]


class Stateful(tutti.Callback):
    """Its state fails when it is saved, cannot be written, or fails when it is restored."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def state_dict(self) -> dict[str, Any]:
        if self.fault == "save":
            raise KeyError("count")
        return {"x": full_disk if self.fault == "write" else 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.x = state["x"] + self.missing  # type: ignore[attr-defined]


class Recorder(tutti.Callback):
    """Notes what was called, and the loss of the last step."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.losses: list[float] = []

    def on_train_start(self, job: Any) -> None:
        self.events.append("train")

    def on_epoch_start(self, job: Any, epoch: int) -> None:
        self.events.append(("epoch", epoch))

    def on_step_end(self, job: Any, step: int, loss: float) -> None:
        self.losses.append(loss)
        self.events.append(step)

    def on_evaluate_end(self, job: Any, values: dict[str, float]) -> None:
        self.events.append(sorted(values))

    def on_log(self, job: Any, values: dict[str, float]) -> None:
        self.events.append(sorted(values))

    def on_epoch_end(self, job: Any, epoch: int) -> None:
        self.events.append(("end", epoch))

    def on_train_end(self, job: Any) -> None:
        self.events.append("trained")


def events(root: Path) -> Any:
    recorder = Recorder()
    job, _, loader = start(root / "events", callbacks=[recorder])
    losses = []
    for _ in job.epochs(2):
        for number, batch in enumerate(loader):
            losses.append(job.step(batch))
            if number == 1:
                break
        job.evaluate(vectors(), name="val")
        job.log(seen=3, word="x")
    logs: list[Any] = [["val/loss"]] if job.is_main else []
    values: list[Any] = [["seen"]] if job.is_main else []
    one = [*logs, ["loss"], *values]
    assert recorder.losses == losses
    assert recorder.events == [
        "train", ("epoch", 0), 1, 2, *one, ("end", 0), ("epoch", 1), 3, 4, *one, ("end", 1), "trained"
    ]  # fmt: skip


def accumulated(root: Path) -> Any:
    """Without job.epochs; two losses before an update add up, as in job.update's own row."""
    recorder = Recorder()
    job, _, loader = start(root / "accumulated", callbacks=[recorder])
    for batch in loader:
        first = job.forward_backward(lambda model, b: nn.functional.cross_entropy(model(b[0]), b[1]), batch)
        second = job.forward_backward(lambda model, b: model(b[0]).square().mean(), batch)
        job.update()
        assert recorder.losses[-1] == pytest.approx(first + second, rel=1e-15)
    assert recorder.events[:2] == ["train", 1]


def stop_between_epochs(root: Path) -> Any:
    """Any rank's wish stops all; the run is saved and finished although the script leaves the loop."""
    folder = root / "between"
    job, model, loader = start(folder)
    answers = []
    for epoch in job.epochs(9):
        for batch in loader:
            job.step(batch)
        answers.append(job.should_stop(job.rank == job.world_size - 1 and epoch == 1))
        if answers[-1]:
            break
    assert answers == [False, True]
    assert (folder / "checkpoints" / "step-00000014" / "index.json").exists()
    assert not job.should_stop(False)  # the loop is over
    if job.is_main:
        assert [row["epoch"] for row in kinds(folder, "epoch")] == [0, 1]
        assert "job.should_stop was true at step 14, in epoch 2 (counted from 1)" in kinds(folder, "stop")[0]["reason"]
    return {name: value.clone() for name, value in model.state_dict().items()}


def stop_within_an_epoch(
    root: Path, resume: Path | None = None, stop_at: int = 10, name: str = "within"
) -> list[float]:
    """Leave the inner loop only: job.epochs ends by itself, and a resumed run takes the next batch."""
    job, _, loader = start(root / name, resume=resume)
    losses = []
    for _ in job.epochs(3):
        for batch in loader:
            losses.append(job.step(batch))
            if job.should_stop(job.rank == 0 and job._run().state.progress.step == stop_at):
                assert job.should_stop(False)  # it stays true until the loop has ended
                break
    return losses


def early(root: Path, values: list[float], resume: Path | None = None, name: str = "early", patience: int = 3) -> Any:
    """Other ranks log values that would never stop."""
    stopping = tutti.EarlyStopping("score", patience=patience, mode="max", min_delta=0.5)
    job, _, loader = start(root / name, callbacks=[stopping], resume=resume)
    ran = []
    for epoch in job.epochs(len(values)):
        ran.append(epoch)
        for batch in loader:
            job.step(batch)
            break
        job.log(score=values[epoch] if job.is_main else 100.0 * epoch)
    return ran


SCORES = [1.0, 2.0, 2.4, float("nan"), 3.0, 3.4, 3.2, 3.3, 9.0]
"""With a least improvement of 0.5: better in epochs 0, 1 and 4, so that patience 3 ends after epoch 7."""


def full_disk() -> Any:
    raise CheckpointError("no space")


def fails(root: Path) -> list[str]:
    """Messages of what is refused."""

    class Broken(tutti.Callback):
        def on_step_end(self, job: Any, step: int, loss: float) -> None:
            raise ValueError("no disk")

    messages = []
    job, _, loader = start(root / "broken", callbacks=[Broken()])
    try:
        for batch in loader:
            job.step(batch)
    except tutti.TuttiError as error:
        messages.append(str(error))
    job, _, loader = start(root / "unsaved")
    job._run().output.checkpoints.save = full_disk
    for _ in job.epochs(5):
        for batch in loader:
            job.step(batch)
            break
        if job.should_stop(True):
            break
    try:
        job.evaluate(vectors())
    except tutti.TuttiError as error:
        messages.append(str(error))
    job.evaluate(vectors())  # it is said once
    for fault in ("save", "write", "good"):
        job, _, _ = start(root / fault, callbacks=[Stateful(fault)])
        try:
            job.save()
            start(root / "again", callbacks=[Stateful(fault)], resume=root / fault)
        except tutti.TuttiError as error:
            messages.append(str(error))
    rank = int(os.environ["RANK"])
    try:
        start(root / "unequal", callbacks=[Recorder()] if rank == 0 else [])
    except tutti.TuttiError as error:
        messages.append(str(error))
    return messages


def everything(root: Path, other: Path | None) -> Any:
    events(root)
    accumulated(root)
    state = stop_between_epochs(root)
    first = stop_within_an_epoch(root)
    second = stop_within_an_epoch(root, resume=(other or root) / "within", stop_at=-1, name="within again")
    ran = early(root, SCORES[:7])
    again = early(root, SCORES, resume=(other or root) / "early", name="early again")
    further = early(root, SCORES, resume=(other or root) / "early again", name="further", patience=4)
    return state, (first, second), (ran, again, further), fails(root)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Everything on three ranks, and then on one, which resumes what three ranks have saved."""
    roots = {size: tmp_path_factory.mktemp(f"ranks{size}") for size in (3, 1)}
    done = {size: run_ranks(everything, size, roots[size], roots[3] if size == 1 else None) for size in roots}
    return {**done, "roots": roots}  # type: ignore[dict-item]


def test_any_rank_stops_all_and_the_model_is_that_of_one_device(runs: Any) -> None:
    one = runs[1][0][0]
    for rank in runs[3]:
        for name, value in one.items():
            torch.testing.assert_close(rank[0][name], value, rtol=1e-12, atol=1e-12)


def test_a_run_stopped_within_an_epoch_resumes_at_the_next_batch(runs: Any) -> None:
    for size in (3, 1):
        first, second = runs[size][0][1]
        assert (len(first), len(second)) == (10, 11)
        state = open_checkpoint(runs["roots"][size] / "within" / "checkpoints" / "step-00000010").run_state
        assert (state["epoch"], state["position"]) == (1, 3)
    torch.testing.assert_close(runs[1][0][1], runs[3][0][1], rtol=1e-12, atol=0)


def test_early_stopping_follows_rank_0_and_survives_a_resume_on_other_ranks(runs: Any) -> None:
    for size in (3, 1):
        for ran, again, further in (rank[2] for rank in runs[size]):
            assert ran == [0, 1, 2, 3, 4, 5, 6]  # all that were asked for
            assert again == [7]  # the third without an improvement
            assert further == [8]  # with more patience
        rows = kinds(runs["roots"][size] / "early again", "stop")
        assert [row["reason"] for row in rows] == ["score did not improve for 3 evaluations"]


def test_a_callback_that_fails_is_named_and_ranks_must_have_the_same(runs: Any) -> None:
    for failed, unsaved, saving, writing, loading, *_ in (rank[3] for rank in runs[3]):
        assert unsaved == "no space"  # a checkpoint that fails while the loop is left is not lost
        assert "callback Broken failed in on_step_end (test_callbacks_multirank.py:" in failed
        assert "ValueError: no disk" in failed
        assert "callback Stateful failed in state_dict (test_callbacks_multirank.py:" in saving
        assert "what state_dict of callback Stateful returns is not made of plain values" in writing
        assert "callback Stateful failed in load_state_dict (test_callbacks_multirank.py:" in loading
    assert "rank 0 has Recorder, rank 1 has none" in runs[3][1][3][-1]


def test_what_is_no_callback_is_refused_by_name() -> None:
    for wrong, message in ((3, "int"), (Recorder, "Recorder"), (print, "print"), ("loss", "str")):
        for given in ([wrong], wrong):
            with pytest.raises(tutti.TuttiError, match=f"holds {message}, which is no callback"):
                JobCallbacks.of(given)
    recorder = Recorder()
    for accepted in (recorder, [recorder], (one for one in [recorder])):
        assert JobCallbacks.of(accepted).callbacks == (recorder,)
    assert JobCallbacks.of(None).callbacks == ()
    wrong_arguments: tuple[dict[str, Any], ...] = (
        {"mode": "up"}, {"patience": 0}, {"patience": "3"}, {"patience": 2.5}, {"patience": True}, {"min_delta": -1.0},
        {"min_delta": "x"}, {"min_delta": float("nan")}, {"metric": 3},
    )  # fmt: skip
    for arguments in wrong_arguments:
        with pytest.raises(ScriptError, match=rf"EarlyStopping\({next(iter(arguments))}="):
            tutti.EarlyStopping(**{"metric": "loss", **arguments})
    assert tutti.EarlyStopping("loss", np.int64(3), min_delta=np.float32(0.5)).patience == 3  # type: ignore[arg-type]


def takes_anything(self: Any, *arguments: Any, **options: Any) -> None: ...


@pytest.mark.parametrize(
    ("method", "remedy"),
    [
        ("on_epoch_ended", "did you mean on_epoch_end?"),
        ("on_epoch_begin", "did you mean on_epoch_start?"),
        ("on_train_begin", "did you mean on_train_start?"),
        ("on_step_begin", "did you mean on_step_end?"),
        ("on_train_batch_end", "did you mean on_step_end?"),
        ("on_validation_epoch_end", "did you mean on_evaluate_end?"),
        ("on_evaluate", "did you mean on_evaluate_end?"),
        ("on_fit_end", "did you mean on_train_end?"),
        ("on_train_epoch_start", "did you mean on_epoch_start?"),
        ("on_train_epoch_end", "did you mean on_epoch_end?"),
        ("on_save_checkpoint", "did you mean state_dict?"),
        ("on_save", "the methods are on_train_start, on_epoch_start"),
        ("on_exception", "the methods are on_train_start, on_epoch_start"),
        ("on_before_optimizer_step", "the methods are on_train_start, on_epoch_start"),
    ],
)
def test_a_method_that_is_never_called_is_refused_with_a_remedy(method: str, remedy: str) -> None:
    with pytest.raises(ScriptError) as raised:
        JobCallbacks.of([type("Other", (), {method: takes_anything})()])
    assert f"callback Other has {method}, which is never called; {remedy}" in str(raised.value)
    with pytest.raises(ScriptError, match=method):
        JobCallbacks.of([type("Ours", (tutti.Callback,), {method: takes_anything})()])


def test_a_method_must_take_what_it_is_called_with() -> None:
    class Theirs:
        def on_epoch_end(self, args: Any, state: Any, control: Any) -> None: ...

    with pytest.raises(ScriptError, match=r"on_epoch_end\(args.*called as on_epoch_end\(job, epoch\)"):
        JobCallbacks.of([Theirs()])


FRAMEWORK = """
class Callback:
    def on_save(self, trainer): ...
    def on_train_start(self, trainer, module): raise AssertionError("their arguments")
    def on_epoch_start(self, job, epoch): self.begun = epoch
    def state_dict(self): return {}

class Best(Callback):
    def on_validation_end(self, trainer, module): ...
"""


def test_what_another_frameworks_base_class_defines_is_not_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "framework_of_a_test.py").write_text(FRAMEWORK)
    monkeypatch.syspath_prepend(str(folder))
    framework = importlib.import_module("framework_of_a_test")

    class Both(framework.Callback):  # type: ignore[misc, name-defined]
        def on_epoch_end(self, job: Any, epoch: int) -> None:
            self.epoch = epoch

    callback = Both()
    callbacks = JobCallbacks.of([callback])
    callbacks.start(None)  # their method cannot take our arguments
    callbacks.call("on_epoch_start", None, 3)  # this one can
    callbacks.call("on_epoch_end", None, 3)
    assert (callback.begun, callback.epoch) == (3, 3)
    callback.on_improvement = print  # it may call what it keeps
    JobCallbacks.of([callback])

    class Saves(framework.Callback):  # type: ignore[misc, name-defined]
        def on_save(self, trainer: Any) -> None: ...

    class Hides(framework.Callback, Recorder):  # type: ignore[misc, name-defined]
        pass

    class Shows(Recorder, framework.Callback):  # type: ignore[misc, name-defined]
        pass

    JobCallbacks.of(Shows())
    with pytest.raises(ScriptError, match="Hides inherits on_train_start from Callback, which hides that of Recorder"):
        JobCallbacks.of(Hides())
    for wrong, message in ((Saves(), "Saves has on_save,"), (framework.Best(), "Best has on_validation_end,")):
        with pytest.raises(ScriptError, match=message):
            JobCallbacks.of([wrong])


def test_a_callback_of_transformers_may_be_ours_too() -> None:
    trainer_callback = pytest.importorskip("transformers.trainer_callback").TrainerCallback

    class Both(trainer_callback):  # type: ignore[misc, valid-type]
        def on_step_end(self, job: Any, step: int, loss: float) -> None:
            self.step = step

    callback = Both()
    callbacks = JobCallbacks.of(callback)
    for event, arguments in (("on_epoch_end", (1,)), ("on_train_end", ()), ("on_step_end", (7, 0.5))):
        callbacks.call(event, None, *arguments)
    assert callback.step == 7


def resumes_at_the_end_of_an_epoch(root: Path) -> Any:
    """A checkpoint of an epoch's last update is followed by the scheduler's step, before another update."""
    torch.set_default_dtype(torch.float64)
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("first", "second"):
            os.environ["TUTTI_RUN_FOLDER"] = str(root / name)
            job = tutti.Job(global_batch_size=8, resume=None if name == "first" else root / "first")
            model = Mlp()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            model, _, loader = job.prepare(
                model, optimizer, vectors(), nn.functional.cross_entropy, scheduler=scheduler, scheduler_clock="epoch"
            )
            for _ in job.epochs(2):
                for batch in loader:
                    job.step(batch)
                    rates.append(optimizer.param_groups[0]["lr"])
                    if name == "first" and job.global_step == 7:
                        job.save()
                if name == "first":
                    break
    return rates


def test_a_resume_at_the_end_of_an_epoch_raises_no_warning_of_torch(tmp_path: Path) -> None:
    ((*rates,),) = run_ranks(resumes_at_the_end_of_an_epoch, 1, tmp_path)
    assert rates == [0.1] * 7 + [0.05] * 7


def test_a_bare_name_must_belong_to_one_evaluation() -> None:
    stopping = tutti.EarlyStopping("loss", patience=1)
    stopping.on_log(None, {"val/loss": 1.0})
    assert stopping.best == 1.0
    with pytest.raises(tutti.TuttiError, match=r"both val/loss and test/loss are; write 'test_loss' or 'val_loss'"):
        stopping.on_log(None, {"test/loss": 1.0})
    full = tutti.EarlyStopping("val_loss", patience=1)
    full.on_log(None, {"val/loss": 1.0})
    full.on_log(None, {"test/loss": 2.0})
    assert full.stop_reason == ""
    full.on_log(None, {"val/loss": 1.0})
    assert full.stop_reason == "val_loss did not improve for 1 evaluation"


def leaves(root: Path) -> list[str]:
    said = []
    for saves in (False, True):
        job, _, loader = start(root / str(saves))
        for _ in job.epochs(5):
            for batch in loader:
                job.step(batch)
            break
        if saves:
            job.save()
        job._finalizer.close()
        said.append(" ".join(job._context.screen._said))
    return said


def test_a_plain_break_says_that_the_end_was_not_saved(tmp_path: Path) -> None:
    ((broken, saved),) = run_ranks(leaves, 1, tmp_path)
    assert "the loop over job.epochs was left at step 7, so no checkpoint of the end was written" in broken
    assert "was left" not in saved
