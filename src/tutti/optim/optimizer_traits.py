"""How an optimizer treats its parameters: element by element, tensor by tensor, or all together.

Ranks that hold parts of tensors need the first, ranks that hold some of the tensors the second. It is tried out: fresh
optimizers of the same kind and settings make some steps on a small matrix and on its halves.
"""

import copy
import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from tutti.errors import PlanError
from tutti.optim.large_batch import LAMB, NormScaledOptimizer
from tutti.optim.schedules import required_arguments

Rows = tuple[int, int]
"""(start, stop): rows of the small matrix that one parameter holds."""

_ONE_TENSOR: list[list[Rows]] = [[(0, 6)]]
_TWO_TENSORS: list[list[Rows]] = [[(0, 3), (3, 6)]]
_TWO_OPTIMIZERS: list[list[Rows]] = [[(0, 3)], [(3, 6)]]
"""The rows of each parameter, for each optimizer."""


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether an optimizer treats elements one by one, so that ranks may update parts of tensors.

    An optimizer that cannot be tried out counts as not elementwise.
    """
    # SparseAdam takes sparse gradients only, and updates the rows that they name
    return type(optimizer) is SparseAdam or _same(optimizer, _ONE_TENSOR, _TWO_OPTIMIZERS, torch.equal)


def is_by_norms(optimizer: Optimizer) -> bool:
    """Whether an optimizer can update parts of parameters once it is told the norms of whole tensors.

    A subclass of NormScaledOptimizer may need whole parameters all the same.
    """
    if not isinstance(optimizer, NormScaledOptimizer):
        return False
    # the squares of parts add up in another order, so results are only nearly equal
    return _same(
        optimizer, _ONE_TENSOR, _TWO_TENSORS, lambda a, b: torch.allclose(a, b, rtol=1e-10, atol=1e-12), told=True
    )


def is_by_tensor(optimizer: Optimizer) -> bool:
    """Whether an optimizer treats tensors one by one, so that ranks may update some of them each."""
    return _same(optimizer, _TWO_TENSORS, _TWO_OPTIMIZERS, torch.equal)


def check_takes_parts(optimizer: Optimizer, divided: str = "sharding levels 2 and 3", remedy: str = "") -> None:
    """Check that an optimizer can update parts of parameters.

    Args:
        optimizer: the optimizer.
        divided: what divides its parameters.
        remedy: what else the user may do, ending in a comma.

    Raises:
        PlanError: it needs whole parameters (row means, factors, norms of its own).
    """
    if not is_elementwise(optimizer) and not is_by_norms(optimizer):
        raise PlanError(
            f"{type(optimizer).__name__} does not treat the elements of a parameter one by one, so it cannot update "
            f"the parts of parameters that {divided} give a rank; use "
            + (remedy or "sharding level 1, which gives every rank whole parameters to update,")
            + " an elementwise optimizer such as AdamW or SGD, or one from tutti.optim.large_batch"
        )


def check_takes_tensors(optimizer: Optimizer, divided: str) -> None:
    """Check that an optimizer can update some of its parameters on each rank.

    Args:
        optimizer: the optimizer.
        divided: what divides its parameters among ranks.

    Raises:
        PlanError: its update of a parameter depends on the others (a global norm, a line search).
    """
    if not is_by_norms(optimizer) and not is_elementwise(optimizer) and not is_by_tensor(optimizer):
        raise PlanError(
            f"{type(optimizer).__name__} is not known to treat parameters one by one, and {divided} gives a rank only "
            "some of them; use replicas only, or an optimizer such as AdamW or SGD"
        )


def check_updates_on_host(optimizer: Optimizer) -> None:
    """Check that an optimizer can update parameters that lie in the host's memory.

    Raises:
        PlanError: it was asked to run as a CUDA graph.
    """
    if any(group.get("capturable") for group in optimizer.param_groups):
        raise PlanError(
            f"{type(optimizer).__name__}(capturable=True) runs on the device, but sharding.offload keeps its state on "
            "the host; leave capturable out, or use offload = none"
        )


def check_steps_in_turn(optimizer: Optimizer) -> None:
    """Check that an optimizer may update its parameters some at a time, by `stepping_only`.

    Raises:
        PlanError: its update of a parameter depends on the others, or on how often it was called.
    """
    exchanges = isinstance(optimizer, NormScaledOptimizer) and optimizer.over_parts is not None
    if exchanges or not _same(optimizer, _TWO_TENSORS, _TWO_TENSORS, torch.equal, in_turn=True):
        raise PlanError(
            f"{type(optimizer).__name__} is not known to update parameters one by one, but sharding.offload_device = "
            "nvme has the state of only some of them in memory at once; use an optimizer such as AdamW or SGD, or "
            "offload_device = cpu"
        )


@contextmanager
def stepping_only(
    optimizer: Optimizer, chosen: Collection[nn.Parameter], settings: list[dict[str, Any]]
) -> Iterator[None]:
    """Within the context, an optimizer holds only some of its parameters, with the settings of its groups as given.

    Args:
        optimizer: the optimizer.
        chosen: the parameters to keep.
        settings: of each group, what `group_settings` returned before the update. Calls of one update start from the
            same, so that a counter in them counts updates.
    """
    groups = optimizer.param_groups
    whole = [group["params"] for group in groups]
    for group, before in zip(groups, settings, strict=True):
        group["params"] = [parameter for parameter in group["params"] if parameter in chosen]
        if group["params"]:  # the others keep what an earlier call of this update has counted
            for key in group.keys() - before.keys() - {"params"}:
                del group[key]
            group.update(before)
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        optimizer.param_groups = groups
        for group, params in zip(groups, whole, strict=True):
            group["params"] = params


def group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return a copy of what each group of an optimizer says beside its parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def unhooked_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """Return the function that updates an optimizer's parameters without calling the hooks on `step`."""
    step = type(optimizer).step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def state_values_per_parameter(optimizer: Optimizer) -> float:
    """Return how many values an optimizer keeps for each value of a parameter; 0 where that cannot be tried out."""
    try:
        settings = _distinct_settings(optimizer)
        parameters = [nn.Parameter(torch.ones(6, 4, dtype=torch.float64)) for _ in settings]
        most = 0
        for parameter, of_group in zip(parameters, settings, strict=True):
            fresh, parameter.grad = _fresh(optimizer, of_group, [parameter]), torch.ones_like(parameter)
            fresh.step()
            kept = [value for value in fresh.state[parameter].values() if isinstance(value, Tensor) and value.dim()]
            most = max(most, sum(value.numel() * value.itemsize for value in kept))
        return most / (24 * torch.float64.itemsize)
    except Exception:  # the optimizer cannot be tried out
        return 0.0


