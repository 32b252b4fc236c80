"""Plans for the nodes that a scheduler tells of: which of its pools suits a model best, and how many nodes."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tutti.clusters.cluster_resources import ClusterNode, HeterogeneousJobs, NodeInventory, NodePool, NodeRequest
from tutti.clusters.profile_file import HardwareFacts, read_profile
from tutti.clusters.schedulers import ALIASES, scheduler_for
from tutti.commands.on_nodes import cluster_settings
from tutti.commands.plan_options import PlanOptions
from tutti.commands.planned import Planned, PoolPlan
from tutti.config import serialization
from tutti.config.cluster import ClusterSpec, DeviceSpec, LinkSpec, NodeSpec
from tutti.errors import LaunchError, PlanError, SpecError

if TYPE_CHECKING:
    from tutti.planner import Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOffer:
    """Equal nodes of a pool, or those of a job of several kinds, and what they are for the planner.

    Attributes:
        pool: from which they are.
        requests: of a job of several kinds of nodes, in the order of its nodes; it has exactly these.
        nodes: as the scheduler tells of them.
        machines: for the planner, as many as a job may get; None where too little is known.
        reason: why they cannot be planned for.
        notes: where values come from, and what is not known.
    """

    pool: NodePool
    nodes: tuple[ClusterNode, ...]
    requests: tuple[NodeRequest, ...] = ()
    machines: ClusterSpec | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()


def checked_plan_on(options: PlanOptions) -> PlanOptions:
    """Check the options of `tutti plan --on`, and return them; hosts mean ssh.

    Raises:
        LaunchError: one does not go with it, or needs it.
    """
    if options.on is None and options.hosts is not None:
        options = replace(options, on="ssh")
    if options.on is None:
        given = {
            "--nnodes": options.nnodes, "--request": options.requests or options.settings, "--links": options.links,
            "--price": options.prices,
        }  # fmt: skip
        name = next((name for name, value in given.items() if value), None)
        if name is not None:
            raise LaunchError(f"{name} is for the nodes of a cluster; add --on slurm, or leave it out")
        return options
    if options.cluster is not None:
        raise LaunchError(f"--on {options.on} asks the cluster what it has, and --cluster says it; leave one out")
    if options.tries is not None or options.share_device:
        name = "--share-device" if options.share_device else "--try"
        raise LaunchError(f"{name} is for this machine, and --on is {options.on}; leave one out")
    if options.explain or options.plan is not None:
        name = "--plan" if options.plan is not None else "--explain"
        raise LaunchError(
            f"{name} explains a plan for described machines, and --on is {options.on}; write the plan with --output, "
            "and explain that"
        )
    return options


def offers(options: PlanOptions) -> tuple[NodeOffer, ...]:
    """Ask a cluster what it has, and return it as the planner sees it.

    Raises:
        LaunchError: there is no such scheduler, it does not tell of its nodes, or it does not answer.
    """
    assert options.on is not None
    on = ALIASES.get(options.on, options.on)
    scheduler = scheduler_for(on)
    if not isinstance(scheduler, NodeInventory):
        raise LaunchError(f"--on {on}: that does not tell what its cluster has; describe it with --cluster")
    settings = {**cluster_settings(on, options.requests, options.hosts), **options.settings}
    facts = _facts(read_profile(Path.cwd()).hardware, options)
    if isinstance(scheduler, HeterogeneousJobs) and scheduler.kinds(settings):
        scheduler.nodes(settings, options.nnodes)
        return (_job_offer(on, scheduler.requests(settings), facts),)
    found = []
    for pool in scheduler.pools(settings):
        kinds: dict[object, list[ClusterNode]] = {}
        for node in pool.nodes[: options.nnodes] if pool.whole else pool.nodes:
            kinds.setdefault(None if pool.whole else node.kind, []).append(node)
        found += [_offer(on, pool, tuple(nodes), facts, options.nnodes) for nodes in kinds.values()]
        if not kinds:
            found.append(NodeOffer(pool=pool, nodes=(), reason=pool.closed or _nothing_usable(pool)))
    return tuple(found)


def _facts(told: HardwareFacts, options: PlanOptions) -> HardwareFacts:
    """Return what is told of the hardware: on the command line, or else in tutti.toml."""
    links = told.links if options.links is None else options.links
    return HardwareFacts(gpus=told.gpus, links=links, prices={**told.prices, **dict(options.prices)})


def _nothing_usable(pool: NodePool) -> str:
    return "none of its nodes can be used" if pool.absent else "it has no nodes"


def _offer(
    on: str, pool: NodePool, nodes: tuple[ClusterNode, ...], facts: HardwareFacts, nnodes: int | None
) -> NodeOffer:
    """Return equal nodes of a pool as the planner sees them, or why it cannot."""
    found = NodeOffer(pool=pool, nodes=nodes, notes=pool.notes)
    if pool.closed:
        return replace(found, reason=pool.closed)
    most = min(len(nodes), pool.most_nodes or len(nodes))
    if nnodes is not None and nnodes > most:
        has = f"one job gets at most {most}" if most < len(nodes) else f"it has {most} such nodes"
        return replace(found, reason=f"--nnodes {nnodes}: {has}")
    measured = _measured(pool, nodes, nnodes or most, facts)
    if measured is not None:
        machines, words = measured
        return replace(found, machines=machines, notes=(*found.notes, words))
    try:
        if all(node.name in pool.probed for node in nodes):
            machines, notes = _from_own_probes(on, pool, nodes, facts)
        elif len({node.kind for node in nodes}) > 1:
            raise PlanError(f"its nodes differ, and were never measured: `tutti probe --on {on}` does it")
        else:
            count = nnodes or most
            probe = _probe_of(on, pool, nodes[0], count)
            machines, notes = _from_data_sheets(
                pool, nodes[0], count, facts, probe, stated=nnodes is not None and count > 1
            )
    except (SpecError, PlanError) as error:
        return replace(found, reason=str(error))
    return replace(found, machines=replace(machines, name=pool.name or on), notes=(*found.notes, *notes))


def _job_offer(on: str, requests: tuple[NodeRequest, ...], facts: HardwareFacts) -> NodeOffer:
    """Return the nodes of a job of several kinds as the planner sees them, or why it cannot."""
    limits = [each.pool.time_limit_s for each in requests if each.pool.time_limit_s is not None]
    nodes = {node.name: node for each in requests for node in each.pool.nodes}
    pool = NodePool(
        name=" + ".join(each.pool.name for each in requests),
        nodes=tuple(nodes.values()),
        absent={name: why for each in requests for name, why in each.pool.absent.items() if name not in nodes},
        time_limit_s=min(limits, default=None),
    )
    found = NodeOffer(pool=pool, nodes=pool.nodes, requests=requests)
    try:
        for each in requests:
            _check_request(each)
        count = sum(each.count for each in requests)
        if count > len(nodes):  # components of a job have no node in common
            raise PlanError(f"the job asks for {count} nodes, and {len(nodes)} serve it; ask for fewer")
        machines, notes = _measured_job(requests, facts) or _job_by_data_sheets(on, requests, facts)
    except (SpecError, PlanError) as error:
        return replace(found, reason=str(error))
    return replace(found, machines=replace(machines, name=pool.name), notes=tuple(notes))


def _check_request(request: NodeRequest) -> None:
    """Check that a part of a job gets nodes of one kind.

    Raises:
        PlanError: it gets none, or nobody knows which.
    """
    pool, name = request.pool, f"{request.name} ({request.pool.name})"
    if pool.closed:
        raise PlanError(f"{name}: {pool.closed}")
    most = min(len(pool.nodes), pool.most_nodes or len(pool.nodes))
    if request.count > most:
        why = [f"{node}: {reason}" for node, reason in list(pool.absent.items())[:3]]
        has = f"one job gets at most {most}" if most < len(pool.nodes) else f"it has {most} such nodes"
        raise PlanError(f"{name} asks for {request.count} nodes, and {has}" + (f" ({'; '.join(why)})" if why else ""))
    kinds = list({node.kind: node for node in pool.nodes}.values())
    if len(kinds) > 1:
        raise PlanError(
            f"{name} may get nodes of several kinds ({_described(kinds[:1])}; {_described(kinds[1:2])}); narrow it "
            "with gpus, constraint or nodelist"
        )
    node = pool.nodes[0]
    if request.ranks is None and not node.gpus:
        raise PlanError(f"{name} asks for no GPUs, so its ranks are not known; give it gpus, or ranks on its cores")
    if request.ranks is not None and node.gpus and request.ranks > node.gpus:
        raise PlanError(f"{name} has {request.ranks} ranks and {node.gpus} GPUs per node; give each rank one")


def _measured_job(requests: Sequence[NodeRequest], facts: HardwareFacts) -> tuple[ClusterSpec, list[str]] | None:
    """Return the nodes of a job of which some of each part were measured together; None if none were."""
    from tutti.profile.probe.cluster_cache import clusters_within

    names = {node.name for each in requests for node in each.pool.nodes}
    for cluster in clusters_within(tuple(names)):
        conditions = cluster.conditions
        found = _as_measured(cluster, requests, facts)
        if found is None or conditions is None:
            continue
        words = f"measured on {_few(list(conditions.hosts))} at {conditions.measured_utc}"
        words += "" if set(conditions.hosts) == names else f"; the others of {len(names)} are taken to be equal"
        return found, [words]
    return None


def _as_measured(cluster: ClusterSpec, requests: Sequence[NodeRequest], facts: HardwareFacts) -> ClusterSpec | None:
    """Return the nodes of a job as some of each part were measured; None where some part was not, or in another way.

    Equal nodes are taken to be as fast as the slowest of them that was measured.
    """
    hosts = () if cluster.conditions is None else cluster.conditions.hosts
    every = [node for node in cluster.nodes for _ in range(node.count)]
    joined = cluster.link("network") is not None or sum(each.count for each in requests) == 1
    if len(every) != len(hosts) or not joined:
        return None
    by_host = dict(zip(hosts, every, strict=True))
    specs, devices = list[NodeSpec](), dict[str, DeviceSpec]()
    for each in requests:
        first = each.pool.nodes[0]
        known = [by_host[node.name] for node in each.pool.nodes if node.name in by_host]
        if not known:
            return None
        spec = min(known, key=lambda node: _peak(cluster.devices[node.device]))
        device, ranks, count = cluster.devices[spec.device], each.ranks or first.gpus, spec.devices_per_node
        if device.kind != "cpu":
            count = min(first.gpus, count)
            if ranks > count:
                return None
        key = _device_key(devices, _priced(device, each.pool, first.gpu, facts), each)
        specs.append(replace(spec, name=each.name, device=key, count=each.count, devices_per_node=count, ranks=ranks))
    return replace(cluster, devices=devices, nodes=tuple(specs))


def _device_key(devices: dict[str, DeviceSpec], device: DeviceSpec, request: NodeRequest) -> str:
    """Add a device, and return its name; one that differs from another of its name in price gets a name of its own."""
    if devices.get(device.name, device) != device:
        device = replace(device, name=f"{device.name}, {request.name}")
    devices[device.name] = device
    return device.name


def _job_by_data_sheets(
    on: str, requests: Sequence[NodeRequest], facts: HardwareFacts
) -> tuple[ClusterSpec, list[str]]:
    """Return the nodes of a job with known GPUs, and what is not known of them.

    Raises:
        PlanError: too little is known for a plan.
    """
    told = all(each.ranks is not None for each in requests)
    probe = f"`tutti probe --on {on}{'' if told else ' --nproc 2'}`"
    devices, specs, notes = dict[str, DeviceSpec](), list[NodeSpec](), list[str]()
    several = sum(each.count for each in requests) > 1
    links: list[tuple[LinkSpec, ...]] = []
    for each in requests:
        node = each.pool.nodes[0]
        try:
            own, said = _from_data_sheets(each.pool, node, each.count, facts, probe, stated=several)
        except (SpecError, PlanError) as error:
            raise PlanError(f"{each.name} ({each.pool.name}): {error}") from None
        key = _device_key(devices, own.devices[own.nodes[0].device], each)
        specs.append(replace(own.nodes[0], name=each.name, device=key, ranks=each.ranks or node.gpus))
        links.append(own.links)
        notes += [f"{each.name}: {words}" for words in said]
    if len(set(links)) > 1:
        specs = [replace(spec, links=own) for spec, own in zip(specs, links, strict=True)]
    shared = links[0] if len(set(links)) == 1 else ()
    return ClusterSpec(name=on, devices=devices, nodes=tuple(specs), links=shared), notes


def _measured(
    pool: NodePool, nodes: tuple[ClusterNode, ...], count: int, facts: HardwareFacts
) -> tuple[ClusterSpec, str] | None:
    """Return nodes of which some were measured before, and what was measured; None if none were.

    Equal nodes are taken to be as fast as those of them that were measured.
    """
    from tutti.profile.probe.cluster_cache import clusters_within

    names = [node.name for node in nodes]
    for cluster in clusters_within(names):
        conditions = cluster.conditions
        assert conditions is not None
        hosts = conditions.hosts
        every = sum(node.count for node in cluster.nodes)
        exact = len(hosts) == count and set(hosts) == set(names)
        scaled = len(cluster.nodes) == 1 and every == len(hosts) and (count == 1 or cluster.link("network") is not None)
        if not (exact or scaled):
            continue
        node = cluster.nodes[0]
        if not exact:
            devices = min(node.devices_per_node, nodes[0].gpus) if nodes[0].gpus else node.devices_per_node
            cluster = replace(cluster, nodes=(replace(node, count=count, devices_per_node=devices),))
        kinds = {name: _priced(device, pool, nodes[0].gpu, facts) for name, device in cluster.devices.items()}
        words = f"measured on {_few(list(hosts))} at {conditions.measured_utc}"
        words += "" if set(hosts) == set(names) else f"; the others of {len(names)} are taken to be equal"
        return replace(cluster, name=pool.name or cluster.name, devices=kinds), words
    return None


def _from_own_probes(
    on: str, pool: NodePool, nodes: tuple[ClusterNode, ...], facts: HardwareFacts
) -> tuple[ClusterSpec, list[str]]:
    """Return nodes of which each has measured itself; equal devices count as fast as the slowest.

    Raises:
        PlanError: what joins them is not known, or a measurement cannot be read.
    """
    from tutti.profile.probe.cluster_cache import outdated
    from tutti.profile.probe.host_facts import versions

    devices, specs = dict[str, DeviceSpec](), list[NodeSpec]()
    for host in nodes:
        try:
            own = serialization.loads(ClusterSpec, pool.probed[host.name], source=f"the probe of {host.name}")
        except SpecError as error:
            raise PlanError(f"{error}; measure it again: `tutti probe --on {on}`") from None
        changed = outdated(own, {name: text for name, text in versions().items() if name == "torch"})
        if changed:
            raise PlanError(
                f"the probe of {host.name} counts no more ({changed}); measure anew: `tutti probe --on {on}`"
            )
        spec, links = own.nodes[0], tuple(link for link in own.links if link.tier == "node")
        device = _priced(own.devices[spec.device], pool, host.gpu, facts)
        slowest = devices.get(device.name)
        if slowest is None or _peak(device) < _peak(slowest):
            devices[device.name] = device
        count = min(spec.devices_per_node, host.gpus) if host.gpus else spec.devices_per_node
        specs.append(replace(spec, name=host.name, device=device.name, devices_per_node=count, links=links))
    network = tuple(link for link in _links(pool, nodes[0].gpu, facts) if link.tier == "network")
    if len(nodes) > 1 and not network:
        raise PlanError(
            f"each of them was measured alone, so what joins them is not known; measure it: `tutti probe --on {on}`, "
            "or say it, such as --links ethernet-10g"
        )
    first = specs[0]
    if all((spec.device, spec.devices_per_node) == (first.device, first.devices_per_node) for spec in specs):
        least = min(spec.memory_nbytes for spec in specs)
        specs = [replace(first, name="node", count=len(specs), memory_nbytes=least)]
    words = f"measured by each of {_few([host.name for host in nodes])}; what joins them is as told"
    return ClusterSpec(name=pool.name or on, devices=devices, nodes=tuple(specs), links=network), [words]


def _peak(device: DeviceSpec) -> float:
    return max(device.peak_flops_per_s.values())


def _probe_of(on: str, pool: NodePool, node: ClusterNode, count: int) -> str:
    """Return the command that measures such nodes, as messages name it."""
    requests = ",".join(filter(None, (pool.request, f"gpus={node.gpus}" if node.gpus and on != "ssh" else "")))
    request = f" --request {requests}" if requests else ""
    return f"`tutti probe --on {on}{request} --nodes {min(count, 2)} --nproc {node.gpus or 2}`"


def _from_data_sheets(
    pool: NodePool, node: ClusterNode, count: int, facts: HardwareFacts, probe: str, *, stated: bool
) -> tuple[ClusterSpec, list[str]]:
    """Return so many equal nodes with known GPUs, and what is not known of them.

    Args:
        pool: from which they are.
        node: one of them.
        count: of them.
        facts: what is told of the hardware.
        probe: the command that measures them.
        stated: whether they are to be used together with others, so that what joins nodes has to be known.

    Raises:
        PlanError: too little is known for a plan.
    """
    notes = list[str]()
    if not node.gpus:
        raise PlanError(f"how fast its cores are is not known; measure them: {probe}")
    device = _device(node.gpu, facts, notes, probe)
    links = _links(pool, node.gpu, facts)
    tiers = {link.tier: link for link in links}
    if node.gpus > 1 and "node" not in tiers:
        raise PlanError(
            f"what joins the {node.gpus} GPUs of a node is not known; say it, such as --links nvlink3,8*ib-hdr, or "
            f"measure it: {probe}"
        )
    if (count > 1 or stated) and "network" not in tiers:
        if stated:
            raise PlanError(
                f"what joins its nodes is not known; say it, such as --links nvlink3,8*ib-hdr, or measure it: {probe}"
            )
        notes.append("one node only, as what joins the nodes is not known; say it with --links, or measure it")
        count = 1
    memory = node.memory_nbytes
    if memory is None:
        notes.append("the memory of its hosts is not known, and counted as that of their GPUs")
        memory = node.gpus * device.memory_nbytes
    device = _priced(device, pool, node.gpu, facts)
    spec = NodeSpec(
        name="node", device=device.name, devices_per_node=node.gpus, count=count, memory_nbytes=memory, cores=node.cores
    )
    notes.append(f"GPUs by data sheet, {device.name}")
    return ClusterSpec(name=pool.name, devices={device.name: device}, nodes=(spec,), links=links), notes


def _device(gpu: str, facts: HardwareFacts, notes: list[str], probe: str) -> DeviceSpec:
    """Return the device of the catalogue that a cluster's name of a kind of GPU means.

    Raises:
        PlanError: none has that name.
    """
    from tutti.profile.catalog import device, devices_called

    if gpu in facts.gpus:
        return device(facts.gpus[gpu])
    known = devices_called(gpu)
    if not known:
        what = f"GPUs called {gpu!r} are" if gpu else "the kind of its GPUs is"
        raise PlanError(
            f"{what} not known; name their device in tutti.toml, such as `[hardware] gpus = {{ {gpu or 'gpu'!r} = "
            f'"A100-SXM4-80GB" }}`, or measure them: {probe}'.replace("'", '"')
        )
    if len(known) > 1:
        names = _few([spec.name for spec in known])
        notes.append(f"{gpu} may be {names}: counted as the first; name one in [hardware] gpus of tutti.toml")
    return known[0]


def _links(pool: NodePool, gpu: str, facts: HardwareFacts) -> tuple[LinkSpec, ...]:
    from tutti.profile.catalog.text_models import links_from_text

    if isinstance(facts.links, str):
        return links_from_text(facts.links)
    return links_from_text(facts.links.get(pool.name) or facts.links.get(gpu) or "")


def _priced(device: DeviceSpec, pool: NodePool, gpu: str, facts: HardwareFacts) -> DeviceSpec:
    """Return the device with its price, if one is told."""
    for name in (pool.name, gpu, device.name):
        if name and name in facts.prices:
            return replace(device, price_per_device_hour=facts.prices[name])
    return device


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def best_of_pools(found: Sequence[NodeOffer], nnodes: int | None, plan_on: Callable[[ClusterSpec], Planned]) -> Planned:
    """Plan for each pool, and return the best plan with those of all pools, the best first.

    Args:
        found: what the cluster has.
        nnodes: number of nodes that is asked for; None where the planner chooses.
        plan_on: searches the best plan for machines.

    Raises:
        PlanError: there is no plan for any; the message says why for each.
    """
    known: dict[str, Planned | str] = {}
    plans: list[tuple[Planned | None, PoolPlan]] = []
    for offer in found:
        planned: Planned | str = offer.reason
        if offer.machines is not None:
            text = serialization.dumps(replace(offer.machines, name=""))
            if text not in known:
                known[text] = _tried(offer.machines, plan_on)
            planned = known[text]
        result = planned if isinstance(planned, Planned) else None
        plans.append((result, _pool_plan(offer, planned, nnodes)))
    ranked = [(each, plan) for each, plan in plans if each is not None]
    if not ranked:
        rows = [f"{plan.pool or 'the cluster'} ({plan.nodes_are}): {plan.reason}" for _, plan in plans]
        raise PlanError("\n".join(["no nodes that can be planned for:", *rows] if rows else ["it has no nodes"]))
    ranked.sort(key=lambda pair: _value(pair[0].choice))
    left = tuple(plan for each, plan in plans if each is None)
    return replace(ranked[0][0], pools=(*(plan for _, plan in ranked), *left))


def _tried(machines: ClusterSpec, plan_on: Callable[[ClusterSpec], Planned]) -> Planned | str:
    try:
        return plan_on(machines)
    except PlanError as error:
        return str(error)


def _value(choice: "Choice") -> float:
    """Return what the objective compares; less is better."""
    totals, objective = choice.totals, choice.request.objective
    if objective == "memory":
        return choice.prediction.memory.total
    values: Mapping[str, float | None] = {}
    if totals is not None:
        values = {
            "cost": totals.cost, "device-hours": totals.device_hours, "energy": totals.energy_kwh,
            "time-to-quality": totals.time_s,
        }  # fmt: skip
    value = values.get(objective)
    return choice.prediction.step_time_s.value if value is None else value


def _pool_plan(offer: NodeOffer, planned: Planned | str, nnodes: int | None) -> PoolPlan:
    pool = offer.pool
    row = PoolPlan(
        pool=pool.name,
        nodes_are=_described_job(offer.requests) if offer.requests else _described(offer.nodes),
        node_names=tuple(node.name for node in offer.nodes),
        idle=None if any(node.idle is None for node in offer.nodes) else sum(bool(node.idle) for node in offer.nodes),
        absent=dict(pool.absent),
        request=pool.request,
        time_limit_s=pool.time_limit_s,
        notes=offer.notes,
    )
    if isinstance(planned, str):
        return replace(row, reason=planned)
    assert offer.machines is not None
    per_node = [node.ranks or node.devices_per_node for node in offer.machines.nodes for _ in range(node.count)]
    nproc, left = list[int](), planned.plan.world_size
    for devices in per_node:
        nproc += [min(devices, left)] if left > 0 else []
        left -= devices
    if left > 0:  # ranks of one host share a CPU
        each = math.ceil(planned.plan.world_size / len(per_node))
        nproc = [min(each, planned.plan.world_size - each * at) for at in range(len(per_node))]
    totals = planned.choice.totals
    return replace(
        row,
        plan=planned.plan,
        nproc=tuple(count for count in nproc if count > 0),
        gpus=offer.nodes[0].gpus > 0 and not offer.requests,  # a job of several kinds says so itself
        step_time_s=planned.choice.prediction.step_time_s.value,
        steps=None if totals is None else totals.steps,
        time_s=None if totals is None or totals.steps is None else totals.time_s,
        cost=None if totals is None else totals.cost,
    )


def _described(nodes: Sequence[ClusterNode]) -> str:
    if not nodes:
        return "no nodes"
    first, count = nodes[0], len(nodes)
    gpus = f"{first.gpus} {first.gpu or 'GPUs'}, " if first.gpus else ""
    memory = f", {first.memory_nbytes / 2**30:.0f} GiB" if first.memory_nbytes else ""
    return f"{count} node{'s' if count > 1 else ''} of {gpus}{first.cores} cores{memory}"


def _described_job(requests: Sequence[NodeRequest]) -> str:
    return " + ".join(_described(each.pool.nodes[:1] * each.count) for each in requests)
