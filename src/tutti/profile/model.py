"""`nn.Module` -> ModelSpec: parameters, FLOPs, activations and optimizer state of every module, for one sample.

One training step is traced on the meta device at two batch sizes. What grows between them is the cost of a sample; what
does not (weights read once a pass, tables, constants) is the cost of a pass. Nothing is computed and nothing of the
model's size is allocated.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from tutti.config.model import ModelSpec, ModuleSpec, OpCost, Passing
from tutti.profile.batches import Batch, dtype_name
from tutti.profile.ledger import Ledger, Line
from tutti.profile.meta import meta_copy
from tutti.profile.state import optimizer_state
from tutti.profile.trace import Tracer, first_line

Loss = Callable[[Any, Any], Any]


def describe_model(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: Any,
    loss: Loss,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    samples: int,
    name: str | None = None,
    tokens_per_sample: int = 0,
    dataset_samples: int | None = None,
) -> ModelSpec:
    """What `loss(model(*args, **kwargs), target)`, its backward and the optimizer's step cost, without running them.

    `args`, `kwargs`, `target` are one collated batch of `samples` samples (4 is a good number: the costs of a sample
    are found by comparing the whole batch with its first half; with 1 they are simply divided). `model` is left as it
    is. Where the model cannot be traced, the result has parameters only, and says in `untraced` and in a note which
    module, or that the loss function, failed and why.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    notes: dict[str, None] = {}
    batch = Batch(args=tuple(args), kwargs=dict(kwargs), target=target, samples=samples)
    lazy = [path for path, parameter in model.named_parameters() if is_lazy(parameter)]
    untraced = f"{', '.join(lazy)}: without shape until the model is called once" if lazy else ""
    traced = _NOTHING
    if not lazy:
        try:
            traced = _trace(model, batch, loss, notes)
        except Exception as error:  # the model's code may raise anything where values are missing
            where = _module_at(error.__traceback__, model, loss)
            untraced = f"{where} could not be traced on shapes alone: {first_line(error)}"
    if untraced:
        notes[f"{untraced}; only {'other ' if lazy else ''}parameters are counted"] = None
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    states = optimizer_state(optimizers, lambda text: notes.setdefault(text))
    modules = _modules(model, traced, states)
    unused = [module.name for module in modules if module.parameters and module.name not in traced.order]
    if traced.order and unused:
        notes[f"never used in the forward pass: {', '.join(unused)}"] = None
    return ModelSpec(
        name=name or type(model).__name__,
        modules=modules,
        inputs=batch.inputs(model),
        dtype=_dtype(model),
        optimizer=", ".join(type(each).__name__ for each in optimizers),
        tokens_per_sample=tokens_per_sample,
        dataset_samples=dataset_samples,
        evidence="predicted",
        notes=tuple(notes),
        untraced=untraced,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traced:
    """Costs of one sample by module; empty where the model could not be traced."""

    ops: dict[str, list[OpCost]]
    activations: dict[str, float]
    outputs: dict[str, float]
    passes_on: dict[str, tuple[Passing, ...]]
    kept_after: dict[str, tuple[tuple[str, float], ...]]
    order: dict[str, int]
    batch_statistics: set[str]


_NOTHING = _Traced(ops={}, activations={}, outputs={}, passes_on={}, kept_after={}, order={}, batch_statistics=set())


def _trace(model: nn.Module, batch: Batch, loss: Loss, notes: dict[str, None]) -> _Traced:
    """Trace the batch and its half; notes say what was assumed. Raises what the batch's code raises."""
    whole = _step(model, batch, loss)
    half_batch = batch.half
    half: Ledger | None = None
    if half_batch is not None:
        try:
            half = _step(model, half_batch, loss)
        except Exception as error:
            notes[f"half a batch could not be traced ({first_line(error)})"] = None
    if half is None:
        notes["costs of a sample are those of a batch divided by its samples: costs of a pass are in them"] = None
    notes.update(whole.notes)
    return _per_sample(whole, batch.samples, half, half_batch.samples if half_batch else 0)


def _step(model: nn.Module, batch: Batch, loss: Loss) -> Ledger:
    twin = meta_copy(model)
    on_meta = batch.on_meta

    def forward() -> Tensor:
        output = twin(*on_meta.args, **on_meta.kwargs)
        return _loss_of(loss, output, on_meta.target)

    return Tracer(twin).run(forward)


def _loss_of(loss: Loss, output: Any, target: Any) -> Tensor:
    """The loss to start backward from. A frame of this function in a traceback says that the model was through."""
    value = loss(output, target)
    value = getattr(value, "total", value)  # of a Weighted loss
    if not isinstance(value, Tensor):
        raise TypeError(f"it returned a {type(value).__name__}; return a tensor, or a tutti.Weighted of tensors")
    return value


def _per_sample(whole: Ledger, samples: int, half: Ledger | None, half_samples: int) -> _Traced:
    """Slope between two batches, or the mean of one."""

    def slope(big: float, small: float) -> float:
        return big / samples if half is None else max(0.0, (big - small) / (samples - half_samples))

    def slopes(big: dict[str, float], small: dict[str, float]) -> dict[str, float]:
        return {module: slope(value, small.get(module, 0.0)) for module, value in big.items()}

    ops: dict[str, list[OpCost]] = defaultdict(list)
    for (module, kind), line in whole.lines.items():
        small = (half.lines.get((module, kind)) if half else None) or Line()
        moved = slope(line.nbytes_forward, small.nbytes_forward)
        if half is None:
            moved, weights = (line.nbytes_forward - line.weight_nbytes) / samples, line.weight_nbytes
        else:
            weights = max(0.0, line.nbytes_forward - samples * moved)
        ops[module].append(
            OpCost(
                kind=kind,
                flops_forward=slope(line.flops_forward, small.flops_forward),
                flops_backward=slope(line.flops_backward, small.flops_backward),
                nbytes_forward=moved,
                nbytes_backward=slope(line.nbytes_backward, small.nbytes_backward),
                weight_nbytes=weights,
                calls=line.calls,
            )
        )
    return _Traced(
        ops=ops,
        activations=slopes(whole.activations, half.activations if half else {}),
        outputs=slopes(whole.outputs, half.outputs if half else {}),
        passes_on=_passings(whole, samples, half, slope),
        kept_after=_kept_after(whole, half, slope),
        order=whole.order,
        batch_statistics=whole.batch_statistics,
    )


def _passings(
    whole: Ledger, samples: int, half: Ledger | None, slope: Callable[[float, float], float]
) -> dict[str, tuple[Passing, ...]]:
    """What each module's values are to later ones: bytes of a sample, and the rest of the batch's."""
    found: dict[str, list[Passing]] = defaultdict(list)
    for way, nbytes in whole.passed.items():
        each = slope(nbytes, half.passed.get(way, 0.0) if half else 0.0)
        rest = max(0.0, nbytes - samples * each)
        if each or rest:
            made, to, trained, kept = way
            found[made].append(Passing(nbytes=each, fixed_nbytes=rest, to=to, trained=trained, kept=kept))
    return {module: tuple(some) for module, some in found.items()}


def _kept_after(
    whole: Ledger, half: Ledger | None, slope: Callable[[float, float], float]
) -> dict[str, tuple[tuple[str, float], ...]]:
    found: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for (module, after), nbytes in whole.kept_after.items():
        each = slope(nbytes, half.kept_after.get((module, after), 0.0) if half else 0.0)
        if each:
            found[module].append((after, each))
    return {module: tuple(some) for module, some in found.items()}


def _modules(model: nn.Module, traced: _Traced, states: dict[int, int]) -> tuple[ModuleSpec, ...]:
    """Every module once, in order of first execution; a parameter is counted where it first appears."""
    named = dict(model.named_modules())
    order = _execution_order(list(named), traced.order)
    owners: dict[int, str] = {}
    result = []
    for name in order:
        module = named[name]
        mine, tied_to = [], None
        for parameter in module._parameters.values():
            if parameter is None or is_lazy(parameter):
                continue
            owner = owners.setdefault(id(parameter), name)
            if owner == name:
                mine.append(parameter)
            else:
                tied_to = owner
        trainable = [parameter for parameter in mine if parameter.requires_grad]
        result.append(
            ModuleSpec(
                name=name,
                kind=type(module).__name__,
                parameters=sum(parameter.numel() for parameter in mine),
                trainable_parameters=sum(parameter.numel() for parameter in trainable),
                parameter_nbytes=_nbytes(mine),
                gradient_nbytes=_nbytes(trainable),
                optimizer_nbytes=sum(states.get(id(parameter), 0) for parameter in trainable),
                buffer_nbytes=_nbytes([buffer for buffer in module._buffers.values() if buffer is not None]),
                activation_nbytes=traced.activations.get(name, 0.0),
                output_nbytes=traced.outputs.get(name, 0.0),
                ops=tuple(traced.ops.get(name, ())),
                batch_statistics=name in traced.batch_statistics or _normalises_over_batch(module),
                tied_to=tied_to,
                passes_on=traced.passes_on.get(name, ()),
                kept_after=traced.kept_after.get(name, ()),
            )
        )
    return tuple(result)


def _execution_order(names: list[str], order: dict[str, int]) -> list[str]:
    """Names by when they, or for containers that are not called their first descendant, ran; others last."""
    first = dict(order)
    for name, time in order.items():
        parts = name.split(".")
        for depth in range(1, len(parts)):
            above = ".".join(parts[:depth])
            first[above] = min(time, first.get(above, time))
    first[""] = -1
    last = len(order)
    return sorted(names, key=lambda name: first.get(name, last))  # stable: a container stays before its first child


def _normalises_over_batch(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats)


def _module_at(traceback: TracebackType | None, model: nn.Module, loss: Loss) -> str:
    """The innermost module in a traceback, or the loss function, in words. Copies are recognised by their place, so by
    class and path."""
    found = f"the model ({type(model).__name__})"
    names: dict[int, str] = {}
    while traceback is not None:
        if traceback.tb_frame.f_code is _loss_of.__code__:
            return f"the loss function {getattr(loss, '__qualname__', type(loss).__name__)}"
        values = traceback.tb_frame.f_locals
        twin = values.get("twin")
        if isinstance(twin, nn.Module):
            names = {id(module): name for name, module in twin.named_modules()}
        module = values.get("self")
        if isinstance(module, nn.Module) and names.get(id(module)):
            found = f"module {names[id(module)]} ({type(module).__name__})"
        traceback = traceback.tb_next
    return found


def _dtype(model: nn.Module) -> str:
    """The dtype that most parameter bytes are in."""
    nbytes: Counter[torch.dtype] = Counter()
    for parameter in (parameter for parameter in model.parameters() if not is_lazy(parameter)):
        nbytes[parameter.dtype] += parameter.numel() * parameter.element_size()
    return dtype_name(max(nbytes, key=lambda dtype: nbytes[dtype], default=torch.float32))


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
