"""A submitted run as a value: its state, its output, its end, and the report."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tutti.clusters.cluster_job import JobRecord, read_record
from tutti.clusters.profile_file import read_profile
from tutti.clusters.schedulers import scheduler_for
from tutti.commands.messages import messages, short
from tutti.commands.run_options import RunOptions
from tutti.commands.submit import POLL_S, RunState, end_run, output, states, submit_run
from tutti.commands.values import path_of
from tutti.config import serialization
from tutti.config.count_range import CountRange, node_counts
from tutti.config.run_folder import RunFolder
from tutti.config.run_report import RunReport
from tutti.errors import RESUMABLE, LaunchError, TrainingError

_TAIL_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedJob:
    """A run that a cluster's scheduler runs; `tutti.submit` and `tutti.attach` return it.

    Attributes:
        folder: the run folder.
        preview: what was or would be submitted, as text; empty for a run that was submitted before.
        job: its number; empty with `dry_run`.

    Examples:
        ```python
        job = tutti.submit("train.py", on="slurm", nnodes=2, nproc=4, settings={"partition": "gpu"})
        print(job.status().state, job.logs())
        report = job.wait()
        ```
    """

    folder: Path
    scheduler: str
    job: str
    preview: str = ""

    def status(self) -> RunState:
        """Return the state: "pending", "running", "completed", "failed", "cancelled" or "unknown", why, step and loss.

        Raises:
            LaunchError: nothing was submitted.
        """
        self._record()
        return states([self.folder]).runs[0]

    def logs(self, rank: int | None = None) -> str:
        """Return what the nodes have printed so far.

        Args:
            rank: only what this rank has printed.

        Raises:
            LaunchError: nothing was submitted, or the rank has printed nothing.
        """
        self._record()
        return "".join(output(self.folder, rank, follow=False))

    def cancel(self, *, checkpoint: bool = False) -> None:
        """End the run.

        Args:
            checkpoint: let the ranks write a checkpoint first.

        Raises:
            LaunchError: nothing was submitted, or it has ended already.
        """
        self._record()
        end_run(self.folder, checkpoint=checkpoint)

    def wait(self, timeout: float | None = None) -> RunReport | None:
        """Wait for the end of the run, and return its report; None where the run folder lies in the cluster.

        Args:
            timeout: seconds to wait at most.

        Raises:
            TimeoutError: the run has not ended by then; it goes on.
            TrainingError: it failed, was cancelled, or stopped with a checkpoint.
            LaunchError: the scheduler does not know the job any more.
        """
        record = self._record()
        scheduler = scheduler_for(record.scheduler)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            status = scheduler.status(record.job)
            if status.ended or status.state == "unknown":
                break
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{record.scheduler} job {record.job} has not ended in {timeout:g} s; it goes on")
            time.sleep(POLL_S)
        elsewhere = scheduler.collect(record.job)
        report = RunFolder(self.folder).report / "report.json"
        if status.state == "completed" and not status.exit_code:
            return None if elsewhere else self._report(report)
        about = f"{record.scheduler} job {record.job} of {short(self.folder)}"
        if status.exit_code == RESUMABLE:
            raise TrainingError(f"{about} stopped with a checkpoint; go on with resume={str(self.folder)!r}")
        if status.state == "unknown":
            raise LaunchError(f"{about} is not known to {record.scheduler} any more; its output is in {record.log}")
        words = f"{about}: {status.state}" + (f" ({status.reason})" if status.reason else "")
        last = "\n".join(self.logs().splitlines()[-_TAIL_LINES:])
        raise TrainingError(f"{words}; the whole output is in {record.log}" + (f"\n{last}" if last else ""))

    def _report(self, file: Path) -> RunReport:
        if file.exists():
            return replace(serialization.load(RunReport, file), folder=str(self.folder))
        from tutti.reporting.build_report import build_report

        return build_report(self.folder)

    def _record(self) -> JobRecord:
        if not self.job:
            raise LaunchError("dry_run submits nothing; leave it out")
        return read_record(self.folder)


def attach(folder: Path | str) -> SubmittedJob:
    """Return a run that was submitted before.

    Args:
        folder: its run folder.

    Raises:
        LaunchError: no run was submitted from there.
    """
    place = path_of("folder", folder)
    assert place is not None
    record = read_record(place)
    return SubmittedJob(folder=place.resolve(), scheduler=record.scheduler, job=record.job)


def submit_options(
    options: RunOptions,
    words: Sequence[str],
    *,
    on: str,
    nnodes: int | CountRange | None,
    hosts: str | Sequence[str] | None,
    settings: Mapping[str, Any] | None,
    files: Mapping[str, Any],
    dry_run: bool = False,
) -> SubmittedJob:
    """Submit a run, and return it.

    Args:
        options: of `tutti.run`.
        words: the arguments of `tutti run` on the nodes.
        on: the scheduler.
        nnodes: number of nodes, or a range; None for all hosts that are named, or 1.
        hosts: of a run over ssh.
        settings: of the scheduler.
        files: values that are written into the run folder, by the option that names the file.
        dry_run: submit nothing.
    """
    nnodes = nnodes or node_counts(read_profile(Path.cwd()).run.nnodes)
    listed = hosts if hosts is None or isinstance(hosts, str) else ",".join(hosts)
    with messages(shown=False):
        done = submit_run(
            options, words, on=on, nnodes=nnodes, settings=settings or {}, files=files, hosts=listed, dry_run=dry_run
        )
    return SubmittedJob(folder=done.folder, scheduler=done.scheduler, job=done.job, preview=done.preview)
