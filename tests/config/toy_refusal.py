"""A refusal of another package: one function, one registration."""

from tutti.config.plan import Plan
from tutti.config.refusals import Refusal

NAME = "toy-four-replicas"


def check(plan: Plan) -> str | None:
    """Four replicas, which this package's switch cannot connect."""
    if plan.degree("replicate") != 4:
        return None
    return "mesh.replicate = 4: the toy switch has three ports; use 3 replicas or fewer"


ENTRY = Refusal(name=NAME, summary="four replicas", check=check)
