"""The mixture of experts on one device against a loop over tokens; what it counts; what it refuses."""

import copy
import io
import math

import pytest
import torch
from torch import nn

from tutti.errors import ScriptError
from tutti.nn.mixture import MixtureOfExperts, Routing, auxiliary_loss, mixtures


def by_hand(moe: MixtureOfExperts, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(output, load-balancing loss, dropped), token by token: all first choices in order, then the second ones."""
    rows = x.reshape(-1, moe.width)
    tokens, experts = len(rows), moe.experts
    p = torch.softmax(rows @ moe.gate.weight.t(), -1)
    order = p.sort(dim=-1, descending=True).indices
    room = [moe.capacity(tokens) or tokens * 2] * experts
    output, kept = [torch.zeros(moe.width, dtype=x.dtype)] * tokens, 0
    for k in range(moe.top_k):
        for t in range(tokens):
            e = int(order[t, k])
            if room[e] == 0:
                continue
            room[e], kept = room[e] - 1, kept + 1
            w = p[t, e] if moe.top_k == 1 else p[t, e] / p[t, order[t, :2]].sum()
            hidden = rows[t] @ moe.input_weight[e] + (0 if moe.input_bias is None else moe.input_bias[e])
            hidden = torch.relu(hidden) @ moe.output_weight[e] + (0 if moe.output_bias is None else moe.output_bias[e])
            output[t] = output[t] + w * hidden
    fractions = torch.bincount(order[:, 0], minlength=experts).to(x.dtype) / tokens
    return torch.stack(output).reshape(x.shape), experts * (fractions * p.mean(0)).sum(), tokens * moe.top_k - kept


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("capacity_factor", [0.5, 1.25, None])
@pytest.mark.parametrize("top_k", [1, 2])
def test_output_loss_drops_and_gradients_are_those_of_a_loop_over_tokens(
    top_k: int, capacity_factor: float | None, bias: bool
) -> None:
    torch.manual_seed(top_k)
    moe = MixtureOfExperts(6, 8, 5, top_k=top_k, capacity_factor=capacity_factor, bias=bias, dtype=torch.float64)
    x = torch.randn(3, 7, 6, dtype=torch.float64, requires_grad=True)
    expected, loss, dropped = by_hand(moe, x)
    output = moe(x)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(auxiliary_loss(moe), loss, rtol=1e-12, atol=1e-12)
    assert (moe.assigned, moe.dropped) == (21 * top_k, dropped)
    assert dropped > 0 if capacity_factor == 0.5 else dropped == 0 or capacity_factor == 1.25
    inputs = [x, *moe.parameters()]
    got = torch.autograd.grad(output.square().sum() + auxiliary_loss(moe), inputs)
    want = torch.autograd.grad(expected.square().sum() + loss, inputs)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def test_evaluation_drops_nothing_and_has_no_loss() -> None:
    torch.manual_seed(0)
    moe = MixtureOfExperts(4, 6, 3, capacity_factor=0.3)
    x = torch.randn(50, 4)
    moe(x)
    assert moe.dropped > 0
    moe.eval()
    torch.testing.assert_close(moe(x), by_hand(moe, x)[0])
    assert moe.dropped == 0
    assert float(auxiliary_loss(moe)) == 0


def test_the_loss_is_1_when_tokens_are_spread_evenly_and_more_when_not() -> None:
    moe = MixtureOfExperts(4, 2, 4, dtype=torch.float64)
    with torch.no_grad():
        moe.gate.weight.copy_(torch.eye(4))
    moe(torch.eye(4, dtype=torch.float64).repeat(5, 1))
    assert float(moe.auxiliary_loss) == pytest.approx(1.0, rel=1e-12)
    moe(10 * torch.eye(4, dtype=torch.float64)[:1].repeat(20, 1))
    assert float(moe.auxiliary_loss) > 3.9


def test_ranks_keep_what_one_queue_of_their_tokens_keeps() -> None:
    """Routing.kept against the definition: one queue an expert, first choices of all ranks before second ones."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        counts = torch.randint(0, 5, (3, 2, 4), generator=generator)
        capacity = int(torch.randint(1, 12, (), generator=generator))
        kept = Routing(counts=counts, rank=0, probability_sums=torch.zeros(4)).kept(capacity)
        for expert in range(4):
            queue = [(r, k) for k in range(2) for r in range(3) for _ in range(int(counts[r, k, expert]))][:capacity]
            assert [[queue.count((r, k)) for k in range(2)] for r in range(3)] == kept[:, :, expert].tolist()


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    moe = MixtureOfExperts(3, 4, 8)
    moe(torch.randn(1, 3)).sum().backward()
    assert all(p.grad is not None for p in moe.parameters())
    assert sum(bool(g.any()) for g in moe.output_bias.grad) == 1  # type: ignore[union-attr]


def test_a_model_in_use_can_be_copied_and_saved() -> None:
    moe = MixtureOfExperts(3, 4, 2)
    moe(torch.randn(5, 3))
    twin = copy.deepcopy(moe)
    torch.save(moe, io.BytesIO())
    x = torch.randn(5, 3)
    torch.testing.assert_close(twin(x), moe(x))


def test_its_shapes_are_known_without_memory() -> None:
    moe = MixtureOfExperts(6, 8, 4, top_k=2, device="meta")
    output = moe(torch.empty(5, 10, 6, device="meta"))
    (output.sum() + auxiliary_loss(moe)).backward()
    assert output.shape == (5, 10, 6)
    assert moe.input_weight.grad is not None


def test_capacity_is_rounded_up_and_at_least_one() -> None:
    assert MixtureOfExperts(4, 4, 8, capacity_factor=1.25).capacity(10) == math.ceil(12.5 / 8)
    assert MixtureOfExperts(4, 4, 8, top_k=2, capacity_factor=1.0).capacity(16) == 4
    assert MixtureOfExperts(4, 4, 8, capacity_factor=0.1).capacity(1) == 1
    assert MixtureOfExperts(4, 4, 8, capacity_factor=None).capacity(100) is None


@pytest.mark.parametrize(
    "wrong", [{"top_k": 3}, {"top_k": 2, "experts": 1}, {"capacity_factor": 0.0}, {"activation": "tanh"}]
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ScriptError, match="MixtureOfExperts"):
        MixtureOfExperts(**{"width": 4, "hidden": 4, "experts": 4, **wrong})  # type: ignore[arg-type]


def test_a_model_without_mixtures_has_no_auxiliary_loss() -> None:
    with pytest.raises(ScriptError, match="MixtureOfExperts"):
        auxiliary_loss(nn.Linear(2, 2))
    two = nn.Sequential(MixtureOfExperts(4, 4, 2), nn.ReLU(), MixtureOfExperts(4, 4, 2))
    two(torch.randn(6, 4))
    assert len(mixtures(two)) == 2
    torch.testing.assert_close(auxiliary_loss(two), two[0].auxiliary_loss + two[2].auxiliary_loss)
