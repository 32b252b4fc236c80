"""Metrics that are objects with a state, as in torchmetrics and torcheval: `reset`, `update`, `compute`.

Their states need not be sums over samples, so ranks cannot add them up. They are given all outputs and targets of the
data set in one update, in its order, and so compute on any number of ranks what they compute on one.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tutti.data.microbatches import map_tensors
from tutti.errors import ScriptError

MetricFunction = Callable[[Any, Any], Any]
Metrics = dict[str, MetricFunction]


def as_functions(metrics: Mapping[str, Any], whole: Mapping[str, Any]) -> tuple[Metrics, Metrics]:
    """Return both kinds of metrics as functions; objects with a state are computed on the whole data set.

    Args:
        metrics: by name, metrics of a batch, or objects.
        whole: by name, metrics of the whole data set, or objects.

    Raises:
        ScriptError: something is no metric, or two metrics have one name.
    """
    of_batches: Metrics = {}
    of_all: Metrics = {}
    for own, given in ((of_batches, metrics), (of_all, whole)):
        for name, metric in _members(given):
            if name in of_batches or name in of_all:
                raise ScriptError(f"two metrics are called {name!r}; give each a name of its own")
            if isinstance(metric, type):
                raise ScriptError(f"metric {name!r} is the class {metric.__name__}; pass an object of it")
            if _has(metric, "update", "compute"):
                of_all[name] = _function_of(name, metric)
            elif callable(metric):
                own[name] = metric
            else:
                raise ScriptError(
                    f"metric {name!r} is of type {type(metric).__name__}; pass a function (output, target), or an "
                    "object with reset, update(output, target) and compute"
                )
    return of_batches, of_all


def _members(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the metrics by name; those of a torchmetrics.MetricCollection one by one."""
    for name, metric in given.items():
        if isinstance(metric, nn.ModuleDict) and _has(metric, "update", "compute"):
            yield from ((f"{name}_{member}", part) for member, part in metric.items())
        else:
            yield name, metric


def _has(metric: Any, *methods: str) -> bool:
    return all(callable(getattr(metric, method, None)) for method in methods)


def _function_of(name: str, metric: Any) -> MetricFunction:
    if not _has(metric, "reset"):
        raise ScriptError(
            f"metric {name!r} ({type(metric).__name__}) has update and compute, but no reset, so that a second "
            "evaluation would count the first one too; add reset(), or pass a function as whole="
        )

    def compute(output: Any, target: Any) -> float:
        device = getattr(metric, "device", None)
        if isinstance(device, torch.device):
            output, target = map_tensors(lambda tensor: tensor.to(device), (output, target))
        with _without_exchange(metric):
            metric.reset()
            metric.update(output, target)
            value = metric.compute()
        return _number(name, value)

    return compute


def _number(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        what = f"shape {tuple(value.shape)}" if hasattr(value, "shape") else f"a {type(value).__name__}"
        raise ScriptError(
            f"metric {name!r}: compute() returned {what}; it must return one number, such as an average over classes"
        ) from None


@contextmanager
def _without_exchange(metric: Any) -> Iterator[None]:
    """Keep torchmetrics from adding up ranks' states, each of which has seen all samples already."""
    changed = []
    for part in metric.modules() if isinstance(metric, nn.Module) else (metric,):
        for flag in ("sync_on_compute", "_to_sync"):
            if getattr(part, flag, None) is True:
                setattr(part, flag, False)
                changed.append((part, flag))
    try:
        yield
    finally:
        for part, flag in changed:
            setattr(part, flag, True)
