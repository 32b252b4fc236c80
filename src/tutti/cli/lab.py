"""`tutti lab`: simulates hosts on this machine, each in a network namespace, joined by links of limited rate."""

import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click

from tutti.cli.options import json_option
from tutti.errors import LabError

if TYPE_CHECKING:
    from tutti.lab.lab_record import LabRecord
    from tutti.lab.lab_run import LabCommand, Sink, Stream

F = TypeVar("F", bound=Callable[..., Any])

PASS_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Context settings of commands whose arguments belong to another command."""

POLL_S = 0.1


def name_option(function: F) -> F:
    """Add --name, which selects one of several labs."""

    def checked(context: click.Context, option: click.Parameter, name: str) -> str:
        from tutti.lab.lab_record import check_name

        return check_name(name)

    option = click.option(
        "--name", default="lab", show_default=True, callback=checked, help="The name of the lab, if there are several."
    )
    return option(function)


@click.group()
def command() -> None:
    """Simulate hosts in network namespaces on this machine, joined by links of limited rate. Needs root."""


@command.command()
@click.option("--hosts", type=click.IntRange(1), help="Number of hosts; by default as many as there are rates, or 2.")
@click.option("--rate", "rates", default="unlimited", show_default=True, metavar="RATE[,RATE...]",
              help="Rate of the hosts' links in each direction, such as 1gbit, 100mbit or unlimited: "
                   "one for all hosts, or one for each.")  # fmt: skip
@click.option("--ranks-per-host", type=click.IntRange(1), default=1, show_default=True,
              help="Ranks that `lab run` starts on each host.")  # fmt: skip
@name_option
@json_option
def up(hosts: int | None, rates: str, ranks_per_host: int, name: str, as_json: bool) -> None:
    """Make a lab, which exists until `tutti lab down`."""
    from tutti.lab import lab_network
    from tutti.lab.lab_network import rates_of

    words = rates.split(",")
    count = hosts or (len(words) if len(words) > 1 else 2)
    record = lab_network.make(rates_of(words, count), ranks_per_host=ranks_per_host, name=name, standing=True)
    _show([record], as_json)


@command.command()
@name_option
@json_option
def down(name: str, as_json: bool) -> None:
    """Remove a lab and end everything that runs in it. Also removes labs whose process was killed."""
    from tutti.lab import lab_network
    from tutti.lab.lab_record import records

    stale = lab_network.remove_stale()
    removed = [record for record in records() if record.name == name]
    for record in removed:
        lab_network.remove(record)
    if as_json:
        print(json.dumps([asdict(record) for record in (*stale, *removed)], indent=2))
        return
    if stale:
        print(f"removed {len(stale)} lab{'s' if len(stale) > 1 else ''} whose process has ended")
    for record in removed:
        print(f"lab {record.name} is down")
    if not removed and not stale:
        print(f"no lab named {name} is up")


@command.command()
@json_option
def status(as_json: bool) -> None:
    """List the labs with their hosts, links and running processes."""
    from tutti.lab import lab_network
    from tutti.lab.lab_record import records

    lab_network.check_possible()
    _show(records(), as_json)


@command.command(context_settings=PASS_ON)
@name_option
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF tutti run] SCRIPT [ARGUMENTS]...")
def run(name: str, arguments: tuple[str, ...]) -> None:
    """Run `tutti run` on all hosts of the lab together. They meet on host 0; --nproc is per host.

    Without --folder, all hosts share a new runs/lab-TIME.
    """
    from tutti.lab.lab_run import LabCommand, rendezvous_port, train_command

    if not arguments:
        raise LabError("no script was named; write `tutti lab run train.py`")
    record = _standing(name)
    words = ["--one-screen", *_unless_given(arguments, record), *arguments]
    port = rendezvous_port()
    commands = {host: train_command(record, host, port, words) for host in record.hosts}
    # Standard output belongs to the run on host 0, so that --json leaves one document there.
    sink = _refusals_once(partial(_print_line, others_out=sys.stderr))
    sys.exit(_wait(lambda: LabCommand(record, commands, sink=sink, ends_with_process=True)))


@command.command("exec", context_settings=PASS_ON)
@name_option
@click.argument("host")
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND...")
def execute(name: str, host: str, words: tuple[str, ...]) -> None:
    """Run COMMAND on one HOST (0, 1, ...), or on `all` together.

    Its environment has NODE_RANK, NNODES, NPROC_PER_NODE, MASTER_ADDR and MASTER_PORT, the same port on all, so
    `tutti lab exec all -- sh -c 'torchrun --nnodes $NNODES --node-rank $NODE_RANK ...'` works.
    """
    from tutti.lab.lab_run import LabCommand, inside, place, rendezvous_port

    record = _standing(name)
    words = words[1:] if words[0] == "--" else words
    if host == "all":
        commands = dict.fromkeys(record.hosts, words)
        sys.exit(_wait(lambda: LabCommand(record, commands, sink=_print_line, ends_with_process=True)))
    number = _host_number(host, record)
    command_line = inside(record, number, words, place(record, number, rendezvous_port()))
    os.execvp(command_line[0], command_line)  # the command gets this terminal and its signals, and sets the exit code


def _standing(name: str) -> "LabRecord":
    """Return the lab of that name. Raises LabError if there is none."""
    from tutti.lab import lab_network
    from tutti.lab.lab_record import records

    lab_network.check_possible()
    lab = next((record for record in records() if record.name == name and not record.stale), None)
    if lab is None:
        raise LabError(f"no lab named {name} is up; make it with `tutti lab up`")
    return lab


def _host_number(text: str, record: "LabRecord") -> int:
    number = text.removeprefix("host")
    if not number.isdecimal() or int(number) not in record.hosts:
        raise LabError(f"{text} is not a host of this lab; give 0 to {len(record.rates) - 1}, or all")
    return int(number)


def _unless_given(arguments: tuple[str, ...], record: "LabRecord") -> list[str]:
    """Return the options of `tutti run` that the lab adds where the command line has none: ranks, a common folder."""

    def given(*names: str) -> bool:
        return any(argument.partition("=")[0] in names for argument in arguments)

    options = []
    if not given("--nproc", "--plan", "--mesh"):
        options += ["--nproc", str(record.ranks_per_host)]
    if not given("--folder", "--resume"):
        options += ["--folder", f"runs/lab-{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}"]
    return options


def _print_line(host: int, stream: str, line: str, others_out: TextIO = sys.stdout) -> None:
    """Print a line of output; lines of hosts other than host 0 get a prefix."""
    to = sys.stderr if stream == "err" else others_out if host else sys.stdout
    to.write(line if host == 0 else f"host{host}: {line}")
    to.flush()


def _refusals_once(sink: "Sink") -> "Sink":
    """Return a sink that passes on only once an error that all hosts print, before ranks start."""
    printed: set[str] = set()
    lock = threading.Lock()

    def take(host: int, stream: "Stream", line: str) -> None:
        if stream == "err" and line.startswith("tutti: "):
            with lock:  # a thread reads the output of each host
                if line in printed:
                    return
                printed.add(line)
        sink(host, stream, line)

    return take


def _wait(start: "Callable[[], LabCommand]") -> int:
    """Wait until the command ends, or until Ctrl-C or SIGTERM ends it; return the first failed host's exit code."""
    from tutti.launch.supervisor import interrupts

    with interrupts() as interrupted:
        started = start()
        try:
            while (codes := started.wait(POLL_S)) is None:
                if interrupted.number is not None:
                    return 128 + interrupted.number
        finally:
            started.stop()
    return next((code if code > 0 else 128 - code for code in codes.values() if code), 0)


def _show(found: "list[LabRecord]", as_json: bool) -> None:
    from tutti.lab import lab_network
    from tutti.lab.lab_network import rate_words

    if as_json:
        rows = [asdict(record) | {"namespaces": record.namespaces, "stale": record.stale} for record in found]
        print(json.dumps(rows, indent=2))
        return
    if not found:
        print("no lab is up; make one with `tutti lab up`")
    for record in found:
        whose = "up until `tutti lab down`" if record.owner is None else f"ends with process {record.owner.pid}"
        whose = "its process has ended: the next `tutti lab down` removes it" if record.stale else whose
        size = f"{len(record.rates)} hosts, {record.ranks_per_host} rank(s) each"
        print(f"lab {record.name or record.id}: {size}; {whose}")
        for host, rate in enumerate(record.rates):
            inside = len(lab_network.pids(record.namespace(host)))
            print(f"  host{host}  {record.address(host)}  {rate_words(rate)}  {inside} processes")
