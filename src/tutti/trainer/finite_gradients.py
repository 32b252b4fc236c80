"""The check that a step's gradients are finite on all ranks.

If the loss or a gradient is not finite, no rank that steps with the same gradients makes the update.
"""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist

from tutti.comm.point_to_point import ring_all_reduce_nbytes
from tutti.config.vocabulary import AxisName
from tutti.errors import TrainingError
from tutti.parallel.data.replicate import unchecked_gradients
from tutti.parallel.layout import to_local
from tutti.trainer.deferred_results import DeviceOutcome
from tutti.trainer.nonfinite_origin import find_origins, named_samples
from tutti.trainer.run_state import Run
from tutti.trainer.step_message import StepMessage

_IDENTICAL_AXES: frozenset[AxisName] = frozenset(("replicate", "shard", "context"))
"""Axes along which all ranks get the same reduced gradients, bit for bit, as long as no parameter is sharded."""

REMEDY = (
    "Lower the learning rate or clip gradients (Job(clip_norm=1.0)), check the batch (the mean of no rows is NaN), or "
    "skip such steps with Job(on_nonfinite='skip')"
)


_MOST_SAID = 5
"""Skipped steps that the terminal names."""


def gradients_finite(run: Run, message: StepMessage) -> bool:
    """Return whether the reduced gradients are finite. Ranks that step together get the same answer.

    A replica that may skip updates by itself checks only its own gradients. Under loss scaling the scaler finds
    gradients that are not finite. They are then checked here only if gradients are compressed, because the compressor
    must know; otherwise the result is True.

    Raises:
        TrainingError: gradients are not finite and the Job says on_nonfinite = "stop"; never under loss scaling.
    """
    loss_scaling = run.state.scaler.is_enabled()
    if loss_scaling and run.parallel.replica.compressor is None:
        return True
    # Ranks that reduce in shared memory have checked their slices while these were in the cache. That takes 0.6 to
    # 0.9 ms of a 70 ms step (MLP of 10 M parameters, 2 ranks); checking all buckets again would take 1.4 ms.
    finite = _sums_finite(unchecked_gradients(run.parallel.replica)) or _first_nonfinite(run) is None
    if run.parallel.world.world_size > 1 and not (_skips_independently(run) or _gradients_identical(run)):
        flag = torch.tensor(float(not finite), device=run.parallel.world.device)
        with run.parallel.layout.channel("scalars").waiting(
            ring_all_reduce_nbytes(flag, run.parallel.world.world_size)
        ):
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        finite = not float(flag)
    if not finite and not loss_scaling and run.settings.on_nonfinite == "stop":
        run.loop.statistics.restore()
        raise TrainingError(_gradient_message(run, _first_nonfinite(run), message))
    if not finite and not loss_scaling and not _skips_independently(run):
        located = run.loop.guard.may_locate()
        note_skipped(run, message.place.step, _locate_nonfinite(run, _first_nonfinite(run), message, search=located))
    return finite


def find_nonfinite_on_device(run: Run) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Check the reduced gradients without waiting for the device.

    Under loss scaling the scaler finds gradients that are not finite, and they are not looked at here.

    Returns:
        0-d float32, 1 if a gradient is not finite, the same on all ranks that step together; then, (3,), whether this
        rank has one, the position of the first among the names, and whether it has a NaN; and the gradients' names.
    """
    device = run.parallel.world.device
    named = [(name, parameter.grad) for name, parameter in run.parallel.model.named_parameters()]
    gradients = {name: _values_on_device(gradient) for name, gradient in named if gradient is not None}
    found, place = torch.zeros((), device=device), torch.zeros(3, device=device)
    if run.state.scaler.is_enabled():
        return found, place, []
    kinds: dict[torch.dtype, list[str]] = {}
    for name, gradient in gradients.items():
        if gradient.numel():
            kinds.setdefault(gradient.dtype, []).append(name)
    names = [name for kind in kinds.values() for name in kind]
    if names:
        largest = torch.cat([_largest([gradients[name] for name in kind]) for kind in kinds.values()])
        bad = ~largest.isfinite()
        first = bad.to(torch.uint8).argmax(0, keepdim=True)
        found = bad.any().float()
        place = torch.cat([found.reshape(1), first.float(), largest.isnan().gather(0, first).float()])
    if run.parallel.world.world_size > 1 and not _gradients_identical(run):
        with run.parallel.layout.channel("scalars").waiting(
            ring_all_reduce_nbytes(found, run.parallel.world.world_size)
        ):
            dist.all_reduce(found, dist.ReduceOp.MAX)
    return found, place, names


def _largest(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The largest magnitude of each gradient, (n,), in one pass over memory; gradients are of one type."""
    return torch.stack(list(torch._foreach_norm(gradients, math.inf))).double()


def _values_on_device(gradient: torch.Tensor) -> torch.Tensor:
    """The values of a gradient; of a sparse one those that are stored, since to add them up waits for the device."""
    part = to_local(gradient).detach()
    return part._values() if part.is_sparse else part


def nonfinite_gradient_message(run: Run, outcome: DeviceOutcome) -> str:
    """Return the error message for gradients that the device has found not to be finite. Collective.

    Args:
        run: the run.
        outcome: of the step in which they were found.
    """
    found, position, is_nan = outcome.totals.read()[-3:]
    return _gradient_message(run, (outcome.names[round(position)], bool(is_nan)) if found else None, outcome.message)


def never_finite_message(run: Run) -> str:
    """Return the error message for gradients that are not finite at any loss scale. Collective."""
    scale, after = run.state.scaler.get_scale(), parameters_as_after(run.state.progress.step)
    where = _locate_nonfinite(run, _first_nonfinite(run), run.state.progress.step + 1, search=False)
    return (
        f"{where}, at every loss scale down to {scale:.2g}, so every further step would be skipped; "
        f"{after}. Check the model and the loss, lower the "
        'learning rate, or use precision = "bfloat16", which needs no loss scale'
    )


