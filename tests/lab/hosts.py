"""A lab for tests, or the reason why there is none here."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest

from tutti.errors import LabError
from tutti.lab import Lab


@contextmanager
def lab_or_skip(hosts: int, *, rates: str | Sequence[str] = "unlimited", ranks_per_host: int = 1) -> Iterator[Lab]:
    """A lab for the length of a block; the test is skipped where this system makes none."""
    with ExitStack() as stack:
        try:
            lab = stack.enter_context(Lab(hosts, rates=rates, ranks_per_host=ranks_per_host))
        except LabError as error:
            pytest.skip(str(error))
        yield lab


def needs_labs() -> None:
    """Skips the test where this system makes no labs."""
    with lab_or_skip(1):
        pass
