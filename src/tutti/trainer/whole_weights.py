"""Whole weights out of a divided model: for saving, exporting, generating, averaging and evaluating by hand."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tutti.errors import ScriptError
from tutti.trainer.run_state import Run


@contextmanager
def whole_model(
    run: Run, device: torch.device | None = None, *, keep: bool = True, edits: bool = False
) -> Iterator[nn.Module]:
    """Let the model hold whole tensors, and compute on each rank as one device does. Collective.

    Args:
        run: the run.
        device: where tensors are gathered; None: where this rank computes.
        keep: whether this rank needs the model.
        edits: see `WholeModel.in_place`.
    """
    parallel = run.parallel
    parallel.replica.shards.rest()
    with (
        run.state.consistency.averaged_model(parallel),
        parallel.whole.in_place(device or parallel.world.device, keep=keep, edits=edits),
    ):
        yield parallel.model


def whole_state(run: Run, *, main_only: bool) -> dict[str, Any]:
    """Return the model's state_dict as one device would have it, on the CPU. Collective.

    Args:
        run: the run.
        main_only: give ranks other than 0 an empty one.
    """
    keep = run.parallel.world.is_main or not main_only
    with whole_model(run, torch.device("cpu"), keep=keep) as model:
        return on_cpu(model.state_dict()) if keep else OrderedDict()


def on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    """Copy a state_dict to the CPU; names that are one tensor stay one tensor."""
    copies: dict[Any, torch.Tensor] = {}
    result: dict[str, Any] = OrderedDict()
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            key = (value.data_ptr() if value.numel() else name, value.shape, value.stride(), value.dtype)
            if key not in copies:
                copies[key] = value.detach().to("cpu", copy=True)
            value = copies[key]
        result[name] = value
    if hasattr(state, "_metadata"):
        result._metadata = state._metadata  # type: ignore[attr-defined]
    return result


def save_pretrained(run: Run, folder: Path, options: dict[str, Any]) -> None:
    """Call the model's own `save_pretrained` on rank 0, with whole weights. Collective.

    Raises:
        ScriptError: on all ranks, if the model has no such method or it fails.
    """
    world, failure = run.parallel.world, None
    if not callable(getattr(run.parallel.model, "save_pretrained", None)):
        kind = type(run.parallel.model).__name__
        raise ScriptError(
            f"{kind} has no save_pretrained; write `state = job.state_dict()` on every rank, and torch.save(state, "
            "file) where job.is_main"
        )
    with whole_model(run, torch.device("cpu"), keep=world.is_main) as model:
        try:
            if world.is_main:
                model.save_pretrained(folder, **options)  # type: ignore[operator]
        except Exception as error:
            failure = f"save_pretrained failed on rank 0: {type(error).__name__}: {str(error).splitlines()[:1]}"
    failure = world.broadcast(failure)
    if failure is not None:
        raise ScriptError(failure)
