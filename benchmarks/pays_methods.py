"""The ways of exchanging that are compared, each as a loop over the same batches: tutti's, torch's, and none at all."""

import atexit
import contextlib
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from pays_work import Work, fresh, sequence

PERIOD = 16
"""Updates between two averages of the methods that average models."""

POST_LOCAL_START = 4
RANK = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """`exact`: its sums are those of one device, so it takes as many steps as the others that are. `period`: steps
    between two exchanges. `same_steps_as`: the method whose trainings stand for it, being the same algorithm. `words`:
    for tutti, what the launcher would set.
    """

    name: str
    side: Literal["tutti", "torch", "floor", "peer"]
    exact: bool = False
    period: int = 1
    words: tuple[tuple[str, str], ...] = ()
    same_steps_as: str = ""
    says: str = ""


def _compress(name: str, words: str) -> Method:
    return Method(name=name, side="tutti", words=(("TUTTI_COMPRESS", words),), says=f"--compress {words}")


METHODS = {
    method.name: method
    for method in (
        Method(name="floor", side="floor", exact=True, says="the same step, nothing sent"),
        Method(name="tutti plain", side="tutti", exact=True, says="tutti run"),
        _compress("tutti powersgd", f"powersgd,rank={RANK}"),
        _compress("tutti one-bit", "one-bit"),
        _compress("tutti top-k", "top-k,density=0.01"),
        Method(
            name="tutti local",
            side="tutti",
            period=PERIOD,
            words=(("TUTTI_SYNC", f"local:{PERIOD}"),),
            says=f"--sync local:{PERIOD}",
        ),
        Method(name="ddp", side="torch", exact=True, says="DistributedDataParallel"),
        Method(name="ddp fp16", side="torch", says="its fp16_compress_hook"),
        Method(name="ddp powersgd", side="torch", says=f"its powerSGD_hook, rank {RANK} from step 2, one bucket"),
        Method(
            name="ddp post-local",
            side="torch",
            period=PERIOD,
            says=f"PostLocalSGDOptimizer, every {PERIOD} steps from step {POST_LOCAL_START}",
        ),
        Method(name="horovod", side="peer", exact=True, says="DistributedOptimizer, Gloo"),
        Method(name="deepspeed", side="peer", exact=True, says="ZeRO-2"),
        Method(
            name="hivemind",
            side="peer",
            period=PERIOD,
            same_steps_as="tutti local",
            says=f"its averager in fp16, every {PERIOD} steps",
        ),
    )
}


AUTO = "tutti auto"
"""What the planner chose; a row of its own in every cell, whichever method that is."""


def method_of(name: str, plans: Mapping[str, Mapping[str, Any]]) -> Method:
    """A method by its name, or the one that a chosen plan of that name is."""
    if name in METHODS:
        return METHODS[name]
    plan = plans[name]
    return Method(
        name=name,
        side="tutti",
        exact=plan["exact"],
        period=plan["period"],
        words=(("TUTTI_PLAN", plan["file"]),),
        says="chosen by tutti plan",
    )


class Loop(Protocol):
    """One model in training. All ranks call alike."""

    def step(self) -> float:
        """One update on the next global batch; the loss this rank sees."""

    def quality(self) -> tuple[float, float]:
        """Held-out mean loss and accuracy of the model that would be left now; the same on all ranks."""

    def close(self) -> None:
        """Hold nothing any more."""


def loop_of(method: Method, work: Work, seed: int) -> Loop:
    """The loop that `method` names."""
    return TuttiLoop(method, work, seed) if method.side == "tutti" else TorchLoop(method, work, seed)


