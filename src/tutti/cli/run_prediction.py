"""Planning and predicting for `tutti run` in a process of their own, so that the run's processes stay clean.

The script is run up to `prepare` there, in a process of the same fork server as the ranks; the results come back as
files in the run folder.
"""

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from tutti.config import serialization
from tutti.config.compression import Compression
from tutti.config.plan import Plan, SyncPlan
from tutti.config.run_folder import RunFolder
from tutti.config.sync_notation import with_mode
from tutti.config.vocabulary import AxisName, Relaxation
from tutti.errors import LaunchError, ScriptError, TuttiError
from tutti.launch.local_launcher import forked
from tutti.launch.rank_main import leave_with_supervisor, user_traceback

if TYPE_CHECKING:
    from tutti.config.cluster import ClusterSpec
    from tutti.trainer.capture import CapturedScript

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionRequest:
    """What is to be worked out for a run. `plan`: the file it follows; `mesh`: or how its ranks are arranged; `ranks`:
    or how many there are. `plans`: the plan itself is wanted too, within what is said, with ways to send less that
    `relax` allows. `compress` and `sync`: in place of the plan's."""

    script: Path
    arguments: tuple[str, ...]
    folder: Path
    cluster: Path | None
    plan: Path | None = None
    mesh: dict[AxisName, int] | None = None
    ranks: int | None = None
    compress: Compression | None = None
    sync: SyncPlan | None = None
    relax: Relaxation = "exact"
    plans: bool = False


class Beside:
    """One process that works for the run while its caller does something else."""

    def __init__(self, wanted: PredictionRequest) -> None:
        """Start at once."""
        self._receiver, sender = multiprocessing.Pipe(duplex=False)
        self._process = forked(_work, wanted, sender)
        sender.close()

    def ready(self, say: Say) -> None:
        """Wait until the machine is known, measured if it never was: ranks started earlier would disturb that.

        `say` is told what is being measured. Raises the TuttiError that stopped the work.
        """
        self._listen("ready", None, say)

    def result(self, timeout_s: float | None = None, say: Say = lambda words: None) -> None:
        """Wait until the files are written; `say` is told why a plan was chosen.

        Raises the TuttiError that stopped the work, or LaunchError in time.
        """
        self._listen("done", timeout_s, say)

    def _listen(self, until: str, timeout_s: float | None, say: Say) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if not self._receiver.poll(None if deadline is None else max(0.0, deadline - time.monotonic())):
                raise LaunchError(f"it took longer than {timeout_s:g} s; make it beforehand with `tutti plan`")
            try:
                kind, value = self._receiver.recv()
            except EOFError:
                raise LaunchError("the process that plans died; is there memory enough? name --nproc to run") from None
            if kind == "error":
                raise value
            if kind == until:
                return
            if kind == "say":
                say(value)

    def stop(self) -> None:
        """End the process, whether it is done or not."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join(5)
        self._receiver.close()


@contextlib.contextmanager
def beside(wanted: PredictionRequest | None) -> Iterator[Beside | None]:
    """A process working out `wanted` (nothing for None), ended with the context."""
    worker = Beside(wanted) if wanted is not None else None
    try:
        yield worker
    finally:
        if worker is not None:
            worker.stop()


def _work(wanted: PredictionRequest, sender: Connection) -> None:
    """The life of the process: what the script prints on its way to `prepare` goes to a file."""
    leave_with_supervisor()
    log = os.open(wanted.folder / "planning.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)

    def say(words: str) -> None:
        sender.send(("say", words))

    try:
        cluster = _cluster(wanted, say)
        sender.send(("ready", None))
        if not wanted.plans:
            os.nice(10)  # the ranks go first
        _work_out(wanted, cluster, say)
    except TuttiError as error:
        sender.send(("error", error))
    except BaseException as error:
        words = f"{wanted.script} failed before its Job was prepared:\n{user_traceback(error).rstrip()}"
        sender.send(("error", ScriptError(words)))
    else:
        sender.send(("done", None))


def _cluster(wanted: PredictionRequest, say: Say) -> "ClusterSpec":
    """The machines: of the file, as measured before, or measured now and kept."""
    from tutti.config.cluster import ClusterSpec

    if wanted.cluster is not None:
        return serialization.load(ClusterSpec, wanted.cluster)
    from tutti.profile.probe import cached_cluster_path, measure

    cached = cached_cluster_path()
    if cached.exists():
        return serialization.load(ClusterSpec, cached)
    cluster = measure(quick=True, progress=say)
    serialization.save(cluster, cached)
    return cluster


def _work_out(wanted: PredictionRequest, cluster: "ClusterSpec", say: Say) -> None:
    """Write cluster.json, model.json and prediction.json, and plan.json where the plan is wanted."""
    from tutti.cli.options import capture_script
    from tutti.cli.planning import costed, model_spec_of, plan_for
    from tutti.cost_model import predict
    from tutti.cost_model.cost_notes import count

    folder = RunFolder(wanted.folder)
    serialization.save(cluster, folder.cluster)
    captured = capture_script(wanted.script, wanted.arguments)
    captured = replace(captured, plan=with_mode(captured.plan.compressed(wanted.compress), wanted.sync))
    model = model_spec_of(captured, name=wanted.script.stem)
    serialization.save(model, folder.model)
    if wanted.plans and model.untraced:  # training needs no prediction
        plan = _plan_of(wanted, captured)
        ranks = count(plan.world_size, "rank")
        say(f"{model.untraced}; so nothing can be predicted, and it trains on {ranks} (--nproc N: on N)")
        serialization.save(plan, folder.plan)
        return
    if wanted.plans:
        from tutti.planner import explain

        name, relax = wanted.script.stem, wanted.relax
        choice = plan_for(captured, cluster, name=name, nproc=wanted.ranks, mesh=wanted.mesh, relax=relax)
        say(explain(choice))
        serialization.save(choice.prediction, folder.prediction)
        serialization.save(choice.best, folder.plan)
        return
    serialization.save(predict(costed(model), cluster, _plan_of(wanted, captured)), folder.prediction)


def _plan_of(wanted: PredictionRequest, captured: "CapturedScript") -> Plan:
    """The plan that the run will follow."""
    from tutti.parallel.annotated_plan import with_annotations

    if wanted.plan is not None:
        plan = with_mode(serialization.load(Plan, wanted.plan).compressed(wanted.compress), wanted.sync)
        return with_annotations(plan, captured.model, stated_mesh=True)
    mesh = wanted.mesh or {"replicate": wanted.ranks or 1}
    return with_annotations(replace(captured.plan, mesh=mesh), captured.model, stated_mesh=wanted.mesh is not None)
