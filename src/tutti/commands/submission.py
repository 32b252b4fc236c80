"""`tutti.submit`: a run on a cluster, submitted and left to it."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from tutti.commands.run import run, submit_arguments
from tutti.commands.submitted_job import SubmittedJob
from tutti.commands.values import StrPath


def submit(
    script: StrPath,
    arguments: Sequence[object] = (),
    *,
    on: str | None = None,
    nnodes: int | str | None = None,
    hosts: str | Sequence[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    dry_run: bool = False,
    **options: Any,
) -> SubmittedJob:
    """Submit a run to a cluster's scheduler, and return at once.

    The job stops with a checkpoint before its time limit and when it is preempted, and goes on by itself.

    Args:
        script: the script, or with `module=True` the dotted name of a module.
        arguments: the script's own arguments.
        on: "slurm", "ssh" or "kubernetes"; if None, ssh with `hosts`, else that of tutti.toml, else Slurm.
        nnodes: number of nodes, or a range such as "1:4"; if None that of tutti.toml, all hosts that are named, or 1.
        hosts: of a run over ssh, such as "node0:8,node1:8", a list of such texts, or a file of them.
        settings: of the scheduler, such as {"partition": "gpu", "time": "2h"}; tutti.toml has those of the project.
        dry_run: submit nothing; `preview` of the result shows what would be.
        options: the others of `tutti.run`, such as nproc=4, plan=... or folder=...

    Returns:
        The submitted run: `status()`, `logs()`, `wait()` and `cancel()`.

    Raises:
        TypeError: `tutti.run` has no such option.
        TuttiError: what `tutti submit` would refuse, with the same sentence.
    """
    parameters = inspect.signature(run).parameters
    unknown = next((name for name in options if name not in parameters), None)
    if unknown is not None:
        raise TypeError(f"submit() got an unexpected keyword argument {unknown!r}; tutti.run has no such option")
    given = {name: parameter.default for name, parameter in parameters.items()} | options
    given |= {"script": script, "arguments": arguments, "nnodes": nnodes, "hosts": hosts, "settings": settings}
    return submit_arguments({**given, "on": on}, dry_run=dry_run)
