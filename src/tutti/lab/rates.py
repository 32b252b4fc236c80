"""Rates of links, as people and `tc` write them: "1gbit" is 1e9 bits a second."""

import re
from collections.abc import Sequence

from tutti.errors import LabError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_FORM = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)bit", re.IGNORECASE)

SLOWEST_BITS_PER_S = 10**5
"""Below it a single burst, which must hold a whole segment, takes seconds."""


FASTEST_BITS_PER_S = 10**13
"""Above it a burst (see burst_nbytes) is more than `tc` takes, and no memory is that fast."""


def parse_rate(text: str) -> int | None:
    """Bits a second of "100mbit", "2.5gbit" and so on; None for "unlimited". Raises LabError for anything else."""
    word = text.strip().lower()
    if word == "unlimited":
        return None
    form = _FORM.fullmatch(word)
    if form is None:
        raise LabError(f"rate {text!r} is none; write it as 100mbit, 1gbit or 2.5gbit (bits a second), or unlimited")
    bits = round(float(form[1]) * _UNITS[form[2].lower()])
    if bits < SLOWEST_BITS_PER_S:
        raise LabError(f"rate {text!r} is too low for a lab; give {rate_words(SLOWEST_BITS_PER_S)} or more")
    if bits > FASTEST_BITS_PER_S:
        most = rate_words(FASTEST_BITS_PER_S)
        raise LabError(f"rate {text!r} is too high for a lab to limit; give {most} or less, or unlimited")
    return bits


def rates_of(words: str | Sequence[str], hosts: int) -> tuple[int | None, ...]:
    """The rate of every host, from one word for all or one for each. Raises LabError where the numbers differ."""
    parts = [words] if isinstance(words, str) else list(words)
    if len(parts) not in (1, hosts):
        raise LabError(f"{len(parts)} rates for {hosts} hosts; give one for all, or one for each")
    rates = tuple(parse_rate(part) for part in parts)
    return rates * hosts if len(rates) == 1 else rates


def rate_words(bits_per_s: int | None) -> str:
    """The rate as it is written: 10**9 -> "1gbit"."""
    if bits_per_s is None:
        return "unlimited"
    for prefix in ("t", "g", "m", "k"):
        if bits_per_s >= _UNITS[prefix]:
            return f"{bits_per_s / _UNITS[prefix]:g}{prefix}bit"
    return f"{bits_per_s}bit"


def burst_nbytes(bits_per_s: int) -> int:
    """What a token bucket may send at once: 1 ms of the rate, and never less than a segment of 64 KiB needs."""
    return max(70_000, bits_per_s // 8 // 1000)
