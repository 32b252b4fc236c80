"""Making labs and taking them down: `ip` and `tc` calls, in order, and processes ended by their number."""

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
"""Command -> the Debian package it is in."""

QUEUE = "50ms"
"""How long a limited link holds packets back before it drops them."""

GRACE_S = 3.0


def check_possible() -> None:
    """Raises LabError where no lab can be made: another system than Linux, not root, or tools that are missing."""
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
    """Make a lab, after the remains of dead owners are removed; raises LabError, and leaves nothing, where it fails.

    `standing`: it stays when this process ends. `name`: no other lab may have it, except "", for one that does not
    stand: nothing could ask for it.
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
    """Take a lab down: end what runs inside, delete its namespaces and with them every link. Twice does no harm."""
    check_possible()
    with records.locked():
        _remove(record)


def remove_stale() -> list[LabRecord]:
    """Remove what dead owners left behind, and say what it was."""
    check_possible()
    with records.locked():
        return _remove_stale()


def _check_name(name: str, *, standing: bool) -> None:
    if not name and not standing:
        return
    records.check_name(name)
    if any(other.name == name for other in records.records()):
        raise LabError(f"a lab named {name} is up already; take it down with `tutti lab down`, or give another --name")


def _remove_stale() -> list[LabRecord]:
    stale = [record for record in records.records() if record.stale]
    for record in stale:
        _remove(record)
    return stale


# The network


def _make_network(record: LabRecord) -> None:
    """A switch and hosts, each in a namespace of its own: nothing of the lab is in the machine's own network."""
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
    """The lab's /etc/hosts. Sockets of IPv6 see IPv4 addresses as ::ffff:ADDRESS, and torch asks for their names: a
    name server, which no host of a lab reaches, if they are not there. That name is another, so that host0 has one
    address."""
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    for host in record.hosts:
        lines += [f"{record.address(host)} host{host}", f"::ffff:{record.address(host)} host{host}.lab"]
    return "\n".join(lines) + "\n"


def _limit(namespace: str, device: str, bits_per_s: int) -> None:
    """Limit what a device sends; a link is limited both ways by limiting both of its ends."""
    bucket = ("tbf", "rate", f"{bits_per_s}bit", "burst", str(burst_nbytes(bits_per_s)), "latency", QUEUE)
    _call("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *bucket)


def _call(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise LabError(
            f"this system does not make labs: `{' '.join(words)}` said: {said}; run it where root may make network "
            "namespaces and limit links, such as a virtual machine or a privileged container"
        )
    return done.stdout


def free_subnet(used: Iterable[ipaddress.IPv4Network]) -> str:
    """The first three numbers of a private network that overlaps none of `used`."""
    taken = list(used)
    for number in range(256):
        candidate = ipaddress.IPv4Network(f"10.213.{number}.0/24")
        if not any(candidate.overlaps(network) for network in taken):
            return f"10.213.{number}"
    raise LabError("no network 10.213.N.0/24 is free on this machine; take labs down with `tutti lab down`")


def _used_networks() -> list[ipaddress.IPv4Network]:
    """Networks that this machine routes to, or that other labs have."""
    routes = json.loads(_call("ip", "-j", "-4", "route", "show", "table", "all") or "[]")
    words = [route["dst"] for route in routes if route.get("dst", "default") != "default"]
    words += [f"{record.subnet}.0/24" for record in records.records()]
    return [ipaddress.IPv4Network(word, strict=False) for word in words]


# The way back


def _remove(record: LabRecord) -> None:
    """End its processes, then delete its namespaces, then forget it: killed on the way, it begins again."""
    there = [name for name in record.namespaces if name in namespaces()]
    end(lambda: [pid for name in there for pid in pids(name)], GRACE_S)
    for name in there:
        _call("ip", "netns", "delete", name)
    record.hosts_file.unlink(missing_ok=True)
    record.file.with_suffix(".new").unlink(missing_ok=True)
    record.file.unlink(missing_ok=True)


def namespaces() -> set[str]:
    """Names of all network namespaces of this machine, whoever made them."""
    return {line.split()[0] for line in _call("ip", "netns", "list").splitlines() if line.strip()}


def pids(namespace: str) -> list[int]:
    """Living processes in a namespace."""
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split() if records.start_of(int(word)) is not None]


def end(living: Callable[[], list[int]], grace_s: float) -> None:
    """End processes by their numbers: asked first, by force after `grace_s` seconds, until `living` names none.

    Raises LabError where this process is among them, or some cannot be ended.
    """
    if os.getpid() in living():
        raise LabError("this command runs inside the lab that it would end; run it outside")
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
        raise LabError(f"processes {left} inside the lab cannot be ended; end them, then take it down again")


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_FORM = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)bit", re.IGNORECASE)

SLOWEST_BITS_PER_S = 10**5
"""Below it a single burst, which must hold a whole segment, takes seconds."""


FASTEST_BITS_PER_S = 10**13
"""Above it a burst (see burst_nbytes) is more than `tc` takes, and no memory is that fast."""


def parse_rate(text: str) -> int | None:
    """Bits a second of "100mbit", "2.5gbit" and so on; None for "unlimited". Raises LabError for anything else."""
    word = text.strip().lower()
    if word == "unlimited":
        return None
    form = _FORM.fullmatch(word)
    if form is None:
        raise LabError(f"rate {text!r} is none; write it as 100mbit, 1gbit or 2.5gbit (bits a second), or unlimited")
    bits = round(float(form[1]) * _UNITS[form[2].lower()])
    if bits < SLOWEST_BITS_PER_S:
        raise LabError(f"rate {text!r} is too low for a lab; give {rate_words(SLOWEST_BITS_PER_S)} or more")
    if bits > FASTEST_BITS_PER_S:
        most = rate_words(FASTEST_BITS_PER_S)
        raise LabError(f"rate {text!r} is too high for a lab to limit; give {most} or less, or unlimited")
    return bits


def rates_of(words: str | Sequence[str], hosts: int) -> tuple[int | None, ...]:
    """The rate of every host, from one word for all or one for each. Raises LabError where the numbers differ."""
    parts = [words] if isinstance(words, str) else list(words)
    if len(parts) not in (1, hosts):
        raise LabError(f"{len(parts)} rates for {hosts} hosts; give one for all, or one for each")
    rates = tuple(parse_rate(part) for part in parts)
    return rates * hosts if len(rates) == 1 else rates


def rate_words(bits_per_s: int | None) -> str:
    """The rate as it is written: 10**9 -> "1gbit"."""
    if bits_per_s is None:
        return "unlimited"
    for prefix in ("t", "g", "m", "k"):
        if bits_per_s >= _UNITS[prefix]:
            return f"{bits_per_s / _UNITS[prefix]:g}{prefix}bit"
    return f"{bits_per_s}bit"


def burst_nbytes(bits_per_s: int) -> int:
    """What a token bucket may send at once: 1 ms of the rate, and never less than a segment of 64 KiB needs."""
    return max(70_000, bits_per_s // 8 // 1000)
