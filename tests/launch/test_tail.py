"""Nothing written to a followed file is lost, repeated or cut, however it is written."""

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tutti.launch.rank_watch import LineTail, RowTail, Tail


@given(st.text(), st.lists(st.integers(1, 7)))
def test_the_pieces_add_up_to_the_text_even_where_a_character_is_cut(text: str, sizes: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        tail, data, read = Tail(path), text.encode(), ""
        with path.open("wb", buffering=0) as file:
            for size in [*sizes, len(data)]:
                file.write(data[:size])
                data = data[size:]
                read += tail.read()
        assert read == text


def test_lines_come_when_they_are_complete(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LineTail(path)
    seen = []
    for piece in ("one\ntw", "o\n", "three"):
        with path.open("a") as file:
            file.write(piece)
        seen.append(tail.read())
    assert seen == [["one"], ["two"], []]
    assert tail.flush() == ["three"]
    assert tail.flush() == []


def test_blank_lines_stay_at_the_end_too(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = LineTail(path)
    path.write_text("one\n\n")
    assert tail.flush() == ["one", ""]


def test_what_an_earlier_run_wrote_is_skipped_unless_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    new, whole = RowTail(path), RowTail(path, from_end=False)
    with path.open("a") as file:
        file.write('not json\n[1]\n{"step": 2}\n')
    assert new.read() == [{"step": 2}]
    assert whole.read() == [{"step": 1}, {"step": 2}]
