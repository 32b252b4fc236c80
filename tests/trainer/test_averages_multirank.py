"""Averages of the weights (EMA, SWA) under every plan: those of a plain loop with torch.optim.swa_utils."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset

import tutti
from harness import run_ranks
from tutti.config import serialization
from tutti.config.consistency_modes import Relaxed
from tutti.config.plan import BatchPlan, LayoutRule, Plan, ShardingPlan, SyncPlan

SPLIT = (LayoutRule(modules="body.3", placement="column"),)
PLANS = {
    "replicas": ({"replicate": 2}, {}),
    "zero1": ({"shard": 2}, {"sharding": ShardingPlan(level=1)}),
    "zero2": ({"shard": 3}, {"sharding": ShardingPlan(level=2)}),
    "zero3": ({"shard": 2}, {"sharding": ShardingPlan(level=3)}),
    "split": ({"split": 2}, {"layout": SPLIT}),
    "stage": ({"stage": 2}, {}),
}
QUICK = ("zero3", "stage")
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in PLANS]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh())
        self.head = nn.Linear(7, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def net() -> Net:
    torch.manual_seed(3)
    return Net().double()


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(4)
    return TensorDataset(torch.randn(22, 5, generator=generator, dtype=torch.float64), torch.arange(22) % 5)


def schedule(optimizer: torch.optim.Optimizer) -> SWALR:
    return SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)


def loss_of(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(data().tensors[0]), data().tensors[1]))


def plain(epochs: int = 3) -> dict[str, Any]:
    """The loop on one device. Batches of 8, the last of 6."""
    model = net()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    both = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7), use_buffers=True)
    swa = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = schedule(optimizer)
    loader = DataLoader(data(), batch_size=8)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            ema.update_parameters(model)
            both.update_parameters(model)
        swa.update_parameters(model)
        scheduler.step()
    result: dict[str, Any] = {"model": model.state_dict(), "ema": ema.module.state_dict()}
    result |= {"both": both.module.state_dict(), "ema loss": loss_of(ema)}
    update_bn(loader, swa)
    return result | {"swa": swa.module.state_dict(), "swa loss": loss_of(swa)}


def job_of(name: str, folder: str, **options: Any) -> tuple[Any, ...]:
    mesh, fields = PLANS[name]
    file = Path(folder) / f"plan-{name}-{os.environ['RANK']}.json"
    serialization.save(Plan(batch=BatchPlan(global_batch_size=8), mesh=mesh, **fields), file)
    os.environ["TUTTI_PLAN"] = str(file)
    job = tutti.Job(global_batch_size=8, **options)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    arguments: dict[str, Any] = {"scheduler": schedule(optimizer), "scheduler_clock": "epoch", "shuffle": False}
    return job, *job.prepare(model, optimizer, data(), nn.functional.cross_entropy, **arguments)


def averages_of(job: Any) -> tuple[Any, Any, Any]:
    ema = tutti.AveragedWeights(job, decay=0.8, name="ema")
    both = tutti.AveragedWeights(job, lambda updates: 0.7, use_buffers=True, name="both")
    return ema, both, tutti.AveragedWeights(job, name="swa")


def train(job: Any, loader: Any, averages: tuple[Any, Any, Any], epochs: int) -> None:
    for _ in job.epochs(epochs):
        for batch in loader:
            job.step(batch)
            averages[0].update()
            averages[1].update()
        averages[2].update()


def results_of(job: Any, averages: tuple[Any, Any, Any]) -> dict[str, Any]:
    ema, both, swa = averages
    result: dict[str, Any] = {}
    with ema.applied():
        result |= {"ema": job.state_dict(), "ema loss": job.evaluate(data())["loss"]}
    with both.applied():
        result["both"] = job.state_dict()
    swa.update_bn()
    with swa.applied():
        result |= {"swa": job.state_dict(), "swa loss": job.evaluate(data())["loss"]}
    return result | {"model": job.state_dict()}


REFUSED = ("job.step", "job.save", "AveragedWeights.update", "AveragedWeights.applied")


def averaged(name: str, folder: str) -> dict[str, Any]:
    job, _, _, loader = job_of(name, folder)
    averages = averages_of(job)
    train(job, loader, averages, 2)
    averages[2].update_bn()  # in the middle of a run; leaves the model and the data's place as they were
    job.save()
    train(job, loader, averages, 3)
    result = results_of(job, averages)
    said = []
    for call in (lambda: job.step(None), job.save, averages[0].update, averages[1].applied().__enter__):
        try:
            with averages[0].applied():
                call()
        except tutti.TuttiError as error:
            said.append(str(error))
    try:
        tutti.AveragedWeights(job, name="swa")
    except tutti.TuttiError as error:
        said.append(str(error))
    with averages[0].applied(), job.whole_model() as whole:
        whole.head.weight.data.zero_()
    with averages[0].applied():
        result["edited"] = job.state_dict()["head.weight"]
    return result | {"said": said, "after": job.state_dict(), "epoch": job._run().state.loader.epoch}


def resumed(name: str, folder: str, checkpoint: str) -> dict[str, Any]:
    job, _, _, loader = job_of(name, folder, resume=checkpoint)
    averages = averages_of(job)
    assert [average.updates for average in averages] == [6, 6, 2]
    train(job, loader, averages, 3)
    return results_of(job, averages)


def close(result: dict[str, Any], expected: dict[str, Any]) -> None:
    for part in ("model", "ema", "both", "swa"):
        assert list(result[part]) == list(expected[part])
        for name, value in expected[part].items():
            if part == "both" and not value.is_floating_point():
                continue  # torch rounds the average of a count down
            torch.testing.assert_close(result[part][name], value, rtol=1e-12, atol=1e-12, msg=f"{part} {name}")
    for part in ("ema loss", "swa loss"):
        assert result[part] == pytest.approx(expected[part], rel=1e-12)


def world_size(name: str) -> int:
    return next(iter(PLANS[name][0].values()))


@pytest.mark.parametrize("name", NAMES)
def test_averages_are_those_of_a_plain_loop(name: str, tmp_path: Path) -> None:
    expected = plain()
    for result in run_ranks(averaged, world_size(name), name, str(tmp_path)):
        close(result, expected)
        for said, call in zip(result["said"], REFUSED, strict=False):
            assert said == f"{call} was called inside `with average.applied():`; leave it first"
        assert "'swa' already" in result["said"][-1]
        assert not result["edited"].any()
        assert result["epoch"] == 3
        for key, value in result["after"].items():
            torch.testing.assert_close(value, result["model"][key], rtol=0, atol=0)


def saved_after_two(name: str, folder: str) -> None:
    os.environ["TUTTI_RUN_FOLDER"] = f"{folder}/first"
    job, _, _, loader = job_of(name, folder)
    averages = averages_of(job)
    train(job, loader, averages, 2)
    averages[2].update_bn()
    job.save()


class Steps(tutti.Callback):
    """Counts steps after each, and says so in checkpoints."""

    count = 0

    def on_step_end(self, job: Any, step: int, loss: float) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def saved_on_the_way(name: str, folder: str) -> dict[str, Any]:
    """A run that saves after every second step, and two that go on: within an epoch and after its last step."""
    os.environ["TUTTI_RUN_FOLDER"] = f"{folder}/on-the-way"
    job, _, _, loader = job_of(name, folder, checkpoint_every=2, keep_checkpoints=9)
    train(job, loader, averages_of(job), 3)
    job.save()  # the last of those on the way is written, too
    results = {}
    for step in (4, 6):
        (checkpoint,) = (Path(folder) / "on-the-way" / "checkpoints").glob(f"*{step}")
        os.environ["TUTTI_RUN_FOLDER"] = f"{folder}/after-{step}"
        steps = Steps()
        job, _, _, loader = job_of(name, folder, resume=str(checkpoint), callbacks=[steps])
        averages = averages_of(job)
        assert [average.updates for average in averages] == [step, step, 1]
        train(job, loader, averages, 3)
        results[step] = results_of(job, averages)
    return results


@pytest.mark.parametrize("name", ["zero3", pytest.param("stage", marks=pytest.mark.long)])
def test_a_checkpoint_on_the_way_has_the_averages_of_its_step(name: str, tmp_path: Path) -> None:
    expected = plain()
    for results in run_ranks(saved_on_the_way, world_size(name), name, str(tmp_path)):
        for result in results.values():
            close(result, expected)


def counted(folder: str) -> list[int]:
    """Steps that a callback has counted, in a whole run and in one that is resumed on the way."""
    counts = []
    for name, resume in (("whole", None), ("rest", f"{folder}/whole/checkpoints")):
        os.environ["TUTTI_RUN_FOLDER"] = f"{folder}/{name}"
        checkpoint = None if resume is None else str(next(Path(resume).glob("*4")))
        steps = Steps()
        job, _, _, loader = job_of(
            "replicas", folder, callbacks=[steps], checkpoint_every=2, keep_checkpoints=9, resume=checkpoint
        )
        for _ in job.epochs(3):
            for batch in loader:
                job.step(batch)
        counts.append(steps.count)
    return counts


def test_a_checkpoint_on_the_way_has_what_callbacks_counted(tmp_path: Path) -> None:
    assert run_ranks(counted, 2, str(tmp_path)) == [[9, 9]] * 2


CHANGES = [("zero3", "stage"), pytest.param("split", "zero2", marks=pytest.mark.long)]


@pytest.mark.parametrize(("first", "then"), CHANGES)
def test_an_average_continues_under_another_plan(first: str, then: str, tmp_path: Path) -> None:
    run_ranks(saved_after_two, world_size(first), first, str(tmp_path))
    for result in run_ranks(resumed, world_size(then), then, str(tmp_path), str(tmp_path / "first")):
        close(result, plain())


def copies(name: str, folder: str) -> dict[str, Any]:
    """torch's own AveragedModel with update_bn on the Job's loader."""
    job, model, _, loader = job_of(name, folder)
    with job.whole_model() as whole:
        swa = AveragedModel(whole)
    for _ in job.epochs(3):
        for batch in loader:
            job.step(batch)
        with job.whole_model() as whole:
            swa.update_parameters(whole)
    update_bn(loader, swa)
    result = {"swa": swa.module.state_dict(), "epoch": job._run().state.loader.epoch}
    if name == "replicas":
        update_bn(loader, model)
        result["own"] = job.state_dict()
    return result


@pytest.mark.parametrize("name", ["replicas", pytest.param("zero3", marks=pytest.mark.long)])
def test_update_bn_of_a_copy_sees_whole_batches(name: str, tmp_path: Path) -> None:
    expected = plain()
    model = net()
    model.load_state_dict(expected["model"])
    update_bn(DataLoader(data(), batch_size=8), model)
    for result in run_ranks(copies, world_size(name), name, str(tmp_path)):
        assert result["epoch"] == 3
        for key, value in expected["swa"].items():
            torch.testing.assert_close(result["swa"][key], value, rtol=1e-12, atol=1e-12, msg=key)
        for key, value in result.get("own", {}).items():
            torch.testing.assert_close(value, model.state_dict()[key], rtol=1e-12, atol=1e-12, msg=key)


def local(folder: str) -> str:
    file = Path(folder) / f"plan-{os.environ['RANK']}.json"
    plan = Plan(
        batch=BatchPlan(global_batch_size=8),
        mesh={"replicate": 2},
        sync=SyncPlan(mode="local", relaxed=Relaxed(period=2)),
    )
    serialization.save(plan, file)
    os.environ["TUTTI_PLAN"] = str(file)
    job = tutti.Job(global_batch_size=8)
    model = net()
    job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data(), nn.functional.cross_entropy)
    with pytest.raises(tutti.TuttiError) as caught:
        tutti.AveragedWeights(job)
    return str(caught.value)


def test_replicas_that_differ_are_refused(tmp_path: Path) -> None:
    for said in run_ranks(local, 2, str(tmp_path)):
        assert said.startswith('AveragedWeights with sync.mode = "local": replicas differ')


def test_a_decay_is_a_share() -> None:
    for decay in (2.0, "0.9", [0.9], True):
        with pytest.raises(tutti.TuttiError, match=r"decay=.*from 0 to 1"):
            tutti.AveragedWeights(None, decay=decay)  # type: ignore[arg-type]
