"""A measured ClusterSpec as a picture: GFLOP/s against N, and link time against size with the fitted line."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tutti.cli.cluster_table import curves, rate_text, time_text
from tutti.config.cluster import ClusterSpec, DeviceSpec, LinkSpec
from tutti.cost_model.network import link_of, message, ring_all_reduce
from tutti.errors import SpecError

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
    """Draw to `path` (.svg, .png or .pdf by its ending) and return it. Raises SpecError for another ending."""
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
            label += f", each of {processes} at once"
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
    """Times as points and the fitted line through them, by tier and kind of transfer."""
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
    """Seconds of the transfer itself, as fitted."""
    one = link_of(link)
    if link.fitted_to == "all_reduce":
        return ring_all_reduce(one, nbytes, link.ranks)
    return message(one, nbytes)


def _nbytes_text(nbytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:g} {unit}"
    return f"{nbytes:g} B"
