"""Infers the shapes of a module's results from the shapes of its arguments. Results are cached."""

import enum
from collections import defaultdict
from collections.abc import Callable, Container
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from tutti.errors import PlanError, TuttiError
from tutti.parallel.expert.expert_parallel import in_order
from tutti.parallel.pipeline.placeholders import StandIns, is_unknown, tensor_attributes
from tutti.parallel.pipeline.stage_program import Form, Slot, flatten, refuse_hidden_tensors, unflatten

READS = frozenset(
    {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__"}
    | {"nonzero", "unique", "masked_select", "equal", "allclose", "is_nonzero", "cpu"}
)
"""Functions of torch that return the values of a tensor to Python, or whose result's shape depends on these."""

_SIMPLE = (int, float, str, bool, type(None), torch.dtype, torch.device, torch.Size, enum.Enum, slice)

Shape = tuple[int, ...]

MEMORY_FLOPS = 10
"""FLOPs charged for each element of a result, in addition to those counted: small modules are not free."""


def _attention_flops(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


COUNTED_TOO = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
"""The CPU's fused attention, which torch's counter leaves out. Without it transformers would be balanced by their
linear layers alone.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One leaf of a module's result: an argument, a view of an argument, a new tensor or a constant.

    Attributes:
        source: index of the argument that the leaf is (no `shape`) or views; None for a new tensor or a constant.
        shape: shape of a view or a new tensor.
        stride: strides of a view or a new tensor.
        offset: storage offset of a view.
        dtype: of a new tensor.
        device: of a new tensor.
        requires_grad: of a new tensor.
        constant: the leaf itself, if it is no tensor.
    """

    source: int | None = None
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device | None = None
    requires_grad: bool = False
    constant: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inference:
    """The effects of one call of a unit.

    Attributes:
        leaves: the leaves of the result, then the tensors left in attributes.
        keeps: attributes in which the unit leaves tensors.
        spec: structure of the result, without attributes.
        written: indices of the arguments that the call changes in place.
        cost: FLOPs of the forward.
    """

    leaves: tuple[Result, ...]
    keeps: tuple[Slot, ...]
    spec: Form
    written: tuple[int, ...]
    cost: float

    def results(self, subjects: list[Any], stand_ins: StandIns) -> list[Any]:
        """The leaves of the result, as tensors without values."""
        return [self._make(leaf, subjects, stand_ins) for leaf in self.leaves]

    def _make(self, leaf: Result, subjects: list[Any], stand_ins: StandIns) -> Any:
        if leaf.source is not None and leaf.shape is None:
            return subjects[leaf.source]
        if leaf.shape is None:
            return leaf.constant
        if leaf.source is not None and is_unknown(subjects[leaf.source]):
            return subjects[leaf.source].as_strided(leaf.shape, leaf.stride, leaf.offset)
        assert leaf.device is not None
        tensor = stand_ins.empty(leaf.shape, leaf.stride, leaf.dtype, leaf.device)
        return stand_ins.computed(tensor) if leaf.requires_grad else tensor


class ShapeCache:
    """Results of units, cached by the shapes of their arguments.

    Attributes:
        counting: whether FLOPs are counted.
        modes: whether each module of the model is in training mode, in the trace in progress.
    """

    def __init__(self, stand_ins: StandIns) -> None:
        self.counting = False
        self.modes: tuple[bool, ...] = ()
        self._stand_ins = stand_ins
        self._known: dict[Any, list[tuple[Form, Inference]]] = defaultdict(list)

    def known(self, name: str, subjects: list[Any], spec: Form) -> Inference | None:
        """The cached result of such a call of unit `name`, or None."""
        key = self._key(name, subjects)
        matches = (inference for cached_spec, inference in self._known.get(key, ()) if cached_spec == spec)
        return next(matches, None)

    def forget(self, names: Container[str]) -> None:
        """Forget the results of units that have changed."""
        for key in [key for key in self._known if key is not None and key[0] in names]:
            del self._known[key]

    def follow(self, name: str, module: nn.Module, subjects: list[Any], spec: Form) -> Inference:
        """Run a call on tensors without values.

        The result is cached unless the code read values of tensors: its shapes would then not depend on shapes alone.

        Raises:
            PlanError: the module fails on tensors without values.
        """
        copies = [self._copy(subject) for subject in subjects]
        versions = [_version(copy) for copy in copies]
        args, kwargs = unflatten(list(copies), spec)
        with _ReadDetector() as detector, _AttributeRecorder(name, module) as recorder:
            returned, flops = self._run(name, module, args, kwargs)
        leaves, out_spec = flatten(returned)
        for leaf in leaves:
            refuse_hidden_tensors(leaf, f"the result of {name}")
        inference = Inference(
            leaves=tuple(_result(leaf, copies) for leaf in (*leaves, *recorder.new.values())),
            keeps=tuple(recorder.new),
            spec=out_spec,
            written=tuple(at for at, copy in enumerate(copies) if _version(copy) != versions[at]),
            cost=_cost(module, flops, leaves),
        )
        key = self._key(name, subjects)
        if key is not None and not detector.reads:
            self._known[key].append((spec, inference))
        return inference

    def _run(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, float]:
        """The module's result on tensors without values, and its FLOPs (0 if they are not counted)."""
        counter = FlopCounterMode(display=False, custom_mapping=COUNTED_TOO)
        call: Callable[..., Any] = module._call_impl
        if id(module) in self._stand_ins.stacked:
            call = partial(of_experts, module)
        elif isinstance(module, _BatchNorm) and module.training:
            call = partial(of_batch_norm, module)
        try:
            with self._stand_ins.hooks_in_place(module), counter if self.counting else nullcontext():
                returned = call(*args, **kwargs)
        except TuttiError:
            raise
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]
            raise PlanError(
                f"mesh.stage: {name} ({type(module).__name__}) cannot be traced on shapes alone "
                f"({type(error).__name__}: {reason}); its forward must not depend on the values it computes"
            ) from error
        return returned, float(counter.get_total_flops()) if self.counting else 0.0

    def _key(self, name: str, subjects: list[Any]) -> Any:
        described = signature(subjects)
        return described and (name, self.modes, described)

    def _copy(self, subject: Any) -> Any:
        """A copy of an argument, which the module may change in place. Known tensors keep their values."""
        if not isinstance(subject, torch.Tensor):
            return subject
        if not is_unknown(subject):
            copy = subject.detach().clone()
            vars(copy).update(vars(subject))  # for example, attributes that a library sets on a mask
            return copy
        placeholder = self._stand_ins.outline(subject, requires_grad=False)
        return self._stand_ins.computed(placeholder) if subject.requires_grad else placeholder


def of_experts(module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A result with the shape that a layer of stacked experts returns. The rows of each expert depend on values."""
    hidden_states, _, weights = in_order(module, args, kwargs)
    return hidden_states * weights.sum().to(hidden_states.dtype)


def of_batch_norm(module: _BatchNorm, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A result with the shape that a batch norm returns.

    torch refuses to normalise one value a channel. Here it may be all that this rank has of a microbatch.
    """
    inputs: torch.Tensor = args[0] if args else kwargs["input"]
    if inputs.dim() > 1 and inputs.numel() == inputs.shape[1]:
        return inputs * (1.0 if module.weight is None else module.weight.sum().to(inputs.dtype))
    returned: torch.Tensor = module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
    return returned


class _ReadDetector(TorchFunctionMode):
    """Detects code that reads values of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.reads = self.reads or getattr(func, "__name__", "") in READS
        return func(*args, **(kwargs or {}))


class _AttributeRecorder:
    """Records the tensors that a module and its children leave in plain attributes, such as a load-balancing loss.

    All attributes are restored at the end. `new` then has the tensors by names of module and attribute.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._parts = [(f"{name}.{inner}" if inner else name, part) for inner, part in module.named_modules()]
        self._before: list[dict[str, Any]] = []
        self.new: dict[Slot, torch.Tensor] = {}

    def __enter__(self) -> "_AttributeRecorder":
        self._before = [dict(vars(part)) for _, part in self._parts]
        return self

    def __exit__(self, *problem: object) -> None:
        for (name, part), before in zip(self._parts, self._before, strict=True):
            tensors = tensor_attributes(part)
            self.new |= {(name, key): tensor for key, tensor in tensors.items() if before.get(key) is not tensor}
            part.__dict__.clear()
            part.__dict__.update(before)
        self.new = dict(sorted(self.new.items()))  # the same order on all ranks


def _version(leaf: Any) -> int:
    return leaf._version if isinstance(leaf, torch.Tensor) else 0


def signature(leaves: list[Any]) -> Any:
    """All properties of arguments that a result may depend on, except values, with grad mode and autocast.

    Returns None for arguments of unsupported types.
    """
    described_leaves: list[Any] = []
    device_type = None
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            form = (leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad, is_unknown(leaf))
            described_leaves.append((*form, next(at for at, other in enumerate(leaves) if other is leaf)))
            device_type = device_type or (leaf.device.type if leaf.device.type != "meta" else None)
        elif isinstance(leaf, _SIMPLE):
            described_leaves.append((type(leaf), str(leaf) if isinstance(leaf, slice) else leaf))
        else:
            return None
    autocast = device_type and (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
    return torch.is_grad_enabled(), autocast, tuple(described_leaves)


def _result(leaf: Any, inputs: list[Any]) -> Result:
    if not isinstance(leaf, torch.Tensor):
        return Result(constant=leaf)
    same = next((at for at, other in enumerate(inputs) if other is leaf), None)
    if same is not None:
        return Result(source=same)
    memory = leaf.untyped_storage()._cdata
    source = None
    for at, other in enumerate(inputs):
        if isinstance(other, torch.Tensor) and other.untyped_storage()._cdata == memory:
            source = at
    return Result(
        source=source,
        shape=tuple(leaf.shape),
        stride=leaf.stride(),
        offset=int(leaf.storage_offset()),
        dtype=leaf.dtype,
        device=leaf.device,
        requires_grad=leaf.requires_grad,
    )


def _cost(module: nn.Module, flops: float, leaves: list[Any]) -> float:
    """FLOPs of a forward. Recurrent layers, which torch does not count, are estimated from their weights."""
    result_numel = sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            weights = sum(p.numel() for p in part.parameters() if p.dim() > 1)
            flops += 2.0 * weights * result_numel / max(part.hidden_size, 1)
    return flops + MEMORY_FLOPS * result_numel
