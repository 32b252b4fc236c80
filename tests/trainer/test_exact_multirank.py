"""N ranks compute what one device computes: same batches, same losses, same parameters, to rounding."""

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import run_ranks
from trainer.training import Case, Trained, train

# Convolutions before batch statistics have biases whose gradient is zero but for rounding, which Adam would blow up:
# those cases use SGD.
CASES = {
    "mlp: sizes that do not divide, tied, unused": Case(batch=7),
    "mlp: unequal shares": Case(batch=9, shares=(3.0, 1.0, 2.0, 1.5)),
    "mlp: a rank without a share": Case(batch=6, shares=(1.0, 0.0, 2.0, 1.0)),
    "mlp: fewer samples than ranks": Case(batch=2, epochs=1),
    "mlp: accumulation, short last batch kept": Case(batch=12, microbatches=3, clip_norm=0.1),
    "mlp: short last batch dropped, momentum": Case(batch=12, microbatches=4, last_batch="drop", optimizer="SGD"),
    "conv: batch statistics": Case(model="conv", batch=10, optimizer="SGD"),
    "conv: batch statistics, accumulation, unequal": Case(
        model="conv",
        batch=16,
        optimizer="SGD",
        microbatches=2,
        shares=(2.0, 1.0, 1.0, 3.0),
        epochs=2,
        last_batch="drop",
    ),
    "conv: a rank without samples": Case(model="conv", batch=6, optimizer="SGD", shares=(1.0, 0.0, 1.0, 1.0), epochs=1),
    "conv: recompute": Case(model="conv", batch=10, optimizer="SGD", recompute="*norm", epochs=2),
    "tagger: tokens weigh alike": Case(model="tagger", batch=9),
    "tagger: tokens, accumulation, clipping": Case(model="tagger", batch=10, microbatches=4, clip_norm=0.5, epochs=2),
    "augmented: seeds of samples": Case(model="augmented", batch=10, epochs=2),
    "augmented: in worker processes": Case(model="augmented", batch=10, epochs=1, workers=2),
}
FLOAT32 = {
    model: Case(model=model, batch=10, epochs=4, dtype=torch.float32, optimizer="SGD")
    for model in ("mlp", "conv", "tagger")
}
SLICED = {n: Case(batch=12, microbatches=n) for n in (1, 2, 3, 4)}
TABLES: dict[str, dict[Any, Case]] = {"exact": CASES, "float32": FLOAT32, "sliced": SLICED}


def train_all(table: str, world_size: int) -> dict[Any, Trained]:
    """Every case of a table, one after another in the same ranks."""
    results = {}
    for number, (name, case) in enumerate(TABLES[table].items()):
        os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{number}")
        results[name] = train(case, world_size)
    return results


@functools.cache
def results(table: str, world_size: int) -> list[dict[Any, Trained]]:
    """What every rank of a world got; each world is launched once."""
    return run_ranks(train_all, world_size, table, world_size)


def assert_same(one: Trained, many: Trained, tolerance: float) -> None:
    assert many.batches == one.batches
    assert many.rates == one.rates
    torch.testing.assert_close(torch.tensor(many.losses), torch.tensor(one.losses), rtol=tolerance, atol=tolerance)
    assert many.evaluation == pytest.approx(one.evaluation, rel=tolerance)
    assert many.state.keys() == one.state.keys()
    for name, value in one.state.items():
        torch.testing.assert_close(
            many.state[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_what_one_device_does(name: str, world_size: int) -> None:
    one = results("exact", 1)[0][name]
    for many in results("exact", world_size):
        assert_same(one, many[name], 1e-12)


def test_at_least_20_steps_were_compared() -> None:
    assert len(results("exact", 1)[0]["mlp: sizes that do not divide, tied, unused"].losses) >= 20


@pytest.mark.parametrize("model", FLOAT32)
def test_float32_agrees_to_rounding(model: str) -> None:
    one = results("float32", 1)[0][model]
    assert len(one.losses) >= 20
    for many in results("float32", 3):
        assert_same(one, many[model], 1e-5)


@pytest.mark.parametrize("microbatches", [2, 3, 4])
def test_accumulation_gives_the_gradients_of_the_whole_batch(microbatches: int) -> None:
    """Without batch statistics the number of slices does not matter either."""
    assert_same(results("sliced", 1)[0][1], results("sliced", 2)[0][microbatches], 1e-12)
