"""Bucket sizes by measurement: ranks try and choose alike, whatever their clocks say, and values stay as they are."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness import run_ranks
from tutti.config.compression import parse_compression
from tutti.config.option_syntax import with_bucket_size
from tutti.config.plan import BatchPlan, Plan
from tutti.config.refusals import check_plan
from tutti.errors import PlanError
from tutti.parallel.data import bucket_size_tuner
from tutti.parallel.data.bucket_size_tuner import MIB, fastest_size, sizes_to_try

KIB = 2**10
PLAN = Plan(batch=BatchPlan(global_batch_size=8), mesh={"replicate": 2})


def test_sizes_that_cut_alike_are_tried_once() -> None:
    assert sizes_to_try(25 * MIB, 0) == []
    assert sizes_to_try(25 * MIB, MIB) == [25 * MIB]
    assert sizes_to_try(25 * MIB, 5 * MIB) == [25 * MIB, 2 * MIB]
    assert sizes_to_try(25 * MIB, 30 * MIB) == [25 * MIB, 2 * MIB, 8 * MIB, 100 * MIB]
    assert sizes_to_try(3 * MIB, 1000 * MIB) == [3 * MIB, 2 * MIB, 8 * MIB, 25 * MIB, 100 * MIB]


def test_the_stated_size_stays_unless_another_is_clearly_quicker() -> None:
    assert fastest_size({25: 1.0, 2: 0.99, 8: 1.5}, 25) == 25
    assert fastest_size({25: 1.0, 2: 0.97, 8: 0.9}, 25) == 8


def test_words() -> None:
    assert with_bucket_size(PLAN, None) == PLAN
    assert with_bucket_size(PLAN, "auto").sync.bucket_sizes == "measured"
    stated = with_bucket_size(with_bucket_size(PLAN, "auto"), "0.5").sync
    assert (stated.bucket_nbytes, stated.bucket_sizes) == (MIB // 2, "stated")
    for text in ("0", "-1", "many", "nan", "inf", "1e-9"):
        with pytest.raises(PlanError, match="give a size in MiB above 0, or auto"):
            with_bucket_size(PLAN, text)


def test_codes_need_a_stated_size() -> None:
    with pytest.raises(PlanError, match="state a size"):
        check_plan(with_bucket_size(PLAN, "auto").compressed(parse_compression("bfloat16")))


def train(settings: dict[str, str], clocks: list[dict[int, float]], steps: int) -> dict[str, Any]:
    """Losses and parameters of some steps, sizes of the buckets before each, and the rows that were written.

    `clocks`: for each rank, seconds of a step by size. Gradients are some KiB, and so are the sizes that are tried.
    """
    import tutti

    os.environ.update(settings)
    bucket_size_tuner.TRIED = (4 * KIB, 16 * KIB, 64 * KIB)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)], nn.BatchNorm1d(32), nn.Linear(32, 4))
    model.register_parameter("unused", nn.Parameter(torch.ones(5)))
    draw = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(12 * steps, 32, generator=draw), torch.arange(12 * steps) % 4)
    job = tutti.Job(global_batch_size=12, num_microbatches=2, seed=0, clip_norm=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, _, loader = job.prepare(model, optimizer, data, nn.functional.cross_entropy)
    run, now = job._run(), [0.0]

    def clock(_: object) -> float:
        """By the size that is in use: how long the step took that has begun."""
        if clocks:
            now[0] += clocks[job.rank].get(run.parallel.replica._cap, 1.0)
        return now[0]

    bucket_size_tuner._now = clock
    caps, losses = [], []
    for _ in job.epochs(1):
        for batch in loader:
            caps.append(run.parallel.replica._cap)
            losses.append(job.step(batch))
    path = Path(os.environ["TUTTI_RUN_FOLDER"]) / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if job.is_main else []
    values = {name: value.clone() for name, value in model.state_dict().items()}
    return {"caps": caps, "losses": losses, "values": values, "rows": [row for row in rows if row["kind"] == "buckets"]}


STEPS = 3 + 2 * 4 * 5 + 3
CLOCKS = [
    {25 * MIB: 5.0, 4 * KIB: 1.0, 16 * KIB: 2.0, 64 * KIB: 5.0},
    {25 * MIB: 3.0, 4 * KIB: 4.0, 16 * KIB: 3.0, 64 * KIB: 2.0},
    {25 * MIB: 3.0, 4 * KIB: 1.0, 16 * KIB: 1.0, 64 * KIB: 1.0},
]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_choose_alike_and_no_bit_changes_in_shared_memory(ranks: int) -> None:
    stated = run_ranks(train, ranks, {}, [], STEPS)
    found = run_ranks(train, ranks, {"TUTTI_BUCKET_MB": "auto"}, CLOCKS[:ranks], STEPS)
    for one in found:
        assert one["caps"] == found[0]["caps"]
        assert one["losses"] == stated[0]["losses"]
        for name, value in stated[0]["values"].items():
            assert torch.equal(one["values"][name], value)
    tried = [25 * MIB, 4 * KIB, 16 * KIB]  # 64 KiB hold all gradients, as 25 MiB do
    turns = [size for size in tried * 2 for _ in range(5)]
    assert found[0]["caps"][:3] == [25 * MIB] * 3
    assert found[0]["caps"][3 : 3 + len(turns)] == turns
    assert set(found[0]["caps"][3 + len(turns) :]) == {16 * KIB}  # 3 s on the slowest; 4 KiB: 4 s, 25 MiB: 5 s
    (row,) = found[0]["rows"]
    assert row["chosen_mib"] == 16 / 1024
    assert row["step_s"] == {"25": 5.0, "0.00390625": 4.0, "0.015625": 3.0}


@pytest.mark.long
def test_through_a_process_group_only_rounding_changes() -> None:
    off = {"TUTTI_SHARED_MEMORY": "off"}
    stated = run_ranks(train, 3, off, [], STEPS)
    found = run_ranks(train, 3, off | {"TUTTI_BUCKET_MB": "auto"}, CLOCKS, STEPS)
    assert found[0]["caps"][-1] == 16 * KIB
    assert found[2]["losses"] == pytest.approx(stated[0]["losses"], rel=1e-4)


def test_one_rank_has_nothing_to_try() -> None:
    (alone,) = run_ranks(train, 1, {"TUTTI_BUCKET_MB": "auto"}, CLOCKS[:1], 8)
    assert set(alone["caps"]) == {25 * MIB}
    assert alone["rows"] == []
