"""`tutti.probe`: measures this machine or a cluster, or describes a cluster from data sheets."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from tutti.commands.inputs import write_spec
from tutti.commands.messages import console, messages, warn
from tutti.commands.values import StrPath, path_of, size_of, whole
from tutti.config import serialization
from tutti.config.cluster import ClusterSpec, DiskSpec
from tutti.errors import LaunchError, SpecError

_REST_S = 5.0


def probe(
    *,
    quick: bool = False,
    nproc: int | None = None,
    device: str | None = None,
    devices_per_node: int = 1,
    nodes: int = 1,
    node_link: str | None = None,
    network: str | None = None,
    network_ports: int = 1,
    node_memory: str | float | None = None,
    host_link: str | None = None,
    nvme_path: StrPath | None = None,
    output: StrPath | None = None,
    verbose: bool = False,
) -> ClusterSpec | None:
    """Measure this machine: matrix products, memory, links between ranks, disk; or describe a cluster.

    The result of measuring this machine is kept for `tutti.plan` and `tutti.run`. With `device` nothing is measured.

    Args:
        quick: fewer sizes and repeats.
        nproc: number of processes to measure with on this host.
        device: describe a cluster of this device from data sheets, or one given in a line, such as
            "4x8:a100-80gb,nvlink3,8*ib-hdr".
        devices_per_node: devices of each node.
        nodes: number of nodes.
        node_link: what joins the devices of a node, such as "NVLink3".
        network: what joins the nodes, such as "InfiniBand-HDR-200".
        network_ports: ports of each node.
        node_memory: memory of each host, in bytes or such as "512GiB"; its devices' if None.
        host_link: what joins each device and its host, such as "PCIe3-x16", for plans that offload.
        nvme_path: an existing folder whose disk is measured, for plans that keep optimizer state there.
        output: write the ClusterSpec to this file.
        verbose: show on standard error what is measured.

    Returns:
        The cluster; None on ranks other than 0, where a launcher started several.

    Raises:
        TuttiError: what `tutti probe` would refuse, with the same sentence.

    Examples:
        >>> probe(device="4x8:a100-80gb,nvlink3,8*ib-hdr").device_count
        32
    """
    memory = size_of("node_memory", node_memory)
    options = ProbeOptions(
        quick=quick,
        nproc=whole("nproc", nproc),
        device=device,
        devices_per_node=whole("devices_per_node", devices_per_node) or 1,
        nodes=whole("nodes", nodes) or 1,
        node_link=node_link,
        network=network,
        network_ports=whole("network_ports", network_ports) or 1,
        node_memory=None if memory is None else int(memory),
        host_link=host_link,
        nvme_path=path_of("nvme_path", nvme_path),
    )
    with messages(shown=verbose):
        result = measured(options) if device is None else described(options, device)
        if result is None:
            return None
        path = path_of("output", output) or (result.file if device is None else None)
        if path is not None:
            write_spec(result.cluster, path)
        return result.cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    """What `tutti probe` is asked for; `tutti.probe` says what each option means."""

    quick: bool = False
    nproc: int | None = None
    output: Path | None = None
    plot: Path | None = None
    no_plot: bool = False
    show_parts: bool = False
    device: str | None = None
    devices_per_node: int = 1
    nodes: int | None = None
    node_rank: int = 0
    rendezvous: str | None = None
    node_link: str | None = None
    network: str | None = None
    network_ports: int = 1
    node_memory: int | None = None
    host_link: str | None = None
    nvme_path: Path | None = None
    as_json: bool = False


class Probed(NamedTuple):
    """A cluster, and the file that it is written to if nobody names another."""

    cluster: ClusterSpec
    file: Path


def described(options: ProbeOptions, device: str) -> Probed:
    """Describe a cluster of a device from data sheets."""
    from tutti.profile.catalog import cluster_from_parts
    from tutti.profile.catalog.text_models import cluster_from_text, is_cluster_text

    if is_cluster_text(device):
        return Probed(cluster_from_text(device), Path("cluster.json"))
    if options.nvme_path is not None:
        raise SpecError("nvme_path with device: nothing is measured; write nvme of the node into the cluster file")
    nodes = options.nodes or 1
    name = f"{nodes} x {options.devices_per_node} x {device}"
    cluster = cluster_from_parts(
        name,
        device,
        devices_per_node=options.devices_per_node,
        nodes=nodes,
        node_link=options.node_link,
        network=options.network,
        network_ports=options.network_ports,
        node_memory_nbytes=options.node_memory,
        host_link=options.host_link,
    )
    return Probed(cluster, Path(f"cluster-{nodes}x{options.devices_per_node}-{device}.json"))


def measured(options: ProbeOptions) -> Probed | None:
    """Measure this machine, or together with the ranks that a launcher started; None on ranks other than 0."""
    from tutti.environment import read_rank_environment
    from tutti.profile.probe import cached_cluster_path, measure

    if options.plot is not None:
        check_plot(options.plot)
    place = read_rank_environment()
    if place.world_size > 1:
        return _measure_with_all_ranks(options)
    disk = _disk(options)
    with _progress() as say:
        cluster = measure(quick=options.quick, ranks=options.nproc, progress=say)
    return Probed(_with_disk(cluster, [disk]), cached_cluster_path())


def _disk(options: ProbeOptions) -> DiskSpec | None:
    """Measure the disk of this host that plans may keep optimizer state on, if one is named."""
    from tutti.profile.probe import FULL, QUICK
    from tutti.profile.probe.memory_rates import measure_disk

    effort = QUICK if options.quick else FULL
    return None if options.nvme_path is None else measure_disk(options.nvme_path, 4 * effort.disk_nbytes)


def _with_disk(cluster: ClusterSpec, disks: list[DiskSpec | None]) -> ClusterSpec:
    """Return the cluster with the slowest and fullest of its hosts' disks on every node."""
    known = [disk for disk in disks if disk is not None]
    if not known:
        return cluster
    disk = replace(
        known[0],
        nbytes=min(one.nbytes for one in known),
        read_bytes_per_s=min(one.read_bytes_per_s for one in known),
        write_bytes_per_s=min(one.write_bytes_per_s for one in known),
    )
    return replace(cluster, nodes=tuple(replace(node, nvme=disk) for node in cluster.nodes))


