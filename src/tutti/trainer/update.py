"""The update: clip by the global norm, step the optimizers at the rule's learning rate, advance their schedulers.

Warm-up and batch-size rules are in optim/learning_rate.py; `_rate_factor` applies them here.

torch's fused kernels for Adam, AdamW and SGD are used if the script chose no kernels. They pass over memory once:
on one core AdamW takes 5 ms instead of 27 for 8 M float32 values, SGD with momentum 4.4 instead of 6.5 for 10 M. They
read parameter, gradient and moments in memory order. If a gradient's layout differs from its parameter's (channels last
beside contiguous), torch 2.13 silently applies it to the wrong values. So a step is fused only if layouts agree.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from tutti.checkpoint.training_state import OptimizerClock
from tutti.environment import read_launch_options
from tutti.errors import ScriptError, TrainingError
from tutti.event_record import recorded
from tutti.host_memory import keep_memory_when_steady, limit_heap_growth
from tutti.optim.gradient_noise_scale import adascale_gain
from tutti.optim.learning_rate import learning_rate_factor, scaled_learning_rate
from tutti.parallel.layout import to_local
from tutti.trainer.deferred_results import DeviceOutcome, HostCopy, PendingUpdate
from tutti.trainer.finite_gradients import never_finite_message
from tutti.trainer.guard import compare_before_checkpoint, guard_update
from tutti.trainer.metrics_rows import advance_profile, count_step, write_bucket_size, write_step_row
from tutti.trainer.run_state import Run, StepResult, UpdateResult
from tutti.trainer.step import await_result, is_skipped, multiply

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
    settle_updates(run, before=result)
    if result.outcomes and not all(skips_on_device(optimizer) for optimizer in optimizers):
        result = await_result(run, result)
    run.loop.clock.enter("optimizer")
    accumulation.stepped.extend(optimizers)
    guard_update(run, optimizers, result.loss)
    undo = _undoing(run, optimizers) if result.outcomes else None
    if run.loop.marks is not None:
        run.loop.marks.updating()
    done = update(run, optimizers, result)
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
    if undo is None:
        write_step_row(run, result, done)
    else:
        _count_pending(run, result, done, undo)
    at_once = not (accumulation.several or run.state.averages or run.state.callbacks)
    if run.loop.marks is not None:
        run.loop.marks.updated(done=at_once)
    advance_profile(run)
    run.loop.observer.updated(run.state.progress.step - 1, result.loss, done.learning_rate)
    overdue = [writer.updated(again=again) for writer in run.output.writers]
    # Callbacks and averages of the weights take the step into account after it; a checkpoint has that, too.
    if at_once:
        save_when_due(run)
    elif any(overdue):
        run.output.screen.say(
            f"the checkpoint of step {run.state.progress.step} is written while its batch is in use; a run resumed "
            "from it begins with the next batch"
        )
        settle_updates(run)
        for writer in run.output.writers:
            writer.save_when_due()


def _undoing(run: Run, optimizers: Sequence[Optimizer]) -> Callable[[], None]:
    """Return what puts back the host's counters of an update that the device turns out to have skipped."""
    clocks = [(clock, clock.base_steps) for clock in (_clock_of(run, optimizer) for optimizer in optimizers)]
    may_go_on = run.settings.on_nonfinite != "stop" or run.state.scaler.is_enabled()
    schedules = run.state.schedules.undoing() if may_go_on and run.state.schedules.bound else None

    def undo() -> None:
        for clock, base_steps in clocks:
            clock.base_steps = base_steps
        if schedules is not None:
            schedules()

    return undo


def _count_pending(run: Run, result: StepResult, done: UpdateResult, undo: Callable[[], None]) -> None:
    """Count an update on which the device decides; its row is written once the host has read what it decided."""
    progress = run.state.progress
    before = progress.step, progress.samples_seen, progress.tokens_seen
    row_of = count_step(run, result, done.gain)
    run.output.log.hold()

    def write(known: UpdateResult) -> None:
        run.output.log.release(**row_of(result, known))

    pending = PendingUpdate(
        outcomes=result.outcomes,
        numbers=done.pending,
        write=write,
        undo=undo,
        restore=run.loop.statistics.restorer(),
        done=done,
        counted=before,
    )
    run.loop.accumulation.pending.append(pending)