def check_needs_no_closure(optimizer: Optimizer) -> None:
    """Check that `step` works on the gradients that it finds.

    Raises:
        PlanError: `step` evaluates the model itself, as LBFGS does.
    """
    needed = [name for name in required_arguments(type(optimizer).step) if name != "self"]  # schedulers wrap `step`
    if not needed and not type(optimizer).__module__.startswith(("torch.", "tutti.")):
        needed = ["closure"] if "closure" in (_failure(optimizer) or "").lower() else []
    if needed:
        raise PlanError(
            f"{type(optimizer).__name__}.step needs {', '.join(needed)} to evaluate the model again, which a step over "
            "ranks does not give; use an optimizer that steps on the gradients of one backward, such as AdamW or SGD"
        )


def _same(
    optimizer: Optimizer,
    one: list[list[Rows]],
    other: list[list[Rows]],
    equal: Callable[[Tensor, Tensor], bool],
    *,
    told: bool = False,
    in_turn: bool = False,
) -> bool:
    """Whether the matrix ends the same with both divisions, for the settings of every parameter group."""
    try:
        return all(
            equal(_trained(optimizer, settings, one, told), _trained(optimizer, settings, other, told, in_turn))
            for settings in _distinct_settings(optimizer)
        )
    except Exception:  # the optimizer cannot be tried out
        return False


