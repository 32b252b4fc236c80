"""Trainings on the digits that flatter their result, and honest ones. Each is run; its run folder is reported on."""

import contextlib
import copy
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, Subset, TensorDataset

import tutti

TRAIN = 1437


def digits(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32)[part, None] / 16, torch.tensor(data.target)[part]


def tensors(part: slice) -> TensorDataset:
    return TensorDataset(*digits(part))


class Files(Dataset[Any]):
    """Digits of which each is read from a file of its own."""

    def __init__(self, folder: Path, part: slice) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        images, self.labels = digits(part)
        self.paths = [folder / f"{number}.npy" for number in range(len(images))]
        for path, image in zip(self.paths, images, strict=True):
            np.save(path, image.numpy())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(np.load(self.paths[index])), self.labels[index]


class Mapped(Dataset[Any]):
    """Digits in one file that is mapped into memory."""

    def __init__(self, path: Path, part: slice) -> None:
        images, self.labels = digits(part)
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_name(f"{os.getpid()}-{path.name}")
        np.save(own, images.numpy())
        with contextlib.suppress(FileExistsError):  # another rank's is as good, and may be mapped already
            path.hardlink_to(own)
        own.unlink()
        self.images = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(np.array(self.images[index])), self.labels[index]


class InMemory(Dataset[Any]):
    """Digits in a class of the user's own that holds them."""

    def __init__(self, part: slice) -> None:
        images, labels = digits(part)
        self.samples = list(zip(images, labels, strict=True))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.samples[index]


class Drawn(Dataset[Any]):
    """Noise drawn when it is asked for, with the digits' labels."""

    def __init__(self) -> None:
        self.labels = digits(slice(0, TRAIN))[1]

    def __len__(self) -> int:
        return TRAIN

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(1, 8, 8) ** 2, self.labels[index]


class Net(nn.Module):
    def __init__(self, inputs: int = 64) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(inputs, 32), nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.out(F.relu(self.hidden(images.flatten(1).float())))


def correct(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).float()


Data = Dataset[Any]


def train(
    folder: Path,
    data: Data,
    test: Data | None,
    *,
    epochs: int = 3,
    batch: int = 64,
    lr: float = 0.3,
    inputs: int = 64,
    steps: int | None = None,
    name: str = "test",
    change: Callable[[Any], Any] = lambda batch: batch,
    facts: dict[str, object] | None = None,
    precision: Any = None,
    repeats: int = 1,
    callbacks: Sequence[Any] = (),
    reload: bool = False,
    validated: bool = False,
    resume: Path | None = None,
) -> None:
    """Train and evaluate, and write a run folder as a process that ends.

    Args:
        steps: number of steps after which the loop is left.
        change: what the script does to a batch before its step.
        repeats: number of steps on each batch.
        reload: whether the best epoch's weights are evaluated again at the end.
        validated: whether the same data is also evaluated as "validation".
        resume: a run of another folder that is continued.
    """
    os.environ["TUTTI_RUN_FOLDER"] = str(folder)
    job = tutti.Job(global_batch_size=batch, facts=facts, precision=precision, name=folder.name, callbacks=callbacks,
                    resume=resume)  # fmt: skip
    model = Net(inputs)
    model, _, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=lr), data, F.cross_entropy)
    done, best = 0, (-1.0, model.state_dict())
    for _ in job.epochs(epochs):
        for given in loader:
            for _ in range(repeats):
                job.step(change(given))
            done += 1
            if done == steps:
                break
        if validated and test is not None:
            job.evaluate(test, {"accuracy": correct}, name="validation")
        if test is not None:
            value = job.evaluate(test, {"accuracy": correct}, name=name)["accuracy"]
            best = max(best, (value, copy.deepcopy(model.state_dict())), key=lambda pair: pair[0])
        if done == steps:
            break
    if reload:
        model.load_state_dict(best[1])
        job.evaluate(test, {"accuracy": correct}, name=name)
    assert job._finalizer is not None
    job._finalizer.close()


def enlarged(batch: Any) -> Any:
    images, labels = batch
    return F.interpolate(images, scale_factor=4, mode="bilinear"), labels


class Same:
    """Gives the first batch again and again."""

    def __init__(self) -> None:
        self.first: Any = None

    def __call__(self, batch: Any) -> Any:
        self.first = batch if self.first is None else self.first
        return self.first if len(self.first[1]) == len(batch[1]) else batch


class FromTest:
    """Gives a batch of the test data instead of every fifth."""

    def __init__(self, test: TensorDataset) -> None:
        self.images, self.labels = test.tensors
        self.calls = 0

    def __call__(self, batch: Any) -> Any:
        self.calls += 1
        size = len(batch[1])
        return (self.images[:size], self.labels[:size]) if self.calls % 5 == 0 else batch


class Spoiled:
    """Gives wrong labels from some call on."""

    calls = 0

    def __call__(self, batch: Any) -> Any:
        self.calls += 1
        return batch if self.calls < 70 else (batch[0], (batch[1] + 1) % 10)


class Repeating(Dataset[Any]):
    """A few samples under as many indices as all have."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index % 30]


def noise(batch: Any) -> Any:
    return torch.randn(batch[0].shape), batch[1]


def larger(part: slice, mode: str) -> TensorDataset:
    images, labels = digits(part)
    return TensorDataset(F.interpolate(images, size=32, mode=mode), labels)


def padded() -> TensorDataset:
    """Sequences of 20 to 40 pixels' levels, padded to 256."""
    images, labels = digits(slice(0, TRAIN))
    sequences = torch.zeros(TRAIN, 256, dtype=torch.int64)
    for index, image in enumerate((images * 16).long().flatten(1)):
        length = 20 + index % 20
        sequences[index, :length] = image[:length] + 1
    return TensorDataset(sequences, labels)