def settle_updates(run: Run, before: StepResult | None = None) -> None:
    """Read what the device has decided on earlier updates: write their rows, and end the run if it is to end.

    Collective where an update is found to be skipped.

    Args:
        run: the run.
        before: only updates with other gradients than these; the device may still compute these.

    Raises:
        TrainingError: as `forward_backward` does, a step late; parameters are as the message says.
    """
    accumulation = run.loop.accumulation
    while accumulation.pending:
        pending = accumulation.pending[0]
        if before is not None and pending.outcomes[-1] in before.outcomes:
            return
        del accumulation.pending[0]
        try:
            _settle(run, pending)
        except TrainingError:
            accumulation.clear()
            accumulation.pending.clear()
            pending.restore()
            run.state.progress.step, run.state.progress.samples_seen, run.state.progress.tokens_seen = pending.counted
            raise


def _settle(run: Run, pending: PendingUpdate) -> None:
    decided = [is_skipped(run, outcome) for outcome in pending.outcomes]  # all of them: each may raise
    skipped = any(decided)
    numbers = [] if pending.numbers is None else pending.numbers.read()
    norm, overflow, scale = numbers or (math.nan, 0.0, math.nan)
    scaled = run.state.scaler.is_enabled()
    skipped = skipped or bool(overflow)
    if skipped:
        pending.undo()
        norm = math.nan
    clipped = run.settings.clip_norm is not None and not (skipped and not overflow)
    pending.write(
        replace(
            pending.done,
            grad_norm=norm if clipped else None,
            skipped=skipped,
            loss_scale=scale if scaled else None,
            pending=None,
        )
    )
    if scaled and overflow and scale < MIN_LOSS_SCALE:  # the scale is the same on all ranks, so all of them raise
        raise TrainingError(never_finite_message(run))


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
        writers = run.output.writers
        if all(writer.due is None for writer in writers):
            for writer in writers:
                writer.save_when_due()
            return
        with recorded("operation", "checkpoint"):
            settle_updates(run)
            compare_before_checkpoint(run)
            for writer in writers:
                writer.save_when_due()


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


def update(run: Run, optimizers: tuple[Optimizer, ...], result: StepResult) -> UpdateResult:
    """Clip the gradients, step the optimizers at the rule's learning rate, and advance their schedulers.

    Args:
        run: the run.
        optimizers: the optimizers that step now.
        result: of forward and backward; if its loss or gradients are not finite, the update is skipped.

    Raises:
        TrainingError: gradients are not finite at any loss scale.
    """
    gain = _adascale_gain_of_step(run)
    rate_factors = [_rate_factor(run, optimizer, gain or 1.0) for optimizer in optimizers]
    rate = float(optimizers[0].param_groups[0]["lr"]) * rate_factors[0]
    for optimizer in optimizers:
        _clock_of(run, optimizer).updates += 1
    scaler = run.state.scaler
    if not result.finite:
        run.loop.statistics.restore()
        if run.state.consistency.diverged:  # other replicas may update, and learning rates must stay equal
            _advance_schedules(run, optimizers, gain or 1.0)
        scale = scaler.get_scale() if scaler.is_enabled() else None
        return UpdateResult(learning_rate=rate, gain=gain, grad_norm=None, skipped=True, loss_scale=scale)
    if result.outcomes:
        pending = _update_on_device(run, optimizers, rate_factors, result.outcomes)
        _advance_schedules(run, optimizers, gain or 1.0)
        _updated(run)
        return UpdateResult(learning_rate=rate, gain=gain, grad_norm=None, skipped=False, pending=pending)
    norm = _clip_gradients(run, optimizers)
    old_scale = scaler.get_scale() if scaler.is_enabled() else 1.0
    with _at_rates(run, optimizers, rate_factors):
        for optimizer in optimizers:
            with fused_kernels(optimizer):
                scaler.step(optimizer)
        _update_loss_scale(run, optimizers)
    skipped, new_scale = False, None
    if scaler.is_enabled():
        new_scale = scaler.get_scale()
        skipped = new_scale < old_scale
        if skipped and new_scale < MIN_LOSS_SCALE:  # the scale is the same on all ranks, so all of them raise
            raise TrainingError(never_finite_message(run))
        if new_scale != old_scale and run.parallel.replica.compressor is not None:
            run.parallel.replica.compressor.rescale(new_scale / old_scale)
    if not skipped:
        _advance_schedules(run, optimizers, gain or 1.0)
        _updated(run)
    return UpdateResult(learning_rate=rate, gain=gain, grad_norm=norm, skipped=skipped, loss_scale=new_scale)


