"""Gradients summed in buckets: every parameter's, once, whatever a rank leaves out, freezes or lays out differently."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import run_ranks
from tutti.comm.world import World, join_world
from tutti.config.plan import BatchPlan, Plan, SyncPlan
from tutti.errors import ScriptError
from tutti.parallel.data.buckets import AllReduceBuckets, Bucket, ReductionGroup, make_buckets
from tutti.parallel.data.replicate import Replica
from tutti.parallel.layout import Layout
from tutti.parallel.mesh import Mesh

ALONE = ReductionGroup(None, 1)


class Net(nn.Module):
    """Branches that a rank may leave out, two dtypes, a channels-last convolution, a sparse embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.Embedding(7, 3, sparse=True)
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.never = nn.Parameter(torch.ones(2))
        self.first = nn.Linear(3, 5)
        self.wide = nn.Linear(3, 5).double()
        self.sometimes = nn.Linear(5, 1)
        self.always = nn.Linear(5, 1)


def backward(model: Net, seed: int, *, use: bool) -> None:
    """One backward; on ranks that do not `use` it, the branch `sometimes` stays without a gradient."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, generator=draw)
    hidden = torch.tanh(model.first(x) + model.wide(x.double()).float())
    loss = model.always(hidden).sum() + model.sparse(torch.randint(7, (4,), generator=draw)).square().sum()
    loss = loss + model.conv(torch.randn(1, 2, 5, 5, generator=draw)).square().sum()
    if use:
        loss = loss + model.sometimes(hidden).square().sum()
    loss.backward()


def summed(world: World, model: Net, replica: Replica, step: int, microbatches: int, *, freeze: bool) -> None:
    model.first.bias.requires_grad_(not freeze)
    model.zero_grad(set_to_none=True)
    for index in range(microbatches):
        if index == 0:
            replica.begin(accumulate=microbatches > 1)
        if index == microbatches - 1:
            replica.announce_last_backward()
        use = world.rank == 1 and index == 0  # with several microbatches: used, but not in the last one
        backward(model, 1000 * step + 10 * index + world.rank, use=use)
    replica.finish()


def expected(world: World, model: Net, step: int, microbatches: int) -> dict[str, torch.Tensor | None]:
    model.zero_grad(set_to_none=True)
    for rank in range(world.world_size):
        for index in range(microbatches):
            backward(model, 1000 * step + 10 * index + rank, use=rank == 1 and index == 0)
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def sums_on_rank(bucket_nbytes: int, together: bool) -> list[str]:
    """Compare five steps with the sum of all ranks' backward passes on one; returns what differs."""
    world = join_world()
    if together:
        make = Bucket.__init__

        def as_on_devices(bucket: Bucket, *args: Any) -> None:
            make(bucket, *args)
            bucket.copies_together = True

        Bucket.__init__ = as_on_devices  # type: ignore[method-assign]
    torch.manual_seed(0)
    model = Net()
    layout = Layout.of(model, Mesh({"replicate": world.world_size}, world.rank))
    plan = Plan(
        batch=BatchPlan(global_batch_size=8),
        mesh={"replicate": world.world_size},
        sync=SyncPlan(bucket_nbytes=bucket_nbytes),
    )
    replica, wrong = Replica(model, layout, plan), []
    for step, (microbatches, freeze) in enumerate([(1, False), (2, False), (1, True), (3, True), (1, False)]):
        summed(world, model, replica, step, microbatches, freeze=freeze)
        got = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        for name, value in expected(world, model, step, microbatches).items():
            mine = got[name]
            if (mine is None) != (value is None):
                wrong.append(f"step {step}: {name} is {'None' if mine is None else 'there'}")
            elif mine is not None and value is not None:
                gap = float((mine.to_dense() - value.to_dense()).abs().max())
                wrong += [f"step {step}: {name} differs by {gap}"] if gap > 1e-4 else []
        if model.conv.weight.grad is not None and model.conv.weight.grad.stride() != model.conv.weight.stride():
            wrong.append("the convolution's gradient has lost its strides")
    return wrong


