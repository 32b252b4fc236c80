"""Codecs on one rank: kernels against torch bit for bit, exact sizes, nothing lost, and what is not finite stays so."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compression.codecs import CODECS, DGCS, FEEDBACK, KINDS, WITHOUT, gradient, same_bits, two_steps
from tutti.compression.blocks import steps
from tutti.compression.bucketed_top_k import TOP16_Q4, BucketedTopK
from tutti.compression.bytegrad import ByteGrad
from tutti.compression.cast import Cast
from tutti.compression.dgc import DGC, clip_locally
from tutti.compression.largest_values import largest
from tutti.compression.one_bit import OneBit
from tutti.compression.qsgd import Levels, qsgd
from tutti.compression.terngrad import TernGrad
from tutti.compression.top_k import TopK
from tutti.errors import CheckpointError, PlanError

SIZES = (1, 7, 31, 32, 33, 511, 2048, 2053)
DTYPES = (torch.float32, torch.float64)


@pytest.mark.parametrize("name", CODECS)
def test_kernels_give_the_bits_of_their_reference(name: str) -> None:
    for kind in KINDS:
        for dtype in DTYPES:
            for numel in (1, 17, 513, 4100) if kind == KINDS[0] else (530,):
                one, other = (two_steps(CODECS[name], kind, numel, dtype, way) for way in ("numba", "torch"))
                pairs = list(zip(one, other, strict=True))
                if kind in ("nan", "infinite"):  # what NaN has for a sign is nobody's business
                    pairs = [(a.nan_to_num(7e7), b.nan_to_num(7e7)) for a, b in pairs]
                assert all(same_bits(a, b) for a, b in pairs), (kind, dtype, numel)


def test_a_quotient_is_rounded_once() -> None:
    """torch makes 1 / scale times levels of levels / scale, which puts one code in a million a level off."""
    for dtype in DTYPES:
        scale = gradient("normal", 4096, dtype).abs()
        unit, inverse = steps(scale, 127)
        assert torch.equal(inverse, torch.from_numpy(scale.numpy().dtype.type(127) / scale.numpy()))
        assert torch.equal(unit, torch.from_numpy(scale.numpy() / scale.numpy().dtype.type(127)))
        assert not torch.equal(inverse, 127 / scale)


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(sorted(CODECS)), numel=st.integers(1, 1500), kind=st.sampled_from(KINDS[:6]))
def test_any_size_by_kernel_and_by_torch(name: str, numel: int, kind: str) -> None:
    one, other = (two_steps(CODECS[name], kind, numel, torch.float32, way) for way in ("numba", "torch"))
    assert all(same_bits(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", FEEDBACK)
def test_nothing_is_lost(name: str) -> None:
    """What came out and what is kept add up to what went in, over 60 steps, in float64."""
    codec = FEEDBACK[name]
    for numel in SIZES:
        state = codec.state(numel, dtype=torch.float64)
        total, out = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
        for step in range(60):
            values = gradient("normal", numel, torch.float64, step)
            total += values
            codec.decode_add(codec.encode(values, state), out)
            state.commit()
        torch.testing.assert_close(out + state.old["residual"], total, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CODECS)
def test_zeros_stay_zeros(name: str) -> None:
    codec = CODECS[name]
    for numel in SIZES:
        into = torch.zeros(numel)
        codec.decode_add(codec.encode(torch.zeros(numel), codec.state(numel, dtype=torch.float32)), into)
        assert not into.any()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_reaches_who_decodes(name: str, bad: float) -> None:
    codec = CODECS[name]
    for numel in SIZES:
        values = gradient("normal", numel)
        values[numel * 2 // 3] = bad
        state, into = codec.state(numel, dtype=torch.float32), torch.zeros(numel)
        codec.decode_add(codec.encode(values, state), into)
        assert not into.isfinite().all()
        state.discard()
        assert not any(tensor.any() for tensor in (*state.old.values(), *state.new.values()))


def test_sizes_are_the_formulas() -> None:
    n = 512 * 1000
    assert OneBit(512).nbytes(n) == n // 8 + 4 * 1000
    assert qsgd().nbytes(n) == n // 2 + 4 * 1000  # 0.508 bytes a value
    assert qsgd(2).nbytes(n) == n // 4 + 4 * 1000
    assert TernGrad(block=512).nbytes(n) == n // 4 + 4 * 1000
    assert ByteGrad(block=512).nbytes(n) == n + 8 * 1000
    assert Cast().nbytes(n) == 2 * n
    assert TopK(0.01).nbytes(n) == DGC(0.01).nbytes(n) == 8 * n // 100
    assert TOP16_Q4.nbytes(n) == 44 * 1000  # 0.0859
    assert TOP16_Q4.nbytes(n) / n == pytest.approx(0.086, rel=0.01)


@given(name=st.sampled_from(sorted(CODECS)), numel=st.integers(0, 5000))
def test_sizes_are_multiples_of_4_that_never_fall(name: str, numel: int) -> None:
    codec = CODECS[name]
    assert codec.nbytes(numel) % 4 == 0
    assert codec.nbytes(numel + 1) >= codec.nbytes(numel)


@pytest.mark.parametrize("codec", [qsgd(), qsgd(2, norm="l2"), qsgd(8), TernGrad(deviations=math.inf)])
def test_unbiased_codes_are_right_on_average(codec: Levels) -> None:
    values = gradient("normal", 512, torch.float64)
    draws = 1000
    state, mean = codec.state(512, dtype=torch.float64), torch.zeros(512).double()
    for _ in range(draws):
        codec.decode_add(codec.encode(values, state), mean)
        state.commit()
    unit = float(values.norm() if codec.norm == "l2" else values.abs().max()) / codec.levels
    variance = unit * values.abs().clamp(max=unit)  # of a draw, at most
    assert ((mean / draws - values).abs() <= 5 * (variance / draws).sqrt() + 5 * unit / draws).all()


def test_the_largest_magnitude_is_a_better_norm_than_the_2_norm() -> None:
    values = gradient("normal", 512 * 20, torch.float64)

    def variance(norm: str) -> float:
        codec = Levels(4, norm=norm)  # type: ignore[arg-type]
        into = torch.zeros_like(values)
        codec.decode_add(codec.encode(values, codec.state(values.numel(), dtype=torch.float64)), into)
        return float(((into - values) ** 2).sum() / (values**2).sum())

    assert variance("max") == pytest.approx(0.039, rel=0.2)
    assert variance("l2") == pytest.approx(1.6, rel=0.3)


def test_streams_of_ranks_and_steps_differ() -> None:
    values, codec = gradient("normal", 4096), qsgd()
    one, other = (codec.state(4096, dtype=torch.float32, seed=seed) for seed in (1, 2))
    first = codec.encode(values, one)
    assert not torch.equal(first, codec.encode(values, other))
    assert torch.equal(first, codec.encode(values, one))  # the step did not count, so it draws the same again
    one.commit()
    assert not torch.equal(first, codec.encode(values, one))


def test_one_bit_of_the_mean_magnitude_always_contracts() -> None:
    """The 2-norm scale leaves up to 1.37 of the norm of a heavy-tailed gradient behind."""
    values = gradient("heavy", 20480, torch.float64)
    codec = OneBit(20480)
    state = codec.state(20480, dtype=torch.float64)
    codec.encode(values, state)
    assert state.new["residual"].norm() < values.norm()
    l2 = values - values.sign() * values.norm() / math.sqrt(20480)
    assert l2.norm() > values.norm()


@pytest.mark.parametrize("numel", [100, 20000, 300000])
@pytest.mark.parametrize("kind", ["normal", "equal", "zeros", "sparse", "heavy"])
def test_top_k_is_exact_and_takes_the_first_of_equals(numel: int, kind: str) -> None:
    codec = TopK(0.003)
    values = gradient(kind, numel)
    state = codec.state(numel, dtype=torch.float32)
    places, found = codec.pairs(codec.encode(values, state), numel)
    order = np.lexsort((np.arange(numel), -values.abs().numpy()))[: codec.count(numel)]
    assert places.tolist() == sorted(order)
    assert torch.equal(found, values[places.long()])
    assert torch.equal(places.long(), largest(values, codec.count(numel)))


def test_an_index_that_comes_twice_adds_twice() -> None:
    codec = TopK(1.0)
    message = torch.cat([torch.tensor([1, 1], dtype=torch.int32), torch.tensor([2.0, 3.0]).view(torch.int32)])
    for decode in (codec.decode_add, codec.decode_add_by_torch):
        into = torch.zeros(2)
        decode(message.view(torch.uint8), into)
        assert into.tolist() == [0, 5]


def test_small_ranges_survive_min_max_codes() -> None:
    """Bagua's 1e-7 added to the range makes zeros of them."""
    values = gradient("normal", 2048) * 1e-9
    into = torch.zeros(2048)
    codec = ByteGrad()
    codec.decode_add(codec.encode(values, codec.state(2048, dtype=torch.float32)), into)
    assert (into - values).abs().max() <= (values.max() - values.min()) / 500


