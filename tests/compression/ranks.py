"""What ranks do in the tests of exchanges: made here, so that they can be imported where ranks are forked."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compression.codecs import CODECS, FEEDBACK, gradient
from compression.transport import sent_nbytes
from tutti.comm.world import join_world
from tutti.compression.bucketed_top_k import TOP16_Q4
from tutti.compression.cast import Cast
from tutti.compression.dense_reducers import AllGatherReducer, TwoPhaseReducer
from tutti.compression.gravac import GravacReducer
from tutti.compression.powersgd import PowerSGDReducer
from tutti.compression.qsgd import Levels
from tutti.compression.reducer import (
    GradientReducer,
    RoundScheduler,
    all_finite,
    load_states_by_tensor,
    states_by_tensor,
    wait_all,
)
from tutti.compression.sparse_reducer import SparseReducer
from tutti.compression.sufficient_factors import FactorReducer, Factors, linear
from tutti.compression.top_k import TopK
from tutti.config.compression import factors_sent_nbytes

SHAPES = [(12, 10), (7,), (9, 4, 5), (3, 2)]


def exchanges(numel: int, dtype: torch.dtype = torch.float64) -> dict[str, GradientReducer]:
    """By name; all ranks make them alike."""
    made: dict[str, GradientReducer] = {
        f"two-phase {name}": TwoPhaseReducer(codec, numel, dtype=dtype)
        for name, codec in FEEDBACK.items()
        if "top" not in name
    }
    made["top16-q4 and q4"] = TwoPhaseReducer(TOP16_Q4, numel, return_codec=Levels(4, feedback=True), dtype=dtype)
    made["gathered topk"] = AllGatherReducer(TopK(0.05), numel, dtype=dtype)
    made["gravac"] = GravacReducer(TopK(0.01), [(numel,)], gain=0.5, window=3, dtype=dtype)
    made["split topk"] = SparseReducer(TopK(0.05), numel, dtype=dtype)
    made["split dense"] = SparseReducer(TopK(0.7), numel, dtype=dtype)
    made["split q4"] = SparseReducer(TopK(0.7), numel, dtype=dtype, return_codec=Levels(4, feedback=True))
    made["doubling topk"] = SparseReducer(TopK(0.05), numel, dtype=dtype, algorithm="doubling")
    made["doubling dense"] = SparseReducer(TopK(0.3), numel, dtype=dtype, algorithm="doubling")
    return made


def plain_exchanges(numel: int, dtype: torch.dtype = torch.float32) -> dict[str, GradientReducer]:
    """Those that keep nothing, or more than the rest of a sum."""
    return {
        name: TwoPhaseReducer(CODECS[name], numel, dtype=dtype)
        for name in ("qsgd", "qsgd-2", "terngrad", "bytegrad-plain", "fp16-plain", "bf16-plain")
    } | {"dgc": AllGatherReducer(CODECS["dgc"], numel, dtype=dtype)}


def all_of(value: Any) -> list[Any]:
    """Every rank's."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def of_rank(kind: str, numel: int, dtype: torch.dtype, step: int) -> Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return gradient(kind, numel, dtype, 100 * step + rank)


def telescoping(sizes: tuple[int, ...], steps: int) -> None:
    """What came out, and what all workers and servers keep, add up to what went in; alike on all ranks."""
    join_world()
    for numel in sizes:
        for name, exchange in exchanges(numel).items():
            total, out = torch.zeros(numel).double(), torch.zeros(numel).double()
            for step in range(steps):
                flat = of_rank("normal", numel, torch.float64, step)
                total += flat
                exchange.run(flat)
                out += flat
                exchange.finish_step(all_finite(flat))
            same_everywhere(out, f"{name} {numel}")
            kept = sum(one["residual"] for one in all_of(states_by_tensor(exchange, [numel])[0]))
            expected = sum(all_of(total))
            error = float((out + kept - expected).abs().max())
            assert error <= 1e-12, f"{name} {numel}: {error}"


def not_finite(numel: int) -> None:
    """One rank's NaN or infinity: all see it, and nobody's error feedback moves."""
    join_world()
    for make in (exchanges, plain_exchanges):
        for name, exchange in make(numel, torch.float32).items():
            for step, kind in enumerate(("normal", "nan", "infinite", "normal")):
                flat = of_rank(
                    kind if dist.get_rank() == 1 or kind == "normal" else "normal", numel, torch.float32, step
                )
                before = {key: tensor.clone() for key, tensor in exchange.tensors().items()}
                exchange.run(flat)
                finite = all_finite(flat)
                assert finite == (kind == "normal"), f"{name} {kind}"
                exchange.finish_step(finite)
                if finite:
                    same_everywhere(flat, name)
                    continue
                for key, tensor in exchange.tensors().items():
                    assert torch.equal(tensor, before[key]), f"{name} {kind} {key}"
            flat = torch.zeros(numel)
            for state in exchange.states.values():
                for tensor in state.old.values():
                    tensor.zero_()
            exchange.run(flat)
            assert not flat.any(), f"{name}: zeros"


