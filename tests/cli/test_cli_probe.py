"""`tutti probe` as a user meets it: files, tables, JSON, refusals."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from harness import run_ranks
from tutti.cli.main import main
from tutti.cli.probe import command
from tutti.config import serialization
from tutti.config.cluster import (
    ClusterSpec,
    Conditions,
    DeviceSpec,
    GemmRate,
    LinkPoint,
    LinkSpec,
    MemoryRate,
    NodeSpec,
)
from tutti.profile import probe
from tutti.profile.catalog import cluster_from_parts
from tutti.profile.probe.probe_timing import Effort

MEASURED = ClusterSpec(
    name="here",
    devices={
        "CPU": DeviceSpec(
            name="CPU",
            kind="cpu",
            memory_nbytes=10**10,
            memory_bandwidth_bytes_per_s=9e9,
            peak_flops_per_s={"float32": 1.8e11},
            gemm=tuple(GemmRate(dtype="float32", n=n, threads=2, flops_per_s=n * 1e8) for n in (256, 512, 1024)),
            gemm_concurrent=(GemmRate(dtype="float32", n=256, threads=1, flops_per_s=2e10, concurrent=2),),
            memory_rates=(MemoryRate(threads=2, bytes_per_s=9e9),),
            kernel_overhead_s=1.2e-6,
            cores=2,
            source="test",
            evidence="measured",
        )
    },
    nodes=(NodeSpec(name="here", device="CPU", memory_nbytes=10**10, disk_read_bytes_per_s=1e9),),
    links=(
        LinkSpec(
            tier="node",
            latency_s=2.5e-5,
            bandwidth_bytes_per_s=1.5e9,
            residual=0.07,
            fitted_to="all_reduce",
            points=(LinkPoint(nbytes=1024, time_s=5e-5), LinkPoint(nbytes=10**7, time_s=7e-3)),
            source="test",
            evidence="measured",
        ),
    ),
    conditions=Conditions(
        measured_utc="2026-01-01T00:00:00Z",
        cores_granted=2,
        load_at_start=0.5,
        load_at_end=1.5,
        versions={"torch": "2.6.0"},
        notes=("float16 products of N = 2048 were skipped",),
    ),
)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments), catch_exceptions=False)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """`measure` returns MEASURED; what it was asked for is recorded. The cache and the work are under tmp_path."""
    asked: list[dict[str, Any]] = []

    def measure(**given: Any) -> ClusterSpec:
        asked.append(given)
        return MEASURED

    monkeypatch.setattr(probe, "measure", measure)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return asked


def test_a_measurement_is_kept_drawn_and_shown(measured: list[dict[str, Any]]) -> None:
    result = run("--quick", "--nproc", "3")
    assert result.exit_code == 0
    assert (measured[0]["quick"], measured[0]["ranks"]) == (True, 3)
    kept = probe.cached_cluster_path()
    assert serialization.load(ClusterSpec, kept) == MEASURED
    picture = kept.with_suffix(".svg").read_text(encoding="utf-8")
    assert picture.startswith("<?xml")
    for words in ("102", "25 us", "1.5 GB/s", "7%", "all-reduce", "float16 products", "2 cores granted", "1 GB/s"):
        assert words in result.stdout, words


def test_json_is_one_document_on_standard_output(measured: list[dict[str, Any]], tmp_path: Path) -> None:
    result = run("--json", "--output", "a/b.json", "--plot", "c.png")
    assert serialization.loads(ClusterSpec, result.stdout) == MEASURED
    assert serialization.load(ClusterSpec, tmp_path / "a" / "b.json") == MEASURED
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert not probe.cached_cluster_path().exists()


def test_no_plot(measured: list[dict[str, Any]], tmp_path: Path) -> None:
    assert run("--no-plot", "--output", "x.json").exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_a_cluster_is_written_down(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(
        *("--device", "A100-SXM4-80GB", "--devices-per-node", "8", "--nodes", "4", "--node-link", "NVLink3"),
        *("--network", "InfiniBand-HDR-200", "--node-memory", "1TiB", "--output", "cluster.json"),
    )
    assert result.exit_code == 0
    cluster = serialization.load(ClusterSpec, tmp_path / "cluster.json")
    assert cluster.device_count == 32
    assert cluster.nodes[0].memory_nbytes == 2**40
    assert "300 GB/s" in result.stdout
    assert "published" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.json"]


def test_the_parts_are_listed() -> None:
    table = run("--list").stdout
    assert "K80" in table
    assert "NVLink4" in table
    listed = json.loads(run("--list", "--json").stdout)
    assert listed["devices"]["K80"]["evidence"] == "published"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "A1000"], "A100-SXM4-80GB"),
        (["--device", "T4", "--nodes", "2"], "need a network link"),
        (["--plot", "x.gif"], ".svg"),
        (["--device", "T4", "--node-memory", "much"], "512GiB"),
        (["--nproc", "0"], "--nproc"),
        (["--device", "T4", "--output", "/proc/nowhere/x.json"], "--output"),
    ],
)
def test_bad_input_is_exit_code_2_and_a_sentence(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tutti", "probe", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_a_data_sheet_has_nothing_to_plot(tmp_path: Path) -> None:
    from tutti.cli.cluster_view import plot_cluster
    from tutti.errors import SpecError

    with pytest.raises(SpecError, match="no measured rates"):
        plot_cluster(cluster_from_parts("x", "T4"), tmp_path / "x.svg")


TINY = Effort(
    gemm_sizes=(16,),
    cuda_gemm_sizes=(256,),
    concurrent_sizes=(16,),
    dtypes=("float32",),
    threads="ends",
    repeats=2,
    gemm_budget_s=1.0,
    link_nbytes=(1024, 16384),
    link_repeats=2,
    link_budget_s=0.5,
    copy_nbytes=2**20,
    disk_nbytes=2**18,
)


def _as_a_rank(folder: str) -> tuple[int, str, bool]:
    """`tutti probe` on one rank of a launcher: exit code, standard output, whether the spec is there."""
    probe.QUICK = TINY  # type: ignore[misc]
    os.environ["MPLCONFIGDIR"] = folder
    output = Path(folder) / "cluster.json"
    result = run("--quick", "--json", "--no-plot", "--output", str(output))
    return result.exit_code, result.stdout, output.exists()


def test_under_a_launcher_all_ranks_measure_and_one_writes(tmp_path: Path) -> None:
    first, second = run_ranks(_as_a_rank, 2, str(tmp_path))
    assert first[0] == second[0] == 0
    cluster = serialization.loads(ClusterSpec, first[1])
    assert second[1] == ""
    assert serialization.load(ClusterSpec, tmp_path / "cluster.json") == cluster
    assert cluster.link("node") is not None
