"""Parts of sequences in stages of a model, against one device."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from against_one import Subject, Trained, assert_agree
from harness import run_ranks
from parallel.test_context import (
    GPT,
    RECOMPUTE,
    Convolved,
    Sliced,
    gpt,
    gpt_by_tokens,
    last_ignored,
    mean_loss,
    padded,
    padded_labels,
    tokens,
)
from trainer.several import Case, on_ranks, once, refusals
from tutti.config.plan import PipelinePlan

STEPS = 3


class Opened(GPT):
    """Attention between the modules that stages are made of, and BatchNorm over all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.where(torch.arange(x.shape[1]))
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            y = block(x)[:, None]
            x = x + nn.functional.scaled_dot_product_attention(y, y, y, is_causal=True)[:, 0]
        return self.head(x)


def opened() -> Subject:
    return Subject(model=Opened, data=tokens(), loss_fn=mean_loss, batch=8, optimizer=torch.optim.SGD)


def sliced() -> Subject:
    return Subject(model=lambda: nn.Sequential(Sliced()), data=tokens(), loss_fn=mean_loss)


def convolved() -> Subject:
    return Subject(model=Convolved, data=tokens(), loss_fn=mean_loss)


def staged(make: Any, schedule: str, microbatches: int, **more: Any) -> Case:
    chunks = 2 if schedule == "interleaved" else 1
    pipeline = PipelinePlan(schedule=schedule, stages_per_rank=chunks)  # type: ignore[arg-type]
    mesh = {"context": 2, "stage": 2} if more.pop("inside", True) else {"stage": 2, "context": 2}
    return make, {"mesh": mesh, "pipeline": pipeline, "batch": {"num_microbatches": microbatches}, **more}


CASES: dict[str, Case] = {
    "tied, clipped": staged(gpt, "1f1b", 2),
    "tied, all-to-all": staged(gpt, "zero-bubble", 3, context="all-to-all", inside=False),
    "recomputed": staged(gpt, "interleaved", 2, layout=RECOMPUTE),
    "tokens": staged(gpt_by_tokens, "gpipe", 2, context="all-to-all"),
    "ignored": staged(last_ignored, "1f1b", 2),
    "padded": staged(padded, "1f1b", 2, inside=False),
    "attention between stages": staged(opened, "1f1b", 2),
}


@functools.cache
def results() -> list[dict[str, Trained]]:
    return on_ranks(CASES, 4, steps=STEPS)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_stages_of_parts_of_sequences_compute_what_one_device_does(name: str) -> None:
    make, plan = CASES[name]
    one = once(make, plan["batch"]["num_microbatches"], STEPS)
    assert_agree(one, [got[name] for got in results()])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ring", "all-to-all"])
def test_a_transformers_model_that_shifts_its_own_labels(kind: str) -> None:
    found = on_ranks({kind: staged(padded_labels, "1f1b", 2, context=kind)}, 4, steps=STEPS)
    assert_agree(once(padded_labels, 2, STEPS), [result[kind] for result in found], 1e-5)


def test_what_mixes_tokens_otherwise_is_refused_on_every_stage() -> None:
    cases: dict[str, Case] = {
        "near (Conv1d) computes different values": staged(convolved, "1f1b", 1),
        "positions from 0 on every rank": staged(sliced, "1f1b", 1),
    }
    for said in run_ranks(refusals, 4, list(cases.values())):
        for words, sentence in zip(cases, said, strict=True):
            assert words in sentence
