"""`nn.Module` -> ModelSpec: parameters, FLOPs, activations and optimizer state of every module, for one sample.

One training step is traced on the meta device at two batch sizes. What grows between them is the cost per sample; the
rest (weights read once per pass, tables, constants) is the cost per pass. Nothing is computed, and nothing of the
model's size is allocated.
"""

import inspect
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from tutti.config.model import AutocastMemory, CachedMemory, ForwardedValues, ModelSpec, ModuleSpec, OpCost, TensorShape
from tutti.profile.allocator import simulate_step
from tutti.profile.memory_trace import MemoryLedger, MemorySlopes, memory_slopes, trace_memory
from tutti.profile.meta_device import SMALL_NUMEL, flat_tensors, meta_copy, to_meta
from tutti.profile.step_trace import ROOT, CostLedger, CostLine, StepTracer, first_line

Loss = Callable[[Any, Any], Any]

ScriptLoss = Callable[[nn.Module, Any], Any]
"""(model, batch) -> loss."""


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
    losses: Sequence[ScriptLoss] = (),
    autocast: torch.dtype | None = None,
) -> ModelSpec:
    """Return the costs of a model's forward, its loss, their backward and the optimizer's step, without running them.

    Args:
        model: left unchanged.
        args, kwargs, target: one collated batch, for `loss(model(*args, **kwargs), target)`.
        loss: called with the output and the target; returns a tensor or a tutti.Weighted.
        optimizer: one or several, for the bytes of their state.
        samples: samples in the batch; 4 is a good number. Costs per sample come from comparing the whole batch with its
            first half; with 1 sample they are simply divided.
        name: name of the model; its class name by default.
        tokens_per_sample: 0 for a model without tokens.
        dataset_samples: size of the training set.
        autocast: a 16-bit dtype in which memory is traced too; None: only in the model's own precision.
        losses: functions that compute a step's losses in place of `loss`; args are their batches, one for each.

    Returns:
        The costs. If the model cannot be traced they cover only parameters. `untraced` and a note then name the module
        that failed, or the loss function, and the reason.
    """
    model = getattr(model, "_orig_mod", model)  # the module inside torch.compile's wrapper
    notes: dict[str, None] = {}
    batch = Batch(args=tuple(args), kwargs=dict(kwargs), target=target, samples=samples)
    lazy = [path for path, parameter in model.named_parameters() if is_lazy(parameter)]
    untraced = f"{', '.join(lazy)}: no shape is known until the model is called once" if lazy else ""
    traced = _NOTHING
    if not lazy:
        try:
            traced = _trace(model, batch, losses or loss, notes)
        except Exception as error:  # the model's code may raise anything where values are missing
            where = _module_at(error.__traceback__, model, loss)
            untraced = f"{where} could not be traced on shapes alone: {first_line(error)}"
    if untraced:
        notes[f"{untraced}; only {'other ' if lazy else ''}parameters are counted"] = None
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    states = optimizer_state(optimizers, lambda text: notes.setdefault(text))
    modules = _modules(model, traced, states)
    memory = None
    if autocast is not None and traced.order:
        memory = _trace_autocast(model, batch, losses or loss, autocast, notes)
        modules = _with_autocast(modules, memory)
    unused = [module.name for module in modules if module.parameters and module.name not in traced.order]
    if traced.order and unused:
        notes[f"never used in the forward pass: {', '.join(unused)}"] = None
    return ModelSpec(
        name=name or type(model).__name__,
        modules=modules,
        inputs=batch.inputs(model),
        dtype=_dtype(model),
        optimizer=", ".join(type(torch_optimizer).__name__ for torch_optimizer in optimizers),
        tokens_per_sample=tokens_per_sample,
        dataset_samples=dataset_samples,
        evidence="predicted",
        notes=tuple(notes),
        untraced=untraced,
        cached=_cached(memory, modules),
        channels_last=_channels_last(model),
    )


