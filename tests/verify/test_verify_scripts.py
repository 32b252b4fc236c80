"""Every broken script is caught with the right module and cause; every correct one passes."""

import pytest

from tutti.config.plan import BatchPlan, LayoutRule, Plan
from verify.running import HERE, verdict_on

BROKEN = {
    "batch_by_ranks": ("batch_depends_on_ranks", "batch size", "", "Job(global_batch_size=...)"),
    "between_steps": ("changed_between_steps", "between steps", "2", "bias"),
    "buffer": ("unsynchronised_buffer", "buffer", "1", "running"),
    "buffer_in_forward": ("unsynchronised_buffer", "forward", "1", "output"),
    "clipping_backward": ("local_clipping", "gradient", "0", "gradient of weight"),
    "contrastive": ("coupled_samples", "loss", "", "loss"),
    "dataset_by_rank": ("samples_depend_on_rank", "input", "", "batch[0]"),
    "first_of_two_calls": ("rank_dependent_forward", "forward", "first.1", "output"),
    "functional_norm": ("local_batch_statistics", "forward", "Net", "input of last"),
    "gradient_scaled": ("gradient_changed_after_averaging", "gradient used", "0", "gradient of weight"),
    "learning_rate": ("learning_rate_depends_on_ranks", "learning rate", "", "lr of optimizer 0"),
    "loss_divided": ("loss_divided_by_ranks", "loss", "", "loss"),
    "loss_sum": ("loss_is_a_sum", "loss", "", "loss"),
    "mean_over_ranks": ("mean_over_ranks", "loss", "", "loss"),
    "mixing": ("coupled_samples", "forward", "1", "output"),
    "own_batch_norm": ("local_batch_statistics", "forward", "1", "output"),
    "padding": ("padding", "forward", "1", "output"),
    "rank_in_forward": ("rank_dependent_forward", "forward", "1", "output"),
    "scheduler": ("scheduler_depends_on_ranks", "learning rate", "", "lr of optimizer 0"),
    "seeded_by_clock": ("different_seed", "initial state", "0", "weight"),
    "seeded_by_rank": ("different_seed", "initial state", "0", "weight"),
    "unseeded_augmentation": ("unseeded_data", "input", "", "batch[0]"),
    "unseeded_noise": ("non_deterministic_op", "forward", "1", "output"),
    "weight_decay": ("settings_depend_on_ranks", "hyper-parameter", "", "weight_decay of optimizer 0"),
    "wrong_expert": ("rows_differ", "forward", "1.experts.2", "output"),
    "weighted": ("weighted_does_not_add_up", "loss", "", "loss"),
}
"""Script -> (kind of cause, stage, module, tensor)."""

STOPPED = {
    "job_seed_by_rank": "step 1: ranks are out of step: rank 0 is in batch 1 of epoch 1 (samples 26, 6, 12, 36, ...)",
    "sampler_by_rank": "the order of samples differs, so give Job and sampler one seed and one order on all ranks",
    "norm_mode_by_rank": "step 1: module '1' is in training mode on rank 0 and in evaluation mode on rank 1",
    "smoothing_by_rank": "step 1: the loss function depends on the rank: the same 4 samples",
}
"""Scripts whose ranks find the mistake themselves -> what they say."""

CORRECT = sorted(path.stem for path in (HERE / "correct").glob("*.py"))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_script_is_caught_and_rightly_named(name: str) -> None:
    verdict = verdict_on(f"broken/{name}.py")
    assert not verdict.passed
    assert verdict.first is not None
    assert verdict.cause is not None
    first = verdict.first
    assert (verdict.cause.kind, first.stage, first.module, first.tensor) == BROKEN[name], verdict.sentence
    assert verdict.sentence.startswith("FAIL: ")
    assert verdict.cause.sentence in verdict.sentence


def test_every_broken_script_is_expected() -> None:
    assert {path.stem for path in (HERE / "broken").glob("*.py")} == set(BROKEN)


@pytest.mark.parametrize("name", STOPPED)
def test_what_the_ranks_themselves_find_is_the_verdict(name: str) -> None:
    verdict = verdict_on(f"stopped/{name}.py")
    assert not verdict.passed
    assert STOPPED[name] in verdict.sentence


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_script_passes(name: str) -> None:
    verdict = verdict_on(f"correct/{name}.py", world_size=3)
    assert verdict.passed, verdict.sentence
    assert verdict.arithmetic == "float64"
    assert verdict.largest is not None
    assert 0 < (verdict.largest.relative_difference or 0.0) < 1e-10
    assert verdict.compared > 50


@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_a_correct_script_passes_in_its_own_precision(name: str) -> None:
    verdict = verdict_on(f"correct/{name}.py", world_size=3, arithmetic="script")
    assert verdict.passed, verdict.sentence
    assert verdict.arithmetic == "float32"
    assert verdict.tolerance == 1e-3
    assert (verdict.largest.relative_difference or 0.0) > 1e-9  # type: ignore[union-attr]


def test_a_broken_script_is_caught_in_its_own_precision() -> None:
    verdict = verdict_on("broken/own_batch_norm.py", arithmetic="script")
    assert verdict.arithmetic == "float32"
    assert verdict.cause is not None
    assert verdict.cause.kind == "local_batch_statistics"


@pytest.mark.parametrize(
    ("name", "batch", "shares"), [("mlp", 16, (3.0, 1.0)), ("cnn", 9, (1.0, 0.0, 2.0)), ("lstm", 8, (2.0, 1.0))]
)
def test_a_plan_with_unequal_shares_microbatches_and_recompute_passes(
    name: str, batch: int, shares: tuple[float, ...]
) -> None:
    plan = Plan(
        batch=BatchPlan(global_batch_size=batch, num_microbatches=2),
        mesh={"replicate": len(shares)},
        shares=shares,
        layout=(LayoutRule(), LayoutRule(modules="2", recompute=True)) if name == "mlp" else (LayoutRule(),),
    )
    verdict = verdict_on(f"correct/{name}.py", plan=plan)
    assert verdict.passed, verdict.sentence
    assert verdict.world_size == len(shares)


def test_bfloat16_is_compared_with_a_tolerance_of_its_own() -> None:
    plan = Plan(batch=BatchPlan(global_batch_size=16), mesh={"replicate": 2}, precision="bfloat16")
    verdict = verdict_on("correct/mlp.py", plan=plan, arithmetic="script")
    assert verdict.passed, verdict.sentence
    assert (verdict.arithmetic, verdict.tolerance) == ("bfloat16", 1e-1)


def test_a_tolerance_below_rounding_fails() -> None:
    verdict = verdict_on("correct/cnn.py", arithmetic="script", tolerance=1e-12)
    assert not verdict.passed
    assert verdict.first is not None


def test_a_script_that_float64_breaks_is_compared_in_its_own_dtypes() -> None:
    verdict = verdict_on("single_precision.py")
    assert verdict.passed, verdict.sentence
    assert verdict.arithmetic == "float32"
    assert "in float64 it fails" in verdict.notes[0]


def test_more_steps_than_the_script_has_are_noted() -> None:
    verdict = verdict_on("correct/stream.py", steps=50)
    assert verdict.passed, verdict.sentence
    assert verdict.steps == 5
    assert any("after 5 of 50 steps" in note for note in verdict.notes)
