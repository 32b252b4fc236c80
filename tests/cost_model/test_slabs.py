"""Convolutions whose interior is computed while halos are in flight: the predicted cost of computing in pieces."""

from dataclasses import replace
from typing import Any

import pytest

from cost_model.examples import cluster, cpu, link
from cost_model.examples_mesh import meshed, part
from tutti.config.model import ModelSpec
from tutti.config.plan import Plan
from tutti.cost_model import cost_constants, predict
from tutti.cost_model.step_time import worked_out
from tutti.cost_model.step_timeline import passes_of
from tutti.parallel.spatial import spatial_convolution

KEPT, OUT, PARAMETERS, FLOPS, BATCH = 4e6, 8e6, 1000, 1e9, 8
FAST, MOVES = 1e10, 1e10
"""FLOP/s and bytes/s of a core."""


def model(halo: float, out: float = OUT) -> ModelSpec:
    """Return one convolution with `halo` bytes per sample across a cut, counted for both of its sides."""
    conv = part("a", flops=FLOPS, parameters=PARAMETERS, kept=KEPT, spatial=True, output_nbytes=out,
                halo_nbytes_by_dim=(halo, halo))  # fmt: skip
    return ModelSpec(name="conv", modules=(conv,), optimizer="SGD", tokens_per_sample=0, dtype="bfloat16")


def passes(plan: Plan, spec: ModelSpec) -> Any:
    device = cpu(
        gemm=(), cores=4, peak_flops_per_s={"bfloat16": 4 * FAST}, memory_bandwidth_bytes_per_s=4 * MOVES
    )  # fmt: skip
    links = (link("node", core_s_per_nbyte=0.0),)  # hidden transfers take no core time
    step = worked_out(spec, cluster(replace(device, evidence="published"), links), plan)
    (found,) = passes_of(step.setting, step.replicas[0]).values()
    return found, step.setting.workers[0]


def test_rows_apart_move_more_and_slabs_are_slower() -> None:
    halo = KEPT / 16
    plan = meshed(BATCH, 1, {"space": 2})
    apart, worker = passes(plan, model(halo))
    whole, _ = passes(plan, model(0.0))
    share = 2 * (halo / KEPT)  # the part of a rank's half at its two edges: a halo and padding
    for direction, weights in (("forward", worker.weights.forward_s), ("backward", 2 * worker.weights.backward_s)):
        name = f"{direction}_s"
        inside, out = cost_constants.PIECEWISE_PASSES[direction]
        moved = (inside * KEPT + out * OUT) * BATCH / 2 / worker.bandwidth_bytes_per_s
        again = 2 * PARAMETERS * (weights + (3 / worker.bandwidth_bytes_per_s if direction == "backward" else 0.0))
        calls = cost_constants.PIECEWISE_CALLS[direction] * worker.call_s
        before = float(getattr(whole, name)[0])
        slower = before * share * (1 / cost_constants.SLAB_EFFICIENCY[direction] - 1)
        assert float(getattr(apart, name)[0]) - before == pytest.approx(moved + again + calls + slower)
    assert apart.limits.sum() == pytest.approx(float((apart.forward_s + apart.backward_s).sum()))


def test_without_halos_or_a_cut_nothing_is_apart() -> None:
    uncontended, copies = meshed(BATCH), meshed(2 * BATCH, 1, {"replicate": 2})
    for plan in (uncontended, copies):
        with_halos, without = (passes(plan, model(halo))[0] for halo in (KEPT / 16, 0.0))
        assert with_halos.forward_s == pytest.approx(without.forward_s)
        assert with_halos.backward_s == pytest.approx(without.backward_s)


def test_where_less_of_a_part_needs_no_halo_all_of_it_waits() -> None:
    """As in the runtime, nothing is computed in pieces then, and no halo is hidden."""
    assert cost_constants.LEAST_INTERIOR == spatial_convolution.LEAST_INTERIOR
    plan = meshed(BATCH, 1, {"space": 2})
    whole, _ = passes(plan, model(0.0))
    (apart, _), (waiting, worker) = (passes(plan, model(share * KEPT)) for share in (0.125, 0.13))
    for direction in ("forward", "backward"):
        name = f"{direction}_s"
        inside, calls = cost_constants.HALO_PASSES[direction], cost_constants.HALO_CALLS[direction]
        more = inside * KEPT * BATCH / 2 / worker.bandwidth_bytes_per_s + calls * worker.call_s
        before = float(getattr(whole, name)[0])
        assert float(getattr(waiting, name)[0]) - before == pytest.approx(more)
        assert float(getattr(apart, name)[0]) - before > more
        waited, taken = (
            [getattr(layout.waits, f"{direction}{of}").sum() for layout in (apart, waiting)] for of in ("_s", "_link_s")
        )
        assert waited[0] < 0.7 * taken[0]
        assert waited[1] == pytest.approx(taken[1])


def test_of_two_dims_the_second_is_waited_for() -> None:
    """The interior is computed while the halos of the first dim are in flight.

    The gradients of the last dim's halos return behind it.
    """
    row, square = (
        passes(meshed(BATCH, 1, {"space": 4}, space_grid=grid), model(KEPT / 32))[0] for grid in ((4,), (2, 2))
    )
    shares = [float(layout.waits.forward_s[0] / layout.waits.forward_link_s.sum()) for layout in (row, square)]
    assert shares[0] < 0.35
    assert shares[1] > 0.5


def test_more_parts_have_more_slabs() -> None:
    """Inside a row of four, a rank has two sides. In a grid of two by two, it has a slab of each dim."""
    spec = model(KEPT / 16)
    device = cpu(gemm=(), cores=4, peak_flops_per_s={"bfloat16": 4 * FAST})
    seconds = [
        predict(spec, cluster(replace(device, evidence="published")), meshed(BATCH, 1, mesh, **more)).phases["forward"]
        for mesh, more in (({"replicate": 4}, {}), ({"space": 4}, {"space_grid": (2, 2)}), ({"space": 4}, {}))
    ]
    assert seconds[0] < seconds[1] < seconds[2]
