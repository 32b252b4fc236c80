"""Lab: a laboratory for tests and benchmarks, which ends with the block it was made for."""

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
"""The same words on every host, or what makes them from the host's number."""


class Lab:
    """Hosts in network namespaces on a bridge, for as long as a `with` block lasts.

    `rates`: of the hosts' links, each way: one word for all ("1gbit", "unlimited"), or one for each. A host has its own
    network, host name (host0, host1, ...) and, where there are enough, cores; files are shared. Needs Linux and root:
    entering raises LabError where a lab cannot be made. A process that is killed leaves its lab to the next one made.

        with Lab(2, rates="1gbit") as lab:
            done = lab.train("train.py", nproc=1)
    """

    def __init__(self, hosts: int = 2, *, rates: str | Sequence[str] = "unlimited", ranks_per_host: int = 1) -> None:
        self.hosts = hosts
        self._rates = rates_of(rates, hosts)
        self._ranks_per_host = ranks_per_host
        self._record: LabRecord | None = None

    def __enter__(self) -> Self:
        if self._record is not None:
            raise LabError("this lab is up already; make another Lab for another block")
        self._record = lab_network.make(self._rates, ranks_per_host=self._ranks_per_host, name="", standing=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        record, self._record = self.record, None
        lab_network.remove(record)

    @property
    def record(self) -> LabRecord:
        """What it consists of. Raises LabError outside its block."""
        if self._record is None:
            raise LabError("this lab is not up; use it inside its `with` block")
        return self._record

    def address(self, host: int) -> str:
        return self.record.address(host)

    def inside(self, host: int, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on a host, for a caller that starts processes by itself."""
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
        """Start a command on some hosts (all by default) and return at once. Each has NODE_RANK, NNODES,
        NPROC_PER_NODE, MASTER_ADDR and MASTER_PORT. `sink` is told every line they write, from threads of its own.
        """
        words = command if callable(command) else lambda host: command
        chosen = {host: words(host) for host in (self.record.hosts if hosts is None else hosts)}
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
        """Run a command to its end on some hosts (all by default); how it ended on each, in order. What it left
        running there is ended. Raises subprocess.TimeoutExpired, everything ended, after `timeout_s` seconds.
        """
        written: dict[tuple[int, Stream], list[str]] = {}

        def keep(host: int, stream: Stream, line: str) -> None:
            written.setdefault((host, stream), []).append(line)

        started = self.start(command, hosts=hosts, environment=environment, cwd=cwd, sink=keep)
        try:
            codes = started.wait(timeout_s)
            if codes is None:
                said = "".join(line for lines in written.values() for line in lines)
                raise subprocess.TimeoutExpired(repr(command), timeout_s, said)
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
        """`tutti run` on every host together: `arguments` are its own, then the script and the script's."""
        port = rendezvous_port()
        words = ("--nproc", str(nproc or self.record.ranks_per_host), "--no-predict", *arguments)
        return self.run(lambda host: train_command(self.record, host, port, words), cwd=cwd, timeout_s=timeout_s)
