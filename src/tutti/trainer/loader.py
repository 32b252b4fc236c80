"""The loader a script iterates over: this rank's shares, with the time they took put down to data."""

from collections.abc import Iterator
from typing import Any

from tutti.comm.clock import PhaseClock
from tutti.data.loader import ShareLoader


class JobLoader:
    """Yields this rank's share of each global batch of the current epoch."""

    def __init__(self, shares: ShareLoader, clock: PhaseClock) -> None:
        self.shares = shares
        self.clock = clock

    def __len__(self) -> int:
        """Steps of an epoch."""
        return len(self.shares)

    @property
    def dataset(self) -> Any:
        return self.shares.source.dataset

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.shares)
        while True:
            self.clock.enter("data")
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self.clock.enter("other")
            yield batch
