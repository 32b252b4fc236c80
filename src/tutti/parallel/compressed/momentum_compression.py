"""Momentum in place of gradients: what a bucket sends once the optimizer's second moment is frozen (1-bit Adam family).

Until then gradients are reduced exactly. All ranks see the switch in the optimizer's state, after the same update.
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
    """Squared norms of each rank's gradients and of their sum, for a rule that asks for them (`wants_statistics`).

    They are all-reduced beside the bucket's flags, so all ranks of a bucket get the same values.

    Args:
        rule: the rule that drives the optimizer.
        model_to_optimizer: by parameter of the model, the parameter that the optimizer holds for it on this rank.
    """

    def __init__(
        self, rule: FrozenSecondMoment | ZeroOneAdam, model_to_optimizer: Mapping[nn.Parameter, nn.Parameter]
    ) -> None:
        self._rule, self.model_to_optimizer = rule, model_to_optimizer
        self._parts: dict[Bucket, Tensor] = {}

    def begin(self, bucket: Bucket) -> Tensor | None:
        """Before an exact reduction: return the squared norms of this rank's gradients, to be all-reduced.

        Returns:
            (parameters,) float64, one value per parameter of the bucket; None if the rule wants no statistics.
        """
        if not self._rule.wants_statistics:
            return None
        self._parts[bucket] = squared_norms(bucket.views)
        return self._parts[bucket]

    @torch.no_grad()
    def finish(self, *, finite: bool) -> None:
        """After all reductions of a step: hand the squared norms to the rule.

        Args:
            finite: whether the update may be made; if not, the statistics are dropped.
        """
        for bucket, parts in self._parts.items() if finite else ():
            norms = torch.stack([parts, squared_norms(bucket.views)], dim=1).tolist()
            for parameter, (parts_norm, total) in zip(bucket.parameters, norms, strict=True):
                if parameter in self.model_to_optimizer:
                    self._rule.observed_norms[self.model_to_optimizer[parameter]] = parts_norm, total
        self._parts = {}


class MomentumCompression:
    """Decides what the buckets of one optimizer send: exact gradients, then compressed momentum.

    Args:
        rule: the rule that drives the optimizer.
        names: names of the parameters, for error messages.
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
        """Whether the next reductions are of momentum, the same on all ranks; otherwise they are exact, of
        gradients.
        """
        return self.rule.frozen

    def mark(self, bucket: Bucket) -> None:
        """Mark gradients whose second moment was frozen at 0 with an infinite flag, which all ranks receive."""
        for index, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
            if self.rule.moment(parameter) is None and bool(view.any()):
                bucket.flags[index] = math.inf

    def rounds(self, bucket: Bucket, exchange: GradientReducer) -> Rounds:
        """Reduce the bucket's momentum, and leave in the bucket the gradients that the sums stand for."""
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
        """After the reductions: refuse gradients that first appear once the second moment is frozen.

        Raises:
            TrainingError: on all ranks that reduced the bucket.
        """
        for parameter, flag in zip(bucket.parameters, bucket.flags.tolist(), strict=True):
            if math.isinf(flag):
                raise TrainingError(
                    f"{self._names.get(parameter, 'a parameter')} has its first gradient after freeze_step = "
                    f"{self.rule.freeze_step}, when its second moment is already frozen without having learned; make "
                    "freeze_step larger than the first step that uses it, or compress gradients (one-bit)"
                )

    def loaded(self) -> None:
        """Adopt the optimizer state that a checkpoint has restored. Collective."""
        if self.rule.on_frozen is not None:
            self.rule.on_frozen()

    def sends(self, parameter: nn.Parameter) -> bool:
        """Return whether anything is sent for a parameter."""
        return self.rule.moment(parameter) is not None


class ZeroOneCompression:
    """Decides what 0/1 Adam sends as long as ranks reduce gradients.

    Gradients are exact in updates in which the second moment learns, and compressed in the others. Compressed gradients
    are divided by the root of the second moment, so that all parameters have similar magnitudes.

    Args:
        rule: the rule that drives the optimizer.
        names: names of the parameters, for error messages.
    """

    def __init__(self, rule: ZeroOneAdam, names: dict[nn.Parameter, str]) -> None:
        self.rule, self._names, self.gradient_statistics = rule, names, GradientStatistics(rule, {p: p for p in names})

    @property
    def compresses_next(self) -> bool:
        """Whether the next reductions are compressed."""
        return not self.rule.exact

    def mark(self, bucket: Bucket) -> None:
        """Mark gradients whose second moment has learned nothing; see MomentumCompression.mark."""
        for index, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
            if not self.rule.knows(parameter) and bool(view.any()):
                bucket.flags[index] = math.inf

    def rounds(self, bucket: Bucket, exchange: GradientReducer) -> Rounds:
        """Leave the summed gradients in the bucket."""
        known = [(p, view) for p, view in zip(bucket.parameters, bucket.views, strict=True) if self.rule.knows(p)]
        divisors = [self.rule.divisor(parameter) for parameter, _ in known]
        for (_, view), divisor in zip(known, divisors, strict=True):
            view.div_(divisor)
        yield from exchange.rounds(bucket.flat[: exchange.numel])
        for (_, view), divisor in zip(known, divisors, strict=True):
            view.mul_(divisor)

    def check(self, bucket: Bucket) -> None:
        """Refuse gradients whose second moment has learned nothing; see MomentumCompression.check."""
        late = _late(bucket)
        if late is not None:
            raise TrainingError(
                f"{self._names.get(late, 'a parameter')} has its first gradient in an update in which second moments "
                f"do not learn (kappa = {self.rule.kappa}), so its own has learned nothing; make kappa larger than the "
                "first step that uses it, or compress gradients (one-bit)"
            )

    def loaded(self) -> None:
        """Do nothing: nothing here depends on a restored state."""

    def sends(self, parameter: nn.Parameter) -> bool:
        """Return whether anything is sent for a parameter."""
        return self.rule.knows(parameter)


