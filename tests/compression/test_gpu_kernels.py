"""Triton's kernels in Triton's interpreter, against their plain PyTorch references: bit for bit, or given a scale."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from compression import on_gpu
from compression.codecs import CODECS, FEEDBACK, KINDS, gradient, same_bits
from tutti.compression import codec as codec_module
from tutti.compression.bucketed_top_k import TOP16_Q4, BucketedTopK
from tutti.compression.bytegrad import ByteGrad
from tutti.compression.cast import Cast
from tutti.compression.codec import Codec
from tutti.compression.codec_state import CodecState
from tutti.compression.dgc import DGC
from tutti.compression.largest_values import SAMPLE, largest
from tutti.compression.one_bit import OneBit
from tutti.compression.qsgd import Levels, _by_torch
from tutti.compression.terngrad import TernGrad
from tutti.compression.top_k import TopK

DTYPES = (torch.float32, torch.float64)
KERNELS = {name: codec for name, codec in CODECS.items() if codec.has_triton_kernels}
SUMMED = {name: c for name, c in KERNELS.items() if isinstance(c, OneBit) or (isinstance(c, Levels) and c.norm == "l2")}
"""Those with a sum over a block for a scale: Triton's order is another, and the scale may differ in its last bits."""
EXACT = {name: codec for name, codec in KERNELS.items() if name not in SUMMED}
TOLERANCE = 2e-6
"""Of such a scale: sums of up to 2048 float32 values, each order with an error of about 1e-7 a value of it."""


@pytest.fixture(scope="module")
def triton() -> Iterator[on_gpu.Call]:
    with on_gpu.process(TRITON_INTERPRET="1", PYTHONWARNINGS="ignore::RuntimeWarning") as call:  # numpy's, of NaN
        yield call


def state_of(codec: Codec, values: torch.Tensor, old: on_gpu.Arrays, count: int = 0) -> CodecState:
    state = codec.state(values.numel(), dtype=values.dtype, seed=3)
    state.count = count
    for name, kept in old.items():
        state.old[name].copy_(torch.from_numpy(kept))
    return state


def reference(
    codec: Codec, values: torch.Tensor, old: on_gpu.Arrays, count: int = 0, given: torch.Tensor | None = None
) -> on_gpu.Arrays:
    """As on_gpu.step, by torch."""
    state, numel = state_of(codec, values, old, count), values.numel()
    message, into = torch.zeros(codec.nbytes(numel), dtype=torch.uint8), torch.ones_like(values)
    if given is None:
        codec.encode_by_torch(values, state, message)
    else:
        assert isinstance(codec, Levels)
        _by_torch(codec, values, state, message, given)
    codec.decode_add_by_torch(message, into)
    return {"message": message.numpy(), "into": into.numpy(), **{name: new.numpy() for name, new in state.new.items()}}


def differences(one: on_gpu.Arrays, other: on_gpu.Arrays) -> list[str]:
    """The names of what differs in a bit; what NaN has for a sign is nobody's business."""
    assert one.keys() == other.keys()
    pairs = {name: (torch.from_numpy(one[name]), torch.from_numpy(other[name])) for name in one}
    pairs |= {n: (a.nan_to_num(7e7), b.nan_to_num(7e7)) for n, (a, b) in pairs.items() if a.is_floating_point()}
    return [name for name, (a, b) in pairs.items() if not same_bits(a, b)]


def cases(codec: Codec) -> list[tuple[str, torch.dtype, int]]:
    """Kinds, dtypes and sizes; buckets, whose search for a bound the interpreter is slow at, get fewer."""
    sizes = (17, 530) if isinstance(codec, BucketedTopK) else (1, 17, 513, 4100)
    wide = () if isinstance(codec, BucketedTopK) else ("heavy", "infinite", "negative zero")
    return [
        *((KINDS[0], dtype, numel) for numel in sizes for dtype in DTYPES),
        *((kind, torch.float32, 530) for kind in KINDS[1:]),
        *((kind, torch.float64, 530) for kind in wide),
    ]


