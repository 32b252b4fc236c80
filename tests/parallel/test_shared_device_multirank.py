"""Two ranks on one device compute what one CPU computes, whatever the plan; nothing of it runs on the CPU unasked."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fakegpu import needs_fakegpu
from harness import preload, run_ranks
from shared_device import Case, assert_agree, by_replicas, of_column, trained_on_cpu, trained_on_device

preload("matrix.plans", "matrix.families", "fakegpu")
pytestmark = needs_fakegpu


def _named(*pairs: tuple[str, str]) -> dict[str, Case]:
    return {f"{family}, {column}": of_column(family, column) for family, column in pairs}


QUICK = _named(
    ("DLRM", "replicate 2"),
    ("MLP", "ZeRO-3, shard 2"),
    ("GPT, tied embeddings", "split 2"),
    ("MLP", "stage 2, 1f1b"),
    ("GPT, tied embeddings", "context 2, ring"),
)
MORE = _named(
    ("MLP", "ZeRO-1, shard 2"),
    ("CNN, BatchNorm", "ZeRO-2, shard 2"),
    ("CNN, BatchNorm", "replicate 2"),
    ("LSTM translator, attention", "replicate 2, 4 microbatches"),
    ("MLP", "ZeRO-3, shard 2, parameters on host"),
    ("MLP", "ZeRO-3, shard 2, optimizer on host"),
    ("GPT, tied embeddings", "ZeRO-3, shard 2, recompute"),
    ("LSTM translator, attention", "split 2"),
    ("MLP", "stage 2, gpipe"),
    ("GPT, tied embeddings", "stage 2, interleaved"),
    ("MLP", "stage 2, zero-bubble"),
    ("GPT, tied embeddings", "context 2, all-to-all"),
    ("Mixture of experts", "expert 2"),
    ("DLRM", "table 2"),
    ("CNN, BatchNorm", "table 2, linear layers"),
    ("3-D U-Net", "space 2"),
    ("CNN, BatchNorm", "space 2"),
)
MORE |= {
    f"{family}, Adagrad, {column}": replace(of_column(family, column), subject={"optimizer": torch.optim.Adagrad})
    for family, column in (("DLRM", "replicate 2"), ("DLRM", "table 2"), ("MLP", "ZeRO-3, shard 2"), ("MLP", "split 2"))
}
MORE["loss with weights"] = replace(
    of_column("CNN, BatchNorm", "replicate 2"),
    subject={"loss_fn": nn.CrossEntropyLoss(weight=torch.linspace(0.5, 1.5, 5, dtype=torch.float64))},
)
MODES = {
    mode: by_replicas("MLP", sync=mode)
    for mode in (
        "local:2", "post-local:2,2", "one-shot", "diloco:2", "adasum", "ring", "shift-one", "push", "elastic",
        "local:3,delay=1", "ad-psgd", "ensemble",
    )
}  # fmt: skip
CODECS = {
    codec: by_replicas("MLP", compress=codec, optimizer=torch.optim.SGD, job={})
    for codec in (
        "bfloat16", "float16", "bytegrad", "qsgd", "terngrad", "one-bit", "top-k", "dgc", "top16-q4", "powersgd",
        "factors",
    )
}  # fmt: skip
UNORDERED = {mode: by_replicas("MLP", sync=mode) for mode in ("stale:2", "asynchronous")}


def _check(cases: dict[str, Case], *, by_plan: bool = False, agree: bool = True) -> None:
    expected = run_ranks(trained_on_cpu, 2 if by_plan else 1, cases, by_plan)
    for rank, (results, failure) in enumerate(run_ranks(trained_on_device, 2, cases)):
        assert not failure, f"rank {rank}: {failure}"
        for name, case in cases.items():
            got = results[name]
            offload = case.fields["sharding"].offload if "sharding" in case.fields else "none"
            assert got.facts["backend"] == "staged"
            assert got.facts["share_device"]
            assert got.facts["devices"] == ["fakegpu"] or offload != "none", f"{name}: {got.facts}"
            if agree:
                assert_agree(expected[rank if by_plan else 0][name], got, f"{name}, rank {rank}")


def test_main_axes() -> None:
    _check(QUICK)


@pytest.mark.long
def test_all_axes() -> None:
    _check(MORE)


@pytest.mark.long
def test_consistency_modes() -> None:
    _check(MODES, by_plan=True)


@pytest.mark.long
def test_modes_without_an_order_train() -> None:
    _check(UNORDERED, by_plan=True, agree=False)


@pytest.mark.long
def test_codecs() -> None:
    _check(CODECS, by_plan=True)
