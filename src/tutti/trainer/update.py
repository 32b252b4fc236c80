"""The update: clip by the global norm, step the optimizers at the rule's learning rate, advance their schedulers.

Warm-up and batch-size rules are in optim/learning_rate.py; `_rate_factor` applies them here.

torch's fused CPU kernels for Adam, AdamW and SGD are used if the script chose no kernels. They pass over memory once:
on one core AdamW takes 5 ms instead of 27 for 8 M float32 values, SGD with momentum 4.4 instead of 6.5 for 10 M. They
read parameter, gradient and moments in memory order. If a gradient's layout differs from its parameter's (channels last
beside contiguous), torch 2.13 silently applies it to the wrong values. So a step is fused only if layouts agree.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from tutti.checkpoint.training_state import OptimizerClock
from tutti.environment import read_launch_options
from tutti.errors import ScriptError, TrainingError
from tutti.host_memory import keep_memory_when_steady, limit_heap_growth
from tutti.optim.gradient_noise_scale import adascale_gain
from tutti.optim.learning_rate import learning_rate_factor, scaled_learning_rate
from tutti.parallel.layout import to_local
from tutti.trainer.finite_gradients import never_finite_message
from tutti.trainer.guard import guard_update
from tutti.trainer.metrics_rows import advance_profile, write_bucket_size, write_step_row
from tutti.trainer.run_state import Run, UpdateResult

MIN_LOSS_SCALE = 2.0**-8
"""If the loss scale falls below this, gradients are not finite at any scale.

The scale starts at 2^12, and each skipped step halves it.
"""


def make_update(run: Run, optimizers: tuple[Optimizer, ...]) -> None:
    """Update by some of the optimizers, write the step's row, and begin a checkpoint that is due."""
    accumulation = run.loop.accumulation
    if not accumulation.results or any(one is used for one in optimizers for used in accumulation.stepped):
        raise ScriptError("update was called before forward_backward; compute gradients first")
    result = accumulation.total()
    run.loop.clock.enter("optimizer")
    accumulation.stepped.extend(optimizers)
    guard_update(run, optimizers, result.loss)
    done = update(run, optimizers, finite=result.finite)
    run.state.consistency.updated(run.parallel, run.state.progress.step)
    run.loop.clock.enter("other")
    full = accumulation.results[-1].samples == run.state.loader.stated_size
    chosen = run.loop.bucket_tuner.end(full_batch=full)
    if chosen is not None:
        write_bucket_size(run, chosen)
    again = result.batch == accumulation.counted
    accumulation.several |= again or len(optimizers) < len(run.parallel.optimizers)
    if not again:
        run.state.schedules.trained(result.loss, result.samples)
    write_step_row(run, result, done)
    advance_profile(run)
    run.loop.observer.updated(run.state.progress.step - 1, result.loss, done.learning_rate)
    overdue = run.output.checkpoints.updated(again=again)
    # Callbacks and averages of the weights take the step into account after it; a checkpoint has that, too.
    if not (accumulation.several or run.state.averages or run.state.callbacks):
        save_when_due(run)
    elif overdue:
        run.output.screen.say(
            f"the checkpoint of step {run.state.progress.step} is written while its batch is in use; a run resumed "
            "from it begins with the next batch"
        )
        run.output.checkpoints.save_when_due()


def refuse_own_steps(run: Run) -> None:
    """Let the optimizers refuse a `step` that the script calls itself.

    On one rank the gradients of the script's own backward are those of the batch, so only a second step with gradients
    that `job.step` has used is refused.
    """
    on_one_rank = run.parallel.world.world_size == 1

    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        kind = type(optimizer).__name__
        if not run.loop.watch.inside and on_one_rank and optimizer in run.loop.accumulation.stepped:
            raise ScriptError(
                f"{kind}.step() was called after job.step() or job.update(), which had made the update: the parameters "
                f"would move twice; delete {kind}.step()"
            )
        if not run.loop.watch.inside and not on_one_rank:
            raise ScriptError(
                f"{kind}.step() was called by the script: gradients of its own "
                "backward are of this rank's share of the batch only, and clipping, schedulers and checkpoints follow "
                "job.update(); write job.forward_backward(function, batch) for backward, also several times to "
                f"accumulate, and job.update() for {kind}.step()"
            )

    for optimizer in run.parallel.optimizers:
        optimizer.register_step_pre_hook(check)


def save_when_due(run: Run) -> None:
    """Begin a checkpoint that is due, unless gradients still wait for their update."""
    if not run.loop.accumulation.waits and not run.loop.average_applied:
        run.output.checkpoints.save_when_due()


