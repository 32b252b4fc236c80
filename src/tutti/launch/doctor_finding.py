"""What the doctor finds."""

from dataclasses import dataclass

from tutti.errors import TuttiError


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check.

    Attributes:
        ok: whether a launch would work. With a fix it works, but worse than it could.
        found: what the check found, as a phrase.
        fix: what to do if it is a problem, or could be better.
        table: measurements, as lines of text.
    """

    name: str
    ok: bool
    found: str
    fix: str = ""
    table: tuple[str, ...] = ()


def good(name: str, found: str) -> Finding:
    return Finding(name=name, ok=True, found=found)


def warned(name: str, found: str, fix: str) -> Finding:
    return Finding(name=name, ok=True, found=found, fix=fix)


def bad(name: str, found: str, fix: str) -> Finding:
    return Finding(name=name, ok=False, found=found, fix=fix)


def refused(name: str, error: TuttiError) -> Finding:
    """Return a TuttiError as a finding. Its message has the remedy after the last semicolon."""
    found, _, fix = str(error).rpartition("; ")
    return bad(name, found or str(error), fix if found else "")
