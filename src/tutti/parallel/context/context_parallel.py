"""All of context parallel around a microbatch: cut, run in parts, and what the rest of the runtime calls."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from tutti.comm.traffic import CommChannel, untracked_channel
from tutti.config.plan import Plan
from tutti.data.batches import Unpack
from tutti.data.seeds import derive_seed, preserved_generators
from tutti.errors import PlanError, ScriptError
from tutti.parallel.context.attention_calls import (
    Pass,
    Site,
    Watch,
    adapt,
    found_calls,
    is_hugging_face,
    shifted_labels,
)
from tutti.parallel.context.context_attention import Attention
from tutti.parallel.context.ring_attention import Ring
from tutti.parallel.context.sequence_order import SequenceOrder, cut_batch, join_parts, sequence_length, shorten
from tutti.parallel.layout import to_local
from tutti.parallel.losses import Weighted, default_loss
from tutti.parallel.mesh import Mesh
from tutti.parallel.tensor.tensor_activation import whole

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
    order = SequenceOrder(kind=plan.context, degree=mesh.degree("context"), index=mesh.index("context"))
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


T = TypeVar("T")

SAMPLES = 2
REMEDY = "give the model's forward a parameter `position_ids`, or drop the context axis for this model"


@dataclass(slots=True)
class Seen:
    """What one run of a model gave: every module's outputs in order of call, and the loss."""

    outputs: list[tuple[str, str, list[torch.Tensor]]] = field(default_factory=list)
    loss: list[torch.Tensor] = field(default_factory=list)


Runner = Callable[[int], Any]
"""tokens -> the loss (or None) of the piece of so many tokens."""


Finding = tuple[int, str]
"""How many modules had returned before, and what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """`parts`: ranks that hold parts of the same sequences; `everyone`: with them those that compute other stages."""

    parts: Any
    everyone: Any


def piece_lengths(model: nn.Module, length: int, order: SequenceOrder, everyone: Any) -> list[int]:
    """Lengths to try: short ones that are no size of a parameter, so that nothing is a sequence by chance; then all."""
    own = {size for parameter in model.parameters() for size in to_local(parameter).shape}
    sizes = set().union(*_gathered(own, everyone))
    multiples = range(2 * order.unit, min(length, 64 * order.unit) + 1, order.unit)
    fitting = [tokens for tokens in multiples if not {tokens, tokens // order.degree} & sizes]
    return [*fitting[:1], *([length] if fitting[:1] != [length] else [])]


def check(
    model: nn.Module,
    lengths: list[int],
    order: SequenceOrder,
    groups: Groups,
    on_one: Runner,
    in_parts: Callable[[int, frozenset[Site]], Any],
) -> frozenset[Site]:
    """Compare the model on whole sequences and on parts; returns where it counts positions.

    Raises ScriptError, on every rank along the context axis, naming the first module whose output differs.
    """
    with _undisturbed(model):
        tokens, seen, sites = _run_whole(model, lengths, on_one)
        parts, watch = Seen(), Watch(tokens // order.degree)
        finding: Finding | None = None
        try:
            with _recorded(model, parts), watch:
                parts.loss = _loss_leaves(in_parts(tokens, sites), order.degree)
        except (PlanError, RuntimeError, ValueError, IndexError, TypeError) as error:
            finding = (
                len(parts.outputs),
                f"{type(model).__name__} fails on {tokens // order.degree} tokens (mesh.context = {order.degree}), but "
                f"not on {tokens}: {str(error).splitlines()[0] if str(error) else type(error).__name__}. Tokens are "
                f"dim 1 of the batch's tensors; {REMEDY}",
            )
        averaged = _average(parts, groups.parts)
        if finding is None:
            finding = _first_difference(seen, parts, tokens, order, averaged=averaged, by_hand=watch.softmaxes > 0)
    of_parts = [one for one in _gathered(finding, groups.parts) if one is not None]
    first = min(of_parts, key=itemgetter(0))[1] if of_parts else None
    said = next((one for one in _gathered(first, groups.everyone) if one is not None), None)
    if said is not None:
        raise ScriptError(said)
    return sites


def _gathered(value: T, group: Any) -> list[T]:
    """Every rank's value, in order of rank."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def _run_whole(model: nn.Module, lengths: list[int], on_one: Runner) -> tuple[int, Seen, frozenset[Site]]:
    """(tokens, what was seen, position sites) of the first length the model takes."""
    for tokens in lengths:
        seen, watch = Seen(), Watch(tokens)
        try:
            with _recorded(model, seen), watch:
                seen.loss = _loss_leaves(on_one(tokens))
        except (PlanError, RuntimeError, ValueError, IndexError, TypeError):  # a PlanError: stages cannot follow it
            if tokens == lengths[-1]:
                raise
            continue
        return tokens, seen, frozenset(watch.sites)
    raise AssertionError("there is always a length to try")


