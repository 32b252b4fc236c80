"""Building without memory: what goes to meta, what keeps its values, and which idioms of scripts go on working."""

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tutti.errors import ScriptError
from tutti.profile import parameters_on_meta
from tutti.profile.meta_device import meta_copy


def devices(model: nn.Module) -> set[str]:
    return {parameter.device.type for parameter in model.parameters()}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_parameters_are_on_meta_and_data_is_not() -> None:
    with parameters_on_meta():
        model = nn.Sequential(nn.Linear(1000, 1000), nn.LayerNorm(8), nn.LSTM(16, 16), nn.Transformer(32, 4, 1, 1))
        data = torch.randn(1000, 1000)
        scaled = (data - data.mean()) / data.std()
    assert devices(model) == {"meta"}
    assert abs(scaled.std().item() - 1) < 1e-3
    assert nn.Linear(2, 2).weight.device.type == "cpu"  # as before, outside


class Idioms(nn.Module):
    """What constructors do with their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.legacy = nn.Parameter(torch.Tensor(1000, 1000))
        self.gain = nn.Parameter(1e-6 * torch.ones(32))
        self.stacked = nn.Parameter(torch.stack([torch.eye(300) for _ in range(3)]))
        self.register_parameter("absent", None)
        for initialise in (nn.init.orthogonal_, nn.init.eye_, nn.init.trunc_normal_, nn.init.kaiming_uniform_):
            initialise(self.legacy)
        with torch.no_grad():
            self.legacy.copy_(torch.randn(1000, 1000))
            self.legacy[0] = torch.zeros(1000)
            self.gain.fill_(2.0)
        self.legacy.data.normal_()
        self.legacy.data = torch.randn(1000, 1000)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        table = torch.zeros(5000, 512)
        table[:, 0::2] = torch.sin(torch.arange(5000).unsqueeze(1) * torch.arange(0, 512, 2))
        self.register_buffer("table", table)
        self.register_buffer("positions", torch.arange(64))
        self.angles = torch.outer(torch.arange(131072).float(), 1 / torch.arange(1, 65))


def test_idioms_of_constructors() -> None:
    with parameters_on_meta():
        model = Idioms().apply(lambda module: None)
    assert devices(model) == {"meta"}
    assert model.rates == pytest.approx([0, 0.05, 0.1])
    assert (model.table.device.type, model.angles.device.type) == ("meta", "meta")
    assert model.positions.tolist() == list(range(64))


def test_ties_hold_and_moves_stay_on_meta() -> None:
    with parameters_on_meta():
        table, head = nn.Embedding(1000, 100), nn.Linear(100, 1000, bias=False)
        head.weight = table.weight
        model = nn.Sequential(table, head).to("cpu").to(device="cpu", dtype=torch.float64).cpu()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    assert model[1].weight is model[0].weight
    assert model[0].weight.dtype == torch.float64
    assert devices(model) == {"meta"}
    assert optimizer.param_groups[0]["params"] == list(model.parameters())


def test_a_dry_run_finds_shapes() -> None:
    with parameters_on_meta():
        features = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.MaxPool2d(2), nn.Flatten())
        with torch.no_grad():
            width = features(torch.zeros(1, 3, 32, 32)).shape[1]
        lazy = nn.LazyLinear(10)
        lazy(torch.zeros(2, width))
    assert width == 64 * 15 * 15
    assert lazy.in_features == width


@pytest.mark.filterwarnings("ignore:for weight")
def test_loading_a_checkpoint_does_nothing() -> None:
    with parameters_on_meta():
        model = nn.Linear(1000, 1000, bias=False)
        model.load_state_dict({"weight": torch.randn(1000, 1000)})
    assert devices(model) == {"meta"}


def test_reading_values_of_parameters_is_refused_with_the_line() -> None:
    with parameters_on_meta():
        model = nn.Linear(10, 10)
        with pytest.raises(ScriptError, match=r"test_meta.py, line \d+ reads values of parameters \(item\).*after job"):
            model.weight.std().item()


def test_copy_keeps_ties_small_values_and_the_original() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(300, 300), nn.Linear(300, 300)
            self.second.weight = self.first.weight
            self.register_buffer("positions", torch.arange(5))
            self.register_buffer("mask", torch.ones(1000, 1000))
            self.cache: list[Tensor] = [self.first.weight * 2, torch.tensor([3.0])]  # not a leaf: plain copy refuses

    model = Model()
    model.first.bias.requires_grad_(False)
    twin = meta_copy(model)
    assert devices(twin) == {"meta"}
    assert devices(model) == {"cpu"}
    assert twin.second.weight is twin.first.weight
    assert [p.requires_grad for p in twin.parameters()] == [p.requires_grad for p in model.parameters()]
    assert (twin.mask.device.type, twin.cache[0].device.type) == ("meta", "meta")
    assert (twin.positions.tolist(), twin.cache[1].tolist()) == ([0, 1, 2, 3, 4], [3.0])


LLAMA = """
import torch, torch.nn.functional as F
from torch import nn