def _failure(optimizer: Optimizer) -> str | None:
    """Return what the optimizer says when it steps without a closure; None where it steps."""
    try:
        for settings in _distinct_settings(optimizer):
            _trained(optimizer, settings, _ONE_TENSOR, told=False)
    except Exception as error:
        return str(error)
    return None


def _distinct_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings of the parameter groups, without those that differ in no more than positive numbers."""
    distinct: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names", "initial_lr")}
        if "lr" in settings:  # a scheduler that warms up begins at 0, where every optimizer is elementwise
            settings["lr"] = float(group.get("initial_lr", group["lr"])) or 0.01
        kinds = {key: value > 0 if isinstance(value, float | Tensor) else value for key, value in settings.items()}
        distinct.setdefault(repr(sorted(kinds.items(), key=lambda item: item[0])), settings)
    return list(distinct.values())


def _trained(
    optimizer: Optimizer, settings: dict[str, Any], division: list[list[Rows]], told: bool, in_turn: bool = False
) -> Tensor:
    """Return the small matrix after some steps; each entry of `division` is one optimizer's parameters.

    Args:
        in_turn: each parameter is updated by a call of its own.
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 4, dtype=torch.float64, generator=generator)
    gradients = torch.randn(3, 6, 4, dtype=torch.float64, generator=generator)
    results: dict[Rows, nn.Parameter] = {}
    for rows in division:
        parts = [nn.Parameter(start[low:high].clone()) for low, high in rows]
        fresh = _fresh(optimizer, settings, parts)
        if told and isinstance(fresh, NormScaledOptimizer):
            fresh.over_parts = _of_all_parts
        if told and isinstance(fresh, LAMB):
            fresh.global_norm = _global_norm
        for gradient in gradients:
            for part, (low, high) in zip(parts, rows, strict=True):
                part.grad = gradient[low:high].clone()
            if not in_turn:
                fresh.step()
                continue
            step, before = unhooked_step(fresh), group_settings(fresh)
            for part in parts:
                with stepping_only(fresh, {part}, before):
                    step(fresh)
        results.update(zip(rows, parts, strict=True))
    return torch.cat([results[rows].detach() for rows in sorted(results)])


def _fresh(optimizer: Optimizer, settings: dict[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    """Return an optimizer of the same kind and settings for other parameters."""
    kind = type(optimizer)
    known = set(inspect.signature(kind.__init__).parameters) - {"self", "params"}
    arguments = {key: value for key, value in {**optimizer.defaults, **settings}.items() if key in known}
    if isinstance(optimizer, LAMB) and "normalise" in known:
        arguments["normalise"] = optimizer.normalise
    try:
        fresh = kind(parameters, **copy.deepcopy(arguments))
    except Exception:  # its constructor takes something else than the settings of its groups
        fresh = _twin(optimizer, settings, parameters)
    if callable(train := getattr(fresh, "train", None)):  # schedule-free optimizers step in train mode only
        train()
    return fresh


def _twin(optimizer: Optimizer, settings: dict[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    """Return a copy of an optimizer, without its state, that holds other parameters."""
    own = {key: value for key, value in vars(optimizer).items() if key not in ("state", "param_groups")}
    plain = {key: value for key, value in own.items() if not callable(value) and not key.endswith("_hooks")}
    hooks = {key: OrderedDict[int, Any]() for key in own if key.endswith("_hooks")}
    twin = object.__new__(type(optimizer))
    groups = [{**copy.deepcopy(settings), "params": parameters}]
    vars(twin).update(copy.deepcopy(plain), state=defaultdict(dict), param_groups=groups, **hooks)
    return twin


def _of_all_parts(squares: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
    """large_batch.OverParts where all parameters are parts of one tensor."""
    parts = len(set(parameters))
    return squares.view(-1, parts).sum(1).repeat_interleave(parts)


def _global_norm(parameters: Sequence[nn.Parameter]) -> float:
    """See large_batch.GlobalNorm."""
    return math.sqrt(sum(float(p.grad.square().sum()) for p in parameters if p.grad is not None))
