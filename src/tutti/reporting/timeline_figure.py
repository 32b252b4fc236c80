"""Draw the timeline of the last steps: one row for each rank, as SVG whose colours are the page's."""

from collections.abc import Mapping, Sequence
from html import escape

from tutti.config.safe_text import plain_text
from tutti.reporting.formatting import duration, plural, significant
from tutti.reporting.rank_timeline import WIDTH_PX, Activity, RankTimeline, TimelineRow, TimelineSpan
from tutti.reporting.report_figures import time_ticks
from tutti.reporting.svg import Plot

NAMES: Mapping[Activity, str] = {
    "computing": "in a step: computing",
    "data": "waiting for the next batch",
    "waiting": "waiting for a rank that has not come",
    "exchanging": "waiting for the exchange itself",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
    "other": "other methods of the Job",
    "hidden": "thin: a collective in progress beside other work",
}
"""Words of the legend."""

_VERBS: Mapping[Activity, str] = {
    "waiting": "waits ",
    "exchanging": "waits ",
    "data": "waits for its batch: ",
}

_NARROW_STEPS = 2
"""Steps that are shown on narrow screens."""

_NARROW_PX = 330
_TOP, _BOTTOM, _LEFT, _RIGHT = 22, 40, 62, 106


def timeline_plot(timeline: RankTimeline) -> Plot | None:
    """Draw a timeline; return None if it has no rows."""
    if not timeline.rows:
        return None
    first, last = timeline.steps[0][0], timeline.steps[-1][0]
    title = f"The last step ({last})" if first == last else f"The last {plural(len(timeline.steps), 'step')}"
    title += "" if first == last else f" ({significant(first)} to {significant(last)})"
    rows = " ".join(
        f"Rank {row.rank} waited {duration(row.waited_s)} of {duration(timeline.seconds)}." for row in timeline.rows
    )
    alt_text = f"{title}. {timeline.sentence} {rows}"
    shown = {span.activity for row in timeline.rows for span in row.spans}
    legend = "".join(
        f'<li><i class="{activity}"></i>{escape(words)}</li>' for activity, words in NAMES.items() if activity in shown
    )
    narrow_from = timeline.steps[-min(_NARROW_STEPS, len(timeline.steps))][1]
    return Plot(
        title=title,
        note="measured; point at a part to read what it is",
        svg=f'<ul class="timeline-legend">{legend}</ul>' + _svg(timeline, alt_text, WIDTH_PX, 0.0, titles=True),
        alt_text=alt_text,
        wide=True,
        narrow=_svg(timeline, alt_text, _NARROW_PX, narrow_from, titles=False),
    )


def _svg(timeline: RankTimeline, alt_text: str, width: int, since_s: float, *, titles: bool) -> str:
    """Return the rows from `since_s` on.

    Args:
        timeline: what is drawn.
        alt_text: the same in words.
        width: of the whole, in page pixels.
        since_s: left edge, in seconds of the timeline.
        titles: whether parts have words that a pointer shows, and rows their waits at the right.
    """
    pitch = 34 if len(timeline.rows) <= 8 else 26
    right = _RIGHT if titles else 8
    plotted = width - _LEFT - right
    steps = sum(begun_s >= since_s for _, begun_s in timeline.steps)
    scale = plotted / max(timeline.seconds - since_s, 1e-6)
    bottom = _TOP + pitch * len(timeline.rows)
    parts = [f'<rect class="frame" x="{_LEFT}" y="{_TOP}" width="{plotted}" height="{bottom - _TOP}"/>']
    axis = "time (ms)" if titles else f"time in the last {plural(steps, 'step')} (ms)"
    parts += _ticks(timeline.seconds - since_s, scale, bottom, axis, most=10 if titles else 4)
    parts += _steps(timeline.steps, since_s, scale, bottom)
    for place, row in enumerate(timeline.rows):
        parts += _rank_row(row, _TOP + place * pitch, pitch, since_s, scale, titles=titles)
        if titles:
            words = f"waits {duration(row.waited_s)}"
            parts.append(f'<text x="{width - right + 10}" y="{_TOP + place * pitch + pitch / 2 + 3:g}">{words}</text>')
    label = escape(alt_text)
    height = bottom + _BOTTOM
    return (
        f'<svg class="timeline" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    )


def _ticks(seconds: float, scale: float, bottom: int, label: str, most: int) -> list[str]:
    """Return the time axis, in milliseconds, with at most `most` marks after the first."""
    parts = []
    for tick in time_ticks(seconds, most):
        x = _LEFT + tick * scale
        parts.append(f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 17}">{tick * 1e3:g}</text>')
    middle = _LEFT + seconds * scale / 2
    return [*parts, f'<text class="tick" x="{middle:.0f}" y="{bottom + 34}">{label}</text>']


def _steps(steps: Sequence[tuple[int, float]], since_s: float, scale: float, bottom: int) -> list[str]:
    """Return the border and the number of each step."""
    parts, free = [], 0.0
    for number, begun_s in steps:
        if begun_s < since_s:
            continue
        x = _LEFT + (begun_s - since_s) * scale
        parts.append(f'<line class="border" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 4}" y2="{bottom}"/>')
        words = f"step {significant(number)}"
        if x >= free:
            parts.append(f'<text class="border" x="{x + 3:.1f}" y="{_TOP - 8}">{words}</text>')
            free = x + 7.5 * len(words)
    return parts


def _rank_row(row: TimelineRow, top: int, pitch: int, since_s: float, scale: float, *, titles: bool) -> list[str]:
    parts = [f'<text x="0" y="{top + pitch / 2 + 3:g}">rank {row.rank}</text>']
    for span in row.spans:
        if span.ended_s <= since_s:
            continue
        x = _LEFT + max(0.0, span.begun_s - since_s) * scale
        width = max(0.7, (span.ended_s - max(span.begun_s, since_s)) * scale)
        y, height = (top + pitch - 7, 3) if span.activity == "hidden" else (top + 4, pitch - 13)
        box = f'<rect class="{span.activity}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}"'
        parts.append(f"{box}><title>{escape(plain_text(_words(span)))}</title></rect>" if titles else f"{box}/>")
    return parts


def _words(span: TimelineSpan) -> str:
    """Return what a pointer shows of a part."""
    verb = _VERBS.get(span.activity, "")
    if span.count == 1:
        return f"{verb}{duration(span.total_s)} {span.words}"
    return f"{verb}{duration(span.total_s)} in {span.count} parts, the longest {span.words}"
