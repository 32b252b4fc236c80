"""Momenta in place of gradients: what a bucket sums once the optimizer's second moment is frozen (1-bit Adam family).

Until then gradients are summed exactly. All ranks see the switch in the optimizer's state, after the same update.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.comm.point_to_point import ring_all_reduce_nbytes
from tutti.comm.world import World
from tutti.compression.reducer import GradientReducer, Rounds
from tutti.config.compression import ZERO_ONE, Compression, format_compression
from tutti.errors import PlanError, TrainingError
from tutti.optim.frozen_second_moment import FrozenAdam, FrozenLAMB, FrozenMoment, FrozenSecondMoment, squared_norms
from tutti.optim.zero_one_adam import ZeroOneAdam
from tutti.parallel.data.buckets import Bucket
from tutti.parallel.layout import Layout
from tutti.parallel.sharded_norms import whole_norms
from tutti.parallel.sharding.sharded_gradients import Shards


class GradientStatistics:
    """Squared norms of ranks' parts of an exact sum and of the sum, for a rule that asks for them (`wants_statistics`).

    They are summed beside the bucket's flags, so all ranks of a bucket take them alike.

    Args:
        rule: of the optimizer.
        model_to_optimizer: by model parameter, the optimizer's parameter in its place on this rank.
    """

    def __init__(
        self, rule: FrozenSecondMoment | ZeroOneAdam, model_to_optimizer: Mapping[nn.Parameter, nn.Parameter]
    ) -> None:
        self._rule, self.model_to_optimizer = rule, model_to_optimizer
        self._parts: dict[Bucket, Tensor] = {}

    def begin(self, bucket: Bucket) -> Tensor | None:
        """Before an exact sum: (parameters,) float64 squared norms of this rank's parts, to be summed over the bucket's
        ranks."""
        if not self._rule.wants_statistics:
            return None
        self._parts[bucket] = squared_norms(bucket.views)
        return self._parts[bucket]

    @torch.no_grad()
    def finish(self, *, finite: bool) -> None:
        """After all sums of a step. `finite`: whether the update may be made."""
        for bucket, parts in self._parts.items() if finite else ():
            both = torch.stack([parts, squared_norms(bucket.views)], dim=1).tolist()
            for parameter, (ours, total) in zip(bucket.parameters, both, strict=True):
                if parameter in self.model_to_optimizer:
                    self._rule.observed_norms[self.model_to_optimizer[parameter]] = ours, total
        self._parts = {}


class MomentumCompression:
    """What the buckets of one optimizer send.

    Args:
        rule: of the optimizer.
        names: of the parameters, for error messages.
        model_to_optimizer: see GradientStatistics.
    """

    def __init__(
        self,
        rule: FrozenSecondMoment,
        names: dict[nn.Parameter, str],
        model_to_optimizer: Mapping[nn.Parameter, nn.Parameter],
    ) -> None:
        self.rule, self._names, self.gradient_statistics = rule, names, GradientStatistics(rule, model_to_optimizer)

    @property
    def compresses_next(self) -> bool:
        """Whether the next sums are of momentum, the same on all ranks; otherwise they are exact sums of gradients."""
        return self.rule.frozen

    def mark(self, bucket: Bucket) -> None:
        """Mark gradients that come too late, whose second moment is 0, in the flags, which all ranks get."""
        for index, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
            if self.rule.moment(parameter) is None and bool(view.any()):
                bucket.flags[index] = math.inf

    def rounds(self, bucket: Bucket, exchange: GradientReducer) -> Rounds:
        """Leave in the bucket the gradients that the sums of momentum stand for."""
        ranks, values = bucket.group.size, bucket.flat[: exchange.numel]
        moments = [self.rule.moment(parameter) for parameter in bucket.parameters]
        for view, moment in zip(bucket.views, moments, strict=True):
            if moment is None:
                view.zero_()
            else:
                moment.to_send(view, ranks)
        yield from exchange.rounds(values)
        for view, moment in zip(bucket.views, moments, strict=True):
            if moment is None:
                view.zero_()
            else:
                moment.to_gradient(view)

    def check(self, bucket: Bucket) -> None:
        """After the sums: raise TrainingError, on all ranks that summed the bucket, for gradients that came too
        late."""
        for parameter, flag in zip(bucket.parameters, bucket.flags.tolist(), strict=True):
            if math.isinf(flag):
                raise TrainingError(
                    f"{self._names.get(parameter, 'a parameter')} has its first gradient after freeze_step = "
                    f"{self.rule.freeze_step}, when second moments stand still: its own has learned nothing; make "
                    "freeze_step larger than the first step that uses it, or compress gradients (one-bit)"
                )

    def loaded(self) -> None:
        """The optimizer's state is a checkpoint's. Collective."""
        if self.rule.on_frozen is not None:
            self.rule.on_frozen()

    def sends(self, parameter: nn.Parameter) -> bool:
        """Whether anything is sent of a parameter."""
        return self.rule.moment(parameter) is not None


class ZeroOneCompression:
    """The same for 0/1 Adam while ranks sum: gradients, compressed where the second moment does not learn.

    Compressed gradients are divided by the second moment's square root, so that all parameters have one magnitude.
    """

    def __init__(self, rule: ZeroOneAdam, names: dict[nn.Parameter, str]) -> None:
        self.rule, self._names, self.gradient_statistics = rule, names, GradientStatistics(rule, {p: p for p in names})

    @property
    def compresses_next(self) -> bool:
        """Whether the next sums are compressed."""
        return not self.rule.exact

    def mark(self, bucket: Bucket) -> None:
        """See MomentumCompression.mark."""
        for index, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
            if not self.rule.knows(parameter) and bool(view.any()):
                bucket.flags[index] = math.inf

    def rounds(self, bucket: Bucket, exchange: GradientReducer) -> Rounds:
        """Leave the sum of gradients in the bucket."""
        known = [(p, view) for p, view in zip(bucket.parameters, bucket.views, strict=True) if self.rule.knows(p)]
        divisors = [self.rule.divisor(parameter) for parameter, _ in known]
        for (_, view), divisor in zip(known, divisors, strict=True):
            view.div_(divisor)
        yield from exchange.rounds(bucket.flat[: exchange.numel])
        for (_, view), divisor in zip(known, divisors, strict=True):
            view.mul_(divisor)

    def check(self, bucket: Bucket) -> None:
        """See MomentumCompression.check."""
        late = _late(bucket)
        if late is not None:
            raise TrainingError(
                f"{self._names.get(late, 'a parameter')} has its first gradient in an update in which second moments "
                f"do not learn (kappa = {self.rule.kappa}): its own has learned nothing; make kappa larger than the "
                "first step that uses it, or compress gradients (one-bit)"
            )

    def loaded(self) -> None:
        """Nothing depends on a loaded state."""

    def sends(self, parameter: nn.Parameter) -> bool:
        """Whether anything is sent of a parameter."""
        return self.rule.knows(parameter)


def _late(bucket: Bucket) -> nn.Parameter | None:
    """A parameter that some rank has marked."""
    marked = zip(bucket.parameters, bucket.flags.tolist(), strict=True)
    return next((parameter for parameter, flag in marked if math.isinf(flag)), None)


def make_momentum_compression(
    compression: Compression,
    layout: Layout,
    world: World,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    clip_norm: float | None,
    shards: Shards,
) -> MomentumCompression | ZeroOneCompression | None:
    """The momentum compression of `compression`; None if it sums gradients. Collective.

    From here on the optimizer's second moment is frozen after `freeze_step` updates, on one rank too.

    Raises:
        PlanError: on all ranks alike, for what momentum compression does not go with.
    """
    if not compression.sends_momentum:
        return None
    words = f"sync.compress = {format_compression(compression)!r}"
    if len(optimizers) != 1:
        raise PlanError(
            f"{words} sums one optimizer's momentum, and there are {len(optimizers)}; compress gradients: one-bit"
        )
    if clip_norm is not None and compression.method in ("one-bit-adam", "one-bit-lamb"):
        raise PlanError(
            f"{words} with clip_norm = {clip_norm}: the gradient that a one-bit sum of momentum stands for is mostly "
            "what the code has lost, of 2 to 11 times the true norm, so that nearly every update would be scaled down; "
            "leave clip_norm out, or use byte-adam or zero-one-adam, or compress gradients: one-bit"
        )
    optimizer, lamb = optimizers[0], compression.method == "one-bit-lamb"
    if compression.method == ZERO_ONE:
        zero_one = ZeroOneAdam(optimizer, compression.freeze_step or 1, int(compression.settings["kappa"]))
        return ZeroOneCompression(zero_one, {p: name for name, p in model.named_parameters()})
    rule = (FrozenLAMB if lamb else FrozenAdam)(optimizer, compression.freeze_step or 1)
    if layout.mesh.degree("shard") > 1:
        rule.on_frozen = partial(_copy, rule, shards)
        rule.agreed = partial(_largest, layout)
    strange = world.gather(_without_momentum(model, optimizer, shards))
    if any(strange):
        name = next(name for name in strange if name)
        raise PlanError(
            f"{words}: {name} has no momentum, for the optimizer does not hold it; give it to the optimizer"
        )
    owned, names = layout.state_names(model, optimizers)[0], {p: name for name, p in model.named_parameters()}
    norms = whole_norms(owned, layout, world)
    if norms is not None and norms.parted:
        if lamb:
            raise PlanError(
                f"{words}: ranks hold parts of tensors, and LAMB's ratios are of whole ones; use a mesh that divides "
                "none, or one-bit-adam"
            )
        rule.over_parts = norms.over_parts
        rule.agreed = partial(_largest, layout)
    by_name = {name: p for p, name in owned.items()}
    return MomentumCompression(rule, names, {p: by_name[name] for p, name in names.items() if name in by_name})


def _copy(rule: FrozenSecondMoment, shards: Shards) -> None:
    """Copy moments of parameters whose state is divided, so that each rank can send a share of all of them.
    Collective."""
    rule.whole_moments = {}  # of an own part: what the optimizer has
    with shards.whole_gradients(rule.optimizer):
        groups = {p: group for group in rule.optimizer.param_groups for p in group["params"]}

    def part(own: nn.Parameter, *, divisor: bool) -> torch.Tensor | None:
        moment = rule.moment(own)
        return None if moment is None else moment.divisor if divisor else moment.m

    m, divisors = (shards.wholes(rule.optimizer, partial(part, divisor=which)) for which in (False, True))
    rule.whole_moments = {
        p: (FrozenMoment(m[p], float(groups[p]["betas"][0]), divisor), groups[p])
        for p, divisor in divisors.items()
        if bool(divisor.any())  # where v has learned, it is nowhere 0
    }


def _without_momentum(model: nn.Module, optimizer: Optimizer, shards: Shards) -> str | None:
    """Name of a parameter that the optimizer does not hold."""
    with shards.whole_gradients(optimizer):
        known = {p for group in optimizer.param_groups for p in group["params"]}
    return next((name for name, p in model.named_parameters() if p.requires_grad and p not in known), None)


def _largest(layout: Layout, count: int) -> int:
    """The largest of all ranks' counts. Collective."""
    found = torch.tensor(count, dtype=torch.int64)
    with layout.channel("scalars").waiting(ring_all_reduce_nbytes(found, layout.mesh.world_size)):
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)
