"""Finds evaluation that draws random numbers: a batch evaluated twice gives two outputs."""

from typing import Any

import torch

from tutti.data.microbatches import leaves
from tutti.data.seeds import seed_device, seed_everything
from tutti.trainer.guard.findings import is_guarded, model_is_local, warn
from tutti.trainer.guard.traceless import untouched
from tutti.trainer.run_state import Run

TOLERANCE = 1e-2
"""Difference, relative to the largest output, that the order of additions may explain."""


def check_evaluation(run: Run, args: Any, kwargs: Any) -> None:
    """At rank 0's first evaluated batch: warn if two forwards in evaluation mode differ. Not collective."""
    state = run.loop.guard
    if state.evaluated or not run.parallel.world.is_main:
        return
    state.evaluated = True
    if not is_guarded(run) or not model_is_local(run) or run.loop.pipeline is not None:
        return
    outputs = []
    try:
        with untouched(run.parallel.model):
            for seed in (1, 2):
                seed_everything(seed)
                seed_device(seed, run.parallel.world.device)
                outputs.append([leaf for leaf in leaves(run.forward(*args, **kwargs)) if _has_values(leaf)])
    except Exception:  # the script's own code; the evaluation itself says what is wrong
        return
    if any(_differ(one, other) for one, other in zip(*outputs, strict=False)):
        warn(
            run,
            f"{type(run.parallel.model).__name__} gives two outputs for one batch in evaluation mode (rank 0), so "
            "values of evaluation are random; a dropout or another draw does not follow the mode: pass "
            "training=self.training to F.dropout, and draw only if self.training",
        )


def _has_values(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel() > 0


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return True
    scale = float(one.abs().max())
    return float((one.double() - other.double()).abs().max()) > TOLERANCE * scale
