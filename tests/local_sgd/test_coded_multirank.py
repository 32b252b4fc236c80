"""Replicas that tell each other in a code how far they went: bits, bytes, what is kept back, and what is refused."""

import functools
from dataclasses import replace

import pytest
import torch

from harness import run_ranks
from local_sgd.replicas import MODELS, Seen, Told, train_all
from local_sgd.simulated import assert_follow, doubles
from tutti.comm.world import join_world
from tutti.config.compression import all_reduce_sent_nbytes, parse_compression
from tutti.config.plan import BatchPlan, Plan
from tutti.config.refusals import check_plan
from tutti.config.sync_notation import format_relaxation, parse_sync
from tutti.errors import PlanError
from tutti.local_sgd.delayed_reduction import CompressedReplicaSum
from tutti.local_sgd.replica_group import FlatTensors, ReplicaGroup
from tutti.parallel.layout import Layout
from tutti.parallel.mesh import Mesh

EXACT = {
    "local": Told(sync="local:2", arguments={"momentum": 0.9}),
    "local, batch statistics": Told(sync="local:3", model="conv", batch=25, steps=7),
    "diloco": Told(sync="diloco:2", optimizer="AdamW", rate=0.01, steps=7),
    "local, delayed": Told(sync="local:period=3,delay=2", arguments={"momentum": 0.9}, steps=9),
    "local, delayed by a period": Told(sync="local:period=2,delay=2", model="conv", batch=25, steps=7),
}
AS_THEY_ARE = {
    "post-local": Told(sync="post-local:period=2,after=2", optimizer="AdamW", rate=0.01),
    "post-local, delayed": Told(sync="post-local:period=2,after=2,delay=1", optimizer="AdamW", rate=0.01),
    "frozen while an average travels": Told(
        sync="local:period=3,delay=3", freeze=(4, "first.bias"), optimizer="AdamW", rate=0.01, steps=8
    ),
    "frozen on the way": Told(sync="local:2", freeze=(3, "first.bias"), optimizer="AdamW", rate=0.01),
}
"""In a code that loses nothing the modes' own equations hold, and these give what they give without one."""

BEGIN = {"qsgd,bits=4": "qsgd,bits=4", "bfloat16": "bfloat16", "one-bit": "", "top-k,density=0.1": ""}
"""By the code of replicas' changes: that of gradients before replicas part, none where it keeps something back."""

CODES = ("float32", "bfloat16", "qsgd,bits=4", "bytegrad,feedback=true", "one-bit", "top-k,density=0.1",
         "top-k,density=0.1,sparse=true", "terngrad", "top16-q4", "powersgd,rank=1")  # fmt: skip
SIZES = pytest.mark.parametrize(
    "size", [pytest.param(2, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long)]
)
STEPS = 6


@functools.cache
def trained(size: int) -> list[dict[str, Seen]]:
    exact = {name: replace(told, compress="float64") for name, told in {**EXACT, **AS_THEY_ARE}.items()}
    coded = {code: Told(sync="local:2", compress=code, steps=STEPS) for code in CODES}
    plain = {f"{name}: as it is": told for name, told in AS_THEY_ARE.items()}
    delayed = {f"{code}, delayed": replace(told, sync="local:period=2,delay=2") for code, told in coded.items()}
    begun = {f"{code}, begun": Told(sync="post-local:period=2,after=3", compress=code) for code in BEGIN}
    equal = {f"{code or 'exact'}, equal": Told(compress=code, steps=3) for code in BEGIN.values()}
    return run_ranks(train_all, size, {**exact, **coded, **plain, **delayed, **begun, **equal}, size)


@SIZES
@pytest.mark.parametrize("name", EXACT)
def test_without_loss_every_replica_follows_the_modes_equations(size: int, name: str) -> None:
    ranks = [one[name] for one in trained(size)]
    assert_follow(EXACT[name], ranks, size)


@SIZES
@pytest.mark.parametrize("name", AS_THEY_ARE)
def test_without_loss_only_rounding_changes(size: int, name: str) -> None:
    for one in trained(size):
        coded, plain = one[name], one[f"{name}: as it is"]
        for step, expected in enumerate(plain.states):
            for key, value in expected.items():
                torch.testing.assert_close(coded.states[step][key], value, rtol=1e-11, atol=1e-12)


@SIZES
@pytest.mark.parametrize("code", BEGIN)
def test_before_they_part_replicas_sum_gradients_in_the_code(size: int, code: str) -> None:
    """Bit for bit what synchronous training does in it, and as many bytes; afterwards only changes are sent."""
    for one in trained(size):
        begun, equal = one[f"{code}, begun"], one[f"{BEGIN[code] or 'exact'}, equal"]
        for mine, theirs in zip(begun.states[:3], equal.states, strict=True):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(value, theirs[key]) for key, value in mine.items())
    first = trained(size)[0]
    sent = sent_by_step(first[f"{BEGIN[code] or 'exact'}, equal"], "gradients")
    assert sent_by_step(first[f"{code}, begun"], "gradients") == [*sent, 0, 0, 0]


