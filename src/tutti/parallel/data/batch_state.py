"""State that forward writes from its batch, other than BatchNorm's: equal on all ranks, as on one device.

torch's own modules are known: InstanceNorm's running statistics are means over samples, and an embedding with max_norm
rescales the rows that a batch looks up. For other modules the script says it with `tutti.synchronized`: the module is
computed on the samples of all ranks, or what its forward wrote is combined after each microbatch.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils import _pytree as pytree

from tutti.config.plan import Plan
from tutti.data.seeds import forked_device
from tutti.errors import PlanError, ScriptError
from tutti.nn.annotations import Synchronization, read_synchronization
from tutti.parallel.data.batchnorm import BatchScope, is_batch_norm


def exchanges_state(module: nn.Module) -> bool:
    """Return whether a module's forward, or what it writes, is shared between the ranks of a microbatch."""
    shared = is_batch_norm(module) or read_synchronization(module) is not None
    return shared or _tracks(module) or _rescales(module)


def share_state(model: nn.Module, scope: BatchScope, plan: Plan) -> None:
    """Make torch's modules with such state, and those that `tutti.synchronized` gathers, communicate over `scope`.

    Raises:
        PlanError: the plan cannot keep what a module's forward writes.
    """
    if scope.world_size == 1:
        return
    gathered: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in gathered):
            continue
        mark = read_synchronization(module)
        if mark is not None:
            if mark.how == "gather":
                if plan.degree("space") > 1:
                    raise PlanError(
                        f'tutti.synchronized({name!r}, "gather") computes whole samples, and mesh.space cuts them; '
                        "use another axis than space"
                    )
                gathered = (*gathered, name)
                module.forward = GatheredForward(module, _own(module), scope, mark.dim, name)
        elif _tracks(module):
            module.forward = SharedInstanceNorm(cast(_NormBase, module), scope)
        elif _rescales(module):
            if plan.degree("shard") > 1 and plan.sharding.level > 1:
                raise PlanError(
                    f"module {name!r} has max_norm, which rescales rows of its weight in forward; with mesh.shard and "
                    f"sharding level {plan.sharding.level} that would be lost; use level 1 or the replicate axis"
                )
            module.forward = SharedLookup(module, scope)


def _own(module: nn.Module) -> Any:
    return vars(module).get("forward") or MethodType(type(module).forward, module)


def _tracks(module: nn.Module) -> bool:
    """Whether a module is torch's InstanceNorm with running statistics."""
    torchs = isinstance(module, _InstanceNorm) and type(module).forward is _InstanceNorm.forward
    return torchs and "forward" not in vars(module) and bool(module.track_running_stats)


def _rescales(module: nn.Module) -> bool:
    """Whether a module is torch's embedding with max_norm."""
    torchs = isinstance(module, nn.Embedding | nn.EmbeddingBag) and "forward" not in vars(module)
    known = type(module).forward in (nn.Embedding.forward, nn.EmbeddingBag.forward)
    return torchs and known and module.max_norm is not None


class SharedForward:
    """A forward that communicates over a scope; a pickled or copied module gets its own forward back."""

    def __init__(self, module: nn.Module, own: Any, scope: BatchScope) -> None:
        self.module, self.own, self.scope = module, own, scope

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self.own, MethodType):
            return functools.partial, (type(self.module).forward, self.module)
        return functools.partial, (self.own,)

    @property
    def is_local(self) -> bool:
        """Whether no other rank takes part now."""
        return self.scope.world_size == 1 or not self.module.training


class SharedInstanceNorm(SharedForward):
    """The forward of torch's InstanceNorm: running statistics move by the mean over the samples of all ranks."""

    def __init__(self, module: _NormBase, scope: BatchScope) -> None:
        super().__init__(module, _own(module), scope)

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        module = cast(_NormBase, self.module)
        running = [value for value in (module.running_mean, module.running_var) if value is not None]
        if self.is_local or self.scope.recomputing:  # recompute discards what it writes
            return self.own(input)  # type: ignore[no-any-return]
        before = [value.clone() for value in running]
        output: torch.Tensor = self.own(input)
        samples = float(input.shape[0] if input.dim() == module._get_no_batch_dim() + 1 else 1)  # type: ignore[operator]
        moved = torch.cat([new - old for new, old in zip(running, before, strict=True)]).double()
        sums = torch.cat([moved, moved.new_ones(1)]) * (samples if self.scope.counts else 0.0)
        self.scope.sum(sums)
        parts = torch.split_with_sizes(sums[:-1] / sums[-1], [len(value) for value in running])
        for value, old, part in zip(running, before, parts, strict=True):
            value.copy_(old + part)
        return output


