"""Which plan is chosen, and the reasons given for the others."""

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_model.examples import cluster, cpu, gpu, linear, link, mlp, plan
from tutti.config import serialization
from tutti.config.cluster import ClusterSpec, GemmRate, NodeSpec
from tutti.config.compression import Compression
from tutti.config.model import ModelSpec
from tutti.config.plan import LayoutRule
from tutti.cost_model import predict
from tutti.errors import PlanError
from tutti.planner import Alternative, Choice, PlanRequest, candidates, choose, explain, rows


def ask(batch: int = 64, **wishes: Any) -> PlanRequest:
    return PlanRequest(script=plan(batch), **wishes)


def cards(count: int = 1, per_node: int = 4, bandwidth: float = 1e11, **device: Any) -> ClusterSpec:
    links = (link("node", 1e-5, bandwidth), link("network", 1e-5, bandwidth))
    return cluster(gpu(**device), links, count=count, devices_per_node=per_node)


def other(choice: Choice, **wanted: Any) -> Alternative:
    """Return the first alternative whose plan has these ranks, this precision or these microbatches."""
    for alternative in choice.alternatives:
        intended = alternative.plan
        has = {
            "ranks": intended.world_size,
            "precision": intended.precision,
            "microbatches": intended.batch.num_microbatches,
        }
        if all(has[name] == value for name, value in wanted.items()):
            return alternative
    raise AssertionError(f"no alternative with {wanted}")


def test_the_choice_is_the_fastest_of_what_fits() -> None:
    model, machines, request = mlp(2048, 4), cards(), ask(1024)
    choice = choose(model, machines, request)
    costed = [predict(model, machines, intended) for intended in candidates(model, machines, request)]
    fastest = min(done.step_time_s.value for done in costed if done.fits)
    assert choice.prediction.fits
    assert choice.prediction.step_time_s.value <= 1.02 * fastest
    assert choice.prediction == predict(model, machines, choice.best)
    assert choice.best.world_size == 4


def test_one_device_wins_on_a_slow_link_and_the_words_say_why() -> None:
    slow = cards(bandwidth=1.25e7)
    choice = choose(mlp(1024), slow, ask())
    assert choice.best.world_size == 1
    lost = other(choice, ranks=2)
    assert "slower:" in lost.reason
    assert "of exposed communication at 100 Mbit/s (node)" in lost.reason
    assert "One device is predicted to be the fastest; 2 ranks would be" in explain(choice)


def test_fewer_ranks_lose_because_they_compute_more() -> None:
    choice = choose(mlp(4096), cards(), ask(4096))
    assert choice.best.world_size == 4
    assert "slower: one rank computes all samples;" in other(choice, ranks=1).reason
    assert "4 ranks, data parallel; one device would be" in explain(choice)


def test_more_devices_within_the_error_are_not_taken() -> None:
    # Nearly all of the step is work that every rank does, however many there are.
    model = dataclasses.replace(mlp(64, 1), modules=(linear("a", 64, 64),))
    choice = choose(model, cards(bandwidth=1e15), ask(4))
    assert choice.best.world_size == 1


def test_a_model_that_does_not_fit_at_once_gets_microbatches() -> None:
    layer = linear("a", 4096, 4096, activation_nbytes=float(2**26))
    model = ModelSpec(name="wide", modules=(layer,), optimizer="Adam")
    choice = choose(model, cards(), ask(1024, degree=1))
    assert choice.best.batch.num_microbatches == 8  # 64 GiB of activations: 8 GiB of them at once fit into 16 GiB
    assert other(choice, microbatches=4).reason.startswith("does not fit: needs ")
    assert "but a rank has 16.0 GiB" in other(choice, microbatches=4).reason
    assert "instead of 1" in explain(choice)


def test_a_model_too_large_for_every_device_is_refused_with_the_numbers() -> None:
    # 80 layers as large as those of Llama-70B, with Adam in float32: 4 x 70e9 x 4 bytes.
    layer = linear("layers", 8192, 106_500)
    modules = tuple(dataclasses.replace(layer, name=f"layers.{index}") for index in range(80))
    model = ModelSpec(name="70B", modules=modules, optimizer="AdamW")
    h100 = cards(64, 8, name="H100", memory_nbytes=80 * 2**30)
    with pytest.raises(PlanError, match=r"'70B' does not fit on cluster 'here'.* has 80.0 GiB; data parallelism") as no:
        choose(model, h100, ask(1024))
    assert "(1 rank, 16 microbatches)" in str(no.value) or "1 rank" in str(no.value)
    assert "needs 1.1 TiB" in str(no.value) or "needs 1.0 TiB" in str(no.value)


