"""A ClusterSpec for people: tables of its devices, links and nodes, with their evidence, and a plot."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tutti.config.cluster import ClusterSpec, CompressRate, DeviceSpec, GemmRate, LinkSpec, NodeSpec
from tutti.cost_model.rank_placement import link_of, message, ring_all_reduce
from tutti.errors import SpecError
from tutti.reporting.fitted_table import FittedTable


def cluster_tables(cluster: ClusterSpec) -> Iterator[RenderableType]:
    """Yield the tables and lines that describe a cluster, in order."""
    yield Text(f"cluster {cluster.name}", style="bold")
    yield _nodes(cluster.nodes)
    for device in cluster.devices.values():
        yield _device(device)
        yield _gemm(device) if device.gemm else _peaks(device)
        if device.compress_rates:
            yield _codes(device.compress_rates)
    if cluster.links:
        yield _links(cluster.links)
    for links in dict.fromkeys(node.links for node in cluster.nodes if node.links):
        hosts = ", ".join(_named(node) for node in cluster.nodes if node.links == links)
        yield _links(links, f"links of {hosts}, in place of the cluster's")
    if cluster.conditions is not None:
        seen = cluster.conditions
        versions = ", ".join(f"{name} {version}" for name, version in seen.versions.items())
        yield Text(
            f"measured {seen.measured_utc}; {seen.cores_granted} cores granted; load {seen.load_at_start:.2f} at the "
            f"start, {seen.load_at_end:.2f} at the end; {versions}"
        )
        for note in seen.notes:
            yield Text(f"note: {note}", style="yellow")


def _codes(rates: tuple[CompressRate, ...]) -> Table:
    """Return a table of the time per value of each codec, by number of values."""
    sizes = sorted({rate.numel for rate in rates})
    known = {(rate.method, rate.numel): rate for rate in rates}
    heads = [f"{size:,}" for size in sizes]
    table = _table("codecs: ns per value to encode + decode, by number of values", "method", *heads)
    for method in dict.fromkeys(rate.method for rate in rates):
        cells = []
        for size in sizes:
            rate = known.get((method, size))
            cells.append("" if rate is None else " + ".join(
                _significant(1e9 * seconds / size) for seconds in (rate.encode_s, rate.decode_s)
            ))  # fmt: skip
        table.add_row(method, *cells)
    return table


def parts_tables(devices: dict[str, DeviceSpec], links: dict[str, LinkSpec]) -> Iterator[RenderableType]:
    """Yield the tables of the catalogue: the names that --device, --node-link and --network accept."""
    dtypes = ("float64", "float32", "tf32", "bfloat16", "float16", "float8")
    table = _table("devices: dense peaks in TFLOP/s", "name", "GB", "GB/s", *dtypes, "year", "evidence")
    for name, device in devices.items():
        peaks = [
            _significant(device.peak_flops_per_s[d] / 1e12) if d in device.peak_flops_per_s else "" for d in dtypes
        ]
        memory = f"{device.memory_nbytes / 1e9:.0f}", f"{device.memory_bandwidth_bytes_per_s / 1e9:.0f}"
        table.add_row(name, *memory, *peaks, str(device.year or ""), device.evidence)
    yield table
    table = _table("links, in each direction", "name", "tier", "latency", "bandwidth", "evidence")
    for name, link in links.items():
        table.add_row(name, link.tier, time_text(link.latency_s), rate_text(link.bandwidth_bytes_per_s), link.evidence)
    yield table


def time_text(seconds: float) -> str:
    """Format seconds with a unit, to three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{_significant(seconds / size)} {unit}"
    return f"{_significant(seconds / 1e-9)} ns"


def rate_text(bytes_per_s: float) -> str:
    """Format a bandwidth with a unit, to three digits."""
    for unit, size in (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6)):
        if bytes_per_s >= size:
            return f"{_significant(bytes_per_s / size)} {unit}"
    return f"{_significant(bytes_per_s / 1e3)} kB/s"


def curves(rates: Iterable[GemmRate]) -> Iterator[tuple[tuple[str, int, int], list[GemmRate]]]:
    """Yield the rates grouped by (dtype, threads, concurrent processes), each group in order of N."""

    def key(rate: GemmRate) -> tuple[str, int, int]:
        return rate.dtype, rate.threads, rate.concurrent

    for name, group in groupby(sorted(rates, key=key), key=key):
        yield name, sorted(group, key=lambda rate: rate.n)


