"""`tutti why`: why a run hangs, or what each of its ranks did last."""

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from tutti.cli.options import PLACE, LocalPath, emit, json_option
from tutti.commands.stored_runs import run_here
from tutti.commands.why import explained, write_trace
from tutti.config.safe_text import plain_text

_MOST_INNER, _MOST_OUTER = 8, 8
"""Calls of a stack that are shown: the innermost ones, and those in which the script began."""


@click.command()
@click.argument("run", type=PLACE, metavar="RUN|URL")
@click.option("--stacks", is_flag=True, help="Show the Python stack of every living rank, too.")
@click.option("--trace", type=LocalPath(path_type=Path), metavar="FILE",
              help="Write the last events of all ranks as a trace for Perfetto or chrome://tracing.")  # fmt: skip
@json_option
def command(run: Path | str, stacks: bool, trace: Path | None, as_json: bool) -> None:
    """Say why RUN (a run folder) hangs: which ranks wait where, and what the missing rank does. Exits with 1 then.

    A run that has ended is explained by what its ranks recorded last.
    """
    folder = run_here(run)
    if trace is not None:
        write_trace(folder, trace)
    explanation = explained(folder)
    if as_json:
        emit(explanation)
    else:
        _print(explanation.message)
        for rank, words in explanation.ranks.items():
            _print(f"rank {rank} {words}")
            for line in _shortened(explanation.stacks.get(rank, ())) if stacks else ():
                _print(f"    {line}")
        for rank, words in explanation.damaged.items():
            _print(f"rank {rank}: {words}")
    sys.exit(explanation.status == "hangs")


def _shortened(stack: Sequence[str]) -> list[str]:
    left_out = len(stack) - _MOST_INNER - _MOST_OUTER
    if left_out <= 1:
        return [*stack]
    return [*stack[:_MOST_INNER], f"... {left_out} more calls", *stack[-_MOST_OUTER:]]


def _print(line: str) -> None:
    click.echo(plain_text(line))
