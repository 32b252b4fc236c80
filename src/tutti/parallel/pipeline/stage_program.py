"""The program of one forward: what the user's code did, as a straight line of operations on values."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from tutti.errors import PlanError


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that some node computes. `key`: its number in the program."""

    key: int


@dataclass(frozen=True, slots=True)
class ProgramParameter:
    """A parameter of the model, by the first of its names."""

    name: str


@dataclass(frozen=True, slots=True)
class Argument:
    """A tensor that the model was called with, in a program that serves several forwards: leaf `at` of the call."""

    at: int


@dataclass(frozen=True, slots=True)
class Copied:
    """A known tensor that the node writes to: every run writes to a copy of its own."""

    tensor: torch.Tensor


Slot = tuple[str, str]
"""A tensor that a module keeps as a plain attribute: names of the module and of the attribute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What is known of a value before it is computed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Grad mode and autocast at a node: (enabled, dtype) of autocast on the model's device."""

    grad: bool
    autocast: tuple[bool, torch.dtype]


@dataclass(frozen=True, slots=True)
class Form:
    """How leaves are put together: (args, kwargs) with `count` args and kwargs called `names`, or as `spec` says, or
    one leaf alone.
    """

    count: int | None = None
    names: tuple[Any, ...] = ()
    spec: pytree.TreeSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCall:
    """One call. `unit`: name of the module that is called, "" for an operation (`function`).

    `leaves` and `spec` are (args, kwargs) with `Value`, `ProgramParameter`, `Copied` and `Argument` in place of
    tensors; `results`: the number of the value that each leaf of the result is, None for one that is no new value;
    `written`: (position in leaves, number) of arguments that the call changed, which are new values from there on;
    `views`: (old number, new number) of other values that changed with them because they share their memory; `keeps`:
    attributes in which the unit leaves tensors, which are its results too, the last ones; `cost`: FLOPs, where they
    were counted.
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
        """Numbers of the values it reads."""
        return [leaf.key for leaf in self.leaves if isinstance(leaf, Value)]

    @property
    def parameters(self) -> list[str]:
        """Names of the parameters that are among its arguments."""
        return [leaf.name for leaf in self.leaves if isinstance(leaf, ProgramParameter)]

    @property
    def makes(self) -> list[int]:
        """Numbers of the values that are its own (not those that changed through a view)."""
        return [key for key in self.results if key is not None] + [key for _, key in self.written]


@dataclass(slots=True, kw_only=True)
class Program:
    """Nodes in order, and what the forward returned (`output`: leaves with `Value` in place of computed tensors).
    `kept`: what modules left in attributes that the loss reads; `hidden`: in others.
    """

    nodes: list[ProgramCall] = field(default_factory=list)
    outlines: dict[int, Outline] = field(default_factory=dict)
    output: tuple[Any, ...] = ()
    kept: dict[Slot, Any] = field(default_factory=dict)
    hidden: dict[Slot, Any] = field(default_factory=dict)
    output_spec: Form | None = None

    @property
    def ends(self) -> list[int]:
        """Numbers of the values that are needed when the forward is over."""
        return [leaf.key for leaf in (*self.output, *self.kept.values()) if isinstance(leaf, Value)]


_LEAVES = frozenset(
    {torch.Tensor, torch.nn.Parameter, FakeTensor, int, float, bool, str, type(None), torch.dtype, torch.device}
)
"""Types of leaves that are met most: what consists of them needs none of torch's search for containers."""


LONE_VALUE = Form()


def flatten(value: Any) -> tuple[list[Any], Form]:
    """Leaves of nested tuples, lists, dicts, named tuples and data classes (such as `transformers`' outputs)."""
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
    """What `flatten` took apart, with other leaves."""
    if form.spec is not None:
        return pytree.tree_unflatten(leaves, form.spec)
    if form.count is None:
        return leaves[0]
    return tuple(leaves[: form.count]), dict(zip(form.names, leaves[form.count :], strict=True))


def refuse_hidden_tensors(leaf: Any, where: str) -> None:
    """Raise PlanError for an object that keeps tensors where they cannot be seen: they could not be sent on."""
    if type(leaf) in _LEAVES or isinstance(leaf, torch.nn.Module | torch.Tensor | type):
        return
    if hasattr(leaf, "__dict__") and any(isinstance(inner, torch.Tensor) for inner in _inside(vars(leaf))):
        raise PlanError(
            f"mesh.stage: {where} passes a {type(leaf).__name__} that holds tensors; pass tensors, tuples, lists, "
            "dicts or data classes between the modules that stages are made of"
        )


def _inside(values: dict[str, Any]) -> Iterator[Any]:
    for value in values.values():
        yield from pytree.tree_leaves(value)
