"""Context parallelism around a microbatch: cut the batch, run the model on parts, and check it on the first batch."""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tutti.comm.object_collectives import gather_values
from tutti.comm.traffic import CommChannel, untracked_channel
from tutti.config.plan import Plan
from tutti.data.batches import Unpack
from tutti.data.device_copies import to_device
from tutti.data.seeds import derive_seed, preserved_generators
from tutti.errors import ScriptError, TuttiError
from tutti.parallel.context.attention_calls import (
    CallRecorder,
    MicrobatchState,
    Site,
    adapt,
    intercepted_calls,
    is_hugging_face,
    shifted_labels,
    takes_packed,
)
from tutti.parallel.context.context_attention import Attention
from tutti.parallel.context.ring_attention import Ring
from tutti.parallel.context.sequence_order import SequenceOrder, cut_batch, join_parts, sequence_length, shorten
from tutti.parallel.layout import to_local
from tutti.parallel.losses import Weighted, default_loss
from tutti.parallel.mesh import Mesh
from tutti.parallel.tensor.tensor_activation import whole

Loss = Callable[[Any, Any], Any]
"""(output, target) -> loss."""

Forward = Callable[[tuple[Any, ...], dict[str, Any]], Any]
"""(positional arguments, keyword arguments) -> output."""

OpenContext = Callable[..., AbstractContextManager[None]]
"""Opens the context in which the model, its loss and its backward run on a part of the batch."""


def _unchanged(value: Any) -> Any:
    return value


def _unchecked(batch: Any, device: torch.device) -> None:
    """There is nothing to check."""


def _no_news() -> tuple[str, ...]:
    return ()


