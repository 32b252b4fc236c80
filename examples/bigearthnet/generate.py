"""Writes patches in BigEarthNet's own format, with made-up land cover, so that the example runs without the archive.

    python examples/bigearthnet/generate.py FOLDER --patches 600

FOLDER gets BigEarthNet-v1.0/, splits/{train,val,test}.csv and patches_with_seasonal_snow.csv. Every class has its own
spectrum of reflectances in 12 bands. A patch has one to four classes, each in regions of its own, under varying light
and noise; similar classes have similar spectra, so F1 is below 1.
"""

import argparse
import json
import sys
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np

from labels import LABELS_43
from pack import GENERATED_MARK
from patches import BANDS, LABELS_SUFFIX, ROOT_NAME, SIDE, SIDE_M, SIDES, SPLITS, geotiff_library
from tutti.errors import DataError, TuttiError

ZONES = {"29SND": 32629, "33UUP": 32633, "34TCR": 32634, "35VPH": 32635}
"""Tiles of Sentinel-2, and the EPSG codes of their UTM zones."""

FAMILIES: dict[str, tuple[int, ...]] = {
    # Reflectance times 10,000 in B01 B02 B03 B04 B05 B06 B07 B08 B8A B09 B11 B12.
    "built": (900, 1050, 1250, 1400, 1600, 1900, 2050, 2150, 2250, 2300, 2400, 2100),
    "soil": (500, 650, 950, 1250, 1600, 2000, 2200, 2350, 2500, 2550, 3000, 2300),
    "crop": (300, 420, 750, 650, 1200, 2500, 3000, 3200, 3350, 3400, 2100, 1150),
    "forest": (200, 250, 430, 300, 700, 1900, 2350, 2450, 2650, 2700, 1300, 600),
    "shrub": (350, 450, 720, 800, 1250, 1900, 2150, 2250, 2450, 2500, 2300, 1450),
    "bare": (1200, 1400, 1750, 2050, 2250, 2400, 2500, 2550, 2650, 2650, 3100, 2800),
    "wetland": (300, 350, 520, 480, 800, 1350, 1500, 1550, 1600, 1650, 1100, 600),
    "water": (450, 420, 380, 240, 220, 180, 170, 150, 130, 160, 60, 40),
}
MEMBERS = {
    "built": range(0, 11),
    "soil": range(11, 14),
    "crop": range(14, 22),
    "forest": range(22, 25),
    "shrub": range(25, 29),
    "bare": range(29, 33),
    "wetland": range(33, 38),
    "water": range(38, 43),
}
"""Classes of each family, by their index among the 43."""


def spectra() -> np.ndarray:
    """Return the reflectances of each class, (43, 12): its family's, of which each band is up to a quarter off."""
    table, draws = np.empty((len(LABELS_43), len(BANDS))), np.random.default_rng(43)
    for family, members in MEMBERS.items():
        for label in members:
            table[label] = np.array(FAMILIES[family]) * draws.uniform(0.75, 1.25, len(BANDS))
    return table


def land_cover(draws: np.random.Generator) -> np.ndarray:
    """Return the class of every pixel, (120, 120): regions around random seeds, of one to four classes.

    Some classes are far more frequent than others, and classes of a family often lie side by side.
    """
    frequency = 1 / (1 + np.random.default_rng(19).permutation(len(LABELS_43)))
    first = int(draws.choice(len(LABELS_43), p=frequency / frequency.sum()))
    family = next(np.array(members) for members in MEMBERS.values() if first in members)
    chosen = [first]
    for _ in range(int(draws.integers(0, 4))):
        pool, weight = (family, None) if draws.random() < 0.5 else (np.arange(43), frequency / frequency.sum())
        chosen.append(int(draws.choice(pool, p=weight)))
    regions = np.array(list(dict.fromkeys(chosen)))
    seeds = draws.uniform(0, SIDE, (4 * len(regions), 2))
    rows, columns = np.mgrid[:SIDE, :SIDE] + 0.5
    distance = (rows[..., None] - seeds[:, 0]) ** 2 + (columns[..., None] - seeds[:, 1]) ** 2
    return regions[distance.argmin(-1) % len(regions)]


def bands_of(cover: np.ndarray, table: np.ndarray, draws: np.random.Generator) -> dict[str, np.ndarray]:
    """Return each band at its own resolution, uint16: spectra under one light, with texture and a sensor's noise."""
    light = draws.uniform(0.8, 1.2)
    texture = draws.normal(1.0, 0.08, (SIDE, SIDE))
    bands = {}
    for index, (band, side) in enumerate(SIDES.items()):
        fine = table[cover, index] * light * texture
        step = SIDE // side
        coarse = fine.reshape(side, step, side, step).mean((1, 3))
        noisy = coarse + draws.normal(0, 30, coarse.shape)
        bands[band] = noisy.clip(1, 10_000).round().astype(np.uint16)
    return bands


