"""Data parallel: replicas whose gradients are summed in buckets while backward still runs.

The sum is tutti's own and not torch's DistributedDataParallel, which must choose between waiting for an extra
all-reduce in every step (find_unused_parameters) and hanging where one rank leaves a parameter unused. Here a flag
travels with each gradient. Losses are weighted by samples first, so gradients are summed, not averaged.
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from tutti.comm.point_to_point import ring_all_reduce_nbytes
from tutti.config.plan import Plan
from tutti.config.vocabulary import AxisName
from tutti.errors import ScriptError
from tutti.parallel.compressed.compressor import Compressor
from tutti.parallel.compressed.factored import Factored
from tutti.parallel.data.buckets import Bucket, Group, make_buckets
from tutti.parallel.data.host_sums import quickest_sums
from tutti.parallel.layout import Layout
from tutti.parallel.sharding.sharded_gradients import Shards
from tutti.trainer.host_memory import WARMUP_UPDATES, long_lived_blocks

LossFunction = Callable[[nn.Module, Any], Any]
"""fn(model, batch) -> loss (a mean over samples, or Weighted)."""


_ALIKE: tuple[AxisName, ...] = ("replicate", "context", "stage")
"""Axes that leave ranks which sum a gradient with the same parameters."""


class Replica:
    """This rank's replica: between `begin` and `finish`, gradients that backward computes are summed over ranks.

    `parameters`: those that require a gradient; `late`: names of those whose gradient is complete only at `finish`.
    `order`: in which buckets are filled; `arrived`: in which gradients have come so far, None once that is settled.
    `apart`: axes along which replicas keep gradients of their own; `restore` makes it count. `ways`: what sums go
    through, in words.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        plan: Plan,
        shards: Shards | None = None,
        late: Iterable[str] = (),
        compressor: Compressor | None = None,
        factored: Factored | None = None,
    ) -> None:
        self.compressor, self.factored = compressor, factored or Factored()
        self.parameters: list[nn.Parameter] = []
        self._late = {model.get_parameter(name) for name in late}
        self._last: set[nn.Parameter] | None = None
        self._model, self._layout, self._cap = model, layout, plan.sync.bucket_nbytes
        self.shards = shards or Shards()
        self.apart: tuple[AxisName, ...] = ()
        self._groups: dict[nn.Parameter, Group] = {}
        self._places: dict[nn.Parameter, tuple[Bucket, int]] = {}
        self._buckets: list[Bucket] = []
        self._sparse: list[nn.Parameter] = []
        self.arrived: list[nn.Parameter] | None = []
        self.order: list[nn.Parameter] = []
        self._hooks: list[Any] = []
        self._next = 0
        self._summing = False
        self._updates = 0
        self._build(_trainable(model))
        if not self.parameters and layout.mesh.degree("stage") == 1:
            raise ScriptError("the model has no parameter that requires a gradient; unfreeze at least one")

    @property
    def sent_nbytes(self) -> int:
        """Bytes this rank sends for its gradients in a step, and for divided parameters."""
        sparse = sum(ring_all_reduce_nbytes(p, self._groups[p].size) for p in self._sparse)
        return self.shards.sent_nbytes + sparse + sum(bucket.sent_nbytes for bucket in self._buckets)

    def begin(self, *, piecewise: bool = False) -> None:
        """The backward that comes is the step's only one: sum gradients from here on. `piecewise`: several come, whose
        gradients are added up in the buckets; `last_of` says for which parameters one is the last.
        """
        self._last = set() if piecewise else None
        trainable = _trainable(self._model)
        if [*map(id, trainable)] != [*map(id, self.parameters)]:  # the script has frozen or unfrozen some
            with long_lived_blocks():
                self._build(trainable)
        elif self.arrived:
            if self._alike():
                self.factored.choose()
                self._reorder()
            self.arrived = None
        for bucket in self._buckets:
            bucket.open()
        self._next, self._summing = 0, True

    def last_of(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """The backward that comes is the last that reaches `parameters` (None: any): their sums may start in it."""
        if parameters is None:
            self._last = None
        elif self._last is not None and self._places:
            self._last.update(parameters)

    def finish(self) -> None:
        """Backward has returned: send what it left out, and wait for all sums."""
        self._summing = False
        for bucket in self._buckets[self._next :]:
            bucket.complete()
            bucket.launch()
        for parameter in self._sparse:
            _sum_sparse(parameter, self._groups[parameter])
        self.shards.send()  # before anything is waited for: a courier must know of all sums
        for bucket in self._buckets:
            bucket.wait()
        self.shards.finish()

    def restore(
        self, order: list[nn.Parameter] | None, arrived: list[nn.Parameter] | None, cap_nbytes: int | None = None
    ) -> None:
        """Buckets in an order that a checkpoint knows; None: as at the start. `arrived`: see the attribute. Of
        `cap_nbytes`, if that is given. Collective.
        """
        self.arrived, self._cap = arrived, cap_nbytes or self._cap
        self._build(self.parameters, order)

    def settle(self, finite: bool) -> None:
        """All ranks have agreed whether the update may be made: what compression keeps back counts, or not."""
        if self.compressor is not None:
            self.compressor.settle(finite)

    def updated(self, optimizers: int) -> bool:
        """One of the optimizers has made an update; returns whether from now on all that lasts is there."""
        self._updates += 1
        return self._updates == WARMUP_UPDATES * optimizers

    def unused(self, model: nn.Module) -> list[str]:
        """Names of parameters that got no gradient on any rank."""
        return [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]

    def _build(self, parameters: list[nn.Parameter], order: list[nn.Parameter] | None = None) -> None:
        """Buckets over `parameters`, in the `order` in which backward reaches them (unknown: the reverse of theirs)."""
        for hook in self._hooks:
            hook.remove()
        self.parameters, self._hooks, self._buckets, self._places = parameters, [], [], {}
        self._groups = self._summed(parameters)
        self.ways = tuple(sorted({group.summing.way for group in self._groups.values()}))
        sparse = _sparse(self._model)
        self._sparse = [p for p in self._groups if p in sparse]
        dense = [p for p in order or parameters[::-1] if p in self._groups and p not in sparse]
        self.order = dense
        early, late = [p for p in dense if p not in self._late], [p for p in dense if p in self._late]
        self._buckets = [
            bucket for some in (early, late) for bucket in make_buckets(some, self._groups.__getitem__, self._cap)
        ]
        self._places = {p: (bucket, i) for bucket in self._buckets for i, p in enumerate(bucket.parameters)}
        self._hooks = [self._groups[p].summing.follow(p, self._hook) for p in dense]
        if self.compressor is not None:
            self.compressor.rebuild(self._buckets)

    def _summed(self, parameters: list[nn.Parameter]) -> dict[nn.Parameter, Group]:
        """The ranks each gradient is summed over; parameters whose gradient concerns this rank alone are left out."""
        mesh, wanted = self._layout.mesh, set(parameters)
        named = [(parameter, self._layout.shard_of(name).sums) for name, parameter in self._model.named_parameters()]
        summed = [(p, tuple(axis for axis in axes if axis not in self.apart)) for p, axes in named if p in wanted]
        axes_of = {p: axes for p, axes in summed if mesh.degree(*axes) > 1}
        groups = {axes: self._group(axes) for axes in sorted(set(axes_of.values()))}  # met in one order on all ranks
        found = {parameter: groups[axes] for parameter, axes in axes_of.items()}
        return {p: self.factored.group(p, axes_of[p], group) for p, group in found.items()}

    def _group(self, axes: tuple[AxisName, ...]) -> Group:
        mesh = self._layout.mesh
        handle = mesh.group(*axes)
        summing = None if self.compressor is None else self.compressor.summing(axes)
        channel = self._layout.channel("gradients", *axes)
        return Group(handle, mesh.degree(*axes), channel, summing or quickest_sums(handle))

    def _hook(self, parameter: nn.Parameter) -> None:
        """A gradient is there: fill its bucket, and start every bucket whose turn has come."""
        if not self._summing:
            return
        bucket, index = self._places[parameter]
        if self._last is not None and parameter not in self._last and not bucket.filled[index]:
            bucket.take(index)
            return
        bucket.fill(index)
        if self.arrived is not None:
            self.arrived.append(parameter)
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._buckets[self._next].launch()
            self._next += 1
        for bucket in self._buckets[: self._next]:
            bucket.poll()

    def _alike(self) -> bool:
        """Whether ranks that sum gradients have the same parameters, all of them summed over the same ranks."""
        mesh = self._layout.mesh
        return not self._layout.shards or mesh.degree(*mesh.degrees) == mesh.degree(*_ALIKE)

    def _reorder(self) -> None:
        """After the first step: the buckets' order becomes the one in which the first rank's gradients arrived."""
        number = {p: position for position, p in enumerate(self.parameters)}
        order = dict.fromkeys([number[p] for p in self.arrived or ()] + [*range(len(self.parameters))[::-1]])
        tensor = torch.tensor(list(order), device=self.parameters[0].device)
        mesh = self._layout.mesh
        axes = tuple(axis for axis in mesh.degrees if axis != "stage")
        dist.broadcast(tensor, src=mesh.ranks(*axes)[0], group=mesh.group(*axes))
        self._build(self.parameters, [self.parameters[position] for position in tensor.tolist()])


def unjudged_gradients(replica: Replica) -> list[torch.Tensor]:
    """The gradients after `finish` that nobody knows to be finite, in as few tensors as hold them: buckets with their
    flags, and single ones.
    """
    lie = {p: bucket.views[i] for p, (bucket, i) in replica._places.items()}
    there = _trainable(replica._model)  # divided ones: `parameters` may have the wholes of forward
    single = [p.grad for p in there if p.grad is not None and p.grad is not lie.get(p)]
    return [*(bucket.flat for bucket in replica._buckets if not bucket.group.summing.finite(bucket)), *single]


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _sparse(model: nn.Module) -> set[nn.Parameter]:
    """Parameters whose gradients are sparse: embeddings made with sparse=True."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    return {cast(nn.Parameter, module.weight) for module in embeddings if module.sparse}


def _sum_sparse(parameter: nn.Parameter, group: Group) -> None:
    """Sum one sparse gradient over ranks; one that no rank has stays None."""
    mine = parameter.grad
    if mine is None:
        mine = torch.zeros_like(parameter, layout=torch.sparse_coo)
    flag = torch.tensor(float(parameter.grad is not None), device=parameter.device)
    mine = mine.coalesce()
    with group.channel.waiting(ring_all_reduce_nbytes(parameter, group.size)):
        dist.all_reduce(flag, group=group.handle)
        dist.all_reduce(mine, group=group.handle)
    parameter.grad = mine if float(flag) else None
