"""Ties: a parameter that several stages hold is one parameter: its gradient is summed over them in every step."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tutti.comm.point_to_point import ring_all_reduce_nbytes
from tutti.parallel.data.buckets import Group
from tutti.parallel.layout import Layout
from tutti.parallel.mesh import Mesh


class Ties:
    """Sums gradients over the ranks that hold a parameter. `shared`: names by positions along the stage axis.

    Making one is collective.
    """

    def __init__(self, shared: Mapping[tuple[int, ...], Sequence[str]], layout: Layout) -> None:
        mesh, channel = layout.mesh, layout.channel("gradients", "stage")
        self._shared = [
            (names, Group(group, len(positions), channel))
            for (positions, names), group in zip(shared.items(), groups_at(mesh, shared), strict=True)
            if mesh.index("stage") in positions
        ]

    def sum(self, model: nn.Module) -> None:
        """Make gradients of shared parameters equal on all ranks that hold them; None where none has one."""
        for names, group in self._shared:
            parameters = [model.get_parameter(name) for name in names]
            for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
                _sum([parameter for parameter in parameters if parameter.dtype == dtype], group)


def _sum(parameters: list[nn.Parameter], group: Group) -> None:
    flags = [float(parameter.grad is not None) for parameter in parameters]
    parts = [
        (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).to_dense().flatten()
        for parameter in parameters
    ]
    flat = torch.cat([*parts, torch.tensor(flags, dtype=parts[0].dtype, device=parts[0].device)])
    with group.channel.waiting(ring_all_reduce_nbytes(flat, group.size)):
        dist.all_reduce(flat, group=group.handle)
    *sums, seen = torch.split(flat, [*(part.numel() for part in parts), len(parts)])
    for parameter, total, one in zip(parameters, sums, seen.tolist(), strict=True):
        parameter.grad = total.view_as(parameter).clone() if one else None


def groups_at(mesh: Mesh, sets: Iterable[tuple[int, ...]]) -> list[Any]:
    """For each set of positions along the stage axis: the group of this rank's stage-axis ranks there (None where this
    rank is not among them). Collective; all ranks must ask for the same sets.
    """
    wanted = list(sets)
    if not wanted:
        return []
    lines: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(lines, mesh.ranks("stage"))
    own: list[Any] = []
    for positions in wanted:
        mine = None
        for line in dict.fromkeys(tuple(ranks) for ranks in lines):
            group = dist.new_group([line[position] for position in positions])
            if mesh.rank in (line[position] for position in positions):
                mine = group
        own.append(mine)
    return own
