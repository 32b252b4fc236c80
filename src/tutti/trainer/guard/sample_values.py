"""Finds data sets and collate functions that return other values on other ranks for the same samples."""

from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset

from tutti.data.fingerprint import values_digest
from tutti.data.samples import Collate, SeededSamples
from tutti.data.seeds import preserved_generators, seed_everything
from tutti.data.share_loader import worker_batches
from tutti.errors import RankMismatchError
from tutti.trainer.run_state import Run

Digests = list[str | None]
"""Of each sample, and of the batch of them; None for what cannot be read."""

_WORKER_OPTIONS = ("worker_init_fn", "multiprocessing_context", "timeout")


def check_samples(run: Run) -> None:
    """Check that the first, the middle and the last sample have the same values on all ranks. Collective.

    What differs is read once more: a data set that draws random numbers of its own is not judged. If workers read the
    samples, one reads these, too: a data set may open files when it is first read, and later workers would share them.

    Raises:
        RankMismatchError: on every rank.
    """
    loader = run.state.loader
    parts = run.parallel.mesh.degree("space", "context") > 1  # which a data set may read by itself
    if parts or loader.source.is_stream or run.parallel.world.world_size == 1:
        return
    order = loader.epoch_batches(loader.epoch)[0]
    chosen = [*dict.fromkeys(int(order[place]) for place in (0, len(order) // 2, -1))]
    everyone: list[Digests] = run.loop.watch.gather("samples", _read(run, chosen))
    if all(digests == everyone[0] for digests in everyone):
        return
    again: list[Digests] = run.loop.watch.gather("samples again", _read(run, chosen))
    for place in range(len(chosen) + 1):
        first, second = ([digests[place] for digests in reading] for reading in (everyone, again))
        other = next((rank for rank, digest in enumerate(first) if digest != first[0]), None)
        if other is None or None in first or first != second:
            continue
        if place == len(chosen):
            raise RankMismatchError(
                f"collate_fn makes other values of the same samples on rank {other} than on rank 0; let it depend on "
                "the samples only, not on the rank"
            )
        raise RankMismatchError(
            f"sample {chosen[place]} of the data set has other values on rank {other} than on rank 0; build the data "
            "set from the same data in the same order on all ranks, and seed whatever it draws or shuffles"
        )


def _read(run: Run, chosen: Sequence[int]) -> Digests:
    """The digests of the chosen samples, read as the loader reads them."""
    source, missing = run.state.loader.source, [None] * (len(chosen) + 1)
    reader = _SampleDigests(source.dataset, source.collate, run.settings.seed, chosen)
    if not source.options.get("num_workers"):
        return reader[0]
    options = {name: source.options[name] for name in _WORKER_OPTIONS if source.options.get(name)}
    with preserved_generators():
        try:
            loader: DataLoader[Any] = DataLoader(reader, batch_size=None, num_workers=1, **options)
            return next(worker_batches(loader, run.state.loader.timeout_s))
        except Exception:  # the script's own code; the loader reports it where it matters
            return [*missing]


class _SampleDigests(Dataset[Any]):
    """A data set of one item: the digests of some samples of the script's, and of the batch of them."""

    def __init__(self, dataset: Any, collate: Any, seed: int, chosen: Sequence[int]) -> None:
        self.dataset, self.collate, self.seed, self.chosen = dataset, collate, seed, chosen

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> Digests:
        digests: Digests = []
        try:
            samples = SeededSamples(self.dataset, self.seed, "sample", gather=False)
            read = []
            for index in self.chosen:
                read.append(samples[0, index])
                digests.append(values_digest(read[-1]))
            with preserved_generators():
                seed_everything(self.seed)
                digests.append(values_digest(Collate(self.collate)(read)))
        except Exception:  # the script's own code, as above; it may not collate these samples
            digests += [None] * (len(self.chosen) + 1 - len(digests))
        return digests
