"""Loggers: where a run's numbers go besides its own files. They run on rank 0 only.

A logger that fails while training is dropped with a warning, so that a lost connection ends no run.
"""

import csv
import importlib.util
import json
import math
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Protocol

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from tutti.errors import ScriptError
from tutti.trainer.callbacks import name_of, numbers, objects_of
from tutti.trainer.late_writer import LateWriter

STEP_FIELDS = ("loss", "learning_rate", "grad_norm", "wall_s", "tokens_dropped", "balance_loss", "noise_scale")
"""Fields of a step's row that loggers get if they are numbers, as "train/loss" and so on."""


class Logger(Protocol):
    """What a Job passes its numbers to, on rank 0. Any object with the method `log` is one.

    Two more methods are optional. `job.prepare` calls `start(run)` with a mapping: "name", "folder" (of the run),
    "plan", "settings" and "facts" as plain values, "step" at which training begins (0 unless it is resumed), "resumed"
    (whether it continues in this folder) and "logged" (the last step of each name that the run had logged before it was
    resumed). `finish()` is called when the process ends.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from torch.utils.data import TensorDataset
        >>> from tutti import Job
        >>> class Losses:
        ...     def log(self, values, step):
        ...         print(step, sorted(values)[0])
        >>> job = Job(global_batch_size=4, folder="runs/losses", loggers=[Losses()])
        >>> model = nn.Linear(3, 1)
        >>> data = TensorDataset(torch.ones(8, 3), torch.ones(8, 1))
        >>> model, _, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, nn.MSELoss())
        >>> for batch in loader:
        ...     loss = job.step(batch)
        1 train/learning_rate
        2 train/learning_rate
    """

    def log(self, values: dict[str, float], step: int) -> None:
        """Take numbers.

        Args:
            values: by name: "train/loss" of a step, "test/accuracy" of an evaluation called "test", and what `job.log`
                was given, by its keyword.
            step: number of updates made so far.
        """


def check_loggers(loggers: Any) -> tuple[Logger, ...]:
    """Return the loggers that a script gives: several, one, or None.

    Raises:
        ScriptError: an object has no method `log`, or is a class.
    """
    given = objects_of(loggers, _is_logger)
    for logger in given:
        if not _is_logger(logger):
            raise ScriptError(
                f"loggers holds {name_of(logger)}, which is no logger; pass an object with log(values, step)"
            )
    return given


def _is_logger(given: Any) -> bool:
    return not isinstance(given, type) and callable(getattr(given, "log", None))


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `job.log` was given as plain numbers, texts and None.

    Raises:
        ScriptError: a value is none of these; names its keyword.
    """
    return {name: _plain_value(name, value) for name, value in values.items()}


def _plain_value(name: str, value: Any) -> Any:
    """Return one value: tensors, arrays and NumPy scalars of one element are numbers."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    kind, shape = type(value).__name__, getattr(value, "shape", ())
    if isinstance(value, Mapping):
        raise ScriptError(f"job.log({name}=...) got {kind}; give its entries as keywords, such as job.log(**values)")
    if isinstance(shape, tuple) and math.prod(shape) == 1 and callable(getattr(value, "item", None)):
        with suppress(Exception):  # a tensor without values, or an object of another library
            value = value.item()
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral) and abs(int(value)) <= sys.float_info.max:
        return int(value)
    if isinstance(value, Real) and not isinstance(value, Integral):
        return float(value)
    size = f" of shape {tuple(shape)}" if isinstance(shape, tuple) and shape else ""
    raise ScriptError(
        f"job.log({name}=...) got {kind}{size}; give one number, such as a mean, or a text for the run's metrics"
    )


