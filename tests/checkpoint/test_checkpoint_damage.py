"""Damaged, missing, swapped and hostile checkpoints: every flipped bit is found, nothing outside is read."""

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tutti
from harness import run_ranks
from trainer.training import vectors
from tutti.checkpoint import to_safetensors
from tutti.checkpoint.checksums import checksum
from tutti.checkpoint.index import INDEX, RUN_STATE, parse_index
from tutti.checkpoint.integrity import find_damage, open_sound_checkpoint
from tutti.checkpoint.plain_state import open_weights
from tutti.checkpoint.sources import open_checkpoint
from tutti.errors import CheckpointError, DamagedCheckpointError

RANK_FILE = "rank-00000.safetensors"


def save_twice(folder: Path, seed: int) -> None:
    """Checkpoints of steps 1 and 2."""
    os.environ["TUTTI_RUN_FOLDER"] = str(folder)
    job = tutti.Job(global_batch_size=8, seed=seed, keep_checkpoints=5)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer, loader = job.prepare(model, optimizer, vectors(), nn.functional.cross_entropy)
    steps = iter(loader)
    for _ in range(2):
        job.step(next(steps))
        job.save()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run_ranks(save_twice, 1, folder, 3)
    return folder


@pytest.fixture
def checkpoint(run: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint of step 2, to be damaged."""
    return Path(shutil.copytree(run, tmp_path / "run")) / "checkpoints" / "step-00000002"


def finding(folder: Path) -> str:
    with pytest.raises(DamagedCheckpointError) as error:
        open_sound_checkpoint(folder)
    assert error.value.exit_code == 2
    assert len(str(error.value)) < 1200
    return error.value.finding


def reseal(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the index as a hostile writer would, who computes its checksum again."""
    data = json.loads((folder / INDEX).read_text())
    del data["checksum"]
    changed = change(data)
    text = json.dumps(data if changed is None else changed)[:-1].encode()
    (folder / INDEX).write_bytes(text + b',\n  "checksum": "' + checksum(text).encode() + b'"\n}\n')


def test_a_sound_checkpoint_is_sound(checkpoint: Path) -> None:
    assert find_damage(open_sound_checkpoint(checkpoint)) is None
    reseal(checkpoint, lambda data: None)  # the tests below find what they change, not that they write
    assert find_damage(open_sound_checkpoint(checkpoint)) is None


@pytest.mark.parametrize("name", [INDEX, RUN_STATE, RANK_FILE])
def test_every_flipped_bit_is_found(checkpoint: Path, name: str) -> None:
    whole = (checkpoint / name).read_bytes()
    chosen = random.Random(7)
    for _ in range(250):
        place, bit = chosen.randrange(len(whole)), chosen.randrange(8)
        damaged = bytearray(whole)
        damaged[place] ^= 1 << bit
        (checkpoint / name).write_bytes(damaged)
        assert name in finding(checkpoint), (place, bit)
    (checkpoint / name).write_bytes(whole)
    open_sound_checkpoint(checkpoint)


@pytest.mark.parametrize("shares", [1, 2, 3])
def test_every_tensor_is_in_the_share_of_one_rank(checkpoint: Path, shares: int) -> None:
    source = open_checkpoint(checkpoint)
    whole = bytearray((checkpoint / RANK_FILE).read_bytes())
    start = int.from_bytes(whole[:8], "little") + 8
    for place in range(start, len(whole), 64):
        whole[place] ^= 1
        (checkpoint / RANK_FILE).write_bytes(whole)
        found = [find_damage(source, share, shares) for share in range(shares)]
        assert sum(one is not None for one in found) == 1
        whole[place] ^= 1


def test_a_damaged_value_is_named_by_its_tensor(checkpoint: Path) -> None:
    whole = bytearray((checkpoint / RANK_FILE).read_bytes())
    size = int.from_bytes(whole[:8], "little")
    begin = json.loads(whole[8 : 8 + size])["optimizer-0/2.weight/exp_avg"]["data_offsets"][0]
    whole[8 + size + begin] ^= 4
    (checkpoint / RANK_FILE).write_bytes(whole)
    assert finding(checkpoint) == (
        f"{RANK_FILE}: the values of 'optimizer-0/2.weight/exp_avg' are not those that were saved"
    )


@pytest.mark.parametrize("left", [0, 5, 100, -1])
def test_truncated_and_longer_files_are_named(checkpoint: Path, left: int) -> None:
    for name in (INDEX, RUN_STATE, RANK_FILE):
        whole = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(whole[:left])
        assert name in finding(checkpoint)
        (checkpoint / name).write_bytes(whole + b"\0")
        assert name in finding(checkpoint)
        (checkpoint / name).write_bytes(whole)
    (checkpoint / RANK_FILE).write_bytes((checkpoint / RANK_FILE).read_bytes()[:-1])
    assert "is truncated" in finding(checkpoint)
    assert "is not whole" in finding(checkpoint)


@pytest.mark.parametrize("name", [INDEX, RUN_STATE, RANK_FILE])
def test_missing_files_are_named(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    assert f"{name} is missing" in finding(checkpoint)
    if name == RANK_FILE:
        assert "which holds 'model/0.weight' and 11 more tensors" in finding(checkpoint)


@pytest.mark.parametrize("name", [INDEX, RUN_STATE, RANK_FILE])
def test_files_of_another_step_or_run_are_named(checkpoint: Path, tmp_path: Path, name: str) -> None:
    run_ranks(save_twice, 1, tmp_path / "other", 4)
    for other in (checkpoint.with_name("step-00000001"), tmp_path / "other" / "checkpoints" / "step-00000002"):
        whole = (checkpoint / name).read_bytes()
        shutil.copy(other / name, checkpoint / name)
        found = finding(checkpoint)
        assert (RANK_FILE if name == RANK_FILE else RUN_STATE) in found
        if name == RANK_FILE:
            assert f"belongs to another checkpoint (of step {int(other.name[-1])}" in found
        (checkpoint / name).write_bytes(whole)


@pytest.mark.parametrize("name", [INDEX, RUN_STATE, RANK_FILE])
def test_nothing_outside_the_folder_is_read(checkpoint: Path, name: str) -> None:
    outside = checkpoint.parent / name
    (checkpoint / name).rename(outside)
    (checkpoint / name).symlink_to(outside)
    assert f"{name} is a link" in finding(checkpoint)
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    assert f"{name} is not a plain file" in finding(checkpoint)


@pytest.mark.parametrize(
    "file", ["../" + RANK_FILE, "/etc/passwd", "a/../../x.safetensors", "rank-00000.safetensors\0"]
)
def test_names_that_lead_outside_are_refused(checkpoint: Path, file: str) -> None:
    def lead_outside(data: dict[str, Any]) -> None:
        data["model"]["0.weight"]["parts"][0]["file"] = file
        data["files"][file] = data["files"][RANK_FILE]

    reseal(checkpoint, lead_outside)
    assert INDEX in finding(checkpoint)


def _entry(data: dict[str, Any]) -> Any:
    return data["model"]["0.weight"]


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a huge shape": lambda data: _entry(data).update(shape=[10**5, 10**5]),
    "a shape beyond all integers": lambda data: _entry(data).update(shape=[10**40]),
    "a negative shape": lambda data: _entry(data).update(shape=[-5, -6]),
    "a shape of floats": lambda data: _entry(data).update(shape=[5.0, 6]),
    "a shape of texts": lambda data: _entry(data).update(shape=["5", "6"]),
    "a shape of truths": lambda data: _entry(data).update(shape=[True, 6]),
    "no shape": lambda data: _entry(data).pop("shape"),
    "a thousand dims": lambda data: _entry(data).update(shape=[1] * 1000),
    "another shape": lambda data: _entry(data).update(shape=[6, 5]),
    "a dtype that is a function": lambda data: _entry(data).update(dtype="load"),
    "a dtype that is a number": lambda data: _entry(data).update(dtype=3),
    "another dtype": lambda data: _entry(data).update(dtype="int64"),
    "no parts": lambda data: _entry(data).update(parts=[]),
    "parts that are a dict": lambda data: _entry(data).update(parts={}),
    "a part of another tensor": lambda data: _entry(data)["parts"][0].update(key="model/2.weight"),
    "a cut of no dim": lambda data: _entry(data)["parts"][0].update(cuts=[{"dim": 9, "ranges": [[0, 1]]}]),
    "a cut outside": lambda data: _entry(data)["parts"][0].update(cuts=[{"dim": 0, "ranges": [[0, 9]]}]),
    "a cut backwards": lambda data: _entry(data)["parts"][0].update(cuts=[{"dim": 0, "ranges": [[3, 1]]}]),
    "two cuts of a dim": lambda data: _entry(data)["parts"][0].update(cuts=[{"dim": 0, "ranges": [[0, 5]]}] * 2),
    "half a tensor": lambda data: _entry(data)["parts"][0].update(cuts=[{"dim": 0, "ranges": [[0, 2]]}]),
    "an entry that is a list": lambda data: data["model"].update({"0.weight": []}),
    "a model that is a list": lambda data: data.update(model=[]),
    "optimizers that are null": lambda data: data.update(optimizers=None),
    "a missing tensor": lambda data: data["model"].pop("0.weight"),
    "a tie to nothing": lambda data: data["tied"].update(x="nothing"),
    "no run state": lambda data: data["files"].pop(RUN_STATE),
    "a negative size": lambda data: data["files"][RUN_STATE].update(nbytes=-1),
    "a size of all memory": lambda data: data["files"][RUN_STATE].update(nbytes=2**60),
    "a size of a disk": lambda data: data["files"][RUN_STATE].update(nbytes=2**40),
    "a dtype that files lack": lambda data: data["model"]["0.weight"].update(dtype="float8_e8m0fnu"),
    "a checksum that is none": lambda data: data["files"][RUN_STATE].update(checksum="x"),
    "a step of a text": lambda data: data.update(step="2"),
    "no ranks": lambda data: data.update(world_size=0),
    "an unknown field": lambda data: data.update(more=1),
    "a long name": lambda data: data["model"].update({"n" * 10**6: data["model"].pop("0.weight")}),
    "an escape": lambda data: data["model"].update({"\x1b[2J": 3}),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_indexes_are_refused_without_allocation(checkpoint: Path, change: Callable[[Any], Any]) -> None:
    reseal(checkpoint, lambda data: change(data) and None)
    said = finding(checkpoint)
    assert any(name in said for name in (INDEX, RANK_FILE, RUN_STATE))
    assert "\x1b" not in said
    with pytest.raises(DamagedCheckpointError):
        to_safetensors(checkpoint, checkpoint.parent / "model.safetensors")
    assert not (checkpoint.parent / "model.safetensors").exists()


@pytest.mark.parametrize(
    "text",
    [b"[" * 100_000, b'{"model": ' * 50_000, b'{"step": ' + b"9" * 5000, b'{"step": 1e400', b"\xff\xfe", b"null", b""],
    ids=["lists", "dicts", "integer", "float", "bytes", "null", "empty"],
)
def test_text_that_is_no_index_is_refused(text: bytes) -> None:
    sealed = text + b',\n  "checksum": "' + checksum(text).encode() + b'"\n}\n'
    for data in (text, sealed):
        with pytest.raises(DamagedCheckpointError, match=INDEX):
            parse_index(data, Path("step"))


class _Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch exploded",)


def test_pickled_objects_are_refused_without_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": _Bomb()}, tmp_path / "zip.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(_Bomb()))
    torch.save({"model": nn.Linear(2, 2)}, tmp_path / "module.pt")
    for name in ("zip.pt", "plain.pt", "module.pt"):
        with pytest.raises(CheckpointError) as error:
            open_weights(tmp_path / name)
        said = str(error.value)
        assert name in said
        assert not any(advice in said for advice in ("weights_only", "trust", "options", "safe_globals"))
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("state", [[], {}, {"seed": "x"}, 3], ids=repr)
def test_a_run_state_of_another_form_is_refused(checkpoint: Path, state: Any) -> None:
    torch.save(state, checkpoint / RUN_STATE)
    data = (checkpoint / RUN_STATE).read_bytes()
    reseal(checkpoint, lambda index: index["files"][RUN_STATE].update(nbytes=len(data), checksum=checksum(data)))
    assert RUN_STATE in finding(checkpoint)
