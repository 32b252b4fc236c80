"""Work: one stage's forward and backward on one microbatch, as plain tensors in and tensors out."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.autograd.graph import Node as AutogradNode

from tutti.errors import PlanError
from tutti.parallel.pipeline.placeholders import surroundings
from tutti.parallel.pipeline.stage_placement import Placement, StagePart
from tutti.parallel.pipeline.stage_program import (
    Argument,
    Copied,
    ProgramCall,
    ProgramParameter,
    Slot,
    Surroundings,
    Value,
    flatten,
    unflatten,
)
from tutti.parallel.tensor import whole, whole_parameter


class StageEntry(torch.autograd.Function):
    """A received value where it enters a stage: no leaf, so the stage may change it in place."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, arrival: "Arrival") -> torch.Tensor:
        ctx.arrival = arrival
        tensor, arrival.tensor = arrival.tensor, None
        assert tensor is not None
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        ctx.arrival.gradient = gradient
        return None, None


class Arrival:
    """A received value. `gradient`: with respect to it, after backward; `edge`: its place in the graph."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.like = (tensor.shape, tensor.dtype, tensor.device)
        self.gradient: torch.Tensor | None = None
        self.edge: GradientEdge | None = None

    def enter(self, device: torch.device) -> torch.Tensor:
        anchor = torch.empty((), device=device, requires_grad=True)
        entered: torch.Tensor = StageEntry.apply(anchor, self)  # type: ignore[no-untyped-call]
        self.edge = get_gradient_edge(entered)
        return entered

    def taken(self) -> torch.Tensor:
        """The gradient, zeros where the stage did not use the value."""
        gradient, self.gradient = self.gradient, None
        if gradient is None:
            shape, dtype, device = self.like
            return torch.zeros(shape, dtype=dtype, device=device)
        return gradient.contiguous()


class StageWork:
    """Stage `stage` of one microbatch's program. Made for its forward, used up by its backward."""

    def __init__(self, placement: Placement, stage: int, model: nn.Module, device: torch.device) -> None:
        self.part: StagePart = placement.parts[stage]
        self.outlines = placement.program.outlines
        self.device = device
        self.loss: torch.Tensor | None = None
        self._placement, self._model = placement, model
        self._arrivals: dict[int, Arrival] = {}
        self._sent: dict[int, torch.Tensor] = {}
        self._paths: dict[int, GradientEdge] = {}
        self._deferred: Deferred | None = None

    def forward(self, received: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Compute; returns all values of this stage by number (those to send are contiguous where they are sent)."""
        values: dict[int, torch.Tensor] = {}
        for key, tensor in received.items():
            if self.wants_gradient(key) and torch.is_grad_enabled():
                self._arrivals[key] = Arrival(tensor)
                values[key] = self._arrivals[key].enter(self.device)
            else:
                values[key] = tensor
        sent = {key for keys in self.part.sends.values() for key in keys}
        for node in self.part.nodes:
            self._run(node, values)
            for key in node.makes:
                if key in sent:
                    self._sent[key] = whole(values[key].clone() if key in self.part.copied else values[key])
            for _, key in node.views:
                if key in sent:
                    self._sent[key] = whole(values[key])
        return values

    def outgoing(self, key: int) -> torch.Tensor:
        """A value to send. Raises PlanError when it is not what the trace foresaw: others wait for that."""
        tensor, outline = self._sent[key].detach().contiguous(), self.outlines[key]
        if (tuple(tensor.shape), tensor.dtype) != (outline.shape, outline.dtype):
            raise PlanError(
                f"mesh.stage: a value between stages is {tuple(tensor.shape)}, {tensor.dtype}, where following the "
                f"model on shapes gave {outline.shape}, {outline.dtype}; name pipeline.cuts elsewhere"
            )
        return tensor

    def let_go(self) -> None:
        """What was sent is held no longer: of it backward needs only where its gradient enters."""
        self._paths |= {key: get_gradient_edge(sent) for key, sent in self._sent.items() if sent.requires_grad}
        self._sent = {}

    def output(self, values: Mapping[int, torch.Tensor]) -> Any:
        """What the forward returned, on the last stage."""
        program = self._placement.program
        leaves = [self._resolve(leaf, values) for leaf in program.output]
        assert program.output_spec is not None
        return unflatten(leaves, program.output_spec)

    def kept(self, values: Mapping[int, torch.Tensor]) -> dict[Slot, torch.Tensor]:
        """What modules of any stage left in attributes that the loss reads, on the last stage."""
        return {slot: self._resolve(leaf, values) for slot, leaf in self._placement.program.kept.items()}

    def wants_gradient(self, key: int) -> bool:
        """Whether a gradient travels back along a value's way."""
        return self.outlines[key].requires_grad

    def backward(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """All gradients, from those of the values sent (and the loss, where there is one)."""
        roots, seeds = self._roots(gradients)
        if roots:
            torch.autograd.backward(roots, seeds)
        self._paths, self.loss = {}, None

    def backward_inputs(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Gradients of what was received; those of weights are left for `backward_weights`."""
        roots, seeds = self._roots(gradients)
        edges = {key: arrival.edge for key, arrival in self._arrivals.items() if arrival.edge is not None}
        found, self._deferred = input_gradients(roots, seeds, list(edges.values()))
        for key, gradient in zip(edges, found, strict=True):
            if gradient is not None:
                self._arrivals[key].gradient = gradient
        self._paths, self.loss = {}, None

    def backward_weights(self) -> None:
        """What `backward_inputs` left out."""
        assert self._deferred is not None
        self._deferred.run()
        self._deferred = None

    def gradient(self, key: int) -> torch.Tensor:
        """The gradient of a received value, to be sent back."""
        return self._arrivals[key].taken()

    def _roots(self, gradients: Mapping[int, torch.Tensor]) -> tuple[list[GradientEdge], list[torch.Tensor | None]]:
        self.let_go()
        roots: list[GradientEdge] = []
        seeds: list[torch.Tensor | None] = []
        for key, gradient in gradients.items():
            if key in self._paths:
                roots.append(self._paths[key])
                seeds.append(gradient)
        if self.loss is not None:
            roots.append(get_gradient_edge(self.loss))
            seeds.append(torch.ones_like(self.loss))
        return roots, seeds

    def _run(self, node: ProgramCall, values: dict[int, torch.Tensor]) -> None:
        leaves = [self._resolve(leaf, values) for leaf in node.leaves]
        args, kwargs = unflatten(leaves, node.spec)
        with _like(node.surroundings, self.device):
            result = node.function(*args, **kwargs)
        if any(key is not None for key in node.results):
            left = [getattr(self._model.get_submodule(name), attribute) for name, attribute in node.keeps]
            for key, leaf in zip(node.results, [*flatten(result)[0], *left], strict=True):
                if key is not None:
                    values[key] = leaf
        for at, key in node.written:
            values[key] = leaves[at]
        for old, new in node.views:
            if old in values:
                values[new] = values[old]

    def _resolve(self, leaf: Any, values: Mapping[int, torch.Tensor]) -> Any:
        if isinstance(leaf, Value):
            return values[leaf.key]
        if isinstance(leaf, ProgramParameter):
            return whole_parameter(self._model, leaf.name)
        if isinstance(leaf, Argument):
            return self._placement.arguments[leaf.at]
        return leaf.tensor.clone() if isinstance(leaf, Copied) else leaf


def _like(wanted: Surroundings, device: torch.device) -> ExitStack:
    """The grad mode and autocast that a node was written down in."""
    stack, now = ExitStack(), surroundings(device)
    if wanted.grad != now.grad:
        stack.enter_context(torch.set_grad_enabled(wanted.grad))
    if wanted.autocast != now.autocast:
        enabled, dtype = wanted.autocast
        stack.enter_context(torch.autocast(device.type, dtype=dtype, enabled=enabled))
    return stack


@dataclass(slots=True)
class Junction:
    """A node where branches to weights leave the way to the inputs. `arrived`: gradients that flowed into it."""

    node: AutogradNode
    weights: list[torch.Tensor]
    arrived: tuple[torch.Tensor | None, ...] = ()


@dataclass(slots=True)
class Deferred:
    """The second half. `roots`: where gradients of results enter that no input leads to, with those."""

    junctions: list[Junction] = field(default_factory=list)
    roots: list[GradientEdge] = field(default_factory=list)
    seeds: list[torch.Tensor | None] = field(default_factory=list)

    def run(self) -> None:
        """Add the gradients of the weights to their `grad`."""
        if self.roots:
            torch.autograd.backward(self.roots, self.seeds, retain_graph=bool(self.junctions))
        for junction in self.junctions:
            edges = [GradientEdge(junction.node, at) for at, g in enumerate(junction.arrived) if g is not None]
            seeds = [gradient for gradient in junction.arrived if gradient is not None]
            if edges:
                torch.autograd.backward(edges, seeds, inputs=junction.weights, retain_graph=True)


def input_gradients(
    roots: Sequence[GradientEdge], seeds: Sequence[torch.Tensor | None], inputs: Sequence[GradientEdge]
) -> tuple[list[torch.Tensor | None], Deferred]:
    """Gradients with respect to `inputs` (None for one that is not used), and the half that is left. `roots`: where the
    gradients of results, `seeds`, enter the graph."""
    if not inputs or not roots:
        return [None] * len(inputs), Deferred(roots=list(roots), seeds=list(seeds))
    paths = _Paths({edge.node for edge in inputs})
    leading = [at for at, root in enumerate(roots) if paths.leads(root.node)]
    if not leading:
        return [None] * len(inputs), Deferred(roots=list(roots), seeds=list(seeds))
    junctions = paths.junctions()
    others = [at for at in range(len(roots)) if at not in leading]
    if junctions is None:
        return _whole(roots, seeds, inputs), Deferred()
    hooks = [junction.node.register_prehook(_keeper(junction)) for junction in junctions]
    try:
        found = torch.autograd.grad(
            [roots[at] for at in leading],
            list(inputs),
            [seeds[at] for at in leading],
            retain_graph=True,
            allow_unused=True,
        )
    finally:
        for hook in hooks:
            hook.remove()
    return list(found), Deferred(junctions, [roots[at] for at in others], [seeds[at] for at in others])


def _whole(
    roots: Sequence[GradientEdge], seeds: Sequence[torch.Tensor | None], inputs: Sequence[GradientEdge]
) -> list[torch.Tensor | None]:
    """All gradients at once; those of the inputs are caught on the way."""
    caught: list[torch.Tensor | None] = [None] * len(inputs)

    def keeper(at: int, position: int) -> Any:
        def keep(gradients: tuple[torch.Tensor | None, ...]) -> None:
            caught[at] = gradients[position]

        return keep

    hooks = [edge.node.register_prehook(keeper(at, edge.output_nr)) for at, edge in enumerate(inputs)]
    try:
        torch.autograd.backward(list(roots), list(seeds))
    finally:
        for hook in hooks:
            hook.remove()
    return caught


def _keeper(junction: Junction) -> Any:
    def keep(gradients: tuple[torch.Tensor | None, ...]) -> None:
        junction.arrived = gradients

    return keep


class _Paths:
    """Which nodes of a graph lead to any of `ends`."""

    def __init__(self, ends: set[AutogradNode]) -> None:
        self._ends = ends
        self._leads: dict[AutogradNode, bool] = dict.fromkeys(ends, True)

    def leads(self, start: AutogradNode) -> bool:
        """Whether `start` leads to an end; all nodes under it are settled too (depth first, without recursion)."""
        stack = [(start, False)]
        while stack:
            node, below_done = stack.pop()
            if node in self._leads:
                continue
            below = [child for child, _ in node.next_functions if child is not None]
            if below_done:
                self._leads[node] = any(self._leads.get(child, False) for child in below)
            else:
                stack.append((node, True))
                stack += [(child, False) for child in below if child not in self._leads]
        return self._leads[start]

    def junctions(self) -> list[Junction] | None:
        """Where branches to weights leave; None where two of them meet again."""
        found: list[Junction] = []
        taken: set[AutogradNode] = set()
        for node, leads in self._leads.items():
            if not leads or node in self._ends:
                continue
            branches = {c for c, _ in node.next_functions if c is not None and not self._leads[c]}
            own = _below(branches)
            weights = [leaf.variable for leaf in own if hasattr(leaf, "variable")]
            if not weights:
                continue
            if own & taken:
                return None
            taken |= own
            found.append(Junction(node, weights))
        return found


def _below(starts: set[AutogradNode]) -> set[AutogradNode]:
    """All nodes under `starts`, themselves included."""
    seen, stack = set(starts), list(starts)
    while stack:
        for child, _ in stack.pop().next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return seen
