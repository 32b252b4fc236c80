"""`tutti probe`: measures this machine or a cluster, or writes a cluster's description from data sheets."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from tutti.cli.options import emit, hosts_option, json_option, request_option
from tutti.cli.submit import default_launcher
from tutti.commands.messages import console
from tutti.commands.probe import (
    ProbeOptions,
    check_plot,
    described,
    kept,
    measured,
    measured_by_ranks,
    probe_words,
)
from tutti.config import serialization
from tutti.config.cluster import ClusterSpec
from tutti.config.option_syntax import BYTES, parse_quantity
from tutti.errors import LaunchError, SpecError


def _nbytes(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """Parse "512GiB" or "512GB" into bytes."""
    if text is None:
        return None
    size = None if text.strip()[-1:].isdecimal() else parse_quantity(text, BYTES)
    if size is not None:
        return int(size)
    raise click.BadParameter(f"{text!r} is not a size; write it as 512GiB or 512GB")


@click.command()
@click.option("--quick", is_flag=True, help="About 25 seconds on 2 cores: fewer sizes and repeats.")
@click.option("--nproc", type=click.IntRange(1), help="Number of processes to measure with on this host.")
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="The ClusterSpec file to write.")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="The plot to write (.svg, .png, .pdf).")
@click.option("--no-plot", is_flag=True, help="Write no plot.")
@click.option("--list", "show_parts", is_flag=True, help="List the devices and links of the catalogue.")
@click.option(
    "--device",
    help="Describe a cluster of this device from data sheets, measuring nothing; or one given in a line, such as "
    "4x8:a100-80gb,nvlink3,8*ib-hdr.",
)
@click.option("--devices-per-node", type=click.IntRange(1), default=1, show_default=True)
@click.option("--nodes", "-N", type=click.IntRange(1), help="Number of nodes; 1, or all --hosts, if not given.")
@click.option("--node-rank", type=click.IntRange(0), default=0,
              help="With --rendezvous: the number of this node, from 0.")  # fmt: skip
@click.option("--rendezvous", metavar="HOST:PORT",
              help="Where several nodes that run this together meet: node 0's host and a free port there.")  # fmt: skip
@click.option("--node-link", help="What joins the devices of a node, such as NVLink3.")
@click.option("--network", help="What joins the nodes, such as InfiniBand-HDR-200.")
@click.option("--network-ports", type=click.IntRange(1), default=1, show_default=True, help="Ports of each node.")
@click.option("--node-memory", callback=_nbytes, metavar="SIZE", help="Memory of each host; its devices' if not given.")
@click.option("--host-link", help="What joins each device and its host, such as PCIe3-x16, for plans that offload.")
@click.option(
    "--nvme-path",
    type=click.Path(path_type=Path, file_okay=False),
    help="An existing folder whose disk is measured, for plans that keep optimizer state there.",
)
@click.option("--on", metavar="NAME", help="On whose nodes to measure, with --nodes: slurm, ssh or kubernetes.")
@request_option
@hosts_option
@click.option("--send", is_flag=True, hidden=True)
@json_option
def command(on: str | None, requests: tuple[str, ...], hosts: str | None, send: bool, **given: Any) -> None:
    """Measure this machine: matrix products, memory, links between ranks, disk.

    Started on several ranks (torchrun, srun, mpirun), or on several nodes with --rendezvous, it measures all of their
    hosts and the network between them. With --device it measures nothing and describes a cluster from data sheets. The
    result of measuring this machine is kept for `tutti plan` and `tutti run`. With --on slurm, Slurm is asked for
    --nodes nodes, and these are measured; with --hosts, hosts over ssh are.
    """
    options = ProbeOptions(**given)
    on = on or (None if hosts is None else default_launcher(hosts))
    if on is not None:
        sys.exit(_measure_on(on, options, requests, hosts))
    if requests:
        raise LaunchError("--request is for the nodes of a cluster; add --on slurm, or leave it out")
    if options.show_parts:
        _show_parts(options)
        return
    if options.rendezvous is not None:
        sys.exit(measured_by_ranks(options, send=send))
    result = measured(options) if options.device is None else described(options, options.device)
    if result is not None and send:
        from tutti.commands.on_nodes import SENT

        print(f"{SENT}{json.dumps(serialization.to_data(result.cluster))}", flush=True)
    elif result is not None:
        _finish(options, result.cluster, options.output or result.file)


def _measure_on(on: str, options: ProbeOptions, requests: tuple[str, ...], hosts: str | None) -> int:
    """Measure nodes of a cluster, and return the exit code."""
    from tutti.clusters.cluster_job import NodeCommand
    from tutti.commands.on_nodes import names_ranks, run_on_nodes, sends_to

    sends = sends_to(on)
    if options.nproc is None and on != "ssh" and not names_ranks(on, requests):
        raise LaunchError(f"--on {on}: say how many ranks each node has: add --nproc N")
    if options.device is not None or options.show_parts:
        raise LaunchError(f"--on {on} measures nodes, and --device and --list measure nothing; leave one out")
    if sends and options.plot is not None:
        check_plot(options.plot)
    own = replace(options, output=None, plot=None, as_json=False) if sends else options
    words = ("probe", *probe_words(own), *(("--send",) if sends else ()))
    asked = NodeCommand(words=words, nodes=options.nodes, nproc=options.nproc, numbered="--nodes")
    done = run_on_nodes(asked, on=on, requests=requests, hosts=hosts, tasks_per_node=options.nproc)
    if done.sent:
        _finish(options, kept(done.sent, done.nodes), options.output or Path("cluster.json"))
    return done.code


def _show_parts(options: ProbeOptions) -> None:
    from tutti.profile.catalog import parts

    if options.as_json:
        emit(parts())
        return
    from tutti.cli.cluster_view import parts_tables

    _print(parts_tables(parts().devices, parts().links))


def _finish(options: ProbeOptions, cluster: ClusterSpec, output: Path) -> None:
    """Write the spec and its plot; print the spec as JSON or as tables."""
    try:
        serialization.save(cluster, output)
    except OSError as error:
        raise SpecError(f"{output} cannot be written ({error.strerror}); choose another --output") from None
    picture = None if options.no_plot or not _measured(cluster) else options.plot or output.with_suffix(".svg")
    if picture is not None:
        from tutti.cli.cluster_view import plot_cluster

        plot_cluster(cluster, picture)
    if options.as_json:
        emit(cluster)
    else:
        from tutti.cli.cluster_view import cluster_tables

        _print(cluster_tables(cluster))
    console.print(f"written: {output}" + (f", {picture}" if picture is not None else ""), soft_wrap=True)


def _measured(cluster: ClusterSpec) -> bool:
    return any(device.gemm for device in cluster.devices.values())


def _print(renderables: Iterator[Any]) -> None:
    """Print tables on standard output."""
    from tutti.terminal import results_console

    out = results_console()
    for renderable in renderables:
        out.print(renderable)
        out.print()