def optimizers_of(run: Run, chosen: Optimizer | Sequence[Optimizer]) -> tuple[Optimizer, ...]:
    """Return the optimizers that the script names.

    Raises:
        ScriptError: one of them was not passed to prepare.
    """
    optimizers = (chosen,) if isinstance(chosen, Optimizer) else tuple(chosen)
    for optimizer in optimizers:
        if not any(optimizer is known for known in run.parallel.optimizers):
            raise ScriptError(
                f"{type(optimizer).__name__} was not passed to prepare, so its parameters and state are not those of "
                "the ranks; pass all optimizers to prepare, as a list"
            )
    return optimizers


def update(run: Run, optimizers: tuple[Optimizer, ...], *, finite: bool) -> UpdateResult:
    """Clip the gradients, step the optimizers at the rule's learning rate, and advance their schedulers.

    Args:
        run: the run.
        optimizers: the optimizers that step now.
        finite: whether the step's loss and gradients are finite; if not, the update is skipped.

    Raises:
        TrainingError: gradients are not finite at any loss scale.
    """
    gain = _adascale_gain_of_step(run)
    rate_factors = [_rate_factor(run, optimizer, gain or 1.0) for optimizer in optimizers]
    rate = float(optimizers[0].param_groups[0]["lr"]) * rate_factors[0]
    for optimizer in optimizers:
        _clock_of(run, optimizer).updates += 1
    if not finite:
        run.loop.statistics.restore()
        if run.state.consistency.diverged:  # other replicas may update, and learning rates must stay equal
            _advance_schedules(run, optimizers, gain or 1.0)
        return UpdateResult(learning_rate=rate, gain=gain, grad_norm=None, skipped=True)
    norm = _clip_gradients(run, optimizers)
    old_scale = run.state.scaler.get_scale() if run.state.scaler.is_enabled() else 1.0
    with ExitStack() as stack:
        for optimizer, rate_factor in zip(optimizers, rate_factors, strict=True):
            local_factor = rate_factor * run.state.consistency.learning_rate_scale
            if local_factor != 1.0:
                stack.enter_context(scaled_learning_rate(optimizer, local_factor))
        for optimizer in optimizers:
            with fused_kernels(optimizer):
                run.state.scaler.step(optimizer)
        _update_loss_scale(run, optimizers)
    skipped = False
    if run.state.scaler.is_enabled() and (new_scale := run.state.scaler.get_scale()) != old_scale:
        skipped = new_scale < old_scale
        if new_scale < MIN_LOSS_SCALE:  # the scale is the same on all ranks, so all of them raise
            raise TrainingError(never_finite_message(run))
        if run.parallel.replica.compressor is not None:
            run.parallel.replica.compressor.rescale(new_scale / old_scale)
    if not skipped:
        _advance_schedules(run, optimizers, gain or 1.0)
        if run.parallel.replica.updated(len(run.parallel.optimizers)):
            keep_memory_when_steady(run.parallel.world.local_world_size, frugal=read_launch_options().frugal)
        limit_heap_growth()
    return UpdateResult(learning_rate=rate, gain=gain, grad_norm=norm, skipped=skipped)


def _update_loss_scale(run: Run, optimizers: Sequence[Optimizer]) -> None:
    """Let the loss scale follow the optimizers that have stepped; the others may still step on these gradients."""
    scaler = run.state.scaler
    if not scaler.is_enabled():
        return
    stepped = {id(optimizer) for optimizer in optimizers}
    others = {key: state for key, state in scaler._per_optimizer_states.items() if key not in stepped}
    for key in others:
        del scaler._per_optimizer_states[key]
    scaler.update()
    scaler._per_optimizer_states.update(others)


def _clock_of(run: Run, optimizer: Optimizer) -> OptimizerClock:
    number = next(i for i, known in enumerate(run.parallel.optimizers) if known is optimizer)
    return run.state.progress.clocks[number]


def _adascale_gain_of_step(run: Run) -> float | None:
    """Return AdaScale's gain, the number of base-batch steps that this step is worth; None without AdaScale."""
    rule = run.settings.lr_rule
    if rule is None or rule.scale != "adascale" or rule.base_batch_size is None:
        return None
    return adascale_gain(run.state.noise.averages, run.state.loader.stated_size, rule.base_batch_size)


def _advance_schedules(run: Run, optimizers: Sequence[Optimizer], gain: float) -> None:
    """Count the update in steps of the base batch. A scheduler that counts steps advances by whole steps."""
    for optimizer in optimizers:
        clock = _clock_of(run, optimizer)
        before = math.floor(clock.base_steps)
        clock.base_steps += gain
        run.state.schedules.updated(optimizer, math.floor(clock.base_steps) - before, clock.updates)


