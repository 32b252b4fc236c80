"""Trace: one forward of the user's code on shapes, written down as a Program.

The code runs as it stands. Calls of units give tensors without values; what is computed from those is written down
too. What depends only on the batch is computed at once, so Python that looks at the batch works, and every forward is
traced anew, so Python that decides otherwise is followed. (torch's own tracer copies tied weights into each stage and
knows no skip connections.)
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from tutti.errors import PlanError
from tutti.parallel.pipeline.placeholders import (
    Attributes,
    StandIns,
    attributes,
    cache_configs,
    functions,
    is_unknown,
    positions,
    script_line,
    surroundings,
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

_MASKED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
_UNREADABLE = (DataDependentOutputException, DynamicOutputShapeException)


_NONE: Mapping[Slot, torch.Tensor] = MappingProxyType({})

_ONE_CALL = (
    "let one function call the model once and compute the loss from what it returns, or write it with modules only"
)


class StopTracing(Exception):
    """Raised to end a trace when the model's own call has returned. `output`: what it returned."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A function that calls the model once and touches no part of it otherwise. `reads`: attributes in which modules
    left tensors that it reads afterwards; None where any may be.
    """

    reads: frozenset[Slot] | None = None


class Tracer:
    """Traces forwards of one model. `shapes`: what is known of the units' results, kept between traces."""

    def __init__(self, model: nn.Module, units: Units, stand_ins: StandIns, device: torch.device) -> None:
        self.model, self.units, self.stand_ins, self.device = model, units, stand_ins, device
        self.shapes = ShapeCache(stand_ins)
        self._configs = cache_configs(model)

    def trace(self, function: Callable[[], Any], ending: Ending | None = None) -> Program:
        """The program of `function()`.

        `ending`: stop when the model's call returns, and take what it returned.
        """
        return self.traced(function, ending)[0]

    def traced(self, function: Callable[[], Any], ending: Ending | None) -> tuple[Program, bool]:
        """`trace`, and whether the shapes of all units' results were known before."""
        recorder = ProgramRecorder(self, until_root=ending is not None)
        self._run(recorder, function)
        return recorder.finish(recorder.output, ending), not recorder.followed

    def call_of(self, function: Callable[[], Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments that `function()` calls the model with; None where it does anything else with it before."""

        def called(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            raise StopTracing(None if name else (args, kwargs))

        try:
            with self.stand_ins.in_place(self.units.glue, called):
                function()
        except StopTracing as stop:
            return stop.output  # type: ignore[no-any-return]
        return None

    def ends_with_model(self, function: Callable[[], Any]) -> Ending | None:
        """Whether `function()` calls the model itself once and touches no part of it otherwise: then what follows the
        call need not be traced. Raises PlanError where it would have to be and cannot.
        """
        recorder, reads = ProgramRecorder(self, until_root=False), True
        try:
            self._run(recorder, function)
        except PlanError:
            if recorder.root_calls != 1 or recorder.outside:
                raise
            reads = False  # it was not followed to its end
        if recorder.root_calls != 1 or recorder.outside:
            return None
        return Ending(reads=frozenset(recorder.read) if reads else None)

    def finish(self, function: Callable[[], Any], output: Any, kept: Mapping[Slot, torch.Tensor] = _NONE) -> Any:
        """What `function()` returns if the model's call in it returns `output` and leaves `kept` in attributes (those
        of other stages as tensors without values).

        Raises PlanError if it uses the model otherwise: its parameters lie on other stages.
        """
        calls: list[str] = []

        def called(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            calls.append(name)
            if name or len(calls) > 1:
                raise PlanError(f"mesh.stage: the loss calls {name or 'the model'} again; {_ONE_CALL}")
            return output

        with self.stand_ins.in_place(self.units.glue, called), attributes(self.model, kept):
            result = function()
        if any(is_unknown(leaf) for leaf in flatten(result)[0]):
            raise PlanError(f"mesh.stage: the loss uses the model's parameters beside calling it; {_ONE_CALL}")
        return result

    def _run(self, recorder: "ProgramRecorder", function: Callable[[], Any]) -> None:
        self.shapes.modes = self.stand_ins.modes()
        with self.stand_ins.in_place(self.units.glue, recorder.called), functions(recorder.applied), recorder:
            try:
                with without_caches(self._configs), recorder.keeping:
                    recorder.output = function()
            except StopTracing as stop:
                recorder.output = stop.output
            except _UNREADABLE as error:
                raise PlanError(
                    f"mesh.stage: {script_line(error)} needs the values of a module's output ({error}); compute "
                    "that inside a module of the model, or without looking at values"
                ) from error


class ProgramRecorder(TorchFunctionMode):
    """Writes one program."""

    def __init__(self, tracer: Tracer, *, until_root: bool) -> None:
        super().__init__()
        self.tracer, self.until_root = tracer, until_root
        self.program = Program()
        self.root_calls = 0
        self.outside = False  # whether the model was used beside its own call
        self.output: Any = None
        self.followed = False  # whether what some unit returns was not known before
        self._depth = 0
        self.paused = False
        self.keeping = Attributes(tracer.model, tracer.units.glue)
        self.read: set[Slot] = set()  # attributes that units have written to and the rest has read
        self.inside = ""  # the unit whose result's shape is being found
        self._keys: dict[int, int] = {}  # id of a tensor without values -> number of its value
        self._stands: dict[int, torch.Tensor] = {}  # id of a known tensor that was written to -> what stands for it
        self._alive: list[Any] = []  # ids above stay unique
        self._memory: dict[int, list[torch.Tensor]] = defaultdict(list)  # values by the memory they share
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
        if not any(is_unknown(leaf) or id(leaf) in self._stands for leaf in leaves if isinstance(leaf, torch.Tensor)):
            result = func(*args, **kwargs)
            if isinstance(result, torch.Tensor) and result._is_view():
                self._views.add(result.untyped_storage()._cdata)
            return result
        return self.operation(func, leaves, spec)

    def called(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call of a module does while the trace runs."""
        if self.paused and not self.inside:
            raise PlanError(
                f"mesh.stage: {name or 'the model'} is called from inside a function of torch; call it in forward"
            )
        if not self.paused and name not in self.tracer.units.glue:
            return self._unit(name, module, args, kwargs)
        if self.paused and id(module) in self.tracer.stand_ins.stacked:
            return of_experts(*args, **kwargs)
        own = not name and not self.paused
        self._depth += own
        result = module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        if own:
            self.keeping.look()
            self._depth -= 1
            self.root_calls += 1
            if self.until_root:
                raise StopTracing(result)
        return result

    def applied(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An autograd function of the user's own is written down as one operation, with its backward."""
        leaves, spec = flatten((args, kwargs))
        if self.paused or not any(is_unknown(leaf) for leaf in leaves):
            return function(*args, **kwargs)
        if function.__self__ is CheckpointFunction:
            raise PlanError("mesh.stage: checkpoint(use_reentrant=True) in forward; use use_reentrant=False")
        return self.operation(function, leaves, spec)

    def operation(self, func: Callable[..., Any], leaves: list[Any], spec: Any) -> Any:
        """Run an operation on shapes and write it down."""
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
        back = {id(stand): leaf for leaf, stand in zip(leaves, subjects, strict=True) if stand is not leaf}
        return back.get(id(result), result) if isinstance(result, torch.Tensor) else result

    def _unit(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shapes, stand_ins = self.tracer.shapes, self.tracer.stand_ins
        with torch._C.DisableTorchFunction():  # what is done here is none of the user's operations
            leaves, spec = flatten((args, kwargs))
            for leaf in leaves:
                refuse_hidden_tensors(leaf, f"a call of {name}")
            subjects = [self._stands.get(id(leaf), leaf) for leaf in leaves]
            inference = shapes.known(name, subjects, spec)
        if inference is None:
            self.followed = True
            with self._pause(name):
                inference = shapes.follow(name, module, subjects, spec)
        with torch._C.DisableTorchFunction(), self._pause(name):
            for at in inference.written:
                subjects[at] = self._subject(leaves[at])
            results = inference.results(subjects, stand_ins)
            self._write(name, module, leaves, subjects, spec, results, list(inference.written), inference)
            for slot in reversed(inference.keeps):
                self.keeping.set(slot, results.pop())
            back = {id(stand): leaf for leaf, stand in zip(leaves, subjects, strict=True) if stand is not leaf}
            return unflatten([back.get(id(leaf), leaf) for leaf in results], inference.spec)

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
        """Add the node; give numbers to what it made and to what it changed."""
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
        """The program, returning `output`."""
        leaves, spec = flatten(output)
        if ending is not None:
            left = sorted(self.keeping.now.items())
            left = [(slot, tensor) for slot, tensor in left if id(tensor) in self._keys or not is_unknown(tensor)]
            values = {slot: self._leaf(tensor, written=False) for slot, tensor in left}
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
        """What stands for an argument while an operation is tried: known tensors lend their shape only."""
        if not isinstance(leaf, torch.Tensor) or is_unknown(leaf):
            return leaf
        return self._stands.get(id(leaf)) if id(leaf) in self._stands else self.tracer.stand_ins.outline(leaf)

    def _leaf(self, leaf: Any, *, written: bool) -> Any:
        """How an argument is written down."""
        if not isinstance(leaf, torch.Tensor):
            refuse_hidden_tensors(leaf, "an operation")
            return leaf
        subject = self._stands.get(id(leaf), leaf)
        if id(subject) in self._keys:
            if not self._depth:
                self.read |= {slot for slot, tensor in self.keeping.now.items() if tensor is subject}
            return Value(self._keys[id(subject)])
        if id(subject) in self.tracer.stand_ins.names:
            return ProgramParameter(self.tracer.stand_ins.names[id(subject)])
        if is_unknown(subject):
            raise PlanError(
                f"mesh.stage: forward uses a buffer of shape {tuple(leaf.shape)} outside the module that owns it; use "
                "it in that module's forward, or keep it on the module whose forward needs it"
            )
        if written:
            return Copied(leaf)
        self._captured.append((leaf, leaf._version))
        return leaf

    def _may_change(self, leaf: Any, subject: Any, words: str) -> None:
        """A tensor is changed in place: from here on it is a value. Refuses what could not be kept consistent."""
        if id(subject) in self.tracer.stand_ins.names:
            name = self.tracer.stand_ins.names[id(subject)]
            raise PlanError(f"mesh.stage: {words} changes parameter {name} in forward; leave that to the optimizer")
        if is_unknown(leaf) or id(leaf) in self._stands:
            return
        shared = leaf._is_view() or leaf.untyped_storage()._cdata in self._views
        if shared or any(leaf is buffer for buffer in self.tracer.model.buffers()):
            what = "a view of another tensor" if shared else "a buffer of the model"
            raise PlanError(
                f"mesh.stage: {words} writes a module's output into {what} of shape {tuple(leaf.shape)}; make a new "
                "tensor (torch.stack, torch.cat), or do it inside one module"
            )
        self._stands[id(leaf)] = subject
        self._alive.append(leaf)

    def _shared(self, subject: torch.Tensor, written: set[int]) -> list[tuple[int, int]]:
        """Other values in the same memory get new numbers too."""
        others = self._memory[subject.untyped_storage()._cdata]
        return [(self._keys[id(other)], self._number(other)) for other in list(others) if id(other) not in written]

    def _number(self, tensor: torch.Tensor) -> int:
        """A new number for a tensor's present values."""
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
