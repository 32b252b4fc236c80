"""Metrics that are objects with update and compute give on any number of ranks what they give on one device."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from harness import run_ranks
from trainer.training import Mlp
from tutti.errors import ScriptError
from tutti.trainer.metric_objects import as_functions


class MacroF1:
    """The mean over classes of F1, which is no mean over samples or batches."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.counts = torch.zeros(3, 3, dtype=torch.float64)  # true positives, predicted, actual by class

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        predicted = nn.functional.one_hot(output.argmax(1), 3)
        actual = nn.functional.one_hot(target, 3)
        self.counts += torch.stack([(predicted * actual).sum(0), predicted.sum(0), actual.sum(0)]).double()

    def compute(self) -> torch.Tensor:
        hits, predicted, actual = self.counts
        return (2 * hits / (predicted + actual).clamp(min=1)).mean()


class AddsUp(nn.Module):
    """Counts samples, and adds up the counts of all ranks as torchmetrics does."""

    def __init__(self) -> None:
        super().__init__()
        self.sync_on_compute = self._to_sync = True
        self.count = torch.zeros(1)

    def reset(self) -> None:
        self.count = torch.zeros(1)

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        self.count += len(target)

    def compute(self) -> torch.Tensor:
        if self._to_sync and dist.is_initialized():
            dist.all_reduce(self.count)
        return self.count


class LastSample:
    """Depends on the order of samples."""

    def reset(self) -> None:
        self.last = 0.0

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        self.last = float(output[-1].square().sum())

    def compute(self) -> float:
        return self.last


def samples(total: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(total, 6, generator=generator), torch.arange(total) % 3)


def torchmetrics() -> dict[str, Any]:
    if importlib.util.find_spec("torchmetrics") is None:
        return {}
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score

    collection = MetricCollection([MulticlassF1Score(3), MulticlassAUROC(3)])
    return {"tm": MulticlassF1Score(3, average="macro"), "all": collection}


def evaluate(root: Path) -> Any:
    os.environ["TUTTI_RUN_FOLDER"] = str(root)
    torch.set_default_dtype(torch.float64)
    job = tutti.Job(global_batch_size=8)
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(*(t.double() if t.is_floating_point() else t for t in samples(24).tensors))
    model, _, _ = job.prepare(model, optimizer, data, nn.functional.cross_entropy)
    found = []
    metric, counter, library = MacroF1(), AddsUp(), torchmetrics()
    for total in (37, 2):  # the second has fewer samples than there are ranks, and counts the first no more
        test = TensorDataset(samples(total).tensors[0].double(), samples(total).tensors[1])
        objects = {"f1": metric, "count": counter, **(library if total > 2 else {})}
        values = job.evaluate(test, objects, whole={"last": LastSample()}, batch_size=5)
        with torch.no_grad():
            output, target = model(test.tensors[0]), test.tensors[1]
        plain = {"loss": float(nn.functional.cross_entropy(output, target)), "count": float(total)}
        for name, one in (("f1", MacroF1()), ("last", LastSample())):
            one.reset()
            one.update(output, target)
            plain[name] = float(one.compute())
        if library and total > 2:
            plain["tm"] = plain["all_MulticlassF1Score"] = plain["f1"]
            plain["all_MulticlassAUROC"] = float(library["all"]["MulticlassAUROC"].compute())
        found.append((values, plain))
    assert counter.sync_on_compute
    assert counter._to_sync
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_metric_objects_are_exact_on_ranks(tmp_path: Path, world_size: int) -> None:
    for rank in run_ranks(evaluate, world_size, tmp_path):
        for values, plain in rank:
            assert values.keys() == plain.keys()
            for name, value in plain.items():
                assert values[name] == pytest.approx(value, rel=1e-6 if "_" in name or name == "tm" else 1e-12), name


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (3, "metric 'm' is of type int; pass a function"),
        (MacroF1, "metric 'm' is the class MacroF1; pass an object of it"),
        (type("NoReset", (), {"update": print, "compute": print})(), "NoReset.* has update and compute, but no reset"),
    ],
)
def test_what_is_no_metric_is_refused(metric: Any, message: str) -> None:
    with pytest.raises(ScriptError, match=message):
        as_functions({"m": metric}, {})


def test_names_are_unique_and_results_are_numbers() -> None:
    with pytest.raises(ScriptError, match="two metrics are called 'f1'"):
        as_functions({"f1": MacroF1()}, {"f1": MacroF1()})

    class PerClass(MacroF1):
        def compute(self) -> torch.Tensor:
            return self.counts[0]

    _, whole = as_functions({"f1": PerClass()}, {})
    with pytest.raises(ScriptError, match=r"metric 'f1': compute\(\) returned shape \(3,\); it must return one number"):
        whole["f1"](torch.eye(3), torch.arange(3))
