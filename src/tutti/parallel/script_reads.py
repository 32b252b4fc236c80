"""Parameters and gradients that the script reads between steps, of which a rank holds a part or nothing.

A rank's part looks like a parameter, so a norm, a count or a copy of it would be wrong without a word. Between the
calls of a Job, torch functions that the script calls with a part are treated by kind. What computes each element by
itself runs on the part. Sizes are those of the whole parameter, and so are norms, which all ranks compute together. All
else is refused. Parameters of other stages have the shape of the whole and no values.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils.weak import WeakTensorKeyDictionary

from tutti.comm.point_to_point import ring_all_reduce_nbytes
from tutti.config.mesh_axes import format_mesh
from tutti.errors import ScriptError
from tutti.parallel import part_guards
from tutti.parallel.divided_tensor import name_of
from tutti.parallel.layout import Layout, square_of
from tutti.parallel.part_reads import OF_THE_PART, PartReads
from tutti.parallel.whole_model import ModuleChanges

_SIZES = frozenset({"get:shape", "size", "numel", "nelement", "__len__", "get:nbytes"})

_SHAPELESS = frozenset({"get:ndim", "get:grad_dtype", "ndimension"})

_TO_OTHERS = frozenset({"to", "type_as"})
"""Functions that give their first argument the dtype or device of another, and nothing of its values."""

_MOVES = frozenset({"to", "cpu", "cuda", "type_as"})

_NORMS = frozenset({"norm", "vector_norm", "linalg_vector_norm", "_foreach_norm"})

_COPIES = frozenset(
    [
        "__and__", "__iand__", "__invert__", "__ior__", "__or__", "bfloat16", "clone", "constant_", "contiguous",
        "copy_", "cpu", "cuda", "detach", "detach_", "double", "empty_like", "fill_", "float", "full_like", "get:data",
        "half", "ones_like", "set:data", "set:grad", "set:requires_grad", "to", "type_as", "zero_", "zeros_like",
    ]
)  # fmt: skip
"""Functions whose results, of the same shape, are parts too; beside those that torch calls pointwise."""

_OF_MODULES = tuple(
    method.__code__
    for method in (nn.Module._call_impl, nn.Module._load_from_state_dict, nn.Module._apply, nn.Module.zero_grad)
)
"""Methods of modules that may treat a part as the parameter: guards and checks of the next step watch them."""

OF_OPTIMIZER, COMPUTED, STATE = "optimizer's part", "computed", "optimizer's state"
"""Kinds of parts, beside "parameter" and "gradient": what optimizers hold, and what was computed from parameters."""

MOST_STORAGES = 4096
"""Of so many parts and copies of parts, those that are gone are forgotten."""

_LAUNCHING = ("tutti.launch.", "tutti.commands.", "tutti.cli.")


def _current_mode() -> Any:
    return torch.overrides._get_current_function_mode()  # type: ignore[no-untyped-call]


@lru_cache(maxsize=1024)
def _is_elementwise(name: str) -> bool:
    """Whether a torch function computes each element from the elements at its place."""
    if name in _COPIES:
        return True
    base = name.removeprefix("_foreach_")
    if base.startswith("__") and base.endswith("__"):
        base = base.strip("_")
        base = (
            f"{base[1:]}_" if base.startswith("i") and hasattr(torch.Tensor, f"{base[1:]}_") else base.removeprefix("r")
        )
    packet = getattr(torch.ops.aten, {"truediv": "div", "truediv_": "div_"}.get(base, base), None)
    kinds = [getattr(packet, kind).tags for kind in packet.overloads()] if packet is not None else []
    if any(torch.Tag.nondeterministic_seeded in tags for tags in kinds) or base == "equal":
        return False
    return base == "zero_" or any(torch.Tag.pointwise in tags for tags in kinds)


class ScriptReads(TorchFunctionMode):
    """Watches what the script does with parts of parameters and gradients between the calls of a Job.

    Args:
        model: the divided model.
        optimizers: those of the run.
        layout: this rank's parts.
        reads: knows which tensors are parts.
        originals: the parameters before the model was divided, by name.

    Attributes:
        absent: parameters of other stages, without values.
        together: context in which all ranks do what is named.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        layout: Layout,
        reads: PartReads,
        originals: Mapping[str, nn.Parameter],
    ) -> None:
        super().__init__()
        self._model, self._optimizers, self._layout, self._reads = model, optimizers, layout, reads
        self._modules = {id(module) for module in model.modules()}
        self.together: Callable[[str], Any] = lambda name: nullcontext()
        self._derived = WeakTensorKeyDictionary()
        self._lacks = layout.mesh.degree("stage", "table") > 1  # some ranks lack parameters
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        here = dict(model.named_parameters(remove_duplicate=False))
        absent = {id(parameter): parameter for name, parameter in originals.items() if name not in here}
        outlines = {
            key: nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
            for key, parameter in absent.items()
        }
        self.absent = {name: outlines[id(parameter)] for name, parameter in originals.items() if name not in here}
        for name, parameter in self.absent.items():
            self._derived[parameter] = (name, "parameter")
        self._storages: dict[tuple[int, int], tuple[StorageWeakRef, tuple[str, str]]] = {}
        self._state: dict[int, tuple[torch.Tensor, str]] | None = None

    def watch(self) -> None:
        """Begin to watch, in place of an earlier Job: the script runs from here on."""
        while isinstance(_current_mode(), ScriptReads):
            _pop_mode()  # type: ignore[no-untyped-call]
        self._state = None
        if self._reads.needed or self._layout.states.shards:
            _push_mode(self)  # type: ignore[no-untyped-call]

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Do not watch within the context, in which the Job works."""
        watching = self.rest()
        try:
            yield
        finally:
            if watching:
                self.watch()

    def rest(self) -> bool:
        """Do not watch until `watch` is called; return whether this did so before."""
        watching = _current_mode() is self
        if watching:
            _pop_mode()  # type: ignore[no-untyped-call]
        return watching

    def script_calls(self, frame: FrameType | None) -> bool:
        """Whether the script itself runs in `frame`: neither a Job's method nor a module of the model is at work."""
        if part_guards.may_read():
            return False
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            if module.startswith("tutti.") and not module.startswith(_LAUNCHING):
                return False
            if frame.f_code in _OF_MODULES and id(frame.f_locals.get("self")) in self._modules:
                return False
            frame = frame.f_back
        return True

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not args and (key := next((key for key in ("input", "self") if key in kwargs), None)):
            args = (kwargs.pop(key),)
        with torch._C.DisableTorchFunction():  # or other modes would be asked for each look
            tensors = list(_tensors((*args, *kwargs.values())))
            parts = [(tensor, *known) for tensor in tensors if (known := self._known(tensor))]
            others = not parts and any(tensor.dim() and not tensor.requires_grad for tensor in tensors)
        if not (parts or others) or not self.script_calls(sys._getframe(1)):
            return func(*args, **kwargs)
        if not parts:
            with torch._C.DisableTorchFunction():
                parts = [(tensor, name, STATE) for tensor in tensors if (name := self._state_name(tensor))]
            if not parts:
                return func(*args, **kwargs)
        name = name_of(func)
        first, parameter, kind = parts[0]
        if not args:
            raise self._refused(name, parameter, kind)
        if name in _TO_OTHERS and first is not args[0]:
            return args[0].to(dtype=first.dtype, device=self._device if first.is_meta else first.device)
        if first.is_meta and name == "get:device":
            return self._device
        if first.is_meta and name in _MOVES:
            return first
        if kind == OF_OPTIMIZER and name == "get:grad":  # of its own, it has that of the last update
            return self._model.get_parameter(parameter).grad
        if name in OF_THE_PART or name in _SHAPELESS or (kind == STATE and name in _SIZES):
            result = func(*args, **kwargs)
            return self._gradient(first, parameter, result) if name == "get:grad" else result
        if name in _SIZES and (kind == OF_OPTIMIZER or self._has_parts_shape(first, parameter)):
            return func(torch.empty(self._layout.names[parameter], device="meta"), *args[1:], **kwargs)
        if name in _NORMS and kind not in (OF_OPTIMIZER, STATE) and not self._lacks and _is_whole_norm(args, kwargs):
            return self._norms(args[0])
        if not _is_elementwise(name):
            raise self._refused(name, parameter, kind)
        return self._elementwise(name, func, args, kwargs, parts[0])

    def _known(self, tensor: torch.Tensor) -> tuple[str, str] | None:
        """(parameter, kind) of a part; None for all other tensors."""
        name = self._reads.part_name(tensor)
        if name is not None:
            return name, "parameter"
        name = self._optimizers_name(tensor)
        if name is not None:
            return name, OF_OPTIMIZER
        known: tuple[str, str] | None = self._derived.get(tensor)  # type: ignore[no-untyped-call]
        if known is None and self._storages and tensor.layout is torch.strided:
            # nn.Parameter(tensor), copies and the like make a tensor of the same memory, of which no mode is told.
            memory, known = self._storages.get(_place(tensor), (None, None))
            if memory is None or _is_gone(memory):
                return None
        return known

    def _optimizers_name(self, tensor: torch.Tensor) -> str | None:
        """The name of the parameter of which an optimizer holds a part; the model has it whole (sharding level 1)."""
        states = self._layout.states
        if not states.shards or not isinstance(tensor, nn.Parameter):
            return None
        name = states.substitutes.get(tensor)
        return name if name in states.shards else None

    def _state_name(self, tensor: torch.Tensor) -> str | None:
        """The name of the parameter of which an optimizer keeps the tensor."""
        if self._state is None:
            self._state = self._tensors_of_state()
        return self._state[id(tensor)][1] if id(tensor) in self._state else None

    def _tensors_of_state(self) -> dict[int, tuple[torch.Tensor, str]]:
        """What the optimizers keep for each parameter, with the parameter's name; other ranks keep more of it."""
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        found = {}
        for parameter, state in [entry for optimizer in self._optimizers for entry in optimizer.state.items()]:
            name = names.get(id(parameter)) or self._optimizers_name(parameter) or "a parameter"
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor) and value.dim():
                    found[id(value)] = value, name
        return found

    def _gradient(self, parameter: torch.Tensor, name: str, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if parameter.is_meta and gradient is None and parameter.requires_grad:
            gradient = torch.empty_like(parameter)
        if gradient is not None:
            self._note(gradient, (name, "gradient"))
        return gradient

    def _has_parts_shape(self, tensor: torch.Tensor, name: str) -> bool:
        return tensor.is_meta or tuple(tensor.shape) == self._layout.shard_of(name).local_shape

    def _elementwise(
        self,
        name: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        part: tuple[torch.Tensor, str, str],
    ) -> Any:
        """Compute on parts what each element has for itself; the results are parts."""
        first, parameter, kind = part
        writes = (name.endswith("_") and not name.endswith("__")) or name.startswith(("set:", "__i"))
        if isinstance(args[0], list | tuple):
            return self._by_element(name, func, args, kwargs, writes=writes)
        others = [tensor for tensor in _tensors((*args, *kwargs.values())) if tensor.numel() > 1]
        if writes and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            return args[0]  # its own stage does that
        mixed = len({tensor.is_meta for tensor in others}) > 1
        if mixed or any(tensor.shape != first.shape for tensor in others if tensor.dim() >= first.dim()):
            raise self._refused(name, parameter, kind)
        result = func(*args, **kwargs)
        results = list(_tensors((result,)))
        if (not results and result is not None) or any(tensor.shape != first.shape for tensor in results):
            raise self._refused(name, parameter, kind)
        for tensor in results:
            self._note(tensor, (parameter, kind))
        return result

    def _by_element(
        self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, writes: bool
    ) -> Any:
        """Compute on lists: element i of the result is made of element i of each list."""
        rows = [value for value in args if isinstance(value, list | tuple)]
        made_of, here = [], []
        for place, tensors in enumerate(zip(*rows, strict=True)):
            known = [known for tensor in tensors if isinstance(tensor, torch.Tensor) and (known := self._known(tensor))]
            made_of.append(known[0] if known else None)
            absent = [isinstance(tensor, torch.Tensor) and tensor.is_meta for tensor in tensors]
            if not (writes and absent[0]):
                here.append(place)
                shapes = {tensor.shape for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.numel() > 1}
                if any(absent) or (known and len(shapes) > 1):
                    raise self._refused(name, *known[0])
        taken = [[value[place] for place in here] if any(value is row for row in rows) else value for value in args]
        result = func(*taken, **kwargs)
        for place, tensor in zip(here, taken[0] if result is None else result, strict=True):
            self._note(tensor, made_of[place])
        return result

    def _note(self, tensor: torch.Tensor, known: tuple[str, str] | None) -> None:
        if known is None or self._known(tensor) is not None:
            return
        known = self._derived[tensor] = known[0], COMPUTED if known[1] == "parameter" else known[1]
        if tensor.layout is torch.strided and not tensor.is_meta:
            if len(self._storages) >= MOST_STORAGES:
                self._storages = {at: kept for at, kept in self._storages.items() if not _is_gone(kept[0])}
            self._storages[_place(tensor)] = _memory(tensor), known

    def _norms(self, tensors: Any) -> Any:
        """Return the norm of each whole tensor. Collective."""
        single = isinstance(tensors, torch.Tensor)
        those = [tensors] if single else list(tensors)
        squares = torch.zeros(len(those), dtype=torch.float64, device=self._device)
        shared = []
        with torch._C.DisableTorchFunction(), self.together("the norm of a parameter or gradient"):
            for place, tensor in enumerate(those):
                known = self._known(tensor)
                own = square_of(tensor.detach())
                if known is None:
                    shared.append((place, own))
                elif self._layout.counts(known[0]):
                    squares[place] = own
            with self._layout.channel("scalars").waiting(ring_all_reduce_nbytes(squares, self._layout.mesh.world_size)):
                dist.all_reduce(squares)
            for place, own in shared:
                squares[place] = own
            norms = [square.sqrt().to(tensor.dtype) for square, tensor in zip(squares, those, strict=True)]
        return norms[0] if single else norms

    def _refused(self, name: str, parameter: str, kind: str) -> ScriptError:
        degrees = {axis: n for axis in part_guards.DIVIDING if (n := self._layout.mesh.degree(axis)) > 1}
        remedy = {
            "parameter": "read it inside `with job.whole_model():`",
            COMPUTED: "compute it inside `with job.whole_model():`",
            "gradient": "clip with Job(clip_norm=...), or keep gradients whole with replicas or sharding level 1",
            OF_OPTIMIZER: "read the model's own parameter",
            STATE: "read it under a plan of replicas only",
        }[kind]
        words = {"parameter": "parameter", COMPUTED: "what was computed from parameter"}
        what = f"{words.get(kind, f'the {kind} of')} {parameter!r}"
        return ScriptError(
            f"between steps, {name.removeprefix('get:')} would see only this rank's part of {what}, since the plan "
            f"divides it ({format_mesh(degrees)}); {remedy}"
        )

    def leave_out_absent(self, optimizers: Iterable[Optimizer]) -> None:
        """Leave out of the optimizers what the script has added of other stages, whose ranks update it."""
        absent = set(map(id, self.absent.values()))
        for group in [group for optimizer in optimizers if absent for group in optimizer.param_groups]:
            if any(id(parameter) in absent for parameter in group["params"]):
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in absent]

    def show_absent(self, model: nn.Module, division: ModuleChanges) -> None:
        """Let `parameters()` and `named_parameters()` of modules give the script those of other stages, too."""
        owners: dict[int, dict[str, nn.Parameter]] = {}
        for name, parameter in self.absent.items():
            if name in division.places:  # a shared module has one place
                _, module, key = division.places[name]
                owners.setdefault(id(module), {})[key] = parameter
        buffers = {
            id(module): name
            for name, (table, module, key) in division.places.items()
            if name not in division.parameters and table.get(key) is None and self._lacks
        }
        for module in model.modules():
            if any(id(inner) in owners for inner in module.modules()):
                vars(module)["named_parameters"] = _NamedParameters(module, owners, self)
            absent = next((buffers[id(inner)] for inner in module.modules() if id(inner) in buffers), None)
            if absent is not None:
                vars(module)["named_buffers"] = _NamedBuffers(module, absent, self)


