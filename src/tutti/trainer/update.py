"""The update: clip by the global norm, step the optimizer at the rule's rate, advance the scheduler once."""

import math
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from tutti.environment import read_wishes
from tutti.errors import TrainingError
from tutti.optim.lr_rule import factor
from tutti.optim.noise import adascale_gain
from tutti.optim.scaling import scaled_learning_rate
from tutti.parallel.layout import local
from tutti.trainer.finite import never_finite_words
from tutti.trainer.fused import fused
from tutti.trainer.host_memory import look_after_heap, settled
from tutti.trainer.state import Run

LEAST_SCALE = 2.0**-8
"""A loss scale below it says that gradients are not finite whatever the scale: it begins at 2^12 and is halved by each
step that is skipped.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What an update did. `skipped`: float16 gradients overflowed, or loss or gradients were not finite. `gain`:
    AdaScale's.
    """

    learning_rate: float
    gain: float | None
    grad_norm: float | None
    skipped: bool


def update(run: Run, optimizers: tuple[Optimizer, ...], *, finite: bool) -> Update:
    """Make one update with `optimizers` from the gradients that stand."""
    gain = _gain(run)
    rate_factor = _rate_factor(run, gain or 1.0)
    rate = float(optimizers[0].param_groups[0]["lr"]) * rate_factor
    if not finite:
        if run.consistency.apart:  # others may make theirs, and rates stay alike
            _advance(run, gain or 1.0)
        return Update(learning_rate=rate, gain=gain, grad_norm=None, skipped=True)
    norm = _clip(run)
    scale = run.scaler.get_scale() if run.scaler.is_enabled() else 1.0
    own_factor = rate_factor * run.consistency.pace
    with ExitStack() as stack:
        if own_factor != 1.0:
            for optimizer in optimizers:
                stack.enter_context(scaled_learning_rate(optimizer, own_factor))
        for optimizer in optimizers:
            with fused(optimizer):
                run.scaler.step(optimizer)
        run.scaler.update()
    skipped = False
    if run.scaler.is_enabled() and (now := run.scaler.get_scale()) != scale:
        skipped = now < scale
        if now < LEAST_SCALE:  # on all ranks alike
            raise TrainingError(never_finite_words(run))
        if run.replica.compressor is not None:
            run.replica.compressor.rescale(now / scale)
    if not skipped:
        _advance(run, gain or 1.0)
        if run.replica.updated(len(run.optimizers)):
            settled(run.world.local_world_size, frugal=read_wishes().frugal)
        look_after_heap()
    return Update(learning_rate=rate, gain=gain, grad_norm=norm, skipped=skipped)


def _gain(run: Run) -> float | None:
    """How many steps of the base batch this one is worth, under AdaScale."""
    rule = run.settings.lr_rule
    if rule is None or rule.scale != "adascale" or rule.base_batch_size is None:
        return None
    return adascale_gain(run.noise.averages, run.loader.stated_size, rule.base_batch_size)


def _advance(run: Run, gain: float) -> None:
    """Count the update, in steps of the base batch, and advance a scheduler that counts steps by the whole ones."""
    before = math.floor(run.progress.base_steps)
    run.progress.base_steps += gain
    if run.scheduler is not None and run.scheduler_clock == "step":
        for _ in range(math.floor(run.progress.base_steps) - before):
            run.scheduler.step()


def _rate_factor(run: Run, gain: float) -> float:
    """What the learning-rate rule multiplies the scheduled rate with at this step."""
    rule = run.settings.lr_rule
    if rule is None:
        return 1.0
    return factor(
        rule,
        run.initial_rates[0],
        run.progress.step,
        global_batch_size=run.loader.stated_size,
        steps_per_epoch=run.steps_per_epoch,
        gain=gain,
    )


def _clip(run: Run) -> float | None:
    """Scale gradients so that their global norm is at most clip_norm; returns the norm before."""
    if run.settings.clip_norm is None:
        return None
    sparse = any(p.grad is not None and p.grad.is_sparse for p in run.replica.parameters)  # torch clips none of those
    if not run.layout.held and not sparse:
        return float(torch.nn.utils.clip_grad_norm_(run.replica.parameters, run.settings.clip_norm))
    named = [(name, p.grad) for name, p in run.model.named_parameters() if p.grad is not None]
    norm = math.sqrt(float(run.consistency.norm_squared(run, named)))
    factor = run.settings.clip_norm / (norm + 1e-6)  # as torch does
    if factor < 1.0 and named:
        torch._foreach_mul_([local(gradient) for _, gradient in named], factor)
    return norm
