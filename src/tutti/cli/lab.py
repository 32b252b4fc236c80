"""`tutti lab`: hosts on this machine, each in a network namespace, joined by links of limited rate."""

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
"""Context settings of commands whose arguments are another command's."""

POLL_S = 0.1


def name_option(function: F) -> F:
    """--name: which lab, where several stand."""

    def checked(context: click.Context, option: click.Parameter, name: str) -> str:
        from tutti.lab.lab_record import check_name

        return check_name(name)

    option = click.option(
        "--name", default="lab", show_default=True, callback=checked, help="Which lab, where several stand."
    )
    return option(function)


@click.group()
def command() -> None:
    """Hosts in network namespaces on this machine, joined by links of limited rate. Needs root."""


@command.command()
@click.option("--hosts", type=click.IntRange(1), help="How many; as many as there are rates, or 2.")
@click.option("--rate", "rates", default="unlimited", show_default=True, metavar="RATE[,RATE...]",
              help="Of the hosts' links, each way: 1gbit, 100mbit, unlimited; one for all, or one each.")  # fmt: skip
@click.option("--ranks-per-host", type=click.IntRange(1), default=1, show_default=True, help="Ranks `lab run` starts.")
@name_option
@json_option
def up(hosts: int | None, rates: str, ranks_per_host: int, name: str, as_json: bool) -> None:
    """Make a lab, which stands until `tutti lab down`."""
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
    """Take a lab down: what runs inside is ended. Also removes what killed processes left of theirs."""
    from tutti.lab import lab_network
    from tutti.lab.lab_record import records

    stale = lab_network.remove_stale()
    found = [record for record in records() if record.name == name]
    for record in found:
        lab_network.remove(record)
    if as_json:
        print(json.dumps([asdict(record) for record in (*stale, *found)], indent=2))
        return
    if stale:
        print(f"removed {len(stale)} lab{'s' if len(stale) > 1 else ''} whose process is gone")
    for record in found:
        print(f"lab {record.name} is down")
    if not found and not stale:
        print(f"no lab named {name} is up")


@command.command()
@json_option
def status(as_json: bool) -> None:
    """Which labs stand, with their hosts, links and what runs inside."""
    from tutti.lab import lab_network
    from tutti.lab.lab_record import records

    lab_network.check_possible()
    _show(records(), as_json)


@command.command(context_settings=PASS_ON)
@name_option
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF tutti run] SCRIPT [ARGUMENTS]...")
def run(name: str, arguments: tuple[str, ...]) -> None:
    """`tutti run` on all hosts of the lab together, which meet on host 0; --nproc is per host.

    Without --folder, all hosts share a new runs/lab-TIME.
    """
    from tutti.lab.lab_run import LabCommand, rendezvous_port, train_command

    if not arguments:
        raise LabError("no script was named; write `tutti lab run train.py`")
    record = _standing(name)
    words = ["--one-screen", *_unless_given(arguments, record), *arguments]
    port = rendezvous_port()
    commands = {host: train_command(record, host, port, words) for host in record.hosts}
    # The run speaks on host 0: standard output is its alone, so that --json leaves one document there.
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
    os.execvp(command_line[0], command_line)  # so that terminals, signals and the exit code are the command's own


def _standing(name: str) -> "LabRecord":
    """The lab of that name. Raises LabError where there is none."""
    from tutti.lab import lab_network
    from tutti.lab.lab_record import records

    lab_network.check_possible()
    found = next((record for record in records() if record.name == name and not record.stale), None)
    if found is None:
        raise LabError(f"no lab named {name} is up; make it with `tutti lab up`")
    return found


def _host_number(text: str, record: "LabRecord") -> int:
    number = text.removeprefix("host")
    if not number.isdecimal() or int(number) not in record.hosts:
        raise LabError(f"{text} is no host of this lab; give 0 to {len(record.rates) - 1}, or all")
    return int(number)


def _unless_given(arguments: tuple[str, ...], record: "LabRecord") -> list[str]:
    """Options of `tutti run` that the lab knows, where the command line does not say: ranks and a common folder."""

    def given(*names: str) -> bool:
        return any(argument.partition("=")[0] in names for argument in arguments)

    options = []
    if not given("--nproc", "--plan", "--mesh"):
        options += ["--nproc", str(record.ranks_per_host)]
    if not given("--folder", "--resume"):
        options += ["--folder", f"runs/lab-{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}"]
    return options


def _print_line(host: int, stream: str, line: str, others_out: TextIO = sys.stdout) -> None:
    """Host 0 speaks for itself; what others say is marked."""
    to = sys.stderr if stream == "err" else others_out if host else sys.stdout
    to.write(line if host == 0 else f"host{host}: {line}")
    to.flush()


def _refusals_once(sink: "Sink") -> "Sink":
    """What all hosts refuse in the same words, before ranks start, is passed on once."""
    said: set[str] = set()
    lock = threading.Lock()

    def take(host: int, stream: "Stream", line: str) -> None:
        if stream == "err" and line.startswith("tutti: "):
            with lock:  # hosts are listened to by threads
                if line in said:
                    return
                said.add(line)
        sink(host, stream, line)

    return take


def _wait(start: "Callable[[], LabCommand]") -> int:
    """To the end of a run, or to Ctrl-C or SIGTERM, which end it; the first failed host's exit code."""
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
        whose = "stands until it is taken down" if record.owner is None else f"ends with process {record.owner.pid}"
        whose = "its process is gone: the next `tutti lab down` removes it" if record.stale else whose
        size = f"{len(record.rates)} hosts, {record.ranks_per_host} rank(s) each"
        print(f"lab {record.name or record.id}: {size}; {whose}")
        for host, rate in enumerate(record.rates):
            inside = len(lab_network.pids(record.namespace(host)))
            print(f"  host{host}  {record.address(host)}  {rate_words(rate)}  {inside} processes")
