"""The runtime's parts alone: batches unpacked, BatchNorm pickled, clocks that add up, checkpoints that do not fit."""

import copy
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from tutti.comm.clock import PhaseClock
from tutti.config.run_folder import RunFolder
from tutti.errors import CheckpointError, PlanError, ScriptError
from tutti.parallel.data.batchnorm import BatchScope, share_statistics
from tutti.parallel.losses import Weighted, as_weighted, default_loss, default_unpack
from tutti.trainer.metrics import MetricsLog, read_rows

A, B, T = torch.zeros(2), torch.ones(2), torch.arange(2)


class Pair(NamedTuple):
    inputs: Any
    target: Any


@pytest.mark.parametrize(
    ("batch", "args", "kwargs", "target"),
    [
        ((A, T), (A,), {}, T),
        ([A, B, T], (A, B), {}, T),
        (((A, B), T), (A, B), {}, T),
        (({"x": A}, T), (), {"x": A}, T),
        (Pair(A, T), (A,), {}, T),
        (A, (A,), {}, A),
    ],
)
def test_batches_become_calls(batch: Any, args: Any, kwargs: Any, target: Any) -> None:
    assert default_unpack(batch) == (args, kwargs, target)


def test_a_dict_is_keyword_arguments_and_its_own_target() -> None:
    batch = {"x": A, "labels": T}
    assert default_unpack(batch) == ((), batch, batch)


def test_what_is_no_batch_is_refused_with_the_remedy() -> None:
    with pytest.raises(ScriptError, match=r"batch of type str .* unpack="):
        default_unpack("text")


def test_losses_that_models_compute_themselves() -> None:
    assert default_loss({"loss": A.sum()}, None) == 0
    assert default_loss(type("Output", (), {"loss": B.sum()})(), None) == 2
    with pytest.raises(ScriptError, match="prepare got no loss_fn"):
        default_loss(B, None)


def test_a_mean_of_5_samples_counts_as_5() -> None:
    weighted = as_weighted(torch.tensor(2.0), 5)
    assert (float(weighted.total), weighted.count) == (10.0, 5.0)
    assert as_weighted(Weighted(A.sum(), 3), 5).count == 3
    with pytest.raises(ScriptError, match=r"the loss is a tensor of shape \(2,\)"):
        as_weighted(B, 2)


def test_a_model_with_shared_statistics_can_be_copied_and_pickled() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    share_statistics(model, BatchScope(world_size=2, group=object()))
    x = torch.randn(4, 3)
    expected = model(x)
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        model[0].weight.zero_()
    for other in (copied, loaded):
        torch.testing.assert_close(other(x), expected)
    loaded.train()(x)  # a loaded model is a plain one: no other rank is asked


def test_phases_add_up_to_wall_time() -> None:
    clock = PhaseClock(torch.device("cpu"))
    for phase in ("data", "forward", "backward", "optimizer", "other"):
        clock.enter(phase)
        sum(range(2000))
    clock.enter("exposed_communication")
    wall, phases = clock.take_row()
    assert sum(phases.values()) == pytest.approx(wall, rel=1e-9)
    assert all(seconds >= 0 for seconds in phases.values())


def test_a_torn_last_line_is_left_out_and_ended(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    log = MetricsLog(folder, 0)
    log.row("log", 1.5, step=1, values={"x": float("nan")})
    log.close()
    with folder.metrics.open("a") as file:
        file.write('{"kind": "step", "st')
    again = MetricsLog(folder, 0)
    again.row("log", 1.0, step=2, values={})
    again.close()
    rows = read_rows(folder.metrics)
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["values"]["x"] is None
    assert rows[1]["time_s"] == 2.5  # the clock goes on


def job_in(folder: Path, hidden: int = 4, **options: Any) -> Any:
    job = tutti.Job(**{"global_batch_size": 4, "folder": folder, **options})
    model = nn.Sequential(nn.Linear(3, hidden), nn.Linear(hidden, 2))
    data = TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
    model, _, loader = job.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), data, nn.functional.cross_entropy
    )
    return job, model, loader


def test_checkpoints_that_do_not_fit_say_why(tmp_path: Path) -> None:
    job, _, loader = job_in(tmp_path / "a")
    for batch in loader:
        job.step(batch)
    saved = job.save()
    for options, sentence in [
        ({"global_batch_size": 8}, "made with global_batch_size = 4 samples, the Job says 8"),
        ({"seed": 1}, "made with seed = 0, the Job says 1"),
        ({"hidden": 5}, r"'0.weight': checkpoint has shape \(4, 3\), model has shape \(5, 3\)"),
    ]:
        with pytest.raises(CheckpointError, match=sentence):
            job_in(tmp_path / "b", resume=saved, **options)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        job_in(tmp_path / "b", resume=tmp_path / "nothing")
    for file in ("rank-00000.safetensors", "run.pt", "index.json"):
        (saved / file).write_bytes(b"no")
        with pytest.raises(CheckpointError, match=rf"{file}.*; name an earlier checkpoint"):
            job_in(tmp_path / "b", resume=saved)


def test_old_checkpoints_go_and_the_newest_is_resumed(tmp_path: Path) -> None:
    job, model, loader = job_in(tmp_path / "a", checkpoint_every=1, keep_checkpoints=2)
    for _ in job.epochs(2):
        for batch in loader:
            job.step(batch)
    assert sorted(p.name for p in (tmp_path / "a" / "checkpoints").iterdir()) == ["step-00000003", "step-00000004"]
    again, resumed, loader = job_in(tmp_path / "b", resume=tmp_path / "a")
    assert list(again.epochs(2)) == []
    assert torch.equal(resumed[0].weight, model[0].weight)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"global_batch_size": 0}, "global_batch_size = 0"),
        ({"clip_norm": -1.0}, "clip_norm = -1.0"),
        ({"on_nonfinite": "ignore"}, "use 'stop', 'skip' or 'rollback'"),
        ({"num_microbatches": 5}, "num_microbatches = 5 exceeds global_batch_size = 4"),
        ({"precision": "tf32"}, "tf32 needs an NVIDIA GPU"),
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        job_in(tmp_path, **options)


def test_misuse_of_a_job_says_what_to_do(tmp_path: Path) -> None:
    job = tutti.Job(global_batch_size=4, folder=tmp_path)
    with pytest.raises(ScriptError, match=r"call job\.prepare"):
        job.step(None)
    job, model, loader = job_in(tmp_path)
    with pytest.raises(ScriptError, match="before the loader yielded one"):
        job.step((torch.zeros(4, 3), torch.zeros(4)))
    with pytest.raises(ScriptError, match="prepare was called twice"):
        job.prepare(model, torch.optim.SGD(model.parameters()), loader.dataset, None)
    with pytest.raises(ScriptError, match="update was called before forward_backward"):
        job.update()
    other = nn.Linear(2, 2)
    with pytest.raises(ScriptError, match=r"SGD holds a parameter of shape \(2, 2\) that is not in the model"):
        tutti.Job(global_batch_size=4).prepare(model, torch.optim.SGD(other.parameters()), loader.dataset)
    batch = next(iter(loader))
    with pytest.raises(ScriptError, match="does not depend on any parameter"):
        job.forward_backward(lambda model, batch: torch.zeros(()), batch)
