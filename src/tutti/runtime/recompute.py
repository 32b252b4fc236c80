"""Recompute: modules whose activations are dropped after forward and computed again in backward."""

import functools
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from tutti.errors import PlanError
from tutti.runtime.batchnorm import BatchScope
from tutti.spec.plan import LayoutRule, recomputes


def apply_recompute(model: nn.Module, layout: tuple[LayoutRule, ...], scope: BatchScope) -> list[str]:
    """Recompute the outermost modules that the layout's last matching rule says so of; returns their names.

    Raises PlanError when a rule with recompute matches no module.
    """
    names = [name for name, _ in model.named_modules() if name]
    for rule in layout:
        if rule.recompute and not any(fnmatchcase(name, rule.modules) for name in names):
            raise PlanError(f"layout: no module matches {rule.modules!r}; modules are {', '.join(names[:8]) or 'none'}")
    chosen: list[str] = []
    for name in names:
        inside = any(name.startswith(outer + ".") for outer in chosen)
        if not inside and recomputes(layout, name):
            _wrap(model.get_submodule(name), scope)
            chosen.append(name)
    return chosen


def _wrap(module: nn.Module, scope: BatchScope) -> None:
    plain = module.forward

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), scope.recompute()

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return plain(*args, **kwargs)
        return checkpoint(plain, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    module.forward = forward
