"""Following files that other processes append to: logs as text, metrics as rows."""

import codecs
import json
from pathlib import Path
from typing import Any


class Tail:
    """New text of one file, each time it is asked. The file need not exist yet."""

    def __init__(self, path: Path, *, from_end: bool = True) -> None:
        """`from_end`: skip what the file holds already (an earlier run's output)."""
        self._path = path
        self._offset = path.stat().st_size if from_end and path.exists() else 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self) -> str:
        """What was appended since the last call; "" when nothing was."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return ""
        self._offset += len(data)
        return self._decoder.decode(data)


class LineTail:
    """New whole lines of one file, each time it is asked."""

    def __init__(self, path: Path, *, from_end: bool = True) -> None:
        self._tail = Tail(path, from_end=from_end)
        self._rest = ""

    def read(self) -> list[str]:
        """The lines completed since the last call, without their ends."""
        *lines, self._rest = (self._rest + self._tail.read()).split("\n")
        return lines

    def flush(self) -> list[str]:
        """What remains without an end, as a last line, after reading on."""
        lines = [*self.read(), self._rest]
        self._rest = ""
        return [line for line in lines if line] if not lines[-1] else lines


class RowTail:
    """New rows of a JSON lines file, each time it is asked; a line that is not a JSON object is left out."""

    def __init__(self, path: Path, *, from_end: bool = True) -> None:
        self._lines = LineTail(path, from_end=from_end)

    def read(self) -> list[dict[str, Any]]:
        rows = []
        for line in self._lines.read():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict):
                rows.append(row)
        return rows
