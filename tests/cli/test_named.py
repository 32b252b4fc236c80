"""Architectures and clusters named on the command line."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tutti.cli.describe import command
from tutti.commands.inputs import cluster_for, named_model, sizes
from tutti.config import serialization
from tutti.config.model import ModelSpec
from tutti.errors import SpecError
from tutti.profile.architectures import architecture


def test_sizes_are_read_as_people_write_them() -> None:
    assert sizes(["--layers", "80", "--kv-heads=8", "--tied", "--fused"]) == {
        "layers": "80", "kv_heads": "8", "tied": "true", "fused": "true",
    }  # fmt: skip
    with pytest.raises(SpecError, match="has no name before it"):
        sizes(["80"])


def test_a_file_goes_before_an_architecture_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert named_model(("gpt", "--layers", "2")) == architecture("gpt", {"layers": 2})
    assert named_model(("train.py",)) is None
    Path("gpt").touch()
    assert named_model(("gpt",)) is None


def test_a_word_that_is_nearly_a_name_is_told_from_a_script() -> None:
    with pytest.raises(SpecError, match=r"^gtp is neither a script nor the name of a model; did you mean gpt\?$"):
        named_model(("gtp", "--layers", "2"))
    with pytest.raises(SpecError, match="did you mean llama3-70b"):
        named_model(("Llama-3-70B",))
    for word in ("gtp.py", "train", "./train.py", "--layers"):
        assert named_model((word,)) is None


def test_a_size_by_another_word_is_answered_with_the_one_it_has() -> None:
    for name, word, meant in (("resnet", "layers", "depth"), ("vit", "depth", "layers"), ("gpt", "d_model", "hidden")):
        with pytest.raises(SpecError, match=rf"has no size '{word}'; did you mean '{meant}'\?"):
            architecture(name, {word: 50})
    with pytest.raises(SpecError, match="experts = 0; give a number of 1 or more"):
        architecture("moe", {"experts": 0})
    with pytest.raises(SpecError, match="top_k = 9 of 8 experts; give a number from 1 to 8"):
        architecture("moe", {"top_k": 9})


def test_describe_takes_a_name_with_sizes() -> None:
    done = CliRunner().invoke(command, ["--json", "llama3-8b", "--layers", "2", "--seq-len", "64"])
    assert done.exit_code == 0, done.output
    model = serialization.loads(ModelSpec, done.stdout)
    assert model == architecture("llama3-8b", {"layers": 2, "seq_len": 64})
    assert json.loads(done.stdout)["name"] == "llama3-8b"


def test_describe_shows_a_tree_with_equal_blocks_gathered() -> None:
    done = CliRunner().invoke(command, ["--depth", "2", "gpt", "--layers", "7"])
    assert done.exit_code == 0, done.output
    assert "0-6 (7x)" in done.output


def test_a_cluster_is_one_line() -> None:
    assert cluster_for(Path("2x8:h100,nvlink4,8*ib-ndr")).device_count == 16
