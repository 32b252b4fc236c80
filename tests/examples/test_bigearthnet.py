"""BigEarthNet's files are read as another reader reads them, whoever wrote them; a pack holds the same values."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bigearthnet_patches import FOLDER, make_pack, write_big_endian_tiff

from tutti.errors import DataError
from tutti.optim.learning_rate import LRRule, learning_rate
from worked.examples import EXAMPLES

rasterio = pytest.importorskip("rasterio")

from rasterio.enums import Resampling  # noqa: E402

from dataset import Patches, PatchFolder, read_record, turned  # noqa: E402
from generate import generate  # noqa: E402
from labels import GROUPS, LABELS_19, LABELS_43, in_nomenclature, multi_hot  # noqa: E402
from network import F1, ResNet  # noqa: E402
from pack import pack  # noqa: E402
from patches import BANDS, OFFSETS, SIDES, VALUES, patch_folders, read_patch, to_image  # noqa: E402
from shared_training import parse_arguments  # noqa: E402
from train_torch import rate_factor  # noqa: E402

# label_indices.json of BigEarthNet-S2_19-classes_models: index among the 43 -> index among the 19.
PUBLISHED = {
    0: 0, 1: 0, 2: 1, 11: 2, 12: 2, 13: 2, 14: 3, 15: 3, 16: 3, 18: 3, 17: 4, 19: 5, 20: 6, 21: 7, 22: 8, 23: 9,
    24: 10, 25: 11, 31: 11, 26: 12, 27: 12, 28: 13, 29: 14, 33: 15, 34: 15, 35: 16, 36: 16, 38: 17, 39: 17,
    40: 18, 41: 18, 42: 18,
}  # fmt: skip
DROPPED = (3, 4, 5, 6, 7, 8, 9, 10, 30, 32, 37)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bigearthnet")
    make_pack(folder, 20)
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    """A folder of three patches, which a test may damage."""
    for folder in patch_folders(made)[:3]:
        shutil.copytree(folder, tmp_path / "raw" / folder.name)
    return tmp_path / "raw"


def test_each_of_the_43_labels_goes_into_the_published_one_of_the_19() -> None:
    matrix = in_nomenclature(np.eye(43, dtype=np.uint8), 19)
    assert {int(row): int(matrix[row].argmax()) for row in np.flatnonzero(matrix.sum(1))} == PUBLISHED
    assert tuple(np.flatnonzero(matrix.sum(1) == 0)) == DROPPED
    assert matrix.sum() == len(PUBLISHED) == sum(map(len, GROUPS.values()))
    assert len(LABELS_43) == len(set(LABELS_43)) == 43
    assert len(LABELS_19) == 19
    assert LABELS_43[28] == "Transitional woodland/shrub"
    assert LABELS_19[13] == "Transitional woodland, shrub"


def test_two_labels_of_one_group_are_one_label_of_the_19() -> None:
    row = multi_hot(["Rice fields", "Non-irrigated arable land", "Airports"], "a file")
    assert np.flatnonzero(in_nomenclature(row[None], 19)[0]).tolist() == [2]


def test_values_are_those_that_rasterio_reads(made: Path) -> None:
    assert len(patch_folders(made)) == len(patch_folders(made / "BigEarthNet-v1.0")) == 20
    for folder in patch_folders(made)[:3]:
        patch = read_patch(folder)
        assert patch.values.dtype == np.uint16
        assert patch.values.shape == (VALUES,) == (80_000,)
        image = to_image(patch.values)
        for index, (band, width) in enumerate(BANDS.items()):
            with rasterio.open(folder / f"{folder.name}_{band}.tif") as file:
                native = file.read(1)
                resampled = file.read(1, out_shape=(120, 120), resampling=Resampling.bilinear)
                assert file.res == (width, width)
                assert file.crs.to_epsg() in range(32601, 32661)
            assert native.shape == (1200 // width,) * 2
            assert (patch.values[OFFSETS[band]].reshape(native.shape) == native).all()
            assert (image[index] - torch.from_numpy(resampled.astype(np.float32))).abs().max() <= 0.501  # it rounds
        labels = json.loads((folder / f"{folder.name}_labels_metadata.json").read_text())["labels"]
        assert [LABELS_43[index] for index in np.flatnonzero(patch.labels)] == sorted(labels, key=LABELS_43.index)


def _by_hand(path: Path, values: np.ndarray, profile: dict[str, Any]) -> None:
    where = profile["transform"]
    write_big_endian_tiff(path, values, 7, (where.c, where.f), where.a)


def _by_gdal(**options: Any) -> Callable[[Path, np.ndarray, dict[str, Any]], None]:
    def write(path: Path, values: np.ndarray, profile: dict[str, Any]) -> None:
        keys = ("driver", "dtype", "width", "height", "count", "crs", "transform")
        with rasterio.open(path, "w", **{key: profile[key] for key in keys}, **options) as file:
            file.write(values, 1)

    return write


WRITERS = {
    "big-endian, strips, by hand": _by_hand,
    "deflate, predictor 2, tiles": _by_gdal(compress="deflate", predictor=2, tiled=True, blockxsize=16, blockysize=16),
    "lzw, big-endian": _by_gdal(compress="lzw", ENDIANNESS="BIG"),
    "BigTIFF, zstd, nodata": _by_gdal(compress="zstd", BIGTIFF="YES", nodata=0),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_patches_of_another_program_read_the_same(made: Path, tmp_path: Path, writer: str) -> None:
    source = patch_folders(made)[3]
    folder = tmp_path / source.name
    folder.mkdir()
    for band in reversed(BANDS):
        with rasterio.open(source / f"{source.name}_{band}.tif") as file:
            WRITERS[writer](folder / f"{source.name}_{band}.tif", file.read(1), file.profile)
        (folder / f"{source.name}_{band}.tif.aux.xml").write_text("<PAMDataset/>")
    metadata = json.loads((source / f"{source.name}_labels_metadata.json").read_text())
    metadata = {"note": "x", **dict(reversed(metadata.items())), "labels": metadata["labels"][::-1]}
    text = json.dumps(metadata, indent=4, ensure_ascii=False)
    (folder / f"{source.name}_labels_metadata.json").write_text("\ufeff" + text, encoding="utf-8")
    (folder / "thumbnail.png").write_bytes(b"png")
    (folder / f"{source.name}_B10.tif").write_bytes(b"not one of the twelve")
    (tmp_path / "README").write_text("readme")
    (tmp_path / "__MACOSX").mkdir()
    assert patch_folders(tmp_path) == [folder]
    patch, expected = read_patch(folder), read_patch(source)
    assert (patch.values == expected.values).all()
    assert (patch.labels == expected.labels).all()


def test_a_pack_holds_what_the_files_hold(made: Path, tmp_path: Path) -> None:
    record = pack(made, tmp_path / "small", splits=made / "splits", workers=2, patches_per_shard=8)
    assert record["sha256"] == read_record(made / "packed")["sha256"]
    assert len(list((tmp_path / "small").glob("values-*.npy"))) == 3
    names = []
    for split, count in (("train", 12), ("val", 4), ("test", 4)):
        packed = Patches(tmp_path / "small", split)
        assert len(packed) == count
        listed = [line.split(",")[0] for line in (made / "splits" / f"{split}.csv").read_text().splitlines()]
        assert packed.names == sorted(listed)
        names += listed
        files = PatchFolder(made, read_record(tmp_path / "small"), packed.names)
        for index in range(count):
            for value, expected in zip(packed[index], files[index], strict=True):
                assert torch.equal(value, expected)
    assert len(set(names)) == 20
    train = torch.stack([Patches(made / "packed", "train")[index][0] for index in range(12)])
    assert train.mean((0, 2, 3)).abs().max() < 0.02
    assert (train.std((0, 2, 3)) - 1).abs().max() < 0.1


def test_patches_without_a_label_of_the_19_are_named_and_left_out(made: Path, tmp_path: Path) -> None:
    splits = {split: Patches(made / "packed", split) for split in ("train", "val", "test")}
    expected = [
        name
        for data in splits.values()
        for name, labels in zip(data.names, data.labels, strict=True)
        if not set(np.flatnonzero(labels)) & set(PUBLISHED)
    ]
    assert expected, "the seed gives none"
    left = {split: Patches(made / "packed", split, classes=19) for split in splits}
    assert [name for data in left.values() for name in data.left_out] == expected
    assert read_record(made / "packed")["without_label_of_19"] == expected
    for split, data in left.items():
        assert len(data) + len(data.left_out) == len(splits[split])
        assert data[0][1].shape == (19,)
        assert data[0][1].sum() >= 1
        where = splits[split].names.index(data.names[0])
        assert torch.equal(data[0][0], splits[split][where][0])


def test_lists_of_splits_and_snow_choose_the_patches(made: Path, tmp_path: Path) -> None:
    names = [folder.name for folder in patch_folders(made)]
    lists = tmp_path / "lists"
    lists.mkdir()
    (lists / "bigearthnet-train.csv").write_text("s2_patch,s1_patch\n" + "".join(f"{n},x\n" for n in names[:5]))
    (lists / "val.csv").write_text("\n".join(names[5:7]))
    (lists / "test.csv").write_text(f"{names[7]}\r\n{names[8]}\r\n")
    (tmp_path / "snow.csv").write_text(names[1])
    record = pack(made, tmp_path / "packed", splits=lists, exclude=[tmp_path / "snow.csv"])
    assert record["names"] == [names[0], *names[2:9]]
    assert record["splits"] == {"train": 4, "val": 2, "test": 2}
    assert record["generated"] is True

    by_hash = pack(made, tmp_path / "by hash")
    assert by_hash["splits"] == {"train": 12, "val": 4, "test": 4}
    assert sorted(by_hash["names"]) == names

    (lists / "test.csv").write_text(f"{names[4]}\n")
    with pytest.raises(DataError, match=rf"{names[4]} is in both train\.csv and test\.csv"):
        pack(made, tmp_path / "other", splits=lists)
    (lists / "test.csv").write_text(f"S2A_elsewhere\n{names[8]}\n")
    with pytest.raises(DataError, match=r"the folder lacks patches that the splits name \(1, S2A_elsewhere first\)"):
        pack(made, tmp_path / "other", splits=lists)
    assert pack(made, tmp_path / "other", splits=lists, only_present=True)["splits"] == {
        "train": 5, "val": 2, "test": 1,
    }  # fmt: skip
    with pytest.raises(DataError, match="exists; remove it"):
        pack(made, tmp_path / "other")


def _rewrite(**changes: Any) -> Callable[[Path, str], None]:
    """Write band B05 of the patch with another size, type or number of bands."""

    def write(folder: Path, name: str) -> None:
        side, dtype, count = changes.get("side", 60), changes.get("dtype", "uint16"), changes.get("count", 1)
        where = rasterio.Affine(20, 0, changes.get("left", 0), 0, -20, 0)
        profile = {"driver": "GTiff", "width": side, "height": side, "count": count, "dtype": dtype}
        with rasterio.open(folder / f"{name}_B05.tif", "w", **profile, transform=where) as file:
            file.write(np.ones((count, side, side), dtype))

    return write


def _metadata(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path, str], None]:
    def write(folder: Path, name: str) -> None:
        path = folder / f"{name}_labels_metadata.json"
        metadata = json.loads(path.read_text())
        change(metadata)
        path.write_text(json.dumps(metadata))

    return write


BROKEN: dict[str, tuple[Callable[[Path, str], Any], str]] = {
    "missing band": (lambda f, n: (f / f"{n}_B8A.tif").unlink(), r"_B8A\.tif is missing; "),
    "missing labels": (lambda f, n: (f / f"{n}_labels_metadata.json").unlink(), r"_labels_metadata\.json is missing; "),
    "cut off": (
        lambda f, n: (f / f"{n}_B02.tif").write_bytes((f / f"{n}_B02.tif").read_bytes()[:9000]),
        r"_B02\.tif cannot be read as a GeoTIFF",
    ),
    "empty": (lambda f, n: (f / f"{n}_B09.tif").write_bytes(b""), r"_B09\.tif cannot be read as a GeoTIFF"),
    "resampled": (_rewrite(side=120), r"_B05\.tif has 120 x 120 pixels, and band B05 has 60 x 60 \(20 m"),
    "float": (_rewrite(dtype="float32"), r"_B05\.tif holds float32 values, and BigEarthNet's are uint16"),
    "all in one": (_rewrite(count=3), r"_B05\.tif has 3 bands in one file"),
    "elsewhere": (_rewrite(left=7), r"_B05\.tif lies at \(7, 0\) with pixels of 20 m, and its"),
    "no JSON": (lambda f, n: (f / f"{n}_labels_metadata.json").write_text("{"), "cannot be read as JSON"),
    "a list": (lambda f, n: (f / f"{n}_labels_metadata.json").write_text("[]"), "holds no JSON object"),
    "no labels": (_metadata(lambda m: m.pop("labels")), "has no list 'labels' of one name or more"),
    "empty labels": (_metadata(lambda m: m.update(labels=[])), "has no list 'labels' of one name or more"),
    "label of the 19": (
        _metadata(lambda m: m.update(labels=["Transitional woodland, shrub"])),
        r"belongs to the 19-class nomenclature.*'Transitional woodland/shrub'",
    ),
    "misspelt": (_metadata(lambda m: m.update(labels=["Pasture"])), r"the label 'Pasture'.*43; write 'Pastures'"),
    "too large": (_metadata(lambda m: m["coordinates"].update(lrx=0)), r"says that the patch is -?\d+ m by 1200 m"),
    "no corner": (_metadata(lambda m: m["coordinates"].pop("uly")), "without the numbers ulx, uly, lrx, lry"),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_a_broken_patch_is_refused_by_the_name_of_its_file(copied: Path, tmp_path: Path, damage: str) -> None:
    name = sorted(path.name for path in copied.iterdir())[1]
    break_it, message = BROKEN[damage]
    break_it(copied / name, name)
    with pytest.raises(DataError, match=message) as raised:
        read_patch(copied / name)
    text = str(raised.value)
    assert name in text
    assert "\n" not in text
    assert "; " in text  # the remedy


def test_folders_without_patches_and_packs_that_are_none_are_refused(made: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no folder"):
        patch_folders(tmp_path / "nowhere")
    with pytest.raises(DataError, match="has no patches"):
        patch_folders(tmp_path)
    shutil.copytree(patch_folders(made)[0], tmp_path / "v2" / "a tile" / patch_folders(made)[0].name)
    with pytest.raises(DataError, match="folders of tiles, as in BigEarthNet v2"):
        patch_folders(tmp_path / "v2")
    with pytest.raises(DataError, match=r"is no pack of patches .*pack\.py PATCHES PACK"):
        Patches(made, "train")
    with pytest.raises(DataError, match="no split 'tests'; use one of train, val, test"):
        Patches(made / "packed", "tests")
    shutil.copytree(made / "packed", tmp_path / "packed")
    shard = tmp_path / "packed" / "values-00000.npy"
    np.save(shard, np.zeros((2, 3), np.uint16))
    with pytest.raises(DataError, match=r"values-00000\.npy has patches of another size; pack the patches again"):
        Patches(tmp_path / "packed", "train")
    shard.write_bytes(b"no array")
    with pytest.raises(DataError, match=r"values-00000\.npy cannot be read .*; pack the patches again"):
        Patches(tmp_path / "packed", "train")
    shard.unlink()
    with pytest.raises(DataError, match=r"values-00000\.npy cannot be read \(\[Errno 2\] .*; pack the patches"):
        Patches(tmp_path / "packed", "train")
    (tmp_path / "packed" / "pack.json").write_text("{")
    with pytest.raises(DataError, match=r"pack\.json cannot be read as JSON"):
        Patches(tmp_path / "packed", "train")
    with pytest.raises(DataError, match="exists; remove it"):
        generate(made, 20)


def test_a_training_program_says_that_its_data_is_no_pack(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train_tutti.py", str(made)])
    with pytest.raises(SystemExit) as left:
        parse_arguments("")
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith(f"train_tutti.py: {made} is no pack of patches")


def test_a_broken_patch_leaves_no_pack_and_the_command_says_why(copied: Path, tmp_path: Path) -> None:
    name = sorted(path.name for path in copied.iterdir())[0]
    (copied / name / f"{name}_B12.tif").unlink()
    command = [sys.executable, str(FOLDER / "pack.py"), str(copied), str(tmp_path / "packed")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("pack.py: ")
    assert f"{name}_B12.tif is missing" in done.stderr
    assert not (tmp_path / "packed").exists()
    shutil.rmtree(copied / name)
    with pytest.raises(DataError, match=r"the split train has no patch of the folder"):  # two patches, three splits
        pack(copied, tmp_path / "packed")


def test_without_rasterio_one_sentence_says_what_to_install(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rasterio", None)
    with pytest.raises(DataError, match=r"rasterio, which is not installed; pip install 'tutti\[bigearthnet\]'"):
        read_patch(patch_folders(made)[0])
    assert len(Patches(made / "packed", "train")[0]) == 2  # a pack needs none


def test_augmentation_turns_and_mirrors_and_repeats_with_the_seed(made: Path) -> None:
    image = torch.arange(12 * 9.0).view(12, 3, 3)
    torch.manual_seed(0)
    seen = {tuple(turned(image).flatten().tolist()) for _ in range(200)}
    every = {tuple(m.rot90(k, (1, 2)).flatten().tolist()) for m in (image, image.flip(2)) for k in range(4)}
    assert seen == every
    assert len(every) == 8
    data = Patches(made / "packed", "train", augment=True)
    first, again = [(torch.manual_seed(3), data[0])[1] for _ in range(2)]
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], Patches(made / "packed", "train")[0][1])


def test_f1_is_that_of_scikit_learn() -> None:
    from sklearn.metrics import f1_score

    generator = torch.Generator().manual_seed(0)
    logits, target = torch.randn(50, 19, generator=generator), torch.rand(50, 19, generator=generator).lt(0.2).float()
    logits[:, 3], target[:, 3] = -1, 0  # a class that is neither present nor predicted
    logits[7], target[7] = -1, 0
    for name, metric in F1.items():
        expected = f1_score(target, logits > 0, average=name.removesuffix("_f1"), zero_division=0)
        assert metric(logits, target) == pytest.approx(expected, rel=1e-12)


def test_the_network_is_resnet_50() -> None:
    assert sum(p.numel() for p in ResNet(1000, bands=3).parameters()) == 25_557_032  # torchvision's resnet50
    model = ResNet(43).eval()
    assert sum(p.numel() for p in model.parameters()) == 23_624_363
    with torch.no_grad():
        assert model.groups(model.stem(torch.zeros(1, 12, 120, 120))).shape == (1, 2048, 4, 4)


def test_rates_are_those_of_the_published_schedule() -> None:
    for case in EXAMPLES["lr_linear"]["cases"]:
        factor = rate_factor(50, 10, case["global_batch"], (30, 60, 80), 5)
        assert 0.1 * factor == pytest.approx(case["eta"], rel=1e-12)
    rule = LRRule(base_lr=0.1, base_batch_size=256, warmup="gradual", warmup_epochs=5)
    factors = [rate_factor(step, 10, 512, (30, 60, 80), 5) for step in range(900)]
    for step, factor in enumerate(factors[:300]):
        expected = learning_rate(rule, 0.1, step, global_batch_size=512, steps_per_epoch=10)
        assert 0.1 * factor == pytest.approx(expected, rel=1e-12)
    jumps = {step // 10: after / before for step, (before, after) in enumerate(pairwise(factors), 1) if after < before}
    assert jumps == {30: pytest.approx(0.1), 60: pytest.approx(0.1), 80: pytest.approx(0.1)}
    assert set(SIDES.values()) == {20, 60, 120}
