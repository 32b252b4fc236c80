"""The arguments of the function `tutti.run` as those of the command `tutti run`, which nodes of a cluster start."""

from collections.abc import Mapping
from typing import Any

from tutti.commands.values import compression_of, mesh_text, sync_of
from tutti.config.cluster import ClusterSpec
from tutti.config.compression import format_compression
from tutti.config.plan import Plan
from tutti.config.sync_notation import format_sync

_ELSEWHERE = frozenset(
    {"script", "arguments", "module", "on", "nnodes", "node_rank", "rendezvous", "folder", "resume", "verbose"}
    | {"settings", "hosts", "dry_run"}
)
"""Arguments that say where a run is, or what runs, and are no options of the nodes' command."""


def words_of_run(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return the options of `tutti run` for arguments of the function, and the values that need a file by option.

    Args:
        given: the arguments by name, after a check.
        defaults: of the function; what equals its default is left out.
    """
    words: list[str] = []
    files: dict[str, Any] = {}
    for name, value in given.items():
        if name in _ELSEWHERE or value is None or value == defaults.get(name):
            continue
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, Plan | ClusterSpec):
            files[name] = value
        elif isinstance(value, bool):
            words.append(option if value else f"--no-{name.replace('_', '-')}")
        else:
            words += [option, _text(name, value)]
    return words, files


def _text(name: str, value: Any) -> str:
    if name == "mesh":
        return mesh_text(value) or ""
    if name == "compress" and (compress := compression_of(value)) is not None:
        return format_compression(compress)
    if name == "sync" and (sync := sync_of(value)) is not None:
        return format_sync(sync)
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    if name == "time_limit" and not isinstance(value, str):
        return f"{value:g}s"
    return str(value)
