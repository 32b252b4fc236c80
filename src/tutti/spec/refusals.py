"""Which parts of a plan do not go together, whatever the model: one table for what runs plans and what costs them."""

from tutti.errors import PlanError
from tutti.spec.compression import compression_in_words
from tutti.spec.plan import Plan


def check_plan(plan: Plan) -> None:
    """Raise PlanError, with the reason and the remedy, for a plan that no model can run under."""
    for check in (check_stages, check_space, check_context, check_sharding, check_compression):
        check(plan)


def check_stages(plan: Plan) -> None:
    """What stages exclude."""
    if plan.degree("stage") == 1:
        return
    if plan.degree("shard") > 1 and plan.sharding.level > 1:
        raise PlanError(
            f"sharding.level = {plan.sharding.level} with mesh.stage = {plan.degree('stage')}: parameters cannot be "
            "gathered while several microbatches are on their way; use sharding.level = 1"
        )
    if plan.sharding.offload == "parameters":
        raise PlanError("sharding.offload = parameters with mesh.stage: use offload = optimizer, or more stages")


def check_space(plan: Plan) -> None:
    """What a cut in space excludes."""
    if plan.degree("space") > 1 and plan.degree("stage") > 1:
        raise PlanError(
            f"mesh.space = {plan.degree('space')} with mesh.stage = {plan.degree('stage')}: what a stage receives is "
            "not known to be cut; use one of the two, with replicate or shard"
        )


def check_context(plan: Plan) -> None:
    """What parts of sequences exclude."""
    if plan.degree("context") > 1 and plan.degree("space") > 1:
        raise PlanError(
            f"mesh.context = {plan.degree('context')} with mesh.space = {plan.degree('space')}: sequences are not cut "
            "where samples are cut in space; use one of the two"
        )


def check_sharding(plan: Plan) -> None:
    """What levels of sharding exclude."""
    if plan.degree("shard") > 1 and plan.sharding.level == 1 and plan.sharding.offload == "parameters":
        raise PlanError(
            'sharding.offload = "parameters" needs sharding level 2 or 3, which divide parameters; level 1 keeps '
            'them whole on the device: use offload = "optimizer"'
        )


def check_compression(plan: Plan) -> None:
    """What compressed sums exclude."""
    if plan.sync.compress is None:
        return
    words = f"sync.compress = {compression_in_words(plan.sync.compress)!r}"
    if plan.degree("shard") > 1 and plan.sharding.level > 1:
        raise PlanError(
            f"{words} with sharding.level = {plan.sharding.level}: every rank gets only its part of a sum there, and "
            "compressed sums give all of it to all; use sharding.level = 1, or leave compress out"
        )
    if plan.precision == "float16":
        raise PlanError(
            f'{words} with precision = "float16": what is kept back would be in units of a loss scale that changes; '
            'use precision = "bfloat16", or leave compress out'
        )
