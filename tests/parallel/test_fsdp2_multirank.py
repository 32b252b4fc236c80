"""Sharded by torch's fully_shard (FSDP2), N ranks compute what one device computes, or say what they do not."""

import functools
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from against_one import Subject, Trained, assert_agree, close, train
from harness import run_ranks
from parallel import habits
from parallel import shard_subjects as subjects
from parallel import test_shard_habits_multirank as written
from tutti.config.plan import LayoutRule, ShardingPlan
from tutti.errors import TuttiError
from tutti.optim.large_batch import LAMB
from tutti.parallel.sharding import fsdp2_units

RECOMPUTE = (LayoutRule(modules="blocks.*", recompute=True),)


def by_norms() -> Subject:
    """LAMB scales each layer's update by norms of the whole layer."""
    return replace(subjects.tied(), optimizer=LAMB, rate=0.02)


def contiguous() -> Subject:
    """As `subjects.convolutions`, without channels_last."""
    made = subjects.convolutions()
    return replace(made, model=lambda: made.model().to(memory_format=torch.contiguous_format))


class Edited(nn.Module):
    """Blocks return views, which the model changes in place; so does the loss with the model's output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(subjects.WORDS, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, subjects.WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # (batch, 4)
        x = self.embed(tokens)
        for block in self.blocks:
            y = block(x)
            assert y._is_view()
            y += x
            x = y
        return self.head(x).unflatten(0, (-1, 1))[:, 0, -1]  # (batch, words), a view


def edited_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    assert output._is_view()
    output *= 2
    return F.cross_entropy(output, target)


def edited() -> Subject:
    return Subject(model=Edited, data=subjects.words(), loss_fn=edited_loss, batch=7)


CASES: dict[str, dict[str, Any]] = {
    "tied, unused, a scalar": {"make": subjects.tied},
    "accumulation, clipping, momentum": {"make": subjects.accumulated},
    "blocks that repeat, ties between blocks, frozen, LSTM": {"make": subjects.repeating},
    "recompute, accumulation": {"make": subjects.accumulated, "layout": RECOMPUTE},
    "recompute of blocks that repeat": {"make": subjects.repeating, "layout": RECOMPUTE},
    "a mean over weights": {"make": subjects.counted},
    "a penalty on a block's weights": {"make": subjects.penalised},
    "batch statistics, few channels": {"make": contiguous},
    "parameters on the host": {"make": subjects.tied, "offload": "parameters"},
    "norms of whole layers": {"make": by_norms},
    "views changed in place": {"make": edited, "levels": (3,)},
}


def held(run: Any) -> dict[str, Any]:
    """What shards, and the values of parameters and of optimizer state on this rank at rest."""
    values = [value for one in run.parallel.optimizers for state in one.state.values() for value in state.values()]
    states = [value for value in values if isinstance(value, torch.Tensor) and value.dim()]
    return {
        "engine": type(run.parallel.replica.shards).__name__,
        "plan": run.parallel.plan.sharding.engine,
        "parameters": sum(parameter.numel() for parameter in run.parallel.model.parameters()),
        "states": sum(state.numel() for state in states),
        "sent": run.parallel.replica.sent_nbytes,
    }


def train_all(mesh: dict[str, int], levels: tuple[int, ...], engine: str) -> dict[tuple[int, str], Trained]:
    """Every case at every level, one after another in the same ranks."""
    results = {}
    for level in levels:
        for name, case in CASES.items():
            if level not in case.get("levels", (2, 3)):
                continue
            os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{len(results)}")
            fields = {"mesh": mesh, "layout": case.get("layout", (LayoutRule(),))}
            sharding = ShardingPlan(level=level, offload=case.get("offload", "none"), engine=engine)  # type: ignore[arg-type]
            results[level, name] = train(case["make"], {**fields, "sharding": sharding}, 3, torch.float64, held)
    return results


@functools.cache
def results(mesh: tuple[tuple[str, int], ...]) -> list[dict[tuple[int, str], Trained]]:
    """What every rank of a mesh got; each mesh is launched once."""
    world_size = 1
    for _, degree in mesh:
        world_size *= degree
    return run_ranks(train_all, world_size, dict(mesh), (2, 3) if world_size > 1 else (3,), "fsdp2")


@pytest.mark.long
@pytest.mark.parametrize("mesh", [{"shard": 2}, {"shard": 3}, {"replicate": 2, "shard": 2}], ids=str)
@pytest.mark.parametrize("level", [2, 3])
def test_same_as_one_device(mesh: dict[str, int], level: int) -> None:
    one, many = results((("replicate", 1),)), results(tuple(mesh.items()))
    for name in [name for name, case in CASES.items() if level in case.get("levels", (2, 3))]:
        try:
            assert_agree(one[0][3, name], [rank[level, name] for rank in many])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def kept_views() -> str:
    """What is said at level 2 of blocks that return views which the model changes in place."""
    with pytest.raises(TuttiError) as refused:
        train(edited, {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=2, engine="fsdp2")}, 1, torch.float64)
    return str(refused.value)


@pytest.mark.long
def test_views_changed_in_place_are_refused_where_backward_gathers_nothing() -> None:
    for said in run_ranks(kept_views, 2):
        assert "got another gradient after its block's backward had ended" in said
        assert "sharding.engine = tutti" in said


@pytest.mark.long
def test_ranks_hold_their_part() -> None:
    """Parameters and AdamW's two moments; what has no dims stays whole on every rank."""
    name, many = "tied, unused, a scalar", results((("shard", 2),))
    whole = results((("replicate", 1),))[0][3, name].facts
    for level in (2, 3):
        facts = [rank[level, name].facts for rank in many]
        assert {fact["engine"] for fact in facts} == {"FullyShard"}
        assert {fact["plan"] for fact in facts} == {"fsdp2"}
        assert sum(fact["parameters"] for fact in facts) == whole["parameters"] + 1
        assert max(fact["parameters"] for fact in facts) <= 0.55 * whole["parameters"]
        assert max(fact["states"] for fact in facts) <= 0.55 * whole["states"]


