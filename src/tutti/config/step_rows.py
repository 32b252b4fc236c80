"""The short form of steps' rows in a metrics file, and how readers fill in what it leaves out.

Now and then a row is written whole. Those after it name it by its step (`"as"`) and leave out:

- fields that are as in that row, also null ones; never the loss,
- `samples_seen`, where every step since had as many samples.

Their `phases` are the seconds in that row's order. In their `communication`, an exchange is a list: its position in
that row's list, the seconds in progress, and then pairs of a phase's position and the seconds that were exposed in it.
Where its count or bytes differ, it is an object that has both beside the list.
"""

from typing import Any

WHOLE_EVERY = 250
"""One row of so many is whole, so that little is lost with a whole row that a crash cut short."""

_REFERENCE = "as"
_ALWAYS = {"step", "loss"}
_SECONDS_DIGITS, _WALL_DIGITS = 4, 7


class StepRowShortener:
    """Shortens the rows of steps that are written to one file, in their order."""

    def __init__(self) -> None:
        self._whole: dict[str, Any] | None = None
        self._phases: list[str] = []
        self._since = 0

    def forget(self) -> None:
        """The next row is whole: an earlier one may not have reached the file."""
        self._whole = None

    def shorten(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return what is written for a step's row.

        Args:
            row: its fields, as JSON has them.

        Returns:
            Another row, whose seconds have fewer digits.
        """
        row = _with_short_seconds(row)
        whole, self._since = self._whole, self._since + 1
        if whole is None or self._since >= WHOLE_EVERY or not whole.keys() <= row.keys():
            self._whole, self._phases, self._since = row, list(row.get("phases") or ()), 0
            return row
        short = {"kind": row["kind"], _REFERENCE: whole["step"]}
        left_out = whole | _samples_seen(whole, row)
        short |= {
            name: value
            for name, value in row.items()
            if name not in left_out or name in _ALWAYS or not _same(value, left_out[name])
        }
        if isinstance(phases := short.get("phases"), dict) and list(phases) == self._phases:
            short["phases"] = list(phases.values())
        if isinstance(exchanges := short.get("communication"), list):
            short["communication"] = [self._exchange(exchange) for exchange in exchanges]
        return short

    def _exchange(self, exchange: dict[str, Any]) -> Any:
        """Return the short form of one exchange; the exchange itself where it has none."""
        assert self._whole is not None
        exposed = exchange["exposed_s"]
        like = next(
            (
                (position, other)
                for position, other in enumerate(self._whole["communication"])
                if other["axes"] == exchange["axes"] and other["carried"] == exchange["carried"]
            ),
            None,
        )
        if like is None or any(phase not in self._phases for phase in exposed):
            return exchange
        position, other = like
        seconds: list[Any] = [position, exchange["in_progress_s"]]
        for phase, waited in exposed.items():
            seconds += (self._phases.index(phase), waited)
        if (other["count"], other["nbytes"]) == (exchange["count"], exchange["nbytes"]):
            return seconds
        return {"count": exchange["count"], "nbytes": exchange["nbytes"], "seconds": seconds}


class StepRowFiller:
    """Fills in what short rows of steps leave out. It is given a file's rows in their order.

    Rows of other kinds, and whole ones, stay as they are. Where the row that a short one names is missing, only what
    is written of it is returned.
    """

    def __init__(self) -> None:
        self._whole: dict[str, Any] = {}

    def fill(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the whole row."""
        if row.get("kind") != "step":
            return row
        if _REFERENCE not in row:
            self._whole = row
            return row
        row = dict(row)
        whole = self._whole if row.pop(_REFERENCE) == self._whole.get("step") else {}
        phases, exchanges = whole.get("phases"), whole.get("communication")
        names = list(phases) if isinstance(phases, dict) else []
        known = exchanges if isinstance(exchanges, list) else []
        if isinstance(row.get("phases"), list):
            row["phases"] = dict(zip(names, row["phases"], strict=False))
        if isinstance(row.get("communication"), list):
            filled = (_filled(exchange, known, names) for exchange in row["communication"])
            row["communication"] = [exchange for exchange in filled if exchange is not None]
        return whole | _samples_seen(whole, whole | row) | row


def _samples_seen(whole: dict[str, Any], row: dict[str, Any]) -> dict[str, int]:
    """Return the field of the samples seen after a step if every one since the whole row had as many."""
    seen, samples, step, whole_step = (
        whole.get("samples_seen"),
        row.get("samples"),
        row.get("step"),
        whole.get("step"),
    )
    if type(seen) is int and type(samples) is int and type(step) is int and type(whole_step) is int:
        return {"samples_seen": seen + samples * (step - whole_step)}
    return {}


def _filled(exchange: Any, known: list[Any], phases: list[str]) -> dict[str, Any] | None:
    """Return the exchange that a short form stands for; None if it stands for none."""
    counts = {}
    if isinstance(exchange, dict):
        if "seconds" not in exchange:
            return exchange
        counts = {"count": exchange.get("count"), "nbytes": exchange.get("nbytes")}
        exchange = exchange["seconds"]
    if not isinstance(exchange, list) or len(exchange) < 2:
        return None
    position, in_progress_s, *pairs = exchange
    like = _item(known, position)
    if not isinstance(like, dict):
        return None
    named = ((_item(phases, phase), waited) for phase, waited in zip(pairs[::2], pairs[1::2], strict=False))
    exposed = {phase: waited for phase, waited in named if phase is not None}
    return {**like, **counts, "in_progress_s": in_progress_s, "exposed_s": exposed}


def _item(items: list[Any], position: Any) -> Any:
    return items[position] if type(position) is int and 0 <= position < len(items) else None


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other  # 1 and True are equal, but not the same


def _with_short_seconds(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with as many digits of its times as mean something."""
    row = dict(row)
    if isinstance(row.get("wall_s"), float):
        row["wall_s"] = _short(row["wall_s"], _WALL_DIGITS)
    if isinstance(phases := row.get("phases"), dict):
        row["phases"] = {phase: _short(seconds) for phase, seconds in phases.items()}
    if isinstance(exchanges := row.get("communication"), list):
        row["communication"] = [
            {
                **exchange,
                "in_progress_s": _short(exchange["in_progress_s"]),
                "exposed_s": {phase: _short(seconds) for phase, seconds in exchange["exposed_s"].items()},
            }
            for exchange in exchanges
        ]
    return row


def _short(seconds: float | None, digits: int = _SECONDS_DIGITS) -> float | int | None:
    if not isinstance(seconds, float):
        return seconds
    return float(f"{seconds:.{digits}g}") or 0  # "0" is shorter than "0.0"
