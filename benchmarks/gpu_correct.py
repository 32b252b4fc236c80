"""The same training by one rank on the device and by a plain loop on the CPU, in float64; and no TF32 unless asked."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import tutti
from gpu_run import PartRun, Row
from gpu_subjects import Subject, subject_of

ONE_RANK = ("digits", "gpt", "resnet", "unet", "dlrm", "lstm")
TOLERANCE = 1e-9
"""Largest relative difference in float64 after `STEPS` updates: kernels add in other orders, and updates amplify it."""

STEPS = 3
FULL_TOLERANCE = 5e-6
"""Largest relative error of float32 products under precision "full"; those in TF32 are off by 3e-4."""


def measure(run: PartRun) -> Iterator[Row]:
    """Yield a row for the precision of products, and one for each model."""
    yield precision_row(run)
    for name in ONE_RANK:
        yield one_rank(name, run)


class InDouble(Dataset[Any]):
    """A data set whose floating-point tensors are float64."""

    def __init__(self, data: Dataset[Any]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(part.double() if part.is_floating_point() else part for part in self.data[index])


def one_rank(name: str, run: PartRun) -> Row:
    """Train on the device with tutti and on the CPU with a plain loop, both in float64, and compare the parameters."""
    subject = subject_of(name, tiny=True)
    losses, batches, trained = with_tutti(subject, run)
    expected_losses, expected = plain_loop(subject, batches)
    worst = max(relative(trained[key], expected[key]) for key in expected)
    worst = max([worst, *(abs(a - b) / abs(b) for a, b in zip(losses, expected_losses, strict=True))])
    return {"what": f"{name}, one rank against CPU float64", "difference": worst, "ok": worst <= TOLERANCE}


def with_tutti(subject: Subject, run: PartRun) -> tuple[list[float], list[Any], dict[str, Tensor]]:
    """Return the losses, the batches that were trained on, and the parameters afterwards, on the CPU."""
    torch.manual_seed(0)
    model = subject.model().double()
    job = tutti.Job(global_batch_size=subject.batch, folder=run.folder / f"correct-{id(subject)}", progress=False)
    if job.device.type != run.device:
        raise RuntimeError(f"the job computes on {job.device}, not on {run.device}")
    data = InDouble(subject.data(STEPS * subject.batch))
    model, _, loader = job.prepare(model, subject.optimizer(model.parameters()), data, subject.loss)
    losses, batches = [], []
    for batch in loader:
        batches.append(tuple(part.to("cpu", copy=True) for part in batch))
        losses.append(float(job.step(batch)))
    return losses, batches, {key: value.cpu() for key, value in model.state_dict().items()}


def plain_loop(subject: Subject, batches: list[Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Train in plain PyTorch on the CPU, from the same initial values."""
    torch.manual_seed(0)
    model = subject.model().double()
    optimizer = subject.optimizer(model.parameters())
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = subject.loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def relative(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of what is expected."""
    expected = expected.double()
    return float((actual.double() - expected).norm() / expected.norm().clamp(min=1e-12))


def precision_row(run: PartRun) -> Row:
    """Compare float32 products on the device under precision "full" with float64: TF32 would show."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 6 * 6, 10))
    job = tutti.Job(global_batch_size=4, precision="full", folder=run.folder / "precision", progress=False)
    data = subject_of("resnet", tiny=True).data(4)
    job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, nn.functional.cross_entropy)
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(512, 512, generator=generator).to(job.device)
    images = torch.randn(4, 64, 16, 16, generator=generator).to(job.device)
    weight = torch.randn(64, 64, 3, 3, generator=generator).to(job.device)
    convolved = nn.functional.conv2d(images, weight)
    errors = {
        "product": relative(a @ a, a.double() @ a.double()),
        "convolution": relative(convolved, nn.functional.conv2d(images.double(), weight.double())),
    }
    return {"what": "precision full has no TF32", **errors, "ok": max(errors.values()) <= FULL_TOLERANCE}
