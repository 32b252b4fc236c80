"""A mesh in words, as users type it: "replicate=2,split=4"."""

from typing import get_args

from tutti.config.vocabulary import AxisName
from tutti.errors import PlanError


def parse_mesh(text: str) -> dict[AxisName, int]:
    """The mesh that `text` says, axes in its order, outermost first. Raises PlanError naming the part that is wrong."""
    known: tuple[AxisName, ...] = get_args(AxisName)
    mesh: dict[AxisName, int] = {}
    for part in text.split(","):
        name, _, degree = part.strip().partition("=")
        axis = next((one for one in known if one == name), None)
        if axis is None:
            raise PlanError(f"mesh {text!r}: there is no axis {name!r}; axes are {', '.join(known)}")
        if axis in mesh:
            raise PlanError(f"mesh {text!r}: {name} is there twice; name each axis once")
        if not degree.isdigit() or int(degree) < 1:
            raise PlanError(f"mesh {text!r}: {part.strip()!r} has no degree; write {name}=2")
        mesh[axis] = int(degree)
    return mesh


def mesh_in_words(mesh: dict[AxisName, int]) -> str:
    """The same, the other way round."""
    return ",".join(f"{axis}={degree}" for axis, degree in mesh.items())
