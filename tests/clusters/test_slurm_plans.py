"""`tutti plan --on slurm`: what a real Slurm has, and plans for it; nodes that were measured before."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusters.command_rig import tutti
from launch.launch_rig import TUTTI
from launch.slurm_rig import own_slurm
from tutti.clusters.cluster_resources import NodePool
from tutti.clusters.slurm_resources import NodeChoice, slurm_pools
from tutti.profile.catalog import device

MODEL = ("gpt2", "--global-batch-size", "64", "--seconds", "1")

PARTITIONS = """\
PartitionName=big AllowAccounts=lab,ops Default=NO MaxNodes=UNLIMITED MaxTime=2-12 Nodes=a[1-7] State=UP
PartitionName=day AllowAccounts=ALL Default=YES MaxNodes=2 MaxTime=30:00 Nodes=a1,b[08-09] State=DRAIN
"""

NODES = """\
NodeName=a1 CPUEfctv=60 CPUTot=64 AvailableFeatures=ib,hdr ActiveFeatures=ib Gres=gpu:a100:4(S:0-1) RealMemory=1000 State=MIXED ThreadsPerCore=1
NodeName=a2 CPUTot=64 ActiveFeatures=ib,hdr Gres=gpu:a100:4(S:0-1) RealMemory=1000 State=IDLE+DRAIN ThreadsPerCore=1 Reason=bad fan on Gres=gpu:x:9 [root@2026-11-29T10:00:00]
NodeName=a3 CPUTot=64 ActiveFeatures=ib,hdr Gres=gpu:2 RealMemory=1000 State=ALLOCATED
NodeName=a4 CPUTot=64 ActiveFeatures=(null) Gres=(null) RealMemory=1 State=IDLE*
NodeName=a5 CPUTot=64 ActiveFeatures=hdr Gres=gpu:a100:4,gpu:1g.10gb:7 RealMemory=1000 State=IDLE+CLOUD+POWERED_DOWN
NodeName=a6 CPUTot=8 ActiveFeatures=hdr Gres=gpu:a100:4 RealMemory=1000 State=RESERVED
NodeName=b08 CPUTot=64 ActiveFeatures=hdr Gres=gpu:rtx_4090:8 RealMemory=1000 State=IDLE
NodeName=b09 CPUTot=64 ActiveFeatures=hdr Gres=gpu:rtx_4090:8 RealMemory=1000 State=IDLE
"""  # noqa: E501


def pools_of(**settings: Any) -> dict[str, NodePool]:
    """What is understood of the text that scontrol 22.05 writes."""

    def ask(program: str, *words: str) -> str:
        kind = words[words.index("show") + 1]
        return {"partition": PARTITIONS, "node": NODES, "reservation": "ReservationName=r Nodes=a[5-6]\n"}[kind]

    return {pool.name: pool for pool in slurm_pools(ask, NodeChoice(**settings))}


def test_states_gpus_and_limits_are_read_as_scontrol_writes_them() -> None:
    pools = pools_of()
    assert list(pools) == ["day", "big"], "the default partition first"
    big = pools["big"]
    assert [(node.name, node.gpus, node.gpu, node.cores) for node in big.nodes] == [
        ("a1", 4, "a100", 60),
        ("a3", 2, "", 64),
        ("a5", 7, "1g.10gb", 64),
        ("a6", 4, "a100", 8),
    ]
    assert [node.idle for node in big.nodes] == [False, False, True, False]
    assert big.absent == {
        "a2": "idle+drain: bad fan on Gres=gpu:x:9",
        "a4": "idle, not responding",
        "a7": "Slurm does not tell of it",
    }
    assert (big.time_limit_s, big.most_nodes, big.closed) == (60 * 3600.0, None, "")
    assert (pools["day"].time_limit_s, pools["day"].most_nodes) == (1800.0, 2)
    assert pools["day"].closed == "its state is DRAIN"


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"gpus": "4"}, ["a1", "a5", "a6"]),
        ({"gpus": "a100:4", "cpus": 16}, ["a1"]),
        ({"constraint": "hdr"}, ["a3", "a5", "a6"]),
        ({"nodelist": "a[1-3]"}, ["a1", "a3"]),
        ({"exclude": "a[1-3],a5"}, ["a6"]),
        ({"reservation": "r"}, ["a5", "a6"]),
    ],
)
def test_settings_narrow_the_choice(settings: dict[str, Any], names: list[str]) -> None:
    assert [node.name for node in pools_of(partition="big", **settings)["big"].nodes] == names


def test_an_account_that_the_partition_does_not_take_is_said() -> None:
    assert pools_of(account="other")["big"].closed == "it does not take jobs of the account other"
    assert pools_of(account="ops")["big"].closed == ""
    asked = pools_of(partition="big", gpus="2")["big"].nodes
    assert {node.gpus for node in asked} == {2}, "a job gets what it asks for"


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    with own_slurm(gpu_partitions=True) as environment:
        yield {**environment, "XDG_CACHE_HOME": f"{environment['XDG_STATE_HOME']}/cache", "COLUMNS": "200"}


def planned(project: Path, cluster: dict[str, str], *words: str) -> dict[str, Any]:
    code, out, err = tutti(project, cluster, "plan", *MODEL, "--on", "slurm", "--json", *words)
    assert code == 0, err
    return dict(json.loads(out))


@pytest.mark.long
@pytest.mark.slow
def test_partitions_are_compared_and_what_is_not_known_is_said(tmp_path: Path, cluster: dict[str, str]) -> None:
    (tmp_path / "tutti.toml").write_text(
        '[hardware]\ngpus = { a100 = "A100-SXM4-80GB" }\nlinks = "nvlink3,8*ib-hdr"\nprices = { a100 = 2.0 }\n'
    )
    result = planned(tmp_path, cluster, "--samples", "1e9")
    best, *others = result["pools"]
    assert (best["pool"], best["request"], best["time_limit_s"]) == ("gpu", "partition=gpu", 86400.0)
    assert (best["node_names"], best["nproc"]) == (["g0", "g1"], [8, 8])
    assert list(best["absent"]) == ["g2"], "a node that is down is not counted"
    assert best["absent"]["g2"].startswith("down")
    assert best["notes"] == [f"GPUs by data sheet, {device('A100-SXM4-80GB').name}"]
    assert best["cost"] == pytest.approx(2.0 * 16 * best["time_s"] / 3600), "16 devices at 2.0 an hour"
    assert best["plan"] == result["choice"]["best"]
    reasons = {pool["pool"]: pool["reason"] for pool in others}
    assert set(reasons) == {"main", "urgent", "odd", "closed"}
    assert reasons["closed"] == "its state is DOWN"
    assert 'GPUs called "zx81" are not known' in reasons["odd"]
    assert "`tutti probe --on slurm --request partition=odd,gpus=4 --nodes 1 --nproc 4`" in reasons["odd"]
    assert "how fast its cores are is not known" in reasons["main"]
    (one,) = planned(tmp_path, cluster, "--nnodes", "1", "--request", "partition=gpu,gpus=4", "--price", "gpu=9")[
        "pools"
    ]
    assert one["nproc"] == [4], "settings and --nnodes narrow the choice"
    assert one["cost"] == pytest.approx(9 * 4 * one["step_time_s"] / 3600)
    (tmp_path / "train.py").write_text("")
    code, out, err = tutti(tmp_path, cluster, "plan", *MODEL, "--on", "slurm", "--output", "p.json")
    assert code == 0, err
    command = "tutti run --on slurm --nnodes 2 --nproc 8 --request partition=gpu --request gpus=8 --plan p.json SCRIPT"
    assert command in out
    assert (tmp_path / "p.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--on", "slurm", "--request", "partition=gpu"), "what joins the 8 GPUs of a node is not known"),
        (("--on", "slurm", "--request", "partition=gpu", "--nnodes", "3"), "--nnodes 3: it has 2 such nodes"),
        (("--on", "slurm", "--request", "partition=no"), "Slurm has no partition 'no'; it has gpu, odd"),
        (("--on", "slurm", "--links", "nvlink9"), "there is no link 'nvlink9' in the catalog"),
        (("--on", "slurm", "--cluster", "1x1:a10"), "leave one out"),
        (("--on", "slurm", "--hosts", "a,b"), "--hosts is for --on ssh"),
        (("--on", "slurm", "--explain"), "--explain explains a plan for described machines"),
        (("--nnodes", "2"), "--nnodes is for the nodes of a cluster; add --on slurm"),
    ],
)
def test_refused_plans(tmp_path: Path, cluster: dict[str, str], words: tuple[str, ...], said: str) -> None:
    code, out, err = tutti(tmp_path, cluster, "plan", *MODEL, *words)
    assert (code, out) == (2, ""), err
    assert said in err
    assert "Traceback" not in err


@pytest.mark.long
def test_measured_nodes_are_planned_for_until_a_version_changes(tmp_path: Path, cluster: dict[str, str]) -> None:
    words = ("probe", "--on", "slurm", "-N", "2", "--nproc", "1", "--quick", "--no-plot")
    code, _, err = tutti(tmp_path, cluster, *words)
    assert code == 0, err
    (kept,) = (Path(cluster["XDG_CACHE_HOME"]) / "tutti").glob("nodes-*.json")
    assert json.loads(kept.read_text())["conditions"]["hosts"] == ["n0", "n1"]
    (tmp_path / "tutti.toml").write_text('[slurm]\npartition = "main"\n')
    (pool,) = planned(tmp_path, cluster, "--max-devices", "2")["pools"]
    assert pool["notes"][0].startswith("measured on n0, n1 at 20")
    environment = {**os.environ, **cluster}
    allocation = ("salloc", "--nodes=2", "--quiet", *TUTTI, "plan", *MODEL, "--json")
    inside = subprocess.run(allocation, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert inside.returncode == 0, inside.stderr
    assert "the nodes of this allocation, as measured before: n0, n1" in inside.stderr
    document = json.loads(kept.read_text())
    document["conditions"]["versions"]["torch"] = "1.0"
    kept.write_text(json.dumps(document))
    code, _, err = tutti(tmp_path, cluster, "plan", *MODEL, "--on", "slurm")
    assert code == 2
    assert "how fast its cores are is not known; measure them" in err
