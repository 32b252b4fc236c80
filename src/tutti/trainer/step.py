"""Forward and backward of one step; update.py makes the update.

The global loss is sum(total) / sum(count) over all ranks and microbatches. Each part's total is divided by the number
of samples in the global batch before backward. If the loss is a mean over something else (tokens), gradients are
multiplied once by samples / sum(count) after the reduction.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from tutti.comm.point_to_point import ring_all_reduce_nbytes
from tutti.comm.traffic import CommHandle
from tutti.config.compression import format_compression
from tutti.config.vocabulary import DATA_AXES
from tutti.data.batches import BatchShare, MicrobatchShare
from tutti.data.device_copies import to_device
from tutti.data.seeds import seed_device
from tutti.errors import RankMismatchError, ScriptError, TrainingError
from tutti.parallel.data.replicate import LossFunction
from tutti.parallel.expert.expert_parallel import TALLY_NUMEL, DeferredTallies, read_tallies, write_tallies
from tutti.parallel.loss_means import CountedLoss
from tutti.parallel.losses import LossSum, Weighted, as_weighted
from tutti.parallel.mixed_precision import autocast
from tutti.parallel.pipeline.pipeline_runner import PipelineBatch
from tutti.trainer.deferred_results import DeferredNumber, DeviceOutcome, HostCopy
from tutti.trainer.finite_gradients import (
    find_nonfinite_on_device,
    gradients_finite,
    nonfinite_gradient_message,
)
from tutti.trainer.guard import guard_loss, guard_step
from tutti.trainer.loss_checks import check_loss_total
from tutti.trainer.metrics_rows import note_inputs
from tutti.trainer.observer import NullObserver
from tutti.trainer.out_of_memory import (
    StepExhaustedError,
    StepProgress,
    divide_again,
    failure_of,
    is_out_of_memory,
    raise_if_exhausted,
)
from tutti.trainer.run_state import Run, StepResult
from tutti.trainer.slow_ranks import note_own_times
from tutti.trainer.state_check import check_state, note_state
from tutti.trainer.step_message import ComputedBatch, StepMessage, describe_places, place_in

Gradients = dict[nn.Parameter, torch.Tensor]


def forward_backward(
    run: Run, loss_of_batch: LossFunction, batch: Any, zeroed: tuple[Optimizer, ...] | None = None
) -> StepResult:
    """Add the gradient of the global mean loss to every parameter's `grad`. Collective.

    Args:
        run: the run.
        loss_of_batch: (model, batch) -> loss of the batch.
        batch: this rank's share of the global batch, as the loader yielded it.
        zeroed: optimizers whose parameters' gradients start from zero; None: all parameters' if an update has used
            what they hold, else none.

    Raises:
        TrainingError: on every rank, if the loss or a gradient is not finite and the Job says on_nonfinite = "stop",
            or if the loss of the global batch has nothing to average over.
        ScriptError: the batch is not the loader's, or the loss does not depend on the model.
    """
    share = run.state.loader.share
    if share is None:
        raise ScriptError(
            "a step was given a batch before the loader yielded one; iterate over the loader that prepare returned"
        )
    loss_of_batch = CountedLoss(loss_of_batch)
    pieces = run.state.loader.pieces(batch)
    accumulation = run.loop.accumulation
    try:
        earlier = start_gradients(run, zeroed)
        if not accumulation.results:
            if run.loop.marks is not None:
                run.loop.marks.computing()
            run.loop.bucket_tuner.begin()
            run.loop.statistics.save(keep=bool(accumulation.pending))
        result = _with_enough_memory(run, loss_of_batch, batch, pieces, earlier)
    except BaseException:
        accumulation.clear()  # the gradients are incomplete
        raise
    accumulation.results.append(result)
    return result


def _with_enough_memory(
    run: Run, loss_of_batch: LossFunction, batch: Any, pieces: list[Any], earlier: Gradients
) -> StepResult:
    """Compute the gradients of one global batch, in as many microbatches as memory asks for."""
    loader, draws = run.state.loader, run.loop.draws
    before = draws.before() if run.settings.automatic_microbatches else None
    while True:
        assert loader.share is not None
        try:
            result = _forward_backward(run, loss_of_batch, loader.share, batch, pieces, earlier)
        except StepExhaustedError as error:
            failure = error.failure
        else:
            draws.after(before)
            return result
        batch = divide_again(run, batch, failure, before)
        pieces = loader.pieces(batch)


def _forward_backward(
    run: Run, loss_of_batch: LossFunction, share: BatchShare, batch: Any, pieces: list[Any], earlier: Gradients
) -> StepResult:
    """Compute the gradients of one global batch, and add those of `earlier` calls."""
    run.loop.observer.loaded(run.state.progress.step, batch)
    if not run.loop.accumulation.results:
        note_inputs(run, batch)
        run.loop.accumulation.note_batch(batch, run.state.loader.before + run.state.loader.position)
    pieces = [run.loop.observer.sampled(piece) for piece in pieces]
    run.parallel.sequences.check(pieces[0], run.parallel.world.device)
    run.parallel.replica.shards.clear()
    run.state.noise.begin(run.state.progress.step)
    guard_step(run, loss_of_batch, pieces)
    noted = note_state(run)
    # All-reduced together: the step's message, a tally per mixture, the noise meter's sums.
    message = run.loop.message = _message(run, ComputedBatch(loss=loss_of_batch, pieces=pieces, share=share))
    size = message.width + TALLY_NUMEL * len(run.parallel.mixtures) + run.state.noise.width
    totals = torch.zeros(size, dtype=torch.float64, device=run.parallel.world.device)
    with run.parallel.gradient_hooks.set_aside():
        _microbatches(run, loss_of_batch, share, pieces, totals)
    run.loop.clock.enter("other")
    check_state(run, noted, loss_of_batch, pieces, share)
    if device_decides(run):
        result = _deferred_result(run, share, message, totals, earlier)
    else:
        result = _finished_result(run, share, message, totals.tolist(), earlier)
    run.loop.message = None
    guard_loss(run, loss_of_batch, pieces, share)
    run.loop.observer.gradients(run.state.progress.step, result.loss)
    return result


def _message(run: Run, computed: ComputedBatch) -> StepMessage:
    """Where this rank is now and what it computes, for the message of the losses."""
    loader, world = run.state.loader, run.parallel.world
    place = place_in(loader, run.state.progress.step, len(run.loop.accumulation.results))
    message = StepMessage(world_size=world.world_size, rank=world.rank, place=place, computed=computed)
    return message if loader.source.is_stream else replace(message, indices=loader.indices, plan=run.parallel.plan)


def _check_in_step(run: Run, message: StepMessage, totals: list[float]) -> None:
    """Check that all ranks compute the loss of the same global batch for the same update, and learn whether to stop.

    Collective if the ranks are out of step.

    Raises:
        RankMismatchError: on every rank.
    """
    if run.state.consistency.asynchronous:  # these ranks exchange no losses
        return
    if message.in_step(totals):
        run.loop.stopping.note(message.words(totals))
        if message.world_size > 1 and not message.place.call:
            note_own_times(run, message.own_times(totals), message.place.step - 1)
        return
    places = run.parallel.world.gather(message.place)
    raise RankMismatchError(f"step {message.place.step}: {describe_places(places)}")


def _finished_result(
    run: Run, share: BatchShare, message: StepMessage, totals: list[float], earlier: Gradients
) -> StepResult:
    """Check the loss and the gradients, and finish the gradients unless they are not finite."""
    _check_in_step(run, message, totals)
    result = _step_result(run, share, message, totals)
    finite = result.finite and gradients_finite(run, message)
    run.parallel.replica.finish_step(finite)
    if result.finite != finite and not run.state.scaler.is_enabled():  # an enabled scaler skips the update itself
        result = replace(result, finite=finite)
    if not result.finite:
        run.loop.statistics.restore()
        for parameter in run.parallel.model.parameters():
            parameter.grad = earlier.get(parameter)
        return result
    scale = run.state.scaler.get_scale() if run.state.noise.measuring and run.state.scaler.is_enabled() else 1.0
    _finish_gradients(run, share.batch_size / result.count)
    run.parallel.gradient_hooks.call()
    run.state.noise.finish(
        run.parallel.replica.parameters,
        run.state.progress.step,
        factor=share.batch_size / scale,
        counted=result.count,
        units=run.state.loader.tokens or share.batch_size,
    )
    for parameter, gradient in earlier.items():
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    return result


def device_decides(run: Run) -> bool:
    """Whether the device decides on this step's update, so that the host need not wait for it.

    Not where the host needs the result at once: state that it updates itself; a limit of the loss, or parameters that
    are rolled back; compressed gradients, whose residuals follow it; replicas that differ; steps whose gradient noise
    is measured and those after them; and observers, which compare numbers.
    """
    parallel, noise = run.parallel, run.state.noise
    return (
        run.loop.device_decides
        and run.settings.loss_limit is None
        and run.settings.on_nonfinite != "rollback"
        and parallel.plan.sync.mode == "synchronous"
        and parallel.plan.sharding.offload == "none"
        and parallel.replica.compressor is None
        and not (noise.measuring or noise.pending)
        and isinstance(run.loop.observer, NullObserver)
    )


def _deferred_result(
    run: Run, share: BatchShare, message: StepMessage, totals: torch.Tensor, earlier: Gradients
) -> StepResult:
    """Start what `_finished_result` does, with numbers that are read a step later."""
    count, flags = totals[1], totals[2 : 2 + message.world_size]
    lost = ((flags.remainder(2) > 0).any() | ~(count > 0)).float()
    found, place, names = find_nonfinite_on_device(run)
    skip = torch.maximum(lost, found)
    if run.settings.on_nonfinite != "stop":
        run.loop.statistics.restore_where(skip)
    _finish_gradients(run, share.batch_size / count)
    run.parallel.gradient_hooks.call()
    for parameter, gradient in earlier.items():
        if parameter.grad is None:
            parameter.grad = gradient
        elif gradient.is_sparse or parameter.grad.is_sparse:
            parameter.grad.add_(gradient)
        else:
            parameter.grad = torch.where(skip > 0, gradient, parameter.grad + gradient)
    numbers = HostCopy(torch.cat([totals, torch.stack([lost, skip]), place]))
    loader = run.state.loader
    outcome = DeviceOutcome(
        lost=lost,
        skip=skip,
        totals=numbers,
        names=names,
        message=message,
        settled=frozenset(earlier),
    )
    return StepResult(
        loss=cast(float, DeferredNumber(lambda: _mean(*numbers.read()[:2]))),
        samples=share.batch_size,
        count=cast(float, DeferredNumber(lambda: numbers.read()[1])),
        finite=True,
        batch=loader.before + loader.position,
        tokens=loader.tokens,
        experts=DeferredTallies(run.parallel.mixtures, lambda: numbers.read()[message.width :]),
        outcomes=(outcome,),
    )


def _mean(total: float, count: float) -> float:
    return total / count if count > 0 else math.nan


def await_result(run: Run, result: StepResult) -> StepResult:
    """Wait for a result that the device decides on, for an update that cannot be skipped there.

    Raises:
        TrainingError: as `forward_backward` does.
    """
    finite = True
    for outcome in result.outcomes:
        skipped = is_skipped(run, outcome)
        finite = finite and not skipped
    if not finite:
        for parameter in run.parallel.model.parameters():
            parameter.grad = None
    return replace(result, loss=float(result.loss), count=float(result.count), finite=finite, outcomes=())


def is_skipped(run: Run, outcome: DeviceOutcome) -> bool:
    """Return whether the device has found that an update must be skipped; waits for that. Collective.

    Raises:
        TrainingError: as `forward_backward` does.
        RankMismatchError: the ranks were out of step.
    """
    numbers = outcome.totals.read()
    _check_in_step(run, outcome.message, numbers)
    lost, skip = numbers[-5:-3]
    if lost:
        check_loss_total(run, outcome.message, numbers)
    elif skip and run.settings.on_nonfinite == "stop":
        raise TrainingError(nonfinite_gradient_message(run, outcome))
    return bool(skip)


def start_gradients(run: Run, zeroed: Iterable[Optimizer] | None) -> Gradients:
    """Set the gradients of all parameters to None. Return those that the next ones are added to.

    Args:
        run: the run.
        zeroed: see `forward_backward`.

    Raises:
        ScriptError: an optimizer has got a parameter that is not in the model, or it is not clear whose gradients
            start from zero.
    """
    accumulation, parameters = run.loop.accumulation, run.parallel.replica.model_parameters()
    run.parallel.check_groups()
    used = bool(accumulation.stepped)
    if zeroed is None:
        _check_clear(run)
        dropped: list[nn.Parameter] | None = None if used or not accumulation.results else []
    else:
        dropped = [parameter for _, parameter in run.parallel.trained_by(zeroed)]
        if used:
            owned = {parameter for _, parameter in run.parallel.trained_by(run.parallel.optimizers)}
            dropped += [parameter for parameter in parameters if parameter not in owned]
    if used or not accumulation.results:
        accumulation.clear()
        if run.state.scaler.is_enabled():
            run.state.scaler._per_optimizer_states.clear()  # of optimizers that have not stepped
    earlier: Gradients = {}
    if dropped is not None:
        without = set(dropped)
        kept = [p for p in parameters if p.grad is not None and p not in without]
        earlier = {p: _earlier_gradient(run, p) for p in kept}
    if earlier:
        _check_additive(run)
    for parameter in parameters:
        parameter.grad = None
    return earlier


def _earlier_gradient(run: Run, parameter: nn.Parameter) -> torch.Tensor:
    """A copy of a gradient of earlier calls; zeros where the device has found that call's not to be finite."""
    gradient, results = parameter.grad, run.loop.accumulation.results
    assert gradient is not None
    if not results or not results[-1].outcomes or parameter in results[-1].outcomes[-1].settled or gradient.is_sparse:
        return gradient.clone()
    return torch.where(results[-1].outcomes[-1].skip > 0, torch.zeros_like(gradient), gradient)


