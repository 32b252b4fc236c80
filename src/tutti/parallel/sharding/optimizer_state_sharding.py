"""Sharding level 1: every rank updates its part of the parameters and keeps only that part's optimizer state.

An elementwise optimizer gets parts of all parameters. Any other optimizer, and sparse gradients, get whole parameters,
spread so that ranks hold about as much. Parameters and gradients stay whole on every rank; ranks exchange the updated
parts after each optimizer step. Checkpoints find the parts through the layout's state shards.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from tutti.comm.traffic import CommHandle
from tutti.config.plan import ShardingPlan
from tutti.optim.optimizer_traits import check_updates_on_host, is_elementwise
from tutti.parallel.layout import Layout
from tutti.parallel.offload.copies import CopyPair, CopyStreams
from tutti.parallel.offload.pinned_memory import allocate_host
from tutti.parallel.sharding.shard_collectives import ShardGroup, gather
from tutti.parallel.sharding.sharded_gradients import Shards
from tutti.parallel.sharding.sharded_unit import Loads, Piece, ShardPieces, even_bounds

BUCKET_NBYTES = 25 * 2**20
"""Parameters are exchanged in buckets of about this size, which bounds the memory that an exchange takes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """The tensor that an optimizer updates on this rank instead of `whole`: a view of its `piece`, or a copy on the
    host.

    Attributes:
        arrived: where the gradient of a copy on the host arrives; None for a view.
    """

    whole: nn.Parameter
    piece: Piece | None
    own: nn.Parameter
    arrived: torch.Tensor | None = None

    @property
    def target(self) -> torch.Tensor:
        return self.whole.data if self.piece is None else self.piece.of(self.whole.data)

    def take_gradient(self) -> list[CopyPair]:
        """Give the tensor its gradient; returns what has to be copied first."""
        gradient = self.whole.grad
        if self.own is self.whole:
            return []
        part_gradient = gradient if gradient is None or self.piece is None else self.piece.of(gradient)
        if part_gradient is None or self.arrived is None:
            self.own.grad = part_gradient
            return []
        if part_gradient.is_sparse:
            self.own.grad = part_gradient.to(self.own.device)
            return []
        self.own.grad = self.arrived
        return [(self.arrived, part_gradient)]

    def give(self) -> list[CopyPair]:
        """Return what has to be copied so that the parameter has the updated values."""
        if self.own is not self.whole:
            self.own.grad = None
        return [] if self.arrived is None else [(self.target, self.own.data)]

    def follow(self) -> None:
        """Take over the parameter's values, which have been set from outside."""
        if self.arrived is not None:
            self.own.data.copy_(self.target)


@dataclass(slots=True, eq=False)
class DividedState:
    """The divided state of one optimizer.

    Attributes:
        buckets: parameters cut among all ranks.
        owned: parameters that one rank updates as a whole.
    """

    given: list[list[nn.Parameter]]
    parts: list[Part]
    buckets: list[tuple[list[nn.Parameter], ShardPieces]]
    owned: list[tuple[nn.Parameter, int]]


