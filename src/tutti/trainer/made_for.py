"""Whether the model that a script prepares is the one that its plan was made for."""

from torch import nn
from torch.nn.parameter import is_lazy

from tutti.config.made_for import differences, entry
from tutti.config.mesh_words import mesh_in_words
from tutti.config.plan import Plan


def other_model(plan: Plan, model: nn.Module) -> str:
    """One sentence that names what is new, gone or other in `model` since the plan was made; empty where nothing is.

    Modules that share parameters are not compared: which of them counts a parameter depends on which ran first.
    """
    holders: dict[int, set[str]] = {}
    now: dict[str, str] = {}
    for name, module in model.named_modules():
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        for parameter in own:
            holders.setdefault(id(parameter), set()).add(name or "(model)")
        count = sum(parameter.numel() for parameter in own if not is_lazy(parameter))
        if count:
            now[name or "(model)"] = entry(type(module).__name__, count)
    shared = frozenset(name for names in holders.values() if len(names) > 1 for name in names)
    found = differences(plan.made_for, now, shared)
    if not found:
        return ""
    mesh = mesh_in_words(plan.mesh)
    return f"warning: this plan ({mesh}) was made for another model: {found}; plan again with tutti plan"
