"""Time of the search for the best plan: large uniform clusters, mixed clusters, a mixture of experts on mixed devices.

No device is used: clusters come from data sheets, models from the catalogue. Wall and CPU seconds are those of a
whole search under the limits that `tutti plan` sets. Targets are 10 s for equal devices and 60 s for mixed ones, on
2 cores.
"""

import time
from dataclasses import dataclass
from typing import Any

from tutti.commands.planning import search
from tutti.config.cluster import ClusterSpec, NodeSpec
from tutti.config.plan import BatchPlan, Plan
from tutti.planner import PlanRequest
from tutti.planner.plan_description import plan_words
from tutti.profile import catalog
from tutti.profile.architectures import architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A named model on nodes of 8 devices.

    Attributes:
        name: its name in the table.
        model: name of an architecture or a published model.
        sizes: sizes of the architecture.
        nodes: (device, number of nodes) of each group.
        batch: global batch, in samples.
        target_s: aim for the wall time.
    """

    name: str
    model: str
    sizes: tuple[tuple[str, int], ...] = ()
    nodes: tuple[tuple[str, int], ...]
    batch: int
    target_s: float = 10.0


A100, H100, H200 = "A100-SXM4-80GB", "H100-SXM5-80GB", "H200-SXM-141GB"
TRILLION = (("layers", 61), ("hidden", 7168), ("heads", 64), ("kv_heads", 8), ("expert_ffn", 2048), ("experts", 384),
            ("top_k", 8), ("seq_len", 4096), ("vocab", 163840))  # fmt: skip

CASES = (
    Case(name="GPT 13 B, 64", model="gpt3-13b", nodes=((H100, 8),), batch=512),
    Case(name="ResNet-50, 1,024", model="resnet50", nodes=((A100, 128),), batch=8192),
    Case(name="Llama 70 B, 4,096", model="llama3-70b", nodes=((H100, 512),), batch=1024),
    Case(name="GPT 175 B, 10,000", model="gpt3-175b", nodes=((H100, 1250),), batch=2048),
    Case(name="GPT 175 B, 16,384", model="gpt3-175b", nodes=((H100, 2048),), batch=3072),
    Case(name="GPT 1 T, 16,384", model="megatron-1t", nodes=((H100, 2048),), batch=3072),
    Case(name="Llama 70 B, 256 mixed", model="llama3-70b", nodes=((H100, 16), (A100, 16)), batch=1024, target_s=60.0),
    Case(name="MoE 1 T, 480 mixed", model="moe", sizes=TRILLION, nodes=((H100, 30), (H200, 30)), batch=960,
         target_s=60.0),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How many of the cases are searched, in order, and how often each."""

    cases: int = len(CASES)
    repeats: int = 1


QUICK = Sizes(cases=2)


def cluster_of(case: Case) -> ClusterSpec:
    """Return the cluster of a case: NVLink within nodes, 8 ports of InfiniBand NDR for each node."""
    whole = catalog.cluster_from_parts(
        case.name, H100, devices_per_node=8, nodes=2, node_link="NVLink4", network="InfiniBand-NDR-400", network_ports=8
    )
    devices = {name: catalog.device(name) for name, _ in case.nodes}
    nodes = tuple(
        NodeSpec(name=name, device=name, devices_per_node=8, count=count, memory_nbytes=8 * devices[name].memory_nbytes)
        for name, count in case.nodes
    )
    return ClusterSpec(name=case.name, devices=devices, nodes=nodes, links=whole.links)


def measure(sizes: Sizes) -> dict[str, Any]:
    """Search every case. Returns {"cases": {name: times and the plan found}}."""
    return {"cases": {case.name: _measured(case, sizes.repeats) for case in CASES[: sizes.cases]}}


def _measured(case: Case, repeats: int) -> dict[str, Any]:
    machines = cluster_of(case)
    script = Plan(batch=BatchPlan(global_batch_size=case.batch), precision="bfloat16")
    wall, cpu = [], []
    for _ in range(repeats):
        model = architecture(case.model, dict(case.sizes))  # a new object, so that no cache has results for it
        began, used = time.perf_counter(), time.process_time()
        choice = search(model, machines, PlanRequest(script=script, scope="all"))
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - used)
    assert choice.coverage is not None
    return {
        "devices": machines.device_count,
        "parameters": model.parameters,
        "wall_s": wall,
        "cpu_s": cpu,
        "target_s": case.target_s,
        "considered": choice.coverage.considered,
        "costed": choice.coverage.costed,
        "left": choice.coverage.left,
        "gap": choice.coverage.gap,
        "plan": plan_words(choice.best),
        "ranks": choice.best.world_size,
        "predicted_step_s": choice.prediction.step_time_s.value,
    }


def rows(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table."""
    header = ["case", "wall s", "CPU s", "target s", "considered", "costed", "gap", "step s", "plan"]
    table = []
    for name, entry in result["cases"].items():
        table.append([
            name, f"{min(entry['wall_s']):.1f}", f"{min(entry['cpu_s']):.1f}", f"{entry['target_s']:.0f}",
            f"{entry['considered']:,}", f"{entry['costed']:,}", f"{entry['gap']:.0%}",
            f"{entry['predicted_step_s']:.3g}", f"{entry['plan']}",
        ])  # fmt: skip
    return header, table
