"""The plain program that ranks are compared with: a loop of torch's own calls over the script's model and data.

It keeps what docs/updates.md promises with none of tutti's step, so that a fault of that step is not on both sides.
Only the loader, which fixes the order of samples and their seeds, is tutti's on both sides.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from tutti.data.device_copies import to_device
from tutti.data.samples import DataSource
from tutti.errors import ScriptError, TrainingError
from tutti.optim.learning_rate import learning_rate_factor
from tutti.trainer.run_state import Run
from tutti.verification.plain_evaluation import Metric, counted_loss, plain_evaluation

Function = Callable[[nn.Module, Any], Any]

_AUTOCAST = {"bfloat16": torch.bfloat16}


def own_step_reason(run: Run) -> str | None:
    """Return why one device cannot run the plain program, to be read after "because"; None if it can."""
    rule, plan = run.settings.lr_rule, run.parallel.plan
    first = next(run.parallel.model.parameters())
    hooked = any(p._backward_hooks or _after_hooks(p) for p in run.parallel.model.parameters())
    if plan.sync.compress is not None:
        return "it follows a codec of gradient reductions"
    if plan.precision == "float16" and first.dtype is not torch.float64:
        return "float16 gradients are computed with loss scaling"
    if rule is not None and rule.scale == "adascale":
        return "AdaScale measures the gradient noise in it"
    if hooked and plan.batch.num_microbatches > 1:
        return "hooks on parameters are called once for several microbatches"
    return None


def _after_hooks(parameter: nn.Parameter) -> list[Any]:
    hooks = (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
    return [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("tutti.")]


class PlainProgram:
    """Trains and evaluates by plain calls of torch, on one device.

    Args:
        run: the run. Of it only the script's model, optimizers, schedulers, data and settings are used.

    Attributes:
        used_counts: whether losses of several batches were weighed by the counts that tutti reads off them.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.model = run, run.parallel.model
        self.optimizers, self.schedulers = run.parallel.optimizers, run.state.schedules.bound
        self.used_counts = False
        self._losses: list[float] = []  # of the calls that left the gradients
        self._used: list[Optimizer] = []  # optimizers that have stepped with these gradients
        self._finite = True
        self._statistics: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._batch = -1
        self._epoch: list[tuple[float, int]] = []  # loss and samples of this epoch's batches
        self._told = False

    def forward_backward(self, function: Function, batch: Any, zeroed: tuple[Optimizer, ...] | None) -> float:
        """Call zero_grad where an update has used the gradients, compute the loss, and call backward."""
        loader, observer, step = self.run.state.loader, self.run.loop.observer, self.run.state.progress.step
        if loader.share is None:
            raise ScriptError("a step was given a batch before the loader yielded one; iterate over the loader")
        pieces = loader.pieces(batch)
        self._zero_grad(zeroed)
        observer.loaded(step, batch)
        pieces = [to_device(observer.sampled(piece), self.run.parallel.world.device) for piece in pieces]
        earlier = {p: p.grad for p in self.model.parameters()}
        loss = self._one_batch(function, pieces[0]) if len(pieces) == 1 else self._accumulated(function, pieces)
        self._check_finite(loss, step, earlier)
        self._losses.append(loss)
        observer.gradients(step, loss)
        return loss

    def _one_batch(self, function: Function, batch: Any) -> float:
        share, step = self.run.state.loader.share, self.run.state.progress.step
        assert share is not None
        with self.run.loop.observer.microbatch(step, 0, share):
            with self._autocast():
                value = function(self.model, batch)
                self.run.loop.observer.loss(value)
                loss = _mean(value)
            _backward(loss)
        return float(loss.detach())

    def _accumulated(self, function: Function, pieces: Sequence[Any]) -> float:
        """Add up the gradients of microbatches: each one's total, divided by the count of all of them."""
        share, step = self.run.state.loader.share, self.run.state.progress.step
        assert share is not None
        earlier = {p: p.grad.clone() for p in self.model.parameters() if p.grad is not None}
        for parameter in self.model.parameters():
            parameter.grad = None
        totals, counts = [], []
        for index, (piece, size) in enumerate(zip(pieces, share.sizes, strict=True)):
            with self.run.loop.observer.microbatch(step, index, share):
                with self._autocast():
                    value = self._counted(function, piece)
                    self.run.loop.observer.loss(value)
                    total, count = _total_count(value, size, share.batch_size)
                _backward(total)
            totals.append(float(total.detach()))
            counts.append(count)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad / sum(counts)
            if parameter in earlier:
                before = earlier[parameter]
                parameter.grad = before if parameter.grad is None else before + parameter.grad
        return sum(totals) / sum(counts)

    def _counted(self, function: Function, batch: Any) -> Any:
        """Return the loss of one of several batches; its count, where it is a mean over something but samples."""
        value, used_counts = counted_loss(function, self.model, batch)
        self.used_counts |= used_counts
        return value

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = _AUTOCAST.get(self.run.parallel.plan.precision)
        device = self.run.parallel.world.device
        return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)

    def _zero_grad(self, zeroed: tuple[Optimizer, ...] | None) -> None:
        fresh = bool(self._used) or not self._losses
        parameters: list[nn.Parameter] = []
        if zeroed is None:
            parameters = [*self.model.parameters()] if fresh else []
        else:
            parameters = _held(zeroed)
            if self._used:
                owned = set(_held(self.optimizers))
                parameters += [p for p in self.model.parameters() if p not in owned]
        for parameter in parameters:
            parameter.grad = None
        if fresh:
            self._losses, self._used, self._finite = [], [], True
            if self.run.settings.on_nonfinite != "stop":
                norms = [module for module in self.model.modules() if isinstance(module, _NormBase)]
                self._statistics = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers()]

    def _check_finite(self, loss: float, step: int, earlier: Mapping[nn.Parameter, torch.Tensor | None]) -> None:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if math.isfinite(loss) and all(bool(_values(gradient).isfinite().all()) for gradient in gradients):
            return
        if self.run.settings.on_nonfinite == "stop":
            raise TrainingError(
                f"the loss or a gradient is not finite at step {step + 1} (loss {loss}); lower the learning rate or "
                "skip such steps with Job(on_nonfinite='skip')"
            )
        self._finite = False
        self._restore_statistics()
        for parameter, gradient in earlier.items():
            parameter.grad = gradient

    @torch.no_grad()
    def _restore_statistics(self) -> None:
        for buffer, saved in self._statistics:
            buffer.copy_(saved)

    def update(self, optimizers: tuple[Optimizer, ...]) -> None:
        """Clip the gradients, call `step` of the optimizers and of their schedulers."""
        if not self._losses or any(one is used for one in optimizers for used in self._used):
            raise ScriptError("update was called before forward_backward; compute gradients first")
        progress = self.run.state.progress
        factors = [self._rate_factor(optimizer) for optimizer in optimizers]
        rate = float(optimizers[0].param_groups[0]["lr"]) * factors[0]
        for optimizer in optimizers:
            progress.clocks[self._number(optimizer)].updates += 1
        if self._finite:
            self._clip(optimizers)
            for optimizer, factor in zip(optimizers, factors, strict=True):
                with _scaled_rate(optimizer, factor):
                    optimizer.step()
            for optimizer in optimizers:
                self._step_schedulers(optimizer)
        else:
            self._restore_statistics()
        self._used.extend(optimizers)
        self._note_epoch_loss()
        progress.step += 1
        self.run.loop.observer.updated(progress.step - 1, sum(self._losses), rate)

    def _number(self, optimizer: Optimizer) -> int:
        return next(number for number, known in enumerate(self.optimizers) if known is optimizer)

    def _rate_factor(self, optimizer: Optimizer) -> float:
        if self.run.settings.lr_rule is None:
            return 1.0
        return learning_rate_factor(
            self.run.settings.lr_rule,
            self.run.loop.initial_rates[0],
            self.run.state.progress.clocks[self._number(optimizer)].updates,
            global_batch_size=self.run.state.loader.stated_size,
            steps_per_epoch=self.run.steps_per_epoch,
        )

    def _clip(self, optimizers: tuple[Optimizer, ...]) -> None:
        bound, everything = self.run.settings.clip_norm, len(optimizers) == len(self.optimizers)
        if bound is None:
            return
        parameters = [*self.model.parameters()] if everything else _held(optimizers)
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not any(gradient.is_sparse for gradient in gradients):
            clip_grad_norm_(parameters, bound)
            return
        norm = math.sqrt(sum(float(_values(gradient).norm()) ** 2 for gradient in gradients))  # torch clips no sparse
        for gradient in gradients:
            gradient.mul_(min(1.0, bound / (norm + 1e-6)))

    def _step_schedulers(self, optimizer: Optimizer) -> None:
        clock = self.run.state.progress.clocks[self._number(optimizer)]
        clock.base_steps += 1
        for entry in self.schedulers:
            if entry.optimizer is optimizer and entry.kind == "counted":
                entry.scheduler.step_update(clock.updates)
            elif entry.optimizer is optimizer and entry.kind == "plain" and self.run.state.schedules.clock == "step":
                entry.scheduler.step()

    def _note_epoch_loss(self) -> None:
        loader = self.run.state.loader
        number, loss = loader.before + loader.position, sum(self._losses)
        if number != self._batch and loader.share is not None and math.isfinite(loss):
            self._epoch.append((loss, loader.share.batch_size))
        self._batch = number

    def schedule(self, metric: float) -> None:
        """Call `step(metric)` of the schedulers that take one."""
        followers = [entry.scheduler for entry in self.schedulers if entry.kind == "metric"]
        if not followers:
            raise ScriptError("schedule was called, but no scheduler of the run follows a metric")
        self._told = True
        for scheduler in followers:
            scheduler.step(metric)

    def epoch_ended(self, epochs: int) -> None:
        """Call `step` of the schedulers that count epochs, and of those that follow the epoch's loss."""
        samples = sum(size for _, size in self._epoch)
        for entry in self.schedulers:
            if entry.kind == "counted":
                entry.scheduler.step(epochs)
            elif entry.kind == "plain" and self.run.state.schedules.clock == "epoch":
                entry.scheduler.step()
            elif entry.kind == "metric" and not self._told and samples:
                entry.scheduler.step(sum(loss * size for loss, size in self._epoch) / samples)
        self._told, self._epoch = False, []

    def evaluate(
        self, source: DataSource, metrics: Mapping[str, Metric], whole: Mapping[str, Metric], batch_size: int | None
    ) -> tuple[dict[str, float], int]:
        """Return the mean loss and metrics over all samples, and their number."""
        evaluation = plain_evaluation(self.run, source, metrics, whole, batch_size, self._autocast)
        self.used_counts |= evaluation.used_counts
        return evaluation.values, evaluation.samples


