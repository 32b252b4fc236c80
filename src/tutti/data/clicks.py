r"""Click logs in Criteo's format: one line per ad display, tab-separated, with 13 integers and 26 categories.

    label \t 13 integers \t 26 categories in hexadecimal      (no header; an empty field is a missing value)

They are read by the rules of DLRM (Naumov et al. 2019, arXiv 1906.00091, and its published code): a missing or negative
integer counts as 0, integers become log(x + 1), and a category becomes its number in order of first appearance.
"""

import math
import random
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from tutti.errors import DataError

INTEGERS, CATEGORIES = 13, 26


@dataclass(frozen=True, slots=True, kw_only=True)
class ClickLog:
    """A click log as tensors. Floating-point values have torch's default dtype.

    Attributes:
        dense: (n, 13), the integers as log(x + 1).
        categories: (n, 26) int64.
        clicked: (n,), 0 or 1.
        sizes: the number of rows that each of the 26 tables needs.
    """

    dense: Tensor
    categories: Tensor
    clicked: Tensor
    sizes: tuple[int, ...]

    def split(self, fraction: float = 6 / 7) -> tuple[TensorDataset, TensorDataset]:
        """Split the log in order of time.

        Args:
            fraction: the part to train on; the default leaves the last of seven days to test on.

        Returns:
            The data to train on, and the data to test on.

        Raises:
            DataError: one part is empty.
        """
        cut = int(len(self.clicked) * fraction)
        if not 0 < cut < len(self.clicked):
            raise DataError(
                f"{len(self.clicked)} displays cannot be split at {fraction:.2f}: one part is empty; give more of them"
            )
        columns = (self.dense, self.categories, self.clicked)
        return TensorDataset(*(c[:cut] for c in columns)), TensorDataset(*(c[cut:] for c in columns))


def read_clicks(path: str | Path, max_rows: int | None = None) -> ClickLog:
    """Read a click log.

    Args:
        path: the file.
        max_rows: the largest number of rows of a table; categories are first taken modulo this number.

    Raises:
        DataError: a line does not have the format (the message names it), or the file is empty.
    """
    dense, categories, clicked = array("f"), array("q"), array("f")
    numbers: list[dict[int, int]] = [{} for _ in range(CATEGORIES)]
    with Path(path).open(encoding="ascii") as file:
        for number, line in enumerate(file, 1):
            fields = line.rstrip("\n").split("\t")
            if len(fields) != 1 + INTEGERS + CATEGORIES:
                raise DataError(
                    f"{path}, line {number}: {len(fields)} fields instead of {1 + INTEGERS + CATEGORIES} (a label, "
                    f"{INTEGERS} integers, {CATEGORIES} categories, separated by tabs); give a log in Criteo's format"
                )
            try:
                clicked.append(float(int(fields[0])))
                dense.extend(math.log1p(max(int(field or 0), 0)) for field in fields[1 : 1 + INTEGERS])
                values = [int(field or "0", 16) for field in fields[1 + INTEGERS :]]
            except ValueError as error:
                raise DataError(f"{path}, line {number}: {error}; give a log in Criteo's format") from None
            for known, value in zip(numbers, values, strict=True):
                categories.append(known.setdefault(value % max_rows if max_rows else value, len(known)))
    if not clicked:
        raise DataError(f"{path} is empty; give a log with at least one display")
    kind = torch.get_default_dtype()
    return ClickLog(
        dense=torch.from_numpy(np.array(dense)).reshape(-1, INTEGERS).to(kind),
        categories=torch.from_numpy(np.array(categories)).reshape(-1, CATEGORIES),
        clicked=torch.from_numpy(np.array(clicked)).to(kind),
        sizes=tuple(len(known) for known in numbers),
    )


def write_clicks(path: str | Path, displays: int, seed: int = 0, most_rows: int = 1000) -> None:
    """Write a synthetic log in Criteo's format, because the real ones may not be redistributed (CC BY-NC-SA).

    Table i has about most_rows / (i + 1) categories, of which the first are far more frequent. Six of the categories
    and the first integer influence the probability of a click. A tenth of all fields is missing.

    Args:
        path: the file to write.
        displays: number of lines.
        seed: seed of the random numbers.
        most_rows: number of categories of the first table.
    """
    draw = random.Random(seed)
    sizes = [max(most_rows // (i + 1), 3) for i in range(CATEGORIES)]
    liking = [[draw.gauss(0, 1) for _ in range(size)] for size in sizes]
    with Path(path).open("w", encoding="ascii") as file:
        for _ in range(displays):
            integers = [int(draw.lognormvariate(1, 1)) - 1 for _ in range(INTEGERS)]
            chosen = [int(size * draw.random() ** 3) for size in sizes]
            score = sum(liking[i][chosen[i]] for i in range(6)) + 0.5 * math.log1p(max(integers[0], 0)) - 1
            label = int(draw.random() < 1 / (1 + math.exp(-score)))
            words = [str(value) for value in integers] + [
                f"{(row * 2654435761 + i) & 0xFFFFFFFF:08x}" for i, row in enumerate(chosen)
            ]
            fields = ["" if draw.random() < 0.1 else word for word in words]
            file.write("\t".join([str(label), *fields]) + "\n")
