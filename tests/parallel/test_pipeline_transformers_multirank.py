"""Pipelines of models from `transformers`: their own code is followed, results are as on one device."""

import functools
from typing import Any

import pytest

from against_one import Trained, assert_agree
from trainer.several import on_ranks
from tutti.config.plan import PipelinePlan

pytest.importorskip("transformers")

from parallel import pipeline_transformers as models

pytestmark = pytest.mark.long

MODELS = {"gpt2": models.gpt2, "t5": models.t5}
"""The tied head, and two stacks that share an embedding; the matrix has more families."""


@functools.cache
def results(ranks: int) -> list[dict[str, Trained]]:
    mesh: dict[str, Any] = {"replicate": 1} if ranks == 1 else {"stage": ranks}
    plan = {"mesh": mesh, "batch": {"num_microbatches": 2}, "pipeline": PipelinePlan(schedule="1f1b")}
    return on_ranks({name: (make, plan) for name, make in MODELS.items()}, ranks, steps=2)


@pytest.mark.parametrize("name", MODELS)
def test_stages_of_transformers(name: str) -> None:
    assert_agree(results(1)[0][name], [one[name] for one in results(3)], 1e-11)
