"""Parts of a step that are kept from one to the next, and what is written later: nothing is missed."""

import math
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import tutti
from tutti.parallel.model_parameters import ModelParameters
from tutti.trainer.finite_gradients import _sums_finite
from tutti.trainer.late_writer import LateWriter
from tutti.trainer.traceless import untouched


def test_parameters_follow_what_changes_in_the_model() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.ReLU(), nn.Sequential(shared, nn.Linear(2, 1)))
    parameters = ModelParameters(model)
    assert parameters() is parameters()
    shared.bias.requires_grad_(False)
    assert [*map(id, parameters.trained())] == [id(p) for p in model.parameters() if p.requires_grad]
    changes = (
        lambda: setattr(model[2][1], "weight", nn.Parameter(torch.ones(1, 2))),
        lambda: model.append(nn.Linear(1, 1)),
        lambda: model[1].register_parameter("slope", nn.Parameter(torch.ones(1))),
        lambda: model[2].pop(0),
    )
    for change in changes:
        change()
        assert [*map(id, parameters())] == [*map(id, model.parameters())]


def test_gradients_that_are_not_finite_are_found_in_all_kinds() -> None:
    kinds = [torch.ones(3, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64)]
    for some in (kinds, kinds[:1], kinds[3:], []):
        assert _sums_finite(some)
        for tensor in some:
            for value in (math.nan, math.inf):
                tensor[1] = value
                assert not _sums_finite(some)
                tensor[1] = 1.0


def test_a_thread_writes_what_waits_in_order() -> None:
    written: list[int] = []
    writer = LateWriter(written.extend, 0.02)
    for item in range(5):
        writer.add(item)
    assert written == [0]  # the first one does not wait
    until = time.monotonic() + 10
    while len(written) < 5 and time.monotonic() < until:
        time.sleep(0.005)
    assert written == [0, 1, 2, 3, 4]
    writer.add(5)
    writer.add(6, now=True)
    assert written[5:] == [5, 6]
    writer.close()
    writer.add(7, now=True)
    assert written[7:] == []


def test_what_fails_in_the_thread_of_event_files_is_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = tutti.TensorBoardLogger()
    logger.start({"folder": tmp_path, "step": 0, "resumed": False})
    monkeypatch.setattr(logger._file, "write_event", lambda event: (_ for _ in ()).throw(OSError("disk full")))
    logger.log({"loss": 1.0}, 1)
    with pytest.raises(OSError, match="disk full"):
        logger.log({"loss": 1.0}, 2)


def test_running_statistics_that_torch_writes_unseen_are_restored() -> None:
    class OwnNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("variance", torch.full((3,), math.nan))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.batch_norm(x, self.mean, self.variance, training=True)

    model = nn.Sequential(OwnNorm(), nn.BatchNorm1d(3), nn.InstanceNorm1d(3, track_running_stats=True))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with untouched(model):
        model(torch.randn(8, 3, 4) + 5)
        assert not torch.equal(model[0].mean, before["0.mean"])
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)
