"""The ways of exchanging that are compared, by name: tutti's, torch's, peers', and none at all."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

PERIOD = 8
"""Updates between two averages of the methods that average models."""

POST_LOCAL_START, POWERSGD_START = 4, 2
"""Updates before which torch's two ways sum exactly."""

RANK = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """`exact`: its sums are those of one device, so it takes as many steps as the others that are. `period`: steps
    between two exchanges, `delay`: in which one travels. `same_steps_as`: the method whose trainings stand for it,
    being the same algorithm. `begins`: the first updates, which torch's make as DDP does, and a chosen plan as the one
    that `at_first` names. `words`: for tutti, what the launcher would set.
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
    said = f"--sync {sync} --compress {code}" if code else f"--sync {sync}"
    return Method(name=name, side="tutti", period=PERIOD, delay=PERIOD, words=words, says=said)


METHODS = {
    method.name: method
    for method in (
        Method(name="floor", side="floor", exact=True, says="the same step, nothing sent"),
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
"""What the planner chose, of every mesh and of copies alone (its scope): rows of their own in every cell, whichever
methods those are."""


ON_REQUEST = ("tutti top16-q4", "tutti top-k", "tutti delayed", "tutti delayed 8-bit", "tutti delayed 4-bit")
"""Left out unless they are asked for or chosen, for time: tried by hand (one seed, 2 hosts) top-k took 44, 100 and 88
steps for the MLP, the CNN and the GPT, and Top16_Q4 128 and 80 for the latter two, beside 24, 48 and 28 of exact sums.
"""

CHECKED_ALIKE = ("ddp", "ddp fp16")
"""Methods whose first seed is trained beside the one that stands for them."""


def method_of(name: str, plans: Mapping[str, Mapping[str, Any]]) -> Method:
    """A method by its name, or the one that a chosen plan of that name is."""
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
    """What the plan is called that makes all updates as the one of this `name` makes its first."""
    return f"{name}, at first"


def stood_for(name: str, plans: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The method whose trainings give the steps of another: tutti's plain sums for all exact ones; None for its own."""
    known = method_of(name, plans)
    if known.exact:
        return "tutti plain"
    return known.same_steps_as or None
