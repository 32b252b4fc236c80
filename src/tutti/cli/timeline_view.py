"""A predicted step and what ranks hold, drawn in letters for a terminal."""

from dataclasses import fields
from typing import TYPE_CHECKING

from rich.text import Text

from tutti.config.prediction import ACTIVITY_LABELS, Activity, Omission, RankMemory, Timeline, Track
from tutti.cost_model.words import nbytes, seconds

if TYPE_CHECKING:
    from rich.console import Console

LETTERS: dict[Activity, tuple[str, str]] = {
    "data": ("d", "black on green"),
    "forward": ("f", "white on blue"),
    "backward": ("b", "black on bright_cyan"),
    "weights": ("w", "black on cyan"),
    "optimizer": ("u", "white on magenta"),
    "communication": ("=", "black on yellow"),
    "bubble": (".", "dim"),
    "waiting": ("-", "dim"),
    "other": ("o", "dim"),
}
"""A letter and a style for what a rank does."""

HOLDERS: dict[str, tuple[str, str]] = {
    "parameters": ("P", "white on blue"),
    "gradients": ("G", "black on bright_cyan"),
    "optimizer": ("O", "white on magenta"),
    "activations": ("A", "black on green"),
    "communication": ("C", "black on yellow"),
    "buffers": ("B", "black on white"),
    "reserve": ("R", "white on bright_black"),
    "script": ("S", "black on bright_white"),
}
"""The same for what holds memory."""

TOLD = 0.005
"""Parts of a step below this are not told beside a track."""


def show_timeline(out: "Console", found: Timeline) -> None:
    """The step by tracks, and the memory of a rank of each against its limit. All of it is predicted."""
    time = found.step_time_s
    label = max(len(_name(track, found)) for track in found.tracks)
    told = {id(track): _told(track, time.value) for track in found.tracks}
    width = max(24, min(out.width, 160) - label - max(len(words) for words in told.values()) - 4)
    left = "" if found.left_out is None else f"; // leaves out {found.left_out.microbatches} microbatches between"
    out.print(
        f"One step, predicted: {seconds(time.value)} ({seconds(time.low)} to {seconds(time.high)}){left}",
        style="bold", markup=False, soft_wrap=True,
    )  # fmt: skip
    letters = ""
    for track in found.tracks:
        line = Text(f"{_name(track, found):<{label}}  ")
        step = drawn(track, found.left_out, time.value, width)
        letters += step.plain
        out.print(line.append_text(step).append(f"  {told[id(track)]}"), soft_wrap=True)
    out.print(
        _legend({ACTIVITY_LABELS[doing]: look for doing, look in LETTERS.items() if look[0] in letters}), soft_wrap=True
    )
    if found.tracks_left_out:
        out.print(f"{found.tracks_left_out} rows between these are not shown", style="dim")
    out.print("Memory of a rank, predicted", style="bold")
    seen = ""
    for track in found.tracks:
        line = Text(f"{_name(track, found):<{label}}  ")
        line.append_text(held(track, width))
        seen += line.plain[label:]
        over = track.memory.total > track.memory_limit_nbytes
        words = f"{nbytes(track.memory.total)} of {nbytes(track.memory_limit_nbytes)}" + (": too much" if over else "")
        line.append(f"  {words}", style="red" if over else "")
        out.print(line, soft_wrap=True)
    out.print(_legend({name: look for name, look in HOLDERS.items() if look[0] in seen}), soft_wrap=True)


def drawn(track: Track, left: Omission | None, step_s: float, width: int) -> Text:
    """`width` letters for the step, // for what is left out. Each is something the track does in its time: what it did
    most and has had the fewest letters for, so that letters are in proportion to seconds where bars are narrow."""
    line = Text()
    mark = 2 if left is not None else 0
    away = left.end_s - left.start_s if left is not None else 0.0
    each = (step_s - away) / (width - mark)
    before = round(left.start_s / each) if left is not None else width
    owed: dict[Activity, float] = {}
    for cell in range(width - mark):
        if cell == before:
            line.append("/" * mark, style="dim")
        later = away if cell >= before else 0.0
        shares = _shares(track, cell * each + later, (cell + 1) * each + later)
        for doing, share in shares.items():
            owed[doing] = owed.get(doing, 0.0) + share / each
        chosen = max(shares, key=lambda doing: owed[doing], default=None)
        if chosen is None:
            line.append(" ")
            continue
        owed[chosen] -= 1.0
        letter, style = LETTERS[chosen]
        line.append(letter, style=style)
    return line


def _shares(track: Track, start_s: float, end_s: float) -> dict[Activity, float]:
    """Seconds of what the track does between two moments."""
    shares: dict[Activity, float] = {}
    for bar in track.bars:
        shared = min(bar.end_s, end_s) - max(bar.start_s, start_s)
        if shared > 0:
            shares[bar.doing] = shares.get(bar.doing, 0.0) + shared
    return shares


def held(track: Track, width: int) -> Text:
    """`width` letters for the larger of memory and limit, a letter for each part held, | where the limit is passed."""
    line = Text()
    whole = max(track.memory_limit_nbytes, track.memory.total)
    limit = round(width * track.memory_limit_nbytes / whole)
    total, end = 0.0, 0
    for part in fields(RankMemory):
        total += getattr(track.memory, part.name)
        letter, style = HOLDERS[part.name]
        for cell in range(end, round(width * total / whole)):
            line.append("|" if cell == limit else letter, style="bold red" if cell == limit else style)
        end = round(width * total / whole)
    line.append("." * (width - end), style="dim")
    return line


def _name(track: Track, found: Timeline) -> str:
    stages = {one.stage for one in found.tracks}
    return track.ranks + (f" (stage {track.stage})" if len(stages) > 1 else "")


def _told(track: Track, step_s: float) -> str:
    """busy 74 %, exposed 5 %, bubble 20 %."""
    parts = [("busy", track.busy_s)]
    words: dict[Activity, str] = {
        "data": "data", "communication": "exposed", "bubble": "bubble", "waiting": "waiting", "other": "other",
        "hidden": "hidden",
    }  # fmt: skip
    parts += [(word, track.seconds.get(doing, 0.0)) for doing, word in words.items()]
    return ", ".join(f"{word} {100 * lasts / step_s:.0f} %" for word, lasts in parts if lasts > TOLD * step_s)


def _legend(entries: dict[str, tuple[str, str]]) -> Text:
    line = Text("  ")
    for name, (letter, style) in entries.items():
        line.append(letter, style=style)
        line.append(f" {name}   ", style="dim")
    return line
