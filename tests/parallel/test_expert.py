"""Experts divided over ranks, and mixtures whose slice several ranks share, against one device."""

import functools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from against_one import Subject, Trained, assert_agree, train
from harness import run_ranks
from trainer.several import Case, on_ranks, once, refusals
from tutti.config.plan import LayoutRule
from tutti.nn.mixture import MixtureOfExperts, auxiliary_loss, mixtures
from tutti.trainer.metrics import read_rows


class Tokens(nn.Module):
    """(batch, seq, 6) -> (batch, seq, 3) through two mixtures with residual connections."""

    def __init__(self, experts: int, top_k: int, capacity_factor: float | None) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.moe = MixtureOfExperts(8, 10, experts, top_k=top_k, capacity_factor=capacity_factor)
        self.norm = nn.LayerNorm(8)
        self.second = MixtureOfExperts(8, 7, experts, top_k=top_k, capacity_factor=capacity_factor, activation="gelu")
        self.leave = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        x = x + self.moe(self.norm(x))
        return self.leave(x + self.second(x))


def subject(experts: int = 5, top_k: int = 1, capacity_factor: float | None = 0.8, **fields: Any) -> Subject:
    generator = torch.Generator().manual_seed(5)
    data = torch.randn(26, 4, 6, generator=generator, dtype=torch.float64)
    target = torch.randint(0, 3, (26, 4), generator=generator)
    made: list[nn.Module] = []

    def model() -> nn.Module:
        made.append(Tokens(experts, top_k, capacity_factor))
        return made[0]

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten()) + 0.1 * auxiliary_loss(made[0])

    return Subject(model=model, data=TensorDataset(data, target), loss_fn=loss, batch=7, **fields)


def top1() -> Subject:
    return subject()


def top2() -> Subject:
    return subject(top_k=2, capacity_factor=0.7, job={"clip_norm": 0.5})


def roomy() -> Subject:
    return subject(experts=4, top_k=2, capacity_factor=None)


class StackedExperts(nn.Module):
    """Stacked parameters and a loop over the experts that were chosen, as transformers has them."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 12, 8) / 3)
        self.down_proj = nn.Parameter(torch.randn(experts, 8, 6) / 3)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        output = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            token, place = torch.where(top_k_index == expert)
            gate, up = F.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            results = F.linear(F.silu(gate) * up, self.down_proj[expert])
            output.index_add_(0, token, results * top_k_weights[token, place, None])
        return output


class OtherNames(StackedExperts):
    """The experts of GPT-OSS: other names of the arguments, and biases."""

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self.down_proj_bias = nn.Parameter(torch.randn(experts, 8))

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, router_indices: torch.Tensor, routing_weights: torch.Tensor
    ) -> torch.Tensor:
        output = torch.zeros_like(hidden_states)
        for expert in router_indices.unique().tolist():
            token, place = torch.where(router_indices == expert)
            gate, up = F.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            results = F.linear(F.silu(gate) * up, self.down_proj[expert]) + self.down_proj_bias[expert]
            output.index_add_(0, token, results * routing_weights[token, place, None])
        return output


class LikeMixtral(nn.Module):
    """Top-2 of 5 stacked experts, of which the last ones are seldom chosen: some ranks get no row."""

    kind: type[StackedExperts] = StackedExperts

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.gate, self.leave = nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(8, 3)
        self.experts = self.kind(5)
        with torch.no_grad():
            self.gate.bias.copy_(-1.5 * torch.arange(5.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.enter(x).flatten(0, 1)
        weights, chosen = self.gate(rows).softmax(-1).topk(2)
        return self.leave(rows + self.experts(rows, chosen, weights / weights.sum(-1, keepdim=True))).view(
            *x.shape[:2], 3
        )


def stacked() -> Subject:
    made = subject()
    return Subject(
        model=LikeMixtral,
        data=made.data,
        loss_fn=lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
        batch=7,
    )


class LikeGptOss(LikeMixtral):
    kind = OtherNames


def other_names() -> Subject:
    return replace(stacked(), model=LikeGptOss, optimizer=torch.optim.SGD, rate=0.1)


def mixtral() -> Subject:
    """Of transformers itself, whose router computes in float32."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=6,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
        num_experts_per_tok=2,
        max_position_embeddings=16,
    )
    config._experts_implementation = "eager"  # the default, grouped_mm, has no float64
    tokens = torch.randint(0, 17, (26, 4), generator=torch.Generator().manual_seed(5))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    return Subject(model=lambda: MixtralForCausalLM(config), data=rows, batch=7, optimizer=torch.optim.SGD, rate=0.5)


