"""One device runs a plain program, so that a fault of tutti's own step is not on both sides; and what widens verify."""

import ast
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from tutti.config.plan import BatchPlan, Plan
from tutti.verification import plain_step
from tutti.verification.verification import VerificationRequest, verify
from verify.running import HERE, run_script, verdict_on

BREAKS = {
    "clips by twice the bound": (
        "gradient used",
        "step",
        """
from tutti.trainer import update
clip = update._clip_gradients
def wrong(run, optimizers):
    norm = clip(run, optimizers)
    for parameter in run.parallel.model.parameters():
        parameter.grad *= 2.0
    return norm
update._clip_gradients = wrong
""",
    ),
    "does not zero gradients": (
        "gradient",
        "step",
        """
from tutti.trainer import step
def kept(run, zeroed):
    run.loop.accumulation.clear()
    earlier = {p: p.grad.clone() for p in run.parallel.model.parameters() if p.grad is not None}
    for parameter in run.parallel.model.parameters():
        parameter.grad = None
    return earlier
step.start_gradients = kept
""",
    ),
    "weighs a short batch like a full one": (
        "gradient",
        "step",
        """
from tutti.trainer import step
finish = step._finish_gradients
step._finish_gradients = lambda run, factor: finish(run, factor * run.state.loader.share.batch_size / 8)
""",
    ),
    "warms up in half the steps": (
        "learning rate",
        "step",
        """
from tutti.trainer import update
factor = update.learning_rate_factor
update.learning_rate_factor = lambda rule, rate, step, **how: factor(rule, rate, 2 * step, **how)
""",
    ),
    "gives schedulers half the metric": (
        "learning rate",
        "step",
        """
from tutti.optim.schedules import Schedules
measured = Schedules.measured
Schedules.measured = lambda self, metric: measured(self, metric * 0.01 ** len(loader))
scheduler.step(0.5)
""",
    ),
    "counts evaluated samples twice on rank 0": (
        "evaluation",
        "evaluation",
        """
from tutti.trainer import evaluate
batches = evaluate._evaluation_batches
def twice(run, source, size):
    for batch in batches(run, source, size):
        yield batch
        if run.parallel.world.rank == 0:
            yield batch
evaluate._evaluation_batches = twice
""",
    ),
}
"""What is broken of tutti -> (stage of the first difference, cause, code in the script)."""

QUICK = ("clips by twice the bound", "does not zero gradients")


def broken(name: str, folder: Path) -> Path:
    path = folder / "broken.py"
    path.write_text((HERE / "widened.py").read_text().replace("# BREAK", BREAKS[name][2]))
    return path


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in BREAKS])
def test_a_fault_of_the_step_is_found_though_all_ranks_share_it(name: str, tmp_path: Path) -> None:
    stage, cause, _ = BREAKS[name]
    options = {"steps": 2} if name in QUICK else {"epochs": 2}
    verdict = verdict_on(broken(name, tmp_path), **options)  # type: ignore[arg-type]
    assert not verdict.passed
    assert verdict.first is not None
    assert verdict.cause is not None
    kinds = {"step": "step_differs", "evaluation": "evaluation_differs"}
    assert (verdict.first.stage, verdict.cause.kind) == (stage, kinds[cause]), verdict.sentence


@pytest.mark.long
@pytest.mark.parametrize("name", QUICK)
def test_such_a_fault_is_not_seen_where_one_device_shares_it(name: str, tmp_path: Path) -> None:
    question = VerificationRequest(script="broken.py", world_size=2, steps=2)
    path = broken(name, tmp_path)
    with tempfile.TemporaryDirectory() as folder:
        verdict = verify(question, lambda trial: run_script(path, replace(trial, own_step=True)), Path(folder))
    assert verdict.passed


def test_a_correct_script_passes_over_epochs_with_evaluation_and_resumed() -> None:
    verdict = verdict_on("widened.py", epochs=2, resume_at=5)
    assert verdict.passed, verdict.sentence
    assert verdict.steps == 8
    assert "none of tutti's step" in verdict.sentence
    assert "resumed from the checkpoint of step 5" in verdict.sentence
    assert any("2 evaluations compared" in note for note in verdict.notes)


