"""What predictions aim at, and why a family's rows may miss it."""

from typing import Final, Literal

from tutti.validate.score import Errors

Setting = Literal["data sheet", "one factor", "calibrated", "mixed devices"]
"""data sheet: nothing fitted; one factor: a factor on the time, fitted to few rows of this family; calibrated: the
constants of a cluster, fitted to rows of the same machines; mixed devices: of different kinds in one job."""

MEAN_AIM: Final[dict[Setting, float]] = {
    "data sheet": 0.25,
    "one factor": 0.12,
    "calibrated": 0.07,
    "mixed devices": 0.20,
}
P90_AIM: Final[dict[Setting, float]] = {"calibrated": 0.15}
REGRET_AIM: Final = 0.02
MEMORY_AIM: Final = 0.08
MEMORY_UNDER_AIM: Final = -0.05

_WHY: Final[dict[str, str]] = {
    "dle": "many programs, frameworks and years under one name: the software version is unknown, models are taken from "
    "their repositories, several (U-Net, recommendation) wait for their data, and printed batches mix precisions",
    "mbridge": "release after release of hand-written kernels and overlaps: identical printed configurations differ by "
    "5.9 % in the median and 77 % at most between releases",
    "mpt": "FlashAttention in Triton as of 2023, one kernel for A100 and H100, so that long sequences and H100 are far "
    "below what newer kernels reach",
    "titan": "H100 parts limited to 500 W, below the clock of the published peak; eager and compiled runs differ",
    "mcoreh100": "gradients are reduced into parts and parameters gathered beside compute, under stages too, which no "
    "plan says; tensor-parallel exchanges are overlapped; micro-batch and interleaving are not printed",
    "bloom": "single second iterations while the cluster changed: repeats differ by 4.3 % (median); plans lie close",
    "tr3": "seconds are rounded to whole numbers",
    "amphomo": "T4 with DeepSpeed of 2021: clocks fall under load, and virtual machines share their network",
    "amphet": "V100 and T4 in virtual machines that share their network; DeepSpeed of 2021",
    "vtrains": "small models whose steps the host's launches limit, which differ by framework and processor",
    "vtrainm": "a tensor-parallel group of 16 crosses nodes; one run of each configuration",
    "sc21t1": "the interconnect's fitted constants are not printed",
    "meg2020": "V100 and A100 of early drivers, one run each",
    "horovod": "the framework's own overlap of 2017, 25 Gbit/s shared with reading data",
}
_OTHERWISE: Final = "nothing is known about the software that ran it"


def misses(family: str, setting: Setting, found: Errors) -> tuple[str, ...]:
    """Each aim that is missed, in words, with the likely reason."""
    said = []
    if found.mean > MEAN_AIM[setting]:
        said.append(f"mean error {found.mean:.1%} is above {MEAN_AIM[setting]:.0%}")
    if setting in P90_AIM and found.p90 > P90_AIM[setting]:
        said.append(f"a tenth of the rows is off by more than {found.p90:.1%}, above {P90_AIM[setting]:.0%}")
    if found.top5_regret is not None and found.top5_regret > REGRET_AIM:
        said.append(f"the best of the five predicted best is {found.top5_regret:.1%} slower than the best")
    if found.memory_mean is not None and found.memory_mean > MEMORY_AIM:
        said.append(f"memory is off by {found.memory_mean:.1%} on average, above {MEMORY_AIM:.0%}")
    if found.memory_worst_under is not None and found.memory_worst_under < MEMORY_UNDER_AIM:
        said.append(f"memory is predicted {-found.memory_worst_under:.1%} too low once")
    if not said:
        return ()
    return (*said, f"likely because: {_WHY.get(family, _OTHERWISE)}")
