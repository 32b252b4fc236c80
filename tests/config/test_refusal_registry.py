"""A refusal that another package registers holds everywhere: in the search, the prediction and the run."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from config import toy_refusal
from cost_model.examples import mlp, plan
from house.refusals import PAGE, page
from planner.machines import cards
from tutti.config.plan import BatchPlan, Plan
from tutti.config.refusals import REFUSALS, check_plan, register_refusal
from tutti.cost_model import predict
from tutti.errors import PlanError
from tutti.planner import PlanRequest, choose

SCRIPTS = Path(__file__).resolve().parents[1] / "launch" / "scripts"


@pytest.fixture
def registered() -> Iterator[None]:
    register_refusal(toy_refusal.ENTRY)
    yield
    REFUSALS.remove(toy_refusal.NAME)


@pytest.mark.usefixtures("registered")
def test_the_search_takes_another_plan() -> None:
    request = PlanRequest(script=Plan(batch=BatchPlan(global_batch_size=1024)))
    assert choose(mlp(2048, 4), cards(), request).best.degree("replicate") != 4
    REFUSALS.remove(toy_refusal.NAME)
    assert choose(mlp(2048, 4), cards(), request).best.degree("replicate") == 4
    register_refusal(toy_refusal.ENTRY)


@pytest.mark.usefixtures("registered")
def test_the_prediction_is_refused_with_the_code() -> None:
    with pytest.raises(PlanError, match="the toy switch has three ports") as refused:
        predict(mlp(), cards(), plan(64, 4))
    assert refused.value.code == toy_refusal.NAME
    check_plan(plan(64, 3))


def test_a_run_is_refused_once_with_exit_code_2(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    registration = "from config import toy_refusal\nfrom tutti.config.refusals import register_refusal\n"
    text = (SCRIPTS / "train.py").read_text(encoding="utf-8")
    script.write_text(f"{registration}register_refusal(toy_refusal.ENTRY)\n{text}", encoding="utf-8")
    tests = str(Path(__file__).resolve().parents[1])
    words = ["run", "--nproc", "4", "--no-predict", "--folder", str(tmp_path / "run"), str(script), "1", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "tutti.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([tests, *sys.path])},
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("the toy switch has three ports") == 1
    assert "Traceback" not in done.stderr


def test_a_name_is_registered_once() -> None:
    with pytest.raises(PlanError, match="already registered"):
        register_refusal(REFUSALS["asynchronous-float16"])


def test_an_error_elsewhere_has_its_place_as_code() -> None:
    with pytest.raises(PlanError) as refused:
        REFUSALS["no-such-refusal"]
    assert refused.value.code == "config.registry.__getitem__"


def test_the_page_lists_every_refusal() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m house.refusals (in tests/)"
