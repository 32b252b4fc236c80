"""One step: forward and backward of every microbatch, gradients of the global mean, one update.

The global loss is sum(total) / sum(count) over all ranks and microbatches. Each part's total is divided by the
global batch's number of samples before backward; where the mean is over something else (tokens), gradients are
multiplied by samples / sum(count) once, after they are summed.
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
from tutti.trainer.losses import Weighted, as_weighted
from tutti.trainer.precision import autocast, gradients_finite, nonfinite_loss_message
from tutti.trainer.run_state import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of forward and backward of one global batch.

    `finite`: whether the update may be made; `experts`: counts of every mixture of experts, over all ranks.
    """

    loss: float
    samples: int
    count: float
    finite: bool
    experts: dict[str, Tally] = field(default_factory=dict)


def forward_backward(run: Run, function: LossFunction, batch: Any) -> StepResult:
    """Gradients of the global mean loss, in every parameter's `grad`, identical on all ranks.

    Raises TrainingError, on every rank, for a loss or a gradient that is not finite where the Job says stop.
    """
    share = run.loader.share
    if share is None:
        raise ScriptError("step got a batch before the loader gave one; iterate over the loader that prepare returned")
    check_batch_size(batch, sum(share.sizes))
    run.sizes.begin(run)
    batch = run.observer.loaded(run.progress.step, batch)
    for optimizer in run.optimizers:
        optimizer.zero_grad(set_to_none=True)
    run.replica.shards.clear()
    run.noise.begin(run.progress.step)
    run.statistics.keep()
    size = 2 + run.world.world_size + WIDTH * len(run.mixtures) + run.noise.width
    totals = torch.zeros(size, dtype=torch.float64, device=run.world.device)
    pieces = split_batch(batch, share.sizes)
    if run.pipeline is not None:
        _pipeline_microbatches(run, function, share, pieces, totals)
        pieces = []
    for index, piece in enumerate(pieces):
        _microbatch(run, function, share, index, piece, totals, last=index == len(pieces) - 1)
    run.clock.enter("other")
    result = _step_result(run, share, totals.tolist())
    finite = result.finite and gradients_finite(run)
    run.replica.finish_step(finite)
    if not run.scaler.is_enabled():  # which leaves out the update itself
        result = replace(result, finite=finite)
    if not result.finite:
        run.statistics.restore()
    else:
        scale = run.scaler.get_scale() if run.noise.measuring and run.scaler.is_enabled() else 1.0
        _finish_gradients(run, share.batch_size / result.count)
        run.noise.finish(
            run.replica.parameters,
            run.progress.step,
            factor=share.batch_size / scale,
            counted=result.count,
            units=run.loader.tokens or share.batch_size,
        )
    run.observer.gradients(run.progress.step)
    return result


def _microbatch(
    run: Run, function: LossFunction, share: BatchShare, index: int, batch: Any, totals: torch.Tensor, *, last: bool
) -> None:
    part, step, device = share.parts[index], run.progress.step, run.world.device
    run.clock.enter("forward")
    seed_device(derive_seed(run.settings.seed, "dropout", step, index, run.mesh.index(*DATA_AXES, "context")), device)
    run.scope.counts = part.count > 0
    with run.sequences.part(to_device(batch, device)) as mine, run.observer.microbatch(step, index, share):
        with autocast(run.plan.precision, device):
            root = _backward_root(run, share, index, function(run.model, mine), totals)
        reduced = _start_loss_all_reduce(run, totals) if last else None
        run.clock.enter("backward")
        if index == 0:
            run.replica.begin(piecewise=not last)
        if last:
            run.replica.last_of()
            run.replica.shards.begin()
        with run.noise.part(run.replica.parameters), run.replica.factored.backward():
            root.backward()  # type: ignore[no-untyped-call]
    if reduced is not None:
        run.clock.enter("exposed_communication")
        run.replica.finish()
        reduced.wait()


def _pipeline_microbatches(
    run: Run, function: LossFunction, share: BatchShare, pieces: list[Any], totals: torch.Tensor
) -> None:
    """Run all microbatches through this rank's stages; losses are all-reduced during the last backwards."""
    assert run.pipeline is not None
    run.scaler.scale(totals[:1])  # the scale exists on every rank, also where no loss appears
    reduced: list[CommHandle | None] = []

    def root(index: int, value: Any) -> torch.Tensor:
        return _backward_root(run, share, index, value, totals)

    run.replica.begin(piecewise=True)
    run.replica.shards.begin()
    run.pipeline.forward_backward(
        run, function, pieces, root, lambda: reduced.append(_start_loss_all_reduce(run, totals))
    )
    run.replica.finish()
    for handle in reduced:
        if handle is not None:
            handle.wait()


