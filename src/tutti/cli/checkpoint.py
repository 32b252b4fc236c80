"""`tutti checkpoint`: lists, verifies and prunes checkpoints, and converts them to and from torch's format (DCP)."""

import sys
from dataclasses import dataclass
from pathlib import Path

import click

from tutti.checkpoint.checksums import printable
from tutti.cli.options import PLACE, emit, json_option
from tutti.commands.checkpoints import list_checkpoints, prune_checkpoints, verify_checkpoints
from tutti.commands.messages import console


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """A finished conversion: the source, the file or folder that was written, and its size."""

    source: str
    written: str
    nbytes: int


@click.group()
def command() -> None:
    """List, verify and prune the checkpoints of a run; convert them to and from torch's distributed format (DCP)."""


@command.command("list")
@click.argument("run", type=PLACE, metavar="RUN|URL")
@json_option
def list_command(run: Path | str, as_json: bool) -> None:
    """List the checkpoints of a run, or of a store (s3://bucket/prefix), with results of evaluations at their steps.

    Only indexes are read; `tutti checkpoint verify` reads everything.
    """
    entries = list_checkpoints(run)
    if as_json:
        emit(entries)
        return
    for entry in entries.checkpoints:
        values = " ".join(f"{name}={value:.6g}" for name, value in entry.values.items())
        mesh = " ".join(f"{axis}={degree}" for axis, degree in entry.mesh.items() if degree > 1)
        ranks = "" if entry.world_size is None else f"{entry.world_size} rank{'s' if entry.world_size > 1 else ''}"
        about = ", ".join(filter(None, (ranks, mesh, values, entry.damage and f"DAMAGED: {entry.damage}")))
        _print(f"step {entry.step}: {entry.nbytes / 1e6:,.1f} MB, {entry.written_utc}, {about}")


@command.command("verify")
@click.argument("run", type=PLACE, metavar="RUN|CHECKPOINT|URL")
@json_option
def verify_command(run: Path | str, as_json: bool) -> None:
    """Read every byte of a run's checkpoints, or of one, and compare the checksums; exit 1 if any is damaged."""
    verified = verify_checkpoints(run)
    if as_json:
        emit(verified)
    else:
        for checkpoint in verified.checkpoints:
            size = f"{checkpoint.nbytes / 1e6:,.1f} MB in {checkpoint.seconds:.2f} s"
            _print(f"{checkpoint.path}: {f'DAMAGED: {checkpoint.damage}' if checkpoint.damage else 'sound'}, {size}")
    if any(checkpoint.damage for checkpoint in verified.checkpoints):
        sys.exit(1)


@command.command("prune")
@click.argument("run", type=PLACE, metavar="RUN|URL")
@click.option("--keep", required=True, type=int, help="How many of the newest sound checkpoints stay.")
@click.option("--best", metavar="METRIC:min|max", help="The checkpoint with the best value of METRIC stays, too.")
@json_option
def prune_command(run: Path | str, keep: int, best: str | None, as_json: bool) -> None:
    """Remove old checkpoints of a run, and damaged ones; the newest sound ones stay."""
    pruned = prune_checkpoints(run, keep=keep, best=best)
    if as_json:
        emit(pruned)
        return
    for path in pruned.removed:
        _print(f"removed {path}")
    _print(f"{len(pruned.kept)} of {len(pruned.kept) + len(pruned.removed)} checkpoints stay")


@command.command("export")
@click.argument("checkpoint", type=click.Path(path_type=Path, exists=True), metavar="RUN_OR_CHECKPOINT")
@click.option("--to-dcp", "folder", required=True, type=click.Path(path_type=Path), help="Folder to create.")
@click.option("--model-only", is_flag=True, help="Leave out the optimizers' state.")
@json_option
def export_command(checkpoint: Path, folder: Path, model_only: bool, as_json: bool) -> None:
    """Write a checkpoint, or a run's newest one, as a DCP folder.

    The folder holds {"model": state_dict, "optimizer": state}; parameters are identified by name.
    """
    from tutti.checkpoint.dcp import export_dcp

    _report(checkpoint, folder, export_dcp(checkpoint, folder, optimizers=not model_only), as_json)


@command.command("import")
@click.argument("folder", type=click.Path(path_type=Path, exists=True), metavar="DCP_FOLDER")
@click.option("--to", "file", required=True, type=click.Path(path_type=Path), help="FILE.safetensors or FILE.pt.")
@json_option
def import_command(folder: Path, file: Path, as_json: bool) -> None:
    """Write the model of a DCP folder to FILE, for job.prepare(..., weights=FILE).

    A DCP folder contains pickled data; objects that could run code are refused.
    """
    if file.suffix not in (".safetensors", ".pt"):
        raise click.UsageError(f"--to {file}: name a file that ends in .safetensors or .pt")
    if file.exists():
        raise click.UsageError(f"{file} exists; name another file, or remove it")
    from tutti.checkpoint.dcp import import_dcp

    _report(folder, file, import_dcp(folder, file), as_json)


def _print(line: str) -> None:
    click.echo(printable(line, 2000))


def _report(source: Path, written: Path, nbytes: int, as_json: bool) -> None:
    if as_json:
        emit(Converted(source=str(source), written=str(written), nbytes=nbytes))
    else:
        console.print(f"{written}: {nbytes / 1e6:,.1f} MB, from {source}", soft_wrap=True, markup=False)
