"""Batches that are not one row a sample: correct ones pass, faults under them are found, draws are no fault."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tutti.config.plan import BatchPlan, Plan
from tutti.data.batches import MicrobatchShare
from tutti.data.collate_record import sample_digest
from tutti.verification.alignment import RankTensor
from tutti.verification.batch_readings import collated_alignments
from tutti.verification.tolerance import alignment_difference
from verify.running import HERE, verdict_on


def quick(names: Iterable[str], *chosen: str) -> list[Any]:
    """Return parameters of which only the chosen ones are in the quick suite."""
    return [name if name in chosen else pytest.param(name, marks=pytest.mark.long) for name in names]


RAGGED = sorted(path.stem for path in (HERE / "ragged").glob("*.py"))


@pytest.mark.parametrize("name", RAGGED)
def test_a_correct_script_with_ragged_batches_passes(name: str) -> None:
    verdict = verdict_on(f"ragged/{name}.py", steps=3)
    assert verdict.passed, verdict.sentence
    assert (verdict.largest.relative_difference or 0.0) < 1e-12  # type: ignore[union-attr]
    assert any(note.startswith("dropout was off") for note in verdict.notes) == (name in ("by_length", "graphs"))


PLANS = {
    "microbatches": (("replicate", 2), 2, ()),
    "unequal": (("replicate", 3), 1, (2.0, 0.0, 1.0)),
}
"""Name -> (mesh, microbatches, shares)."""
SIZES = {"boxes": 4, "by_length": 10, "graphs": 9, "left_padded": 9, "nested": 6, "packed": 10}
QUICK = (("graphs", "microbatches"), ("left_padded", "microbatches"))


@pytest.mark.parametrize(
    ("name", "how"),
    [
        (name, how) if (name, how) in QUICK else pytest.param(name, how, marks=pytest.mark.long)
        for name in RAGGED
        for how in PLANS
    ],
)
def test_a_correct_script_with_ragged_batches_passes_by_any_plan(name: str, how: str) -> None:
    mesh, microbatches, parts = PLANS[how]
    batch = BatchPlan(global_batch_size=SIZES[name], num_microbatches=microbatches)
    verdict = verdict_on(f"ragged/{name}.py", plan=Plan(batch=batch, mesh=dict([mesh]), shares=parts))
    assert verdict.passed, verdict.sentence


FAULTS = {
    "gradient": (
        "MODEL",
        "for weight in model.second.parameters():\n    weight.register_hook(lambda g: g * (1 + job.rank))",
        ("local_clipping", "gradient", "second.own"),
        "",
    ),
    "data set": (
        "SAMPLE",
        "nodes[0] += job.rank",
        ("samples_depend_on_rank", "input", ""),
        "before collate_fn: the data set",
    ),
    "sizes of samples": (
        "SAMPLE",
        "nodes, ends, count = nodes[job.rank :], torch.arange(count - job.rank), count - job.rank",
        ("samples_depend_on_rank", "input", ""),
        "before collate_fn: the data set",
    ),
    "collate": (
        "COLLATE",
        "batch.nodes = batch.nodes + job.rank",
        ("", "", ""),
        "collate_fn",
    ),
    "targets": ("COLLATE", "batch.targets = (batch.targets + job.rank) % 3", ("", "loss", ""), "collate_fn"),
    "forward": (
        "FORWARD",
        "nodes = nodes * (1 + job.rank)",
        ("rank_dependent_forward", "forward", "Net"),
        "",
    ),
}
"""What is wrong -> (place, code, expected (cause, stage, module), words of the cause)."""


def changed(place: str, code: str, folder: Path, script: str = "ragged/graphs.py") -> Path:
    lines = (HERE / script).read_text().splitlines()
    mark = next(line for line in lines if line.strip() == f"# {place}")
    indent = mark[: len(mark) - len(mark.lstrip())]
    lines[lines.index(mark)] = "\n".join(indent + line for line in code.splitlines())
    path = folder / "changed.py"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("name", quick(FAULTS, "data set", "gradient", "targets"))
def test_a_fault_under_ragged_batches_is_found(name: str, tmp_path: Path) -> None:
    place, code, expected, words = FAULTS[name]
    verdict = verdict_on(changed(place, code, tmp_path))
    assert not verdict.passed
    assert verdict.comparable
    assert verdict.sentence.startswith("FAIL: ")
    assert verdict.first is not None
    assert verdict.cause is not None
    got = (verdict.cause.kind, verdict.first.stage, verdict.first.module)
    assert all(want in ("", have) for want, have in zip(expected, got, strict=True)), verdict.sentence
    assert words in verdict.cause.sentence, verdict.sentence


@pytest.mark.long
def test_padding_that_has_no_effect_is_not_blamed(tmp_path: Path) -> None:
    text = (HERE / "ragged" / "left_padded.py").read_text()
    assert "nn.CrossEntropyLoss()" in text
    path = tmp_path / "squared.py"
    path.write_text(text.replace("nn.CrossEntropyLoss()", "lambda out, to: nn.functional.cross_entropy(out, to) ** 2"))
    verdict = verdict_on(path, world_size=3)
    assert not verdict.passed
    assert verdict.first is not None
    assert (verdict.first.stage, verdict.first.module) == ("loss", ""), verdict.sentence


INCOMPARABLE = {
    "between": ("batch_draws", "the script draws random numbers from torch"),
    "masking": ("collate_draws", "collate_fn (Masking) draws random numbers from torch"),
    "mixup": ("random_not_comparable", "randperm draws random numbers"),
    "numpy_generator": ("random_outside_torch", "a generator of its own"),
    "numpy_noise": ("random_outside_torch", "numpy.random"),
    "own_generator": ("random_outside_torch", "a torch.Generator of its own"),
    "python_noise": ("random_outside_torch", "random"),
}
"""Script -> (kind of cause, words of its sentence)."""


@pytest.mark.parametrize("name", quick(INCOMPARABLE, "between", "masking", "mixup", "numpy_noise"))
def test_random_numbers_that_differ_are_not_said_to_be_wrong(name: str) -> None:
    verdict = verdict_on(f"incomparable/{name}.py")
    assert not verdict.passed
    assert not verdict.comparable
    assert verdict.sentence.startswith("NOT COMPARABLE: 2 ranks differ from one device, first in ")
    assert verdict.cause is not None
    assert (verdict.cause.kind, INCOMPARABLE[name][1] in verdict.cause.sentence) == (INCOMPARABLE[name][0], True)


@pytest.mark.long
def test_a_collate_function_with_a_generator_of_its_own_draws_too(tmp_path: Path) -> None:
    code = "def __init__(self):\n    self.draws = torch.Generator().manual_seed(0)\n"
    path = changed("GENERATOR", code, tmp_path, "incomparable/masking.py")
    path.write_text(path.read_text().replace("torch.rand(ids.shape)", "torch.rand(ids.shape, generator=self.draws)"))
    verdict = verdict_on(path)
    assert not verdict.comparable
    assert verdict.cause is not None
    assert "collate_fn (Masking) draws random numbers from a generator of its own" in verdict.cause.sentence


def test_every_incomparable_script_is_expected() -> None:
    assert {path.stem for path in (HERE / "incomparable").glob("*.py")} == set(INCOMPARABLE)


@pytest.mark.parametrize(
    ("script", "place", "code", "kind"),
    [
        pytest.param(
            "mixup",
            "MODEL",
            "model[0].register_forward_hook(lambda m, a, value: value * (1 + job.rank))",
            "rank_dependent_forward",
            marks=pytest.mark.long,
        ),
        ("masking", "SAMPLE", "ids[1] = 1 + job.rank", "samples_depend_on_rank"),
    ],
)
def test_a_fault_before_the_draws_is_a_fault(script: str, place: str, code: str, kind: str, tmp_path: Path) -> None:
    verdict = verdict_on(changed(place, code, tmp_path, f"incomparable/{script}.py"))
    assert verdict.comparable
    assert verdict.cause is not None
    assert verdict.cause.kind == kind, verdict.sentence


def shares(sizes: tuple[int, ...]) -> list[MicrobatchShare]:
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    return [
        MicrobatchShare(start=s, count=n, slice_start=0, slice_size=sum(sizes))
        for s, n in zip(starts, sizes, strict=True)
    ]


def read(whole: list[int], parts: list[list[int]], counts: list[int]) -> bool:
    """Whether some reading makes one device's integers of the ranks'; `counts`: what the earlier ranks have."""
    tensors = [
        RankTensor(rank=rank, share=share, value=torch.tensor(part))
        for rank, (part, share) in enumerate(zip(parts, shares((2,) * len(parts)), strict=True))
    ]
    sizes = [frozenset({0, count}) for count in counts]
    alignments = collated_alignments(torch.tensor(whole), tensors, sizes)
    return any(alignment_difference(alignment, 1.0) == 0.0 for alignment in alignments)


def test_indices_count_from_a_ranks_first_sample() -> None:
    assert read([0, 3, 7, 8], [[0, 3], [0, 1]], [0, 7])  # offsets
    assert read([0, 3, 7, 8, 12], [[0, 3, 7], [0, 1, 5]], [0, 7])  # boundaries
    assert not read([0, 3, 7, 8], [[0, 3], [0, 1]], [0, 6])  # the earlier rank has 6 entries, not 7
    assert not read([0, 3, 7, 8], [[0, 3], [0, 2]], [0, 7])
    assert not read([0, 3, 7, 8, 12], [[0, 3, 7], [0, 1, 6]], [0, 7])


def test_rows_may_be_in_another_order_but_not_have_other_values() -> None:
    assert read([5, 4, 2, 1], [[5, 2], [4, 1]], [0, 0])
    assert not read([5, 4, 2, 1], [[5, 2], [4, 3]], [0, 0])


def test_the_digest_of_a_sample_follows_its_values() -> None:
    def sample(value: float = 1.0, name: str = "a") -> dict[str, object]:
        return {"rows": [torch.tensor([value, 2.0])], "name": name, "pair": (1, None)}

    assert sample_digest(sample()) == sample_digest(sample())
    assert len({sample_digest(s) for s in (sample(), sample(3.0), sample(name="b"), [1.0], [1], ["1"])}) == 6
    assert sample_digest([torch.zeros(2)]) != sample_digest([torch.zeros(1, 2)])
    assert sample_digest(lambda: None) is None
