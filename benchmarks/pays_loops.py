"""The compared methods as loops over the same batches: tutti's, torch's, and the step without communication."""

import atexit
import contextlib
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from pays_methods import PERIOD, POST_LOCAL_START, POWERSGD_START, RANK, Method
from pays_work import Work, fresh, sequence


class Loop(Protocol):
    """One model in training. All ranks make the same calls."""

    def step(self) -> float:
        """Make one update on the next global batch; returns the loss that this rank sees."""

    def quality(self) -> tuple[float, float]:
        """Return held-out mean loss and accuracy of the model as training would end now; the same on all ranks."""

    def close(self) -> None:
        """Free everything."""


def loop_of(method: Method, work: Work, seed: int) -> Loop:
    """Return the loop of a method."""
    return TuttiLoop(method, work, seed) if method.side == "tutti" else TorchLoop(method, work, seed)


class TuttiLoop:
    """The three lines of tutti, started as `tutti run` would with the method's variables."""

    def __init__(self, method: Method, work: Work, seed: int) -> None:
        import tutti

        self._work = work
        self._folder = Path(tempfile.mkdtemp(prefix="tutti-pays-"))
        words = {**dict(method.words), "TUTTI_RUN_FOLDER": str(self._folder), "TUTTI_SUPERVISED": "1"}
        with environment(words):
            self.job = tutti.Job(global_batch_size=work.batch, seed=seed, precision="full", keep_checkpoints=0)
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
        values = self.job.evaluate(self._work.data()[1], {"accuracy": right}, batch_size=360)
        return values["loss"], values["accuracy"]

    def close(self) -> None:
        """End the run but not its process group, which other loops still use."""
        self._steps.close()  # type: ignore[attr-defined]
        run, ending = self.job._prepared, self.job._finalizer
        assert run is not None
        assert ending is not None
        run.output.log.close()
        run.output.screen.close()
        atexit.unregister(ending.close)
        ending.run = self.job._prepared = None
        gc.collect()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def environment(words: dict[str, str]) -> Iterator[None]:
    """Set variables inside the block only."""
    before = {name: os.environ.get(name) for name in words}
    os.environ.update(words)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


class TorchLoop:
    """The loop by hand: DDP with torch's own hooks, or a model without communication."""

    def __init__(self, method: Method, work: Work, seed: int) -> None:
        self._work, self._method = work, method
        self._model = fresh(work, seed)
        self._batches = share(work, seed)
        self._optimizer: Any = work.optimizer(self._model)
        self._replica = self._model if method.side == "floor" else self._distributed()

    def _distributed(self) -> nn.Module:
        name = self._method.name
        cap = 1024 if name == "ddp powersgd" else 25  # under Gloo the PowerSGD hook aborts with several buckets
        replica = DistributedDataParallel(self._model, gradient_as_bucket_view=True, bucket_cap_mb=cap)
        if name == "ddp fp16":
            replica.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif name == "ddp powersgd":
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=RANK, start_powerSGD_iter=POWERSGD_START
            )
            replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif name == "ddp post-local":
            uncontended = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
            post = post_localSGD_hook.PostLocalSGDState(None, uncontended, POST_LOCAL_START)
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
        """Evaluate the mean of the ranks' models if they differ."""
        parameters = [parameter.detach().clone() for parameter in self._model.parameters()]
        if self._method.name == "ddp post-local":
            for parameter in self._model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= dist.get_world_size()
        values = judged(self._work, self._model)
        with torch.no_grad():
            for parameter, value in zip(self._model.parameters(), parameters, strict=True):
                parameter.copy_(value)
        return values

    def close(self) -> None:
        self._replica = self._model
        gc.collect()


def share(work: Work, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's contiguous part of each global batch of a seed, again and again."""
    tensors = sequence(work, seed).tensors
    part = work.batch // dist.get_world_size()
    while True:
        for step in range(work.most):
            begin = step * work.batch + dist.get_rank() * part
            inputs, target = (tensor[begin : begin + part] for tensor in tensors)
            yield inputs, target


def right(output: Tensor, target: Tensor) -> Tensor:
    """Return the share of right answers of each sample."""
    return (output.argmax(dim=-1) == target).float().reshape(len(target), -1).mean(dim=1)


def judged(work: Work, model: nn.Module) -> tuple[float, float]:
    """Return held-out loss and accuracy; each rank evaluates its part of the samples."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    inputs, target = (tensor[rank::ranks] for tensor in work.data()[1].tensors)
    with torch.no_grad():
        output = model(inputs)
        sums = [float(work.loss(output, target)) * len(target), float(right(output, target).sum()), len(target)]
    total = torch.tensor(sums, dtype=torch.float64)
    dist.all_reduce(total)
    loss, hits, count = total.tolist()
    return loss / count, hits / count
