"""Out of memory in a step: all ranks agree on twice as many microbatches and compute the step again.

The rank that has run out completes the step's exchanges without its gradients. It marks its buckets with a flag that is
not a number, so the other ranks learn of it from the sums that they wait for anyway.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from tutti.comm.rendezvous import open_group
from tutti.comm.traffic import CommHandle
from tutti.config import serialization
from tutti.data.batches import BatchShare
from tutti.data.seeds import HostState, host_digest, host_state, set_host_state
from tutti.errors import TrainingError
from tutti.parallel.data.batch_state import exchanges_state
from tutti.parallel.data.replicate import has_sparse, is_abandoned
from tutti.trainer.observer import NullObserver
from tutti.trainer.run_state import Run

_CPU_ALLOCATOR = ("DefaultCPUAllocator", "can't allocate memory", "not enough memory")


class StepExhaustedError(Exception):
    """A rank has run out of memory in this step, and all ranks know it.

    Attributes:
        failure: what this rank's allocator said; None on other ranks.
    """

    def __init__(self, failure: str | None) -> None:
        super().__init__(failure)
        self.failure = failure


@dataclass(slots=True)
class StepProgress:
    """How far a step has come on this rank.

    Attributes:
        begun: whether the reduction of gradients has begun.
        loss_started: whether the all-reduce of the losses has begun.
        loss_handle: its handle.
    """

    begun: bool = False
    loss_started: bool = False
    loss_handle: CommHandle | None = None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocator, of a device or of the host, has found no memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _CPU_ALLOCATOR)


def failure_of(run: Run, error: BaseException, share: BatchShare) -> str:
    """Return what the allocator said, if all ranks can compute the step again.

    Raises:
        TrainingError: they cannot; the sentence says what to do.
    """
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    reason = _obstacle(run)
    if reason is not None:
        raise TrainingError(_sentence(run, share, run.parallel.world.rank, said, reason))
    if run.parallel.world.device.type != "cpu":
        torch.accelerator.empty_cache()
    return said


def raise_if_exhausted(run: Run, failure: str | None) -> None:
    """Raise StepExhaustedError on all ranks, if one of them has run out of memory in this step. Collective."""
    if run.parallel.world.device.type == "cpu":
        exhausted = run.settings.automatic_microbatches and is_abandoned(run.parallel.replica)
    else:
        exhausted = _any_host_failed(run, failed=failure is not None)
    if failure is not None or exhausted:
        raise StepExhaustedError(failure)


def _any_host_failed(run: Run, *, failed: bool) -> bool:
    """Return whether a rank has run out of memory, as the hosts tell each other while their accelerators compute.

    An allocator fails when the host asks for memory, so no host need wait for what its device has reduced.
    """
    if run.parallel.world.world_size == 1 or _obstacle(run) is not None:
        return failed
    flag = torch.tensor([failed], dtype=torch.uint8)
    with run.parallel.layout.channel("scalars").waiting(flag.numel()):
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=_host_group(dist.group.WORLD))
    return bool(flag)


@lru_cache(maxsize=1)
def _host_group(world: Any) -> Any:
    """A group of all ranks for the hosts' own messages. Collective when first called in a world."""
    return open_group(range(dist.get_world_size()), connect=False, backend="gloo")