def _gradient_message(run: Run, first: tuple[str, bool] | None, message: StepMessage) -> str:
    """Return the error message for gradients that are not finite. Collective, unless this rank skips by itself.

    Args:
        run: the run.
        first: this rank's first such gradient, and whether it has a NaN.
        message: of the step.
    """
    compression = run.parallel.plan.sync.gradient_code
    too_large = (
        "float16 cannot represent sums above 65504: compress gradients to bfloat16 instead. "
        if compression is not None and compression.method == "float16"
        else ""
    )
    where = _locate_nonfinite(run, first, message, search=True)
    return f"{where}; {parameters_as_after(message.place.step - 1)}. {too_large}{REMEDY}"


def _locate_nonfinite(run: Run, first: tuple[str, bool] | None, where: StepMessage | int, *, search: bool) -> str:
    """Name the gradient that is not finite, its step and rank. Collective, unless this rank skips by itself.

    Args:
        run: the run.
        first: this rank's first such gradient, and whether it has a NaN.
        where: the message of the step, or its number.
        search: whether to compute the batch again, to name the module in which it arises.
    """
    step = where if isinstance(where, int) else where.place.step
    ranks = (
        [(run.parallel.world.rank, first)]
        if _skips_independently(run)
        else [*enumerate(run.parallel.world.gather(first))]
    )
    nonfinite = [(rank, *location) for rank, location in ranks if location is not None]
    if not nonfinite:  # under loss scaling, where an accelerator's gradients are those of the next batch by now
        return f"the loss is finite, but a gradient is not finite at step {step}"
    rank, name, is_nan = nonfinite[0]
    on_some = _skips_independently(run) or len(nonfinite) < run.parallel.world.world_size
    origin = ""
    if search and isinstance(where, StepMessage) and not _skips_independently(run):
        origins = find_origins(run, where, of_gradients=True)
        found = next((number for number, each in enumerate(origins) if each.words), None)
        if found is not None:  # the reduction has spread it over all ranks
            rank, on_some = found, run.parallel.world.world_size > 1
            samples = origins[found].samples or where.samples_of(found)
            origin = f"; {origins[found].words}" + (f"; samples: {named_samples(samples)}" if samples else "")
    on_rank = f" on rank {rank}" if on_some else ""
    return f"the loss is finite, but the gradient of {name} is {nonfinite_kind(is_nan)} at step {step}{on_rank}{origin}"


def note_skipped(run: Run, step: int, sentence: str) -> None:
    """Note that all ranks skip a step: the report says which, and why; the terminal has the first ones."""
    guard = run.loop.guard
    guard.skipped += 1
    guard.rolls_back = run.settings.on_nonfinite == "rollback"
    said = f"step {step} is skipped: {sentence}"
    if guard.skipped <= _MOST_SAID:
        run.output.screen.say(f"warning: {said}")
    if guard.skipped == _MOST_SAID:
        run.output.screen.say("warning: the report lists further steps that are skipped")
    run.output.log.row("skipped", run.loop.clock.elapsed_s(), step=step, sentence=said)


def nonfinite_kind(is_nan: bool) -> str:
    return "NaN" if is_nan else "infinite"


def parameters_as_after(step: int) -> str:
    return f"parameters are as they were after step {step}"


def _skips_independently(run: Run) -> bool:
    """Return whether this rank skips an update by itself. Telling the other ranks would cost a wait in every step."""
    return run.state.consistency.diverged and not run.state.consistency.skip_together


def _gradients_identical(run: Run) -> bool:
    """Return whether all ranks hold the same gradients, so that each reaches the same answer without communication.

    Gradients computed from factors do not count as the same, because each rank multiplies the factors itself.
    """
    other_axes = [axis for axis in run.parallel.mesh.degrees if axis not in _IDENTICAL_AXES]
    unsharded = not run.parallel.layout.shards and run.parallel.mesh.degree(*other_axes) == 1
    return unsharded and not run.state.consistency.diverged and not run.parallel.replica.factored.weights


def _sums_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether the sum of each tensor is finite. This reads memory once.

    The result is False if a value is not finite, and possibly if finite values are so large that their sum overflows.
    """
    gradients = [_gradient_values(tensor) for tensor in tensors]
    if any(gradient.is_cuda for gradient in gradients):  # one kernel launch for many tensors
        sums = list(torch._foreach_norm(gradients))
    else:
        sums = [
            torch.sum(gradient, dtype=torch.float32) if gradient.itemsize < 4 else gradient.sum()
            for gradient in gradients
        ]
    kinds = dict.fromkeys((value.device, value.dtype) for value in sums)
    if len(kinds) == 1:
        return bool(torch.stack(sums).sum().isfinite())
    stacked = (torch.stack([value for value in sums if (value.device, value.dtype) == kind]) for kind in kinds)
    return all(bool(values.sum().isfinite()) for values in stacked)


def _first_nonfinite(run: Run) -> tuple[str, bool] | None:
    """Return the first parameter whose gradient is not finite on this rank, and whether that gradient has a NaN."""
    for name, parameter in run.parallel.model.named_parameters():
        if parameter.grad is not None:
            values = _gradient_values(parameter.grad)
            if not bool(values.isfinite().all()):
                return name, bool(values.isnan().any())
    return None


def _gradient_values(gradient: torch.Tensor) -> torch.Tensor:
    if type(gradient) is torch.Tensor and gradient.layout is torch.strided and not gradient.requires_grad:
        return gradient
    part = to_local(gradient).detach()
    return part.coalesce().values() if part.is_sparse else part
