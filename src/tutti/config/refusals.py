"""Refusals: combinations in a plan that no model can run under.

`REFUSALS` is the one table that the planner, the cost model, `tutti verify` and the runtime check a plan against. A
refusal is a function that gets the plan and returns the message for the user, with the remedy, or None. Another
package adds its own with `register_refusal`, in a module that it announces as an entry point of "tutti.plugins".

What depends on the model or the cluster is refused where it is found: each such place raises `PlanError`.
docs/refusals.md lists both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tutti.config.compression import Compression, format_compression
from tutti.config.consistency_modes import CONSISTENCY_MODES
from tutti.config.plan import Plan
from tutti.config.registry import Registry
from tutti.config.shard_engine import unsupported_by_fsdp2
from tutti.config.vocabulary import AxisName
from tutti.errors import PlanError

PlanCheck = Callable[[Plan], str | None]
"""Plan -> why it is refused and what to do instead; None where it is accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A combination that no model can run under.

    Attributes:
        name: the code of the error, such as "stages-with-sharded-parameters".
        summary: the combination, in one line.
        check: finds the combination in a plan.
    """

    name: str
    summary: str
    check: PlanCheck


REFUSALS: Final[Registry[Refusal]] = Registry("refusal", "refusal")
"""Refusals by their code, in the order in which a plan is checked."""


def register_refusal(refusal: Refusal) -> Refusal:
    """Add a combination that every plan is checked for.

    Raises:
        PlanError: the code is already registered.

    Examples:
        >>> from tutti.config.plan import BatchPlan, Plan
        >>> def check(plan):
        ...     odd = plan.batch.global_batch_size % 2
        ...     return "global_batch_size is odd; give an even number" if odd else None
        >>> refusal = register_refusal(Refusal(name="odd-batch", summary="an odd global batch", check=check))
        >>> check_plan(Plan(batch=BatchPlan(global_batch_size=3)))
        Traceback (most recent call last):
        ...
        tutti.errors.PlanError: global_batch_size is odd; give an even number
        >>> REFUSALS.remove("odd-batch")
    """
    return REFUSALS.register(refusal)


def check_plan(plan: Plan) -> None:
    """Check a plan for combinations that no model can run under.

    Raises:
        PlanError: with the reason and the remedy; its `code` is the refusal's name.
    """
    for refusal in REFUSALS.loaded():
        message = refusal.check(plan)
        if message is not None:
            raise PlanError(message, code=refusal.name)


def _refuse(name: str) -> Callable[[PlanCheck], PlanCheck]:
    """Register the decorated check; the first line of its docstring is the summary."""

    def register(check: PlanCheck) -> PlanCheck:
        summary = (check.__doc__ or "").partition("\n")[0].rstrip(".")
        register_refusal(Refusal(name=name, summary=summary, check=check))
        return check

    return register


def _shards_parameters(plan: Plan) -> bool:
    return plan.degree("shard") > 1 and plan.sharding.level > 1


def _offloads_unsharded(plan: Plan) -> bool:
    """Whether each rank keeps all of its state on its host, because no shard axis divides it."""
    return plan.degree("shard") == 1 and plan.sharding.offload != "none"


# Pipeline, spatial, context and tensor parallelism


@_refuse("stages-with-sharded-parameters")
def _stages_with_sharded_parameters(plan: Plan) -> str | None:
    """Pipeline stages with sharding level 2 or 3."""
    if plan.degree("stage") == 1 or not _shards_parameters(plan):
        return None
    return (
        f"sharding.level = {plan.sharding.level} with mesh.stage = {plan.degree('stage')}: parameters cannot be "
        "gathered while several microbatches are in flight; use sharding.level = 1"
    )


@_refuse("stages-with-offloaded-parameters")
def _stages_with_offloaded_parameters(plan: Plan) -> str | None:
    """Pipeline stages with parameters in host memory."""
    if plan.degree("stage") == 1 or plan.sharding.offload != "parameters" or plan.degree("shard") == 1:
        return None
    return "sharding.offload = parameters with mesh.stage: use offload = optimizer, or more stages"


@_refuse("spatial-with-stages")
def _spatial_with_stages(plan: Plan) -> str | None:
    """Spatial parallelism with pipeline stages."""
    if plan.degree("space") == 1 or plan.degree("stage") == 1:
        return None
    return (
        f"mesh.space = {plan.degree('space')} with mesh.stage = {plan.degree('stage')}: a stage cannot tell whether "
        "what it receives is cut in space; use one of the two, with replicate or shard"
    )


@_refuse("context-with-spatial")
def _context_with_spatial(plan: Plan) -> str | None:
    """Context parallelism with spatial parallelism."""
    if plan.degree("context") == 1 or plan.degree("space") == 1:
        return None
    return (
        f"mesh.context = {plan.degree('context')} with mesh.space = {plan.degree('space')}: samples that are cut in "
        "space cannot be cut as sequences too; use one of the two"
    )


@_refuse("unequal-shares-with-all-to-all")
def _unequal_shares_with_all_to_all(plan: Plan) -> str | None:
    """Unequal tensor-parallel shares with all-to-all context parallelism."""
    if not plan.split_weights or plan.degree("context") == 1 or plan.context != "all-to-all":
        return None
    return (
        f'split_shares = {list(plan.split_shares)} with context = "all-to-all": split ranks have unequal '
        "numbers of heads, and the context degree would have to divide each of these numbers; use "
        'context = "ring", or leave split_shares out'
    )


@_refuse("offloaded-parameters-without-sharding")
def _offloaded_parameters_without_sharding(plan: Plan) -> str | None:
    """Parameters in host memory at sharding level 1."""
    if plan.degree("shard") == 1 or plan.sharding.level != 1 or plan.sharding.offload != "parameters":
        return None
    return (
        'sharding.offload = "parameters" needs sharding level 2 or 3, which divide parameters; level 1 keeps '
        'them whole on the device: use offload = "optimizer"'
    )


@_refuse("offload-with-stages")
def _offload_with_stages(plan: Plan) -> str | None:
    """Offload without a shard axis, with pipeline stages."""
    if plan.degree("stage") == 1 or not _offloads_unsharded(plan):
        return None
    return (
        f'sharding.offload = "{plan.sharding.offload}" with mesh.stage = {plan.degree("stage")} and no shard axis: '
        "parameters cannot be copied to the device while several microbatches are in flight; use mesh.shard = 2 or "
        'more with sharding.level = 1 and offload = "optimizer", or offload = none'
    )


@_refuse("offloaded-activations-with-stages")
def _offloaded_activations_with_stages(plan: Plan) -> str | None:
    """Activations in host memory, with pipeline stages."""
    rule = next((rule for rule in plan.layout if rule.offload), None)
    if rule is None or plan.degree("stage") == 1:
        return None
    return (
        f"layout: offload of {rule.modules!r} with mesh.stage = {plan.degree('stage')}: several microbatches are in "
        "flight, whose activations would come back out of order; use recompute, or no stage axis"
    )


@_refuse("offload-with-diverged-replicas")
def _offload_with_diverged_replicas(plan: Plan) -> str | None:
    """Offload without a shard axis, with replicas that diverge."""
    if plan.sync.mode == "synchronous" or plan.degree("replicate") == 1 or not _offloads_unsharded(plan):
        return None
    return (
        f'sharding.offload = "{plan.sharding.offload}" with sync.mode = "{plan.sync.mode}": the gradients that go to '
        'the host are reduced over all replicas; use sync.mode = "synchronous", or offload = none'
    )


@_refuse("offload-with-codec")
def _offload_with_codec(plan: Plan) -> str | None:
    """Offload without a shard axis, with compressed gradients."""
    if plan.sync.compress is None or plan.degree("replicate") == 1 or not _offloads_unsharded(plan):
        return None
    return (
        f'sharding.offload = "{plan.sharding.offload}" with {_compression_of(plan.sync.compress)}: the gradients that '
        "go to the host are reduced exactly; leave compress out, or use mesh.shard = 2 or more"
    )


@_refuse("nvme-without-offload")
def _nvme_without_offload(plan: Plan) -> str | None:
    """Files for the optimizer's state, which stays on the device."""
    sharding = plan.sharding
    if sharding.offload == "none" and sharding.offload_device == "nvme":
        return 'sharding.offload_device = "nvme" with offload = none: add offload = optimizer or parameters'
    if sharding.nvme_path and not sharding.on_disk:
        return f'sharding.nvme_path = {sharding.nvme_path!r} without files: add offload_device = "nvme"'
    return None