def _uncut(batch: Any) -> tuple[Any, OpenContext]:
    def open_context(*, within: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    return batch, open_context


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """How a rank handles sequences; without a context axis they are left whole.

    Attributes:
        loss_fn: the user's loss, adapted to parts of sequences.
        prepare: from a batch, this rank's part of it and a function that opens the context in which the model, its loss
            and its backward run. The function takes `within=True` if it is opened inside the model's forward.
        join: whole sequences from the outputs and targets of all parts. Collective; call it in that context too.
        check: from a batch and the device, runs the model on the first batch, whole and in parts, with other parameters
            for a moment; later calls do nothing. Call it between steps: within one, ranks may read each other's
            parameters at any time.
        take_engines: what computed attention over the context axis so far; empty if that is what the last call said.
    """

    loss_fn: Loss | None
    prepare: Callable[[Any], tuple[Any, OpenContext]] = _uncut
    join: Callable[[Any], Any] = _unchanged
    check: Callable[[Any, torch.device], None] = _unchecked
    take_engines: Callable[[], tuple[str, ...]] = _no_news

    def part(self, batch: Any) -> AbstractContextManager[Any]:
        """While open, the model runs on this rank's part of the batch, which is yielded. Run backward inside too."""
        return nullcontext(batch) if self.prepare is _uncut else self._cut(batch)

    @contextmanager
    def _cut(self, batch: Any) -> Iterator[Any]:
        part, open_context = self.prepare(batch)
        with open_context():
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
    """Prepare `model` for parts of sequences, in place, if the mesh has a context axis. Collective.

    Args:
        model: the user's model.
        plan: the plan; it says which form of attention is used.
        mesh: the mesh of the ranks.
        unpack: splits a batch into the model's arguments and the target.
        loss_fn: the user's loss, or None if the model returns it.
        channel: where the communication of attention is counted.
        stages: the forward of the whole pipeline, if the model is divided into stages.
    """
    if mesh.degree("context") == 1:
        return Sequences(loss_fn=loss_fn)
    order = SequenceOrder(kind=plan.context, degree=mesh.degree("context"), index=mesh.index("context"))
    ring = Ring(order=order, group=mesh.new_group("context"), channel=channel or untracked_channel())
    parallel = ContextParallelModel(model, ring, unpack, loss_fn)
    if stages is not None:
        parallel.take_stages(stages, mesh.new_group("context", "stage"))
    return Sequences(
        loss_fn=parallel.loss,
        prepare=parallel.prepare,
        join=parallel.join,
        check=parallel.check,
        take_engines=parallel.take_engines,
    )


class ContextParallelModel:
    """One model that runs on parts of sequences."""

    def __init__(self, model: nn.Module, ring: Ring, unpack: Unpack, loss_fn: Loss | None) -> None:
        self.ring = ring
        self.model, self._unpack, self._loss_fn = model, unpack, loss_fn or default_loss
        self._sites: frozenset[Site] | None = None
        self._state: MicrobatchState | None = None
        self._weighted = False
        self._stages: Forward | None = None
        self._all_ranks = ring.group
        self._engines_told: frozenset[str] = frozenset()
        if is_hugging_face(model):
            adapt(model, lambda: self._state)
        self._take_positions()

    def take_stages(self, forward: Forward, all_ranks: Any) -> None:
        """Use `forward` for a model that is divided into stages; only ranks of the last stage get a result.

        `all_ranks` is the group of all ranks that compute parts or stages of the same samples.
        """
        self._stages, self._all_ranks = forward, all_ranks

    def prepare(self, batch: Any) -> tuple[Any, OpenContext]:
        """See `Sequences.prepare`. The first batch is also used for the check."""
        order = self.ring.order
        sites = self._sites_of(batch)
        length = sequence_length(batch, order)
        batch = shifted_labels(self.model, batch)
        return cut_batch(batch, length, order), partial(self._running, self._state_of(batch, length, sites))

    def check(self, batch: Any, device: torch.device) -> None:
        """See `Sequences.check`."""
        if self._sites is None:
            self._sites_of(to_device(batch, device))

    def _sites_of(self, batch: Any) -> frozenset[Site]:
        """Where the model makes positions; found on the first batch."""
        if self._sites is None:
            length = sequence_length(batch, self.ring.order)
            self._sites = self._check(shifted_labels(self.model, batch), length)
        return self._sites

    def take_engines(self) -> tuple[str, ...]:
        """See `Sequences.take_engines`."""
        before, self._engines_told = self._engines_told, frozenset(self.ring.engines)
        return () if before == self._engines_told else tuple(sorted(self._engines_told))

    def join(self, value: Any) -> Any:
        """See `Sequences.join`."""
        if self._state is None:
            raise RuntimeError("join was called outside the context of a microbatch; call it while the microbatch runs")
        return join_parts(value, self._state.attention.part, self.ring.order, self.ring.group)

    def loss(self, output: Any, target: Any) -> Any:
        """The user's loss of a part.

        A mean over tokens is taken over all ranks' tokens. Sums are those of this part.
        """
        state = self._state
        if state is None or self._weighted:
            return self._loss_fn(output, target)
        with state.averaging():
            value = self._loss_fn(output, target)
        if isinstance(value, Weighted):  # it adds up over ranks, so no mean in it may include other ranks' tokens
            self._weighted = True
            value = self._loss_fn(output, target)
        return value

    def _state_of(self, batch: Any, length: int, sites: frozenset[Site]) -> MicrobatchState:
        device = next(leaf.device for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))
        attention = Attention(ring=self.ring, length=length)
        return MicrobatchState(attention, self.ring.order.positions(length, device), sites)

    @contextmanager
    def _running(self, state: MicrobatchState, *, within: bool = False) -> Iterator[None]:
        self._state = state
        try:
            with intercepted_calls(state, self.model), state.averaging() if within else nullcontext():
                yield
        finally:
            self._state = None

    def _check(self, batch: Any, length: int) -> frozenset[Site]:
        """Run `check` on a short piece of the batch; returns where the model makes positions."""
        order = self.ring.order

        def loss(piece: Any) -> Any:
            args, kwargs, target = self._unpack(piece)
            if self._stages is None:
                return self.loss(self.model(*args, **kwargs), target)
            output = self._stages(args, kwargs)
            return None if output is None else self.loss(output, target)

        def run_whole(tokens: int) -> Any:
            return loss(shorten(batch, length, SAMPLES, tokens))

        def run_part(tokens: int, sites: frozenset[Site]) -> Any:
            piece = cut_batch(shorten(batch, length, SAMPLES, tokens), tokens, order)
            with self._running(self._state_of(batch, tokens, sites)):
                return loss(piece)

        groups = CheckGroups(parts=self.ring.group, all_ranks=self._all_ranks)
        lengths = piece_lengths(self.model, length, order, self._all_ranks)
        return check(self.model, lengths, order, groups, run_whole, run_part)

    def _take_positions(self) -> None:
        """Pass the tokens' positions to the model's forward if it has a parameter for them that the caller left out."""
        plain = self.model.forward
        parameters = inspect.signature(plain).parameters
        name = next((name for name in ("position_ids", "positions") if name in parameters), None)
        hugging_face = is_hugging_face(self.model) and "attention_mask" in parameters

        def forward(*args: Any, **kwargs: Any) -> Any:
            state = self._state
            if state is None:
                return plain(*args, **kwargs)
            passed = inspect.signature(plain).bind_partial(*args, **kwargs).arguments
            if name and passed.get(name) is None:
                kwargs[name] = state.positions[None] if name == "position_ids" else state.positions
                state.own_mask = hugging_face and passed.get("attention_mask") is None
            elif hugging_face and name == "position_ids" and takes_packed(self.model, passed):
                state.own_mask = True
                state.take_documents(passed[name])
            if state.own_mask:  # without a mask the library takes a jump between positions for a new packed sequence
                first = next(leaf for leaf in passed.values() if isinstance(leaf, torch.Tensor))
                kwargs["attention_mask"] = first.new_ones(first.shape[:2], dtype=torch.bool)
            with state.averaging():
                return plain(*args, **kwargs)

        self.model.forward = forward


