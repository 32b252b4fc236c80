"""Linear layers divided over ranks that compute different samples, against one device: a CNN with a wide classifier."""

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from against_one import Subject, Trained, assert_agree, on_many
from trainer.several import Case, on_ranks, once
from tutti.config.plan import BatchPlan, LayoutRule, Plan, ShardingPlan
from tutti.errors import PlanError
from tutti.parallel.embedding.table_linear import DividedLinear
from tutti.parallel.preview import explain_layout
from tutti.trainer.metrics import read_rows

HELD = {"wide.weight": (37, 149), "wide.bias": (37,), "narrow.weight": (5, 37), "narrow.bias": (5,)}
"""Whole shapes of what is divided in `Wide`."""


class Wide(nn.Module):
    """A CNN with batch statistics, and two linear layers whose widths nothing divides."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(3)
        self.wide = nn.Linear(149, 37, bias=bias)
        self.between = nn.BatchNorm1d(37)
        self.narrow = nn.Linear(37, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2, ceil_mode=True)
        x = torch.cat([x.flatten(1), x.flatten(1)[:, 1:].square()], 1)
        return self.narrow(F.relu(self.between(self.wide(x))))


class Tokens(nn.Module):
    """Rows are tokens, not samples; the first layer's input needs no gradient; one weight is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 11)
        self.mix = nn.TransformerEncoderLayer(11, 1, 23, dropout=0.0, batch_first=True)
        self.frozen = nn.Linear(11, 11, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.head = nn.Linear(11, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.mix(self.enter(x)))).mean(1)


def images(**fields: Any) -> Subject:
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(
        torch.randn(26, 1, 10, 10, generator=generator, dtype=torch.float64),
        torch.randint(0, 5, (26,), generator=generator),
    )
    return Subject(model=fields.pop("model", Wide), data=data, loss_fn=F.cross_entropy, **{"batch": 9, **fields})


def sgd() -> Subject:
    made = functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True)
    return images(model=Narrower, optimizer=made, rate=0.1, job={"clip_norm": 0.3})


class Narrower(Wide):
    """Without the bias before batch statistics, whose gradient is nothing but rounding."""

    def __init__(self) -> None:
        super().__init__(bias=False)


def adam() -> Subject:
    return images(model=Narrower, job={"clip_norm": 0.5})


def tokens() -> Subject:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(20, 4, 6, generator=generator, dtype=torch.float64)
    data = TensorDataset(x, torch.randint(0, 7, (20,), generator=generator))
    made = functools.partial(torch.optim.SGD, momentum=0.9)  # keys' biases have no gradient but rounding
    return Subject(model=Tokens, data=data, loss_fn=F.cross_entropy, batch=7, optimizer=made, rate=0.1)


def says(**placements: str) -> dict[str, Any]:
    return {"layout": tuple(LayoutRule(modules=name, placement=word) for name, word in placements.items())}  # type: ignore[arg-type]


def look(run: Any) -> dict[str, Any]:
    """Shapes that this rank holds, and values that it sent over `table` in all steps."""
    shapes = {name: tuple(p.shape) for name, p in run.parallel.model.named_parameters()}
    if not run.parallel.world.is_main:
        return shapes
    channels = [channel for row in read_rows(run.output.folder.metrics) for channel in row.get("communication", ())]
    kinds = ("activations", "gradients")
    sent = {kind: sum(channel["nbytes"] for channel in channels if channel["carried"] == kind) for kind in kinds}
    return {**shapes, **sent}


COLUMNS = says(wide="column", narrow="column")
ROWS = says(wide="row", narrow="row")
BOTH = says(wide="split", narrow="row")
EVERY = says(enter="column", **{"mix.linear1": "column", "mix.linear2": "row", "frozen": "row", "head": "row"})
AGAIN = {"layout": (*EVERY["layout"], LayoutRule(modules="mix", recompute=True))}
CASES: dict[int, dict[str, Case]] = {
    1: {"one rank": (adam, {"mesh": {"table": 1}, **BOTH})},
    2: {
        "columns": (adam, {"mesh": {"table": 2}, **COLUMNS}),
        "rows, unequal": (sgd, {"mesh": {"table": 2}, "shares": (1.0, 3.0), **ROWS}),
        "tokens": (tokens, {"mesh": {"table": 2}, **EVERY}),
    },
    3: {
        "columns and rows, unequal": (adam, {"mesh": {"table": 3}, "shares": (2.0, 1.0, 3.0), **BOTH}),
        "columns, a rank without a share": (sgd, {"mesh": {"table": 3}, "shares": (1.0, 0.0, 1.0), **COLUMNS}),
        "tokens, rows": (tokens, {"mesh": {"table": 3}, **says(enter="row", head="split")}),
    },
    4: {
        "x replicate": (adam, {"mesh": {"table": 2, "replicate": 2}, **BOTH}),
        "replicate x": (sgd, {"mesh": {"replicate": 2, "table": 2}, "shares": (1.0, 2.0, 1.0, 1.0), **COLUMNS}),
        "x shard, level 1": (adam, {"mesh": {"table": 2, "shard": 2}, "sharding": ShardingPlan(level=1), **BOTH}),
        "x shard, level 3": (adam, {"mesh": {"shard": 2, "table": 2}, "sharding": ShardingPlan(level=3), **BOTH}),
        "tokens, recomputed": (tokens, {"mesh": {"table": 4}, **AGAIN}),
    },
}  # fmt: skip


