"""What ranks do in the tests of modes in which none waits for another: they stall, leave early, end badly."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import tutti
from trainer import training
from tutti.async_sgd import asynchronous_replicas
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan
from tutti.config.sync_notation import parse_sync
from tutti.errors import TuttiError
from tutti.trainer.metrics import read_rows
from tutti.trainer.run_state import Run

PATIENCE_S = 60.0


def until(condition: Callable[..., bool]) -> None:
    """Sleep until it holds."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def prepared(sync: str, size: int, **optimizer: Any) -> tuple[tutti.Job, nn.Module, Run, Any]:
    torch.set_default_dtype(torch.float64)
    plan = Plan(batch=BatchPlan(global_batch_size=12), mesh={"replicate": size}, sync=parse_sync(sync))
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path.cwd() / f"plan-{os.getpid()}.json"))
    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{len(list(Path.cwd().glob('run-*')))}")
    job = tutti.Job(global_batch_size=12)
    model, _, loader = job.prepare(
        model := training.Mlp(),
        torch.optim.SGD(model.parameters(), **{"lr": 0.05, **optimizer}),
        training.vectors(),
        nn.functional.cross_entropy,
    )
    return job, model, job._run(), loader


def steps(job: tutti.Job, loader: Any) -> Iterator[Any]:
    """Batches of any number of epochs."""
    for _ in job.epochs(1000):
        yield from loader


def values(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def met(run: Run) -> None:
    """All ranks come together, and this one leaves."""
    run.state.consistency.finish(run.parallel)
    run.state.consistency.on_exit(run.parallel)


def stalled_server(sync: str, count: int) -> dict[str, Any]:
    """Rank 1 sleeps before its first step until the others are held back, or have made all of their steps."""
    job, model, run, loader = prepared(sync, int(os.environ["WORLD_SIZE"]))
    served, seen = run.state.consistency.served, dict[str, Any](stale=[], rank=job.rank)
    bounded = served.bound is not None
    others = [worker for worker in range(job.world_size) if worker != 1]
    for number, batch in enumerate(steps(job, loader)):
        if number == count:
            break
        if job.rank == 1 and number == 0:
            until(lambda: all(served.held_back[one] if bounded else served.clocks[one] == count for one in others))
            time.sleep(0.2)
            seen["made"] = list(served.clocks)
        job.step(batch)
        seen["stale"].append(run.state.consistency.own_staleness)
    met(run)
    return {**seen, "held": list(served.held_back), "values": values(model)}


def averaged_pairs(count: int) -> dict[str, Any]:
    """AD-PSGD with the sum of what the optimizer changed on this rank. Rank 1 sleeps until it was averaged thrice; whom
    the active ask depends on seeds alone.
    """
    job, model, run, loader = prepared("ad-psgd", int(os.environ["WORLD_SIZE"]), momentum=0.9)
    start, changed = values(model), torch.zeros_like(values(model))
    before = start

    def took(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal before
        before = values(model)

    def made(optimizer: Any, args: Any, kwargs: Any) -> None:
        changed.add_(values(model) - before)

    run.parallel.optimizers[0].register_step_pre_hook(took)
    run.parallel.optimizers[0].register_step_post_hook(made)
    for number, batch in enumerate(steps(job, loader)):
        if number == count:
            break
        if job.rank == 1 and number == 2:
            until(lambda: run.state.consistency.exchanges >= 3)
        elif run.state.consistency.active:  # one exchange after every update
            until(lambda least=number: run.state.consistency.exchanges >= least)
        job.step(batch)
    met(run)
    rows = str(read_rows(run.output.folder.metrics)).count("'max'") if job.is_main else 0
    found = {"start": start, "changed": changed, "end": values(model), "measured": rows}
    return {**found, "exchanges": run.state.consistency.exchanges}


def one_memory(count: int) -> dict[str, Any]:
    """Hogwild: rank 1 sleeps before its second step until rank 0 has made all of its steps."""
    job, model, run, loader = prepared("hogwild", 2, momentum=0.9)
    seen, looked = dict[str, Any](), Path("looked")
    for number, batch in enumerate(steps(job, loader)):
        if number == count:
            break
        if job.rank == 1 and number == 1:
            before = values(model).clone()
            looked.touch()
            until(lambda: int(run.state.consistency.counted[0]) == count)
            seen["moved"] = not torch.equal(before, values(model))
        elif number == 1:
            until(looked.exists)
        job.step(batch)
        if job.rank == 1 and number == 1:
            seen["stale"] = run.state.consistency.staleness
    state = run.parallel.optimizers[0].state
    met(run)
    momenta = [state[p]["momentum_buffer"] for p in model.parameters() if state.get(p)]
    seen["momentum"] = torch.cat([one.reshape(-1) for one in momenta])
    return {**seen, "values": values(model).clone()}


def uneven(modes: list[str]) -> list[float]:
    """In each mode: rank r makes 3 + 4 r steps, all evaluate, and make 2 more."""
    return [_uneven(sync) for sync in modes]


def _uneven(sync: str) -> float:
    job, _, run, loader = prepared(sync, int(os.environ["WORLD_SIZE"]))
    batches = steps(job, loader)
    for _ in range(3 + 4 * job.rank):
        job.step(next(batches))
    found = job.evaluate(training.vectors())["loss"]
    for _ in range(2):
        job.step(next(batches))
    met(run)
    return found


def leaving(sync: str) -> int:
    """Rank r makes 2 + 5 r steps, and its script ends."""
    job, _, run, loader = prepared(sync, int(os.environ["WORLD_SIZE"]))
    batches = steps(job, loader)
    for _ in range(2 + 5 * job.rank):
        job.step(next(batches))
    return run.state.progress.step


def ending_badly(sync: str, dies: int) -> str:
    """What a rank says when another has been killed. The killed one is a child of the rank, which stays."""
    rank = int(os.environ["RANK"])
    if rank == dies:
        child = os.fork()
        if child:
            return f"ended {os.waitpid(child, 0)[1]}"
    job, _, _, loader = prepared(sync, int(os.environ["WORLD_SIZE"]))
    try:
        for number, batch in enumerate(steps(job, loader)):
            if number == 3 and rank == dies:
                os.kill(os.getpid(), signal.SIGKILL)
            if number == 2000:
                return "trained"
            job.step(batch)
            if number > 2:
                time.sleep(0.02)
    except TuttiError as error:
        job._finalizer.failed = True  # type: ignore[union-attr]
        return f"{type(error).__name__}, {type(error.__cause__).__name__}: {error}"
    return "never"


def ending_unheard(sync: str, dies: int) -> str:
    """The same where Gloo tells nobody who waits for what goes to the killed rank, as it sometimes does."""
    start = asynchronous_replicas.Transport.start_send

    def unheard(one: asynchronous_replicas.Transport, *message: Any) -> Callable[[], None]:
        arrived = start(one, *message)

        def wait() -> None:
            try:
                arrived()
            except asynchronous_replicas.Unreachable:
                time.sleep(60)

        return wait

    with mock.patch.object(asynchronous_replicas.Transport, "start_send", unheard):
        return ending_badly(sync, dies)


def on_two_hosts() -> str:
    from tutti.async_sgd import hogwild

    hogwild.host_identity = lambda: os.environ["RANK"]  # type: ignore[assignment]
    try:
        prepared("hogwild", 2)
    except TuttiError as error:
        return f"{type(error).__name__}: {error}"
    return "trained"
