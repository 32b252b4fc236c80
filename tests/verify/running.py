"""Runs a script for verification on ranks forked from the tests' preloaded server."""

import atexit
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import RankFailed, run_ranks
from tutti.config import serialization
from tutti.config.plan import Plan
from tutti.config.verdict import Verdict
from tutti.verification.verification import VerificationRequest, VerificationTrial, on_one_device, verify

HERE = Path(__file__).parent


def as_rank(script: str, environment: dict[str, str]) -> None:
    """What one rank does: the script as a program, watched by the recorder, which ends it."""
    os.environ.update(environment, TUTTI_SUPERVISED="1")
    sys.argv = [script]
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    finally:
        atexit._run_exitfuncs()


def run_script(script: Path, trial: VerificationTrial, plan: Plan | None = None) -> str | None:
    """Run a script as one trial, by a plan if one is given; the failure, if it failed."""
    environment = trial.environment
    if plan is not None:
        own = plan if trial.world_size > 1 else on_one_device(plan)
        environment["TUTTI_PLAN"] = str(serialization.save(own, trial.folder / "plan.json"))
    environment["TUTTI_RUN_FOLDER"] = str(trial.run_folder)
    try:
        run_ranks(as_rank, trial.world_size, str(script), environment)
    except RankFailed as error:
        return str(error)
    return None


def verdict_on(
    script: Path | str, *, steps: int = 2, world_size: int = 2, plan: Plan | None = None, **options: Any
) -> Verdict:
    """Verify a script; a name such as "broken/loss_sum.py" is one beside this file."""
    path = HERE / script
    question = VerificationRequest(
        script=path.name, world_size=plan.world_size if plan else world_size, steps=steps, **options
    )
    with tempfile.TemporaryDirectory() as folder:
        return verify(question, lambda trial: run_script(path, trial, plan), Path(folder))
