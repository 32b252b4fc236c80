"""Volumes in HDF5 files: what is read, what is refused."""

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tutti.data.volumes import Hdf5Volumes
from tutti.errors import DataError

h5py = pytest.importorskip("h5py")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    with h5py.File(tmp_path / "volumes.h5", "w") as file:
        file["x"] = draw.normal(size=(5, 2, 6, 7, 8))
        file["label"] = draw.integers(3, size=(5, 6, 7, 8))
        file["target"] = draw.normal(size=(5, 4)).astype(np.float32)
        file["short"] = draw.normal(size=(4, 4))
    return tmp_path / "volumes.h5"


def test_samples_are_rows(path: Path) -> None:
    data = Hdf5Volumes(path, ["x", "label", "target"])
    x, label, target = data[3]
    with h5py.File(path) as file:
        assert torch.equal(x, torch.from_numpy(file["x"][3]))
        assert torch.equal(label, torch.from_numpy(file["label"][3]))
        assert torch.equal(target, torch.from_numpy(file["target"][3]))
    assert len(data) == 5
    assert data.nbytes_read == 2 * 336 * 8 + 336 * 8 + 4 * 4


def test_a_part_reads_its_rows_of_what_is_spatial(path: Path) -> None:
    data = Hdf5Volumes(path, ["x", "label", "target"])
    part = data.part_of_space([(2, 6), (0, 7), (4, 5)])
    for index in range(5):
        whole = data[index]
        x, label, target = part[index]
        assert torch.equal(x, whole[0][:, 2:6, :, 4:5])
        assert torch.equal(label, whole[1][2:6, :, 4:5])
        assert torch.equal(target, whole[2])
    assert part.nbytes_read == 5 * (2 * 28 * 8 + 28 * 8 + 16)
    assert part.sha256 == data.sha256


def test_workers_open_their_own(path: Path) -> None:
    data = Hdf5Volumes(path, ["x", "target"])
    again = pickle.loads(pickle.dumps(data))
    assert torch.equal(again[1][0], data[1][0])
    read = [batch[0] for batch in torch.utils.data.DataLoader(data, num_workers=1, batch_size=5)]
    assert torch.equal(read[0][1], data[1][0])


def test_fingerprint_follows_values(path: Path) -> None:
    before = Hdf5Volumes(path, ["x"]).sha256
    with h5py.File(path, "r+") as file:
        file["x"][0, 0, 0] += 1
    assert Hdf5Volumes(path, ["x"]).sha256 != before


def test_what_is_wrong_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="no data set 'y'"):
        Hdf5Volumes(path, ["x", "y"])
    with pytest.raises(DataError, match="different numbers of samples"):
        Hdf5Volumes(path, ["x", "short"])
    with pytest.raises(DataError, match="cannot be read"):
        Hdf5Volumes(path.with_name("absent.h5"), ["x"])
    with pytest.raises(DataError, match="no names"):
        Hdf5Volumes(path, [])
    with pytest.raises(DataError, match="2 spatial dims need"):
        Hdf5Volumes(path, ["x"]).part_of_space([(0, 1), (0, 1)])
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(DataError, match=r"tutti\[hdf5\]"):
        Hdf5Volumes(path, ["x"])
