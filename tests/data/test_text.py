"""Real text from this machine: whole, once, in order, hashed; and its windows."""

import hashlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tutti.data.text import LICENCES, TextWindows, licence_text, split_by_position, standard_library_text
from tutti.errors import DataError


def test_licences_are_read_in_order_of_name_and_links_once(tmp_path: Path) -> None:
    (tmp_path / "B-2").write_bytes(b"two;")
    (tmp_path / "A-1").write_bytes(b"one;")
    (tmp_path / "B").symlink_to(tmp_path / "B-2")
    (tmp_path / "folder").mkdir()
    text = licence_text(tmp_path)
    assert text.content == b"one;two;"
    assert text.sha256 == hashlib.sha256(b"one;two;").hexdigest()
    assert text.description == f"2 licence texts of {tmp_path}, 8 bytes"


@pytest.mark.skipif(not LICENCES.is_dir(), reason=f"no {LICENCES} on this system")
def test_this_systems_licences_hold_the_gpl_once() -> None:
    content = licence_text().content
    assert content.count(b"Copyright (C) 2007 Free Software Foundation, Inc. <https://fsf.org/>") == 2  # GPL, LGPL
    assert len(content) > 100_000


def test_without_licences_the_standard_library_takes_their_place_and_says_so(tmp_path: Path) -> None:
    text = licence_text(tmp_path / "absent")
    assert text.content == standard_library_text().content
    assert f"no licence texts in {tmp_path / 'absent'}" in text.description


def test_standard_library_is_bounded_and_the_same_each_time() -> None:
    text = standard_library_text(50_000)
    assert len(text.content) == 50_000
    assert text == standard_library_text(50_000)
    assert standard_library_text(60_000).content.startswith(text.content)
    assert text.sha256 == hashlib.sha256(text.content).hexdigest()


def test_split_is_by_position() -> None:
    assert split_by_position(b"0123456789") == (b"012345678", b"9")
    for fraction in (0.0, 1.0):
        with pytest.raises(DataError, match="one part is empty"):
            split_by_position(b"0123456789", fraction)


@given(st.binary(min_size=2, max_size=200), st.integers(1, 20), st.integers(1, 30))
def test_windows_are_slices_of_the_text(content: bytes, length: int, stride: int) -> None:
    if len(content) <= length:
        with pytest.raises(DataError, match="more text"):
            TextWindows(content, length, stride)
        return
    windows = TextWindows(content, length, stride)
    for index in range(len(windows)):
        inputs, target = windows[index]
        assert inputs.dtype == target.dtype == torch.int64
        assert bytes(inputs.tolist()) == content[index * stride : index * stride + length]
        assert bytes(target.tolist()) == content[index * stride + 1 : index * stride + length + 1]
    assert len(windows) * stride + length + 1 > len(content)  # not one window more would fit
    with pytest.raises(IndexError):
        windows[len(windows)]


def test_by_default_every_byte_but_the_first_is_predicted_once() -> None:
    content = bytes(range(101))
    windows = TextWindows(content, 10)
    assert [byte for _, target in windows for byte in target.tolist()] == list(range(1, 101))


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(DataError, match="1 or more"):
        TextWindows(b"0123456789", 0)
    with pytest.raises(DataError, match="1 or more"):
        TextWindows(b"0123456789", 2, 0)
