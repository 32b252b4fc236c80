"""Which modules a plan's layout rules touch. Names are dotted; a module contains all names that extend its own."""

from dataclasses import dataclass

from tutti.spec.model import ModelSpec
from tutti.spec.plan import Plan, recomputes


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A module whose activations are dropped after forward, and with it all modules inside: indices into modules."""

    root: int
    members: tuple[int, ...]


def recompute_regions(model: ModelSpec, plan: Plan) -> tuple[Region, ...]:
    """The outermost modules that recompute, each with everything inside it.

    The model itself is no region: a rule for "*" means every module directly inside it. What recomputes selectively
    keeps most of its memory and costs little time, so it is costed as if it kept everything.
    """
    if not any(rule.recompute for rule in plan.layout):
        return ()
    names = [module.name for module in model.modules]
    asked = {name for name in names if name and recomputes(plan.layout, name) is True}
    roots = [name for name in names if name in asked and not any(parent in asked for parent in _parents(name))]
    members: dict[str, list[int]] = {root: [] for root in roots}
    for index, name in enumerate(names):
        for candidate in (name, *_parents(name)):
            if candidate in members:
                members[candidate].append(index)
                break
    return tuple(Region(root=names.index(root), members=tuple(members[root])) for root in roots)


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]
