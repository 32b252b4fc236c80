"""No schedule deadlocks on NCCL: the runtime's own messages, under NCCL's rules for connecting and for completion."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallel.nccl_semantics import Operation, UncountedChannel, find_deadlock, recorded
from tutti.comm import rendezvous
from tutti.config.pipeline_schedule import Orders, build_schedule, forward_orders
from tutti.parallel.mesh import Mesh
from tutti.parallel.pipeline.placeholders import StandIns
from tutti.parallel.pipeline.stage_links import Links, StageMessage, make_links
from tutti.parallel.pipeline.stage_placement import Placement, calls_of, choose_units, named_starts, place
from tutti.parallel.pipeline.stage_tracing import Tracer

CPU = torch.device("cpu")
KINDS = [("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1), ("interleaved", 1), ("interleaved", 2), ("interleaved", 3)]


class Skips(nn.Module):
    """A chain whose first value every third layer and the last one need, and whose input's integers travel too."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 2)
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(layers - 1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        first = x = self.embed(tokens)
        for number, layer in enumerate(self.layers, 1):
            x = layer(x)
            if number % 3 == 0 or number == len(self.layers):
                x = (x + first) * (tokens != 0)[..., None]
        return x


@functools.cache
def placement(stages: int, skips: bool) -> Placement:
    """A real program of `stages` stages, as ranks trace it."""
    model: nn.Module = Skips(stages) if skips else nn.Sequential(*(nn.Linear(2, 2) for _ in range(stages)))
    batch = torch.randint(5, (3, 4)) if skips else torch.randn(3, 2)
    tracer = Tracer(model, choose_units(model), StandIns(model), CPU)
    program = tracer.trace(lambda: model(batch))
    cuts = tuple(f"layers.{n}" if skips else str(n + 1) for n in range(stages - 1))
    starts = named_starts(calls_of(program), cuts, stages) if cuts else ()
    return place(program, starts, None)


def by_direction(source: int, target: int) -> tuple[int, int]:
    return source, target


def traces_of(
    orders: Orders,
    chunks: int,
    *,
    skips: bool = False,
    connect: bool = True,
    groups: Callable[[int, int], tuple[int, int]] = by_direction,
) -> list[list[Operation]]:
    """The messages of all ranks in one run of a schedule, as the runtime issues them."""
    ranks = len(orders)
    placed = placement(ranks * chunks, skips)
    tensors = {key: torch.empty(o.shape, dtype=o.dtype) for key, o in placed.program.outlines.items()}

    def tensor_of(message: StageMessage) -> torch.Tensor:
        return tensors[message.key]

    channel: Any = UncountedChannel()
    traces = []
    for rank in range(ranks):
        with recorded() as trace:
            links = Links(range(ranks), rank, groups, CPU, channel)
            if connect:
                links.connect()
            session = links.session(orders, lambda _: placed)
            for action in session.begin_each(orders[rank]):
                session.receive(action)
                session.send(action, tensor_of)
            links.settle()
        traces.append(trace)
    return traces


@pytest.mark.parametrize("skips", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize(("name", "chunks"), KINDS)
def test_no_schedule_deadlocks(name: Any, chunks: int, skips: bool) -> None:
    for ranks in range(1, 9):
        for microbatches in range(1, 17):
            orders = build_schedule(name, ranks, chunks, microbatches)
            found = find_deadlock(traces_of(orders, chunks, skips=skips))
            assert not found, (ranks, microbatches, found)


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_no_forward_without_gradients_deadlocks(chunks: int, skips: bool) -> None:
    for ranks in range(1, 9):
        orders = forward_orders(ranks, chunks)
        found = find_deadlock(traces_of(orders, chunks, skips=skips))
        assert not found, (ranks, found)


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "microbatches"),
    [
        *(("gpipe", ranks, 1, count) for ranks in (2, 3, 4, 8) for count in (1, 2, 4, 16)),
        *((name, 4, chunks, 1) for name, chunks in KINDS),
        *(("zero-bubble", 4, 1, count) for count in range(1, 9)),
        ("interleaved", 4, 2, 4),
        ("1f1b", 4, 1, 2),
    ],
)
def test_groups_that_connect_at_their_first_message_deadlock(
    name: Any, ranks: int, chunks: int, microbatches: int
) -> None:
    """Why `connect` is needed."""
    orders = build_schedule(name, ranks, chunks, microbatches)
    assert "stuck" in find_deadlock(traces_of(orders, chunks, connect=False))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble"])
def test_one_group_for_both_directions_deadlocks(name: Any) -> None:
    """Why each direction has a group: a receive that is posted early would block the sends behind it."""
    orders = build_schedule(name, 4, 1, 8)
    groups = [lambda source, target: (min(source, target), max(source, target)), by_direction]
    assert [bool(find_deadlock(traces_of(orders, 1, groups=each))) for each in groups] == [True, False]


def test_links_on_nccl_are_connected_when_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks: each opens the groups of its own pairs only, in one order, and connects them by messages."""
    opened: list[tuple[int, ...]] = []

    def new_group(ranks: list[int], **_: Any) -> tuple[int, ...]:
        opened.append(tuple(ranks))
        return tuple(ranks) if opened.count(tuple(ranks)) == 1 else (ranks[1], ranks[0])

    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(dist, "new_group", new_group)
    traces = []
    for rank in range(3):
        opened.clear()
        with recorded() as trace:
            make_links(Mesh({"stage": 3}, rank), CPU, UncountedChannel(), None)  # type: ignore[arg-type]
        pairs = [pair for pair in [(0, 1), (0, 2), (1, 2)] if rank in pair]
        assert sorted(opened) == sorted(pairs * 2)
        traces.append(trace)
    assert {operation.group for trace in traces for operation in trace if operation.group} == {
        *itertools.permutations(range(3), 2)
    }
    assert not find_deadlock(traces)


def test_groups_on_nccl_are_connected_when_they_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    connected: list[Any] = []
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(dist, "new_group", lambda ranks, **_: tuple(ranks))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: connected.append(group))
    mesh = Mesh({"replicate": 2, "space": 2}, 1)
    mesh.group("space")
    mesh.group("space")
    mesh.new_group("replicate")
    rendezvous.connect_group(None)
    assert connected == [(0, 1), (1, 3), None]
