"""The check that a step's gradients are finite on all ranks.

If the loss or a gradient is not finite, no rank that steps with the same gradients makes the update.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from tutti.comm.point_to_point import ring_all_reduce_nbytes
from tutti.config.vocabulary import AxisName
from tutti.errors import TrainingError
from tutti.parallel.data.replicate import unchecked_gradients
from tutti.parallel.layout import to_local
from tutti.trainer.run_state import Run

_IDENTICAL_AXES: frozenset[AxisName] = frozenset(("replicate", "shard", "context"))
"""Axes along which all ranks get the same reduced gradients, bit for bit, as long as no parameter is sharded."""

_REMEDY = (
    "Lower the learning rate or clip gradients (Job(clip_norm=1.0)), check the batch (the mean of no rows is NaN), or "
    "skip such steps with Job(on_nonfinite='skip')"
)


def gradients_finite(run: Run) -> bool:
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
        raise TrainingError(_nonfinite_gradient_message(run))
    return finite


def nonfinite_loss_message(loss: float, nonfinite: list[int], step: int) -> str:
    """Return the error message for a loss that is not finite.

    Args:
        loss: the global loss.
        nonfinite: the ranks whose part of the loss is not finite.
        step: number of the step, from 1.
    """
    where = f"rank {nonfinite[0]}" if len(nonfinite) == 1 else f"ranks {', '.join(map(str, nonfinite))}"
    kind = _nonfinite_kind(loss != loss)
    return f"the loss is {kind} at step {step} on {where}; {_parameters_as_after(step - 1)}. {_REMEDY}"


def never_finite_message(run: Run) -> str:
    """Return the error message for gradients that are not finite at any loss scale. Collective."""
    scale, after = run.state.scaler.get_scale(), _parameters_as_after(run.state.progress.step)
    return (
        f"{_locate_nonfinite(run)}, at every loss scale down to {scale:.2g}, so every further step would be skipped; "
        f"{after}. Check the model and the loss, lower the "
        'learning rate, or use precision = "bfloat16", which needs no loss scale'
    )


def _nonfinite_gradient_message(run: Run) -> str:
    """Return the error message for gradients that are not finite. Collective, unless this rank skips by itself."""
    compression = run.parallel.plan.sync.gradient_code
    too_large = (
        "float16 cannot represent sums above 65504: compress gradients to bfloat16 instead. "
        if compression is not None and compression.method == "float16"
        else ""
    )
    return f"{_locate_nonfinite(run)}; {_parameters_as_after(run.state.progress.step)}. {too_large}{_REMEDY}"


def _locate_nonfinite(run: Run) -> str:
    """Name the gradient that is not finite, its step and rank. Collective, unless this rank skips by itself."""
    first, step = _first_nonfinite(run), run.state.progress.step + 1
    ranks = (
        [(run.parallel.world.rank, first)]
        if _skips_independently(run)
        else [*enumerate(run.parallel.world.gather(first))]
    )
    nonfinite = [(rank, *location) for rank, location in ranks if location is not None]
    rank, name, is_nan = nonfinite[0]
    where = f" on rank {rank}" if _skips_independently(run) or len(nonfinite) < run.parallel.world.world_size else ""
    return f"the loss is finite, but the gradient of {name} is {_nonfinite_kind(is_nan)} at step {step}{where}"


def _nonfinite_kind(is_nan: bool) -> str:
    return "NaN" if is_nan else "infinite"


def _parameters_as_after(step: int) -> str:
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
    kinds = {(value.device, value.dtype) for value in sums}
    stacked = (torch.stack([value for value in sums if (value.device, value.dtype) == kind]) for kind in kinds)
    return all(bool(values.isfinite().all()) for values in stacked)


def _first_nonfinite(run: Run) -> tuple[str, bool] | None:
    """Return the first parameter whose gradient is not finite on this rank, and whether that gradient has a NaN."""
    for name, parameter in run.parallel.model.named_parameters():
        if parameter.grad is not None:
            values = _gradient_values(parameter.grad)
            if not bool(values.isfinite().all()):
                return name, bool(values.isnan().any())
    return None


def _gradient_values(gradient: torch.Tensor) -> torch.Tensor:
    part = to_local(gradient).detach()
    return part.coalesce().values() if part.is_sparse else part