def test_dgc_by_its_equations() -> None:
    """u = m u + g, v = v + u, top-k of v, both 0 where sent."""
    codec, numel = DGC(0.1, momentum=0.8), 50
    state = codec.state(numel, dtype=torch.float64)
    u, v = torch.zeros(numel).double(), torch.zeros(numel).double()
    for step in range(20):
        values = gradient("normal", numel, torch.float64, step)
        u = 0.8 * u + values
        v = v + u
        sent = largest(v, 5)
        out = torch.zeros(numel, dtype=torch.float64)
        codec.decode_add(codec.encode(values, state), out)
        state.commit()
        assert torch.equal(out.nonzero()[:, 0], sent)
        torch.testing.assert_close(out[sent], v[sent], rtol=1e-7, atol=0)
        v[sent] -= out[sent]  # float32 on the wire: the rest of it stays
        u[sent] = 0
        torch.testing.assert_close(state.old["residual"], v, rtol=0, atol=1e-12)
        torch.testing.assert_close(state.old["momentum"], u, rtol=0, atol=1e-12)


def test_dgc_without_momentum_is_top_k() -> None:
    for dtype in DTYPES:
        one = two_steps(DGCS["dgc-plain"], "normal", 700, dtype, "numba")
        other = two_steps(TopK(0.1), "normal", 700, dtype, "numba")
        assert same_bits(one[1], other[1])
        assert same_bits(one[2], other[2])