def drops(run: Any) -> dict[str, Any]:
    """What this rank's mixtures saw last, what it holds, and what its rows say."""
    name = next(name for name in run.parallel.layout.names if name.endswith(("moe.input_weight", "experts.down_proj")))
    held, part = run.parallel.layout.shard_of(name), dict(run.parallel.model.named_parameters())[name]
    rows = read_rows(run.output.folder.metrics)
    return {
        "counts": [(moe.assigned, moe.dropped) for moe in mixtures(run.parallel.model)],
        "experts": part.shape[0],
        "agrees": tuple(part.shape) == held.local_shape,
        "sums": held.sums,
        "steps": [row for row in rows if row["kind"] == "step"],
    }


RECOMPUTED = {"layout": (LayoutRule(modules="moe", recompute=True), LayoutRule(modules="second", recompute=True))}
WHOLE = {"layout": (LayoutRule(modules="moe", placement="replicate"),)}
CASES: dict[int, dict[str, Case]] = {
    2: {
        "replicate": (top2, {"mesh": {"replicate": 2}}),
        "expert": (top1, {"mesh": {"expert": 2}}),
        "recompute": (top2, {"mesh": {"expert": 2}, **RECOMPUTED}),
        "unequal shares": (roomy, {"mesh": {"expert": 2}, "shares": (3.0, 1.0)}),
        "one mixture whole": (top1, {"mesh": {"expert": 2}, **WHOLE}),
        "stacked": (stacked, {"mesh": {"expert": 2}}),
        "other names": (other_names, {"mesh": {"expert": 2}}),
    },
    3: {
        "replicate": (top1, {"mesh": {"replicate": 3}}),
        "expert": (top2, {"mesh": {"expert": 3}}),
        "a rank without a share": (top2, {"mesh": {"expert": 3}, "shares": (1.0, 0.0, 2.0)}),
        "stacked": (stacked, {"mesh": {"expert": 3}}),
    },
    4: {
        "expert x replicate": (top2, {"mesh": {"expert": 2, "replicate": 2}}),
        "replicate x expert": (top1, {"mesh": {"replicate": 2, "expert": 2}}),
        "expert": (roomy, {"mesh": {"expert": 4}}),
        "stacked x replicate": (stacked, {"mesh": {"replicate": 2, "expert": 2}}),
    },
}


@functools.cache
def results(ranks: int) -> list[dict[str, Trained]]:
    plans = {name: (make, {**plan, "batch": {"num_microbatches": 2}}) for name, (make, plan) in CASES[ranks].items()}
    return on_ranks(plans, ranks, look=drops)


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, cases in CASES.items() for name in cases])
def test_ranks_route_drop_and_learn_as_one_device(ranks: int, name: str) -> None:
    make, plan = CASES[ranks][name]
    many = [result[name] for result in results(ranks)]
    assert_agree(once(make), many)
    facts = [trained.facts for trained in many]
    degree = 1 if name == "one mixture whole" else plan["mesh"].get("expert", 1)
    experts = 4 if make is roomy else 5
    assert sum(fact["experts"] for fact in facts) == experts * ranks // degree
    assert all(fact["agrees"] for fact in facts)
    assert all(("expert" in fact["sums"]) == (degree == 1) for fact in facts)
    assert all(fact["counts"] == facts[0]["counts"] for fact in facts)  # of the slice, so equal on all ranks