@_refuse("nvme-with-diverged-replicas")
def _nvme_with_diverged_replicas(plan: Plan) -> str | None:
    """Optimizer state in files, with replicas that diverge."""
    if not plan.sharding.on_disk or plan.sync.mode == "synchronous":
        return None
    return (
        f'sharding.offload_device = "nvme" with sync.mode = "{plan.sync.mode}": the mode reads and changes optimizer '
        'state between updates; use sync.mode = "synchronous", or offload_device = cpu'
    )


@_refuse("nvme-with-codec")
def _nvme_with_codec(plan: Plan) -> str | None:
    """Optimizer state in files, with compressed gradients."""
    if not plan.sharding.on_disk or plan.sync.compress is None:
        return None
    return (
        f'sharding.offload_device = "nvme" with {_compression_of(plan.sync.compress)}: codecs of momentum keep their '
        "state with the optimizer's; leave compress out, or use offload_device = cpu"
    )


# The engine of sharding


def _refuse_fsdp2(name: str, summary: str) -> None:
    """Register a combination that a plan with sharding.engine = fsdp2 may not have."""

    def check(plan: Plan) -> str | None:
        if plan.sharding.engine != "fsdp2" or plan.degree("shard") == 1:
            return None
        found = unsupported_by_fsdp2(plan)
        if found is None or found[0] != name:
            return None
        return f"sharding.engine = fsdp2 with {found[1]}; use engine = tutti, or leave it out"

    register_refusal(Refusal(name=name, summary=summary, check=check))


