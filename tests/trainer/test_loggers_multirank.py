"""Loggers: rank 0 passes them the run's numbers, a resumed run repeats no step, and a failing one ends nothing."""

import csv
import importlib.util
import os
import struct
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboardX.proto.event_pb2 import Event, SessionLog
from torch import nn

import tutti
from harness import run_ranks
from trainer.training import Mlp, vectors
from tutti.errors import ScriptError
from tutti.trainer.loggers import RunLoggers, check_loggers, flat_settings, last_logged
from tutti.trainer.metrics import read_rows


class Kept:
    """A logger that keeps what it is given, and notes when it is started and finished."""

    def __init__(self) -> None:
        self.run: Any = None
        self.rows: list[tuple[int, dict[str, float]]] = []

    def start(self, run: Any) -> None:
        self.run = run

    def log(self, values: dict[str, float], step: int) -> None:
        self.rows.append((step, values))


class Failing:
    """A logger whose service is gone after the first value."""

    def __init__(self) -> None:
        self.calls = 0

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls += 1
        if self.calls > 1:
            raise ConnectionError("no route")


class Refusing(Kept):
    def start(self, run: Any) -> None:
        raise ValueError("no key")


def train(folder: Path, loggers: list[Any], epochs: int, last: int = -1, resume: Path | None = None) -> Any:
    os.environ["TUTTI_RUN_FOLDER"] = str(folder)
    torch.set_default_dtype(torch.float64)
    job = tutti.Job(
        global_batch_size=8, loggers=loggers, resume=resume, checkpoint_every=5, facts={"kind": "test"}, name="logged"
    )
    model = Mlp()
    model, _, loader = job.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.05), vectors(), nn.functional.cross_entropy
    )
    for epoch in job.epochs(epochs):
        for batch in loader:
            loss = job.step(batch)
            if job._run().state.progress.step == last:
                return job
        job.evaluate(vectors(), name="val")
        job.log(mine=loss, epoch=epoch, word="text")
    return job


def services(root: Path) -> list[Any]:
    """MLflow's and W&B's loggers, without a server, where these are installed."""
    loggers: list[Any] = []
    if importlib.util.find_spec("mlflow") is not None:
        loggers.append(tutti.MLflowLogger("digits", tracking_uri=f"sqlite:///{root}/mlflow.db"))
    if importlib.util.find_spec("wandb") is not None:
        loggers.append(tutti.WandbLogger("digits", mode="offline"))
    return loggers


def first(root: Path) -> Any:
    """Three ranks, which end in the middle of an epoch after a checkpoint of step 10."""
    try:
        train(root / "refused", [Refusing()], 1)
    except ScriptError as error:
        refused = str(error)
    kept, failing = Kept(), Failing()
    loggers = [tutti.CSVLogger(), tutti.TensorBoardLogger("events"), kept, failing, *services(root)]
    train(root / "run", loggers, 3, last=12)._finalizer.close()
    return kept.run, kept.rows, failing.calls, refused


def second(root: Path) -> Any:
    """A run that is only observed; then one rank resumes the first run from step 10."""
    kept, observed = Kept(), Kept()
    os.environ["TUTTI_OBSERVER"] = "tutti.trainer.observer:NullObserver"
    train(root / "observed", [observed], 1)
    del os.environ["TUTTI_OBSERVER"]
    loggers = [tutti.CSVLogger(), tutti.TensorBoardLogger("events"), kept, *services(root)]
    train(root / "run", loggers, 3, resume=root / "run")._finalizer.close()
    return kept.run, kept.rows, observed.rows


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("loggers")
    begun = run_ranks(first, 3, root)
    with (root / "run" / "metrics.csv").open("a") as file:
        file.write("13,0.12")  # cut short
    return root, begun, run_ranks(second, 1, root)[0]


def test_rank_0_gets_every_number_and_what_the_run_is(runs: Any) -> None:
    root, begun, _ = runs
    run, rows, failed_after, _ = begun[0]
    assert [other[1] for other in begun[1:]] == [[], []]
    assert (run["name"], run["step"], run["resumed"], run["logged"]) == ("logged", 0, False, {})
    assert run["folder"] == root / "run"
    assert run["facts"] == {"kind": "test"}
    assert (run["settings"]["global_batch_size"], run["plan"]["mesh"]) == (8, {"replicate": 3})
    assert failed_after == 2  # it got no more
    steps = [row for row in read_rows(root / "run" / "metrics.jsonl") if row["kind"] == "step"]
    trained = [(step, values) for step, values in rows if "train/loss" in values]
    assert [step for step, _ in trained] == [*range(1, 13)]
    for (_, values), row in zip(trained, steps, strict=False):
        assert values["train/loss"] == row["loss"]
        assert values["train/learning_rate"] == 0.05
        assert values["train/throughput"] == pytest.approx(row["samples"] / row["wall_s"])
    others = [(step, values) for step, values in rows if "train/loss" not in values]
    assert [(step, sorted(values)) for step, values in others] == [(7, ["val/loss"]), (7, ["epoch", "mine"])]


