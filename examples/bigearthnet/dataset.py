"""Patches as samples for training: a normalised image of 12 bands, and a 0 or 1 for each label."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from labels import LABELS_43, in_nomenclature
from pack import FORM, shard_name
from patches import BANDS, SPLITS, VALUES, patch_folders, read_patch, to_image
from tutti.errors import DataError


class Patches(Dataset[tuple[Tensor, Tensor]]):
    """A split of a pack. Sample i is (image, labels): float32 of (12, 120, 120) and of (classes,).

    Each process maps the shards for itself, so that loader workers share the pages that the system has read.

    Args:
        folder: a pack, as pack.py makes one.
        split: "train", "val" or "test".
        classes: 43 or 19. Patches without a label of the 19 are left out; `left_out` names them.
        augment: turn and flip each image at random, with draws from torch's generator.

    Attributes:
        names: the patches, in order.
        left_out: patches of the split without a label in this nomenclature.
        generated: whether the patches were made by generate.py.
        sha256: digest of all values and labels.

    Raises:
        DataError: the folder is no pack, or has no such split.
    """

    def __init__(self, folder: str | Path, split: str, *, classes: int = 43, augment: bool = False) -> None:
        self.folder, self.classes, self.augment = Path(folder), classes, augment
        record = read_record(self.folder)
        if split not in SPLITS:
            raise DataError(f"a pack has no split {split!r}; use one of {', '.join(SPLITS)}")
        counts = [record["splits"][name] for name in SPLITS]
        start = sum(counts[: SPLITS.index(split)])
        rows = np.arange(start, start + record["splits"][split])
        labels = in_nomenclature(_array(self.folder / "labels.npy"), classes)[rows]
        labelled = labels.any(axis=1)
        self.left_out = [record["names"][row] for row in rows[~labelled]]
        self.rows, self.labels = rows[labelled], labels[labelled]
        if not len(self.rows):
            raise DataError(f"no patch of the split {split} of {self.folder} has a label of the {classes}; use 43")
        self.names = [record["names"][row] for row in self.rows]
        self.generated: bool = record["generated"]
        self.sha256 = f"{record['sha256'][split]}-{classes}"
        self._per_shard: int = record["patches_per_shard"]
        self._mean = torch.tensor(record["mean"]).view(-1, 1, 1)
        self._deviation = torch.tensor(record["deviation"]).view(-1, 1, 1)
        self._shards: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = normalise(to_image(self.values(index)), self._mean, self._deviation)
        if self.augment:
            image = turned(image)
        return image, torch.from_numpy(self.labels[index]).to(torch.get_default_dtype())

    def values(self, index: int) -> np.ndarray:
        """Return all pixels of a patch at the bands' own resolutions, uint16, (VALUES,)."""
        shard, row = divmod(int(self.rows[index]), self._per_shard)
        if shard not in self._shards:
            self._shards[shard] = _array(self.folder / shard_name(shard))
        return self._shards[shard][row]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shards": {}}


class PatchFolder(Dataset[tuple[Tensor, Tensor]]):
    """The same samples read from GeoTIFFs each time, in the order of their names: for a look, and for tests.

    Args:
        root: the folder of patches.
        record: the pack's record, for its means and deviations (`read_record`).
        names: the patches to read; None: all.
        classes: 43 or 19.
    """

    def __init__(
        self, root: str | Path, record: dict[str, Any], names: list[str] | None = None, *, classes: int = 43
    ) -> None:
        folders = {folder.name: folder for folder in patch_folders(Path(root))}
        if missing := [name for name in names or [] if name not in folders]:
            raise DataError(f"{root} has no patch {missing[0]}; name patches that it has")
        self.folders = list(folders.values()) if names is None else [folders[name] for name in names]
        self.classes = classes
        self._mean = torch.tensor(record["mean"]).view(-1, 1, 1)
        self._deviation = torch.tensor(record["deviation"]).view(-1, 1, 1)

    def __len__(self) -> int:
        return len(self.folders)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        patch = read_patch(self.folders[index])
        labels = in_nomenclature(patch.labels[None], self.classes)[0]
        image = normalise(to_image(patch.values), self._mean, self._deviation)
        return image, torch.from_numpy(labels).to(torch.get_default_dtype())


def read_record(folder: Path) -> dict[str, Any]:
    """Return what pack.json says.

    Raises:
        DataError: the folder is no pack, or one of another form.
    """
    path = Path(folder) / "pack.json"
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"{folder} is no pack of patches (it has no pack.json); make one: python examples/bigearthnet/pack.py "
            "PATCHES PACK"
        ) from None
    except ValueError as error:
        raise DataError(f"{path} cannot be read as JSON ({error}); pack the patches again") from None
    form = (record.get("form"), record.get("bands"), record.get("labels"))
    if form != (FORM, list(BANDS), list(LABELS_43)):
        raise DataError(f"{path} was written by another version of pack.py; pack the patches again")
    first = Path(folder) / shard_name(0)
    if _array(first).shape[1:] != (VALUES,):
        raise DataError(f"{first} has patches of another size; pack the patches again")
    return record


def _array(path: Path) -> np.ndarray:
    """Map an array of a pack into memory.

    Raises:
        DataError: the file is missing or broken.
    """
    try:
        array: np.ndarray = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); pack the patches again") from None
    return array


def normalise(image: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    return (image - mean) / deviation


def turned(image: Tensor) -> Tensor:
    """Return one of the eight turned and mirrored images, each as likely: north is no feature of land cover."""
    quarters, mirrored = int(torch.randint(4, ())), bool(torch.randint(2, ()))
    image = image.rot90(quarters, (1, 2))
    return (image.flip(2) if mirrored else image).contiguous()
