"""Published measurements, a row each: read from a CSV file, plain or gzipped, as text and numbers."""

import csv
import gzip
import io
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from tutti.errors import DataError

SHIPPED = "data/published-throughput.csv.gz"
_NEEDED = ("row_id", "family", "model", "gpu", "n_gpus", "metric", "value")


class Uncosted(Exception):
    """A row that cannot be costed; the message is the reason, worded so that equal reasons count together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """One measurement. `cells`: its columns by name, without white space around; a missing one is empty."""

    cells: dict[str, str]

    def text(self, column: str) -> str:
        return self.cells.get(column, "")

    def whole(self, column: str, default: int | None = None) -> int:
        """A whole number. Raises Uncosted where there is none and no default."""
        text = self.text(column).replace(",", "")
        try:
            return int(float(text))
        except ValueError:
            if default is None:
                raise Uncosted(f"{column} is not printed as one number") from None
            return default

    @property
    def row_id(self) -> str:
        return self.text("row_id")

    @property
    def family(self) -> str:
        return self.text("family")

    @property
    def value(self) -> float:
        try:
            return float(self.text("value").replace(",", ""))
        except ValueError:
            raise Uncosted("the value is no number") from None

    @property
    def gpus(self) -> int:
        return self.whole("n_gpus")

    @property
    def memory_gib(self) -> float | None:
        try:
            return float(self.text("memory_gib"))
        except ValueError:
            return None


def load_rows(path: Path | None) -> list[PublishedRow]:
    """The rows of a file, or those that ship with tutti. Raises DataError for a file that is not such a table."""
    if path is None:
        return _parse(resources.files(__package__).joinpath(SHIPPED).read_bytes(), SHIPPED)
    try:
        return _parse(path.read_bytes(), str(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); name a CSV file of measurements") from None


def _parse(content: bytes, source: str) -> list[PublishedRow]:
    try:
        text = (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{source} is not text in UTF-8 ({error}); give a CSV file, plain or gzipped") from None
    reader = csv.DictReader(io.StringIO(text, newline=""))
    missing = [name for name in _NEEDED if name not in (reader.fieldnames or ())]
    if missing:
        raise DataError(
            f"{source} has no column {', '.join(missing)}; a table of measurements has the columns of the rows that "
            "ship with tutti (tutti validate --columns lists them)"
        )
    return [PublishedRow(cells={name: (value or "").strip() for name, value in row.items() if name}) for row in reader]
