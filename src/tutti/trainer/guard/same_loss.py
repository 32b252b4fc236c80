"""Finds forwards and losses that depend on the rank: rank 0's samples have one loss on all ranks.

All ranks compute a few samples of rank 0 with the same random draws and the running statistics of norms. If losses
differ, they are computed again: what each module returns then shows the first one that differs.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from tutti.comm.devices import device_name
from tutti.comm.value_codec import decode, encode
from tutti.data.batches import BatchShare
from tutti.data.microbatches import split_batch
from tutti.errors import SpecError
from tutti.nn.mixture import take_tallies
from tutti.parallel.data.batch_state import exchanges_state
from tutti.trainer.guard.findings import LossFunction, loss_again
from tutti.trainer.run_state import Run

SHARED_SAMPLES = 4
"""Samples that all ranks compute."""

SHARED_NBYTES = 2**26
"""Samples that are larger than this are not sent to all ranks."""

_SEED = 1
_FINE, _COARSE = 2e-5, 1e-2
"""Relative differences of one computation on two ranks that rounding explains, in 32 bits and in 16 or on two GPUs."""

Values = list[tuple[str, bool, float]]
"""In the order of calls: the name of a module, whether it returns, and the sum of what it got or returned."""


LOSS = "the loss function"


def depends_on_rank(run: Run, loss: LossFunction, piece: Any, share: BatchShare) -> tuple[str, str] | None:
    """Return what depends on the rank, and a sentence, if ranks compute other losses of the same samples. Collective.

    Args:
        run: the run; each rank can compute its model by itself.
        loss: (model, batch) -> loss.
        piece: this rank's first microbatch.
        share: this rank's share of the global batch.
    """
    sent = _samples_sent(run, piece, share.parts[0].count)
    if sent is None:
        return None
    samples = sent[1], share.batch_size
    outcome = _outcome(run, loss, sent[0], samples)
    found: list[tuple[float | None, str]] = run.loop.watch.gather("same loss", (outcome, _processor(run)))
    everyone = [number for number, _ in found]
    tolerance = _tolerance(run.parallel.model, {processor for _, processor in found})
    numbers = [number for number in everyone if number is not None]
    rank = next((n for n, number in enumerate(numbers) if not _agree(numbers[0], number, tolerance)), None)
    if len(numbers) < len(everyone) or rank is None:
        return None
    values: Values = []
    with _noting_values(run.parallel.model, values):
        again = _outcome(run, loss, sent[0], samples)
    repeated: list[tuple[float | None, Values]] = run.loop.watch.gather("values of modules", (again, values))
    if [number for number, _ in repeated] != everyone:
        return None  # the script draws from generators of its own
    where = _first_difference(run.parallel.model, repeated[0][1], repeated[rank][1], tolerance)
    return where, (
        f"{where} depends on the rank: the same {sent[1]} samples with the same random draws have the loss "
        f"{numbers[0]:.6g} on rank 0 and {numbers[rank]:.6g} on rank {rank}, so ranks do not train one model; let "
        "forward, the loss and their settings (smoothing, class weights, precision) depend on the samples only"
    )


def _samples_sent(run: Run, piece: Any, count: int) -> tuple[Any, int] | None:
    """Return a few samples of rank 0 and their number; None if they cannot be sent. Collective."""
    sent = None
    if run.parallel.world.is_main and count:
        samples = min(count, SHARED_SAMPLES)
        try:
            few = piece if count == samples else split_batch(piece, [samples, count - samples])[0]
            sent = encode((few, samples))
        except Exception:  # batches of the script's own classes
            sent = None
        if sent is not None and len(sent) > SHARED_NBYTES:
            sent = None
    sent = run.parallel.world.broadcast(sent)
    try:
        read: tuple[Any, int] | None = None if sent is None else decode(sent)
    except SpecError:
        read = None
    return read if all(run.loop.watch.gather("samples read", read is not None)) else None


def _outcome(run: Run, loss: LossFunction, batch: Any, samples: tuple[int, int]) -> float | None:
    """The loss of the samples; None if the script's code cannot compute it, or it is not finite."""
    modules = run.parallel.model.modules()
    exchanges = any(exchanges_state(module) and not isinstance(module, _BatchNorm) for module in modules)
    try:
        total, count = loss_again(run, loss, batch, samples, _SEED, _all_modules if exchanges else _norms)
    except Exception:  # the script's own code, on other samples than this rank's
        return None
    finally:
        take_tallies(run.parallel.model)
    return total / count if count and math.isfinite(total / count) else None


def _all_modules(module: nn.Module) -> bool:
    return True


def _norms(module: nn.Module) -> bool:
    return isinstance(module, _NormBase)


def _processor(run: Run) -> str:
    device = run.parallel.world.device
    return device.type if device.type == "cpu" else device_name(device)


def _tolerance(model: nn.Module, processors: set[str]) -> float:
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    # On GPUs, each rank may choose other algorithms, and convolutions and products may be in tf32.
    fine = kinds <= {torch.float32, torch.float64} and len(processors) == 1
    return _FINE if fine and processors == {"cpu"} else _COARSE


def _agree(one: float, other: float, tolerance: float) -> bool:
    return abs(one - other) <= tolerance * max(abs(one), abs(other), 1e-3)


@contextmanager
def _noting_values(model: nn.Module, values: Values) -> Iterator[None]:
    """Within the context, note the sum of what each module gets and returns."""
    names = {module: name for name, module in model.named_modules()}

    def note(module: nn.Module, value: Any, *, returns: bool) -> None:
        if module in names:
            tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            total = sum(float(tensor.detach().double().sum()) for tensor in tensors if tensor.is_floating_point())
            values.append((names[module], returns, total))

    handles = [
        register_module_forward_pre_hook(lambda module, args: note(module, args, returns=False)),
        register_module_forward_hook(lambda module, args, output: note(module, output, returns=True)),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first_difference(model: nn.Module, expected: Values, actual: Values, tolerance: float) -> str:
    """What computes something else on another rank than on rank 0, as the subject of a sentence."""
    for (name, returns, one), (*other_call, other) in zip(expected, actual, strict=False):
        if other_call != [name, returns]:
            return f"which modules the forward of {type(model).__name__} calls"
        if not _agree(one, other, tolerance):
            caller = name if returns else name.rpartition(".")[0]
            kind = type(model.get_submodule(caller)).__name__
            where = "" if returns else f", before it calls {name!r},"
            return f"the forward of {f'module {caller!r} ({kind})' if caller else kind}{where}"
    return LOSS
