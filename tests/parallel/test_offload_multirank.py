"""State in the host's memory: values are those of one device, and the device does not hold what is on the host."""

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import fakegpu
from against_one import Trained, assert_agree
from fakegpu import needs_fakegpu
from harness import run_ranks
from parallel import offload_subjects as offloaded
from parallel.offload_subjects import RECOMPUTED, in_microbatches, offload
from tutti.comm import world
from tutti.config.plan import LayoutRule, ShardingPlan
from tutti.parallel.offload import saved_activations

PARAMETER_NBYTES = 8 * sum(parameter.numel() for parameter in offloaded.Deep().parameters())
ACTIVATIONS = (LayoutRule(modules="blocks.*", offload=True),)
WHERE = ("none", "optimizer", "parameters")

LAYOUTS: dict[str, tuple[LayoutRule, ...]] = {"none": (), "blocks": ACTIVATIONS}

FULL: dict[str, tuple[str, dict[str, Any]]] = {
    "tied, unused, a scalar": ("tied", {}),
    "accumulation, clipping, momentum": ("accumulated", {}),
    "blocks that repeat, ties, frozen, LSTM": ("repeating", {}),
    "batch statistics, channels last": ("convolutions", {}),
    "a penalty on a block's weights": ("penalised", {}),
    "an optimizer of whole matrices": ("adafactor", {}),
    "recompute, accumulation": ("accumulated", {"layout": RECOMPUTED}),
    "activations": ("repeating", {"layout": ACTIVATIONS}),
    "activations of convolutions": ("convolutions", {"layout": (LayoutRule(modules="body.*", offload=True),)}),
    "activations of recomputed blocks": ("accumulated", {"layout": RECOMPUTED + ACTIVATIONS}),
}
FAKE = {name: FULL[name] for name in ("blocks that repeat, ties, frozen, LSTM", "activations of recomputed blocks")}

HALF: dict[str, tuple[str, dict[str, Any]]] = {
    f"{subject}, {precision}, {count}": (subject, in_microbatches({"precision": precision}, count))
    for subject in ("tied", "convolutions")
    for precision in ("bfloat16", "float16")
    for count in (1, 2)
}


def _trained(cases: dict[str, tuple[str, dict[str, Any]]], dtype: torch.dtype) -> dict[str, dict[str, Trained]]:
    return {
        where: offloaded.values({name: (s, {**f, **offload(where)}) for name, (s, f) in cases.items()}, dtype)
        for where in WHERE
    }


def _on_one() -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    seen: dict[str, Any] = {where: offloaded.observe(offload(where)) for where in WHERE[1:]}
    torch.set_default_dtype(torch.float32)
    seen["activations"] = {rules: offloaded.saved_on_device(layout) for rules, layout in LAYOUTS.items()}
    seen["half"] = offloaded.observe(offload("optimizer", precision="bfloat16"))
    seen["values"] = _trained({name: FULL[name] for name in list(FULL)[1:2]}, torch.float64)
    seen["half values"] = _trained({name: HALF[name] for name in list(HALF)[1:2]}, torch.float32)
    return seen


def _same(results: dict[str, dict[str, Trained]], tolerance: float) -> None:
    for where in WHERE[1:]:
        for name, trained in results[where].items():
            try:
                assert_agree(results["none"][name], [trained], tolerance)
            except AssertionError as error:
                raise AssertionError(f"{name}, {where} on the host: {error}") from error


def test_the_device_holds_no_more_than_the_plan_says_and_computes_the_same() -> None:
    (seen,) = run_ranks(_on_one, 1)
    for where in WHERE[1:]:
        assert seen[where]["state"] == {"cpu"}
        assert seen[where]["gradients"] <= 1, "gradients stay on the device after their block's backward"
    assert seen["parameters"]["forward"] <= 3, "more than a block and the next two are on the device"
    assert seen["parameters"]["rest"] == 0
    assert seen["optimizer"]["rest"] == offloaded.DEPTH
    activations = seen["activations"]
    assert activations["blocks"]["forward"] < 0.3 * activations["none"]["forward"], "what blocks save stays there"
    assert activations["blocks"]["values"] == activations["none"]["values"]
    assert "torch.bfloat16" in seen["half"]["kinds"]
    assert seen["half"]["parameters"] == {("cpu", "torch.float32")}
    _same(seen["values"], 1e-12)
    _same(seen["half values"], 0.0)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_every_case_trains_to_the_same_values(dtype: torch.dtype) -> None:
    full = dtype is torch.float64
    (results,) = run_ranks(_trained, 1, FULL if full else HALF, dtype)
    _same(results, 1e-12 if full else 0.0)