def steps_differ(triton: on_gpu.Call, codec: Codec, kind: str, dtype: torch.dtype, numel: int) -> list[str]:
    """Two steps, the second on what the first kept."""
    found, old = [], on_gpu.Arrays()
    for count in range(2):
        values = gradient(kind, numel, dtype, count)
        one = triton(on_gpu.step, codec, values.numpy(), old, count)
        found += differences(one, reference(codec, values, old, count))
        old = {name: one[name] for name in codec.state_names}
    return found


@pytest.mark.parametrize("name", EXACT)
def test_kernels_give_the_bits_of_their_reference(triton: on_gpu.Call, name: str) -> None:
    for kind, dtype, numel in cases(EXACT[name]):
        assert not steps_differ(triton, EXACT[name], kind, dtype, numel), (kind, dtype, numel)


def written_with(
    codec: Codec, values: torch.Tensor, old: on_gpu.Arrays, count: int, scales: torch.Tensor
) -> on_gpu.Arrays:
    """The reference's step with given scales; of one bit by its equation."""
    if isinstance(codec, Levels):
        return reference(codec, values, old, count, scales)
    assert isinstance(codec, OneBit)
    x, numel = values + state_of(codec, values, old).old["residual"] if codec.feedback else values, values.numel()
    scale = scales.to(x.dtype).repeat_interleave(codec.block)[:numel]
    sent = torch.where(x < 0, -scale, scale)
    message = torch.zeros(codec.nbytes(numel), dtype=torch.uint8)
    for part, written in zip(
        codec._parts(message, numel),
        (scales, torch.from_numpy(np.packbits(x.numpy() < 0, bitorder="little"))),
        strict=True,
    ):
        part.copy_(written)
    kept = {"residual": (x - sent).numpy()} if codec.feedback else {}
    return {"message": message.numpy(), "into": (1 + sent).numpy(), **kept}