def _updated(run: Run) -> None:
    """After an update: keep freed memory once all long-lived memory is allocated."""
    if run.parallel.replica.updated(len(run.parallel.optimizers)):
        keep_memory_when_steady(run.parallel.world.local_world_size, frugal=read_launch_options().frugal)
    limit_heap_growth()


def _at_rates(
    run: Run, optimizers: Sequence[Optimizer], rate_factors: Sequence[float]
) -> AbstractContextManager[object]:
    """Within the context the optimizers have the learning rates of the rule."""
    factors = [rate_factor * run.state.consistency.learning_rate_scale for rate_factor in rate_factors]
    if all(factor == 1.0 for factor in factors):
        return nullcontext()
    stack = ExitStack()
    for optimizer, factor in zip(optimizers, factors, strict=True):
        if factor != 1.0:
            stack.enter_context(scaled_learning_rate(optimizer, factor))
    return stack


def _update_on_device(
    run: Run, optimizers: Sequence[Optimizer], rate_factors: Sequence[float], outcomes: Sequence[DeviceOutcome]
) -> HostCopy | None:
    """Step optimizers that the device lets skip the step; return the norm, an overflow, and the loss scale, if any."""
    skip, lost, scaler = outcomes[0].skip, outcomes[0].lost, run.state.scaler
    for outcome in outcomes[1:]:
        skip, lost = torch.maximum(skip, outcome.skip), torch.maximum(lost, outcome.lost)
    norm = _clip_on_device(run, optimizers)
    overflow = torch.zeros_like(skip)
    with _at_rates(run, optimizers, rate_factors):
        for optimizer in optimizers:
            found = skip
            if scaler.is_enabled():
                state = scaler._per_optimizer_states[id(optimizer)]
                found = torch.maximum(skip, sum(state["found_inf_per_device"].values(), torch.zeros_like(skip)))
                overflow = torch.maximum(overflow, found)
                state["stage"] = OptState.STEPPED
            with fused_kernels(optimizer), _skipping(optimizer, found):
                optimizer.step()
        if scaler.is_enabled():
            _update_loss_scale_unless(run, optimizers, lost)
    if norm is None and not scaler.is_enabled():
        return None
    scale = scaler._scale if scaler.is_enabled() else None
    parts = [skip.new_zeros(()) if part is None else part for part in (norm, overflow, scale)]
    return HostCopy(torch.stack([part.double() for part in parts]))


@contextmanager
def _skipping(optimizer: Optimizer, found: Tensor) -> Iterator[None]:
    """Within the context, the optimizer's fused kernels change nothing where `found` is 1; GradScaler's protocol."""
    optimizer.grad_scale, optimizer.found_inf = None, found  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


def skips_on_device(optimizer: Optimizer) -> bool:
    """Return whether the device can decide on an optimizer's update: torch's fused kernels skip it if told so.

    Not the first one of SGD with momentum: its buffers would stay without values.
    """
    if any(p.grad is not None and p.grad.is_sparse for group in optimizer.param_groups for p in group["params"]):
        return False
    fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    if not (fused and all(group.get("fused") for group in optimizer.param_groups)) and not can_fuse(optimizer):
        return False
    return not isinstance(optimizer, SGD) or all(
        optimizer.state.get(p, {}).get("momentum_buffer") is not None
        for group in optimizer.param_groups
        for p in group["params"]
        if group["momentum"] and p.grad is not None
    )


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


def _update_loss_scale_unless(run: Run, optimizers: Sequence[Optimizer], lost: Tensor) -> None:
    """Update the loss scale, but leave it as it is where `lost` is 1: a loss that is not finite says nothing of it."""
    scaler = run.state.scaler
    scale, growth = scaler._scale, scaler._growth_tracker
    assert scale is not None
    assert growth is not None
    before = scale.clone(), growth.clone()
    _update_loss_scale(run, optimizers)
    scale.copy_(torch.where(lost > 0, before[0], scale))
    growth.copy_(torch.where(lost > 0, before[1], growth))


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
    parameters = _clipped(run, optimizers)
    if not _divided_or_sparse(run, parameters):
        return float(torch.nn.utils.clip_grad_norm_(parameters, run.settings.clip_norm))
    named = _named_gradients(run, optimizers)
    norm = math.sqrt(float(run.state.consistency.norm_squared(run.parallel, named)))
    factor = run.settings.clip_norm / (norm + 1e-6)  # as torch does
    if factor < 1.0 and named:
        torch._foreach_mul_([to_local(gradient) for _, gradient in named], factor)
    return norm


