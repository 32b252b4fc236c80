"""Random draws on parts, refusals while a model runs, and models whose parts are unequal."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tutti.comm.world import join_world
from tutti.config.plan import BatchPlan, LayoutRule, Plan
from tutti.errors import PlanError, ScriptError
from tutti.parallel.layout import Layout
from tutti.parallel.mesh import Mesh
from tutti.parallel.tensor import split_model
from tutti.parallel.tensor.partition_ranges import even
from tutti.parallel.tensor.tensor_activation import PartPlacement, parted, whole
from tutti.parallel.tensor.tensor_collectives import SplitGroup


def draw() -> dict[str, Any]:
    """Masks this rank sees: in parts (of 6 heads), of whole activations before and after, and again in recompute."""
    world = join_world()
    mesh = Mesh({"split": world.world_size}, world.rank)
    group = SplitGroup(handle=mesh.new_group("split"), rank=world.rank, size=world.world_size)
    place = PartPlacement(dim=1, spread=even(6, group.size), group=group)
    torch.manual_seed(5)
    before = F.dropout(torch.ones(64), 0.5)
    ones = parted(torch.ones(4, place.spread.local(group.rank), 32), place)
    mask = F.dropout(ones, 0.5)
    plain = F.dropout(ones, 0.0)
    q = parted(torch.randn(1, place.spread.local(group.rank), 16, 4), place)
    v = parted(torch.eye(16).expand(1, place.spread.local(group.rank), 16, 16).contiguous(), place)
    torch.manual_seed(6)
    attended = F.scaled_dot_product_attention(q, q, v, dropout_p=0.5)
    after = torch.rand(8)
    seen = []

    def twice(x: torch.Tensor) -> torch.Tensor:
        result = F.dropout(parted(x * 1.0, place), 0.5)
        seen.append(whole(result).detach().clone())
        return whole(result * result)

    leaf = torch.ones(4, place.spread.local(group.rank), 32, requires_grad=True)
    checkpoint(twice, leaf, use_reentrant=False).sum().backward()
    return {
        "before": before, "mask": whole(mask), "plain": whole(plain), "attended": whole(attended) == 0,
        "after": after, "recomputed": seen,
    }  # fmt: skip


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class Writes(nn.Module):
    """Does what cannot be done with a part: writes into it, or takes it past torch's functions."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.down, self.how = nn.Linear(8, 6), nn.Linear(6, 3), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        if self.how == "item":
            y[:, 0] = 0.0
        elif self.how == "method":
            y.index_fill_(1, torch.tensor([0]), 0.0)
        elif self.how == "out":
            torch.cumsum(y, 1, out=y)
        else:
            y = Twice.apply(y)  # type: ignore[no-untyped-call]
        return self.down(y)


def refusals() -> dict[str, str]:
    """What is said, on this rank, where a model's code cannot be followed."""
    world = join_world()
    mesh = Mesh({"split": world.world_size}, world.rank)
    plan = Plan(batch=BatchPlan(global_batch_size=1), mesh={"split": mesh.world_size})
    said = {}
    for how in ("item", "method", "out", "function"):
        torch.manual_seed(0)
        model = Writes(how)
        split_model(model, plan, Layout.of(model, mesh))
        try:
            model(torch.ones(2, 8)).sum().backward()
        except ScriptError as error:
            said[how] = str(error)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    dense = [p.detach().clone() for p in model.parameters()]
    rules = tuple(LayoutRule(modules=name, placement="split") for name in "01")
    split_model(model, Plan(batch=plan.batch, mesh=plan.mesh, layout=rules), Layout.of(model, mesh))
    narrow = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 3))
    try:
        split_model(narrow, Plan(batch=plan.batch, mesh=plan.mesh, layout=rules), Layout.of(narrow, mesh))
    except PlanError as error:
        said["narrow"] = str(error)
    hidden = F.linear(dense[0][torch.tensor([0, 2, 1])], dense[1], dense[2]).relu()
    output = whole(model(torch.tensor([0, 2, 1])))
    said["unequal parts"] = str(float((output - F.linear(hidden, dense[3], dense[4])).abs().max()))
    said["shown"] = repr(model[1](torch.ones(1, 4)))
    try:
        model(torch.tensor([5]))
    except RuntimeError as error:
        said["index"] = str(error)
    return said