@pytest.mark.parametrize("name", SUMMED)
def test_sums_are_near_and_all_else_is_exact_given_them(triton: on_gpu.Call, name: str) -> None:
    codec = SUMMED[name]
    for kind, dtype, numel in cases(codec):
        old = on_gpu.Arrays()
        for count in range(2):
            values = gradient(kind, numel, dtype, count)
            one, other = triton(on_gpu.step, codec, values.numpy(), old, count), reference(codec, values, old, count)
            rows = -(-numel // codec.block)
            scales, wanted = (
                torch.from_numpy(each["message"][: 4 * rows]).view(torch.float32) for each in (one, other)
            )
            torch.testing.assert_close(scales, wanted, rtol=TOLERANCE, atol=0, equal_nan=True)
            given = written_with(codec, values, old, count, scales)
            assert not differences(one, given), (kind, dtype, numel, count)
            old = {kept: one[kept] for kept in codec.state_names}


@pytest.mark.parametrize("name", KERNELS)
def test_sums_of_whole_numbers_are_exact_so_all_is(triton: on_gpu.Call, name: str) -> None:
    """Also a GPU's own trial (`codec`), which has to tell kernels that are right from others."""
    codec = KERNELS[name]
    for dtype in DTYPES:
        values = (torch.arange(3001) * 7919 % 251 - 125).to(dtype)
        old = {kept: (torch.arange(3001) * 101 % 23 - 11).to(dtype).numpy() for kept in codec.state_names}
        assert not differences(triton(on_gpu.step, codec, values.numpy(), old), reference(codec, values, old)), dtype
    by_torch = codec_module._trial(type(codec)(), torch.device("cpu"), "torch")
    assert all(np.array_equal(a, b) for a, b in zip(triton(on_gpu.trial, type(codec)()), by_torch, strict=True))


@pytest.mark.parametrize("name", KERNELS)
def test_a_processor_reads_what_a_gpu_wrote_to_the_same_bits(triton: on_gpu.Call, name: str) -> None:
    for kind in ("normal", "heavy", "tiny"):
        values = gradient(kind, 1003)
        one = triton(on_gpu.step, KERNELS[name], values.numpy(), {})
        into = torch.ones(1003)
        KERNELS[name].decode_add(torch.from_numpy(one["message"]), into)
        assert np.array_equal(into.numpy(), one["into"])


@pytest.mark.parametrize("name", [name for name in FEEDBACK if name in KERNELS])
def test_nothing_is_lost(triton: on_gpu.Call, name: str) -> None:
    for numel in (7, 600):
        sums = triton(on_gpu.telescoped, FEEDBACK[name], numel, 6)
        np.testing.assert_allclose(sums["out"] + sums["residual"], sums["total"], rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", KERNELS)
def test_what_is_not_finite_reaches_who_decodes_and_zeros_stay_zeros(triton: on_gpu.Call, name: str) -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        for numel in (1, 33, 600):
            values = gradient("normal", numel)
            values[numel * 2 // 3] = bad
            assert not np.isfinite(triton(on_gpu.step, KERNELS[name], values.numpy(), {})["into"]).all()
    for values in (torch.zeros(530), torch.full((530,), 2.0**-101)):
        found = triton(on_gpu.step, KERNELS[name], values.numpy(), {})
        assert (found["into"] == 1).all()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_scales_that_are_given(triton: on_gpu.Call, bits: int) -> None:
    """TernGrad's, that ranks share; NaN and 0 among them."""
    values = gradient("normal", 530)
    for codec in (Levels(bits, block=64, feedback=True), Levels(bits, block=64, rounding="nearest")):  # type: ignore[arg-type]
        given = codec.scales(values) * 1.5
        given[3], given[5], given[6] = torch.nan, 0, 2.0**-101
        one = triton(on_gpu.step, codec, values.numpy(), {}, 2, given.numpy())
        assert not differences(one, reference(codec, values, {}, 2, given))


def test_a_block_that_is_no_power_of_two_and_a_large_one(triton: on_gpu.Call) -> None:
    for codec in (
        Levels(4, block=48),
        ByteGrad(block=8192),
        BucketedTopK(336, 7),
        Levels(2, block=4096, feedback=True),
    ):
        values = gradient("normal", 9000)
        assert not differences(triton(on_gpu.step, codec, values.numpy(), {}), reference(codec, values, {}))


# The search for the largest


def sampled(numel: int) -> np.ndarray:
    """The places that a search looks at first."""
    return ((np.arange(SAMPLE, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(11)) % np.uint64(numel)


@pytest.mark.parametrize("kind", ["normal", "equal", "zeros", "sparse", "heavy", "nan"])
def test_top_k_of_more_than_a_sample(triton: on_gpu.Call, kind: str) -> None:
    for codec, dtype in ((TopK(0.003), torch.float32), (DGC(0.01), torch.float64)):
        assert not steps_differ(triton, codec, kind, dtype, 20000), codec


def test_the_search_finds_by_itself_also_where_momentum_decides(triton: on_gpu.Call) -> None:
    """It could give up every time and all would be right, but slow."""
    for kind in ("equal", "sparse", "zeros"):
        assert triton(on_gpu.searched, TopK(0.003), gradient(kind, 20000).numpy(), {}) is not None
    for codec in (TopK(0.003), DGC(0.003, momentum=0.5)):
        values = gradient("normal", 20000)
        sizes = {"residual": 9, "momentum": 9000}
        old = {name: gradient("normal", 20000, seed=7).numpy() * np.float32(sizes[name]) for name in codec.state_names}
        sums = old["residual"] + (np.float32(0.5) * old["momentum"] if "momentum" in old else 0) + values.numpy()
        wanted = largest(torch.from_numpy(sums), codec.count(20000))
        found = triton(on_gpu.searched, codec, values.numpy(), old)
        assert found is not None
        assert np.array_equal(found, wanted.numpy())


def test_values_that_differ_in_their_last_bits_only(triton: on_gpu.Call) -> None:
    for dtype, whole in ((torch.float32, torch.int32), (torch.float64, torch.int64)):
        last = torch.randint(0, 4, (1030,), dtype=whole, generator=torch.Generator().manual_seed(0))
        values = (torch.full((1030,), -0.7, dtype=dtype).view(whole) + last).view(dtype)
        for codec in (TOP16_Q4, BucketedTopK(32, 5), TopK(0.1)):
            assert not differences(triton(on_gpu.step, codec, values.numpy(), {}), reference(codec, values, {}))


def test_a_sample_that_misleads(triton: on_gpu.Call) -> None:
    """Once so that the second threshold has enough above it, once so that the whole has to be sorted."""
    numel, codec = 100_000, TopK(0.01)
    places = np.unique(sampled(numel))
    ordinary = np.random.default_rng(0).random(numel, dtype=np.float32)
    misled, empty = ordinary.copy(), ordinary.copy()
    others = np.setdiff1d(np.arange(numel), places)
    misled[places[:260]] += 10
    misled[others[:600]] += 10
    empty[places] = 0
    for values in (misled, empty):
        one = triton(on_gpu.step, codec, values, {})
        assert not differences(one, reference(codec, torch.from_numpy(values), {}))
        assert (triton(on_gpu.searched, codec, values, {}) is None) == (values is empty)
        chosen = codec.pairs(torch.from_numpy(one["message"]), numel)[0]
        assert torch.equal(chosen.long(), largest(torch.from_numpy(values), codec.count(numel)))


def test_an_index_that_comes_twice_adds_twice(triton: on_gpu.Call) -> None:
    message = torch.cat([torch.tensor([1, 1], dtype=torch.int32), torch.tensor([2.0, 3.0]).view(torch.int32)])
    assert triton(on_gpu.decoded, TopK(1.0), message.view(torch.uint8).numpy(), 2).tolist() == [0, 5]


# Who computes


def implementation(codec: Codec, name: str) -> str:
    return codec_module.implementation(
        codec, torch.device(name), by_numba="numba", by_triton="triton", by_torch="torch"
    )


def test_triton_computes_where_it_has_shown_that_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def trial(codec: Codec, where: torch.device, by: str) -> list[torch.Tensor]:
        tried.append((type(codec), by))
        if isinstance(codec, ByteGrad) and by == "triton":
            raise RuntimeError("Failed to find C compiler")
        return [torch.tensor([float(isinstance(codec, TopK) and by == "triton")])]

    monkeypatch.setattr(codec_module, "_trial", trial)
    monkeypatch.setattr(codec_module, "find_spec", lambda name: name)
    codec_module._triton_verified.cache_clear()
    assert [implementation(OneBit(), name) for name in ("cpu", "cuda:0", "cuda:0", "mps")] == [
        "numba",
        "triton",
        "triton",
        "torch",
    ]
    assert tried == [(OneBit, "triton"), (OneBit, "torch")]
    assert implementation(OneBit(block=8192), "cuda:0") == "triton"
    assert implementation(OneBit(block=16384), "cuda:0") == implementation(Cast(), "cuda:0") == "torch"
    with pytest.warns(RuntimeWarning, match=r"ByteGrad on cuda:0.*Failed to find C compiler"):
        assert implementation(ByteGrad(), "cuda:0") == "torch"
    with pytest.warns(RuntimeWarning, match="not what torch computes"):
        assert implementation(TopK(), "cuda:0") == "torch"
    monkeypatch.setattr(codec_module, "find_spec", lambda name: None)
    codec_module._triton_verified.cache_clear()
    assert implementation(OneBit(), "cuda:0") == implementation(OneBit(), "mps") == "torch"
    codec_module._triton_verified.cache_clear()


def test_every_kind_of_codec_can_be_tried_with_its_defaults() -> None:
    kinds = {type(codec) for codec in KERNELS.values()}
    assert kinds == {OneBit, ByteGrad, Levels, TernGrad, TopK, DGC, type(TOP16_Q4)}
    assert all(kind() in (kind(),) and kind().has_triton_kernels for kind in kinds)
