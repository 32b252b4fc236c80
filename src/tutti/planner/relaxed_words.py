"""What opening the dial brought, in plain words."""

from tutti.config.vocabulary import Evidence
from tutti.cost_model.words import seconds
from tutti.planner.choice import Request
from tutti.planner.explore import Costed
from tutti.planner.tried_ways import Doubt, Tried


def chosen_words(request: Request, best: Costed, one: Tried, doubt: Doubt) -> str:
    """Why a plan that sends less was chosen, and what that changes."""
    counted = counted_words(one.samples, one.evidence)
    if one.way.dial == "exact":
        return (
            f"{_way(one)}, which are fewer bytes and lose nothing: a step takes {_step(one.one)} instead of "
            f"{_step(best)} with sums of gradients. That pays even if {doubt_words(one, doubt)}"
        )
    return (
        f"{_way(one)}, as --relax {request.relax} allows: a step takes {_step(one.one)} instead of {_step(best)} with "
        f"exact sums. Counted with {counted}, that pays even if {doubt_words(one, doubt)}. It computes something else "
        "than one device: compare its quality with an exact run's"
    )


def exact_words(request: Request, best: Costed, near: Tried | None, doubt: Doubt | None, why: str) -> str:
    """Why sums stay exact although the dial is open."""
    begin = f"Sums stay exact, although --relax {request.relax} allows others: "
    if near is None or doubt is None:
        return begin + (why or "no way to send less goes with these plans")
    told = f"{_way(near, small=True)} would take {_step(near.one)} a step instead of {_step(best)}"
    counted = counted_words(near.samples, near.evidence)
    if near.one.value >= best.value:
        return f"{begin}the best of them is no quicker; {told}"
    if near.counted >= best.value:
        return f"{begin}{told}, but counted with {counted} that is no gain"
    gain = 1 - near.counted / best.value
    if gain < near.worth:
        return f"{begin}{told}, counted with {counted} a gain of {gain:.0%}, too small to change training for"
    return f"{begin}{told}, which, counted with {counted}, is no sure gain: none if {doubt_words(near, doubt)}"


def doubt_words(one: Tried, doubt: Doubt) -> str:
    """The margins in words."""
    links = f"links are {doubt.links:.2g} times as fast as predicted"
    return f"{links} and its kernels {doubt.kernels:.2g} times as slow" if doubt.kernels > 1 else links


def counted_words(samples: float, evidence: Evidence) -> str:
    """How a way's samples are counted."""
    if abs(samples - 1) < 0.005:
        return "as many samples" + ("" if evidence == "measured" else f" ({evidence})")
    return f"{samples:.3g} times the samples ({evidence})"


def why_exact_lost(best: Costed, one: Tried) -> str:
    """Why the best exact plan was not taken."""
    return f"exact sums; {best.value / one.counted:.2f}x as long as {one.way.words}, with all it is counted with"


def why_way_lost(one: Tried, chosen: float) -> str:
    """Why a way was not taken, `chosen` being what the one that was is counted with."""
    ratio, counted = one.counted / chosen, counted_words(one.samples, one.evidence)
    if ratio < 1:
        return f"{1 - ratio:.0%} less, counted with {counted}, which is within the prediction's error"
    return f"{ratio:.2f}x as long, counted with {counted}"


def _way(one: Tried, *, small: bool = False) -> str:
    said = (
        f"gradients go as {one.way.words}" if one.way.mode == "synchronous" else f"replicas are kept as {one.way.words}"
    )
    return said if small else said[0].upper() + said[1:]


def _step(one: Costed) -> str:
    return seconds(one.prediction.step_time_s.value)
