"""Combinations in a plan that no model can run under: one table for the runtime and the planner."""

from collections.abc import Sequence

from tutti.config.compression import FACTORS, MOMENTA, ZERO_ONE, Compression, compression_in_words
from tutti.config.plan import Plan
from tutti.config.vocabulary import ALONE, AxisName, SyncMode
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
    if plan.sync.compress is None:
        return
    words = f"sync.compress = {compression_in_words(plan.sync.compress)!r}"
    if plan.sync.compress.method == FACTORS:
        _check_factors(plan, words)
        return
    if plan.sync.compress.method == ZERO_ONE:
        _check_zero_one(plan, words)
    if plan.sync.bucket_sizes == "measured":
        raise PlanError(
            f'{words} with sync.bucket_sizes = "measured": what a code keeps and loses depends on the buckets, so that '
            "sizes that follow a clock would change values; state a size"
        )
    if plan.degree("shard") > 1 and plan.sharding.level > 1:
        _check_parts(plan, plan.sync.compress, words)
    if plan.precision == "float16" and plan.sync.compress.method in MOMENTA:
        raise PlanError(
            f'{words} with precision = "float16": gradients come times a loss scale that changes, and are added to a '
            f'momentum that is not; use precision = "bfloat16", or compress gradients: {plan.sync.compress.code.method}'
        )


def _check_parts(plan: Plan, compress: Compression, words: str) -> None:
    """What a compressed reduce-scatter excludes."""
    if compress.method in MOMENTA:
        raise PlanError(
            f"{words} with sharding.level = {plan.sharding.level}: every rank needs the whole momentum to send its "
            "share of it, and gets its part only; use sharding.level = 1, or compress gradients: one-bit"
        )
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


def _check_factors(plan: Plan, words: str) -> None:
    """What sufficient factors exclude. They lose nothing and have no residual."""
    if plan.degree("stage") > 1:
        raise PlanError(
            f"{words} with mesh.stage = {plan.degree('stage')}: a stage's backward may come in halves, of which "
            "the one for weights makes gradients; leave compress out, or use replicate in the place of stages"
        )
    if plan.degree("shard") > 1 and plan.sharding.level > 1:
        raise PlanError(
            f"{words} with sharding.level = {plan.sharding.level}: every rank gets only its part of a sum there, and "
            "factors give all of it to all; use sharding.level = 1, or leave compress out"
        )


def _check_zero_one(plan: Plan, words: str) -> None:
    """What 0/1 Adam, whose ranks step on their own, excludes."""
    for axis in (*_TOGETHER, *_INSIDE):
        if plan.degree(axis) > 1:
            raise PlanError(
                f"{words} with mesh.{axis} = {plan.degree(axis)}: ranks step alone between the moments in which they "
                "agree, and each needs the whole model and its optimizer's state; use replicate, or one-bit-adam"
            )


AVERAGING_MODES: tuple[SyncMode, ...] = ("local", "post-local", "diloco")
"""Modes whose replicas may send their changes in a codec."""


def _check_coded(plan: Plan) -> None:
    """What a codec for the changes of diverged replicas excludes."""
    how, mode = plan.sync.compress, plan.sync.mode
    if how is None:
        return
    words = f'sync.compress = {compression_in_words(how)!r} with sync.mode = "{mode}"'
    if mode not in AVERAGING_MODES:
        raise PlanError(
            f"{words}: replicas sum nothing that could be written so; leave one out, or use one of the modes "
            f"{', '.join(AVERAGING_MODES)}, whose replicas sum their changes"
        )
    if how.method in (*MOMENTA, FACTORS, "dgc"):
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
    if mode == "shift-one" and plan.degree("replicate") % 2 and plan.degree("replicate") > 1:
        raise PlanError(
            f'sync.mode = "shift-one" with mesh.replicate = {plan.degree("replicate")}: replicas meet in pairs; use an '
            'even number of them, or sync.mode = "ring"'
        )
    if mode in ALONE and plan.precision == "float16":
        raise PlanError(
            f'sync.mode = "{mode}" with precision = "float16": ranks agree on the loss scale in every step, and here '
            'no rank waits for the others; use precision = "bfloat16"'
        )
