"""Evaluation: every sample counts exactly once, on any number of ranks."""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from tutti.config.partitioning import cut
from tutti.data.device_copies import to_device
from tutti.data.microbatches import leaves, map_tensors, one_per_sample
from tutti.data.samples import Collate, DataSource, SeededSamples
from tutti.data.share_loader import worker_batches
from tutti.errors import PlanError, ScriptError
from tutti.parallel.loss_means import LossMeans, looked_up, noted_means
from tutti.parallel.losses import LossSum, Weighted, default_loss, loss_in
from tutti.parallel.mixed_precision import autocast
from tutti.parallel.pipeline.placeholders import is_unknown
from tutti.trainer.guard import EvaluationWatch
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
        ScriptError: a metric returned something that cannot be averaged, or `whole` cannot join the batches.
    """
    table = _metric_functions(run, metrics)
    sums = torch.zeros(len(table), 2, dtype=torch.float64, device=run.parallel.world.device)
    samples, kept = 0, []
    watch = EvaluationWatch(run)
    with _evaluation_mode(run.parallel.model), run.parallel.scope.evaluation():
        for batch, size, counts in _evaluation_batches(run, source, batch_size):
            run.parallel.scope.counts = counts
            batch = run.loop.observer.sampled(to_device(batch, run.parallel.world.device))
            with (
                watch.batch(),
                run.parallel.sequences.part(batch) as part,
                autocast(run.parallel.plan.precision, run.parallel.world.device),
            ):
                watch.compare(part, size)
                args, kwargs, target = run.loop.unpack(part)
                with noted_means(run.parallel.model) as means:
                    output = run.state.consistency.combine_predictions(run.forward(*args, **kwargs))
                    # A loss that reads parts of parameters gathers them with the ranks whose batch counts.
                    if not run.gives_output or not (counts or run.parallel.reads.needed):
                        continue
                    rows = []
                    # The loss is of this rank's part of the sequences and added up; metrics may need whole ones.
                    if "loss" in table and "loss" not in metrics:
                        wanted = not (metrics or whole)
                        with run.parallel.reads.active():
                            rows = [_loss_and_count(table["loss"], output, target, size, means, wanted=wanted)]
                if metrics or whole:
                    output, target = run.parallel.sequences.join((output, target))
                with run.parallel.reads.active(), noted_means(run.parallel.model) as means:
                    values_of_batch = {
                        name: means.weighted(looked_up(metric)(output, target)) for name, metric in metrics.items()
                    }
                if not counts:
                    continue
                rows += [_total_count(name, value, size) for name, value in values_of_batch.items()]
            sums += torch.tensor(rows, dtype=torch.float64, device=sums.device).reshape(len(table), 2)
            samples += size
            if whole:
                kept.append((size, map_tensors(_to_cpu, (output, target))))
    run.loop.batch_state.evaluated()
    watch.report()
    run.parallel.world.sum(sums)
    evaluated = int(run.parallel.world.sum(torch.tensor([int(run.gives_output)], device=run.parallel.world.device))[0])
    # Ranks that computed the outputs of the same samples.
    copies = evaluated // run.state.consistency.evaluation_share(run.parallel)[1]
    counted = int(run.parallel.world.sum(torch.tensor([samples], device=run.parallel.world.device))[0]) // copies
    values = {name: float(total / count) for name, (total, count) in zip(table, sums.tolist(), strict=True) if count}
    values.update(whole_set_metrics(run, kept, whole, in_turn=source.is_stream))
    return values, counted


def _loss_and_count(
    loss_fn: Metric, output: Any, target: Any, size: int, means: LossMeans, *, wanted: bool
) -> tuple[float, float]:
    """Return (total, count) of the loss; of none, if no loss is `wanted` and the script gave no loss function."""
    if loss_fn is default_loss and not wanted and loss_in(output) is None:
        return 0.0, 0.0
    tensors = [tensor for tensor in leaves(output) if isinstance(tensor, torch.Tensor) and not tensor.is_inference()]
    versions = [tensor._version for tensor in tensors]
    loss = loss_fn(output, target)
    weighted = means.weighted(loss)
    unchanged = versions == [tensor._version for tensor in tensors]
    if weighted is loss and means.means and loss_fn is not default_loss and unchanged:
        # Without gradients, only a mean itself is known. The graph of the loss tells which means it is made of.
        with torch.enable_grad():
            weighted = means.weighted(loss_fn(map_tensors(_with_graph, output), target))
    return _total_count("loss", weighted, size)


def _with_graph(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that autograd follows, where it can."""
    differentiable = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().clone().requires_grad_().clone() if differentiable else tensor


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


