"""Laws of pipelines without ranks: schedules, cuts, halves of a backward, and what a trace follows or refuses."""

import itertools
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from parallel import pipeline_subjects as subjects
from tutti.config.pipeline_schedule import Action, build_schedule, cut_balanced, max_activations, simulate, total_time
from tutti.errors import PlanError
from tutti.parallel.pipeline.placeholders import StandIns
from tutti.parallel.pipeline.stage_placement import calls_of, choose_units, named_starts, open_for_cuts, place
from tutti.parallel.pipeline.stage_tracing import Tracer
from tutti.parallel.pipeline.stage_work import StageWork, input_gradients

CPU = torch.device("cpu")
SHAPES = [(name, ranks, 1) for name in ("gpipe", "1f1b", "zero-bubble") for ranks in (2, 3, 4, 5)]
SHAPES += [("interleaved", ranks, chunks) for ranks in (2, 3, 4) for chunks in (1, 2, 3)]


@pytest.mark.parametrize(("name", "ranks", "chunks"), SHAPES)
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 8])
def test_every_stage_computes_every_microbatch_once(name: Any, ranks: int, chunks: int, microbatches: int) -> None:
    orders = build_schedule(name, ranks, chunks, microbatches)
    kinds = "FIW" if name == "zero-bubble" else "FB"
    wanted = itertools.product(kinds, range(ranks * chunks), range(microbatches))
    assert Counter(action for order in orders for action in order) == Counter(Action(*one) for one in wanted)  # type: ignore[arg-type]
    for rank, order in enumerate(orders):
        assert all(action.stage % ranks == rank for action in order)
        for stage in range(rank, ranks * chunks, ranks):
            forwards = [action.microbatch for action in order if (action.kind, action.stage) == ("F", stage)]
            assert forwards == sorted(forwards), "batch statistics see microbatches in order"


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("microbatches", [5, 6, 8, 12])
def test_what_schedules_promise(ranks: int, microbatches: int) -> None:
    work = 3 * microbatches  # a forward takes 1, a backward 2
    assert total_time(build_schedule("gpipe", ranks, 1, microbatches)) == work + 3 * (ranks - 1)
    one = build_schedule("1f1b", ranks, 1, microbatches)
    assert total_time(one) == work + 3 * (ranks - 1)
    assert [max_activations(order) for order in one] == [min(ranks - rank, microbatches) for rank in range(ranks)]
    zero = build_schedule("zero-bubble", ranks, 1, microbatches)
    assert max(max_activations(order) for order in zero) <= ranks, "no more memory than 1F1B's first rank"
    assert work + (ranks - 1) <= total_time(zero) <= work + 2 * (ranks - 1), (
        "from (p - 1)(F + I - W) to 2/3 of 1F1B's bubble"
    )
    if microbatches % ranks == 0:
        for chunks in (2, 3):
            looped = build_schedule("interleaved", ranks, chunks, microbatches)
            assert total_time(looped) == work * chunks + 3 * (ranks - 1), "bubble in pieces of 1 / chunks of a stage"


def test_a_deadlock_is_found_and_named() -> None:
    orders = [[Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1)], [Action("F", 1, 1), Action("B", 1, 0)]]
    with pytest.raises(PlanError, match=r"rank 0 .*B of stage 0, microbatch 0 waits"):
        simulate(orders)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=9), st.integers(1, 5))
@settings(deadline=None, max_examples=80)
def test_balanced_cuts_are_the_best(costs: list[float], parts: int) -> None:
    parts = min(parts, len(costs))

    def largest(starts: tuple[int, ...]) -> float:
        bounds = [0, *starts, len(costs)]
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(bounds))

    starts = tuple(cut_balanced(costs, parts))
    best = min(largest(some) for some in itertools.combinations(range(1, len(costs)), parts - 1))
    assert list(starts) == sorted(set(starts))
    assert len(starts) == parts - 1
    assert all(0 < start < len(costs) for start in starts)
    assert largest(starts) == pytest.approx(best, abs=1e-9)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(torch.relu(self.b(self.a(x))))


