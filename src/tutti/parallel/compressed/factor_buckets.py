"""Sufficient factors in place of weight gradients: which linear layers use them, and the buckets that reduce them.

Nothing is lost. In every step all ranks decide alike, from the number of rows, whether factors or the exact gradient of
a weight take fewer bytes. A weight that was reduced exactly in the first step joins the ordinary buckets from then on.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from tutti.comm.object_collectives import gather_values
from tutti.comm.traffic import CommHandle
from tutti.compression.reducer import Rounds
from tutti.compression.sufficient_factors import FactoredLinear, FactorReducer, Factors
from tutti.config.compression import FACTORS, factors_pay
from tutti.config.plan import Plan
from tutti.config.vocabulary import DATA_AXES, AxisName, Precision
from tutti.parallel.compressed.comm_thread import ReductionThread
from tutti.parallel.data.buckets import Bucket, BucketReducer, ReductionGroup
from tutti.parallel.layout import Layout
from tutti.parallel.mesh import Mesh

Axes = tuple[AxisName, ...]

FACTORED_AXES: frozenset[AxisName] = frozenset((*DATA_AXES, "context"))
"""Axes over which weight gradients may be reduced as factors: their ranks saw different samples, or different
tokens.
"""

_HALVES: dict[Precision, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class FactorBucket(Bucket):
    """One weight whose gradient consists of factors, and possibly an ordinary gradient beside them."""

    def __init__(self, parameters: list[nn.Parameter], group: ReductionGroup, factors: Factors) -> None:
        super().__init__(parameters, group)
        self.factors, self.dense = factors, False
        self.copies_together = False

    def open(self) -> None:
        super().open()
        self.dense = False
        self.factors.take(0, self.flat)  # drop factors of a backward that did not finish

    def take(self, index: int) -> None:
        self.dense = self.dense or self.parameters[0].grad is not None
        if self.dense or self.work is not None:
            super().take(index)

    def complete(self) -> None:
        """Fill the bucket if the weight has a gradient.

        Backward may have left the weight out; then it has no factors either.
        """
        if not self.filled[0] and self.parameters[0].grad is not None:
            self.fill(0)

    def wait(self) -> None:
        """Wait for the sum; set the weight's gradient if any rank had one."""
        assert self.work is not None
        self.work.wait()
        self.group.channel.correct_nbytes(self.sent_nbytes)
        self.parameters[0].grad = self.views[0] if float(self.flags[0]) > 0 else None


class FactorBucketReducer(BucketReducer):
    """Reduces the weights of one group of ranks, each in a bucket of its own."""

    transport = "sufficient factors of linear layers"
    one_per_bucket = True

    def __init__(self, factored: "FactoredLayers", number: int, group: Any) -> None:
        self._factored, self._number, self.group = factored, number, group
        self._nodes: dict[nn.Parameter, Any] = {}

    def bucket(self, parameters: list[nn.Parameter], group: ReductionGroup) -> Bucket:
        return FactorBucket(parameters, group, self._factored.weights[parameters[0]])

    def add_hook(self, parameter: nn.Parameter, ready: Callable[[nn.Parameter], None]) -> Any:
        """Call `ready` once all uses of the weight have had their backward, even if they leave no gradient.

        The hook sits on autograd's own node of the parameter.
        """
        node = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        self._nodes[parameter] = node
        return node.register_hook(lambda *_: ready(parameter))  # type: ignore[union-attr]

    def start(self, bucket: Bucket) -> CommHandle:
        assert isinstance(bucket, FactorBucket)
        rounds_work = self._factored.comm_thread.start(self._number, self._rounds(bucket))
        return bucket.group.channel.start([rounds_work])

    def _rounds(self, bucket: FactorBucket) -> Rounds:
        parameter, view = bucket.parameters[0], bucket.views[0]
        reducer = self._factored.sums.setdefault(parameter, FactorReducer(self.group, self._factored.half))
        nbytes_before = reducer.collectives.sent_nbytes
        yield from reducer.rounds(bucket.factors, view, view.clone() if bucket.dense else None)
        bucket.flags[0] = reducer.used
        bucket.sent_nbytes = reducer.collectives.sent_nbytes - nbytes_before


