"""Click logs in Criteo's form: read by DLRM's rules, written so that they can be read, refused by line."""

import math
from pathlib import Path

import pytest
import torch

from tutti.data.clicks import CATEGORIES, INTEGERS, read_clicks, write_clicks
from tutti.errors import DataError


def line(label: int, integers: list[str], categories: list[str]) -> str:
    integers = integers + ["0"] * (INTEGERS - len(integers))
    categories = categories + ["00000000"] * (CATEGORIES - len(categories))
    return "\t".join([str(label), *integers, *categories]) + "\n"


def test_missing_and_negative_integers_are_0_and_categories_are_numbered_as_they_appear(tmp_path: Path) -> None:
    log = tmp_path / "train.txt"
    log.write_text(
        line(1, ["5", "", "-3"], ["ffffffff", "0a"]) + line(0, [], ["00000007", ""]) + line(0, [], ["ffffffff", "0A"])
    )
    clicks = read_clicks(log)
    assert clicks.dense[0, :3].tolist() == pytest.approx([math.log(6), 0.0, 0.0])
    assert clicks.categories[:, :2].tolist() == [[0, 0], [1, 1], [0, 0]]
    assert clicks.sizes == (2, 2, *[1] * 24)
    assert clicks.clicked.tolist() == [1.0, 0.0, 0.0]
    assert read_clicks(log, max_rows=8).sizes[0] == 1  # ffffffff and 7 are both 7 modulo 8


def test_a_made_up_log_is_the_same_for_a_seed_and_has_something_to_learn(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_clicks(tmp_path / name, 300, seed, most_rows=50)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()
    clicks = read_clicks(tmp_path / "a")
    assert clicks.dense.shape == (300, 13)
    assert 0.2 < float(clicks.clicked.mean()) < 0.8
    assert all(0 < size <= 51 for size in clicks.sizes)
    assert torch.equal(clicks.categories.amax(0) + 1, torch.tensor(clicks.sizes))
    train, test = clicks.split(0.8)
    assert (len(train), len(test)) == (240, 60)


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "empty"), ("1\t2\n", "line 1: 2 fields"), (line(0, [], []) + line(0, ["x"], []), "line 2")],
)
def test_what_is_no_click_log_is_refused_with_the_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "log").write_text(text)
    with pytest.raises(DataError, match=words):
        read_clicks(tmp_path / "log")


def test_a_log_too_short_to_split_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(line(0, [], []))
    with pytest.raises(DataError, match="one part is empty"):
        read_clicks(tmp_path / "log").split()
