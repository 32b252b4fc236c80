"""Mesh axes as users write them: "replicate=2,split=4", or with the field's names "dp=2,tp=4"."""

import difflib
from collections.abc import Mapping
from typing import get_args

from tutti.config.vocabulary import AxisName
from tutti.errors import PlanError

AXIS_ALIASES: dict[str, AxisName] = {
    "dp": "replicate",
    "fsdp": "shard",
    "zero": "shard",
    "tp": "split",
    "pp": "stage",
    "cp": "context",
    "ep": "expert",
}
"""Common names of axes -> the axis."""

PARALLELISM: dict[AxisName, str] = {
    "replicate": "data parallel",
    "shard": "sharded data parallel",
    "expert": "expert parallel",
    "table": "embedding parallel",
    "split": "tensor parallel",
    "stage": "pipeline parallel",
    "context": "context parallel",
    "space": "spatial parallel",
}
"""Common name of the parallelism along each axis."""


def parse_axis(name: str) -> AxisName:
    """Return the axis that `name` denotes, by its own name or an alias.

    Raises:
        PlanError: there is no such axis; the message suggests the closest name.
    """
    known: tuple[AxisName, ...] = get_args(AxisName)
    for axis in known:
        if name in (axis, *(alias for alias, meant in AXIS_ALIASES.items() if meant == axis)):
            return axis
    close = difflib.get_close_matches(name, [*known, *AXIS_ALIASES], n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    aliases = ", ".join(f"{alias} ({axis})" for alias, axis in AXIS_ALIASES.items())
    raise PlanError(f"there is no axis {name!r}; {hint}axes are {', '.join(known)}; also {aliases}")


def parse_mesh(text: str) -> dict[AxisName, int]:
    """Parse the text of a mesh, such as "replicate=2,split=4"; axes are given outermost first.

    Returns:
        The degree of each axis, in the order of the text.

    Raises:
        PlanError: an axis is unknown or appears twice, or a degree is missing or below 1.
    """
    mesh: dict[AxisName, int] = {}
    names: dict[AxisName, str] = {}
    for part in text.split(","):
        name, _, degree = part.strip().partition("=")
        try:
            axis = parse_axis(name)
        except PlanError as error:
            raise PlanError(f"mesh {text!r}: {error}") from None
        if axis in mesh:
            raise PlanError(f"mesh {text!r}: {_twice(axis, names[axis], name)}")
        if not degree.isdigit() or int(degree) < 1:
            raise PlanError(f"mesh {text!r}: {part.strip()!r} has no degree of 1 or more; write {name}=2")
        mesh[axis], names[axis] = int(degree), name
    return mesh


def without_aliases(mesh: Mapping[str, object]) -> dict[str, object]:
    """Replace each alias in the `mesh` of a plan file by its axis.

    Unknown names are left for the plan's own checks.

    Raises:
        PlanError: one axis is given under two names.
    """
    names: dict[str, str] = {}
    for name in mesh:
        axis = AXIS_ALIASES.get(name, name)
        if axis in names:
            raise PlanError(_twice(axis, names[axis], name))
        names[axis] = name
    return {axis: mesh[name] for axis, name in names.items()}


def _twice(axis: str, first: str, second: str) -> str:
    if first == second:
        return f"{axis} appears twice; name each axis once"
    return f"{axis} appears twice, as {first} and as {second}; name each axis once"


def format_mesh(mesh: Mapping[AxisName, int]) -> str:
    """Format a mesh as `parse_mesh` reads it: "replicate=2,split=4"."""
    return ",".join(f"{axis}={degree}" for axis, degree in mesh.items())


def describe_axis(axis: AxisName) -> str:
    """Return the axis with its common name: "split (tensor parallel)"."""
    return f"{axis} ({PARALLELISM[axis]})"
