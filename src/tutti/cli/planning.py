"""What commands that plan have in common: from a captured script to a ModelSpec and a Choice."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti.errors import SpecError
from tutti.plan import Choice, PrecisionPolicy, Request, choose
from tutti.spec import codec
from tutti.spec.cluster import ClusterSpec
from tutti.spec.model import ModelSpec

if TYPE_CHECKING:
    from tutti.runtime.capture import Captured


def model_spec_of(captured: "Captured", *, name: str = "model") -> ModelSpec:
    """The ModelSpec of what a script gave to `Job.prepare`. Raises DataError where no sample can be had."""
    from tutti.cli.describe import describe_captured

    return describe_captured(captured, name=name)


def plan_for(
    captured: "Captured",
    cluster: ClusterSpec,
    *,
    name: str = "model",
    nproc: int | None = None,
    max_devices: int | None = None,
    precision: PrecisionPolicy = "script",
    allow_microbatches: bool = False,
) -> Choice:
    """Choose a plan for a captured script: its batch, layout and sync stay; `nproc` fixes the number of ranks.

    Raises PlanError where nothing fits.
    """
    request = Request(
        script=captured.plan,
        max_devices=max_devices,
        degree=nproc,
        precision=precision,
        allow_microbatches=allow_microbatches,
    )
    return choose(model_spec_of(captured, name=name), cluster, request)


def write_spec(value: Any, output: Path) -> None:
    """Write a spec where the user asked for it. Raises SpecError where that is impossible."""
    try:
        codec.save(value, output)
    except OSError as error:
        raise SpecError(
            f"the {type(value).__name__} cannot be written to {output} ({error.strerror}); name another file"
        ) from None
