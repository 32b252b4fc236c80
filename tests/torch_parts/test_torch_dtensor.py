"""DTensor: what docs/decisions/dtensor.md says it cannot do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

from harness import RankFailed, run_ranks
from torch_parts.limits import attempt, join_gloo, still_limited

RECORD = "dtensor"


def convolution(mesh: DeviceMesh) -> Any:
    """(placements, global shape, local shape) of a convolution of an image that is cut in height."""
    image = distribute_tensor(torch.randn(2, 4, 16, 16), mesh, [Shard(2)])
    weight = distribute_tensor(torch.randn(6, 4, 3, 3), mesh, [Replicate()])
    out = torch.conv2d(image, weight, padding=1)
    return str(out.placements), tuple(out.shape), tuple(out.to_local().shape)


def causal_attention(mesh: DeviceMesh) -> Any:
    heads = distribute_tensor(torch.randn(2, 4, 8, 16), mesh, [Shard(1)])
    attention = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    return str(attention.placements)


def recurrent(mesh: DeviceMesh) -> Any:
    layer = nn.LSTM(4, 4)
    distribute_module(layer, mesh)
    return tuple(layer(torch.randn(3, 2, 4))[0].shape)


def norm_over_meshes(mesh: DeviceMesh) -> Any:
    grid = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("dp", "tp"))
    parameters = [
        nn.Parameter(distribute_tensor(torch.ones(4, 4), grid["tp"], [Shard(0)])),
        nn.Parameter(distribute_tensor(torch.ones(4, 4), grid["dp"], [Replicate()])),
    ]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return float(nn.utils.clip_grad_norm_(parameters, 1.0))


def try_one(function: Callable[[DeviceMesh], Any]) -> Any:
    _, world_size = join_gloo()
    return attempt(lambda: function(init_device_mesh("cpu", (world_size,))))


def test_dtensor_convolution_of_a_cut_image_is_silently_wrong() -> None:
    placements, shape, local_shape = run_ranks(try_one, 2, convolution)[0]
    assert shape == (2, 6, 16, 16)
    wrong = "Replicate" in placements and local_shape != shape
    still_limited(wrong, RECORD, "convolves images that are cut in space")


@pytest.mark.parametrize(
    ("function", "reason", "learned"),
    [
        (causal_attention, "NotImplementedError", "has a sharding strategy for attention on CPUs"),
        (recurrent, "Error", "runs LSTMs on distributed parameters"),
        (norm_over_meshes, "same mesh", "clips gradients over parameters of several meshes"),
    ],
)
def test_dtensor_refuses_layers_that_tutti_divides(function: Any, reason: str, learned: str) -> None:
    result = run_ranks(try_one, 2, function)[0]
    still_limited(reason in str(result), RECORD, learned)


def unequal_shards() -> Any:
    rank, world_size = join_gloo()
    mesh = init_device_mesh("cpu", (world_size,))
    part = torch.ones(3 if rank == 0 else 1)
    tensor = DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=torch.Size([4]), stride=(1,))
    return tensor.full_tensor().tolist()


def test_dtensor_cannot_hold_shards_of_chosen_sizes() -> None:
    try:
        gathered = run_ranks(unequal_shards, 2, timeout_s=30)[0]
    except RankFailed:
        return
    still_limited(gathered != [1.0] * 4, RECORD, "gathers shards of 3 and 1 elements")
