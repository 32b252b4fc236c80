"""BatchNorm whose statistics are those of the whole microbatch, over all ranks that share it.

torch's SyncBatchNorm refuses CPU tensors. Each rank sends (count, mean, sum of squared deviations) per channel once;
they are combined by the formula of Chan, Golub and LeVeque (1979), which does not cancel where the mean is large.
Backward all-reduces two vectors (Ioffe and Szegedy 2015, arXiv 1502.03167, section 3).
"""

import functools
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from tutti.comm.point_to_point import ring_all_reduce_nbytes
from tutti.comm.shared_memory import SharedMemoryCommunicator
from tutti.comm.traffic import CommChannel, untracked_channel
from tutti.errors import PlanError, ScriptError

Forward = Callable[..., Any]
"""The forward of a module."""


@dataclass(slots=True)
class BatchScope:
    """The ranks over which statistics are computed, and the state of the current pass.

    Attributes:
        world_size: number of ranks.
        group: their process group.
        diverged: whether this rank is a replica that computes statistics of its own samples only.
        counts: whether this rank's samples count; False for a rank that only takes part in the collectives.
        recomputing: whether forward runs again inside backward, when running statistics must not change.
        evaluating: whether job.evaluate runs, where ranks may have different numbers of batches.
        channel: accounting of the traffic.
        communicator: shared-memory communicator, if the ranks share memory.
    """

    world_size: int = 1
    group: Any = None
    diverged: bool = False
    counts: bool = True
    recomputing: bool = field(default=False)
    evaluating: bool = field(default=False)
    channel: CommChannel = field(default_factory=untracked_channel)
    communicator: SharedMemoryCommunicator | None = None

    @property
    def degree(self) -> int:
        """The number of ranks whose samples a BatchNorm normalises by."""
        return 1 if self.evaluating else self.world_size

    @property
    def own_samples(self) -> bool:
        """Whether several ranks each normalise by their own samples."""
        return self.diverged or self.evaluating

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """Gather every rank's vector.

        Args:
            local: shape (values,).

        Returns:
            Shape (ranks, values).
        """
        everyone = local.new_empty(self.world_size, local.numel())
        with self.channel.waiting((self.world_size - 1) * local.numel() * local.element_size()):
            if self.communicator is not None:
                self.communicator.gather(everyone, local).wait()
            else:
                dist.all_gather(list(everyone), local, group=self.group)
        return everyone

    def sum(self, values: torch.Tensor) -> None:
        """All-reduce `values` in place."""
        with self.channel.waiting(ring_all_reduce_nbytes(values, self.world_size)):
            if self.communicator is not None:
                self.communicator.reduce(values)
            else:
                dist.all_reduce(values, group=self.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> "BatchScope":
        """Return the scope itself: copies of a model belong to the same ranks."""
        return self

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """Within the context, forward is a repetition inside backward."""
        self.recomputing = True
        try:
            yield
        finally:
            self.recomputing = False

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Within the context, batches are normalised by the statistics of this rank's own samples."""
        self.evaluating = True
        try:
            yield
        finally:
            self.evaluating = False


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether a module normalises over the batch: a BatchNorm, or a class whose code mentions F.batch_norm."""
    if isinstance(module, _BatchNorm):
        return True
    for kind in type(module).__mro__:
        if kind.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        functions = [value for value in vars(kind).values() if isinstance(value, FunctionType)]
        if any({"batch_norm", "native_batch_norm"}.intersection(code.__code__.co_names) for code in functions):
            return True
    return False


def share_statistics(model: nn.Module, scope: BatchScope, traced: Container[str] = ()) -> None:
    """Give batch normalisation in `model` statistics over `scope`; modules, parameters and buffers stay the same.

    Args:
        model: the model.
        scope: the ranks.
        traced: names of modules whose code is traced on shapes, where statistics cannot be exchanged.

    Raises:
        PlanError: a traced module normalises over the batch itself.
    """
    for name, module in model.named_modules():
        if not is_batch_norm(module):
            continue
        if name in traced and scope.world_size > 1:
            raise PlanError(
                f"mesh.stage: {name or 'the model'} ({type(module).__name__}) calls F.batch_norm beside other modules; "
                "put the call into a module of its own, such as nn.BatchNorm, or use another axis than stage"
            )
        module.forward = GlobalForward(module, scope, own_forward(module), name)


def own_forward(module: nn.Module) -> Forward | None:
    """Return the forward that a subclass of BatchNorm, or this instance of it, defines; None if it is torch's."""
    forward = vars(module).get("forward")
    if isinstance(forward, GlobalForward):
        return forward.own
    if forward is not None:
        return cast(Forward, forward)
    kind = type(module).forward
    return None if kind.__module__ == _BatchNorm.__module__ else MethodType(kind, module)


class GlobalForward:
    """The forward of one BatchNorm with statistics over a scope; torch's own forward in evaluation mode.

    Only torch's forward is replaced. A forward that a subclass or the instance defines runs as it is, and computes
    F.batch_norm over the scope.

    Args:
        module: the module.
        scope: the ranks.
        own: the forward that is not torch's; None if it is torch's.
        name: the module's name, for errors.
        apply: apply(normalise, input) calls `normalise` with the plain tensor of an input of another type.
    """

    def __init__(
        self,
        module: nn.Module,
        scope: BatchScope,
        own: Forward | None = None,
        name: str = "",
        apply: Callable[[Forward, Any], Any] | None = None,
    ) -> None:
        self.module, self.scope, self.own, self.name, self.apply = module, scope, own, name, apply
        self._checked = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Give a pickled model its own forward, since the ranks are not part of it."""
        if isinstance(self.own, MethodType) or self.own is None:
            return functools.partial, (type(self.module).forward, self.module)
        return functools.partial, (self.own,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._replaced(*args, **kwargs) if self.own is None else self._around(self.own, args, kwargs)

    def _replaced(self, input: torch.Tensor) -> torch.Tensor:
        """Compute torch's own forward."""
        module, scope = cast(_BatchNorm, self.module), self.scope
        batch_statistics = module.training or (module.running_mean is None and module.running_var is None)
        if not batch_statistics:
            return _BatchNorm.forward(module, input)  # not SyncBatchNorm's, which would communicate by itself
        single = self._is_single(input)
        if scope.degree == 1 and scope.counts and not scope.recomputing and not single:
            return _BatchNorm.forward(module, input)
        module._check_input_dim(input)  # type: ignore[no-untyped-call]
        tracked, momentum = module.training and module.track_running_stats, 0.0
        if tracked and scope.degree > 1 and not scope.recomputing:
            if module.num_batches_tracked is not None:
                module.num_batches_tracked.add_(1)
            # a cumulative average waits for an accelerator, as torch's does
            momentum = module.momentum if module.momentum is not None else 1.0 / float(module.num_batches_tracked or 1)
        running = (module.running_mean, module.running_var) if tracked or single else (None, None)
        return _batch_norm(scope, input, *running, module.weight, module.bias, momentum, module.eps)

    def _is_single(self, input: torch.Tensor) -> bool:
        """Whether this rank normalises one value a channel by itself, which torch refuses."""
        if not (self.scope.own_samples and self.scope.counts):
            return False
        return input.numel() == input.shape[1]

    def _around(self, own: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward that is not torch's, with F.batch_norm over the scope."""
        scope = self.scope
        if scope.degree == 1 and scope.counts and not scope.diverged:
            return own(*args, **kwargs)
        absent = not scope.counts and scope.degree == 1  # a diverged replica without a sample of this microbatch
        calls = SharedStatistics(scope, self.apply)
        with _unchanged_buffers(self.module) if absent else nullcontext(), calls:
            output = own(*args, **kwargs)
        if not calls.seen and isinstance(self.module, _BatchNorm) and self.module.training and not self._checked:
            self._checked = True
            _check_samples_independent(self.module, self.name, own, args, kwargs, output)
        return output


class SharedStatistics(TorchFunctionMode):
    """Within the context, F.batch_norm takes the statistics of its batch over all ranks of a scope.

    Attributes:
        seen: whether F.batch_norm was called.
    """

    def __init__(self, scope: BatchScope, apply: Callable[[Forward, Any], Any] | None) -> None:
        super().__init__()
        self.scope, self.apply, self.seen = scope, apply, False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        signature = _SIGNATURES.get(func)
        if signature is None:
            return func(*args, **(kwargs or {}))
        self.seen = True
        arguments = dict(zip(signature, args, strict=False)) | (kwargs or {})
        if not arguments.get("training", False):
            return func(*args, **(kwargs or {}))

        def normalise(input: torch.Tensor) -> torch.Tensor:
            return _batch_norm(
                self.scope,
                input,
                arguments.get("running_mean"),
                arguments.get("running_var"),
                arguments.get("weight"),
                arguments.get("bias"),
                arguments.get("momentum", 0.1),
                arguments.get("eps", 1e-5),
            )

        input = arguments["input"]
        return normalise(input) if self.apply is None else self.apply(normalise, input)


_SIGNATURES = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps"),
}
"""The functions that normalise over the batch, with the names of their arguments in order."""


@contextmanager
def _unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Restore the module's buffers after the context."""
    saved = [(inner, name, value, value.clone()) for inner in module.modules() for name, value in _buffers(inner)]
    try:
        yield
    finally:
        for inner, name, value, copy in saved:
            value.copy_(copy)
            inner._buffers[name] = value


def _buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, value) for name, value in module._buffers.items() if value is not None]


