"""Batches of every kind: samples are divided before they are collated, in training and in evaluation."""

import os
from collections import UserDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import Dataset, WeightedRandomSampler

import tutti
from harness import run_ranks
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan
from tutti.data.device_copies import to_device
from tutti.data.microbatches import LoadedBatch, collate_share, leaves, split_batch
from tutti.data.samples import read_source
from tutti.data.share_loader import ShareLoader
from tutti.errors import DataError

SAMPLES, BATCH, EPOCHS = 22, 8, 2


@dataclass(frozen=True)
class Record:
    x: torch.Tensor
    y: torch.Tensor
    names: list[str]


class Holder:
    """A graph library's batch: neither a mapping nor a dataclass."""

    def __init__(self, rows: torch.Tensor, owner: torch.Tensor, y: torch.Tensor) -> None:
        self.rows, self.owner, self.y = rows, owner, y


Pair = namedtuple("Pair", "x y")


def samples() -> list[tuple[torch.Tensor, int]]:
    g = torch.Generator().manual_seed(5)
    rows = [torch.randn(1 + (3 * i) % 5, 6, generator=g, dtype=torch.float64) for i in range(SAMPLES)]
    return [(row, i % 3) for i, row in enumerate(rows)]


def concatenated(batch: list[Any]) -> Any:
    owner = torch.cat([torch.full((len(rows),), i) for i, (rows, _) in enumerate(batch)])
    return Holder(torch.cat([rows for rows, _ in batch]), owner, torch.tensor([y for _, y in batch]))


def time_first(batch: list[Any]) -> Any:
    return torch.stack([rows[:1].expand(5, 6) for rows, _ in batch], 1), torch.tensor([y for _, y in batch])


def means(batch: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([rows.mean(0) for rows, _ in batch]), torch.tensor([y for _, y in batch])


COLLATES: dict[str, Any] = {
    "concatenated": concatenated,
    "packed": lambda b: (pack_sequence([r for r, _ in b], enforce_sorted=False), torch.tensor([y for _, y in b])),
    "time first": time_first,
    "padded": lambda b: (pad_sequence([r for r, _ in b], batch_first=True), torch.tensor([y for _, y in b])),
    "lists": lambda b: [{"rows": rows, "y": y} for rows, y in b],
    "dataclass": lambda b: Record(*means(b), [str(y) for _, y in b]),
    "user dict": lambda b: UserDict(zip("xy", means(b), strict=True)),
    "named tuple": lambda b: Pair(*means(b)),
    "nothing and scalars": lambda b: {"x": means(b)[0].numpy(), "y": means(b)[1], "n": len(b), "none": [None] * len(b)},
}


def pooled(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples' features (B, 6) and classes (B,) of a batch of any kind above."""
    if isinstance(batch, Holder):
        return torch.zeros(len(batch.y), 6).index_add(0, batch.owner, batch.rows), batch.y
    if isinstance(batch, list):
        return torch.stack([e["rows"].sum(0) for e in batch]), torch.tensor([e["y"] for e in batch])
    if isinstance(batch, Record):
        assert batch.names == [str(int(y)) for y in batch.y]
        return batch.x, batch.y
    if isinstance(batch, dict | UserDict):
        if "n" in batch:
            assert batch["n"] == len(batch["none"]) == len(batch["y"])
        return torch.as_tensor(batch["x"]), batch["y"]
    x, y = batch
    if hasattr(x, "batch_sizes"):
        x = pad_packed_sequence(x, batch_first=True)[0]
    return x.sum(0 if x.shape[1:2] == y.shape and x.shape[0] == 5 else 1) if x.ndim == 3 else x, y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.body(pooled(batch)[0])


def model() -> Net:
    torch.manual_seed(1)
    return Net()


def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output, pooled(batch)[1])


def plain(kind: str) -> tuple[dict[str, torch.Tensor], float]:
    net, data = model(), samples()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(EPOCHS):
        for start in range(0, SAMPLES, BATCH):
            batch = COLLATES[kind](data[start : start + BATCH])
            optimizer.zero_grad()
            loss(net(batch), batch).backward()
            optimizer.step()
    batch = COLLATES[kind](data)
    return net.state_dict(), float(loss(net(batch), batch))


def trained(kinds: list[str], microbatches: int, ranks: int) -> dict[str, tuple[dict[str, torch.Tensor], float]]:
    plan = Plan(
        batch=BatchPlan(global_batch_size=BATCH, num_microbatches=microbatches),
        mesh={"replicate": ranks},
    )
    torch.set_default_dtype(torch.float64)
    results = {}
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path.cwd() / f"plan-{os.getpid()}.json"))
    for kind in kinds:
        job = tutti.Job(global_batch_size=BATCH)
        net = model()
        net, _, loader = job.prepare(
            net, torch.optim.SGD(net.parameters(), 0.1), samples(), loss, shuffle=False, collate_fn=COLLATES[kind],
            unpack=lambda batch: ((batch,), {}, batch),
        )  # fmt: skip
        for _ in job.epochs(EPOCHS):
            for batch in loader:
                job.step(batch)
        results[kind] = net.state_dict(), job.evaluate(samples(), batch_size=3)["loss"]
    return results


