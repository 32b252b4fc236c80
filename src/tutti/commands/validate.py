"""`tutti.validate`: scores predictions against published measurements, family by family."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tutti.commands.messages import messages, status
from tutti.commands.values import StrPath, path_of
from tutti.errors import DataError

if TYPE_CHECKING:
    from tutti.validation.validation import CalibrationShare, Validation


def validate(
    rows: StrPath | None = None,
    *,
    fit: Sequence[str] = (),
    family: Sequence[str] = (),
    verbose: bool = False,
) -> "Validation":
    """Score predictions against published measurements, by family.

    Args:
        rows: a CSV file of measurements; those that ship with tutti if None.
        fit: "FAMILY=N" or "FAMILY=N@OTHER": calibrate with N rows of a family.
        family: only these families.
        verbose: show on standard error what is predicted.

    Raises:
        TuttiError: what `tutti validate` would refuse, with the same sentence.
    """
    with messages(shown=verbose):
        return validated(path_of("rows", rows), tuple(fit), tuple(family))


def validated(path: Path | None, fits: tuple[str, ...], families: tuple[str, ...]) -> "Validation":
    """Score the rows of a file, or those that ship with tutti.

    Args:
        path: the file.
        fits: how families are calibrated.
        families: the families to score; empty for all.
    """
    from tutti.validation.published_rows import load_rows
    from tutti.validation.validation import validate as scored

    every = load_rows(path)
    _check_known(families, {row.family for row in every})
    loaded = [row for row in every if not families or row.family in families]
    wanted = dict(_fit(text) for text in fits)
    borrowed = [share.borrow for share in wanted.values() if share.borrow]
    _check_known([*wanted, *borrowed], {row.family for row in loaded})
    with status("predicting") as shown:
        return scored(loaded, wanted, lambda family: shown.update(f"predicting {family}") if shown else None)


def _check_known(named: Sequence[str], known: set[str]) -> None:
    """Raise DataError for a family without rows, naming those that have some."""
    missing = [name for name in named if name not in known]
    if missing:
        raise DataError(f"there are no rows of family {missing[0]!r}; there are {', '.join(sorted(known)) or 'none'}")


def _fit(text: str) -> "tuple[str, CalibrationShare]":
    from tutti.validation.validation import CalibrationShare

    family, _, rest = text.partition("=")
    count, _, borrow = rest.partition("@")
    if not family or not count.isdecimal():
        raise DataError(f"--fit {text}: write FAMILY=N, such as vtrainm=25, or FAMILY=N@OTHER")
    return family, CalibrationShare(count=int(count), borrow=borrow)
