"""Evaluation by a plain loop on one device, which verification compares the ranks' evaluation with."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tutti.data.device_copies import to_device
from tutti.data.microbatches import map_tensors
from tutti.data.samples import Collate, DataSource, SeededSamples
from tutti.parallel.loss_means import CountedLoss, CountedMean, looked_up, noted_means
from tutti.parallel.losses import default_loss, loss_in
from tutti.trainer.evaluate import whole_set_metrics
from tutti.trainer.run_state import Run

Metric = Callable[[Any, Any], Any]

AT_ONCE = 8
"""Up to so many global batches of samples are evaluated as one batch, whose values need no weighing."""


def counted_loss(function: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any) -> tuple[Any, bool]:
    """Return the loss of one of several batches, and whether tutti's own rules told how many targets it is a mean of.

    A plain loop would need the script to say that. The loss of one batch needs no count.
    """
    value = CountedLoss(function)(model, batch)
    return value, isinstance(value, CountedMean)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainEvaluation:
    """The outcome of one evaluation.

    Attributes:
        values: mean loss and metrics by name.
        samples: number of samples.
        used_counts: whether the loss of several batches was weighed by the counts that tutti reads off it.
    """

    values: dict[str, float]
    samples: int
    used_counts: bool


@torch.no_grad()
def plain_evaluation(
    run: Run,
    source: DataSource,
    metrics: Mapping[str, Metric],
    whole: Mapping[str, Metric],
    batch_size: int | None,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> PlainEvaluation:
    """Evaluate the model in evaluation mode, in one batch or, with many samples or a stream, in several.

    Args:
        run: the run.
        source: the data, not shuffled.
        metrics: by name, functions of a batch's output and target.
        whole: by name, functions of all outputs and all targets.
        batch_size: samples of a batch, where there are several; None: as many as in training.
        autocast: returns the context in which the model runs.
    """
    loss_fn = run.loop.loss_fn
    table = dict(metrics) if loss_fn is None or "loss" in metrics else {"loss": loss_fn, **metrics}
    optional = bool(metrics or whole)
    sums = {name: [0.0, 0.0] for name in table}
    kept: list[tuple[int, Any]] = []
    used_counts, samples = False, 0
    with _evaluation_mode(run.parallel.model):
        for batch, size, single in _batches(run, source, batch_size or run.state.loader.stated_size):
            batch = run.loop.observer.sampled(to_device(batch, run.parallel.world.device))
            with autocast():
                values, output, target = _measured(run, table, batch, counted=not single, optional=optional)
            for name, value in values.items():
                total, count = _total_count(value, size)
                sums[name] = [sums[name][0] + total, sums[name][1] + count]
            used_counts |= any(isinstance(value, CountedMean) for value in values.values())
            samples += size
            if whole:
                kept.append((size, map_tensors(torch.Tensor.cpu, (output, target))))
    results = {name: total / count for name, (total, count) in sums.items() if count}
    if len(kept) == 1:
        results.update({name: float(metric(*kept[0][1])) for name, metric in whole.items()})
    elif whole:
        results.update(whole_set_metrics(run, kept, whole, in_turn=source.is_stream))
    return PlainEvaluation(values=results, samples=samples, used_counts=used_counts)


def _batches(run: Run, source: DataSource, size: int) -> Iterator[tuple[Any, int, bool]]:
    """Yield the batches, the number of samples of each, and whether it is the only one."""
    if source.is_stream:
        stream: DataLoader[Any] = DataLoader(
            source.dataset, batch_size=size, collate_fn=lambda samples: (source.collate(samples), len(samples))
        )
        for batch, count in stream:
            yield batch, count, False
        return
    count = len(source.dataset)
    single = count <= AT_ONCE * size
    keys = [(0, index) for index in range(count)]
    parts = [keys] if single else [keys[start : start + size] for start in range(0, count, size)]
    data = SeededSamples(source.dataset, run.settings.seed, "evaluate", gather=False)
    loader: DataLoader[Any] = DataLoader(data, batch_sampler=parts, collate_fn=Collate(source.collate))
    for batch, part in zip(loader, parts, strict=True):
        yield batch, len(part), single


def _measured(
    run: Run, table: Mapping[str, Metric], batch: Any, *, counted: bool, optional: bool
) -> tuple[dict[str, Any], Any, Any]:
    """Return the values of one batch, its output and its target.

    Args:
        run: the run.
        table: functions of the output and the target, by name.
        batch: the batch.
        counted: whether to return with the loss what it is a mean of.
        optional: whether the loss is left out if the script has no loss function and the model computes none.
    """
    args, kwargs, target = run.loop.unpack(batch)
    model = run.parallel.model
    with noted_means(model) if counted else nullcontext() as means:
        output = model(*args, **kwargs)
        if optional and table.get("loss") is default_loss and loss_in(output) is None:
            table = {name: function for name, function in table.items() if name != "loss"}
        values = {name: looked_up(function)(output, target) for name, function in table.items()}
        if means is not None:
            values = {name: means.weighted(value) for name, value in values.items()}
    return values, output, target


def _total_count(value: Any, samples: int) -> tuple[float, float]:
    """Return what a metric gave for a batch as a total and a count."""
    if hasattr(value, "count") and hasattr(value, "total"):
        return float(value.total), float(value.count)
    value = getattr(value, "total", value)
    if isinstance(value, torch.Tensor) and value.ndim and value.numel() == samples:
        return float(value.double().sum()), float(samples)
    return float(value) * samples, float(samples)


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
