"""All of context parallel around a microbatch: cut, run in parts, and what the rest of the runtime calls."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tutti.comm.traffic import CommChannel, untracked_channel
from tutti.config.plan import Plan
from tutti.parallel.context.attention import Attention
from tutti.parallel.context.batch import cut_batch, join_parts, sequence_length, shorten
from tutti.parallel.context.calls import Pass, Site, found_calls
from tutti.parallel.context.check import SAMPLES, Groups, check, piece_lengths
from tutti.parallel.context.families import adapt, is_hugging_face, shifted_labels
from tutti.parallel.context.order import Order
from tutti.parallel.context.ring import Ring
from tutti.parallel.mesh import Mesh
from tutti.trainer.losses import Weighted, default_loss

Unpack = Callable[[Any], tuple[tuple[Any, ...], dict[str, Any], Any]]
Loss = Callable[[Any, Any], Any]
Forward = Callable[[tuple[Any, ...], dict[str, Any]], Any]


Around = Callable[..., AbstractContextManager[None]]


def _same(value: Any) -> Any:
    return value


def _whole(batch: Any) -> tuple[Any, Around]:
    def around(*, within: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    return batch, around


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """What a rank does with sequences. Without a context axis: nothing.

    `prepare(batch)`: this rank's part of the batch, and a function that opens the context in which the model, its loss
    and its backward run on it (`within=True`: in the midst of the model's forward). `join(value)`: outputs and targets
    of all parts as whole sequences, collective, in that context too. `loss_fn`: the user's.
    """

    loss_fn: Loss | None
    prepare: Callable[[Any], tuple[Any, Around]] = _whole
    join: Callable[[Any], Any] = _same

    @contextmanager
    def part(self, batch: Any) -> Iterator[Any]:
        """A context in which the model runs on this rank's part of the batch, which it yields; backward belongs
        inside.
        """
        part, around = self.prepare(batch)
        with around():
            yield part


def sequences_of(
    model: nn.Module,
    plan: Plan,
    mesh: Mesh,
    unpack: Unpack,
    loss_fn: Loss | None,
    channel: CommChannel | None = None,
    stages: Forward | None = None,
) -> Sequences:
    """Make `model` ready for parts of sequences, in place, if the mesh has a context axis. Collective.

    `channel`: where what attention exchanges is counted; `stages`: the forward of a model that is cut into stages.
    """
    if mesh.degree("context") == 1:
        return Sequences(loss_fn=loss_fn)
    order = Order(kind=plan.context, degree=mesh.degree("context"), index=mesh.index("context"))
    ring = Ring(order=order, group=mesh.new_group("context"), channel=channel or untracked_channel())
    parts = Parts(model, ring, unpack, loss_fn)
    if stages is not None:
        parts.take_stages(stages, mesh.new_group("context", "stage"))
    return Sequences(loss_fn=parts.loss, prepare=parts.prepare, join=parts.join)


class Parts:
    """One model that runs on parts of sequences."""

    def __init__(self, model: nn.Module, ring: Ring, unpack: Unpack, loss_fn: Loss | None) -> None:
        self.ring = ring
        self.model, self._unpack, self._loss_fn = model, unpack, loss_fn or default_loss
        self._sites: frozenset[Site] | None = None
        self._known: Pass | None = None
        self._weighted = False
        self._stages: Forward | None = None
        self._everyone = ring.group
        if is_hugging_face(model):
            adapt(model, lambda: self._known)
        self._take_positions()

    def take_stages(self, forward: Forward, everyone: Any) -> None:
        """The model is cut into stages: this is its forward, which returns something on the last stage's ranks.
        `everyone`: the group of all ranks that compute parts or stages of the same samples.
        """
        self._stages, self._everyone = forward, everyone

    def prepare(self, batch: Any) -> tuple[Any, Around]:
        """See Sequences.prepare. The first batch is also checked."""
        order = self.ring.order
        length = sequence_length(batch, order)
        batch = shifted_labels(self.model, batch)
        if self._sites is None:
            self._sites = self._check(batch, length)
        return cut_batch(batch, length, order), partial(self._running, self._pass(batch, length, self._sites))

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

    def _pass(self, batch: Any, length: int, sites: frozenset[Site]) -> Pass:
        device = next(leaf.device for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))
        attention = Attention(ring=self.ring, length=length)
        return Pass(attention, self.ring.order.positions(length, device), sites)

    @contextmanager
    def _running(self, known: Pass, *, within: bool = False) -> Iterator[None]:
        self._known = known
        try:
            with found_calls(known, self.model), known.averaging() if within else nullcontext():
                yield
        finally:
            self._known = None

    def _check(self, batch: Any, length: int) -> frozenset[Site]:
        order = self.ring.order

        def loss(piece: Any) -> Any:
            args, kwargs, target = self._unpack(piece)
            if self._stages is None:
                return self.loss(self.model(*args, **kwargs), target)
            output = self._stages(args, kwargs)
            return None if output is None else self.loss(output, target)

        def whole(tokens: int) -> Any:
            return loss(shorten(batch, length, SAMPLES, tokens))

        def in_parts(tokens: int, sites: frozenset[Site]) -> Any:
            piece = cut_batch(shorten(batch, length, SAMPLES, tokens), tokens, order)
            with self._running(self._pass(batch, tokens, sites)):
                return loss(piece)

        groups = Groups(parts=self.ring.group, everyone=self._everyone)
        lengths = piece_lengths(self.model, length, order, self._everyone)
        return check(self.model, lengths, order, groups, whole, in_parts)

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
