"""Momenta in place of gradients: what a bucket's sum is of once the optimizer's second moment stands.

Until then gradients are summed exactly. All ranks see the switch in the optimizer's state, after the same update.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from tutti.comm.point_to_point import ring_all_reduce_nbytes
from tutti.comm.world import World
from tutti.compression.exchange import Exchange, Rounds
from tutti.config.compression import MOMENTA, ZERO_ONE, Compression, compression_in_words
from tutti.errors import PlanError, TrainingError
from tutti.optim.frozen import Frozen, FrozenAdam, FrozenLAMB, Moment
from tutti.optim.zero_one import ZeroOne
from tutti.parallel.compressed.looks import Looks
from tutti.parallel.data.buckets import Bucket
from tutti.parallel.layout import Layout
from tutti.parallel.sharded_norms import whole_norms
from tutti.parallel.sharding.sharded_gradients import Shards


class Momenta:
    """What the buckets of one optimizer send. `names`: of the parameters, to say which; `held`: as of Looks."""

    def __init__(
        self, frozen: Frozen, names: dict[nn.Parameter, str], held: Mapping[nn.Parameter, nn.Parameter]
    ) -> None:
        self.frozen, self._names, self.looks = frozen, names, Looks(frozen, held)

    @property
    def stand_in(self) -> bool:
        """Whether the next sums are of momenta, the same on all ranks; else they are exact sums of gradients."""
        return self.frozen.stands

    def mark(self, bucket: Bucket) -> None:
        """Say in the flags, which all ranks get, which gradients have come too late: their second moment is 0."""
        for index, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
            if self.frozen.moment(parameter) is None and bool(view.any()):
                bucket.flags[index] = math.inf

    def rounds(self, bucket: Bucket, exchange: Exchange) -> Rounds:
        """Leave in the bucket the gradients that the sums of momenta stand for."""
        ranks, values = bucket.group.size, bucket.flat[: exchange.numel]
        moments = [self.frozen.moment(parameter) for parameter in bucket.parameters]
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
        """After the sums. Raises TrainingError, on all ranks that summed the bucket, for gradients too late."""
        for parameter, flag in zip(bucket.parameters, bucket.flags.tolist(), strict=True):
            if math.isinf(flag):
                raise TrainingError(
                    f"{self._names.get(parameter, 'a parameter')} has its first gradient after freeze_step = "
                    f"{self.frozen.freeze_step}, when second moments stand still: its own has learned nothing; make "
                    "freeze_step larger than the first step that uses it, or compress gradients (one-bit)"
                )

    def loaded(self) -> None:
        """The optimizer's state is a checkpoint's. Collective."""
        if self.frozen.stood is not None:
            self.frozen.stood()

    def sends(self, parameter: nn.Parameter) -> bool:
        """Whether anything is sent of a parameter."""
        return self.frozen.moment(parameter) is not None


class ZeroOneMomenta:
    """The same of 0/1 Adam, while ranks sum: gradients, in few bytes where the second moment does not learn; divided by
    its square root then, by which parameters are of one magnitude.
    """

    def __init__(self, frozen: ZeroOne, names: dict[nn.Parameter, str]) -> None:
        self.frozen, self._names, self.looks = frozen, names, Looks(frozen, {p: p for p in names})

    @property
    def stand_in(self) -> bool:
        """Whether the next sums are in few bytes."""
        return not self.frozen.exact

    def mark(self, bucket: Bucket) -> None:
        """As of momenta."""
        for index, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
            if not self.frozen.knows(parameter) and bool(view.any()):
                bucket.flags[index] = math.inf

    def rounds(self, bucket: Bucket, exchange: Exchange) -> Rounds:
        """Leave in the bucket the sum of gradients."""
        known = [(p, view) for p, view in zip(bucket.parameters, bucket.views, strict=True) if self.frozen.knows(p)]
        divisors = [self.frozen.divisor(parameter) for parameter, _ in known]
        for (_, view), divisor in zip(known, divisors, strict=True):
            view.div_(divisor)
        yield from exchange.rounds(bucket.flat[: exchange.numel])
        for (_, view), divisor in zip(known, divisors, strict=True):
            view.mul_(divisor)

    def check(self, bucket: Bucket) -> None:
        """As of momenta."""
        late = _late(bucket)
        if late is not None:
            raise TrainingError(
                f"{self._names.get(late, 'a parameter')} has its first gradient in an update in which second moments "
                f"do not learn (kappa = {self.frozen.kappa}): its own has learned nothing; make kappa larger than the "
                "first step that uses it, or compress gradients (one-bit)"
            )

    def loaded(self) -> None:
        """As of momenta: nothing is divided."""

    def sends(self, parameter: nn.Parameter) -> bool:
        """Whether anything is sent of a parameter."""
        return self.frozen.knows(parameter)


def _late(bucket: Bucket) -> nn.Parameter | None:
    """A parameter that some rank has marked."""
    marked = zip(bucket.parameters, bucket.flags.tolist(), strict=True)
    return next((parameter for parameter, flag in marked if math.isinf(flag)), None)


def make_momenta(
    how: Compression,
    layout: Layout,
    world: World,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    clip_norm: float | None,
    shards: Shards,
) -> Momenta | ZeroOneMomenta | None:
    """What `how` sums of momenta, None where it sums gradients. From here on the optimizer's second moment stands after
    `freeze_step` updates, on one rank too. Raises PlanError, on all ranks alike, for what that does not go with.
    Collective.
    """
    if how.method not in MOMENTA:
        return None
    words = f"sync.compress = {compression_in_words(how)!r}"
    if len(optimizers) != 1:
        raise PlanError(
            f"{words} sums one optimizer's momentum, and there are {len(optimizers)}; compress gradients: one-bit"
        )
    if clip_norm is not None and how.method in ("one-bit-adam", "one-bit-lamb"):
        raise PlanError(
            f"{words} with clip_norm = {clip_norm}: the gradient that a sum of momenta in one bit stands for is mostly "
            "what the code has lost, of 2 to 11 times the true norm, so that nearly every update would be scaled down; "
            "leave clip_norm out, or use byte-adam or zero-one-adam, or compress gradients: one-bit"
        )
    optimizer, lamb = optimizers[0], how.method == "one-bit-lamb"
    if how.method == ZERO_ONE:
        rule = ZeroOne(optimizer, how.freeze_step or 1, int(how.settings["kappa"]))
        return ZeroOneMomenta(rule, {p: name for name, p in model.named_parameters()})
    frozen = (FrozenLAMB if lamb else FrozenAdam)(optimizer, how.freeze_step or 1)
    if layout.mesh.degree("shard") > 1:
        frozen.stood = partial(_copy, frozen, shards)
        frozen.agreed = partial(_largest, layout)
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
        frozen.over_parts = norms.over_parts
        frozen.agreed = partial(_largest, layout)
    by_name = {name: p for p, name in owned.items()}
    return Momenta(frozen, names, {p: by_name[name] for p, name in names.items() if name in by_name})


def _copy(frozen: Frozen, shards: Shards) -> None:
    """Have moments of parameters whose state is divided, whole: each rank sends a share of all of them. Collective."""
    frozen.copies = {}  # of an own part: what the optimizer has
    with shards.whole_gradients(frozen.optimizer):
        groups = {p: group for group in frozen.optimizer.param_groups for p in group["params"]}

    def part(own: nn.Parameter, *, divisor: bool) -> torch.Tensor | None:
        moment = frozen.moment(own)
        return None if moment is None else moment.divisor if divisor else moment.m

    m, divisors = (shards.wholes(frozen.optimizer, partial(part, divisor=which)) for which in (False, True))
    frozen.copies = {
        p: (Moment(m[p], float(groups[p]["betas"][0]), divisor), groups[p])
        for p, divisor in divisors.items()
        if bool(divisor.any())  # where v has learned, it is nowhere 0
    }


def _without_momentum(model: nn.Module, optimizer: Optimizer, shards: Shards) -> str | None:
    """A parameter that the optimizer does not hold."""
    with shards.whole_gradients(optimizer):
        known = {p for group in optimizer.param_groups for p in group["params"]}
    return next((name for name, p in model.named_parameters() if p.requires_grad and p not in known), None)


def _largest(layout: Layout, count: int) -> int:
    """Of all ranks' counts. Collective."""
    found = torch.tensor(count, dtype=torch.int64)
    with layout.channel("scalars").waiting(ring_all_reduce_nbytes(found, layout.mesh.world_size)):
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)