@pytest.mark.parametrize(
    ("world_size", "bucket_nbytes", "together"), [(2, 25 * 2**20, False), (3, 64, False), (2, 25 * 2**20, True)]
)
def test_gradients_are_the_sum_over_ranks(world_size: int, bucket_nbytes: int, together: bool) -> None:
    for wrong in run_ranks(sums_on_rank, world_size, bucket_nbytes, together):
        assert wrong == []


def test_gradients_that_are_copied_together_are_the_bucket_s_before_its_reduction() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(1))]
    bucket = Bucket(parameters, ReductionGroup(None, 1, bucket_reducer=Started()))
    bucket.copies_together = True
    bucket.open()
    for index in (2, 0):
        parameters[index].grad = torch.full_like(parameters[index], index + 1.0)
        bucket.fill(index)
        assert parameters[index].grad is not bucket.views[index]
    parameters[0].grad = parameters[0].grad + 1  # type: ignore[operator]  # a hook of the script, or a second use
    bucket.complete()
    bucket.launch()
    assert bucket.flat.tolist() == [2, 2, 0, 0, 0, 3, 1, 0, 1]
    assert parameters[0].grad is bucket.views[0]
    assert parameters[1].grad is None


class Started(AllReduceBuckets):
    def start(self, bucket: Bucket) -> Any:
        return None


def order_on_rank() -> list[list[int]]:
    """Sizes of the buckets' gradients after two steps of a model whose order of use is not that of registration."""
    world = join_world()
    model = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in ("third", "first", "second")})
    layout = Layout.of(model, Mesh({"replicate": world.world_size}, world.rank))
    plan = Plan(
        batch=BatchPlan(global_batch_size=8), mesh={"replicate": world.world_size}, sync=SyncPlan(bucket_nbytes=64)
    )
    replica = Replica(model, layout, plan)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        replica.begin()
        model["third"](model["second"](model["first"](torch.ones(1, 8)))).sum().backward()
        replica.finish()
    order = {id(p): position for position, p in enumerate(model.parameters())}
    return [[order[id(p)] for p in bucket.parameters] for bucket in replica._buckets]


def test_buckets_follow_the_order_in_which_gradients_arrive() -> None:
    for order in run_ranks(order_on_rank, 2):
        assert order == [[0], [2], [1]]


def test_a_bucket_holds_one_dtype_and_closes_at_its_cap() -> None:
    parameters = [nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in (torch.float32, torch.float64) * 3]
    buckets = make_buckets(parameters, lambda _: ALONE, 32)
    assert sorted(len(bucket.parameters) for bucket in buckets) == [1, 1, 1, 1, 2]
    assert all(len({p.dtype for p in bucket.parameters}) == 1 for bucket in buckets)


def test_a_gradient_that_comes_again_after_it_was_sent_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(3))
    bucket = Bucket([parameter], ALONE)
    parameter.grad = torch.ones(3)
    bucket.fill(0)
    bucket.work = object()
    with pytest.raises(ScriptError, match="use_reentrant=False"):
        bucket.fill(0)


class Reentrant(nn.Module):
    """A block under checkpoint(use_reentrant=True), and a parameter that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self.block, self.first(x), use_reentrant=True)  # type: ignore[no-any-return]


def reentrant_on_rank() -> list[float]:
    import tutti

    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / "run")
    job = tutti.Job(global_batch_size=4)
    model = Reentrant()
    data: Any = torch.utils.data.TensorDataset(torch.randn(8, 4, generator=torch.Generator().manual_seed(1)))
    _, _, loader = job.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        data,
        lambda output, _: output.square().mean(),
        unpack=lambda batch: ((batch[0],), {}, None),
        shuffle=False,
    )
    losses = [job.step(batch) for _ in job.epochs(2) for batch in loader]
    assert dist.is_initialized() == (job.world_size > 1)
    return losses


def test_reentrant_checkpoints_and_unused_parameters_go_together() -> None:
    one, many = run_ranks(reentrant_on_rank, 1)[0], run_ranks(reentrant_on_rank, 2)
    for losses in many:
        assert losses == pytest.approx(one, rel=1e-5)