@pytest.fixture
def double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 1), (3, 2)])
def test_every_kind_of_batch_trains_and_evaluates_as_on_one_device(ranks: int, microbatches: int) -> None:
    for result in run_ranks(trained, ranks, list(COLLATES), microbatches, ranks):
        for kind, (state, value) in result.items():
            expected, expected_value = plain(kind)
            assert value == pytest.approx(expected_value, abs=1e-12), kind
            for name, tensor in expected.items():
                torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-12, msg=f"{kind} {name}")


def loaded(collate: Any) -> LoadedBatch:
    return LoadedBatch(collate_share(collate, samples()[:4], [3, 1]))


def test_what_the_script_passes_on_unchanged_is_not_cut() -> None:
    batch = loaded(lambda b: list(pad_sequence([r for r, _ in b], batch_first=True).split(1)))
    assert [len(piece) for piece in batch.pieces(batch.batch.whole, [3, 1])] == [3, 1]
    batch = loaded(time_first)
    x, y = batch.batch.whole
    assert [tuple(piece[0].shape) for piece in batch.pieces((x, y), [3, 1])] == [(5, 3, 6), (5, 1, 6)]


def test_what_the_script_changes_is_cut_or_refused() -> None:
    batch = loaded(lambda b: UserDict(zip("xy", means(b), strict=True)))
    batch.batch.whole["x"].mul_(2)
    assert torch.equal(batch.pieces(batch.batch.whole, [3, 1])[1]["x"], 2 * means(samples()[:4])[0][3:])
    record = Record(*means(samples()[:4]), list("abcd"))
    assert [piece.names for piece in split_batch(record, [3, 1])] == [["a", "b", "c"], ["d"]]
    batch = loaded(concatenated)
    batch.batch.whole.rows = batch.batch.whole.rows * 2
    with pytest.raises(DataError, match="Holder, which cannot be cut into microbatches; pass step the batch"):
        batch.pieces(batch.batch.whole, [3, 1])
    x, y = (batch := loaded(time_first)).batch.whole
    with pytest.raises(DataError, match="its first dimension must be 4"):
        batch.pieces((x + 1, y), [3, 1])


def test_a_batch_of_as_many_fields_as_samples_is_cut_by_fields() -> None:
    x, y = torch.arange(6.0).reshape(2, 3), torch.tensor([1, 2])
    for inputs in ({"a": x, "b": x, "flag": True}, (x, x, x), [x, {"c": x}, x], x):
        for number, (fields, target) in enumerate(split_batch([inputs, y], [1, 1])):
            assert torch.equal(target, y[number : number + 1])
            assert all(leaf is True or torch.equal(leaf, x[number : number + 1]) for leaf in leaves(fields))
    boxes = [
        {"boxes": torch.zeros(2, 4), "labels": torch.ones(2)},
        {"boxes": torch.ones(2, 4), "labels": torch.ones(2)},
    ]
    assert [piece for [piece] in split_batch(boxes, [1, 1])] == boxes


