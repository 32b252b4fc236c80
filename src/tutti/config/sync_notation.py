"""Consistency modes as users type them: "local:8", "diloco:period=500,outer_rate=0.7"."""

from dataclasses import fields, replace
from typing import Any, get_args

from tutti.config.compression import format_compression
from tutti.config.consistency_modes import CONSISTENCY_MODES, OptimizerStateRule, Relaxed
from tutti.config.plan import Plan, SyncPlan
from tutti.errors import PlanError

_WHOLE = ("period", "after", "bound", "delay")
_FIELDS = tuple(part.name for part in fields(Relaxed) if part.name != "options")


def parse_sync(text: str) -> SyncPlan:
    """Parse MODE[:VALUE,...], with values given by name or in the mode's order.

    Raises:
        PlanError: names the part that is wrong.
    """
    word, _, rest = text.partition(":")
    mode = word.strip()
    if mode not in CONSISTENCY_MODES:
        raise PlanError(f"sync {text!r}: there is no mode {word!r}; modes are {', '.join(CONSISTENCY_MODES)}")
    known, values = list(CONSISTENCY_MODES[mode].parameters), dict[str, Any]()
    for place, part in enumerate(rest.split(",") if rest else ()):
        name, equals, value = part.strip().rpartition("=")
        if not equals and place < len(known):
            name = known[place]
        if name not in known:
            has = f"has {', '.join(known)}" if known else "has no parameters"
            raise PlanError(f"sync {text!r}: {part.strip()!r} is not a parameter of {mode}, which {has}; leave it out")
        if name in values:
            raise PlanError(f"sync {text!r}: {name} appears twice; give it once")
        values[name] = _value(text, name, value)
    options = {name: value for name, value in values.items() if name not in _FIELDS}
    stated = {name: value for name, value in values.items() if name in _FIELDS}
    return SyncPlan(mode=mode, relaxed=Relaxed(**stated, options=options))


def format_sync(sync: SyncPlan) -> str:
    """Format a mode and its parameters as `parse_sync` reads them."""
    stated = ",".join(f"{name}={value}" for name, value in sync.relaxed.stated().items())
    return f"{sync.mode}:{stated}" if stated else sync.mode


def format_relaxation(sync: SyncPlan) -> str:
    """Describe how a plan departs from exact reductions, the mode first, then the codec; empty where it does not."""
    mode = "" if sync.mode == "synchronous" else format_sync(sync)
    code = "" if sync.compress is None else format_compression(sync.compress)
    return " in ".join(filter(None, (mode, code)))


def with_mode(plan: Plan, sync: SyncPlan | None) -> Plan:
    """Return the plan in the mode of `sync`; unchanged for None."""
    if sync is None:
        return plan
    return replace(plan, sync=replace(plan.sync, mode=sync.mode, relaxed=sync.relaxed))


def _value(text: str, name: str, value: str) -> int | float | str:
    if name == "optimizer_state":
        if value not in get_args(OptimizerStateRule):
            raise PlanError(f"sync {text!r}: optimizer_state = {value!r}; write own, averaged or corrected")
        return value
    if name not in _FIELDS:
        return _number(value)
    try:
        return int(value) if name in _WHOLE else float(value)
    except ValueError:
        kind = "a whole number" if name in _WHOLE else "a number"
        raise PlanError(f"sync {text!r}: {name} = {value!r} is not {kind}; write {name}=8") from None


def _number(value: str) -> int | float | str:
    """Read a registered mode's own parameter as a whole number, a number or a text."""
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value