_refuse_fsdp2("fsdp2-with-axis", "FSDP2 with an axis other than replicate and shard")
_refuse_fsdp2("fsdp2-at-level-1", "FSDP2 with sharding level 1")
_refuse_fsdp2("fsdp2-with-codec", "FSDP2 with compressed gradients")
_refuse_fsdp2("fsdp2-with-mode", "FSDP2 with replicas that diverge")
_refuse_fsdp2("fsdp2-with-offload", "FSDP2 with an offload that it lacks")


# Compressed gradients


@_refuse("codec-excludes")
def _codec_excludes(plan: Plan) -> str | None:
    """A codec with an axis, a sharding level or a precision that its registry entry excludes."""
    compress = plan.sync.compress
    if compress is None:
        return None
    stated = {f"mesh.{axis}": f"mesh.{axis} = {degree}" for axis, degree in plan.mesh.items() if degree > 1}
    if _shards_parameters(plan):
        stated["sharding.level"] = f"sharding.level = {plan.sharding.level}"
    stated[f"precision.{plan.precision}"] = f'precision = "{plan.precision}"'
    for condition, reason in compress.entry.excludes.items():
        if condition in stated:
            return f"{_compression_of(compress)} with {stated[condition]}: {reason}"
    return None


@_refuse("codec-with-measured-buckets")
def _codec_with_measured_buckets(plan: Plan) -> str | None:
    """A lossy codec with bucket sizes that are chosen by timing."""
    compress = plan.sync.compress
    if compress is None or compress.entry.exact or plan.sync.bucket_sizes != "measured":
        return None
    return (
        f'{_compression_of(compress)} with sync.bucket_sizes = "measured": the results of a codec depend on the '
        "buckets, so sizes chosen by timing would make runs differ; state a size"
    )