def test_dgc_warms_up_and_clips_locally() -> None:
    codec = DGC(0.001, warmup_steps=100)
    densities = [codec.at_step(count).density for count in (0, 26, 51, 76, 100)]
    assert densities == [0.25, 0.0625, 0.015625, 0.00390625, 0.001]
    values = torch.tensor([3.0, 4.0])
    clip_locally(values, 2.0, 4)
    assert values.tolist() == pytest.approx([0.6, 0.8])
    clip_locally(values, 9.0, 4)
    assert values.tolist() == pytest.approx([0.6, 0.8])
    clip_locally(zeros := torch.zeros(2), 1.0, 4)
    assert not zeros.any()


def test_terngrad_has_three_values_and_clips() -> None:
    values = gradient("normal", 4096)
    values[5] = 100.0
    codec, into = TernGrad(), torch.zeros(4096)
    codec.decode_add(codec.encode(values, codec.state(4096, dtype=torch.float32)), into)
    for block, deviation in zip(into.split(2048), values.split(2048), strict=True):
        assert len(block.unique()) == 3
        assert block.max() == -block.min()
        assert block.max() <= 2.5 * deviation.std(correction=0) * (1 + 1e-5)


def test_bfloat16_gradients_are_coded_in_float32() -> None:
    for codec in (*FEEDBACK.values(), *WITHOUT.values()):
        values = gradient("normal", 300).bfloat16()
        states = [codec.state(300, dtype=values.dtype) for _ in range(2)]
        assert torch.equal(codec.encode(values, states[0]), codec.encode(values.float(), states[1]))


def test_a_state_goes_on_from_its_checkpoint() -> None:
    codec = Levels(4, feedback=True)
    one, other = (codec.state(100, dtype=torch.float32, seed=9) for _ in range(2))
    for step in range(3):
        codec.encode(gradient("normal", 100, seed=step), one)
        one.commit()
    other.load({name: tensor.clone() for name, tensor in one.tensors().items()})
    values = gradient("normal", 100, seed=9)
    assert torch.equal(codec.encode(values, one), codec.encode(values, other))
    assert torch.equal(one.new["residual"], other.new["residual"])
    with pytest.raises(CheckpointError, match="residual"):
        other.load({"count": torch.tensor(1)})
    with pytest.raises(CheckpointError, match="100"):
        other.load({"count": torch.tensor(1), "residual": torch.zeros(99)})


def test_settings_that_cannot_work_are_refused() -> None:
    for make in (
        lambda: OneBit(8),
        lambda: ByteGrad(100),
        lambda: Levels(3),  # type: ignore[arg-type]
        lambda: TopK(0.0),
        lambda: BucketedTopK(512, 513),
        lambda: BucketedTopK(2**16, 1),
    ):
        with pytest.raises(PlanError):
            make()