def _channels_last(model: nn.Module) -> bool:
    """Return whether most weights of two-dimensional convolutions have the memory format channels_last.

    A weight of one channel, or of one pixel, has both formats.
    """
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Conv2d)]
    plain = sum(not weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)
    return sum(not weight.is_contiguous() for weight in weights) > plain


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traced:
    """Costs per sample by module; empty if the model could not be traced."""

    ops: dict[str, list[OpCost]]
    activations: dict[str, float]
    outputs: dict[str, float]
    passes_on: dict[str, tuple[ForwardedValues, ...]]
    kept_after: dict[str, tuple[tuple[str, float], ...]]
    order: dict[str, int]
    batch_statistics: set[str]


_NOTHING = _Traced(ops={}, activations={}, outputs={}, passes_on={}, kept_after={}, order={}, batch_statistics=set())


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A collated batch for `loss(model(*args, **kwargs), target)`.

    Attributes:
        samples: number of samples in the batch.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    samples: int

    @property
    def on_meta(self) -> "Batch":
        """The batch with its floating-point tensors on meta; small integers and masks keep their values."""

        def move(tensor: Tensor) -> Tensor:
            floating = tensor.is_floating_point() or tensor.is_complex()
            if floating or tensor.numel() > SMALL_NUMEL:
                return to_meta(tensor).requires_grad_(tensor.requires_grad)
            return tensor.detach().cpu().clone()  # a new storage: half a batch must not hold the whole batch's

        args, kwargs, target = tree_map_only(Tensor, move, (self.args, self.kwargs, self.target))
        return Batch(args=args, kwargs=kwargs, target=target, samples=self.samples)

    @property
    def half(self) -> "Batch | None":
        """The first half of the samples; None for one sample, or if no dim counts samples."""
        count = self.samples // 2

        def cut(tensor: Tensor) -> Tensor:
            dim = batch_dim(tensor, self.samples)
            return tensor if dim is None else tensor.narrow(dim, 0, count)

        everything = (self.args, self.kwargs, self.target)
        leaves = tree_leaves(everything)
        cuttable = any(isinstance(leaf, Tensor) and batch_dim(leaf, self.samples) is not None for leaf in leaves)
        if count < 1 or not cuttable:
            return None
        args, kwargs, target = tree_map_only(Tensor, cut, everything)
        return Batch(args=args, kwargs=kwargs, target=target, samples=count)

    def inputs(self, model: nn.Module) -> tuple[TensorShape, ...]:
        """Return the tensors of the forward call, named like the parameters of `forward`, without their batch dim."""
        try:
            named = dict(inspect.signature(model.forward).bind_partial(*self.args, **self.kwargs).arguments)
        except (TypeError, ValueError):
            named = {**{f"input{i}": value for i, value in enumerate(self.args)}, **self.kwargs}
        return tuple(self._shape(name, tensor) for name, tensor in _tensors(named, ""))

    def _shape(self, name: str, tensor: Tensor) -> TensorShape:
        dim = batch_dim(tensor, self.samples)
        shape = tuple(size for i, size in enumerate(tensor.shape) if i != dim)
        return TensorShape(name=name, shape=shape, dtype=dtype_name(tensor.dtype))


def _trace(model: nn.Module, batch: Batch, loss: Loss | Sequence[ScriptLoss], notes: dict[str, None]) -> _Traced:
    """Trace the batch and its half, and add the assumptions made to `notes`. Raises what the batch's code raises."""
    whole = _step(model, batch, loss)
    half_batch = batch.half
    half: CostLedger | None = None
    if half_batch is not None:
        try:
            half = _step(model, half_batch, loss)
        except Exception as error:
            notes[f"half a batch could not be traced ({first_line(error)})"] = None
    if half is None:
        notes["costs per sample are the batch's divided by its samples, so they include costs per pass"] = None
    notes.update(whole.notes)
    return _per_sample(whole, batch.samples, half, half_batch.samples if half_batch else 0)


