"""Plans that compress sums of gradients, on real ranks: what loses nothing is one device's run, what loses is accounted
for, and all ranks end with the same bits.
"""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from against_one import Subject, Trained, assert_agree
from runtime.several import Case, on_ranks
from runtime.training import Mlp
from tutti.runtime.metrics import read_rows
from tutti.spec.compression import parse_compression
from tutti.spec.plan import Sync

STEPS = 20


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(50, 6, generator=draw), torch.randint(3, (50,), generator=draw))


def tied() -> Subject:
    """A tied weight, and a parameter that no loss uses."""
    return Subject(model=Mlp, data=data(), loss_fn=F.cross_entropy, batch=8)


def look(run: Any) -> dict[str, Any]:
    steps = [row for row in read_rows(run.folder.metrics) if row["kind"] == "step"] if run.world.is_main else []
    compressor = run.replica.compressor
    wires = [] if compressor is None else [one.wire.sent_nbytes for one in compressor.exchanges.values()]
    state = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    return {"steps": steps, "wires": wires, "state": state}


def case(words: str | None, make: Any = tied, bucket_nbytes: int = 400, **plan: Any) -> Case:
    compress = None if words is None else parse_compression(words)
    return make, {"sync": Sync(bucket_nbytes=bucket_nbytes, compress=compress), **plan}


@functools.cache
def alone() -> Trained:
    return on_ranks({"one": case(None)}, 1, steps=STEPS)[0]["one"]


LOSSLESS = ("float64", "powersgd,rank=50")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_what_loses_nothing_is_the_run_of_one_device(world_size: int) -> None:
    cases = {words: case(words, mesh={"replicate": world_size}) for words in LOSSLESS}
    found = on_ranks(cases, world_size, steps=STEPS)
    for words in LOSSLESS:
        assert_agree(alone(), [rank[words] for rank in found])


LOSSY = (
    "bfloat16,feedback=true", "float16", "bytegrad", "qsgd", "terngrad", "one-bit", "top-k", "dgc", "top16-q4", "powersgd",
)  # fmt: skip


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_method_ends_with_the_same_bits_on_all_ranks(world_size: int) -> None:
    def made(words: str) -> Case:
        return case(words, plain if words == "dgc" else tied, mesh={"replicate": world_size})

    found = on_ranks({words: made(words) for words in LOSSY}, world_size, steps=6, look=look)
    for words in LOSSY:
        first, *others = [rank[words].facts["state"] for rank in found]
        for other in others:
            for name, value in first.items():
                assert torch.equal(value, other[name]), (words, name)


def plain() -> Subject:
    return Subject(model=Mlp, data=data(), loss_fn=F.cross_entropy, optimizer=torch.optim.SGD, rate=0.1)