@functools.cache
def results(ranks: int) -> list[dict[str, Trained]]:
    plans = {name: (make, {**plan, "batch": {"num_microbatches": 2}}) for name, (make, plan) in CASES[ranks].items()}
    return on_ranks(plans, ranks, look=look)


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, cases in CASES.items() for name in cases])
def test_divided_layers_learn_as_one_device_does(ranks: int, name: str) -> None:
    make, plan = CASES[ranks][name]
    many = [result[name] for result in results(ranks)]
    assert_agree(once(make), many)
    if make is tokens or "shard" in plan["mesh"]:
        return
    divided = {rule.modules: rule.placement for rule in plan["layout"]}
    copies = ranks // plan["mesh"]["table"]
    for layer, word in divided.items():
        rows, columns = HELD[f"{layer}.weight"]
        by_rows = word == "row" or (word == "split" and rows < columns)
        widths = [one.facts[f"{layer}.weight"][by_rows] for one in many]
        assert sum(widths) == copies * (columns if by_rows else rows)
        assert max(widths) - min(widths) <= 1
        assert {one.facts[f"{layer}.weight"][not by_rows] for one in many} == {rows if by_rows else columns}


def test_activations_are_sent_and_no_gradients_of_what_is_divided() -> None:
    """4 steps of 9, 9, 8 and 9 samples in two microbatches, shared by 2 ranks: rank 0 has the smaller halves."""
    columns = results(2)[0]["columns"].facts
    mine = [sizes for size in (9, 9, 8, 9) for sizes in ((size // 2) // 2, (size - size // 2) // 2)]
    theirs = [sizes for size in (9, 9, 8, 9) for sizes in (-(-(size // 2) // 2), -(-(size - size // 2) // 2))]
    values = 0
    for inputs, outputs in ((149, 37), (37, 5)):
        own = outputs // 2
        values += sum(a * inputs + b * own for a, b in zip(mine, theirs, strict=True))  # rows there, outputs back
        values += sum(a * (outputs - own) + b * inputs for a, b in zip(mine, theirs, strict=True))  # and gradients
    assert columns["activations"] == 8 * values
    whole = sum(p.numel() for name, p in Narrower().named_parameters() if "wide" not in name and "narrow" not in name)
    assert columns["gradients"] == 4 * 8 * whole  # 2 (P - 1) / P of them in every step


def single() -> Subject:
    torch.set_default_dtype(torch.float32)
    made = functools.partial(torch.optim.SGD, momentum=0.9)
    subject = images(model=Narrower, optimizer=made, rate=0.05)
    subject.data.tensors = (subject.data.tensors[0].float(), subject.data.tensors[1])
    return subject


@pytest.mark.long
def test_in_bfloat16_ranks_agree_to_its_rounding() -> None:
    """To what the matrix of plans asks of bfloat16: 5 % of a gradient's norm."""
    options = {"dtype": torch.float32, "steps": 3, "precision": "bfloat16"}
    one = on_many(single, mesh={"replicate": 1}, **options)[0]
    for got in on_many(single, mesh={"table": 2}, **BOTH, **options):
        assert got.losses == pytest.approx(one.losses, rel=5e-3)
        for name, value in one.gradients[0].items():
            assert float((got.gradients[0][name] - value).norm() / value.norm()) < 0.05, name


def tied() -> Subject:
    def model() -> nn.Module:
        built = Wide()
        built.narrow = nn.Linear(37, 37)
        built.again = nn.Linear(37, 37)
        built.again.weight = built.narrow.weight
        return built

    return images(model=model)


def heads() -> Subject:
    return images(model=lambda: nn.Sequential(nn.MultiheadAttention(4, 1)))


def test_what_cannot_work_is_refused_before_anything_starts() -> None:
    mesh = {"mesh": {"table": 4}}
    chunks = {"layout": (LayoutRule(modules="wide", placement="column", chunks=2),)}
    cases: dict[str, Case] = {
        "no layout rule names a linear layer": (images, mesh),
        "are one tensor": (tied, {**mesh, **says(narrow="split")}),
        "has 5 outputs, fewer than mesh.table = 6": (images, {"mesh": {"table": 6}, **says(narrow="column")}),
        "used by other code": (heads, {**mesh, **says(**{"0.out_proj": "column"})}),
        "runs in chunks": (images, {**mesh, **chunks}),
        "mesh.space = 2": (images, {"mesh": {"table": 2, "space": 2}, **BOTH}),
    }
    for words, (make, plan) in cases.items():
        with pytest.raises(PlanError, match=words):
            explain_layout(make().model(), Plan(batch=BatchPlan(global_batch_size=8), **plan))


def test_a_copied_or_pickled_layer_has_its_plain_forward() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    model[0].forward = DividedLinear(model[0], (0, 1, 2), True, None)  # type: ignore[arg-type]
    copied = copy.deepcopy(model)
    assert copied[0].forward.module is copied[0]
    loaded = pickle.loads(pickle.dumps(model))
    x = torch.randn(4, 3)
    torch.testing.assert_close(loaded(x), F.linear(x, model[0].weight, model[0].bias))
