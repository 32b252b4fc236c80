"""Every function that a cut tensor knows against the same function of the whole tensor: values and gradients."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import run_ranks
from spatial_operators import Op, functions, modules
from tutti.comm.world import join_world
from tutti.errors import PlanError
from tutti.parallel.mesh import Mesh
from tutti.parallel.spatial import whole
from tutti.parallel.spatial.apply_spatial_parallel import HANDLING, open_space
from tutti.parallel.spatial.halo_exchange import SpatialGroup
from tutti.parallel.spatial.spatial_tensor import cut_whole

SHAPES = {1: (2, 4, 13), 2: (2, 4, 14, 11), 3: (2, 4, 13, 12, 9)}


def space_on(grid: tuple[int, ...]) -> SpatialGroup:
    torch.set_default_dtype(torch.float64)
    assert HANDLING
    world = join_world()
    return open_space(Mesh({"space": world.world_size}, world.rank), grid)


def difference(op: Op, shape: tuple[int, ...], space: SpatialGroup) -> float:
    """Largest difference, over values, input gradient and parameter gradients, relative to their largest value."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    results = []
    for parts in (False, True):
        leaf = x.clone().requires_grad_()
        output = op(cut_whole(leaf, 2, space) if parts else leaf)
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
        loss = (output * weights).sum()
        parameters = [leaf, *(op.parameters() if isinstance(op, nn.Module) else ())]
        gradients = torch.autograd.grad(loss / (math.prod(space.grid) if parts else 1), parameters)
        if parts:
            for gradient in gradients:
                dist.all_reduce(gradient)
        results.append([whole(output).detach(), *gradients])
    for ours, theirs in zip(*results, strict=True):
        assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return max(float((a - b).abs().max()) / max(float(a.abs().max()), 1e-300) for a, b in zip(*results, strict=True))


def differences(grid: tuple[int, ...], overlap: bool) -> dict[str, Any]:
    space = space_on(grid)
    space.overlap = overlap
    ops = {name: (op, SHAPES[len(grid)]) for name, op in modules(len(grid)).items()}
    if len(grid) == 2:
        ops |= {name: (op, SHAPES[2]) for name, op in functions().items()}
    found: dict[str, Any] = {}
    for name, (op, shape) in ops.items():
        try:
            found[name] = difference(op, shape, space)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.parametrize(
    ("grid", "ranks", "overlap"),
    [((3,), 3, True), ((2, 2), 4, True), ((1, 3), 3, False), ((2, 1, 2), 4, True), ((2, 1, 1), 2, True)],
)
def test_parts_are_the_whole(grid: tuple[int, ...], ranks: int, overlap: bool) -> None:
    for rank, found in enumerate(run_ranks(differences, ranks, grid, overlap)):
        wrong = {name: gap for name, gap in found.items() if isinstance(gap, str) or not gap <= 1e-12}
        assert not wrong, f"rank {rank}: {wrong}"


def shown_and_copied() -> dict[str, Any]:
    """What a cut tensor says of itself, and a deep copy of one."""
    space = space_on((2,))
    x = torch.arange(30.0).reshape(1, 2, 15)
    part = cut_whole(x.clone(), 2, space)
    copied = copy.deepcopy(part)
    part.mul_(2)
    return {
        "shown": repr(part),
        "formatted": f"{part}",
        "sizes": (tuple(part.shape), part.size(2), part.size(dim=-1), part.numel(), len(part), part.dim(), part.ndim),
        "by keyword": tuple(torch.relu(input=part).shape),
        "copied": bool((whole(copied) == x).all()),
    }


def test_a_part_shows_the_whole_shape_and_can_be_copied() -> None:
    for found in run_ranks(shown_and_copied, 2):
        assert found["shown"].startswith("SpatialTensor(whole (1, 2, 15), dims [2] cut, local tensor(")
        assert found["formatted"] == found["shown"]
        assert found["sizes"] == ((1, 2, 15), 15, 15, 30, 1, 3, 3)
        assert found["by keyword"] == (1, 2, 15)
        assert found["copied"]


def in_bfloat16() -> dict[str, float]:
    """Layers under autocast, on parts and whole."""
    space = space_on((2,))
    torch.set_default_dtype(torch.float32)
    names = ("conv 3 1d", "conv strided 1d", "transposed 3 1d", "max pool 3 1d", "group norm 1d", "to one 1d")
    with torch.autocast("cpu", torch.bfloat16):
        return {name: difference(modules(1)[name], SHAPES[1], space) for name in names}


def test_parts_under_autocast_are_as_close_as_its_precision() -> None:
    for found in run_ranks(in_bfloat16, 2):
        assert all(gap < 0.02 for gap in found.values()), found


def refusals() -> list[str]:
    space = space_on((1, 2))
    x = cut_whole(torch.randn(2, 4, 6, 8), 2, space)
    conv = nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")
    for name, function in {
        "unknown function": lambda: torch.linalg.svd(x),
        "circular padding": lambda: conv(x),
        "indices": lambda: nn.functional.max_pool2d(x, 2, return_indices=True),
        "other size": lambda: x + torch.randn(6, 3),
        "cubic": lambda: nn.functional.interpolate(x, scale_factor=2, mode="bicubic"),
        "random": lambda: torch.rand_like(x),
        "matrix product": lambda: x @ x,
        "written into a whole one": lambda: torch.zeros(2, 4, 6, 8).add_(x),
        "output": lambda: torch.add(x, x, out=torch.zeros(2, 4, 6, 8)),
        "batch norm": lambda: nn.functional.batch_norm(x, None, None, training=True),
        "write": lambda: x.__setitem__((0, 0), 1.0),
        "geometry of memory": lambda: x.as_strided((2,), (1,)),
    }.items():
        try:
            function()
        except PlanError:
            continue
        return [f"{name} was not refused"]
    return []


def test_what_is_not_known_is_refused() -> None:
    assert run_ranks(refusals, 2) == [[], []]


def kept_by_convolutions() -> tuple[int, int]:
    """(values that two activations and convolutions keep for backward, values of the parts and halos that pass)."""
    space = space_on((2,))
    torch.manual_seed(0)
    layers = [nn.Conv1d(4, 4, 3, padding=1), nn.Conv1d(4, 4, 3, padding=1)]
    x = cut_whole(torch.randn(2, 4, 64, requires_grad=True), 2, space)
    constants = {p.untyped_storage().data_ptr() for layer in layers for p in layer.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in constants:
            kept[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for layer in layers:
            x = layer(torch.relu(x))
    return sum(kept.values()), 2 * (2 * 4 * 32 + 2 * 4)


def test_a_convolution_keeps_its_rows_and_the_halos_and_no_second_copy() -> None:
    for kept, passed in run_ranks(kept_by_convolutions, 2):
        assert kept == passed
