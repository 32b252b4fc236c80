"""The planner: enumerate plans, cost them, choose one, and say why."""

from tutti.plan.candidates import candidates
from tutti.plan.choice import Alternative, Choice, PrecisionPolicy, Request
from tutti.plan.explain import Row, explain, rows
from tutti.plan.search import choose

__all__ = ["Alternative", "Choice", "PrecisionPolicy", "Request", "Row", "candidates", "choose", "explain", "rows"]
