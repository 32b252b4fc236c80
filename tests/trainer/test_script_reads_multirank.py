"""What the script does with parameters and gradients between steps: as on one device, or refused by name."""

import copy
import io
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import tutti
from harness import run_ranks

SAMPLES, BATCH = 24, 8


class Twins(nn.Module):
    """A trained network, and a copy that follows it by hand, on another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6), nn.Tanh())
        self.target = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6), nn.Tanh()).requires_grad_(False)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.online(x)
        return self.head(y + 0.1 * self.target(y))

    @torch.no_grad()
    def follow(self) -> None:
        for online, target in zip(self.online.parameters(), self.target.parameters(), strict=True):
            target.lerp_(online, 0.2)


def model_and_data() -> tuple[Twins, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Twins().double()
    return model, torch.randn(SAMPLES, 6).double(), torch.randint(3, (SAMPLES,))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def grad_norms(model: nn.Module) -> list[float]:
    return [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]


def clip_norm(model: Twins, optimizer: Optimizer) -> Any:
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
    return norm, grad_norms(model), [float(torch.linalg.vector_norm(p)) for p in model.parameters()]


def clip_groups(model: Twins, optimizer: Optimizer) -> Any:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return float(nn.utils.clip_grad_norm_(parameters, 0.05)), grad_norms(model)


def clip_value(model: Twins, optimizer: Optimizer) -> Any:
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    for parameter in model.parameters():
        parameter.data.clamp_(-0.3, 0.3)
        positive = ~(parameter.detach() < 0)
        positive &= torch.isfinite(input=parameter)
        parameter.data.mul_(torch.where(positive, parameter.detach().to(torch.float64) * 0 + 1.0, 1.0))
        assert parameter.ndim <= 2
        assert torch.zeros(3).to(parameter).mean() == 0
        kept = {key: value.detach().cpu().clone() for key, value in model.named_parameters()}
        assert len(kept) == 10
        if parameter.grad is not None:
            parameter.grad *= 0.5
            parameter.grad.add_(parameter.detach(), alpha=1e-3)
    shapes = [(tuple(p.shape), p.dim(), p.size(0), len(p), p.numel()) for p in model.parameters()]
    return shapes, sum(p.numel() for p in model.parameters()), [p.device.type == "cpu" for p in model.parameters()]


def follow(model: Twins, optimizer: Optimizer) -> Any:
    model.follow()


def other_memory(model: Twins, optimizer: Optimizer) -> Any:
    """Gradients get other memory, and momenta are changed element by element."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data = parameter.grad.data.clamp(-0.02, 0.02)
    for state in optimizer.state.values():
        if state.get("momentum_buffer") is not None:
            state["momentum_buffer"].mul_(0.5)


READS: dict[str, Callable[[Twins, Optimizer], Any]] = {
    "clip_norm": clip_norm,
    "clip_groups": clip_groups,
    "clip_value": clip_value,
    "follow": follow,
    "other_memory": other_memory,
}

REFUSED: dict[str, Callable[[nn.Parameter], Any]] = {
    "sum": lambda p: p.sum(),
    "item": lambda p: (p * 2)[0],
    "mean of the gradient": lambda p: p.grad.mean(),  # type: ignore[union-attr]
    "quantile of a copy": lambda p: p.detach().clone().abs().quantile(0.5),
    "tolist": lambda p: p.tolist(),
    "repr": repr,
    "flatten": lambda p: nn.utils.parameters_to_vector([p]),
    "largest": lambda p: p.data.div_(p.abs().max()),
    "largest in rows": lambda p: p / p.abs().max(dim=0)[0],
    "norms of columns": lambda p: p.norm(2, 0),
    "equal": lambda p: torch.equal(p, p),
    "parameter of a copy": lambda p: nn.Parameter(p.detach().clone()).mean(),
    "deep copy": lambda p: copy.deepcopy(p).sum(),
    "save": lambda p: torch.save(p, io.BytesIO()),
    "largest norm": lambda p: torch.linalg.vector_norm(p, float("inf")),
    "whole mask": lambda p: p.data.mul_(torch.ones(16, 6, dtype=torch.float64)),
    "noise": lambda p: p.data.add_(torch.randn_like(p)),
}


def plain(name: str) -> tuple[list[Any], dict[str, Tensor]]:
    """What the script reads after each backward, and the weights in the end, on one device, without tutti."""
    model, x, y = model_and_data()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3, momentum=0.9)
    read = []
    for start in range(0, SAMPLES, BATCH):
        optimizer.zero_grad()
        loss(model, (x[start : start + BATCH], y[start : start + BATCH])).backward()
        read.append(READS[name](model, optimizer))
        optimizer.step()
    return read, model.state_dict()


