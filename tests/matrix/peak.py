"""The most bytes of tensors that are alive at once while something runs, from the allocations that torch records."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.autograd.profiler import profile


@contextmanager
def recorded_peak(facts: dict[str, int], name: str, before: int) -> Iterator[None]:
    """Note under `name` the peak in what runs inside; `before`: bytes alive at its start."""
    with profile(profile_memory=True) as recorded:
        yield
    changes = [
        (event.start_ns(), event.nbytes()) for event in recorded.kineto_results.events() if event.name() == "[memory]"
    ]
    alive = most = before
    for _, nbytes in sorted(changes, key=lambda change: change[0]):
        alive += nbytes
        most = max(most, alive)
    facts[name] = most
