"""Jobs of several kinds of nodes: what Slurm says of them, and plans that keep the job's order of nodes and ranks."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tutti
from tutti.cli.pool_view import run_there
from tutti.clusters import slurm
from tutti.commands.plan_options import PlanOptions
from tutti.commands.planned import Planned
from tutti.config import serialization
from tutti.config.cluster import ClusterSpec, Conditions, GemmRate
from tutti.cost_model import predict
from tutti.errors import LaunchError, TuttiError
from tutti.profile.architectures import architecture
from tutti.profile.catalog import device, link
from tutti.profile.probe.host_facts import versions

PARTITIONS = """\
PartitionName=old AllowAccounts=ALL Default=NO MaxNodes=UNLIMITED MaxTime=2-00:00:00 Nodes=v[1-3] State=UP
PartitionName=gpu AllowAccounts=ALL Default=YES MaxNodes=UNLIMITED MaxTime=12:00:00 Nodes=a[1-2],m1 State=UP
PartitionName=shut AllowAccounts=ALL Default=NO MaxNodes=UNLIMITED MaxTime=12:00:00 Nodes=v1 State=DOWN
"""

NODES = """\
NodeName=a1 CPUTot=64 ActiveFeatures=ib Gres=gpu:a100:4(S:0-1) RealMemory=500000 State=MIXED
NodeName=a2 CPUTot=64 ActiveFeatures=ib Gres=gpu:a100:4(S:0-1) RealMemory=500000 State=IDLE
NodeName=m1 CPUTot=64 ActiveFeatures=mi Gres=gpu:zx81:4 RealMemory=500000 State=IDLE
NodeName=v1 CPUTot=40 ActiveFeatures=ib Gres=gpu:v100:2 RealMemory=250000 State=IDLE
NodeName=v2 CPUTot=40 ActiveFeatures=ib Gres=gpu:v100:2 RealMemory=250000 State=IDLE
NodeName=v3 CPUTot=40 ActiveFeatures=ib Gres=gpu:v100:2 RealMemory=250000 State=DOWN* Reason=bad fan [root@2026-11-29]
"""

OLD = {"nodes": 2, "ranks": 1, "partition": "old", "gpus": "v100:2"}
NEW = {"partition": "gpu", "gpus": "a100:2"}

HARDWARE = '[hardware]\ngpus = { v100 = "V100-SXM2-16GB", a100 = "A100-SXM4-40GB" }\n'

LINKS = "nvlink3,8*ib-hdr"

MODEL = ["--layers", "4", "--hidden", "512", "--heads", "8", "--seq-len", "256", "--vocab", "8000"]


@pytest.fixture(autouse=True)
def answering(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, ...]]:
    """Slurm, as scontrol 22.05 writes; returns what it was asked."""
    asked: list[tuple[str, ...]] = []

    def ask(program: str, *words: str, text: str | None = None) -> tuple[int, str, str]:
        asked.append((program, *words))
        if program == "srun":
            return 0, "", ""
        return 0, {"partition": PARTITIONS, "node": NODES}[words[-1]], ""

    monkeypatch.setattr(slurm, "_ask", ask)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tutti.toml").write_text(HARDWARE)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return asked


def planned(*components: dict[str, Any], **given: Any) -> Planned:
    """What `tutti plan --on slurm` plans for a job of these components."""
    options: dict[str, Any] = {"on": "slurm", "settings": {"components": list(components)}, "links": LINKS}
    return tutti.plan("gpt", MODEL, global_batch_size=96, data_parallel=True, precision="full", **options | given)


def test_the_nodes_of_each_component_are_those_that_it_may_get() -> None:
    cores, old, new = slurm.Slurm().requests({"time": "1h", "components": [{"ranks": 3, "nodelist": "m1"}, OLD, NEW]})
    assert [(each.name, each.count, each.ranks, each.pool.name) for each in (cores, old, new)] == [
        ("component 1", 1, 3, "gpu"),
        ("component 2", 2, 1, "old"),
        ("component 3", 1, None, "gpu"),
    ], "without a partition it is the default one"
    assert [(node.name, node.gpus, node.gpu, node.cores) for node in old.pool.nodes] == [
        ("v1", 2, "v100", 40),
        ("v2", 2, "v100", 40),
    ]
    assert old.pool.absent == {"v3": "down, not responding: bad fan"}
    assert [(node.name, node.gpus, node.gpu) for node in new.pool.nodes] == [("a1", 2, "a100"), ("a2", 2, "a100")]
    assert [(node.name, node.gpus) for node in cores.pool.nodes] == [("m1", 0)], "who asks for no GPUs gets none"
    assert (old.pool.time_limit_s, new.pool.time_limit_s) == (172800.0, 43200.0)
    either = slurm.Slurm().requests({"components": [{"partition": "old,gpu", "gpus": "v100:1"}]})[0].pool
    assert ([node.name for node in either.nodes], either.time_limit_s) == (["v1", "v2"], 43200.0)


def by_hand(tmp_path: Path, slow_first: bool, ranks: tuple[int, ...] = ()) -> Path:
    """The cluster of `OLD` and `NEW` as a person would write it, after the data sheets."""
    slow, fast = device("V100-SXM2-16GB"), device("A100-SXM4-40GB")
    network, nvlink = (
        serialization.to_data(link(*of)) for of in (("InfiniBand-HDR-200", "network"), ("NVLink3", "node"))
    )
    network["bandwidth_bytes_per_s"] *= 8
    each = {"devices_per_node": 2}
    nodes = [
        {"name": "v", "device": slow.name, "count": 2, "memory_nbytes": 250000 << 20, "cores": 40, **each},
        {"name": "a", "device": fast.name, "count": 1, "memory_nbytes": 500000 << 20, "cores": 64, **each},
    ]
    nodes = [{**node, "ranks": count} for node, count in zip(nodes, ranks, strict=True)] if ranks else nodes
    devices = {sheet.name: serialization.to_data(sheet) for sheet in (slow, fast)}
    cluster = {"name": "hand", "devices": devices, "links": [nvlink, network]}
    file = tmp_path / f"hand-{slow_first}-{len(ranks)}.json"
    file.write_text(json.dumps({**cluster, "nodes": nodes if slow_first else nodes[::-1]}))
    return file


@pytest.mark.parametrize("slow_first", [True, False])
def test_a_plan_keeps_the_order_of_the_components_and_gives_fast_ranks_more(tmp_path: Path, slow_first: bool) -> None:
    new = {**NEW, "ranks": 2}
    found = planned(*((OLD, new) if slow_first else (new, OLD)))
    (pool,) = found.pools
    assert (pool.nproc, pool.gpus) == ((1, 1, 2) if slow_first else (2, 1, 1), False)
    assert pool.pool == ("old + gpu" if slow_first else "gpu + old")
    words = f"tutti run --on slurm --nnodes 3 --nproc {'1,1,2' if slow_first else '2,1,1'} --plan p.json SCRIPT"
    assert run_there(pool, PlanOptions(on="slurm", output=Path("p.json"))) == words, "the components say the rest"
    shares = found.plan.shares if slow_first else found.plan.shares[::-1]
    assert len(shares) == 4
    assert shares[0] == shares[1] < 0.8 < shares[2] == shares[3] == 1.0, "the last two ranks are the A100s"
    file = by_hand(tmp_path, slow_first, ranks=(1, 2))
    hand = tutti.plan("gpt", MODEL, global_batch_size=96, data_parallel=True, precision="full", cluster=file)
    assert hand.plan == found.plan
    assert hand.choice.prediction.step_time_s.value == pytest.approx(found.choice.prediction.step_time_s.value, 1e-12)
    # one device a node is what the job gives to each rank of v1 and v2: without `ranks`, their places are the same
    model = architecture(
        "gpt", dict(zip([word[2:].replace("-", "_") for word in MODEL[::2]], MODEL[1::2], strict=True))
    )
    plain = serialization.load(ClusterSpec, by_hand(tmp_path, slow_first))
    nodes = tuple(replace(node, devices_per_node=1) if node.name == "v" else node for node in plain.nodes)
    assert predict(model, replace(plain, nodes=nodes), found.plan).step_time_s.value == pytest.approx(
        found.choice.prediction.step_time_s.value, 1e-12
    )
    turned = predict(model, replace(plain, nodes=nodes[::-1]), found.plan)
    assert turned.step_time_s.value > 1.2 * found.choice.prediction.step_time_s.value


def test_measurements_of_the_nodes_count_for_their_components(tmp_path: Path) -> None:
    hand = serialization.load(ClusterSpec, by_hand(tmp_path, slow_first=False))
    told = Conditions(
        measured_utc="2026-01-01T00:00:00Z",
        cores_granted=4,
        load_at_start=0.0,
        load_at_end=0.0,
        versions=versions(),
        hosts=("a2", "v2", "v1"),
    )

    def slower(spec: ClusterSpec, name: str, factor: float) -> ClusterSpec:
        rates = tuple(
            GemmRate(dtype="float32", n=n, flops_per_s=factor * spec.devices[name].peak_flops_per_s["float32"])
            for n in (512, 4096)
        )
        return replace(spec, devices={**spec.devices, name: replace(spec.devices[name], gemm=rates)})

    file = tmp_path / "cache/tutti/nodes-0123.json"
    old, new = {name: value for name, value in OLD.items() if name != "ranks"}, NEW
    by_sheet = planned(old, new).plan.shares
    measured = replace(slower(hand, device("A100-SXM4-40GB").name, 0.25), conditions=told)
    serialization.save(measured, file)
    found = planned(old, new, links=None)
    assert found.pools[0].notes == (
        "measured on a2, v2, v1 at 2026-01-01T00:00:00Z; the others of 4 are taken to be equal",
    )
    assert found.pools[0].nproc == (2, 2, 2)
    assert by_sheet[0] < 1.0 == by_sheet[5], "by their data sheets, the A100s are faster"
    assert found.plan.shares[0] == 1.0 > found.plan.shares[5], "these were measured to be slower"
    serialization.save(replace(measured, conditions=replace(told, hosts=("a2", "v2", "m1"))), file)
    assert planned(old, new).plan.shares == by_sheet, "m1 is no node of the job"
    serialization.save(replace(measured, conditions=replace(told, hosts=("a2", "v2"))), file)
    assert planned(old, new).plan.shares == by_sheet, "which node was which is not known"


@pytest.mark.parametrize(
    ("components", "given", "said"),
    [
        (
            [OLD, {"partition": "gpu", "gpus": "zx81:2", "ranks": 2}],
            {},
            'component 2 (gpu): GPUs called "zx81" are not known; name their',
        ),
        (
            [OLD, {"partition": "gpu", "gpus": 2, "ranks": 2}],
            {},
            "component 2 (gpu) may get nodes of several kinds (1 node of 2 a100",
        ),
        ([OLD | {"nodes": 3}], {}, "component 1 (old) asks for 3 nodes, and it has 2 such nodes (v3: down, not resp"),
        ([NEW, {"partition": "old"}], {}, "component 2 (old) asks for no GPUs, so its ranks are not known"),
        ([{"ranks": 2, "nodelist": "a1"}, OLD], {}, "component 1 (gpu): how fast its cores are is not known; measure"),
        ([OLD | {"ranks": 3}], {}, "component 1 (old) has 3 ranks and 2 GPUs per node; give each rank one"),
        ([OLD | {"partition": "shut"}], {}, "component 1 (shut): its state is DOWN"),
        ([OLD, NEW], {}, "only some have `ranks`"),
        ([OLD, OLD | {"gpus": "v100:1"}], {}, "the job asks for 4 nodes, and 2 serve it; ask for fewer"),
        (
            [OLD | {"exclude": "v1"}, NEW],
            {},
            "component 2 of [[slurm.components]] has no exclude, and Slurm would give it v1",
        ),
        ([OLD], {"links": None}, "component 1 (old): what joins the 2 GPUs of a node is not known"),
        ([OLD], {"links": "nvlink3"}, "component 1 (old): what joins its nodes is not known"),
        ([OLD | {"partition": "none"}], {}, "Slurm has no partition 'none'"),
        ([OLD], {"nnodes": 3}, "--nnodes 3: [[slurm.components]] has 2 nodes"),
        ([OLD], {"nproc": 4}, "--nproc asks for 4 ranks, and the nodes of the job have 2; leave it out"),
        ([OLD], {"max_devices": 1}, "--max-devices asks for 1 ranks, and the nodes of the job have 2"),
        ([OLD], {"scaling": True}, "--scaling varies the number of ranks, and the nodes of the job fix it"),
    ],
)
def test_jobs_that_cannot_be_planned(components: list[dict[str, Any]], given: dict[str, Any], said: str) -> None:
    with pytest.raises(TuttiError) as raised:
        planned(*components, **given)
    assert said in str(raised.value)
    if "not known" in said and "component" in said and "GPUs, so" not in said:
        assert "`tutti probe --on slurm`" in str(raised.value), "the remedy measures the nodes of the job"


def test_a_component_without_partition_needs_a_default_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PARTITIONS", PARTITIONS.replace("Default=YES", "Default=NO"))
    with pytest.raises(LaunchError, match=r"component 1 of .* has no partition, and Slurm has no"):
        slurm.Slurm().requests({"components": [{"gpus": 1}, OLD]})


def test_a_command_on_the_nodes_of_a_job_is_one_step_over_its_components(
    answering: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"python": "python3", "components": [OLD, NEW | {"ranks": 2}]}

    def parts(words: list[str]) -> list[list[str]]:
        middle = words.index(":")
        return [words[:middle], words[middle + 1 :]]

    first, second = (
        ["--nodes=2", "--ntasks-per-node=1", "--ntasks=2"],
        ["--nodes=1", "--ntasks-per-node=2", "--ntasks=2"],
    )
    words = slurm.Slurm().command_on_nodes(["probe"], 3, None, settings)
    step = words.index("srun")
    assert words[:2] == ["salloc", "--quiet"], "tasks of srun alone do not learn which node has rank 0"
    assert parts(words[2:step]) == [
        ["--job-name=tutti", *first, "--gpus-per-node=v100:2", "--partition=old"],
        ["--job-name=tutti", *second, "--gpus-per-node=a100:2", "--partition=gpu"],
    ]
    steps = parts(words[step + 1 :])
    assert [part[:-1] for part in steps] == [
        ["--het-group=0", *first, "bash", "-c"],
        ["--het-group=1", *second, "bash", "-c"],
    ]
    assert all(part[-1].endswith("python3 -m tutti.cli.main probe") for part in steps)
    assert [asked[:2] for asked in answering] == [("srun", "--test-only")] * 2, "each part is tried first"
    assert "--ntasks-per-node=4" in parts(slurm.Slurm().command_on_nodes(["probe"], 3, 4, settings))[0]
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert slurm.Slurm().command_on_nodes(["probe"], 3, None, settings) == words[step:], "the nodes are there"
