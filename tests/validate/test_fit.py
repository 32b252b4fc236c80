"""The fit finds constants that made the times, leaves alone what the rows do not say, and scores by the book."""

from dataclasses import replace

import numpy as np
import pytest

from tutti.config.cluster import GemmRate
from tutti.config.plan import BatchPlan, Plan
from tutti.cost_model import predict
from tutti.profile.architectures import architecture
from tutti.profile.catalog.text_models import cluster_from_text
from tutti.validation.cluster_fit import (
    NAMES,
    NOISE,
    PRIOR,
    UNFITTED,
    Constants,
    Fit,
    Sample,
    _capped,
    _minimise,
    apply_fit,
    fit_constants,
    fitted_cluster,
)
from tutti.validation.scoring import Scored, errors, regret

CLUSTER = cluster_from_text("2x8:a100-80gb,nvlink3,8*ib-hdr")
TRUTH = Constants(rate=-0.2, half_size=0.3, bandwidth=-0.1, call=0.5, network_bandwidth=-0.4)


def samples(truth: Constants, count: int = 20) -> list[Sample]:
    """Steps of small GPTs of several widths, batches and ranks, as a cluster with these constants would take them."""
    made = []
    real = fitted_cluster(CLUSTER, truth, "truth")
    for index in range(count):
        width, ranks, each = 512 * 2 ** (index % 4), (1, 8, 16)[index % 3], 1 + index % 5
        options = {"layers": 2, "hidden": width, "heads": 4, "seq_len": 256, "vocab": 1000, "dtype": "float16"}
        model = architecture("gpt", options)
        plan = Plan(batch=BatchPlan(global_batch_size=each * ranks), mesh={"replicate": ranks})
        seconds = predict(model, real, plan).step_time_s.value
        made.append(Sample(model=model, cluster=CLUSTER, plan=plan, measured_s=seconds))
    return made


def test_a_fit_predicts_what_it_was_not_fitted_to() -> None:
    rows = samples(TRUTH, 26)
    fit = fit_constants(rows[:16])
    assert fit.after < 0.03 < fit.before
    fitted = [apply_fit(fit, row.cluster, "fit") for row in rows[16:]]
    done = [predict(row.model, cluster, row.plan) for row, cluster in zip(rows[16:], fitted, strict=True)]
    off = [abs(one.step_time_s.value / row.measured_s - 1) for one, row in zip(done, rows[16:], strict=True)]
    assert np.mean(off) < 0.03


