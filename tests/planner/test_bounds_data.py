"""Bounds with data loading on hosts of two kinds, for every plan of a small space.

No plan is below its bound, so the search misses nothing.
"""

import contextlib
import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from cost_model.examples import cpu, gpu, link, mlp, plan
from tutti.config.cluster import ClusterSpec, DeviceSpec, NodeSpec
from tutti.config.model import Loading, ModelSpec
from tutti.config.plan import Plan
from tutti.config.prediction import Prediction
from tutti.cost_model import predict
from tutti.cost_model.best_case import BestCase
from tutti.cost_model.best_case_memory import BestCaseMemory
from tutti.cost_model.plan_bounds import shape_bounds, variant_bounds
from tutti.errors import PlanError
from tutti.planner import PlanRequest, choose
from tutti.planner.candidates import limits_of
from tutti.planner.exploration import Explorer
from tutti.planner.mesh_enumeration import plan_of, shapes, variants
from tutti.planner.mixed_hardware import improved, orders
from tutti.planner.plan_description import plan_words
from tutti.planner.plan_search import TIE
from tutti.profile.architectures import architecture

ROUNDING = 1e-9


def hosts(
    slow: DeviceSpec,
    quick: DeviceSpec,
    counts: tuple[int, int] = (2, 1),
    cores: tuple[int, int] = (2, 16),
    **changes: Any,
) -> ClusterSpec:
    """Return a host of slow devices with a fast disk and few cores, and one of fast devices with a slow disk."""
    kinds = zip(("slow", "quick"), counts, (4e9, 5e8), cores, strict=True)
    nodes = tuple(
        NodeSpec(
            name=name,
            device=name,
            devices_per_node=count,
            memory_nbytes=2**36,
            disk_read_bytes_per_s=disk,
            cores=node_cores,
        )
        for name, count, disk, node_cores in kinds
    )
    links = (link("node", 1e-6, 1e11), link("network", 1e-6, 1e10))
    return ClusterSpec(name="unlike", devices={"slow": slow, "quick": quick}, nodes=nodes, links=links, **changes)


def cards(**changes: Any) -> ClusterSpec:
    return hosts(gpu(name="slow"), gpu(name="quick", peak_flops_per_s={"float32": 30e12}), **changes)


def processors() -> ClusterSpec:
    """Return a host with 4 cores and one with 2 that are half as fast; workers and ranks share the cores."""
    rates = tuple(dataclasses.replace(rate, flops_per_s=rate.flops_per_s / 2) for rate in cpu().gemm[:2])
    weak = cpu(name="slow", cores=2, memory_bandwidth_bytes_per_s=10e9, gemm=rates)
    return hosts(weak, cpu(name="quick"), (1, 1))


def like_devices() -> ClusterSpec:
    """Return hosts whose devices are alike and whose disks and cores are not."""
    pairs = hosts(gpu(name="slow"), gpu(name="quick"), (2, 2))
    return dataclasses.replace(pairs, nodes=tuple(dataclasses.replace(node, device="slow") for node in pairs.nodes))


LOADING: dict[str, Loading] = {
    "between steps": Loading(core_s=2e-5, wait_s=1e-5),
    "between steps, from storage": Loading(core_s=1e-5, stored_nbytes=2e4),
    "ahead": Loading(core_s=4e-5, workers=2),
    "ahead, from storage": Loading(core_s=1e-5, stored_nbytes=5e4, workers=2),
    "stream": Loading(core_s=1e-5, stored_nbytes=1e4, workers=1, stream=True),
    "stream between steps": Loading(core_s=1e-5, wait_s=1e-6, stream=True),
    "a little": Loading(core_s=1e-7),
    "parts between steps": Loading(core_s=1e-3, parts=True),
    "parts ahead": Loading(core_s=1e-3, stored_nbytes=1e5, workers=2, parts=True),
}

MACHINES: dict[str, ClusterSpec] = {
    "cards": cards(),
    "cards, shared storage": cards(shared_read_bytes_per_s=1e9),
    "processors": processors(),
    "like devices": like_devices(),
}

ROWS, PICTURES = "rows", "pictures"
BATCH = {ROWS: 12, PICTURES: 4}

QUICK = (
    (ROWS, "cards", "between steps"),
    (ROWS, "cards", "ahead, from storage"),
    (ROWS, "cards", "stream between steps"),
    (ROWS, "processors", "ahead"),
    (ROWS, "like devices", "between steps, from storage"),
    (PICTURES, "cards", "parts between steps"),
)
ALL = (
    *((ROWS, where, how) for where in MACHINES for how in LOADING if "parts" not in how),
    *((PICTURES, where, how) for where in ("cards", "like devices") for how in LOADING if "parts" in how),
)
CASES = [case if case in QUICK else pytest.param(*case, marks=pytest.mark.long) for case in ALL]


