"""`--relax`: the relaxation level on the command line of plan and run."""

import json
from pathlib import Path

import pytest

from cost_model.examples import cluster, link
from tutti.cli.main import main
from tutti.config import serialization
from tutti.config.plan import BatchPlan, Plan

Capture = pytest.CaptureFixture[str]

SCRIPT = """
import torch, tutti
job = tutti.Job(global_batch_size=512)
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(3)], torch.nn.Linear(512, 2))
data = torch.utils.data.TensorDataset(torch.randn(2048, 512), torch.arange(2048) % 2)
job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data, torch.nn.functional.cross_entropy)
"""


def told(capsys: Capture, folder: Path, command: str, *options: str, script: str = SCRIPT) -> tuple[int, str, str]:
    file, machines = folder / "train.py", folder / "cluster.json"
    file.write_text(script)
    wires = (link("node"), link("network", 1e-4, 2.5e6))
    serialization.save(cluster(devices_per_node=1, count=4, links=wires), machines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["tutti", command, "--cluster", str(machines), *options, str(file)])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return code, *capsys.readouterr()


def test_a_plan_that_sends_less_is_written_and_explained(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "written.json"
    script = SCRIPT.replace("size=512", "size=2048")  # enough work that several ranks pay, with samples that codes add
    options = ("--relax", "reduced", "--data-parallel", "--output", str(file))
    code, out, err = told(capsys, tmp_path, "plan", *options, script=script)
    assert code == 0, err
    assert "as --relax reduced allows" in " ".join(out.split())
    assert serialization.load(Plan, file).sync.compress is not None


def test_the_relaxation_is_in_the_document(capsys: Capture, tmp_path: Path) -> None:
    code, out, err = told(capsys, tmp_path, "plan", "--relax", "relaxed", "--mesh", "replicate=4", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["request"]["relax"] == "relaxed"
    assert document["relaxation"]["chosen"]
    assert document["relaxation"]["exact_step_s"] > document["relaxation"]["step_s"]
    assert document["best"]["mesh"] == {"replicate": 4}


def test_sparse_gradients_are_not_compressed(capsys: Capture, tmp_path: Path) -> None:
    layers = "torch.nn.Embedding(4096, 512, sparse=True), torch.nn.Flatten(1), *["
    script = SCRIPT.replace("*[", layers, 1).replace("torch.randn(2048, 512)", "torch.arange(2048)")
    code, out, err = told(
        capsys, tmp_path, "plan", "--relax", "reduced", "--data-parallel", "--nproc", "4", "--json", script=script
    )
    assert code == 0, err
    document = json.loads(out)
    assert not document["relaxation"]["chosen"]
    assert "no strategy that sends less applies to these plans" in document["relaxation"]["sentence"]


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        ("plan", ("--relax", "reduced", "--compress", "bytegrad"), "already asks for bytegrad; leave one out"),
        ("plan", ("--relax", "reduced", "--explain", "--nproc", "2"), "--nproc already set what to explain"),
        ("plan", ("--samples-from", "run", "--target-quality", "a=1"), "add --relax reduced or relaxed"),
        ("plan", ("--relax", "relaxed", "--samples-from", "run"), "add --target-quality"),
        ("plan", ("--relax", "half"), "'half' is not one of"),
        ("run", ("--relax", "relaxed", "--plan", "plan.json"), "leave one out"),
        ("run", ("--relax", "relaxed", "--nproc", "1", "--nnodes", "2"), "make the plan first"),
    ],
)  # fmt: skip
def test_what_excludes_it_is_refused_in_one_sentence(
    capsys: Capture, tmp_path: Path, command: str, options: tuple[str, ...], words: str
) -> None:
    plan = tmp_path / "plan.json"
    serialization.save(Plan(batch=BatchPlan(global_batch_size=512)), plan)
    code, out, err = told(capsys, tmp_path, command, *(str(plan) if one == "plan.json" else one for one in options))
    assert code == 2
    assert words in err
    assert out == ""
