"""`tutti checkpoint`: converts checkpoints to and from torch's distributed checkpoint format (DCP)."""

from dataclasses import dataclass
from pathlib import Path

import click

from tutti.cli.options import emit, json_option
from tutti.commands.messages import console


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """A finished conversion: the source, the file or folder that was written, and its size."""

    source: str
    written: str
    nbytes: int


@click.group()
def command() -> None:
    """Convert checkpoints to and from torch's distributed format (DCP), which torchtitan and Lightning read."""


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

    A DCP folder contains pickled data: convert only folders that you trust.
    """
    if file.suffix not in (".safetensors", ".pt"):
        raise click.UsageError(f"--to {file}: name a file that ends in .safetensors or .pt")
    if file.exists():
        raise click.UsageError(f"{file} exists; name another file, or remove it")
    from tutti.checkpoint.dcp import import_dcp

    _report(folder, file, import_dcp(folder, file), as_json)


def _report(source: Path, written: Path, nbytes: int, as_json: bool) -> None:
    if as_json:
        emit(Converted(source=str(source), written=str(written), nbytes=nbytes))
    else:
        console.print(f"{written}: {nbytes / 1e6:,.1f} MB, from {source}", soft_wrap=True, markup=False)