WIDTH, LAYERS, HEADS, KEY_HEADS, HIDDEN, VOCABULARY, SEQ = 8192, 80, 64, 8, 28672, 128256, 4096
HEAD = WIDTH // HEADS

class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
    def forward(self, x):
        return F.rms_norm(x, (WIDTH,), self.weight)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = Norm(), Norm()
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
    def forward(self, x, turn):
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2))) * turn).flatten(-2) for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = Norm(), nn.Linear(WIDTH, VOCABULARY, bias=False)
        angles = torch.outer(torch.arange(SEQ).float(), 5e5 ** (-torch.arange(0, HEAD, 2) / HEAD))
        self.register_buffer("turn", torch.polar(torch.ones_like(angles), angles))
        self.apply(lambda m: nn.init.normal_(m.weight, std=0.02) if isinstance(m, nn.Linear) else None)
    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, self.turn)
        return self.head(self.norm(x))
"""


@pytest.mark.long
def test_a_70_billion_parameter_model_needs_no_memory(tmp_path: Path) -> None:
    (tmp_path / "llama.py").write_text(LLAMA, encoding="utf-8")
    script = tmp_path / "describe.py"
    script.write_text(
        "import json, resource, torch, torch.nn.functional as F\n"
        "from tutti.profile import describe_model, parameters_on_meta\n"
        "with parameters_on_meta():\n"
        "    import llama\n"
        "    model = llama.Llama()\n"
        "    optimizer = torch.optim.AdamW(model.parameters())\n"
        "ids = torch.zeros(4, llama.SEQ, dtype=torch.long)\n"
        "loss = lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten())\n"
        "spec = describe_model(model, (ids,), {}, ids, loss, optimizer, samples=4)\n"
        "state = sum(module.optimizer_nbytes for module in spec.modules)\n"
        "rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(json.dumps([spec.parameters, spec.flops_forward, state, spec.notes, rss]))\n",
        encoding="utf-8",
    )
    import json

    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=True)
    parameters, flops, state, notes, rss_kib = json.loads(done.stdout)
    assert parameters == 70_553_706_496
    # every weight but the embedding once a token, attention at 4 seq width a layer; the rest is elementwise
    products = 2 * 4096 * (parameters - 128256 * 8192) + 80 * 4 * 4096**2 * 8192
    assert flops == pytest.approx(products, rel=0.01)
    assert state == 8 * parameters
    assert notes == ["causal attention is counted at full cost, as if nothing were masked"]
    assert rss_kib < 1.5 * 2**20  # GiB, nearly all of it the interpreter with torch; the parameters would be 263


def test_this_process_stays_small() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with parameters_on_meta():
        model: Any = nn.Sequential(*(nn.Linear(30000, 30000) for _ in range(4)))
    assert sum(parameter.numel() for parameter in model.parameters()) > 3.5e9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024
