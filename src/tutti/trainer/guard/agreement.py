"""Compares what must be equal on all ranks: hyperparameters, modules, modes, the samples' order and the weights."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from tutti.data.microbatches import leaves
from tutti.data.samples import SeededSamples
from tutti.errors import RankMismatchError
from tutti.trainer.guard.findings import code_of, has_whole_modules, warn
from tutti.trainer.run_state import Run
from tutti.trainer.state_check import Summary, summaries_of

_UNCOMPARED = frozenset({"params", "param_names", "fused", "foreach"})

FEW_TRAINED = 0.01
"""Share of trained parameters below which the run says how many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """What one rank has, by name; ranks are compared name by name.

    Attributes:
        hyperparameters: of each optimizer's groups.
        modules: type and settings of each module.
        modes: whether each module trains.
        loss: name and code of the loss function.
        order: digests of the global batch's and the epoch's samples.
        place: ranks with equal places hold the same weights.
        weights: a checksum of each parameter.
        data_index: ranks with equal ones compute the same samples.
        batch: digest of this rank's microbatches; None where ranks take parts of it.
    """

    hyperparameters: dict[str, Any]
    modules: dict[str, str]
    modes: dict[str, bool]
    loss: dict[str, str]
    order: dict[str, str]
    place: int
    weights: dict[str, int] = field(repr=False)
    data_index: int
    batch: str | None


def check_agreement(run: Run, loss: Callable[..., Any], pieces: list[Any]) -> None:
    """Compare the ranks, and warn of a model that does not train. Collective.

    Raises:
        RankMismatchError: on every rank, naming what differs, the ranks and the remedy.
    """
    views: list[RankView] = run.loop.watch.gather("agreement of ranks", _view(run, loss, pieces))
    _warn_of_modes(run, views)
    difference = next(_differences(views), None)
    if difference is not None:
        raise RankMismatchError(f"step {run.state.progress.step + 1}: {difference}")
    _check_weights(run, views)


def check_first_sample(run: Run) -> None:
    """Check that the first sample has the same values on all ranks, if reading it here leaves no trace. Collective.

    A data set that draws random numbers of its own is not judged, nor one that workers read: it may open files when it
    is first read, and later workers would share them.

    Raises:
        RankMismatchError: on every rank.
    """
    loader = run.state.loader
    parts = run.parallel.mesh.degree("space", "context") > 1  # which a data set may read by itself
    if parts or loader.source.is_stream or loader.source.options.get("num_workers"):
        return
    order = loader.epoch_batches(loader.epoch)[0]
    digest = _sample_digest(loader.source.dataset, run.settings.seed, int(order[0]))
    digests = run.loop.watch.gather("first sample", digest)
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None and None not in digests:
        raise RankMismatchError(
            f"sample {int(order[0])} of the data set has other values on rank {other} than on rank 0; build the data "
            "set from the same data in the same order on all ranks, and seed whatever it draws or shuffles"
        )


def _sample_digest(dataset: Any, seed: int, index: int) -> str | None:
    """The digest of a sample's numbers and strings; None if reading it twice gives different values, or fails."""
    samples = SeededSamples(dataset, seed, "sample", gather=False)
    try:
        first, second = (_values_digest(samples[0, index]) for _ in range(2))
    except Exception:  # the script's own code; the loader reports it where it matters
        return None
    return first if first == second else None


def _view(run: Run, loss: Callable[..., Any], pieces: list[Any]) -> RankView:
    parallel, whole = run.parallel, has_whole_modules(run)
    modules = dict(parallel.model.named_modules()) if whole else {}
    code = code_of(loss)
    replicas = ("replicate", "shard") if parallel.plan.sharding.level == 1 else ("replicate",)
    loader = run.state.loader
    epoch = {} if loader.source.is_stream else {"the epoch": loader.epoch_batches(loader.epoch)[0]}
    parts = parallel.mesh.degree("space", "context") > 1
    return RankView(
        hyperparameters={
            f"{key!r} of group {number} of {name}": _plain(value)
            for name, optimizer in _named(parallel.optimizers).items()
            for number, group in enumerate(optimizer.param_groups)
            for key, value in group.items()
            if key not in _UNCOMPARED and not callable(value)
        },
        modules={name: _settings(module) for name, module in modules.items()},
        modes={name: module.training for name, module in modules.items()},
        loss={} if not hasattr(code, "co_code") else {"the loss function": f"{code.co_name} {_digest(code.co_code)}"},
        order={
            name: _digest(np.ascontiguousarray(indices).tobytes())
            for name, indices in {"the global batch": loader.indices, **epoch}.items()
        },
        place=parallel.mesh.ranks(*replicas)[0],
        weights=_checksums(parallel.model),
        data_index=parallel.mesh.data_index,
        batch=None if parts else _values_digest(pieces),
    )


