"""Commands of `tutti` against a cluster, whose jobs outlive them."""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from launch.launch_rig import TUTTI, default_signals


@contextmanager
def started(
    cwd: Path, cluster: Mapping[str, str], *words: str, before: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """A command; unlike `running`, its end leaves the jobs alone, which have its environment.

    Args:
        cwd: where it runs.
        cluster: the variables by which it finds the cluster.
        words: arguments of `tutti`.
        before: what its command begins with.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **cluster}
    command = subprocess.Popen(
        [*before, *TUTTI, *words], cwd=cwd, env=environment, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=default_signals,
    )  # fmt: skip
    try:
        yield command
    finally:
        command.kill()
        command.communicate()


def tutti(
    cwd: Path, cluster: Mapping[str, str], *words: str, timeout_s: float = 300, before: Sequence[str] = ()
) -> tuple[int, str, str]:
    """Run a command to its end; return its exit code and what it wrote."""
    with started(cwd, cluster, *words, before=before) as command:
        out, err = command.communicate(timeout=timeout_s)
        return command.returncode, out, err


def state(cwd: Path, cluster: Mapping[str, str], run: str, before: Sequence[str] = ()) -> dict[str, object]:
    """What `tutti status` says of a run."""
    code, out, err = tutti(cwd, cluster, "status", "--json", run, before=before)
    assert code == 0, err
    return json.loads(out)["runs"][0]
