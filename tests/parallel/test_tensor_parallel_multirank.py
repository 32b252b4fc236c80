"""Models divided over the split axis do what whole ones do: functions, layers of every kind, training runs."""

import gc
import os
from typing import Any

import pytest
import tensor_parallel_models
import tensor_parallel_transformers
import torch
import torch.nn.functional as F
from tensor_parallel_functions import check_all
from tensor_parallel_models import plain, split_rule, tokens, values
from tensor_parallel_streams import draw, refusals
from tensor_parallel_transformers import example_gpt
from tensor_parallel_with_others import run_cases
from torch import nn
from torch.utils.data import TensorDataset

from against_one import Subject, assert_same_as_one
from harness import run_ranks
from tutti.comm import shared_segment
from tutti.comm.hierarchical import HierarchicalCommunicator
from tutti.config.plan import LayoutRule

pytestmark = pytest.mark.long


@pytest.mark.parametrize("degree", [2, 4])
def test_every_function_on_parts_is_the_function(degree: int) -> None:
    for failures in run_ranks(check_all, degree):
        assert not failures, "\n".join(failures[:5])


def check(module: Any, degree: int, names: tuple[str, ...]) -> None:
    failures = run_ranks(run_cases, degree, dict.fromkeys(names, module.__name__), names)[0]
    assert not failures, "\n".join(failures.values())


def test_layers_of_every_kind() -> None:
    check(tensor_parallel_models, 3, tuple(tensor_parallel_models.CASES))


FEW = (
    "plain",
    "heads",
    "few key heads gqa",
    "one key head",
    "tied",
    "multihead",
    "lstm",
    "sequence parallel",
    "samples",
)


@pytest.mark.long
def test_layers_over_more_ranks() -> None:
    check(tensor_parallel_models, 4, FEW)


@pytest.mark.long
def test_known_models() -> None:
    pytest.importorskip("transformers")
    check(tensor_parallel_transformers, 2, tuple(tensor_parallel_transformers.CASES))


def test_masks_differ_in_parts_and_agree_elsewhere() -> None:
    first, second, third = run_ranks(draw, 3)
    for one in (second, third):
        for key in ("before", "after", "mask", "attended"):
            assert (one[key] == first[key]).all(), key
    assert (first["plain"] == 1).all()
    heads = first["mask"].unbind(1)
    dropped = first["attended"][0].unbind(0)
    for a in range(6):
        for b in range(a):
            if a // 2 != b // 2:  # heads of different ranks
                assert (heads[a] != heads[b]).any()
                assert (dropped[a] != dropped[b]).any()
    assert 0.4 < float((first["mask"] == 0).double().mean()) < 0.6
    for one in (first, second, third):
        forward, again = one["recomputed"]
        assert (forward == again).all()


def test_what_cannot_be_followed_is_refused() -> None:
    for said in run_ranks(refusals, 4):
        for how, name in {"item": "__setitem__", "method": "index_fill_", "out": "cumsum"}.items():
            assert name in said[how]
            assert "placement='replicate'" in said[how]
        assert "autograd function Twice" in said["function"]
        assert float(said["unequal parts"]) < 1e-6
        assert said["shown"].startswith("SplitTensor(whole (1, 5), dim 1 at")
        assert "module '1' has 2 outputs, fewer than mesh.split = 4" in said["narrow"]
        assert "outside the 5 rows" in said["index"]


def digits(count: int = 32) -> TensorDataset:
    return TensorDataset(values(count, 8), torch.arange(count) % 5)


def mlp() -> Subject:
    return Subject(model=lambda: plain(8, 13, 7, 9, 5), data=digits(), loss_fn=nn.CrossEntropyLoss())


def clipped() -> Subject:
    """A tied language model: gradients accumulated over microbatches, clipped by their global norm."""
    ids = tokens(32, 9, 53)
    return Subject(
        model=example_gpt, data=TensorDataset(ids[:, :-1], ids[:, 1:]), loss_fn=next_token, job={"clip_norm": 0.5}
    )


def next_token(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(4, 7, 2, batch_first=True, bidirectional=True), nn.Linear(14, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(x.view(len(x), 2, 4))[0][:, -1])  # type: ignore[no-any-return]


def sequences() -> Subject:
    return Subject(model=Sequences, data=digits(), loss_fn=nn.CrossEntropyLoss(), job={"clip_norm": 0.1})


def widths(run: Any) -> dict[str, Any]:
    return {name: tuple(p.shape) for name, p in run.parallel.model.named_parameters()}


def test_training_a_plain_net() -> None:
    ranks = assert_same_as_one(mlp, mesh={"split": 3}, steps=3, look=widths)
    assert [rank.facts["0.weight"] for rank in ranks] == [(5, 8), (4, 8), (4, 8)]


def test_training_a_tied_language_model_in_two_ways_at_once() -> None:
    ranks = assert_same_as_one(
        clipped, mesh={"replicate": 2, "split": 2}, steps=3, batch={"num_microbatches": 2}, look=widths, tolerance=1e-11
    )
    assert [rank.facts["tokens.weight"] for rank in ranks] == [(27, 24), (26, 24)] * 2


def test_training_with_recompute_and_norms_by_tokens() -> None:
    rules = (LayoutRule(modules="*norm*", placement="row"), LayoutRule(modules="blocks.?", recompute=True))
    assert_same_as_one(clipped, mesh={"split": 4}, steps=2, layout=rules, tolerance=1e-11)


def on_two_hosts() -> Subject:
    """The same where ranks 0 and 1 are on one host, the others on another: exchanges are made in two tiers."""
    shared_segment.host_identity = lambda: f"host {int(os.environ['RANK']) // 2}"
    return clipped()


def tiers(run: Any) -> bool:
    return any(isinstance(one, HierarchicalCommunicator) for one in gc.get_objects())


def test_training_over_hosts_of_several_ranks() -> None:
    rows = (LayoutRule(modules="*norm*", placement="row"),)
    for mesh, tiered in (({"split": 4}, True), ({"split": 3}, True), ({"replicate": 2, "split": 2}, False)):
        ranks = assert_same_as_one(on_two_hosts, mesh=mesh, steps=2, layout=rows, look=tiers, tolerance=1e-11)
        assert [rank.facts for rank in ranks] == [tiered] * len(ranks)


def test_training_a_recurrent_net() -> None:
    assert_same_as_one(sequences, mesh={"split": 2, "replicate": 2}, steps=3, layout=split_rule("rnn"))


def read_directly() -> Subject:
    """Logits from the embedding's own matrix, which the model's code reads."""
    ids = tokens(32, 9, 53)

    def model() -> nn.Module:
        return tensor_parallel_models.Vectors(
            nn.Sequential(tensor_parallel_models.Gated(8), tensor_parallel_models.Gated(8)), 8, 53, direct=True
        )

    return Subject(model=model, data=TensorDataset(ids[:, :-1], ids[:, 1:]), loss_fn=next_token)


def test_training_in_stages_of_divided_layers() -> None:
    batch = {"num_microbatches": 2}
    rules = split_rule("embed")
    assert_same_as_one(read_directly, mesh={"stage": 2, "split": 2}, steps=2, batch=batch, layout=rules)
