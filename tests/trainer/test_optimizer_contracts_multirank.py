"""What schedulers, optimizers and checkpoints owe each other: kept on any number of ranks, or refused by name."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adafactor, Adam, Muon, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import TensorDataset

import tutti
from harness import run_ranks
from tutti.checkpoint import to_state_dict
from tutti.config import serialization
from tutti.config.compression import parse_compression
from tutti.config.plan import BatchPlan, Plan, ShardingPlan, SyncPlan
from tutti.errors import TuttiError
from tutti.optim.optimizer_traits import is_by_tensor, is_elementwise
from tutti.optim.schedules import make_schedules

BATCH = 7


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def data(count: int = 23) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(count, 6, generator=generator, dtype=torch.float64), torch.arange(count) % 3)


loss_fn = nn.functional.cross_entropy


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return loss_fn(model(batch[0]), batch[1])


def open_job(fields: dict[str, Any] | None = None, **options: Any) -> tutti.Job:
    if fields is not None:
        plan = Plan(batch=BatchPlan(global_batch_size=BATCH), **fields)
        os.environ["TUTTI_PLAN"] = str(serialization.save(plan, Path.cwd() / f"plan-{os.getpid()}.json"))
    return tutti.Job(global_batch_size=BATCH, **options)


class Sharp(SGD):
    """Needs a closure without saying so in its signature, as implementations of SAM do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "a closure is needed"


class GlobalNorm(SGD):
    """Divides by the norm of all gradients that it sees."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm)
        super().step(closure)


class ByGroup(Optimizer):
    """A constructor that its groups do not repeat, and another rule for some groups."""

    def __init__(self, groups: list[dict[str, Any]], needed: int) -> None:
        self.needed = needed
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad / (p.grad.norm() if group["whole"] else 1.0))


class Wants:
    """A scheduler whose step takes something of its own."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, temperature: float) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def refused(optimizer: Any = None, scheduler: Any = None, model: Any = None, fields: Any = None) -> None:
    job, model = open_job(fields), net() if model is None else model()
    made = SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer(model)
    job.prepare(model, made, data(), loss_fn, scheduler=scheduler and scheduler(made))


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 2]


def temperature(model: nn.Module) -> Optimizer:
    return SGD([*model.parameters(), nn.Parameter(torch.ones(()))], lr=0.1)


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 3))


def elsewhere(_: Any) -> Any:
    return StepLR(SGD([nn.Parameter(torch.ones(2))], lr=0.1), 3)


def steps_twice() -> None:
    job, model = open_job(), net()
    model, optimizer, loader = job.prepare(model, SGD(model.parameters(), lr=0.1), data(), loss_fn)
    job.forward_backward(loss_of, next(iter(loader)))
    job.update(optimizer)
    job.update(optimizer)


def steps_a_stranger() -> None:
    job, model = open_job(), net()
    model, _, loader = job.prepare(model, SGD(model.parameters(), lr=0.1), data(), loss_fn)
    job.forward_backward(loss_of, next(iter(loader)))
    job.update(Adam(model.parameters(), lr=0.1))


def adds_a_stranger() -> None:
    job, model = open_job(), net()
    model, optimizer, loader = job.prepare(model, SGD(model.parameters(), lr=0.1), data(), loss_fn)
    for number, batch in enumerate(loader):
        if number == 1:
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5))]})
        job.step(batch)


def leaves_it_open() -> None:
    """The second optimizer accumulates over batches in which the first steps: plain torch says which is zeroed."""
    job, model = open_job(), net()
    optimizers = [SGD(model[0].parameters(), lr=0.1), Adam(model[2].parameters(), lr=0.1)]
    model, (first, _), loader = job.prepare(model, optimizers, data(), loss_fn)
    for batch in loader:
        job.forward_backward(loss_of, batch)
        job.forward_backward(loss_of, batch)
        job.update(first)