def _gemm(device: DeviceSpec) -> Table:
    rates = (*device.gemm, *device.gemm_concurrent)
    sizes = sorted({rate.n for rate in rates})
    cpu = device.kind == "cpu"
    heads = ("dtype", "threads", "processes") if cpu else ("dtype",)
    table = _table("matrix products: GFLOP/s of each process, by N", *heads, *map(str, sizes))
    for (dtype, threads, processes), curve in curves(rates):
        cells = {rate.n: _significant(rate.flops_per_s / 1e9) for rate in curve}
        name = (dtype, str(threads), str(processes)) if cpu else (dtype,)
        table.add_row(*name, *(cells.get(n, "") for n in sizes))
    return table


def _peaks(device: DeviceSpec) -> Table:
    table = _table(f"dense peak in TFLOP/s, {device.evidence}", *device.peak_flops_per_s)
    table.add_row(*(_significant(peak / 1e12) for peak in device.peak_flops_per_s.values()))
    return table


def _device(device: DeviceSpec) -> Text:
    lines = [
        f"{device.name} ({device.evidence}): {device.memory_nbytes / 1e9:.3g} GB, "
        f"{rate_text(device.memory_bandwidth_bytes_per_s)} memory bandwidth"
    ]
    for rate in device.memory_rates:
        at_once = f", {rate.concurrent} processes at once" if rate.concurrent > 1 else ""
        lines.append(
            f"  copying on {rate.threads} thread{'s' * (rate.threads > 1)}{at_once}: {rate_text(rate.bytes_per_s)}"
        )
    if device.kernel_overhead_s:
        lines.append(f"  one call of a tiny operator: {time_text(device.kernel_overhead_s)}")
    if device.launch_s:
        lines.append(f"  launch of a kernel: {time_text(device.launch_s)} of the host")
    lines.append(f"  {device.source}")
    return Text("\n".join(lines))


def _named(node: NodeSpec) -> str:
    return f"{node.name} and {node.count - 1} more" if node.count > 1 else node.name


def _links(links: tuple[LinkSpec, ...], title: str = "links") -> Table:
    table = _table(
        f"{title}: time = latency + bytes / bandwidth",
        *("tier", "backend", "fitted to", "ranks", "latency", "bandwidth", "residual", "evidence"),
    )
    for link in links:
        table.add_row(
            link.tier,
            link.backend,
            link.fitted_to.replace("_", "-") or "data sheet",
            str(link.ranks) if link.points else "",
            time_text(link.latency_s),
            _bandwidth_text(link),
            f"{link.residual:.0%}" if link.points else "",
            link.evidence,
        )
    return table


def _bandwidth_text(link: LinkSpec) -> str:
    if link.large_nbytes is None or link.large_bandwidth_bytes_per_s is None:
        return rate_text(link.bandwidth_bytes_per_s)
    beyond = f"{link.large_nbytes / 2**20:.3g} MiB"
    return f"{rate_text(link.bandwidth_bytes_per_s)}, beyond {beyond} {rate_text(link.large_bandwidth_bytes_per_s)}"


def _nodes(nodes: tuple[NodeSpec, ...]) -> Table:
    turns = any(node.turns > 1 for node in nodes)
    copied = any(node.copy_rates for node in nodes)
    heads = ("first host", "count", "devices of each", "memory", "disk read")
    disks = any(node.nvme for node in nodes)
    more = (
        *(("disk for state",) if disks else ()),
        *(("to and from a device",) if copied else ()),
        *(("hosts per core",) if turns else ()),
    )
    table = _table("nodes", *heads, *more)
    for node in nodes:
        read = node.disk_read_bytes_per_s
        table.add_row(
            node.name,
            str(node.count),
            f"{node.devices_per_node} x {node.device}",
            f"{node.memory_nbytes / 1e9:.3g} GB",
            rate_text(read) if read else "not measured",
            *((_state_disk(node),) if disks else ()),
            *((_copies(node),) if copied else ()),
            *((f"{node.turns:.3g}",) if turns else ()),
        )
    return table


def _state_disk(node: NodeSpec) -> str:
    """Return the folder for optimizer state, its free bytes, and its rates of reading and writing."""
    disk = node.nvme
    if disk is None:
        return "none"
    rates = f"{rate_text(disk.read_bytes_per_s)} read, {rate_text(disk.write_bytes_per_s)} written"
    return f"{disk.path}: {disk.nbytes / 1e9:.3g} GB, {rates}"


def _copies(node: NodeSpec) -> str:
    """Return the rates of copies to the device and back, from and to pinned memory, or else pageable memory."""
    pinned = any(rate.pinned for rate in node.copy_rates)
    rates = {rate.direction: rate.bytes_per_s for rate in node.copy_rates if rate.pinned == pinned}
    return (
        ", ".join(rate_text(rates[direction]) for direction in ("to_device", "to_host") if direction in rates)
        or "not measured"
    )


