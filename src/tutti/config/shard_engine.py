"""The engine of sharding levels 2 and 3: what a plan may ask of torch's fully_shard, and the option that states it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from tutti.config.plan import Plan, ShardingPlan
from tutti.config.vocabulary import AxisName, Offload, OffloadDevice, ShardEngine
from tutti.errors import PlanError

FSDP2_AXES: tuple[AxisName, ...] = ("replicate", "shard")
"""The axes of a mesh on which fully_shard runs; with both, it is hybrid sharding (HSDP)."""

FSDP2_OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "parameters")
"""What fully_shard can keep in host memory; both kinds keep this rank's parts and their state there."""


def unsupported_by_fsdp2(plan: Plan) -> tuple[str, str] | None:
    """Return what in a plan fully_shard cannot run, as (code of the refusal, what it is); None where it can run it."""
    for axis, degree in plan.mesh.items():
        if degree > 1 and axis not in FSDP2_AXES:
            return "fsdp2-with-axis", f"mesh.{axis} = {degree}: FSDP2 runs on a mesh of replicate and shard only"
    if plan.sharding.level == 1:
        return "fsdp2-at-level-1", "sharding.level = 1: FSDP2 divides gradients too, as level 2 does"
    if plan.sync.compress is not None:
        return "fsdp2-with-codec", "sync.compress: FSDP2 reduces gradients itself, in the dtype of the parameters"
    if plan.sync.mode != "synchronous":
        return "fsdp2-with-mode", f'sync.mode = "{plan.sync.mode}": FSDP2 reduces gradients in every step'
    if plan.sharding.offload not in FSDP2_OFFLOADS:
        return "fsdp2-with-offload", f'sharding.offload = "{plan.sharding.offload}": FSDP2 keeps parts of parameters'
    if plan.sharding.on_disk:
        return "fsdp2-with-offload", 'sharding.offload_device = "nvme": FSDP2 keeps the optimizer\'s state in memory'
    return None


def describe_engine(plan: Plan, *, gpus: bool | None = None) -> str:
    """Return which engine runs a plan's sharding, as text; empty where nothing is divided at level 2 or 3.

    Args:
        plan: the plan.
        gpus: whether ranks have GPUs; None where it is not known.
    """
    if plan.degree("shard") == 1 or plan.sharding.level == 1:
        return ""
    engine = plan.sharding.engine
    if engine == "auto" and (gpus is False or unsupported_by_fsdp2(plan) is not None):
        engine = "tutti"
    if engine == "auto" and gpus:
        return "fsdp2 (torch's fully_shard; chosen for GPUs unless the model rules it out)"
    return {
        "auto": "fsdp2 (torch's fully_shard) where ranks have GPUs with NCCL, else tutti",
        "tutti": "tutti",
        "fsdp2": "fsdp2 (torch's fully_shard)",
    }[engine]


_ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "level": (1, 2, 3),
    "offload": get_args(Offload),
    "engine": get_args(ShardEngine),
    "offload_device": get_args(OffloadDevice),
    "nvme_path": (),
}
"""The settings of the option and their values; a setting without values takes any text."""


def with_sharding(plan: Plan, text: str | None) -> Plan:
    """Set what a plan says of its sharding from the text of an option, such as "level=2,engine=fsdp2".

    "offload=nvme" stands for "offload=optimizer,offload_device=nvme".

    Args:
        plan: the plan to change.
        text: NAME=VALUE, separated by commas; None for no change.

    Raises:
        PlanError: a name or a value is not one of a plan's sharding; several ranks and no shard axis that a level or an
            engine could be of.
    """
    if text is None:
        return plan
    settings = _settings(text)
    idle = [f"{name}={settings[name]}" for name in ("level", "engine") if name in settings]
    if idle and plan.degree("shard") == 1 and plan.world_size > 1:
        mesh = ",".join(f"{axis}={degree}" for axis, degree in plan.mesh.items() if degree > 1)
        raise PlanError(
            f"shard {text!r}: {' and '.join(idle)} with mesh {mesh}, which has no shard axis, so nothing is divided; "
            f"give --mesh shard={plan.world_size} or another mesh with a shard axis, or leave {' and '.join(idle)} out"
        )
    if settings.get("offload") == "none":  # a plan's disk is left out with what it holds
        settings.setdefault("offload_device", "cpu")
    if settings.get("offload_device") == "cpu":
        settings.setdefault("nvme_path", "")
    return replace(plan, sharding=replace(plan.sharding, **settings))


def check_sharding(text: str) -> str:
    """Return the text of the option after a check.

    Raises:
        PlanError: as `with_sharding`.
    """
    replace(ShardingPlan(), **_settings(text))
    return text


def _settings(text: str) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in _ALLOWED:
            raise PlanError(f"shard {text!r}: {part.strip()!r} is not a setting; give {', '.join(_ALLOWED)}")
        if name in settings:
            raise PlanError(f"shard {text!r}: {name} appears twice; give it once")
        if name == "offload" and value == "nvme":  # as short as what is meant
            settings.update(offload="optimizer", offload_device="nvme")
            continue
        match = next((allowed for allowed in _ALLOWED[name] if str(allowed) == value), None)
        if not _ALLOWED[name] and value:
            match = value
        if match is None:
            raise PlanError(
                f"shard {text!r}: {name} = {value!r}; give {', '.join(map(str, _ALLOWED[name])) or 'a folder'}"
            )
        settings[name] = match
    return settings