def _differences(views: list[RankView]) -> Iterator[str]:
    """Yield what differs between rank 0 and each other rank, most telling first."""
    for rank, view in enumerate(views):
        for name, first, other in _unequal(views[0].hyperparameters, view.hyperparameters):
            yield (
                f"{name} is {first} on rank 0 and {other} on rank {rank}, so weights would drift apart; set "
                "hyperparameters on all ranks alike"
            )
        for name, first, other in _unequal(views[0].modules, view.modules):
            yield (
                f"module {name or 'the model'!r} is {first} on rank 0 and {other} on rank {rank}; build the same model "
                "on every rank"
            )
        for name, first, other in _unequal(views[0].modes, view.modes):
            yield (
                f"module {name or 'the model'!r} is in {_mode(first)} mode on rank 0 and in {_mode(other)} mode on "
                f"rank {rank}; call train() and eval() on all ranks alike"
            )
        for _, first, other in _unequal(views[0].loss, view.loss):
            names = first.split()[0], other.split()[0]
            yield (
                f"the loss function is {names[0]!r} on rank 0 and {names[1]!r}, of other code, on rank {rank}; train "
                "with one loss on all ranks"
            )
        for name, _, _ in _unequal(views[0].order, view.order):
            yield (
                f"the order of samples in {name} differs between rank 0 and rank {rank}, so samples are seen twice or "
                "never; seed the sampler the same on every rank"
            )
        partner = next(number for number, other in enumerate(views) if other.data_index == view.data_index)
        if view.batch != views[partner].batch:
            yield (
                f"ranks {partner} and {rank} compute the same samples together, but have read other values; make what "
                "the dataset and collate_fn return depend on the sample only, not on the rank"
            )


def _check_weights(run: Run, views: list[RankView]) -> None:
    """Refuse replicas whose weights differ by more than rounding. Collective."""
    names = set()
    for view in views:
        first = next(other for other in views if other.place == view.place)
        names |= {name for name, _, _ in _unequal(first.weights, view.weights)}
    if not names:
        return
    summaries: list[dict[str, Summary]] = run.loop.watch.gather(
        "weights", summaries_of(run.parallel.model, sorted(names))
    )
    for name in sorted(names):
        for rank, view in enumerate(views):
            origin = next(number for number, other in enumerate(views) if other.place == view.place)
            expected, actual = summaries[origin].get(name), summaries[rank].get(name)
            if expected is not None and actual is not None and not expected.agrees(actual):
                raise RankMismatchError(
                    f"step {run.state.progress.step + 1}: the weights of {name!r} differ between the replicas on ranks "
                    f"{origin} and {rank}; change weights on all ranks alike, and only between steps"
                )


def _warn_of_modes(run: Run, views: list[RankView]) -> None:
    if all(view.modes and not any(view.modes.values()) for view in views):
        warn(
            run,
            f"{type(run.parallel.model).__name__} is in evaluation mode in training steps on all ranks, so dropout is "
            "off and norms do not follow the data; models from from_pretrained start in it, and model.eval() stays; "
            "call model.train()",
        )


def say_few_trained(run: Run) -> None:
    """Say how many parameters are trained if nearly all are frozen; adapters and probes intend it."""
    if not has_whole_modules(run):
        return
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in run.parallel.model.parameters()]
    total, trained = sum(size for size, _ in sizes), sum(size for size, trains in sizes if trains)
    if trained < FEW_TRAINED * total:
        run.output.screen.say(f"{trained:,} of {total:,} parameters are trained ({trained / total:.2%})")


def _unequal(first: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(name, value, other[name]) for name, value in first.items() if name in other and other[name] != value]


def _named(optimizers: Sequence[Optimizer]) -> dict[str, Optimizer]:
    """The optimizers by the names of their classes, with their numbers if there are several."""
    numbers = [f" (optimizer {number})" if len(optimizers) > 1 else "" for number in range(len(optimizers))]
    return {type(each).__name__ + number: each for each, number in zip(optimizers, numbers, strict=True)}


def _plain(value: Any) -> Any:
    """A hyperparameter as text, which is equal where the value is."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    return repr(value) if isinstance(value, int | float | str | bool | tuple | list | None) else type(value).__name__


def _settings(module: nn.Module) -> str:
    """The type of a module; with the settings of those of torch, which are numbers."""
    own = type(module).__module__.startswith("torch.nn.") and not list(module.children())
    return f"{type(module).__name__}({module.extra_repr() if own else ''})"


def _mode(training: bool) -> str:
    return "training" if training else "evaluation"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _checksums(model: nn.Module) -> dict[str, int]:
    """The sum of the bits of each parameter that this rank holds, read as integers."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    held = {name: p.detach() for name, p in model.named_parameters() if not p.is_meta and p.numel()}
    real = [torch.view_as_real(value) if value.is_complex() else value for value in held.values()]
    sums = [value.contiguous().view(kinds[value.element_size()]).sum(dtype=torch.int64).cpu() for value in real]
    return dict(zip(held, torch.stack(sums).tolist(), strict=True)) if sums else {}


def _values_digest(values: Any) -> str:
    """The digest of all numbers and strings in nested containers."""
    hashed = hashlib.blake2b(digest_size=8)
    for leaf in leaves(values):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            hashed.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            hashed.update(np.ascontiguousarray(leaf).tobytes())
        elif isinstance(leaf, str | bytes | bool | int | float | complex | np.generic):
            hashed.update(repr(leaf).encode())
    return hashed.hexdigest()
