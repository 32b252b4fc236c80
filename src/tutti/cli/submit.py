"""Runs on a cluster or over ssh: `tutti submit`, `attach`, `status`, `logs` and `cancel`."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tutti.cli.options import (
    PLACE,
    SCRIPT_CONTEXT,
    emit,
    hosts_option,
    json_option,
    nnodes_option,
    request_option,
)
from tutti.commands.messages import console, guarded_streams
from tutti.commands.run_options import RunOptions, options_from
from tutti.config.count_range import CountRange, node_counts
from tutti.errors import LaunchError

if TYPE_CHECKING:
    from tutti.commands.submit import Answer, SubmittedArray, SubmittedRun

_RUN = click.Path(path_type=Path)

NOT_OF_RANKS = ("launcher", "requests", "hosts", "dry_run")
"""Options of `tutti run` that say where it runs, and are not for the ranks."""


@click.command("submit", context_settings=SCRIPT_CONTEXT)
@click.option(
    "--on", metavar="NAME", help="What runs it: slurm, ssh, mpi, kubernetes or ray; that of tutti.toml if not given."
)
@nnodes_option
@request_option
@hosts_option
@click.option("--folder", type=PLACE, help="The run folder; runs/NAME-TIME if not given.")
@click.option("--resume", type=PLACE, metavar="RUN|URL", help="Continue from a run folder, a checkpoint, or a store.")
@click.option(
    "--array",
    metavar="0-7|'NAME=VALUE,... ...'",
    help="Submit a run for each number or combination of values, which stand in words as {index} or {NAME}.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be submitted.")
@click.option("--follow", is_flag=True, help="Show the run until it has ended, as `tutti attach` does.")
@json_option
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF tutti run] SCRIPT [ARGUMENTS]...")
def submit_command(
    words: tuple[str, ...], array: str | None, follow: bool, as_json: bool, hosts: str | None, **given: Any
) -> None:
    """Submit a run to a cluster's scheduler and return; all options of `tutti run` hold.

    The job stops with a checkpoint before its time limit and when it is preempted, and goes on by itself.
    """
    context = click.get_current_context()
    commands = context.find_root().command
    run = commands.get_command(context, "run") if isinstance(commands, click.Group) else None
    assert run is not None
    if array is not None:
        if follow or hosts is not None:
            raise LaunchError(f"--array and {'--follow' if follow else '--hosts'} exclude each other; leave one out")
        _submitted_array(run, words, array, as_json=as_json, **given)
        return
    folder = submitted(run, words, as_json=as_json, hosts=hosts, **given)
    if follow and folder is not None:
        sys.exit(_followed(folder))


def submitted(
    run: click.Command,
    words: Sequence[str],
    *,
    on: str | None,
    nnodes: int | CountRange | None,
    requests: Sequence[str],
    hosts: str | None,
    folder: Path | str | None,
    resume: Path | str | None,
    dry_run: bool = False,
    as_json: bool = False,
) -> Path | None:
    """Submit a run, and say so; return its folder, or None if nothing was submitted.

    Args:
        run: the command `tutti run`, which reads its arguments.
        words: the other arguments of `tutti run`.
        on, nnodes: None for what tutti.toml says.
        requests, hosts, folder, resume, dry_run, as_json: see the options.
    """
    from tutti.clusters.profile_file import read_profile
    from tutti.commands.submit import submit_run

    profile = read_profile(Path.cwd())
    done = submit_run(
        replace(_options(run, words), folder=folder, resume=resume),
        words,
        on=on or profile.launcher(hosts) or "slurm",
        nnodes=nnodes or (None if hosts is not None else node_counts(profile.run.nnodes)),
        requests=requests,
        hosts=hosts,
        dry_run=dry_run,
    )
    said = (
        f"{done.scheduler} job {done.job}: {done.folder}\n"
        "`tutti attach`, `tutti logs -f` and `tutti cancel` take this folder; `tutti status` lists all runs"
    )
    _tell(done, said, dry_run=dry_run, as_json=as_json)
    return done.folder if done.job else None


def _tell(done: "SubmittedRun | SubmittedArray", words: str, *, dry_run: bool, as_json: bool) -> None:
    """Print what was submitted, or would be."""
    if as_json:
        emit(done)
    elif dry_run:
        click.echo(done.preview, nl=False)
    else:
        console.print(words, markup=False, soft_wrap=True)


def _submitted_array(
    run: click.Command,
    words: Sequence[str],
    text: str,
    *,
    on: str | None,
    nnodes: int | CountRange | None,
    requests: Sequence[str],
    folder: Path | str | None,
    resume: Path | str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Submit the runs of an array, and say so. The arguments are those of `submitted`, and the text of --array."""
    from tutti.clusters.profile_file import read_profile
    from tutti.commands.run_array import parse_array
    from tutti.commands.submit import RunOfArray, submit_array

    defaults = read_profile(Path.cwd()).run
    array = parse_array(text, words)
    runs = {}
    for each in array.runs:
        own = each.words(words)
        options = replace(_options(run, own), folder=folder, resume=resume)
        runs[each.number] = RunOfArray(options=options, words=tuple(own), title=each.title)
    done = submit_array(
        runs,
        on=on or defaults.on or "slurm",
        at_once=array.at_once,
        nnodes=nnodes or node_counts(defaults.nnodes),
        requests=requests,
        dry_run=dry_run,
    )
    lines = [
        f"{done.scheduler} job {each.job}: {each.folder} ({runs[int(each.folder.name)].title})" for each in done.runs
    ]
    lines.append(f"`tutti status` and `tutti cancel` take {done.folder}, or a run in it")
    _tell(done, "\n".join(lines), dry_run=dry_run, as_json=as_json)


