"""Job(compile=...) and what scripts compile: the values of the plain loop, and what each plan compiles or says."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import tutti
from harness import run_ranks
from tutti.config import serialization
from tutti.config.plan import BatchPlan, LayoutRule, PipelinePlan, Plan, ShardingPlan
from tutti.nn import MixtureOfExperts

EAGER_KERNELS = {"backend": "aot_eager"}
SPLIT = (LayoutRule(modules="2", placement="column"),)
PLANS: dict[str, dict[str, Any]] = {
    "replicas": {"mesh": {"replicate": 2}},
    "zero1": {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=1)},
    "zero2": {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=2)},
    "zero3": {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=3)},
    "split": {"mesh": {"split": 2}, "layout": SPLIT},
    "stage": {"mesh": {"stage": 2}},
    "interleaved": {
        "mesh": {"stage": 2},
        "pipeline": PipelinePlan(schedule="interleaved", stages_per_rank=2, cuts=("2", "4", "5")),
    },
    "zero-bubble": {"mesh": {"stage": 2}, "pipeline": PipelinePlan(schedule="zero-bubble")},
    "expert": {"mesh": {"expert": 2}},
    "table": {"mesh": {"table": 2}},
}
COMPILED = ("replicas", "zero1", "zero2", "zero3", "stage", "interleaved", "expert", "table")
PARTS = ("stage", "interleaved", "expert", "table")
"""Plans that divide some modules: what they leave whole is compiled."""


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def net() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Tanh(), *(Block() for _ in range(2))]
    return nn.Sequential(*layers, nn.Linear(8, 1)).double()


class Experts(nn.Module):
    """A mixture between blocks, and a table that the input looks rows up in."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 3)
        self.enter, self.leave = nn.Linear(3, 8), nn.Linear(8, 1)
        self.before, self.after = Block(), Block()
        self.mixture = MixtureOfExperts(8, 12, 4, top_k=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x + self.table((x[:, 0] > 0).long()))
        return self.leave(self.after(self.mixture(self.before(x))))


def mixed_net() -> nn.Module:
    torch.manual_seed(1)
    return Experts().double()


def data() -> TensorDataset:
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True))


def made(name: str | None) -> nn.Module:
    return mixed_net() if name in ("expert", "table") else net()


def plain(name: str | None = None) -> dict[str, torch.Tensor]:
    model = made(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = data().tensors
    for i in range(0, 30, 8):
        optimizer.zero_grad()
        mse_loss(model(x[i : i + 8]), y[i : i + 8]).backward()
        optimizer.step()
    return model.state_dict()


def trained(how: Any, name: str | None = None, compiled: Callable[[nn.Module], None] | None = None) -> dict[str, Any]:
    """Train under a plan. `compiled` is what the script has compiled itself before prepare."""
    if name is not None:
        file = Path(f"plan-{name}-{os.environ['RANK']}.json").absolute()
        serialization.save(Plan(batch=BatchPlan(global_batch_size=8), **PLANS[name]), file)
        os.environ["TUTTI_PLAN"] = str(file)
    torch.compiler.set_stance("default")
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    job = tutti.Job(global_batch_size=8, compile=how, keep_checkpoints=0)
    said: list[str] = []
    job._context.screen.say = lambda sentence: said.append(sentence)  # type: ignore[method-assign]
    model = made(name)
    if compiled is not None:
        compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = job.prepare(model, optimizer, data(), mse_loss, shuffle=False)
    for batch in loader:
        job.step(batch)
    values = job.evaluate(data())
    return {
        "state": job.state_dict(),
        "said": said,
        "graphs": counters["stats"]["unique_graphs"],
        "loss": values["loss"],
    }


def whole_by_script(model: nn.Module) -> None:
    model.compile(**EAGER_KERNELS)


def blocks_by_script(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Block):
            module.compile(**EAGER_KERNELS)


WAYS: dict[str, tuple[Any, Callable[[nn.Module], None] | None]] = {
    "job": (EAGER_KERNELS, None),
    "whole": (False, whole_by_script),
    "blocks": (False, blocks_by_script),
}


def under(names: tuple[str, ...], ways: tuple[str, ...]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(name, way): trained(WAYS[way][0], name, WAYS[way][1]) for name in names for way in ways}


def close(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12, msg=name)


ALL_WAYS = [(names, tuple(WAYS)) for names in (("replicas", "zero1", "zero2", "zero3"), ("stage", "interleaved"))]
ALL_WAYS += [(names, tuple(WAYS)) for names in (("split", "zero-bubble"), ("expert", "table"))]


@pytest.mark.parametrize(
    ("names", "ways"),
    [(("stage",), ("job",)), *(pytest.param(*each, marks=pytest.mark.long) for each in ALL_WAYS)],
)
def test_compiled_plans_compute_what_one_device_does(names: tuple[str, ...], ways: tuple[str, ...]) -> None:
    results_of_ranks = run_ranks(under, 2, names, ways)
    for results in results_of_ranks:
        for (name, way), result in results.items():
            expected = plain(name)
            model = made(name).eval()
            model.load_state_dict(expected)
            loss = mse_loss(model(data().tensors[0]), data().tensors[1]).item()
            close(result["state"], expected)
            assert result["loss"] == pytest.approx(loss, rel=1e-12)
            said = [sentence for sentence in result["said"] if sentence.startswith("torch.compile")]
            parts = name in PARTS
            begins = {
                "off under": name not in COMPILED,
                "off for the model under": parts and way == "whole",
                "compiles ": parts and way == "job",
            }
            expected_words = [words for words, is_said in begins.items() if is_said]
            assert len(said) == len(expected_words), (name, way, said)
            assert all(words in said[0] for words in expected_words), (name, way, said)
    for name, way in results_of_ranks[0]:
        graphs = max(results[name, way]["graphs"] for results in results_of_ranks)  # all blocks may be on one stage
        assert (graphs > 0) == (name in COMPILED and (way != "whole" or name not in PARTS)), (name, way, graphs)


@pytest.mark.long
def test_the_default_compiler_computes_what_one_device_does() -> None:
    for result in run_ranks(trained, 2, True, "zero3"):
        close(result["state"], plain())
        assert result["graphs"] > 0


def refused() -> str:
    job = tutti.Job(global_batch_size=8, compile="fastest")
    model = net()
    with pytest.raises(tutti.TuttiError) as caught:
        job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data(), mse_loss)
    return str(caught.value)


def test_an_unknown_mode_is_named() -> None:
    assert run_ranks(refused, 1)[0].startswith("Job(compile='fastest'): torch.compile cannot be used (")
