"""Planning and predicting for `tutti run` in a separate process, so that the run's own processes stay clean.

That process is forked from the same server as the ranks and runs the script up to `prepare`. Its results are files in
the run folder.
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
    """A request to plan or predict for a run.

    Attributes:
        folder: the run folder, where results are written.
        cluster: a ClusterSpec file; None for this machine, or the measured nodes of this Slurm job.
        nodes: number of nodes.
        nproc: ranks of each node, if there are several.
        plan: the plan file that the run follows.
        mesh: the mesh, if there is no plan file.
        ranks: the number of ranks, if there is neither.
        compress: codec that replaces the plan's.
        sync: synchronisation that replaces the plan's.
        relax: how far the planner may leave exactness.
        plans: also choose the plan, within these limits.
        timeout_s: seconds that the script may take to get as far as `prepare`.
    """

    script: Path
    arguments: tuple[str, ...]
    folder: Path
    cluster: Path | None
    nodes: int = 1
    nproc: tuple[int, ...] = ()
    plan: Path | None = None
    mesh: dict[AxisName, int] | None = None
    ranks: int | None = None
    compress: Compression | None = None
    sync: SyncPlan | None = None
    relax: Relaxation = "exact"
    plans: bool = False
    timeout_s: float = 600.0


class Beside:
    """A process that plans or predicts for the run while its caller does something else."""

    def __init__(self, wanted: PredictionRequest) -> None:
        """Start the process at once."""
        self._receiver, sender = multiprocessing.Pipe(duplex=False)
        self._process = forked(_work, wanted, sender)
        sender.close()

    def ready(self, say: Say) -> None:
        """Wait until the machine has been measured, if it never was. Ranks started earlier would disturb that.

        Args:
            say: called with what is being measured.

        Raises:
            TuttiError: the error that stopped the process.
        """
        self._listen("ready", None, say)

    def result(self, timeout_s: float | None = None, say: Say = lambda words: None) -> None:
        """Wait until the files are written.

        Args:
            timeout_s: seconds to wait; None for no limit.
            say: called with the reasons for the plan that was chosen.

        Raises:
            TuttiError: the error that stopped the process; a LaunchError if it took too long.
        """
        self._listen("done", timeout_s, say)

    def _listen(self, until: str, timeout_s: float | None, say: Say) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if not self._receiver.poll(None if deadline is None else max(0.0, deadline - time.monotonic())):
                raise LaunchError(f"the prediction took longer than {timeout_s:g} s; make it first with `tutti plan`")
            try:
                kind, value = self._receiver.recv()
            except EOFError:
                raise LaunchError(
                    "the planning process died, perhaps for lack of memory; add --nproc N to run without planning"
                ) from None
            if kind == "error":
                raise value
            if kind == until:
                return
            if kind == "say":
                say(value)

    def stop(self) -> None:
        """End the process, whether it is finished or not."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join(5)
        self._receiver.close()


@contextlib.contextmanager
def beside(wanted: PredictionRequest | None) -> Iterator[Beside | None]:
    """Run a process that works on `wanted` (no process for None); it ends with the context."""
    worker = Beside(wanted) if wanted is not None else None
    try:
        yield worker
    finally:
        if worker is not None:
            worker.stop()


def _work(wanted: PredictionRequest, sender: Connection) -> None:
    """Do the work of the process. What the script prints before `prepare` goes to a file."""
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
    """Return the machines: from the file, from an earlier measurement, or measured now and saved."""
    from tutti.config.cluster import ClusterSpec

    if wanted.cluster is not None:
        return serialization.load(ClusterSpec, wanted.cluster)
    from tutti.commands.inputs import kept_cluster
    from tutti.profile.probe import cached_cluster_path, measure

    kept = kept_cluster(wanted.nodes)
    if kept is not None:
        even = len(kept.nodes) == 1 and len(set(wanted.nproc)) == 1
        return kept if even or wanted.nodes == 1 else kept.with_ranks(wanted.nproc)
    cluster = measure(quick=True, progress=say)
    serialization.save(cluster, cached_cluster_path())
    return cluster


def _work_out(wanted: PredictionRequest, cluster: "ClusterSpec", say: Say) -> None:
    """Write cluster.json, model.json and prediction.json, and plan.json if the plan is wanted."""
    from tutti.commands.capture import capture_script
    from tutti.commands.planning import costed, model_spec_of, plan_for
    from tutti.cost_model import predict
    from tutti.cost_model.cost_notes import count

    folder = RunFolder(wanted.folder)
    serialization.save(cluster, folder.cluster)
    captured = capture_script(wanted.script, wanted.arguments, timeout_s=wanted.timeout_s)
    captured = replace(captured, plan=with_mode(captured.plan.compressed(wanted.compress), wanted.sync))
    model = model_spec_of(captured, name=wanted.script.stem)
    serialization.save(model, folder.model)
    if wanted.plans and model.untraced:  # training needs no prediction
        plan = _plan_of(wanted, captured)
        ranks = count(plan.world_size, "rank")
        say(f"{model.untraced}; so nothing can be predicted, and it trains on {ranks} (--nproc N to choose)")
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
    """Return the plan that the run will follow."""
    from tutti.parallel.annotated_plan import with_annotations

    if wanted.plan is not None:
        plan = with_mode(serialization.load(Plan, wanted.plan).compressed(wanted.compress), wanted.sync)
        return with_annotations(plan, captured.model, stated_mesh=True)
    mesh = wanted.mesh or {"replicate": wanted.ranks or 1}
    return with_annotations(captured.plan.on(mesh), captured.model, stated_mesh=wanted.mesh is not None)
