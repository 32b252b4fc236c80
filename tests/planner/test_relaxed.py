"""Strategies that send less are chosen only where they surely pay and the request allows them."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from cost_model.examples import cluster, cpu, link, mlp
from tutti.config import serialization
from tutti.config.cluster import ClusterSpec, CompressRate
from tutti.config.compression import Compression, parse_compression
from tutti.config.plan import BatchPlan, Plan, SyncPlan
from tutti.config.sync_notation import format_relaxation, parse_sync
from tutti.cost_model import predict
from tutti.errors import PlanError
from tutti.planner import Choice, NoiseScale, PlanRequest, choose, explain, rows
from tutti.planner.relaxed_search import TriedStrategy, _costed
from tutti.planner.relaxed_strategies import (
    BEGINS,
    RELAXED_STRATEGIES,
    REQUIRED_SAVING,
    REQUIRED_SAVING_OVERSUBSCRIBED,
    RelaxedStrategy,
    correctable,
    samples_of,
    strategies,
)

MODEL = mlp(1826, 3)
"""A model of 10 million parameters."""

SCRIPT = Plan(batch=BatchPlan(global_batch_size=2048))

MBIT = 1.25e5
"""Bytes per second of one Mbit/s."""

KERNELS = tuple(
    CompressRate(method=strategy.words, numel=numel, encode_s=3e-9 * numel, decode_s=1e-9 * numel)
    for strategy in RELAXED_STRATEGIES
    if strategy.compress is not None
    for numel in (2**14, 2**22)
)
"""Measured kernels that take about 7 ns per value."""


def hosts(mbit: float, count: int = 4, **changes: Any) -> ClusterSpec:
    wires = (link("node"), link("network", 1e-4, mbit * MBIT))
    device = cpu(**{"compress_rates": KERNELS, **changes})
    return cluster(device, wires, devices_per_node=1, count=count)


def asked(relax: Any = "relaxed", **changes: Any) -> PlanRequest:
    return PlanRequest(**{"script": SCRIPT, "degree": 4, "relax": relax, **changes})


def chosen(mbit: float, relax: Any = "relaxed", **changes: Any) -> Choice:
    return choose(MODEL, hosts(mbit), asked(relax, **changes))


def way_of(choice: Choice) -> str:
    return format_relaxation(choice.best.sync) or choice.best.sync.mode


@pytest.mark.parametrize(
    ("optimizer", "mbit", "reduced", "relaxed"),
    [
        ("SGD", 100_000, "synchronous", "synchronous"),  # practically unlimited
        ("SGD", 1000, "bytegrad", "local:period=4 in qsgd,bits=4"),
        ("SGD", 100, "powersgd,rank=2", "local:period=16 in qsgd,bits=4"),
        ("Adam", 1000, "bytegrad", "local:period=4,optimizer_state=corrected in qsgd,bits=4"),
        ("Adagrad", 1000, "bytegrad", "bytegrad"),  # its averages take more samples
        ("Adam", 100, "powersgd,rank=2", "local:period=16,optimizer_state=corrected in qsgd,bits=4"),
        ("Adagrad", 100, "powersgd,rank=2", "local:period=8,delay=1 in qsgd,bits=4"),
    ],
)
def test_an_mlp_of_ten_million_on_three_networks(optimizer: str, mbit: float, reduced: str, relaxed: str) -> None:
    model = replace(MODEL, optimizer=optimizer)
    exact = choose(model, hosts(mbit), asked("exact"))
    assert exact.relaxation is None
    assert exact.best.sync == SCRIPT.sync
    for relax, expected in (("reduced", reduced), ("relaxed", relaxed)):
        choice = choose(model, hosts(mbit), asked(relax))
        assert way_of(choice) == expected
        assert choice.relaxation is not None
        assert choice.relaxation.chosen == (expected != "synchronous")
        assert choice.relaxation.exact_step_s == exact.prediction.step_time_s.value
        assert serialization.loads(Choice, serialization.dumps(choice)) == choice


@cache
def at_every_rate() -> tuple[tuple[float, Choice], ...]:
    return tuple((mbit, chosen(mbit)) for mbit in (30, 300, 1500, 10_000, 100_000))


def test_more_bandwidth_never_makes_it_more_attractive() -> None:
    gains, still = [], []
    for _, choice in at_every_rate():
        assert choice.relaxation is not None
        gains.append(choice.relaxation.exact_step_s / choice.relaxation.step_s)
        still.append(choice.relaxation.chosen)
    assert gains == sorted(gains, reverse=True)
    assert still == sorted(still, reverse=True)
    assert still[0]
    assert not still[-1]


def test_what_is_chosen_is_quicker_also_where_links_and_kernels_are_in_the_exact_plans_favour() -> None:
    for mbit, choice in at_every_rate():
        assert choice.relaxation is not None
        if not choice.relaxation.chosen:
            continue
        quick = hosts(mbit * choice.relaxation.links)
        device = quick.devices["d"]
        slow = tuple(
            replace(
                rate,
                encode_s=rate.encode_s * choice.relaxation.kernels,
                decode_s=rate.decode_s * choice.relaxation.kernels,
            )
            for rate in device.compress_rates
        )
        worst = replace(quick, devices={"d": replace(device, compress_rates=slow)})
        worst = replace(
            worst,
            links=tuple(replace(link, latency_s=link.latency_s / choice.relaxation.links) for link in worst.links),
        )
        exact = choose(MODEL, worst, asked("exact")).prediction.step_time_s.value
        assert predict(MODEL, worst, choice.best).step_time_s.value * choice.relaxation.samples < exact


@pytest.mark.parametrize(
    ("mbit", "rates", "least", "words"),
    [
        (1500, (), 0.05, "that would be no gain if"),
        (3000, KERNELS, 0.0, "a gain of 4%, too small to change training for"),
    ],
)
def test_a_gain_that_is_small_or_within_the_predictions_error_is_not_taken(
    mbit: float, rates: tuple[CompressRate, ...], least: float, words: str
) -> None:
    """Between bandwidths at which a strategy pays and those at which it does not, it is faster without being chosen.

    The gain is uncertain where nobody measured the kernels, or too small to change training for.
    """
    choice = choose(MODEL, hosts(mbit, compress_rates=rates), asked("reduced"))
    assert choice.relaxation is not None
    assert choice.relaxation.step_s * choice.relaxation.samples < (1 - least) * choice.relaxation.exact_step_s
    assert not choice.relaxation.chosen
    assert choice.best.sync == SCRIPT.sync
    assert words in explain(choice)


def test_where_hosts_take_turns_on_cores_a_gain_must_be_larger() -> None:
    separate = hosts(2000)
    shared = replace(separate, nodes=tuple(replace(node, turns=2.0) for node in separate.nodes))
    uncontended, in_turns = (choose(MODEL, machines, asked("reduced")) for machines in (separate, shared))
    assert uncontended.relaxation is not None
    assert in_turns.relaxation is not None
    assert uncontended.relaxation.chosen
    assert not in_turns.relaxation.chosen
    gain = 1 - in_turns.relaxation.step_s * in_turns.relaxation.samples / in_turns.relaxation.exact_step_s
    assert REQUIRED_SAVING < gain < REQUIRED_SAVING_OVERSUBSCRIBED
    assert "too small to change training for" in explain(in_turns)


def test_where_hosts_take_turns_a_way_that_computes_nothing_more_needs_no_larger_gain() -> None:
    """Averages without a codec compute nothing that could cost more than predicted."""
    separate = hosts(2000)
    shared = replace(separate, nodes=tuple(replace(node, turns=2.0) for node in separate.nodes))
    (rare,) = [strategy for strategy in RELAXED_STRATEGIES if strategy.words == "local:period=8"]
    exact = choose(MODEL, shared, asked("exact"))
    base = _costed(shared, asked(), exact.best, exact.prediction)
    coded = replace(rare, compress=Compression(method="qsgd", bits=8))
    (often,) = [strategy for strategy in RELAXED_STRATEGIES if strategy.words == "qsgd,bits=8"]
    worth = {
        strategy.words: TriedStrategy(
            strategy=strategy, costed=base, samples=1.0, evidence="assumed", totals=exact.totals
        ).required_saving
        for strategy in (rare, coded, often)
    }
    assert worth[rare.words] == REQUIRED_SAVING
    assert worth[often.words] == REQUIRED_SAVING_OVERSUBSCRIBED
    assert worth[coded.words] - REQUIRED_SAVING == pytest.approx((REQUIRED_SAVING_OVERSUBSCRIBED - REQUIRED_SAVING) / 8)


def counted_with(optimizer: str) -> dict[tuple[str, int], float]:
    """Return the counted samples by strategy and number of replicas."""
    return {
        (strategy.words, replicas): samples_of(
            strategy, asked(), replace(SCRIPT, mesh={"replicate": replicas}), optimizer
        )[0]
        for strategy in RELAXED_STRATEGIES
        if strategy.mode == "local"
        for replicas in (1, 2, 4)
    }


@pytest.mark.parametrize(
    ("optimizer", "waited", "half", "delayed"),
    [("SGD", 0.01, 0.05, 0.14), ("AdamW", 0.1, 0.15, 0.3), ("", 0.1, 0.15, 0.3), ("SGD, Adam", 0.1, 0.15, 0.3)],
)
def test_averages_are_counted_with_more_samples_the_more_replicas_and_where_steps_are_normalised(
    optimizer: str, waited: float, half: float, delayed: float
) -> None:
    counted = counted_with(optimizer)
    for others in (0, 1, 3):
        for period in (4, 8, 16):
            assert counted[f"local:period={period}", others + 1] == pytest.approx(1 + waited * others)
            late = counted[f"local:period={period},delay={period // 2}", others + 1]
            assert late == pytest.approx(1 + half * others)
        assert counted["local:period=8,delay=8", others + 1] == pytest.approx(1 + delayed * others)
    assert counted["local:period=8 in qsgd,bits=4", 4] == counted["local:period=8", 4]


def test_moments_are_corrected_of_optimizers_that_have_them() -> None:
    """Corrected averages take fewer samples. Uncorrected ones are offered only if a past run measured them."""
    third = tuple(replace(module, optimizer_nbytes=3 * module.gradient_nbytes) for module in MODEL.modules)
    assert correctable(replace(MODEL, optimizer="AdamW"))
    assert not any(correctable(replace(MODEL, optimizer=name)) for name in ("SGD", "AdamW, SGD", ""))
    assert not correctable(replace(MODEL, optimizer="AdamW", modules=third))  # amsgrad
    averages = ("local", "post-local")
    for corrected in (True, False):
        assert {
            strategy.corrects
            for strategy in strategies(asked(), 1000, corrected=corrected)
            if strategy.mode in averages
        } == {corrected}
    past = strategies(asked(samples={"local:period=8": 1.1}), 1000, corrected=True)
    assert not any(
        strategy.corrects
        for strategy in strategies(asked(samples={"local:period=8,optimizer_state=corrected": 1.0}), 1000)
    )
    assert [strategy.words for strategy in past if strategy.mode in averages and not strategy.corrects] == [
        "local:period=8"
    ]
    four = replace(SCRIPT, mesh={"replicate": 4})
    allowances = {
        strategy.words: samples_of(strategy, asked(), four, "AdamW")[0]
        for strategy in RELAXED_STRATEGIES
        if strategy.mode in averages
    }
    for words, samples in allowances.items():
        if ",optimizer_state=corrected" in words:
            assert samples < allowances[words.replace(",optimizer_state=corrected", "")]


def test_kernels_that_nobody_measured_are_doubted_more() -> None:
    bare = hosts(1000, compress_rates=())
    assert choose(MODEL, hosts(1000), asked("reduced")).relaxation.kernels == 1.5  # type: ignore[union-attr]
    assert choose(MODEL, bare, asked("reduced")).relaxation.kernels == 2.0  # type: ignore[union-attr]


def test_the_mesh_is_chosen_with_the_way() -> None:
    """One device is best with exact gradient reduction. With a strategy that sends less, all devices are."""
    free = {"degree": None, "max_devices": 4}
    assert chosen(20, "exact", **free).best.world_size == 1
    choice = chosen(20, "reduced", **free)
    assert choice.best.mesh == {"replicate": 4}
    assert [row.reason for row in rows(choice)][1].startswith("exact gradient reduction;")


@pytest.mark.parametrize("mbit", [50, 1000])
@pytest.mark.parametrize("samples", [64, 2048])
def test_among_all_meshes_nothing_is_missed_that_copies_would_do(mbit: float, samples: int) -> None:
    """Replicas wait long for exact reduction, so the search drops them. Strategies for replicas bring them back."""
    request = asked(script=Plan(batch=BatchPlan(global_batch_size=samples)), degree=8)
    wide, copies = (choose(MODEL, hosts(mbit, 8), replace(request, scope=scope)) for scope in ("all", "data"))
    assert copies.best.mesh == {"replicate": 8}
    assert wide.relaxation is not None
    assert copies.relaxation is not None
    assert wide.relaxation.step_s * wide.relaxation.samples <= copies.relaxation.step_s * copies.relaxation.samples


def test_a_mesh_that_was_asked_for_stays() -> None:
    choice = chosen(100, degree=None, mesh={"replicate": 2, "shard": 2}, scope="all")
    assert choice.best.mesh == {"replicate": 2, "shard": 2}
    assert choice.best.sharding.level == 1  # compressed reductions give every rank the whole gradient
    assert way_of(choice).startswith("qsgd")


def test_one_rank_and_the_objective_memory_stay_exact_and_say_so() -> None:
    uncontended = chosen(100, degree=1)
    assert uncontended.best.sync == SCRIPT.sync
    assert "one rank sends nothing" in explain(uncontended)
    least = chosen(100, objective="memory")
    assert least.best.sync == SCRIPT.sync
    assert "no strategy that sends less takes less memory" in explain(least)


def test_runners_up_are_in_the_table_with_what_they_are_counted_with() -> None:
    choice = chosen(100)
    assert choice.relaxation is not None
    table_rows = rows(choice)
    assert table_rows[0].chosen
    assert table_rows[0].settings == "replicas local:period=16,optimizer_state=corrected in qsgd,bits=4"
    others = [row.reason for row in table_rows[2:] if "counting" in row.reason]
    assert any("times the samples (assumed)" in reason for reason in others)
    assert any(row.settings.startswith("replicas local") for row in table_rows)
    text = explain(choice)
    assert "even if links are 1.4 times as fast as predicted" in text
    assert f"Counting {choice.relaxation.samples:.3g} times the samples (assumed)" in text


def test_time_to_quality_counts_more_samples() -> None:
    noise = NoiseScale(critical_batch=2000.0, least_samples=1e6, evidence="measured")
    for mbit in (100, 1000):
        exact = chosen(mbit, "exact", objective="time-to-quality", noise=noise)
        choice = chosen(mbit, objective="time-to-quality", noise=noise)
        assert choice.relaxation is not None
        assert choice.totals is not None
        assert exact.totals is not None
        if choice.relaxation.chosen:
            assert choice.totals.time_s < exact.totals.time_s
    unbiased = next(strategy for strategy in RELAXED_STRATEGIES if strategy.words == "qsgd,bits=4")
    factor, evidence = samples_of(unbiased, asked(noise=noise), SCRIPT, "Adam")
    assert factor == pytest.approx((2048 + 1.04 * 2000) / (2048 + 2000))
    assert evidence == "measured"
    assert samples_of(unbiased, asked(), SCRIPT, "Adam") == (1.04, "assumed")


def test_what_past_runs_measured_counts_instead_of_what_is_assumed() -> None:
    best = chosen(100)
    assert best.relaxation is not None
    dear = {strategy.words: 100.0 for strategy in RELAXED_STRATEGIES if strategy.compress is not None}
    other = chosen(100, samples=dear)
    assert other.relaxation is not None
    assert way_of(other) == other.relaxation.strategy == "local:period=16,optimizer_state=corrected,delay=8"
    measured = chosen(100, samples={"local:period=16": 0.9, **dear})  # uncorrected, as in that run
    assert measured.relaxation is not None
    assert (measured.relaxation.samples, measured.relaxation.evidence) == (0.9, "measured")
    failed = chosen(100, samples={"local:period=16": None, **dear})
    assert failed.relaxation is not None
    assert failed.relaxation.chosen
    assert failed.relaxation.strategy != "local:period=16"


@pytest.mark.parametrize("words", ["top-k,density=0.01", "top16-q4", "powersgd,rank=2", "local:period=4"])
def test_a_way_is_chosen_only_where_it_saves_more_than_its_factor(words: str) -> None:
    """With a single strategy and falling bandwidth, it first saves less than its additional samples cost, then more."""
    model = replace(MODEL, optimizer="Adagrad")  # its moments cannot be corrected
    (tried,) = (strategy for strategy in RELAXED_STRATEGIES if strategy.words == words)
    others: dict[str, float | None] = {other.words: None for other in RELAXED_STRATEGIES if other is not tried}
    factor, _ = samples_of(tried, asked(), replace(SCRIPT, mesh={"replicate": 4}), MODEL.optimizer)
    saved, taken = [], []
    for mbit in (5000, 4000, 1500, 700, 400, 250, 100, 30):
        relaxation = choose(model, hosts(mbit), asked(samples=others)).relaxation
        assert relaxation is not None
        saved.append(relaxation.exact_step_s / relaxation.step_s)
        taken.append(relaxation.chosen)
        if relaxation.chosen:
            assert relaxation.samples == factor
            assert saved[-1] > factor
    assert any(1 < gain < factor for gain in saved)
    assert taken[-1]
    assert saved[-1] > factor


def test_a_way_that_keeps_more_back_is_counted_with_no_fewer_samples() -> None:
    factors = {
        strategy.words: strategy.samples
        for strategy in RELAXED_STRATEGIES
        if strategy.compress is not None and strategy.variance is None
    }
    assert factors["powersgd,rank=4"] <= factors["powersgd,rank=2"] <= factors["powersgd,rank=1"]
    assert max(factors["powersgd,rank=1"], factors["top-k,density=0.01"]) < factors["top16-q4"]
    text = explain(
        chosen(
            100,
            samples={strategy.words: None for strategy in RELAXED_STRATEGIES if strategy.words != "top-k,density=0.01"},
        )
    )
    assert "2.3 times the samples (assumed)" in text


def test_periods_stay_within_the_root_of_the_steps() -> None:
    def longest(steps: int | None) -> int:
        return max(strategy.relaxed.period or 1 for strategy in strategies(asked(), steps))

    assert (longest(None), longest(10_000), longest(100), longest(70)) == (16, 16, 8, 8)
    assert (longest(20), longest(3)) == (4, 1)
    short = chosen(
        100,
        samples={strategy.words: 10.0 for strategy in RELAXED_STRATEGIES if strategy.compress},
        train_samples=2048.0 * 40,
    )
    assert short.best.sync.relaxed.period == 4


def test_what_first_updates_take_counts_and_where_it_counts_for_little_replicas_begin_alike() -> None:
    """Replicas that start synchronously change less. In a short training the synchronous updates cost too much."""
    assert not any(strategy.relaxed.after for strategy in strategies(asked(), None))
    begun = [strategy for strategy in strategies(asked(), 1000) if strategy.relaxed.after]
    assert {strategy.relaxed.after for strategy in begun} == {BEGINS}
    model = replace(MODEL, optimizer="SGD")
    short, long = (choose(model, hosts(100), asked(train_samples=2048.0 * steps)) for steps in (40, 4000))
    assert (short.best.sync.relaxed.after, long.best.sync.mode) == (None, "post-local")
    (strategy,) = (strategy for strategy in begun if strategy.of(SCRIPT).sync == long.best.sync)
    plan = strategy.of(replace(SCRIPT, mesh={"replicate": 4}))
    prediction = predict(MODEL, hosts(100), plan)
    for steps in (3, 40, 4000):
        request = asked(train_samples=2048.0 * steps)
        (first,) = prediction.first
        whole = min(BEGINS, steps) * first.step_time_s + max(0, steps - BEGINS) * prediction.step_time_s.value
        base = _costed(hosts(100), request, plan, prediction)
        assert base.value * steps == pytest.approx(whole)


def test_the_dial_and_a_stated_way_exclude_each_other() -> None:
    for sync in (SyncPlan(compress=parse_compression("bytegrad")), parse_sync("local:8")):
        script = replace(SCRIPT, sync=sync)
        PlanRequest(script=script)
        with pytest.raises(PlanError, match="leave one out"):
            PlanRequest(script=script, relax="reduced")
    with pytest.raises(PlanError, match="above 0"):
        asked(samples={"bytegrad": 0.0})


@pytest.mark.parametrize("strategy", RELAXED_STRATEGIES, ids=lambda strategy: strategy.words)
def test_words_of_a_way_are_what_a_user_types(strategy: RelaxedStrategy) -> None:
    mode, _, code = (
        strategy.words.rpartition(" in ")
        if strategy.mode != "synchronous" and strategy.compress
        else ("", "", strategy.words)
    )
    if strategy.mode != "synchronous":
        assert parse_sync(mode or strategy.words) == SyncPlan(mode=strategy.mode, relaxed=strategy.relaxed)
        assert strategy.relaxation == "relaxed"
    if strategy.compress is not None:
        assert parse_compression(code) == strategy.compress
    if strategy.mode == "synchronous":
        assert strategy.compress is not None
        assert strategy.relaxation == ("exact" if strategy.compress.method == "factors" else "reduced")
    assert (strategy.variance is None) == (strategy.samples > 1 or strategy.each.others > 0)


def test_ways_go_on_plans_of_the_scripts_precision_where_a_lower_one_would_be_quicker() -> None:
    """Exact plans in a lower precision are only listed. They can be chosen only with --precision."""
    fast = tuple(replace(rate, dtype="bfloat16", flops_per_s=4 * rate.flops_per_s) for rate in cpu().gemm)
    both = hosts(100, gemm=(*cpu().gemm, *fast))
    kept = choose(MODEL, both, asked())
    assert any(other.plan.precision == "bfloat16" for other in choose(MODEL, both, asked("exact")).alternatives)
    assert kept.best.precision == "full"
    assert way_of(kept) != "synchronous"
    assert choose(MODEL, both, asked(precision="auto")).best.precision == "bfloat16"
