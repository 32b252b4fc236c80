"""Evaluation: every sample counts exactly once, on any number of ranks."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from tutti.config.partitioning import cut
from tutti.data.batches import to_device
from tutti.data.samples import Collate, DataSource, SeededSamples
from tutti.errors import PlanError, ScriptError
from tutti.parallel.loss_means import noted_means
from tutti.parallel.losses import LossSum, Weighted
from tutti.parallel.mixed_precision import autocast
from tutti.parallel.pipeline.placeholders import is_unknown
from tutti.trainer.run_state import Run

Metric = Callable[[Any, Any], Any]
"""fn(output, target) -> one value per sample, their mean, or a Weighted."""


@torch.no_grad()
def evaluate(
    run: Run, source: DataSource, metrics: Mapping[str, Metric], whole: Mapping[str, Metric], batch_size: int
) -> tuple[dict[str, float], int]:
    """Evaluate the model on all samples of `source`. Collective.

    Args:
        run: the run; its model is put in evaluation mode meanwhile.
        source: the data, not shuffled.
        metrics: by name, functions of a batch's output and target, whose mean over samples is taken.
        whole: by name, functions of all outputs and all targets in the order of the data set (F1, AUC).
        batch_size: samples that a rank computes at once.

    Returns:
        The mean loss and metrics by name, the same on every rank, and the number of samples.

    Raises:
        ScriptError: a metric returned something that cannot be averaged, or a batch has no tensor.
    """
    table = _metric_functions(run, metrics)
    sums = torch.zeros(len(table), 2, dtype=torch.float64, device=run.parallel.world.device)
    samples, kept = 0, []
    with _evaluation_mode(run.parallel.model):
        for batch, counts in _evaluation_batches(run, source, batch_size):
            run.parallel.scope.counts = counts
            batch = to_device(batch, run.parallel.world.device)
            with (
                run.parallel.sequences.part(batch) as part,
                autocast(run.parallel.plan.precision, run.parallel.world.device),
            ):
                args, kwargs, target = run.loop.unpack(part)
                with noted_means(run.parallel.model) as means:
                    output = run.state.consistency.combine_predictions(run.forward(*args, **kwargs))
                    if not counts or not run.gives_output:
                        continue
                    size = _batch_size(batch)
                    rows = []
                    # The loss is of this rank's part of the sequences and added up; metrics may need whole ones.
                    if "loss" in table and "loss" not in metrics:
                        rows = [_total_count("loss", means.weighted(table["loss"](output, target)), size)]
                if metrics or whole:
                    output, target = run.parallel.sequences.join((output, target))
                rows += [_total_count(name, metric(output, target), size) for name, metric in metrics.items()]
            sums += torch.tensor(rows, dtype=torch.float64, device=sums.device).reshape(len(table), 2)
            samples += size
            if whole:
                kept.append(pytree.tree_map(_to_cpu, (output, target)))
    run.parallel.world.sum(sums)
    evaluated = int(run.parallel.world.sum(torch.tensor([int(run.gives_output)], device=run.parallel.world.device))[0])
    # Ranks that computed the outputs of the same samples.
    copies = evaluated // run.state.consistency.evaluation_share(run.parallel)[1]
    counted = int(run.parallel.world.sum(torch.tensor([samples], device=run.parallel.world.device))[0]) // copies
    values = {name: float(total / count) for name, (total, count) in zip(table, sums.tolist(), strict=True) if count}
    values.update(_whole_set_metrics(run, kept, whole))
    return values, counted


def samples_at_once(run: Run) -> int:
    """Return how many samples a rank computes at once in training, at most 256: evaluation needs no more memory."""
    batch, tokens = run.parallel.plan.batch, run.state.loader.source.tokens
    samples: float = batch.global_batch_size
    if batch.unit == "tokens" and tokens:
        samples /= tokens if isinstance(tokens, int) else sum(tokens) / len(tokens)
    return max(1, min(math.ceil(samples / (batch.num_microbatches * run.parallel.mesh.data_degree)), 256))


def _metric_functions(run: Run, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    table = dict(metrics)
    if run.loop.loss_fn is not None and "loss" not in table:
        table = {"loss": run.loop.loss_fn, **table}
    return table


def _evaluation_batches(run: Run, source: DataSource, batch_size: int) -> Iterator[tuple[Any, bool]]:
    """Yield this rank's batches, and whether each counts.

    A rank has a contiguous share of a map data set, or every n-th batch of a stream. If forward communicates with other
    data-parallel ranks, ranks with fewer batches compute further ones that do not count.
    """
    rank, size = run.state.consistency.evaluation_share(run.parallel)
    collective_forward = run.parallel.mesh.degree("shard", "expert", "table") > 1
    if source.is_stream:
        number, batch = 0, None
        for number, batch in enumerate(DataLoader(source.dataset, batch_size=batch_size, collate_fn=source.collate), 1):
            if (number - 1) % size == rank:
                yield batch, True
        if collective_forward and 0 < number % size <= rank:
            yield batch, False
        return
    bounds = cut(len(source.dataset), size)
    indices = np.arange(bounds[rank], bounds[rank + 1])
    keys = [[(0, int(i)) for i in indices[s : s + batch_size]] for s in range(0, len(indices), batch_size)]
    counted = len(keys)
    if collective_forward:
        max_batches = -(-max(stop - start for start, stop in pairwise(bounds)) // batch_size)
        keys += [[(0, min(bounds[rank], len(source.dataset) - 1))]] * (max_batches - counted)
    gather = source.collate is Collate().function
    samples = SeededSamples(source.dataset, run.settings.seed, "evaluate", gather=gather)
    options = {k: v for k, v in source.options.items() if k != "persistent_workers"}
    loader = DataLoader(samples, batch_sampler=keys, collate_fn=Collate(source.collate), **options)
    yield from ((batch, number < counted) for number, batch in enumerate(loader))


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every module in evaluation mode, and restore each module's mode afterwards (the user may freeze some)."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _batch_size(batch: Any) -> int:
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            return int(leaf.shape[0])
    raise ScriptError(
        "evaluate got a batch without a tensor; collate samples into tensors whose first dimension is samples"
    )


def _total_count(name: str, value: Any, samples: int) -> tuple[float, float]:
    """Return (total, count) of a metric over one batch of `samples`."""
    if is_unknown(value.total if isinstance(value, Weighted) else value):
        raise PlanError(
            f"mesh.stage: the metric {name!r} uses what a forward hook has kept, which is on another stage; return it "
            "from the model's forward, or do not use it in evaluation mode"
        )
    if isinstance(value, Weighted):
        return float(value.total), float(value.count)
    value = value.total if isinstance(value, LossSum) else value
    if isinstance(value, torch.Tensor) and value.numel() == samples and value.ndim:
        return float(value.double().sum()), float(samples)
    if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return float(value) * samples, float(samples)
    shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    raise ScriptError(
        f"metric {name!r} returned {shape} for {samples} samples; return one value per sample, their mean, or "
        "tutti.Weighted(total, count)"
    )


def _to_cpu(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf


def _whole_set_metrics(run: Run, kept: list[Any], whole: Mapping[str, Metric]) -> dict[str, float]:
    """Gather all outputs and targets on every rank, and compute the metrics of the whole data set. Collective."""
    if not whole:
        return {}
    everyone = run.parallel.world.gather((run.state.consistency.evaluation_share(run.parallel)[0], kept))
    parts = [part for _, rank_parts in sorted(dict(everyone).items()) for part in rank_parts]
    leaves, structure = zip(*(pytree.tree_flatten(part) for part in parts), strict=True)
    joined = [
        torch.cat(column) if isinstance(column[0], torch.Tensor) else column for column in zip(*leaves, strict=True)
    ]
    output, target = pytree.tree_unflatten(joined, structure[0])
    return {name: float(metric(output, target)) for name, metric in whole.items()}
