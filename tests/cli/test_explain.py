"""`tutti plan --explain` shows the layout as a tree, and as JSON."""

import json
from pathlib import Path

import pytest

from cost_model.examples import cluster
from tutti.cli.main import main
from tutti.cli.plan import gathered
from tutti.config import serialization
from tutti.config.plan import Plan
from tutti.config.prediction import ModulePlacement

SCRIPT = """
import torch, tutti
job = tutti.Job(global_batch_size=8)
model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)], torch.nn.Linear(4, 2))
data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.arange(16) % 2)
MARKS
job.prepare(model, torch.optim.Adam(model.parameters()), data, torch.nn.functional.cross_entropy)
"""


Capture = pytest.CaptureFixture[str]


def explained(capsys: Capture, tmp_path: Path, *options: str, marks: str = "") -> tuple[int, str, str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("MARKS", marks))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["tutti", "plan", *options, str(script)])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return code, *capsys.readouterr()


def test_a_stated_mesh_is_explained_as_a_tree(capsys: Capture, tmp_path: Path) -> None:
    code, out, _ = explained(capsys, tmp_path, "--mesh", "replicate=2", "--output", str(tmp_path / "plan.json"))
    assert code == 0
    assert "Layout over replicate 2; ranks shown: all 2" in out
    assert "0-2 Linear: whole, 80 B per rank" in out
    assert "gradients reduced over replicate" in out
    assert serialization.load(Plan, tmp_path / "plan.json").mesh == {"replicate": 2}


def test_the_gradient_of_the_batch_is_not_listed(capsys: Capture, tmp_path: Path) -> None:
    """Of two equal pairs of layers the first has nothing before it that is trained."""
    code, out, _ = explained(capsys, tmp_path, "--mesh", "split=2", "--explain", "--json")
    assert code == 0
    found = {one["name"]: one["collectives"] for one in json.loads(out)["modules"]}
    assert found == {
        "0": [],
        "1": ["forward: all-reduce over split of 4 values per row"],
        "2": ["backward: all-reduce over split of 4 values per row"],
        "3": ["forward: all-reduce over split of 2 values per row"],
    }


def test_the_same_as_json(capsys: Capture, tmp_path: Path) -> None:
    code, out, _ = explained(capsys, tmp_path, "--nproc", "3", "--explain", "--json")
    assert code == 0
    data = json.loads(out)
    assert data["mesh"] == {"replicate": 3}
    assert data["parameter_nbytes_per_rank"] == [280, 280, 280]
    assert data["state_nbytes_per_rank"] == [4 * 280] * 3


def test_what_cannot_be_is_refused_in_one_sentence(capsys: Capture, tmp_path: Path) -> None:
    code, out, err = explained(capsys, tmp_path, "--mesh", "rows=2")
    assert code == 2
    assert not out
    assert "there is no axis 'rows'" in err
    code, _, err = explained(capsys, tmp_path, "--mesh", "replicate=2", "--try", "2")
    assert code == 2
    assert "--try and --scaling search for plans" in err


def test_with_a_cluster_the_step_is_drawn_too_and_a_page_written(capsys: Capture, tmp_path: Path) -> None:
    machines, page = serialization.save(cluster(), tmp_path / "here.json"), tmp_path / "plan.html"
    given = ("--mesh", "replicate=2", "--cluster", str(machines), "--html", str(page))
    code, out, err = explained(capsys, tmp_path, *given)
    assert code == 0, err
    assert out.index("Layout over replicate 2") < out.index("One step, predicted")
    assert "train on here" in page.read_text(encoding="utf-8")


def test_equal_numbered_siblings_are_shown_once() -> None:
    def row(name: str, nbytes: int = 8) -> ModulePlacement:
        return ModulePlacement(name=name, kind="Linear", placement="whole", nbytes=nbytes, nbytes_per_rank=(nbytes,))

    rows = (row("a.0.x"), row("a.0.y"), row("a.1.x"), row("a.1.y"), row("a.2.x", 16), row("b"))
    assert [name for name, _ in gathered(rows)] == ["a.0-1.x", "a.0-1.y", "a.2.x", "b"]