def test_a_table_has_every_step_once_after_a_resume(runs: Any) -> None:
    root, _, (run, rows, _) = runs
    assert (run["step"], run["resumed"], run["logged"]["train/loss"], run["logged"]["val/loss"]) == (10, True, 12, 7)
    assert rows[0][0] == 11
    with (root / "run" / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [int(row["step"]) for row in table if row["train/loss"]] == [*range(1, 22)]
    assert [int(row["step"]) for row in table if row["val/loss"]] == [7, 14, 21]
    assert [float(row["epoch"]) for row in table if row["mine"]] == [0, 1, 2]
    kept = {row["step"]: row["loss"] for row in read_rows(root / "run" / "metrics.jsonl") if row["kind"] == "step"}
    assert [float(row["train/loss"]) for row in table if row["train/loss"]] == [*kept.values()]


def test_event_files_tell_tensorboard_which_steps_are_made_again(runs: Any) -> None:
    files = sorted((runs[0] / "run" / "events").iterdir(), key=lambda file: file.stat().st_mtime)
    assert not (runs[0] / "run" / "tensorboard").exists()  # the script has chosen another folder
    before, after = (list(events_of(file)) for file in files)
    assert any(event.session_log.status == SessionLog.START and event.step == 11 for event in after)
    tags = [(event.step, value.tag) for event in [*before, *after] for value in event.summary.value]
    assert [step for step, tag in tags if tag == "train/loss"] == [*range(1, 13), *range(11, 22)]
    assert (7, "val/loss") in tags
    assert (7, "mine") in tags


def test_event_files_of_one_second_do_not_replace_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1e9)
    for step in (0, 2):
        logger = tutti.TensorBoardLogger()
        logger.start({"folder": tmp_path, "step": step, "resumed": step > 0})
        logger.log({"loss": 1.0}, step + 1)
        logger.finish()
    events = [event for file in (tmp_path / "tensorboard").iterdir() for event in events_of(file)]
    assert sorted(event.step for event in events if event.summary.value) == [1, 3]


def events_of(file: Path) -> Iterator[Event]:
    """The records of an event file: a length of 8 bytes, its sum, the event and its sum."""
    data, at = file.read_bytes(), 0
    while at < len(data):
        (size,) = struct.unpack("<Q", data[at : at + 8])
        yield Event.FromString(data[at + 12 : at + 12 + size])
        at += size + 16


def test_an_observed_run_logs_nothing_to_the_scripts_loggers(runs: Any) -> None:
    assert runs[2][2] == []


def test_a_logger_that_cannot_start_ends_all_ranks_with_its_name(runs: Any) -> None:
    for *_, refused in runs[1]:
        assert refused == "logger Refusing could not start: ValueError: no key"


