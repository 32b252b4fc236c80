"""Each command as a function: it returns values, prints nothing, and refuses with the sentence of the command."""

import inspect
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import tutti
from cost_model.examples import cluster, gpu, link, mlp, plan
from tutti.cli.main import cli
from tutti.commands.capture import capture_script
from tutti.config import serialization
from tutti.config.model import ModelSpec
from tutti.config.plan import Plan
from tutti.errors import PlanError, ReportError, ScriptError, SpecError, TrainingError

SCRIPT = """
import random
import sys

import torch
from torch import nn

import tutti
from parts import width

print("a line of the script")
random.seed(1)
torch.manual_seed(1)
torch.set_default_dtype(torch.float64)
data = torch.utils.data.TensorDataset(torch.zeros(100, width).float(), torch.zeros(100, dtype=torch.long))
model = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 4)).float()
job = tutti.Job(global_batch_size=20)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = job.prepare(model, optimizer, data, nn.functional.cross_entropy)
"""

CARDS = cluster(gpu(), (link("node", 1e-5, 1e11),), devices_per_node=4)

COMMANDS = ("plan", "run", "verify", "report", "describe", "predict", "probe", "calibrate", "doctor", "export",
            "validate", "why")  # fmt: skip

NAMES = {"timeout_s": "timeout", "launcher": "on", "file": "to", "fits": "fit", "families": "family"}
NAMES |= {"grace_s": "grace", "time_limit_s": "time_limit", "places": "runs"}
"""Names of parameters of commands that their functions call otherwise."""

SHOWN_ONLY = {"as_json", "html", "top", "diff", "explain", "depth", "every", "plot", "no_plot", "show_parts",
              "open_page", "columns", "one_screen", "progress", "stacks", "target", "requests",
              "hosts", "dry_run"}  # fmt: skip
"""Options that say how a command shows its result, the script with its arguments, and those of a cluster's job."""


def write_script(folder: Path, width: int) -> Path:
    folder.mkdir()
    (folder / "parts.py").write_text(f"width = {width}\n")
    (folder / "train.py").write_text(SCRIPT)
    return folder / "train.py"


def refusal(*arguments: str) -> str:
    """Return the sentence with which a command refuses."""
    result = CliRunner().invoke(cli, arguments, catch_exceptions=True)
    assert isinstance(result.exception, tutti.TuttiError), result.output
    return str(result.exception)


@pytest.mark.parametrize("name", COMMANDS)
def test_functions_have_the_options_of_their_commands(name: str) -> None:
    command = cli.get_command(None, name)  # type: ignore[arg-type]
    assert command is not None
    options = {NAMES.get(str(param.name), str(param.name)) for param in command.params} - SHOWN_ONLY
    parameters = set(inspect.signature(getattr(tutti, name)).parameters)
    if name == "plan":
        options.remove("plan")  # `tutti.explain` has it
    if name in ("doctor", "probe"):
        # Nodes print what they find, which no function returns.
        options -= {"on", "node_rank", "rendezvous", "send"} if name == "probe" else {"on"}
    assert options - parameters == set()


def test_functions_return_values_and_print_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script, other = write_script(tmp_path / "one", 8), write_script(tmp_path / "two", 12)
    state, numbers = torch.get_rng_state(), random.getstate()
    model = tutti.describe(script)
    assert isinstance(model, ModelSpec)
    assert model.inputs[0].shape == (8,)
    assert tutti.describe(other).inputs[0].shape == (12,), "the other script's own module, not the first one's"
    assert "parts" not in sys.modules
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == numbers
    assert torch.get_default_dtype() == torch.float32
    planned = tutti.plan(script, cluster=CARDS, nproc=2, output=tmp_path / "best.json")
    assert planned.plan.world_size == 2
    assert planned.choice.prediction.fits
    assert serialization.load(Plan, tmp_path / "best.json").mesh == planned.plan.mesh
    assert tutti.explain(script, mesh={"replicate": 2}).mesh == {"replicate": 2}
    prediction = tutti.predict(plan(4096, 2), model=mlp(4096, 4), cluster=CARDS)
    assert prediction.step_time_s.value > 0
    assert tutti.probe(device="2x8:a100-80gb,nvlink3,8*ib-hdr").device_count == 16  # type: ignore[union-attr]
    assert capfd.readouterr() == ("", "")
    tutti.describe(script, verbose=True)
    assert "a line of the script" in capfd.readouterr().err


def test_functions_take_specs_and_files_alike(tmp_path: Path) -> None:
    files = {name: serialization.save(spec, tmp_path / f"{name}.json")
             for name, spec in {"cluster": CARDS, "model": mlp(4096, 4), "plan": plan(4096, 2)}.items()}  # fmt: skip
    given = tutti.predict(plan(4096, 2), model=mlp(4096, 4), cluster=CARDS)
    assert tutti.predict(files["plan"], model=files["model"], cluster=str(files["cluster"])) == given
    limits = {"global_batch_size": 4096, "memory": "60gb", "max_devices": 2}
    first = tutti.plan(model=mlp(4096, 4), cluster=CARDS, **limits)  # type: ignore[arg-type]
    second = tutti.plan(files["model"], cluster=files["cluster"], **limits)  # type: ignore[arg-type]
    assert first.plan == second.plan


