"""Normalisation over places: statistics are those of the whole sample (and, for BatchNorm, of the whole slice)."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from tutti.errors import PlanError
from tutti.parallel.data.batchnorm import BatchScope, GlobalForward
from tutti.parallel.spatial.exchange import all_sum
from tutti.parallel.spatial.tensor import CutTensor, cut, handles, local, space_of, where_of

Function = Callable[..., Any]


class SpaceBatchNorm:
    """The forward of one BatchNorm: over data and the axes that cut its input; the plain one for a whole input."""

    def __init__(self, module: _BatchNorm, plain: Callable[[torch.Tensor], torch.Tensor], scope: BatchScope) -> None:
        self.module, self.plain, self.scope = module, plain, scope

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled model gets its plain forward back: the ranks are not part of it."""
        return functools.partial, (type(self.module).forward, self.module)

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        if not isinstance(input, CutTensor):
            return self.plain(input)
        where, space = where_of(input), space_of([input])
        if any(where[:2]):
            raise PlanError(f"{type(self.module).__name__} on channels that mesh.space cuts; cut spatial dims only")
        wide = space.scopes[tuple(sorted(along.axis for along in where if along))]
        wide.counts, wide.recomputing = self.scope.counts, self.scope.recomputing
        return cut(GlobalForward(self.module, wide)(local(input)), where, space)


def share_statistics_in_space(model: nn.Module, scope: BatchScope) -> None:
    """Give every BatchNorm of `model` statistics over all parts of its input, on top of those over data."""
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.forward = SpaceBatchNorm(module, module.forward, scope)  # type: ignore[method-assign]


@handles("batch_norm")
def _batch_norm(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The functional form: in evaluation only, when it uses no statistics of its input."""
    tensor, *rest = args
    training = kwargs.get("training", rest[4] if len(rest) > 4 else False)
    if training:
        raise PlanError("F.batch_norm(training=True) on a tensor that mesh.space cuts; use an nn.BatchNorm module")
    return cut(func(local(tensor), *rest, **kwargs), where_of(tensor), space_of([tensor]))


@handles("group_norm")
def _group_norm(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _grouped(*args, **kwargs)


def _grouped(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Group normalisation (Wu and He 2018, arXiv 1803.08494): mean and variance in two sums over all parts."""
    where, space, part = where_of(input), space_of([input]), local(input)
    if any(where[:2]):
        raise PlanError("group_norm on channels that mesh.space cuts; cut spatial dims only")
    axes = tuple(sorted(along.axis for along in where if along))
    work = part.float() if part.dtype in (torch.bfloat16, torch.float16) else part
    grouped = work.reshape(part.shape[0], num_groups, -1)
    size = grouped.shape[-1]
    for dim, along in enumerate(where):
        if along is not None:
            size = size // part.shape[dim] * along.extent
    mean = all_sum(grouped.sum(-1, keepdim=True), axes, space) / size
    centred = grouped - mean
    variance = all_sum((centred * centred).sum(-1, keepdim=True), axes, space) / size
    result = (centred * torch.rsqrt(variance + eps)).reshape(part.shape)
    shape = [1, -1] + [1] * (part.dim() - 2)
    if weight is not None:
        result = result * weight.reshape(shape)
    if bias is not None:
        result = result + bias.reshape(shape)
    return cut(result.to(part.dtype), where, space)


@handles("instance_norm")
def _instance_norm(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _each(*args, **kwargs)


def _each(
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Instance normalisation: groups of one channel."""
    if running_mean is not None or running_var is not None:
        raise PlanError("instance_norm with running statistics where mesh.space cuts; use track_running_stats=False")
    return _grouped(input, local(input).shape[1], weight, bias, eps)
