"""Units: the modules that stages are made of. What calls them is glue, traced anew in every forward."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from torch import nn
from torch.nn.utils import parametrize

from tutti.errors import PlanError
from tutti.nn.mixture import MixtureOfExperts
from tutti.parallel.expert.stacked import is_stacked

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """`glue`: names of the modules whose own code is traced, the model ("") among them; `names`: the units, in the
    model's order. Every parameter belongs to a unit or directly to a module of the glue.
    """

    glue: frozenset[str]
    names: tuple[str, ...]

    def opened(self, model: nn.Module, name: str) -> "Units":
        """The same with the unit `name` taken apart into its parts."""
        return choose_units(model, (*self.glue, name))


def choose_units(model: nn.Module, opened: Iterable[str] = ()) -> Units:
    """Units of `model`: the entries of its outermost lists of modules, and the smallest modules outside lists.

    `opened`: names of modules that are taken apart in any case.
    """
    glue, names = {""}, []
    wanted = set(opened)

    def walk(name: str, module: nn.Module, in_list: bool) -> None:
        children = [] if _whole(module) else list(module.named_children())
        is_list = isinstance(module, _LISTS)
        if children and (not name or is_list or name in wanted or not in_list):
            glue.add(name)
            for key, child in children:
                walk(f"{name}.{key}" if name else key, child, is_list)
        elif name:
            names.append(name)

    walk("", model, in_list=False)
    return Units(glue=frozenset(glue), names=tuple(names))


def can_open(model: nn.Module, name: str) -> bool:
    """Whether the unit `name` has parts of its own."""
    module = model.get_submodule(name)
    return not _whole(module) and any(True for _ in module.children())


def open_for_cuts(model: nn.Module, cuts: Iterable[str]) -> Units:
    """Units such that every name in `cuts` begins one. Raises PlanError for a name the model does not have."""
    known = dict(model.named_modules())
    opened: list[str] = []
    for cut in cuts:
        if cut not in known or not cut:
            near = [name for name in known if name.rpartition(".")[2] == cut.rpartition(".")[2]] or list(known)[1:9]
            raise PlanError(f"pipeline.cuts: the model has no module {cut!r}; it has {', '.join(near[:8])}")
        parts = cut.split(".")
        opened += [".".join(parts[:count]) for count in range(1, len(parts))]
    return choose_units(model, opened)


def begins(cut: str, unit: str) -> bool:
    """Whether a call of `unit` is a call of (a part of) the module called `cut`."""
    return unit == cut or unit.startswith(cut + ".")


def heaviest_to_open(
    model: nn.Module, costs: Mapping[str, float], stages: int, closed: Container[str] = ()
) -> str | None:
    """The unit to take apart because it is too large a part for `stages` equal stages; None where all is well.
    `closed`: units that cannot be taken apart."""
    total = sum(costs.values())
    able = [name for name in costs if name not in closed and can_open(model, name)]
    if not able:
        return None
    heaviest = max(able, key=lambda name: costs[name])
    return heaviest if len(costs) < stages or costs[heaviest] > 0.75 * total / stages else None


def _whole(module: nn.Module) -> bool:
    """Modules never taken apart: torch's own (their code reads their parts' weights), parametrised ones, and experts,
    which route by values."""
    own = type(module).__module__.startswith("torch.nn.") and not isinstance(module, _LISTS)
    coders = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)
    experts = isinstance(module, MixtureOfExperts) or is_stacked(module)
    return (own and not isinstance(module, coders)) or experts or parametrize.is_parametrized(module)
