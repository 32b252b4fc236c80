"""The page docs/refusals.md, written from the registry and from every `raise PlanError` of the source.

`python -m house.refusals`, run in tests/, writes the page again.
"""

import ast
from collections.abc import Iterator

from house.tree import PACKAGE, ROOT, module_name
from tutti.config.refusals import REFUSALS

PAGE = ROOT / "docs" / "refusals.md"

_HEAD = """# Refusals

What cannot be right is refused before training, with a sentence that names the remedy. Each `PlanError` has a `code`.

## Combinations in a plan

The planner, the cost model, `tutti verify` and the runtime check every plan against this table
(`tutti/config/refusals.py`). [Contributing](contributing.md) shows how another package adds a row.

| code | combination |
|---|---|
"""

_PLACES = """
## What a model, a cluster or a command line decides

The code is the place that refuses: module and function. `...` stands for the values of the case.

| code | sentence |
|---|---|
"""


def _template(node: ast.expr) -> str:
    """Return the text of a message, with `...` for values that are filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
    if isinstance(node, ast.BinOp):
        return _template(node.left) + _template(node.right)
    return "..."


def _raised(tree: ast.AST, module: str) -> Iterator[tuple[str, str]]:
    """Yield (code, message template) of each PlanError that a module raises in a function."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for node in _own_nodes(function):
                call = node.exc if isinstance(node, ast.Raise) else None
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "PlanError" and not call.keywords:
                    yield f"{module.removeprefix('tutti.')}.{function.name}", _template(call.args[0])


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
    rows = [f"| `{name}` | {refusal.summary} |" for name, refusal in REFUSALS.items()]
    places = sorted(
        entry
        for path in PACKAGE.rglob("*.py")
        for entry in _raised(ast.parse(path.read_text(encoding="utf-8")), module_name(path))
    )
    sentences = [f"| `{code}` | {_cell(sentence)} |" for code, sentence in places if sentence != "..."]
    return _HEAD + "\n".join(rows) + "\n" + _PLACES + "\n".join(sentences) + "\n"


def _cell(text: str) -> str:
    """Return a message as a cell of a Markdown table."""
    for mark in "\\|<>*_[]`":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