def _clip_on_device(run: Run, optimizers: Sequence[Optimizer]) -> Tensor | None:
    """`_clip_gradients` without waiting for the device."""
    if run.settings.clip_norm is None:
        return None
    parameters = _clipped(run, optimizers)
    if not _divided_or_sparse(run, parameters):
        return torch.nn.utils.clip_grad_norm_(parameters, run.settings.clip_norm)
    named = _named_gradients(run, optimizers)
    norm = run.state.consistency.norm_squared(run.parallel, named).sqrt()
    multiply([to_local(gradient) for _, gradient in named], (run.settings.clip_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _clipped(run: Run, optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
    parallel = run.parallel
    if len(optimizers) == len(parallel.optimizers):
        return parallel.replica.parameters
    return [p for _, p in parallel.trained_by(optimizers)]


def _divided_or_sparse(run: Run, parameters: Sequence[nn.Parameter]) -> bool:
    """Whether torch's own function cannot clip the gradients: ranks hold parts of them, or they are sparse."""
    return bool(run.parallel.layout.shards) or any(p.grad is not None and p.grad.is_sparse for p in parameters)


def _named_gradients(run: Run, optimizers: Sequence[Optimizer]) -> list[tuple[str, Tensor]]:
    everything = len(optimizers) == len(run.parallel.optimizers)
    candidates = run.parallel.model.named_parameters() if everything else run.parallel.trained_by(optimizers)
    return [(name, p.grad) for name, p in candidates if p.grad is not None]


_MOMENTS = frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"})

_OPTIMIZER_STATE: dict[type[Optimizer], frozenset[str]] = {
    Adam: _MOMENTS,
    AdamW: _MOMENTS,
    SGD: frozenset({"momentum_buffer"}),
}
"""State that each optimizer keeps for a parameter. If there is any other state, the step is not fused."""

_FUSED_ON_DEVICE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Types of parameters whose update is fused on an accelerator; of the shorter ones it is computed in float32."""

_FUSED_ON_CPU = (torch.float32, torch.float64)

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
        if groups:
            _count_on_device(optimizer)

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
    for parameter, state in zip(trained, states, strict=True):
        if not (state.keys() <= known and _same_layout(parameter, parameter.grad, state)):
            return False
    return True


def _kernels_unspecified(group: dict[str, Any]) -> bool:
    """Whether the group requests no particular kernels and its rates are plain numbers."""
    if any(group.get(name) for name in ("fused", "foreach", "capturable", "differentiable")):
        return False
    unfused = group.get("fused") is False or group.get("foreach") is False
    return not unfused and not any(isinstance(rate, Tensor) for rate in (group["lr"], *group.get("betas", ())))


def _count_on_device(optimizer: Optimizer) -> None:
    """Move counts of steps to the parameters' device, where fused kernels want them; torch keeps others on the CPU."""
    for parameter, state in optimizer.state.items():
        count = state.get("step")
        if isinstance(count, Tensor) and count.device != parameter.device:
            state["step"] = count.to(parameter.device, non_blocking=True)


@cache
def _has_fused_kernels(kind: str) -> bool:
    return kind in _get_fused_kernels_supported_devices()


def _same_layout(parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> bool:
    """Whether parameter, gradient and state are dense tensors of one device, one dtype and one memory layout."""
    device, dtype = parameter.device, parameter.dtype
    if type(parameter) not in _PLAIN_TYPES or not _has_fused_kernels(device.type) or not _dense(parameter):
        return False
    if dtype not in (_FUSED_ON_CPU if parameter.is_cpu else _FUSED_ON_DEVICE):
        return False
    steps = state.get("step")
    if steps is not None and not (isinstance(steps, Tensor) and steps.dtype is torch.float32):
        return False
    if gradient.layout is not torch.strided:
        return False
    strides = _strides(parameter)
    tensors = [gradient, *(value for name, value in state.items() if name != "step" and value is not None)]
    for tensor in tensors:
        if tensor.dtype is not dtype or tensor.device != device or _strides(tensor) != strides:
            return False
    return True


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides that matter: along a dim of size 1 they may have any value, and a loaded state another one."""
    return tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1)


def _dense(tensor: Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    if tensor.is_contiguous():
        return True
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return last is not None and tensor.is_contiguous(memory_format=last)
