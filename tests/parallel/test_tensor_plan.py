"""What is divided and how, and what is refused: decisions need no ranks."""

import re
from typing import Any

import pytest
import torch
from tensor_parallel_models import Attention, Gated, Vectors, plain
from tensor_parallel_transformers import build, example_gpt
from torch import nn

from tutti.config.plan import LayoutRule
from tutti.errors import PlanError
from tutti.parallel.tensor import describe_split
from tutti.parallel.tensor.tensor_plan import decide


def roles(model: nn.Module, *layout: LayoutRule, degree: int = 2) -> dict[str, str]:
    return {one.name: one.role for one in decide(model, layout, degree)}


def rule(modules: str, placement: Any) -> LayoutRule:
    return LayoutRule(modules=modules, placement=placement)


def test_pairs_in_a_plain_net() -> None:
    assert roles(plain(8, 9, 7, 5)) == {"0": "column", "2": "row"}
    assert roles(plain(8, 9, 7, 5), rule("4", "split")) == {"0": "column", "2": "row", "4": "column"}
    normed = nn.Sequential(nn.Linear(8, 9), nn.LayerNorm(9), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 5))
    assert roles(normed) == {"2": "column", "4": "row"}


def test_a_library_model_that_knows_no_embeddings() -> None:
    """CLIPModel and Wav2Vec2Model of transformers raise where others return their embeddings."""

    class Towers(nn.Sequential):
        def get_input_embeddings(self) -> nn.Module:
            error: type[Exception] = NotImplementedError
            raise error("override it")

    Towers.__module__ = "transformers.models.towers"
    assert roles(Towers(*plain(8, 9, 7, 5))) == roles(plain(8, 9, 7, 5))


def test_rules_keep_modules_whole() -> None:
    net = nn.Sequential(Attention(), Gated(24, 20))
    assert roles(net, rule("0", "replicate"), rule("0.*", "replicate")) == {
        "1.gate": "column", "1.up": "column", "1.down": "row"
    }  # fmt: skip
    assert "1.gate" not in roles(net, rule("1.down", "replicate"))
    assert roles(Vectors(Gated(8), 8), rule("head", "replicate")).keys() == {"body.gate", "body.up", "body.down"}


def test_the_last_rule_with_an_opinion_wins() -> None:
    net = plain(8, 9, 7, 6, 5)
    assert roles(net, rule("*", "replicate"), rule("[46]", "auto"), rule("0", "column")) == {"0": "column"}


