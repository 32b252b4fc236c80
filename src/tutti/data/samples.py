"""The data that `prepare` was given: its samples, each with its own seed, their order, and how they are collated.

Augmentation draws from a seed of (seed, epoch, sample), so it does not depend on the rank.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from tutti.data.seeds import derive_seed, preserved_generators, seed_everything
from tutti.errors import DataError

SampleKey = tuple[int, int]
"""(epoch, index of the sample)."""


@dataclass(frozen=True, slots=True)
class EpochKeys(Sequence[SampleKey]):
    """The keys of samples of one epoch."""

    epoch: int
    indices: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: Any) -> Any:
        return self.epoch, int(self.indices[position])

    def __iter__(self) -> Iterator[SampleKey]:
        return ((self.epoch, index) for index in self.indices.tolist())


@dataclass(frozen=True, slots=True)
class CollatedBatch:
    """A batch that needs no collating."""

    batch: Any


class SeededSamples(Dataset[Any]):
    """A map dataset in which every access runs under a seed derived from (seed, stream, epoch, sample).

    With `gather`, a plain TensorDataset, which draws nothing, is indexed as a whole: several times faster than sample
    by sample.
    """

    def __init__(self, dataset: Any, seed: int, stream: str, *, gather: bool) -> None:
        self.dataset = dataset
        self.seed = seed
        self.stream = stream
        self.tensors = tensors_of(dataset) if gather else None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, keys: Sequence[SampleKey]) -> Any:
        if self.tensors is not None:
            indices = keys.indices if isinstance(keys, EpochKeys) else np.asarray([key[1] for key in keys], np.int64)
            index = torch.from_numpy(indices)
            return CollatedBatch([tensor[index] for tensor in self.tensors])
        if draws_nothing(self.dataset):
            return [self.dataset[index] for _, index in keys]
        with preserved_generators():
            return [self._seeded(*key) for key in keys]

    def __getitem__(self, key: SampleKey) -> Any:
        if draws_nothing(self.dataset):  # saving and restoring generators takes several times as long as such a read
            return self.dataset[key[1]]
        with preserved_generators():
            return self._seeded(*key)

    def _seeded(self, epoch: int, index: int) -> Any:
        seed_everything(derive_seed(self.seed, self.stream, epoch, index))
        return self.dataset[index]


def tensors_of(dataset: Any) -> tuple[torch.Tensor, ...] | None:
    """Return the tensors of a plain TensorDataset; None for other datasets."""
    return tuple(dataset.tensors) if type(dataset) is TensorDataset else None


def draws_nothing(dataset: Any) -> bool:
    """Return whether a dataset is known to draw no random numbers."""
    if type(dataset) is Subset:
        return draws_nothing(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(draws_nothing(part) for part in dataset.datasets)
    return type(dataset) is TensorDataset


@dataclass(frozen=True, slots=True)
class Collate:
    """The user's collate function; passes collated batches through. A class, so that workers can pickle it."""

    function: Callable[[Any], Any] = default_collate

    def __call__(self, samples: Any) -> Any:
        return samples.batch if isinstance(samples, CollatedBatch) else self.function(samples)


