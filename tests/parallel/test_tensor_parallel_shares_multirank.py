"""Layers divided in unequal parts compute what whole ones do: layers of every kind, training, checkpoints' layouts."""

from typing import Any

import pytest
import tensor_parallel_models
import torch
from tensor_parallel_models import plain, split_rule
from tensor_parallel_transformers import example_gpt
from tensor_parallel_with_others import run_cases
from test_tensor_parallel_multirank import Sequences, digits, next_token, on_two_hosts, tokens, widths
from torch import nn
from torch.utils.data import TensorDataset

from against_one import Subject, assert_same_as_one
from harness import run_ranks

FEW = ("plain", "heads", "few key heads gqa", "one key head", "tied", "multihead", "lstm", "samples")


def check(shares: tuple[float, ...], names: tuple[str, ...]) -> None:
    modules = dict.fromkeys(names, tensor_parallel_models.__name__)
    failures = run_ranks(run_cases, len(shares), modules, names, 2, shares)[0]
    assert not failures, "\n".join(failures.values())


def test_layers_of_the_main_kinds_in_three_parts() -> None:
    check((1.0, 4.0, 2.0), FEW)


@pytest.mark.long
def test_layers_of_every_kind_in_two_parts() -> None:
    check((3.0, 1.0), tuple(tensor_parallel_models.CASES))


def mlp() -> Subject:
    return Subject(model=lambda: plain(8, 13, 7, 9, 5), data=digits(), loss_fn=nn.CrossEntropyLoss())


def three_heads() -> Subject:
    """A tied language model whose heads no two ranks share equally: clipped by their global norm."""
    ids = tokens(32, 9, 53)
    data = TensorDataset(ids[:, :-1], ids[:, 1:])
    return Subject(model=lambda: example_gpt(heads=3), data=data, loss_fn=next_token, job={"clip_norm": 0.5})


def sequences() -> Subject:
    return Subject(model=Sequences, data=digits(), loss_fn=nn.CrossEntropyLoss(), job={"clip_norm": 0.1})


def test_training_a_plain_net() -> None:
    ranks = assert_same_as_one(mlp, mesh={"split": 3}, split_shares=(1.0, 3.0, 2.0), steps=3, look=widths)
    assert [rank.facts["0.weight"] for rank in ranks] == [(2, 8), (7, 8), (4, 8)]


def many() -> Subject:
    return Subject(model=lambda: plain(8, 272, 5), data=digits(), loss_fn=nn.CrossEntropyLoss())


def test_training_a_net_of_many_units_which_go_in_sixteens() -> None:
    """As they are predicted (test_portions.py, the same rule)."""
    ranks = assert_same_as_one(many, mesh={"split": 2}, split_shares=(1.0, 0.427), steps=2, look=widths)
    assert [rank.facts["0.weight"] for rank in ranks] == [(192, 8), (80, 8)]


def test_training_a_tied_language_model_in_two_ways_at_once() -> None:
    ranks = assert_same_as_one(
        three_heads, mesh={"replicate": 2, "split": 2}, split_shares=(1.0, 2.0), steps=3, look=widths,
        batch={"num_microbatches": 2}, tolerance=1e-11,
    )  # fmt: skip
    assert [rank.facts["blocks.0.qkv.weight"] for rank in ranks] == [(24, 24), (48, 24)] * 2
    assert [rank.facts["tokens.weight"] for rank in ranks] == [(18, 24), (35, 24)] * 2


def test_training_in_stages_of_divided_layers() -> None:
    batch: dict[str, Any] = {"num_microbatches": 2}
    assert_same_as_one(
        three_heads, mesh={"stage": 2, "split": 2}, split_shares=(2.0, 1.0), steps=2, batch=batch, tolerance=1e-11
    )


@pytest.mark.long
def test_training_a_recurrent_net() -> None:
    rules, mesh = split_rule("rnn"), {"split": 2, "replicate": 2}
    assert_same_as_one(sequences, mesh=mesh, split_shares=(5.0, 2.0), steps=3, layout=rules)


@pytest.mark.long
def test_training_beside_sharding_and_over_hosts() -> None:
    assert_same_as_one(three_heads, mesh={"shard": 2, "split": 2}, split_shares=(1.0, 2.0), steps=2, tolerance=1e-11)
    assert_same_as_one(on_two_hosts, mesh={"split": 3}, split_shares=(1.0, 2.0, 1.0), steps=2, tolerance=1e-11)


def pictures() -> Subject:
    images = tensor_parallel_models.values(32, 3, 6, 6)
    return Subject(
        model=tensor_parallel_models.Pictures,
        data=TensorDataset(images, torch.arange(32) % 5),
        loss_fn=nn.CrossEntropyLoss(),
    )


@pytest.mark.long
def test_training_of_samples_in_unequal_parts() -> None:
    rules = (tensor_parallel_models.LayoutRule(modules="features", placement="row"),)
    assert_same_as_one(pictures, mesh={"split": 2}, split_shares=(3.0, 1.0), steps=2, layout=rules)
