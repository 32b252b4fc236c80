"""torch.distributed.checkpoint: what docs/decisions/dcp.md says it cannot do."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from harness import run_ranks
from torch_parts.limits import attempt, join_gloo, still_limited

RECORD = "dcp"


def values_of_each_rank(folder: Path) -> list[float]:
    """Every rank saves another value under one name, as generators and residuals are; returns what it loads."""
    rank, _ = join_gloo()
    dcp.save({"residual": torch.full((2,), float(rank))}, checkpoint_id=folder)
    state = {"residual": torch.zeros(2)}
    dcp.load(state, checkpoint_id=folder)
    return state["residual"].tolist()


def test_dcp_drops_values_that_differ_between_ranks(tmp_path: Path) -> None:
    loaded = run_ranks(values_of_each_rank, 2, tmp_path / "dcp")
    still_limited(loaded[0] == loaded[1], RECORD, "keeps or refuses values of one name that differ between ranks")


def disks_of_their_own(folder: Path) -> Any:
    """Every rank writes to a disk of its own, as hosts without a shared one do; returns what rank 0 loads."""
    rank, _ = join_gloo()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    state = {"weight": distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])}
    dcp.save(state, checkpoint_id=folder / str(rank))
    if rank:
        return "not asked"
    target = {"weight": torch.zeros(4)}
    return attempt(lambda: dcp.load(target, checkpoint_id=folder / "0", no_dist=True)) or target["weight"].tolist()


def test_dcp_needs_a_disk_that_all_ranks_share(tmp_path: Path) -> None:
    result = run_ranks(disks_of_their_own, 2, tmp_path)[0]
    still_limited("Error" in str(result) or "Exception" in str(result), RECORD, "saves from hosts that share no disk")


def test_the_metadata_of_dcp_is_a_pickle(tmp_path: Path) -> None:
    dcp.save({"x": torch.zeros(1)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    first = (tmp_path / "dcp" / ".metadata").read_bytes()[:1]
    still_limited(first == b"\x80", RECORD, "writes its index as plain data")
