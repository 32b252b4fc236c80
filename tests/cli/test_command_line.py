"""What a person who mistypes, reads JSON or has spaces in names meets on the command line."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import tutti
from cli.commands import called
from cost_model.examples import cluster
from tutti.config import serialization
from tutti.config.mesh_axes import parse_mesh
from tutti.config.plan import BatchPlan, Plan, ShardingPlan

Says = Callable[..., tuple[int, str, str]]

SCRIPT = """
import torch, tutti
from torch import nn
job = tutti.Job(global_batch_size=8)
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 2))
job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, nn.MSELoss())
"""


@pytest.fixture
def tutti_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Says:
    """Run a command; return its exit code, standard output and standard error on one line."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT, encoding="utf-8")

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = called(monkeypatch, *words)
        out, err = capsys.readouterr()
        return code, out, " ".join(err.split())

    return run


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("rn train.py", "did you mean `tutti run`?"),
        ("train.py", "did you mean `tutti run train.py`?"),
        ("zzz", "`tutti --help` lists them"),
        ("run --array lr=1,2 train.py --lr {lr}", "--array is an option of tutti submit, not of tutti run"),
        ("run train.py --foldr x", "--foldr is not an option of tutti, and the script does not name it; did"),
        ("verify --nprc=2 train.py", "did you mean --nproc?"),
        ("plan train.py --explan", "did you mean --explain?"),
        ("describe train.py --jso", "did you mean --json?"),
        ("run --foldr x", "did you mean --folder?"),
    ],
)  # fmt: skip
def test_misspelt_words_are_named(tutti_says: Says, words: str, hint: str) -> None:
    code, out, err = tutti_says(*words.split())
    assert code == 2
    assert hint in err
    assert not out


def test_options_of_the_script_are_the_scripts(tutti_says: Says) -> None:
    ends = "print(sys.argv[1:]); sys.exit(0)\n"
    Path("own.py").write_text(f"import sys\n# takes --foldr\n{ends}", encoding="utf-8")
    Path("other.py").write_text(f"import sys\n{ends}", encoding="utf-8")
    for words in ("own.py --foldr x", "other.py --unlike x", "other.py -- --foldr x"):
        _, _, err = tutti_says("describe", *words.split())
        assert "ended without calling job.prepare" in err, err
        assert words.replace("-- ", "").split()[1] in err, "the script has got it"


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ("describe nothere.py --json", "ScriptError", "nothere.py does not exist"),
        ("plan train.py --mesh stagge=2 --json --explain", "PlanError", "did you mean 'stage'?"),
        ("run train.py --foldr x --json", "UsageError", "did you mean --folder?"),
        ("rn --json", "UsageError", "did you mean `tutti run`?"),
    ],
)
def test_errors_are_json_where_json_is_asked_for(tutti_says: Says, words: str, error: str, message: str) -> None:
    code, out, _ = tutti_says(*words.split())
    document = json.loads(out)
    assert (code, document["exit_code"], document["status"], document["error"]) == (2, 2, "failed", error)
    assert message in document["message"]


def test_a_scripts_own_error_is_shown_without_tuttis_frames(tutti_says: Says) -> None:
    Path("broken.py").write_text("def f():\n    return 1 / 0\n\n\nf()\n", encoding="utf-8")
    for command in ("describe", "plan"):
        code, _, err = tutti_says(command, "broken.py")
        assert code == 2
        assert err.startswith("tutti: broken.py failed before its Job was prepared: Traceback")
        assert "ZeroDivisionError" in err
        assert "runpy" not in err
        assert "options.py" not in err


def test_printed_commands_can_be_pasted(tutti_says: Says) -> None:
    serialization.save(cluster(), Path("here.json"))
    Path("my train.py").write_text(SCRIPT, encoding="utf-8")
    code, _, err = tutti_says("plan", "my train.py", "--cluster", "here.json", "--output", "the best.json")
    assert code == 0
    wanted = ["tutti", "run", "--plan", "the best.json", "my train.py"]
    assert shlex.split(err[err.index("tutti run") :])[: len(wanted)] == wanted


def test_a_mesh_of_stages_and_shards_gets_a_level_that_it_allows(tutti_says: Says) -> None:
    code, out, err = tutti_says("plan", "--explain", "--mesh", "stage=2,shard=2", "train.py")
    assert code == 0, err
    assert out
    plan = Plan(batch=BatchPlan(global_batch_size=8))
    assert plan.on(parse_mesh("stage=2,shard=2")).sharding.level == 1
    assert plan.on(parse_mesh("shard=2")).sharding.level == 3
    stated = Plan(batch=BatchPlan(global_batch_size=8), sharding=ShardingPlan(level=2))
    assert stated.on(parse_mesh("stage=2,shard=2")).sharding.level == 2, "what is stated stays, and is refused by name"


def test_resuming_a_finished_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def train(epochs: int, resume: str | None) -> str:
        job = tutti.Job(global_batch_size=8, folder="run", resume=resume)
        model = nn.Linear(4, 2)
        data = TensorDataset(torch.ones(16, 4), torch.ones(16, 2))
        model, _, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, nn.MSELoss())
        for _ in job.epochs(epochs):
            for batch in loader:
                job.step(batch)
        return " ".join(capsys.readouterr().err.split())

    words = "the run has already trained 2 epochs, and job.epochs(2) asks for no more"
    assert words not in train(2, None)
    assert words in train(2, "run")
    assert "asks for no more" not in train(3, "run")
