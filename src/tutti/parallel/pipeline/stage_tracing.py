"""Traces one forward of the user's code on tensors without values, and records it as a `Program`.

The user's code runs unchanged. Calls of units return tensors without values, and operations on these are
recorded. Operations that depend only on the batch are computed at once, so Python may read the batch. Every
forward is traced anew, so Python control flow may differ between forwards. (torch's own tracer for pipelines
copies tied weights into each stage and does not support skip connections.)
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from tutti.errors import PlanError, TuttiError
from tutti.parallel.loss_means import LossMean, means_among, note_mean
from tutti.parallel.pipeline.placeholders import (
    SMALL_NUMEL,
    Attributes,
    StandIns,
    attributes,
    cache_configs,
    functions,
    is_unknown,
    positions,
    script_line,
    surroundings,
    tensor_attributes,
    without_caches,
)
from tutti.parallel.pipeline.shape_inference import Inference, ShapeCache, of_experts
from tutti.parallel.pipeline.stage_placement import Units
from tutti.parallel.pipeline.stage_program import (
    Copied,
    Outline,
    Program,
    ProgramCall,
    ProgramParameter,
    Slot,
    Value,
    flatten,
    refuse_hidden_tensors,
    unflatten,
)
from tutti.parallel.script_hooks import CallWithoutScriptHooks, call_with_script_hooks, has_script_hooks

_MASKED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_UNREADABLE = (DataDependentOutputException, DynamicOutputShapeException)


_NONE: Mapping[Slot, torch.Tensor] = MappingProxyType({})
_NO_MEANS: Mapping[int, LossMean] = MappingProxyType({})

_ONE_CALL = "call the model once and compute the loss from its output, or compute the loss inside modules of the model"


class StopTracing(Exception):
    """Raised to end a trace when the model's own call has returned. `output` is the return value."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A function that calls the model once and does not use its parts otherwise; its trace stops at the model's return.

    Attributes:
        reads: attributes set by modules that the function reads afterwards; None if unknown, so that all are provided.
    """

    reads: frozenset[Slot] | None = None


class Tracer:
    """Traces the forwards of one model.

    Attributes:
        shapes: cached results of units, shared by all traces.
    """

    def __init__(self, model: nn.Module, units: Units, stand_ins: StandIns, device: torch.device) -> None:
        self.model, self.units, self.stand_ins, self.device = model, units, stand_ins, device
        self.shapes = ShapeCache(stand_ins)
        self._configs = cache_configs(model)

    def trace(self, function: Callable[[], Any], ending: Ending | None = None) -> Program:
        """The program of `function()`.

        Args:
            function: calls the model.
            ending: if given, tracing stops at the model's return, and the program's output is the return value.
        """
        return self.traced(function, ending)[0]

    def traced(self, function: Callable[[], Any], ending: Ending | None) -> tuple[Program, bool]:
        """Like `trace`, with whether the results of all units were cached."""
        recorder = ProgramRecorder(self, until_root=ending is not None)
        self._run(recorder, function)
        return recorder.finish(recorder.output, ending), not recorder.followed

    def call_of(self, function: Callable[[], Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments of the model's call in `function()`; None without such a call, or if a part is called first."""

        def called(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            raise StopTracing(None if name else (args, kwargs))

        try:
            with self.stand_ins.in_place(self.units.glue, called):
                function()
        except StopTracing as stop:
            return stop.output  # type: ignore[no-any-return]
        return None

    def ends_with_model(self, function: Callable[[], Any]) -> Ending | None:
        """Determine whether `function()` calls the model exactly once and does not use its parts otherwise.

        Returns:
            An `Ending`, so that later traces may stop at the model's return, or None if they may not.

        Raises:
            PlanError: the function must be traced to its end and cannot be.
        """
        recorder, reads = ProgramRecorder(self, until_root=False), True
        try:
            with self.without_effects():
                self._run(recorder, function)
        except PlanError:
            if recorder.root_calls != 1 or recorder.outside:
                raise
            reads = False  # it was not traced to its end
        if recorder.root_calls != 1 or recorder.outside:
            return None
        return Ending(reads=frozenset(recorder.read) if reads else None)

    @contextmanager
    def without_effects(self) -> Iterator[None]:
        """Restore the attributes and small buffers that traced code changes, such as a counter of forwards."""
        traced = [self.model.get_submodule(name) for name in sorted(self.units.glue)]
        attributes_before = [{k: v for k, v in vars(module).items() if not isinstance(v, dict)} for module in traced]
        buffers = [buffer for module in traced for buffer in module._buffers.values() if buffer is not None]
        buffers = [buffer for buffer in buffers if buffer.numel() <= SMALL_NUMEL and not buffer.is_meta]
        values = [buffer.detach().clone() for buffer in buffers]
        names = [dict(module._buffers) for module in traced]
        try:
            yield
        finally:
            for module, before, own in zip(traced, attributes_before, names, strict=True):
                for key in [key for key, value in vars(module).items() if not isinstance(value, dict)]:
                    if key not in before:
                        del vars(module)[key]
                vars(module).update(before)
                module._buffers.clear()
                module._buffers.update(own)
            with torch.no_grad():
                for buffer, value in zip(buffers, values, strict=True):
                    buffer.copy_(value)

    def finish(
        self,
        function: Callable[[], Any],
        output: Any,
        kept: Mapping[Slot, torch.Tensor] = _NONE,
        means: Mapping[int, LossMean] = _NO_MEANS,
    ) -> Any:
        """Compute the return value of `function()` after the model's part of it is computed.

        Args:
            function: calls the model once.
            output: the return value of that call.
            kept: attributes that modules have set; those that are on other stages are tensors without values.
            means: leaves of the output that are means, with the numbers that they are taken over.

        Raises:
            PlanError: the function uses the model otherwise, although its parameters are on other stages.
        """
        calls: list[str] = []

        def called(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            calls.append(name)
            if name or len(calls) > 1:
                raise PlanError(f"mesh.stage: the loss calls {name or 'the model'} again; {_ONE_CALL}")
            note_means(output, means)
            return output

        in_place = self.stand_ins.in_place(self.units.glue, called)
        with in_place, attributes(self.model, kept), refuse_inner_gradients():
            result = function()
        if any(is_unknown(leaf) for leaf in flatten(result)[0]):
            raise PlanError(f"mesh.stage: the loss uses the model's parameters outside its forward; {_ONE_CALL}")
        return result

    def _run(self, recorder: "ProgramRecorder", function: Callable[[], Any]) -> None:
        self.shapes.modes = self.stand_ins.modes()
        with self.stand_ins.in_place(self.units.glue, recorder.called), functions(recorder.applied), recorder:
            try:
                with without_caches(self._configs), recorder.keeping, refuse_inner_gradients():
                    recorder.output = function()
            except StopTracing as stop:
                recorder.output = stop.output
            except _UNREADABLE as error:
                raise PlanError(
                    f"mesh.stage: {script_line(error)} needs the values of a module's output ({error}); move this "
                    "code into a module of the model, or do not read the values"
                ) from error
            except TuttiError:
                raise
            except Exception as error:  # code that works on values may raise anything without them
                reason = (str(error).splitlines() or [""])[0]
                raise PlanError(
                    f"mesh.stage: the forward cannot be followed without values: {type(error).__name__} at "
                    f"{script_line(error)}: {reason}; if it also fails on one device, mend it there, else drop the "
                    "stage axis"
                ) from error


@contextmanager
def refuse_inner_gradients() -> Iterator[None]:
    """Say what a failing torch.autograd.grad means where the model's modules are on other stages.

    Raises:
        PlanError: the loss differentiates the model.
    """
    try:
        yield
    except RuntimeError as error:
        if "not have been used in the graph" not in str(error):
            raise
        raise PlanError(
            f"mesh.stage: {script_line(error)} differentiates the model with respect to its input or to what its "
            "modules compute (torch.autograd.grad), which are on other stages; use another axis"
        ) from None


def note_means(output: Any, means: Mapping[int, LossMean]) -> None:
    """Note the means that are leaves of a model's output, which other objects stood for in the trace."""
    leaves = flatten(output)[0]
    for at, mean in means.items():
        note_mean(leaves[at], mean.count, mean.key, mean.target)


class ProgramRecorder(TorchFunctionMode):
    """Records one program.

    Attributes:
        until_root: whether to stop when the model's own call returns.
        root_calls: finished calls of the model itself.
        outside: whether a part of the model was used outside such a call.
        output: return value of the traced function.
        followed: whether the result of some unit was not cached.
        paused: whether operations are run without being recorded.
        keeping: attributes that units have set.
        read: attributes set by units and read outside the model's call.
        inside: name of the unit whose result is being inferred.
    """

    def __init__(self, tracer: Tracer, *, until_root: bool) -> None:
        super().__init__()
        self.tracer, self.until_root = tracer, until_root
        self.program = Program()
        self.root_calls = 0
        self.outside = False
        self.output: Any = None
        self.followed = False
        self._depth = 0
        self.paused = False
        self.keeping = Attributes(tracer.model, tracer.units.glue)
        self.read: set[Slot] = set()
        self.inside = ""
        self._keys: dict[int, int] = {}  # id of a tensor without values -> number of its value
        self._placeholders: dict[int, torch.Tensor] = {}  # id of a known tensor that was written to -> its placeholder
        self._alive: list[Any] = []  # keeps tensors alive, so that the ids above stay unique
        self._memory: dict[int, list[torch.Tensor]] = defaultdict(list)  # storage -> the values in it
        self._views: set[int] = set()
        self._captured: list[tuple[torch.Tensor, int]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if func in _MASKED:
            args = positions(args)
        leaves, spec = flatten((args, kwargs))
        kept = next(filter(None, map(self.tracer.stand_ins.kept_name, leaves)), None)
        if kept is not None and func is not torch.Tensor.__hash__:
            self.outside = True
            raise PlanError(
                f"mesh.stage: the loss reads parameter {kept!r} through a reference that the script holds, which not "
                "every stage has; read it from the model that the loss function gets (model.parameters())"
            )
        if not any(
            is_unknown(leaf) or id(leaf) in self._placeholders for leaf in leaves if isinstance(leaf, torch.Tensor)
        ):
            result = func(*args, **kwargs)
            if isinstance(result, torch.Tensor) and result._is_view():
                self._views.add(result.untyped_storage()._cdata)
            return result
        return self.operation(func, leaves, spec)

    def called(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a call of a module during the trace."""
        if self.paused and not self.inside:
            raise PlanError(
                f"mesh.stage: {name or 'the model'} is called from inside a torch function; call it in forward"
            )
        if not self.paused and name not in self.tracer.units.glue:
            if not (self.tracer.stand_ins.hooks_run and has_script_hooks(module)):
                return self._unit(name, module, args, kwargs)
            before = tensor_attributes(module)
            return call_with_script_hooks(module, partial(self._hooked_unit, name, module, before), args, kwargs)
        if self.paused and id(module) in self.tracer.stand_ins.stacked:
            return of_experts(module, *args, **kwargs)
        is_root = not name and not self.paused
        self._depth += is_root
        result = module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        if is_root:
            self.keeping.look()
            self._depth -= 1
            self.root_calls += 1
            if self.until_root:
                self.program.means = means_among(flatten(result)[0])
                raise StopTracing(result)
        return result

    def applied(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call of the user's autograd function as one operation, with its backward."""
        leaves, spec = flatten((args, kwargs))
        if self.paused or not any(is_unknown(leaf) for leaf in leaves):
            return function(*args, **kwargs)
        if function.__self__ is CheckpointFunction:
            raise PlanError(
                "mesh.stage: forward calls checkpoint(use_reentrant=True), which cannot be traced; pass "
                "use_reentrant=False"
            )
        return self.operation(function, leaves, spec)

    def operation(self, func: Callable[..., Any], leaves: list[Any], spec: Any) -> Any:
        """Run an operation on tensors without values and record it."""
        subjects = [self._subject(leaf) for leaf in leaves]
        versions = [_version(subject) for subject in subjects]
        args, kwargs = unflatten(subjects, spec)
        with self._pause():
            result = func(*args, **kwargs)
        written = [at for at, subject in enumerate(subjects) if _version(subject) != versions[at]]
        results, _ = flatten(result)
        if not written and not any(is_unknown(leaf) for leaf in results):
            return result
        self._write("", func, leaves, subjects, spec, results, written)
        originals = {id(subject): leaf for leaf, subject in zip(leaves, subjects, strict=True) if subject is not leaf}
        return originals.get(id(result), result) if isinstance(result, torch.Tensor) else result

    def _hooked_unit(
        self, name: str, module: nn.Module, before: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A unit's call after the script's forward pre-hooks, which must not leave tensors in the unit."""
        for key, tensor in tensor_attributes(module).items():
            if is_unknown(tensor) and tensor is not before.get(key):
                raise PlanError(
                    f"mesh.stage: a forward pre-hook sets {name}.{key}, which only the rank that holds {name} could "
                    "read; set it in the module's own forward"
                )
        return self._unit(name, module, args, kwargs)

    def _unit(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shapes, stand_ins = self.tracer.shapes, self.tracer.stand_ins
        with torch._C.DisableTorchFunction():  # operations in here are not the user's
            leaves, spec = flatten((args, kwargs))
            for leaf in leaves:
                refuse_hidden_tensors(leaf, f"a call of {name}")
            subjects = [self._placeholders.get(id(leaf), leaf) for leaf in leaves]
            inference = shapes.known(name, subjects, spec)
        if inference is None:
            self.followed = True
            with self._pause(name):
                inference = shapes.follow(name, module, subjects, spec)
        with torch._C.DisableTorchFunction(), self._pause(name):
            for at in inference.written:
                subjects[at] = self._subject(leaves[at])
            results = inference.results(subjects, stand_ins)
            function = CallWithoutScriptHooks(module) if has_script_hooks(module) else module
            self._write(name, function, leaves, subjects, spec, results, list(inference.written), inference)
            for slot in reversed(inference.keeps):
                self.keeping.set(slot, results.pop())
            originals = {
                id(subject): leaf for leaf, subject in zip(leaves, subjects, strict=True) if subject is not leaf
            }
            return unflatten([originals.get(id(leaf), leaf) for leaf in results], inference.spec)

    def _write(
        self,
        unit: str,
        func: Callable[..., Any],
        leaves: list[Any],
        subjects: list[Any],
        spec: Any,
        results: list[Any],
        written: list[int],
        inference: Inference | None = None,
    ) -> None:
        """Append a node, and number the values that it makes or changes."""
        read = tuple(self._leaf(leaf, written=at in written) for at, leaf in enumerate(leaves))
        if not self._depth and (unit or any(isinstance(leaf, ProgramParameter) for leaf in read)):
            self.outside = True
        changed: list[tuple[int, int]] = []
        views: list[tuple[int, int]] = []
        for at in written:
            self._may_change(leaves[at], subjects[at], unit or getattr(func, "__name__", str(func)))
            views += self._shared(subjects[at], {id(subjects[other]) for other in written})
            changed.append((at, self._number(subjects[at])))
        numbers: list[int | None] = []
        for leaf in results:
            fresh = is_unknown(leaf) and not any(leaf is subject for subject in subjects)
            numbers.append(self._number(leaf) if fresh else None)
        self.program.nodes.append(
            ProgramCall(
                unit=unit,
                function=func,
                leaves=read,
                spec=spec,
                results=tuple(numbers),
                written=tuple(changed),
                views=tuple(views),
                surroundings=surroundings(self.tracer.device),
                keeps=inference.keeps if inference else (),
                cost=inference.cost if inference else 0.0,
            )
        )

    def finish(self, output: Any, ending: Ending | None) -> Program:
        """The recorded program, with `output` as its return value."""
        leaves, spec = flatten(output)
        if ending is not None:
            slots = sorted(self.keeping.now.items())
            slots = [(slot, tensor) for slot, tensor in slots if id(tensor) in self._keys or not is_unknown(tensor)]
            values = {slot: self._leaf(tensor, written=False) for slot, tensor in slots}
            reads = set(values) if ending.reads is None else ending.reads
            self.program.kept = {slot: value for slot, value in values.items() if slot in reads}
            self.program.hidden = {slot: value for slot, value in values.items() if slot not in reads}
        self.program.output = tuple(self._leaf(leaf, written=False) for leaf in leaves)
        self.program.output_spec = spec
        for tensor, version in self._captured:
            if tensor._version != version:
                raise PlanError(
                    f"mesh.stage: forward changes a tensor of shape {tuple(tensor.shape)} in place after it was used; "
                    "make a new tensor instead (mask = mask | other)"
                )
        return self.program

    def _subject(self, leaf: Any) -> Any:
        """The placeholder of an argument: a known tensor contributes only its shape."""
        if not isinstance(leaf, torch.Tensor) or is_unknown(leaf):
            return leaf
        return (
            self._placeholders.get(id(leaf)) if id(leaf) in self._placeholders else self.tracer.stand_ins.outline(leaf)
        )

    def _leaf(self, leaf: Any, *, written: bool) -> Any:
        """The form in which an argument is recorded."""
        if not isinstance(leaf, torch.Tensor):
            refuse_hidden_tensors(leaf, "an operation")
            return leaf
        subject = self._placeholders.get(id(leaf), leaf)
        if id(subject) in self._keys:
            if not self._depth:
                self.read |= {slot for slot, tensor in self.keeping.now.items() if tensor is subject}
            return Value(self._keys[id(subject)])
        if id(subject) in self.tracer.stand_ins.names:
            return ProgramParameter(self.tracer.stand_ins.names[id(subject)])
        if is_unknown(subject):
            raise PlanError(
                f"mesh.stage: forward uses a buffer of shape {tuple(leaf.shape)} outside the module that owns it; use "
                "it in that module's forward, or register it in the module whose forward needs it"
            )
        if written:
            return Copied(leaf)
        self._captured.append((leaf, leaf._version))
        return leaf

    def _may_change(self, leaf: Any, subject: Any, operation: str) -> None:
        """Turn a tensor that is changed in place into a value from here on.

        Raises:
            PlanError: the tensor is a parameter, a buffer, or shares memory with other known tensors.
        """
        if id(subject) in self.tracer.stand_ins.names:
            name = self.tracer.stand_ins.names[id(subject)]
            raise PlanError(f"mesh.stage: {operation} changes parameter {name} in forward; leave that to the optimizer")
        if is_unknown(leaf) or id(leaf) in self._placeholders:
            return
        shared = leaf._is_view() or leaf.untyped_storage()._cdata in self._views
        if shared or any(leaf is buffer for buffer in self.tracer.model.buffers()):
            kind = "a view of another tensor" if shared else "a buffer of the model"
            raise PlanError(
                f"mesh.stage: {operation} writes a module's output into {kind} of shape {tuple(leaf.shape)}; make a "
                "new tensor (torch.stack, torch.cat), or do it inside one module"
            )
        self._placeholders[id(leaf)] = subject
        self._alive.append(leaf)

    def _shared(self, subject: torch.Tensor, written: set[int]) -> list[tuple[int, int]]:
        """Renumber the other values in the memory of `subject`. Returns (old number, new number) pairs."""
        others = self._memory[subject.untyped_storage()._cdata]
        return [(self._keys[id(other)], self._number(other)) for other in list(others) if id(other) not in written]

    def _number(self, tensor: torch.Tensor) -> int:
        """A new number for the present values of a tensor."""
        key = len(self.program.outlines)
        if id(tensor) not in self._keys:
            self._alive.append(tensor)
            self._memory[tensor.untyped_storage()._cdata].append(tensor)
        self._keys[id(tensor)] = key
        self.program.outlines[key] = Outline(
            shape=tuple(tensor.shape), dtype=tensor.dtype, requires_grad=tensor.requires_grad
        )
        return key

    @contextmanager
    def _pause(self, unit: str = "") -> Iterator[None]:
        before, self.paused, self.inside = (self.paused, self.inside), True, unit
        try:
            yield
        finally:
            self.paused, self.inside = before


def _version(leaf: Any) -> int:
    return leaf._version if isinstance(leaf, torch.Tensor) else 0
