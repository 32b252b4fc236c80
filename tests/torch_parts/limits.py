"""What the tests of torch's own parts share: a world of Gloo ranks, and the message when a limitation is gone."""

import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

TIMEOUT_S = 8


def still_limited(holds: bool, record: str, learned: str) -> None:
    """Fail when torch has learned what a decision record says it cannot do."""
    assert holds, f"torch {torch.__version__} {learned}: reopen docs/decisions/{record}.md"


def join_gloo() -> tuple[int, int]:
    """Open the default group of this rank's world, without tutti; returns (rank, world size)."""
    warnings.filterwarnings("ignore")
    dist.init_process_group(
        "gloo",
        init_method=os.environ["TUTTI_RENDEZVOUS"],
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    return dist.get_rank(), dist.get_world_size()


def attempt(function: Callable[[], Any]) -> Any:
    """What a function returns, or its error as "Type: message"."""
    try:
        return function()
    except (Exception, CheckpointException) as error:  # DCP's is no Exception
        return f"{type(error).__name__}: {error}"
