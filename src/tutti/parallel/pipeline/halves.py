"""Halves of a backward: first the gradients of a stage's inputs, later those of its weights (arXiv 2401.10241).

The graph's nodes that lead to an input are run first, without the branches that only lead to weights. What flowed
into the nodes where such branches leave is kept; the second half starts from there, one node at a time. So nothing is
computed twice. A weight that several such nodes share would be reached more than once: then, and where a stage has
no inputs, one half does everything.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node


@dataclass(slots=True)
class Junction:
    """A node where branches to weights leave the way to the inputs. `arrived`: gradients that flowed into it."""

    node: Node
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
    ways = _Ways({edge.node for edge in inputs})
    leading = [at for at, root in enumerate(roots) if ways.leads(root.node)]
    if not leading:
        return [None] * len(inputs), Deferred(roots=list(roots), seeds=list(seeds))
    junctions = ways.junctions()
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


class _Ways:
    """Which nodes of a graph lead to any of `ends`."""

    def __init__(self, ends: set[Node]) -> None:
        self._ends = ends
        self._leads: dict[Node, bool] = dict.fromkeys(ends, True)

    def leads(self, start: Node) -> bool:
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
        taken: set[Node] = set()
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


def _below(starts: set[Node]) -> set[Node]:
    """All nodes under `starts`, themselves included."""
    seen, stack = set(starts), list(starts)
    while stack:
        for child, _ in stack.pop().next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    return seen
