"""What Slurm's partitions have, from scontrol and sinfo: nodes, cores, memory, GPUs, states and time limits."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tutti.clusters.cluster_resources import ClusterNode, NodePool, NodeRequest
from tutti.config.safe_text import plain_text
from tutti.environment import expand_hostlist
from tutti.errors import LaunchError


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChoice:
    """The settings of a job that narrow on which nodes it may run; see `tutti.clusters.slurm_script.SlurmSettings`."""

    partition: str | None = None
    account: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    cpus: int | None = None
    gpus: str | None = None


Ask = Callable[..., str]
"""Runs a command of Slurm and returns what it prints, or raises LaunchError."""

_UNUSABLE = re.compile(
    r"\*|\b(DOWN|DRAIN\w*|FAIL\w*|ERROR|UNKNOWN|INVAL\w*|NOT_RESPONDING|NO_RESPOND|MAINT\w*|FUTURE|BLOCKED|REBOOT\w*)\b"
)
_MEMORY_UNKNOWN_MB = 1
"""What Slurm says of a node whose memory its configuration does not name."""


def slurm_pools(ask: Ask, settings: NodeChoice) -> tuple[NodePool, ...]:
    """Return the partitions that a job with these settings may use.

    Args:
        ask: runs a command of Slurm.
        settings: of the job. Limits of accounts and of qualities of service are not looked at.

    Raises:
        LaunchError: Slurm does not answer, or has no such partition or reservation.
    """
    partitions, nodes = _partitions(ask), _nodes(ask)
    chosen = _chosen_names(ask, settings)
    return tuple(_pool(fields, nodes, settings, chosen) for fields in _wanted(partitions, settings))


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentChoice:
    """A component of a heterogeneous job: which nodes it asks for, how many, and the ranks of each."""

    choice: NodeChoice
    nodes: int
    ranks: int | None


def component_nodes(ask: Ask, components: Sequence[ComponentChoice]) -> tuple[NodeRequest, ...]:
    """Return the nodes that the components of a heterogeneous job may get; without `gpus`, they get no GPU.

    Args:
        ask: runs a command of Slurm.
        components: in their order.

    Raises:
        LaunchError: Slurm does not answer, or has no such partition or reservation.
    """
    if not components:
        return ()
    partitions, nodes, found = _partitions(ask), _nodes(ask), list[NodeRequest]()
    for number, component in enumerate(components, 1):
        choice = component.choice
        if choice.partition is None and not any(map(_is_default, partitions)):
            raise LaunchError(
                f"component {number} of [[slurm.components]] has no partition, and Slurm has no default one; name one "
                "with partition"
            )
        wanted = _wanted(partitions, choice) if choice.partition is not None else list(filter(_is_default, partitions))
        pools = [_pool(fields, nodes, choice, _chosen_names(ask, choice)) for fields in wanted]
        pool = pools[0] if len(pools) == 1 else _either(pools)
        if choice.gpus is None:
            pool = replace(pool, nodes=tuple(replace(node, gpus=0, gpu="") for node in pool.nodes))
        found.append(NodeRequest(name=f"component {number}", count=component.nodes, ranks=component.ranks, pool=pool))
    return tuple(found)


def _either(pools: Sequence[NodePool]) -> NodePool:
    """Return what a job may get that names several partitions: Slurm takes the one in which it starts first."""
    open_pools = [pool for pool in pools if not pool.closed] or list(pools)
    limits = [pool.time_limit_s for pool in open_pools if pool.time_limit_s is not None]
    most = [pool.most_nodes for pool in open_pools if pool.most_nodes is not None]
    nodes = {node.name: node for pool in open_pools for node in pool.nodes}
    return NodePool(
        name=",".join(pool.name for pool in pools),
        nodes=tuple(nodes.values()),
        absent={name: why for pool in open_pools for name, why in pool.absent.items() if name not in nodes},
        closed=open_pools[0].closed,
        most_nodes=min(most, default=None),
        time_limit_s=min(limits, default=None),
    )


def _partitions(ask: Ask) -> list[dict[str, str]]:
    """Return what Slurm says of each partition."""
    return [_fields(line) for line in ask("scontrol", "--oneliner", "show", "partition").splitlines() if line]


def _is_default(partition: Mapping[str, str]) -> bool:
    return partition.get("Default") == "YES"


def _nodes(ask: Ask) -> dict[str, dict[str, str]]:
    """Return what Slurm says of each node, by name."""
    lines = ask("scontrol", "--oneliner", "show", "node").splitlines()
    return {fields["NodeName"]: fields for line in lines if "NodeName" in (fields := _fields(line))}


def _wanted(partitions: Sequence[Mapping[str, str]], settings: NodeChoice) -> list[Mapping[str, str]]:
    """Return the partitions that the settings name, or all of them, the default one first.

    Raises:
        LaunchError: Slurm has no such partition.
    """
    wanted = None if settings.partition is None else settings.partition.split(",")
    known = [fields["PartitionName"] for fields in partitions]
    missing = [name for name in wanted or () if name not in known]
    if missing:
        raise LaunchError(f"Slurm has no partition {missing[0]!r}; it has {', '.join(known) or 'none'}")
    found = [fields for fields in partitions if wanted is None or fields["PartitionName"] in wanted]
    return sorted(found, key=lambda fields: not _is_default(fields))


def _fields(line: str) -> dict[str, str]:
    """Return the fields of a line of scontrol; of several with one name the first, as a reason is free text."""
    found: dict[str, str] = {}
    for name, value in re.findall(r"(?:^|\s)(\w+)=(\S*)", line):
        found.setdefault(name, value)
    reason = re.search(r"\sReason=(.*?)(?:\s\[[^\]]*@|$)", line)
    return found | ({"Reason": reason[1].strip()} if reason else {})


def _chosen_names(ask: Ask, settings: NodeChoice) -> Callable[[str], str]:
    """Return what says why a node is not for a job with these settings; empty if it is."""
    listed = set(expand_hostlist(settings.nodelist or ""))
    excluded = set(expand_hostlist(settings.exclude or ""))
    reserved: set[str] | None = None
    if settings.reservation is not None:
        said = _fields(ask("scontrol", "--oneliner", "show", "reservation", settings.reservation))
        reserved = set(expand_hostlist(said.get("Nodes", "")))

    def why_not(name: str) -> str:
        if listed and name not in listed:
            return "nodelist leaves it out"
        if name in excluded:
            return "exclude leaves it out"
        return "the reservation has it not" if reserved is not None and name not in reserved else ""

    return why_not


def _pool(
    fields: Mapping[str, str],
    nodes: Mapping[str, Mapping[str, str]],
    settings: NodeChoice,
    why_not: Callable[[str], str],
) -> NodePool:
    name = fields["PartitionName"]
    usable, absent = [], {}
    for node_name in expand_hostlist(fields.get("Nodes", "").replace("(null)", "")):
        said = nodes.get(node_name)
        reason = "Slurm does not tell of it" if said is None else why_not(node_name) or _state_problem(said)
        if said is None or reason:
            absent[node_name] = reason
            continue
        node = _narrowed(_node(node_name, said), settings)
        reason = _feature_problem(said, settings) or _too_small(node, settings)
        if reason:
            absent[node_name] = reason
        else:
            usable.append(node)
    limit_s = _seconds(fields.get("MaxTime", ""))
    most = fields.get("MaxNodes", "UNLIMITED")
    state = fields.get("State", "UP")
    closed = "" if state == "UP" else f"its state is {state}"
    accounts = fields.get("AllowAccounts", "ALL")
    if settings.account is not None and accounts != "ALL" and settings.account not in accounts.split(","):
        closed = closed or f"it does not take jobs of the account {settings.account}"
    return NodePool(
        name=name,
        nodes=tuple(usable),
        absent=absent,
        closed=closed,
        most_nodes=int(most) if most.isdigit() else None,
        time_limit_s=limit_s,
        request=f"partition={name}",
    )


def _state_problem(said: Mapping[str, str]) -> str:
    """Return why no job gets a node, in Slurm's words; empty if it may."""
    state = said.get("State", "UNKNOWN")
    if not _UNUSABLE.search(state):
        return ""
    reason = plain_text(said.get("Reason", ""))
    return state.replace("*", ", not responding").lower() + (f": {reason}" if reason else "")