def _evaluation_batches(run: Run, source: DataSource, batch_size: int) -> Iterator[tuple[Any, int, bool]]:
    """Yield this rank's batches, the number of samples of each, and whether it counts.

    A rank has a contiguous share of a map data set, or every n-th batch of a stream. If forward communicates with other
    data-parallel ranks, ranks with fewer batches compute further ones that do not count.
    """
    rank, size = run.state.consistency.evaluation_share(run.parallel)
    collective_forward = run.parallel.mesh.degree("shard", "expert", "table") > 1
    if source.is_stream:
        number, batch, count = 0, None, 0
        counted_batches = DataLoader(source.dataset, batch_size=batch_size, collate_fn=_CollateCounted(source.collate))
        for number, (batch, count) in enumerate(counted_batches, 1):
            if (number - 1) % size == rank:
                yield batch, count, True
        if collective_forward and 0 < number % size <= rank:
            yield batch, count, False
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
    batches = worker_batches(loader, run.state.loader.timeout_s)
    for number, (batch, part) in enumerate(zip(batches, keys, strict=True)):
        yield batch, len(part), number < counted


@dataclass(frozen=True, slots=True)
class _CollateCounted:
    """Collates samples, and counts them."""

    collate: Callable[[Any], Any]

    def __call__(self, samples: Any) -> tuple[Any, int]:
        return self.collate(samples), len(samples)


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


def _total_count(name: str, value: Any, samples: int) -> tuple[float, float]:
    """Return (total, count) of a metric over one batch of `samples`."""
    if is_unknown(value.total if isinstance(value, Weighted) else value):
        raise PlanError(
            f"mesh.stage: the metric {name!r} uses what a forward hook has kept, which is on another stage; return it "
            "from the model's forward, or do not use it in evaluation mode"
        )
    if isinstance(value, Weighted):
        return float(torch.as_tensor(value.total).detach()), float(torch.as_tensor(value.count).detach())
    value = value.total if isinstance(value, LossSum) else value
    value = value.detach() if isinstance(value, torch.Tensor) else value
    if isinstance(value, torch.Tensor) and value.numel() == samples and value.ndim:
        return float(value.double().sum()), float(samples)
    if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return float(value) * samples, float(samples)
    shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    raise ScriptError(
        f"metric {name!r} returned {shape} for {samples} samples; return one value per sample, their mean, or "
        "tutti.Weighted(total, count)"
    )


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()


def whole_set_metrics(
    run: Run, kept: list[tuple[int, Any]], whole: Mapping[str, Metric], *, in_turn: bool
) -> dict[str, float]:
    """Gather all outputs and targets on every rank, and compute the metrics of the whole data set. Collective.

    Args:
        run: the run.
        kept: the number of samples, outputs and targets of this rank's batches.
        whole: the metrics by name.
        in_turn: whether ranks had batches of the data in turn, rather than contiguous shares.
    """
    if not whole:
        return {}
    share = run.state.consistency.evaluation_share(run.parallel)[0]
    everyone = {rank: parts for rank, parts in run.parallel.world.gather((share, kept)) if parts}
    of_ranks = [parts for _, parts in sorted(everyone.items())]
    if in_turn:
        parts = [part for turn in zip_longest(*of_ranks) for part in turn if part is not None]
    else:
        parts = [part for rank_parts in of_ranks for part in rank_parts]
    counts = [count for count, _ in parts]
    masked = _tells_padding([target for _, (_, target) in parts])
    output = _joined([output for _, (output, _) in parts], counts, masked=masked)
    target = _joined([target for _, (_, target) in parts], counts, masked=masked)
    with run.parallel.reads.active():
        return {name: float(metric(output, target)) for name, metric in whole.items()}


