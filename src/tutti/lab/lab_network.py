"""Make labs and remove them, by `ip` and `tc` commands; processes inside a lab are ended by their process ids."""

import contextlib
import dataclasses
import ipaddress
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence

import tutti.lab.lab_record as records
from tutti.errors import LabError
from tutti.lab.lab_record import LabRecord

TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "taskset": "util-linux", "mount": "mount"}
"""Required command -> the Debian package that has it."""

QUEUE = "50ms"
"""Maximum time that a packet waits in the queue of a limited link before it is dropped."""

GRACE_S = 3.0


def check_possible() -> None:
    """Check that labs can be made here.

    Raises:
        LabError: the system is not Linux, the user is not root, or tools are missing.
    """
    if sys.platform != "linux":
        raise LabError(f"a lab needs Linux network namespaces, and this is {sys.platform}; run it on Linux")
    missing = sorted({package for tool, package in TOOLS.items() if shutil.which(tool) is None})
    if missing:
        tools = ", ".join(tool for tool in TOOLS if shutil.which(tool) is None)
        raise LabError(f"a lab needs {tools}, not found here; on Debian and Ubuntu: apt install {' '.join(missing)}")
    if os.geteuid() != 0:
        raise LabError(
            "making network namespaces needs root, and this is user "
            f'{os.geteuid()}; run it as root: sudo "$(which tutti)" lab ...'
        )


def make(rates: tuple[int | None, ...], *, ranks_per_host: int, name: str, standing: bool) -> LabRecord:
    """Make a lab, after removing the remains of dead owners.

    Args:
        rates: rate of each host's link in bits per second; None for unlimited.
        ranks_per_host: ranks that a training command starts on each host.
        name: the lab's name, which no other lab may have. "" only for a lab that is not standing, because no command
            can refer to it.
        standing: whether the lab remains when this process ends.

    Raises:
        LabError: the lab cannot be made; nothing of it remains.
    """
    check_possible()
    with records.locked():
        _remove_stale()
        _check_name(name, standing=standing)
        record = records.new_record(
            rates,
            ranks_per_host=ranks_per_host,
            name=name,
            owner=records.this_process(),
            subnet=free_subnet(_used_networks()),
        )
        records.write(record)
        try:
            _make_network(record)
        except BaseException:
            _remove(record)
            raise
        if standing:
            record = dataclasses.replace(record, owner=None)
            records.write(record)
        return record


def remove(record: LabRecord) -> None:
    """Remove a lab: end its processes and delete its namespaces, with all their links. Removing twice is harmless."""
    check_possible()
    with records.locked():
        _remove(record)


def remove_stale() -> list[LabRecord]:
    """Remove the labs of dead owners and return their records."""
    check_possible()
    with records.locked():
        return _remove_stale()


def _check_name(name: str, *, standing: bool) -> None:
    """Raise LabError if the name is not valid or another lab has it."""
    if not name and not standing:
        return
    records.check_name(name)
    if any(other.name == name for other in records.records()):
        raise LabError(f"a lab named {name} is up already; remove it with `tutti lab down`, or give another --name")


def _remove_stale() -> list[LabRecord]:
    """Remove the labs of dead owners; the caller holds the lock."""
    stale = [record for record in records.records() if record.stale]
    for record in stale:
        _remove(record)
    return stale


# The network


