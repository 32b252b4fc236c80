"""A mode that another package registers works everywhere: text, plan files, refusals, prediction, run and report."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from cost_model.examples import cluster, link, mlp, plan
from harness import run_ranks
from local_sgd import toy_mode
from local_sgd.replicas import Told, plan_of
from tutti.config import serialization
from tutti.config.consistency_modes import (
    CONSISTENCY_MODES,
    ConsistencyMode,
    Relaxed,
    register_consistency_mode,
    with_mode_defaults,
)
from tutti.config.plan import Plan, SyncPlan
from tutti.config.refusals import check_plan
from tutti.config.registry import load_factory
from tutti.config.sync_notation import format_sync, parse_sync
from tutti.cost_model import predict
from tutti.errors import PlanError
from tutti.reporting.build_report import build_report

TEXT = f"{toy_mode.NAME}:period=2,share=0.25"
N = 4.0 * 3 * 512 * 512
"""Bytes of the example's parameters."""


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register_consistency_mode(toy_mode.ENTRY)
    yield
    CONSISTENCY_MODES.remove(toy_mode.NAME)


def toy_sync() -> SyncPlan:
    return SyncPlan(mode=toy_mode.NAME, relaxed=Relaxed(period=2, options={"share": 0.25}))


def test_text_and_plan_files_state_the_mode_and_its_parameters() -> None:
    assert parse_sync(TEXT) == parse_sync(f"{toy_mode.NAME}:2,0.25") == toy_sync()
    assert format_sync(toy_sync()) == TEXT
    defaults = with_mode_defaults(toy_mode.NAME, Relaxed(period=2))
    assert defaults == Relaxed(period=2, options={"share": 0.5})
    stated = plan_of(Told(sync=TEXT), 2)
    check_plan(stated)
    assert serialization.loads(Plan, serialization.dumps(stated)) == stated


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{toy_mode.NAME}:2,0", "sync.relaxed.share = 0; give a number above 0"),
        (f"{toy_mode.NAME}:1", "period = 1; give a number of updates of 2 or more"),
        (toy_mode.NAME, "needs sync.relaxed.period"),
        (f"{toy_mode.NAME}:2,bound=3", "which has period, share"),
        ("toy-halfwei:2", "there is no mode 'toy-halfwei'"),
    ],
)
def test_a_wrong_parameter_or_name_is_refused(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        parse_sync(text)


def test_parameters_of_another_mode_and_unknown_modes_are_refused() -> None:
    with pytest.raises(PlanError, match=r'share = 0.5 with sync.mode = "local", which has period'):
        SyncPlan(mode="local", relaxed=Relaxed(period=2, options={"share": 0.5}))
    with pytest.raises(PlanError, match="there is no such mode; choose from synchronous, local"):
        SyncPlan(mode="lokal")


def test_what_all_diverged_replicas_exclude_is_refused() -> None:
    with pytest.raises(PlanError, match=r"mesh.shard = 2: ranks along shard share what they train"):
        check_plan(replace(plan_of(Told(sync=TEXT), 2), mesh={"replicate": 2, "shard": 2}))


def test_the_prediction_has_the_entrys_traffic() -> None:
    machines = cluster(devices_per_node=1, count=4, links=(link("node"), link("network", 1e-4, 1.25e8)))
    toy, local = (predict(mlp(), machines, plan(64, 4, sync=parse_sync(text))) for text in (TEXT, "local:2"))
    assert toy.sent_nbytes_per_rank == local.sent_nbytes_per_rank == pytest.approx(1.5 * N / 2)
    assert toy.memory.total - local.memory.total == pytest.approx(N)  # one vector more during an exchange
    faster = local.step_time_s.value - toy.step_time_s.value
    assert faster == pytest.approx(N / 20e9 / 2, rel=1e-6)  # five passes through memory in place of six


def test_two_ranks_train_with_it_and_the_report_names_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    seen = run_ranks(toy_mode.train_with_it, 2, Told(sync=TEXT, steps=4, folder=str(folder)))
    assert torch.equal(_vector(seen[0].after), _vector(seen[1].after))  # all end with the mean
    alone = run_ranks(toy_mode.train_with_it, 2, Told(sync="one-shot", steps=4, folder=str(tmp_path / "alone")))
    before = [_vector(rank.states[1]) for rank in alone]  # two updates without any exchange
    after = [_vector(rank.states[1]) for rank in seen]
    mean = (before[0] + before[1]) / 2
    for own, moved in zip(before, after, strict=True):
        torch.testing.assert_close(moved, torch.lerp(own, mean, 0.25))
    report = build_report(folder)
    assert TEXT in report.plan
    assert report.replicas["disagreement"].value is not None


def test_every_mode_has_a_factory() -> None:
    for name, mode in CONSISTENCY_MODES.items():
        assert (mode.make is None) == (mode.traffic is None) == (name == "synchronous")
        assert mode.make is None or callable(load_factory(mode.make))


def test_a_name_is_registered_once() -> None:
    with pytest.raises(PlanError, match="already registered"):
        register_consistency_mode(ConsistencyMode(name="local"))


def _vector(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.utils.parameters_to_vector(list(tensors.values()))
