"""TF32 is what the plan says, whatever torch allows by default."""

from collections.abc import Iterator

import pytest
import torch

from tutti.errors import PlanError
from tutti.parallel.mixed_precision import set_matmul_precision


@pytest.fixture(autouse=True)
def flags() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("precision", ["full", "bfloat16", "float16"])
def test_no_other_precision_leaves_tf32_on(precision: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    set_matmul_precision(precision, torch.device("cuda"))  # type: ignore[arg-type]
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32


def test_a_cpu_has_none() -> None:
    with pytest.raises(PlanError, match="needs an NVIDIA GPU"):
        set_matmul_precision("tf32", torch.device("cpu"))