def test_every_object_is_moved() -> None:
    meta = torch.device("meta")
    packed = pack_sequence([torch.zeros(2, 3), torch.zeros(1, 3)])
    batch = {"a": UserDict(x=torch.zeros(2)), "b": Record(torch.zeros(1), torch.zeros(1), ["n"]), "c": packed, "d": 1}
    moved = to_device(batch, meta)
    assert moved["a"]["x"].device == moved["b"].x.device == moved["c"].data.device == meta
    assert moved["d"] == 1
    assert batch["b"].x.device.type == "cpu"


class Epochs:
    """A sampler with set_epoch, as many libraries have."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return SAMPLES

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        return iter(np.random.default_rng(self.epoch).permutation(SAMPLES).tolist())


class Own:
    """A sampler with a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self):
        return iter(self.rng.permutation(SAMPLES).tolist())


def share_loader(sampler: Any) -> ShareLoader:
    source = read_source(list(range(SAMPLES)), shuffle=None, tokens=None, arguments={"sampler": sampler})
    return ShareLoader(source, Plan(batch=BatchPlan(global_batch_size=BATCH), mesh={"replicate": 1}), 0, 0)


class Stops(Dataset[int]):
    """Raises what only an iterable data set may raise."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        if index == BATCH:
            raise StopIteration
        return index


def test_an_epoch_does_not_end_early_by_what_a_sample_raises() -> None:
    source = read_source(Stops(), shuffle=False, tokens=None, arguments={})
    loader = ShareLoader(source, Plan(batch=BatchPlan(global_batch_size=BATCH), mesh={"replicate": 1}), 0, 0)
    with pytest.raises(DataError, match="the data ended before batch 2 of epoch 1, which has more: the data set"):
        list(loader)


def orders(loader: ShareLoader, epochs: int) -> list[list[int]]:
    taken = []
    for _ in range(epochs):
        assert len(loader) == 3
        taken.append([i for batch in loader for i in batch.tolist()])
    return taken


class OwnToldTheEpoch(Own):
    """Has both, and ignores the epoch."""

    def set_epoch(self, epoch: int) -> None:
        pass


def drawn() -> WeightedRandomSampler:
    return WeightedRandomSampler(torch.linspace(0.1, 1, SAMPLES), SAMPLES, generator=torch.Generator().manual_seed(3))


def test_a_torch_generator_of_a_sampler_is_the_scripts_own() -> None:
    sampler = drawn()
    expected = [list(sampler) for _ in range(3)]
    assert orders(share_loader(drawn()), 3) == expected
    resumed = share_loader(drawn())
    resumed.go_to(1, 0, 3)
    assert orders(resumed, 2) == expected[1:]


@pytest.mark.parametrize("sampler", [Epochs, Own, OwnToldTheEpoch])
def test_a_samplers_order_is_asked_every_epoch_and_goes_on_after_a_resume(sampler: Any) -> None:
    rng = np.random.default_rng(0)
    expected = [
        (np.random.default_rng(e) if sampler is Epochs else rng).permutation(SAMPLES).tolist() for e in range(3)
    ]
    assert orders(share_loader(sampler()), 3) == expected
    resumed = share_loader(sampler())
    resumed.go_to(1, 0, 3)
    assert orders(resumed, 2) == expected[1:]


def test_the_scripts_own_epoch_is_obeyed_after_len() -> None:
    loader = share_loader(sampler := Epochs())
    for epoch in (7, 9):
        assert len(loader) == 3
        sampler.set_epoch(epoch)
        taken = [i for batch in loader for i in batch.tolist()]
        assert taken == np.random.default_rng(epoch).permutation(SAMPLES).tolist()


def test_a_look_at_the_first_batch_takes_none() -> None:
    loader = share_loader(list(range(SAMPLES)))
    assert next(iter(loader)).tolist() == list(range(8))
    taken = []
    for batch in loader:
        loader.pieces(batch)
        taken += batch.tolist()
        if len(taken) == 16:
            break
    assert taken + [i for batch in loader for i in batch.tolist()] == list(range(SAMPLES))
