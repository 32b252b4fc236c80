"""One sample cut in space against one device: values, gradients, parameters, statistics."""

from typing import Any

import pytest

from against_one import assert_same_as_one
from models_space import cosmoflow, plain2d, plain2d_dropout, unet, unet_upsampled

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
    "CosmoFlow in 4": (cosmoflow, {"mesh": {"space": 4}}),
    "CosmoFlow in 2x2": (cosmoflow, {"mesh": {"space": 4}, "space_grid": (1, 2, 2)}),
}


@pytest.mark.parametrize("name", CASES)
def test_same_as_one_device(name: str) -> None:
    make, options = CASES[name]
    assert_same_as_one(make, steps=3, **options)