def test_precision_stays_unless_the_choice_is_left() -> None:
    model, machines = mlp(8192), cards()
    kept = choose(model, machines, ask(8192))
    assert kept.best.precision == "full"
    assert "changes the numbers: --precision auto allows it" in other(kept, precision="bfloat16").reason
    assert "--precision auto would allow a faster one" in explain(kept)
    free = choose(model, machines, ask(8192, precision="auto"))
    assert free.best.precision == "bfloat16"
    assert "slower" in other(free, precision="full").reason
    asked = choose(model, machines, ask(8192, precision="tf32"))
    assert {row.precision for row in rows(asked)} == {"tf32"}


def test_bfloat16_that_is_slow_on_this_cpu_is_not_chosen() -> None:
    slow = tuple(dataclasses.replace(rate, dtype="bfloat16", flops_per_s=3e9) for rate in cpu().gemm)
    choice = choose(mlp(2048), cluster(cpu(gemm=(*cpu().gemm, *slow))), ask(512, precision="auto", degree=1))
    assert choice.best.precision == "full"
    assert "bfloat16 is slower on four cores" in other(choice, precision="bfloat16").reason


def test_float16_is_tried_only_where_it_is_faster() -> None:
    asked = ask(precision="auto")
    assert {p.precision for p in candidates(mlp(), cards(), asked)} == {"full", "tf32", "bfloat16"}
    volta = cards(peak_flops_per_s={"float32": 15e12, "bfloat16": 15e12, "float16": 125e12})
    assert "float16" in {p.precision for p in candidates(mlp(), volta, asked)}


@pytest.mark.parametrize(("method", "tried"), [("one-bit-adam", False), ("one-bit", True), ("qsgd", True)])
def test_float16_is_tried_and_shown_only_with_codes_of_gradients(method: str, tried: bool) -> None:
    """float16 needs loss scaling, which momentum compression does not allow. That refusal once ended the search."""
    volta = cards(peak_flops_per_s={"float32": 15e12, "bfloat16": 15e12, "float16": 125e12})
    freeze_step = 5 if method == "one-bit-adam" else None
    coded = plan(8192).compressed(Compression(method=method, freeze_step=freeze_step))
    kept, free = PlanRequest(script=coded), PlanRequest(script=coded, precision="auto")
    assert ("float16" in {p.precision for p in candidates(mlp(8192), volta, free)}) == tried
    assert (
        "float16" in {alternative.plan.precision for alternative in choose(mlp(8192), volta, kept).alternatives}
    ) == tried


def test_a_precision_no_device_has_is_refused() -> None:
    with pytest.raises(PlanError, match="no rate for bfloat16"):
        choose(mlp(), cluster(), ask(precision="bfloat16"))
    assert {p.precision for p in candidates(mlp(), cluster(), ask(precision="auto"))} == {"full"}


def test_batch_statistics_hold_the_microbatches() -> None:
    layer = linear("norm", 512, 512, batch_statistics=True)
    model = ModelSpec(name="bn", modules=(layer,), optimizer="SGD")
    held = PlanRequest(script=plan(64, microbatches=4))
    assert {p.batch.num_microbatches for p in candidates(model, cluster(), held)} == {4}
    assert "normalises over the batch" in explain(choose(model, cluster(), held))
    free = dataclasses.replace(held, allow_microbatches=True)
    assert {p.batch.num_microbatches for p in candidates(model, cluster(), free)} > {1, 2, 4}
    asked = PlanRequest(script=plan(64, microbatches=4), keep_microbatches=True)
    assert {p.batch.num_microbatches for p in candidates(mlp(), cluster(), asked)} == {4}
    assert "stays 4, as asked" in explain(choose(mlp(), cluster(), asked))


def test_crowded_cores_lose_by_name() -> None:
    asked = choose(mlp(1024), cluster(), ask(degree=8))
    assert asked.best.world_size == 8
    assert explain(asked).count("8 ranks, as asked") == 1
    assert max(p.world_size for p in candidates(mlp(), cluster(), ask())) == 4


