"""`tutti validate`: scores predictions against published measurements, family by family."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tutti.cli.options import emit, json_option

if TYPE_CHECKING:
    from rich.table import Table

    from tutti.validation.published_rows import PublishedRow
    from tutti.validation.scoring import Errors
    from tutti.validation.validation import FamilyResult, Validation


@click.command()
@click.argument("rows", required=False, type=click.Path(path_type=Path), metavar="[ROWS.csv]")
@click.option(
    "--fit",
    "fits",
    multiple=True,
    metavar="FAMILY=N[@OTHER]",
    help="Calibrate with N rows of FAMILY, starting from the device constants of OTHER if given; may be repeated.",
)
@click.option("--family", "families", multiple=True, help="Only this family; may be repeated.")
@click.option("--columns", is_flag=True, help="List the columns of a table of rows, with an example; predict nothing.")
@json_option
def command(rows: Path | None, fits: tuple[str, ...], families: tuple[str, ...], columns: bool, as_json: bool) -> None:
    """Score predictions against the published measurements in ROWS, or those that ship with tutti.

    Errors are those of the step time, by family; there is no mean over all families. Rows that calibrate are listed
    separately from rows that test; the rows' names alone decide which is which. Missed aims are shown with the likely
    reason, and rows that cannot be costed are counted. From 16 rows of a machine its constants are fitted, with fewer
    only one factor.
    """
    from tutti.commands.validate import validated
    from tutti.validation.published_rows import load_rows

    if columns:
        _show_columns((load_rows(rows) or load_rows(None))[0], as_json=as_json)
        return
    result = validated(rows, fits, families)
    if as_json:
        emit(result)
    else:
        _show(result)


def _show_columns(example: "PublishedRow", *, as_json: bool) -> None:
    if as_json:
        emit(example)
        return
    for name, value in example.cells.items():
        click.echo(f"{name}: {value}" if value else name)


def _show(result: "Validation") -> None:
    from tutti.terminal import results_console

    out = results_console()
    out.print(_table(result))
    for family in result.families:
        for line in _lines(family):
            out.print(line, markup=False, soft_wrap=True)


def _table(result: "Validation") -> "Table":
    from tutti.reporting.fitted_table import FittedTable

    shown = FittedTable(title="Errors of the predicted step time by family", title_justify="left")
    shown.add_column("family", no_wrap=True)
    shown.add_column("setting", no_wrap=True)
    shown.add_column("rows", no_wrap=True)
    for name in ("n", "median", "mean", "p90", "bias", "in interval", "rank corr.", "regret 1", "regret 5", "memory",
                 "lowest"):  # fmt: skip
        shown.add_column(name, justify="right", no_wrap=True)
    for family in result.families:
        for score in family.scores:
            for kind, errors in (("calibration", score.calibration), ("test", score.test)):
                if errors is not None:
                    style = "dim" if kind == "calibration" else None
                    shown.add_row(family.family, score.setting, kind, *_cells(errors), style=style)
    shown.caption = (
        "Absolute errors relative to the measured time; bias is signed. Rank correlation and regret: among rows of one "
        "model, batch and number of GPUs. Memory: mean absolute error, and the lowest signed one."
    )
    shown.caption_justify = "left"
    return shown


def _cells(found: "Errors") -> tuple[str, ...]:
    def percent(value: float | None) -> str:
        return "" if value is None else f"{value:.1%}"

    return (
        str(found.rows),
        percent(found.median),
        percent(found.mean),
        percent(found.p90),
        f"{found.bias:+.1%}",
        f"{found.within:.0%}",
        "" if found.rank_correlation is None else f"{found.rank_correlation:.2f}",
        percent(found.top1_regret),
        percent(found.top5_regret),
        percent(found.memory_mean),
        "" if found.memory_worst_under is None else f"{found.memory_worst_under:+.1%}",
    )


def _lines(family: "FamilyResult") -> list[str]:
    """Return the lines below the table: fits, missed aims, the worst rows, and rows that could not be costed."""
    lines = [f"{family.family}: {family.rows} rows"]
    for made in family.fits:
        what = f"one factor {made.fit.scale:.2f} on the time" if made.fit.scale != 1 else "its constants"
        borrowed = f", constants of its device from {made.borrowed}" if made.borrowed else ""
        lines.append(
            f"  fitted to {made.fit.rows} rows of {made.machine}: {what}{borrowed}; their error is "
            f"{made.fit.before:.1%} before, {made.fit.after:.1%} after"
        )
    for score in family.scores:
        lines += [f"  missed ({score.setting}): {miss}" for miss in score.misses]
    if family.worst:
        rows = ", ".join(f"{row.row_id} {row.error:+.0%}" for row in family.worst)
        lines.append(f"  largest errors: {rows}")
    lines += [f"  not costed, {count}: {reason}" for reason, count in family.uncosted.items()]
    return lines if len(lines) > 1 else []
