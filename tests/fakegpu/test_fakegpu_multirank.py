"""The second device of the tests: it computes what the CPU computes, and fails where a GPU would."""

import os
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

import fakegpu
from fakegpu import needs_fakegpu
from harness import run_ranks

pytestmark = needs_fakegpu


class _Language(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module], *, sparse: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16, sparse=sparse)
        self.layer = layer()
        self.head = nn.Linear(16, 50)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(self.embedding(tokens))
        return self.head(hidden if isinstance(hidden, torch.Tensor) else hidden[0])


def _convolutions() -> nn.Module:
    activation = nn.ReLU(inplace=True)
    features = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), activation, nn.MaxPool2d(2), nn.ConvTranspose2d(8, 4, 2))
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(4 * 16, 50))


def _attention() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Optimizer]]] = {
    "convolutions": (_convolutions, lambda parameters: AdamW(parameters, foreach=True)),
    "attention, tied": (lambda: _Language(_attention, tied=True), lambda parameters: Adam(parameters, fused=False)),
    "lstm": (lambda: _Language(lambda: nn.LSTM(16, 16, 2, batch_first=True)), lambda parameters: SGD(parameters, 0.1)),
    "gru": (lambda: _Language(lambda: nn.GRU(16, 16, batch_first=True)), lambda parameters: SGD(parameters, 0.1, 0.9)),
    "sparse": (lambda: _Language(nn.Identity, sparse=True), lambda parameters: Adagrad(parameters, 0.1)),
}


def _batch(name: str, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(step)
    if name == "convolutions":
        inputs = torch.randn(6, 3, 8, 8, dtype=torch.float64, generator=numbers)
        return inputs, torch.randint(50, (6,), generator=numbers)
    return torch.randint(50, (4, 7), generator=numbers), torch.randint(50, (28,), generator=numbers)


def _train(name: str, device: torch.device) -> list[torch.Tensor]:
    torch.manual_seed(0)
    build, optimize = CASES[name]
    model = build().double().to(device)
    optimizer = optimize(model.parameters())
    for step in range(3):
        inputs, targets = (tensor.to(device) for tensor in _batch(name, step))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets)
        loss.backward()
        if name != "sparse":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert all(parameter.device == device for parameter in model.parameters())
    return [parameter.detach().cpu() for parameter in model.parameters()]


def _error(action: Callable[[], object]) -> str:
    try:
        action()
    except (RuntimeError, NotImplementedError) as error:
        return str(error)
    return ""


def _everything() -> dict[str, object]:
    device = fakegpu.load()
    rank, address = int(os.environ["RANK"]), os.environ["TUTTI_RENDEZVOUS"]
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    seen: dict[str, object] = {}
    for name in CASES:
        pairs = zip(_train(name, torch.device("cpu")), _train(name, device), strict=True)
        seen[name] = max(float((one - other).abs().max()) for one, other in pairs)
    ones = torch.ones(3, device=device)
    seen["mixed addition"] = _error(lambda: ones + torch.ones(3))
    seen["mixed product"] = _error(lambda: torch.ones(2, 3).to(device) @ torch.ones(3, 2))
    seen["mixed list"] = _error(lambda: torch._foreach_add_([ones], [torch.ones(3)]))
    seen["gloo"] = _error(lambda: torch.distributed.all_reduce(ones))
    with fakegpu.no_synchronization():
        seen["waits"] = [
            _error(wait) for wait in (ones.sum().item, lambda: bool(ones[0]), ones.cpu, ones.nonzero, ones.tolist)
        ]
        seen["does not wait"] = _error(lambda: torch.where(ones > 0, ones, 2 * ones).sum())
    pinned = torch.empty(3).pin_memory().copy_(ones, non_blocking=True)
    early = pinned.tolist()
    torch.accelerator.synchronize()
    seen["early, late"] = early != [1.0] * 3, pinned.tolist() == [1.0] * 3
    torch.manual_seed(3)
    drawn = torch.rand(4, device=device).cpu()
    torch.manual_seed(3)
    seen["drawn again"] = torch.equal(drawn, torch.rand(4, device=device).cpu())
    with torch.autocast(fakegpu.NAME, dtype=torch.bfloat16):
        seen["autocast"] = (ones.view(1, 3) @ ones.view(3, 1)).dtype
    return seen


def test_it_computes_what_the_cpu_computes_and_fails_where_a_gpu_would() -> None:
    (seen, _) = run_ranks(_everything, 2)
    for name in CASES:
        difference = seen[name]
        assert isinstance(difference, float)
        assert difference < 1e-11, f"{name}: parameters differ by {difference}"
    assert "Expected all tensors to be on the same device" in seen["mixed addition"]
    assert "Expected all tensors to be on the same device" in seen["mixed product"]
    assert "Expected all tensors to be on the same device" in seen["mixed list"]
    assert "fakegpu" in seen["gloo"] or "backend" in seen["gloo"], seen["gloo"]
    assert all("the host waits for the device" in error for error in seen["waits"]), seen["waits"]
    assert seen["does not wait"] == ""
    assert seen["early, late"] == (True, True)
    assert seen["drawn again"]
    assert seen["autocast"] == torch.bfloat16
