"""How long ranks' parts of an exact sum are beside the sum: what rules of momenta are to know (optim/cancelling.py)."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tutti.optim.cancelling import squares_of
from tutti.optim.frozen import Frozen
from tutti.optim.zero_one import ZeroOne
from tutti.parallel.data.buckets import Bucket


class Looks:
    """For a rule that says when it `looks`. `held`: of the model's parameters, what the optimizer has in their place on
    this rank. A look travels beside the bucket's flags, so ranks of a bucket look alike.
    """

    def __init__(self, rule: Frozen | ZeroOne, held: Mapping[nn.Parameter, nn.Parameter]) -> None:
        self._rule, self._held = rule, held
        self._parts: dict[Bucket, Tensor] = {}

    def begin(self, bucket: Bucket) -> Tensor | None:
        """Before an exact sum: squared norms of this rank's parts, float64, to be summed over the bucket's ranks."""
        if not self._rule.looks:
            return None
        self._parts[bucket] = squares_of(bucket.views)
        return self._parts[bucket]

    @torch.no_grad()
    def finish(self, *, finite: bool) -> None:
        """After all sums of a step. `finite`: the update may be made."""
        for bucket, parts in self._parts.items() if finite else ():
            both = torch.stack([parts, squares_of(bucket.views)], dim=1).tolist()
            for parameter, (ours, total) in zip(bucket.parameters, both, strict=True):
                if parameter in self._held:
                    self._rule.seen[self._held[parameter]] = ours, total
        self._parts = {}