def _step(model: nn.Module, batch: Batch, loss: Loss | Sequence[ScriptLoss]) -> CostLedger:
    twin = meta_copy(model)
    on_meta = batch.on_meta

    def forward() -> Tensor:
        if not callable(loss):
            return torch.stack([_own_loss(f, twin, b) for f, b in zip(loss, on_meta.args, strict=True)]).sum()
        output = twin(*on_meta.args, **on_meta.kwargs)
        return _loss_of(loss, output, on_meta.target)

    if callable(loss):
        return StepTracer(twin).run(forward)
    ledger = StepTracer(twin).run(forward, within=twin)
    if ledger.order.keys() == {ROOT} and not any(line.weight_nbytes for line in ledger.lines.values()):
        raise ValueError("the functions of forward_backward do not use the model that they are given")
    return ledger


def _trace_autocast(
    model: nn.Module, batch: Batch, loss: Loss | Sequence[ScriptLoss], dtype: torch.dtype, notes: dict[str, None]
) -> MemorySlopes | None:
    """Trace memory under autocast for the batch and its half; None, with a note, where that fails."""
    half = batch.half
    if half is None:
        return None
    try:
        ledgers = [_memory_step(model, part, loss, dtype) for part in (batch, half)]
        return memory_slopes(ledgers[0], batch.samples, ledgers[1], half.samples)
    except Exception as error:  # the model's code may raise anything where values are missing
        notes[f"memory under autocast was not traced ({first_line(error)}): half the size is assumed"] = None
        return None


def _memory_step(model: nn.Module, batch: Batch, loss: Loss | Sequence[ScriptLoss], dtype: torch.dtype) -> MemoryLedger:
    twin = meta_copy(model)

    def prepare(put: Callable[[Any], Any]) -> Callable[[], Tensor]:
        args, kwargs, target = put((batch.args, batch.kwargs, batch.target))
        if callable(loss):
            return lambda: _loss_of(loss, twin(*args, **kwargs), target)
        return lambda: torch.stack([_own_loss(f, twin, b) for f, b in zip(loss, args, strict=True)]).sum()

    return trace_memory(twin, prepare, dtype)


def _with_autocast(modules: tuple[ModuleSpec, ...], memory: MemorySlopes | None) -> tuple[ModuleSpec, ...]:
    """Return the modules with their memory under autocast; in order of execution, as they are given."""
    if memory is None:
        return modules
    saved, result = 0.0, []
    for module in modules:
        kept = memory.saved.get(module.name, 0.0)
        saved += kept
        found = AutocastMemory(
            activation_nbytes=kept,
            output_nbytes=memory.outputs.get(module.name, 0.0),
            transient_nbytes=max(0.0, memory.peaks.get(module.name, 0.0) - saved),
        )
        result.append(replace(module, autocast=found))
    return tuple(result)


CACHED_AT = (1, 4, 16, 64, 256)
"""Samples of the microbatches for which the caching allocator is simulated."""


def _cached(memory: MemorySlopes | None, modules: tuple[ModuleSpec, ...]) -> tuple[CachedMemory, ...]:
    if memory is None:
        return ()
    parameters = [float(m.parameter_nbytes) for m in modules if m.parameter_nbytes]
    states = [float(m.optimizer_nbytes) for m in modules if m.optimizer_nbytes]
    result = []
    for samples in CACHED_AT:
        allocated, reserved = simulate_step(memory.sizes(samples), parameters, states)
        result.append(CachedMemory(samples=samples, allocated_nbytes=allocated, reserved_nbytes=reserved))
    return tuple(result)


def _loss_of(loss: Loss, output: Any, target: Any) -> Tensor:
    """Return the loss to start backward from.

    A frame of this function in a traceback shows that the model itself succeeded.
    """
    return _checked(loss(output, target))


def _own_loss(function: ScriptLoss, twin: nn.Module, batch: Any) -> Tensor:
    """Return a loss that the script computes. A traceback has this frame, too."""
    return _checked(function(twin, batch))


