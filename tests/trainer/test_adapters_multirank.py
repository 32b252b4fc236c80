"""LoRA on frozen and on quantised bases (QLoRA), and PEFT: values and files of one device under every plan.

A quantised base is an integer parameter without gradient, or an integer buffer, with scales.
"""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear, mse_loss
from torch.utils.data import TensorDataset

import tutti
from harness import run_ranks
from tutti.checkpoint import to_state_dict
from tutti.config import serialization
from tutti.config.plan import BatchPlan, LayoutRule, Plan, ShardingPlan

SPLIT = (LayoutRule(modules="*.up", placement="column"), LayoutRule(modules="*.down", placement="row"))
WRAPPED = (LayoutRule(modules="*.up.base_layer", placement="column"),)
PLANS: dict[str, dict[str, Any]] = {
    "replicas": {"mesh": {"replicate": 2}},
    "zero1": {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=1)},
    "zero2": {"mesh": {"shard": 3}, "sharding": ShardingPlan(level=2)},
    "zero3": {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=3)},
    "split": {"mesh": {"split": 2}, "layout": SPLIT},
    "stage": {"mesh": {"stage": 2}},
}
QUICK = ("zero3",)
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in PLANS]


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank update."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a, self.b = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 0.5 * self.b(self.a(x))


class Quantised(Adapted):
    """The same with int8 weights and a scale for each output, as a parameter without gradient or as a buffer."""

    scale: torch.Tensor

    def __init__(self, inputs: int, outputs: int, *, as_buffer: bool) -> None:
        super().__init__(inputs, outputs)
        weight = self.base.weight.detach()
        del self.base
        scale = weight.abs().amax(1, keepdim=True) / 127
        codes = (weight / scale).round().to(torch.int8)
        if as_buffer:
            self.register_buffer("codes", codes)
        else:
            self.codes = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.codes.to(x.dtype) * self.scale) + 0.5 * self.b(self.a(x))


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        made = {
            "lora": Adapted,
            "parameter": lambda i, o: Quantised(i, o, as_buffer=False),
            "buffer": lambda i, o: Quantised(i, o, as_buffer=True),
            "plain": nn.Linear,
        }[kind]
        self.q = made(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.q(x))
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.blocks = nn.Sequential(*(Block(kind) for _ in range(3)))
        for parameter in [*self.first.parameters(), *self.blocks[0].up.parameters()]:
            parameter.requires_grad = False
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.first(x)))

    def save_pretrained(self, folder: Path) -> None:
        Path(folder).mkdir(parents=True)
        torch.save(self.state_dict(), Path(folder) / "model.pt")


def net(kind: str) -> nn.Module:
    if kind != "peft":
        return Net(kind)
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q", "up", "down"], modules_to_save=["head"], init_lora_weights=False)
    return peft.get_peft_model(Net("plain"), config).double()


def data() -> TensorDataset:
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, x[:, :2].sin())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def plain(kind: str, epochs: int = 2) -> dict[str, torch.Tensor]:
    model = net(kind)
    optimizer = optimizer_of(model)
    x, y = data().tensors
    for _ in range(epochs):
        for i in range(0, 20, 8):
            optimizer.zero_grad()
            mse_loss(model(x[i : i + 8]), y[i : i + 8]).backward()
            optimizer.step()
    return model.state_dict()


def trained(kind: str, name: str, folder: str, resume: str | None = None) -> dict[str, Any]:
    file = Path(folder) / f"plan-{name}-{kind}-{os.environ['RANK']}.json"
    fields = PLANS[name] | ({"layout": WRAPPED} if kind == "peft" and name == "split" else {})
    serialization.save(Plan(batch=BatchPlan(global_batch_size=8), **fields), file)
    os.environ["TUTTI_PLAN"] = str(file)
    os.environ["TUTTI_RUN_FOLDER"] = f"{folder}/{kind}-{name}"
    job = tutti.Job(global_batch_size=8, resume=resume)
    model = net(kind)
    model, _, loader = job.prepare(model, optimizer_of(model), data(), mse_loss, shuffle=False)
    shards = job._run().parallel.layout.shards
    held = sum(math.prod(shard.local_shape) for tensor, shard in shards.items() if tensor.endswith("codes"))
    for _ in job.epochs(2 if resume is None else 4):
        for batch in loader:
            job.step(batch)
    job.save_pretrained(f"{folder}/{kind}-{name}/pretrained")
    return {"state": job.state_dict(), "codes": held, "saved": str(job.save())}


def kinds_under(kinds: tuple[str, ...], name: str, folder: str) -> dict[str, Any]:
    return {kind: trained(kind, name, folder) for kind in kinds}


def close(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12, msg=name)


def world_size(name: str) -> int:
    return next(iter(PLANS[name]["mesh"].values()))


@pytest.mark.parametrize("name", NAMES)
def test_adapters_train_as_on_one_device(name: str, tmp_path: Path) -> None:
    kinds = ("lora", "parameter", "buffer")
    for results in run_ranks(kinds_under, world_size(name), kinds, name, str(tmp_path)):
        for kind in kinds:
            expected = plain(kind)
            close(results[kind]["state"], expected)
            close(to_state_dict(Path(results[kind]["saved"]))["model"], expected)
            close(torch.load(tmp_path / f"{kind}-{name}" / "pretrained" / "model.pt"), expected)
        if name == "zero3":
            assert results["parameter"]["codes"] == 3 * 64 // 2  # integer parameters are sharded, too


@pytest.mark.long
def test_a_quantised_base_resumes_under_another_plan(tmp_path: Path) -> None:
    saved = run_ranks(trained, 2, "parameter", "zero3", str(tmp_path))[0]["saved"]
    for result in run_ranks(trained, 2, "parameter", "stage", str(tmp_path), saved):
        close(result["state"], plain("parameter", 4))


@pytest.mark.long
@pytest.mark.parametrize("name", ["zero2", "zero3", "split", "stage"])
def test_peft_trains_as_on_one_device(name: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    expected = plain("peft")
    for result in run_ranks(trained, world_size(name), "peft", name, str(tmp_path)):
        close(result["state"], expected)
    from safetensors.torch import load_file

    adapters = load_file(tmp_path / f"peft-{name}" / "pretrained" / "adapter_model.safetensors")
    assert any("lora_A" in key for key in adapters)
    for key, value in adapters.items():
        name = key.replace(".head.", ".head.modules_to_save.")
        matching = [tensor for full, tensor in expected.items() if full.replace(".default", "") == name]
        torch.testing.assert_close(value, matching[0], rtol=1e-12, atol=1e-12, msg=key)
