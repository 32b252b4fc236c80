"""Combinations in a plan that no model can run under: one table for the runtime and the planner."""

from collections.abc import Mapping, Sequence

from tutti.config.compression import Compression, format_compression
from tutti.config.consistency_modes import CONSISTENCY_MODES
from tutti.config.plan import Plan
from tutti.config.vocabulary import AxisName
from tutti.errors import PlanError


def check_plan(plan: Plan) -> None:
    """Check a plan for combinations that no model can run under.

    Raises:
        PlanError: with the reason and the remedy.
    """
    checks = (
        check_stages, check_space, check_context, check_split, check_sharding, check_compression, check_relaxed
    )  # fmt: skip
    for check in checks:
        check(plan)


def check_stages(plan: Plan) -> None:
    """What pipeline stages exclude."""
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
    """What context parallelism excludes."""
    if plan.degree("context") > 1 and plan.degree("space") > 1:
        raise PlanError(
            f"mesh.context = {plan.degree('context')} with mesh.space = {plan.degree('space')}: sequences are not cut "
            "where samples are cut in space; use one of the two"
        )


def check_split(plan: Plan) -> None:
    """What unequal parts of layers exclude."""
    if plan.split_weights and plan.degree("context") > 1 and plan.context == "all-to-all":
        raise PlanError(
            f'split_shares = {list(plan.split_shares)} with context = "all-to-all": split ranks have unequal '
            "numbers of heads, and each would exchange its own among the ranks of context, which must divide them; use "
            'context = "ring", or leave split_shares out'
        )


def check_parts_not_empty(name: str, sizes: Sequence[int], shares: Sequence[float], what: str) -> None:
    """Raise PlanError where unequal shares leave a rank without any of the `what` of a module; `sizes` are the ranks'
    parts.
    """
    if 0 in sizes:
        place = list(sizes).index(0)
        raise PlanError(
            f"module {name or 'the model'!r} has {sum(sizes)} {what}, of which split_shares = {list(shares)} leaves "
            f"place {place} of the split axis none; give it a larger share, use fewer split ranks, or keep the module "
            f"whole: LayoutRule(modules='{name}*', placement='replicate')"
        )


def check_sharding(plan: Plan) -> None:
    """What the levels of sharding exclude."""
    if plan.degree("shard") > 1 and plan.sharding.level == 1 and plan.sharding.offload == "parameters":
        raise PlanError(
            'sharding.offload = "parameters" needs sharding level 2 or 3, which divide parameters; level 1 keeps '
            'them whole on the device: use offload = "optimizer"'
        )


def check_compression(plan: Plan) -> None:
    """What compressed reductions exclude."""
    compress = plan.sync.compress
    if compress is None:
        return
    words = f"sync.compress = {format_compression(compress)!r}"
    _check_exclusions(plan, compress.entry.excludes, words)
    if compress.entry.exact:
        return
    if plan.sync.bucket_sizes == "measured":
        raise PlanError(
            f'{words} with sync.bucket_sizes = "measured": what a codec keeps and loses depends on the buckets, so '
            "sizes that follow a clock would change values; state a size"
        )
    if plan.degree("shard") > 1 and plan.sharding.level > 1:
        _check_parts(plan, compress, words)


def _check_exclusions(plan: Plan, excludes: Mapping[str, str], words: str) -> None:
    """Raise PlanError for the first condition of the plan that a codec's entry excludes."""
    level, precision = plan.sharding.level, plan.precision
    stated = {f"mesh.{axis}": f"mesh.{axis} = {degree}" for axis, degree in plan.mesh.items() if degree > 1}
    if plan.degree("shard") > 1 and level > 1:
        stated["sharding.level"] = f"sharding.level = {level}"
    stated[f"precision.{precision}"] = f'precision = "{precision}"'
    for condition, reason in excludes.items():
        if condition in stated:
            raise PlanError(f"{words} with {stated[condition]}: {reason}")


def _check_parts(plan: Plan, compress: Compression, words: str) -> None:
    """What a compressed reduce-scatter excludes."""
    if compress.gain is not None:
        raise PlanError(
            f"{words} with sharding.level = {plan.sharding.level}: ranks judge by what every message says, and each "
            "gets messages of its part only; leave gain out, or use sharding.level = 1"
        )
    if compress.between == "hosts":
        raise PlanError(
            f"{words} with sharding.level = {plan.sharding.level}: sums of which each rank gets its part are "
            "compressed between ranks; leave between out, or use sharding.level = 1"
        )


def _check_coded(plan: Plan) -> None:
    """What a codec for the changes of diverged replicas excludes."""
    how, mode = plan.sync.compress, plan.sync.mode
    if how is None:
        return
    words = f'sync.compress = {format_compression(how)!r} with sync.mode = "{mode}"'
    averaged = [entry.name for entry in CONSISTENCY_MODES.values() if entry.compresses_changes]
    if mode not in averaged:
        raise PlanError(
            f"{words}: replicas sum nothing that could be written so; leave one out, or use one of the modes "
            f"{', '.join(averaged)}, whose replicas sum their changes"
        )
    if how.entry.per_step_only:
        raise PlanError(
            f"{words}: {how.method} is made for gradients of every step, and what replicas sum here are changes of "
            "parameters over several; use another code, such as qsgd, or leave one out"
        )
    if how.between == "hosts":
        raise PlanError(f"{words}: replicas' changes are written in a code between all ranks alike; leave between out")


_INSIDE: tuple[AxisName, ...] = ("split", "stage", "context", "space")
"""Axes inside a replica."""

_TOGETHER: tuple[AxisName, ...] = ("shard", "expert", "table")
"""Axes whose ranks reduce gradients or gather parameters with all others in every step."""


def check_width(name: str, width: int, *, columns: bool, degree: int) -> None:
    """Raise PlanError for a linear layer with fewer outputs (`columns`) or inputs than the table axis has ranks."""
    if width < degree:
        raise PlanError(
            f"layer {name!r} has {width} {'outputs' if columns else 'inputs'}, fewer than mesh.table = {degree}; place "
            "it 'replicate', or leave it out of the rule"
        )


def check_relaxed(plan: Plan) -> None:
    """What modes whose replicas diverge exclude."""
    mode = plan.sync.mode
    if mode == "synchronous":
        return
    for axis in _TOGETHER:
        if plan.degree(axis) > 1:
            raise PlanError(
                f'sync.mode = "{mode}" with mesh.{axis} = {plan.degree(axis)}: ranks along {axis} share what they '
                "train in every step and cannot differ; use replicate for the ranks that may"
            )
    for axis in _INSIDE:
        if plan.degree(axis) > 1:
            raise PlanError(
                f'sync.mode = "{mode}" with mesh.{axis} = {plan.degree(axis)}: replicas that differ are of one rank '
                'each in this version; use replicate alone, or sync.mode = "synchronous"'
            )
    _check_coded(plan)
    entry, replicas = CONSISTENCY_MODES[mode], plan.degree("replicate")
    if entry.pairs_of_replicas and replicas % 2 and replicas > 1:
        raise PlanError(
            f'sync.mode = "{mode}" with mesh.replicate = {plan.degree("replicate")}: replicas meet in pairs; use an '
            'even number of them, or sync.mode = "ring"'
        )
    if entry.asynchronous and plan.precision == "float16":
        raise PlanError(
            f'sync.mode = "{mode}" with precision = "float16": ranks agree on the loss scale in every step, and here '
            'no rank waits for the others; use precision = "bfloat16"'
        )
