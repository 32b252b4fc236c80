"""`tutti.export`: writes a checkpoint of any plan as one plain file that one device reads."""

from dataclasses import dataclass
from pathlib import Path

from tutti.commands.values import StrPath
from tutti.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A finished export: the checkpoint, the file, and its size in bytes."""

    checkpoint: str
    file: str
    nbytes: int
    optimizers: bool


def export(checkpoint: StrPath, to: StrPath, *, optimizers: bool = False) -> Exported:
    """Write the whole model of a checkpoint, or of a run's newest one, to a file.

    Args:
        checkpoint: a checkpoint, or a run folder.
        to: FILE.safetensors or FILE.pt; it holds a plain state_dict.
        optimizers: include the optimizers' state, as {"model": ..., "optimizers": [...]} (FILE.pt only).

    Raises:
        TuttiError: what `tutti export` would refuse, with the same sentence.
    """
    source, file = Path(checkpoint), Path(to)
    _check(source, file, optimizers)
    from tutti.checkpoint.plain_state import to_file
    from tutti.checkpoint.sources import find_checkpoint

    path = find_checkpoint(source)
    nbytes = to_file(path, file, optimizers=optimizers)
    return Exported(checkpoint=str(path), file=str(file), nbytes=nbytes, optimizers=optimizers)


def _check(checkpoint: Path, file: Path, optimizers: bool) -> None:
    if file.suffix not in (".safetensors", ".pt"):
        raise SpecError(f"--to {file}: name a file that ends in .safetensors or .pt")
    if optimizers and file.suffix != ".pt":
        raise SpecError("--optimizers needs --to FILE.pt; a safetensors file holds only tensors")
    if file.exists():
        raise SpecError(f"{file} exists; name another file, or remove it")
    if not file.absolute().parent.is_dir():
        raise SpecError(f"{file.absolute().parent} is not a folder; create it, or name another file")
    if not checkpoint.exists():
        raise SpecError(f"{checkpoint} does not exist; name a run folder, or a checkpoint in one")
