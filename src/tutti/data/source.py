"""What `prepare` was given as data, in one form: the samples, their order, and how they are collated."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from tutti.errors import DataError

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
    "drop_last": "say Job(last_batch='drop') or 'keep'",
    "batch_sampler": "tutti cuts the batches itself; pass sampler=... to keep an order of your own",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Samples and how to read them. `sampler`: the user's own order of an epoch, if any."""

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
        """Number of samples, None for a stream."""
        return None if self.is_stream else len(self.dataset)


def read_source(
    data: Any, *, shuffle: bool | None, tokens: int | Sequence[int] | None, arguments: dict[str, Any]
) -> Source:
    """Understand a map dataset, an iterable dataset or a DataLoader, with DataLoader arguments on top."""
    given = _from_loader(data) if isinstance(data, DataLoader) else {"dataset": data}
    unknown = set(arguments) - set(_PASSED_ON) - {"sampler", "collate_fn"}
    if unknown:
        name = sorted(unknown)[0]
        why = _MEANINGS.get(name, f"it takes {', '.join(_PASSED_ON)}, sampler, collate_fn, shuffle")
        raise DataError(f"prepare got the loader argument {name}={arguments[name]!r}; {why}")
    options = {**given.get("options", {}), **{k: v for k, v in arguments.items() if k in _PASSED_ON}}
    source = Source(
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
            "batches; pass the dataset, with sampler=... to keep an order of your own"
        )
    found: dict[str, Any] = {
        "dataset": loader.dataset,
        "collate": loader.collate_fn,
        "options": {name: getattr(loader, name) for name in _PASSED_ON if getattr(loader, name, None)},
    }
    if not isinstance(loader.dataset, IterableDataset):
        kind = type(loader.sampler)
        if isinstance(loader.sampler, DistributedSampler):
            raise DataError(
                "the DataLoader has a DistributedSampler; tutti shares the data itself: remove the sampler and say "
                "shuffle=True or False"
            )
        found["shuffle"] = kind is not SequentialSampler
        found["sampler"] = None if kind in (SequentialSampler, RandomSampler) else loader.sampler
    return found


def _check(source: Source) -> None:
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