def test_max_devices_bounds_the_search() -> None:
    choice = choose(mlp(4096), cards(), ask(4096, max_devices=2))
    assert choice.best.world_size == 2
    assert max(row.ranks for row in rows(choice)) == 2
    with pytest.raises(PlanError, match="max_devices = 0"):
        ask(max_devices=0)


def test_degrees_above_the_batch_are_not_tried_or_refused() -> None:
    assert max(p.world_size for p in candidates(mlp(), cards(), ask(3))) == 3
    with pytest.raises(PlanError, match=r"8 ranks cannot share a global batch of 3 samples"):
        choose(mlp(), cards(), ask(3, degree=8))


def test_too_few_devices_for_the_degree() -> None:
    with pytest.raises(PlanError, match="at most 4"):
        choose(mlp(), cards(), ask(degree=5))


def test_a_missing_link_leaves_one_device_and_is_told() -> None:
    choice = choose(mlp(4096), cluster(gpu(), (), devices_per_node=4), ask(4096))
    assert choice.best.world_size == 1
    unknown = [a for a in choice.alternatives if a.prediction is None]
    assert "no link of tier 'node'" in unknown[0].reason


def mixed() -> ClusterSpec:
    quick = gpu(name="quick", peak_flops_per_s={"float32": 30e12})
    return ClusterSpec(
        name="mixed",
        devices={"slow": gpu(name="slow"), "quick": quick},
        nodes=(
            NodeSpec(name="a", device="slow", memory_nbytes=2**36),
            NodeSpec(name="b", device="quick", memory_nbytes=2**36),
        ),
        links=(link("network", 1e-6, 1e11),),
    )


def test_unequal_devices_get_shares_by_their_speed() -> None:
    choice = choose(mlp(8192, 2), mixed(), ask(8192, degree=2))
    slow, quick = choice.best.shares
    assert quick == 1
    assert slow == pytest.approx(1 / 3, abs=0.03)
    equal = next(a for a in choice.alternatives if not a.plan.shares and a.plan.world_size == 2)
    assert "equal shares on unequal devices (quick, slow)" in equal.reason
    assert "Shares follow the devices' speeds" in explain(choice)
    alike = candidates(mlp(), cards(), ask())
    assert not any(p.shares for p in alike)


def test_the_scripts_layout_and_sync_are_kept() -> None:
    script = plan(64, layout=(LayoutRule(modules="layers.*", recompute=True),))
    choice = choose(mlp(), cards(), PlanRequest(script=script))
    assert choice.best.layout == script.layout
    assert choice.best.sync == script.sync
    assert choice.best.batch.global_batch_size == 64


@settings(deadline=None, max_examples=30)
@given(batch=st.integers(1, 300), width=st.sampled_from([64, 1024]), bandwidth=st.sampled_from([1e7, 1e9, 1e11]))
def test_every_choice_round_trips_and_explains_every_loser(batch: int, width: int, bandwidth: float) -> None:
    choice = choose(mlp(width), cards(2, 2, bandwidth), ask(batch))
    assert serialization.loads(Choice, serialization.dumps(choice)) == choice
    assert all(alternative.reason for alternative in choice.alternatives)
    assert choice.best not in [alternative.plan for alternative in choice.alternatives]
    assert len(rows(choice)) == 1 + len(choice.alternatives)
    assert explain(choice).startswith("mlp on here: ")


def test_a_faster_network_never_lengthens_the_chosen_step() -> None:
    times = [
        choose(mlp(4096), cards(bandwidth=bandwidth), ask(4096)).prediction.step_time_s.value
        for bandwidth in (1e7, 1e8, 1e9, 1e10, 1e11)
    ]
    assert all(after <= before * 1.02 for before, after in pairwise(times))


def test_many_devices_are_searched_quickly_enough_to_list() -> None:
    plans = candidates(mlp(), cards(128, 8), ask(4096))
    assert max(p.world_size for p in plans) == 1024
    assert len(plans) < 1000


def test_measured_threads_matter() -> None:
    # Threads do not speed up a product here, and ranks do: four ranks with one thread each win.
    flat = tuple(GemmRate(dtype="float32", n=1000, threads=t, flops_per_s=10e9) for t in (1, 2))
    device = cpu(gemm=flat, memory_bandwidth_bytes_per_s=1e12)
    choice = choose(mlp(1024), cluster(device, (link(latency_s=1e-6, bandwidth=1e11),)), ask(4096))
    assert choice.best.world_size == 4
