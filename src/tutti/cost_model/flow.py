"""What a model's modules pass on to later ones, as columns, and what of it crosses the cuts of a pipeline."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tutti.config.model import ModuleSpec
from tutti.cost_model.worker import Array

Indices = NDArray[np.intp]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowTable:
    """Values that modules pass on, (values,): the module that each is `made` at, bytes of one sample and of a
    microbatch whatever its samples, whether it is `trained`. `used`: rows (value, module at which it is used);
    `kept`: rows (value, module that keeps it for backward, the first that does). `after`: rows (container, module at
    whose work it keeps), with bytes of one sample in `after_nbytes`. Modules by their index."""

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
        """Whether somebody followed the model."""
        return len(self.made) > 0

    def crossings(self, stage: Indices, count: int) -> Array:
        """(2, 2, stages, stages): bytes of one sample, and of a microbatch whatever its samples, that travel from each
        of `count` stages to each later one in forward, and of those whose gradients come back. `stage`: of modules."""
        value, source, target = self.used[:, 0], stage[self.made[self.used[:, 0]]], stage[self.used[:, 1]]
        _, once = np.unique(value * count + target, return_index=True)
        once = once[target[once] > source[once]]
        found = np.zeros((2, 2, count, count))
        for kind, nbytes in enumerate((self.nbytes, self.fixed_nbytes)):
            for way, travels in enumerate((nbytes, np.where(self.trained, nbytes, 0.0))):
                np.add.at(found[kind, way], (source[once], target[once]), travels[value[once]])
        return found

    def copies(self, stage: Indices, count: int, keeps: Flags) -> Array:
        """(stages,): bytes of one sample that came from other stages and are kept, where another stage's module counts
        them. `keeps`: of modules, whether they keep what they get."""
        value, at, first = self.kept.T
        here = stage[at]
        more = keeps[at] & (here != stage[first]) & (here != stage[self.made[value]])
        pairs = np.unique(np.stack([value[more], here[more]], axis=1), axis=0)
        return np.bincount(pairs[:, 1], weights=self.nbytes[pairs[:, 0]], minlength=count).astype(np.float64)


def flow_table(modules: tuple[ModuleSpec, ...], place: Mapping[str, int]) -> FlowTable:
    """The columns of what `modules`, whose indices by name are `place`, say of their values."""
    values = [(place[module.name], one) for module in modules for one in module.passes_on]
    after = [(place[m.name], place[name], nbytes) for m in modules for name, nbytes in m.kept_after if name in place]
    used = [(at, place[name]) for at, (_, one) in enumerate(values) for name in one.to if name in place]
    kept = [
        (at, place[name], place[one.kept[0]])
        for at, (_, one) in enumerate(values)
        if one.kept and one.kept[0] in place
        for name in one.kept[1:]
        if name in place
    ]
    return FlowTable(
        made=np.array([made for made, _ in values], dtype=np.intp),
        nbytes=np.array([one.nbytes for _, one in values], dtype=np.float64),
        fixed_nbytes=np.array([one.fixed_nbytes for _, one in values], dtype=np.float64),
        trained=np.array([one.trained for _, one in values], dtype=np.bool_),
        used=np.array(used, dtype=np.intp).reshape(-1, 2),
        kept=np.array(kept, dtype=np.intp).reshape(-1, 3),
        after=np.array([row[:2] for row in after], dtype=np.intp).reshape(-1, 2),
        after_nbytes=np.array([row[2] for row in after], dtype=np.float64),
    )
