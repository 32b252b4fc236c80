"""The planner: enumerate plans, cost them, choose one, and say why."""

from tutti.planner.candidates import candidates
from tutti.planner.choice import (
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
from tutti.planner.difference import difference
from tutti.planner.explain import Row, explain, rows, whole_words
from tutti.planner.quality import samples_to_quality
from tutti.planner.scaling import device_counts, scaling
from tutti.planner.scenarios import what_if
from tutti.planner.search import choose
from tutti.planner.stamp import changed_modules, stamp
from tutti.planner.words import plan_words

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