KEPT = [maker for maker in written.SAME_ON_ALL_RANKS if maker is not written.reentrant]
REFUSED = {
    written.reentrant: "got another gradient after its block's backward had ended",
    written.carried: "'blocks.0' through what an earlier step computed",
    written.routed: "the same blocks in the same order, but one rank comes to",
}


@pytest.mark.long
@pytest.mark.parametrize("level", [2, 3])
def test_what_scripts_do_with_models(level: int) -> None:
    """Graphs of gradients, outputs of inner modules, modules without their blocks, freezing: right, or refused."""
    plan = {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=level, engine="fsdp2")}  # type: ignore[arg-type]
    expected = run_ranks(habits.all_plain, 1, KEPT)[0]
    for got in run_ranks(habits.on_rank, 2, [*KEPT, *REFUSED], plan, "on"):
        for maker, one, values in zip(KEPT, expected, got, strict=False):
            assert not isinstance(values, str), f"{maker.__name__}: {values}"
            close(torch.tensor(values.losses), torch.tensor(one.losses), 1e-12, maker.__name__)
            for name, value in one.state.items():
                close(values.state[name], value, 1e-12, f"{maker.__name__}: {name}")
        for message, words in zip(got[len(KEPT) :], REFUSED.values(), strict=True):
            assert words in str(message)


def precise(precision: str, plans: list[dict[str, Any]]) -> list[tuple[list[float], int]]:
    """Losses in float32 under autocast, and the number of units in lower precision, by plan."""
    fsdp2_units.LEAST_LOWERED_NUMEL = 100
    found = []
    for fields in plans:
        os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{precision}-{len(found)}")
        trained = train(subjects.accumulated, {**fields, "precision": precision}, 8, torch.float32, lowered)
        found.append((trained.losses, trained.facts["lowered"]))
    return found


def lowered(run: Any) -> dict[str, Any]:
    units = getattr(getattr(run.parallel.replica.shards, "_sharded", None), "units", [])
    return {"lowered": sum(unit.group.mp_policy.param_dtype is not None for unit in units)}


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_lower_precision(precision: str) -> None:
    """Large layers are gathered in it; products are those of replicas, sums differ in float32 rounding."""
    sharded = [{"mesh": {"shard": 2}, "sharding": ShardingPlan(level=level, engine="fsdp2")} for level in (2, 3)]  # type: ignore[arg-type]
    for (replicated, none), *others in run_ranks(precise, 2, precision, [{"mesh": {"replicate": 2}}, *sharded]):
        assert none == 0
        for losses, units in others:
            assert units == 6
            assert losses == pytest.approx(replicated, rel=2e-3)


def quick(refused: list[str]) -> tuple[list[Trained], list[str]]:
    """Two cases of level 3, and the sentences of what is refused."""
    fields: dict[str, Any] = {"mesh": {"shard": 2}, "sharding": ShardingPlan(level=3, engine="fsdp2")}
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        trained, messages = [train(each, fields, 2, torch.float64, held) for each in QUICK], []
    assert not [warning for warning in shown if "returned a view" in str(warning.message)]
    for number, name in enumerate(refused):
        os.environ["TUTTI_RUN_FOLDER"] = str(Path.cwd() / f"run-{number}")
        os.environ["TUTTI_TIMEOUT_S"] = "20"
        try:
            train(getattr(subjects, name, None) or globals()[name], fields, 1, torch.float64)
            messages.append("nothing")
        except TuttiError as error:
            messages.append(str(error))
    return trained, messages


def mixed() -> Subject:
    """Parameters of two dtypes in one block."""

    def model() -> torch.nn.Module:
        made = subjects.Tied()
        made.blocks[1].norm.float()
        return made

    return replace(subjects.tied(), model=model)


def plain(subject: Any) -> Trained:
    return train(subject, {}, 2, torch.float64)


QUICK = (subjects.tied, subjects.repeating, edited)


def test_two_cases_and_what_is_refused_by_name() -> None:
    expected = {
        "branching": "the same blocks in the same order, but one rank comes to",
        "convolutions": "sharding.engine = fsdp2: parameter 'body.0.0.weight' is not contiguous (channels_last?)",
        "mixed": "FSDP2 reduces the gradients of 'blocks.1' in one dtype",
        "bag": "'embed.weight' has sparse gradients",
        "adafactor": "Adafactor does not treat the elements of a parameter one by one",
    }
    many = run_ranks(quick, 2, list(expected))
    for number, subject in enumerate(QUICK):
        assert_agree(run_ranks(plain, 1, subject)[0], [trained[number] for trained, _ in many])
        assert [trained[number].facts["engine"] for trained, _ in many] == ["FullyShard"] * 2
    for _, messages in many:
        for message, words in zip(messages, expected.values(), strict=True):
            assert words in message
