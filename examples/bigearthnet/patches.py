"""Reads BigEarthNet-S2 v1 patches: folders with one GeoTIFF a band, and a JSON file with the labels.

    BigEarthNet-v1.0/<patch>/<patch>_<band>.tif          12 files, uint16
    BigEarthNet-v1.0/<patch>/<patch>_labels_metadata.json

A patch is 1,200 m wide and high. Files besides these are ignored, so other programs may leave theirs in the folders.
"""

import json
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from labels import multi_hot
from tutti.errors import DataError

BANDS: dict[str, int] = {
    "B01": 60,
    "B02": 10,
    "B03": 10,
    "B04": 10,
    "B05": 20,
    "B06": 20,
    "B07": 20,
    "B08": 10,
    "B8A": 20,
    "B09": 60,
    "B11": 20,
    "B12": 20,
}
"""Each band and the width of its pixels in metres, in the order of the wavelengths. Level 2A has no B10."""

SIDE_M = 1200
SIDE = 120
SIDES: dict[str, int] = {band: SIDE_M // width for band, width in BANDS.items()}
OFFSETS: dict[str, slice] = {
    band: slice(start, stop)
    for band, (start, stop) in zip(
        BANDS, pairwise(np.cumsum([0, *(side * side for side in SIDES.values())]).tolist()), strict=True
    )
}
"""Where each band lies in the values of a patch, which hold one band after the other."""

VALUES = OFFSETS["B12"].stop
SPLITS = ("train", "val", "test")
ROOT_NAME = "BigEarthNet-v1.0"
LABELS_SUFFIX = "_labels_metadata.json"


@dataclass(frozen=True, slots=True)
class Patch:
    """What is read of a patch.

    Attributes:
        name: name of its folder.
        values: all pixels of all bands at their own resolution, uint16, (VALUES,).
        labels: 0 or 1 for each of the 43 classes, uint8, (43,).
    """

    name: str
    values: np.ndarray
    labels: np.ndarray


def patch_folders(root: Path) -> list[Path]:
    """Return the folders of all patches in `root`, or in its folder BigEarthNet-v1.0, sorted by name.

    Raises:
        DataError: there is no such folder, or it has no patches.
    """
    root = Path(root)
    if not root.is_dir():
        raise DataError(f"there is no folder {root}; name the folder of patches, such as {ROOT_NAME}")
    if (root / ROOT_NAME).is_dir():
        root = root / ROOT_NAME
    inside = sorted(path for path in root.iterdir() if path.is_dir())
    folders = [path for path in inside if _is_patch(path)]
    if folders:
        return folders
    if any(path.is_dir() and _is_patch(path) for folder in inside for path in folder.iterdir()):
        raise DataError(
            f"the patches of {root} lie in folders of tiles, as in BigEarthNet v2, which has no labels beside the "
            f"patches; name the {ROOT_NAME} folder of version 1, or one folder of patches with {LABELS_SUFFIX} files"
        )
    raise DataError(
        f"{root} has no patches (folders with <patch>_B02.tif and <patch>{LABELS_SUFFIX}); name {ROOT_NAME}"
    )


def _is_patch(folder: Path) -> bool:
    """Whether a folder has at least one of a patch's files, so that one which lacks others is refused by name."""
    name = folder.name
    return any((folder / f"{name}{end}").exists() for end in (LABELS_SUFFIX, *(f"_{band}.tif" for band in BANDS)))


def read_patch(folder: Path) -> Patch:
    """Read all bands and the labels of a patch.

    Raises:
        DataError: a file is missing or cannot be read, or does not have the form that BigEarthNet gives it.
    """
    folder = Path(folder)
    metadata = _metadata(folder)
    corner = _corner(folder, metadata)
    values = np.empty(VALUES, dtype=np.uint16)
    for band, place in OFFSETS.items():
        values[place] = read_band(folder, band, corner).reshape(-1)
    return Patch(folder.name, values, _labels(folder, metadata))


def read_band(folder: Path, band: str, corner: tuple[float, float] | None = None) -> np.ndarray:
    """Read one band at its own resolution, uint16, (rows, columns).

    Args:
        folder: the patch.
        band: such as "B8A".
        corner: easting and northing of the patch's upper left corner. The file's own must agree, if it has one.

    Raises:
        DataError: the file is missing, cannot be read, or is not one band of the right size and type.
    """
    rasterio = geotiff_library()
    path = folder / f"{folder.name}_{band}.tif"
    if not path.is_file():
        raise DataError(f"{path} is missing; unpack the archive again, or leave the patch out with --exclude")
    try:
        with warnings.catch_warnings(), rasterio.Env(GDAL_DISABLE_READDIR_ON_OPEN="EMPTY_DIR", GDAL_PAM_ENABLED=False):
            warnings.simplefilter("ignore", rasterio.errors.NotGeoreferencedWarning)
            with rasterio.open(path, driver="GTiff") as file:
                _check_form(path, band, file)
                _check_corner(path, band, file.transform, corner)
                values: np.ndarray = file.read(1)
    except rasterio.errors.RasterioError as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise DataError(f"{path} cannot be read as a GeoTIFF ({reason}); unpack the archive again") from None
    return values


def geotiff_library() -> Any:
    """Import rasterio, which only reading and writing GeoTIFFs needs; a pack is read without it."""
    try:
        import rasterio
        import rasterio.errors
    except ImportError:
        raise DataError(
            "GeoTIFFs are read with rasterio, which is not installed; pip install 'tutti[bigearthnet]', or pip install "
            "rasterio"
        ) from None
    return rasterio


def _check_form(path: Path, band: str, file: Any) -> None:
    side = SIDES[band]
    if file.count != 1:
        raise DataError(f"{path} has {file.count} bands in one file; BigEarthNet has one band a file")
    if file.shape != (side, side):
        rows, columns = file.shape
        raise DataError(
            f"{path} has {rows} x {columns} pixels, and band {band} has {side} x {side} ({BANDS[band]} m a pixel); use "
            "the files as BigEarthNet has them, not resampled"
        )
    if file.dtypes[0] != "uint16":
        raise DataError(f"{path} holds {file.dtypes[0]} values, and BigEarthNet's are uint16; write it as uint16")


def _check_corner(path: Path, band: str, transform: Any, corner: tuple[float, float] | None) -> None:
    """Refuse a band of another place, where both the file and the JSON file say theirs."""
    if corner is None or transform.is_identity:
        return
    distance = max(abs(transform.c - corner[0]), abs(transform.f - corner[1]))
    if distance > BANDS[band] or abs(transform.a - BANDS[band]) > 1e-6:
        raise DataError(
            f"{path} lies at ({transform.c:g}, {transform.f:g}) with pixels of {transform.a:g} m, and its "
            f"{LABELS_SUFFIX} says ({corner[0]:g}, {corner[1]:g}) with {BANDS[band]} m; unpack the archive again"
        )


def _metadata(folder: Path) -> dict[str, Any]:
    path = folder / f"{folder.name}{LABELS_SUFFIX}"
    try:
        metadata = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise DataError(f"{path} is missing; unpack the archive again, or leave the patch out with --exclude") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as JSON ({error}); unpack the archive again") from None
    if not isinstance(metadata, dict):
        raise DataError(f"{path} holds no JSON object; unpack the archive again")
    return metadata


def _labels(folder: Path, metadata: dict[str, Any]) -> np.ndarray:
    path, labels = folder / f"{folder.name}{LABELS_SUFFIX}", metadata.get("labels")
    if not isinstance(labels, list) or not labels or not all(isinstance(label, str) for label in labels):
        raise DataError(f"{path} has no list 'labels' of one name or more; leave the patch out with --exclude")
    return multi_hot(labels, str(path))


def _corner(folder: Path, metadata: dict[str, Any]) -> tuple[float, float] | None:
    """Return the patch's upper left corner, if the metadata have it, after a check of its extent."""
    place = metadata.get("coordinates")
    if place is None:
        return None
    path = folder / f"{folder.name}{LABELS_SUFFIX}"
    try:
        left, top, right, bottom = (float(place[key]) for key in ("ulx", "uly", "lrx", "lry"))
    except (KeyError, TypeError, ValueError):
        raise DataError(f"{path} has 'coordinates' without the numbers ulx, uly, lrx, lry; write all four") from None
    if abs(right - left - SIDE_M) > 1e-6 or abs(top - bottom - SIDE_M) > 1e-6:
        raise DataError(
            f"{path} says that the patch is {right - left:g} m by {top - bottom:g} m, and BigEarthNet's are "
            f"{SIDE_M} m by {SIDE_M} m; leave it out with --exclude"
        )
    return left, top


def to_image(values: np.ndarray) -> Tensor:
    """Return a patch's values as an image with 10 m a pixel, float32, (12, 120, 120), bands in the order of BANDS.

    Bands of 20 m and 60 m are interpolated bilinearly between the pixels' centres, as GDAL's `bilinear` does.
    """
    image = torch.empty(len(BANDS), SIDE, SIDE, dtype=torch.float32)
    for side in sorted(set(SIDES.values())):
        places = [index for index, band in enumerate(BANDS) if SIDES[band] == side]
        bands = np.stack([values[OFFSETS[band]] for band in BANDS if SIDES[band] == side]).astype(np.float32)
        grid = torch.from_numpy(bands).view(1, len(places), side, side)
        if side != SIDE:
            grid = F.interpolate(grid, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
        image[places] = grid[0]
    return image


def read_list(path: Path) -> list[str]:
    """Return the patches that a list names: one a line, the first field of a CSV (splits, snow, clouds).

    Raises:
        DataError: there is no such file.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise DataError(f"the list {path} cannot be read ({error.strerror}); name an existing file") from None
    names = [line.split(",")[0].strip().strip('"') for line in lines if line.strip()]
    return [name for name in names if name not in ("s2_patch", "patch", "patch_id", "name")]


def read_splits(folder: Path) -> dict[str, list[str]]:
    """Return the patches of each split, from train.csv, val.csv and test.csv (or bigearthnet-train.csv, ...).

    Raises:
        DataError: a file is missing, or a patch is in two splits.
    """
    splits = {}
    for split in SPLITS:
        candidates = [Path(folder) / f"{prefix}{split}.csv" for prefix in ("", "bigearthnet-")]
        path = next((path for path in candidates if path.is_file()), None)
        if path is None:
            raise DataError(f"{candidates[0]} is missing; the splits are train.csv, val.csv and test.csv")
        splits[split] = read_list(path)
    owner: dict[str, str] = {}
    for split, names in splits.items():
        for name in names:
            if owner.setdefault(name, split) != split:
                raise DataError(
                    f"{name} is in both {owner[name]}.csv and {split}.csv of {folder}; a patch belongs to one split"
                )
    return splits


def unique(names: Iterable[str]) -> Iterator[str]:
    """Yield each name once, in order."""
    yield from dict.fromkeys(names)
