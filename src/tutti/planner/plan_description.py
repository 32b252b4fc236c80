"""Plans as text: the mesh of a plan, and how it is sharded, scheduled and recomputed."""

from tutti.config.compression import format_compression
from tutti.config.mesh_axes import describe_axis
from tutti.config.model import ModelSpec
from tutti.config.model_fingerprint import describe_module, differences, merge_siblings
from tutti.config.plan import Plan
from tutti.config.sync_notation import format_relaxation
from tutti.config.vocabulary import AxisName
from tutti.cost_model.cost_notes import count

_ZERO = {1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}


def mesh_words(plan: Plan, *, common_names: bool = False) -> str:
    """Return the mesh as text: "replicate 4 x split 2"; "1 rank" where nothing is divided.

    Unequal parts along split follow the degree in parentheses: "split 2 (1:0.5)".

    Args:
        plan: what is described.
        common_names: whether each axis is followed by its common name: "split (tensor parallel) 2".
    """
    axes = {axis: degree for axis, degree in plan.mesh.items() if degree > 1}
    parts = {"split": f" ({parts_words(plan)})"} if plan.split_weights else {}
    names = {axis: describe_axis(axis) if common_names else axis for axis in axes}
    return " x ".join(f"{names[axis]} {degree}{parts.get(axis, '')}" for axis, degree in axes.items()) or "1 rank"


def parts_words(plan: Plan) -> str:
    """Return the relative sizes of the parts along the split axis as text: "equal", or the first eight, "1:0.5:0.5"."""
    if not plan.split_weights:
        return "equal"
    parts = ":".join(f"{share:g}" for share in plan.split_weights[:8])
    return parts + (":..." if len(plan.split_weights) > 8 else "")


def settings_words(plan: Plan) -> str:
    """Return what the mesh does not say, as text: "ZeRO-3, 1f1b, recompute"; empty where there is nothing to add."""
    settings = []
    if plan.mesh.get("shard", 1) > 1:
        settings.append(_ZERO[plan.sharding.level] + (" by FSDP2" if plan.sharding.engine == "fsdp2" else ""))
    if plan.sharding.offload != "none":
        settings.append(f"{plan.sharding.offload} on the host" + (" and its disk" if plan.sharding.on_disk else ""))
    if plan.mesh.get("stage", 1) > 1:
        many = f" x{plan.pipeline.stages_per_rank}" if plan.pipeline.stages_per_rank > 1 else ""
        settings.append(plan.pipeline.schedule + many + (", cut unevenly" if plan.pipeline.cuts else ""))
    if plan.mesh.get("context", 1) > 1:
        settings.append(f"{plan.context} attention")
    if plan.mesh.get("space", 1) > 1 and plan.space_grid:
        settings.append("space " + "x".join(map(str, plan.space_grid)))
    if plan.share_device:
        settings.append("ranks share devices")
    wide = wide_layers(plan)
    if wide:
        settings.append(
            " and ".join((*wide[:3], *([f"{len(wide) - 3} more"] if len(wide) > 3 else []))) + " over table"
        )
    if plan.sync.mode == "synchronous" and plan.sync.gradient_code is not None:
        settings.append(f"gradients as {format_compression(plan.sync.gradient_code)}")
    if plan.sync.mode != "synchronous":
        settings.append(f"replicas {format_relaxation(plan.sync)}")
    recompute = recompute_words(plan)
    if recompute != "none":
        globs = [rule.modules for rule in plan.layout if rule.recompute]
        scope = "" if any("*" in glob for glob in globs) else f" of {count(len(globs), 'block')}"
        settings.append(("recompute" if recompute == "full" else f"{recompute} recompute") + scope)
    return ", ".join(settings)


def plan_words(plan: Plan, *, common_names: bool = False) -> str:
    """Return the whole plan as one phrase: "shard 8 with ZeRO-3, recompute, 4 microbatches".

    `common_names` is that of `mesh_words`.
    """
    settings = settings_words(plan)
    words = mesh_words(plan, common_names=common_names) + (f" with {settings}" if settings else "")
    return f"{words}, {count(plan.batch.num_microbatches, 'microbatch')}"


def recompute_words(plan: Plan) -> str:
    """Return "none", "selective" or "full": the most that any rule of the layout recomputes."""
    settings = [rule.recompute for rule in plan.layout if rule.recompute]
    if not settings:
        return "none"
    return "full" if True in settings else "selective"


def wide_layers(plan: Plan) -> tuple[str, ...]:
    """Return the modules that the layout divides along the `table` axis."""
    if plan.degree("table") == 1 or plan.degree("split") > 1:
        return ()
    return tuple(rule.modules for rule in plan.layout if rule.placement not in ("auto", "replicate"))


def axes_of(plan: Plan) -> tuple[AxisName, ...]:
    """Return the axes with more than one rank."""
    return tuple(axis for axis, degree in plan.mesh.items() if degree > 1)


def stamp(model: ModelSpec) -> dict[str, str]:
    """Describe every module that has parameters by its kind and number of parameters.

    Equal siblings share an entry, under a name such as `layers.0-11.query`. A plan stores the result, so that a run
    can tell whether its model is the one that was planned for.
    """
    return merge_siblings(_entries(model))


def _entries(model: ModelSpec) -> dict[str, str]:
    """Describe every module that has parameters, by name."""
    return {
        module.name or "(model)": describe_module(module.kind, module.parameters)
        for module in model.modules
        if module.parameters
    }


def changed_modules(plan: Plan, model: ModelSpec) -> str:
    """Return a sentence naming the modules of `model` that were added, removed or changed since the plan was made.

    The result is empty where nothing changed, or the plan does not say for which model it was made.
    """
    changed = differences(plan.made_for, _entries(model))
    if not changed:
        return ""
    return f"this plan ({mesh_words(plan)}) was made for another model: {changed}; plan again with tutti plan"