def _rate_factor(run: Run, optimizer: Optimizer, gain: float) -> float:
    """Return the factor of the learning-rate rule (warm-up, batch scaling) at the optimizer's next update."""
    rule = run.settings.lr_rule
    if rule is None:
        return 1.0
    return learning_rate_factor(
        rule,
        run.loop.initial_rates[0],
        _clock_of(run, optimizer).updates,
        global_batch_size=run.state.loader.stated_size,
        steps_per_epoch=run.steps_per_epoch,
        gain=gain,
    )


def _clip_gradients(run: Run, optimizers: Sequence[Optimizer]) -> float | None:
    """Scale gradients so that their global norm is at most clip_norm; return the norm before. Collective.

    An update of all optimizers clips all gradients of the model, also those of parameters that no optimizer holds, as
    clip_grad_norm_(model.parameters()) does. An update of some clips the gradients of their parameters.
    """
    if run.settings.clip_norm is None:
        return None
    parallel = run.parallel
    everything = len(optimizers) == len(parallel.optimizers)
    parameters = parallel.replica.parameters if everything else [p for _, p in parallel.trained_by(optimizers)]
    # torch cannot clip sparse gradients.
    sparse = any(p.grad is not None and p.grad.is_sparse for p in parameters)
    if not parallel.layout.shards and not sparse:
        return float(torch.nn.utils.clip_grad_norm_(parameters, run.settings.clip_norm))
    candidates = parallel.model.named_parameters() if everything else parallel.trained_by(optimizers)
    named = [(name, p.grad) for name, p in candidates if p.grad is not None]
    norm = math.sqrt(float(run.state.consistency.norm_squared(run.parallel, named)))
    factor = run.settings.clip_norm / (norm + 1e-6)  # as torch does
    if factor < 1.0 and named:
        torch._foreach_mul_([to_local(gradient) for _, gradient in named], factor)
    return norm


_MOMENTS = frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"})

_OPTIMIZER_STATE: dict[type[Optimizer], frozenset[str]] = {
    Adam: _MOMENTS,
    AdamW: _MOMENTS,
    SGD: frozenset({"momentum_buffer"}),
}
"""State that each optimizer keeps for a parameter. If there is any other state, the step is not fused."""

_PLAIN_TYPES = (Tensor, nn.Parameter)
"""Tensor types without behaviour of their own."""


@contextmanager
def fused_kernels(optimizer: Optimizer) -> Iterator[None]:
    """Within the context, `optimizer.step` uses fused kernels if they compute the same up to rounding.

    The choice is made after all other pre-step hooks, which may replace gradients. The optimizer's groups are restored
    afterwards.
    """
    groups: list[dict[str, Any]] = []

    def choose(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        groups.extend(optimizer.param_groups if can_fuse(optimizer) else [])
        for group in groups:
            group["fused"] = True

    hook = optimizer.register_step_pre_hook(choose)
    try:
        yield
    finally:
        hook.remove()
        for group in groups:
            group["fused"] = None


def can_fuse(optimizer: Optimizer) -> bool:
    """Return whether the script chose no kernels and the fused ones compute the same."""
    known = _OPTIMIZER_STATE.get(type(optimizer))
    if known is None or not all(map(_kernels_unspecified, optimizer.param_groups)):
        return False
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    states = [optimizer.state.get(p, {}) for p in trained]
    if type(optimizer) is SGD and len({state.get("momentum_buffer") is None for state in states}) > 1:
        return False  # the fused kernels initialise the momentum of all parameters or of none
    return all(
        state.keys() <= known and _same_layout(p, p.grad, state) for p, state in zip(trained, states, strict=True)
    )


def _kernels_unspecified(group: dict[str, Any]) -> bool:
    """Whether the group requests no particular kernels and its rates are plain numbers."""
    if any(group.get(name) for name in ("fused", "foreach", "capturable", "differentiable")):
        return False
    unfused = group.get("fused") is False or group.get("foreach") is False
    return not unfused and not any(isinstance(rate, Tensor) for rate in (group["lr"], *group.get("betas", ())))


def _same_layout(parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> bool:
    """Whether parameter, gradient and state are dense CPU tensors of one dtype and one memory layout."""
    if type(parameter) not in _PLAIN_TYPES or parameter.device.type != "cpu" or not _dense(parameter):
        return False
    if parameter.dtype not in (torch.float32, torch.float64):
        return False
    steps = state.get("step")
    if steps is not None and not (isinstance(steps, Tensor) and steps.dtype is torch.float32):
        return False
    tensors = [gradient, *(value for name, value in state.items() if name != "step" and value is not None)]
    return gradient.layout is torch.strided and all(
        tensor.dtype is parameter.dtype and tensor.device.type == "cpu" and tensor.stride() == parameter.stride()
        for tensor in tensors
    )


def _dense(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return tensor.is_contiguous() or (last is not None and tensor.is_contiguous(memory_format=last))
