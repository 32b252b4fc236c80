"""Batches cut into microbatches, and what prepare takes as data."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, TensorDataset

from tutti.data.microbatches import LoadedBatch, ShareBatch, split_batch
from tutti.data.samples import SeededSamples, read_source
from tutti.errors import DataError

Pair = namedtuple("Pair", "x y")
DATA = TensorDataset(torch.arange(10.0), torch.arange(10))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def test_every_tensor_is_cut_along_samples() -> None:
    batch = {"a": torch.arange(5), "b": Pair(torch.arange(10).reshape(5, 2), np.arange(5)), "name": "x", "n": None}
    first, second = split_batch(batch, [2, 3])
    assert first["a"].tolist() == [0, 1]
    assert second["b"].x.tolist() == [[4, 5], [6, 7], [8, 9]]
    assert second["b"].y.tolist() == [2, 3, 4]
    assert first["name"] == second["name"] == "x"
    assert isinstance(first["b"], Pair)


def test_a_batch_of_one_part_passes_through_whatever_it_is() -> None:
    thing = object()
    assert split_batch(thing, [7]) == [thing]


def test_a_tensor_without_samples_first_is_refused() -> None:
    with pytest.raises(DataError, match=r"shape \(3, 4\) .* first dimension must be 4"):
        split_batch((torch.zeros(4, 3), torch.zeros(3, 4)), [2, 2])
    with pytest.raises(DataError, match="this rank's share is 4 samples"):
        LoadedBatch(ShareBatch((torch.zeros(4, 1),), None, 4)).pieces((torch.zeros(3, 1),), [4])


def test_a_loader_is_taken_apart() -> None:
    source = read_source(
        DataLoader(DATA, batch_size=3, shuffle=True, num_workers=2), shuffle=None, tokens=None, arguments={}
    )
    assert source.dataset is DATA
    assert source.shuffle
    assert source.options["num_workers"] == 2
    assert not read_source(DataLoader(DATA), shuffle=None, tokens=None, arguments={}).shuffle
    assert read_source(DATA, shuffle=None, tokens=None, arguments={}).shuffle


@pytest.mark.parametrize(
    ("data", "arguments", "sentence"),
    [
        (TensorDataset(torch.zeros(0)), {}, "has length 0"),
        (7, {}, "prepare got int as dataset"),
        (DATA, {"batch_size": 3}, "batch_size=3; the batch is Job's global_batch_size"),
        (DATA, {"nonsense": 3}, "loader argument nonsense=3"),
        (Stream(), {"num_workers": 4}, "use num_workers=0 or 1"),
        (DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0)), {}, "DistributedSampler"),
        (DataLoader(DATA, batch_sampler=type("Mine", (BatchSampler,), {})([], 1, False)), {}, "own batch sampler"),
    ],
)
def test_data_that_cannot_be_shared_is_refused(data, arguments, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        read_source(data, shuffle=None, tokens=None, arguments=arguments)


class Noisy:
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> float:
        return float(torch.rand(())) + np.random.rand()


def test_a_sample_draws_from_seed_epoch_and_index_only() -> None:
    samples = SeededSamples(Noisy(), 0, "sample", gather=False)
    together = samples.__getitems__([(0, 3), (0, 4), (1, 3)])
    torch.rand(5)
    assert samples[(0, 4)] == together[1]
    assert len(set(together)) == 3
    assert SeededSamples(Noisy(), 1, "sample", gather=False)[(0, 4)] != together[1]


def test_reading_samples_leaves_the_generators_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3).tolist()
    torch.manual_seed(0)
    SeededSamples(Noisy(), 0, "sample", gather=False).__getitems__([(0, 1), (0, 2)])
    assert torch.rand(3).tolist() == expected
