"""Cuts a model into stages; each rank keeps only the parameters and buffers that its stages use."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules

from tutti.config.pipeline_schedule import Action
from tutti.config.plan import Plan
from tutti.errors import PlanError, TuttiError
from tutti.parallel.data.batchnorm import is_batch_norm
from tutti.parallel.layout import Layout
from tutti.parallel.pipeline.placeholders import StandIns, is_unknown
from tutti.parallel.pipeline.shape_inference import signature
from tutti.parallel.pipeline.stage_placement import (
    Call,
    Placement,
    StageHolders,
    Units,
    automatic_starts,
    calls_of,
    choose_units,
    heaviest_to_open,
    named_starts,
    open_for_cuts,
    place,
)
from tutti.parallel.pipeline.stage_program import Argument, Copied, Program, flatten
from tutti.parallel.pipeline.stage_tracing import Ending, Tracer
from tutti.parallel.script_hooks import HOOKS, has_backward_hooks

Sample = Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
"""Makes the model's positional and keyword arguments for a few samples."""

MOST_OPENED = 64
"""Upper bound on the number of units that are divided in search of balanced stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePartition:
    """Where a model is cut into stages. Stage s is on position s mod `ranks` of the stage axis.

    Attributes:
        ranks: number of ranks along the stage axis.
        position: this rank's index along the stage axis.
        starts: the first call of each of the stages 1, 2, ...
        tracer: traces each forward.
        holders: the stages that hold each unit and parameter.
        first: name of a parameter or buffer -> the first name of the same tensor.
        shared: positions -> names of the trainable parameters held at all of these (only where there are several).
        trained: names of the parameters that require a gradient.
    """

    ranks: int
    position: int
    starts: tuple[Call, ...]
    tracer: Tracer
    holders: StageHolders
    first: dict[str, str]
    shared: dict[tuple[int, ...], list[str]]
    trained: frozenset[str]

    @property
    def count(self) -> int:
        """Number of stages."""
        return len(self.starts) + 1

    def place(self, program: Program) -> Placement:
        """Assign the operations of a traced forward to these stages."""
        return place(program, self.starts, self.holders)

    def trains(self, position: int, names: Iterable[str]) -> bool:
        """Whether a position of the stage axis holds a trainable parameter that `names` includes."""
        stages = set(range(position, self.count, self.ranks))
        return any(self.holders.parameters[name] & stages for name in self.trained.intersection(names))

    def refresh(self, model: nn.Module) -> set[str] | None:
        """Follow what the script has changed on modules since the last call; see `StandIns.refresh`.

        Raises:
            PlanError: it has registered a hook that cannot run under stages.
        """
        for name in self.tracer.units.glue:
            if has_backward_hooks(model.get_submodule(name)):
                raise PlanError(
                    f"mesh.stage: {name or 'the model'} has a backward hook, but its stages are computed by several "
                    "ranks; register the hook on modules inside it"
                )
        before, units = self.tracer.units, open_for_hooks(model, self.tracer.units, self.tracer.stand_ins.hooked())
        if units is not before:
            for name in units.names:
                owner = next((old for old in before.names if name.startswith(old + ".")), None)
                if owner is not None:
                    self.holders.units[name] = self.holders.units[owner]
            self.tracer.units = units
        return self.tracer.stand_ins.refresh()

    def tied_here(self, model: nn.Module) -> list[str]:
        """Names of the trainable parameters that this rank shares with other ranks of the stage axis."""
        shared = [name for positions, names in self.shared.items() if self.position in positions for name in names]
        names_here = {name for name, _ in model.named_parameters()}
        return [name for name in shared if name in names_here]

    def endings(self, order: Sequence[Action], *, splits: bool) -> dict[int, list[str]]:
        """Index in `order` -> names of the parameters whose gradient is complete after that action.

        Parameters shared between positions of the stage axis are left out: their gradients are reduced after the last
        action.

        Args:
            order: this rank's actions.
            splits: whether gradients of weights are computed in actions of their own ("W").
        """
        tied = {name for names in self.shared.values() for name in names}
        kinds = ("B", "W") if splits else ("B", "I")
        last = {action.stage: index for index, action in enumerate(order) if action.kind in kinds}
        names_by_index: dict[int, list[str]] = defaultdict(list)
        for name in sorted(self.trained - tied):
            indices = [last[stage] for stage in self.holders.parameters[name] if stage in last]
            if indices:
                names_by_index[max(indices)].append(name)
        return names_by_index

    def keep_own(self, model: nn.Module, layout: Layout) -> None:
        """Remove the parameters and buffers that no stage of this rank uses, which frees their memory."""
        own_stages = set(range(self.position, self.count, self.ranks))
        units = [unit + "." for unit, stages in self.holders.units.items() if stages & own_stages]
        needed = {self.first[name] for name, _ in _buffers(model) if _in_any(name, units)}
        needed |= {
            self.first[name]
            for name, _ in _buffers(model)
            if not _in_any(name, [u + "." for u in self.tracer.units.names])
        }
        needed |= {name for name, stages in self.holders.parameters.items() if stages & own_stages}
        for prefix, module in model.named_modules():
            for tensors in (module._parameters, module._buffers):
                for key, tensor in list(tensors.items()):
                    name = f"{prefix}.{key}" if prefix else key
                    if tensor is not None and self.first.get(name, name) not in needed:
                        tensors[key] = None
            if isinstance(module, nn.RNNBase):  # it keeps a second list of its parameters
                module._flat_weights = [module._parameters.get(key) for key in module._flat_weights_names]
        for name in layout.names:  # parameters held only by other ranks must not count as whole here
            layout.set_reduce_axes(name, layout.shard_of(name).sums)


def cut_stages(
    model: nn.Module, plan: Plan, layout: Layout, sample: Sample, device: torch.device | None = None
) -> StagePartition | None:
    """Decide where to cut `model`, without changing it.

    Args:
        model: the whole model.
        plan: names the cuts, or leaves them to be balanced by FLOPs.
        layout: the mesh and the placement of parameters.
        sample: makes arguments to trace the model with.
        device: where the model will compute; None: where it is, or the CPU if it has no memory.

    Returns:
        The partition, or None without a stage axis.

    Raises:
        PlanError: the model cannot be traced, or cannot be cut as the plan asks.
    """
    ranks = layout.mesh.degree("stage")
    if ranks == 1:
        return None
    count = ranks * plan.pipeline.stages_per_rank
    args, kwargs = sample()
    device = device or next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))
    stand_ins = StandIns(model, device)

    def traced(units: Units) -> tuple[Tracer, Program]:
        tracer = Tracer(model, open_for_hooks(model, units, stand_ins.hooked()), stand_ins, device)
        tracer.shapes.counting = True
        program = _trace_sample(tracer, model, args, kwargs)
        tracer.shapes.counting = False
        return tracer, program

    stand_ins.hooks_run = False  # they may collect what they see, and this is no forward of the training
    if plan.pipeline.cuts:
        tracer, program = traced(open_for_cuts(model, plan.pipeline.cuts))
        starts = named_starts(calls_of(program), plan.pipeline.cuts, count)
    else:
        tracer, program = _open_until_balanced(model, count, traced)
        costs = [node.cost for node in program.nodes if node.unit]
        starts = automatic_starts(calls_of(program), costs, count)
    placements = [place(program, starts, None)]
    if model.training:
        placements += _in_evaluation(model, tracer, starts, args, kwargs)
    stand_ins.hooks_run = True
    holders = _holders(model, tracer.units, placements, count)
    _check_statistics(model, holders)
    position = layout.mesh.index("stage")
    shared = _shared(model, holders, ranks)
    return StagePartition(
        ranks=ranks,
        position=position,
        starts=starts,
        tracer=tracer,
        holders=holders,
        first=_first_names(model),
        shared=shared,
        trained=frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad),
    )


def _trace_sample(tracer: Tracer, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
    """Trace the model on samples, to find where to cut it.

    Raises:
        PlanError: the model cannot be called with what `unpack` takes from a batch, or cannot be traced.
    """
    try:
        with tracer.without_effects():
            return tracer.trace(lambda: model(*args, **kwargs))
    except TuttiError as refusal:
        error = refusal.__cause__
        if not isinstance(error, NotImplementedError | TypeError):
            raise
        reason = (str(error).splitlines() or [""])[0]
        if isinstance(error, TypeError) and ".forward()" not in reason:
            raise
        if isinstance(error, NotImplementedError) and type(model).forward is nn.Module.forward:
            reason = f"{type(model).__name__} has no forward; write one that calls all its parts"
        raise PlanError(
            f"mesh.stage: prepare cuts the model by a call of it with what `unpack` takes from a batch, which raised "
            f"{type(error).__name__}: {reason}; pass job.prepare(..., unpack=...) that returns (args, kwargs, target) "
            "such that model(*args, **kwargs) computes the whole model, or use another axis than stage"
        ) from error


def open_for_hooks(model: nn.Module, units: Units, hooked: list[str]) -> Units:
    """Divide units until no module in `hooked`, which have hooks of the script, is inside one.

    Raises:
        PlanError: a module with a hook is inside a module that cannot be divided.
    """
    inner = [name for name in hooked if name not in units.glue and name not in units.names] if hooked else []
    if not inner:
        return units
    opened = [name.rsplit(".", parts)[0] for name in inner for parts in range(1, name.count(".") + 1)]
    units = choose_units(model, (*units.glue, *opened))
    for name in inner:
        if name not in units.glue and name not in units.names:
            raise PlanError(
                f"mesh.stage: the forward hook on {name} is inside a module that is not divided; register the hook on "
                "that module, or return the value from its forward"
            )
    return units


def _first_names(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *_buffers(model)]
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors}


def _buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return model.named_buffers(remove_duplicate=False)


def _in_any(name: str, prefixes: list[str]) -> bool:
    return any(name.startswith(prefix) for prefix in prefixes)


def _open_until_balanced(
    model: nn.Module, count: int, traced: Callable[[Units], tuple[Tracer, Program]]
) -> tuple[Tracer, Program]:
    """Divide units until they are small enough for `count` stages of about equal cost."""
    tracer, program = traced(choose_units(model))
    closed: set[str] = set()
    for _ in range(MOST_OPENED):
        costs: dict[str, float] = defaultdict(float)
        for node in program.nodes:
            if node.unit:
                costs[node.unit] += node.cost
        name = heaviest_to_open(model, costs, count, closed)
        if name is None:
            break
        try:
            tracer, program = traced(tracer.units.opened(model, name))
        except PlanError:
            closed.add(name)  # its own code cannot be traced, so it stays one unit
    return tracer, program


def _in_evaluation(
    model: nn.Module, tracer: Tracer, starts: tuple[Call, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Placement]:
    """The forward in evaluation mode, which may call other modules; empty if it cannot be traced."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with tracer.without_effects():
            return [place(tracer.trace(lambda: model(*args, **kwargs)), starts, None)]
    except PlanError:
        return []
    finally:
        for module in training:
            module.training = True


