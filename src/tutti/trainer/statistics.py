"""Running statistics, which forward moves before anyone knows whether the step counts."""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase


class Statistics:
    """Running statistics and counters of the model's norms, tutti's or torch's own: `restore` puts back what they were
    at the last `keep`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._norms = [module for module in model.modules() if isinstance(module, _NormBase)]
        self._live: list[torch.Tensor] = []
        self._kept: list[torch.Tensor] = []

    def keep(self) -> None:
        """A step begins."""
        found = [one for norm in self._norms if norm.training for one in norm._buffers.values() if one is not None]
        live = [one for one in found if not one.is_meta]  # on another stage's ranks
        if [*map(id, live)] != [*map(id, self._live)]:
            self._live, self._kept = live, [torch.empty_like(one) for one in live]
        if live:
            torch._foreach_copy_(self._kept, live)

    @torch.no_grad()
    def restore(self) -> None:
        """The step is as if it had not been."""
        if self._live:
            torch._foreach_copy_(self._live, self._kept)
