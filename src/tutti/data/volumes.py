"""Volumes in an HDF5 file. When samples are cut in space, a rank reads only its part of each volume."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from tutti.errors import DataError

_MANY = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOfSpace:
    """The part of a volume that a rank reads.

    Attributes:
        rows: (start, stop) along each spatial dim.
        extents: the spatial sizes of the whole volume.
    """

    rows: tuple[tuple[int, int], ...]
    extents: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.rows)


class Hdf5Volumes(Dataset[tuple[torch.Tensor, ...]]):
    """Samples of an HDF5 file: sample i is row i of every data set in `names`, in that order, as tensors.

    The first of `names` holds the volumes: (samples, channels, spatial dims). Every data set whose last dims have the
    same sizes is spatial too (a label at each voxel) and is cut with it. Others (a target vector) are read whole. Every
    process opens the file for itself.

    Args:
        path: the file.
        names: names of the data sets, the volumes first.
        part: the part to read; None for whole volumes.

    Attributes:
        nbytes_read: bytes of values that this process has read.

    Raises:
        DataError: h5py, the file or a data set is missing, or the numbers of samples differ.
    """

    def __init__(self, path: str | Path, names: Sequence[str], *, part: PartOfSpace | None = None) -> None:
        self.path, self.names, self.part = Path(path), tuple(names), part
        self.nbytes_read = 0
        self._opened: tuple[int, Any] | None = None
        if not self.names:
            raise DataError(f"Hdf5Volumes({self.path}) has no names; name its data sets, the volumes first")
        file = self._file()
        missing = [name for name in self.names if name not in file]
        if missing:
            raise DataError(f"{self.path} has no data set {missing[0]!r}; it has {', '.join(file) or 'none'}")
        self.shapes: tuple[tuple[int, ...], ...] = tuple(tuple(file[name].shape) for name in self.names)
        counts = {shape[0] if shape else 0 for shape in self.shapes}
        if len(counts) != 1:
            raise DataError(
                f"data sets of {self.path} have different numbers of samples: "
                f"{dict(zip(self.names, (shape[:1] for shape in self.shapes), strict=True))}; give one row per sample"
            )

    def __len__(self) -> int:
        return self.shapes[0][0]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.from_numpy(self._read(name, index, shape))
            for name, shape in zip(self.names, self.shapes, strict=True)
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def extents(self, rank: int) -> tuple[int, ...]:
        """Return the `rank` spatial sizes of the whole volume.

        Raises:
            DataError: the volumes do not have `rank` spatial dims.
        """
        if len(self.shapes[0]) != rank + 2:
            raise DataError(
                f"data set {self.names[0]!r} of {self.path} has shape {self.shapes[0]}; samples cut in {rank} spatial "
                f"dims need (samples, channels, {rank} spatial dims)"
            )
        return self.shapes[0][2:]

    def part_of_space(self, rows: Sequence[tuple[int, int]]) -> "Hdf5Volumes":
        """Return the same samples, of which only `rows` (start, stop) along each spatial dim are read."""
        part = PartOfSpace(rows=tuple(rows), extents=self.extents(len(rows)))
        return Hdf5Volumes(self.path, self.names, part=part)

    @property
    def sha256(self) -> str:
        """Hash of the shapes, the types and one plane of up to 64 samples: a fingerprint that reads little."""
        digest, file = hashlib.sha256(), self._file()
        for name, shape in zip(self.names, self.shapes, strict=True):
            digest.update(f"{name} {shape} {file[name].dtype}".encode())
            plane = (0,) * max(len(shape) - 3, 0)
            for index in np.unique(np.linspace(0, max(shape[0] - 1, 0), min(shape[0], _MANY)).astype(int)):
                digest.update(np.ascontiguousarray(file[name][(int(index), *plane)]).tobytes())
        return digest.hexdigest()

    def _read(self, name: str, index: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        where: tuple[Any, ...] = (int(index),)
        if self.part is not None and shape[1:][-len(self.part.extents) :] == self.part.extents:
            others = len(shape) - 1 - len(self.part.extents)
            where += (slice(None),) * others + tuple(slice(start, stop) for start, stop in self.part.rows)
        values = np.asarray(self._file()[name][where])
        self.nbytes_read += values.nbytes
        return values

    def _file(self) -> Any:
        """Return the open file; a forked worker opens its own."""
        if self._opened is None or self._opened[0] != os.getpid():
            try:
                import h5py
            except ImportError:
                raise DataError("Hdf5Volumes needs h5py; install it with pip install 'tutti[hdf5]'") from None
            try:
                self._opened = (os.getpid(), h5py.File(self.path, "r"))
            except OSError as error:
                raise DataError(f"{self.path} cannot be read as an HDF5 file ({error}); check the path") from None
        return self._opened[1]
