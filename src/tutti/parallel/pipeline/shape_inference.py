"""Infer: the shapes of what a module returns, from the shapes of what it gets. Found once, then remembered."""

import enum
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from tutti.errors import PlanError, TuttiError
from tutti.parallel.pipeline.placeholders import StandIns, is_unknown, tensor_attributes
from tutti.parallel.pipeline.stage_program import Form, Slot, flatten, refuse_hidden_tensors, unflatten

READS = frozenset(
    {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__"}
    | {"nonzero", "unique", "masked_select", "equal", "allclose", "is_nonzero", "cpu"}
)
"""Functions of torch that tell Python what is in a tensor."""

_SIMPLE = (int, float, str, bool, type(None), torch.dtype, torch.device, torch.Size, enum.Enum, slice)

Shape = tuple[int, ...]

MEMORY_FLOPS = 10
"""What one value of a result is taken to cost beside the operations counted: small modules are not free."""


def _attention_flops(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


COUNTED_TOO = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
"""Attention as CPUs do it, which torch's counter leaves out: transformers would be cut by their layers alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One leaf of what a module returns: argument number `source` itself, a view of it, a new tensor, or `constant`."""

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
    """What a call gives. `written`: positions of the arguments it changes in place; `keeps`: attributes in which it
    leaves tensors, which are the last of `leaves`; `cost`: FLOPs of its forward.
    """

    leaves: tuple[Result, ...]
    keeps: tuple[Slot, ...]
    spec: Form
    written: tuple[int, ...]
    cost: float

    def results(self, subjects: list[Any], stand_ins: StandIns) -> list[Any]:
        """Tensors without values of the right shapes, as leaves."""
        return [self._make(leaf, subjects, stand_ins) for leaf in self.leaves]

    def _make(self, leaf: Result, subjects: list[Any], stand_ins: StandIns) -> Any:
        if leaf.source is not None and leaf.shape is None:
            return subjects[leaf.source]
        if leaf.shape is None:
            return leaf.constant
        if leaf.source is not None and is_unknown(subjects[leaf.source]):
            return subjects[leaf.source].as_strided(leaf.shape, leaf.stride, leaf.offset)
        assert leaf.device is not None
        made = stand_ins.empty(leaf.shape, leaf.stride, leaf.dtype, leaf.device)
        return stand_ins.computed(made) if leaf.requires_grad else made


class ShapeCache:
    """Results of units by the shapes of their arguments. `counting`: whether FLOPs are counted too; `modes`: of the
    model's modules, in the trace that runs.
    """

    def __init__(self, stand_ins: StandIns) -> None:
        self.counting = False
        self.modes: tuple[bool, ...] = ()
        self._stand_ins = stand_ins
        self._known: dict[Any, list[tuple[Form, Inference]]] = defaultdict(list)

    def known(self, name: str, subjects: list[Any], spec: Form) -> Inference | None:
        """What a call of unit `name` gives, if such a call was followed before."""
        key = self._key(name, subjects)
        found = (inference for other, inference in self._known.get(key, ()) if other == spec)
        return next(found, None)

    def follow(self, name: str, module: nn.Module, subjects: list[Any], spec: Form) -> Inference:
        """What a call gives, found by running it on shapes; remembered unless its code looked at values (then the
        result's shapes do not follow from shapes alone). Raises PlanError where it cannot be found.
        """
        copies = [self._copy(subject) for subject in subjects]
        versions = [_version(copy) for copy in copies]
        args, kwargs = unflatten(list(copies), spec)
        with _Watching() as watching, _Attributes(name, module) as attributes:
            returned, flops = self._run(name, module, args, kwargs)
        leaves, out_spec = flatten(returned)
        for leaf in leaves:
            refuse_hidden_tensors(leaf, f"the result of {name}")
        inference = Inference(
            leaves=tuple(_result(leaf, copies) for leaf in (*leaves, *attributes.new.values())),
            keeps=tuple(attributes.new),
            spec=out_spec,
            written=tuple(at for at, copy in enumerate(copies) if _version(copy) != versions[at]),
            cost=_cost(module, flops, leaves),
        )
        key = self._key(name, subjects)
        if key is not None and not watching.reads:
            self._known[key].append((spec, inference))
        return inference

    def _run(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, float]:
        """What the module returns on shapes, and its FLOPs where they are counted."""
        counter = FlopCounterMode(display=False, custom_mapping=COUNTED_TOO)
        call = of_experts if id(module) in self._stand_ins.stacked else module._call_impl
        try:
            with self._stand_ins.hooks_in_place(module), counter if self.counting else nullcontext():
                returned = call(*args, **kwargs)
        except TuttiError:
            raise
        except Exception as error:
            words = (str(error).splitlines() or [""])[0]
            raise PlanError(
                f"mesh.stage: {name} ({type(module).__name__}) cannot be followed on shapes alone "
                f"({type(error).__name__}: {words}); its forward must not depend on the values it computes"
            ) from error
        return returned, float(counter.get_total_flops()) if self.counting else 0.0

    def _key(self, name: str, subjects: list[Any]) -> Any:
        described = signature(subjects)
        return described and (name, self.modes, described)

    def _copy(self, subject: Any) -> Any:
        """An argument the module may write to without harm; known tensors keep their values."""
        if not isinstance(subject, torch.Tensor):
            return subject
        if not is_unknown(subject):
            copy = subject.detach().clone()
            vars(copy).update(vars(subject))  # what a library notes on a mask, say
            return copy
        made = self._stand_ins.outline(subject, requires_grad=False)
        return self._stand_ins.computed(made) if subject.requires_grad else made


def of_experts(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """The shape of what a layer of stacked experts returns; which expert gets how many rows depends on values."""
    return hidden_states * top_k_weights.sum().to(hidden_states.dtype)


class _Watching(TorchFunctionMode):
    """Notices code that looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.reads = self.reads or getattr(func, "__name__", "") in READS
        return func(*args, **(kwargs or {}))


class _Attributes:
    """Afterwards, `new` has the tensors that a module and its parts have left in plain attributes (a load-balancing
    loss, say), by module and attribute; all attributes are as they were.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._parts = [(f"{name}.{inner}" if inner else name, part) for inner, part in module.named_modules()]
        self._before: list[dict[str, Any]] = []
        self.new: dict[Slot, torch.Tensor] = {}

    def __enter__(self) -> "_Attributes":
        self._before = [dict(vars(part)) for _, part in self._parts]
        return self

    def __exit__(self, *problem: object) -> None:
        for (name, part), before in zip(self._parts, self._before, strict=True):
            tensors = tensor_attributes(part)
            self.new |= {(name, key): tensor for key, tensor in tensors.items() if before.get(key) is not tensor}
            part.__dict__.clear()
            part.__dict__.update(before)
        self.new = dict(sorted(self.new.items()))  # in one order on all ranks


def _version(leaf: Any) -> int:
    return leaf._version if isinstance(leaf, torch.Tensor) else 0


def signature(leaves: list[Any]) -> Any:
    """All of arguments that a call's result may depend on, except values, and what holds around the call; None where
    that cannot be said.
    """
    described: list[Any] = []
    kind = None
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            form = (leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad, is_unknown(leaf))
            described.append((*form, next(at for at, other in enumerate(leaves) if other is leaf)))
            kind = kind or (leaf.device.type if leaf.device.type != "meta" else None)
        elif isinstance(leaf, _SIMPLE):
            described.append((type(leaf), str(leaf) if isinstance(leaf, slice) else leaf))
        else:
            return None
    autocast = kind and (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
    return torch.is_grad_enabled(), autocast, tuple(described)


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
    """FLOPs of a forward; recurrent layers, which torch does not count, by their weights."""
    made = sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            weights = sum(p.numel() for p in part.parameters() if p.dim() > 1)
            flops += 2.0 * weights * made / max(part.hidden_size, 1)
    return flops + MEMORY_FLOPS * made