class TuttiLoop:
    """The three lines, as `tutti run` would start them with the method's words."""

    def __init__(self, method: Method, work: Work, seed: int) -> None:
        import tutti

        self._work = work
        self._folder = Path(tempfile.mkdtemp(prefix="tutti-pays-"))
        words = {**dict(method.words), "TUTTI_RUN_FOLDER": str(self._folder), "TUTTI_SUPERVISED": "1"}
        with environment(words):
            self.job = tutti.Job(global_batch_size=work.batch, seed=seed, keep_checkpoints=0)
            model = fresh(work, seed)
            data = sequence(work, seed)
            _, _, self._loader = self.job.prepare(model, work.optimizer(model), data, work.loss, shuffle=False)
        self._steps = self._forever()

    def _forever(self) -> Iterator[float]:
        for _ in self.job.epochs(1_000_000):
            for batch in self._loader:
                yield self.job.step(batch)

    def step(self) -> float:
        return next(self._steps)

    def quality(self) -> tuple[float, float]:
        found = self.job.evaluate(self._work.data()[1], {"accuracy": right}, batch_size=360)
        return found["loss"], found["accuracy"]

    def close(self) -> None:
        """Leave the run but not its world, in which others go on."""
        self._steps.close()  # type: ignore[attr-defined]
        run, ending = self.job._prepared, self.job._ending
        assert run is not None
        assert ending is not None
        run.log.close()
        run.screen.close()
        atexit.unregister(ending.close)
        ending.run = self.job._prepared = None
        gc.collect()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def environment(words: dict[str, str]) -> Iterator[None]:
    """Variables that are there inside the block only."""
    before = {name: os.environ.get(name) for name in words}
    os.environ.update(words)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


class TorchLoop:
    """By hand: DDP with torch's own hooks, or a model that nobody shares."""

    def __init__(self, method: Method, work: Work, seed: int) -> None:
        self._work, self._method = work, method
        self._model = fresh(work, seed)
        self._batches = share(work, seed)
        self._optimizer: Any = work.optimizer(self._model)
        self._replica = self._model if method.side == "floor" else self._distributed()

    def _distributed(self) -> nn.Module:
        name = self._method.name
        cap = 1024 if name == "ddp powersgd" else 25  # with several buckets the hook aborts under Gloo
        replica = DistributedDataParallel(self._model, gradient_as_bucket_view=True, bucket_cap_mb=cap)
        if name == "ddp fp16":
            replica.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif name == "ddp powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
            replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif name == "ddp post-local":
            alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
            post = post_localSGD_hook.PostLocalSGDState(None, alone, POST_LOCAL_START)
            replica.register_comm_hook(post, post_localSGD_hook.post_localSGD_hook)
            averager = PeriodicModelAverager(period=PERIOD, warmup_steps=POST_LOCAL_START)
            self._optimizer = PostLocalSGDOptimizer(self._optimizer, averager)
        return replica

    def step(self) -> float:
        inputs, target = next(self._batches)
        self._optimizer.zero_grad()
        loss = self._work.loss(self._replica(inputs), target)
        loss.backward()
        self._optimizer.step()
        return loss.item()

    def quality(self) -> tuple[float, float]:
        """Of the mean of the ranks' models where they differ."""
        own = [parameter.detach().clone() for parameter in self._model.parameters()]
        if self._method.name == "ddp post-local":
            for parameter in self._model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= dist.get_world_size()
        found = judged(self._work, self._model)
        with torch.no_grad():
            for parameter, value in zip(self._model.parameters(), own, strict=True):
                parameter.copy_(value)
        return found

    def close(self) -> None:
        self._replica = self._model
        gc.collect()


def share(work: Work, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's contiguous part of each global batch of a seed, round and round."""
    tensors = sequence(work, seed).tensors
    part = work.batch // dist.get_world_size()
    while True:
        for step in range(work.most):
            begin = step * work.batch + dist.get_rank() * part
            inputs, target = (tensor[begin : begin + part] for tensor in tensors)
            yield inputs, target


def right(output: Tensor, target: Tensor) -> Tensor:
    """Share of right answers of each sample."""
    return (output.argmax(dim=-1) == target).float().reshape(len(target), -1).mean(dim=1)


def judged(work: Work, model: nn.Module) -> tuple[float, float]:
    """Held-out loss and accuracy, each rank computing its part of the samples."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    inputs, target = (tensor[rank::ranks] for tensor in work.data()[1].tensors)
    with torch.no_grad():
        output = model(inputs)
        sums = [float(work.loss(output, target)) * len(target), float(right(output, target).sum()), len(target)]
    total = torch.tensor(sums, dtype=torch.float64)
    dist.all_reduce(total)
    loss, hits, count = total.tolist()
    return loss / count, hits / count