def _check_clear(run: Run) -> None:
    """Refuse to guess whose gradients start from zero.

    After an update all do, as in a loop that calls zero_grad before each backward. If several calls of
    forward_backward came before an update of some optimizers only, the others may still be accumulating.
    """
    accumulation = run.loop.accumulation
    if len(accumulation.results) < 2 or not accumulation.stepped:
        return
    used = {parameter for _, parameter in run.parallel.trained_by(accumulation.stepped)}
    for optimizer in run.parallel.optimizers:
        waiting = (name for name, p in run.parallel.trained_by([optimizer]) if p not in used and p.grad is not None)
        name = next(waiting, None)
        if name is not None:
            raise ScriptError(
                f"{len(accumulation.results)} calls of forward_backward came before an update that left out "
                f"{type(optimizer).__name__} of {name!r}, whose gradients may be accumulating; say whose gradients "
                "start from zero: forward_backward(..., zero_grad=[...]), () for none"
            )


def _check_additive(run: Run) -> None:
    """Refuse to add up gradients whose compressed form already contains the momentum of an update."""
    compressor = run.parallel.replica.compressor
    if compressor is not None and (compressor.momentum_compression or compressor.compression.entry.own_momentum):
        raise ScriptError(
            f"several calls of forward_backward before an update, with {format_compression(compressor.compression)}: "
            "it sends momentum, which every call would advance; compute one loss in one call, or use another codec"
        )