SAMPLES = 2
"""Number of samples in the piece of the first batch that is checked."""

REMEDY = "give the model's forward a parameter `position_ids`, or drop the context axis for this model"


@dataclass(slots=True)
class ModelRecord:
    """One run of a model.

    Attributes:
        outputs: (name, class, tensors) of every module, in order of call.
        loss: the loss, as tensors.
    """

    outputs: list[tuple[str, str, list[torch.Tensor]]] = field(default_factory=list)
    loss: list[torch.Tensor] = field(default_factory=list)


Runner = Callable[[int], Any]
"""Number of tokens -> the loss (or None) of a piece of that length."""


Finding = tuple[int, str]
"""(number of modules that had returned before, what is wrong)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckGroups:
    """The groups of the check.

    Attributes:
        parts: ranks that hold parts of the same sequences.
        all_ranks: these ranks, and those that compute other stages of the same samples.
    """

    parts: Any
    all_ranks: Any


def piece_lengths(model: nn.Module, length: int, order: SequenceOrder, all_ranks: Any) -> list[int]:
    """Lengths to try in the check: a short one if any fits, then the whole length.

    Neither the short one nor a rank's part of it equals a dim of a parameter, so no other dim is taken for a sequence.
    """
    local_sizes = {size for parameter in model.parameters() for size in to_local(parameter).shape}
    sizes = set().union(*gather_values(local_sizes, all_ranks))
    multiples = range(2 * order.unit, min(length, 64 * order.unit) + 1, order.unit)
    fitting = [tokens for tokens in multiples if not {tokens, tokens // order.degree} & sizes]
    return [*fitting[:1], *([length] if fitting[:1] != [length] else [])]


def check(
    model: nn.Module,
    lengths: list[int],
    order: SequenceOrder,
    groups: CheckGroups,
    run_whole: Runner,
    run_part: Callable[[int, frozenset[Site]], Any],
) -> frozenset[Site]:
    """Compare the model on whole sequences with the model on parts; returns where it makes positions.

    Raises:
        ScriptError: on every rank along the context axis; it names the first module whose output differs.
    """
    with _undisturbed(model):
        tokens, reference, sites = _run_whole(model, lengths, run_whole)
        part, recorder = ModelRecord(), CallRecorder(tokens // order.degree)
        finding: Finding | None = None
        try:
            with _recorded(model, part), recorder:
                part.loss = _loss_leaves(run_part(tokens, sites), order.degree)
        except Exception as error:  # the model's own code, on parts
            finding = (
                len(part.outputs),
                f"{type(model).__name__} fails on {tokens // order.degree} tokens (mesh.context = {order.degree}), but "
                f"not on {tokens}: {str(error).splitlines()[0] if str(error) else type(error).__name__}. Tokens are "
                f"dim 1 of the batch's tensors; {REMEDY}",
            )
        averaged = _average(part, groups.parts)
        if finding is None:
            finding = _first_difference(
                reference, part, tokens, order, averaged=averaged, by_hand=recorder.softmaxes > 0
            )
    findings = [other for other in gather_values(finding, groups.parts) if other is not None]
    first = min(findings, key=itemgetter(0))[1] if findings else None
    message = next((other for other in gather_values(first, groups.all_ranks) if other is not None), None)
    if message is not None:
        raise ScriptError(message)
    return sites


def _run_whole(model: nn.Module, lengths: list[int], run_whole: Runner) -> tuple[int, ModelRecord, frozenset[Site]]:
    """(tokens, record, position sites) of the first length with which the model runs."""
    for tokens in lengths:
        record, recorder = ModelRecord(), CallRecorder(tokens)
        try:
            with _recorded(model, record), recorder:
                record.loss = _loss_leaves(run_whole(tokens))
        except Exception as error:  # the model's own code; PlanError: stages cannot be traced
            if tokens != lengths[-1]:
                continue
            if isinstance(error, TuttiError):
                raise
            reason = (str(error).splitlines() or [""])[0]
            raise ScriptError(
                f"{type(model).__name__} cannot be checked for parts of sequences: it fails on {SAMPLES} samples "
                f"of the first batch, of which dim 1 of the batch's tensors are the tokens: {type(error).__name__}: "
                f"{reason}; drop the context axis for this model"
            ) from error
        return tokens, record, frozenset(recorder.sites)
    raise AssertionError("there is always a length to try")


def _average(record: ModelRecord, group: Any) -> bool:
    """Replace scalars that modules and the loss returned by their means over the ranks.

    Every rank must call it, whatever it has found, because ranks may find different things.

    Returns:
        False if ranks have different numbers of scalars; they are unchanged then.
    """
    leaves = [*(leaf for *_, tensors in record.outputs for leaf in tensors), *record.loss]
    scalars = [leaf for leaf in leaves if leaf.dim() == 0 and leaf.is_floating_point()]
    by_rank = gather_values([float(scalar) for scalar in scalars], group)
    if len({len(values) for values in by_rank}) > 1:
        return False
    for scalar, *values in zip(scalars, *by_rank, strict=True):
        scalar.fill_(sum(values) / len(values))
    return True


def _first_difference(
    reference: ModelRecord, part: ModelRecord, tokens: int, order: SequenceOrder, *, averaged: bool, by_hand: bool
) -> Finding | None:
    """The first module whose result on parts differs; None if all agree.

    `averaged` says whether scalars are means over all parts; otherwise they are not compared.
    """
    context = f"mesh.context = {order.degree}"
    if [name for name, *_ in reference.outputs] != [name for name, *_ in part.outputs]:
        return 0, f"the model calls other modules for a part of a sequence than for a whole one ({context}); {REMEDY}"
    hint = (
        "attention by hand (with a softmax of its own) sees only one rank's tokens: call "
        f"F.scaled_dot_product_attention (attn_implementation='sdpa'), or {REMEDY}"
        if by_hand
        else f"it mixes tokens other than by attention, or counts positions from 0 on every rank: {REMEDY}"
    )
    verdicts = [
        [
            _agree(expected, actual, tokens, order) if averaged or actual.dim() else True
            for expected, actual in zip(references, parts, strict=False)
        ]
        for (_, _, references), (_, _, parts) in zip(reference.outputs, part.outputs, strict=True)
    ]
    agreeing = {name for name, *_ in reference.outputs if name}
    for (name, *_), found in zip(reference.outputs, verdicts, strict=True):
        if not found or any(verdict is not True for verdict in found):
            agreeing.discard(name)
    for number, ((name, kind, _), found) in enumerate(zip(reference.outputs, verdicts, strict=True)):
        # A module may see tokens in another order (grouped by expert) if a module around it returns the right values.
        if any(name.startswith(f"{around}.") for around in agreeing):
            continue
        if False in found or (None in found and not name):
            module = f"{name or 'the model'} ({kind})"
            return number, f"{module} computes different values on a part of a sequence ({context}): {hint}"
    for expected, actual in zip(reference.loss, part.loss, strict=False):
        if averaged and not _same_loss(expected, actual):
            return len(part.outputs), (
                f"the loss of a part of the tokens does not agree with that of whole sequences ({context}): it must be "
                "a mean over tokens, or tutti.Weighted(sum, count); shift labels in the data set, not in the loss, and "
                "leave out terms that are computed over whole sequences"
            )
    return None


def _agree(reference: torch.Tensor, part: torch.Tensor, tokens: int, order: SequenceOrder) -> bool | None:
    """Whether `part` is this rank's part of `reference`, within a tolerance; None if their shapes do not say."""
    if reference.shape == part.shape:
        expected = reference
    else:
        dims = [
            d for d, (size, part_size) in enumerate(zip(reference.shape, part.shape, strict=False)) if size != part_size
        ]
        if reference.dim() != part.dim() or len(dims) != 1:
            return None
        dim = dims[0]
        if reference.shape[dim] % tokens or part.shape[dim] * order.degree != reference.shape[dim]:
            return None
        by_tokens = reference.reshape(*reference.shape[:dim], -1, tokens, *reference.shape[dim + 1 :])
        expected = order.take(by_tokens, dim + 1).flatten(dim, dim + 1)
    if not reference.is_floating_point():
        return bool(torch.equal(expected, part))
    tolerance = torch.finfo(reference.dtype).eps ** 0.5
    expected, part = expected.double().nan_to_num(), part.double().nan_to_num()
    scale = float(reference.double().nan_to_num().abs().max()) if reference.numel() else 0.0
    return bool((expected - part).abs().max() <= tolerance * scale) if part.numel() else True