def on_ranks(name: str, plan: dict[str, Any]) -> tuple[list[Any], dict[str, Tensor], dict[str, str]]:
    """The same in a Job, and what is said to what it cannot read."""
    path = Path.cwd() / f"plan-{os.getpid()}.json"
    path.write_text(json.dumps({"batch": {"global_batch_size": BATCH}, **plan}))
    os.environ["TUTTI_PLAN"] = str(path)
    model, x, y = model_and_data()
    job = tutti.Job(global_batch_size=BATCH, folder=Path("run") / name, keep_checkpoints=0)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3, momentum=0.9)
    dataset = torch.utils.data.TensorDataset(x, y)
    model, optimizer, loader = job.prepare(model, optimizer, dataset, shuffle=False)
    optimizer.add_param_group({"params": list(model.target.parameters())})  # frozen, and of both stages
    read, refused = [], {}
    for batch in [batch for _ in job.epochs(1) for batch in loader]:
        job.forward_backward(loss, batch)
        read.append(READS[name](model, optimizer))
        first = next(model.parameters())
        for kind, reads in REFUSED.items() if plan not in WHOLE else ():  # whose parameters are whole
            try:
                reads(first)
            except tutti.TuttiError as error:
                refused[kind] = str(error)
        job.update()
    return read, job.state_dict(), refused


def said_on_ranks(name: str, plan: dict[str, Any]) -> str:
    """The refusal of reading parameters or gradients of other stages."""
    try:
        on_ranks(name, plan)
    except (tutti.TuttiError, RuntimeError) as error:  # the latter: the other rank has ended
        return str(error)
    return ""


SHARD_1 = {"mesh": {"shard": 2}, "sharding": {"level": 1}}
SHARD_2 = {"mesh": {"shard": 2}, "sharding": {"level": 2}}
SHARD_3 = {"mesh": {"shard": 2}, "sharding": {"level": 3}}
FSDP2 = {"mesh": {"shard": 2}, "sharding": {"level": 3, "engine": "fsdp2"}}
WHOLE = (SHARD_1, {"mesh": {"replicate": 2}})
SPLIT = {"mesh": {"split": 2}}
STAGE = {"mesh": {"stage": 2}}
"""`Twins` is cut after `online`, or within it."""


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("clip_norm", SHARD_3),
        ("clip_norm", SPLIT),
        ("clip_groups", SHARD_1),
        ("clip_value", STAGE),
        ("other_memory", WHOLE[0]),
        ("other_memory", WHOLE[1]),
        *(
            pytest.param(name, plan, marks=pytest.mark.long)
            for name, plan in [
                ("clip_norm", SHARD_2),
                ("clip_norm", {"mesh": {"replicate": 2, "shard": 2}, "sharding": {"level": 3}}),
                ("clip_value", SHARD_3),
                ("clip_norm", FSDP2),
                ("clip_value", FSDP2),
                ("follow", FSDP2),
                ("other_memory", FSDP2),
                ("clip_value", SPLIT),
                ("follow", SHARD_3),
                ("follow", SPLIT),
                ("other_memory", SHARD_3),
                ("other_memory", STAGE),
            ]
        ),
    ],
)
def test_parts_are_read_as_on_one_device_or_not_at_all(name: str, plan: dict[str, Any]) -> None:
    ranks = math.prod(plan["mesh"].values())
    expected, weights = plain(name)
    for read, state, refused in run_ranks(on_ranks, ranks, name, plan):
        # A stage has whole parameters, or none, of which a copy has no values either.
        same = {"whole mask", "deep copy", "parameter of a copy"} if "stage" in plan["mesh"] else set()
        assert plan in WHOLE or set(REFUSED) - set(refused) <= same
        assert all("between steps" in said and "online.0.weight" in said for said in refused.values())
        torch.testing.assert_close(read, expected, rtol=1e-12, atol=1e-14)
        for key, value in state.items():
            torch.testing.assert_close(value, weights[key], rtol=1e-11, atol=1e-13, msg=key)


@pytest.mark.parametrize("name", ["clip_norm", pytest.param("follow", marks=pytest.mark.long)])
def test_values_of_other_stages_are_refused(name: str) -> None:
    said = [text for text in run_ranks(said_on_ranks, 2, name, STAGE) if "between steps" in text]
    assert said
    assert all("stage=2" in text and ("job.whole_model()" in text or "clip_norm" in text) for text in said)