def _microbatches(
    run: Run, loss_of_batch: LossFunction, share: BatchShare, pieces: list[Any], totals: torch.Tensor
) -> None:
    """Run all microbatches.

    Raises:
        StepExhaustedError: on all ranks, if one of them has run out of memory and the step can be computed again.
        TrainingError: this rank has run out of memory, and it cannot.
    """
    progress, failure = StepProgress(), None
    try:
        if run.loop.pipeline is not None:
            _pipeline_microbatches(run, loss_of_batch, share, pieces, totals)
            return
        for index, piece in enumerate(pieces):
            _microbatch(run, loss_of_batch, share, index, piece, totals, progress, last=index == len(pieces) - 1)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        failure = failure_of(run, error, share)
    if failure is not None:  # what the error held is free now
        _complete_without(run, share, totals, progress, several=len(pieces) > 1)
    raise_if_exhausted(run, failure)


def _complete_without(
    run: Run, share: BatchShare, totals: torch.Tensor, progress: StepProgress, *, several: bool
) -> None:
    """Take part in the exchanges of a step that this rank cannot compute, in the order of the other ranks."""
    replica = run.parallel.replica
    if several and not progress.begun:
        replica.begin(accumulate=True)
    if not progress.loss_started:
        totals[0] = math.nan
        progress.loss_handle = _start_loss_all_reduce(run, share, totals)
    if not several and not progress.begun:
        replica.begin()
    replica.abandon()
    if progress.loss_handle is not None:
        progress.loss_handle.wait()


