"""Forward and backward of one step; update.py makes the update.

The global loss is sum(total) / sum(count) over all ranks and microbatches. Each part's total is divided by the number
of samples in the global batch before backward. If the loss is a mean over something else (tokens), gradients are
multiplied once by samples / sum(count) after the reduction.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from tutti.comm.point_to_point import ring_all_reduce_nbytes
from tutti.comm.traffic import CommHandle
from tutti.config.compression import format_compression
from tutti.config.vocabulary import DATA_AXES
from tutti.data.batches import BatchShare, MicrobatchShare
from tutti.data.microbatches import to_device
from tutti.data.seeds import derive_seed, seed_device
from tutti.errors import RankMismatchError, ScriptError, TrainingError
from tutti.parallel.data.replicate import LossFunction
from tutti.parallel.expert.expert_parallel import TALLY_NUMEL, read_tallies, write_tallies
from tutti.parallel.loss_means import CountedLoss
from tutti.parallel.losses import LossSum, Weighted, as_weighted
from tutti.parallel.mixed_precision import autocast
from tutti.parallel.pipeline.pipeline_runner import PipelineBatch
from tutti.trainer.finite_gradients import gradients_finite, nonfinite_loss_message
from tutti.trainer.guard import guard_loss, guard_step
from tutti.trainer.metrics_rows import note_inputs
from tutti.trainer.out_of_memory import (
    StepExhaustedError,
    StepProgress,
    divide_again,
    failure_of,
    is_out_of_memory,
    raise_if_exhausted,
)
from tutti.trainer.run_state import Run, StepResult
from tutti.trainer.state_check import check_state, note_state

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
            run.loop.bucket_tuner.begin()
            run.loop.statistics.save()
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
    # All-reduced together: loss, count, a non-finite flag per rank, a tally per mixture, the noise meter's sums.
    size = 2 + run.parallel.world.world_size + TALLY_NUMEL * len(run.parallel.mixtures) + run.state.noise.width
    totals = torch.zeros(size, dtype=torch.float64, device=run.parallel.world.device)
    with run.parallel.gradient_hooks.set_aside():
        _microbatches(run, loss_of_batch, share, pieces, totals)
    run.loop.clock.enter("other")
    check_state(run, noted, loss_of_batch, pieces, share)
    result = _step_result(run, share, totals.tolist())
    finite = result.finite and gradients_finite(run)
    run.parallel.replica.finish_step(finite)
    if not run.state.scaler.is_enabled():  # an enabled scaler skips the update itself
        result = replace(result, finite=finite)
    if not result.finite:
        run.loop.statistics.restore()
        for parameter in run.parallel.model.parameters():
            parameter.grad = earlier.get(parameter)
    else:
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
    guard_loss(run, loss_of_batch, pieces, share)
    run.loop.observer.gradients(run.state.progress.step, result.loss)
    return result


def start_gradients(run: Run, zeroed: Iterable[Optimizer] | None) -> Gradients:
    """Set the gradients of all parameters to None. Return those that the next ones are added to.

    Args:
        run: the run.
        zeroed: see `forward_backward`.

    Raises:
        ScriptError: an optimizer has got a parameter that is not in the model, or it is not clear whose gradients
            start from zero.
    """
    accumulation, model = run.loop.accumulation, run.parallel.model
    run.parallel.check_groups()
    used = bool(accumulation.stepped)
    if zeroed is None:
        _check_clear(run)
        dropped: list[nn.Parameter] | None = None if used or not accumulation.results else []
    else:
        dropped = [parameter for _, parameter in run.parallel.trained_by(zeroed)]
        if used:
            owned = {parameter for _, parameter in run.parallel.trained_by(run.parallel.optimizers)}
            dropped += [parameter for parameter in model.parameters() if parameter not in owned]
    if used or not accumulation.results:
        accumulation.clear()
        if run.state.scaler.is_enabled():
            run.state.scaler._per_optimizer_states.clear()  # of optimizers that have not stepped
    earlier: Gradients = {}
    if dropped is not None:
        without = set(dropped)
        earlier = {p: p.grad.clone() for p in model.parameters() if p.grad is not None and p not in without}
    if earlier:
        _check_additive(run)
    for parameter in model.parameters():
        parameter.grad = None
    return earlier


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
    rank = run.parallel.mesh.index(*DATA_AXES, "context")
    seed_device(derive_seed(run.settings.seed, "dropout", step, index, rank, *_call(run)), device)
    run.parallel.scope.counts = part.count > 0
    run.loop.batch_state.begin()
    with (
        run.parallel.sequences.part(to_device(batch, device)) as local_batch,
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
    if loss_handle is not None:
        run.loop.clock.enter("exposed_communication")
        run.parallel.replica.finish()
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
    )
    run.loop.pipeline.forward_backward(batch, scaled_loss_of, start_loss_all_reduce)
    run.parallel.replica.finish()
    for handle in loss_handles:
        if handle is not None:
            handle.wait()
    run.loop.batch_state.combine(sum(part.count for part in share.parts))


def _start_loss_all_reduce(run: Run, share: BatchShare, totals: torch.Tensor) -> CommHandle | None:
    """Complete `totals` (loss and count are in it already), and start their all-reduce."""
    totals[2 + run.parallel.world.rank] = ~torch.isfinite(totals[0])
    if run.parallel.replica.changed:
        totals[2 + run.parallel.world.rank] += 2 * run.parallel.replica.digest()
    if run.parallel.mixtures:
        copies = run.parallel.world.world_size // run.parallel.mesh.degree("stage")
        write_tallies(run.parallel.model, run.parallel.mixtures, totals[2 + run.parallel.world.world_size :], copies)
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
    if part.count:
        count = loss.count.detach() if isinstance(loss.count, torch.Tensor) else loss.count
        totals[0].add_(loss.total.detach(), alpha=1 / run.parallel.loss_copies)
        count = torch.as_tensor(count, dtype=torch.float64)  # an integer divided by copies would be a float32
        totals[1] += count.to(totals.device) / run.parallel.loss_copies


def _step_result(run: Run, share: BatchShare, totals: list[float]) -> StepResult:
    """Read the result from the all-reduced totals. Raises TrainingError as `forward_backward` does."""
    total, count, flags = totals[0], totals[1], totals[2 : 2 + run.parallel.world.world_size]
    experts = read_tallies(run.parallel.mixtures, totals[2 + run.parallel.world.world_size :])
    run.state.noise.read(totals)
    step = run.state.progress.step + 1
    bad = [rank for rank, flag in enumerate(flags) if flag % 2]
    if not bad and count <= 0:
        raise TrainingError(
            f"step {step}: the loss of the global batch has nothing to average over (its count is {count}); leave out "
            "samples in which no token counts"
        )
    loss = total / count if count > 0 else math.nan
    if bad and run.settings.on_nonfinite == "stop":
        run.loop.statistics.restore()
        raise TrainingError(nonfinite_loss_message(loss, bad, step))
    loader = run.state.loader
    return StepResult(
        loss=loss,
        samples=share.batch_size,
        count=count,
        finite=not bad,
        batch=loader.before + loader.position,
        tokens=loader.tokens,
        experts=experts,
    )


def _finish_gradients(run: Run, factor: float) -> None:
    """Undo loss scaling, and rescale gradients from a mean over samples to the loss's own mean (tokens).

    Args:
        run: the run.
        factor: samples of the global batch, divided by the loss's count.
    """
    if run.state.scaler.is_enabled():
        for optimizer in run.parallel.optimizers:
            _unscale(run, optimizer)
        if run.settings.clip_norm is not None:  # the norm counts parameters that no optimizer holds
            owned = {name for name, _ in run.parallel.trained_by(run.parallel.optimizers)}
            others = [p.grad for name, p in run.parallel.model.named_parameters() if name not in owned]
            if any(gradient is not None for gradient in others):
                scale = run.state.scaler.get_scale()
                torch._foreach_div_([gradient for gradient in others if gradient is not None], scale)
    if factor != 1.0:
        # The parameters that optimizers step on; with sharding, `replica.parameters` may be those of forward.
        gradients = [p.grad for p in run.parallel.model.parameters() if p.grad is not None]
        if gradients:  # a stage may have nothing to train
            torch._foreach_mul_(gradients, factor)


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
    if run.parallel.layout.shards or run.state.consistency.diverged:
        for value in overflows.values():
            with run.parallel.layout.channel("scalars").waiting(
                ring_all_reduce_nbytes(value, run.parallel.world.world_size)
            ):
                dist.all_reduce(value, dist.ReduceOp.MAX)
    for device, value in before.items():  # of earlier calls, whose gradients these are added to
        overflows[device] = torch.maximum(value, overflows[device]) if device in overflows else value
