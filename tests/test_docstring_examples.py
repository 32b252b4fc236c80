"""The examples in docstrings: every one runs and prints what it says, each module in its own process."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import tutti
from house.tree import PACKAGE, module_name

RUN_ALL = """
import atexit, doctest, importlib, json, os, shutil, sys, traceback
from tutti.launch import preload
preload.load_modules()

def in_process(folder, function, *arguments):
    sys.stdout.flush()
    if (process := os.fork()) == 0:
        os.chdir(folder)
        output = os.open("output.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1), os.dup2(output, 2)
        try:
            code = function(*arguments)
            atexit._run_exitfuncs()
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

def run(text):
    exec(text, {"__name__": "__main__"})
    return 0

def examples(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.attempted, "no example was found"
    return int(bool(result.failed))

os.mkdir("first")
assert in_process("first", run, sys.argv[1]) == 0, open("first/output.txt").read()
codes = {}
for name in sys.argv[2:]:
    shutil.copytree("first", name)
    codes[name] = in_process(name, examples, name)
print(json.dumps(codes))
"""
"""Runs the examples of each module in a process of its own, which is forked, as importing torch takes seconds."""

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


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """Where each module's output is, and its exit code."""
    folder = tmp_path_factory.mktemp("examples")
    command = [sys.executable, "-c", RUN_ALL, FIRST_RUN, *WITH_EXAMPLES]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, json.loads(done.stdout)


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_print_what_they_say(module: str, examples: tuple[Path, dict[str, int]]) -> None:
    folder, codes = examples
    assert codes[module] == 0, (folder / module / "output.txt").read_text()


@pytest.mark.parametrize("package", CALLED_BY_USERS)
def test_what_users_call_has_an_example(package: str) -> None:
    module = importlib.import_module(package)
    without = [name for name in CALLED_BY_USERS[package] if ">>> " not in (getattr(module, name).__doc__ or "")]
    assert not without


def test_the_list_is_of_public_names() -> None:
    assert CALLED_BY_USERS["tutti"] <= set(tutti.__all__)
