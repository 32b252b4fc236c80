"""What commands are given: models by name (`llama --layers 80`, `llama3-70b`), clusters by file or line."""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tutti.commands.messages import console
from tutti.config import serialization
from tutti.config.cluster import ClusterSpec
from tutti.config.model import ModelSpec
from tutti.environment import slurm_node_names
from tutti.errors import SpecError


def named_model(target: Sequence[str]) -> ModelSpec | None:
    """Return the ModelSpec of a named architecture or preset with its sizes; None if the first word is no such name.

    A file of that name takes precedence.

    Args:
        target: the name, then options such as --layers 80.

    Raises:
        SpecError: the architecture lacks a size or cannot have it, or the word is neither a file nor a name but
            resembles one.
    """
    from tutti.profile.architectures import architecture, names

    if not target or Path(target[0]).exists():
        return None
    if target[0].lower() not in names():
        near = get_close_matches(target[0].lower(), names(), n=3)
        if near and not Path(target[0]).suffix:
            raise SpecError(
                f"{target[0]} is neither a script nor the name of a model; did you mean {' or '.join(near)}?"
            )
        return None
    return architecture(target[0], sizes(target[1:]))


def sizes(words: Sequence[str]) -> dict[str, str]:
    """Parse `--layers 80 --kv-heads=8 --tied` into {"layers": "80", "kv_heads": "8", "tied": "true"}.

    Raises:
        SpecError: a value without a name.
    """
    values: dict[str, str] = {}
    waiting = ""
    for word in words:
        if word.startswith("--"):
            if waiting:
                values[waiting] = "true"
            name, equals, value = word[2:].partition("=")
            waiting = "" if equals else name.replace("-", "_")
            if equals:
                values[name.replace("-", "_")] = value
        elif waiting:
            values[waiting], waiting = word, ""
        else:
            raise SpecError(f"{word!r} has no name before it; sizes of a named architecture are written --name value")
    if waiting:
        values[waiting] = "true"
    return values


def cluster_for(path: Path | ClusterSpec | None, *, quick: bool = True) -> ClusterSpec:
    """Return the cluster of a file or of one line (4x8:a100-80gb,nvlink3,8*ib-hdr), or this machine's.

    Args:
        path: the file, the line or the cluster itself; None for this machine, measured now if it never was.
        quick: measure with fewer sizes and repeats.
    """
    if isinstance(path, ClusterSpec):
        return path
    if path is not None:
        from tutti.profile.catalog.text_models import cluster_from_text, is_cluster_text

        if is_cluster_text(str(path)) and not path.exists():
            return cluster_from_text(str(path))
        return serialization.load(ClusterSpec, path)
    from tutti.profile.probe import cached_cluster_path, measure

    names = slurm_node_names()
    kept = kept_cluster(len(names)) if len(names) > 1 else None
    if kept is not None:
        console.print(f"the nodes of this allocation, as measured before: {', '.join(names)}", soft_wrap=True)
        return kept
    if len(names) > 1:
        console.print(
            f"the {len(names)} nodes of this allocation were never measured together (`srun tutti probe` does it), so "
            "this is for this machine alone",
            soft_wrap=True,
        )
    if (kept := kept_cluster(1)) is not None:
        return kept
    console.print("measuring this machine, once (`tutti probe` measures it more thoroughly)")
    cluster = measure(quick=quick)
    serialization.save(cluster, cached_cluster_path())
    return cluster


def kept_cluster(nodes: int) -> ClusterSpec | None:
    """Return what was measured of the nodes of this Slurm job, or of this machine; None if it is to be measured.

    Args:
        nodes: number of nodes that are to be used.

    Raises:
        SpecError: the kept file is damaged.
    """
    from tutti.profile.probe import cached_cluster_path, node_set_path, read_cached

    names = slurm_node_names()
    kept = read_cached(node_set_path(names)) if names and len(names) == nodes else None
    return read_cached(cached_cluster_path()) if kept is None and nodes == 1 else kept


def write_spec(value: Any, output: Path) -> None:
    """Write a spec to the file that the user named.

    Raises:
        SpecError: the file cannot be written.
    """
    try:
        serialization.save(value, output)
    except OSError as error:
        raise SpecError(
            f"the {type(value).__name__} cannot be written to {output} ({error.strerror}); name another file"
        ) from None