def _average(parts: Seen, group: Any) -> bool:
    """Numbers without dims that modules and the loss gave become their means over the ranks; False where ranks have
    not as many. Every rank calls it, whatever it has found: ranks differ in that.
    """
    leaves = [*(leaf for *_, some in parts.outputs for leaf in some), *parts.loss]
    numbers = [leaf for leaf in leaves if leaf.dim() == 0 and leaf.is_floating_point()]
    everyone = _gathered([float(number) for number in numbers], group)
    if len({len(theirs) for theirs in everyone}) > 1:
        return False
    for number, *values in zip(numbers, *everyone, strict=True):
        number.fill_(sum(values) / len(values))
    return True


def _first_difference(
    seen: Seen, parts: Seen, tokens: int, order: SequenceOrder, *, averaged: bool, by_hand: bool
) -> Finding | None:
    """The first module that gives something else on parts; None where all agree. `averaged`: whether numbers without
    dims are means over all parts; else nothing is known of them.
    """
    context = f"mesh.context = {order.degree}"
    if [name for name, *_ in seen.outputs] != [name for name, *_ in parts.outputs]:
        return 0, f"the model calls other modules for a part of a sequence than for a whole one ({context}); {REMEDY}"
    hint = (
        f"attention by hand (a softmax of its own) sees one rank's tokens only: call "
        f"F.scaled_dot_product_attention (attn_implementation='sdpa'), or {REMEDY}"
        if by_hand
        else f"it mixes tokens other than by attention, or counts positions from 0 on every rank: {REMEDY}"
    )
    for number, ((name, kind, ones), (_, _, theirs)) in enumerate(zip(seen.outputs, parts.outputs, strict=True)):
        for one, other in zip(ones, theirs, strict=False):
            verdict = _agree(one, other, tokens, order) if averaged or other.dim() else True
            if verdict is False or (verdict is None and not name):
                module = f"{name or 'the model'} ({kind})"
                return number, f"{module} computes something else on a part of a sequence ({context}): {hint}"
    for one, other in zip(seen.loss, parts.loss, strict=False):
        if averaged and _agree(one, other, tokens, order) is False:
            return len(parts.outputs), (
                f"the loss over a part of the tokens is not the whole's ({context}): it must be a mean over tokens, or "
                "tutti.Weighted(sum, count); shift labels in the data set rather than in the loss, and leave out what "
                "is computed over whole sequences"
            )
    return None


def _agree(one: torch.Tensor, part: torch.Tensor, tokens: int, order: SequenceOrder) -> bool | None:
    """Whether `part` is this rank's part of `one`; None where their shapes do not say."""
    if one.shape == part.shape:
        expected = one
    else:
        dims = [d for d, (a, b) in enumerate(zip(one.shape, part.shape, strict=False)) if a != b]
        if one.dim() != part.dim() or len(dims) != 1:
            return None
        dim = dims[0]
        if one.shape[dim] % tokens or part.shape[dim] * order.degree != one.shape[dim]:
            return None
        by_tokens = one.reshape(*one.shape[:dim], -1, tokens, *one.shape[dim + 1 :])
        expected = order.take(by_tokens, dim + 1).flatten(dim, dim + 1)
    if not one.is_floating_point():
        return bool(torch.equal(expected, part))
    tolerance = torch.finfo(one.dtype).eps ** 0.5
    expected, part = expected.double().nan_to_num(), part.double().nan_to_num()
    scale = float(one.double().nan_to_num().abs().max()) if one.numel() else 0.0
    return bool((expected - part).abs().max() <= tolerance * scale) if part.numel() else True


def _loss_leaves(value: Any, parts: int = 1) -> list[torch.Tensor]:
    """The numbers of a loss of one of `parts` ranks, in a form whose mean over ranks is the whole's."""
    if isinstance(value, Weighted):
        return [torch.as_tensor(number, dtype=torch.float64).detach() * parts for number in (value.total, value.count)]
    return [value.detach().clone()] if isinstance(value, torch.Tensor) and value.numel() == 1 else []


@contextmanager
def _recorded(model: nn.Module, seen: Seen) -> Iterator[None]:
    """Note every module's outputs."""

    def hook(name: str) -> Callable[..., None]:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            leaves = [whole(leaf.detach()).clone() for leaf in tensors]
            seen.outputs.append((name, type(module).__name__, leaves))

        return note

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, random values for constant parameters; afterwards all is as it was."""
    training = [module for module in model.modules() if module.training]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    constants = []
    with preserved_generators(), torch.no_grad():
        for name, parameter in model.named_parameters():
            values = to_local(parameter)
            if values.is_floating_point() and values.numel() and bool((values == values.reshape(-1)[0]).all()):
                constants.append((values, values.clone()))
                draw = torch.Generator().manual_seed(derive_seed(0, "check", name))
                values.add_(torch.randn(values.shape, generator=draw).to(values) * 0.5)
        model.eval()
        try:
            yield
        finally:
            for tensor, kept in (*constants, *buffers):
                tensor.copy_(kept)
            for module in training:
                module.training = True