def _checked(value: Any) -> Tensor:
    value = getattr(value, "total", value)  # of a Weighted loss
    if not isinstance(value, Tensor):
        raise TypeError(f"it returned a {type(value).__name__}; return a tensor, or a tutti.Weighted of tensors")
    return value


def _per_sample(whole: CostLedger, samples: int, half: CostLedger | None, half_samples: int) -> _Traced:
    """Return costs per sample: the slope between two batches, or the mean of one."""

    def slope(big: float, small: float) -> float:
        return big / samples if half is None else max(0.0, (big - small) / (samples - half_samples))

    def slopes(big: dict[str, float], small: dict[str, float]) -> dict[str, float]:
        return {module: slope(value, small.get(module, 0.0)) for module, value in big.items()}

    ops: dict[str, list[OpCost]] = defaultdict(list)
    for (module, kind), line in whole.lines.items():
        small = (half.lines.get((module, kind)) if half else None) or CostLine()
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
        passes_on=_forwarded_values(whole, samples, half, slope),
        kept_after=_kept_after(whole, half, slope),
        order=whole.order,
        batch_statistics=whole.batch_statistics,
    )


def _forwarded_values(
    whole: CostLedger, samples: int, half: CostLedger | None, slope: Callable[[float, float], float]
) -> dict[str, tuple[ForwardedValues, ...]]:
    """Return the values that each module forwards to later ones: bytes per sample, and the rest of the batch."""
    values: dict[str, list[ForwardedValues]] = defaultdict(list)
    for direction, nbytes in whole.passed.items():
        per_sample = slope(nbytes, half.passed.get(direction, 0.0) if half else 0.0)
        rest = max(0.0, nbytes - samples * per_sample)
        if per_sample or rest:
            made, to, trained, kept = direction
            values[made].append(
                ForwardedValues(nbytes=per_sample, fixed_nbytes=rest, to=to, trained=trained, kept=kept)
            )
    return {module: tuple(module_values) for module, module_values in values.items()}


def _kept_after(
    whole: CostLedger, half: CostLedger | None, slope: Callable[[float, float], float]
) -> dict[str, tuple[tuple[str, float], ...]]:
    kept: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for (module, after), nbytes in whole.kept_after.items():
        per_sample = slope(nbytes, half.kept_after.get((module, after), 0.0) if half else 0.0)
        if per_sample:
            kept[module].append((after, per_sample))
    return {module: tuple(entries) for module, entries in kept.items()}


def _modules(model: nn.Module, traced: _Traced, states: dict[int, int]) -> tuple[ModuleSpec, ...]:
    """Return every module once, in order of first execution. A parameter is counted where it first appears."""
    named = dict(model.named_modules())
    order = _execution_order(list(named), traced.order)
    owners: dict[int, str] = {}
    result = []
    for name in order:
        module = named[name]
        counted, tied_to = [], None
        for parameter in module._parameters.values():
            if parameter is None or is_lazy(parameter):
                continue
            owner = owners.setdefault(id(parameter), name)
            if owner == name:
                counted.append(parameter)
            else:
                tied_to = owner
        trainable = [parameter for parameter in counted if parameter.requires_grad]
        result.append(
            ModuleSpec(
                name=name,
                kind=type(module).__name__,
                parameters=sum(parameter.numel() for parameter in counted),
                trainable_parameters=sum(parameter.numel() for parameter in trainable),
                parameter_nbytes=_nbytes(counted),
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
    """Sort names by first execution.

    Containers that are not called take the time of their first descendant; modules that never run come last.
    """
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
    """Name the innermost module in a traceback, or the loss function. Copies are recognised by their class and path."""
    description = f"the model ({type(model).__name__})"
    names: dict[int, str] = {}
    while traceback is not None:
        if traceback.tb_frame.f_code is _loss_of.__code__:
            return f"the loss function {_name_of(loss)}"
        values = traceback.tb_frame.f_locals
        if traceback.tb_frame.f_code is _own_loss.__code__:
            description = f"the loss function {_name_of(values['function'])}"
        twin = values.get("twin")
        if isinstance(twin, nn.Module):
            names = {id(module): name for name, module in twin.named_modules()}
        module = values.get("self")
        if isinstance(module, nn.Module) and names.get(id(module)):
            description = f"module {names[id(module)]} ({type(module).__name__})"
        traceback = traceback.tb_next
    return description


def _name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def _dtype(model: nn.Module) -> str:
    """Return the dtype of most parameter bytes."""
    nbytes: Counter[torch.dtype] = Counter()
    for parameter in (parameter for parameter in model.parameters() if not is_lazy(parameter)):
        nbytes[parameter.dtype] += parameter.numel() * parameter.element_size()
    return dtype_name(max(nbytes, key=lambda dtype: nbytes[dtype], default=torch.float32))


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def batch_dim(tensor: Tensor, samples: int) -> int | None:
    """Return the dim that counts samples: the first of that size; None if there is none."""
    return next((dim for dim, size in enumerate(tensor.shape) if size == samples), None)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors inside nested lists and dicts, with dotted paths."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{path}.{index}" if path else str(index))


_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37)