def adds_up_momentum() -> None:
    compress = parse_compression("dgc")
    job, model = open_job({"mesh": {"replicate": 2}, "sync": SyncPlan(compress=compress)}), net()
    model, _, loader = job.prepare(model, SGD(model.parameters(), lr=0.1), data(), loss_fn)
    for batch in loader:
        job.step(batch)
    batch = next(iter(loader))
    job.forward_backward(loss_of, batch)
    job.forward_backward(loss_of, batch)


def schedules_nothing() -> None:
    job, model = open_job(), net()
    optimizer = SGD(model.parameters(), lr=0.1)
    job.prepare(model, optimizer, data(), loss_fn, scheduler=StepLR(optimizer, 2))
    job.schedule(0.5)


SPLIT, ZERO1, STAGE = (
    {"mesh": {"split": 2}},
    {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=1)},
    {"mesh": {"stage": 2}},
)

REFUSED: dict[str, tuple[Callable[..., None], dict[str, Any], str]] = {
    "lbfgs": (refused, {"optimizer": lambda m: LBFGS(m.parameters())}, "LBFGS.step needs closure"),
    "sharp": (refused, {"optimizer": lambda m: Sharp(m.parameters(), lr=0.1)}, "Sharp.step needs closure"),
    "outside": (refused, {"optimizer": temperature}, "SGD holds a parameter of shape () that is not in the model"),
    "lazy": (refused, {"model": lazy}, "module '0' (LazyLinear) has no shape before its first call"),
    "elsewhere": (refused, {"scheduler": elsewhere}, "StepLR belongs to no optimizer that was passed to prepare"),
    "no scheduler": (refused, {"scheduler": lambda o: object()}, "prepare got object as scheduler"),
    "wants": (refused, {"scheduler": lambda o: [Wants(o)]}, "Wants.step needs temperature"),
    "twice": (steps_twice, {}, "update was called before forward_backward"),
    "stranger": (steps_a_stranger, {}, "Adam was not passed to prepare"),
    "added": (
        adds_a_stranger,
        {},
        "SGD holds a parameter of shape (5,) that is not in the model that prepare",
    ),
    "open": (leaves_it_open, {}, "left out Adam of '2.weight', whose gradients may be accumulating"),
    "momentum": (adds_up_momentum, {}, "several calls of forward_backward before an update, with dgc"),
    "nothing": (schedules_nothing, {}, "no scheduler of the run follows a metric"),
    "muon": (refused, {"optimizer": lambda m: Muon(matrices(m)), "fields": SPLIT}, "Muon does not treat the elements"),
    "adafactor": (
        refused,
        {"optimizer": lambda m: Adafactor(m.parameters()), "fields": SPLIT},
        "Adafactor does not treat the elements of a parameter one by one",
    ),
    "norm": (
        refused,
        {"optimizer": lambda m: GlobalNorm(m.parameters(), lr=0.1), "fields": ZERO1},
        "GlobalNorm is not known to treat parameters one by one",
    ),
    "norm on stages": (
        refused,
        {"optimizer": lambda m: GlobalNorm(m.parameters(), lr=0.1), "fields": STAGE},
        "GlobalNorm is not known to treat parameters one by one",
    ),
}


def words_of(name: str, number: int) -> str:
    function, arguments, _ = REFUSED[name]
    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{number}")
    os.environ.pop("TUTTI_PLAN", None)
    try:
        function(**arguments)
    except TuttiError as error:
        return str(error)
    return "nothing was said"


def say_all(names: list[str]) -> dict[str, str]:
    return {name: words_of(name, number) for number, name in enumerate(names)}


def test_what_cannot_be_kept_is_refused_on_every_rank() -> None:
    for said in run_ranks(say_all, 2, list(REFUSED)):
        for name, (_, _, expected) in REFUSED.items():
            assert expected in said[name], f"{name}: {said[name]}"


