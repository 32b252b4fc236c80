"""Kernels that compress gradients are timed as runs use them."""

from dataclasses import replace

import pytest
import torch

from tutti.compression.codecs import make_reducer
from tutti.config.compression import format_compression, parse_compression
from tutti.profile.probe import FULL, codec_rates

SMALL = replace(FULL, repeats=1, codes_numel=(5000,), codes_budget_s=60.0)


@pytest.mark.parametrize("words", list(codec_rates.CODECS))
def test_what_is_timed_is_what_a_run_sums_with(words: str) -> None:
    how = parse_compression(words)
    assert format_compression(how) == words
    made = make_reducer(how, [(64,)], group=None, dtype=torch.float32, device=torch.device("cpu"), seed=0)
    assert made.codec == codec_rates.CODECS[words]  # type: ignore[attr-defined]


@pytest.mark.long
def test_every_method_has_a_time_at_every_size() -> None:
    threads = torch.get_num_threads()
    rates = codec_rates.measure(torch.device("cpu"), SMALL)
    powers = [f"powersgd,rank={rank}" for rank in codec_rates.POWERSGD_RANKS]
    assert {rate.method for rate in rates} == {*codec_rates.CODECS, *powers}
    assert [rate.numel for rate in rates] == list(SMALL.codes_numel) * (len(codec_rates.CODECS) + len(powers))
    assert all(rate.encode_s > 0 for rate in rates)
    assert all(rate.decode_s > 0 for rate in rates if not rate.method.startswith("powersgd"))
    assert torch.get_num_threads() == threads


def test_a_short_budget_leaves_methods_out() -> None:
    assert (
        len({rate.method for rate in codec_rates.measure(torch.device("cpu"), replace(SMALL, codes_budget_s=0.0))}) == 1
    )
    assert codec_rates.measure(torch.device("cpu"), replace(SMALL, codes_numel=())) == ()
