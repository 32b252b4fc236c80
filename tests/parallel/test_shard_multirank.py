"""Sharded at every level, N ranks compute what one device computes, and hold what arithmetic says."""

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from against_one import Trained, assert_agree, train
from harness import run_ranks
from parallel import shard_subjects as subjects
from tutti.comm import shared_segment
from tutti.config.plan import LayoutRule, ShardingPlan
from tutti.errors import TuttiError
from tutti.parallel.layout import to_local

pytestmark = pytest.mark.long

RECOMPUTE = (LayoutRule(modules="blocks.*", recompute=True),)

CASES: dict[str, dict[str, Any]] = {
    "tied, unused, a scalar": {"make": subjects.tied},
    "accumulation, clipping, momentum": {"make": subjects.accumulated},
    "ranks take different branches": {"make": subjects.branching},
    "blocks that repeat, ties between blocks, frozen, LSTM": {"make": subjects.repeating},
    "batch statistics, few channels": {"make": subjects.convolutions},
    "recompute, accumulation": {"make": subjects.accumulated, "layout": RECOMPUTE},
    "recompute of blocks that repeat": {"make": subjects.repeating, "layout": RECOMPUTE},
    "a penalty on a block's weights": {"make": subjects.penalised},
    "states on the host": {"make": subjects.tied, "offload": "optimizer"},
}
WHOLE_ONLY = {
    "an optimizer of whole matrices": {"make": subjects.adafactor},
    "sparse gradients": {"make": subjects.bag},
}
MESHES: list[dict[str, int]] = [{"shard": 2}, {"shard": 3}, {"replicate": 2, "shard": 2}, {"shard": 4}]
LEVELS = (1, 2, 3)


def cases_of(level: int) -> dict[str, dict[str, Any]]:
    return {**CASES, **WHOLE_ONLY} if level == 1 else CASES


def held(run: Any) -> dict[str, Any]:
    """Values of parameters and of optimizer state on this rank at rest."""
    parameters = sum(to_local(p).numel() for p in run.parallel.model.parameters())
    states = [s for one in run.parallel.optimizers for state in one.state.values() for s in state.values() if s.dim()]
    return {"parameters": parameters, "states": sum(s.numel() for s in states)}


def train_all(mesh: dict[str, int], levels: tuple[int, ...]) -> dict[tuple[int, str], Trained]:
    """Every case at every level, one after another in the same ranks."""
    results = {}
    for level in levels:
        for name, case in cases_of(level).items():
            os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{len(results)}")
            fields = {"mesh": mesh, "layout": case.get("layout", (LayoutRule(),))}
            sharding = ShardingPlan(level=level, offload=case.get("offload", "none"))  # type: ignore[arg-type]
            results[level, name] = train(case["make"], {**fields, "sharding": sharding}, 3, torch.float64, held)
    return results


@functools.cache
def results(mesh: tuple[tuple[str, int], ...]) -> list[dict[tuple[int, str], Trained]]:
    """What every rank of a mesh got; each mesh is launched once."""
    world_size = 1
    for _, degree in mesh:
        world_size *= degree
    return run_ranks(train_all, world_size, dict(mesh), LEVELS if world_size > 1 else (1,))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_same_as_one_device(mesh: dict[str, int], level: int) -> None:
    one, many = results((("replicate", 1),)), results(tuple(mesh.items()))
    for name in cases_of(level):
        try:
            assert_agree(one[0][1, name], [rank[level, name] for rank in many])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def train_by_messages(mesh: dict[str, int]) -> dict[tuple[int, str], Trained]:
    os.environ["TUTTI_SHARED_MEMORY"] = "off"
    return train_all(mesh, LEVELS)


@pytest.mark.parametrize("mesh", [{"shard": 2}, {"shard": 3}], ids=str)
def test_same_as_one_device_by_messages(mesh: dict[str, int]) -> None:
    """As between hosts: two ranks add rows where they lie, three lay theirs beside the others'."""
    one, many = results((("replicate", 1),)), run_ranks(train_by_messages, mesh["shard"], mesh)
    for level in LEVELS:
        for name in cases_of(level):
            assert_agree(one[0][1, name], [rank[level, name] for rank in many])


def train_on_hosts(hosts: tuple[int, ...]) -> dict[tuple[int, str], Trained]:
    own = [host for host, ranks in enumerate(hosts) for _ in range(ranks)][int(os.environ["RANK"])]
    shared_segment.host_identity = lambda: f"host {own}"
    return train_all({"shard": sum(hosts)}, LEVELS)


@pytest.mark.parametrize("hosts", [(2, 2), (1, 2)], ids=str)
def test_same_as_one_device_over_hosts(hosts: tuple[int, ...]) -> None:
    """What all of a host need crosses to it once, what is summed is summed inside hosts first."""
    one, many = results((("replicate", 1),)), run_ranks(train_on_hosts, sum(hosts), hosts)
    for level in LEVELS:
        for name in cases_of(level):
            assert_agree(one[0][1, name], [rank[level, name] for rank in many])


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ranks_hold_their_part(mesh: dict[str, int]) -> None:
    """Parameters and optimizer state at rest, in all: AdamW keeps two values for each."""
    name, degree = "batch statistics, few channels", mesh["shard"]
    many = results(tuple(mesh.items()))
    whole = results((("replicate", 1),))[0][1, name].facts
    for level in LEVELS:
        facts = [rank[level, name].facts for rank in many]
        for part in ("parameters", "states"):
            expected = whole[part] / degree if part == "states" or level > 1 else whole[part]
            assert max(fact[part] for fact in facts) <= 1.1 * expected + 8, (level, part)
            shards = sum(fact[part] for fact in facts[:degree]) if expected < whole[part] else facts[0][part]
            assert shards == whole[part], (level, part)


def precise(precision: str, plans: list[tuple[dict[str, int], int]]) -> list[list[float]]:
    """Losses in float32 under autocast, by plan."""
    found = []
    for mesh, level in plans:
        os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{precision}-{len(found)}")
        fields = {"mesh": mesh, "sharding": ShardingPlan(level=level), "precision": precision}  # type: ignore[arg-type]
        trained = train(subjects.accumulated, fields, 8, torch.float32)
        found.append(trained.losses)
    return found


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_lower_precision(precision: str) -> None:
    """Sharded or replicated, ranks make the same products in lower precision; sums differ in float32 rounding."""
    plans = [({"replicate": 2}, 1), *(({"shard": 2}, level) for level in LEVELS)]
    for replicated, *sharded in run_ranks(precise, 2, precision, plans):
        for losses in sharded:
            assert losses == pytest.approx(replicated, rel=2e-3)


def refused(cases: list[tuple[str, int]]) -> list[str]:
    messages = []
    for number, (name, level) in enumerate(cases):
        os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{number}")
        fields: dict[str, Any] = {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=level)}  # type: ignore[arg-type]
        if name == "parameters on the host":
            fields["sharding"] = ShardingPlan(level=1, offload="parameters")
        try:
            train(getattr(subjects, name, subjects.tied), fields, 1, torch.float64)
            messages.append("nothing")
        except TuttiError as error:
            messages.append(str(error))
    return messages


def test_what_cannot_work_is_refused_on_all_ranks() -> None:
    expected = {
        ("adafactor", 3): "Adafactor does not treat the elements of a parameter one by one",
        ("bag", 2): "'embed.weight' has sparse gradients",
        ("parameters on the host", 1): 'offload = "parameters" needs sharding level 2 or 3',
    }
    for messages in run_ranks(refused, 2, list(expected)):
        for message, words in zip(messages, expected.values(), strict=True):
            assert words in message
