"""`tutti describe`: the table, the document, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tutti.cli.describe import command, scaled, tree
from tutti.config.model import Loading, ModelSpec
from tutti.config.serialization import from_data, load
from tutti.errors import DataError, ScriptError, SpecError, TuttiError

SCRIPT = """
import argparse, torch, tutti
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=3)
layers = parser.parse_args().layers

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(300, 300), nn.ReLU()) for _ in range(layers))
        self.head = nn.Linear(300, 2)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

print("a word of the script")
data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 300), torch.zeros(SAMPLES, dtype=torch.long))
job = tutti.Job(global_batch_size=8, seed=0)
model = Net()
job.prepare(model, torch.optim.Adam(model.parameters()), data, nn.CrossEntropyLoss())
raise SystemExit("trained")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("SAMPLES", "20"), encoding="utf-8")
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def refused(*arguments: object) -> TuttiError:
    error = run(*arguments).exception
    assert isinstance(error, TuttiError)
    return error


def test_one_json_document_and_the_same_file(script: Path, tmp_path: Path) -> None:
    output = tmp_path / "made" / "model.json"
    result = run("--json", "--output", output, script, "--layers", "2")
    assert result.exit_code == 0, result.output
    spec = from_data(ModelSpec, json.loads(result.stdout))
    assert spec == load(ModelSpec, output)
    assert (spec.name, spec.optimizer, spec.dataset_samples) == ("train", "Adam", 20)
    assert spec.parameters == 2 * 300 * 301 + 2 * 301
    products = sum(op.flops_forward for module in spec.modules for op in module.ops if op.kind == "gemm")
    assert products == 2 * 2 * 300 * 300 + 2 * 2 * 300
    assert "a word of the script" in result.stderr


SLOW = """
import time, torch, tutti

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        time.sleep(0.003)
        return torch.randn(4), torch.randn(2)

job = tutti.Job(global_batch_size=8, seed=0)
model = torch.nn.Linear(4, 2)
job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), Slow(), torch.nn.MSELoss(), num_workers=2)
"""


def test_what_samples_cost_to_load_is_measured(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text(SLOW, encoding="utf-8")
    result = run("--json", script)
    assert result.exit_code == 0, result.output
    loading = from_data(ModelSpec, json.loads(result.stdout)).loading
    assert loading is not None
    assert loading.core_s + loading.wait_s >= 0.003  # a sleep is never shorter
    assert (loading.workers, loading.stream, loading.evidence) == (2, False, "measured")
    words = run(script).stdout
    assert "data: a sample takes" in words
    assert "2 workers of each rank load ahead" in words


def test_a_description_of_before_data_was_measured_is_read() -> None:
    before = {"name": "m", "modules": [], "version": 1}
    assert from_data(ModelSpec, before).loading is None
    by_hand = from_data(ModelSpec, before | {"loading": {"core_s": "4 ms", "stored_nbytes": "110 kB", "workers": 3}})
    assert by_hand.loading == Loading(core_s=4e-3, stored_nbytes=110e3, workers=3)
    with pytest.raises(SpecError, match="core_s = -1; give 0"):
        from_data(ModelSpec, before | {"loading": {"core_s": -1.0}})


def test_the_table_gathers_equal_layers_and_sums_containers(script: Path) -> None:
    result = run(script)
    assert result.exit_code == 0, result.output
    rows = [[cell.strip() for cell in line.split("│")[1:]] for line in result.stdout.splitlines() if "│" in line]
    # the first block needs no gradient of its input, so it costs less than the others
    assert [row[0] for row in rows] == ["(model)", "blocks", "0", "0", "1", "1-2 (2x)", "0", "1", "head"]
    assert [row[2] for row in rows] == ["272 k", "271 k", "90.3 k", "90.3 k", "", "181 k", "181 k", "", "602"]
    assert "predicted" in result.stdout
    every = run("--all", script).stdout
    assert every.count("Sequential") == 3
    assert "Sequential" not in run("--depth", "1", script).stdout


def test_sums_do_not_depend_on_gathering(script: Path) -> None:
    spec = from_data(ModelSpec, json.loads(run("--json", script).stdout))
    total = tree(spec).total()
    assert total == tree(spec, every=True).total()
    assert total[0] == spec.parameters
    assert total[1:3] == pytest.approx((spec.flops_forward, spec.flops_backward))


def test_what_cannot_be_traced_is_a_note_and_no_failure(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    script.write_text(text.replace("return self.head(x)", "return self.head(x if x.sum() > 0 else -x)"))
    result = run(script)
    assert result.exit_code == 0
    assert "note: the model (Net) could not be traced on shapes alone" in result.stdout


def test_bad_input_is_refused_in_a_sentence(script: Path, tmp_path: Path) -> None:
    assert isinstance(refused(tmp_path / "absent.py"), ScriptError)
    text = script.read_text(encoding="utf-8")
    script.write_text(text.replace("(20", "(0"), encoding="utf-8")
    assert isinstance(refused(script), DataError)
    script.write_text(text.replace("job.prepare", "print"), encoding="utf-8")
    assert "exit code" in str(refused(script))
    script.write_text(text, encoding="utf-8")
    assert "cannot be written" in str(refused("--output", script / "model.json", script))


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0, "B", ""), (12, "B", "12 B"), (999.6, "B", "1.00 kB"), (134217728, "B", "134 MB"), (70.55e9, "", "70.5 B")],
)
def test_scaled(value: float, unit: str, text: str) -> None:
    assert scaled(value, unit) == text


@pytest.mark.parametrize("kept", [0, 200 * 10**6])
def test_what_the_script_keeps_in_memory_is_seen(script: Path, tmp_path: Path, kept: int) -> None:
    """A list of its own beside its data set, as a data set in memory would be; parameters are on no device, and what
    every rank loads, some 90 MB, is not the script's own. In a process of its own, which has loaded none of that."""
    text = f"kept = bytearray(b'x' * {kept})\n" + script.read_text(encoding="utf-8")
    script.write_text(text.replace("nn.Linear(300, 300)", "nn.Linear(3000, 3000)"), encoding="utf-8")
    code, output = "from tutti.cli.main import main; main()", tmp_path / "model.json"
    words = ("describe", "--output", str(output), str(script), "--layers", "8")
    subprocess.run((sys.executable, "-c", code, *words), timeout=100, check=True, capture_output=True)
    model = load(ModelSpec, output)
    assert model.parameters * 4 > 250e6
    assert kept <= model.script_nbytes <= kept + 30e6
