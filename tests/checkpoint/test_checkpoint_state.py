"""What is in a checkpoint beside plain tensors: state of odd shapes, of modules, of schedulers; and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from tutti.checkpoint import latest_checkpoint, load_weights, to_safetensors, to_state_dict
from tutti.checkpoint.contribution import Collected, Contribution, collect, find_conflict
from tutti.checkpoint.load import load_checkpoint
from tutti.errors import CheckpointError
from tutti.parallel.saved_values import pack_scalar, unpack_scalar


class Factored(torch.optim.Optimizer):
    """State as Adafactor's (rows and columns), a list, None, and an entry of no parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "tensor": torch.tensor(0.5)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["calls"] = self.state.get("calls", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["rows"] = state.get("rows", 0) + p.grad.reshape(len(p), -1).sum(1) ** 2
                state["steps"] = state.get("steps", torch.zeros(1)) + 1
                state["nothing"] = None
                state["seen"] = [*state.get("seen", []), float(p.grad.sum())]
                p.sub_(group["lr"] * p.grad / (1 + state["rows"].reshape(-1, *[1] * (p.dim() - 1))))


class Counting(nn.Module):
    """A module with state of its own, a scalar parameter, complex numbers, and a buffer that is not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 2), nn.Parameter(torch.tensor(1.5))
        self.twin = self.layer
        self.turn = nn.Parameter(torch.randn(2, dtype=torch.complex64))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return self.twin(x) * self.scale * self.turn.abs()


def job_in(folder: Path, model: nn.Module, make: Any, **options: Any) -> Any:
    job = tutti.Job(global_batch_size=4, folder=folder, keep_checkpoints=0, **options)
    data = TensorDataset(torch.randn(16, 3), torch.arange(16) % 2)
    scheduler = options.pop("scheduler", None)
    model, optimizer, loader = job.prepare(model, make, data, nn.functional.cross_entropy, scheduler=scheduler)
    return job, model, optimizer, loader


def test_state_of_every_kind_comes_back(tmp_path: Path) -> None:
    job, model, optimizer, loader = job_in(tmp_path / "a", Counting(), lambda p: Factored(list(p)[2:]))
    for batch in loader:
        job.step(batch)
    path = job.save()
    _, other, again, _ = job_in(tmp_path / "b", Counting(), lambda p: Factored(list(p)[2:]), resume=path)
    assert other.calls == model.calls == 4
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(other.state_dict()[name], value), name
    assert again.state["calls"] == 4
    for one, two in zip(optimizer.param_groups[0]["params"], again.param_groups[0]["params"], strict=True):
        state, got = optimizer.state[one], again.state[two]
        assert got.keys() == state.keys()
        assert torch.equal(got["rows"], state["rows"])
        assert torch.equal(got["steps"], state["steps"])
        assert got["steps"].shape == (1,)
        assert got["seen"] == state["seen"]
        assert got["nothing"] is None
    assert again.param_groups[0]["tensor"] == 0.5
    assert to_state_dict(path)["optimizers"][0]["state"]["calls"] == 4
    with pytest.raises(CheckpointError, match="holds state that is not a tensor"):
        to_safetensors(path, tmp_path / "x.safetensors")


def test_state_that_differs_between_ranks_is_refused_with_its_name() -> None:
    key = (0, "a.weight", "rows")
    one, two = Contribution(digests={key: "x"}), Contribution(digests={key: "y"})
    assert find_conflict([one, one]) is None
    assert "state 'rows' of a.weight does not have the parameter's shape and differs between ranks" in str(
        find_conflict([one, two])
    )
    assert find_conflict([one, Contribution(failure="full")]) == "rank 1: full"


def test_state_of_another_shape_goes_only_where_the_parameter_is_whole(tmp_path: Path) -> None:
    job, _, _, loader = job_in(tmp_path / "a", nn.Linear(3, 2), Factored)
    for batch in loader:
        job.step(batch)
    path = job.save()
    other, model, _, _ = job_in(tmp_path / "b", nn.Linear(3, 2), Factored)
    run = other._run()
    run.parallel.layout.cut("weight", 0, (0, 1))
    model.weight.data = model.weight.data[:1].clone()
    with pytest.raises(CheckpointError, match=r"state 'rows' of weight has shape \(2,\), not the parameter's"):
        load_checkpoint(run.state, path, print)


def test_copies_of_parameters_follow_what_was_loaded(tmp_path: Path) -> None:
    job, model, _, loader = job_in(tmp_path / "a", nn.Linear(3, 2), torch.optim.SGD)
    for batch in loader:
        job.step(batch)
    path = job.save()
    torch.save(model.state_dict(), tmp_path / "w.pt")
    for load in (
        lambda training: load_checkpoint(training, path, print),
        lambda training: load_weights(training, tmp_path / "w.pt"),
    ):
        other, fresh, _, _ = job_in(tmp_path / "b", nn.Linear(3, 2), torch.optim.SGD)
        copies: list[torch.Tensor] = []
        other._run().parallel.layout.states.after_load.append(
            lambda to=copies, of=fresh: to.append(of.weight.detach().clone())
        )
        load(other._run().state)
        assert torch.equal(copies[0], model.weight)


def test_a_part_that_is_not_as_the_layout_says_is_not_written(tmp_path: Path) -> None:
    job, _, _, _ = job_in(tmp_path / "a", nn.Linear(3, 2), torch.optim.SGD)
    job._run().parallel.layout.cut("weight", 0, (0, 1))
    with pytest.raises(CheckpointError, match=r"weight has shape \(2, 3\) on this rank, its layout says \(1, 3\)"):
        collect(job._run().state, Collected(Contribution()))
    with pytest.raises(CheckpointError, match=r"could not be written .* its layout says"):
        job.save()
    assert list((tmp_path / "a" / "checkpoints").iterdir()) == []


def test_a_scheduler_whose_state_is_no_plain_value_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    class Odd(torch.optim.lr_scheduler.LambdaLR):
        def state_dict(self) -> dict[str, Any]:
            return {"path": Path("x")}

    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = tutti.Job(global_batch_size=4, folder=tmp_path)
    data = TensorDataset(torch.randn(16, 3), torch.arange(16) % 2)
    scheduler = Odd(optimizer, lambda step: 1.0)
    job.prepare(model, optimizer, data, nn.functional.cross_entropy, scheduler=scheduler)
    with pytest.raises(CheckpointError, match="not made of plain values and could not be read back"):
        job.save()


def test_optimizers_made_otherwise_are_named(tmp_path: Path) -> None:
    def two_groups(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}], lr=0.1, momentum=0.9)

    def prepared(folder: str, model: nn.Module, optimizer: Any, resume: Path | None = None) -> Any:
        job = tutti.Job(global_batch_size=4, folder=tmp_path / folder, keep_checkpoints=0, resume=resume)
        data = TensorDataset(torch.randn(16, 3), torch.arange(16) % 2)
        job.prepare(model, optimizer, data, nn.functional.cross_entropy)
        return job

    model = nn.Linear(3, 2)
    path = prepared("a", model, two_groups(model)).save()
    one = nn.Linear(3, 2)
    with pytest.raises(CheckpointError, match="was saved with 2 parameter groups and has 1 now"):
        prepared("b", one, torch.optim.SGD(one.parameters(), lr=0.1), path)
    with pytest.raises(CheckpointError, match=r"group 0 of optimizer 0 \(SGD\) was saved without 'bias'"):
        prepared("b", one, torch.optim.SGD([{"params": [one.weight, one.bias]}, {"params": []}], lr=0.1), path)
    with pytest.raises(CheckpointError, match="holds 1 optimizers, prepare got 2"):
        prepared("b", one, [two_groups(one), torch.optim.SGD([one.weight], lr=0.1)], path)


@pytest.mark.parametrize("value", [torch.tensor(3.0), torch.tensor([7]), torch.tensor(True), None, 4, "x", [1.5]])
def test_scalars_keep_their_kind(value: Any) -> None:
    got = unpack_scalar(pack_scalar(value))
    assert type(got) is type(value)
    if isinstance(value, torch.Tensor):
        assert (got.dtype, got.shape) == (value.dtype, value.shape)
    assert got == value


def test_what_was_just_written_stays_beside_later_ones_of_another_run(tmp_path: Path) -> None:
    later = tmp_path / "a" / "checkpoints" / "step-00000200"
    later.mkdir(parents=True)
    job, _, _, _ = job_in(tmp_path / "a", nn.Linear(3, 2), torch.optim.SGD)
    path = job.save()
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    later.mkdir()
    assert latest_checkpoint(tmp_path / "a") == path  # a folder without an index is none


def test_an_optimizer_that_cannot_say_its_state_is_named(tmp_path: Path) -> None:
    class Mute(torch.optim.SGD):
        def state_dict(self) -> Any:
            raise KeyError("nothing")

    job, _, _, _ = job_in(tmp_path, nn.Linear(3, 2), Mute)
    with pytest.raises(CheckpointError, match=r"step 0 could not be written to .*: KeyError 'nothing'; earlier"):
        job.save()