def run_all(root: Path) -> None:
    """Run every training below `root`, each into a folder named after it."""
    whole, held_out = slice(0, TRAIN), slice(TRAIN, None)
    test = tensors(held_out)
    files = Mapped(root / "digits.npy", whole)

    train(root / "honest/one", Files(root / "files", whole), test, epochs=1)
    train(root / "honest/two", files, test, facts={"tuning.trials": 1})
    train(root / "honest/sequences", tensors_of_levels(), None)

    train(root / "quality/small", files, test, epochs=6)
    train(root / "quality/large", files, test, epochs=6, batch=700)
    train(root / "quality/missed", files, test, facts={"quality.target": "test.accuracy=0.99"})
    train(root / "quality/worse", files, test, facts={"quality.reference_value": 0.97})
    train(root / "quality/as-good", files, test, facts={"quality.reference_value": 0.5})

    run_evaluations(root, files, test)

    for rate in (0.01, 0.1, 0.3):
        train(root / f"tuned/{rate}", files, test, lr=rate)
    train(root / "tuned-stated/first", files, test, lr=0.1, facts={"tuning.trials": 2, "tuning.device_seconds": 9})
    train(root / "tuned-stated/second", files, test, lr=0.3, facts={"tuning.trials": 2, "tuning.device_seconds": 9})

    train(root / "part/five-steps", files, test, steps=5, epochs=1)
    train(root / "part/one-batch", files, test, steps=1, epochs=1, repeats=60)
    train(root / "part/subset", Subset(files, range(300)), test)
    train(root / "part/nothing-learned", files, test, lr=1e-9)
    train(root / "part/same-batch", files, test, change=Same())
    train(root / "part/same-samples", Repeating(files), test)
    train(root / "part/each-epoch", files, test, epochs=6, steps=40)

    train(root / "data/in-memory", InMemory(whole), test)
    train(root / "data/drawn", Drawn(), test)
    train(root / "data/noise", TensorDataset(torch.randn(TRAIN, 1, 8, 8), digits(whole)[1]), test)
    train(root / "data/noise-in-the-loop", files, test, change=noise)
    train(root / "data/misstated", InMemory(whole), test, facts={"data.start_state": "disk-cold"})

    train(root / "size/bilinear", larger(whole, "bilinear"), None, inputs=1024)
    train(root / "size/nearest", larger(whole, "nearest"), None, inputs=1024)
    train(root / "size/in-the-loop", files, None, change=enlarged, inputs=1024)
    train(root / "size/padded", padded(), None, inputs=256)
    train(
        root / "size/misstated",
        larger(whole, "bilinear"),
        None,
        inputs=1024,
        facts={"data.native_shape": "1x32x32"},
    )

    train(root / "stop/clock-stated", files, test, facts={"stop.rule": "time", "stop.value": 60})
    train(root / "stop/misstated", files, test, facts={"stop.rule": "epochs", "stop.value": 90})
    train(root / "stop/stated", files, test, steps=40, facts={"stop.rule": "steps", "stop.value": 40})

    train(root / "scaling/base", files, test, facts={"scaling": "strong"})
    train(root / "scaling/grown", files, test, batch=128, facts={"scaling": "strong"})
    run_compared(root, files, test)


def run_evaluations(root: Path, files: Data, test: TensorDataset) -> None:
    """Run what is evaluated on other data than held-out ones, or chosen by it."""
    plain = tensors(slice(0, TRAIN))
    train(root / "held-out/training-data", plain, plain)
    train(root / "held-out/mixed", TensorDataset(*digits(slice(0, 1600))), test)
    images, labels = digits(slice(0, None))
    train(
        root / "held-out/scaled", TensorDataset(torch.cat([images[:TRAIN], 0.5 * images[TRAIN:] + 0.2]), labels), test
    )
    train(root / "held-out/trained-on", files, test, change=FromTest(test))
    train(root / "held-out/left", files, test, epochs=6, steps=46)
    train(root / "held-out/validated", files, test, validated=True)
    train(root / "held-out/fewer", files, tensors(slice(TRAIN, 1700)))
    train(root / "part/continued", files, test, resume=root / "honest/two", epochs=5)
    lost = {"quality.target": "test.accuracy=0.5"}
    train(root / "quality/lost", files, test, epochs=6, change=Spoiled(), facts=lost)
    train(root / "held-out/none", files, None)
    train(root / "held-out/reloaded", files, test, epochs=6, lr=3.0, reload=True)
    stop = tutti.EarlyStopping("test_loss", patience=1, min_delta=1.0)
    train(root / "held-out/stopped", files, test, epochs=9, callbacks=[stop])
    train(root / "held-out/best", files, test, facts={"quality.selection": "best"})


def run_compared(root: Path, files: Data, test: Data) -> None:
    """Run what is compared with a baseline or with another recipe."""
    train(root / "baseline/published", files, test, facts={"baseline.source": "published", "baseline.device": "K80"})
    train(root / "recipe/fast", files, test, precision="bfloat16")
    train(root / "recipe/good", files, test)


def tensors_of_levels() -> TensorDataset:
    images, labels = digits(slice(0, TRAIN))
    return TensorDataset((images * 16).long().flatten(1), labels)
