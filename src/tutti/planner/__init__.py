"""The planner: enumerate plans, predict what they cost, choose the best, and say why."""

from tutti.planner.candidates import candidates
from tutti.planner.plan_description import changed_modules, plan_words, stamp
from tutti.planner.plan_explanation import PlanRow, difference, explain, rows, training_cost_text
from tutti.planner.plan_request import (
    Alternative,
    Choice,
    Coverage,
    NoiseScale,
    Objective,
    PlanRequest,
    PrecisionPolicy,
    Scope,
    Totals,
    samples_to_quality,
)
from tutti.planner.plan_search import choose
from tutti.planner.scaling_search import device_counts, scaling
from tutti.planner.scenarios import what_if

__all__ = [
    "Alternative",
    "Choice",
    "Coverage",
    "NoiseScale",
    "Objective",
    "PlanRequest",
    "PlanRow",
    "PrecisionPolicy",
    "Scope",
    "Totals",
    "candidates",
    "changed_modules",
    "choose",
    "device_counts",
    "difference",
    "explain",
    "plan_words",
    "rows",
    "samples_to_quality",
    "scaling",
    "stamp",
    "training_cost_text",
    "what_if",
]
