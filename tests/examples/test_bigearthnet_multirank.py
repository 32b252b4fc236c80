"""The BigEarthNet pair: plain PyTorch, one rank and two ranks have the same losses and F1, also after a resume."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bigearthnet_patches import make_pack

import tutti
from harness import preload, run_ranks

pytest.importorskip("rasterio")
preload("bigearthnet_patches")

SMALL = ["--epochs", "3", "--batch-size", "12", "--layers", "14", "--width", "2", "--lr", "60", "--workers", "0"]
SMALL += ["--validate-every", "2"]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pack(tmp_path_factory.mktemp("bigearthnet"), 40)


class Stopped(Exception):
    """What ends a script early."""


class Tape:
    """A Job class that keeps what the script did: the model's first state, each step's batch and loss, evaluations.

    Args:
        resume: a checkpoint to resume from.
        stop_after: steps after which the script saves and ends; 0: never.
    """

    def __init__(self, resume: Path | None = None, stop_after: int = 0) -> None:
        self.state: dict[str, torch.Tensor] = {}
        self.batches: list[Any] = []
        self.losses: list[float] = []
        self.values: list[tuple[str, int, dict[str, float]]] = []
        self.saved: Path | None = None
        tape = self

        class Recorded(tutti.Job):
            def __init__(self, **settings: Any) -> None:
                super().__init__(**settings, resume=resume)

            def prepare(self, model: Any, *args: Any, **kwargs: Any) -> Any:
                tape.state = {name: value.clone() for name, value in model.state_dict().items()}
                return super().prepare(model, *args, **kwargs)

            def step(self, batch: Any) -> float:
                tape.batches.append(batch)
                tape.losses.append(super().step(batch))
                if len(tape.losses) == stop_after:
                    tape.saved = self.save().absolute()
                    raise Stopped
                return tape.losses[-1]

            def evaluate(self, data: Any, *args: Any, name: str = "test", **kwargs: Any) -> dict[str, float]:
                values = super().evaluate(data, *args, name=name, **kwargs)
                tape.values.append((name, len(data), values))
                return values

        self.job = Recorded


def run_tutti(options: list[str], **settings: Any) -> tuple[Tape, list[str]]:
    import train_tutti

    tape = Tape(**settings)
    train_tutti.tutti = SimpleNamespace(Job=tape.job)  # type: ignore[assignment]
    return tape, _run(train_tutti.main, options)


def run_torch(options: list[str], tape: Tape) -> tuple[list[float], list[str]]:
    """The plain script from the taped first state, on the taped batches; returns losses and lines."""
    import train_torch

    batches, losses = iter(tape.batches), []
    loader, make, backward = train_torch.DataLoader, train_torch.make_model, torch.Tensor.backward

    class Taped:
        def __init__(self, data: Any, batch_size: int) -> None:
            self.length = -(-len(data) // batch_size)

        def __len__(self) -> int:
            return self.length

        def __iter__(self) -> Iterator[Any]:
            return (next(batches) for _ in range(self.length))

    def loaded(data: Any, batch_size: int, shuffle: bool = False, **options: Any) -> Any:
        return Taped(data, batch_size) if shuffle else loader(data, batch_size)

    def from_state(args: Any) -> Any:
        model = make(args)
        model.load_state_dict(tape.state)
        return model

    def kept_backward(loss: torch.Tensor) -> None:
        losses.append(loss.item())
        backward(loss)

    train_torch.DataLoader, train_torch.make_model = loaded, from_state  # type: ignore[assignment]
    torch.Tensor.backward = kept_backward  # type: ignore[method-assign, assignment]
    try:
        lines = _run(train_torch.main, options)
    finally:
        train_torch.DataLoader, train_torch.make_model = loader, make  # type: ignore[misc]
        torch.Tensor.backward = backward  # type: ignore[method-assign]
    assert next(batches, None) is None, "the plain script made fewer steps"
    return losses, lines


def _run(main: Any, options: list[str]) -> list[str]:
    printed, sys.argv = io.StringIO(), ["script", *options]
    with contextlib.redirect_stdout(printed), contextlib.suppress(Stopped):
        main()
    return printed.getvalue().splitlines()


def one_rank(pack: str) -> dict[str, Any]:
    """The pair in float64, and what depends on loader workers."""
    torch.set_default_dtype(torch.float64)
    tape, lines = run_tutti([pack, *SMALL])
    losses, plain_lines = run_torch([pack, *SMALL], tape)
    return {"tutti": tape.losses, "lines": lines, "plain": losses, "plain lines": plain_lines, "values": tape.values}


def one_rank_bfloat16(pack: str) -> tuple[list[float], list[float]]:
    options = [pack, *SMALL, "--precision", "bfloat16", "--labels", "19"]
    tape, _ = run_tutti(options)
    return tape.losses, run_torch(options, tape)[0]


def two_ranks(pack: str, folder: str) -> dict[str, Any]:
    """The whole run, with loader workers; then one that stops within the second epoch, and one that goes on."""
    torch.set_default_dtype(torch.float64)
    whole, lines = run_tutti([pack, *SMALL, "--workers", "1"])
    os.environ["TUTTI_RUN_FOLDER"] = f"{folder}/first"
    stopped, _ = run_tutti([pack, *SMALL], stop_after=3)
    os.environ["TUTTI_RUN_FOLDER"] = f"{folder}/second"
    resumed, resumed_lines = run_tutti([pack, *SMALL], resume=stopped.saved)
    return {
        "losses": whole.losses,
        "values": whole.values,
        "lines": lines,
        "resumed": (stopped.losses, resumed.losses),
        "resumed lines": resumed_lines,
    }


@pytest.mark.long
def test_the_pair_agrees_on_one_rank_and_two_and_after_a_resume(packed: Path, tmp_path: Path) -> None:
    """In float64, with augmentation; two ranks load on workers, one rank does not."""
    one = run_ranks(one_rank, 1, str(packed))[0]
    assert len(one["tutti"]) == 6
    assert one["tutti"] == pytest.approx(one["plain"], rel=1e-10)
    assert one["tutti"][-1] < 0.9 * one["tutti"][0]
    assert one["lines"] == one["plain lines"]
    assert [line.split()[0] for line in one["lines"]] == ["epoch", "test"]
    assert [(name, size) for name, size, _ in one["values"]] == [("validation", 8), ("test", 8)]  # the test once

    two, other = run_ranks(two_ranks, 2, str(packed), str(tmp_path))
    assert two["losses"] == other["losses"]
    assert two["losses"] == pytest.approx(one["tutti"], rel=1e-10)
    assert two["lines"] == one["lines"]
    for (_, _, value), (_, _, expected) in zip(two["values"], one["values"], strict=True):
        assert value == pytest.approx(expected, rel=1e-10)
    assert list(map(len, two["resumed"])) == [3, 3]
    assert [loss for part in two["resumed"] for loss in part] == two["losses"]
    assert two["resumed lines"][-2:] == two["lines"]


@pytest.mark.long
def test_the_pair_agrees_in_bfloat16(packed: Path) -> None:
    losses, plain = run_ranks(one_rank_bfloat16, 1, str(packed))[0]
    assert losses == pytest.approx(plain, rel=1e-5)