def _measure_with_all_ranks(options: ProbeOptions) -> Probed | None:
    """Measure with the ranks that a launcher started; only rank 0 returns the result."""
    from tutti.comm.world import join_world, leave_world
    from tutti.environment import node_name
    from tutti.profile.probe import FULL, QUICK, cached_cluster_path, of_nodes
    from tutti.profile.probe.rank_probe import measure_ranks

    world = join_world()
    try:
        with _progress(world.is_main) as say:
            effort = QUICK if options.quick else FULL
            cluster = measure_ranks(world.device, effort, folder=Path.cwd(), say=say, host=node_name())
            cluster = _with_disk(cluster, world.gather(_disk(options) if world.local_rank == 0 else None))
            hosts = world.gather(node_name())
    finally:
        leave_world()
    if not world.is_main:
        return None
    names = tuple(dict.fromkeys(hosts))
    cluster = of_nodes(cluster, names)
    _keep(cluster, names)
    one_host = len(cluster.nodes) == 1 and cluster.nodes[0].count == 1
    return Probed(cluster, cached_cluster_path() if one_host else Path("cluster.json"))


def probe_words(options: ProbeOptions) -> list[str]:
    """Return the arguments of `tutti probe` that say what to measure and what to write, not on which nodes."""
    paths = (("--output", options.output), ("--plot", options.plot), ("--nvme-path", options.nvme_path))
    words = [word for name, path in paths if path is not None for word in (name, str(path.resolve()))]
    flags = (("--quick", options.quick), ("--no-plot", options.no_plot), ("--json", options.as_json))
    return words + [name for name, is_set in flags if is_set]


def kept(text: str, names: Sequence[str]) -> ClusterSpec:
    """Keep what nodes have measured and sent, and return it.

    Args:
        text: a ClusterSpec, as JSON.
        names: of the nodes, as their cluster calls them.
    """
    from tutti.profile.probe import of_nodes

    cluster = of_nodes(serialization.loads(ClusterSpec, text, source="what the nodes have sent"), names)
    _keep(cluster, names)
    return cluster


def _keep(cluster: ClusterSpec, names: Sequence[str]) -> None:
    """Keep a measurement by the names of its nodes, for those that plan for them later."""
    from tutti.profile.probe import node_set_path

    try:
        serialization.save(cluster, node_set_path(names))
    except OSError as error:
        warn(f"{node_set_path(names)} cannot be written ({error.strerror}), so `tutti plan --on` will not find this")


def measured_by_ranks(options: ProbeOptions, *, send: bool) -> int:
    """Start the ranks of this node, which measure together with those of the others, and return the exit code.

    Args:
        options: with the number of nodes, this one's, and where they meet.
        send: rank 0 prints the result as one line instead of writing it.

    Raises:
        LaunchError: the number of ranks is missing, or the node's number is too high.
    """
    from tutti.launch.launch_environment import of_node, of_rank, variables
    from tutti.launch.launcher import LaunchSpec
    from tutti.launch.process_tree import end_with_parent

    nodes, nproc = options.nodes or 1, options.nproc
    if nproc is None or options.node_rank >= nodes or options.rendezvous is None:
        raise LaunchError(
            f"--rendezvous {options.rendezvous} lets {nodes} nodes measure together; add --nodes N, --node-rank below "
            "it and --nproc N"
        )
    spec = LaunchSpec(
        target="probe", folder=Path.cwd(), ranks_per_node=(nproc,) * nodes, node_rank=options.node_rank,
        rendezvous=options.rendezvous,
    )  # fmt: skip
    shared = of_node(spec, Path.cwd())
    for name in ("OMP_NUM_THREADS", "TUTTI_SUPERVISED", "TUTTI_RUN_FOLDER"):  # a probe takes threads as it needs them
        shared.pop(name)
    words = [sys.executable, "-m", "tutti.cli.main", "probe", *probe_words(options), *(["--send"] if send else [])]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for local in range(nproc):
            environment = {**variables(), **shared, **of_rank(options.node_rank * nproc + local, local)}
            ranks.append(subprocess.Popen(words, env=environment, preexec_fn=end_with_parent))
        while (codes := [rank.poll() for rank in ranks]).count(None) and not any(codes):
            time.sleep(0.05)
        deadline = time.monotonic() + _REST_S  # others notice by themselves that one is gone
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    code = next((code for code in codes if code), 0)
    return code if code >= 0 else 128 - code


def check_plot(path: Path) -> None:
    """Raise SpecError for a wrong suffix before anything is measured."""
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise SpecError(f"{path}: a plot is written as .svg, .png or .pdf; change the ending")


@contextmanager
def _progress(here: bool = True) -> Iterator[Callable[[str], None]]:
    """Show what is being measured on one line of standard error, if it is a terminal."""
    if not (here and console.is_terminal and not console.quiet):
        yield lambda text: None
        return
    with console.status("starting") as shown:
        yield lambda text: shown.update(f"measuring: {text}")
