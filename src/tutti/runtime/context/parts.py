"""All of context parallel around a microbatch: cut, run in parts, and what the rest of the runtime calls."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tutti.runtime.context.attention import Attention
from tutti.runtime.context.batch import cut_batch, join_parts, sequence_length, shorten
from tutti.runtime.context.calls import Pass, Site, found_calls
from tutti.runtime.context.check import SAMPLES, check, piece_lengths
from tutti.runtime.context.families import adapt, is_hugging_face, shifted_labels
from tutti.runtime.context.order import Order
from tutti.runtime.context.ring import Ring
from tutti.runtime.mesh import Mesh
from tutti.runtime.traffic import Lane, lone_lane
from tutti.runtime.unpack import default_loss
from tutti.runtime.weighted import Weighted
from tutti.spec.plan import Plan
from tutti.spec.refusals import check_context

Unpack = Callable[[Any], tuple[tuple[Any, ...], dict[str, Any], Any]]
Loss = Callable[[Any, Any], Any]


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """What a rank does with sequences. Without a context axis: nothing.

    `part(batch)`: a context in which the model runs on this rank's part of the batch, which it yields; backward
    belongs inside. `join(value)`: outputs and targets of all parts as whole sequences, collective, inside too.
    `loss_fn`: the user's.
    """

    loss_fn: Loss | None
    part: Callable[[Any], AbstractContextManager[Any]] = nullcontext
    join: Callable[[Any], Any] = _same


def sequences_of(
    model: nn.Module, plan: Plan, mesh: Mesh, unpack: Unpack, loss_fn: Loss | None, lane: Lane | None = None
) -> Sequences:
    """Make `model` ready for parts of sequences, in place, if the mesh has a context axis. Collective.

    `lane`: where what attention exchanges is counted.
    """
    if mesh.degree("context") == 1:
        return Sequences(loss_fn=loss_fn)
    check_context(plan)
    order = Order(kind=plan.context, degree=mesh.degree("context"), index=mesh.index("context"))
    ranks, group = tuple(mesh.ranks("context")), mesh.new_group("context")
    ring = Ring(order=order, ranks=ranks, group=group, lane=lane or lone_lane())
    parts = Parts(model, ring, unpack, loss_fn)
    return Sequences(loss_fn=parts.loss, part=parts.part, join=parts.join)


class Parts:
    """One model that runs on parts of sequences."""

    def __init__(self, model: nn.Module, ring: Ring, unpack: Unpack, loss_fn: Loss | None) -> None:
        self.ring = ring
        self.model, self._unpack, self._loss_fn = model, unpack, loss_fn or default_loss
        self._sites: frozenset[Site] | None = None
        self._known: Pass | None = None
        self._weighted = False
        if is_hugging_face(model):
            adapt(model, lambda: self._known)
        self._take_positions()

    @contextmanager
    def part(self, batch: Any) -> Iterator[Any]:
        """See Sequences.part. The first batch is also checked."""
        order = self.ring.order
        length = sequence_length(batch, order)
        batch = shifted_labels(self.model, batch)
        if self._sites is None:
            self._sites = self._check(batch, length)
        with self._running(length, self._sites):
            yield cut_batch(batch, length, order)

    def join(self, value: Any) -> Any:
        """See Sequences.join."""
        if self._known is None:
            raise RuntimeError("outputs of parts are joined while the parts' microbatch runs")
        return join_parts(value, self._known.attention.part, self.ring.order, self.ring.group)

    def loss(self, output: Any, target: Any) -> Any:
        """The user's loss of a part: a mean over tokens is taken over all ranks' tokens, sums stay this part's."""
        known = self._known
        if known is None or self._weighted:
            return self._loss_fn(output, target)
        with known.averaging():
            value = self._loss_fn(output, target)
        if isinstance(value, Weighted):  # made of sums, or of means over this part: nothing of other ranks in it
            self._weighted = True
            value = self._loss_fn(output, target)
        return value

    @contextmanager
    def _running(self, length: int, sites: frozenset[Site]) -> Iterator[None]:
        order, device = self.ring.order, next(self.model.parameters()).device
        attention = Attention(ring=self.ring, length=length)
        self._known = Pass(attention, order.positions(length, device), sites)
        try:
            with found_calls(self._known, self.model):
                yield
        finally:
            self._known = None

    def _check(self, batch: Any, length: int) -> frozenset[Site]:
        order = self.ring.order

        def loss(piece: Any) -> Any:
            args, kwargs, target = self._unpack(piece)
            return self.loss(self.model(*args, **kwargs), target)

        def whole(tokens: int) -> Any:
            return loss(shorten(batch, length, SAMPLES, tokens))

        def in_parts(tokens: int, sites: frozenset[Site]) -> Any:
            piece = cut_batch(shorten(batch, length, SAMPLES, tokens), tokens, order)
            with self._running(tokens, sites):
                return loss(piece)

        lengths = piece_lengths(self.model, length, order)
        return check(self.model, lengths, order, self.ring.group, whole, in_parts)

    def _take_positions(self) -> None:
        """Give the model's forward its tokens' positions where it takes them by name and the caller gave none."""
        plain = self.model.forward
        parameters = inspect.signature(plain).parameters
        name = next((name for name in ("position_ids", "positions") if name in parameters), None)
        hugging_face = is_hugging_face(self.model) and "attention_mask" in parameters

        def forward(*args: Any, **kwargs: Any) -> Any:
            known = self._known
            if known is None:
                return plain(*args, **kwargs)
            given = inspect.signature(plain).bind_partial(*args, **kwargs).arguments
            if name and given.get(name) is None:
                kwargs[name] = known.positions[None] if name == "position_ids" else known.positions
                known.own_mask = hugging_face and given.get("attention_mask") is None
            if known.own_mask:  # or the library takes a jump between positions for the start of another sequence
                first = next(leaf for leaf in given.values() if isinstance(leaf, torch.Tensor))
                kwargs["attention_mask"] = first.new_ones(first.shape[:2], dtype=torch.bool)
            with known.averaging():
                return plain(*args, **kwargs)

        self.model.forward = forward
