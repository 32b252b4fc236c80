"""What a sample costs to load is measured as a run would load it: told by a clock of the test's own."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from tutti.data import loading_cost
from tutti.data.loading_cost import ResourceUsage, measure_loading, read_usage
from tutti.data.samples import DataSource, read_source
from tutti.data.volumes import Hdf5Volumes


class Machine:
    """A clock that stands still but for what data sets say they cost."""

    def __init__(self) -> None:
        self.wall_s = self.core_s = self.nbytes = 0.0
        self.readings = 0

    def read(self) -> ResourceUsage:
        self.readings += 1
        return ResourceUsage(
            self.wall_s, self.core_s, self.nbytes + 100 * self.readings
        )  # looking reads something, too

    def passes(self, core_s: float, wait_s: float, nbytes: float) -> None:
        self.core_s += core_s
        self.wall_s += core_s + wait_s
        self.nbytes += nbytes


class Pictures(Dataset[Any]):
    """Of each 3 ms of decoding and 2 ms of waiting, besides 1 s of storage when it is read for the first time."""

    def __init__(self, machine: Machine, count: int = 50, storage_s: float = 0.0) -> None:
        self.machine, self.count, self.storage_s = machine, count, storage_s
        self.seen: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        self.machine.passes(3e-3, 2e-3 + self.storage_s * (index not in self.seen), 1000)
        self.seen.append(index)
        return torch.full((2,), float(index))


def source_of(data: Any, **options: Any) -> DataSource:
    return read_source(data, shuffle=None, tokens=None, arguments=options)


@pytest.mark.parametrize("storage_s", [0.0, 1e-2])
def test_seconds_of_a_core_and_of_waiting_and_bytes(storage_s: float) -> None:
    machine = Machine()
    data = Pictures(machine, storage_s=storage_s)
    found = measure_loading(source_of(data, num_workers=3), 0, machine.read)
    assert found is not None
    assert (found.core_s, found.wait_s, found.stored_nbytes) == pytest.approx((3e-3, 2e-3, 1000))
    assert (found.workers, found.stream, found.parts, found.evidence) == (3, False, False, "measured")
    assert max(data.seen) > 25  # spread over the data, as a run shuffles it
    in_order = Pictures(machine)
    measure_loading(dataclasses.replace(source_of(in_order), shuffle=False), 0, machine.read)
    assert max(in_order.seen) + 1 == len(set(in_order.seen)) == 16  # as many as take long enough


def test_few_samples_of_slow_data_are_read() -> None:
    machine = Machine()
    data = Pictures(machine, storage_s=2.0)
    found = measure_loading(source_of(data), 0, machine.read)
    assert found is not None
    assert len(data.seen) == 1
    assert found.wait_s == pytest.approx(2.002)


def test_collating_counts() -> None:
    machine = Machine()

    def collate(samples: list[torch.Tensor]) -> Any:
        machine.passes(1e-3 * len(samples), 0, 0)
        return default_collate(samples)

    found = measure_loading(source_of(Pictures(machine, 3), collate_fn=collate), 0, machine.read)
    assert found is not None
    assert found.core_s == pytest.approx(4e-3)


class Stream(IterableDataset[Any]):
    def __init__(self, machine: Machine, count: int) -> None:
        self.machine, self.count = machine, count

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(self.count):
            self.machine.passes(1e-3, 0, 10)
            yield torch.zeros(2)


def test_a_stream_is_measured_from_its_beginning() -> None:
    machine = Machine()
    found = measure_loading(source_of(Stream(machine, 10)), 0, machine.read)
    assert found is not None
    assert found.stream
    assert (found.core_s, found.wait_s, found.stored_nbytes) == pytest.approx((1e-3, 0, 10), abs=1e-9)
    assert measure_loading(source_of(Stream(machine, 0)), 0, machine.read) is None


class Broken(Pictures):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index:
            raise OSError("no such file")
        return super().__getitem__(index)


def test_data_that_cannot_be_read_is_left_unknown_and_threads_are_as_before() -> None:
    threads = torch.get_num_threads()
    assert measure_loading(source_of(Broken(Machine())), 0) is None
    assert torch.get_num_threads() == threads


def test_tensors_cost_little_and_come_from_no_storage() -> None:
    found = measure_loading(source_of(TensorDataset(torch.zeros(5000, 8))), 0)
    assert found is not None
    assert found.stored_nbytes < 1
    assert found.core_s < 1e-3  # milliseconds would be seconds a step


def test_bytes_of_files_are_those_that_are_read(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    if read_usage().nbytes == 0:
        pytest.skip("this system does not count what a process reads")
    with h5py.File(tmp_path / "volumes.h5", "w") as file:
        file["x"] = np.random.default_rng(0).normal(size=(8, 1, 32, 32, 32)).astype(np.float32)
    found = measure_loading(source_of(Hdf5Volumes(tmp_path / "volumes.h5", ["x"])), 0)
    assert found is not None
    assert found.stored_nbytes == pytest.approx(4 * 32**3, rel=0.05)
    assert found.parts


def test_time_that_a_hypervisor_took_is_no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    before = loading_cost.stolen_s()
    first = read_usage()
    monkeypatch.setattr(loading_cost, "stolen_s", lambda: before + 1000.0)
    assert read_usage().since(first).stolen_s == pytest.approx(1000.0)


@pytest.mark.parametrize(("stolen_s", "lasted_s"), [(0.0, 5.0), (0.5, 4.5), (2.0, 3.0), (9.0, 3.0)])
def test_what_is_stolen_while_it_waits_shortens_no_waiting(stolen_s: float, lasted_s: float) -> None:
    """Of 5 s it had a core for 2: no more than those can have been lengthened, whatever other cores lost."""
    assert ResourceUsage(5.0, 2.0, 0.0, stolen_s).undisturbed_s == lasted_s
