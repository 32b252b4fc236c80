"""Recompute, whole and selective, and layers run in parts: the same values, less kept."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from against_one import Subject, assert_agree, on_many, on_one
from tutti.config.plan import LayoutRule
from tutti.errors import PlanError
from tutti.parallel.data.batchnorm import BatchScope, share_statistics
from tutti.parallel.offload.saved_activations import apply_offload
from tutti.parallel.recompute import apply_chunks, apply_recompute

SELECTIVE = LayoutRule(modules="blocks.*", recompute="selective")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 24), nn.Linear(24, 6)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
        return {"x": x + scale * self.down(nn.functional.gelu(self.up(self.norm(x))))}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)["x"]
        return self.head(x)  # type: ignore[no-any-return]


def subject() -> Subject:
    draw = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(30, 6, generator=draw, dtype=torch.float64), torch.arange(30) % 3)
    return Subject(model=Net, data=data, loss_fn=nn.functional.cross_entropy, batch=10)


@pytest.mark.parametrize(
    "rule",
    [SELECTIVE, LayoutRule(modules="blocks.*", chunks=3), LayoutRule(modules="blocks.1", chunks=2, recompute=True)],
    ids=["selective", "chunks", "both"],
)
def test_values_stay_the_same(rule: LayoutRule) -> None:
    layout = (LayoutRule(), rule)
    assert_agree(on_one(subject, steps=3), on_many(subject, steps=3, mesh={"replicate": 2}, layout=layout))


def kept_nbytes(model: nn.Module) -> int:
    """Bytes that autograd keeps for one backward, apart from parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(torch.randn(64, 6, generator=torch.Generator().manual_seed(0)))
    out.sum().backward()
    return sum(kept.values())


def test_less_is_kept_with_recompute_and_chunks() -> None:
    plain, again, parts = Net(), Net(), Net()
    apply_recompute(again, (LayoutRule(modules="blocks.*", recompute=True),), BatchScope())
    assert apply_chunks(parts, (LayoutRule(modules="blocks.*", chunks=4),)) == ["blocks.0", "blocks.1", "blocks.2"]
    assert kept_nbytes(again) < kept_nbytes(plain) / 3
    assert kept_nbytes(parts) < kept_nbytes(plain) / 2


class Products(TorchDispatchMode):
    """Counts matrix products with a bias, which forward alone has, as they reach the device."""

    count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += op is torch.ops.aten.addmm.default
        return op(*args, **(kwargs or {}))


def test_selective_recompute_runs_no_matrix_product_again() -> None:
    def products(rule: LayoutRule) -> int:
        model = Net()
        apply_recompute(model, (rule,), BatchScope())
        with Products() as counted:
            model(torch.randn(8, 6)).sum().backward()
        return counted.count

    none, whole = products(LayoutRule()), products(LayoutRule(modules="blocks.*", recompute=True))
    assert whole == none + 3  # of every block the first again; nobody needs the output of the last
    assert products(SELECTIVE) == none


@pytest.mark.parametrize("option", ["recompute", "chunks", "offload"])
def test_a_rule_that_matches_no_module_is_refused(option: str) -> None:
    setting: Any = 2 if option == "chunks" else True
    layout = (LayoutRule(modules="layers.*", **{option: setting}),)
    apply: dict[str, Any] = {
        "recompute": lambda model: apply_recompute(model, layout, BatchScope()),
        "chunks": lambda model: apply_chunks(model, layout),
        "offload": lambda model: apply_offload(model, layout, torch.device("cpu")),
    }
    with pytest.raises(PlanError, match="no module matches 'layers"):
        apply[option](Net())


def test_chunks_of_a_module_with_batch_statistics_are_refused() -> None:
    model = nn.ModuleDict({"conv": nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))})
    with pytest.raises(PlanError, match=r"chunks = 2 for module 'conv', but 'conv.1' normalises over the batch"):
        apply_chunks(model, (LayoutRule(modules="conv", chunks=2),))


def normed() -> nn.Module:
    """A residual block as ResNets have it, twice."""
    blocks = [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 1),
                            nn.BatchNorm2d(3, track_running_stats=False)) for _ in range(2)]  # fmt: skip
    return nn.Sequential(*blocks).double()


@pytest.mark.parametrize("how", [True, "selective"])
def test_blocks_with_batch_norms_are_recomputed_on_one_rank(how: bool | str) -> None:
    """Their statistics are taken once, their running statistics move once."""
    torch.manual_seed(0)
    plain, again = normed(), normed()
    again.load_state_dict(plain.state_dict())
    scope = BatchScope()
    assert apply_recompute(again, (LayoutRule(modules="?", recompute=how),), scope) == ["0", "1"]  # type: ignore[arg-type]
    share_statistics(again, scope)
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    for model in (plain, again):
        for part in x.split(2):  # as two microbatches do
            model(part).square().sum().backward()
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    for name, value in plain.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
