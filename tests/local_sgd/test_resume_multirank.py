"""Replicas that differ in checkpoints: a resumed run goes on bit for bit; any other begins from the shared model."""

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import tutti
from harness import run_ranks
from local_sgd.replicas import MODELS, Seen, Told, train_on, train_twice
from local_sgd.simulated import simulate
from tutti.checkpoint import to_state_dict
from tutti.config import serialization
from tutti.parallel.layout import local_tensors

SAVED = {
    "local": Told(sync="local:2", optimizer="AdamW", rate=0.01, save_at=3, model="choosy", batch=9),
    "local, state averaged": Told(
        sync="local:period=2,optimizer_state=averaged", arguments={"momentum": 0.9}, save_at=3, model="conv", batch=25
    ),
    "local, moments corrected": Told(
        sync="local:period=2,optimizer_state=corrected",
        optimizer="AdamW",
        rate=0.01,
        save_at=3,
        model="choosy",
        batch=9,
    ),
    "post-local": Told(sync="post-local:period=2,after=2", optimizer="AdamW", rate=0.01, save_at=3),
    "post-local, before": Told(sync="post-local:period=2,after=4", arguments={"momentum": 0.9}, save_at=3),
    "post-local, in a code, before": Told(sync="post-local:period=2,after=4", compress="qsgd,bits=4", save_at=3),
    "post-local, in a code": Told(sync="post-local:period=2,after=2", compress="qsgd,bits=4", rate=0.01, save_at=3),
    "one-shot": Told(sync="one-shot", arguments={"momentum": 0.9}, save_at=3),
    "diloco": Told(sync="diloco:2", optimizer="AdamW", rate=0.01, save_at=3),
    "diloco, after a round": Told(sync="diloco:3", optimizer="AdamW", rate=0.01, save_at=3),
    "local, drawn levels": Told(sync="local:2", compress="qsgd,bits=4", arguments={"momentum": 0.9}, save_at=3),
    "local, kept back": Told(sync="local:2", compress="one-bit", optimizer="AdamW", rate=0.01, save_at=3),
    "local, matrices": Told(sync="local:2", compress="powersgd,rank=2", arguments={"momentum": 0.9}, save_at=3),
    "diloco, kept back": Told(sync="diloco:2", compress="bytegrad,feedback=true", rate=0.01, save_at=3),
    "local, under way": Told(
        sync="local:period=2,delay=2", arguments={"momentum": 0.9}, save_at=3, model="conv", batch=25
    ),
    "local, taken in": Told(sync="local:period=3,delay=1", optimizer="AdamW", rate=0.01, save_at=4, steps=8),
    "post-local, under way": Told(sync="post-local:period=2,after=2,delay=2", rate=0.01, save_at=5, steps=8),
    "drawn levels, under way": Told(sync="local:period=4,delay=3", compress="qsgd,bits=4", save_at=6, steps=9),
    "kept back, under way": Told(sync="local:period=2,delay=2", compress="one-bit", rate=0.01, save_at=5, steps=8),
    "matrices, under way": Told(sync="local:period=2,delay=2", compress="powersgd,rank=2", save_at=5, steps=8),
    "adasum": Told(sync="adasum:2", arguments={"momentum": 0.9}, save_at=3),
    "ring": Told(sync="ring", optimizer="AdamW", rate=0.01, save_at=3),
    "ring, sometimes": Told(sync="ring:2", model="conv", batch=25, save_at=3, steps=7),
    "shift-one": Told(sync="shift-one", arguments={"momentum": 0.9}, save_at=3),
    "push": Told(sync="push", optimizer="AdamW", rate=0.01, save_at=3),
    "elastic": Told(sync="elastic:2", optimizer="AdamW", rate=0.01, save_at=2),
    "elastic, under way": Told(sync="elastic", arguments={"momentum": 0.9}, save_at=3),
}


QUICK = (
    "local",
    "local, moments corrected",
    "local, drawn levels",
    "local, kept back",
    "local, matrices",
    "local, under way",
    "drawn levels, under way",
    "kept back, under way",
    "diloco, kept back",
    "post-local",
    "post-local, in a code, before",
    "diloco",
    "ring",
    "ring, sometimes",
    "push",
    "elastic, under way",
)


NAMES = {2: QUICK, 3: tuple(name for name in SAVED if name != "shift-one"), 4: tuple(SAVED)}
"""By number of ranks: the trainings that are resumed. Three replicas do not meet in pairs."""


@functools.cache
def resumed(size: int) -> list[dict[str, tuple[Seen, Seen]]]:
    return run_ranks(train_twice, size, {name: SAVED[name] for name in NAMES[size]}, size)