def _lives(folder: str) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    results: dict[str, Any] = {}
    for first in WHERE:
        results[first] = offloaded.lived(offload(first), f"{folder}/{first}", saves=True)
        for second in WHERE:
            results[first, second] = offloaded.lived(offload(second), f"{folder}/{first}", saves=False)
    return results


@pytest.mark.long
def test_averages_evaluation_skipped_steps_and_checkpoints_are_those_without_offload(tmp_path: Path) -> None:
    (results,) = run_ranks(_lives, 1, str(tmp_path))
    for run, result in results.items():
        expected = results["none"] if run in WHERE else results["none", "none"]
        _close(result, expected, str(run))


def _close(got: Any, expected: Any, words: str) -> None:
    if isinstance(expected, dict):
        assert got.keys() == expected.keys(), words
        for key, value in expected.items():
            _close(got[key], value, f"{words}: {key}")
    else:
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13, equal_nan=True, msg=lambda m: f"{words}: {m}")


def _on_fakegpu(cases: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    device = fakegpu.load()
    world.choose_device = lambda local_rank: device  # type: ignore[assignment]
    torch.set_default_dtype(torch.float64)
    peaks = {where: offloaded.peak_nbytes(offload(where)) for where in WHERE}
    saved_activations.MIN_NBYTES = 1
    return {"peaks": peaks, "values": _trained(cases, torch.float64)}


@needs_fakegpu
def test_on_a_device_of_its_own_memory_no_tensor_meets_one_of_the_other_memory() -> None:
    (seen,) = run_ranks(_on_fakegpu, 1, FAKE)
    _same(seen["values"], 1e-12)
    peaks = seen["peaks"]
    assert peaks["none"] > 3.5 * PARAMETER_NBYTES, "parameters, gradients and two moments"
    assert peaks["optimizer"] < 1.8 * PARAMETER_NBYTES, "parameters, and the gradients of a block or two"
    assert peaks["parameters"] < 1.2 * PARAMETER_NBYTES, "a block and the next two, and the gradients of a block or two"


RANKS: dict[str, list[dict[str, Any]]] = {
    "2": [
        *({"mesh": {"shard": 2}, "sharding": {"level": level, "offload": "optimizer"}} for level in (1, 2, 3)),
        {"mesh": {"shard": 2}, "sharding": {"level": 3, "offload": "parameters"}},
        {"mesh": {"replicate": 2}, "sharding": {"offload": "optimizer"}},
        {"mesh": {"replicate": 2}, "sharding": {"offload": "parameters"}},
    ],
    "3": [{"mesh": {"shard": 3}, "sharding": {"level": level, "offload": "optimizer"}} for level in (1, 2, 3)],
}
SUBJECTS = ("tied", "accumulated", "repeating", "convolutions", "penalised")


def _on_many(plans: list[dict[str, Any]]) -> list[dict[str, Trained]]:
    os.chdir(Path.cwd() if os.environ["WORLD_SIZE"] == "1" else _own_folder())
    cases = [{s: (s, {**p, "sharding": ShardingPlan(**p["sharding"])}) for s in SUBJECTS} for p in plans]
    return [offloaded.values(case, torch.float64) for case in cases]


def _own_folder() -> Path:
    folder = Path.cwd() / os.environ["RANK"]
    folder.mkdir(exist_ok=True)
    return folder


@functools.cache
def _alone() -> dict[str, Trained]:
    (results,) = run_ranks(_on_many, 1, [{"mesh": {"replicate": 1}, "sharding": {}}])
    return results[0]


@pytest.mark.long
@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_that_share_the_state_train_to_the_same_values(ranks: str) -> None:
    one, many = _alone(), run_ranks(_on_many, int(ranks), RANKS[ranks])
    for index, plan in enumerate(RANKS[ranks]):
        for subject in SUBJECTS:
            try:
                assert_agree(one[subject], [rank[index][subject] for rank in many])
            except AssertionError as error:
                raise AssertionError(f"{plan}, {subject}: {error}") from error