def generate(folder: Path, patches: int, seed: int = 0) -> None:
    """Write patches, splits and a list of snowy patches.

    Args:
        folder: where to write; its BigEarthNet-v1.0 must not exist.
        patches: how many, at least 10. 60 of 100 are for training, 20 for validation, 20 for the test.
        seed: seed of the land cover. Spectra do not depend on it.

    Raises:
        DataError: the folder has patches, or too few are asked for.
    """
    root = Path(folder) / ROOT_NAME
    if root.exists():
        raise DataError(f"{root} exists; remove it, or name another folder")
    if patches < 10:
        raise DataError(f"{patches} patches cannot be split; ask for 10 or more")
    root.mkdir(parents=True)
    (root / GENERATED_MARK).write_text("These patches were made by generate.py. They show no real place.\n")
    table, names = spectra(), []
    for number in range(patches):
        draws = np.random.default_rng([seed, number])
        cover = land_cover(draws)
        name = _write_patch(root, number, cover, bands_of(cover, table, draws), draws)
        names.append(name)
    order = np.random.default_rng([seed, patches]).permutation(patches)
    bounds = [0, patches * 6 // 10, patches * 8 // 10, patches]
    (Path(folder) / "splits").mkdir(exist_ok=True)
    for split, start, stop in zip(SPLITS, bounds, bounds[1:], strict=False):
        lines = [f"{names[index]},{_radar_name(names[index])}\n" for index in sorted(order[start:stop])]
        (Path(folder) / "splits" / f"{split}.csv").write_text("".join(lines))
    (Path(folder) / "patches_with_seasonal_snow.csv").write_text(f"{names[order[0]]}\n")


def _radar_name(name: str) -> str:
    """The Sentinel-1 patch of the same place, which the lists of splits name too."""
    _, _, date, column, row = name.split("_")
    return f"S1A_IW_GRDH_1SDV_{date}_{column}_{row}"


def _write_patch(
    root: Path, number: int, cover: np.ndarray, bands: dict[str, np.ndarray], draws: np.random.Generator
) -> str:
    rasterio = geotiff_library()
    tile = list(ZONES)[number % len(ZONES)]
    date = datetime(2017, 6, 1, 10, 0, 31) + timedelta(days=int(draws.integers(0, 360)))
    column, row = divmod(number // len(ZONES), 90)
    # Numbers of two neighbouring patches of one tile differ, so a name occurs once.
    name = f"S2{'AB'[number % 2]}_MSIL2A_{date:%Y%m%dT%H%M%S}_{column * len(ZONES) + number % len(ZONES)}_{row}"
    left, top = 300_000 + SIDE_M * column, 4_800_000 - SIDE_M * row
    crs = rasterio.CRS.from_epsg(ZONES[tile])
    folder = root / name
    folder.mkdir()
    for band, pixels in bands.items():
        width = BANDS[band]
        with rasterio.open(
            folder / f"{name}_{band}.tif",
            "w",
            driver="GTiff",
            height=pixels.shape[0],
            width=pixels.shape[1],
            count=1,
            dtype="uint16",
            blockysize=pixels.shape[0],  # one strip
            crs=crs,
            transform=rasterio.Affine(width, 0, left, 0, -width, top),
        ) as file:
            file.write(pixels, 1)
    metadata = {
        "labels": [LABELS_43[label] for label in np.unique(cover)],
        "coordinates": {"ulx": left, "uly": top, "lrx": left + SIDE_M, "lry": top - SIDE_M},
        "projection": crs.to_wkt(),
        "tile_source": f"S2{'AB'[number % 2]}_MSIL1C_{date:%Y%m%dT%H%M%S}_N0205_R022_T{tile}_{date:%Y%m%dT%H%M%S}.SAFE",
        "acquisition_date": f"{date:%Y-%m-%d %H:%M:%S}",
    }
    (folder / f"{name}{LABELS_SUFFIX}").write_text(json.dumps(metadata), encoding="utf-8")
    return name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--patches", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        generate(args.folder, args.patches, args.seed)
    except TuttiError as error:
        print(f"generate.py: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    print(f"{args.folder / ROOT_NAME}: {args.patches} patches")


if __name__ == "__main__":
    main()