@_refuse("codec-gain-with-sharded-gradients")
def _codec_gain_with_sharded_gradients(plan: Plan) -> str | None:
    """A codec whose density adapts to its gain, with sharding level 2 or 3."""
    compress = plan.sync.compress
    if compress is None or compress.entry.exact or not _shards_parameters(plan) or compress.gain is None:
        return None
    return (
        f"{_compression_of(compress)} with sharding.level = {plan.sharding.level}: the gain is computed from whole "
        "messages, but each rank gets messages of its part only; leave gain out, or use sharding.level = 1"
    )


@_refuse("codec-between-hosts-with-sharded-gradients")
def _codec_between_hosts_with_sharded_gradients(plan: Plan) -> str | None:
    """Compression between hosts with sharding level 2 or 3."""
    compress = plan.sync.compress
    if compress is None or compress.entry.exact or not _shards_parameters(plan) or compress.between != "hosts":
        return None
    return (
        f"{_compression_of(compress)} with sharding.level = {plan.sharding.level}: reduce-scatters are compressed "
        "between all ranks, not between hosts; leave between out, or use sharding.level = 1"
    )


# Replicas that diverge


@_refuse("diverged-replicas-that-share")
def _diverged_replicas_that_share(plan: Plan) -> str | None:
    """Replicas that diverge, with an axis whose ranks reduce gradients or gather parameters in every step."""
    for axis in _SHARED_AXES:
        if plan.sync.mode != "synchronous" and plan.degree(axis) > 1:
            return (
                f'sync.mode = "{plan.sync.mode}" with mesh.{axis} = {plan.degree(axis)}: ranks along {axis} share what '
                "they train in every step and cannot diverge; use replicate for ranks that may diverge"
            )
    return None


@_refuse("diverged-replicas-of-several-ranks")
def _diverged_replicas_of_several_ranks(plan: Plan) -> str | None:
    """Replicas that diverge, each on several ranks."""
    for axis in _REPLICA_AXES:
        if plan.sync.mode != "synchronous" and plan.degree(axis) > 1:
            return (
                f'sync.mode = "{plan.sync.mode}" with mesh.{axis} = {plan.degree(axis)}: replicas that diverge must '
                'have one rank each; use no axis but replicate, or sync.mode = "synchronous"'
            )
    return None


@_refuse("codec-with-mode")
def _codec_with_mode(plan: Plan) -> str | None:
    """A codec with a mode whose replicas do not reduce their changes."""
    compress, mode = plan.sync.compress, plan.sync.mode
    averaged = [entry.name for entry in CONSISTENCY_MODES.values() if entry.compresses_changes]
    if compress is None or mode == "synchronous" or mode in averaged:
        return None
    return (
        f"{_compression_with_mode(plan, compress)}: this mode has no reduction that a codec could compress; leave one "
        f"of the two out, or use one of the modes {', '.join(averaged)}"
    )


@_refuse("gradient-codec-with-diverged-replicas")
def _gradient_codec_with_diverged_replicas(plan: Plan) -> str | None:
    """A codec that is made for gradients, with replicas that diverge."""
    compress = plan.sync.compress
    if compress is None or plan.sync.mode == "synchronous" or not compress.entry.per_step_only:
        return None
    return (
        f"{_compression_with_mode(plan, compress)}: {compress.method} is made for the gradients of every step, but "
        "these replicas reduce parameter changes over several steps; use another codec, such as qsgd, or leave one out"
    )


@_refuse("codec-between-hosts-with-diverged-replicas")
def _codec_between_hosts_with_diverged_replicas(plan: Plan) -> str | None:
    """Compression between hosts, with replicas that diverge."""
    compress = plan.sync.compress
    if compress is None or plan.sync.mode == "synchronous" or compress.between != "hosts":
        return None
    return (
        f"{_compression_with_mode(plan, compress)}: replicas' changes are compressed between all ranks, not only "
        "between hosts; leave between out"
    )


