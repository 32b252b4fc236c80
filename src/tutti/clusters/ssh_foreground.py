"""A command of `tutti` on hosts over ssh while one waits for it, such as the doctor and the probe."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tutti.clusters.node_run import BEAT_S
from tutti.clusters.ssh_driver import HostLink, Results
from tutti.errors import LaunchError

FAILED_S = 10.0
"""Seconds that the other hosts have to end by themselves after one has failed."""

_END_S = 20.0


class ShownOutput(Results):
    """What hosts print, line by line.

    Args:
        show: called with each line.
        several: whether each line names its host.
        together: show the lines of each host together, when all have ended.
    """

    def __init__(self, show: Callable[[str], None], *, several: bool, together: bool) -> None:
        super().__init__(Path(), several=several and not together)
        self._show, self._together = show, together
        self._held: dict[str, bytes] = {}

    def say(self, name: str, data: bytes) -> None:
        """Take output of a host."""
        if self._together:
            self._held[name] = self._held.get(name, b"") + data
        else:
            super().say(name, data)

    def finish(self, names: Sequence[str]) -> None:
        """Show what is left: lines without an end, and what was kept for the end."""
        for name in names:
            held = self._held.pop(name, b"")
            if held:
                super().say(name, held)
            super().say(name, b"" if held.endswith(b"\n") or not self._has_rest(name) else b"\n")

    def _has_rest(self, name: str) -> bool:
        return bool(self._lines.get(name))

    def _print(self, data: bytes) -> None:
        for line in data.decode("utf-8", "replace").splitlines():
            self._show(line)


def run_on_hosts(tasks: Sequence[Mapping[str, Any]], output: ShownOutput) -> int:
    """Run commands on hosts, and return the exit code of the first that failed; Ctrl-C ends them everywhere.

    Args:
        tasks: what each host runs; see `tutti.clusters.ssh_driver.HostLink`.
        output: takes what they print.

    Raises:
        LaunchError: a host was lost.
        KeyboardInterrupt: Ctrl-C came; nothing runs any more.
    """
    secret = secrets.token_hex(32)
    links = [HostLink(dict(task), secret, output) for task in tasks]
    try:
        try:
            _watch(links)
        except KeyboardInterrupt:
            _end(links, "cancel")
            raise
    finally:
        output.finish([link.name for link in links])
        for link in links:
            link.close()
    ended = sorted(links, key=lambda link: link.over_at)
    lost = next((link for link in ended if link.lost), None)
    failed = next((link.code for link in ended if link.code), 0)
    if lost is not None and not failed:
        raise LaunchError(f"{lost.name} is lost: {lost.lost}; correct that, or leave it out of --hosts")
    return failed


def _watch(links: Sequence[HostLink]) -> None:
    """Wait until all hosts have ended; those that go on without a lost or failed one are ended."""
    beaten = 0.0
    while not all(link.over for link in links):
        now = time.monotonic()
        if now > beaten + BEAT_S:
            beaten = now
            _tell(links, "")
        for link in links:
            link.look()
        gone = [link.over_at for link in links if link.lost or link.code not in (None, 0)]
        if gone and now > min(gone) + FAILED_S:
            _end(links, "end")
            return
        time.sleep(0.02)


def _tell(links: Sequence[HostLink], command: str) -> None:
    for link in links:
        if not link.over:
            link.command(command)


def _end(links: Sequence[HostLink], command: str) -> None:
    _tell(links, command)
    deadline = time.monotonic() + _END_S
    while not all(link.over for link in links) and time.monotonic() < deadline:
        time.sleep(0.02)
    for link in links:
        if not link.over:
            link.lost = "it did not end in time"
