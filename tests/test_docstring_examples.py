"""The examples in docstrings: every one runs and prints what it says, each module in its own process."""

import ast
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

WITH_EXAMPLES = sorted(
    module_name(path) for path in PACKAGE.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8")
)

CALLED_BY_USERS = {
    "tutti": {"Job", "LRRule", "Plan", "ClusterSpec", "Weighted", "replicate", "shard", "split", "stage"},
    "tutti.nn": {
        "BlockPattern", "BlockSparseSelfAttention", "EmbeddingTables", "MixtureOfExperts", "auxiliary_loss",
        "block_sparse_attention",
    },
    "tutti.checkpoint": {
        "export_dcp", "import_dcp", "latest_checkpoint", "to_safetensors", "to_state_dict"
    },
    "tutti.optim.large_batch": {"LARS", "LAMB", "nvlamb", "NovoGrad"},
}  # fmt: skip
"""Module -> what scripts call from it: each has an example."""


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_print_what_they_say(module: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, module]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("package", CALLED_BY_USERS)
def test_what_users_call_has_an_example(package: str) -> None:
    documents: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in CALLED_BY_USERS[package]:
                documents.setdefault(node.name, []).append(ast.get_docstring(node) or "")
    without = [name for name in CALLED_BY_USERS[package] if not any(">>> " in text for text in documents.get(name, ()))]
    assert not without


def test_the_list_is_of_public_names() -> None:
    assert CALLED_BY_USERS["tutti"] <= set(tutti.__all__)