def _feature_problem(said: Mapping[str, str], settings: NodeChoice) -> str:
    """Return which feature a node lacks that the constraint asks for; simple ones only are understood."""
    constraint = settings.constraint
    if constraint is None or not re.fullmatch(r"[\w.:-]+(?:&[\w.:-]+)*", constraint):
        return ""
    has = set(said.get("ActiveFeatures", said.get("AvailableFeatures", "")).split(","))
    lacks = [feature for feature in constraint.split("&") if feature not in has]
    return f"it has not the feature {lacks[0]}" if lacks else ""


def _node(name: str, said: Mapping[str, str]) -> ClusterNode:
    gpus, gpu = _gpus(said.get("Gres", ""))
    memory_mb = int(said.get("RealMemory", "0") or 0)
    return ClusterNode(
        name=name,
        cores=int(said.get("CPUEfctv", said.get("CPUTot", "1"))),
        memory_nbytes=memory_mb << 20 if memory_mb > _MEMORY_UNKNOWN_MB else None,
        gpus=gpus,
        gpu=gpu,
        idle=said.get("State", "").startswith("IDLE"),
    )


def _gpus(gres: str) -> tuple[int, str]:
    """Return the number and type of a node's GPUs; of several types the one that it has most of."""
    counts: dict[str, int] = {}
    for match in re.finditer(r"(?:^|,)(?:gres/)?gpu(?::([^:,()=]*[^\d:,()=][^:,()=]*))?(?:[:=](\d+))?", gres):
        kind = match[1] or ""
        counts[kind] = counts.get(kind, 0) + int(match[2] or 1)
    return max(((count, kind) for kind, count in counts.items()), default=(0, ""))


