"""One step: forward and backward of every microbatch, gradients of the global mean, one update.

The global loss is sum(total) / sum(count) over all ranks and microbatches. Each part's total is divided by the number
of samples in the global batch before backward. Where the mean is over something else (tokens), gradients are multiplied
once by samples / sum(count) after the reduction.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from tutti.comm.point_to_point import ring_all_reduce_nbytes
from tutti.comm.traffic import CommHandle
from tutti.config.vocabulary import DATA_AXES
from tutti.data.batches import BatchShare, MicrobatchShare, check_batch_size, split_batch, to_device
from tutti.data.seeds import derive_seed, seed_device
from tutti.errors import ScriptError, TrainingError
from tutti.nn.mixture import Tally
from tutti.parallel.data.replicate import LossFunction
from tutti.parallel.expert.expert_parallel import WIDTH, read_tallies, write_tallies
from tutti.parallel.losses import Weighted, as_weighted
from tutti.parallel.mixed_precision import autocast
from tutti.parallel.pipeline.pipeline_runner import PipelineBatch
from tutti.trainer.finite_gradients import gradients_finite, nonfinite_loss_message
from tutti.trainer.run_state import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of forward and backward of one global batch.

    Attributes:
        loss: global mean loss.
        samples: samples of the global batch.
        count: what the loss is a mean over, over all ranks: samples or tokens.
        finite: whether the update may be made.
        experts: for each mixture of experts, its counts over all ranks.
    """

    loss: float
    samples: int
    count: float
    finite: bool
    experts: dict[str, Tally] = field(default_factory=dict)


def forward_backward(run: Run, function: LossFunction, batch: Any) -> StepResult:
    """Compute the gradients of the global mean loss in every parameter's `grad`, identical on all ranks. Collective.

    Args:
        run: the run.
        function: (model, batch) -> loss of the batch.
        batch: this rank's share of the global batch, as the loader yielded it.

    Raises:
        TrainingError: on every rank, for a loss or gradient that is not finite if the Job says on_nonfinite = "stop",
            and for a batch whose loss has nothing to average over.
        ScriptError: the batch is not the loader's, or the loss does not depend on the model.
    """
    share = run.state.loader.share
    if share is None:
        raise ScriptError(
            "a step was given a batch before the loader yielded one; iterate over the loader that prepare returned"
        )
    check_batch_size(batch, sum(share.sizes))
    run.loop.sizes.begin()
    batch = run.loop.observer.loaded(run.state.progress.step, batch)
    for optimizer in run.parallel.optimizers:
        optimizer.zero_grad(set_to_none=True)
    run.parallel.replica.shards.clear()
    run.state.noise.begin(run.state.progress.step)
    run.loop.statistics.keep()
    size = 2 + run.parallel.world.world_size + WIDTH * len(run.parallel.mixtures) + run.state.noise.width
    totals = torch.zeros(size, dtype=torch.float64, device=run.parallel.world.device)
    pieces = split_batch(batch, share.sizes)
    if run.loop.pipeline is not None:
        _pipeline_microbatches(run, function, share, pieces, totals)
        pieces = []
    for index, piece in enumerate(pieces):
        _microbatch(run, function, share, index, piece, totals, last=index == len(pieces) - 1)
    run.loop.clock.enter("other")
    result = _step_result(run, share, totals.tolist())
    finite = result.finite and gradients_finite(run)
    run.parallel.replica.finish_step(finite)
    if not run.state.scaler.is_enabled():  # an enabled scaler skips the update itself
        result = replace(result, finite=finite)
    if not result.finite:
        run.loop.statistics.restore()
    else:
        scale = run.state.scaler.get_scale() if run.state.noise.measuring and run.state.scaler.is_enabled() else 1.0
        _finish_gradients(run, share.batch_size / result.count)
        run.state.noise.finish(
            run.parallel.replica.parameters,
            run.state.progress.step,
            factor=share.batch_size / scale,
            counted=result.count,
            units=run.state.loader.tokens or share.batch_size,
        )
    run.loop.observer.gradients(run.state.progress.step)
    return result


def _microbatch(
    run: Run, function: LossFunction, share: BatchShare, index: int, batch: Any, totals: torch.Tensor, *, last: bool
) -> None:
    """Run forward and backward of one microbatch. Reductions overlap the last one's backward."""
    part, step, device = share.parts[index], run.state.progress.step, run.parallel.world.device
    run.loop.clock.enter("forward")
    seed_device(
        derive_seed(run.settings.seed, "dropout", step, index, run.parallel.mesh.index(*DATA_AXES, "context")), device
    )
    run.parallel.scope.counts = part.count > 0
    with (
        run.parallel.sequences.part(to_device(batch, device)) as local_batch,
        run.loop.observer.microbatch(step, index, share),
    ):
        with autocast(run.parallel.plan.precision, device):
            root = _backward_root(run, share, index, function(run.parallel.model, local_batch), totals)
        reduced = _start_loss_all_reduce(run, share, totals) if last else None
        run.loop.clock.enter("backward")
        if index == 0:
            run.parallel.replica.begin(piecewise=not last)
        if last:
            run.parallel.replica.last_of()
            run.parallel.replica.shards.begin()
        with run.state.noise.part(run.parallel.replica.parameters), run.parallel.replica.factored.backward():
            root.backward()  # type: ignore[no-untyped-call]
    if reduced is not None:
        run.loop.clock.enter("exposed_communication")
        run.parallel.replica.finish()
        reduced.wait()


