"""The program of one forward: the operations that the user's code performed, in order, as calls on numbered values."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from tutti.errors import PlanError
from tutti.parallel.loss_means import LossMean


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that some node computes. `key` is its number in the program."""

    key: int


@dataclass(frozen=True, slots=True)
class ProgramParameter:
    """A parameter of the model, by the first of its names."""

    name: str


@dataclass(frozen=True, slots=True)
class Argument:
    """Leaf `at` of the arguments of the model's call, in a program that is reused for several forwards."""

    at: int


@dataclass(frozen=True, slots=True)
class Copied:
    """A tensor known at tracing time that the node writes to. Every run writes to its own copy."""

    tensor: torch.Tensor


Slot = tuple[str, str]
"""A tensor in a plain attribute of a module: names of the module and of the attribute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """Shape, dtype and gradient requirement of a value, known before it is computed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Grad mode and autocast at a node. `autocast` is (enabled, dtype) on the model's device."""

    grad: bool
    autocast: tuple[bool, torch.dtype]


@dataclass(frozen=True, slots=True)
class Form:
    """The structure from which leaves were flattened.

    Attributes:
        count: for (args, kwargs): the number of args; None otherwise.
        names: for (args, kwargs): the keys of kwargs.
        spec: any other structure. None, together with `count`, for a single leaf.
    """

    count: int | None = None
    names: tuple[Any, ...] = ()
    spec: pytree.TreeSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCall:
    """One call of a unit or of an operation.

    Attributes:
        unit: name of the module that is called; "" for an operation.
        function: the module or the operation.
        leaves: (args, kwargs), flattened. Tensors are `Value`, `ProgramParameter`, `Copied`, `Argument` or constants.
        spec: the structure of (args, kwargs).
        results: number of the value of each leaf of the result; None for a leaf that is no new value.
        written: (position in `leaves`, new number) of each argument that the call changed in place.
        views: (old number, new number) of other values that changed because they share memory with these.
        surroundings: grad mode and autocast.
        keeps: attributes in which the unit leaves tensors; these are the last of its results.
        cost: FLOPs, where they were counted.
    """

    unit: str
    function: Callable[..., Any]
    leaves: tuple[Any, ...]
    spec: Form
    results: tuple[int | None, ...]
    written: tuple[tuple[int, int], ...] = ()
    views: tuple[tuple[int, int], ...] = ()
    surroundings: Surroundings
    keeps: tuple[Slot, ...] = ()
    cost: float = 0.0

    @property
    def uses(self) -> list[int]:
        """Numbers of the values that the call reads."""
        return [leaf.key for leaf in self.leaves if isinstance(leaf, Value)]

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters among its arguments."""
        return [leaf.name for leaf in self.leaves if isinstance(leaf, ProgramParameter)]

    @property
    def makes(self) -> list[int]:
        """Numbers of the values that it computes, except those that changed through a view."""
        return [key for key in self.results if key is not None] + [key for _, key in self.written]


@dataclass(slots=True, kw_only=True)
class Program:
    """The calls of one forward, in order, and its output.

    Attributes:
        nodes: the calls.
        outlines: number of a value -> its shape and dtype.
        output: leaves of the return value, with `Value` in place of computed tensors.
        kept: tensors that modules left in attributes and the loss reads.
        hidden: tensors that modules left in attributes and the loss does not read.
        output_spec: the structure of the return value.
        means: leaves of the return value that are means over targets, by position.
    """

    nodes: list[ProgramCall] = field(default_factory=list)
    outlines: dict[int, Outline] = field(default_factory=dict)
    output: tuple[Any, ...] = ()
    kept: dict[Slot, Any] = field(default_factory=dict)
    hidden: dict[Slot, Any] = field(default_factory=dict)
    output_spec: Form | None = None
    means: dict[int, LossMean] = field(default_factory=dict)

    @property
    def ends(self) -> list[int]:
        """Numbers of the values needed after the forward."""
        return [leaf.key for leaf in (*self.output, *self.kept.values()) if isinstance(leaf, Value)]


_LEAVES = frozenset(
    {torch.Tensor, torch.nn.Parameter, FakeTensor, int, float, bool, str, type(None), torch.dtype, torch.device}
)
"""The most frequent types of leaves. Arguments made of these alone skip torch's slower pytree search."""


LONE_VALUE = Form()


def flatten(value: Any) -> tuple[list[Any], Form]:
    """Leaves and structure of nested tuples, lists, dicts, named tuples and data classes.

    Data classes such as the outputs of `transformers` are registered with torch's pytree when first met.
    """
    if type(value) in _LEAVES:
        return [value], LONE_VALUE
    if type(value) is tuple and len(value) == 2 and type(value[0]) is tuple and type(value[1]) is dict:
        args, kwargs = value
        leaves = [*args, *kwargs.values()]
        if _LEAVES.issuperset(map(type, leaves)):
            return leaves, Form(len(args), tuple(kwargs))
    leaves, spec = pytree.tree_flatten(value)
    new = {type(leaf) for leaf in leaves if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)}
    if not new:
        return leaves, Form(spec=spec)
    for kind in new:
        pytree.register_dataclass(kind)
    return flatten(value)


def unflatten(leaves: list[Any], form: Form) -> Any:
    """Rebuild the structure that `flatten` returned, with other leaves."""
    if form.spec is not None:
        return pytree.tree_unflatten(leaves, form.spec)
    if form.count is None:
        return leaves[0]
    return tuple(leaves[: form.count]), dict(zip(form.names, leaves[form.count :], strict=True))


def refuse_hidden_tensors(leaf: Any, where: str) -> None:
    """Refuse an object that holds tensors in its attributes, which could not be sent between stages.

    Raises:
        PlanError: `leaf` is such an object; `where` names the caller in the message.
    """
    if isinstance(leaf, torch.nn.Module) and any(True for _ in leaf.parameters()):
        raise PlanError(
            f"mesh.stage: {where} takes a module ({type(leaf).__name__}) as an argument, but its parameters may be on "
            "another stage; pass what the module returns, or use another axis than stage"
        )
    if type(leaf) in _LEAVES or isinstance(leaf, torch.nn.Module | torch.Tensor | type):
        return
    if hasattr(leaf, "__dict__") and any(isinstance(inner, torch.Tensor) for inner in _inside(vars(leaf))):
        raise PlanError(
            f"mesh.stage: {where} passes a {type(leaf).__name__} that holds tensors; pass only tensors, tuples, lists, "
            "dicts or data classes between the modules of stages"
        )


def _inside(values: dict[str, Any]) -> Iterator[Any]:
    for value in values.values():
        yield from pytree.tree_leaves(value)