def optimizer_state(optimizers: Sequence[Optimizer], note: Callable[[str], None]) -> dict[int, int]:
    """Return the bytes of optimizer state of each parameter, by the parameter's id.

    The state is that after one step with the options of the parameter's group, without counters (tensors without dims).
    An optimizer that reads values of its tensors is stepped on small real tensors with as many dims, of prime sizes,
    and the dims of its state are scaled. One that cannot be stepped counts as 0, with a note.

    Args:
        optimizers: the optimizers; left unchanged.
        note: receives sentences about assumptions.
    """
    result: dict[int, int] = {}
    for optimizer in optimizers:
        known: dict[Any, int] = {}
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                key = (index, parameter.shape, parameter.dtype)
                if key not in known:
                    known[key] = _state_nbytes(optimizer, group, parameter, note)
                result[id(parameter)] = known[key]
    return result


def _state_nbytes(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor, note: Callable[[str], None]) -> int:
    primes = dict(zip(_PRIMES, parameter.shape, strict=False))
    try:
        state = _after_a_step(optimizer, group, to_meta(parameter))
        return sum(tensor.numel() * tensor.element_size() for tensor in state)
    except Exception:  # a step may raise anything on meta; next, try small real tensors
        small = torch.zeros([1 if size == 1 else p for p, size in primes.items()], dtype=parameter.dtype)
    try:
        state = _after_a_step(optimizer, group, small)
    except Exception as error:
        what = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
        note(f"the state of {type(optimizer).__name__} could not be found ({what}): counted as 0 bytes")
        return 0
    return sum(tensor.element_size() * math.prod(_grown(dim, primes) for dim in tensor.shape) for tensor in state)


def _grown(size: int, primes: dict[int, int]) -> int:
    """Scale a dim of the state to the real parameter, from its size for a parameter with prime dims."""
    for prime, real in primes.items():
        if size % prime == 0:
            size = size // prime * real
    return size


def _after_a_step(optimizer: Optimizer, group: dict[str, Any], like: Tensor) -> list[Tensor]:
    """Return the state, without counters, after a copy of `optimizer` has stepped a parameter like `like`."""
    parameter = nn.Parameter(like)
    parameter.grad = torch.zeros_like(like)
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(
        {name: value for name, value in optimizer.__dict__.items() if name != "step"},  # schedulers wrap step
        state=defaultdict(dict),
        param_groups=[{**group, "params": [parameter], "foreach": False, "fused": False}],
        _optimizer_step_pre_hooks=OrderedDict(),
        _optimizer_step_post_hooks=OrderedDict(),
    )
    twin.step()
    values = [value for state in twin.state.values() for value in state.values()]
    return [tensor for tensor in flat_tensors(values) if tensor.dim()]