@pytest.mark.parametrize(
    ("size", "name"),
    [
        pytest.param(size, name, marks=() if size == 2 else pytest.mark.long)
        for size, names in NAMES.items()
        for name in names
    ],
)
def test_a_resumed_run_goes_on_bit_for_bit(size: int, name: str) -> None:
    told = SAVED[name]
    for one in resumed(size):
        whole, rest = one[name]
        assert rest.losses == whole.losses[told.save_at :]
        for step, expected in enumerate(whole.states[told.save_at :]):
            different = [key for key, value in expected.items() if not torch.equal(rest.states[step][key], value)]
            assert not different, f"step {step} after the checkpoint"
        assert rest.evaluation == whole.evaluation
        assert all(torch.equal(rest.after[key], value) for key, value in whole.after.items())


@pytest.mark.parametrize("name", ["local", "local, under way", "ring, sometimes", "elastic, under way", "diloco"])
def test_saving_changes_nothing(name: str) -> None:
    ranks = [one[name][0] for one in resumed(2)]
    states, _ = simulate(SAVED[name], ranks[0].batches, 2)
    for rank, seen in enumerate(ranks):
        for step, expected in enumerate(states):
            for key, value in expected[rank].items():
                torch.testing.assert_close(seen.states[step][key], value, rtol=1e-12, atol=1e-13, check_dtype=False)


def save_local(size: int, told: Told) -> tuple[Seen, dict[str, Any]]:
    """A training of local steps, and what its checkpoint has for one device."""
    from local_sgd.replicas import train

    seen = train(told, size)
    return seen, to_state_dict(Path(seen.saved))


def evaluate_from(told: Told, saved: str, size: int) -> dict[str, torch.Tensor]:
    """What a rank has once it has begun from a checkpoint."""
    from local_sgd.replicas import plan_of

    torch.set_default_dtype(torch.float64)
    os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / "begun")
    os.environ["TUTTI_PLAN"] = str(serialization.save(plan_of(told, size), Path.cwd() / f"plan-{os.getpid()}.json"))
    job = tutti.Job(global_batch_size=told.batch, resume=saved)
    build, data, loss_fn = MODELS[told.model]
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=told.rate, **told.arguments)
    model, _, _ = job.prepare(model, optimizer, data(), loss_fn)
    return {name: tensor.detach().clone() for name, tensor in local_tensors(model)}


def test_others_begin_from_the_mean(tmp_path: Path) -> None:
    told = Told(
        sync="local:4", arguments={"momentum": 0.9}, save_at=3, model="conv", batch=25, folder=str(tmp_path / "run")
    )
    ranks = run_ranks(save_local, 2, 2, told)
    plain = ranks[0][1]
    for key, value in ranks[0][0].states[2].items():
        if value.is_floating_point():
            expected = (value + ranks[1][0].states[2][key]) / 2
            torch.testing.assert_close(plain["model"][key], expected, rtol=1e-12, atol=1e-14)
    saved = ranks[0][0].saved
    sync = Told(arguments={"momentum": 0.9}, model="conv", batch=25)
    (one,) = run_ranks(train_on, 1, sync, saved, 1)
    three = run_ranks(train_on, 3, Told(**{**_fields(sync), "sync": "ring"}), saved, 3)
    assert one.losses[0] == pytest.approx(run_ranks(train_on, 2, sync, saved, 2)[0].losses[0], rel=1e-12)
    assert all(torch.equal(value, three[0].after[key]) for seen in three for key, value in seen.after.items())
    assert three[0].batches == one.batches


@pytest.mark.parametrize(("before", "after"), [("", "qsgd,bits=4"), ("one-bit", ""), ("qsgd,bits=4", "one-bit")])
def test_under_another_code_replicas_begin_from_the_mean(before: str, after: str, tmp_path: Path) -> None:
    told = Told(sync="local:4", compress=before, arguments={"momentum": 0.9}, save_at=3, folder=str(tmp_path / "run"))
    ranks = run_ranks(save_local, 2, 2, told)
    saved, mean = ranks[0][0].saved, ranks[0][1]["model"]
    other = Told(**{**_fields(told), "compress": after, "folder": "", "save_at": None, "steps": 3})
    for seen in run_ranks(evaluate_from, 2, other, saved, 2):
        assert all(torch.equal(seen[key], value) for key, value in mean.items() if key != "back.weight")  # tied


def _fields(told: Told) -> dict[str, object]:
    return {name: getattr(told, name) for name in told.__dataclass_fields__}
