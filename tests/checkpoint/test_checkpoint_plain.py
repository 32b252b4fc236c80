"""Plain state: what one device reads and writes, made of checkpoints of any plan and taken up under any plan."""

import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import tutti
from checkpoint.checkpoint_variants import FAMILIES, GPT, PLANS, SAVED_AT, Way, train
from harness import run_ranks
from tutti.checkpoint import latest_checkpoint, to_safetensors, to_state_dict
from tutti.config import serialization
from tutti.errors import CheckpointError
from tutti.parallel.layout import gather_whole, local_tensors, to_local

DIVIDED = [way for way in PLANS if way.family == GPT and not way.missing and way.plan.world_size > 1]


def save(way: Way, folder: Path) -> None:
    train(way, folder, SAVED_AT, save_at=SAVED_AT)


def on_one_device(folder: Path) -> Any:
    """Plain torch, on from a plain state: what parameters are after one more update with gradients of 1."""
    torch.set_default_dtype(torch.float64)
    subject = FAMILIES[GPT].subject()
    model = subject.model()
    optimizer = subject.optimizer(model.parameters(), lr=subject.rate)
    state = to_state_dict(folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizers"][0])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model.state_dict(), state


@pytest.mark.parametrize("way", [DIVIDED[0], DIVIDED[-1]], ids=lambda way: way.name)
def test_a_checkpoint_is_plain_state_for_one_device(way: Way, tmp_path: Path) -> None:
    run_ranks(save, 1, PLANS[0], tmp_path / "one")
    run_ranks(save, way.plan.world_size, way, tmp_path / "many")
    after, state = run_ranks(on_one_device, 1, tmp_path / "many")[0]
    expected, one = run_ranks(on_one_device, 1, tmp_path / "one")[0]
    assert list(state["optimizers"][0]["state"]) == list(one["optimizers"][0]["state"])
    assert state["optimizers"][0]["param_groups"] == one["optimizers"][0]["param_groups"]
    assert after.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(after[name], value, rtol=1e-11, atol=1e-13)
    checkpoint = latest_checkpoint(tmp_path / "many")
    assert checkpoint is not None
    file = tmp_path / "model.safetensors"
    assert to_safetensors(checkpoint, file) == file.stat().st_size
    model = FAMILIES[GPT].subject().model().double()
    safetensors.torch.load_model(model, file)  # type: ignore[arg-type]
    for name, value in model.state_dict().items():
        assert torch.equal(value, state["model"][name]), name


def start_with(way: Way, weights: Path) -> Any:
    """The whole parameters after prepare, or what it said."""
    torch.set_default_dtype(torch.float64)
    subject = FAMILIES[way.family].subject()
    os.environ["TUTTI_PLAN"] = str(serialization.save(way.plan, Path.cwd() / f"plan-{os.environ['RANK']}.json"))
    job = tutti.Job(global_batch_size=8)
    model = subject.model()
    optimizer = subject.optimizer(model.parameters(), lr=subject.rate)
    try:
        job.prepare(model, optimizer, subject.data, subject.loss_fn, weights=weights)
    except CheckpointError as error:
        return str(error)
    run = job._run()
    return gather_whole(
        run.parallel.layout, run.parallel.world, {name: to_local(tensor) for name, tensor in local_tensors(model)}
    )


@pytest.mark.parametrize("way", [PLANS[0], DIVIDED[0], DIVIDED[-1]], ids=lambda way: way.name)
def test_training_begins_with_plain_weights_under_any_plan(way: Way, tmp_path: Path) -> None:
    torch.manual_seed(77)
    model = FAMILIES[GPT].subject().model().double()
    safetensors.torch.save_model(model, str(tmp_path / "w.safetensors"))
    torch.save(model.state_dict(), tmp_path / "w.pt")
    for file in ("w.safetensors", "w.pt"):
        for got in run_ranks(start_with, way.plan.world_size, way, tmp_path / file):
            for name, value in got.items():
                assert torch.equal(value, model.state_dict()[name]), name


def start_with_each(way: Way, files: list[Path]) -> list[Any]:
    return [start_with(way, file) for file in files]


def test_weights_that_do_not_fit_are_refused_on_every_rank(tmp_path: Path) -> None:
    state = FAMILIES[GPT].subject().model().double().state_dict()
    first, last = next(iter(state)), list(state)[-2]
    cases: list[tuple[Any, str]] = [
        ({name: value for name, value in state.items() if name != last}, f"{last!r}: checkpoint does not have it"),
        ({**state, "more": torch.ones(2)}, "'more': checkpoint has shape (2,), model does not have it"),
        ({**state, first: state[first][:-1]}, f"does not fit the model at {first!r}"),
        ({"epoch": 3}, "holds no state_dict"),
        (b"12345678", "cannot be read as safetensors"),
        (None, "is not a file"),
    ]
    files = []
    for number, (wrong, _) in enumerate(cases):
        files.append(tmp_path / (f"{number}.safetensors" if isinstance(wrong, bytes) else f"{number}.pt"))
        if isinstance(wrong, bytes):
            files[-1].write_bytes(wrong)
        elif wrong is not None:
            torch.save(wrong, files[-1])
    ranks = run_ranks(start_with_each, 2, Way(family=GPT, mesh={"replicate": 2}), files)
    assert ranks[0] == ranks[1]
    for said, (_, sentence) in zip(ranks[0], cases, strict=True):
        assert sentence in said
