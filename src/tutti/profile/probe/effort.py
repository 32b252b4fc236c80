"""How much a probe measures: sizes, repeats and bounds on time."""

from dataclasses import dataclass

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Sizes to measure and how long one of them may take.

    `gemm_budget_s` bounds the repeats of one matrix product (one dtype, size and number of threads); a size predicted
    to take longer than that is skipped. `link_budget_s` bounds one message size likewise. `concurrent_sizes`:
    sizes measured again while all ranks of a host compute. `weight_size`: of the square weights that products of few
    rows go over, larger than caches near a core; `weight_caches`: how many times the caches' size they have together.
    `kinds`: how often convolutions and attention are timed, and layers twice as often. `codes_numel`: gradients' sizes
    that are written in fewer bytes; `codes_budget_s` bounds all of that after compiling.
    """

    gemm_sizes: tuple[int, ...]
    cuda_gemm_sizes: tuple[int, ...]
    concurrent_sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    threads: str  # "ends": one and all cores; "powers": powers of two between them too
    repeats: int
    gemm_budget_s: float
    link_nbytes: tuple[int, ...]
    link_repeats: int
    link_budget_s: float
    copy_nbytes: int  # at least; more where the caches are larger
    disk_nbytes: int
    weight_size: int = 0
    weight_caches: float = 0.0
    kinds: int = 0
    codes_numel: tuple[int, ...] = ()
    codes_budget_s: float = 0.0


QUICK = Effort(
    gemm_sizes=(256, 512, 1024, 2048),
    cuda_gemm_sizes=(512, 1024, 2048, 4096),
    concurrent_sizes=(256, 1024),
    dtypes=("float32", "bfloat16", "float16", "tf32", "float8"),
    threads="ends",
    repeats=3,
    gemm_budget_s=0.25,
    link_nbytes=(KIB, 16 * KIB, 256 * KIB, 2 * MIB, 16 * MIB),
    link_repeats=7,
    link_budget_s=0.5,
    copy_nbytes=64 * MIB,
    disk_nbytes=64 * MIB,
    weight_size=2048,
    weight_caches=4.0,
    kinds=2,
    codes_numel=(2**20,),
    codes_budget_s=1.5,
)
"""Some 33 seconds on 2 cores for 2 ranks of one host (32.6 and 33.1, by hand), 15 to 20 for 2 hosts of a core each; the
first time about 10 more, to compile the kernels that compress gradients."""

FULL = Effort(
    gemm_sizes=(128, 256, 512, 1024, 2048, 4000),
    cuda_gemm_sizes=(256, 512, 1024, 2048, 4096, 8192),
    concurrent_sizes=(256, 512, 1024, 2048),
    dtypes=("float64", "float32", "bfloat16", "float16", "tf32", "float8"),
    threads="powers",
    repeats=7,
    gemm_budget_s=3.0,
    link_nbytes=(KIB, 8 * KIB, 64 * KIB, 512 * KIB, 4 * MIB, 25 * MIB, 64 * MIB),
    link_repeats=15,
    link_budget_s=3.0,
    copy_nbytes=256 * MIB,
    disk_nbytes=512 * MIB,
    weight_size=2048,
    weight_caches=4.0,
    kinds=3,
    codes_numel=(2**14, 2**18, 2**22),
    codes_budget_s=6.0,
)
"""At most 90 seconds on 2 cores, and as many more the first time."""
