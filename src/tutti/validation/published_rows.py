"""Read published measurements, one per row, from a CSV file, plain or gzipped."""

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
    """A row that cannot be costed.

    The message is the reason; its wording is the same for equal reasons, which are counted together.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """One published measurement.

    Attributes:
        cells: stripped text by column name; a missing cell is empty.
    """

    cells: dict[str, str]

    def text(self, column: str) -> str:
        """Return a cell; empty if the column is missing."""
        return self.cells.get(column, "")

    def whole(self, column: str, default: int | None = None) -> int:
        """Return a cell as a whole number, or `default` if it is not a number.

        Raises:
            Uncosted: the cell is not a number and there is no default.
        """
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
            raise Uncosted("the value is not a number") from None

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
    """Read the rows of a file, or the rows that ship with tutti if `path` is None.

    Raises:
        DataError: the file cannot be read or is not a table of measurements.
    """
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
        raise DataError(f"{source} is not UTF-8 text ({error}); give a CSV file, plain or gzipped") from None
    reader = csv.DictReader(io.StringIO(text, newline=""))
    missing = [name for name in _NEEDED if name not in (reader.fieldnames or ())]
    if missing:
        raise DataError(
            f"{source} has no column {', '.join(missing)}; give a table with the columns of the rows that ship with "
            "tutti (tutti validate --columns lists them)"
        )
    return [PublishedRow(cells={name: (value or "").strip() for name, value in row.items() if name}) for row in reader]
