"""Checks of a host's limits and variables, and of what differs between hosts, from what their ranks told.

`tutti.commands.rank_check` measures; here are the judgements, which are functions of values.
"""

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tutti.launch.doctor_finding import Finding, bad, good, warned

SLOW = 3.0
"""A link is slow if the fastest carries so many times more, or answers so many times sooner."""

ASYMMETRIC = 2.0
"""The two directions of a link differ if one carries so many times more."""

_LATENCY_S = 0.5e-3
"""Latencies below are not judged."""

SKEW_S = 1.0
"""Seconds by which clocks may differ before it is told."""

_FILES = 1024
_FILES_PER_RANK = 32
"""Files that a process may open at the least, and for each rank of a run, with which it may be connected often."""

_MAY_DIFFER = re.compile(r".*(IFNAME|_HCA|DEBUG.*|_FILE|_HOSTID|TOPO.*|VISIBLE_DEVICES|AFFINITY_MASK)$")
"""Variables that are each host's own."""

_STOPPING = re.compile(r"(NCCL|RCCL|GLOO|UCX|FI|TUTTI|TORCH_NCCL)_.*")
"""Variables that ranks have to agree on before they can talk to each other."""


def open_files(soft: int, hard: int, ranks: int) -> Finding:
    """Check how many files, which sockets are, a process may open.

    Args:
        soft: the limit of this process; negative for none.
        hard: what it may be raised to; negative for none.
        ranks: number of ranks of a run.
    """
    needed = max(_FILES, _FILES_PER_RANK * ranks)
    if 0 <= soft < needed:
        raised = needed if hard < 0 or hard >= needed else 0
        fix = f"ulimit -n {raised}" if raised else f"ask the administrator to raise `nofile` to {needed} (limits.conf)"
        return bad("open files", f"a process may open {soft}; a run of {ranks} ranks may need {needed}", fix)
    return good("open files", "no limit" if soft < 0 else f"a process may open {soft}")


def variables_here(variables: Mapping[str, str], interfaces: Sequence[str], nproc: int, cores: int) -> Finding:
    """Check the variables that steer communication and threads against this host.

    Args:
        variables: those that are set.
        interfaces: names of the host's network interfaces.
        nproc: ranks on this host.
        cores: cores that they may use.
    """
    name, gloo = "environment", variables.get("GLOO_SOCKET_IFNAME", "")
    absent = [each for each in gloo.split(",") if each and each not in interfaces]
    if absent:
        here = ", ".join(interfaces)
        return bad(name, f"GLOO_SOCKET_IFNAME names {absent[0]}, which is not here ({here})", "unset it, or correct it")
    nccl = variables.get("NCCL_SOCKET_IFNAME", "")
    if nccl and not _nccl_interfaces(nccl, interfaces):
        fix = f"unset it, or name one of {', '.join(interfaces)}"
        return bad(name, f"NCCL_SOCKET_IFNAME={nccl} leaves no interface of this host", fix)
    threads = variables.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) * nproc > cores:
        found = f"OMP_NUM_THREADS={threads} for each of {nproc} ranks on {cores} cores: they wait for each other"
        return warned(name, found, "unset OMP_NUM_THREADS; tutti run divides the cores")
    shown = ", ".join(f"{key}={value}" for key, value in sorted(variables.items())[:6])
    return good(name, shown or "no variable steers communication")


def _nccl_interfaces(text: str, interfaces: Sequence[str]) -> list[str]:
    """Return the interfaces that NCCL takes: by prefixes, `^` for all others, `=` for exact names."""
    negated, exact = text.startswith("^"), text.lstrip("^").startswith("=")
    wanted = [each for each in text.lstrip("^=").split(",") if each]
    return [
        each
        for each in interfaces
        if any(each == word if exact else each.startswith(word) for word in wanted) is not negated
    ]


def environments(nodes: Sequence[Mapping[str, Any]]) -> Finding:
    """Find variables that contradict each other between hosts.

    Args:
        nodes: for each host, its "label" and its "variables".
    """
    name = "environments of hosts"
    stopping: list[str] = []
    others: list[str] = []
    for variable in sorted({key for node in nodes for key in node["variables"]}):
        values: dict[str, list[str]] = {}
        for node in nodes:
            values.setdefault(node["variables"].get(variable, "not set"), []).append(node["label"])
        if len(values) > 1 and not _MAY_DIFFER.fullmatch(variable):
            which = f"{variable}: " + ", ".join(f"{value} on {few(hosts)}" for value, hosts in values.items())
            (stopping if _STOPPING.fullmatch(variable) else others).append(which)
    fix = "set them alike on all hosts, or nowhere"
    if stopping:
        return bad(name, "; ".join([*stopping, *others]), f"{fix}: ranks may wait for each other for ever")
    return warned(name, "; ".join(others), fix) if others else good(name, "the same variables everywhere")


def clocks(nodes: Sequence[Mapping[str, Any]]) -> Finding:
    """Compare the hosts' clocks.

    Args:
        nodes: for each host, its "label" and "offset_s": seconds by which its clock is ahead of the first host's, or
            None.
    """
    offsets = {node["label"]: float(node["offset_s"]) for node in nodes if node.get("offset_s") is not None}
    if not offsets:
        return good("clocks", "not compared")
    middle = statistics.median_low(offsets.values())
    wrong = {host: offset - middle for host, offset in offsets.items() if abs(offset - middle) > SKEW_S}
    if wrong:
        which = ", ".join(f"{host} {abs(by):.1f} s {'ahead' if by > 0 else 'behind'}" for host, by in wrong.items())
        return warned(
            "clocks", f"{which}: time limits, logs and file times disagree", "run chrony or ntpd on all hosts"
        )
    spread_s = max(offsets.values()) - min(offsets.values())
    return good("clocks", f"at most {max(spread_s, 1e-3):.3f} s between {few(list(offsets))}")


