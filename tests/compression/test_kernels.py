"""How kernels are loaded: late, kept on disk, and usable in processes that were forked."""

import importlib
import multiprocessing
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from filelock import FileLock

from compression.codecs import gradient
from harness import run_ranks
from tutti.comm.world import join_world
from tutti.compression.one_bit import OneBit


def test_importing_tutti_or_a_codec_loads_no_numba_and_no_triton() -> None:
    code = (
        "import sys, tutti, tutti.compression.one_bit, tutti.compression.dense_reducers; "
        "import tutti.compression.sparse_reducer; "
        "sys.exit(not sys.modules.keys().isdisjoint({'numba', 'triton'}))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def coded() -> torch.Tensor:
    codec, values = OneBit(), gradient("normal", 5000)
    return codec.encode(values, codec.state(5000, dtype=torch.float32))


def _send(sender: Connection) -> None:
    sender.send_bytes(coded().numpy().tobytes())


def test_kernels_work_in_a_process_forked_after_they_were_used() -> None:
    expected = coded()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(sender,))
    child.start()
    try:
        assert receiver.poll(60)
        assert receiver.recv_bytes() == expected.numpy().tobytes()
    finally:
        child.join(10)
    assert child.exitcode == 0


def made_of(path: Path) -> Any:
    """A kernel of a file, whose folder keeps what is compiled."""
    from tutti.compression.cpu_kernels import kernel

    sys.path.insert(0, str(path.parent))
    return kernel(importlib.import_module(path.stem).summed)


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """A file with a function that was never compiled."""
    path = tmp_path / "never_compiled.py"
    path.write_text("def summed(x):\n    return x.sum() + x[::2].prod()\n")
    return path


def uses(path: Path) -> tuple[float, int, int]:
    """All ranks want the kernel at once: its result, and what of it was read and what compiled."""
    join_world()
    made = made_of(path)
    dist.barrier()
    found = float(made(np.arange(1.0, 5.0)))
    return found, sum(made.stats.cache_hits.values()), sum(made.stats.cache_misses.values())


def test_one_process_compiles_and_the_others_wait_for_it(fresh: Path) -> None:
    found = run_ranks(uses, 3, fresh)
    assert [one[0] for one in found] == [13.0] * 3
    assert sorted(one[1:] for one in found) == [(0, 1), (1, 0), (1, 0)]


def test_a_lock_that_is_never_given_back_stops_nobody(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tutti.compression import cpu_kernels

    monkeypatch.setattr(cpu_kernels, "PATIENCE_S", 0.05)
    monkeypatch.setattr(sys, "path", [*sys.path])
    made = made_of(fresh)
    with FileLock(Path(made.stats.cache_path) / "never_compiled.summed.lock"):
        assert made(np.arange(1.0, 5.0)) == 13.0
