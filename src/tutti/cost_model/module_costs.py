"""A model as columns: what the cost functions need repeatedly, computed once for each model."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

import tutti.cost_model.cost_constants as cost_constants
from tutti.config.model import ModelSpec, ModuleSpec, block_of_name
from tutti.cost_model.compute_cost import OpTable, op_table
from tutti.cost_model.worker_speed import Array

T = TypeVar("T")


Flags = NDArray[np.bool_]


class _Same(Generic[T]):
    """A value that equals only itself, so that large models are not compared field by field."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def remembered(size: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Return a decorator that caches the last `size` results of a pure function of a model and small values.

    Models are compared by identity. The cache keeps a reference to them, so that no other model gets the same
    address.
    """

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        @lru_cache(maxsize=size)
        def known(same: _Same[Any], *rest: Any) -> T:
            return function(same.value, *rest)

        @wraps(function)
        def call(model: Any, *rest: Any) -> T:
            return known(_Same(model), *rest)

        return call

    return decorate


def multiplies(module: ModuleSpec) -> bool:
    """Return whether a module has matrix operators, which autocast runs in the lower precision."""
    return any(op.kind in cost_constants.MATRIX_KINDS for op in module.ops)


Indices = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowTable:
    """Values that modules pass on, as columns: (values,) unless stated otherwise. Modules are named by index.

    Attributes:
        made: the module that makes the value.
        nbytes: bytes of one sample.
        fixed_nbytes: bytes that do not depend on the samples.
        trained: whether its gradient comes back.
        used: rows (value, module that uses it).
        kept: rows (value, module that keeps it for backward, first module that keeps it).
        after: rows (container, module after whose work the container's own code keeps activations).
        after_nbytes: for each row of `after`, the bytes of one sample.
    """

    made: Indices
    nbytes: Array
    fixed_nbytes: Array
    trained: Flags
    used: Indices
    kept: Indices
    after: Indices
    after_nbytes: Array

    @property
    def known(self) -> bool:
        """Whether the model has been traced."""
        return len(self.made) > 0

    def crossings(self, stage: Indices, count: int) -> Array:
        """Return (2, 2, stages, stages): bytes that each stage sends to each other stage.

        The first index is 0 for bytes of one sample, and 1 for those of a microbatch whatever its samples. The
        second index is 0 for values sent in forward, and 1 for values whose gradients come back.

        Args:
            stage: (modules,), the stage of each module.
            count: number of stages.
        """
        value, source, target = self.used[:, 0], stage[self.made[self.used[:, 0]]], stage[self.used[:, 1]]
        _, once = np.unique(value * count + target, return_index=True)
        once = once[target[once] > source[once]]
        sent = np.zeros((2, 2, count, count))
        for kind, nbytes in enumerate((self.nbytes, self.fixed_nbytes)):
            for link, sent_nbytes in enumerate((nbytes, np.where(self.trained, nbytes, 0.0))):
                np.add.at(sent[kind, link], (source[once], target[once]), sent_nbytes[value[once]])
        return sent

    def copies(self, stage: Indices, count: int, keeps: Flags) -> Array:
        """Return (stages,): bytes of one sample that a stage keeps although another stage's module counts them.

        Args:
            stage: (modules,), the stage of each module.
            count: number of stages.
            keeps: (modules,), whether a module keeps its input.
        """
        value, at, first = self.kept.T
        here = stage[at]
        more = keeps[at] & (here != stage[first]) & (here != stage[self.made[value]])
        pairs = np.unique(np.stack([value[more], here[more]], axis=1), axis=0)
        return np.bincount(pairs[:, 1], weights=self.nbytes[pairs[:, 0]], minlength=count).astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTable:
    """Columns over the modules of a model. Bytes are as in ModuleSpec, of one sample where they grow with samples.

    Attributes:
        ops: all operators.
        names: dotted names.
        classes: class names.
        autocast: (3, modules), activations, outputs and transient bytes under autocast; None if they were not traced.
        inputs: bytes of inputs whose gradient is wanted.
        halo: (modules, 3), bytes that cross one cut through each spatial dim.
        kinds: how the split axis divides the module; empty where it does not.
        summed: whether the split axis reduces the divided module's output.
        gathered: whether the split axis gathers the divided module's output.
        limit: number of heads or units that the split axis divides; 0: any.
        linear: bytes of the input of a linear layer that `table` can divide.
        first: whether nothing before the module is trained.
        convolved: bytes that the module's largest convolution reads and writes in forward.
        recurred: bytes of the output of a recurrent layer.
        unit: the part of the model, in order of execution, that a pipeline stage or a unit of sharding keeps
            together. Unit 0 is what comes before the first, the model itself included.
        block: whether the module is in a repeated block.
        owner: the module whose parameters a tied module shares, -1 for none.
        flow: the values that modules pass on.
        flops: FLOPs of forward's matrix operators.
        sample_flops: FLOPs of both passes of a sample.
        tokens: tokens of a sample; 0 where it has none.
    """

    ops: OpTable
    names: tuple[str, ...]
    classes: tuple[str, ...]
    parameters: Array
    gradients: Array
    optimizer: Array
    buffers: Array
    activations: Array
    outputs: Array
    autocast: Array | None
    inputs: Array
    routed: Array
    key_value: Array
    halo: Array
    kinds: tuple[str, ...]
    summed: Flags
    gathered: Flags
    limit: NDArray[np.intp]
    groups: NDArray[np.intp]
    sequence: Flags
    expert: Flags
    table: Flags
    linear: Array
    first: Flags
    spatial: Flags
    multiplies: Flags
    convolved: Array
    recurred: Array
    unit: NDArray[np.intp]
    block: Flags
    owner: NDArray[np.intp]
    flow: FlowTable
    flops: Array
    sample_flops: float
    tokens: int

    def __len__(self) -> int:
        return len(self.names)

    @property
    def units(self) -> int:
        return int(self.unit.max(initial=0)) + 1


@remembered(16)
def model_table(model: ModelSpec) -> ModelTable:
    """Return the columns of `model`."""
    modules = model.modules
    names = tuple(module.name for module in modules)
    place = {name: index for index, name in enumerate(names)}

    def column(of: Callable[[ModuleSpec], float]) -> Array:
        return np.array([of(module) for module in modules], dtype=np.float64)

    def flags(of: Callable[[ModuleSpec], bool]) -> Flags:
        return np.array([of(module) for module in modules], dtype=np.bool_)

    blocks = _blocks(modules)
    return ModelTable(
        ops=op_table(model),
        names=names,
        classes=tuple(module.kind for module in modules),
        parameters=column(lambda module: module.parameter_nbytes),
        gradients=column(lambda module: module.gradient_nbytes),
        optimizer=column(lambda module: module.optimizer_nbytes),
        buffers=column(lambda module: module.buffer_nbytes),
        activations=column(lambda module: module.activation_nbytes),
        outputs=column(lambda module: module.output_nbytes),
        autocast=_autocast(modules),
        inputs=column(lambda module: 0.0 if _first(module) else module.input_nbytes),
        routed=column(lambda module: module.routed_nbytes),
        key_value=column(lambda module: module.key_value_nbytes),
        halo=np.array([_halo(module) for module in modules], dtype=np.float64).reshape(len(modules), 3),
        kinds=tuple(module.split for module in modules),
        summed=flags(
            lambda module: module.split in ("row", "vocabulary") or (module.split == "heads" and module.parameters > 0)
        ),
        gathered=flags(lambda module: module.split == "rnn"),
        limit=np.array([module.split_limit for module in modules], dtype=np.intp),
        groups=np.array([module.split_groups for module in modules], dtype=np.intp),
        sequence=flags(lambda module: module.sequence),
        expert=flags(lambda module: module.expert),
        table=flags(lambda module: module.table),
        linear=column(lambda module: module.linear_input_nbytes),
        first=flags(_first),
        spatial=flags(lambda module: module.spatial),
        multiplies=flags(multiplies),
        convolved=column(_convolved),
        recurred=column(lambda module: module.output_nbytes if any(op.kind == "rnn" for op in module.ops) else 0.0),
        unit=_units(blocks, names),
        block=np.array([block >= 0 for block in blocks], dtype=np.bool_),
        owner=np.array([place.get(module.tied_to or "\0", -1) for module in modules], dtype=np.intp),
        flow=flow_table(modules, place),
        flops=column(
            lambda module: sum(op.flops_forward for op in module.ops if op.kind in cost_constants.MATRIX_KINDS)
        ),
        sample_flops=model.flops_forward + model.flops_backward,
        tokens=model.tokens_per_sample,
    )


def _autocast(modules: tuple[ModuleSpec, ...]) -> Array | None:
    """Return (3, modules): activations, outputs and transient bytes under autocast; None where any is unknown."""
    traced = [module.autocast for module in modules if module.autocast is not None]
    if not traced or len(traced) < len(modules):
        return None
    rows = [(one.activation_nbytes, one.output_nbytes, one.transient_nbytes) for one in traced]
    return np.array(rows, dtype=np.float64).T


def _first(module: ModuleSpec) -> bool:
    """Return whether nothing before the module is trained.

    Its backward then computes the gradients of its weights only: as many FLOPs as forward.
    """
    ahead, back = (
        sum(getattr(op, name) for op in module.ops if op.kind in cost_constants.MATRIX_KINDS)
        for name in ("flops_forward", "flops_backward")
    )
    return 0 < back < 1.5 * ahead and module.gradient_nbytes > 0


def _convolved(module: ModuleSpec) -> float:
    """Return the bytes that a module's largest convolution reads and writes in one call of forward."""
    return max((op.nbytes_forward / max(op.calls, 1) for op in module.ops if op.kind == "conv"), default=0.0)


def _halo(module: ModuleSpec) -> tuple[float, ...]:
    """Return the bytes that cross one cut through each of three spatial dims."""
    given = module.halo_nbytes_by_dim or (module.halo_nbytes_per_cut,) * 3
    return (*given, 0.0, 0.0, 0.0)[:3]


def _blocks(modules: tuple[ModuleSpec, ...]) -> list[int]:
    """Return the block of each module as the model says, otherwise the entry of its outermost list; -1 for none."""
    if any(module.block >= 0 for module in modules):
        return [module.block for module in modules]
    numbers: dict[str, int] = {}
    blocks = [block_of_name(module.name) for module in modules]
    return [numbers.setdefault(block, len(numbers)) if block else -1 for block in blocks]


def _units(blocks: list[int], names: tuple[str, ...]) -> NDArray[np.intp]:
    """Return a unit for each block and for each module outside of blocks; the model itself is in unit 0."""
    units, of_block, last = [], {}, 0
    for block, name in zip(blocks, names, strict=True):
        if not name:
            units.append(0)
            continue
        if block < 0 or block not in of_block:
            last += 1
            if block >= 0:
                of_block[block] = last
            units.append(last)
        else:
            units.append(of_block[block])
    return np.array(units, dtype=np.intp)


def flow_table(modules: tuple[ModuleSpec, ...], place: Mapping[str, int]) -> FlowTable:
    """Return the columns of the values of `modules`, whose indices by name are `place`."""
    values = [(place[module.name], passed) for module in modules for passed in module.passes_on]
    after = [(place[m.name], place[name], nbytes) for m in modules for name, nbytes in m.kept_after if name in place]
    used = [(at, place[name]) for at, (_, passed) in enumerate(values) for name in passed.to if name in place]
    kept = [
        (at, place[name], place[passed.kept[0]])
        for at, (_, passed) in enumerate(values)
        if passed.kept and passed.kept[0] in place
        for name in passed.kept[1:]
        if name in place
    ]
    return FlowTable(
        made=np.array([made for made, _ in values], dtype=np.intp),
        nbytes=np.array([passed.nbytes for _, passed in values], dtype=np.float64),
        fixed_nbytes=np.array([passed.fixed_nbytes for _, passed in values], dtype=np.float64),
        trained=np.array([passed.trained for _, passed in values], dtype=np.bool_),
        used=np.array(used, dtype=np.intp).reshape(-1, 2),
        kept=np.array(kept, dtype=np.intp).reshape(-1, 3),
        after=np.array([row[:2] for row in after], dtype=np.intp).reshape(-1, 2),
        after_nbytes=np.array([row[2] for row in after], dtype=np.float64),
    )
