"""A mode of consistency in words, as users type it: "local:8", "diloco:period=500,outer_rate=0.7"."""

from dataclasses import replace
from typing import Any, get_args

from tutti.config.compression import compression_in_words
from tutti.config.plan import Plan, SyncPlan
from tutti.config.relaxed import PARAMETERS, OwnState, Relaxed
from tutti.config.vocabulary import SyncMode
from tutti.errors import PlanError

_WHOLE = ("period", "after", "bound", "delay")


def parse_sync(text: str) -> SyncPlan:
    """What `text` says: MODE[:VALUE,...], values by name or in the mode's order. Raises PlanError naming the part."""
    word, _, rest = text.partition(":")
    mode = next((one for one in get_args(SyncMode) if one == word.strip()), None)
    if mode is None:
        raise PlanError(f"sync {text!r}: there is no mode {word!r}; modes are {', '.join(get_args(SyncMode))}")
    known, said = list(PARAMETERS[mode]), dict[str, Any]()
    for place, part in enumerate(rest.split(",") if rest else ()):
        name, equals, value = part.strip().rpartition("=")
        if not equals and place < len(known):
            name = known[place]
        if name not in known:
            has = f"has {', '.join(known)}" if known else "has no parameters"
            raise PlanError(f"sync {text!r}: {part.strip()!r} says nothing that {mode} knows; it {has}")
        if name in said:
            raise PlanError(f"sync {text!r}: {name} is there twice; give it once")
        said[name] = _value(text, name, value)
    return SyncPlan(mode=mode, relaxed=Relaxed(**said))


def sync_in_words(sync: SyncPlan) -> str:
    """The same, the other way round."""
    told = ",".join(f"{name}={value}" for name, value in sync.relaxed.told().items())
    return f"{sync.mode}:{told}" if told else sync.mode


def way_in_words(sync: SyncPlan) -> str:
    """How gradients or replicas are kept together where sums are not exact, the mode first; empty where they are."""
    mode = "" if sync.mode == "synchronous" else sync_in_words(sync)
    code = "" if sync.compress is None else compression_in_words(sync.compress)
    return " in ".join(filter(None, (mode, code)))


def with_mode(plan: Plan, sync: SyncPlan | None) -> Plan:
    """The plan in the mode that `sync` says; as it is where that says nothing."""
    if sync is None:
        return plan
    return replace(plan, sync=replace(plan.sync, mode=sync.mode, relaxed=sync.relaxed))


def _value(text: str, name: str, value: str) -> int | float | str:
    if name == "optimizer_state":
        if value not in get_args(OwnState):
            raise PlanError(f"sync {text!r}: optimizer_state = {value!r}; it is own, averaged or corrected")
        return value
    try:
        return int(value) if name in _WHOLE else float(value)
    except ValueError:
        kind = "a whole number" if name in _WHOLE else "a number"
        raise PlanError(f"sync {text!r}: {name} = {value!r} is not {kind}; write {name}=8") from None
