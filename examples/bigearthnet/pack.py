"""Packs a folder of BigEarthNet patches once, so that training reads a patch with one read instead of 13 files.

    python examples/bigearthnet/pack.py BigEarthNet-v1.0 packed --splits splits --exclude patches_with_seasonal_snow.csv

A pack is a folder with memory-mapped shards of uint16 values at each band's own resolution (160 kB a patch), the 43
labels, and pack.json: splits, names, means and deviations of the training split, and digests.
"""

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from labels import LABELS_43, in_nomenclature
from patches import BANDS, OFFSETS, SPLITS, VALUES, Patch, patch_folders, read_list, read_patch, read_splits, unique
from tutti.errors import DataError, TuttiError

FORM = 1
PATCHES_PER_SHARD = 4096
GENERATED_MARK = "GENERATED.txt"
"""A file of this name beside the patches says that they were generated; reports then say so."""


def pack(
    root: Path,
    out: Path,
    *,
    splits: Path | None = None,
    exclude: Sequence[Path] = (),
    only_present: bool = False,
    workers: int = 0,
    patches_per_shard: int = PATCHES_PER_SHARD,
) -> dict[str, object]:
    """Pack a folder of patches.

    Args:
        root: the folder of patches.
        out: the folder to make; it must not exist.
        splits: folder of train.csv, val.csv and test.csv. None: 60, 20 and 20 of 100 patches by a hash of their names.
        exclude: lists of patches to leave out, such as those with snow or clouds.
        only_present: pack those patches of the splits that are there, instead of refusing if one is missing.
        workers: processes that read patches; 0: this one.
        patches_per_shard: patches in a file of values.

    Returns:
        What pack.json holds.

    Raises:
        DataError: a patch is missing or broken, a list names none, or `out` exists.
    """
    out, root = Path(out), Path(root)
    if out.exists():
        raise DataError(f"{out} exists; remove it, or name another folder for the pack")
    folders = {folder.name: folder for folder in patch_folders(root)}
    order = _order(folders, splits, exclude, only_present)
    names = [name for split in SPLITS for name in order[split]]
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    counts = {split: len(order[split]) for split in SPLITS}
    written = _write(partial, _read([folders[name] for name in names], workers), counts, patches_per_shard)
    labels = np.load(partial / "labels.npy")
    without = [names[index] for index in np.flatnonzero(in_nomenclature(labels, 19).sum(1) == 0)]
    generated = any((folder / GENERATED_MARK).exists() for folder in {root, next(iter(folders.values())).parent})
    record: dict[str, object] = {
        "form": FORM,
        "bands": list(BANDS),
        "labels": list(LABELS_43),
        "splits": counts,
        "names": names,
        "without_label_of_19": without,
        "patches_per_shard": patches_per_shard,
        "generated": generated,
        **written,
    }
    (partial / "pack.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    partial.rename(out)
    return record


def _order(
    folders: dict[str, Path], splits: Path | None, exclude: Sequence[Path], only_present: bool
) -> dict[str, list[str]]:
    """Return the patches of each split, without the excluded ones, sorted by name."""
    excluded = {name for path in exclude for name in read_list(path)}
    if splits is None:
        order = _split_by_hash(folders)
    else:
        order = {split: list(unique(names)) for split, names in read_splits(splits).items()}
    chosen = {split: sorted(name for name in names if name not in excluded) for split, names in order.items()}
    missing = [name for names in chosen.values() for name in names if name not in folders]
    if missing and not only_present:
        raise DataError(
            f"the folder lacks patches that the splits name ({len(missing)}, {missing[0]} first); unpack the whole "
            "archive, or pack what is there with --only-present"
        )
    chosen = {split: [name for name in names if name in folders] for split, names in chosen.items()}
    if empty := [split for split, names in chosen.items() if not names]:
        raise DataError(f"the split {empty[0]} has no patch of the folder; name the splits of these patches")
    return chosen


def _split_by_hash(names: Iterable[str]) -> dict[str, list[str]]:
    """60 of 100 patches for training, 20 for validation and 20 for the test, in the order of their names' hashes."""
    mixed = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    fifth = max(1, len(mixed) // 5)
    return {"train": mixed[2 * fifth :], "val": mixed[:fifth], "test": mixed[fifth : 2 * fifth]}


def _read(folders: Sequence[Path], workers: int) -> Iterator[Patch]:
    if not workers:
        yield from map(read_patch, folders)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(read_patch, folders, chunksize=16)


def _write(folder: Path, patches: Iterator[Patch], counts: dict[str, int], patches_per_shard: int) -> dict[str, object]:
    """Write shards and labels; return digests of the splits, and the training split's means and deviations."""
    total, row = sum(counts.values()), 0
    labels = np.zeros((total, len(LABELS_43)), dtype=np.uint8)
    sums, squares, digests = np.zeros(len(BANDS)), np.zeros(len(BANDS)), {}
    shard: np.ndarray | None = None
    for split, count in counts.items():
        digest = hashlib.sha256()
        for _ in range(count):
            patch = next(patches)
            if row % patches_per_shard == 0:
                size = min(patches_per_shard, total - row)
                shard = np.lib.format.open_memmap(
                    folder / shard_name(row // patches_per_shard), mode="w+", dtype=np.uint16, shape=(size, VALUES)
                )
            assert shard is not None
            shard[row % patches_per_shard], labels[row] = patch.values, patch.labels
            for part in (patch.name.encode(), patch.values.tobytes(), patch.labels.tobytes()):
                digest.update(part)
            if split == "train":
                bands = [patch.values[place].astype(np.float64) for place in OFFSETS.values()]
                sums += [band.mean() for band in bands]
                squares += [np.square(band).mean() for band in bands]
            row += 1
        digests[split] = digest.hexdigest()
    np.save(folder / "labels.npy", labels)
    mean = sums / counts["train"]
    deviation = np.sqrt(np.maximum(squares / counts["train"] - mean**2, 0))
    return {"mean": mean.tolist(), "deviation": np.maximum(deviation, 1.0).tolist(), "sha256": digests}


def shard_name(number: int) -> str:
    return f"values-{number:05d}.npy"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="the folder of patches (BigEarthNet-v1.0)")
    parser.add_argument("out", type=Path, help="the pack to make")
    parser.add_argument("--splits", type=Path, help="folder with train.csv, val.csv and test.csv")
    parser.add_argument("--exclude", type=Path, action="append", default=[], help="a list of patches to leave out")
    parser.add_argument("--only-present", action="store_true", help="pack those patches of the splits that are there")
    parser.add_argument("--workers", type=int, default=0, help="processes that read patches")
    args = parser.parse_args()
    try:
        record = pack(
            args.root,
            args.out,
            splits=args.splits,
            exclude=args.exclude,
            only_present=args.only_present,
            workers=args.workers,
        )
    except TuttiError as error:
        print(f"pack.py: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    counts = record["splits"]
    assert isinstance(counts, dict)
    print(f"{args.out}: " + ", ".join(f"{count} patches to {split}" for split, count in counts.items()))
    without = record["without_label_of_19"]
    assert isinstance(without, list)
    if without:
        print(f"{len(without)} patches have no label of the 19 and are left out with --labels 19: {without[0]}, ...")


if __name__ == "__main__":
    main()
