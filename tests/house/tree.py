"""What the checkers read: the project's files, and the imports of a syntax tree."""

import ast
import subprocess
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "tutti"


def python_files(*folders: str) -> list[Path]:
    """Return all Python files under these folders of the project, sorted."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def tracked_files() -> list[Path] | None:
    """Return the files under version control that exist, or None outside a checkout."""
    listing = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=False)
    if listing.returncode != 0:
        return None
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


def name_of(path: Path) -> str:
    """Return a path as tables and findings write it: relative to the project, with forward slashes."""
    return path.relative_to(ROOT).as_posix()


def module_name(path: Path) -> str:
    """Return the dotted name of a file of the package."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@lru_cache(maxsize=1)
def syntax_nodes(source: str) -> list[ast.AST]:
    """Return the nodes of a module's syntax tree, without operators and contexts. Faster than `ast.walk`.

    The last module is cached, because several checks read one file in turn.
    """
    nodes: list[ast.AST] = [ast.parse(source)]
    for node in nodes:  # the list grows while it is read
        for value in vars(node).values():
            if isinstance(value, list):
                nodes += [child for child in value if isinstance(child, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, (ast.expr_context, ast.operator)):
                nodes.append(value)
    return nodes


def imports(source: str, module: str, *, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of everything that a module imports.

    Covers imports inside functions, under TYPE_CHECKING, relative ones, and `import_module`, `__import__` and
    `find_spec` with a string. `from a import b` yields `a.b`, because b may be a module.
    """
    package = module if is_package else module.rpartition(".")[0]
    for node in syntax_nodes(source):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")
                base = ".".join([*parent[: len(parent) - node.level + 1], *([base] if base else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and _callee(node) in ("import_module", "__import__", "find_spec"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value


def _callee(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