def bytes_sent(numel: int) -> dict[str, tuple[int, int, int]]:
    """By name: the formula, what the wire counted, what the sockets of this process sent in four steps."""
    join_world()
    found = {}
    made = exchanges(numel, torch.float32) | plain_exchanges(numel)
    made["powersgd"] = PowerSGDReducer([(numel // 100, 100)], rank=2)
    for name, exchange in made.items():
        flat = of_rank("normal", numel if name != "powersgd" else numel // 100 * 100, torch.float32, 0)
        exchange.run(flat.clone())
        counted = exchange.collectives.sent_nbytes
        dist.barrier()
        before = sent_nbytes()
        for _ in range(4):
            exchange.run(flat.clone())
        dist.barrier()  # what waits in a socket's buffer has not been sent
        after = sent_nbytes()
        found[name] = (
            4 * getattr(exchange, "step_nbytes", counted),
            exchange.collectives.sent_nbytes - counted,
            after - before,
        )
    return found


def several_at_once(numel: int) -> None:
    """Buckets under way together give what they give one by one; the wire's order is the same on all ranks."""
    join_world()
    alone, together = exchanges(numel), exchanges(numel)
    for step in range(3):
        expected, got = {}, {}
        for name, exchange in alone.items():
            expected[name] = of_rank("normal", numel, torch.float64, step)
            exchange.run(expected[name])
            exchange.finish_step(True)
        order = RoundScheduler(ahead=1 + step)
        for name, exchange in together.items():
            got[name] = of_rank("normal", numel, torch.float64, step)
            order.start(exchange.rounds(got[name]))
        order.finish()
        for name, exchange in together.items():
            exchange.finish_step(True)
            assert torch.equal(got[name], expected[name]), name


def checkpointed(numel: int) -> None:
    """Exchanges go on from their tensors exactly; in another world nothing that was kept is lost."""
    join_world()
    ranks = dist.get_world_size()
    one, other, fresh = exchanges(numel), exchanges(numel), exchanges(numel)
    for name, exchange in one.items():
        for step in range(3):
            exchange.run(of_rank("normal", numel, torch.float64, step))
            exchange.finish_step(True)
        other[name].load({key: tensor.clone() for key, tensor in exchange.tensors().items()})
        flats = [of_rank("normal", numel, torch.float64, 9) for _ in range(2)]
        exchange.run(flats[0])
        other[name].run(flats[1])
        assert torch.equal(*flats), name
        exchange.finish_step(True)
        (kept,) = states_by_tensor(exchange, [numel])
        count = exchange.states["worker"].count
        load_states_by_tensor(
            fresh[name], [numel], [{what: sum(all_of(value)) / ranks for what, value in kept.items()}], count
        )
        (again,) = states_by_tensor(fresh[name], [numel])
        for what, value in kept.items():
            torch.testing.assert_close(sum(all_of(again[what])), sum(all_of(value)), rtol=1e-13, atol=1e-15)
        assert fresh[name].states["worker"].count == count == 4


def sparse_sums(numel: int) -> list[tuple[str, float, int, bool]]:
    """Whole-valued inputs of several overlaps and densities: bit for bit the dense sum; (algorithm, overlap, nnz,
    whether it switched).
    """
    join_world()
    rank, ranks, found = dist.get_rank(), dist.get_world_size(), []
    for algorithm in ("split", "doubling"):
        for share in (0.02, 0.3, 0.6):
            for overlap in (0.0, 0.5, 1.0):
                count = round(share * numel / (1 if overlap == 1 else ranks))
                flat = torch.zeros(numel)
                draw = torch.Generator().manual_seed(5)
                order = torch.randperm(numel, generator=draw)
                common = round(overlap * count)
                own = order[common + rank * (count - common) :][: count - common]
                flat[order[:common]] = torch.randint(1, 50, (common,), generator=draw).float() * (rank + 1)
                flat[own] = torch.randint(-50, 0, (len(own),), generator=draw).float()
                expected = sum(all_of(flat.clone()))
                assert isinstance(expected, Tensor)
                exchange = SparseReducer(TopK(max(count, 1) / numel), numel, algorithm=algorithm)  # type: ignore[arg-type]
                exchange.run(flat)
                assert torch.equal(flat, expected), (algorithm, share, overlap)
                found.append((algorithm, overlap, common + ranks * (count - common), exchange.switched))
    return found


def power(steps: int) -> dict[str, Any]:
    """PowerSGD of all ranks beside one rank with the sum; and how the workers' errors go."""
    join_world()
    numel = sum(torch.Size(shape).numel() for shape in SHAPES)
    exchange = PowerSGDReducer(SHAPES, rank=2, min_rate=1, dtype=torch.float64, seed=4)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    single = PowerSGDReducer(SHAPES, rank=2, min_rate=1, dtype=torch.float64, seed=4, group=alone)
    worst, total, out = 0.0, torch.zeros(numel).double(), torch.zeros(numel).double()
    for step in range(steps):
        flat = of_rank("normal", numel, torch.float64, step)
        everyone = sum(all_of(flat.clone()))
        assert isinstance(everyone, Tensor)
        total += everyone
        exchange.run(flat)
        single.run(everyone)
        worst = max(worst, float((flat - everyone).abs().max()))
        same_everywhere(flat, "powersgd")
        out += flat
        exchange.finish_step(True)
        single.finish_step(True)
    error = exchange.states["worker"].old["residual"]
    kept = sum(all_of(error))
    assert isinstance(kept, Tensor)
    whole = torch.zeros(numel).double()
    offset = 0
    for matrix in exchange.matrices:
        size = matrix.rows * matrix.columns
        whole[matrix.start : matrix.start + size] = kept[offset : offset + size]
        offset += size
    return {"beside one": worst, "lost": float((out + whole - total).abs().max()), "error": float(error.norm())}


def power_not_finite() -> None:
    """A step that does not count leaves Q and the errors; zero gradients do not end the method."""
    join_world()
    exchange = PowerSGDReducer([(12, 10), (5,)], rank=2, min_rate=1)
    for kind in ("normal", "nan", "zeros", "zeros", "normal"):
        before = {key: tensor.clone() for key, tensor in exchange.tensors().items()}
        flat = of_rank(kind if dist.get_rank() == 0 or kind != "nan" else "normal", 125, torch.float32, 1)
        exchange.run(flat)
        finite = all_finite(flat)
        assert finite == (kind != "nan")
        exchange.finish_step(finite)
        if not finite:
            assert all(torch.equal(tensor, before[key]) for key, tensor in exchange.tensors().items())
    assert flat[:120].norm() > 0


def precision_of_casts(numel: int) -> None:
    """1e5 does not overflow on the way to an average, since nothing is cast before it is divided."""
    join_world()
    ranks = dist.get_world_size()
    flat = torch.full((numel,), 1e5) / ranks
    TwoPhaseReducer(Cast("float16"), numel).run(flat / 2)
    small = torch.full((numel,), 5e-8 * 1000)
    TwoPhaseReducer(Cast("bfloat16"), numel).run(small)
    torch.testing.assert_close(small, torch.full((numel,), 5e-5 * ranks), rtol=1e-2, atol=0)


def terngrad_sums(numel: int) -> None:
    """With the scales shared over ranks, the way back is exact: the sum is that of the ranks' codes."""
    join_world()
    exchange = TwoPhaseReducer(CODECS["terngrad"], numel)
    flat = of_rank("normal", numel, torch.float32, 0)
    exchange.run(flat)
    for chunk in flat.split(exchange.length):
        scale = float(chunk.abs()[chunk != 0].min())
        assert torch.allclose((chunk / scale).round(), chunk / scale, atol=1e-4)
    same_everywhere(flat, "terngrad")


def same_everywhere(tensor: Tensor, name: str) -> None:
    first, *others = all_of(tensor)
    assert all(torch.equal(first, other) for other in others), f"{name}: not the same on all ranks"


def factor_sums(out_features: int, in_features: int, beside: bool) -> dict[str, Any]:
    """A linear layer's weight gradient by factors of several calls, unlike many rows on each rank, beside the dense.
    `beside`: the last rank has a gradient that is none of factors, too.
    """
    join_world()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(rank)
    start = torch.randn(out_features, in_features, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = start.t().contiguous().t().requires_grad_()  # transposed in memory
    bias = torch.zeros(out_features, dtype=torch.float64, requires_grad=True)
    kept, everything = Factors(), FactorReducer()
    dense = torch.zeros_like(weight)
    for rows in [(2, 3), (rank,)][: 1 + rank]:
        inputs = torch.randn(*rows, in_features, dtype=torch.float64, generator=draw).requires_grad_()
        linear(inputs, weight, bias, kept).sin().sum().backward()
        assert weight.grad is None
        own = inputs.detach().requires_grad_()
        loss = torch.nn.functional.linear(own, weight, bias).sin().sum()
        gradients = torch.autograd.grad(loss, [weight, own])
        dense += gradients[0]
        torch.testing.assert_close(inputs.grad, gradients[1])
    other = torch.ones_like(weight) if beside and rank == ranks - 1 else None
    out = torch.empty_like(weight)
    for works in everything.rounds(kept, out, other):
        wait_all(works)
    same_everywhere(out, "factors")
    error = float((out - sum(all_of(dense if other is None else dense + other))).abs().max())
    exact = 2 * (ranks - 1) * weight.numel() * 8 // ranks + 8 * (ranks - 1)
    rows = 6 + (rank if rank else 0)
    return {
        "error": error,
        "formula": exact if everything.dense else factors_sent_nbytes(rows, out_features, in_features, ranks, 8),
        "counted": everything.collectives.sent_nbytes,
        "dense": everything.dense,
        "used": everything.used,
    }


def at_once(*calls: tuple[Any, ...]) -> list[Any]:
    """Several of these functions with their arguments, in one launch."""
    return [function(*arguments) for function, *arguments in calls]