def _microbatch(
    run: Run,
    loss_of_batch: LossFunction,
    share: BatchShare,
    index: int,
    batch: Any,
    totals: torch.Tensor,
    progress: StepProgress,
    *,
    last: bool,
) -> None:
    """Run forward and backward of one microbatch. Gradients are reduced during the last microbatch's backward."""
    part, step, device = share.parts[index], run.state.progress.step, run.parallel.world.device
    run.loop.clock.enter("forward")
    seed_device(run.parallel.draws_seed(step, index, _call(run)), device)
    run.parallel.scope.counts = part.count > 0
    run.loop.batch_state.begin()
    with (
        run.parallel.sequences.part(to_device(batch, device, run.state.loader.copies)) as local_batch,
        run.loop.observer.microbatch(step, index, share),
    ):
        with autocast(run.parallel.plan.precision, device):
            with run.parallel.reads.active():
                value = loss_of_batch(run.parallel.model, local_batch)
            scaled_loss = _scaled_loss(run, share, index, value, totals)
        loss_handle = _start_loss_all_reduce(run, share, totals) if last else None
        progress.loss_started, progress.loss_handle = last, loss_handle
        run.loop.clock.enter("backward")
        if index == 0:
            run.parallel.replica.begin(accumulate=not last)
            progress.begun = True
        if last:
            if run.parallel.replica.changed:
                _check_same_changes(run, loss_handle, totals)
                run.parallel.replica.rebuild()
            run.parallel.replica.announce_last_backward()
            run.parallel.replica.shards.begin()
        with run.state.noise.part(run.parallel.replica.parameters), run.parallel.replica.factored.backward():
            scaled_loss.backward()  # type: ignore[no-untyped-call]
    if last:
        run.loop.clock.enter("exposed_communication" if loss_handle is not None else "other")
        run.parallel.replica.finish()
    if loss_handle is not None:
        loss_handle.wait()
    run.loop.batch_state.combine(part.count)


