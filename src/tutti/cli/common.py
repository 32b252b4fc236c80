"""What several commands share: output, and how a script's model and a cluster are found."""

import json
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tutti.config import serialization
from tutti.config.cluster import ClusterSpec
from tutti.errors import ScriptError

if TYPE_CHECKING:
    from tutti.trainer.capture import CapturedScript

console = Console(stderr=True, highlight=False)
"""Everything for people goes to standard error, so that --json leaves one document on standard output."""


def emit(data: Any) -> None:
    """Print one JSON document on standard output."""
    print(json.dumps(serialization.to_data(data), indent=2))


def capture_script(script: Path, arguments: tuple[str, ...]) -> "CapturedScript":
    """Run a script up to `Job.prepare` and return what it was given; the model's parameters stay on meta.

    What the script prints goes to standard error. Raises ScriptError when it ends without calling prepare.
    """
    from tutti.launch.preload import load_modules
    from tutti.launch.script import check_script
    from tutti.profile.meta_device import parameters_on_meta
    from tutti.trainer.capture import CaptureDone, capturing

    check_script(script)
    load_modules()
    try:
        with _as_main(script, arguments), redirect_stdout(sys.stderr), capturing(), parameters_on_meta():
            runpy.run_path(str(script), run_name="__main__")
    except CaptureDone as done:
        return done.captured
    except SystemExit as error:
        if error.code not in (0, None):
            raise ScriptError(f"{script} ended with exit code {error.code} before job.prepare; run it alone") from None
    raise ScriptError(
        f"{script} ended without calling job.prepare; make a tutti.Job and pass model, optimizer, data and loss to its "
        "prepare (docs/tutorial.md shows the three lines)"
    )


def cluster_for(path: Path | None, *, quick: bool = True) -> ClusterSpec:
    """The cluster of a file or of one line (4x8:a100-80gb,nvlink3,8*ib-hdr), or this machine, measured."""
    if path is not None:
        from tutti.profile.catalog.text import cluster_from_text, is_cluster_text

        if is_cluster_text(str(path)) and not path.exists():
            return cluster_from_text(str(path))
        return serialization.load(ClusterSpec, path)
    from tutti.profile.probe import cached_cluster_path, measure

    cached = cached_cluster_path()
    if cached.exists():
        return serialization.load(ClusterSpec, cached)
    console.print("measuring this machine (kept for the next time; `tutti probe` measures it longer)")
    cluster = measure(quick=quick)
    serialization.save(cluster, cached)
    return cluster


@contextmanager
def _as_main(script: Path, arguments: tuple[str, ...]) -> Iterator[None]:
    """sys.argv and sys.path as `python script arguments` has them."""
    argv, path = sys.argv, sys.path[:]
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