def _apart(x: torch.Tensor, tokens: torch.Tensor, model: nn.ModuleDict) -> list[torch.Tensor]:
    """Two results, one that no input leads to; no weight is used twice."""
    embedded = model["embed"](tokens)
    deep = torch.tanh(model["deep"](model["norm"](x + embedded)))
    return [torch.relu(model["out"](deep)) + x, model["out2"](embedded)]


def _again(x: torch.Tensor, tokens: torch.Tensor, model: nn.ModuleDict) -> list[torch.Tensor]:
    """Weights that are used more than once."""
    return [model["lstm"](model["shared"](x))[0]]


@pytest.mark.parametrize("forward", [_apart, _again])
def test_halves_of_a_backward_make_a_whole(forward: Callable[..., list[torch.Tensor]]) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(5, 4),
            "norm": nn.LayerNorm(4),
            "deep": nn.Linear(4, 4),
            "lstm": nn.LSTM(4, 4, batch_first=True),
            "out": nn.Linear(4, 4),
            "out2": nn.Linear(4, 4),
            "shared": Shared(),
        }
    ).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(0, 5, (2, 3))
    results = forward(x, tokens, model)
    seeds = [torch.randn_like(result) for result in results]
    expected = torch.autograd.grad(results, [x, *model.parameters()], seeds, retain_graph=True, allow_unused=True)
    model.zero_grad()
    entered = x * 1
    roots = [get_gradient_edge(result) for result in forward(entered, tokens, model)]
    found, rest = input_gradients(roots, seeds, [get_gradient_edge(entered)])
    torch.testing.assert_close(found[0], expected[0])
    if forward is _apart:
        assert all(parameter.grad is None for parameter in model.parameters()), "weights wait for the second half"
    rest.run()
    for parameter, gradient in zip(model.parameters(), expected[1:], strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def traced(model: nn.Module, *args: Any, cuts: tuple[str, ...] = ()) -> tuple[Tracer, Any]:
    units = open_for_cuts(model, cuts) if cuts else choose_units(model)
    tracer = Tracer(model, units, StandIns(model), CPU)
    return tracer, tracer.trace(lambda: model(*args))


def test_a_program_computes_what_the_model_does() -> None:
    torch.manual_seed(0)
    model, tokens = subjects.GPT(), torch.randint(0, 23, (2, 8))
    _, program = traced(model, tokens)
    placement = place(program, named_starts(calls_of(program), ("blocks.1", "blocks.3"), 3), None)
    parts = [[node.unit for node in part.nodes if node.unit] for part in placement.parts]
    assert parts == [["embed", "blocks.0"], ["blocks.1", "blocks.2"], ["blocks.3", "norm", "head"]]
    values: dict[int, torch.Tensor] = {}
    for stage in range(3):
        work = StageWork(placement, stage, model, CPU)
        needed = [key for keys in placement.parts[stage].receives.values() for key in keys]
        values |= work.forward({key: values[key].detach() for key in needed})
    torch.testing.assert_close(work.output(values), model(tokens))


def test_a_stage_lets_go_of_what_it_has_sent() -> None:
    """Its gradient enters where it was made all the same."""
    torch.manual_seed(0)
    model, tokens = subjects.GPT(), torch.randint(0, 23, (2, 8))
    _, program = traced(model, tokens)
    placement = place(program, named_starts(calls_of(program), ("blocks.2",), 2), None)
    first, keys = (
        StageWork(placement, 0, model, CPU),
        [key for many in placement.parts[0].sends.values() for key in many],
    )
    values = first.forward({})
    sent = {key: weakref.ref(values[key]) for key in keys if values[key].requires_grad}
    gradients = {key: torch.ones_like(values[key]) for key in sent}
    assert sent
    del values
    first.let_go()
    assert all(held() is None for held in sent.values())
    first.backward(gradients)
    found = model.blocks[1].mlp[2].weight.grad
    model.zero_grad()
    middle = model.blocks[1](
        model.blocks[0](model.embed(tokens) + model.positions[:8], _causal(tokens)), _causal(tokens)
    )
    middle.sum().backward()
    torch.testing.assert_close(found, model.blocks[1].mlp[2].weight.grad)


def _causal(tokens: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
    return mask & (tokens != 0)[:, None, None, :] | torch.eye(tokens.shape[1], dtype=torch.bool)


def test_tracing_leaves_the_model_as_it_was() -> None:
    model = subjects.UNet()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    traced(model, torch.randn(2, 2, 8, 8))
    for name, module in model.named_modules():
        assert module.__dict__.keys() == before[name].keys()
        assert all(module.__dict__[key] is before[name][key] for key in before[name])
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), f"{name} changed"


class Straight(torch.autograd.Function):
    """A custom gradient must stay: its forward's own operations are not what is written down."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 3


class Glue(nn.Module):
    """Two layers with `between` called on the first one's output."""

    def __init__(self, between: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.between = nn.Linear(4, 4), nn.Linear(4, 4), between
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.between(self, self.one(x), x))


def _in_place(model: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    kept = y * 2
    view = y[:, :2]
    y += 1
    view.mul_(3)
    board = torch.zeros(x.shape)
    board[:, 1] = y[:, 0]
    return torch.relu_(y) + kept + board


def _masked(model: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = y.abs().amax()
    picked = y[(x > 0).any(1)]
    return Straight.apply(y) / scale + picked.sum() + (1.0 if float(x.sum()) > 0 else 2.0)


@pytest.mark.parametrize("between", [_in_place, _masked])
@pytest.mark.parametrize("start", ["one", "two"])
def test_glue_is_followed(between: Callable[..., torch.Tensor], start: str) -> None:
    torch.manual_seed(1)
    model, x = Glue(between), torch.randn(3, 4)
    _, program = traced(model, x)
    expected = model(x)
    expected.square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    placement = place(program, (("two", 0),), None)
    first, second = (StageWork(placement, stage, model, CPU) for stage in (0, 1))
    first.forward({})
    keys = placement.parts[1].receives[0]
    values = second.forward({key: first.outgoing(key).clone() for key in keys})
    torch.testing.assert_close(second.output(values), expected)
    second.loss = second.output(values).square().sum()
    second.backward({})
    first.backward({key: second.gradient(key) for key in keys if second.wants_gradient(key)})
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def _reads(model: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y if y.sum() > 0 else -y


def _buffers(model: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    model.seen.add_(y.sum(0))
    return y


def _parameters(model: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model.one.weight.mul_(0.5)
    return y


def _board(model: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    board = torch.zeros(x.shape)
    board[:, 0].copy_(y[:, 0])
    return board


def _object(model: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    class Cache:
        pass

    cache = Cache()
    cache.values = y  # type: ignore[attr-defined]
    return model.two(y, cache)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("between", "words"),
    [
        (_reads, "needs the values"),
        (_buffers, "a buffer of the model"),
        (_parameters, "changes parameter one.weight"),
        (_board, "a view of another tensor"),
        (_object, "holds tensors"),
    ],
)
def test_what_cannot_be_followed_is_refused(between: Callable[..., torch.Tensor], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        traced(Glue(between), torch.randn(3, 4))


@pytest.mark.parametrize(
    ("cuts", "words"),
    [(("blocks.9",), "no module 'blocks.9'"), (("embed",), "first"), (("unused",), "never calls"), ((), "0 modules")],
)
def test_cuts_that_make_no_pipeline_are_refused(cuts: tuple[str, ...], words: str) -> None:
    def cut() -> None:
        _, program = traced(subjects.GPT(), torch.randint(0, 23, (2, 8)), cuts=cuts)
        named_starts(calls_of(program), cuts, 2)

    with pytest.raises(PlanError, match=words):
        cut()


def test_a_loss_that_uses_parameters_is_not_taken_for_one_that_does_not() -> None:
    model, x = Glue(lambda model, y, x: y), torch.randn(3, 4)
    tracer, _ = traced(model, x)
    assert tracer.ends_with_model(lambda: model(x).square().mean())
    assert not tracer.ends_with_model(lambda: model(x).mean() + model.one.weight.square().sum())
    assert not tracer.ends_with_model(lambda: model(x).mean() + model(-x).mean())
    with pytest.raises(PlanError, match="parameters outside its forward"):
        tracer.finish(lambda: F.relu(model(x)).mean() + model.one.weight.sum(), torch.ones(3, 4))
