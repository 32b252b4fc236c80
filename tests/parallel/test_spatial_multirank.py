"""One sample cut in space against one device: values, gradients, parameters, statistics."""

import functools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from against_one import Trained, assert_agree, assert_same_as_one, on_many, on_one
from harness import run_ranks
from spatial_models import (
    Plain2d,
    UNet3d,
    cosmoflow,
    plain2d,
    plain2d_dropout,
    unet,
    unet_from_file,
    unet_upsampled,
    write_volumes,
)
from tutti.comm.world import join_world
from tutti.config.plan import BatchPlan, LayoutRule, Plan
from tutti.errors import PlanError
from tutti.parallel.data.batchnorm import BatchScope
from tutti.parallel.layout import Layout
from tutti.parallel.mesh import Mesh
from tutti.parallel.spatial.apply_spatial_parallel import cut_space, halo_nbytes_of

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "2-D CNN in 2": (plain2d, {"mesh": {"space": 2}}),
    "2-D CNN in 3, accumulated": (plain2d, {"mesh": {"space": 3}, "batch": {"num_microbatches": 2}}),
    "2-D CNN in 2x2 with dropout and clipping": (plain2d_dropout, {"mesh": {"space": 4}, "space_grid": (2, 2)}),
    "2-D CNN in 2, 2 replicas, accumulated": (
        plain2d,
        {"mesh": {"replicate": 2, "space": 2}, "batch": {"num_microbatches": 2}},
    ),
    "U-Net in 4": (unet, {"mesh": {"space": 4}}),
    "U-Net in 2x1x2": (unet, {"mesh": {"space": 4}, "space_grid": (2, 1, 2)}),
    "U-Net in 3": (unet, {"mesh": {"space": 3}, "space_grid": (1, 3)}),
    "U-Net in 2, 2 replicas": (unet, {"mesh": {"space": 2, "replicate": 2}, "space_grid": (1, 1, 2)}),
    "up-sampling U-Net in 2x2": (unet_upsampled, {"mesh": {"space": 4}, "space_grid": (2, 2)}),
    "up-sampling U-Net in 3": (unet_upsampled, {"mesh": {"space": 3}}),
    "U-Net in 2, recomputed": (unet, {"mesh": {"space": 2}, "layout": (LayoutRule(modules="down*", recompute=True),)}),
    "CosmoFlow in 4": (cosmoflow, {"mesh": {"space": 4}}),
    "CosmoFlow in 2x2": (cosmoflow, {"mesh": {"space": 4}, "space_grid": (1, 2, 2)}),
}


@pytest.mark.parametrize("name", CASES)
def test_same_as_one_device(name: str) -> None:
    make, options = CASES[name]
    assert_agree(
        one_device(make, options.get("batch", {}).get("num_microbatches", 1)), on_many(make, steps=3, **options)
    )


@functools.cache
def one_device(make: Any, num_microbatches: int) -> Trained:
    return on_one(make, steps=3, batch={"num_microbatches": num_microbatches})


def bytes_read(run: Any) -> dict[str, Any]:
    return {"nbytes": run.state.loader.source.dataset.nbytes_read, "sent": run.parallel.model.forward.space.sent_nbytes}


def test_a_rank_reads_its_part_of_a_file(tmp_path: Path) -> None:
    path = str(tmp_path / "volumes.h5")
    write_volumes(path)
    plan: dict[str, Any] = {"mesh": {"space": 2}, "space_grid": (1, 2), "batch": {"num_microbatches": 2}}
    many = assert_same_as_one(functools.partial(unet_from_file, path), steps=4, look=bytes_read, **plan)
    sample = 10 * 9 * 12 * (8 + 8)
    assert many[1].facts["nbytes"] == 4 * 4 * sample * 5 // 9  # 4 steps of 4 samples, 5 of 9 rows
    assert many[1].facts["sent"] > 0


def test_what_is_sent_is_foreseen() -> None:
    grid = (2, 1, 2)
    many = on_many(unet, steps=2, mesh={"space": 4}, space_grid=grid, look=sent)
    for rank, trained in enumerate(many):
        forward, backward = halo_nbytes_of(UNet3d(), (4, 1, 10, 9, 12), grid, rank, torch.float64)
        assert trained.facts["sent"] == 2 * (forward + backward)
        assert forward > 0


def sent(run: Any) -> dict[str, Any]:
    return {"sent": run.parallel.model.forward.space.sent_nbytes}


def refused() -> list[str]:
    """What cannot be cut is said before anything is computed."""
    join_world()
    found = []
    for model, grid, axes in (
        (nn.Linear(3, 3), (), {"space": 2}),
        (Plain2d(), (1, 1, 2), {"space": 2}),
        (UNet3d(), (), {"space": 2, "stage": 1}),
    ):
        mesh = Mesh({"space": 2}, 0)
        plan = Plan(batch=BatchPlan(global_batch_size=2), mesh=axes, space_grid=grid)
        try:
            cut_space(model, plan, Layout.of(model, mesh), BatchScope())
            found.append("built")
        except PlanError as error:
            found.append(str(error))
    copy = pickle.loads(pickle.dumps(model))  # the ranks are not part of a pickled model
    found.append(str(copy(torch.zeros(1, 1, 8, 8, 8)).shape))
    return found


def test_refusals_name_the_remedy() -> None:
    linear, dims, built, shape = run_ranks(refused, 2)[0]
    assert "no convolution" in linear
    assert "at most 2 numbers" in dims
    assert built == "built"
    assert shape == "torch.Size([1, 3, 8, 8, 8])"
