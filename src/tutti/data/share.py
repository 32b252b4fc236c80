"""Who computes what of a global batch: slices (microbatches), and each rank's contiguous share of a slice."""

from dataclasses import dataclass
from itertools import pairwise

from tutti.config.partitioning import cut
from tutti.config.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's part of one slice: samples start .. start + count - 1 of the global batch.

    A rank whose count is 0 still loads one sample of the slice (`start`) and computes with weight 0, because it
    must take part in the slice's collectives.
    """

    start: int
    count: int
    slice_start: int
    slice_size: int

    @property
    def loaded(self) -> int:
        return max(self.count, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's parts of a global batch of `batch_size` samples, one for each slice that is not empty."""

    batch_size: int
    parts: tuple[Part, ...]

    @property
    def positions(self) -> list[int]:
        """Positions within the global batch of the samples to load, in order."""
        return [part.start + offset for part in self.parts for offset in range(part.loaded)]

    @property
    def sizes(self) -> list[int]:
        """Number of loaded samples of each part."""
        return [part.loaded for part in self.parts]


def share_of(batch_size: int, rank: int, plan: Plan) -> Share:
    """The share of data-parallel rank `rank` in a global batch of `batch_size` samples."""
    degree = plan.data_parallel_degree
    slices = cut(batch_size, plan.batch.num_microbatches)
    parts = []
    for begin, end in pairwise(slices):
        if begin == end:
            continue
        bounds = cut(end - begin, degree, plan.shares)
        count = bounds[rank + 1] - bounds[rank]
        start = begin + min(bounds[rank], end - begin - 1)
        parts.append(Part(start=start, count=count, slice_start=begin, slice_size=end - begin))
    return Share(batch_size=batch_size, parts=tuple(parts))
