"""Gradient accumulation as scripts write it: right through the Job's calls, refused where it bypasses them."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import tutti
from harness import run_ranks

EVERY = 4


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def data() -> TensorDataset:
    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True))


def quarter(model: nn.Module, batch: Any) -> torch.Tensor:
    return mse_loss(model(batch[0]), batch[1]) / EVERY


def plain() -> dict[str, torch.Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = data().tensors
    for i in range(8):
        quarter(model, (x[4 * i : 4 * i + 4], y[4 * i : 4 * i + 4])).backward()
        if (i + 1) % EVERY == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def own(job: Any, model: nn.Module, optimizer: Any, batch: Any, due: bool) -> None:
    quarter(model, batch).backward()
    if due:
        optimizer.step()
        optimizer.zero_grad()


def mixed(job: Any, model: nn.Module, optimizer: Any, batch: Any, due: bool) -> None:
    job.forward_backward(quarter, batch)
    if due:
        optimizer.step()
        optimizer.zero_grad()


def through(job: Any, model: nn.Module, optimizer: Any, batch: Any, due: bool) -> None:
    job.forward_backward(quarter, batch)
    if due:
        job.update()
        optimizer.zero_grad()


def trained(loop: Callable[..., None]) -> Any:
    job = tutti.Job(global_batch_size=4, keep_checkpoints=0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = job.prepare(model, optimizer, data(), mse_loss, shuffle=False)
    try:
        for i, batch in enumerate(loader):
            loop(job, model, optimizer, batch, (i + 1) % EVERY == 0)
    except tutti.TuttiError as error:
        return str(error)
    return job.state_dict()


def all_loops() -> list[Any]:
    return [trained(loop) for loop in (through, own, mixed)]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_accumulation_is_that_of_one_device_or_refused(ranks: int) -> None:
    expected = plain()
    for results in run_ranks(all_loops, ranks):
        for state in results[: 3 if ranks == 1 else 1]:
            for name, value in expected.items():
                torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12, msg=name)
        for said in results[1:] if ranks > 1 else ():
            assert said.startswith("SGD.step() was called by the script")
            assert "job.update() for SGD.step()" in said


def twice(job: Any, model: nn.Module, optimizer: Any, batch: Any, due: bool) -> None:
    job.step(batch)
    optimizer.step()


def stepped_twice() -> str:
    return str(trained(twice))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_is_left_from_the_old_loop_is_refused(ranks: int) -> None:
    for said in run_ranks(stepped_twice, ranks):
        assert said.startswith("SGD.step() was called")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"global_batch_size": 32.5}, "global_batch_size = 32.5 is not a whole number"),
        ({"global_batch_size": "32"}, "global_batch_size = '32' is not a whole number"),
        ({"lr_rule": 0.1}, "lr_rule = 0.1 is no rule"),
        ({"facts": {"tuning.trial": 1}}, "did you mean 'tuning.trials'"),
    ],
)
def test_arguments_of_another_kind_are_named(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(tutti.TuttiError, match=re.escape(said)):
        tutti.Job(**{"global_batch_size": 4, **changed})


def test_an_error_in_the_constructor_is_one_sentence(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import tutti\ntutti.Job(global_batch_size=0)\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stderr) == (2, "tutti: global_batch_size = 0; give a number of 1 or more\n")
