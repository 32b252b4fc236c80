"""The Lab class: a laboratory for tests and benchmarks that lasts as long as its `with` block."""

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import tutti.lab.lab_network as lab_network
from tutti.errors import LabError
from tutti.lab.lab_network import rates_of
from tutti.lab.lab_record import LabRecord
from tutti.lab.lab_run import Finished, LabCommand, Stream, inside, rendezvous_port, train_command

Command = Sequence[str] | Callable[[int], Sequence[str]]
"""The same command for every host, or a function that returns the command for a host's number."""


class Lab:
    """Hosts in network namespaces on a bridge, for the duration of a `with` block.

    A host has its own network, its own host name (host0, host1, ...) and, if there are enough, its own cores; files are
    shared. A lab needs Linux and root. If this process is killed, the next lab that is made removes the remains.

        with Lab(2, rates="1gbit") as lab:
            done = lab.train("train.py", nproc=1)

    Args:
        hosts: number of hosts.
        rates: rate of the hosts' links in each direction, such as "1gbit" or "unlimited": one for all, or one for each.
        ranks_per_host: ranks that `train` starts on each host by default.

    Raises:
        LabError: on entering, if no lab can be made here.
    """

    def __init__(self, hosts: int = 2, *, rates: str | Sequence[str] = "unlimited", ranks_per_host: int = 1) -> None:
        self.hosts = hosts
        self._rates = rates_of(rates, hosts)
        self._ranks_per_host = ranks_per_host
        self._record: LabRecord | None = None

    def __enter__(self) -> Self:
        if self._record is not None:
            raise LabError("this lab is already up; make another Lab for another `with` block")
        self._record = lab_network.make(self._rates, ranks_per_host=self._ranks_per_host, name="", standing=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        record, self._record = self.record, None
        lab_network.remove(record)

    @property
    def record(self) -> LabRecord:
        """The record of the lab.

        Raises:
            LabError: outside the `with` block.
        """
        if self._record is None:
            raise LabError("this lab is not up; use it inside its `with` block")
        return self._record

    def address(self, host: int) -> str:
        """Return the IPv4 address of a host."""
        return self.record.address(host)

    def inside(self, host: int, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` on a host, for a caller that starts processes itself."""
        return inside(self.record, host, command)

    def start(
        self,
        command: Command,
        *,
        hosts: Sequence[int] | None = None,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        sink: Callable[[int, Stream, str], None] = lambda host, stream, line: None,
    ) -> LabCommand:
        """Start a command on some hosts and return at once.

        The command finds NODE_RANK, NNODES, NPROC_PER_NODE, MASTER_ADDR and MASTER_PORT in its environment.

        Args:
            command: the command, or a function from the host's number to its command.
            hosts: numbers of the hosts; by default all.
            environment: further environment variables.
            cwd: working directory.
            sink: called with each line that a host writes, from threads of its own.
        """
        command_for = command if callable(command) else lambda host: command
        chosen = {host: command_for(host) for host in (self.record.hosts if hosts is None else hosts)}
        return LabCommand(self.record, chosen, sink=sink, environment=environment, cwd=cwd)

    def run(
        self,
        command: Command,
        *,
        hosts: Sequence[int] | None = None,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout_s: float = 600,
    ) -> tuple[Finished, ...]:
        """Run a command to its end on some hosts, and then end the processes that it left there.

        Args:
            command: the command, or a function from the host's number to its command.
            hosts: numbers of the hosts; by default all.
            environment: further environment variables.
            cwd: working directory.
            timeout_s: seconds after which everything is ended.

        Returns:
            How the command ended on each host, in the order of `hosts`.

        Raises:
            subprocess.TimeoutExpired: the command did not end in time.
        """
        written: dict[tuple[int, Stream], list[str]] = {}

        def keep(host: int, stream: Stream, line: str) -> None:
            written.setdefault((host, stream), []).append(line)

        started = self.start(command, hosts=hosts, environment=environment, cwd=cwd, sink=keep)
        try:
            codes = started.wait(timeout_s)
            if codes is None:
                output = "".join(line for lines in written.values() for line in lines)
                raise subprocess.TimeoutExpired(repr(command), timeout_s, output)
        finally:
            started.stop(0)
        return tuple(
            Finished(
                host=host,
                code=code,
                out="".join(written.get((host, "out"), [])),
                err="".join(written.get((host, "err"), [])),
            )
            for host, code in codes.items()
        )

    def train(
        self, *arguments: str, nproc: int | None = None, cwd: Path | None = None, timeout_s: float = 600
    ) -> tuple[Finished, ...]:
        """Run `tutti run` on all hosts together.

        Args:
            arguments: options of `tutti run`, then the script and its own arguments.
            nproc: ranks per host; by default the lab's.
            cwd: working directory.
            timeout_s: seconds after which everything is ended.
        """
        port = rendezvous_port()
        options = ("--nproc", str(nproc or self.record.ranks_per_host), "--no-predict", *arguments)
        return self.run(lambda host: train_command(self.record, host, port, options), cwd=cwd, timeout_s=timeout_s)