def _options(run: click.Command, words: Sequence[str]) -> RunOptions:
    """Return the options of `tutti run` among words."""
    read = run.make_context("tutti submit", list(words)).params
    return options_from(**{name: value for name, value in read.items() if name not in ("timeout_s", *NOT_OF_RANKS)})


def default_launcher(hosts: str | None) -> str:
    """Return what starts ranks where the command line does not say it: that of tutti.toml, ssh, or this machine."""
    here = Path.cwd()
    if not any((directory / "tutti.toml").is_file() for directory in (here, *here.parents)):
        return "local" if hosts is None else "ssh"
    from tutti.clusters.profile_file import read_profile

    return read_profile(here).launcher(hosts) or "local"


def submitted_and_followed(words: Sequence[str]) -> int:
    """Submit a run that `tutti run` was asked for, follow it, and return its exit code.

    Args:
        words: the arguments of `tutti run`.
    """
    from tutti.commands.submit import states

    run = click.get_current_context().command
    mine = ("on", "nnodes", "requests", "hosts", "folder", "resume", "dry_run", "words")
    own = [parameter for parameter in submit_command.params if parameter.name in mine]
    shown = [parameter for parameter in run.params if parameter.name in ("as_json", "progress")]
    command = click.Command("tutti run", params=[*own, *shown], context_settings=SCRIPT_CONTEXT)
    given = command.make_context("tutti run", list(words)).params
    as_json, progress = given.pop("as_json"), given.pop("progress")
    folder = submitted(run, **given)
    code = 0 if folder is None else _followed(folder, as_json=as_json, progress=progress)
    if as_json and folder is not None:
        emit(states([folder]).runs[0])
    return code


@click.command("attach")
@click.argument("run", type=_RUN)
def attach_command(run: Path) -> None:
    """Show a submitted run until it has ended: what its first rank prints, and its progress."""
    sys.exit(_followed(run))


@click.command("status")
@click.argument("runs", type=_RUN, nargs=-1)
@json_option
def status_command(runs: tuple[Path, ...], as_json: bool) -> None:
    """List submitted runs, or those named: state, nodes, step and loss."""
    from tutti.commands.submit import states

    found = states(runs)
    if as_json:
        emit(found)
        return
    for state in found.runs:
        total = f" of {state.total_steps}" if state.total_steps else ""
        step = f"step {state.step}{total}" if state.step is not None else ""
        loss = f"loss {state.loss:.4g}" if state.loss is not None else ""
        where = state.nodes and f"on {state.nodes}"
        job = f"{state.scheduler} job {state.job}"
        about = ", ".join(filter(None, (job, state.values, state.reason, where, step, loss)))
        console.print(f"{state.folder}: {state.state} ({about})", markup=False, soft_wrap=True)
    if not found.runs:
        console.print("no run was submitted from here; `tutti submit` does it")


@click.command("logs")
@click.argument("run", type=_RUN)
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended.")
@click.option("--rank", type=click.IntRange(0), help="What this rank prints, instead of what the nodes print.")
def logs_command(run: Path, follow: bool, rank: int | None) -> None:
    """Print what a submitted run prints."""
    from tutti.commands.submit import output, show

    with guarded_streams():
        try:
            for text in output(run, rank, follow=follow):
                show(text)
        except KeyboardInterrupt:
            sys.exit(130)


@click.command("cancel")
@click.argument("run", type=_RUN)
@click.option("--checkpoint", is_flag=True, help="Let the ranks write a checkpoint first.")
def cancel_command(run: Path, checkpoint: bool) -> None:
    """End a submitted run, or all runs of an array."""
    from tutti.commands.submit import end_runs

    how = "is told to write a checkpoint and to stop" if checkpoint else "is cancelled"
    for record in end_runs(run, checkpoint=checkpoint):
        console.print(f"{record.scheduler} job {record.job} {how}", soft_wrap=True)


def _followed(folder: Path, *, as_json: bool = False, progress: bool = True) -> int:
    from tutti.commands.run import screen
    from tutti.commands.submit import follow

    with guarded_streams():
        return follow(folder, screen(shown=True, as_json=as_json, progress=progress), _asked)


def _asked() -> "Answer":
    """Ask what Ctrl-C means; leave the run alone where nobody can be asked."""
    if not sys.stdin.isatty():
        return "leave"
    choice = click.Choice(["leave", "stop", "cancel"])
    try:
        answer = click.prompt(
            "\nleave the run alone, stop it with a checkpoint, or cancel it", type=choice, default="leave", err=True
        )
    except click.Abort:
        return "leave"
    return "stop" if answer == "stop" else "cancel" if answer == "cancel" else "leave"
