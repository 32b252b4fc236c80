"""Parts of tensors in files: written under any cuts, read under any others, without launching ranks."""

import itertools
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti.checkpoint.index import (
    MODEL,
    CheckpointIndex,
    StoredFile,
    StoredPart,
    StoredTensor,
    index_to_text,
    overlaps,
    parse_index,
)
from tutti.checkpoint.sources import LoadTarget, Source, transfer
from tutti.checkpoint.tensor_files import TensorFiles, tensor_to_write, write_tensors
from tutti.comm.world import World
from tutti.errors import CheckpointError, DamagedCheckpointError
from tutti.parallel.layout import Cut, Range, TensorShard

ALONE = World(
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    host="here",
    device=torch.device("cpu"),
    backend="none",
    launcher="python",
    rendezvous_s=0.0,
)


@st.composite
def divisions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[TensorShard]:
    """Parts that together hold every element once: each dim's positions are dealt to its parts in ranges."""
    cuts: list[list[Cut | None]] = []
    for dim, size in enumerate(shape):
        count = draw(st.integers(1, 3))
        edges = sorted(draw(st.lists(st.integers(0, size), max_size=5)))
        ranges: list[list[Range]] = [[] for _ in range(count)]
        for start, stop in itertools.pairwise([0, *edges, size]):
            if start < stop:
                ranges[draw(st.integers(0, count - 1))].append((start, stop))
        whole: list[Cut | None] = [None]
        cuts.append(whole if count == 1 else [Cut(dim=dim, ranges=tuple(some)) for some in ranges])
    return [TensorShard(shape=shape, cuts=tuple(cut for cut in some if cut)) for some in itertools.product(*cuts)]


@st.composite
def journeys(draw: st.DrawFn) -> tuple[tuple[int, ...], list[TensorShard], list[TensorShard]]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=3)))
    return shape, draw(divisions(shape)), draw(divisions(shape))


@settings(max_examples=150, deadline=None)
@given(journeys())
def test_what_parts_have_in_common_is_in_exactly_one_pair(
    journey: tuple[tuple[int, ...], list[TensorShard], list[TensorShard]],
) -> None:
    shape, stored, wanted = journey
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for target in wanted:
        got, times = torch.full(target.local_shape, -1), torch.zeros(target.local_shape)
        for part in stored:
            values = part.take(whole)
            for there, here in overlaps(shape, part.cuts, target.cuts):
                got[here] = values[there]
                times[here] += 1
        assert torch.equal(got, target.take(whole))
        assert bool((times == 1).all())


def test_ranges_that_go_on_in_both_parts_are_read_at_once() -> None:
    stored = (Cut(dim=0, ranges=((0, 4), (4, 8))),)
    assert len(list(overlaps((12,), stored, ()))) == 1
    assert len(list(overlaps((12,), stored, (Cut(dim=0, ranges=((0, 2), (6, 8))),)))) == 2


def stored_in(folder: Path, whole: torch.Tensor, parts: list[TensorShard], dtype: str) -> Source:
    """A source of one tensor, one file for each part."""
    named = []
    for number, held in enumerate(parts):
        write_tensors(folder / f"{number}.safetensors", [tensor_to_write("x", held.take(whole))])
        named.append(StoredPart(file=f"{number}.safetensors", key="x", cuts=held.cuts))
    files = TensorFiles(folder)
    return Source(
        path=folder,
        tensors={(MODEL, "x", ""): StoredTensor(shape=tuple(whole.shape), dtype=dtype, parts=tuple(named))},
        read=lambda part, kind, index: files.read(part.file, part.key, kind, index),
    )


