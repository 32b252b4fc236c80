"""Data parallelism: replicas whose gradients are all-reduced in buckets while backward still runs.

torch's DistributedDataParallel has to choose: wait for an extra all-reduce in every step (find_unused_parameters), or
hang if one rank leaves a parameter unused. Here a flag is sent with each gradient instead. Each loss is weighted by its
samples before backward, so gradients are summed, not averaged.
"""

import math
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tutti.config.plan import Plan
from tutti.config.vocabulary import AxisName
from tutti.errors import ScriptError
from tutti.host_memory import WARMUP_UPDATES, long_lived_blocks
from tutti.parallel.compressed.compressor import Compressor
from tutti.parallel.compressed.factor_buckets import FactoredLayers
from tutti.parallel.data.buckets import Bucket, ReductionGroup, fastest_bucket_reducer, make_buckets
from tutti.parallel.data.sparse_gradients import SparseReduction, sparse_tables
from tutti.parallel.layout import Layout
from tutti.parallel.model_parameters import ModelParameters
from tutti.parallel.sharding.sharded_gradients import Shards

LossFunction = Callable[[nn.Module, Any], Any]
"""fn(model, batch) -> loss: a mean over samples, or a Weighted."""


_ALIKE: tuple[AxisName, ...] = ("replicate", "context", "stage")
"""Axes along which ranks that reduce a gradient together have the same parameters."""