def _make_network(record: LabRecord) -> None:
    """Make a switch and the hosts in separate namespaces, so that the machine's own network is unchanged."""
    record.hosts_file.write_text(_names(record), encoding="ascii")
    _call("ip", "netns", "add", record.switch)
    _call("ip", "-n", record.switch, "link", "add", "bridge", "type", "bridge")
    _call("ip", "-n", record.switch, "link", "set", "bridge", "up")
    for host, rate in enumerate(record.rates):
        name, port = record.namespace(host), f"port{host}"
        _call("ip", "netns", "add", name)
        _call("ip", "-n", record.switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        _call("ip", "-n", record.switch, "link", "set", port, "master", "bridge", "up")
        _call("ip", "-n", name, "addr", "add", f"{record.address(host)}/24", "dev", "eth0")
        _call("ip", "-n", name, "link", "set", "lo", "up")
        _call("ip", "-n", name, "link", "set", "eth0", "up")
        if rate is not None:
            _limit(name, "eth0", rate)
            _limit(record.switch, port, rate)


def _names(record: LabRecord) -> str:
    """Return the lab's /etc/hosts.

    An IPv6 socket sees IPv4 addresses as ::ffff:ADDRESS, and torch looks up their names. Without an entry it would ask
    a name server, which no host of a lab reaches. The entry has another name, so that host0 has only one address.
    """
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    for host in record.hosts:
        lines += [f"{record.address(host)} host{host}", f"::ffff:{record.address(host)} host{host}.lab"]
    return "\n".join(lines) + "\n"


def _limit(namespace: str, device: str, bits_per_s: int) -> None:
    """Limit what a device sends; limiting both ends of a link limits both directions."""
    bucket = ("tbf", "rate", f"{bits_per_s}bit", "burst", str(burst_nbytes(bits_per_s)), "latency", QUEUE)
    _call("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *bucket)


def _call(*words: str) -> str:
    """Run a command and return its output; raise LabError if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise LabError(
            f"labs cannot be made on this system: `{' '.join(words)}` failed: {reason}; use one where root may make "
            "network namespaces and limit links, such as a virtual machine or a privileged container"
        )
    return done.stdout


def free_subnet(used: Iterable[ipaddress.IPv4Network]) -> str:
    """Return the first three numbers of a private /24 network that overlaps none of `used`.

    Raises:
        LabError: no such network is free.
    """
    taken = list(used)
    for number in range(256):
        candidate = ipaddress.IPv4Network(f"10.213.{number}.0/24")
        if not any(candidate.overlaps(network) for network in taken):
            return f"10.213.{number}"
    raise LabError("no network 10.213.N.0/24 is free on this machine; remove labs with `tutti lab down`")


def _used_networks() -> list[ipaddress.IPv4Network]:
    """Return the networks to which this machine has routes, and those of other labs."""
    routes = json.loads(_call("ip", "-j", "-4", "route", "show", "table", "all") or "[]")
    networks = [route["dst"] for route in routes if route.get("dst", "default") != "default"]
    networks += [f"{record.subnet}.0/24" for record in records.records()]
    return [ipaddress.IPv4Network(network, strict=False) for network in networks]


# Removal


def _remove(record: LabRecord) -> None:
    """End a lab's processes, delete its namespaces, and last its record, so that a removal can be repeated."""
    present = [name for name in record.namespaces if name in namespaces()]
    end(lambda: [pid for name in present for pid in pids(name)], GRACE_S)
    for name in present:
        _call("ip", "netns", "delete", name)
    record.hosts_file.unlink(missing_ok=True)
    record.file.unlink(missing_ok=True)


def namespaces() -> set[str]:
    """Return the names of all network namespaces on this machine, whoever made them."""
    return {line.split()[0] for line in _call("ip", "netns", "list").splitlines() if line.strip()}


def pids(namespace: str) -> list[int]:
    """Return the living processes in a namespace."""
    listing = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return [int(pid) for pid in listing.stdout.split() if records.start_of(int(pid)) is not None]


def end(living: Callable[[], list[int]], grace_s: float) -> None:
    """End processes: terminate them, and kill those that remain after `grace_s` seconds.

    Args:
        living: returns the process ids that are still alive; it is called until it returns none.
        grace_s: seconds between SIGTERM and SIGKILL.

    Raises:
        LabError: this process is among them, or some cannot be ended.
    """
    if os.getpid() in living():
        raise LabError("this command runs inside the lab that it would end; run it outside that lab")
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
        deadline, asked = time.monotonic() + patience_s, set[int]()
        while left := living():
            for pid in left:
                if pid not in asked:
                    _send(pid, number)
                    asked.add(pid)
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        else:
            return
    if left := living():
        raise LabError(f"processes {left} inside the lab cannot be ended; end them, then remove the lab again")


def _send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, which may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_FORM = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)bit", re.IGNORECASE)

SLOWEST_BITS_PER_S = 10**5
"""Lowest rate: below it, a single burst, which must hold a whole segment, takes seconds."""


FASTEST_BITS_PER_S = 10**13
"""Highest rate: above it, a burst (see burst_nbytes) exceeds what `tc` accepts, and no memory is that fast."""


def parse_rate(text: str) -> int | None:
    """Return the bits per second of a rate such as "100mbit" or "2.5gbit"; None for "unlimited".

    Raises:
        LabError: the text is not a rate, or the rate is too low or too high.
    """
    word = text.strip().lower()
    if word == "unlimited":
        return None
    form = _FORM.fullmatch(word)
    if form is None:
        raise LabError(f"{text!r} is not a rate; write it as 100mbit, 1gbit or 2.5gbit (bits per second), or unlimited")
    bits = round(float(form[1]) * _UNITS[form[2].lower()])
    if bits < SLOWEST_BITS_PER_S:
        raise LabError(f"rate {text!r} is too low for a lab; give {rate_words(SLOWEST_BITS_PER_S)} or more")
    if bits > FASTEST_BITS_PER_S:
        most = rate_words(FASTEST_BITS_PER_S)
        raise LabError(f"rate {text!r} is too high for a lab to limit; give {most} or less, or unlimited")
    return bits


def rates_of(words: str | Sequence[str], hosts: int) -> tuple[int | None, ...]:
    """Return the rate of every host.

    Args:
        words: one rate for all hosts, or one for each.
        hosts: number of hosts.

    Raises:
        LabError: the number of rates is neither 1 nor `hosts`, or one is not a rate.
    """
    parts = [words] if isinstance(words, str) else list(words)
    if len(parts) not in (1, hosts):
        raise LabError(f"{len(parts)} rates for {hosts} hosts; give one rate for all hosts, or one for each")
    rates = tuple(parse_rate(part) for part in parts)
    return rates * hosts if len(rates) == 1 else rates


def rate_words(bits_per_s: int | None) -> str:
    """Format a rate: 10**9 becomes "1gbit"."""
    if bits_per_s is None:
        return "unlimited"
    for prefix in ("t", "g", "m", "k"):
        if bits_per_s >= _UNITS[prefix]:
            return f"{bits_per_s / _UNITS[prefix]:g}{prefix}bit"
    return f"{bits_per_s}bit"


def burst_nbytes(bits_per_s: int) -> int:
    """Return the bytes that a token bucket may send at once: 1 ms at the rate, but at least one segment of 64 KiB."""
    return max(70_000, bits_per_s // 8 // 1000)
