"""What exchanges between ranks consist of: how many rounds, and between two ranks codes of the whole."""

from typing import Any

import pytest
import torch

from harness import run_ranks
from tutti.comm.world import join_world
from tutti.compression.codec_state import rank_seed
from tutti.compression.codecs import make_reducer, round_count
from tutti.compression.dense_reducers import AllGatherReducer, TwoPhaseReducer
from tutti.compression.qsgd import qsgd
from tutti.compression.reducer import wait_all
from tutti.config.compression import all_reduce_sent_nbytes, parse_compression

WORDS = (
    "float64", "bfloat16", "bytegrad,feedback=true", "qsgd,bits=4", "terngrad", "one-bit", "top-k,density=0.1",
    "top-k,density=0.1,sparse=true", "dgc,density=0.1", "top16-q4", "powersgd,rank=1",
)  # fmt: skip
NUMEL, SEED = 1111, 5


def made(words: str) -> Any:
    like = {"group": None, "dtype": torch.float64, "device": torch.device("cpu")}
    return make_reducer(parse_compression(words), [(101, 11)], **like, seed=SEED)  # type: ignore[arg-type]


def values(rank: int) -> torch.Tensor:
    return torch.randn(NUMEL, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def exchanged(words: str) -> tuple[str, int, int, torch.Tensor]:
    """(kind, rounds, bytes sent, sum)."""
    flat, exchange, rounds = values(join_world().rank), made(words), 0
    for works in exchange.rounds(flat):
        wait_all(works)
        rounds += 1
    return type(exchange).__name__, rounds, exchange.collectives.sent_nbytes, flat


def all_exchanged() -> dict[str, tuple[str, int, int, torch.Tensor]]:
    return {words: exchanged(words) for words in WORDS}


@pytest.mark.parametrize("size", [2, 3])
def test_rounds_and_bytes_are_those_that_are_said(size: int) -> None:
    ranks = run_ranks(all_exchanged, size)
    for words in WORDS:
        how = parse_compression(words)
        _, rounds, sent, flat = ranks[0][words]
        assert rounds == round_count(how, size), words
        assert all(torch.equal(flat, rank[words][3]) for rank in ranks), words
        if not how.settings.get("sparse"):  # how many bytes, the values say
            assert sent == all_reduce_sent_nbytes(how, [(101, 11)], size, 8), words
    kind = AllGatherReducer if size == 2 else TwoPhaseReducer
    assert {ranks[0][words][0] for words in ("one-bit", "qsgd,bits=4", "bytegrad,feedback=true")} == {kind.__name__}


def test_between_two_ranks_nothing_is_rounded_but_what_each_sends() -> None:
    expected = torch.zeros(NUMEL, dtype=torch.float64)
    for rank in range(2):
        codec = qsgd(4)
        state = codec.state(NUMEL, dtype=torch.float64, seed=rank_seed(SEED, rank))
        codec.decode_add(codec.encode(values(rank), state), expected)
    assert all(torch.equal(found[3], expected) for found in run_ranks(exchanged, 2, "qsgd,bits=4"))