class Replica:
    """This rank's replica. Gradients that backward computes between `begin` and `finish` are reduced over ranks.

    Args:
        model: the model.
        layout: the run's layout.
        plan: the run's plan.
        shards: parameters that are sharded.
        late: names of parameters whose gradient is complete only at `finish`.
        compressor: reduces some groups' gradients in compressed form.
        factored: linear layers whose gradients are sent as factors.

    Attributes:
        parameters: the model's parameters that require a gradient, as its modules show them (with sharding, parts of
            them or the whole ones).
        model_parameters: gives all parameters, as the modules show them.
        order: the order in which parameters fill the buckets.
        arrived: parameters in the order in which their gradients have arrived so far; None once `order` is final.
        changed: whether the script has frozen, unfrozen or converted parameters since the buckets were built.
        diverged_axes: axes along which gradients are not reduced; `rebuild_buckets` applies a change.
        transports: what the reductions go through, for reports.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        plan: Plan,
        shards: Shards | None = None,
        late: Iterable[str] = (),
        compressor: Compressor | None = None,
        factored: FactoredLayers | None = None,
    ) -> None:
        self.compressor, self.factored = compressor, factored or FactoredLayers()
        self.parameters: list[nn.Parameter] = []
        self._late = {model.get_parameter(name) for name in late}
        self._last: set[nn.Parameter] | None = None
        self._model, self._layout, self._cap = model, layout, plan.sync.bucket_nbytes
        self.shards = shards or Shards()
        self.diverged_axes: tuple[AxisName, ...] = ()
        self._groups: dict[nn.Parameter, ReductionGroup] = {}
        self._places: dict[nn.Parameter, tuple[Bucket, int]] = {}
        self._buckets: list[Bucket] = []
        self._sparse: list[SparseReduction] = []
        self.arrived: list[nn.Parameter] | None = []
        self.order: list[nn.Parameter] = []
        self._hooks: list[Any] = []
        self._next = 0
        self._summing = False
        self.changed = False
        self._updates = 0
        self.model_parameters = ModelParameters(model)
        self._build(self.model_parameters.trained())
        if not self.parameters and layout.mesh.degree("stage") == 1:
            raise ScriptError("the model has no parameter that requires a gradient; unfreeze at least one")

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank sends in a step for its gradients and for sharded parameters."""
        sparse = sum(reduction.sent_nbytes for reduction in self._sparse)
        return self.shards.sent_nbytes + sparse + sum(bucket.sent_nbytes for bucket in self._buckets)

    def begin(self, *, accumulate: bool = False) -> None:
        """Begin a step. Gradients are reduced from here on.

        Args:
            accumulate: whether several backwards follow, whose gradients add up in the buckets. Each parameter's last
                one is then told by `announce_last_backward`. Otherwise the next backward is the only one.
        """
        self._last = set() if accumulate else None
        if self.changed:  # backward leaves its gradients on this rank until `rebuild`
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            return
        trainable = self.model_parameters.trained()
        if [*map(id, trainable)] != [*map(id, self.parameters)]:
            # Modules show parts or whole parameters now, as this rank's forward left them. That may differ among ranks,
            # and building is collective; what is shown is not reduced here, so there is nothing to build.
            self.parameters = trainable
        if self.arrived:
            if self._alike():
                self.factored.choose()
                self._reorder()
            self.arrived = None
        self._open()

    def rebuild(self) -> None:
        """After `begin` of a step for which parameters have changed: build new buckets and reduce from here on.

        Collective: the ranks that reduce together must have changed the same parameters; see `digest`.
        """
        with long_lived_blocks():
            self._build(self.model_parameters.trained())
        self.changed = False
        if self.arrived is not None:
            self.arrived = []  # the order of parameters that may be frozen now
        self._open()

    def digest(self) -> int:
        """A number below 2^32 for the names and types of the parameters that this rank trains now."""
        trained = [(name, str(p.dtype)) for name, p in self._model.named_parameters() if p.requires_grad]
        return zlib.crc32(repr(trained).encode())

    def _open(self) -> None:
        for bucket in self._buckets:
            bucket.open()
        self._next, self._summing = 0, True

    def announce_last_backward(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Announce that the next backward is the last to reach some parameters, so that it may start their reductions.

        Args:
            parameters: the parameters; None: all of them.
        """
        if parameters is None:
            self._last = None
        elif self._last is not None and self._places:
            self._last.update(parameters)

    def finish(self) -> None:
        """After backward: start the reductions that backward has not started, and wait for all of them."""
        self._summing = False
        for bucket in self._buckets[self._next :]:
            bucket.complete()
            bucket.launch()
        for reduction in self._sparse:
            reduction.run()
        self.shards.send()  # before any wait: a communication thread must know of all reductions
        for bucket in self._buckets:
            bucket.wait()
        self.shards.finish()

    def abandon(self) -> None:
        """Complete the reductions without the rest of this rank's gradients, so that all ranks know of it.

        The step's reductions must have begun. Buckets that are still to be reduced get flags that are not numbers.
        """
        self._summing = False
        for bucket in self._buckets[self._next :]:
            bucket.complete()
            bucket.flags.fill_(math.nan)
            bucket.launch()
        for bucket in self._buckets:
            bucket.wait()

    def begin_again(self) -> None:
        """All ranks compute an abandoned step again."""
        if self.arrived is not None:
            self.arrived = []

    def rebuild_buckets(
        self, order: list[nn.Parameter] | None, arrived: list[nn.Parameter] | None, cap_nbytes: int | None = None
    ) -> None:
        """Rebuild the buckets, for example in the order that a checkpoint recorded. Collective.

        Args:
            order: parameters in the order in which backward reaches them; None: the reverse of the model's.
            arrived: value of the attribute `arrived`.
            cap_nbytes: new size of the buckets; None: as before.
        """
        self.arrived, self._cap = arrived, cap_nbytes or self._cap
        self._build(self.parameters, order)

    def finish_step(self, finite: bool) -> None:
        """Commit the residuals of compression if the step's gradients are finite on all ranks, else discard them."""
        if self.compressor is not None:
            self.compressor.finish_step(finite)

    def updated(self, optimizers: int) -> bool:
        """Count one optimizer's update; return whether all long-lived memory is allocated from now on.

        Args:
            optimizers: number of optimizers in the run.
        """
        self._updates += 1
        return self._updates == WARMUP_UPDATES * optimizers

    def unused(self, model: nn.Module) -> list[str]:
        """Return the names of parameters that got no gradient on any rank."""
        return [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]

    def _build(self, parameters: list[nn.Parameter], order: list[nn.Parameter] | None = None) -> None:
        """Build buckets over `parameters`, in the `order` in which backward reaches them (None: reversed)."""
        for hook in self._hooks:
            hook.remove()
        self.parameters, self._hooks, self._buckets, self._places = parameters, [], [], {}
        self._groups = self._summed(parameters)
        self.transports = tuple(sorted({group.bucket_reducer.transport for group in self._groups.values()}))
        sparse = sparse_tables(self._model)
        self._sparse = [
            SparseReduction([p for p in parameters if p in sparse and self._groups.get(p) == group], group)
            for group in dict.fromkeys(group for p, group in self._groups.items() if p in sparse)
        ]
        dense = [p for p in order or parameters[::-1] if p in self._groups and p not in sparse]
        self.order = dense
        early, late = [p for p in dense if p not in self._late], [p for p in dense if p in self._late]
        self._buckets = [
            bucket
            for parameters_of_phase in (early, late)
            for bucket in make_buckets(parameters_of_phase, self._groups.__getitem__, self._cap)
        ]
        self._places = {p: (bucket, i) for bucket in self._buckets for i, p in enumerate(bucket.parameters)}
        self._hooks = [self._groups[p].bucket_reducer.add_hook(p, self._hook) for p in dense]
        if self.compressor is not None:
            self.compressor.rebuild(self._buckets)

    def _summed(self, parameters: list[nn.Parameter]) -> dict[nn.Parameter, ReductionGroup]:
        """Return the ranks that reduce each gradient; parameters whose gradient stays on this rank are left out."""
        mesh, wanted = self._layout.mesh, set(parameters)
        named = [(parameter, self._layout.shard_of(name).sums) for name, parameter in self._model.named_parameters()]
        summed = [
            (p, tuple(axis for axis in axes if axis not in self.diverged_axes)) for p, axes in named if p in wanted
        ]
        axes_of = {p: axes for p, axes in summed if mesh.degree(*axes) > 1}
        groups = {axes: self._group(axes) for axes in sorted(set(axes_of.values()))}  # in one order on all ranks
        group_of = {parameter: groups[axes] for parameter, axes in axes_of.items()}
        return {p: self.factored.group(p, axes_of[p], group) for p, group in group_of.items()}

    def _group(self, axes: tuple[AxisName, ...]) -> ReductionGroup:
        mesh = self._layout.mesh
        handle = mesh.group(*axes)
        bucket_reducer = None if self.compressor is None else self.compressor.bucket_reducer(axes)
        channel = self._layout.channel("gradients", *axes)
        return ReductionGroup(handle, mesh.degree(*axes), channel, bucket_reducer or fastest_bucket_reducer(handle))

    def _hook(self, parameter: nn.Parameter) -> None:
        """A gradient is complete on this rank: put it into its bucket, and start every bucket whose turn has come."""
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
        """Whether ranks that reduce gradients have the same parameters, all of them reduced over the same ranks."""
        mesh = self._layout.mesh
        return not self._layout.shards or mesh.degree(*mesh.degrees) == mesh.degree(*_ALIKE)

    def _reorder(self) -> None:
        """After the first step: order buckets as gradients arrived on the first rank. Collective."""
        number = {p: position for position, p in enumerate(self.parameters)}
        order = dict.fromkeys([number[p] for p in self.arrived or ()] + [*range(len(self.parameters))[::-1]])
        tensor = torch.tensor(list(order), device=self.parameters[0].device)
        mesh = self._layout.mesh
        axes = tuple(axis for axis in mesh.degrees if axis != "stage")
        dist.broadcast(tensor, src=mesh.ranks(*axes)[0], group=mesh.group(*axes))
        self._build(self.parameters, [self.parameters[position] for position in tensor.tolist()])


def is_abandoned(replica: Replica) -> bool:
    """Return whether a rank has abandoned the reductions of this step."""
    sums = [bucket.flags.double().sum() for bucket in replica._buckets]
    return bool(sums) and bool(torch.stack(sums).isnan().any())


def has_sparse(replica: Replica) -> bool:
    """Return whether some gradients are sparse, which lie in no bucket."""
    return bool(replica._sparse)


def unchecked_gradients(replica: Replica) -> list[torch.Tensor]:
    """Return the reduced gradients that nobody has checked to be finite, in as few tensors as possible.

    These are whole buckets with their flags, and the gradients that lie in no bucket.
    """
    views = {p: bucket.views[i] for p, (bucket, i) in replica._places.items()}
    # With sharding, `replica.parameters` may be the whole ones of forward.
    parameters = replica.model_parameters.trained()
    single = [p.grad for p in parameters if p.grad is not None and p.grad is not views.get(p)]
    return [
        *(bucket.flat for bucket in replica._buckets if not bucket.group.bucket_reducer.known_finite(bucket)),
        *single,
    ]
