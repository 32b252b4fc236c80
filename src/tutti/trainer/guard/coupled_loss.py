"""Finds losses and models that couple samples: one device would compute another loss than several ranks.

A few samples are computed at once and as two halves, without dropout and with the running statistics of norms. The two
agree if the loss is a mean over samples, or over what it states. If the loss draws random numbers by itself, several
draws of each are computed, and must lie further apart than they scatter.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

from tutti.data.batches import BatchShare
from tutti.data.microbatches import split_batch
from tutti.nn.mixture import take_tallies
from tutti.parallel.data.batch_state import exchanges_state
from tutti.trainer.guard.findings import LossFunction, loss_again, warn
from tutti.trainer.run_state import Run

MOST_SAMPLES = 16
"""Samples that are computed again."""

_FINE, _COARSE = 5e-4, 5e-2
"""Relative differences of two losses that rounding in 32 and in 16 bits explains; in float64 some modules use 32."""

DRAWS, CLEAR, DISTANCE = 5, 0.1, 4.0
"""Draws of a loss that is random; the relative difference that counts there, and in units of how far draws scatter."""

Losses = tuple[tuple[float, ...], tuple[float, ...]]
"""Draws of the loss of all samples, and draws of the loss of the two halves together."""


def check_loss(run: Run, loss: LossFunction, piece: Any, share: BatchShare) -> None:
    """Warn if the loss of a few samples is not the mean of its halves. Collective."""
    divided = run.parallel.mesh.data_degree > 1 or len(share.parts) > 1
    if not divided or not all(map(_has_statistics, run.parallel.model.modules())):
        return
    counts: list[int] = run.loop.watch.gather("samples", share.parts[0].count)
    if min(counts) < 2:
        return
    model, tolerance = run.parallel.model, _tolerance(run.parallel.model)
    exchanges = any(exchanges_state(module) and not isinstance(module, _BatchNorm) for module in model.modules())
    for quiet, draws in ((_random_modules, 2), (_all_modules, 2), (_all_modules, DRAWS))[1 if exchanges else 0 :]:
        found: list[Losses | None] = run.loop.watch.gather("losses", _losses(run, loss, piece, share, quiet, draws))
        known = {rank: losses for rank, losses in enumerate(found) if losses is not None}
        if known and (draws > 2 or all(_agree(wholes[0], wholes[1], tolerance) for wholes, _ in known.values())):
            break
    else:
        return
    differs = partial(_differ, tolerance=tolerance) if draws == 2 else _are_far
    rank = next((n for n, (wholes, halves) in known.items() if differs(wholes, halves)), None)
    if rank is not None:
        wholes, halves = known[rank]
        warn(run, _sentence(model, rank, min(counts[rank], MOST_SAMPLES), wholes[0], halves[0]))


def _sentence(model: nn.Module, rank: int, samples: int, whole: float, halves: float) -> str:
    if not math.isfinite(halves):
        return (
            f"the loss of {type(model).__name__} is not a mean over samples: on rank {rank}, {samples} samples have "
            f"{whole:.6g} together, but the loss of half of them is not finite, as the mean of no rows is; if it "
            "chooses rows, call job.forward_backward once for each mean, or return tutti.Weighted(sum, count)"
        )
    return (
        f"the loss of {type(model).__name__} is not a mean over samples: on rank {rank}, {samples} samples have "
        f"{whole:.6g} together and {halves:.6g} as two halves, so one device would train with another loss than "
        "several ranks; if it is a mean over tokens, boxes or the like, return tutti.Weighted(sum, count), and if "
        "samples are compared with each other (negatives, statistics of the batch, a router's balance), each rank or "
        "microbatch compares only its own"
    )


def _has_statistics(module: nn.Module) -> bool:
    return not isinstance(module, _BatchNorm) or module.running_mean is not None


def _all_modules(module: nn.Module) -> bool:
    return True


def _random_modules(module: nn.Module) -> bool:
    """Whether a module draws, or has statistics of its batch in training only."""
    return isinstance(module, _DropoutNd | _NormBase)


def _losses(
    run: Run, loss: LossFunction, piece: Any, share: BatchShare, quiet: Callable[[nn.Module], bool], draws: int
) -> Losses | None:
    """Compute the losses; None if the script's code cannot, for these samples or in this mode.

    Of two draws of all samples, the halves have the first one's only.
    """
    count = share.parts[0].count
    samples = min(count, MOST_SAMPLES)
    try:
        few = piece if count == samples else split_batch(piece, [samples, count - samples])[0]
        halves = split_batch(few, [samples // 2, samples - samples // 2])
        sizes = (samples, samples // 2, samples - samples // 2)
        values = []
        for part, held, seed in [
            (part, held, seed)
            for seed in range(1, draws + 1)
            for part, held in zip((few, *halves), sizes, strict=True)
            if draws > 2 or seed == 1 or part is few
        ]:
            values.append(loss_again(run, loss, part, (held, share.batch_size), seed, quiet))
    except Exception:  # the script's own code, on other samples than it was written for
        return None
    finally:
        take_tallies(run.parallel.model)
    wholes = values[::3]
    pairs = [(left[0] + right[0], left[1] + right[1]) for left, right in zip(values[1::3], values[2::3], strict=False)]
    if not all(count for _, count in (*wholes, *pairs)):
        return None
    losses = tuple(tuple(total / count for total, count in some) for some in (wholes, pairs))
    return (losses[0], losses[1]) if all(map(math.isfinite, losses[0])) else None


def _tolerance(model: nn.Module) -> float:
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return _FINE if kinds <= {torch.float32, torch.float64} else _COARSE


def _differ(wholes: tuple[float, ...], halves: tuple[float, ...], tolerance: float) -> bool:
    return not _agree(wholes[0], halves[0], tolerance)


def _are_far(wholes: tuple[float, ...], halves: tuple[float, ...]) -> bool:
    """Whether all draws of the one are far from all draws of the other."""
    if not all(map(math.isfinite, halves)):
        return True
    scatter = max(max(some) - min(some) for some in (wholes, halves))
    nearest = max(min(wholes) - max(halves), min(halves) - max(wholes))
    return nearest > DISTANCE * scatter and nearest > CLEAR * max(map(abs, (*wholes, *halves)))


def _agree(one: float, other: float, tolerance: float) -> bool:
    return abs(one - other) <= tolerance * max(abs(one), abs(other), 1e-3)
