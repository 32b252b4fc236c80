"""What a cluster of Kubernetes has, plans for it, and the doctor and the probe in its pods, by the stand-in."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusters.command_rig import tutti
from clusters.kubernetes_rig import Cluster, Refusal, kubernetes, node
from tutti.clusters.cluster_resources import NodePool
from tutti.clusters.kubernetes import Kubernetes
from tutti.errors import LaunchError

PRODUCT = "nvidia.com/gpu.product"
A100 = {PRODUCT: "NVIDIA-A100-SXM4-80GB"}
TAINT = {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with kubernetes(tmp_path / "cluster") as (found, _):
        yield found


def pools(cluster: Cluster, **settings: Any) -> dict[str, NodePool]:
    found = Kubernetes().pools({"kubeconfig": str(cluster.base / "kubeconfig"), **settings})
    return {pool.name: pool for pool in found}


def quota(cluster: Cluster, used: dict[str, str], **hard: str) -> None:
    hard = {key.replace("__", "requests.nvidia.com/"): value for key, value in hard.items()}
    name = f"quota{len(cluster.things)}"
    thing = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": name}}
    cluster.add("resourcequotas", "team", {**thing, "spec": {"hard": hard}, "status": {"hard": hard, "used": used}})


def test_nodes_are_told_by_kind_and_those_that_no_pod_gets_with_the_reason(cluster: Cluster) -> None:
    cluster.nodes = [
        node("a", labels=A100, spec=TAINT, cpu="95500m", memory="1000Gi", __gpu="8"),
        node("b", labels=A100, cpu="96", memory="1000Gi", __gpu="4"),
        node("c", labels=A100, spec={"unschedulable": True}, cpu="96", __gpu="8"),
        node("d", labels=A100, ready=False, cpu="96", __gpu="8"),
        node("e", cpu="16"),
    ]
    found = pools(cluster)
    assert list(found) == ["NVIDIA-A100-SXM4-80GB", ""]
    gpus = found["NVIDIA-A100-SXM4-80GB"]
    assert gpus.request == f"node_selector={PRODUCT}:NVIDIA-A100-SXM4-80GB"
    assert [(each.name, each.gpus, each.cores, each.memory_nbytes) for each in gpus.nodes] == [("b", 4, 96, 1000 << 30)]
    assert gpus.absent == {
        "a": "it has the taint nvidia.com/gpu:NoSchedule; set tolerations to use it",
        "c": "it is cordoned",
        "d": "it is not ready (NodeStatusUnknown)",
    }
    assert [(each.name, each.gpus, each.gpu) for each in found[""].nodes] == [("e", 0, "")]
    gpus = pools(cluster, tolerations="nvidia.com/gpu:NoSchedule", gpus=8)["NVIDIA-A100-SXM4-80GB"]
    assert [(each.name, each.cores) for each in gpus.nodes] == [("a", 95)]
    assert gpus.absent["b"] == "it has 4 GPUs, and a pod is to get 8"


def test_quotas_of_the_namespace_leave_less(cluster: Cluster) -> None:
    cluster.nodes = [node(name, labels=A100, cpu="96", __gpu="8") for name in ("a", "b", "c")]
    quota(cluster, {"pods": "3"}, pods="5")
    (pool,) = pools(cluster).values()
    assert (pool.most_nodes, pool.notes) == (2, ("the quota quota0 of team leaves 2 pods (pods)",))
    quota(cluster, {"requests.nvidia.com/gpu": "10"}, __gpu="14")
    (pool,) = pools(cluster).values()
    assert {each.gpus for each in pool.nodes} == {4}
    assert pool.most_nodes == 1
    assert pool.notes[0] == "the quota quota1 of team leaves 4 GPUs"
    (pool,) = pools(cluster, gpus=8).values()
    assert pool.closed == "the quota quota1 of team leaves 4 GPUs"


def test_a_cluster_that_does_not_show_its_nodes_says_what_it_takes(cluster: Cluster) -> None:
    def refuse(method: str, path: str) -> None:
        if path.endswith("/nodes"):
            raise Refusal(
                403, "Forbidden", 'nodes is forbidden: User "me" cannot list resource "nodes" in API group ""'
            )

    cluster.refuse = refuse
    with pytest.raises(LaunchError, match="what a cluster has is shown to those who may list its nodes"):
        pools(cluster)


@pytest.mark.long
@pytest.mark.slow
def test_plans_compare_kinds_of_nodes(tmp_path: Path, cluster: Cluster) -> None:
    cluster.nodes = [node(name, labels=A100, cpu="96", __gpu="8") for name in ("a", "b")]
    cluster.nodes += [node("t", labels={PRODUCT: "Tesla-T4"}, cpu="16", __gpu="1"), node("x", cpu="16")]
    words = ("gpt2", "--global-batch-size", "64", "--seconds", "1", "--links", "nvlink3,8*ib-hdr", "--on", "k8s")
    code, out, err = tutti(tmp_path, cluster.variables, "plan", *words, "--json")
    assert code == 0, err
    found = {pool["pool"]: pool for pool in json.loads(out)["pools"]}
    assert list(found) == ["NVIDIA-A100-SXM4-80GB", "Tesla-T4", ""], "the best first, those without a plan last"
    assert found["NVIDIA-A100-SXM4-80GB"]["nproc"] == [8, 8]
    assert found["Tesla-T4"]["nproc"] == [1]
    assert found["Tesla-T4"]["idle"] is None
    assert "`tutti probe --on kubernetes --nodes 1 --nproc 2`" in found[""]["reason"]
    code, out, err = tutti(tmp_path, {**cluster.variables, "COLUMNS": "250"}, "plan", *words)
    assert code == 0, err
    selector = f"--request node_selector={PRODUCT}:NVIDIA-A100-SXM4-80GB --request gpus=8"
    assert f"tutti run --on k8s --nnodes 2 --nproc 8 {selector} --plan plan.json SCRIPT" in out


@pytest.mark.long
def test_the_doctor_and_the_probe_run_in_pods(tmp_path: Path, cluster: Cluster) -> None:
    variables = {**cluster.variables, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    (tmp_path / "tutti.toml").write_text(
        f'[kubernetes]\nimage = "train:1"\npython = "{sys.executable}"\ndirectory = "{tmp_path}"\n'
    )
    code, out, err = tutti(tmp_path, variables, "doctor", "--on", "k8s", "--nnodes", "2", "--nproc", "1")
    assert code == 0, out + err
    assert out.count("nothing would stop a launch here") == 2
    assert "\n[pod 1] ok       torch" in out
    code, _, err = tutti(
        tmp_path, variables, "probe", "--on", "k8s", "-N", "2", "--nproc", "1", "--quick", "--no-plot",
    )  # fmt: skip
    assert code == 0, err
    assert json.loads((tmp_path / "cluster.json").read_text())["conditions"]["hosts"] == ["node0", "node1"]
    assert {posted["kind"] for posted in cluster.posted} == {"Job", "Service", "Secret"}
    assert not cluster.things, "nothing stays in the cluster"