def _pipeline_microbatches(
    run: Run, function: LossFunction, share: BatchShare, pieces: list[Any], totals: torch.Tensor
) -> None:
    """Run all microbatches through this rank's stages; losses are all-reduced during the last backwards."""
    assert run.loop.pipeline is not None
    run.state.scaler.scale(totals[:1])  # creates the scale on every rank, also on those that see no loss
    reduced: list[CommHandle | None] = []

    def root(index: int, value: Any) -> torch.Tensor:
        return _backward_root(run, share, index, value, totals)

    run.parallel.replica.begin(piecewise=True)
    run.parallel.replica.shards.begin()
    batch = PipelineBatch(
        parallel=run.parallel,
        function=function,
        pieces=pieces,
        share=share,
        step=run.state.progress.step,
        clock=run.loop.clock,
    )
    run.loop.pipeline.forward_backward(batch, root, lambda: reduced.append(_start_loss_all_reduce(run, share, totals)))
    run.parallel.replica.finish()
    for handle in reduced:
        if handle is not None:
            handle.wait()


def _start_loss_all_reduce(run: Run, share: BatchShare, totals: torch.Tensor) -> CommHandle | None:
    """Start the all-reduce of losses, one non-finite flag per rank, the experts' counts and the noise meter's sums."""
    totals[2 + run.parallel.world.rank] = ~torch.isfinite(totals[0])
    if run.parallel.mixtures:
        copies = run.parallel.world.world_size // run.parallel.mesh.degree("stage")
        write_tallies(run.parallel.model, run.parallel.mixtures, totals[2 + run.parallel.world.world_size :], copies)
    run.state.noise.write(totals)
    return run.state.consistency.start_losses(run.parallel, totals, share)


def _backward_root(run: Run, share: BatchShare, index: int, value: Any, totals: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a microbatch's backward starts from: its loss, weighted for the global mean and scaled."""
    run.loop.observer.loss(value)
    part = share.parts[index]
    loss = _weighted_part(value, part, run.parallel.mesh.degree("context"))
    run.state.noise.counted(loss.count)
    _accumulate_loss(totals, loss, part, run)
    # Ranks along space compute the same loss, and the reduction adds up their gradients of it.
    samples = share.batch_size * run.parallel.mesh.degree("space")
    return run.state.scaler.scale(loss.total / (samples / run.state.consistency.gradient_scale))


def _weighted_part(loss: Any, part: MicrobatchShare, sequence_parts: int) -> Weighted:
    """Return a part's loss as (total, count), with weight 0 on a rank that only takes part in the collectives."""
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
        totals[1] += count / run.parallel.loss_copies


def _step_result(run: Run, share: BatchShare, totals: list[float]) -> StepResult:
    """Read the result from the all-reduced totals. Raises TrainingError as `forward_backward` does."""
    total, count, flags = totals[0], totals[1], totals[2 : 2 + run.parallel.world.world_size]
    experts = read_tallies(run.parallel.mixtures, totals[2 + run.parallel.world.world_size :])
    run.state.noise.read(totals)
    step = run.state.progress.step + 1
    bad = [rank for rank, flag in enumerate(flags) if flag]
    if not bad and count <= 0:
        raise TrainingError(
            f"step {step}: the loss of the global batch has nothing to average over (its count is {count}); leave out "
            "samples in which no token counts"
        )
    loss = total / count if count > 0 else math.nan
    if bad and run.settings.on_nonfinite == "stop":
        run.loop.statistics.restore()
        raise TrainingError(nonfinite_loss_message(loss, bad, step))
    return StepResult(loss=loss, samples=share.batch_size, count=count, finite=not bad, experts=experts)


def _finish_gradients(run: Run, factor: float) -> None:
    """Undo loss scaling, and multiply gradients by `factor`, which makes them those of the loss' own mean."""
    for optimizer in run.parallel.optimizers:
        if run.state.scaler.is_enabled():
            with run.parallel.replica.shards.whole_gradients(optimizer):
                run.state.scaler.unscale_(optimizer)
            overflows = run.state.scaler._found_inf_per_device(optimizer)
            if not overflows:  # this optimizer has no gradient on this rank
                overflows[str(run.parallel.world.device)] = torch.zeros((), device=run.parallel.world.device)
            # Ranks that hold different gradients must skip the update together if one of them overflows.
            if run.parallel.layout.shards or run.state.consistency.diverged:
                for value in overflows.values():
                    with run.parallel.layout.channel("scalars").waiting(
                        ring_all_reduce_nbytes(value, run.parallel.world.world_size)
                    ):
                        dist.all_reduce(value, dist.ReduceOp.MAX)
    if factor != 1.0:
        # The parameters that optimizers step on; with sharding, `replica.parameters` may be those of forward.
        gradients = [p.grad for p in run.parallel.model.parameters() if p.grad is not None]
        if gradients:  # a stage may have nothing to train
            torch._foreach_mul_(gradients, factor)
