"""Losses that are means over tokens, weighted classes or rows, or sums, against a plain loop of PyTorch."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import tutti
from harness import run_ranks
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan

SAMPLES, BATCH, LENGTH, CLASSES = 28, 7, 6, 5
IGNORED = -100


class Tagger(nn.Module):
    """One class a token, from two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.hidden = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.head, self.other = nn.Linear(8, CLASSES), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.hidden(self.tokens(x)))
        return self.head(y), self.other(y)


class WithLoss(Tagger):
    """Computes the mean over its targets itself, as the models of transformers do."""

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits, _ = super().forward(x)
        return {"loss": cross_entropy(logits.flatten(0, 1), target.flatten()), "logits": logits}


def tokens(output: Any, target: Tensor) -> Tensor:
    return nn.CrossEntropyLoss()(output[0].transpose(1, 2), target)


def classes(output: Any, target: Tensor) -> Tensor:
    weight = torch.arange(1.0, CLASSES + 1, dtype=output[0].dtype)
    return cross_entropy(output[0].flatten(0, 1), target.flatten(), weight=weight, label_smoothing=0.1)


def two_heads(output: Any, target: Tensor) -> Tensor:
    """The auxiliary head of image models: a sum of two means over the same targets."""
    main, other = (F.cross_entropy(logits.transpose(1, 2), target) for logits in output)
    return (main + 0.4 * other) / 2


def rows(output: Any, target: Tensor) -> Tensor:
    counted = target != IGNORED
    return F.mse_loss(output[0][counted], F.one_hot(target[counted], CLASSES).to(output[0].dtype))


def summed(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output[0].flatten(0, 1), target.flatten(), reduction="sum")


def by_sample(output: Any, target: Tensor) -> Tensor:
    """A mean over samples after all: the factor depends on the batch."""
    return F.cross_entropy(output[0].transpose(1, 2), target) * (target != IGNORED).sum() / len(target)


class Flat(Tagger):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0].transpose(1, 2)


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    function.__name__: function for function in (tokens, classes, two_heads, rows, summed, by_sample)
}
LOSSES["flat"] = F.cross_entropy


def data(name: str) -> tuple[Tensor, Tensor]:
    """Sequences with very different numbers of targets.

    The first four of every batch have none, so that some ranks' means are over nothing, where the loss allows that.
    """
    draw = torch.Generator().manual_seed(0)
    text = torch.randint(11, (SAMPLES, LENGTH), generator=draw)
    target = torch.randint(CLASSES, (SAMPLES, LENGTH), generator=draw)
    lengths = torch.arange(SAMPLES)[:, None] % BATCH + (1 if name in ("classes", "by_sample") else -3)
    return text, torch.where(torch.arange(LENGTH) < lengths, target, IGNORED)


def model_of(name: str) -> nn.Module:
    torch.manual_seed(1)
    kinds: dict[str, type[nn.Module]] = {"own": WithLoss, "flat": Flat}
    return kinds.get(name, Tagger)().double()


def plain(name: str) -> tuple[list[float], dict[str, Tensor], float]:
    """Losses and weights of a loop that has nothing of tutti, and the loss of all samples at its end."""
    model, (text, target) = model_of(name), data(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for start in range(0, SAMPLES, BATCH):
        x, y = text[start : start + BATCH], target[start : start + BATCH]
        loss = plain_loss(name, model, x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, model.state_dict(), float(plain_loss(name, model.eval(), text, target))


def plain_loss(name: str, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x, y)["loss"] if name == "own" else LOSSES[name](model(x), y)


def trained(names: tuple[str, ...], mesh: dict[str, int], microbatches: int) -> dict[str, Any]:
    """Of each loss: losses, weights where they are whole, and the loss of all samples in evaluation."""
    plan = Plan(mesh=mesh, batch=BatchPlan(global_batch_size=BATCH, num_microbatches=microbatches))
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path.cwd() / f"plan-{os.getpid()}.json"))
    results = {}
    for number, name in enumerate(names):
        os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{number}")
        job, model = tutti.Job(global_batch_size=BATCH), model_of(name)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        dataset, unpack = TensorDataset(*data(name)), lambda batch: (tuple(batch), {}, batch)
        options: dict[str, Any] = {"unpack": unpack} if name == "own" else {"loss_fn": LOSSES[name]}
        model, optimizer, loader = job.prepare(model, optimizer, dataset, shuffle=False, **options)
        losses = [job.step(batch) for _ in job.epochs(1) for batch in loader]
        state = {key: value.clone() for key, value in model.state_dict().items()} if "replicate" in mesh else {}
        results[name] = (losses, state, job.evaluate(dataset, batch_size=5)["loss"])
    return results


ALL = ("own", *LOSSES)
CASES: list[tuple[dict[str, int], int, tuple[str, ...]]] = [
    ({"replicate": 1}, 1, ALL),
    ({"replicate": 2}, 1, ALL),
    ({"replicate": 3}, 1, ALL),
    ({"replicate": 2}, 2, ALL),
    ({"split": 2}, 2, ALL),
    ({"stage": 2}, 2, ALL),
]


@pytest.mark.parametrize(("mesh", "microbatches", "names"), CASES)
def test_a_mean_is_over_what_one_device_counts(mesh: dict[str, int], microbatches: int, names: tuple[str, ...]) -> None:
    ranks = next(iter(mesh.values()))
    results = run_ranks(trained, ranks, names, mesh, microbatches)
    for name in names:
        losses, weights, evaluated = plain(name)
        for result in results:
            found, state, loss = result[name]
            if name != "summed":  # which depends on how many samples are evaluated at once
                assert loss == pytest.approx(evaluated, rel=1e-12), name
            assert found == pytest.approx(losses, rel=1e-12), name
            for key, value in state.items():
                torch.testing.assert_close(value, weights[key], rtol=1e-11, atol=1e-13, msg=f"{name}: {key}")