def _same_loss(reference: torch.Tensor, part: torch.Tensor) -> bool:
    """Whether two losses agree but for rounding.

    Untrained models have nearly the same loss at every token, so a loss over other tokens must not pass.
    """
    eps = torch.finfo(reference.dtype).eps
    expected, actual = float(reference), float(part)
    return math.isclose(expected, actual, rel_tol=min(eps**0.5, 500 * eps), abs_tol=eps) or expected != expected


def _loss_leaves(value: Any, parts: int = 1) -> list[torch.Tensor]:
    """The numbers of a loss of one of `parts` ranks, such that their means over the ranks are those of the whole."""
    if isinstance(value, Weighted):
        return [torch.as_tensor(number, dtype=torch.float64).detach() * parts for number in (value.total, value.count)]
    return [value.detach().clone()] if isinstance(value, torch.Tensor) and value.numel() == 1 else []


@contextmanager
def _recorded(model: nn.Module, record: ModelRecord) -> Iterator[None]:
    """While open, record every module's outputs."""

    def hook(name: str) -> Callable[..., None]:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            leaves = [whole(leaf.detach()).clone() for leaf in tensors]
            record.outputs.append((name, type(module).__name__, leaves))

        return note

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """While open, the model is in evaluation mode, without gradients, and constant parameters have random values.

    Afterwards the model and the random generators are as before.
    """
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
            for tensor, saved in (*constants, *buffers):
                tensor.copy_(saved)
            for module in training:
                module.training = True
