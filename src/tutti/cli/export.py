"""`tutti export CHECKPOINT --to FILE`: writes a checkpoint of any plan as one plain file that one device reads."""

from dataclasses import dataclass
from pathlib import Path

import click

from tutti.cli.options import console, emit, json_option


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A finished export: the checkpoint, the file, and its size in bytes."""

    checkpoint: str
    file: str
    nbytes: int
    optimizers: bool


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path), metavar="RUN_OR_CHECKPOINT")
@click.option("--to", "file", required=True, type=click.Path(path_type=Path), help="FILE.safetensors or FILE.pt.")
@click.option("--optimizers", is_flag=True, help="Include the optimizers' state (FILE.pt only).")
@json_option
def command(checkpoint: Path, file: Path, optimizers: bool, as_json: bool) -> None:
    """Write the whole model of a checkpoint, or of a run's newest one, to FILE.

    The file holds a plain state_dict: model.load_state_dict(torch.load(FILE)), or safetensors.torch.load_model(model,
    FILE). With --optimizers FILE.pt holds {"model": state_dict, "optimizers": [state_dict, ...]}.
    """
    _check(checkpoint, file, optimizers)
    from tutti.checkpoint.plain_state import to_file
    from tutti.checkpoint.sources import find_checkpoint

    path = find_checkpoint(checkpoint)
    nbytes = to_file(path, file, optimizers=optimizers)
    if as_json:
        emit(Exported(checkpoint=str(path), file=str(file), nbytes=nbytes, optimizers=optimizers))
    else:
        console.print(f"{file}: {nbytes / 1e6:,.1f} MB, from {path}", soft_wrap=True, markup=False)


def _check(checkpoint: Path, file: Path, optimizers: bool) -> None:
    if file.suffix not in (".safetensors", ".pt"):
        raise click.UsageError(f"--to {file}: name a file that ends in .safetensors or .pt")
    if optimizers and file.suffix != ".pt":
        raise click.UsageError("--optimizers needs --to FILE.pt; a safetensors file holds only tensors")
    if file.exists():
        raise click.UsageError(f"{file} exists; name another file, or remove it")
    if not file.absolute().parent.is_dir():
        raise click.UsageError(f"{file.absolute().parent} is not a folder; create it, or name another file")
    if not checkpoint.exists():
        raise click.UsageError(f"{checkpoint} does not exist; name a run folder, or a checkpoint in one")
