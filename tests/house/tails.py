"""Checkers of size budgets, marks of unfinished work, docstrings, and reads of the environment."""

import ast
import re

from house.tree import syntax_nodes

MAX_FILE_LINES = 700
MAX_FUNCTION_LINES = 60
MAX_CLASS_METHODS = 20

# The words are divided so that this file does not contain the marks that it searches for.
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|raise NotImplemented" + r"Error)\b")
MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:wo" + r"rk|ro" + r"ot|tmp/ve" + r"nv|home/\w+)/|\.\./sha" + r"red")


def oversized(source: str) -> list[str]:
    """Return a sentence for the file, and for each of its functions and classes, that exceeds its budget."""
    findings = []
    lines = len(source.splitlines())
    if lines > MAX_FILE_LINES:
        findings.append(f"{lines} lines; at most {MAX_FILE_LINES}")
    for node in syntax_nodes(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = _length(node)
            if length > MAX_FUNCTION_LINES:
                findings.append(f"line {node.lineno}: {node.name} has {length} lines; at most {MAX_FUNCTION_LINES}")
        elif isinstance(node, ast.ClassDef):
            methods = sum(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body)
            if methods > MAX_CLASS_METHODS:
                findings.append(f"line {node.lineno}: {node.name} has {methods} methods; at most {MAX_CLASS_METHODS}")
    return findings


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of a function from `def` to its end, without the docstring."""
    length = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function) is not None:
        length -= (function.body[0].end_lineno or 0) - function.body[0].lineno + 1
    return length


def unfinished(text: str) -> list[str]:
    """Return a sentence for each mark of unfinished work."""
    return _matches(UNFINISHED, text)


def machine_paths(text: str) -> list[str]:
    """Return a sentence for each path that exists on one machine only."""
    return _matches(MACHINE_PATHS, text)


def _matches(pattern: re.Pattern[str], text: str) -> list[str]:
    return [
        f"line {number}: {match.group()!r}"
        for number, line in enumerate(text.splitlines(), 1)
        for match in pattern.finditer(line)
    ]


def undocumented(source: str) -> list[str]:
    """Return a sentence if the module has no docstring; an empty file, which only marks a package, needs none."""
    if source.startswith('"""'):  # nearly every file: saves parsing it
        return []
    tree = ast.parse(source)
    return ["the module has no docstring"] if tree.body and not ast.get_docstring(tree) else []


def environment_uses(source: str) -> list[str]:
    """Return a sentence for each use of environment variables: `os.environ`, `os.getenv`, imports of them and the
    like.
    """
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    findings: list[str] = []
    if not any(name in source for name in names):
        return findings
    for node in syntax_nodes(source):
        if isinstance(node, ast.Attribute) and node.attr in names and getattr(node.value, "id", "") == "os":
            findings.append(f"line {node.lineno}: os.{node.attr}")
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            findings += [f"line {node.lineno}: from os import {a.name}" for a in node.names if a.name in names]
    return findings