def _holders(model: nn.Module, units: Units, placements: list[Placement], count: int) -> StageHolders:
    """The stages of all units and parameters; a unit that no forward calls joins the unit before it."""
    where: dict[str, set[int]] = defaultdict(set)
    direct: dict[str, set[int]] = defaultdict(set)
    for placement in placements:
        for node, stage in zip(placement.program.nodes, placement.stages, strict=True):
            if node.unit:
                where[node.unit].add(stage)
            for name in node.parameters:
                direct[name].add(stage)
    current = 0
    for name in units.names:
        current = min(where[name] or {current})
        where[name].add(current)
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters: dict[str, set[int]] = defaultdict(set, direct)
    for unit, stages in where.items():
        for parameter in model.get_submodule(unit).parameters():
            parameters[first[id(parameter)]] |= stages
    for name in first.values():
        parameters[name] = parameters[name] or {0}
    return StageHolders(
        units={unit: frozenset(stages) for unit, stages in where.items()},
        parameters={name: frozenset(stages) for name, stages in parameters.items()},
    )


def _check_statistics(model: nn.Module, holders: StageHolders) -> None:
    for unit, stages in holders.units.items():
        norms = [part for part in model.get_submodule(unit).modules() if is_batch_norm(part)]
        if len(stages) > 1 and any(getattr(norm, "track_running_stats", True) for norm in norms):
            raise PlanError(
                f"mesh.stage: {unit} has batch statistics and is called on stages {sorted(stages)}; choose "
                "pipeline.cuts such that all calls of it are in one stage"
            )


