"""The planner: enumerate plans, cost them, choose one, and say why."""

from tutti.plan.candidates import candidates
from tutti.plan.choice import (
    Alternative,
    Choice,
    Coverage,
    NoiseScale,
    Objective,
    PrecisionPolicy,
    Request,
    Scope,
    Totals,
)
from tutti.plan.difference import difference
from tutti.plan.explain import Row, explain, rows, whole_words
from tutti.plan.quality import samples_to_quality
from tutti.plan.scaling import device_counts, scaling
from tutti.plan.scenarios import what_if
from tutti.plan.search import choose
from tutti.plan.stamp import changed_modules, stamp
from tutti.plan.words import plan_words

__all__ = [
    "Alternative",
    "Choice",
    "Coverage",
    "NoiseScale",
    "Objective",
    "PrecisionPolicy",
    "Request",
    "Row",
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
    "what_if",
    "whole_words",
]
