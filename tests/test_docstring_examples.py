"""The examples in docstrings: every one runs and prints what it says, each module in its own process."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import tutti
from house.tree import PACKAGE, module_name

RUN = """
import doctest, importlib, sys
module = importlib.import_module(sys.argv[1])
result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
assert result.attempted, "no example was found"
sys.exit(bool(result.failed))
"""

FIRST_RUN = """
import torch
from torch.utils.data import TensorDataset
import tutti
job = tutti.Job(global_batch_size=4, folder="runs/first")
model = torch.nn.Linear(3, 1)
data = TensorDataset(torch.ones(8, 3), torch.ones(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = job.prepare(model, optimizer, data, torch.nn.MSELoss())
for epoch in job.epochs(1):
    for batch in loader:
        job.step(batch)
"""
"""The run whose checkpoint the examples of tutti.checkpoint read."""

WITH_EXAMPLES = sorted(
    module_name(path) for path in PACKAGE.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8")
)

CALLED_BY_USERS = {
    "tutti": {
        "Job", "LRRule", "Plan", "ClusterSpec", "Weighted", "replicate", "shard", "split", "stage",
        "Callback", "EarlyStopping", "Logger", "CSVLogger", "TensorBoardLogger",
    },
    "tutti.nn": {
        "BlockPattern", "BlockSparseSelfAttention", "EmbeddingTables", "MixtureOfExperts", "attention",
        "auxiliary_loss", "block_sparse_attention", "document_numbers",
    },
    "tutti.checkpoint": {
        "export_dcp", "import_dcp", "latest_checkpoint", "to_safetensors", "to_state_dict"
    },
    "tutti.optim.large_batch": {"LARS", "LAMB", "nvlamb", "NovoGrad"},
}  # fmt: skip
"""Module -> what scripts call from it: each has an example."""


def run_python(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-c", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_print_what_they_say(module: str, tmp_path: Path) -> None:
    if module.startswith("tutti.checkpoint"):
        run_python(tmp_path, FIRST_RUN)
    run_python(tmp_path, RUN, module)


@pytest.mark.parametrize("package", CALLED_BY_USERS)
def test_what_users_call_has_an_example(package: str) -> None:
    module = importlib.import_module(package)
    without = [name for name in CALLED_BY_USERS[package] if ">>> " not in (getattr(module, name).__doc__ or "")]
    assert not without


def test_the_list_is_of_public_names() -> None:
    assert CALLED_BY_USERS["tutti"] <= set(tutti.__all__)