def _call(run: Run) -> tuple[int, ...]:
    """What tells the random draws of an update's later calls of forward_backward from those of the first."""
    number = len(run.loop.accumulation.results)
    return (number,) if number else ()


def _pipeline_microbatches(
    run: Run, loss_of_batch: LossFunction, share: BatchShare, pieces: list[Any], totals: torch.Tensor
) -> None:
    """Run all microbatches through this rank's stages.

    Losses are all-reduced while the last microbatches' backwards run.
    """
    assert run.loop.pipeline is not None
    run.state.scaler.scale(totals[:1])  # creates the scale on every rank, also on those that see no loss
    loss_handles: list[CommHandle | None] = []

    def scaled_loss_of(index: int, value: Any) -> torch.Tensor:
        return _scaled_loss(run, share, index, value, totals)

    def start_loss_all_reduce() -> None:
        loss_handles.append(_start_loss_all_reduce(run, share, totals))

    run.parallel.replica.begin(accumulate=True)
    if run.parallel.replica.changed:
        run.parallel.replica.rebuild()
    run.parallel.replica.shards.begin()
    run.loop.batch_state.begin()
    batch = PipelineBatch(
        parallel=run.parallel,
        function=loss_of_batch,
        pieces=pieces,
        share=share,
        step=run.state.progress.step,
        call=_call(run),
        clock=run.loop.clock,
        copies=run.state.loader.copies,
    )
    run.loop.pipeline.forward_backward(batch, scaled_loss_of, start_loss_all_reduce)
    run.parallel.replica.finish()
    for handle in loss_handles:
        if handle is not None:
            handle.wait()
    run.loop.batch_state.combine(sum(part.count for part in share.parts))