def _late(bucket: Bucket) -> nn.Parameter | None:
    """Return a parameter that some rank has marked, or None."""
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
    """Make the momentum compression that `compression` asks for. Collective.

    From here on the optimizer's second moment is frozen after `freeze_step` updates, on one rank too.

    Args:
        compression: the plan's compression.
        layout: the placement of every parameter.
        world: all ranks of the run.
        model: the model.
        optimizers: the run's optimizers; momentum compression needs exactly one.
        clip_norm: largest norm of the gradient; None where it is not clipped.
        shards: the sharded parameters.

    Returns:
        The momentum compression; None if `compression` sends gradients.

    Raises:
        PlanError: on all ranks alike, if momentum compression does not support the optimizer, the mesh or clipping.
    """
    if not compression.sends_momentum:
        return None
    method = f"sync.compress = {format_compression(compression)!r}"
    if len(optimizers) != 1:
        raise PlanError(
            f"{method} sends the momentum of one optimizer, but there are {len(optimizers)}; use one optimizer, or "
            "compress gradients: one-bit"
        )
    if clip_norm is not None and compression.method in ("one-bit-adam", "one-bit-lamb"):
        raise PlanError(
            f"{method} with clip_norm = {clip_norm}: the gradient recovered from one-bit momentum is mostly coding "
            "error, of 2 to 11 times the true norm, so clipping would scale down nearly every update; leave clip_norm "
            "out, or use byte-adam or zero-one-adam, or compress gradients: one-bit"
        )
    optimizer, lamb = optimizers[0], compression.method == "one-bit-lamb"
    if compression.method == ZERO_ONE:
        zero_one = ZeroOneAdam(optimizer, compression.freeze_step or 1, int(compression.settings["kappa"]))
        return ZeroOneCompression(zero_one, {p: name for name, p in model.named_parameters()})
    rule = (FrozenLAMB if lamb else FrozenAdam)(optimizer, compression.freeze_step or 1)
    if layout.mesh.degree("shard") > 1:
        rule.on_frozen = partial(_copy, rule, shards)
        rule.agreed = partial(_largest, layout)
    missing = world.gather(_without_momentum(model, optimizer, shards))
    if any(missing):
        name = next(name for name in missing if name)
        raise PlanError(
            f"{method}: {name} has no momentum because the optimizer does not hold it; give it to the optimizer"
        )
    owned, names = layout.state_names(model, optimizers)[0], {p: name for name, p in model.named_parameters()}
    norms = whole_norms(owned, layout, world)
    if norms is not None and norms.parted:
        if lamb:
            raise PlanError(
                f"{method}: ranks hold parts of tensors, but LAMB's ratios need whole tensors; use a mesh that divides "
                "no tensor, or one-bit-adam"
            )
        rule.over_parts = norms.over_parts
        rule.agreed = partial(_largest, layout)
    by_name = {name: p for p, name in owned.items()}
    return MomentumCompression(rule, names, {p: by_name[name] for p, name in names.items() if name in by_name})


def _copy(rule: FrozenSecondMoment, shards: Shards) -> None:
    """Copy the moments of sharded parameters to all ranks, so that each can send its share of all. Collective."""
    rule.whole_moments = {}  # so that `rule.moment` returns this rank's parts, which the optimizer holds
    with shards.whole_gradients(rule.optimizer):
        groups = {p: group for group in rule.optimizer.param_groups for p in group["params"]}

    def part(parameter: nn.Parameter, *, divisor: bool) -> torch.Tensor | None:
        moment = rule.moment(parameter)
        return None if moment is None else moment.divisor if divisor else moment.m

    m, divisors = (shards.wholes(rule.optimizer, partial(part, divisor=which)) for which in (False, True))
    rule.whole_moments = {
        p: (FrozenMoment(m[p], float(groups[p]["betas"][0]), divisor), groups[p])
        for p, divisor in divisors.items()
        if bool(divisor.any())  # a second moment that has learned has no zero divisor
    }


def _without_momentum(model: nn.Module, optimizer: Optimizer, shards: Shards) -> str | None:
    """Return the name of a trainable parameter that the optimizer does not hold, or None."""
    with shards.whole_gradients(optimizer):
        known = {p for group in optimizer.param_groups for p in group["params"]}
    return next((name for name, p in model.named_parameters() if p.requires_grad and p not in known), None)


def _largest(layout: Layout, count: int) -> int:
    """Return the largest count over all ranks. Collective."""
    largest = torch.tensor(count, dtype=torch.int64)
    with layout.channel("scalars").waiting(ring_all_reduce_nbytes(largest, layout.mesh.world_size)):
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)
