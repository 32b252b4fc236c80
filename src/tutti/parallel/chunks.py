"""Microbatching inside a layer: a module that would not fit is run on parts of its batch, one after another.

Each part is recomputed in backward, so that the module's workspace and what it keeps inside are those of one part.
Exact for modules that treat samples one by one.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from tutti.config.plan import LayoutRule, find_chunks
from tutti.errors import PlanError, ScriptError


def apply_chunks(model: nn.Module, layout: Sequence[LayoutRule]) -> list[str]:
    """Run the outermost modules that the layout says so of in parts; returns their names.

    Raises PlanError for a module that normalises over the batch: its parts would be other batches.
    """
    chosen: list[str] = []
    for name, module in model.named_modules():
        count = find_chunks(layout, name) if name else 1
        if count == 1 or any(name.startswith(outer + ".") for outer in chosen):
            continue
        over_batch = next((key for key, one in module.named_modules() if isinstance(one, _BatchNorm)), None)
        if over_batch is not None:
            place = f"{name}.{over_batch}" if over_batch else name
            raise PlanError(
                f"layout: chunks = {count} for module {name!r}, but {place!r} normalises over the batch, which parts "
                "would change; leave it out of the rule"
            )
        _wrap(module, name, count)
        chosen.append(name)
    return chosen


def _wrap(module: nn.Module, name: str, count: int) -> None:
    plain = module.forward

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        parts = [
            checkpoint(plain, *own_args, use_reentrant=False, **own_kwargs)
            for own_args, own_kwargs in _cut(name, (args, kwargs), count)
        ]
        return pytree.tree_map(_join, *parts)

    module.forward = forward


def _cut(name: str, call: Any, count: int) -> list[Any]:
    """The call on parts along dim 0 of every tensor that has the batch there."""
    leaves, structure = pytree.tree_flatten(call)
    batch = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim), None)
    if batch is None:
        raise ScriptError(f"module {name!r} gets no tensor with a batch; take chunks out of the layout rule for it")
    columns = [
        leaf.tensor_split(min(count, batch)) if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == batch
        else [leaf] * min(count, batch)
        for leaf in leaves
    ]  # fmt: skip
    return [pytree.tree_unflatten(list(part), structure) for part in zip(*columns, strict=True)]


def _join(*parts: Any) -> Any:
    return torch.cat(parts) if isinstance(parts[0], torch.Tensor) and parts[0].ndim else parts[0]
