"""Finds outputs that depend on the other samples of the batch in evaluation: batch statistics, attention over samples.

A few samples are computed as a whole, once more with other random draws, and without their second half. Nothing is
compared if the model draws random numbers.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils import _pytree as pytree

from tutti.data.microbatches import split_batch
from tutti.data.seeds import seed_device, seed_everything
from tutti.trainer.guard.findings import hooked_modules, model_is_local
from tutti.trainer.run_state import Run
from tutti.trainer.traceless import untouched

MOST_SAMPLES = 8
"""Samples that are computed again."""

_FINE, _COARSE = 1e-3, 5e-2
"""Differences of equal outputs in 32 and in 16 bits, relative to their root mean square."""

Rows = list[tuple[str, torch.Tensor]]
"""Names of modules in the order of their calls, and a tensor that each returned with a row for each sample."""


def coupled_module(run: Run, batch: Any, samples: int) -> tuple[str, str] | None:
    """Return the name and type of the first module whose output for a sample depends on the others, or None."""
    model = run.parallel.model
    if samples < 2 or run.loop.pipeline is not None or not model_is_local(run) or hooked_modules(model) != []:
        return None
    few = min(samples, MOST_SAMPLES)
    half = few // 2
    try:
        whole = batch if few == samples else split_batch(batch, [few, samples - few])[0]
        first = split_batch(whole, [half, few - half])[0]
        rows = [
            _rows(run, part, size, seed) for part, size, seed in ((whole, few, 1), (whole, few, 2), (first, half, 1))
        ]
    except Exception:  # the script's own code, on other samples than it was given
        return None
    for (name, one), (again_name, again), (half_name, part) in zip(*rows, strict=False):
        if not name == again_name == half_name or not _equal(one, again):
            return None
        if one.shape[1:] == part.shape[1:] and not _equal(one[:half], part):
            return name, type(model.get_submodule(name)).__name__
    return None


def _rows(run: Run, batch: Any, samples: int, seed: int) -> Rows:
    """What modules return for these samples."""
    model = run.parallel.model
    rows: Rows = []
    with untouched(model), _noting_rows(model, samples, rows):
        seed_everything(seed)
        seed_device(seed, run.parallel.world.device)
        args, kwargs, _ = run.loop.unpack(batch)
        run.forward(*args, **kwargs)
    return rows


@contextmanager
def _noting_rows(model: nn.Module, samples: int, rows: Rows) -> Iterator[None]:
    """Within the context, note the first tensor of what each module returns that has a row for each sample."""
    names = {module: name for name, module in model.named_modules()}

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if module not in names:
            return
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dim() and len(leaf) == samples:
                rows.append((names[module], leaf.detach().clone()))
                return

    handle = register_module_forward_hook(note)
    try:
        yield
    finally:
        handle.remove()


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether outputs are equal up to rounding; those that are not finite say nothing."""
    if one.shape != other.shape or not one.numel():
        return False
    tolerance = _FINE if one.dtype in (torch.float32, torch.float64) else _COARSE
    first, second = one.double(), other.double()
    scale = float(torch.maximum(first.square().mean(), second.square().mean()).sqrt())
    return not math.isfinite(scale) or torch.allclose(first, second, rtol=0.0, atol=tolerance * scale + 1e-12)