def test_metrics_of_a_script_without_a_loss_function_are_compared(tmp_path: Path) -> None:
    path, text = tmp_path / "own_loss.py", (HERE / "widened.py").read_text()
    for old, new in (
        ("data, nn.CrossEntropyLoss(), scheduler=scheduler", "data"),
        ("job.step(batch)", "job.forward_backward(lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), batch)"),
        ("    values = ", "        job.update()\n    values = "),
        ("    job.schedule(values", "    print(values"),
        ('["loss"]', '["right"]'),
    ):
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    verdict = verdict_on(path, epochs=1)
    assert verdict.passed, verdict.sentence
    assert any("1 evaluation compared" in note for note in verdict.notes), verdict.notes


@pytest.mark.long
def test_averages_of_a_compiled_model_are_compared() -> None:
    verdict = verdict_on("averaged.py", epochs=2, resume_at=5)
    assert verdict.passed, verdict.sentence
    assert any("4 evaluations compared" in note for note in verdict.notes), verdict.notes


@pytest.mark.long
def test_what_a_checkpoint_leaves_out_is_found(tmp_path: Path) -> None:
    path = tmp_path / "forgets.py"
    forgets = """
from tutti.checkpoint import load
load._load_optimizers = lambda training, source: None
"""
    path.write_text(
        (HERE / "widened.py").read_text().replace("# BREAK", "").replace("import tutti\n", "import tutti\n" + forgets)
    )
    verdict = verdict_on(path, steps=3, resume_at=3)
    assert not verdict.passed
    assert verdict.first is not None
    assert "resumed from the checkpoint of step 3" in verdict.sentence
    assert verdict.first.stage == "parameter"


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_promise_about_updates_is_kept_over_epochs(world_size: int) -> None:
    verdict = verdict_on("correct/updates.py", epochs=2, world_size=world_size)
    assert verdict.passed, verdict.sentence
    assert verdict.steps == 24
    assert "but for the weights" in verdict.sentence


@pytest.mark.parametrize("precision", ["bfloat16", pytest.param("float16", marks=pytest.mark.long)])
def test_the_precision_that_is_asked_for_is_verified_beside_float64(precision: str) -> None:
    plan = Plan(batch=BatchPlan(global_batch_size=16), mesh={"replicate": 2}, precision=precision)  # type: ignore[arg-type]
    verdict = verdict_on("correct/mlp.py", plan=plan)
    assert verdict.passed, verdict.sentence
    assert verdict.arithmetic == "float64"
    assert f"in {precision}, which is asked for" in verdict.sentence
    assert ("tutti's own step, because" in verdict.sentence) == (precision == "float16")


@pytest.mark.long
def test_a_tolerance_that_is_not_float64s_is_explained(tmp_path: Path) -> None:
    path, loss = tmp_path / "converts.py", "lambda output, target: nn.functional.cross_entropy(output.float(), target)"
    path.write_text((HERE / "widened.py").read_text().replace("nn.CrossEntropyLoss()", loss))
    verdict = verdict_on(path)
    assert verdict.passed, verdict.sentence
    assert verdict.tolerance == 1e-3
    assert any("convert values to float32 themselves" in note for note in verdict.notes)


BREAKS_PRECISION = """
from tutti.trainer import step
finish = step._finish_gradients
def wrong(run, factor):
    low = next(run.parallel.model.parameters()).dtype is not torch.float64
    finish(run, factor * (1.4 if low and run.parallel.world.world_size > 1 else 1.0))
step._finish_gradients = wrong
"""


@pytest.mark.long
def test_what_is_wrong_only_in_the_asked_precision_is_found(tmp_path: Path) -> None:
    path = tmp_path / "low.py"
    path.write_text(
        (HERE / "widened.py")
        .read_text()
        .replace("# BREAK", BREAKS_PRECISION)
        .replace("seed=2", "seed=2, precision='bfloat16'")
    )
    verdict = verdict_on(path, steps=1)
    assert not verdict.passed
    assert "in float64 they agree, but in bfloat16" in verdict.sentence
    assert verdict.first is not None
    assert verdict.first.stage == "gradient"


def test_the_plain_program_imports_none_of_the_step() -> None:
    tree = ast.parse(Path(plain_step.__file__).read_text())
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert modules
    assert not [m for m in modules if m.startswith(("tutti.parallel", "tutti.trainer.step", "tutti.trainer.update"))]
