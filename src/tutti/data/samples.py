"""Samples with their own seeds: augmentation draws from (seed, epoch, sample), on whichever rank it happens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

from tutti.data.seeds import derive_seed, preserved_generators, seed_everything

Key = tuple[int, int]
"""(epoch, index of the sample)."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A batch that was gathered whole and needs no collating."""

    batch: Any


class SeededSamples(Dataset[Any]):
    """A map dataset whose every access runs under seeds derived from (seed, stream, epoch, sample).

    Tensor datasets draw nothing and are gathered whole, which is several times as fast as sample by sample.
    """

    def __init__(self, dataset: Any, seed: int, stream: str, *, gather: bool) -> None:
        self.dataset = dataset
        self.seed = seed
        self.stream = stream
        self.tensors = tensors_of(dataset) if gather else None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, keys: Sequence[Key]) -> Any:
        if self.tensors is not None:
            index = torch.tensor([key[1] for key in keys], dtype=torch.int64)
            return Ready([tensor[index] for tensor in self.tensors])
        with preserved_generators():
            return [self._seeded(*key) for key in keys]

    def __getitem__(self, key: Key) -> Any:
        with preserved_generators():
            return self._seeded(*key)

    def _seeded(self, epoch: int, index: int) -> Any:
        if not draws_nothing(self.dataset):
            seed_everything(derive_seed(self.seed, self.stream, epoch, index))
        return self.dataset[index]


def tensors_of(dataset: Any) -> tuple[torch.Tensor, ...] | None:
    """The tensors of a plain TensorDataset, or None."""
    return tuple(dataset.tensors) if type(dataset) is TensorDataset else None


def draws_nothing(dataset: Any) -> bool:
    """Whether a dataset is known to draw no random numbers."""
    if type(dataset) is Subset:
        return draws_nothing(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(draws_nothing(part) for part in dataset.datasets)
    return type(dataset) is TensorDataset


@dataclass(frozen=True, slots=True)
class Collate:
    """The user's collate function, which passes ready batches through. A class, so that workers can pickle it."""

    function: Callable[[Any], Any] = default_collate

    def __call__(self, samples: Any) -> Any:
        return samples.batch if isinstance(samples, Ready) else self.function(samples)