@_refuse("odd-number-of-paired-replicas")
def _odd_number_of_paired_replicas(plan: Plan) -> str | None:
    """A mode whose replicas exchange in pairs, with an odd number of replicas."""
    replicas = plan.degree("replicate")
    if not CONSISTENCY_MODES[plan.sync.mode].pairs_of_replicas or replicas % 2 == 0 or replicas == 1:
        return None
    return (
        f'sync.mode = "{plan.sync.mode}" with mesh.replicate = {replicas}: replicas exchange in pairs; use an even '
        'number of them, or sync.mode = "ring"'
    )


@_refuse("asynchronous-float16")
def _asynchronous_float16(plan: Plan) -> str | None:
    """Float16 loss scaling with ranks that do not wait for each other."""
    if not CONSISTENCY_MODES[plan.sync.mode].asynchronous or plan.precision != "float16":
        return None
    return (
        f'sync.mode = "{plan.sync.mode}" with precision = "float16": ranks must agree on the loss scale in every step, '
        'but in this mode no rank waits for the others; use precision = "bfloat16"'
    )


_REPLICA_AXES: tuple[AxisName, ...] = ("split", "stage", "context", "space")
"""Axes inside a replica."""

_SHARED_AXES: tuple[AxisName, ...] = ("shard", "expert", "table")
"""Axes whose ranks reduce gradients or gather parameters with all others in every step."""


def _compression_of(compress: Compression) -> str:
    return f"sync.compress = {format_compression(compress)!r}"


def _compression_with_mode(plan: Plan, compress: Compression) -> str:
    return f'{_compression_of(compress)} with sync.mode = "{plan.sync.mode}"'


# Refusals that the model's sizes decide, shared by the cost model and the runtime


def check_parts_not_empty(name: str, sizes: Sequence[int], shares: Sequence[float], what: str) -> None:
    """Check that unequal shares leave no rank without a part of a module.

    Args:
        name: name of the module; empty for the model itself.
        sizes: number of `what` that each rank gets.
        shares: the plan's `split_shares`.
        what: what is divided, such as "heads".

    Raises:
        PlanError: a rank gets none.
    """
    if 0 in sizes:
        place = list(sizes).index(0)
        raise PlanError(
            f"module {name or 'the model'!r} has {sum(sizes)} {what}, and split_shares = {list(shares)} gives "
            f"rank {place} of the split axis none of them; give it a larger share, use fewer split ranks, or keep the "
            f"module whole: LayoutRule(modules='{name}*', placement='replicate')"
        )


def check_units(name: str, size: int, degree: int, what: str) -> None:
    """Check that equal parts leave no rank of the split axis without a part of a module.

    Args:
        name: name of the module; empty for the model itself.
        size: number of `what` that the module has.
        degree: ranks along the split axis.
        what: what is divided, such as "outputs".

    Raises:
        PlanError: there are more ranks than units.
    """
    if size < degree:
        raise PlanError(
            f"module {name or 'the model'!r} has {size} {what}, fewer than mesh.split = {degree}, so "
            f"{degree - size} of these ranks would hold none; use {format_degrees(size)}, or keep the module whole: "
            f"LayoutRule(modules='{name}*', placement='replicate')"
        )


def format_degrees(size: int) -> str:
    """Return the degrees that divide a number of units, as "split=2, 4 or 8"; the largest few if there are many."""
    degrees = [degree for degree in range(2, size + 1) if size % degree == 0][-8:]
    if not degrees:
        return "no split axis"
    return f"split={', '.join(map(str, degrees[:-1]))} or {degrees[-1]}" if len(degrees) > 1 else f"split={degrees[0]}"


def check_width(name: str, width: int, *, columns: bool, degree: int) -> None:
    """Check that a linear layer is wide enough for the table axis to divide it.

    Args:
        name: name of the layer.
        width: number of its outputs (`columns`) or inputs.
        columns: whether its outputs are divided.
        degree: ranks along the table axis.

    Raises:
        PlanError: a rank would get no column or row.
    """
    if width < degree:
        raise PlanError(
            f"layer {name!r} has {width} {'outputs' if columns else 'inputs'}, fewer than mesh.table = {degree}; place "
            "it 'replicate', or leave it out of the rule"
        )