def _start_loss_all_reduce(run: Run, share: BatchShare, totals: torch.Tensor) -> CommHandle | None:
    """Complete `totals` (loss and count are in it already), and start their all-reduce."""
    message = run.loop.message
    assert message is not None
    if not totals.is_cpu:
        totals[message.flag] = ~torch.isfinite(totals[0])
    elif not math.isfinite(totals.numpy()[0]):
        totals[message.flag] = 1.0
    if run.parallel.replica.changed:
        totals[message.flag] += 2 * run.parallel.replica.digest()
    message.put(totals, run.loop.stopping.word, run.loop.own_times.column)
    if run.parallel.mixtures:
        copies = run.parallel.world.world_size // run.parallel.mesh.degree("stage")
        write_tallies(run.parallel.model, run.parallel.mixtures, totals[message.width :], copies)
    run.state.noise.write(totals)
    return run.state.consistency.start_losses(run.parallel, totals, share)


def _check_same_changes(run: Run, loss_handle: CommHandle | None, totals: torch.Tensor) -> None:
    """Check that all ranks that reduce gradients together have frozen, unfrozen or converted the same parameters.

    Ranks that have not would not take part in making the new buckets. They have sent no digest with their loss.
    """
    if loss_handle is None or run.state.consistency.diverged:
        return
    loss_handle.wait()
    flags = totals[2 : 2 + run.parallel.world.world_size].tolist()
    for rank in run.parallel.mesh.ranks(*DATA_AXES, "context"):
        if flags[rank] // 2 != run.parallel.replica.digest():
            raise RankMismatchError(
                f"step {run.state.progress.step + 1}: rank {run.parallel.world.rank} has frozen, unfrozen or converted "
                f"parameters after prepare, but rank {rank} has not changed the same ones; change requires_grad and "
                "types on all ranks alike"
            )


def _scaled_loss(run: Run, share: BatchShare, index: int, value: Any, totals: torch.Tensor) -> torch.Tensor:
    """Add a microbatch's loss to `totals`; return it divided by the global batch size and times the loss scale."""
    part = share.parts[index]
    if isinstance(value, LossSum):
        value = as_weighted(value, part.loaded / run.parallel.mesh.degree("context"), share.batch_size)
    run.loop.observer.loss(value)
    loss = _weighted_part(value, part, run.parallel.mesh.degree("context"))
    run.state.noise.counted(loss.count)
    _accumulate_loss(totals, loss, part, run)
    # Ranks along space compute the same loss, and the reduction adds up their gradients of it.
    samples = share.batch_size * run.parallel.mesh.degree("space")
    return run.state.scaler.scale(loss.total / (samples / run.state.consistency.gradient_scale))


def _weighted_part(loss: Any, part: MicrobatchShare, sequence_parts: int) -> Weighted:
    """Return a part's loss as (total, count), with weight 0 if the rank has no samples of this microbatch."""
    weighted = as_weighted(loss, part.loaded / sequence_parts)
    if not weighted.total.requires_grad:
        raise ScriptError(
            "the loss does not depend on any parameter that requires a gradient; compute it from the model's output, "
            "outside torch.no_grad() and without .item() or .detach()"
        )
    return weighted if part.count else Weighted(weighted.total * 0.0, 0.0)


def _accumulate_loss(totals: torch.Tensor, loss: Weighted, part: MicrobatchShare, run: Run) -> None:
    """Add one part's loss and count to `totals`."""
    if not part.count:
        return
    copies = run.parallel.loss_copies
    if totals.is_cpu:
        numbers = totals.numpy()  # the same memory, in fewer operations
        numbers[0] += float(loss.total.detach()) / copies
        numbers[1] += float(loss.count) / copies
        return
    totals[0].add_(loss.total.detach(), alpha=1 / copies)
    if isinstance(loss.count, torch.Tensor):
        count = loss.count.detach().to(torch.float64)  # an integer divided by copies would be a float32
        totals[1] += count.to(totals.device) / copies
    else:
        totals[1].add_(float(loss.count) / copies)


