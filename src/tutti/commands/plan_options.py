"""The options of `tutti plan`, of the command and of the function."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from tutti.commands.capture import SCRIPT_TIMEOUT_S
from tutti.commands.values import (
    compression_of,
    duration_of,
    mesh_text,
    one_of,
    path_of,
    path_or,
    paths_of,
    positive,
    seconds_above_0,
    size_of,
    texts_of,
    whole,
)
from tutti.config.cluster import ClusterSpec
from tutti.config.model import ModelSpec
from tutti.config.plan import Plan
from tutti.config.vocabulary import Precision, Relaxation, Unit

if TYPE_CHECKING:
    from tutti.config.compression import Compression
    from tutti.planner import Objective, PrecisionPolicy

OBJECTIVES: "tuple[Objective, ...]" = ("throughput", "device-hours", "cost", "energy", "memory", "time-to-quality")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What `tutti plan` is asked for; `tutti.plan` and `tutti.explain` say what each option means."""

    target: tuple[str, ...] = ()
    cluster: "Path | ClusterSpec | None" = None
    model: "Path | ModelSpec | None" = None
    global_batch_size: int | None = None
    unit: Unit = "samples"
    max_devices: int | None = None
    nproc: int | None = None
    precision: "PrecisionPolicy | None" = None
    allow_microbatches: bool = False
    data_parallel: bool = False
    objective: "Objective" = "throughput"
    epochs: float | None = None
    samples: float | None = None
    memory: float | None = None
    budget: float | None = None
    deadline: float | None = None
    critical_batch: float | None = None
    least_samples: float | None = None
    noise_from: Path | None = None
    target_quality: str | None = None
    seconds: float | None = None
    samples_from: tuple[Path, ...] = ()
    what_if: tuple[str, ...] = ()
    diff: tuple[Path, Path] | None = None
    top: int = 10
    html: Path | None = None
    scaling: bool = False
    tries: int | None = None
    try_steps: int = 8
    output: Path | None = None
    mesh: str | None = None
    compress: "Compression | None" = None
    relax: Relaxation = "exact"
    plan: "Path | Plan | None" = None
    explain: bool = False
    as_json: bool = False
    timeout_s: float = SCRIPT_TIMEOUT_S
    share_device: bool = False
    on: str | None = None
    nnodes: int | None = None
    hosts: str | None = None
    requests: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    links: str | None = None
    prices: tuple[tuple[str, float], ...] = ()


def _choice(*allowed: Any) -> Callable[[str, Any], Any]:
    return lambda name, value: one_of(name, value, allowed)


READ: dict[str, Callable[[str, Any], Any]] = {
    "cluster": lambda name, value: path_or(name, ClusterSpec, value),
    "model": lambda name, value: path_or(name, ModelSpec, value),
    "plan": lambda name, value: path_or(name, Plan, value),
    "mesh": lambda name, value: mesh_text(value),
    "compress": lambda name, value: compression_of(value),
    "unit": _choice(*get_args(Unit)),
    "precision": _choice(None, "script", "auto", *get_args(Precision)),
    "objective": _choice(*OBJECTIVES),
    "relax": _choice(*get_args(Relaxation)),
    "prices": lambda name, value: tuple((str(key), float(price)) for key, price in (value or {}).items()),
    "settings": lambda name, value: dict(value or {}),
    "memory": size_of,
    "deadline": duration_of,
    "samples_from": lambda name, value: paths_of(name, value),
    "what_if": lambda name, value: texts_of(value, name, "['link=10gbit']"),
    **dict.fromkeys(("nproc", "max_devices", "global_batch_size", "tries", "try_steps", "nnodes"), whole),
    **dict.fromkeys(("epochs", "samples", "budget", "critical_batch", "least_samples", "seconds"), positive),
    **dict.fromkeys(("noise_from", "output"), lambda name, value: path_of(name, value)),
}
"""How the argument of a function is read for the option of that name; others are taken as they are."""


def options_of(arguments: Mapping[str, Any]) -> PlanOptions:
    """Return the options of `tutti.plan` or `tutti.explain` for the arguments of a call.

    Raises:
        SpecError: an argument has no value that the option may have.
    """
    given = dict(arguments)
    script, words, timeout = given.pop("script"), texts_of(given.pop("arguments")), given.pop("timeout")
    given.pop("verbose")
    return PlanOptions(
        target=(str(script), *words) if script is not None else (),
        timeout_s=seconds_above_0("timeout", timeout),
        **{name: READ[name](name, value) if name in READ else value for name, value in given.items()},
    )