class SharedLookup(SharedForward):
    """The forward of an embedding with max_norm: rows that any rank looks up are rescaled on all of them.

    Evaluation rescales rows, too, as torch does; `rescale_all` afterwards makes the ranks equal again.
    """

    def __init__(self, module: nn.Module, scope: BatchScope) -> None:
        super().__init__(module, _own(module), scope)
        self._rows: torch.Tensor | None = None

    def __call__(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.module
        if self.scope.world_size == 1:
            return self.own(input, *args, **kwargs)
        if self.scope.counts and not self.scope.recomputing:
            self._marks[input.reshape(-1)] = 1.0
        if not module.training and self.scope.counts:
            self._rescale(torch.unique(input))
        elif module.training and not self.scope.recomputing:
            self.rescale_all()
        saved, module.max_norm = module.max_norm, None  # rescaling again would move rows by rounding, on some ranks
        try:
            return self.own(input, *args, **kwargs)
        finally:
            module.max_norm = saved

    def rescale_all(self) -> None:
        """Rescale the rows that any rank has looked up since the last call. Collective."""
        self.scope.sum(self._marks)
        self._rescale(self._marks.nonzero().reshape(-1))
        self._marks.zero_()

    @property
    def _marks(self) -> torch.Tensor:
        """A 1 for each row that this rank has looked up since the last exchange."""
        module: Any = self.module
        if self._rows is None:
            self._rows = torch.zeros(module.num_embeddings, device=module.weight.device)
        return self._rows

    def _rescale(self, rows: torch.Tensor) -> None:
        module: Any = self.module
        if len(rows):
            with torch.no_grad():
                torch.embedding_renorm_(module.weight.detach(), rows, module.max_norm, module.norm_type)


class GatheredForward(SharedForward):
    """A module's forward on the samples of all ranks, in training; each rank goes on with its own samples' output.

    Every rank computes all samples, so whatever forward writes is what one device would write. Random draws in it are
    the same on all ranks.

    Args:
        module: the module.
        own: its forward.
        scope: the ranks.
        dim: the dim of arguments and outputs along which samples lie.
        name: the module's name, for errors.
    """

    def __init__(self, module: nn.Module, own: Any, scope: BatchScope, dim: int, name: str) -> None:
        super().__init__(module, own, scope)
        self.dim, self.name = dim, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_local:
            return self.own(*args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > self.dim]
        if not tensors:
            raise ScriptError(
                f'tutti.synchronized({self.name!r}, "gather"): its forward got no tensor with samples along dim '
                f"{self.dim}; pass dim=, or use another way"
            )
        local_count, scope = tensors[0].shape[self.dim], self.scope
        counts, seed = self._agree(local_count, tensors[0].device)
        samples = [
            _GatherSamples.apply(leaf.movedim(self.dim, 0), counts, scope).movedim(0, self.dim)  # type: ignore[no-untyped-call]
            if isinstance(leaf, torch.Tensor) and leaf.dim() > self.dim and leaf.shape[self.dim] == local_count
            else leaf
            for leaf in leaves
        ]
        all_args, all_kwargs = pytree.tree_unflatten(samples, structure)
        with forked_device(tensors[0].device), _on_all_samples(scope):
            torch.manual_seed(seed)
            output = self.own(*all_args, **all_kwargs)
        total, begin = sum(counts), sum(counts[: self._rank])
        if scope.counts:
            rows = torch.arange(begin, begin + local_count, device=tensors[0].device)
        else:  # this rank's samples do not count: any rows have the right shape
            rows = torch.arange(local_count, device=tensors[0].device) % total
        return pytree.tree_map_only(torch.Tensor, functools.partial(self._own_rows, rows=rows, total=total), output)

    def _agree(self, count: int, device: torch.device) -> tuple[list[int], int]:
        """Exchange the number of samples of each rank, and one seed of random draws."""
        own_seed = float(torch.randint(2**31, ()))
        vector = torch.tensor([float(count) if self.scope.counts else 0.0, own_seed], dtype=torch.float64)
        everyone = self.scope.gather(vector.to(device)).tolist()
        return [int(row[0]) for row in everyone], int(everyone[0][1])

    @property
    def _rank(self) -> int:
        return torch.distributed.get_rank(self.scope.group)

    def _own_rows(self, output: torch.Tensor, rows: torch.Tensor, total: int) -> torch.Tensor:
        if output.dim() > self.dim and output.shape[self.dim] == total:
            return output.index_select(self.dim, rows)
        return output


@contextmanager
def _on_all_samples(scope: BatchScope) -> Iterator[None]:
    """Within the context, the batch is whole on every rank, so that nothing else is exchanged for it."""
    size, counts, scope.world_size, scope.counts = scope.world_size, scope.counts, 1, True
    try:
        yield
    finally:
        scope.world_size, scope.counts = size, counts


class _GatherSamples(torch.autograd.Function):
    """This rank's samples -> all ranks' samples, along dim 0 in the order of ranks.

    Each rank's loss contributes to the gradient of every sample, so backward adds the contributions.
    """

    @staticmethod
    def forward(ctx: Any, samples: torch.Tensor, counts: list[int], scope: BatchScope) -> torch.Tensor:
        ctx.counts, ctx.scope, ctx.counted, ctx.shape = counts, scope, scope.counts, samples.shape
        exact = samples if samples.is_floating_point() else samples.double()
        rows = exact.new_zeros(max(counts), *samples.shape[1:])
        if scope.counts:
            rows[: len(samples)] = exact
        everyone = scope.gather(rows.reshape(-1)).view(len(counts), *rows.shape)
        parts = [part[:count] for part, count in zip(everyone, counts, strict=True)]
        return torch.cat(parts).to(samples.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        counts, scope = ctx.counts, ctx.scope  # type: ignore[attr-defined]
        total = gradient.contiguous().clone()
        scope.sum(total)
        if not ctx.counted:  # type: ignore[attr-defined]
            return total.new_zeros(ctx.shape), None, None  # type: ignore[attr-defined]
        begin = sum(counts[: torch.distributed.get_rank(scope.group)])
        return total[begin : begin + ctx.shape[0]], None, None  # type: ignore[attr-defined]


class BatchState:
    """Combines the state that the modules marked with `tutti.synchronized` write, after each microbatch.

    Args:
        model: the model.
        scope: the ranks.
        is_sharded: tells by its name whether ranks hold different parts of a parameter.
    """

    def __init__(self, model: nn.Module, scope: BatchScope, is_sharded: Callable[[str], bool]) -> None:
        self._scope, self._is_sharded = scope, is_sharded
        self._marked = [
            (name, module, mark)
            for name, module in model.named_modules()
            if (mark := read_synchronization(module)) is not None and mark.how != "gather"
        ]
        forwards = [vars(module).get("forward") for module in model.modules()]
        self._lookups = [forward for forward in forwards if isinstance(forward, SharedLookup)]
        self._before: list[dict[str, torch.Tensor]] = []

    def begin(self) -> None:
        """A microbatch begins: note what the state is."""
        if self._marked and self._scope.world_size > 1:
            self._before = [
                {key: tensor.clone() for key, tensor in self._state(name, module)} for name, module, _ in self._marked
            ]

    def combine(self, samples: int) -> None:
        """Combine what forward wrote, in a microbatch of which this rank had `samples`. Collective."""
        if not self._before:
            return
        for (name, module, mark), before in zip(self._marked, self._before, strict=True):
            self._combine(name, module, mark, before, samples)
        self._before = []

    def evaluated(self) -> None:
        """An evaluation ended: rescale the rows that it looked up, on all ranks. Collective."""
        if self._scope.world_size > 1:
            for lookup in self._lookups:
                lookup.rescale_all()

    @torch.no_grad()
    def _combine(
        self, name: str, module: nn.Module, mark: Synchronization, before: dict[str, torch.Tensor], samples: int
    ) -> None:
        now = dict(self._state(name, module))
        kept = [key for key, old in before.items() if now[key].shape == old.shape]
        moved = [key for key in kept if not torch.equal(now[key], before[key])]
        flags = torch.tensor([float(key in moved) for key in before] + [float(len(kept) < len(before)), float(samples)])
        everyone = self._scope.gather(flags.double().to(next(iter(before.values())).device)) if before else None
        if everyone is None:
            return
        if bool(everyone[:, -2].any()):
            raise ScriptError(
                f"tutti.synchronized({name!r}, {mark.how!r}): its forward changes the shape of a buffer, which cannot "
                'be combined; use "gather", or a buffer of a fixed size'
            )
        weights = everyone[:, -1].tolist()
        for position, (key, old) in enumerate(before.items()):
            if bool(everyone[:, position].any()):
                change = self._change(f"{name}.{key}" if name else key, mark, now[key], old, weights)
                now[key].copy_((old.double() + change) if old.dtype is not torch.bool else old.double() + change != 0)

    def _change(
        self, name: str, mark: Synchronization, now: torch.Tensor, old: torch.Tensor, weights: Sequence[float]
    ) -> torch.Tensor:
        """The combined change of one tensor."""
        rank = torch.distributed.get_rank(self._scope.group)
        change = now.double() - old.double()
        if mark.how == "mean" and not now.is_floating_point():
            everyone = self._scope.gather(change.reshape(-1))
            counted = everyone[[weight > 0 for weight in weights]]
            if not bool((counted == counted[0]).all()):
                raise ScriptError(
                    f'tutti.synchronized(..., "mean"): {name!r} is of whole numbers, which the ranks changed '
                    'differently; use "sum" for a count, or "gather"'
                )
            return counted[0].reshape(now.shape)
        first = next(position for position, weight in enumerate(weights) if weight > 0)
        share = {
            "mean": weights[rank] / sum(weights),
            "sum": float(weights[rank] > 0),
            "first": float(rank == first),
        }[mark.how]
        change = change * share if share else torch.zeros_like(change)
        self._scope.sum(change)
        return change

    def _state(self, name: str, module: nn.Module) -> list[tuple[str, torch.Tensor]]:
        """The buffers and parameters of a module that ranks hold whole, the same on all ranks; complex ones as real."""
        prefix = f"{name}." if name else ""
        whole = [(key, value) for key, value in module.named_parameters() if not self._is_sharded(prefix + key)]
        tensors = [(key, tensor.detach()) for key, tensor in (*module.named_buffers(), *whole) if not tensor.is_meta]
        return [(key, torch.view_as_real(tensor) if tensor.is_complex() else tensor) for key, tensor in tensors]