def divide_again(run: Run, batch: Any, failure: str | None, before: HostState | None) -> Any:
    """Compute this and later steps in twice as many microbatches; return this rank's share of the batch. Collective.

    Args:
        run: the run.
        batch: what the script has passed to the step.
        failure: what this rank's allocator said, if it has run out of memory.
        before: states of the generators before the step, to begin with again; None: the loss seems to draw nothing.

    Raises:
        TrainingError: on all ranks, if a microbatch is one sample a rank already, the script has changed the batch, or
            random numbers cannot be drawn again.
    """
    parallel, loader = run.parallel, run.state.loader
    assert loader.share is not None
    draws = (run.loop.draws.digest, host_digest(host_state())) if before is None else (None, None)
    everyone = parallel.world.gather((failure, loader.can_divide_again(batch), draws))
    rank, said = next((number, words) for number, (words, _, _) in enumerate(everyone) if words is not None)
    share, plan = loader.share, parallel.plan
    if _drew_differently([draws for *_, draws in everyone]):
        reason = "the loss function has drawn from `random` or NumPy, and ranks cannot draw the same numbers again"
        raise TrainingError(_sentence(run, share, rank, said, reason))
    if before is not None:
        set_host_state(before)
    if not all(able for _, able, _ in everyone):
        reason = "the script has changed the batch, or the data is a stream, so that it cannot be divided again"
        raise TrainingError(_sentence(run, share, rank, said, reason))
    now, most = plan.batch.num_microbatches, _most(run, share)
    if now >= most:
        raise TrainingError(_sentence(run, share, rank, said, ""))
    number = min(2 * now, most)
    use_microbatches(run, number)
    parallel.replica.begin_again()
    for parameter in parallel.model.parameters():
        parameter.grad = None
    run.output.screen.say(
        f"rank {rank} ran out of memory at step {run.state.progress.step + 1} with num_microbatches = {now}; all ranks "
        f"continue with {number}, from the beginning of this step"
    )
    if parallel.world.is_main:
        rebalancer = run.loop.rebalancer  # a run that begins again has the shares that were stated
        shares = parallel.plan.shares if rebalancer is None else rebalancer.stated
        serialization.save(replace(parallel.plan, shares=shares), run.output.folder.plan)
    return loader.divide_again(parallel.plan)


def _drew_differently(digests: list[tuple[int | None, int | None]]) -> bool:
    """Return whether the states of the ranks' generators were equal and differ now; (then, now) of each rank."""
    then, now = (set(states) for states in zip(*digests, strict=True))
    return len(then) == 1 and len(now) > 1


def use_microbatches(run: Run, number: int) -> None:
    """Compute later steps in `number` microbatches; checkpoints remember it."""
    plan = run.parallel.plan
    run.parallel.plan = replace(plan, batch=replace(plan.batch, num_microbatches=number))
    run.state.raised_microbatches = number


def resume_microbatches(run: Run) -> None:
    """Begin with the number of microbatches that an earlier run was raised to, unless the user states one."""
    number = run.state.raised_microbatches
    if number is None:
        return
    run.state.raised_microbatches = None
    if run.settings.automatic_microbatches and _obstacle(run) is None:
        use_microbatches(run, number)
        run.state.loader.plan = run.parallel.plan
        run.output.screen.say(f"num_microbatches = {number}: the run that is resumed ran out of memory with fewer")


def _most(run: Run, share: BatchShare) -> int:
    return max(1, math.ceil(share.batch_size / run.parallel.mesh.data_degree))


def _obstacle(run: Run) -> str | None:
    """Why a step cannot be computed again by all ranks; None if it can. The same on all ranks."""
    parallel, replica = run.parallel, run.parallel.replica
    if not run.settings.automatic_microbatches:
        return "the number is stated by the script or the plan"
    divided = [axis for axis, n in parallel.mesh.degrees.items() if n > 1 and axis not in ("replicate", "shard")]
    if divided:
        return f"ranks wait for each other inside forward under mesh.{divided[0]}"
    if replica.shards.gathers_in_forward:
        return f"ranks wait for each other inside forward at sharding level {parallel.plan.sharding.level}"
    module = next((name for name, m in parallel.model.named_modules() if exchanges_state(m)), None)
    if module is not None:
        return f"module {module!r} has statistics of a microbatch, which another number would change"
    if run.state.consistency.diverged or run.state.consistency.asynchronous:
        return f'replicas step on their own under sync.mode = "{parallel.plan.sync.mode}"'
    if replica.compressor is not None or replica.factored.weights:
        return "gradients are compressed"
    if replica.changed or has_sparse(replica) or not isinstance(run.loop.observer, NullObserver):
        return "this step cannot be repeated"
    return None


def _sentence(run: Run, share: BatchShare, rank: int, said: str, reason: str) -> str:
    now, most = run.parallel.plan.batch.num_microbatches, _most(run, share)
    begin = (
        f"rank {rank} ran out of memory at step {run.state.progress.step + 1} with num_microbatches = {now} ({said})"
    )
    if now >= most:
        return (
            f"{begin}; a microbatch is one sample a rank already: divide the model over more ranks (--mesh shard=N, "
            "split=N), recompute activations, or use a smaller model"
        )
    return f"{begin}; {reason}: start again with Job(num_microbatches={min(2 * now, most)})"