@functools.cache
def model_of(of: str) -> ModelSpec:
    if of == PICTURES:
        return architecture("unet", {"dims": 3, "widths": "8,16", "image": "16"})
    return mlp(512, 3)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A plan on one order of the hosts.

    Attributes:
        plan: the plan.
        prediction: its prediction.
        bound: lower bound of its step time.
        of_mesh: lower bound of the step time of any plan on its mesh.
    """

    plan: Plan
    prediction: Prediction
    bound: float
    of_mesh: float

    @property
    def step_s(self) -> float:
        return self.prediction.step_time_s.value


def asked(of: str) -> PlanRequest:
    return PlanRequest(script=plan(BATCH[of]), scope="all", allow_microbatches=True)


def every(model: ModelSpec, machines: ClusterSpec, request: PlanRequest) -> list[Seen]:
    """Return all plans of a space on all orders of the hosts, each also with shares and cuts by speed."""
    plans_seen: list[Seen] = []
    samples = request.script.batch.global_batch_size
    for order in orders(machines, model.loading):
        limits = limits_of(model, order, request)
        meshes, best_case = shapes(limits, request), BestCase(model, order, "full")
        best_memory = BestCaseMemory(best_case, request.script)
        strategies = variants(limits, meshes, np.arange(len(meshes), dtype=np.intp))
        bounds, coarse = (
            variant_bounds(best_memory, meshes, strategies, samples),
            shape_bounds(best_case, meshes, samples)[0],
        )
        for row in range(len(strategies)):
            whole = plan_of(model, request, meshes, strategies, row, "full")
            plans, count = [whole], 0
            while count < len(plans):
                with contextlib.suppress(PlanError):
                    seen = Seen(
                        plan=plans[count],
                        prediction=predict(model, order, plans[count]),
                        bound=float(bounds.step_s[row]),
                        of_mesh=float(coarse[int(strategies.shape[row])]),
                    )
                    plans_seen.append(seen)
                    if not count and best_case.mixed and whole.world_size > 1:
                        plans += improved(best_memory, order, whole, seen.prediction, samples)
                count += 1
    return plans_seen


@pytest.mark.parametrize(("of", "where", "how"), CASES)
def test_no_plan_is_below_its_bound_and_the_search_finds_the_best(of: str, where: str, how: str) -> None:
    model, machines, request = dataclasses.replace(model_of(of), loading=LOADING[how]), MACHINES[where], asked(of)
    plans_seen = every(model, machines, request)
    assert len(plans_seen) >= 100
    for seen_plan in plans_seen:
        assert seen_plan.bound <= seen_plan.step_s * (1 + ROUNDING), plan_words(seen_plan.plan)
        assert seen_plan.of_mesh <= seen_plan.step_s * (1 + ROUNDING), plan_words(seen_plan.plan)
    explorer = Explorer(model, orders(machines, model.loading), request, ["full"])
    explorer.run()
    assert explorer.coverage().left == 0
    got = min(candidate.value for candidate in explorer.costed if candidate.good)
    assert got == min(seen_plan.step_s for seen_plan in plans_seen if seen_plan.prediction.fits)


@pytest.mark.parametrize(
    ("of", "loading"),
    [
        (ROWS, Loading(core_s=1e-1)),
        (ROWS, Loading(wait_s=1e-1, workers=3)),
        (ROWS, Loading(core_s=1e-1, workers=1, stream=True)),
        (PICTURES, Loading(wait_s=1.0)),
        (PICTURES, Loading(wait_s=1.0, parts=True)),
    ],
)
def test_where_samples_cost_most_a_bound_is_little_else_than_their_time(of: str, loading: Loading) -> None:
    """All ranks have as many samples, on cores of their own hosts. The bound is the time of the rank that has most."""
    model, machines = dataclasses.replace(model_of(of), loading=loading), hosts(gpu(), gpu(name="q"), cores=(64, 64))
    for seen_plan in every(model, machines, asked(of)):
        if not seen_plan.plan.shares:
            assert 0.98 * seen_plan.step_s <= seen_plan.bound <= seen_plan.step_s * (1 + ROUNDING), plan_words(
                seen_plan.plan
            )


def test_what_is_chosen_is_as_quick_as_the_best_of_all() -> None:
    """Within what counts as equal. Neighbours of the best plan may be faster than any plan that is enumerated."""
    model, request = dataclasses.replace(model_of(ROWS), loading=LOADING["between steps"]), asked(ROWS)
    best = min(seen_plan.step_s for seen_plan in every(model, cards(), request) if seen_plan.prediction.fits)
    assert choose(model, cards(), request).prediction.step_time_s.value <= best * (1 + TIE)


def test_ranks_alike_that_load_themselves_do_so_beside_all_else() -> None:
    """Loading adds to a bound what it adds to the prediction."""
    without, with_data = (
        every(dataclasses.replace(model_of(ROWS), loading=loading), like_devices(), asked(ROWS))
        for loading in (None, LOADING["between steps"])
    )
    assert len(without) == len(with_data) >= 100
    for plain, loading_too in zip(without, with_data, strict=True):
        assert plain.plan == loading_too.plan
        added = loading_too.step_s - plain.step_s
        assert loading_too.bound - plain.bound == pytest.approx(added, rel=1e-9), plan_words(plain.plan)


def test_which_host_has_the_quick_disk_changes_nothing() -> None:
    """With equal devices, a plan that leaves hosts idle leaves those with the slow disk idle, in any order of hosts."""
    loading = Loading(stored_nbytes=2**20, workers=2)
    model, request = dataclasses.replace(model_of(ROWS), loading=loading), asked(ROWS)
    machines = like_devices()
    backwards = dataclasses.replace(machines, nodes=machines.nodes[::-1])
    assert machines.nodes[0].disk_read_bytes_per_s != machines.nodes[1].disk_read_bytes_per_s
    forwards_s, backwards_s = (
        choose(model, hosts_in_order, request).prediction.step_time_s.value for hosts_in_order in (machines, backwards)
    )
    assert forwards_s == backwards_s