def _narrowed(node: ClusterNode, settings: NodeChoice) -> ClusterNode:
    """Return the part of a node that a job with these settings gets."""
    count = _asked_gpus(settings)[0]
    cores = node.cores if settings.cpus is None else min(node.cores, settings.cpus)
    return replace(node, gpus=node.gpus if count is None else min(node.gpus, count), cores=cores)


def _asked_gpus(settings: NodeChoice) -> tuple[int | None, str]:
    """Return the number and the type of GPUs per node that the settings ask for; None where they do not say."""
    if settings.gpus is None:
        return None, ""
    kind, _, count = settings.gpus.rpartition(":")
    return (int(count), kind) if count.isdigit() else (1, settings.gpus)


def _too_small(node: ClusterNode, settings: NodeChoice) -> str:
    count, kind = _asked_gpus(settings)
    if count and (node.gpus < count or (kind and kind != node.gpu)):
        return f"it has {node.gpus} GPUs {node.gpu}".rstrip() + f", and gpus={settings.gpus}"
    if settings.cpus is not None and node.cores < settings.cpus:
        return f"it has {node.cores} cores, and cpus={settings.cpus}"
    return ""


def _seconds(text: str) -> float | None:
    """Return a time of Slurm, such as 1-12:00:00 or 30:00, in seconds; None for no limit."""
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in parts) or (dash and not days.isdigit()):
        return None
    if dash:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = [*map(int, parts), 0, 0][:3]
    else:  # minutes, minutes:seconds or hours:minutes:seconds
        hours, minutes, seconds = ([0, *map(int, parts), 0] if len(parts) < 3 else [*map(int, parts)])[:3]
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)
