"""The rules of the house hold: layers, sizes, finished work, one reader of the environment, small face."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from house.layers import ALLOWED, import_circle, layer_of, upward_imports
from house.tails import environment_uses, machine_paths, oversized, undocumented, unfinished
from house.terms import repeated_classes, repeated_files, retired_identifiers, retired_in_messages
from house.tree import PACKAGE, ROOT, module_name, name_of, python_files, tracked_files

SIZE_EXCEPTIONS: dict[str, str] = {}
"""File -> why it may exceed a budget of size."""

ENVIRONMENT_FILES: dict[str, str] = {
    "src/tutti/environment.py": "the one reader",
    "src/tutti/launch/launch_environment.py": "composes the environment that a rank is started with",
    "src/tutti/profile/probe/host_facts.py": "the user's cache folder, and the network interface of the probe's ranks",
}
"""File -> why it touches the environment. Only environment.py reads variables that change what a run does."""

PUBLIC_NAMES = [
    "AveragedWeights",
    "CSVLogger",
    "Callback",
    "ClusterSpec",
    "EarlyStopping",
    "Job",
    "LRRule",
    "Logger",
    "MLflowLogger",
    "ModelSpec",
    "Plan",
    "Prediction",
    "RunReport",
    "SubmittedJob",
    "TensorBoardLogger",
    "TuttiError",
    "WandbLogger",
    "Weighted",
    "attach",
    "calibrate",
    "describe",
    "doctor",
    "explain",
    "export",
    "notebook",
    "plan",
    "predict",
    "probe",
    "replicate",
    "report",
    "run",
    "shard",
    "split",
    "stage",
    "submit",
    "synchronized",
    "validate",
    "verify",
    "why",
]


def findings(paths: list[Path], check: Callable[[str], list[str]], excepted: dict[str, str] | None = None) -> list[str]:
    return [
        f"{name_of(path)}: {finding}"
        for path in paths
        if name_of(path) not in (excepted or {})
        for finding in check(path.read_text(encoding="utf-8"))
    ]


def report(found: list[str]) -> None:
    assert not found, "\n" + "\n".join(found)


# The project's own files


def test_imports_point_downward() -> None:
    report(
        [
            f"{name_of(path)}: {finding}"
            for path in python_files("src/tutti")
            for finding in upward_imports(
                path.read_text(encoding="utf-8"), module_name(path), is_package=path.name == "__init__.py"
            )
        ]
    )


def test_every_layer_is_in_the_table() -> None:
    layers = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    layers |= {path.stem for path in PACKAGE.glob("*.py") if path.stem not in ("__init__", "__main__")}
    assert layers <= set(ALLOWED), f"add to house/layers.py: {sorted(layers - set(ALLOWED))}"


def test_the_table_of_layers_has_no_cycle() -> None:
    below = dict(ALLOWED)
    while below:
        lowest = [layer for layer, allowed in below.items() if not allowed & below.keys()]
        assert lowest, f"these layers import each other: {sorted(below)}"
        for layer in lowest:
            del below[layer]


def test_sizes_are_within_budget() -> None:
    files = python_files("src", "tests", "examples", "benchmarks")
    report(findings(files, oversized, SIZE_EXCEPTIONS))


def test_exceptions_are_still_needed() -> None:
    for name in SIZE_EXCEPTIONS:
        assert oversized((ROOT / name).read_text(encoding="utf-8")), f"{name} is within budget: remove its exception"
    for name in ENVIRONMENT_FILES:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert environment_uses(text), f"{name} does not touch the environment: remove its exception"


def test_no_work_is_left_unfinished() -> None:
    files = python_files("src", "tests", "examples", "benchmarks")
    files += [path for path in PACKAGE.rglob("*") if path.suffix in (".html", ".css", ".js", ".json")]
    report(findings(files, unfinished))


def test_every_module_has_a_docstring() -> None:
    report(findings(python_files("src", "tests", "examples", "benchmarks"), undocumented))


def test_retired_words_are_gone() -> None:
    found = []
    for path in python_files("src"):
        name, source = name_of(path), path.read_text(encoding="utf-8")
        found += [f"{name}: {one}" for one in (*retired_identifiers(source, name), *retired_in_messages(source, name))]
    report(found)


def test_one_name_means_one_thing() -> None:
    files = python_files("src")
    report([*repeated_classes(files), *repeated_files(files)])


def test_no_module_imports_itself_through_others() -> None:
    circle = import_circle(python_files("src/tutti"))
    assert not circle, " imports ".join(circle)


def test_the_environment_is_read_in_one_file() -> None:
    report(findings(python_files("src"), environment_uses, ENVIRONMENT_FILES))


def test_no_file_names_a_path_of_one_machine() -> None:
    files = tracked_files()
    if files is None:
        pytest.skip("not a git checkout")
    texts = [path for path in files if b"\0" not in path.read_bytes()[:8192]]
    report(findings(texts, machine_paths))


def test_import_tutti_is_light() -> None:
    code = "import sys, json, tutti; print(json.dumps(sorted(m for m in sys.modules if '.' not in m)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    heavy = {"torch", "numpy", "matplotlib", "pydantic", "rich", "jinja2", "tensorboardX"}
    assert not heavy & set(json.loads(run.stdout))


def test_public_names_are_frozen() -> None:
    import tutti

    assert sorted(tutti.__all__) == PUBLIC_NAMES, "a public name was added or removed: say so in CHANGELOG.md"
    for name in tutti.__all__:
        assert getattr(tutti, name) is not None
    assert set(tutti.__all__) <= set(dir(tutti))


# The checkers themselves: each finds what it is for, and leaves what is right alone


@pytest.mark.parametrize(
    ("module", "source", "count"),
    [
        ("tutti.cost_model.step_time", "from tutti.config.plan import Plan\nimport numpy as np\nimport math", 0),
        ("tutti.cost_model.step_time", "import torch", 1),
        ("tutti.cost_model.step_time", "def f():\n    import torch.nn as nn", 1),
        ("tutti.cost_model.step_time", "import time", 1),
        ("tutti.cost_model.step_time", "from pathlib import Path", 1),
        ("tutti.planner.plan_search", "from pathlib import Path", 0),
        ("tutti.planner.plan_search", "from tutti.cost_model import memory", 0),
        ("tutti.config.plan", "from tutti import trainer", 1),
        ("tutti.config.plan", "import tutti.trainer.job", 1),
        ("tutti.config.plan", "from ..trainer import job", 1),
        (
            "tutti.config.plan",
            "from . import words\nfrom .words import Unit\nfrom ..errors import PlanError",
            0,
        ),
        (
            "tutti.trainer.job",
            "from importlib import import_module\nimport_module('tutti.verification.compare_recordings')",
            1,
        ),
        ("tutti.trainer.job", "if TYPE_CHECKING:\n    from tutti.cli.main import main", 1),
        ("tutti.trainer.job", "import tutti", 1),
        ("tutti.cli.run", "import tutti\nfrom tutti.verification import compare", 0),
        ("tutti.errors", "import pydantic", 1),
    ],
)
def test_layer_checker(module: str, source: str, count: int) -> None:
    assert len(upward_imports(source, module)) == count


def test_layer_checker_resolves_relative_imports_of_a_package() -> None:
    assert upward_imports("from .plan import Plan", "tutti.config", is_package=True) == []
    assert upward_imports("from ..planner import search", "tutti.config", is_package=True) != []


def test_layer_of() -> None:
    assert [layer_of(name) for name in ("tutti", "tutti.Job", "tutti.config", "tutti.config.plan.Plan")] == [
        "",
        "",
        "config",
        "config",
    ]


def test_size_checker() -> None:
    body = "\n".join("    x = 1" for _ in range(59))
    assert oversized(f"def f():\n{body}") == []
    assert oversized(f'def f():\n    """One\n    two\n    three."""\n{body}') == []
    assert oversized(f"def f():\n{body}\n    x = 2") == ["line 1: f has 61 lines; at most 60"]
    assert oversized(f"class A:\n    async def f(self):\n{body.replace('    ', '        ')}\n        x = 2") != []
    methods = "\n".join(f"    def m{i}(self): ..." for i in range(20))
    assert oversized(f"class A:\n{methods}") == []
    assert oversized(f"class A:\n{methods}\n    def one_more(self): ...") == ["line 1: A has 21 methods; at most 20"]
    assert oversized("x = 1\n" * 700) == []
    assert oversized("x = 1\n" * 701) == ["701 lines; at most 700"]


@pytest.mark.parametrize("mark", ["TO" + "DO", "FIX" + "ME", "raise NotImplemented" + "Error"])
def test_mark_checker(mark: str) -> None:
    assert unfinished(f"x = 1\n# {mark}: later") != []
    assert unfinished("methods to do, fixed, replaced; except NotImplementedError:") == []


def test_docstring_checker() -> None:
    assert undocumented("") == []
    assert undocumented("x = 1") == ["the module has no docstring"]
    assert undocumented('"""What it is."""') == []


@pytest.mark.parametrize("word", ["party", "parties", "crowded", "WISHES", "paced", "dialling", "seating"])
def test_word_checker(word: str) -> None:
    name = word if word.isupper() else f"my_{word}"
    assert retired_identifiers(f"{name} = 1", "src/a.py") != []
    assert retired_identifiers(f"# {word}\nx = 1", "src/a.py") == []
    assert retired_identifiers("always = space = forward = 1", "src/a.py") == []
    assert retired_in_messages("f'a {crowded} place'", "src/a.py") == []
    assert retired_in_messages("print('crowded cores')", "src/a.py") != []


@pytest.mark.parametrize(
    "source",
    ["import os\nos.environ['A']", "os.getenv('A')", "from os import environ", "def f():\n    os.environ"],
)
def test_environment_checker(source: str) -> None:
    assert environment_uses(source) != []
    assert environment_uses("import os\nos.path.join('a', environ['b'])\nself.environ = 1") == []


@pytest.mark.parametrize("path", ["/wo" + "rk/main/x", "see ../sha" + "red/y", "/ro" + "ot/.cache", "/ho" + "me/me/x"])
def test_path_checker(path: str) -> None:
    assert machine_paths(f"open('{path}')") != []
    assert machine_paths("network/main, a.work/x, /var/tmp, https://example.org/root/") == []
