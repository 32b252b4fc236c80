"""The planner: enumerate plans, predict what they cost, choose the best, and say why.

- `plan_search.py`: the search; `exploration.py` orders plans by the bounds of `tutti.cost_model.plan_bounds` and
  predicts the most promising; `search_pool.py` holds the others.
- `plan_request.py`: what is asked and answered; `candidates.py`, `mesh_enumeration.py`: the plans there are.
- `plan_refinement.py`, `mixed_hardware.py`: better versions of good plans (recompute, shares and cuts by speed).
- `relaxed_search.py`, `relaxed_strategies.py`: training that sends less; `scaling_search.py`, `scenarios.py`: other
  numbers of devices, other clusters.
- `objectives.py`: time, cost, energy, memory, time to quality.
- Words: `plan_description.py`, `plan_explanation.py`, `loss_reasons.py` (why others lost), `no_plan_found.py`.
"""

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
