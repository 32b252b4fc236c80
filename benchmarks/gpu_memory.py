"""Predicted memory of a rank beside what the device's allocator allocated and reserved, for six models and plans."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tutti
from gpu_run import SCRIPT, PartRun, Row, last_line, skipped
from gpu_subjects import subject_of
from tutti.config.cluster import ClusterSpec
from tutti.config.plan import BatchPlan, Plan
from tutti.config.vocabulary import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model with a precision and a number of microbatches."""

    subject: str
    precision: Precision = "bfloat16"
    microbatches: int = 1


CASES = (
    Case(subject="gpt"),
    Case(subject="resnet"),
    Case(subject="gpt", precision="full", microbatches=4),
    Case(subject="unet"),
    Case(subject="lstm", precision="full"),
    Case(subject="dlrm", precision="full"),
)
REHEARSED = CASES[5:]
LOW, HIGH = 0.98, 1.05
"""Smallest and largest ratio of the predicted to the allocated bytes."""


def measure(run: PartRun) -> Iterator[Row]:
    """Yield a row for each case: predicted, allocated and reserved bytes."""
    cluster = measured_cluster(run)
    for case in REHEARSED if run.tiny else CASES:
        what = f"{case.subject}, {case.precision}, {case.microbatches} microbatches"
        yield one(case, what, cluster, run) if run.left_s() > 10 else skipped(what, "no time was left")


def measured_cluster(run: PartRun) -> ClusterSpec:
    """Return this machine as `tutti probe --quick` sees it; in a rehearsal, a stated one."""
    if run.tiny:
        from matrix.foreseen import HOST

        return HOST
    return tutti.probe(quick=True, output=run.folder / "cluster.json")


def one(case: Case, what: str, cluster: ClusterSpec, run: PartRun) -> Row:
    """Predict a case, train it in a process of its own, and compare."""
    from tutti.cost_model import predict

    subject = subject_of(case.subject, tiny=run.tiny)
    batch = BatchPlan(global_batch_size=subject.batch, num_microbatches=case.microbatches)
    plan = Plan(batch=batch, mesh={"replicate": 1}, precision=case.precision)
    report = run.folder / f"memory-{case.subject}-{case.precision}.json"
    options = ["--steps", "4", "--precision", case.precision, "--microbatches", str(case.microbatches)]
    size = ["--tiny"] if run.tiny else []
    process = run.start([str(SCRIPT), case.subject, *options, *size, "--report", str(report)])
    memory = predict(described(case, run), cluster, plan).memory
    code, text = run.output(process, 60)
    if code != 0:
        return {"what": what, "ok": False, "said": last_line(text)}
    measured = json.loads(report.read_text(encoding="utf-8"))
    predicted = memory.total - memory.reserve
    ratio = predicted / measured["allocated_nbytes"]
    figures = {"predicted_nbytes": predicted, "predicted_total_nbytes": memory.total, "ratio": ratio}
    return {"what": what, **measured, **figures, "ok": run.tiny or LOW <= ratio <= HIGH}


def described(case: Case, run: PartRun) -> Any:
    """Return the ModelSpec of a case."""
    from tutti.commands.describe import describe_captured
    from tutti.trainer.capture import capturing

    subject = subject_of(case.subject, tiny=run.tiny)
    with capturing() as capture:
        job = tutti.Job(global_batch_size=subject.batch, precision=case.precision, num_microbatches=case.microbatches)
        model = subject.model()
        job.prepare(model, subject.optimizer(model.parameters()), subject.data(subject.batch), subject.loss)
    return describe_captured(capture.captured, name=case.subject)
