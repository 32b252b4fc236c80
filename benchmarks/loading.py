"""Data loading: tutti's loader beside a hand-written DataLoader with a DistributedSampler, and a bare gather.

One rank takes batches without training; measured are the seconds until a batch arrives. tutti's loader also seeds
every sample, so that augmentation does not depend on the number of ranks; the cost of that shows here.
"""

import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from record import spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is timed: `repeats` blocks of `batches` of each loader, after `warmup` batches of each."""

    samples: int = 8192
    batch: int = 64
    batches: int = 60
    warmup: int = 5
    repeats: int = 7


QUICK = Sizes(samples=2048, batches=10, warmup=2, repeats=3)


class Flipped(Dataset[tuple[Tensor, Tensor]]):
    """Images mirrored at random when they are read: a data set with augmentation."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, target = self.data[index]
        return (image.flip(-1) if random.random() < 0.5 else image), target


def data_sets(samples: int) -> dict[str, Dataset[Any]]:
    """Return data sets of images of 3 x 32 x 32: one in memory, one augmented."""
    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(samples, 3, 32, 32, generator=draw), torch.randint(10, (samples,), generator=draw))
    return {"tensors": data, "augmented": Flipped(data)}


def measure(sizes: Sizes) -> dict[str, Any]:
    """Measure both data sets with all loaders. Returns {"samples": .., "summary": {data set: ..}}, in seconds."""
    torch.set_num_threads(1)  # the threads of a rank
    samples = {}
    for name, data in data_sets(sizes.samples).items():
        loops = {"torch": torch_batches(data, sizes), "tutti": tutti_batches(data, sizes), "bare": bare(data, sizes)}
        samples[name] = interleaved(loops, sizes)
    return {"samples": samples, "summary": {name: summary(times) for name, times in samples.items()}}


def interleaved(loops: dict[str, Iterator[Any]], sizes: Sizes) -> dict[str, list[float]]:
    """Return the seconds of a batch in each block; the loops take turns."""
    for loop in loops.values():
        _block(loop, sizes.warmup)
    times: dict[str, list[float]] = {name: [] for name in loops}
    for repeat in range(sizes.repeats):
        for name in sorted(loops, reverse=bool(repeat % 2)):
            times[name].append(_block(loops[name], sizes.batches))
    return times


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians over blocks, and the ratio block by block."""
    ratios = [ours / theirs for ours, theirs in zip(times["tutti"], times["torch"], strict=True)]
    return {
        **{f"{name}_s": statistics.median(blocks) for name, blocks in times.items()},
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "spread": {name: spread(blocks) for name, blocks in times.items()},
    }


def torch_batches(data: Dataset[Any], sizes: Sizes) -> Iterator[Any]:
    """Yield batches of the hand-written loader, epoch after epoch."""
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=0)
    loader = DataLoader(data, batch_size=sizes.batch, sampler=sampler)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader


def tutti_batches(data: Dataset[Any], sizes: Sizes) -> Iterator[Any]:
    """Yield batches of the loader that `prepare` returns, epoch after epoch."""
    import tutti

    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))
    with tempfile.TemporaryDirectory() as folder:
        job = tutti.Job(global_batch_size=sizes.batch, seed=0, folder=folder)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _, _, loader = job.prepare(model, optimizer, data, nn.CrossEntropyLoss())
        while True:
            yield from loader


def bare(data: Dataset[Any], sizes: Sizes) -> Iterator[Any]:
    """Yield the lower bound: rows of the tensors in a random order, gathered with one indexing a batch."""
    tensors = (data.data if isinstance(data, Flipped) else data).tensors  # type: ignore[attr-defined]
    while True:
        for chosen in torch.randperm(len(tensors[0])).split(sizes.batch):
            yield [tensor[chosen] for tensor in tensors]


def _block(loop: Iterator[Any], batches: int) -> float:
    begin = time.perf_counter()
    for _ in range(batches):
        next(loop)
    return (time.perf_counter() - begin) / batches


def rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the table: header and rows, times in milliseconds a batch."""
    header = ["data", "DataLoader ms", "tutti ms", "ratio", "(min-max)", "bare gather ms"]
    table = [
        [
            name,
            f"{1e3 * entry['torch_s']:.2f}",
            f"{1e3 * entry['tutti_s']:.2f}",
            f"{entry['ratio']:.3f}",
            f"{entry['ratio_min']:.3f}-{entry['ratio_max']:.3f}",
            f"{1e3 * entry['bare_s']:.2f}",
        ]
        for name, entry in result["summary"].items()
    ]
    return header, table
