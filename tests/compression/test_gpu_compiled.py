"""Triton's kernels compiled to a device's own code, by Triton's own assembler: without a GPU, a driver or CUDA."""

from collections.abc import Iterator

import pytest

from compression import on_gpu
from compression.codecs import CODECS

AMPERE, HOPPER, INSTINCT = ("cuda", 80, 32), ("cuda", 90, 32), ("hip", "gfx942", 64)
KERNELS = {name: codec for name, codec in CODECS.items() if codec.has_triton_kernels}
NAMES = {
    *(
        f"dense_kernels._{what}_{codec}_kernel"
        for what in ("encode", "decode")
        for codec in ("signs", "levels", "min_max")
    ),
    *(f"sparse_kernels._{what}_kernel" for what in ("sample", "collect", "take", "decode_pairs")),
    *(f"sparse_kernels._{what}_buckets_kernel" for what in ("choose", "write", "decode")),
}


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[on_gpu.Call]:
    folder = tmp_path_factory.mktemp("triton")  # nothing that was compiled before is taken
    with on_gpu.process(TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(folder)) as call:
        yield call


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "numel", "target"), [("float32", 4096, HOPPER), ("float64", 4100, AMPERE)])
def test_kernels_compile_and_round_as_a_processor_does(
    triton: on_gpu.Call, dtype: str, numel: int, target: tuple[str, int, int]
) -> None:
    """Sizes that 16 divides, and others: Triton compiles them apart."""
    seen = set()
    for name in ("onebit", "bytegrad", "4-bit", "8-bit-l2", "dgc", "top16-q4"):
        for kernel, nbytes, inexact in triton(on_gpu.compiled, KERNELS[name], dtype, numel, target):
            assert nbytes > 1000
            assert not inexact, f"{kernel} of {name}"
            seen.add(kernel)
    assert seen == NAMES


@pytest.mark.long
@pytest.mark.parametrize("target", [AMPERE, HOPPER, INSTINCT])
@pytest.mark.parametrize("name", KERNELS)
def test_all_settings_compile(triton: on_gpu.Call, name: str, target: tuple[str, int | str, int]) -> None:
    for dtype, numel in (("float32", 1), ("float32", 4100), ("float64", 4096)):  # 1 is a constant to Triton
        made = triton(on_gpu.compiled, KERNELS[name], dtype, numel, target)
        assert made
        assert not any(inexact for _, _, inexact in made)


def test_what_rounds_otherwise_is_found() -> None:
    found = on_gpu.INEXACT.findall(
        "add.ftz.f32 a; fma.rn.f32 b; div.full.f32 c; sqrt.approx.f32 d; rcp.approx.ftz.f64 e"
    )
    assert found == ["add.ftz.f32", "fma.rn.f32", "div.full.f32", "sqrt.approx.f32", "rcp.approx.ftz.f64"]
    assert not on_gpu.INEXACT.findall("cvt.rmi.ftz.f32.f32 a; mad.lo.s32 b; div.rn.f32 c; sqrt.rn.f64 d; add.rn.f32 e")
