"""Recompute (activation checkpointing): activations are dropped after forward and computed again in backward.

A module that does not fit can also run on chunks of its batch, one after another. Each chunk is recomputed in backward,
so the module's memory is that of one chunk. This is exact for modules that treat samples independently.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tutti.config.plan import LayoutRule, find_chunks, find_recompute
from tutti.errors import PlanError, ScriptError
from tutti.parallel.data.batchnorm import BatchScope


def apply_recompute(model: nn.Module, layout: tuple[LayoutRule, ...], scope: BatchScope) -> list[str]:
    """Recompute the outermost modules for which the layout says so.

    Args:
        model: the model, changed in place.
        layout: the plan's layout rules.
        scope: tells BatchNorm modules that forward runs again.

    Returns:
        Their names.

    Raises:
        PlanError: a rule with recompute matches no module.
    """
    names = [name for name, _ in model.named_modules() if name]
    for rule in layout:
        if rule.recompute and not any(fnmatchcase(name, rule.modules) for name in names):
            raise PlanError(f"layout: no module matches {rule.modules!r}; modules are {', '.join(names[:8]) or 'none'}")
    chosen: list[str] = []
    for name in names:
        inside = any(name.startswith(outer + ".") for outer in chosen)
        if not inside and find_recompute(layout, name):
            _wrap_recomputed(model.get_submodule(name), scope, selective=find_recompute(layout, name) == "selective")
            chosen.append(name)
    return chosen


SAVED_OPS = (
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
"""Operators whose outputs selective recompute saves: those with many FLOPs for each byte of output."""


def _keep(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with first, second:
        yield


def _wrap_recomputed(module: nn.Module, scope: BatchScope, *, selective: bool) -> None:
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


def apply_chunks(model: nn.Module, layout: Sequence[LayoutRule]) -> list[str]:
    """Run the outermost modules for which the layout states chunks on parts of the batch, one after another.

    Returns:
        Their names.

    Raises:
        PlanError: a module normalises over the batch, so chunks would change its result.
    """
    chosen: list[str] = []
    for name, module in model.named_modules():
        count = find_chunks(layout, name) if name else 1
        if count == 1 or any(name.startswith(outer + ".") for outer in chosen):
            continue
        over_batch = next((key for key, inner in module.named_modules() if isinstance(inner, _BatchNorm)), None)
        if over_batch is not None:
            place = f"{name}.{over_batch}" if over_batch else name
            raise PlanError(
                f"layout: chunks = {count} for module {name!r}, but {place!r} normalises over the batch, so chunks "
                "would change its results; leave it out of the rule"
            )
        _wrap_chunked(module, name, count)
        chosen.append(name)
    return chosen


def _wrap_chunked(module: nn.Module, name: str, count: int) -> None:
    plain = module.forward

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        parts = [
            checkpoint(plain, *chunk_args, use_reentrant=False, **chunk_kwargs)
            for chunk_args, chunk_kwargs in _split_call(name, (args, kwargs), count)
        ]
        return pytree.tree_map(_concatenate, *parts)

    module.forward = forward


def _split_call(name: str, call: Any, count: int) -> list[Any]:
    """Split a call's arguments into parts: tensors with the batch in dim 0 are split, all else is repeated."""
    leaves, structure = pytree.tree_flatten(call)
    batch = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim), None)
    if batch is None:
        raise ScriptError(f"module {name!r} gets no tensor with a batch dim; remove chunks from its layout rule")
    columns = [
        leaf.tensor_split(min(count, batch)) if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == batch
        else [leaf] * min(count, batch)
        for leaf in leaves
    ]  # fmt: skip
    return [pytree.tree_unflatten(list(part), structure) for part in zip(*columns, strict=True)]


def _concatenate(*parts: Any) -> Any:
    return torch.cat(parts) if isinstance(parts[0], torch.Tensor) and parts[0].ndim else parts[0]