REFUSED: dict[str, tuple[Any, tuple[LayoutRule, ...], int, str]] = {
    "heads": (Attention, (), 5, "module 'the model' has 12 attention heads.*5 does not divide.*12 % 5 = 2"),
    "more ranks than units": (
        lambda: plain(8, 12, 5), (), 64, "module '0' has 12 outputs, fewer than mesh.split = 64.*split=2, 3, 4, 6 or 12"
    ),
    "more ranks than heads": (Attention, (), 24, "has 12 attention heads.*use split=2, 3, 4, 6 or 12"),
    "torch heads": (lambda: nn.Sequential(nn.MultiheadAttention(24, 3)), (), 2, "module '0' has 3 attention heads"),
    "bert heads": (lambda: build("bert"), (), 5, "'bert.encoder.layer.0.attention.self' has 12.*modules='bert"),
    "row of whole": (
        lambda: plain(8, 9, 5), (rule("0", "replicate"), rule("2", "row")), 2,
        "says 'row' for module '2' and 'replicate' for '0'.*'replicate'",
    ),
    "row after row": (lambda: plain(8, 9, 5), (rule("*", "row"),), 2, "'row' for module '2' and 'row' for '0'"),
    "tied": (
        lambda: Vectors(Gated(8), 8), (rule("embed", "split"), rule("head", "replicate")), 2,
        "'head' and 'embed' share their weight",
    ),
    "tied, cut two ways": (
        lambda: Vectors(Gated(8), 8), (rule("head", "row"), rule("embed", "split")), 2,
        "'embed' and 'head' share their weight.*'vocabulary' and 'row'",
    ),
    "nothing": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), (), 2, "mesh.split = 2 divides nothing"),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)),
        (rule("0", "split"),), 2, r"rule '0' says 'split', but nothing in module '0' \(Conv2d\)",
    ),
    "no such module": (lambda: plain(8, 9, 5), (rule("head", "split"),), 2, "no module matches 'head'"),
    "column of a norm": (Gated, (rule("norm", "column"),), 2, "nothing in module 'norm'"),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(9, 8, max_norm=1.0), *plain(8, 9, 5)), (rule("0", "split"),), 2, "max_norm"
    ),
    "statistics of parts": (
        lambda: nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten()), *plain(16, 9, 5)),
        (rule("0", "row"),), 2, "'0' says 'row'.*the BatchNorm '1'",
    ),
    "parts of a tied one": (
        lambda: Vectors(nn.Sequential(Gated(8)), 8), (rule("embed", "row"),), 2, "'embed' says 'row'.*'head.weight'"
    ),
    "attention": (
        lambda: nn.Sequential(nn.MultiheadAttention(24, 4, add_bias_kv=True), *plain(8, 9, 5)),
        (rule("0", "split"),), 2, "bias_k or add_zero_attn",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_places_and_remedy(name: str) -> None:
    model, layout, degree, words = REFUSED[name]
    with pytest.raises(PlanError) as caught:
        decide(model(), layout, degree)
    assert re.search(words, str(caught.value)), str(caught.value)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Attention, r"'the model' has 12 attention heads, and split_shares = \[30.0, 1.0\] gives rank 1.*none"),
        (lambda: plain(8, 9, 5), "'0' has 9 outputs.*fewer split ranks.*modules='0\\*', placement='replicate'"),
    ],
)
def test_unequal_parts_of_nothing_are_refused(model: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        decide(model(), (), 2, weights=(30.0, 1.0))


def test_unequal_parts_follow_what_a_model_is_made_of() -> None:
    """Heads stay whole, three of them on two ranks; key heads with those that use them, until there are too few."""
    parts = {one.name: one.spread.parts for one in decide(example_gpt(heads=3), (), 2, weights=(2.0, 1.0))}
    assert parts["blocks.0.qkv"] == (((0, 16), (24, 40), (48, 64)), ((16, 24), (40, 48), (64, 72)))
    assert parts["blocks.0.merge"] == (((0, 16),), ((16, 24),))
    assert parts["tokens"] == parts["head"] == (((0, 35),), ((35, 53),))
    grouped = {one.name: one for one in decide(Attention(key_heads=4), (), 2, weights=(2.0, 1.0))}
    assert (grouped["k_proj"].role, grouped["k_proj"].spread.parts) == ("column", (((0, 6),), ((6, 8),)))
    assert grouped["q_proj"].spread.parts == (((0, 18),), ((18, 24),))
    few = {one.name: one for one in decide(Attention(key_heads=2), (), 2, weights=(3.0, 1.0))}
    assert (few["k_proj"].role, few["q_proj"].spread.parts) == ("shared", (((0, 18),), ((18, 24),)))
    assert few["k_proj"].spread.parts == (((0, 4),), ((2, 4),))


def test_a_rule_for_another_axis_is_no_error() -> None:
    net = nn.Sequential(nn.EmbeddingBag(9, 8), *plain(8, 9, 5))
    assert decide(net, (rule("0", "split"),), 2, rules_for_others=True)


def test_descriptions_add_up() -> None:
    model = example_gpt()
    described = describe_split(model, (), 3)
    by_name = {one.name: one for one in described}
    nbytes = 4 if torch.get_default_dtype() is torch.float32 else 8
    assert sum(by_name["tokens"].nbytes_per_rank) == 53 * 24 * nbytes
    assert sum(by_name["head"].nbytes_per_rank) == 0  # tied: counted where it comes first
    assert by_name["blocks.0.qkv"].placement == "column"
    assert by_name["blocks.0.qkv"].nbytes_per_rank == (24 * 25 * nbytes,) * 3
    assert [e.values for e in by_name["blocks.0.merge"].exchanges] == [24]
    assert by_name["blocks.0.merge"].exchanges[0].when == "forward"
    assert by_name["norm"].placement == "replicate"
    assert by_name["norm"].nbytes_per_rank == (2 * 24 * nbytes,) * 3
    assert by_name["blocks.1.mlp.0"].partner == "blocks.1.mlp.2"
    forwards = sum(e.when == "forward" for one in described for e in one.exchanges)
    assert forwards == 5  # what test_split_models counts in a run: one a row layer, one for the embedding


def test_a_model_without_memory_is_described() -> None:
    with torch.device("meta"):
        model = build("llama", num_key_value_heads=1)
    described = {one.name: one for one in describe_split(model, (), 4)}
    shared = described["model.layers.0.self_attn.k_proj"]
    assert shared.placement == "shared"
    assert len(set(shared.nbytes_per_rank)) == 1
    assert describe_split(model, (), 1)[0].placement == "replicate"