def _table(title: str, *columns: str) -> Table:
    table = FittedTable(title=title, title_justify="left", title_style="", pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index > 0)
    return table


def _significant(value: float) -> str:
    """Format a value to three digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


COLOURS = {
    "float64": "#7b3294",
    "float32": "#0571b0",
    "tf32": "#1b9e77",
    "bfloat16": "#d95f02",
    "float16": "#ca0020",
    "float8": "#666666",
}
LINES = ("-", "--", "-.", ":")
MARKS = ("o", "s", "^", "D", "v")


def plot_cluster(cluster: ClusterSpec, path: Path) -> Path:
    """Plot the measured rates of a cluster.

    Args:
        cluster: what to plot.
        path: the file; its suffix (.svg, .png or .pdf) sets the format.

    Returns:
        The path.

    Raises:
        SpecError: another suffix, or the cluster has no measured rates.
    """
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise SpecError(f"{path}: a plot is written as .svg, .png or .pdf; change the ending")
    devices = [device for device in cluster.devices.values() if device.gemm]
    links = [link for link in cluster.links if link.points]
    panels = len(devices) + bool(links)
    if not panels:
        raise SpecError(f"cluster {cluster.name!r} has no measured rates to plot; leave --plot out")
    with mpl.rc_context(
        {"svg.hashsalt": "tutti", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    ):
        figure = Figure(figsize=(5.6 * panels, 5.2), layout="constrained")
        axes = [figure.add_subplot(1, panels, index + 1) for index in range(panels)]
        for device, panel in zip(devices, axes, strict=False):
            _products(panel, device)
        if links:
            _transfers(axes[-1], links)
        measured = cluster.conditions.measured_utc if cluster.conditions else ""
        figure.suptitle(f"{cluster.name}, measured {measured}", fontsize=10)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def _products(axes: Axes, device: DeviceSpec) -> None:
    threads = sorted({rate.threads for rate in (*device.gemm, *device.gemm_concurrent)})
    for (dtype, count, processes), rates in curves((*device.gemm, *device.gemm_concurrent)):
        label = dtype
        if device.kind == "cpu":
            label += f", {count} thread{'s' * (count > 1)}"
        if processes > 1:
            label += f", each of {processes} processes"
        axes.plot(
            [rate.n for rate in rates],
            [rate.flops_per_s / 1e9 for rate in rates],
            color=COLOURS.get(dtype, "black"),
            linestyle=":" if processes > 1 else LINES[threads.index(count) % 3],
            marker="x" if processes > 1 else "o",
            markersize=4,
            linewidth=1.3,
            label=label,
        )
    sizes = sorted({rate.n for rate in device.gemm})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(n) for n in sizes])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set(xlabel="N of an N x N matrix product", ylabel="GFLOP/s (2 N³ / time)", title=device.name)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)


def _transfers(axes: Axes, links: list[LinkSpec]) -> None:
    """Plot measured times as points with the fitted line through them, for each tier and kind of transfer."""
    for index, link in enumerate(links):
        sizes = [point.nbytes for point in link.points]
        colour = f"C{index}"
        axes.plot(sizes, [point.time_s for point in link.points], MARKS[index % len(MARKS)], color=colour, markersize=5)
        between = [sizes[0] * (sizes[-1] / sizes[0]) ** (step / 60) for step in range(61)]
        axes.plot(
            between,
            [_fitted_s(link, size) for size in between],
            color=colour,
            linewidth=1.2,
            label=f"{link.tier}, {link.fitted_to.replace('_', '-')}, {link.ranks} ranks, {link.backend}: "
            f"{time_text(link.latency_s)}, {rate_text(link.bandwidth_bytes_per_s)} (residual {link.residual:.0%})",
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: _nbytes_text(value))
    axes.yaxis.set_major_formatter(lambda value, _: time_text(value))
    axes.set(xlabel="size", ylabel="time", title="links between ranks: measured points, fitted lines")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=1)


def _fitted_s(link: LinkSpec, nbytes: float) -> float:
    """Return the seconds that the fit predicts for a transfer."""
    link_model = link_of(link)
    if link.fitted_to == "all_reduce":
        return ring_all_reduce(link_model, nbytes, link.ranks)
    return message(link_model, nbytes)


def _nbytes_text(nbytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:g} {unit}"
    return f"{nbytes:g} B"
