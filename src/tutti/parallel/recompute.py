"""Recompute (activation checkpointing): activations are dropped after forward and computed again in backward.

A module that does not fit can also run on chunks of its batch, one after another. Each chunk is recomputed in backward,
so the module's memory is that of one chunk. This is exact for modules that treat samples independently.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tutti.config.plan import LayoutRule, find_chunks, find_recompute
from tutti.errors import PlanError, ScriptError
from tutti.parallel.data.batchnorm import BatchScope, is_batch_norm, own_forward


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
    chosen = outermost_modules(model, layout, "recompute", lambda name: bool(find_recompute(layout, name)))
    for name in chosen:
        selective = find_recompute(layout, name) == "selective"
        _wrap_recomputed(model.get_submodule(name), name, scope, selective=selective)
    return chosen


def outermost_modules(
    model: nn.Module, layout: Sequence[LayoutRule], option: str, is_chosen: Callable[[str], bool]
) -> list[str]:
    """Return the names of the modules for which an option of the layout is set, without those inside of others.

    Args:
        model: the model.
        layout: the plan's layout rules.
        option: the option's name in a rule.
        is_chosen: whether the layout sets it for the module of a name.

    Raises:
        PlanError: a rule that sets the option matches no module.
    """
    names = [name for name, _ in model.named_modules() if name]
    for rule in layout:
        if getattr(rule, option) and not any(fnmatchcase(name, rule.modules) for name in names):
            raise PlanError(f"layout: no module matches {rule.modules!r}; modules are {', '.join(names[:8]) or 'none'}")
    chosen: list[str] = []
    for name in names:
        if is_chosen(name) and not any(name.startswith(outer + ".") for outer in chosen):
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
def _all_of(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


class WrittenBuffers:
    """The buffers that a recomputed module's forward writes.

    Recompute begins with the values that the first forward began with, and leaves the buffers as that forward did:
    running statistics move once, and a codebook is the one that chose. torch's BatchNorm does this by itself (see
    BatchScope.recomputing).
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = module, name
        self._places: list[tuple[nn.Module, str]] | None = None

    @contextmanager
    def forward(self, before: list[torch.Tensor]) -> Iterator[None]:
        """Around the first forward: fill `before` with what the buffers that it writes were before."""
        places = self._all() if self._places is None else self._places
        copies = [inner._buffers[key].clone() for inner, key in places]  # type: ignore[union-attr]
        versions = self._versions()
        yield
        changed = {place for place, version in self._versions().items() if versions.get(place) != version}
        if self._places is None:
            # by value as well, because F.batch_norm writes its running statistics without counting a version
            written = [
                (id(inner), key) in changed or not torch.equal(copy, inner._buffers[key])  # type: ignore[arg-type]
                for (inner, key), copy in zip(places, copies, strict=True)
            ]
            self._places = [place for place, is_written in zip(places, written, strict=True) if is_written]
            copies = [copy for copy, is_written in zip(copies, written, strict=True) if is_written]
        new = changed - {(id(inner), key) for inner, key in self._places}
        if new:
            raise PlanError(
                f"layout: recompute of module {self._name!r}, whose forward writes the buffer {min(new)[1]!r} only at "
                "times, so that it cannot be computed again as it was; leave it out of the rule"
            )
        before += copies

    @contextmanager
    def again(self, before: list[torch.Tensor]) -> Iterator[None]:
        """Around the repeated forward, which begins with `before`."""
        places = self._places or []
        after = [inner._buffers[key] for inner, key in places]
        for (inner, key), value in zip(places, before, strict=True):
            inner._buffers[key] = value.clone()
        try:
            yield
        finally:
            for (inner, key), buffer in zip(places, after, strict=True):
                inner._buffers[key] = buffer

    def _all(self) -> list[tuple[nn.Module, str]]:
        return [
            (inner, key)
            for inner in self._module.modules()
            for key, buffer in inner._buffers.items()
            if buffer is not None and not buffer.is_meta and (not isinstance(inner, _BatchNorm) or own_forward(inner))
        ]

    def _versions(self) -> dict[tuple[int, str], tuple[int, int]]:
        """Of each buffer, by (id of the module, name): which tensor it is, and how often it was written in place."""
        tensors = {(id(inner), key): inner._buffers[key] for inner, key in self._all()}
        return {place: (id(tensor), tensor._version) for place, tensor in tensors.items() if tensor is not None}


def _wrap_recomputed(module: nn.Module, name: str, scope: BatchScope, *, selective: bool) -> None:
    plain, written = module.forward, WrittenBuffers(module, name)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        before: list[torch.Tensor] = []
        first, again = written.forward(before), _all_of(scope.recompute(), written.again(before))
        if not selective:
            return first, again
        ahead, repeated = create_selective_checkpoint_contexts(_keep)  # type: ignore[no-untyped-call]
        return _all_of(first, ahead), _all_of(again, repeated)

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
        PlanError: a module normalises over the batch, so chunks would change its result, or a rule with chunks matches
            no module.
    """
    chosen = outermost_modules(model, layout, "chunks", lambda name: find_chunks(layout, name) > 1)
    for name in chosen:
        module, count = model.get_submodule(name), find_chunks(layout, name)
        over_batch = next((key for key, inner in module.named_modules() if is_batch_norm(inner)), None)
        if over_batch is not None:
            place = f"{name}.{over_batch}" if over_batch else name
            raise PlanError(
                f"layout: chunks = {count} for module {name!r}, but {place!r} normalises over the batch, so chunks "
                "would change its results; leave it out of the rule"
            )
        _wrap_chunked(module, name, count)
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