def _shared(model: nn.Module, holders: StageHolders, ranks: int) -> dict[tuple[int, ...], list[str]]:
    shared: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        positions = tuple(sorted({stage % ranks for stage in holders.parameters[name]}))
        if len(positions) > 1 and parameter.requires_grad:
            shared[positions].append(name)
    return dict(sorted(shared.items()))


class Forwards:
    """Assigns the forwards of one model to stages. Programs that do not depend on values are cached."""

    def __init__(self, stages: StagePartition) -> None:
        self._stages, self._tracer = stages, stages.tracer
        self._placed: dict[Any, Placement] = {}

    def place(self, function: Callable[[], Any], ending: Ending | None) -> Placement:
        """Trace `function()`, which calls the model, and assign its operations to stages; see `Tracer.trace`."""
        call = self._tracer.call_of(function) if ending and self._is_plain() else None
        leaves, form = flatten(call)
        described = None if call is None else signature(leaves)
        if call is None or described is None or any(map(is_unknown, leaves)):
            return self._stages.place(self._tracer.trace(function, ending))
        key = (described, form.count, form.names, str(form.spec), ending, *self._surroundings())
        if key not in self._placed:
            args, kwargs = call
            model = self._tracer.model
            program, known = self._tracer.traced(lambda: model(*args, **kwargs), ending)
            if not known or not _bind_arguments(program, leaves):
                return self._stages.place(program)
            self._placed[key] = self._stages.place(program)
        return replace(self._placed[key], arguments=tuple(leaves))

    def forget(self) -> None:
        """Forget all programs, because modules have changed."""
        self._placed.clear()

    def _is_plain(self) -> bool:
        """Whether all traced modules are plain Sequentials, so that arguments alone determine the program."""
        if self._tracer.stand_ins.hooked():
            return False
        if modules._global_forward_hooks or modules._global_forward_pre_hooks:
            return False
        return all(map(_is_bare_sequential, self._glue()))

    def _glue(self) -> list[nn.Module]:
        return [self._tracer.model.get_submodule(name) for name in sorted(self._tracer.units.glue)]

    def _surroundings(self) -> tuple[Any, ...]:
        children = [(name, id(child)) for module in self._glue() for name, child in module._modules.items()]
        return self._tracer.stand_ins.modes(), tuple(children)


def _is_bare_sequential(module: nn.Module) -> bool:
    state = module.__dict__
    hooked = any(state[key] for key in (*HOOKS, "_backward_hooks", "_backward_pre_hooks"))
    return type(module) is nn.Sequential and "forward" not in state and not hooked


def _bind_arguments(program: Program, leaves: list[Any]) -> bool:
    """Replace the tensors that the model was called with by `Argument`s.

    Returns False if the program holds other tensors or writes to one of them: it must not be reused.
    """
    places = {id(leaf): at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}

    def bound(leaf: Any) -> Any:
        return Argument(places[id(leaf)]) if id(leaf) in places else leaf

    program.nodes = [replace(node, leaves=tuple(map(bound, node.leaves))) for node in program.nodes]
    program.output = tuple(map(bound, program.output))
    rest = [*program.output, *(leaf for node in program.nodes for leaf in node.leaves)]
    return not any(isinstance(leaf, torch.Tensor | Copied) for leaf in rest)