class RunLoggers:
    """Passes the numbers of a run's rows to its loggers. Without any, event files for TensorBoard are written.

    Args:
        loggers: those of the script.
        say: takes a warning for the user.
    """

    def __init__(self, loggers: Sequence[Any] = (), say: Callable[[str], None] = print) -> None:
        own = () if any(isinstance(logger, TensorBoardLogger) for logger in loggers) else (TensorBoardLogger(),)
        self._loggers: list[Any] = [*own, *loggers]
        self._say = say

    def start(self, run: Mapping[str, Any]) -> str | None:
        """Start every logger; return why one could not, if one could not."""
        for logger in self._loggers:
            if hasattr(logger, "start"):
                try:
                    logger.start(run)
                except Exception as error:
                    self._loggers = []
                    reason = str(error) if isinstance(error, ScriptError) else f"{type(error).__name__}: {error}"
                    return f"logger {type(logger).__name__} could not start: {reason}"
        return None

    def row(self, kind: str, values: Mapping[str, Any]) -> None:
        """Pass on the numbers of a row about a step, an evaluation or `job.log`."""
        found = logged_values(kind, values)
        if found:
            self._each("log", found, int(values.get("step") or 0))

    def close(self, *, failed: bool) -> None:
        """Finish every logger.

        Args:
            failed: whether the run has failed; loggers with a method `fail` are told so first.
        """
        if failed:
            self._each("fail")
        self._each("finish")
        self._loggers = []

    def _each(self, method: str, *arguments: Any) -> None:
        for logger in [*self._loggers]:
            if not hasattr(logger, method):
                continue
            try:
                getattr(logger, method)(*arguments)
            except Exception as error:  # its service may be gone, which is no reason to stop training
                self._loggers.remove(logger)
                self._say(
                    f"warning: logger {type(logger).__name__} failed in {method} ({type(error).__name__}: {error}); it "
                    "gets no more values, and the run goes on"
                )


def logged_values(kind: str, row: Mapping[str, Any]) -> dict[str, float]:
    """Return what loggers get of a row; empty if it is of another kind."""
    if kind == "step":
        amount, wall_s = row.get("tokens") or row.get("samples"), row.get("wall_s")
        rate = amount / wall_s if amount and wall_s else None
        fields = {**{name: row.get(name) for name in STEP_FIELDS}, "throughput": rate}
        return {f"train/{name}": value for name, value in numbers(fields).items()}
    if kind == "evaluate":
        return {f"{row.get('name')}/{name}": value for name, value in numbers(row["values"]).items()}
    return numbers(row["values"]) if kind == "log" else {}