@SIZES
@pytest.mark.parametrize("code", CODES)
def test_replicas_have_the_same_bits_after_each_exchange(size: int, code: str) -> None:
    ranks = [one[code] for one in trained(size)]
    names = dict(MODELS["mlp"][0]().named_parameters())
    for step in range(STEPS):
        alike = all(torch.equal(seen.states[step][key], ranks[0].states[step][key]) for seen in ranks for key in names)
        assert alike == (step % 2 == 1)
    assert all(torch.equal(value, ranks[0].after[key]) for seen in ranks for key, value in seen.after.items())


@SIZES
@pytest.mark.parametrize("code", [code for code in CODES if "sparse" not in code])
def test_bytes_are_those_of_the_formula(size: int, code: str) -> None:
    with doubles():
        shapes = [p.shape for p in MODELS["mlp"][0]().parameters()]
    channels = [channel for row in trained(size)[0][code].rows for channel in row["communication"]]
    sent = sum(channel["nbytes"] for channel in channels if channel["carried"] == "parameters")
    assert sent == 3 * all_reduce_sent_nbytes(parse_compression(code), shapes, size, 8)


@SIZES
@pytest.mark.parametrize("code", [code for code in CODES if "sparse" not in code])
def test_averages_that_travel_send_the_same(size: int, code: str) -> None:
    """All that begin but the last one, of which only a first round counts, or nothing: training ends."""
    seen = trained(size)[0]
    waited, delayed = (sent_by_step(seen[name]) for name in (code, f"{code}, delayed"))
    assert sum(delayed) - delayed[1] == sum(waited[:-1])
    assert all(torch.isfinite(value).all() for value in seen[f"{code}, delayed"].after.values())


def sent_by_step(seen: Seen, carried: str = "parameters") -> list[int]:
    return [
        sum(channel["nbytes"] for channel in row["communication"] if channel["carried"] == carried) for row in seen.rows
    ]


def what_went_in(size: int, code: str, rows: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of several sums on this rank: what all of them gave, and what this rank put in less what it keeps back. What it
    says to have sent is what its exchanges put on the wire."""
    torch.set_default_dtype(torch.float64)
    world = join_world()
    layout = Layout.of(torch.nn.Linear(1, 1), Mesh({"replicate": size}, world.rank), ())
    replicas = ReplicaGroup.of(
        layout.mesh, layout.channel("parameters", "replicate"), layout.channel("scalars", "replicate")
    )
    vectors = FlatTensors([("a", torch.zeros(rows, 5)), ("b", torch.zeros(3))])
    sums = CompressedReplicaSum(replicas, parse_compression(code), vectors, 0)
    assert len(sums.reducers) == parts
    generator = torch.Generator().manual_seed(world.rank)
    came, went = torch.zeros(5 * rows + 3), torch.zeros(5 * rows + 3)
    for _ in range(5):
        flat = torch.randn(5 * rows + 3, generator=generator)
        went += flat
        sums.sum([flat])
        came += flat
    kept = sums.saved_tensors()
    assert sums.count == 5
    assert layout.channel("parameters", "replicate").take().nbytes == sum(
        one.collectives.sent_nbytes for one in sums.reducers
    )
    went -= torch.cat([kept[f"worker-residual-{part}"][0] for part in range(parts)])
    return came, went


@pytest.mark.parametrize(
    ("code", "rows", "parts"),
    [
        ("top-k,density=0.1", 7, 1),
        ("top-k,density=0.1", 40_001, 3),
        ("top-k,density=0.1,sparse=true", 40_001, 1),
    ],
)
def test_what_a_code_leaves_out_goes_with_the_next_sum(code: str, rows: int, parts: int) -> None:
    """Also in parts, of which one is written or read while another travels."""
    found = run_ranks(what_went_in, 3, 3, code, rows, parts)
    total = sum(went for _, went in found)
    for came, _ in found:
        torch.testing.assert_close(came, total, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("sync", "code", "words"),
    [
        ("ring", "qsgd", "local, post-local, diloco"),
        ("one-shot", "qsgd", "local, post-local, diloco"),
        ("local:4", "one-bit-adam,freeze_step=10", "parameter changes over several steps"),
        ("local:4", "factors", "parameter changes over several steps"),
        ("local:4", "dgc", "parameter changes over several steps"),
        ("diloco:4", "qsgd,between=hosts", "between all ranks, not only between hosts"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_reason(sync: str, code: str, words: str) -> None:
    plan = Plan(batch=BatchPlan(global_batch_size=4), mesh={"replicate": 2}, sync=parse_sync(sync))
    with pytest.raises(PlanError, match=words) as error:
        check_plan(plan.compressed(parse_compression(code)))
    assert sync.partition(":")[0] in str(error.value)


@pytest.mark.parametrize(
    ("sync", "code", "words"),
    [
        ("synchronous", "", ""),
        ("synchronous", "qsgd,bits=4", "qsgd,bits=4"),
        ("local:8", "", "local:period=8"),
        ("local:8", "qsgd,bits=4", "local:period=8 in qsgd,bits=4"),
    ],
)
def test_in_words(sync: str, code: str, words: str) -> None:
    plan = Plan(batch=BatchPlan(global_batch_size=4), sync=parse_sync(sync))
    assert format_relaxation(plan.compressed(parse_compression(code) if code else None).sync) == words
