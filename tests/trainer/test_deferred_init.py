"""A model built without memory gets, tensor for tensor and bit for bit, the values of an ordinary constructor."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tutti.errors import ScriptError
from tutti.parallel.sharding.sharded_gradients import Shards
from tutti.trainer import deferred_init as module
from tutti.trainer.deferred_init import build_on_meta, materialize


class Everything(nn.Module):
    """What constructors do: default and own initialisation, `apply`, ties, buffers, plain tensors, scaled weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=0)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.lstm = nn.LSTM(8, 8, 2)
        self.norm = nn.BatchNorm1d(8)
        self.convolution = nn.Conv2d(3, 4, 3)
        self.rates = [float(rate) for rate in torch.linspace(0, 0.1, 3)]
        self.offsets = torch.tensor([1.0, 2.0, 3.0])
        self.register_buffer("frequencies", 1 / (10000 ** (torch.arange(0, 8, 2).float() / 8)))
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)), persistent=False)
        nn.init.orthogonal_(self.convolution.weight)
        nn.init.trunc_normal_(self.lstm.weight_ih_l0, std=0.02)
        nn.init.trunc_normal_(self.lstm.weight_hh_l0, a=1.5, b=2.0)
        nn.init.sparse_(self.layers[0].linear1.weight, 0.2)
        self.apply(self._own)
        self.layers[1].linear1.weight.data.mul_(0.5).add_(torch.randn(16, 8) * self.offsets[1])
        self.position = nn.Parameter(torch.randn(5, 8).bfloat16())
        self.coins = nn.Parameter(torch.bernoulli(torch.full((4,), 0.5)))

    def _own(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module is not self.head:
            nn.init.normal_(module.weight, std=0.02)


def both(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """The model of an ordinary constructor, and the one built without memory first."""
    torch.manual_seed(3)
    usual = make()
    torch.manual_seed(3)
    built, tape = build_on_meta(make)
    assert all(p.is_meta for p in built.parameters())
    materialize(built, tape, torch.device("cpu"), Shards())
    return usual, built


def test_every_value_is_the_same() -> None:
    usual, built = both(Everything)
    expected = dict(usual.named_parameters()) | dict(usual.named_buffers())
    got = dict(built.named_parameters()) | dict(built.named_buffers())
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
        assert torch.equal(got[name], value), name
    assert torch.equal(built.offsets, usual.offsets)
    assert built.rates == usual.rates
    assert built.head.weight is built.embed.weight
    assert built.lstm._flat_weights[0] is built.lstm.weight_ih_l0


def test_generators_are_left_as_they_were() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model, tape = build_on_meta(Everything)
    materialize(model, tape, torch.device("cpu"), Shards())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_part_has_the_values_of_the_whole_and_little_else_is_held() -> None:
    """Slices taken before there is memory; the largest amount held at once is about one layer's."""
    width, depth = 128, 12

    def make() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
        for layer in model:
            nn.init.normal_(layer.weight)
        return model

    torch.manual_seed(4)
    usual = make()
    torch.manual_seed(4)
    built, tape = build_on_meta(make)
    with tape:
        parts = [layer.weight[3:7].clone() for layer in built]
    held: list[int] = []
    memory = torch.UntypedStorage.nbytes
    execute = module._Replay._execute

    def watched(run: Any, index: int) -> None:
        execute(run, index)
        held.append(sum(memory(storage) for storage in run.memory.values()))

    module._Replay._execute = watched  # type: ignore[method-assign]
    try:
        storages = module.replay(tape, parts)
    finally:
        module._Replay._execute = execute  # type: ignore[method-assign]
    for layer, part in zip(usual, parts, strict=True):
        ref = tape.ref(part)
        assert torch.equal(module.tensor_in_storage(ref, storages[ref.storage]), layer.weight[3:7])
    assert max(held) <= 4 * width * (width + 4 * depth) + 4 * width * 4


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Linear(3, int(torch.ones(1).item())), "reads values"),
        (lambda: (torch.manual_seed(1), nn.Linear(2, 2))[1], "seeds torch's generator"),
        (lambda: nn.Linear(2, 2, device="cpu"), "on an explicit device"),
        (lambda: nn.ParameterList([nn.Parameter(torch.tensor([1.0, 2.0]).copy_(torch.rand(2)))]), "not computed yet"),
    ],
)
def test_what_cannot_work_is_refused(make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(ScriptError, match=words):
        build_on_meta(make)


FAMILIES = ["GPT2LMHeadModel", "LlamaForCausalLM", "T5ForConditionalGeneration", "BertForMaskedLM", "ViTModel"]


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, family)
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2} if "GPT2" in family else {}
    sizes |= {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    if "T5" in family:
        sizes = {"d_model": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = kind.config_class(
        **({"image_size": 32, "patch_size": 8} if "ViT" in family else {"vocab_size": 50}), **sizes
    )
    usual, built = both(lambda: kind(config))
    for (name, value), (_, got) in zip(usual.state_dict().items(), built.state_dict().items(), strict=True):
        assert torch.equal(got, value), name
    for (name, value), (_, got) in zip(usual.named_buffers(), built.named_buffers(), strict=True):
        assert torch.equal(got, value), name