def _check_samples_independent(
    module: nn.Module, name: str, own: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    """Refuse a BatchNorm whose forward, without F.batch_norm, makes a sample's output depend on the other samples.

    Such a forward would take the statistics of this rank's samples only. One that uses constants, or running statistics
    alone, passes.
    """
    input = args[0] if args else next(iter(kwargs.values()))
    if not isinstance(input, torch.Tensor) or not isinstance(output, torch.Tensor) or not input.numel():
        return
    with torch.no_grad(), _unchanged_buffers(module):
        pair = torch.cat([input[:1], input[:1] * 2 + 1])
        if args:
            together, piecewise = own(pair, *args[1:]), [own(part, *args[1:]) for part in (pair[:1], pair[1:])]
        else:
            key = next(iter(kwargs))
            together, piecewise = own(**{key: pair}), [own(**{key: part}) for part in (pair[:1], pair[1:])]
    if not torch.allclose(together, torch.cat(piecewise), rtol=1e-3, atol=1e-5, equal_nan=True):
        raise PlanError(
            f"module {name!r} ({type(module).__name__}) takes the statistics of a batch by other means than "
            "F.batch_norm, so that each rank would normalise by its own samples; call F.batch_norm in its forward, or "
            'compute it on the samples of all ranks with tutti.synchronized(module, "gather")'
        )


def _batch_norm(
    scope: BatchScope,
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    momentum: float,
    eps: float,
) -> torch.Tensor:
    """F.batch_norm in training, with the statistics of the microbatch over all ranks of `scope`.

    Where forward runs again inside backward, running statistics stay; a momentum of 0 does that with the same operator
    as in the first forward, which checkpoint requires.
    """
    if scope.degree == 1 and not scope.counts:  # a diverged replica without a sample of this microbatch
        return input * 1.0
    if scope.own_samples and scope.counts and input.numel() == input.shape[1]:
        return _by_running(input, running_mean, running_var, weight, bias, eps)
    if scope.degree == 1:
        momentum = 0.0 if scope.recomputing else momentum
        return F.batch_norm(input, running_mean, running_var, weight, bias, True, momentum, eps)
    work = input.float() if input.dtype in (torch.bfloat16, torch.float16) else input
    mean, variance, count = _global_statistics(work.detach(), scope)
    if not scope.recomputing:
        _update_running(running_mean, running_var, momentum, mean, variance, count)
    output = _Normalise.apply(work, weight, bias, mean, variance, count, eps, scope)  # type: ignore[no-untyped-call]
    return output.to(input.dtype)  # type: ignore[no-any-return]


def _by_running(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Normalise with the running statistics, which do not change.

    For a rank's own batch with one value per channel, which has no variance.
    """
    if running_mean is None or running_var is None:
        raise ScriptError(
            "a rank normalises a batch with one value per channel, and its BatchNorm keeps no running statistics to "
            "do it with; use track_running_stats=True, or else another batch_size in evaluate, or a larger global "
            "batch, fewer microbatches or Job(last_batch='drop') in training"
        )
    mean, var = running_mean.clone(), running_var.clone()  # another call may change them before backward
    return F.batch_norm(input, mean, var, weight, bias, False, 0.0, eps)


def _global_statistics(
    input: torch.Tensor, scope: BatchScope
) -> tuple[torch.Tensor, torch.Tensor, float | torch.Tensor]:
    """Compute statistics over all ranks.

    Args:
        input: shape (samples, channels, ...).
        scope: the ranks.

    Returns:
        Mean and biased variance, each of shape (channels,), and the number of values per channel; a 0-d tensor on an
        accelerator, which the host does not wait for.
    """
    count = input.numel() / input.shape[1] if scope.counts else 0.0
    variance, mean = _moments(input)
    if scope.world_size > 1:
        local = torch.cat([mean, variance * count, mean.new_full((1,), count)])
        stacked = scope.gather(local)
        counts, channels = stacked[:, -1:], mean.shape[0]
        total = counts.sum()
        means = stacked[:, :channels]
        mean = (counts * means).sum(0) / total
        squares = stacked[:, channels : 2 * channels] * (counts > 0)
        variance = (squares + counts * (means - mean) ** 2).sum(0) / total
        if count > 1 and mean.device.type != "cpu":  # so there are more than one together
            return mean, variance, total
        count = float(total)
    if count <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(input.shape)}")
    return mean, variance, count


def _moments(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return biased variance and mean per channel, each of shape (channels,).

    Two passes with the correction of Chan, Golub and LeVeque (1983, eq. 1.7): 0.6 ns a value on a CPU, where
    torch.var_mean takes 6.7.
    """
    dims = [dim for dim in range(input.dim()) if dim != 1]
    mean = input.mean(dims)
    deviation = input - mean.view(1, -1, *[1] * (input.dim() - 2))
    rest = deviation.mean(dims)
    return deviation.square_().mean(dims) - rest**2, mean + rest


def _update_running(
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    mean: torch.Tensor,
    variance: torch.Tensor,
    count: float | torch.Tensor,
) -> None:
    """Move running mean and (unbiased) variance towards the batch's, as torch does."""
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_((variance * (count / (count - 1))).to(running_var.dtype), momentum)


class _Normalise(torch.autograd.Function):
    """y = (x - mean) / sqrt(variance + eps) * weight + bias, with gradients through the global statistics."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        count: float | torch.Tensor,
        eps: float,
        scope: BatchScope,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight, mean, variance)
        ctx.count, ctx.eps, ctx.scope, ctx.counts = count, eps, scope, scope.counts
        return F.batch_norm(input, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, mean, variance = ctx.saved_tensors  # type: ignore[attr-defined]
        count, eps, scope = ctx.count, ctx.eps, ctx.scope  # type: ignore[attr-defined]
        scale = torch.rsqrt(variance + eps)
        grad_input, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grad_output.contiguous(), input, weight, mean, variance, mean, scale, False, eps, [True, True, True]
        )
        sums = torch.cat([grad_bias, grad_weight])
        if scope.world_size > 1:
            scope.sum(sums)
        if ctx.counts:  # type: ignore[attr-defined]
            sum_dy, sum_dy_xhat = sums.chunk(2)
            gain = scale if weight is None else scale * weight
            slope = gain * scale * sum_dy_xhat / count
            offset = gain * sum_dy / count - slope * mean
            shape = [1, -1] + [1] * (input.dim() - 2)
            grad_input = grad_input.sub_(offset.view(shape)).addcmul_(input, slope.view(shape), value=-1)
        _, with_weight, with_bias, *_ = ctx.needs_input_grad  # type: ignore[attr-defined]
        return grad_input, grad_weight if with_weight else None, grad_bias if with_bias else None, *[None] * 5
