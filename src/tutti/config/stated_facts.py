"""Facts that only the user knows and that a report needs: their names and the form of their values.

A misspelt name would be a fact that no rule sees, so names that begin like known ones are checked.
"""

import difflib
import math
import re
from collections.abc import Callable, Mapping
from reprlib import repr as short
from typing import get_args

from tutti.config.vocabulary import StartState, StopRule
from tutti.errors import SpecError


def _number(text: str) -> bool:
    try:
        return math.isfinite(float(text)) and float(text) >= 0
    except ValueError:
        return False


def _any_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _one_of(*words: str) -> tuple[str, Callable[[str], bool]]:
    return " or ".join(words), lambda text: text in words


_TEXT: tuple[str, Callable[[str], bool]] = ("a text", lambda text: bool(text.strip()))
_NUMBER = ("a number of 0 or more", _number)
_SHAPE = re.compile(r"\d+([x×]\d+)*")
_TARGET = re.compile(r"[\w.-]+\s*(>=|<=|=)\s*[-+\d.eE]+")

STATED_FACTS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "quality.target": ("NAME.METRIC=VALUE, such as test.accuracy=0.9", lambda text: bool(_TARGET.fullmatch(text))),
    "quality.reference_value": ("a number", _any_number),
    "quality.selection": _one_of("last", "best"),
    "tuning.trials": _NUMBER,
    "tuning.device_seconds": _NUMBER,
    "tuning.space": _TEXT,
    "tuning.search_log_sha256": ("64 hexadecimal digits", lambda text: bool(re.fullmatch(r"[0-9a-f]{64}", text))),
    "data.start_state": _one_of(*get_args(StartState)),
    "data.bytes_read": _NUMBER,
    "data.native_shape": (
        "sizes joined by x, such as 3x32x32",
        lambda text: bool(re.fullmatch(r"\d+([x×]\d+)*", text)),
    ),
    "preprocess.timed": ("true or false", lambda text: text.lower() in ("true", "false")),
    "stop.rule": _one_of(*get_args(StopRule)),
    "stop.value": ("a number", _any_number),
    "baseline.source": _one_of("measured-here", "published"),
    "baseline.system": _TEXT,
    "baseline.device": _TEXT,
    "baseline.tuned_by": _TEXT,
    "scaling": _one_of("strong", "weak"),
}
"""Fact -> (the form of its value in words, whether a text has that form)."""

_FAMILIES = {name.partition(".")[0] for name in STATED_FACTS}


def check_names(facts: object, where: str) -> None:
    """Check that facts are a dict with texts as names.

    Args:
        facts: what the user gave.
        where: what the user wrote them in, for the error message.

    Raises:
        SpecError: they are something else.
    """
    if not isinstance(facts, Mapping):
        raise SpecError(f"{where} got {short(facts)}; give a dict, such as {{'tuning.trials': 12}}")
    for name in facts:
        if not isinstance(name, str):
            raise SpecError(f"{where} has {short(name)} as a name; names of facts are texts, such as 'tuning.trials'")


def check_facts(facts: Mapping[str, object], where: str) -> dict[str, str]:
    """Return facts as texts.

    Args:
        facts: value by name. Names that do not begin like known ones are the user's own notes.
        where: what the user wrote them in, for the error message.

    Raises:
        SpecError: the facts are no dict, a fact that begins like a known one is not known, or a value has another form.
    """
    check_names(facts, where)
    texts = {name: str(value).strip() for name, value in facts.items()}
    for name, text in texts.items():
        if name not in STATED_FACTS:
            near = difflib.get_close_matches(name, STATED_FACTS, n=1, cutoff=0.8)
            if name.partition(".")[0] in _FAMILIES or near:
                known = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(STATED_FACTS))}"
                raise SpecError(f"{where} has {name!r}, which no rule of the report reads; {known}")
            continue
        form, fits = STATED_FACTS[name]
        if not fits(text):
            raise SpecError(f"{where} has {name} = {text!r}; write {form}")
    return texts