_PASSED_ON = (
    "num_workers",
    "pin_memory",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "timeout",
)
_MEANINGS = {
    "batch_size": "the batch is Job's global_batch_size",
    "drop_last": "use Job(last_batch='drop') or 'keep'",
    "batch_sampler": "tutti cuts the batches itself; pass sampler=... to keep your own order",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """Samples, and how to read them.

    Attributes:
        dataset: a map dataset or an iterable dataset.
        shuffle: whether each epoch has a random order.
        sampler: the user's own order of an epoch, if any.
        collate: makes a batch of a list of samples.
        tokens: tokens of every sample, or of each one.
        options: further arguments for DataLoader.
    """

    dataset: Any
    shuffle: bool = True
    sampler: Iterable[int] | None = None
    collate: Any = default_collate
    tokens: int | Sequence[int] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_stream(self) -> bool:
        return isinstance(self.dataset, IterableDataset)

    @property
    def samples(self) -> int | None:
        """Number of samples; None for a stream."""
        return None if self.is_stream else len(self.dataset)


def read_source(
    data: Any, *, shuffle: bool | None, tokens: int | Sequence[int] | None, arguments: dict[str, Any]
) -> DataSource:
    """Read what `prepare` was given as data.

    Args:
        data: a map dataset, an iterable dataset or a DataLoader.
        shuffle: whether to shuffle; None: as the DataLoader does, or True.
        tokens: tokens of every sample, or of each one.
        arguments: DataLoader arguments, which override those of a DataLoader.

    Raises:
        DataError: the data or an argument cannot be used.
    """
    given = _from_loader(data) if isinstance(data, DataLoader) else {"dataset": data}
    unknown = set(arguments) - set(_PASSED_ON) - {"sampler", "collate_fn"}
    if unknown:
        name = sorted(unknown)[0]
        why = _MEANINGS.get(name, f"it takes {', '.join(_PASSED_ON)}, sampler, collate_fn, shuffle")
        raise DataError(f"prepare got the loader argument {name}={arguments[name]!r}; {why}")
    options = {**given.get("options", {}), **{k: v for k, v in arguments.items() if k in _PASSED_ON}}
    source = DataSource(
        dataset=given["dataset"],
        sampler=arguments.get("sampler", given.get("sampler")),
        shuffle=given.get("shuffle", True) if shuffle is None else shuffle,
        collate=arguments.get("collate_fn") or given.get("collate", default_collate),
        tokens=tokens,
        options=options,
    )
    _check(source)
    return source


def _from_loader(loader: DataLoader[Any]) -> dict[str, Any]:
    if type(loader.batch_sampler) not in (BatchSampler, type(None)):
        raise DataError(
            f"the DataLoader has its own batch sampler ({type(loader.batch_sampler).__name__}), which would decide the "
            "batches; pass the dataset, with sampler=... to keep your own order"
        )
    if loader.batch_sampler is None:
        raise DataError(
            "the DataLoader has batch_size=None, so its data set makes the batches, but tutti divides samples among "
            "ranks before they are collated; pass a data set of samples, and collate_fn=... to make a batch of them"
        )
    source: dict[str, Any] = {
        "dataset": loader.dataset,
        "collate": loader.collate_fn,
        "options": {name: getattr(loader, name) for name in _PASSED_ON if getattr(loader, name, None)},
    }
    if not isinstance(loader.dataset, IterableDataset):
        kind = type(loader.sampler)
        source["shuffle"] = kind is not SequentialSampler
        source["sampler"] = None if kind is SequentialSampler or _is_permutation(loader.sampler) else loader.sampler
    return source


def _is_permutation(sampler: Any) -> bool:
    """Return whether torch's sampler yields every sample once, in random order, as tutti's own order does."""
    return (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    )


def _check(source: DataSource) -> None:
    replicas = getattr(source.sampler, "num_replicas", None)
    if isinstance(source.sampler, DistributedSampler) or (
        isinstance(replicas, int) and hasattr(source.sampler, "rank")
    ):
        raise DataError(
            f"the sampler is a {type(source.sampler).__name__}, which divides the data among ranks, but tutti divides "
            "it itself; remove the sampler and pass shuffle=True or False"
        )
    if source.is_stream:
        if source.options.get("num_workers", 0) > 1:
            raise DataError(
                f"num_workers={source.options['num_workers']} with an IterableDataset: the order of samples would "
                "depend on the number of workers; use num_workers=0 or 1"
            )
        return
    if not hasattr(source.dataset, "__getitem__") or not hasattr(source.dataset, "__len__"):
        raise DataError(
            f"prepare got {type(source.dataset).__name__} as dataset; give a dataset with __len__ and __getitem__, an "
            "IterableDataset, or a DataLoader"
        )
    if len(source.dataset) == 0:
        raise DataError(f"the dataset {type(source.dataset).__name__} has length 0; give at least one sample")
