"""Loss curves of one training in float32, TF32, bfloat16, float16 and what else the device multiplies."""

import statistics
from collections.abc import Iterator
from typing import get_args

import torch

import tutti
from gpu_run import PartRun, Row, skipped
from gpu_subjects import subject_of
from tutti.config.vocabulary import Precision
from tutti.errors import TuttiError

AIM = 0.02
"""Largest relative difference of the last losses from those of float32."""


def measure(run: PartRun) -> Iterator[Row]:
    """Yield a row for each precision: the mean of its last losses beside that of float32."""
    steps = 4 if run.tiny else 120
    reference: float | None = None
    for precision in get_args(Precision):
        if run.left_s() < 2:
            yield skipped(precision, "no time was left")
            continue
        try:
            losses = curve(precision, steps, run)
        except TuttiError as error:
            yield skipped(precision, str(error))
            continue
        last = statistics.fmean(losses[-max(1, steps // 6) :])
        reference = last if reference is None else reference
        difference = abs(last - reference) / reference
        row = {"what": f"loss curve, {precision}", "first": losses[0], "last": last, "difference": difference}
        yield row | {"losses": losses[:: max(1, steps // 12)], "ok": difference <= AIM or run.tiny}


def curve(precision: Precision, steps: int, run: PartRun) -> list[float]:
    """Train a small GPT again and again on the same 8 batches; returns the loss of each step."""
    subject = subject_of("gpt", tiny=True)
    torch.manual_seed(0)
    job = tutti.Job(global_batch_size=subject.batch, precision=precision, folder=run.folder / precision, progress=False)
    model = subject.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    _, _, loader = job.prepare(model, optimizer, subject.data(8 * subject.batch), subject.loss)
    losses = []
    while True:
        for batch in loader:
            losses.append(float(job.step(batch)))
            if len(losses) == steps:
                return losses