@pytest.mark.slow
def test_mixtral_of_transformers_is_divided_as_it_is() -> None:
    many = on_ranks({"mixtral": (mixtral, {"mesh": {"expert": 2}, "batch": {"num_microbatches": 2}})}, 2, look=drops)
    assert_agree(once(mixtral), [result["mixtral"] for result in many], 1e-5)
    assert sorted(result["mixtral"].facts["experts"] for result in many) == [1, 2]


@pytest.mark.parametrize("make", [top1, top2, roomy])
def test_assigned_and_dropped_tokens_are_in_the_rows_and_the_same_on_any_number_of_ranks(
    make: Callable[[], Subject],
) -> None:
    def counted(trained: Trained) -> list[tuple[int, int]]:
        return [(row["tokens_assigned"], row["tokens_dropped"]) for row in trained.facts["steps"]]

    one = run_ranks(train, 1, make, {"batch": {"num_microbatches": 2}}, 4, torch.float64, drops)[0]
    for ranks, cases in CASES.items():
        for name in cases:
            if cases[name][0] is make:
                assert counted(results(ranks)[0][name]) == counted(one), (ranks, name)
    top_k, tokens = (1 if make is top1 else 2), 7 * 4 * 2  # two mixtures
    assert counted(one)[0][0] == top_k * tokens
    assert any(dropped for _, dropped in counted(one)) == (make is not roomy)


def test_only_rows_that_change_ranks_are_counted_as_sent() -> None:
    plain = results(2)[0]["replicate"].facts["steps"]
    divided = results(2)[0]["expert"].facts["steps"]
    assert all(row["exchanged_nbytes"] == 0 for row in plain)
    most = 2 * 2 * 2 * 7 * 4 * 8 * 8  # mixtures, there and back, forward and backward, tokens, width, float64
    assert all(0 < row["exchanged_nbytes"] < most for row in divided)


def too_few() -> Subject:
    return subject(experts=2)


def without() -> Subject:
    return Subject(
        model=lambda: nn.Linear(6, 3), data=TensorDataset(torch.randn(8, 6), torch.randn(8, 3)), loss_fn=F.mse_loss
    )


def tied() -> Subject:
    class Shared(Tokens):
        def __init__(self) -> None:
            super().__init__(4, 1, None)
            self.second = MixtureOfExperts(8, 10, 4, capacity_factor=None)
            self.second.input_weight = self.moe.input_weight

    made = subject()
    return Subject(model=Shared, data=made.data, loss_fn=F.cross_entropy, batch=7)


def judged() -> Subject:
    """A model whose configuration makes it add a load-balancing loss of each rank's own tokens."""

    def model() -> nn.Module:
        built = LikeMixtral()
        built.config = SimpleNamespace(output_router_logits=True)  # type: ignore[assignment]
        return built

    return replace(stacked(), model=model)


def test_what_cannot_work_is_refused_on_all_ranks_with_the_remedy() -> None:
    row = {"layout": (LayoutRule(modules="moe", placement="row"),)}
    cases: dict[str, Case] = {
        "lower it to 2": (too_few, {"mesh": {"expert": 3}}),
        "tutti.nn.MixtureOfExperts": (without, {"mesh": {"expert": 3}}),
        "are one tensor": (tied, {"mesh": {"expert": 3}}),
        "'split' or 'replicate'": (top1, {"mesh": {"expert": 3}, **row}),
        "output_router_logits=False": (judged, {"mesh": {"replicate": 3}}),
    }
    for said in run_ranks(refusals, 3, list(cases.values())):
        for words, sentence in zip(cases, said, strict=True):
            assert sentence.startswith("PlanError: "), sentence
            assert words in sentence