def _start_loss_all_reduce(run: Run, totals: torch.Tensor) -> CommHandle | None:
    """Start the all-reduce of losses, one non-finite flag per rank, and the experts' counts."""
    totals[2 + run.world.rank] = ~torch.isfinite(totals[0])
    if run.mixtures:
        copies = run.world.world_size // run.mesh.degree("stage")
        write_tallies(run.model, run.mixtures, totals[2 + run.world.world_size :], copies)
    run.noise.write(totals)
    return run.consistency.start_losses(run, totals)


def _backward_root(run: Run, share: BatchShare, index: int, value: Any, totals: torch.Tensor) -> torch.Tensor:
    """The tensor a microbatch's backward starts from: its loss, weighted for the global mean and scaled."""
    run.observer.loss(value)
    part = share.parts[index]
    loss = _weighted_part(value, part, run.mesh.degree("context"))
    run.noise.counted(loss.count)
    _accumulate_loss(totals, loss, part, run)
    own = share.batch_size * run.mesh.degree("space")  # ranks along space sum their gradients of one loss
    return run.scaler.scale(loss.total / (own / run.consistency.gradient_scale))


def _weighted_part(loss: Any, part: MicrobatchShare, sequence_parts: int) -> Weighted:
    """The loss of one part (or of its part of the sequences); one that only takes part in collectives is nothing."""
    weighted = as_weighted(loss, part.loaded / sequence_parts)
    if not weighted.total.requires_grad:
        raise ScriptError(
            "the loss does not depend on any parameter that requires a gradient; compute it from the model's output, "
            "outside torch.no_grad() and without .item() or .detach()"
        )
    return weighted if part.count else Weighted(weighted.total * 0.0, 0.0)


def _accumulate_loss(totals: torch.Tensor, loss: Weighted, part: MicrobatchShare, run: Run) -> None:
    """Add one part to (total, count)."""
    if part.count:
        count = loss.count.detach() if isinstance(loss.count, torch.Tensor) else loss.count
        totals[0].add_(loss.total.detach(), alpha=1 / run.copies)
        totals[1] += count / run.copies


def _step_result(run: Run, share: BatchShare, totals: list[float]) -> StepResult:
    total, count, flags = totals[0], totals[1], totals[2 : 2 + run.world.world_size]
    experts = read_tallies(run.mixtures, totals[2 + run.world.world_size :])
    run.noise.read(totals)
    step = run.progress.step + 1
    bad = [rank for rank, flag in enumerate(flags) if flag]
    if not bad and count <= 0:
        raise TrainingError(
            f"step {step}: the global batch has nothing to average over (the loss' count is {count}); leave out "
            "samples without a single token that counts"
        )
    loss = total / count if count > 0 else math.nan
    if bad and run.settings.on_nonfinite == "stop":
        run.statistics.restore()
        raise TrainingError(nonfinite_loss_message(loss, bad, step))
    return StepResult(loss=loss, samples=share.batch_size, count=count, finite=not bad, experts=experts)


def _finish_gradients(run: Run, factor: float) -> None:
    """Undo loss scaling, and turn a mean over samples into the mean the loss is over."""
    for optimizer in run.optimizers:
        if run.scaler.is_enabled():
            with run.replica.shards.whole_gradients(optimizer):
                run.scaler.unscale_(optimizer)
            found = run.scaler._found_inf_per_device(optimizer)
            if not found:  # nothing of this optimizer's has a gradient on this rank
                found[str(run.world.device)] = torch.zeros((), device=run.world.device)
            if (
                run.layout.shards or run.consistency.diverged
            ):  # ranks hold different gradients: one that overflows stops all
                for value in found.values():
                    with run.layout.channel("scalars").waiting(ring_all_reduce_nbytes(value, run.world.world_size)):
                        dist.all_reduce(value, dist.ReduceOp.MAX)
    if factor != 1.0:
        gradients = [p.grad for p in run.model.parameters() if p.grad is not None]  # those that optimizers step on
        if gradients:  # a stage may have nothing to train
            torch._foreach_mul_(gradients, factor)