def test_mlflow_has_one_run_with_every_step_once(runs: Any) -> None:
    client = pytest.importorskip("mlflow").MlflowClient(tracking_uri=f"sqlite:///{runs[0]}/mlflow.db")
    (known,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert known.info.status == "FINISHED"
    assert known.data.params["global_batch_size"] == "8"
    assert known.data.params["plan.mesh.replicate"] == "3"
    assert known.data.params["facts.kind"] == "test"
    history = client.get_metric_history(known.info.run_id, "train/loss")
    assert sorted(metric.step for metric in history) == [*range(1, 22)]
    assert sorted(metric.step for metric in client.get_metric_history(known.info.run_id, "val/loss")) == [7, 14, 21]


def test_wandb_has_one_run_with_every_step_once(runs: Any) -> None:
    pytest.importorskip("wandb")
    files = sorted((runs[0] / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1  # the same run
    written = [file.read_bytes().count(b"train/loss") for file in files]
    assert written[0] > 0
    assert written[0] / 12 == written[1] / 9  # steps 1 to 12, and 13 to 21


class Numbers:
    """A callback that keeps what job.log was given."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def on_log(self, job: Any, values: dict[str, float]) -> None:
        self.values |= values


VALUES: dict[str, Any] = {
    "tensor": torch.tensor(2.5, requires_grad=True),
    "vector": torch.tensor([3]),
    "flag": torch.tensor(True),
    "half": torch.tensor(0.5, dtype=torch.bfloat16),
    "float32": np.float32(1.5),
    "int64": np.int64(3),
    "bool_": np.bool_(True),
    "array": np.ones((1, 1)),
    "fraction": Fraction(1, 4),
    "nan": torch.tensor(float("nan")),
    "big": 10**30,
}
TEXTS = {"word": "x", "none": None, "path": Path("a")}
REFUSED: dict[str, tuple[Any, str]] = {
    "many": (torch.ones(2, 3), "Tensor of shape (2, 3); give one number, such as a mean"),
    "array": (np.ones(4), "ndarray of shape (4,); give one number"),
    "empty": (torch.ones(0), "Tensor of shape (0,); give one number"),
    "meta": (torch.ones((), device="meta"), "Tensor; give one number"),
    "complex": (torch.tensor(1j), "Tensor; give one number"),
    "nested": ({"loss": torch.tensor(1.0)}, "dict; give its entries as keywords, such as job.log(**values)"),
    "several": ([1.0, 2.0], "list; give one number"),
    "some": ({1, 2}, "set; give one number"),
    "huge": (10**400, "int; give one number"),
    "kind": (Kept, "type; give one number"),
}


def logs(root: Path) -> Any:
    kept, numbers = Kept(), Numbers()
    os.environ["TUTTI_RUN_FOLDER"] = str(root)
    torch.set_default_dtype(torch.float64)
    job = tutti.Job(global_batch_size=8, loggers=kept, callbacks=numbers)
    model = Mlp()
    job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), vectors(), nn.functional.cross_entropy)
    messages = {}
    for name, (value, _) in REFUSED.items():
        try:
            job.log(good=1.0, **{name: value})
        except ScriptError as error:
            messages[name] = str(error)
    job.log(self=1, **VALUES, **TEXTS)
    return kept.rows, numbers.values, messages


def test_numbers_of_torch_and_numpy_are_logged_and_other_values_are_refused_by_keyword(tmp_path: Path) -> None:
    ((rows, numbers, messages),) = run_ranks(logs, 1, tmp_path)
    expected = {name: value.item() if hasattr(value, "item") else float(value) for name, value in VALUES.items()}
    expected |= {"self": 1.0}
    ((_, logged),) = rows
    for values in (logged, numbers):
        assert values.keys() == expected.keys()
        assert all(value == expected[name] for name, value in values.items() if name != "nan")
        assert {type(value) for value in values.values()} == {float}
    (row,) = (row for row in read_rows(tmp_path / "metrics.jsonl") if row["kind"] == "log")
    written = row["values"]
    assert (written["tensor"], written["int64"], written["bool_"], written["nan"]) == (2.5, 3, True, None)
    assert {name: written[name] for name in TEXTS} == {"word": "x", "none": None, "path": "a"}
    assert messages.keys() == REFUSED.keys()
    for name, (_, words) in REFUSED.items():
        assert messages[name].startswith(f"job.log({name}=...) got {words}")


def test_what_is_no_logger_is_refused_and_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong, name in ((3, "int"), (Kept, "Kept")):
        for given in (wrong, [wrong]):
            with pytest.raises(ScriptError, match=f"loggers holds {name}, which is no logger"):
                check_loggers(given)
    kept = Kept()
    assert check_loggers(kept) == check_loggers([kept]) == (kept,)
    assert check_loggers(None) == ()
    for logger in (tutti.CSVLogger, tutti.TensorBoardLogger):
        with pytest.raises(ScriptError, match=rf"{logger.__name__}\(3\): give a path"):
            logger(3)  # type: ignore[arg-type]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ScriptError, match="MLflowLogger needs mlflow, which is not installed; run `pip install mlflow`"
    ):
        tutti.MLflowLogger("x")
    with pytest.raises(ScriptError, match="WandbLogger needs wandb, which is not installed; run `pip install wandb`"):
        tutti.WandbLogger("x")


def test_a_failed_run_is_told_to_loggers_that_ask(tmp_path: Path) -> None:
    calls: list[str] = []

    class Service(Kept):
        def fail(self) -> None:
            calls.append("fail")

        def finish(self) -> None:
            calls.append("finish")

    for failed in (False, True):
        loggers = RunLoggers([Service(), tutti.TensorBoardLogger(tmp_path)])
        loggers.close(failed=failed)
    assert calls == ["finish", "fail", "finish"]


def test_settings_as_one_table() -> None:
    run = {
        "settings": {"seed": 1, "clip_norm": None, "batch_ramp": [[1, 2]]},
        "plan": {"mesh": {"replicate": 2}, "made_for": {"a": 1}},
        "facts": {"data": "disk"},
    }
    assert flat_settings(run) == {"seed": 1, "batch_ramp": "[[1, 2]]", "plan.mesh.replicate": 2, "facts.data": "disk"}
    rows = [{"kind": "step", "step": 3, "loss": 1.0}, {"kind": "step", "step": 2, "loss": 1.0}, {"kind": "epoch"}]
    assert last_logged(rows) == {"train/loss": 3}