class States(Shards):
    """Optimizer state divided among the ranks of `shard`."""

    def __init__(self, model: nn.Module, layout: Layout, sharding: ShardingPlan) -> None:
        self._model, self._layout = model, layout
        self._offloads = sharding.offload == "optimizer"
        self._copies: dict[torch.device, CopyStreams] = {}
        self._degree, self._rank = layout.mesh.degree("shard"), layout.mesh.index("shard")
        self._ranks = layout.mesh.ranks("shard")
        self._shard_group = ShardGroup.meet(layout.mesh.new_group("shard"), layout.channel("parameters", "shard"))
        self._loads = Loads(layout.mesh)
        self._divided: dict[Optimizer, DividedState] = {}
        self._shared: set[nn.Parameter] = set()
        self._sent_nbytes = 0

    @property
    def sent_nbytes(self) -> int:
        return self._sent_nbytes

    def bind(self, optimizers: Iterable[Optimizer]) -> None:
        optimizers = tuple(optimizers)
        for optimizer in optimizers if self._offloads else ():
            check_updates_on_host(optimizer)
        holders = Counter(p for o in optimizers for p in {q for group in o.param_groups for q in group["params"]})
        self._shared = {parameter for parameter, count in holders.items() if count > 1}
        for optimizer in optimizers:
            self._divided[optimizer] = self._divide(optimizer)
            optimizer.zero_grad = partial(self._zero_grad, optimizer)  # type: ignore[method-assign]
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)

    def _zero_grad(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        """The optimizer's zero_grad, for a script that calls it: it concerns the parameters of forward."""
        for parameter in (p for group in self._divided[optimizer].given for p in group):
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad = torch.zeros_like(parameter.grad)

    def clear(self) -> None:
        self._sent_nbytes = 0

    @contextmanager
    def whole_gradients(self, optimizer: Optimizer) -> Iterator[None]:
        part_groups = [group["params"] for group in optimizer.param_groups]
        for group, given in zip(optimizer.param_groups, self._divided[optimizer].given, strict=True):
            group["params"] = given
        try:
            yield
        finally:
            for group, params in zip(optimizer.param_groups, part_groups, strict=True):
                group["params"] = params

    @torch.no_grad()
    def wholes(
        self, optimizer: Optimizer, of: Callable[[nn.Parameter], torch.Tensor | None]
    ) -> dict[nn.Parameter, torch.Tensor]:
        divided = self._divided[optimizer]
        cut = [parameter for parameters, _ in divided.buckets for parameter in parameters]
        wholes = {p: torch.zeros_like(p.data) for p in (*cut, *(p for p, _ in divided.owned))}
        for part in divided.parts:
            part_value, whole = of(part.own), wholes[part.whole]
            if part_value is not None:
                (whole if part.piece is None else part.piece.of(whole)).copy_(part_value)
        self._complete(divided, wholes.__getitem__)
        return wholes

    def _divide(self, optimizer: Optimizer) -> DividedState:
        """Decide which rank updates what, and give the optimizer this rank's part."""
        given = [list(group["params"]) for group in optimizer.param_groups]
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        sparse = _sparse(self._model)
        held = [p for group in given for p in group if "shard" in self._layout.shard_of(names[p]).sums]
        everything = [p for p in held if p not in self._shared]  # several optimizers would divide those differently
        may_cut = is_elementwise(optimizer)
        cut = [p for p in everything if may_cut and p.dim() and p.numel() and p not in sparse]
        whole = [p for p in everything if p not in set(cut) and (p.dim() or not may_cut)]
        loads = {p: self._loads.beside(self._layout.shard_of(names[p]).sums) for p in everything}
        buckets = [(bucket, self._pieces(bucket, loads)) for bucket in _buckets(cut)]
        owned = _spread(whole, loads)
        rank_pieces = [(bucket, pieces.ranks[self._rank]) for bucket, pieces in buckets]
        parts = [self._part(p, piece) for bucket, ours in rank_pieces for p, piece in zip(bucket, ours, strict=True)]
        parts += [self._part(p, None) for p, owner in owned if owner == self._rank]
        parts_here = {part.whole: part for part in parts if part.own.numel()}
        for part in parts_here.values():
            self._note(names[part.whole], part)
        everywhere = set(everything) - set(cut) - set(whole)
        for group, params in zip(optimizer.param_groups, given, strict=True):
            kept = [p for p in params if p in parts_here or p in everywhere or p not in set(everything)]
            group["params"] = [parts_here[p].own if p in parts_here else p for p in kept]
        return DividedState(given, list(parts_here.values()), buckets, owned)

    def _part(self, whole: nn.Parameter, piece: Piece | None) -> Part:
        target, arrived = whole.data if piece is None else piece.of(whole.data), None
        if self._offloads:
            self._copies.setdefault(whole.device, CopyStreams(whole.device))
            here, arrived = (allocate_host(target.numel(), target.dtype, whole.device) for _ in range(2))
            arrived, target = arrived.view(target.shape), here.view(target.shape).copy_(target)
        elif piece is None:
            return Part(whole=whole, piece=None, own=whole)
        substitute = nn.Parameter(target, requires_grad=whole.requires_grad)
        substitute.__dict__.update(whole.__dict__)
        return Part(whole=whole, piece=piece, own=substitute, arrived=arrived)

    def _note(self, name: str, part: Part) -> None:
        if part.piece is not None:
            self._layout.cut_state_of(name, part.piece.dim, (part.piece.start, part.piece.stop))
        if part.own is not part.whole:
            self._layout.states.substitutes[part.own] = name
            self._layout.states.after_load.append(part.follow)

    def _pieces(self, parameters: list[nn.Parameter], loads: Mapping[nn.Parameter, list[int]]) -> ShardPieces:
        bounds = [even_bounds(p.shape, loads[p]) for p in parameters]
        return ShardPieces.cut([p.shape for p in parameters], bounds, self._degree)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        parts = self._divided[optimizer].parts
        pairs = [pair for part in parts for pair in part.take_gradient()]
        for copying in [copies.to_host(_of(device, pairs, 1)) for device, copies in self._copies.items()]:
            copying.synchronize()

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Exchange the updated parts."""
        divided = self._divided[optimizer]
        pairs = [pair for part in divided.parts for pair in part.give()]
        copying = [copies.to_device(_of(device, pairs, 0)) for device, copies in self._copies.items()]
        for copy in copying:
            copy.wait()
        self._complete(divided, lambda parameter: parameter.data)
        for copy in copying:
            copy.synchronize()  # the script may change what the optimizer holds

    def _complete(self, divided: DividedState, of: Callable[[nn.Parameter], torch.Tensor]) -> None:
        """Gather tensors of which every rank has its part, in the parameters' shapes.

        One bucket is exchanged while the one before is unpacked.
        """
        waiting: list[Callable[[], None]] = []
        for parameters, pieces in divided.buckets:
            waiting.append(self._gather([of(parameter) for parameter in parameters], pieces))
            if len(waiting) > 1:
                waiting.pop(0)()
        for parameter, owner in divided.owned:
            waiting.append(self._broadcast(of(parameter), owner))
        for finish in waiting:
            finish()

    def _gather(self, wholes: list[torch.Tensor], pieces: ShardPieces) -> Callable[[], None]:
        communicator = self._shard_group.communicator
        empty = partial(torch.empty, dtype=wholes[0].dtype, device=wholes[0].device)
        segment = empty(pieces.size) if communicator is None else communicator.borrow(pieces.size, wholes[0].dtype)
        ours = pieces.ranks[self._rank]
        segment[sum(piece.numel for piece in ours) :].zero_()  # padding to equal segments, read by nobody
        for piece, whole in zip(ours, wholes, strict=True):
            piece.within(segment).copy_(piece.of(whole))
        self._sent_nbytes += (self._degree - 1) * segment.numel() * segment.element_size()
        rows = partial(empty, self._degree, pieces.size)
        return gather(segment, self._shard_group, rows, partial(pieces.scatter, wholes=wholes)).wait

    def _broadcast(self, whole: torch.Tensor, owner: int) -> Callable[[], None]:
        values = whole.contiguous()
        work = dist.broadcast(values, src=self._ranks[owner], group=self._shard_group.handle, async_op=True)
        nbytes = (self._degree - 1) * values.numel() * values.element_size() if owner == self._rank else 0
        self._sent_nbytes += nbytes
        return partial(_take, self._shard_group.channel.start([work], nbytes), values, whole)


def _spread(parameters: list[nn.Parameter], loads: Mapping[nn.Parameter, list[int]]) -> list[tuple[nn.Parameter, int]]:
    """The owner of each whole parameter: the largest first, each to the rank that holds least so far."""
    owners: dict[nn.Parameter, int] = {}
    for parameter in sorted(parameters, key=lambda p: -p.numel()):
        so_far = loads[parameter]
        owners[parameter] = owner = so_far.index(min(so_far))
        so_far[owner] += parameter.numel()
    return [(p, owners[p]) for p in parameters]


def _of(device: torch.device, pairs: Iterable[CopyPair], index: int) -> list[CopyPair]:
    """The pairs whose tensor `index` is on the device."""
    return [pair for pair in pairs if pair[index].device == device]


def _take(work: CommHandle, values: torch.Tensor, whole: torch.Tensor) -> None:
    work.wait()
    if values.data_ptr() != whole.data_ptr():
        whole.copy_(values)


def _buckets(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters of one dtype and device, about BUCKET_NBYTES each."""
    open_ones: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        key = (parameter.dtype, parameter.device)
        open_ones.setdefault(key, []).append(parameter)
        if sum(p.numel() * p.element_size() for p in open_ones[key]) >= BUCKET_NBYTES:
            yield open_ones.pop(key)
    yield from open_ones.values()


def _sparse(model: nn.Module) -> set[nn.Parameter]:
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    return {cast(nn.Parameter, module.weight) for module in embeddings if module.sparse}
