"""What a ModelSpec says of how a model's modules may be divided, and whether real runs send what follows from it."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tutti
from cost_model.examples import cluster
from harness import run_ranks
from tutti.config import serialization
from tutti.config.model import ModelSpec, ModuleSpec
from tutti.config.plan import BatchPlan, LayoutRule, PipelinePlan, Plan, ShardingPlan
from tutti.cost_model import predict
from tutti.nn import MixtureOfExperts
from tutti.parallel.capabilities import with_capabilities
from tutti.profile import describe_model
from tutti.trainer.metrics import read_rows

WIDTH, HEADS, TOKENS = 32, 4, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.merge = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.heads = HEADS
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(seen.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Vectors -> vectors, so that nothing but blocks is divided."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(6)))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def volumes() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Sequential(nn.Conv2d(4, 2, 5, padding=2)))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.moe = nn.Linear(4, 8), MixtureOfExperts(8, 16, 4, top_k=2, capacity_factor=None)
        self.table = nn.Embedding(7, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(self.inputs(x) + self.table(torch.zeros(x.shape[:-1], dtype=torch.long, device=x.device)))


def spec_of(model: nn.Module, x: Tensor, layout: tuple[LayoutRule, ...] = ()) -> ModelSpec:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spec = describe_model(model, (x,), {}, None, lambda output, _: output.square().mean(), optimizer, samples=len(x))
    return with_capabilities(spec, model, (x,), layout)


def facts(model: nn.Module, x: Tensor) -> dict[str, ModuleSpec]:
    return {module.name: module for module in spec_of(model, x).modules}


def test_a_transformer_is_divided_as_the_runtime_divides_it() -> None:
    found = facts(Model(), torch.zeros(4, TOKENS, WIDTH))
    kinds = {name.removeprefix("blocks.2"): one.split for name, one in found.items() if name.startswith("blocks.2")}
    assert kinds == {
        "": "heads", ".norm1": "", ".qkv": "column", ".merge": "row", ".norm2": "", ".mlp": "",
        ".mlp.0": "column", ".mlp.1": "column", ".mlp.2": "row",
    }  # fmt: skip
    row = TOKENS * WIDTH * 4
    assert [found[f"blocks.2.{name}"].input_nbytes for name in ("qkv", "merge", "mlp.0", "mlp.2")] == [row, 0, row, 0]
    assert [found[f"blocks.2{name}"].split_limit for name in ("", ".qkv", ".merge")] == [HEADS] * 3
    assert [found[f"blocks.2.mlp.{place}"].split_limit for place in range(3)] == [4 * WIDTH] * 3  # units
    assert [found[name].block for name in ("blocks.0.qkv", "blocks.5", "head", "")] == [0, 5, -1, -1]
    assert found["blocks.1"].key_value_nbytes == 2 * row


def test_norms_are_divided_by_tokens_where_the_layout_says_so_and_only_there() -> None:
    x, rows = torch.zeros(4, TOKENS, WIDTH), (LayoutRule(modules="blocks.[0-3].norm?", placement="row"),)
    found = {module.name for module in spec_of(Model(), x, rows).modules if module.sequence}
    assert found == {f"blocks.{block}.norm{number}" for block in range(4) for number in (1, 2)}
    assert not any(module.sequence for module in spec_of(Model(), x).modules)


def test_volumes_say_what_crosses_a_cut() -> None:
    found = facts(volumes(), torch.zeros(4, 1, 8, 16))
    assert found["0"].halo_nbytes_by_dim == (2 * 16 * 4, 2 * 8 * 4)  # a row to each side
    assert found["2.0"].halo_nbytes_by_dim == (4 * 4 * 16 * 4, 4 * 4 * 8 * 4)  # two rows of 4 channels
    assert found["1"].halo_nbytes_by_dim == found["2"].halo_nbytes_by_dim == (0, 0)
    assert all(found[name].spatial for name in ("0", "1", "2.0"))
    assert not facts(nn.Sequential(nn.Linear(4, 4)), torch.zeros(4, 4))["0"].spatial


def test_experts_and_tables_are_known() -> None:
    found = facts(Mixture(), torch.zeros(4, 3, 4))
    assert [name for name, one in found.items() if one.expert] == ["moe"]
    assert found["moe"].routed_nbytes == 2 * 3 * 8 * 4
    assert [name for name, one in found.items() if one.table] == ["table"]


def test_linear_layers_say_what_goes_in() -> None:
    found = facts(Model(), torch.zeros(4, TOKENS, WIDTH))
    row = TOKENS * WIDTH * 4
    assert [found[f"blocks.1.{name}"].linear_input_nbytes for name in ("qkv", "mlp.0", "mlp.2")] == [row, row, 4 * row]
    assert found["blocks.1.norm1"].linear_input_nbytes == found["blocks.1.mlp.1"].linear_input_nbytes == 0
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    assert not any(one.linear_input_nbytes for one in facts(tied, torch.zeros(2, 4)).values())


def test_a_model_that_cannot_be_divided_says_nothing() -> None:
    found = facts(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.zeros(4, 4))
    assert not any(one.spatial or one.expert or one.table for one in found.values())


def train(plan: str, folder: str) -> None:
    os.environ.update({"TUTTI_PLAN": plan, "TUTTI_RUN_FOLDER": folder})
    torch.manual_seed(0)
    model: nn.Module = Model()
    data = TensorDataset(torch.randn(16, TOKENS, WIDTH), torch.randn(16, TOKENS, 2))
    job = tutti.Job(global_batch_size=8, keep_checkpoints=0)
    model, _, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, F.mse_loss)
    for batch in loader:
        job.step(batch)


WIDE = (LayoutRule(modules="blocks.*.mlp.?", placement="split"), LayoutRule(modules="head", placement="row"))
PLANS: dict[str, dict[str, Any]] = {
    "split, recomputed": {"mesh": {"split": 2}, "layout": (LayoutRule(modules="blocks.*", recompute=True),)},
    "sharded": {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=3), "microbatches": 2},
    "ring": {"mesh": {"context": 2}},
    "linear layers over table": {"mesh": {"table": 2}, "microbatches": 2, "layout": WIDE},
    "stages": {"mesh": {"stage": 2}, "microbatches": 4, "pipeline": PipelinePlan(schedule="zero-bubble")},
}


def sent(plan: Plan, folder: Path) -> tuple[float, float]:
    """(predicted, counted) bytes that the rank which sends most sends in a step."""
    predicted = predict(spec_of(Model(), torch.zeros(4, TOKENS, WIDTH), plan.layout), cluster(), plan)
    run_ranks(train, 2, str(serialization.save(plan, folder / "plan.json")), str(folder / "run"))
    rows = []
    for rank in range(2):
        lines = read_rows(folder / "run" / "ranks" / str(rank) / "metrics.jsonl")
        rows += [row["sent_nbytes"] for row in lines if row["kind"] == "step"][-1:]
    return predicted.sent_nbytes_per_rank, max(rows)


@pytest.mark.parametrize("name", PLANS)
def test_real_runs_send_the_predicted_bytes(name: str, tmp_path: Path) -> None:
    fields = dict(PLANS[name])
    batch = BatchPlan(global_batch_size=8, num_microbatches=fields.pop("microbatches", 1))
    plan = Plan(batch=batch, **fields)
    predicted, counted = sent(plan, tmp_path)
    # the first step also checks attention over parts of sequences; flags travel with summed parts of gradients
    assert counted == pytest.approx(predicted, rel=0.005)


def test_norms_by_tokens_send_their_gradients_over_split(tmp_path: Path) -> None:
    """Each rank sends as many bytes of gradients as the norms have (a ring of 2). A model file does not say that the
    biases of row layers and the head see parts of the tokens then: their gradients and the result are sent, too.
    """
    rows = (LayoutRule(modules="*norm?", placement="row"),)
    plan = Plan(batch=BatchPlan(global_batch_size=8), mesh={"split": 2}, layout=rows)
    predicted, counted = sent(plan, tmp_path)
    activations = 6 * 4 * 8 * TOKENS * WIDTH * 4  # 6 blocks, 2 sums each way
    assert predicted - activations == 12 * 2 * WIDTH * 4
    besides = 12 * WIDTH * 4 + (2 * WIDTH + 2) * 4 + 8 * TOKENS * 2 * 4 // 2
    assert counted == predicted + besides