_IGNORED = -100
"""The target of a position that does not count (torch's cross entropy)."""


def _joined(values: list[Any], counts: list[int], *, masked: bool) -> Any:
    """Join what batches of `counts` samples hold: tensors along samples, lists of samples, and containers entry-wise.

    Where `masked`, targets say which positions are padding, so batches that are padded to other lengths are padded on.
    """
    first = values[0]

    def entries(parts: list[Any]) -> Any:
        return _joined(parts, counts, masked=masked)

    if isinstance(first, torch.Tensor):
        return _joined_tensors(values, counts, masked=masked) if first.ndim else torch.stack(values)
    if isinstance(first, Mapping):
        return _like(first, {key: entries([value[key] for value in values]) for key in first})
    if isinstance(first, list) and all(one_per_sample(v, n) for v, n in zip(values, counts, strict=True)):
        return [entry for value in values for entry in value]
    if isinstance(first, tuple | list):
        columns = [entries(list(column)) for column in zip(*values, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    if dataclasses.is_dataclass(first):
        made: Any = copy.copy(first)
        for entry in dataclasses.fields(first):
            object.__setattr__(made, entry.name, entries([getattr(value, entry.name) for value in values]))
        return made
    return None if first is None else values


def _like(first: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    """Return a mapping of the type of `first`, if that can be filled, with other entries."""
    if not isinstance(first, MutableMapping):
        return entries
    made = copy.copy(first)
    for key, value in entries.items():
        made[key] = value
    return made


def _joined_tensors(values: list[torch.Tensor], counts: list[int], *, masked: bool) -> torch.Tensor:
    """Concatenate tensors along their samples, which are in dim 0 or, with time first, in dim 1."""
    time_first = all(value.shape[0] != count for value, count in zip(values, counts, strict=True)) and all(
        value.ndim > 1 and value.shape[1] == count for value, count in zip(values, counts, strict=True)
    )
    dim = int(time_first)
    longest = [max(sizes) for sizes in zip(*(value.shape for value in values), strict=True)]
    ragged = any(value.shape[d] != longest[d] for value in values for d in range(value.ndim) if d != dim)
    if not ragged:
        return torch.cat(values, dim)
    if not masked:
        raise ScriptError(
            f"metrics of the whole data set need outputs and targets of one length, but batches have "
            f"{tuple(values[0].shape)} and others, and no target is {_IGNORED}, which would say what is padding; pad "
            f"all batches to one length or pad targets with {_IGNORED} in collate_fn, or use metrics= with "
            "tutti.Weighted(total, count)"
        )
    filling = _IGNORED if any(bool((value == _IGNORED).any()) for value in values) else 0
    padded = []
    for value in values:
        shape = [value.shape[d] if d == dim else longest[d] for d in range(value.ndim)]
        whole = value.new_full(shape, filling)
        whole[tuple(slice(size) for size in value.shape)] = value
        padded.append(whole)
    return torch.cat(padded, dim)


def _tells_padding(targets: list[Any]) -> bool:
    """Return whether some integer target of -100 or an attention mask says which positions are padding."""
    if any(isinstance(target, Mapping) and "attention_mask" in target for target in targets):
        return True
    tensors = (leaf for target in targets for leaf in leaves(target) if isinstance(leaf, torch.Tensor))
    return any(not tensor.is_floating_point() and bool((tensor == _IGNORED).any()) for tensor in tensors)