class FactoredLayers:
    """The weights whose gradients may be reduced as factors.

    Args:
        mesh: the run's mesh.
        modules: the layers.
        groups: by axes in the mesh's order, a process group that nothing else uses.
        half: dtype of mixed precision, None without it.

    Attributes:
        weights: weights that still use factors.
        left: weights that used factors before.
        sums: the reducer of each weight, which knows how the weight was reduced last.
    """

    def __init__(
        self,
        mesh: Mesh | None = None,
        modules: Sequence[FactoredLinear] = (),
        groups: dict[Axes, Any] | None = None,
        half: torch.dtype | None = None,
    ) -> None:
        self._mesh, self._modules, self.half = mesh, list(modules), half
        self.weights = {cast(nn.Parameter, module.weight): module.factors for module in modules}
        self.sums: dict[nn.Parameter, FactorReducer] = {}
        self.left: list[nn.Parameter] = []
        self.comm_thread = ReductionThread()
        numbered = enumerate((groups or {}).items())
        self._reducers = {axes: FactorBucketReducer(self, number, group) for number, (axes, group) in numbered}

    def group(self, parameter: nn.Parameter, axes: Axes, like: ReductionGroup) -> ReductionGroup:
        """Return the group that reduces a parameter over `axes`: `like`, or a group that reduces factors."""
        if self._mesh is None or parameter not in self.weights:
            return like
        return replace(like, bucket_reducer=self._reducers[_ordered(self._mesh, axes)])

    def backward(self) -> AbstractContextManager[None]:
        """Collect factors inside this context: its backward passes compute the gradients of the step."""
        return self._collecting() if self.weights else nullcontext()

    @contextmanager
    def _collecting(self) -> Iterator[None]:
        for factors in self.weights.values():
            factors.collecting = True
        try:
            yield
        finally:
            for factors in self.weights.values():
                factors.collecting = False

    def exactly(self) -> list[nn.Parameter]:
        """Return the weights whose factors took more bytes than their gradients, now or before."""
        return [*self.left, *(p for p, reducer in self.sums.items() if reducer.dense and p in self.weights)]

    def choose(self) -> None:
        """Move the weights that were reduced exactly to ordinary buckets, the same on all ranks of a group."""
        self.leave(self.exactly())

    def leave(self, parameters: Iterable[nn.Parameter]) -> None:
        """Stop using factors for these weights. Buckets must be rebuilt afterwards."""
        self.left += [parameter for parameter in parameters if self.weights.pop(parameter, None) is not None]
        for module in self._modules:
            if module.weight not in self.weights:
                module.__class__ = nn.Linear  # type: ignore[assignment]
                del module.factors
        self._modules = [module for module in self._modules if module.weight in self.weights]


def make_factored(plan: Plan, layout: Layout, model: nn.Module) -> FactoredLayers:
    """Make the model's linear layers collect factors, where the plan says so and fewer bytes are sent. Collective.

    A layer is chosen if factors pay at one row per sample, or at one row if the batch counts tokens.

    Args:
        plan: the plan; its `sync.compress` must be the method of factors.
        layout: the placement of every parameter.
        model: the model; its chosen layers become `FactoredLinear`.
    """
    mesh = layout.mesh
    if plan.sync.compress is None or plan.sync.compress.method != FACTORS or mesh.world_size == 1:
        return FactoredLayers()
    half = _HALVES.get(plan.precision)
    least = 1 if plan.batch.unit == "tokens" else plan.batch.global_batch_size
    chosen: dict[nn.Parameter, tuple[Axes, Factors]] = {}
    modules: list[FactoredLinear] = []
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or "forward" in vars(module) or "weight" not in module._parameters:
            continue  # weight_norm and similar wrappers compute the weight anew in every forward
        weight, axes = cast(nn.Parameter, module.weight), layout.shard_of(f"{name}.weight" if name else "weight").sums
        axes = tuple(axis for axis in axes if mesh.degree(axis) > 1)
        width = weight.element_size() if half is None else half.itemsize
        worth = factors_pay(least, weight.shape[0], weight.shape[1], weight.element_size(), width)
        if not axes or not FACTORED_AXES.issuperset(axes) or not worth:
            continue
        max_rows = 2 * weight.numel() * weight.element_size() // (sum(weight.shape) * width)
        chosen.setdefault(weight, (_ordered(mesh, axes), Factors(max_rows)))
        module.__class__ = FactoredLinear
        modules.append(cast(FactoredLinear, module))
        modules[-1].factors = chosen[weight][1]
        modules[-1].factors.collecting = False
    everyone = gather_values({axes for axes, _ in chosen.values()})
    groups = {axes: mesh.new_group(*axes) for axes in sorted(set().union(*everyone))}
    return FactoredLayers(mesh, modules, groups, half)


def _ordered(mesh: Mesh, axes: Iterable[AxisName]) -> Axes:
    return tuple(axis for axis in mesh.degrees if axis in axes and mesh.degree(axis) > 1)
