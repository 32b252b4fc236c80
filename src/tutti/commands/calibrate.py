"""`tutti.calibrate`: fits a cluster's constants to the step times of past runs."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from tutti.commands.inputs import cluster_for, write_spec
from tutti.commands.messages import messages, warn
from tutti.commands.values import StrPath, path_of, path_or, paths_of
from tutti.config.cluster import ClusterSpec, Conditions, DeviceSpec
from tutti.config.version import VERSION
from tutti.errors import ReportError

if TYPE_CHECKING:
    from tutti.validation.cluster_fit import Fit, Sample

FEW_RUNS = 4
"""With fewer runs only one factor on the time is fitted; otherwise every constant, drawn towards its previous value."""


def calibrate(
    *runs: StrPath,
    cluster: StrPath | ClusterSpec | None = None,
    output: StrPath | None = None,
    verbose: bool = False,
) -> ClusterSpec:
    """Fit a cluster's constants to the steps of past runs: rates of products and memory, cost of a call, links.

    Args:
        runs: run folders, or folders of them.
        cluster: the ClusterSpec to correct, or its file; the runs' own if None.
        output: also write the new ClusterSpec to this file.
        verbose: say on standard error which runs are left out.

    Returns:
        The cluster; `conditions.notes` say which error the fit had.

    Raises:
        TuttiError: what `tutti calibrate` would refuse, with the same sentence.
    """
    with messages(shown=verbose):
        fitted, _ = calibrated(paths_of("run", runs), path_or("cluster", ClusterSpec, cluster))
        if (path := path_of("output", output)) is not None:
            write_spec(fitted, path)
        return fitted


def calibrated(paths: tuple[Path, ...], cluster: Path | ClusterSpec | None) -> tuple[ClusterSpec, "Fit"]:
    """Return the cluster with fitted constants, and the fit.

    Args:
        paths: run folders, or folders of them.
        cluster: the cluster to correct, or its file; None for the runs' own cluster.

    Raises:
        ReportError: no run has enough records, or the runs are of different machines.
    """
    from tutti.validation.cluster_fit import apply_fit, fit_constants

    given = cluster_for(cluster) if cluster is not None else None
    measured = [pair for path in paths for folder in _folders(path) if (pair := _sample(folder, given)) is not None]
    if not measured:
        raise ReportError(
            "no run has a model, a plan, a cluster and a finished step; name run folders of `tutti run` with prediction"
        )
    samples = [sample for sample, _ in measured]
    base = given or samples[0].cluster
    other = next((sample for sample in samples if sample.cluster.name != base.name), None)
    if other is not None:
        raise ReportError(
            f"the runs are from different machines ({base.name!r} and {other.cluster.name!r}); calibrate each machine "
            "separately, or name one cluster with --cluster"
        )
    fit = fit_constants(samples, few=FEW_RUNS)
    versions = {"tutti": VERSION, **{name: text for _, known in measured for name, text in known.items()}}
    stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    what = ", ".join(f"{name} {text}" for name, text in sorted(versions.items()))
    fitted = apply_fit(fit, base, f"fitted to {len(samples)} runs at {stamp} ({what})")
    note = (
        f"constants fitted at {stamp} to {len(samples)} runs; mean error {fit.before:.1%} before the fit, "
        f"{fit.after:.1%} after"
    )
    return replace(fitted, conditions=_conditions(base.conditions, stamp, versions, note)), fit


def _folders(path: Path) -> list[Path]:
    """Return the path itself if it is a run folder, else all runs in it."""
    if (path / "run.json").is_file():
        return [path]
    return sorted(header.parent for header in path.glob("*/run.json"))


def _sample(folder: Path, cluster: ClusterSpec | None) -> "tuple[Sample, dict[str, str]] | None":
    """Return what a run measured, and the versions it ran with; None, after a note, if it recorded too little.

    The wait for data is left out, because the constants describe computation. Raises ReportError if the run was on
    other machines than `cluster`.
    """
    from tutti.reporting.measurements import steady_steps
    from tutti.reporting.run_records import read_records
    from tutti.validation.cluster_fit import Sample

    try:
        records = read_records(folder)
    except ReportError as error:
        warn(f"left out: {error}")
        return None
    machines = cluster or records.cluster
    if records.model is None or records.plan is None or machines is None:
        warn(f"left out: {folder} has no model, plan or cluster")
        return None
    if records.model.untraced:
        warn(f"left out: {folder}: {records.model.untraced}")
        return None
    if cluster is not None and records.cluster is not None:
        _check_same(folder, records.cluster, cluster)
    times = [_own_s(row.number("wall_s"), row.mapping("phases")) for row in steady_steps(records)]
    known = [seconds for seconds in times if seconds > 0]
    if not known:
        return None
    model = replace(records.model, loading=None)
    sample = Sample(model=model, cluster=machines, plan=records.plan, measured_s=median(known))
    return sample, {name: text for name, text in records.header.versions.items() if name in ("torch", "cuda", "python")}


def _check_same(folder: Path, own: ClusterSpec, given: ClusterSpec) -> None:
    """Raise ReportError if a run was on devices that are not in the cluster to correct.

    Its step times would say nothing about other devices.
    """
    known = {_device_words(device) for device in given.devices.values()}
    ran_on = dict.fromkeys(_device_words(own.devices[node.device]) for node in own.nodes)
    missing = [words for words in ran_on if words not in known]
    if missing:
        raise ReportError(
            f"{folder} ran on {missing[0]}, but {given.name!r} has {', '.join(sorted(known))}; name the machines of "
            "the runs with --cluster, or leave it out"
        )


def _device_words(device: DeviceSpec) -> str:
    return f"{device.name!r} ({device.kind})"


def _own_s(wall_s: float | None, phases: dict[str, float]) -> float:
    return (wall_s or 0.0) - phases.get("data", 0.0)


def _conditions(before: Conditions | None, stamp: str, versions: dict[str, str], note: str) -> Conditions:
    fields: dict[str, Any] = {"measured_utc": stamp, "versions": versions}
    if before is None:
        return Conditions(cores_granted=0, load_at_start=0.0, load_at_end=0.0, notes=(note,), **fields)
    return replace(before, notes=(*before.notes, note), **fields)
