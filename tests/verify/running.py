"""Runs a script for verification on ranks forked from the tests' preloaded server."""

import atexit
import os
import runpy
import sys
import tempfile
from pathlib import Path

from harness import RankFailed, run_ranks
from tutti.spec.verdict import Verdict
from tutti.verify.trial import Question, Trial, verify

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


def run_script(script: Path, trial: Trial) -> str | None:
    """Run a script as one trial; the failure, if it failed."""
    try:
        run_ranks(as_rank, trial.world_size, str(script), trial.environment)
    except RankFailed as error:
        return str(error)
    return None


def verdict_on(script: str, world_size: int = 2, steps: int = 2, **options: object) -> Verdict:
    """Verify a script beside this file, such as "broken/sum_loss.py"."""
    path = HERE / script
    question = Question(script=path.name, world_size=world_size, steps=steps, **options)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        return verify(question, lambda trial: run_script(path, trial), Path(folder))
