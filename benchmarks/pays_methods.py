"""The methods that are compared, by name: tutti's, torch's, peers', and no communication at all."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

PERIOD = 8
"""Updates between two averages, for methods that average models."""

POST_LOCAL_START, POWERSGD_START = 4, 2
"""First updates that torch's post-local SGD and its PowerSGD hook make exactly."""

RANK = 2
"""Rank of PowerSGD's approximations, in torch and in tutti."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One method of training.

    Attributes:
        name: its name in tables and results.
        side: whose it is; "floor" communicates nothing.
        exact: its sums equal those of one device, so it takes as many steps as the other exact methods.
        period: steps between two exchanges.
        delay: steps for which an exchange may be in flight.
        words: environment variables that a launcher of tutti would set.
        same_steps_as: a method with the same algorithm, whose trainings give its steps.
        begins: number of first updates that differ from the later ones. Torch's methods make them like DDP, a
            chosen plan like the plan that `at_first` names.
        says: description for result files.
    """

    name: str
    side: Literal["tutti", "torch", "floor", "peer"]
    exact: bool = False
    period: int = 1
    delay: int = 0
    words: tuple[tuple[str, str], ...] = ()
    same_steps_as: str = ""
    begins: int = 0
    says: str = ""


def _compress(name: str, words: str) -> Method:
    return Method(name=name, side="tutti", words=(("TUTTI_COMPRESS", words),), says=f"--compress {words}")


def _delayed(name: str, code: str = "") -> Method:
    sync = f"local:period={PERIOD},delay={PERIOD}"
    words = (("TUTTI_SYNC", sync), *((("TUTTI_COMPRESS", code),) if code else ()))
    options = f"--sync {sync} --compress {code}" if code else f"--sync {sync}"
    return Method(name=name, side="tutti", period=PERIOD, delay=PERIOD, words=words, says=options)


METHODS = {
    method.name: method
    for method in (
        Method(name="floor", side="floor", exact=True, says="the same step, with nothing sent"),
        Method(name="tutti plain", side="tutti", exact=True, says="tutti run"),
        _compress("tutti powersgd", f"powersgd,rank={RANK}"),
        _compress("tutti top16-q4", "top16-q4"),
        _compress("tutti top-k", "top-k,density=0.01"),
        Method(
            name="tutti local",
            side="tutti",
            period=PERIOD,
            words=(("TUTTI_SYNC", f"local:{PERIOD}"),),
            says=f"--sync local:{PERIOD}",
        ),
        _delayed("tutti delayed"),
        _delayed("tutti delayed 8-bit", "qsgd,bits=8"),
        _delayed("tutti delayed 4-bit", "qsgd,bits=4"),
        Method(name="ddp", side="torch", exact=True, says="DistributedDataParallel"),
        Method(name="ddp fp16", side="torch", same_steps_as="tutti plain", says="its fp16_compress_hook"),
        Method(
            name="ddp powersgd",
            side="torch",
            begins=POWERSGD_START,
            says=f"its powerSGD_hook, rank {RANK} from step {POWERSGD_START}, one bucket",
        ),
        Method(
            name="ddp post-local",
            side="torch",
            period=PERIOD,
            begins=POST_LOCAL_START,
            says=f"PostLocalSGDOptimizer, every {PERIOD} steps from step {POST_LOCAL_START}",
        ),
        Method(name="horovod", side="peer", exact=True, says="DistributedOptimizer, Gloo"),
        Method(name="deepspeed", side="peer", exact=True, says="ZeRO-2"),
        Method(
            name="hivemind",
            side="peer",
            period=PERIOD,
            same_steps_as="tutti local",
            says=f"its averager in fp16, every {PERIOD} steps",
        ),
    )
}


AUTO = "tutti auto"
AUTOS = {AUTO: "all", "tutti auto copies": "data"}
"""Rows of every cell for the planner's choice, and the meshes among which it chose: all, or data parallelism only.
They are rows of their own, whichever methods were chosen.
"""


ON_REQUEST = ("tutti top16-q4", "tutti top-k", "tutti delayed", "tutti delayed 8-bit", "tutti delayed 4-bit")
"""Left out, to save time, unless they are asked for or chosen. Tried by hand (one seed, 2 hosts), top-k took 44, 100
and 88 steps for the MLP, the CNN and the GPT, and Top16_Q4 128 and 80 for the latter two. Exact sums took 24, 48
and 28.
"""

CHECKED_ALIKE = ("ddp", "ddp fp16")
"""Methods that use another method's steps; their first seed is trained as a check."""


def method_of(name: str, plans: Mapping[str, Mapping[str, Any]]) -> Method:
    """Return the method of this name, or the one that stands for a chosen plan."""
    if name in METHODS:
        return METHODS[name]
    plan = plans[name]
    return Method(
        name=name,
        side="tutti",
        exact=plan["exact"],
        period=plan["period"],
        delay=plan["delay"],
        begins=plan.get("begins", 0),
        same_steps_as=plan.get("first_of", ""),
        words=(("TUTTI_PLAN", plan["file"]),),
        says="chosen by tutti plan",
    )


def at_first(name: str) -> str:
    """Return the name of the plan that makes all updates as the plan `name` makes its first ones."""
    return f"{name}, at first"


def stood_for(name: str, plans: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the method whose trainings give the steps of another, or None if it is trained itself. Exact methods
    use tutti's.
    """
    known = method_of(name, plans)
    if known.exact:
        return "tutti plain"
    return known.same_steps_as or None