def test_constants_that_no_row_speaks_of_stay_as_they_were() -> None:
    alone = [row for row in samples(TRUTH) if row.plan.world_size == 1]
    fit = fit_constants(alone, few=2)
    assert (fit.constants.network_bandwidth, fit.constants.node_bandwidth) == pytest.approx((0.0, 0.0), abs=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_the_minimum_is_scipys(seed: int) -> None:
    """Sums of two times in unlike proportions, some rows misprinted by a factor: as much is gained within 1 %."""
    optimize = pytest.importorskip("scipy.optimize")
    draw = np.random.default_rng(seed)
    parts, truth = draw.uniform(0.05, 1.0, (40, len(NAMES))), draw.normal(0, 0.5, len(NAMES))
    measured = np.log(parts @ np.exp(truth)) + draw.normal(0, 0.05, 40)
    measured[:3] += 1.5

    def logs(values: np.ndarray) -> np.ndarray:
        return np.log(parts @ np.exp(values)) - measured

    def cost(values: np.ndarray) -> float:
        residual = np.concatenate([_capped(logs(values)), NOISE / PRIOR * values])
        return float(residual @ residual)

    start = np.zeros(len(NAMES))
    own = _minimise(logs, start, np.ones(len(NAMES), dtype=np.bool_))
    theirs = optimize.least_squares(lambda v: np.concatenate([_capped(logs(v)), NOISE / PRIOR * v]), start)
    assert cost(start) - cost(own) >= 0.99 * (cost(start) - cost(theirs.x)) > 0.1


def test_few_rows_give_one_factor() -> None:
    rows = [replace(row, measured_s=2 * row.measured_s) for row in samples(UNFITTED, 6)]
    fit = fit_constants(rows)
    assert fit.scale == pytest.approx(2.0)
    assert fit.constants == UNFITTED
    first = rows[0]
    before = predict(first.model, fitted_cluster(CLUSTER, UNFITTED, ""), first.plan).step_time_s.value
    after = predict(first.model, apply_fit(fit, CLUSTER, "fit"), first.plan).step_time_s.value
    assert after == pytest.approx(2 * before, rel=0.2)  # what Python takes between steps is not scaled


def test_one_misprinted_row_bends_no_fit() -> None:
    rows = samples(TRUTH)
    broken = [replace(rows[0], measured_s=100 * rows[0].measured_s), *rows[1:]]
    straight, bent = fit_constants(rows).constants.array(), fit_constants(broken).constants.array()
    assert np.abs(straight - bent).max() < 0.7


def test_a_fitted_cluster_is_new_and_says_so() -> None:
    made = apply_fit(Fit(constants=TRUTH, rows=20), CLUSTER, "fitted to 20 rows")
    assert made != CLUSTER
    assert all(device.source.startswith("fitted to 20 rows") for device in made.devices.values())
    assert all(device.evidence == "measured" for device in made.devices.values())
    assert apply_fit(Fit(), CLUSTER, "nothing") == CLUSTER
    assert set(NAMES) == set(Constants.__dataclass_fields__)


def test_links_that_hosts_have_of_their_own_are_fitted_too() -> None:
    own = replace(CLUSTER, nodes=tuple(replace(node, links=CLUSTER.links) for node in CLUSTER.nodes), links=())
    made, shared = (fitted_cluster(one, TRUTH, "fit") for one in (own, CLUSTER))
    assert [node.links for node in made.nodes] == [shared.links]
    assert shared.links != CLUSTER.links


def test_a_probed_machine_keeps_what_its_probe_found_between_sizes_and_neighbours() -> None:
    rates = tuple(GemmRate(dtype="float32", n=n, flops_per_s=1e9 * n, concurrent=k) for n in (64, 256) for k in (1, 2))
    part = replace(
        next(iter(CLUSTER.devices.values())), kind="cpu", cores=2, evidence="measured", gemm=rates[::2],
        gemm_concurrent=rates[1::2], kernel_overhead_s=1e-6,
    )  # fmt: skip
    probed = replace(CLUSTER, devices={part.name: part})
    made = fitted_cluster(probed, Constants(rate=np.log(0.5)), "fit").devices[part.name]
    for before, after in zip((*part.gemm, *part.gemm_concurrent), (*made.gemm, *made.gemm_concurrent), strict=True):
        assert after.flops_per_s == pytest.approx(before.flops_per_s / 2)
    assert made.memory_bandwidth_bytes_per_s == part.memory_bandwidth_bytes_per_s


def scored(name: str, measured: float, predicted: float, memory: float | None = None) -> Scored:
    return Scored(
        row_id=name, contest=("one",), measured_s=measured, predicted_s=predicted, low_s=0.9 * predicted,
        high_s=1.1 * predicted, memory_nbytes=9.0, measured_memory_nbytes=memory,
    )  # fmt: skip


def test_scores_are_those_worked_by_hand() -> None:
    rows = [scored("a", 1.0, 1.2), scored("b", 2.0, 1.9, 10.0), scored("c", 4.0, 3.0), scored("d", 1.1, 1.1)]
    found = errors(rows)
    assert found is not None
    assert found.mean == pytest.approx((0.2 + 0.05 + 0.25 + 0.0) / 4)
    assert found.median == pytest.approx(0.125)
    assert found.bias == pytest.approx((0.2 - 0.05 - 0.25) / 4)
    assert found.within == 0.5
    assert found.top1_regret == pytest.approx(0.1)  # d is predicted best, a is
    assert found.top5_regret is None
    assert found.rank_correlation == pytest.approx(0.8)
    assert (found.memory_rows, found.memory_mean) == (1, pytest.approx(0.1))
    assert found.memory_worst_under == pytest.approx(-0.1)
    assert errors([]) is None


def test_regret_falls_with_what_is_tried() -> None:
    rows = [scored(str(index), 1.0 + index, 9.0 - index) for index in range(8)]
    regrets = [regret(rows, count) for count in range(1, 9)]
    assert regrets == sorted(regrets, reverse=True)
    assert regrets[0] == 7.0
    assert regrets[-1] == 0.0
