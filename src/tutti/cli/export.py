"""`tutti export CHECKPOINT --to FILE`: writes a checkpoint of any plan as one plain file that one device reads."""

from pathlib import Path

import click

from tutti.cli.options import LocalPath, emit, json_option
from tutti.commands.export import export
from tutti.commands.messages import console


@click.command()
@click.argument("checkpoint", type=LocalPath(path_type=Path), metavar="RUN_OR_CHECKPOINT")
@click.option("--to", "file", required=True, type=LocalPath(path_type=Path), help="FILE.safetensors or FILE.pt.")
@click.option("--optimizers", is_flag=True, help="Include the optimizers' state (FILE.pt only).")
@json_option
def command(checkpoint: Path, file: Path, optimizers: bool, as_json: bool) -> None:
    """Write the whole model of a checkpoint, or of a run's newest one, to FILE.

    The file holds a plain state_dict: model.load_state_dict(torch.load(FILE)), or safetensors.torch.load_model(model,
    FILE). With --optimizers FILE.pt holds {"model": state_dict, "optimizers": [state_dict, ...]}.
    """
    done = export(checkpoint, file, optimizers=optimizers)
    if as_json:
        emit(done)
    else:
        console.print(f"{file}: {done.nbytes / 1e6:,.1f} MB, from {done.checkpoint}", soft_wrap=True, markup=False)
