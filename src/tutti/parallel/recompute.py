"""Recompute: modules whose activations are dropped after forward and computed again in backward."""

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tutti.config.plan import LayoutRule, find_recompute
from tutti.errors import PlanError
from tutti.parallel.data.batchnorm import BatchScope


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
        if not inside and find_recompute(layout, name):
            _wrap(model.get_submodule(name), scope, selective=find_recompute(layout, name) == "selective")
            chosen.append(name)
    return chosen


KEPT = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)
"""What selective recomputing keeps: outputs that take many operations a byte to compute again."""


def _keep(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with first, second:
        yield


def _wrap(module: nn.Module, scope: BatchScope, *, selective: bool) -> None:
    plain = module.forward

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        if not selective:
            return nullcontext(), scope.recompute()
        ahead, again = create_selective_checkpoint_contexts(_keep)  # type: ignore[no-untyped-call]
        return ahead, _both(scope.recompute(), again)

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return plain(*args, **kwargs)
        return checkpoint(plain, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    module.forward = forward