def _mean(value: Any) -> torch.Tensor:
    """Return the loss that a script's function returned for the whole batch."""
    if hasattr(value, "total") and hasattr(value, "count") and not isinstance(value, torch.Tensor):
        value = value.total / value.count
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise ScriptError(
            f"the loss is of type {type(value).__name__}; return a 0-d tensor that is the mean over samples, or "
            "tutti.Weighted(total, count)"
        )
    return value.reshape(())


def _total_count(value: Any, samples: int, batch_size: int) -> tuple[torch.Tensor, float]:
    """Return the loss of one microbatch as a total and what to divide the sum of all totals by."""
    if isinstance(value, torch.Tensor):
        return _mean(value) * samples, float(samples)
    if hasattr(value, "count"):
        return value.total.reshape(()), float(value.count)
    return value.total.reshape(()), samples / batch_size  # a sum over samples


def _backward(loss: torch.Tensor) -> None:
    if not loss.requires_grad:
        raise ScriptError(
            "the loss does not depend on any parameter that requires a gradient; compute it from the model's output, "
            "outside torch.no_grad() and without .item() or .detach()"
        )
    loss.backward()  # type: ignore[no-untyped-call]


def _held(optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


@contextmanager
def _scaled_rate(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Multiply the learning rates inside the context, as a warm-up does."""
    rates = [group["lr"] for group in optimizer.param_groups if "lr" in group and factor != 1.0]
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=False):
            group["lr"] = rate
