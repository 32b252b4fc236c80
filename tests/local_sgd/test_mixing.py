"""The algebra of mixing: what keeps the mean, what reaches it, and how fast."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from harness import run_ranks
from local_sgd.simulated import tree
from tutti.comm.traffic import Traffic
from tutti.comm.world import join_world
from tutti.local_sgd.adasum import adasum, combine
from tutti.local_sgd.averaging import DiLoCo
from tutti.local_sgd.mixing import ElasticAveraging, GossipMixing, StochasticGradientPush, one_peer, ring, shift_one
from tutti.local_sgd.replica_group import FlatTensors, ReplicaGroup, distance_from_mean, distance_from_sampled_mean
from tutti.parallel.mesh import Mesh

SIZES = range(1, 13)


def matrix(partners: Any, mixing: int, size: int) -> np.ndarray:
    w = np.zeros((size, size))
    for index in range(size):
        weights = partners(mixing, index, size)
        w[index, index] = 1 - sum(weights.values())
        for other, weight in weights.items():
            w[index, other] += weight
    return w


@pytest.mark.parametrize(
    ("partners", "size"),
    [*((ring, size) for size in SIZES), *((shift_one, size) for size in SIZES if size == 1 or size % 2 == 0)],
)
def test_mixing_keeps_the_mean(partners: Any, size: int) -> None:
    for mixing in range(7):
        w = matrix(partners, mixing, size)
        assert np.abs(w.sum(0) - 1).max() < 1e-12
        assert np.abs(w.sum(1) - 1).max() < 1e-12
        assert (w >= 0).all()
        assert np.array_equal(w, w.T), "both must know that they exchange"


@pytest.mark.parametrize(("size", "second"), [(4, 0.333), (8, 0.805), (16, 0.949)])
def test_a_ring_agrees_as_fast_as_its_second_eigenvalue(size: int, second: float) -> None:
    values = sorted(np.abs(np.linalg.eigvalsh(matrix(ring, 0, size))))
    assert values[-2] == pytest.approx(second, abs=5e-4)


@pytest.mark.parametrize("size", [2, 4, 6, 8, 10, 12])
def test_pairs_shift_so_that_everyone_meets_the_other_half(size: int) -> None:
    met = set()
    for mixing in range(size // 2):
        for index in range(size):
            (partner,) = shift_one(mixing, index, size)
            assert list(shift_one(mixing, partner, size)) == [index]
            met.add((index, partner))
    assert len(met) == 2 * (size // 2) ** 2


@pytest.mark.parametrize("size", SIZES)
def test_what_is_pushed_is_kept_in_sum(size: int) -> None:
    reach = np.eye(size)
    for mixing in range(max(1, (size - 1).bit_length())):
        w = np.zeros((size, size))
        for index in range(size):
            to, frm = one_peer(mixing, index, size)
            for other in (index, *to):
                w[other, index] += 1 / (len(to) + 1)
            assert all(index in one_peer(mixing, other, size)[0] for other in frm)
        assert np.abs(w.sum(0) - 1).max() < 1e-12
        reach = w @ reach
    if size & (size - 1) == 0:
        assert np.abs(reach - 1 / size).max() < 1e-15, "the exact mean after log2 of the replicas"


def test_adasum_averages_what_is_parallel_and_adds_what_is_orthogonal() -> None:
    a = torch.tensor([3.0, -1.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(combine(a, a), a, rtol=1e-15, atol=0)
    torch.testing.assert_close(combine(a, 3 * a), 2 * a, rtol=1e-15, atol=0)
    b = torch.tensor([1.0, 3.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(combine(a, b), a + b, rtol=1e-15, atol=0)
    one, both = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])
    assert combine(one, both).tolist() == [1.25, 0.75]
    assert combine(both, one).tolist() == [1.25, 0.75]
    nothing = torch.zeros(2)
    assert combine(nothing, both).tolist() == [1.0, 1.0]
    assert combine(nothing, nothing).tolist() == [0.0, 0.0]
    tiny = torch.full((2,), 1e-200, dtype=torch.float64)
    assert torch.isfinite(combine(tiny, tiny)).all()


def test_the_outer_update_is_nesterov_momentum() -> None:
    generator = torch.Generator().manual_seed(3)
    start, moves = torch.randn(5, generator=generator), torch.randn(6, 5, generator=generator)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    mode, model = DiLoCo(ReplicaGroup(), 1, rate=0.7, momentum=0.9), start.clone()
    mode.vectors = FlatTensors([("x", model)])
    mode.restart()
    for move in moves:
        model += move
        parameter.grad = parameter.detach() - (parameter.detach() + move)
        optimizer.step()
        (final_parameters,) = mode.final_parameters()
        mode.average()
        torch.testing.assert_close(model, parameter.detach())
        torch.testing.assert_close(final_parameters, model, rtol=0, atol=0)


def test_distances_from_the_mean_are_relative_to_its_length() -> None:
    own, mean = [torch.tensor([3.0, 4.0])], [torch.tensor([3.0, 1.0])]
    assert distance_from_mean(own, mean, ReplicaGroup())["max"] == pytest.approx(3 / math.sqrt(10))
    assert distance_from_sampled_mean(own, ReplicaGroup()) == {"max": 0.0, "mean": 0.0, "parameters": 2}
    assert distance_from_sampled_mean([torch.zeros(100_000)], ReplicaGroup())["parameters"] <= 4096


def test_vectors_give_back_what_they_read() -> None:
    wide = torch.arange(12.0).reshape(3, 4).t()
    tensors = {"a": wide, "b": torch.ones(3, dtype=torch.float16), "c": torch.zeros(()), "d": torch.ones(0)}
    vectors = FlatTensors(tensors.items())
    flats = vectors.read()
    assert sorted(str(flat.dtype) for flat in flats) == ["torch.float32", "torch.float32"]
    assert vectors.nbytes == 4 * 13 + 4 * 3
    vectors.write([flat + 1 for flat in flats])
    assert torch.equal(wide, torch.arange(12.0).reshape(3, 4).t() + 1)
    assert tensors["b"].tolist() == [2, 2, 2]
    assert float(tensors["c"]) == 1


def exchange_all(size: int) -> dict[str, Any]:
    """On a rank: Adasum, a push over a graph that is not regular, a ring; with the bytes that they sent."""
    world = join_world()
    mesh, traffic = Mesh({"replicate": size}, world.rank), Traffic()
    channel = traffic.channel("parameters", ("replicate",))
    replicas = ReplicaGroup.of(mesh, channel, traffic.channel("scalars"))
    found: dict[str, Any] = {}
    flats = [values(world.rank), values(world.rank)[:3].float()]
    parts = FlatTensors([("a", torch.zeros(4, dtype=torch.float64)), ("b", torch.zeros(3, dtype=torch.float64)),
                     ("c", torch.zeros(3))]).parts  # fmt: skip
    found["adasum"] = adasum(flats, replicas, parts)
    found["adasum nbytes"] = channel.take().nbytes
    found["mean"] = replicas.mean([values(world.rank)])[0]
    found["mean nbytes"] = channel.take().nbytes
    for name, mode in (("push", StochasticGradientPush(replicas, 1, star)), ("ring", GossipMixing(replicas, 1, ring))):
        model, sums = values(world.rank), []
        mode.vectors, mode.buffers = FlatTensors([("x", model)]), Nothing()  # type: ignore[assignment]
        mode.restart()
        for _ in range(8):
            mode.counts["updates_since"] += 1
            mode.exchange(None)  # type: ignore[arg-type]
            biased = mode._biased()[0] if isinstance(mode, StochasticGradientPush) else model
            weight = float(mode.saved_vectors["weight"][0]) if isinstance(mode, StochasticGradientPush) else 1.0
            sums.append((replicas.mean([biased.clone()])[0], weight))
        mode.restart()
        found[name] = (model, sums)
    model, kept = values(world.rank), []
    elastic = ElasticAveraging(replicas, 1, 0.9)
    elastic.vectors, elastic.buffers = FlatTensors([("x", model)]), Nothing()  # type: ignore[assignment]
    elastic.restart()
    elastic.saved_vectors["centre"] = [torch.zeros(7, dtype=torch.float64)]
    for _ in range(8):
        elastic.counts["updates_since"] += 1
        elastic.exchange(None)  # type: ignore[arg-type]
        kept.append(size * replicas.mean([model.clone()])[0] + elastic.saved_vectors["centre"][0])
    elastic.restart()
    found["elastic"] = kept
    return found


class Nothing:
    """A model without buffers."""

    def agree(self) -> None:
        pass


def values(rank: int) -> torch.Tensor:
    return torch.randn(7, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def star(mixing: int, index: int, size: int) -> tuple[list[int], list[int]]:
    """The first pushes to everyone, everyone to the next: columns sum to one, rows do not."""
    targets = [[*range(1, size)] if i == 0 else [(i + 1) % size] for i in range(size)]
    return targets[index], [i for i in range(size) if index in targets[i]]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_exchanges_on_ranks(size: int) -> None:
    ranks = run_ranks(exchange_all, size, size)
    wholes = [values(rank) for rank in range(size)]
    mean = torch.stack(wholes).mean(0)
    rounds = {2: 1, 3: 1, 4: 2}[size]
    for rank, found in enumerate(ranks):
        for part in (slice(0, 4), slice(4, 7)):
            expected = tree([whole[part] for whole in wholes])
            torch.testing.assert_close(found["adasum"][0][part], expected, rtol=1e-13, atol=1e-14)
        assert all(torch.equal(a, b) for a, b in zip(found["adasum"], ranks[0]["adasum"], strict=True))
        extra = 1 if size == 3 and rank == 0 else 0  # it gives the result back to the one beyond the power of two
        sent = 1 if size == 3 and rank == 2 else rounds + extra
        assert found["adasum nbytes"] == sent * (7 * 8 + 3 * 4)
        torch.testing.assert_close(found["mean"], mean, rtol=1e-15, atol=1e-15)
        assert torch.equal(found["mean"], ranks[0]["mean"])
        assert found["mean nbytes"] == 2 * (size - 1) * 7 * 8 // size
        for name in ("push", "ring"):
            for sum_of, _ in found[name][1]:
                torch.testing.assert_close(sum_of, mean, rtol=1e-12, atol=1e-14)
        whole = torch.stack(wholes).sum(0)
        for kept in found["elastic"]:
            torch.testing.assert_close(kept, whole, rtol=1e-12, atol=1e-13)
    assert all(sum(found["push"][1][k][1] for found in ranks) == pytest.approx(size, rel=1e-12) for k in range(8))
    if size > 2:
        assert ranks[0]["push"][1][0][1] != 1.0, "the graph is not regular"
    start = max(float((whole - mean).abs().max()) for whole in wholes)
    for name in ("push", "ring"):
        end = max(float((found[name][0] - mean).abs().max()) for found in ranks)
        assert end < start / 20, name