def shared_folder(nodes: Sequence[Mapping[str, Any]]) -> Finding:
    """Tell whether the run folder is the same folder on all hosts.

    Args:
        nodes: for each host, its "label", its "place" and whether it "sees" there what the first host wrote.
    """
    blind = [node["label"] for node in nodes if not node["sees"]]
    if not blind:
        return good("shared folder", f"{nodes[0]['place']} is the same folder on all hosts")
    return warned(
        "shared folder",
        f"{nodes[0]['place']} of {nodes[0]['label']} is not on {few(blind)}: checkpoints of their ranks are sent to "
        "rank 0, and a resume reads through it",
        "give --folder on a file system that all hosts share, if there is one",
    )


def unreachable(pairs: Sequence[Sequence[str]]) -> Finding:
    """Name hosts that cannot connect to each other.

    Args:
        pairs: (from, to, address, reason) of each connection that failed.
    """
    which = "; ".join(f"{source} cannot reach {target} at {address} ({why})" for source, target, address, why in pairs)
    hosts = few(list(dict.fromkeys(name for pair in pairs for name in pair[:2])))
    fix = f"let TCP connections to all ports above 1023 through between {hosts} (firewall, route, security group)"
    return bad("ports between hosts", which, fix)


def other_problems(nodes: Sequence[Mapping[str, Any]], own: int) -> Finding:
    """Tell what the doctors of other hosts found there."""
    problems = [f"{node['label']}: {text}" for at, node in enumerate(nodes) if at != own for text in node["problems"]]
    if problems:
        return bad("other hosts", "; ".join(problems), "their own doctors name the fixes")
    return good("other hosts", "no problem of their own")


def links(labels: Sequence[str], pairs: Sequence[tuple[int, int, float, float]]) -> Finding:
    """Judge the links between hosts by the fastest of them.

    Args:
        labels: names of the hosts.
        pairs: (from, to, bytes per second, latency in seconds), both directions of every pair.
    """
    rates = {(a, b): rate for a, b, rate, _ in pairs}
    latencies = {(a, b): latency for a, b, _, latency in pairs}
    best, soonest = max(rates.values()), min(latencies.values())
    slow = {pair for pair, rate in rates.items() if rate * SLOW < best}
    late = {pair for pair, latency in latencies.items() if latency > max(SLOW * soonest, _LATENCY_S)}
    found = [_slow_words(labels, rates, slow, best)] if slow else []
    for a, b in sorted(rates):
        both = sorted((rates[a, b], rates[b, a]))
        if a < b and both[0] * ASYMMETRIC < both[1]:
            found.append(
                f"{labels[a]} to {labels[b]} carries {rate_words(rates[a, b])}, but {labels[b]} to {labels[a]} "
                f"{rate_words(rates[b, a])}"
            )
    if late:
        which = ", ".join(f"{labels[a]}-{labels[b]} {latencies[a, b] * 1e3:.2f} ms" for a, b in sorted(late) if a < b)
        found.append(f"late answers: {which} (others from {soonest * 1e3:.2f} ms)")
    table = _table(labels, rates, latencies)
    words = f"{rate_words(min(rates.values()))} to {rate_words(best)}, answers from {soonest * 1e3:.2f} ms"
    if not found:
        return replace(good("links", words), table=table)
    fix = (
        "look at cable, switch port and duplex (ethtool), and other traffic there; or leave the host out; or measure "
        "with tutti probe, so that the plan knows"
    )
    return replace(warned("links", "; ".join(found), fix), table=table)


def _slow_words(
    labels: Sequence[str], rates: Mapping[tuple[int, int], float], slow: set[tuple[int, int]], best: float
) -> str:
    """Name the hosts all of whose links are slow, then the other slow pairs."""
    hosts = [
        host
        for host in range(len(labels))
        if all(pair in slow or pair[::-1] in slow for pair in rates if host in pair) and len(labels) > 2
    ]
    words = []
    for host in hosts:
        own = max(rates[pair] for pair in slow if host in pair)
        words.append(
            f"every link of {labels[host]} is slow: at most {rate_words(own)}, others carry {rate_words(best)}"
        )
    rest = sorted(pair for pair in slow if not set(hosts) & set(pair))
    if rest:
        which = ", ".join(f"{labels[a]} to {labels[b]} {rate_words(rates[a, b])}" for a, b in rest)
        words.append(f"slow: {which} (others carry up to {rate_words(best)})")
    return "; ".join(words)


def _table(
    labels: Sequence[str], rates: Mapping[tuple[int, int], float], latencies: Mapping[tuple[int, int], float]
) -> tuple[str, ...]:
    """Format bandwidth from the host of a row to that of a column, and latency."""
    width = max(24, *(len(label) + 2 for label in labels))
    head = "from \\ to".ljust(width) + "".join(label.rjust(width) for label in labels)
    rows = [head]
    for a, label in enumerate(labels):
        cells = [
            "-" if a == b else f"{rate_words(rates[a, b])}, {latencies[a, b] * 1e3:.2f} ms" for b in range(len(labels))
        ]
        rows.append(label.ljust(width) + "".join(cell.rjust(width) for cell in cells))
    return tuple(rows)


def rate_words(bytes_per_s: float) -> str:
    """Format a rate in bits.

    Examples:
        >>> rate_words(12.5e6)
        '100 Mbit/s'
        >>> rate_words(1.25e9)
        '10.0 Gbit/s'
    """
    bits = bytes_per_s * 8
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def few(names: Sequence[str]) -> str:
    """Return host names, at most four of them."""
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