@settings(max_examples=40, deadline=None)
@given(journeys(), st.sampled_from(["float64", "bfloat16", "int64", "bool", "complex64"]))
def test_any_parts_are_made_of_any_others(
    tmp_path_factory: pytest.TempPathFactory,
    journey: tuple[tuple[int, ...], list[TensorShard], list[TensorShard]],
    dtype: str,
) -> None:
    shape, stored, wanted = journey
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape).to(getattr(torch, dtype))
    source = stored_in(tmp_path_factory.mktemp("parts"), whole, stored, dtype)
    targets = [
        LoadTarget(key=(MODEL, "x", ""), out=torch.empty(held.local_shape, dtype=whole.dtype), cuts=held.cuts)
        for held in wanted
    ]
    transfer(ALONE, source, targets)
    for held, target in zip(wanted, targets, strict=True):
        assert torch.equal(target.out, held.take(whole))


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(6, 4)
    parts = [TensorShard(shape=(6, 4)).cut(0, (0, 3)), TensorShard(shape=(6, 4)).cut(0, (3, 6))]
    source = stored_in(tmp_path, whole, parts, "float32")
    (tmp_path / "1.safetensors").unlink()
    held = TensorShard(shape=(6, 4)).cut(0, (1, 3)).cut(1, (0, 1), (3, 4))
    target = LoadTarget(key=(MODEL, "x", ""), out=torch.empty(2, 2), cuts=held.cuts)
    transfer(ALONE, source, [target])
    assert torch.equal(target.out, held.take(whole))
    with pytest.raises(CheckpointError, match=r"1\.safetensors cannot be read"):
        transfer(ALONE, source, [LoadTarget(key=(MODEL, "x", ""), out=torch.empty(6, 4))])


def test_parts_may_overlap_and_none_may_be_missing(tmp_path: Path) -> None:
    whole, held = torch.arange(10.0), TensorShard(shape=(10,))
    source = stored_in(tmp_path, whole, [held.cut(0, (0, 7)), held.cut(0, (4, 10))], "float32")
    target = LoadTarget(key=(MODEL, "x", ""), out=torch.empty(10))
    transfer(ALONE, source, [target])
    assert torch.equal(target.out, whole)
    for lacking in ([held.cut(0, (0, 7))], [held.cut(0, (0, 5)), held.cut(0, (0, 5))]):
        with pytest.raises(CheckpointError, match="holds only parts of x"):
            transfer(ALONE, stored_in(tmp_path, whole, lacking, "float32"), [target])


def test_files_are_safetensors_that_others_read(tmp_path: Path) -> None:
    wanted = {
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "expanded": torch.ones(1, 3).expand(2, 3),
        "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 5),
        "half": torch.randn(3).to(torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "eight": torch.randn(4).to(torch.float8_e4m3fn),
        "unsigned": torch.tensor([1, 2], dtype=torch.uint16),
    }
    file = tmp_path / "all.safetensors"
    tensors = [tensor_to_write(name, tensor) for name, tensor in wanted.items()]
    nbytes = write_tensors(file, tensors, {"format": "pt"}).nbytes
    assert nbytes == file.stat().st_size
    got = safetensors.torch.load_file(file)
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype
        assert got[name].shape == tensor.shape
        bits, expected = (one.contiguous().reshape(-1).view(torch.uint8) for one in (got[name], tensor))
        assert torch.equal(bits, expected), name


def test_the_index_says_what_it_said() -> None:
    file = "rank-00001.safetensors"

    def parts_of(key: str) -> StoredTensor:
        cut = StoredPart(file=file, key=key, cuts=(Cut(dim=1, ranges=((0, 2), (5, 6))),))
        whole = StoredPart(file="rank-00000.safetensors", key=key)
        return StoredTensor(shape=(2, 8), dtype="float32", parts=(cut, whole), replicated=True)

    keys = dict.fromkeys(("model/a", "model/b.weight", "optimizer-0/a/exp_avg"), "c" * 32)
    index = CheckpointIndex(
        step=7,
        world_size=2,
        mesh={"split": 2},
        id="abc",
        model={"a": parts_of("model/a"), "b.weight": parts_of("model/b.weight")},
        tied={"c": "a"},
        optimizers=({"a": {"exp_avg": parts_of("optimizer-0/a/exp_avg")}}, {}),
        files={
            **{
                name: StoredFile(nbytes=2000, checksum="a" * 32, tensors=keys)
                for name in ("rank-00000.safetensors", file)
            },
            "run.pt": StoredFile(nbytes=7, checksum="b" * 32),
        },
    )
    text = index_to_text(index)
    assert parse_index(text.encode(), Path("step")) == index
    assert json.loads(text)["format"] == 4
    older = text.replace('"format": 4', '"format": 3').partition(',\n  "checksum"')[0] + "\n}\n"
    with pytest.raises(CheckpointError, match="has format 3, which has no checksums; this version of tutti reads 4"):
        parse_index(older.encode(), Path("step"))
    for damaged in (text[:100], "[]", text.replace('"cuts"', '"cats"'), text.replace('"format": 4', '"format": 3')):
        with pytest.raises(DamagedCheckpointError, match="does not have the checksum"):
            parse_index(damaged.encode(), Path("step"))