class _NamedParameters:
    """`named_parameters` of a module that lacks some."""

    def __init__(self, module: nn.Module, owners: dict[int, dict[str, nn.Parameter]], reads: ScriptReads) -> None:
        self._module, self._owners, self._reads = module, owners, reads

    def __call__(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        if not self._reads.script_calls(sys._getframe(1)):
            return nn.Module.named_parameters(self._module, prefix, recurse, remove_duplicate)
        members: Iterator[tuple[str, nn.Parameter]] = self._module._named_members(
            self._with_absent, prefix=prefix, recurse=recurse, remove_duplicate=remove_duplicate
        )
        return members

    def _with_absent(self, module: nn.Module) -> list[tuple[str, Any]]:
        absent = self._owners.get(id(module), {})
        return [(key, absent.get(key) if value is None else value) for key, value in module._parameters.items()]


class _NamedBuffers:
    """`named_buffers` of a module that lacks some."""

    def __init__(self, module: nn.Module, absent: str, reads: ScriptReads) -> None:
        self._module, self._absent, self._reads = module, absent, reads

    def __call__(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        if self._reads.script_calls(sys._getframe(1)):
            raise ScriptError(
                f"between steps, the buffers of {type(self._module).__name__} are not all on this rank: "
                f"{self._absent!r} is on another stage; read them inside `with job.whole_model():`"
            )
        return nn.Module.named_buffers(self._module, prefix, recurse, remove_duplicate)


def _tensors(values: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(tuple(value))


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset())


def _memory(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _is_gone(memory: StorageWeakRef) -> bool:
    return bool(memory.expired())  # type: ignore[no-untyped-call]


def _is_whole_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the arguments ask for the Euclidean norm over all elements."""
    names = ("ord", "dim", "keepdim", "out", "dtype")
    options = {"ord": 2, **dict(zip(names, args[1:], strict=False)), **kwargs}
    order = options.pop("p", options.pop("ord"))
    return order in (2, None, "fro") and all(value is None or value is False for value in options.values())
