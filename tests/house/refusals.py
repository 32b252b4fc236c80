"""The page docs/refusals.md, written from the registry and from every `raise PlanError` of the source.

`python -m house.refusals`, run in tests/, writes the page again.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from house.tree import PACKAGE, ROOT, module_name
from tutti.config.codec_registry import CODECS
from tutti.config.refusals import REFUSALS
from tutti.config.vocabulary import AxisName

PAGE = ROOT / "docs" / "refusals.md"

_HEAD = """# Refusals

tutti refuses a plan that cannot be right before training starts. The message names the fields, the reason and the
remedy. Look the refusal up by a part of its sentence. The message of a refused combination ends with its code in
brackets. In Python the code is `PlanError.code`.

## By subject

| subject | codes |
|---|---|
"""

_COMBINATIONS = """
## Combinations in a plan

The planner, the cost model, `tutti verify` and the runtime check every plan against this table
(`tutti/config/refusals.py`). [Contributing](contributing.md) shows how another package adds a row. `...` stands for
the values of the case.

| code | combination | sentence |
|---|---|---|
"""

_PLACES = """
## What a model, a cluster or a command line decides

The code is the place that refuses: module and function.

| code | sentence |
|---|---|
"""

_SUBJECTS = {
    "pipeline stages (`stage`)": (r"mesh\.stage|\bstages?\b|stages_per_rank|pipeline", "parallel.pipeline"),
    "tensor parallelism (`split`)": (r"mesh\.split|\bsplit\b|split axis|split_shares", "parallel.tensor"),
    "sharding (`shard`)": (r"mesh\.shard|tutti\.shard|sharding\.(level|offload)|^[a-z-]*shard", "parallel.sharding"),
    "context parallelism (`context`)": (r"mesh\.context|\bcontext\b|sequences", "parallel.context"),
    "experts (`expert`)": (r"mesh\.expert|\bexperts?\b", "parallel.expert"),
    "embedding tables (`table`)": (r"mesh\.table|\btables?\b", "parallel.embedding"),
    "spatial parallelism (`space`)": (r"mesh\.space|\bspace\b|space_grid", "parallel.spatial"),
    "replicas that diverge (`sync.mode`)": (r"sync\.mode|sync\.relaxed|diverge", "local_sgd", "async_sgd"),
    "compressed gradients (`compress`)": (r"compress|\bcodecs?\b", "compression", "parallel.compressed"),
    "batch and microbatches": (r"global_batch_size|num_microbatches|global batch|batch\.",),
    "clusters, devices and memory": (r"\bcluster\b|devices?\b|memory\b|\blinks?\b",),
}
"""Subject -> the pattern of texts about it, and the packages that are about nothing else."""

_ANY_AXIS = " ".join(f"mesh.{axis}" for axis in get_args(AxisName))
"""What a sentence is about that fills in the axis."""


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """A refusal: its code, its sentences, and every text that shows what it is about."""

    code: str
    sentence: str
    text: str


def _template(node: ast.expr) -> str:
    """Return the text of a message, with `...` for values that are filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
    if isinstance(node, ast.BinOp):
        return _template(node.left) + _template(node.right)
    return "..."


def _raised(tree: ast.AST, module: str) -> Iterator[Entry]:
    """Yield each PlanError that a module raises in a function."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for node in _own_nodes(function):
                call = node.exc if isinstance(node, ast.Raise) else None
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "PlanError" and not call.keywords:
                    sentence = _template(call.args[0])
                    yield Entry(f"{module.removeprefix('tutti.')}.{function.name}", sentence, _texts(function))


def _combinations() -> list[Entry]:
    """Return the rows of the registry; their sentences are what their checks return."""
    rows = []
    for name, refusal in REFUSALS.items():
        tree = ast.parse(textwrap.dedent(inspect.getsource(refusal.check)))
        returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return) and node.value is not None]
        sentences = [
            _template(value) for value in returned if isinstance(value, ast.JoinedStr | ast.Constant | ast.BinOp)
        ]
        stated = dict.fromkeys(sentence for sentence in sentences if sentence not in ("None", "..."))
        sentence = " / ".join(stated)
        excluded = [f"{key} {why}" for codec in CODECS.loaded() for key, why in codec.excludes.items()]
        about = " ".join(excluded) if name == "codec-excludes" else _ANY_AXIS if "mesh...." in sentence else ""
        rows.append(Entry(name, sentence, f"{refusal.summary} {_texts(tree)} {about}"))
    return rows


def _texts(tree: ast.AST) -> str:
    """Return all strings of a syntax tree."""
    constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return " ".join(value for value in constants if isinstance(value, str))


def _subjects(entries: list[Entry]) -> list[str]:
    """Return the rows of the index: each subject with the codes about it."""
    rows = []
    for subject, (pattern, *packages) in _SUBJECTS.items():
        codes = [
            entry.code
            for entry in entries
            if re.search(pattern, f"{entry.sentence} {entry.text}") or entry.code.startswith(tuple(packages))
        ]
        rows.append(f"| {subject} | {', '.join(f'`{code}`' for code in dict.fromkeys(codes))} |")
    return rows


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of functions within it."""
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, ast.FunctionDef):
            todo.extend(ast.iter_child_nodes(node))


def page() -> str:
    """Return the text of docs/refusals.md."""
    combinations = _combinations()
    places = sorted(
        entry
        for path in PACKAGE.rglob("*.py")
        for entry in _raised(ast.parse(path.read_text(encoding="utf-8")), module_name(path))
        if entry.sentence != "..."
    )
    rows = [f"| `{row.code}` | {REFUSALS[row.code].summary} | {_cell(row.sentence)} |" for row in combinations]
    sentences = [f"| `{entry.code}` | {_cell(entry.sentence)} |" for entry in places]
    parts = [_HEAD, *_subjects([*combinations, *places]), _COMBINATIONS, *rows, _PLACES, *sentences]
    return "\n".join(part.strip("\n") if part.startswith("|") else part.removesuffix("\n") for part in parts) + "\n"


def _cell(text: str) -> str:
    """Return a message as a cell of a Markdown table."""
    for mark in "\\|<>*_[]`":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