def test_refusals_are_those_of_the_commands(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.py")
    empty = tmp_path / "empty"
    empty.mkdir()
    cases: list[tuple[Any, type[Exception], tuple[str, ...]]] = [
        (lambda: tutti.describe(missing), ScriptError, ("describe", missing)),
        (lambda: tutti.plan(missing, cluster=CARDS), ScriptError, ("plan", missing)),
        (lambda: tutti.plan("llama3-8b"), PlanError, ("plan", "llama3-8b")),
        (lambda: tutti.run(missing), ScriptError, ("run", missing)),
        (lambda: tutti.verify(missing), ScriptError, ("verify", missing)),
        (lambda: tutti.report(empty), ReportError, ("report", str(empty))),
        (lambda: tutti.report(), ReportError, ("report",)),
        (lambda: tutti.export(missing, to="m.bin"), SpecError, ("export", missing, "--to", "m.bin")),
        (lambda: tutti.calibrate(empty), ReportError, ("calibrate", str(empty))),
        (lambda: tutti.run(__file__, nnodes=2), tutti.TuttiError, ("run", "--nnodes", "2", __file__)),
    ]
    for call, kind, arguments in cases:
        with pytest.raises(kind) as raised:
            call()
        assert str(raised.value) == refusal(*arguments)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tutti.plan("gpt2", nproc=0), "nproc=0: give a whole number of 1 or more"),
        (lambda: tutti.plan("gpt2", objective="speed"), "objective='speed': give one of 'throughput'"),  # type: ignore[arg-type]
        (lambda: tutti.plan("gpt2", memory="60 apples"), "memory='60 apples' is not understood"),
        (lambda: tutti.run("train.py", arguments="--epochs 3"), "give a list, such as ['--epochs', '3']"),
        (lambda: tutti.run("train.py", nproc="two"), "'two' is not a number"),
        (lambda: tutti.verify("train.py", timeout=0), "timeout=0: give a number above 0"),
        (lambda: tutti.plan("gpt2", mesh=["shard", 2]), "mesh=['shard', 2]: give a dict, such as {'shard': 2}"),
        (lambda: tutti.plan("train.py", None), "arguments=None: give a list, such as ['--epochs', 3]"),
        (lambda: tutti.plan("train.py", {"epochs": 3}), "arguments={'epochs': 3}: give a list"),
        (lambda: tutti.describe("train.py", 3), "arguments=3: give a list"),
        (lambda: tutti.plan("gpt2", memory=[1]), "memory=[1] is not understood"),
        (lambda: tutti.plan("gpt2", cluster=3), "cluster=3: give a path or a ClusterSpec"),
        (lambda: tutti.plan("gpt2", compress=3), "compress=3: give a text"),
        (lambda: tutti.plan("gpt2", samples_from=[3]), "samples_from=3: give a path"),
        (lambda: tutti.plan("gpt2", what_if="link=10gbit"), "what_if='link=10gbit' is one text; give a list"),
        (lambda: tutti.verify("train.py", plan=3), "plan=3: give a path or a Plan"),
        (lambda: tutti.verify(None), "script=None: give a path"),
        (lambda: tutti.run("train.py", sync=3), "sync=3: give a text"),
        (lambda: tutti.run("train.py", folder=3), "folder=3: give a path"),
        (lambda: tutti.calibrate(["r2"]), "run=['r2']: give a path"),
        (lambda: tutti.report(["r2"]), "run=['r2']: give a path"),
        (
            lambda: tutti.calibrate("s3://bucket/run"),
            "run=s3://bucket/run is an address, and a path on this",
        ),
        (lambda: tutti.report("r2", facts=["a"]), "report(facts=...) got ['a']; give a dict"),
        (lambda: tutti.report("r2", facts={1: "a"}), "report(facts=...) has 1 as a name; names of facts are texts"),
        (lambda: tutti.Job(global_batch_size=1, facts=["a"]), "Job(facts=...) got ['a']; give a dict"),
    ],
)
def test_arguments_are_checked(call: Any, words: str) -> None:
    with pytest.raises(tutti.TuttiError) as raised:
        call()
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_script_that_hangs_ends_with_one_sentence(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\n\ntry:\n    time.sleep(60)\nexcept Exception:\n    pass\n")
    for call in (tutti.describe, tutti.explain, tutti.plan):
        with pytest.raises(TrainingError, match=r"train.py did not get as far as .* but was in train.py, line 4"):
            call(script, timeout=0.2)
    script.write_text(SCRIPT.replace("from parts import width", "width = 4"))
    captured: list[object] = []
    thread = threading.Thread(target=lambda: captured.append(capture_script(script, ())))
    thread.start()  # a time limit needs the main thread; without one the script runs all the same
    thread.join()
    torch.set_default_dtype(torch.float32)
    assert captured


def test_importing_a_package_does_not_hide_a_function() -> None:
    code = (
        "import tutti, tutti.verification.recorder, tutti.reporting.svg, tutti.validation.scoring\n"
        "assert all(callable(getattr(tutti, name)) for name in ('verify', 'report', 'validate', 'plan', 'run'))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
