"""Forward and backward of one stage on one microbatch: plain tensors in, plain tensors out."""

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
    """Makes a received value a non-leaf of the autograd graph, so that the stage may change it in place."""

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
    """A received value that requires a gradient.

    Attributes:
        tensor: the value, until `enter`.
        like: its shape, dtype and device.
        gradient: its gradient, after backward.
        edge: where its gradient leaves the autograd graph.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.like = (tensor.shape, tensor.dtype, tensor.device)
        self.gradient: torch.Tensor | None = None
        self.edge: GradientEdge | None = None

    def enter(self, device: torch.device) -> torch.Tensor:
        """The value as a tensor of the autograd graph."""
        anchor = torch.empty((), device=device, requires_grad=True)
        entered: torch.Tensor = StageEntry.apply(anchor, self)  # type: ignore[no-untyped-call]
        self.edge = get_gradient_edge(entered)
        return entered

    def taken(self) -> torch.Tensor:
        """Remove and return the gradient; zeros if the stage did not use the value."""
        gradient, self.gradient = self.gradient, None
        if gradient is None:
            shape, dtype, device = self.like
            return torch.zeros(shape, dtype=dtype, device=device)
        return gradient.contiguous()


class StageWork:
    """Forward and backward of one stage on one microbatch. It is made for the forward and used up by the backward.

    Args:
        placement: the microbatch's program, divided into stages.
        stage: the stage to compute.
        model: the model, with at least this stage's parameters.
        device: where received values lie.

    Attributes:
        part: this stage's operations.
        outlines: shape and dtype of each value, by its number.
        loss: the scalar to differentiate, set by the caller on the last stage.
    """

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
        """Compute the stage.

        Args:
            received: number -> value from other stages.

        Returns:
            All values of this stage, by number.
        """
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
        """The value to send to other stages, contiguous.

        Raises:
            PlanError: its shape or dtype differs from the traced one, which the receiver has allocated.
        """
        tensor, outline = self._sent[key].detach().contiguous(), self.outlines[key]
        if self._sent[key].requires_grad and not outline.requires_grad:
            raise PlanError(
                f"mesh.stage: {self._trained_name()} has been unfrozen, but no gradient reaches its stage, because all "
                "that the stage and those before it train was frozen when prepare cut the model; leave it trainable "
                "until prepare and freeze it afterwards, which stages follow"
            )
        if (tuple(tensor.shape), tensor.dtype) != (outline.shape, outline.dtype):
            raise PlanError(
                f"mesh.stage: a value sent between stages has shape {tuple(tensor.shape)} and {tensor.dtype}, but "
                f"tracing gave {outline.shape} and {outline.dtype}; choose other pipeline.cuts"
            )
        return tensor

    def _trained_name(self) -> str:
        """The name of a parameter of this stage that requires a gradient."""
        named = self._model.named_parameters()
        return next((f"parameter {name!r}" for name, parameter in named if parameter.requires_grad), "a parameter")

    def let_go(self) -> None:
        """Release sent values; backward needs only the graph edges at which their gradients enter."""
        self._paths |= {key: get_gradient_edge(sent) for key, sent in self._sent.items() if sent.requires_grad}
        self._sent = {}

    def output(self, values: Mapping[int, torch.Tensor]) -> Any:
        """The model's return value, on the last stage."""
        program = self._placement.program
        leaves = [self._resolve(leaf, values) for leaf in program.output]
        assert program.output_spec is not None
        return unflatten(leaves, program.output_spec)

    def kept(self, values: Mapping[int, torch.Tensor]) -> dict[Slot, torch.Tensor]:
        """Tensors that modules of any stage left in attributes and the loss reads, on the last stage."""
        return {slot: self._resolve(leaf, values) for slot, leaf in self._placement.program.kept.items()}

    def wants_gradient(self, key: int) -> bool:
        """Whether the gradient of a value is sent back to the stage that computed it."""
        return self.outlines[key].requires_grad

    def backward(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Compute all gradients.

        Args:
            gradients: number -> gradient of a value sent; the loss, if set, gets gradient 1.
        """
        roots, seeds = self._roots(gradients)
        if roots:
            torch.autograd.backward(roots, seeds)
        self._paths, self.loss = {}, None

    def backward_inputs(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Compute the gradients of received values; gradients of weights are left to `backward_weights`."""
        roots, seeds = self._roots(gradients)
        edges = {key: arrival.edge for key, arrival in self._arrivals.items() if arrival.edge is not None}
        input_grads, self._deferred = input_gradients(roots, seeds, list(edges.values()))
        for key, gradient in zip(edges, input_grads, strict=True):
            if gradient is not None:
                self._arrivals[key].gradient = gradient
        self._paths, self.loss = {}, None

    def backward_weights(self) -> None:
        """Compute the gradients that `backward_inputs` left out."""
        assert self._deferred is not None
        self._deferred.run()
        self._deferred = None

    def gradient(self, key: int) -> torch.Tensor:
        """Remove and return the gradient of a received value."""
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
        with _match_surroundings(node.surroundings, self.device):
            result = node.function(*args, **kwargs)
        if any(key is not None for key in node.results):
            attribute_tensors = [getattr(self._model.get_submodule(name), attribute) for name, attribute in node.keeps]
            for key, leaf in zip(node.results, [*flatten(result)[0], *attribute_tensors], strict=True):
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


def _match_surroundings(traced: Surroundings, device: torch.device) -> ExitStack:
    """Enter the grad mode and autocast under which a node was traced."""
    stack, current = ExitStack(), surroundings(device)
    if traced.grad != current.grad:
        stack.enter_context(torch.set_grad_enabled(traced.grad))
    if traced.autocast != current.autocast:
        enabled, dtype = traced.autocast
        stack.enter_context(torch.autocast(device.type, dtype=dtype, enabled=enabled))
    return stack


@dataclass(slots=True)
class Junction:
    """A node on the path to the inputs from which branches lead to weights.

    Attributes:
        node: the autograd node.
        weights: the leaves that these branches reach.
        arrived: gradients that flowed into the node, None for outputs without one.
    """

    node: AutogradNode
    weights: list[torch.Tensor]
    arrived: tuple[torch.Tensor | None, ...] = ()


@dataclass(slots=True)
class Deferred:
    """The part of backward that computes gradients of weights.

    Attributes:
        junctions: where this part starts from the paths to the inputs.
        roots: graph edges of results that lead to no input.
        seeds: the gradients of those results.
    """

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
    """Compute gradients with respect to `inputs` only.

    Args:
        roots: graph edges at which the gradients of results enter.
        seeds: those gradients; None means 1.
        inputs: graph edges of the inputs.

    Returns:
        The gradient of each input (None if unused), and the deferred gradients of the weights.
    """
    if not inputs or not roots:
        return [None] * len(inputs), Deferred(roots=list(roots), seeds=list(seeds))
    paths = _Paths({edge.node for edge in inputs})
    leading_roots = [at for at, root in enumerate(roots) if paths.leads(root.node)]
    if not leading_roots:
        return [None] * len(inputs), Deferred(roots=list(roots), seeds=list(seeds))
    junctions = paths.junctions()
    other_roots = [at for at in range(len(roots)) if at not in leading_roots]
    if junctions is None:
        return _all_gradients(roots, seeds, inputs), Deferred()
    hooks = [junction.node.register_prehook(_capture_hook(junction)) for junction in junctions]
    try:
        gradients = torch.autograd.grad(
            [roots[at] for at in leading_roots],
            list(inputs),
            [seeds[at] for at in leading_roots],
            retain_graph=True,
            allow_unused=True,
        )
    finally:
        for hook in hooks:
            hook.remove()
    return list(gradients), Deferred(junctions, [roots[at] for at in other_roots], [seeds[at] for at in other_roots])


def _all_gradients(
    roots: Sequence[GradientEdge], seeds: Sequence[torch.Tensor | None], inputs: Sequence[GradientEdge]
) -> list[torch.Tensor | None]:
    """Compute all gradients at once; hooks capture those of the inputs."""
    caught: list[torch.Tensor | None] = [None] * len(inputs)

    def capture_hook(at: int, position: int) -> Any:
        def capture(gradients: tuple[torch.Tensor | None, ...]) -> None:
            caught[at] = gradients[position]

        return capture

    hooks = [edge.node.register_prehook(capture_hook(at, edge.output_nr)) for at, edge in enumerate(inputs)]
    try:
        torch.autograd.backward(list(roots), list(seeds))
    finally:
        for hook in hooks:
            hook.remove()
    return caught


def _capture_hook(junction: Junction) -> Any:
    def capture(gradients: tuple[torch.Tensor | None, ...]) -> None:
        junction.arrived = gradients

    return capture


class _Paths:
    """The nodes of an autograd graph that lead to any of `ends`."""

    def __init__(self, ends: set[AutogradNode]) -> None:
        self._ends = ends
        self._leads: dict[AutogradNode, bool] = dict.fromkeys(ends, True)

    def leads(self, start: AutogradNode) -> bool:
        """Whether `start` leads to an end.

        The search is depth first without recursion and records the answer for all nodes below `start` too.
        """
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
        """The nodes where branches to weights leave the paths to `ends`; None if two such branches share a node."""
        junctions: list[Junction] = []
        claimed: set[AutogradNode] = set()
        for node, leads in self._leads.items():
            if not leads or node in self._ends:
                continue
            branches = {c for c, _ in node.next_functions if c is not None and not self._leads[c]}
            branch_nodes = _below(branches)
            weights = [leaf.variable for leaf in branch_nodes if hasattr(leaf, "variable")]
            if not weights:
                continue
            if branch_nodes & claimed:
                return None
            claimed |= branch_nodes
            junctions.append(Junction(node, weights))
        return junctions


def _below(starts: set[AutogradNode]) -> set[AutogradNode]:
    """All nodes below `starts`, including these."""
    seen, stack = set(starts), list(starts)
    while stack:
        for child, _ in stack.pop().next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return seen
