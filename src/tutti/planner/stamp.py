"""Which model a plan was made for: its modules in short, to tell later what is new or gone."""

from tutti.config.model import ModelSpec
from tutti.config.model_fingerprint import describe_module, differences, merge_siblings
from tutti.config.plan import Plan
from tutti.planner.words import mesh_words


def stamp(model: ModelSpec) -> dict[str, str]:
    """Every module with parameters: its kind and how many; equal numbered siblings as one: layers.0-11.query."""
    return merge_siblings(_entries(model))


def _entries(model: ModelSpec) -> dict[str, str]:
    return {
        module.name or "(model)": describe_module(module.kind, module.parameters)
        for module in model.modules
        if module.parameters
    }


def changed_modules(plan: Plan, model: ModelSpec) -> str:
    """What is new, gone or other in `model` since the plan was made; empty where nothing is, or nobody knows."""
    found = differences(plan.made_for, _entries(model))
    if not found:
        return ""
    return f"this plan ({mesh_words(plan)}) was made for another model: {found}; plan again with tutti plan"