def last_logged(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the last step of each name that rows of metrics hold."""
    last: dict[str, int] = {}
    for row in rows:
        for name in logged_values(str(row.get("kind")), row):
            last[name] = max(last.get(name, 0), int(row.get("step") or 0))
    return last


def _require(logger: str, module: str) -> None:
    """Check that a library is installed.

    Raises:
        ScriptError: it is not; the message says how to install it.
    """
    if importlib.util.find_spec(module) is None:
        raise ScriptError(f"{logger} needs {module}, which is not installed; run `pip install {module}`")


def _path(logger: str, path: object) -> Path:
    """Return where a logger writes.

    Raises:
        ScriptError: it is no path.
    """
    if not isinstance(path, str | os.PathLike):
        raise ScriptError(f"{logger}({path!r}): give a path")
    return Path(path)


class TensorBoardLogger:
    """Writes event files for TensorBoard.

    Every run has them in its folder's tensorboard/; pass this logger to choose another place.

    Args:
        folder: a relative path is inside the run folder.

    Examples:
        >>> from tutti import Job, TensorBoardLogger
        >>> job = Job(global_batch_size=4, loggers=[TensorBoardLogger("events")])
    """

    FLUSH_S = 10.0
    ENCODE_S = 1.0

    def __init__(self, folder: str | Path = "tensorboard") -> None:
        self.folder = _path("TensorBoardLogger", folder)
        self._file: EventsWriter | None = None
        self._events: LateWriter[tuple[float, int, dict[str, float]]] | None = None
        self._failure: Exception | None = None
        self._flushed_s = 0.0

    def start(self, run: Mapping[str, Any]) -> None:
        """Open a file of events. TensorBoard hides earlier files' steps that a resumed run makes again."""
        folder = run["folder"] / self.folder
        folder.mkdir(parents=True, exist_ok=True)
        # Files are named by the second: one that an earlier run began within it would be overwritten.
        self._file = EventsWriter(str(folder / "events"), f".{os.getpid()}.{run['step']}")
        if run["resumed"]:
            now, purge = time.time(), run["step"] + 1
            self._file.write_event(Event(wall_time=now, step=purge, file_version="brain.Event:2"))
            begins = SessionLog(status=SessionLog.SessionStatus.START)
            self._file.write_event(Event(wall_time=now, step=purge, session_log=begins))
        self._events = LateWriter(self._write, self.ENCODE_S)

    def log(self, values: dict[str, float], step: int) -> None:
        """Write all values as one event, which a thread encodes."""
        if self._failure is not None:
            raise self._failure
        if self._events is not None:
            self._events.add((time.time(), step, values))

    def finish(self) -> None:
        """Flush and close the file."""
        if self._file is not None and self._events is not None:
            self._events.close()
            self._file.close()
            self._file = self._events = None
        if self._failure is not None:
            raise self._failure

    def _write(self, events: list[tuple[float, int, dict[str, float]]]) -> None:
        """Encode and write; what fails in the thread is raised by the next call."""
        try:
            assert self._file is not None
            for wall_s, step, values in events:
                scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
                self._file.write_event(Event(wall_time=wall_s, step=step, summary=Summary(value=scalars)))
            now = time.monotonic()
            if now - self._flushed_s >= self.FLUSH_S:
                self._file.flush()
                self._flushed_s = now
        except Exception as error:
            self._failure = error


class CSVLogger:
    """Writes a table: one line for each call of `log`, one column for each name.

    A resumed run appends, and first removes the lines of steps that it makes again. A new run replaces the file.

    Args:
        path: a relative path is inside the run folder.

    Examples:
        >>> from tutti import CSVLogger, Job
        >>> job = Job(global_batch_size=4, loggers=[CSVLogger("metrics.csv")])
    """

    def __init__(self, path: str | Path = "metrics.csv") -> None:
        self.path = _path("CSVLogger", path)
        self._columns = ["step"]
        self._file: Any = None

    def start(self, run: Mapping[str, Any]) -> None:
        """Keep the lines up to the step at which training begins."""
        self.path = run["folder"] / self.path
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = [row for row in self._read() if int(row["step"]) <= run["step"]] if run["step"] else []
        self._columns = ["step", *dict.fromkeys(name for row in rows for name in row if name != "step")]
        self._rewrite(rows)

    def log(self, values: dict[str, float], step: int) -> None:
        """Append a line; names that are new become columns of the whole table."""
        row = {"step": step, **{"log/step" if name == "step" else name: value for name, value in values.items()}}
        new = [name for name in row if name not in self._columns]
        if new:
            self._columns += new
            self._rewrite(self._read())
        self._writer().writerow(row)
        self._file.flush()

    def finish(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _writer(self) -> "csv.DictWriter[str]":
        return csv.DictWriter(self._file, self._columns, restval="")

    def _read(self) -> list[dict[str, str]]:
        """Return the lines of the file, without one that a crash cut short."""
        if not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        return [row for row in csv.DictReader(whole.splitlines()) if (row.get("step") or "").isdigit()]

    def _rewrite(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the table anew, completely or not at all, and open it for appending."""
        self.finish()
        partial = self.path.with_name(f"{self.path.name}.partial")
        with partial.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self._columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(partial, self.path)
        self._file = self.path.open("a", encoding="utf-8", newline="")


class MLflowLogger:
    """Sends the run to MLflow: settings, plan and facts as parameters, numbers as metrics.

    A resumed run continues the same MLflow run, and sends no step twice.

    Args:
        experiment: name of the experiment; it is created if it is missing.
        tracking_uri: MLflow's server or store. None: as MLflow is configured (MLFLOW_TRACKING_URI).
        run_name: name of the MLflow run. None: the run's name.

    Raises:
        ScriptError: MLflow is not installed.
    """

    AT_ONCE = 500
    EVERY_S = 5.0

    def __init__(self, experiment: str, *, tracking_uri: str | None = None, run_name: str | None = None) -> None:
        _require("MLflowLogger", "mlflow")
        self.experiment, self.tracking_uri, self.run_name = experiment, tracking_uri, run_name
        self._client: Any = None
        self._id = ""
        self._waiting: list[Any] = []
        self._sent_s = 0.0
        self._stored: dict[str, int] = {}
        self._resumed = False
        self._status = "FINISHED"

    def start(self, run: Mapping[str, Any]) -> None:
        """Create the MLflow run, or find the one that the run folder names."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client, self._sent_s = MlflowClient(tracking_uri=self.tracking_uri), time.monotonic()
        known = _remembered(run, "mlflow")
        self._resumed = known is not None
        if known is not None:
            self._id = known["run_id"]
            self._client.update_run(self._id, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(self.experiment)
        number = self._client.create_experiment(self.experiment) if experiment is None else experiment.experiment_id
        self._id = self._client.create_run(number, run_name=self.run_name or run["name"]).info.run_id
        parameters = [Param(_mlflow_name(name), str(value)[:500]) for name, value in flat_settings(run).items()]
        for begin in range(0, len(parameters), 100):
            self._client.log_batch(self._id, params=parameters[begin : begin + 100])
        _remember(run, "mlflow", {"run_id": self._id})

    def log(self, values: dict[str, float], step: int) -> None:
        """Send the values with others, every few seconds."""
        from mlflow.entities import Metric

        now = round(time.time() * 1000)
        for name, value in values.items():
            key = _mlflow_name(name)
            if step > self._last_stored(key):
                self._waiting.append(Metric(key, value, now, step))
        if len(self._waiting) >= self.AT_ONCE or time.monotonic() - self._sent_s > self.EVERY_S:
            self._send()

    def fail(self) -> None:
        """Note that the run has failed."""
        self._status = "FAILED"

    def finish(self) -> None:
        """Send what is left and end the MLflow run."""
        self._send()
        self._client.set_terminated(self._id, status=self._status)

    def _send(self) -> None:
        waiting, self._waiting, self._sent_s = self._waiting, [], time.monotonic()
        for begin in range(0, len(waiting), self.AT_ONCE):
            self._client.log_batch(self._id, metrics=waiting[begin : begin + self.AT_ONCE])

    def _last_stored(self, key: str) -> int:
        """Return the last step of a metric that MLflow had when the run was resumed; -1 if none."""
        if not self._resumed:
            return -1
        if key not in self._stored:
            history = self._client.get_metric_history(self._id, key)
            self._stored[key] = max((metric.step for metric in history), default=-1)
        return self._stored[key]


class WandbLogger:
    """Sends the run to Weights & Biases; settings, plan and facts are its configuration.

    A resumed run continues the same W&B run, and sends no step twice.

    Args:
        project: name of the project.
        mode: "online", "offline" (files in the run folder, for `wandb sync`) or "disabled". None: as W&B is configured.
        **options: further arguments of `wandb.init`, such as entity, name, group and tags.

    Raises:
        ScriptError: wandb is not installed.
    """

    def __init__(self, project: str, *, mode: str | None = None, **options: Any) -> None:
        _require("WandbLogger", "wandb")
        self.project, self.mode, self.options = project, mode, options
        self._run: Any = None
        self._logged: Mapping[str, int] = {}
        self._exit_code = 0

    def start(self, run: Mapping[str, Any]) -> None:
        """Begin a W&B run, or continue the one that the run folder names."""
        import wandb

        known = _remembered(run, "wandb")
        self._logged = run["logged"] if known is not None else {}
        known = known or {"id": secrets.token_hex(4)}
        _remember(run, "wandb", known)
        options = {"name": run["name"], "config": flat_settings(run), "dir": str(run["folder"]), **self.options}
        self._run = wandb.init(project=self.project, mode=self.mode, id=known["id"], resume="allow", **options)

    def log(self, values: dict[str, float], step: int) -> None:
        """Log the values that the run has not logged before it was resumed."""
        new = {name: value for name, value in values.items() if step > self._logged.get(name, -1)}
        if new:
            self._run.log(new, step=step)

    def fail(self) -> None:
        """Note that the run has failed."""
        self._exit_code = 1

    def finish(self) -> None:
        """End the W&B run and wait until its values are sent."""
        self._run.finish(exit_code=self._exit_code)


def flat_settings(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings, plan and facts as one table: "global_batch_size", "plan.mesh.replicate", "facts.data"."""
    flat: dict[str, Any] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, entry in value.items():
                add(f"{prefix}.{key}" if prefix else str(key), entry)
        elif value not in (None, [], ()):
            flat[prefix] = value if isinstance(value, str | int | float | bool) else json.dumps(value, default=str)

    add("", run["settings"])
    add("plan", {name: value for name, value in run["plan"].items() if name != "made_for"})
    add("facts", run["facts"])
    return {name: value for name, value in flat.items() if not (isinstance(value, float) and math.isnan(value))}


def _mlflow_name(name: str) -> str:
    """Replace characters that MLflow refuses in names."""
    return re.sub(r"[^\w\-. /]", "_", name)


def _remembered(run: Mapping[str, Any], service: str) -> dict[str, Any] | None:
    """Return what an earlier process of this run has remembered about a service."""
    file = run["folder"] / "loggers" / f"{service}.json"
    if not run["resumed"] or not file.exists():
        return None
    known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return known


def _remember(run: Mapping[str, Any], service: str, facts: dict[str, Any]) -> None:
    file = run["folder"] / "loggers" / f"{service}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(facts), encoding="utf-8")