def _step_result(run: Run, share: BatchShare, message: StepMessage, totals: list[float]) -> StepResult:
    """Read the result from the all-reduced totals. Raises TrainingError as `forward_backward` does."""
    total, count = totals[:2]
    experts = read_tallies(run.parallel.mixtures, totals[message.width :])
    run.state.noise.read(totals)
    finite = check_loss_total(run, message, totals)
    loader = run.state.loader
    return StepResult(
        loss=_mean(total, count),
        samples=share.batch_size,
        count=count,
        finite=finite,
        batch=loader.before + loader.position,
        tokens=loader.tokens,
        experts=experts,
    )


def _finish_gradients(run: Run, factor: float | torch.Tensor) -> None:
    """Undo loss scaling, and rescale gradients from a mean over samples to the loss's own mean (tokens).

    Args:
        run: the run.
        factor: samples of the global batch, divided by the loss's count; a float64 of the device if only that knows it.
    """
    if run.state.scaler.is_enabled():
        for optimizer in run.parallel.optimizers:
            _unscale(run, optimizer)
        if run.settings.clip_norm is not None:  # the norm counts parameters that no optimizer holds
            owned = {name for name, _ in run.parallel.trained_by(run.parallel.optimizers)}
            others = [p.grad for name, p in run.parallel.model.named_parameters() if name not in owned]
            if any(gradient is not None for gradient in others):
                dense = [gradient for gradient in others if gradient is not None]
                if isinstance(factor, torch.Tensor) and run.state.scaler._scale is not None:
                    torch._foreach_div_(dense, run.state.scaler._scale)
                else:
                    torch._foreach_div_(dense, run.state.scaler.get_scale())
    if isinstance(factor, torch.Tensor) or factor != 1.0:
        # The parameters that optimizers step on; with sharding, `replica.parameters` may be those of forward.
        gradients = [p.grad for p in run.parallel.model.parameters() if p.grad is not None]
        if gradients:  # a stage may have nothing to train
            multiply(gradients, factor)


def multiply(tensors: list[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply tensors in place by a number, or by a 0-d float64 of their device, as by that number."""
    if not isinstance(factor, torch.Tensor):
        torch._foreach_mul_(tensors, factor)
        return
    for dtype in {tensor.dtype for tensor in tensors}:
        same = [tensor for tensor in tensors if tensor.dtype is dtype]
        if dtype.itemsize < 4:  # these types would round the factor, too
            for tensor in same:
                tensor.copy_(tensor.float() * factor.float())
        else:
            torch._foreach_mul_(same, factor.to(dtype))


def _unscale(run: Run, optimizer: Optimizer) -> None:
    """Divide an optimizer's gradients by the loss scale, and note whether one of them has overflowed on any rank."""
    scaler = run.state.scaler
    before = scaler._per_optimizer_states.pop(id(optimizer), {}).get("found_inf_per_device", {})
    with run.parallel.replica.shards.whole_gradients(optimizer):
        scaler.unscale_(optimizer)
    overflows = scaler._found_inf_per_device(optimizer)
    if not overflows:  # this optimizer has no gradient on this rank
        overflows[str(run.parallel.world.device)] = torch.zeros((), device=run.parallel.world.device)
    # Ranks that hold different gradients must skip the update together if one of them overflows.
    if run.parallel.world.world_size > 1 and (run.parallel.layout.shards or run.state.consistency.diverged):
        for device, value in overflows.items():  # of offloaded gradients it lies on the host
            value = overflows[device] = value.to(run.parallel.world.device)
            with run.parallel.layout.channel("scalars").waiting(
                ring_all_reduce_nbytes(value, run.parallel.world.world_size)
            ):
                dist.all_reduce(value, dist.ReduceOp.MAX)
    for device, value in before.items():  # of earlier calls, whose gradients these are added to
        overflows[device] = torch.maximum(value, overflows[device]) if device in overflows else value
