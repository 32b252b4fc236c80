"""Annotations: marks that a script sets on modules. They constrain how modules are placed and change nothing else.

tutti.split(model.head)            parameters are divided over the split axis
tutti.replicate(model.backbone)    whole on every rank of that axis
tutti.stage(model.layers[6:])      a pipeline stage begins here
tutti.shard(model)                 optimizer state, gradients and parameters are divided (ZeRO)
tutti.synchronized(model.vq, "gather")   what its forward writes from the batch is the same on all ranks
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

from torch import nn

from tutti.config.vocabulary import ShardLevel
from tutti.errors import PlanError

M = TypeVar("M", bound=nn.Module)

SplitKind = Literal["split", "column", "row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """One annotation.

    Attributes:
        kind: what is done with the module.
        degree: number of ranks; None for as many as the axis has.
        level: sharding level, for kind "shard".
    """

    kind: Literal["replicate", "split", "column", "row", "stage", "shard"]
    degree: int | None = None
    level: ShardLevel | None = None

    @property
    def words(self) -> str:
        """The name of the function that made it."""
        return f"tutti.{'split' if self.kind in ('column', 'row') else self.kind}"


def replicate(module: M) -> M:
    """Keep `module` whole on every rank of the split axis; return the module.

    Examples:
        >>> model = nn.ModuleDict({"body": nn.Linear(8, 8), "head": nn.Linear(8, 8)})
        >>> _ = split(model)
        >>> _ = replicate(model["head"])
    """
    return _mark(module, Annotation(kind="replicate"))


def split(module: M, *, how: SplitKind = "split", degree: int | None = None) -> M:
    """Divide the parameters of `module` over the split axis; return the module.

    Args:
        module: any module.
        how: column or row for a linear layer; split for the division that suits the module.
        degree: number of ranks of the split axis; None for as many as there are.

    Raises:
        PlanError: `how` or `degree` is invalid.

    Examples:
        >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        >>> _ = split(model[0], how="column")
        >>> _ = split(model[2], how="row")
    """
    if how not in ("split", "column", "row"):
        raise PlanError(f"tutti.split(how={how!r}): use 'split', 'column' or 'row'")
    return _mark(module, Annotation(kind=how, degree=_checked(degree, "split")))


def stage(module: M) -> M:
    """Begin a pipeline stage at `module`, or at the first module of a list; return `module`.

    Raises:
        PlanError: the list is empty.

    Examples:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        >>> _ = stage(model[2])  # under two stages, the second begins here
    """
    first = next(iter(module.children()), None) if isinstance(module, nn.ModuleList | nn.Sequential) else module
    if first is None:
        raise PlanError("tutti.stage got an empty list of modules; name the module at which a stage begins")
    _mark(first, Annotation(kind="stage"))
    return module


def shard(module: M, *, level: ShardLevel = 3, degree: int | None = None) -> M:
    """Divide `module` over the shard axis; return the module.

    Args:
        module: any module.
        level: 1 divides optimizer state, 2 gradients as well, 3 parameters as well.
        degree: number of ranks of the shard axis; None for as many as there are.

    Raises:
        PlanError: `level` or `degree` is invalid.

    Examples:
        >>> model = shard(nn.Linear(8, 8), level=2)
    """
    if level not in (1, 2, 3):
        raise PlanError(f"tutti.shard(level={level!r}): use 1, 2 or 3")
    return _mark(module, Annotation(kind="shard", level=level, degree=_checked(degree, "shard")))


def annotations(module: nn.Module) -> tuple[Annotation, ...]:
    """Return the annotations of this module itself, not those of modules inside it."""
    return tuple(getattr(module, "_tutti_annotations", ()))


def _mark(module: M, annotation: Annotation) -> M:
    """Add an annotation to a module.

    An annotation of a slice of a ModuleList goes to the modules in it, because the slice is not part of the model.
    """
    targets: Iterable[nn.Module] = module.children() if isinstance(module, nn.ModuleList) else [module]
    for target in targets:
        target._tutti_annotations = (*annotations(target), annotation)  # type: ignore[assignment]
    return module


def _checked(degree: int | None, name: str) -> int | None:
    if degree is not None and degree < 1:
        raise PlanError(f"tutti.{name}(degree={degree}): give a number of ranks of 1 or more")
    return degree


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronization:
    """How the state that a module's forward writes is made equal on all ranks; see `synchronized`."""

    how: Literal["gather", "mean", "sum", "first"]
    dim: int = 0


def synchronized(module: M, how: Literal["gather", "mean", "sum", "first"], *, dim: int = 0) -> M:
    """Say how the state that the forward of `module` writes from its batch is made equal on all ranks; return it.

    State is what a forward in training leaves in buffers or parameters: running statistics, a codebook, a queue,
    data-dependent initial values. On one rank nothing changes.

    | how | on several ranks | equal to one device |
    |---|---|---|
    | gather | the module computes the samples of all ranks in every rank, and returns each rank its own | always |
    | mean | after each microbatch, the changes are averaged, weighted by samples | moving averages of a batch's mean |
    | sum | the changes are added up | counts and sums over samples |
    | first | rank 0's changes are taken | no; the ranks agree |

    With mean, sum and first, a forward that reads the state that it has just written still reads its own rank's. In a
    pipeline they combine once a step.

    Args:
        module: any module, before `job.prepare`. Its submodules are part of it.
        how: gather costs as much computation of this module as one device has; the others send its state.
        dim: for gather, the dim of the module's tensors along which samples lie.

    Raises:
        PlanError: `how` is none of these.

    Examples:
        >>> class Counted(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.register_buffer("seen", torch.zeros(()))
        ...     def forward(self, x):
        ...         if self.training:
        ...             self.seen += len(x)
        ...         return x
        >>> import torch
        >>> model = nn.Sequential(synchronized(Counted(), "sum"), nn.Linear(4, 2))
    """
    if how not in ("gather", "mean", "sum", "first"):
        raise PlanError(f"tutti.synchronized(..., {how!r}): use 'gather', 'mean', 'sum' or 'first'")
    setattr(module, _SYNCHRONIZATION, Synchronization(how=how, dim=dim))
    return module


_SYNCHRONIZATION = "_tutti_synchronization"


def read_synchronization(module: nn.Module) -> Synchronization | None:
    """Return what `synchronized` said about a module; None if nothing."""
    return getattr(module, _SYNCHRONIZATION, None)
