"""Parameters that a loss reads itself, outside of the modules' forward: penalties, shared weights, other methods.

A rank holds a part of them. While the script's loss function runs outside of any module of the model, torch functions
called with a part get the whole parameter, with the gradient that one device would have; what cannot be whole there is
refused.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from tutti.errors import ScriptError
from tutti.parallel.divided_tensor import name_of
from tutti.parallel.layout import Layout
from tutti.parallel.sharding.sharded_gradients import Shards
from tutti.parallel.tensor.apply_tensor_parallel import whole_parameter

OF_THE_PART = frozenset(
    [
        "__hash__",
        "get:requires_grad",
        "get:dtype",
        "get:device",
        "get:is_leaf",
        "get:layout",
        "get:grad",
        "get:grad_fn",
        "get:is_cuda",
        "get:is_cpu",
        "get:is_meta",
        "get:is_sparse",
        "get:is_quantized",
        "get:_backward_hooks",
        "get:_version",
        "get:output_nr",
        "get:names",
        "get:itemsize",
        "is_floating_point",
        "is_complex",
        "element_size",
        "get_device",
        "data_ptr",
        "dim",
        "requires_grad_",
        "register_hook",
        "register_post_accumulate_grad_hook",
    ]
)
"""Functions that do not concern values, or only in the sense of the tensor that the optimizer holds."""


class PartReads(TorchFunctionMode):
    """Gives a loss function whole parameters in place of this rank's parts.

    Args:
        model: the divided model.
        layout: this rank's parts.
        shards: gathers parameters that are sharded.
        originals: the parameters before the model was divided, by name; the script may still hold them.
    """

    def __init__(self, model: nn.Module, layout: Layout, shards: Shards, originals: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._model, self._layout, self._shards = model, layout, shards
        self._splits = layout.mesh.degree("split") > 1
        self._modules = {id(module) for module in model.modules()}
        self._names: dict[int, tuple[str, Callable[[], Any]]] = {}
        current = dict(model.named_parameters(remove_duplicate=False))
        self._absent = next((name for name in originals if name not in current), None)
        self._sharded = [(pack.others, sharded) for pack in shards.packs() for sharded in pack.parameters]
        alternatives = shards.parts()
        for name, original in originals.items():
            part = current.get(name)
            if part is not original:
                self._names[id(original)] = (name, weakref.ref(original))
            if part is not None and (part is not original or self._absent or self._is_shared(name)):
                for tensor in (part, *alternatives.get(layout.first_name(name), ())):
                    self._names[id(tensor)] = (name, weakref.ref(tensor))

    @property
    def needed(self) -> bool:
        """Whether any parameter of the model is not whole on this rank."""
        return bool(self._names)

    def active(self) -> AbstractContextManager[None]:
        """Give whole parameters meanwhile, except within calls of the model's modules."""
        return self._giving() if self._names else nullcontext()

    @contextmanager
    def _giving(self) -> Iterator[None]:
        hook = register_module_forward_pre_hook(self._entered)
        calls: list[Any] = []
        self._hooks = (hook, calls)
        with self._shards.loss_reads(), self:
            try:
                yield
            finally:
                self._hooks[0].remove()

    def _entered(self, module: nn.Module, args: Any) -> None:
        """A module is called from the loss: within it, parameters are what its forward expects."""
        if id(module) not in self._modules:
            return
        self._hooks[0].remove()
        _pop_mode()  # type: ignore[no-untyped-call]

        def left(module: nn.Module, args: Any, output: Any) -> None:
            handle.remove()
            _push_mode(self)  # type: ignore[no-untyped-call]
            self._hooks = (register_module_forward_pre_hook(self._entered), self._hooks[1])

        handle = module.register_forward_hook(left, always_call=True)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if name in OF_THE_PART:
            return func(*args, **kwargs)
        self._refuse_writes(name, args, kwargs)
        return func(*map(self._read, args), **{key: self._read(value) for key, value in kwargs.items()})

    def part_name(self, value: Any) -> str | None:
        """The name of the parameter that `value` is a part of; None for all other values."""
        if not isinstance(value, torch.Tensor):
            return None
        name, alive = self._names.get(id(value), (None, None))
        if alive is not None and alive() is value:
            return name
        # What the ranks of shard gather may be a part along split.
        return self._gathered_name(value) if self._splits and isinstance(value, nn.Parameter) else None

    def _read(self, value: Any) -> Any:
        """The whole parameter in place of a part; lists are searched too."""
        if isinstance(value, list | tuple) and any(isinstance(item, torch.Tensor) for item in value):
            return type(value)(map(self._read, value)) if type(value) in (list, tuple) else value
        name = self.part_name(value)
        return value if name is None else self._whole(name)

    def _whole(self, name: str) -> torch.Tensor:
        if self._absent is None:
            self._shards.gather_for_loss(self._layout.first_name(name))
            whole = whole_parameter(self._model, name)
            if tuple(whole.shape) == self._layout.names[name]:
                if self._is_shared(name):  # its gradients on the ranks of split will be added up
                    return whole.detach() + (whole - whole.detach()) / self._layout.mesh.degree("split")
                return whole
        divided = name if self._absent is None else self._absent
        raise ScriptError(
            f"the loss reads parameter {name!r} outside of the modules' forward, but {divided!r} is divided over "
            f"{self._axes()}, and this rank sees only its part; use the optimizer's weight decay instead of a penalty, "
            "or keep the module whole: LayoutRule(modules=..., placement='replicate')"
        )

    def _axes(self) -> str:
        """The axes over which parameters are divided so that no rank can see them whole."""
        degrees = self._layout.mesh.degrees
        return " and ".join(f"mesh.{axis}" for axis in ("stage", "expert", "table") if degrees.get(axis, 1) > 1)

    def _gathered_name(self, tensor: nn.Parameter) -> str | None:
        return next((sharded.name for _, sharded in self._sharded if sharded.whole is tensor), None)

    def _is_shared(self, name: str) -> bool:
        """Whether each rank of split uses a part of a whole parameter, so that gradients are added up."""
        first = self._layout.first_name(name)
        axes = next((others for others, sharded in self._sharded if sharded.name == first), None)
        return self._splits and "split" in (self._layout.shard_of(name).sums if axes is None else axes)

    def _refuse_writes(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        written = (name.endswith("_") and not name.endswith("__")) or name.startswith("set:") or name == "__setitem__"
        target = args[0] if args and (written or name == "get:data") else kwargs.get("out")
        parameter = self.part_name(target)
        if parameter is not None:
            what = "reads .data of" if name == "get:data" else "changes"
            raise ScriptError(
                f"the loss {what} parameter {parameter!r}, of which this rank holds a part; read .detach() of it, and "
                "change parameters between steps"
            )
