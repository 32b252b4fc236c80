"""Format numbers and lists for readers: SI prefixes, durations, percentages, and "not recorded" for missing values."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from tutti.config.run_report import Quantity
from tutti.config.vocabulary import Evidence, TrafficKind

NOT_RECORDED = "not recorded"

EVIDENCE: dict[Evidence, str] = {
    "measured": "recorded by the run itself while it ran",
    "predicted": "estimated by tutti before the run",
    "published": "taken from a data sheet or a paper",
    "assumed": "stated by the user or assumed by tutti; not measured here",
}

PHASE_NAMES = {
    "data": "data",
    "forward": "forward",
    "backward": "backward",
    "exposed_communication": "exposed communication",
    "optimizer": "optimizer",
    "evaluation": "evaluation",
    "other": "other",
}

CARRIED: dict[TrafficKind, str] = {
    "gradients": "gradients of parameters",
    "parameters": "parameters",
    "activations": "activations of split layers",
    "halos": "halos of neighbours",
    "tokens": "tokens to and from experts",
    "vectors": "embedding vectors",
    "keys": "keys and values",
    "heads": "attention heads for tokens",
    "messages": "activations between stages",
    "statistics": "batch statistics",
    "routing": "routing decisions",
    "indices": "indices of table rows",
    "scalars": "losses and norms",
}

_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_SI_UNITS = ("B", "B/s", "FLOP", "FLOP/s", "J")
_COUNTED = ("ranks", "hosts", "cores", "samples", "tokens", "steps", "epochs", "devices")
_LOWER_ENDINGS = ("loss", "error", "perplexity", "deviance", "distance", "regret", "mse", "mae", "mape", "nll")
_LOWER_IS_BETTER = frozenset(
    (
        "ppl",
        "rmse",
        "nmse",
        "rmsle",
        "msle",
        "medae",
        "smape",
        "mase",
        "wape",
        "bits",
        "bpc",
        "bpb",
        "bpd",
        "wer",
        "cer",
        "ter",
        "eer",
        "err",
        "fid",
        "kid",
        "lpips",
        "brier",
        "hamming",
        "crps",
        "pinball",
        "cost",
        "kl",
        "divergence",
    )
)


def significant(value: float, digits: int = 3) -> str:
    """Format a number with about `digits` significant digits.

    Whole numbers keep all digits, thousands are grouped, and there is no exponent between 1e-4 and 1e15.
    """
    if value == 0:
        return "0"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    size = math.floor(math.log10(abs(value)))
    if size < -4 or size >= 15:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(0, digits - 1 - size)}f}"


def duration(seconds: float) -> str:
    """Format seconds: 3.42 ms, 12.3 s, 4 min 05 s, 2 h 13 min."""
    if seconds < 0:
        return "-" + duration(-seconds)
    if seconds == 0:
        return "0 s"
    if seconds < 1e-3:
        return f"{significant(seconds * 1e6)} µs"
    if seconds < 1:
        return f"{significant(seconds * 1e3)} ms"
    if seconds < 120:
        return f"{significant(seconds)} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return f"{int(seconds // 3600):,} h {int(seconds % 3600 // 60):02d} min"


def prefixed(value: float, unit: str) -> str:
    """Format a value with an SI prefix: 3.2 MB, 41 GFLOP/s."""
    for factor, prefix in _PREFIXES:
        if abs(value) >= factor:
            return f"{significant(value / factor)} {prefix}{unit}"
    return f"{significant(value)} {unit}"


def number(value: float, unit: str) -> str:
    """Format a value in its unit, as all pages and tables show it."""
    if unit == "s":
        return duration(value)
    if unit == "ratio":
        return f"{significant(value * 100)} %"
    if unit in _SI_UNITS:
        return prefixed(value, unit)
    if unit == "x":
        return f"{significant(value)}×"
    if not unit:
        return significant(value, 4) if float(value).is_integer() or abs(value) >= 1e4 else f"{value:.4g}"
    return f"{significant(value, 4)} {unit.removesuffix('s') if value == 1 and unit in _COUNTED else unit}"


def show(quantity: Quantity) -> str:
    """Format a quantity, or return "not recorded"."""
    return NOT_RECORDED if quantity.value is None else number(quantity.value, quantity.unit)


_TIMES = ((3600.0, "h", 7200.0), (60.0, "min", 600.0), (1.0, "s", 1.0), (1e-3, "ms", 1e-3), (1e-6, "µs", 0.0))
"""Units of time, each with its seconds and the least time, in seconds, that a column shows in it."""


LEAST_SHOWN = 0.001
"""The least value that a column shows, in its unit."""


def alike(quantities: Iterable[Quantity]) -> Callable[[Quantity], str]:
    """Return a function that formats quantities as `show` does, but all in the unit of the largest of `quantities`.

    Examples:
        >>> column = [Quantity(value=seconds, unit="s", evidence="measured") for seconds in (1.25, 0.004)]
        >>> [alike(column)(quantity) for quantity in column]
        ['1.25 s', '0.00400 s']
    """
    known = [q for q in quantities if q.value]
    largest = max((abs(q.value or 0.0) for q in known), default=0.0)
    unit = known[0].unit if known else ""
    if not largest or any(q.unit != unit for q in known):
        return show
    if unit == "s":
        factor, name, _ = next(entry for entry in _TIMES if largest >= entry[2])
    elif unit in _SI_UNITS:
        factor, prefix = next((entry for entry in _PREFIXES if largest >= entry[0]), _PREFIXES[-1])
        name = f"{prefix}{unit}"
    else:
        return show

    def format_value(quantity: Quantity) -> str:
        if quantity.value is None or not quantity.value or quantity.unit != unit:
            return show(quantity)
        scaled = quantity.value / factor
        return f"{significant(scaled)} {name}" if abs(scaled) >= LEAST_SHOWN else f"< {LEAST_SHOWN} {name}"

    return format_value


def split_unit(quantity: Quantity) -> tuple[str, str]:
    """Split a formatted quantity into number and unit, as in ("6,095", "samples/s").

    A duration in two parts, such as "4 min 05 s", stays whole, with an empty unit.
    """
    head, _, unit = show(quantity).partition(" ")
    separate = any(mark.isdigit() for mark in head) and not any(mark.isdigit() for mark in unit)
    return (head, unit) if separate else (show(quantity), "")


def show_interval(quantity: Quantity, form: Callable[[Quantity], str] = show) -> str:
    """Format the interval of an estimate, such as "8.1 to 12.4 ms"; empty if it has none.

    Args:
        quantity: the estimate.
        form: formats a value, such as `alike(...)`.
    """
    if quantity.low is None or quantity.high is None:
        return ""
    low, high = (form(replace(quantity, value=end, low=None, high=None)) for end in (quantity.low, quantity.high))
    (start, _, unit), (_, _, same) = low.partition(" "), high.partition(" ")
    return f"{start if unit == same else low} to {high}"


def signed_percent(ratio: float) -> str:
    """Format a ratio as a signed percentage: +12 %, −3.4 %, 0 %."""
    text = significant(abs(ratio) * 100, 2 if abs(ratio) < 1 else 3)
    return f"{'+' if ratio > 0 else '−' if ratio < 0 else ''}{text} %"


def quality_text(value: float) -> str:
    """Format a quality: four decimals up to 1, four significant digits above."""
    return f"{value:.4f}" if abs(value) <= 1 else significant(value, 4)


def higher_is_better(metric: str) -> bool:
    """Return whether a higher value of this metric is better, judged by its name (not for losses and errors)."""
    name = metric.lower().replace("-", "_")
    return not (name.endswith(_LOWER_ENDINGS) or _LOWER_IS_BETTER & set(name.split("_")) or "distance" in name)


def plural(count: int | float, word: str) -> str:
    """Format a count and a noun: 1 step, 2 steps, 2 microbatches."""
    ending = "" if count == 1 else "es" if word == "microbatch" else "s"
    return f"{significant(count)} {word}{ending}"


def listed(items: list[str]) -> str:
    """Join items: "a, b and c"."""
    return " and ".join(([", ".join(items[:-1])] if len(items) > 1 else []) + items[-1:])