def test_optimizers_are_tried_out_with_the_settings_of_every_group() -> None:
    parameters = [nn.Parameter(torch.ones(2, 2))]
    for whole in (True, False):
        optimizer = ByGroup([{"params": parameters, "lr": 0.1, "whole": whole}], needed=3)
        assert is_elementwise(optimizer) is not whole
        assert is_by_tensor(optimizer)
        assert not optimizer.state
    warming = GlobalNorm(parameters, lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(warming, lambda step: 0.0)  # at a rate of 0 every optimizer looks elementwise
    assert not is_elementwise(warming)
    assert not is_by_tensor(warming)


class Timm:
    """The protocol of timm's schedulers."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.calls = optimizer, []  # type: ignore[var-annotated]

    def step(self, epoch: int, metric: float | None = None) -> None:
        self.calls.append(("epoch", epoch))

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        self.calls.append(("update", num_updates))

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def test_a_scheduler_that_is_told_its_count_is_told_it() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    scheduler = Timm(optimizer)
    schedules = make_schedules(scheduler, [optimizer], "step")
    schedules.updated(optimizer, 1, 1)
    schedules.epoch_ended(1)
    assert scheduler.calls == [("update", 1), ("epoch", 1)]


def plateau(given: bool, epochs: int, resume: str | None = None) -> list[float]:
    """Rates after each epoch."""
    job, model = open_job(resume=resume, folder="runs/plateau" if resume is None else "runs/resumed"), net()
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=0.05, factor=0.5)
    model, optimizer, loader = job.prepare(model, optimizer, data(), loss_fn, shuffle=False, scheduler=scheduler)
    rates = []
    for _ in job.epochs(epochs):
        rates.append(optimizer.param_groups[0]["lr"])
        for batch in loader:
            job.step(batch)
        if given:
            job.schedule(job.evaluate(data())["loss"])
    return [*rates, optimizer.param_groups[0]["lr"]]


def plateau_resumed() -> tuple[list[float], list[float]]:
    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / "first")
    before = plateau(True, 3)
    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / "second")
    after = plateau(True, 6, resume=str(Path.cwd() / "first"))
    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / "third")
    return before[:-1] + after, plateau(False, 6)


def plain_plateau(given: bool) -> list[float]:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=0.05, factor=0.5)
    (x, y), rates = data().tensors, []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        total = 0.0
        for inputs, target in zip(x.split(BATCH), y.split(BATCH), strict=True):
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), target)
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * len(inputs)
        scheduler.step(float(loss_fn(model(x), y).detach()) if given else total / len(x))
    return [*rates, optimizer.param_groups[0]["lr"]]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_plateau_follows_what_it_is_told_or_the_training_loss(ranks: int) -> None:
    expected = plain_plateau(True), plain_plateau(False)
    assert len({*expected[0]}) > 2, "the test would see no change of the rate"
    for told, own in run_ranks(plateau_resumed, ranks):
        assert told == pytest.approx(expected[0])
        assert own == pytest.approx(expected[1])


def two_updates(resume: str | None, epochs: int) -> tuple[dict[str, Tensor], list[str]]:
    """Two optimizers, an update of each in every batch; a checkpoint is due in mid-batch."""
    job, model = open_job(resume=resume, checkpoint_every=3, keep_checkpoints=9), net()
    optimizers = [Adam(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.1, momentum=0.9)]
    schedulers = [StepLR(optimizer, 2, 0.5) for optimizer in optimizers]
    model, optimizers, loader = job.prepare(
        model, optimizers, data(), loss_fn, scheduler=schedulers, shuffle=False, num_workers=0
    )
    for _ in job.epochs(epochs):
        for batch in loader:
            for optimizer in optimizers:
                job.forward_backward(loss_of, batch)
                job.update(optimizer)
    folder = Path(os.environ["TUTTI_RUN_FOLDER"]) / "checkpoints"
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return state, sorted(path.name for path in folder.glob("step-*"))


def saved_and_resumed() -> tuple[dict[str, Tensor], list[str], dict[str, Tensor]]:
    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / "first")
    state, names = two_updates(None, 2)
    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / "second")
    resumed, _ = two_updates(str(Path.cwd() / "first" / "checkpoints" / names[0]), 2)
    return state, names, resumed


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_waits_for_all_updates_of_its_batch(ranks: int) -> None:
    for state, names, resumed in run_ranks(saved_and_resumed, ranks):
        # 4 batches an epoch and 2 updates a batch: due after updates 3, 6, 9, 12, 15, and written between batches
        assert names[:2] == ["step-00000004", "step-00000006"]
        assert all(int(name[5:]) % 2 == 0 for name in names)
        for name, value in state.items():
            torch.testing.assert_close(resumed[name], value, rtol=0, atol=1e-14)


def wrapped(inside: bool) -> tuple[list[str], list[str], float]:
    job, model = open_job(), net()
    if inside:
        model[0] = torch.compile(model[0], backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    model, _, loader = job.prepare(model, SGD(model.parameters(), lr=0.1), data(), loss_fn, shuffle=False)
    for batch in loader:
        loss = job.step(batch)
    folder = job.save()
    return list(model.state_dict()), list(to_state_dict(folder)["model"]), loss


@pytest.mark.parametrize("inside", [True, False])
def test_names_are_without_the_compiler_s_prefix(inside: bool) -> None:
    expected = list(net().state_dict())
    for here, saved, loss in run_ranks(wrapped, 2, inside):
        assert here == saved == expected
        assert loss > 0


def half(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return loss_of(model, batch) / 2


def in_float16(way: str) -> dict[str, Tensor]:
    """Two epochs under loss scaling; each way makes the same updates."""
    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{way}")
    job, model = open_job(precision="float16", clip_norm=None if way == "in turn" else 0.5), net().float()
    optimizers = [SGD(model[0].parameters(), lr=0.5), SGD(model[2].parameters(), lr=0.5)]
    x, y = data().tensors
    model, optimizers, loader = job.prepare(model, optimizers, TensorDataset(x.float(), y), loss_fn, shuffle=False)
    for _ in job.epochs(2):
        for batch in loader:
            if way == "halves":
                job.forward_backward(half, batch)
                job.forward_backward(half, batch)
            else:
                job.forward_backward(loss_of, batch)
            for optimizer in optimizers if way == "in turn" else [None]:
                job.update(optimizer)
    assert not any(torch.equal(value, net().float().state_dict()[name]) for name, value in model.state_dict().items())
    return {name: value.clone() for name, value in model.state_dict().items()}


def all_in_float16() -> dict[str, dict[str, Tensor]]:
    return {way: in_float16(way) for way in ("once", "halves", "in turn")}


def without_scaling() -> dict[str, Tensor]:
    """The updates of `in turn`, in float32."""
    model = net().float()
    optimizer = SGD(model.parameters(), lr=0.5)
    x, y = data().tensors
    for _ in range(2):
        for inputs, target in zip(x.float().split(BATCH), y.split(BATCH), strict=True):
            optimizer.zero_grad()
            loss_fn(model(inputs), target).backward()
            optimizer.step()
    return model.state_dict()


def test_gradients_under_loss_scaling_are_unscaled_once() -> None:
    expected = without_scaling()
    for ways in run_ranks(all_in_float16, 2):
        for name, value in expected.items():
            torch.testing.assert_close(ways["halves"][name], ways["once"][name], rtol=0, atol=2e-3)
            torch.testing.assert_close(ways["in turn"][name], value, rtol=0, atol=5e-3)


def drops() -> tuple[float, float]:
    job = open_job()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 3)).double()
    model, _, loader = job.prepare(model, SGD(model.parameters(), lr=0.1), data(), loss_fn)
    batch = next(iter(loader))
    return job.forward_backward(loss_of, batch), job.forward_backward(loss_of, batch)


def test_calls_before_one_update_draw_masks_of_their_own() -> None:
    for first, second in run_ranks(drops, 2):
        assert first != second
