"""Imports inside the product: no circle of files, and no constant with two meanings."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "genius_search"
PACKAGES = sorted({path.parent for path in SOURCE.rglob("*.py")})


def read(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path) -> set[str]:
    """Return the modules that a file imports at its top or in functions, but not for types alone."""
    modules: set[str] = set()
    unvisited: list[ast.AST] = [read(path)]
    while unvisited:
        node = unvisited.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        unvisited.extend(ast.iter_child_nodes(node))
    return modules


def circles(package: Path) -> list[set[str]]:
    """Return the sets of files of a package that import one another, directly or through others."""
    prefix = ".".join(package.relative_to(SOURCE.parent).parts)
    files = {f"{prefix}.{path.stem}": path for path in package.glob("*.py")}
    reached = {name: imports_of(path) & files.keys() for name, path in files.items()}
    for middle in files:  # Warshall's transitive closure
        for name in files:
            if middle in reached[name]:
                reached[name] |= reached[middle]
    groups = {
        frozenset(other for other in files if other in reached[name] and name in reached[other])
        for name in files
    }
    return [set(group) for group in groups if group]


def constants() -> dict[str, dict[str, set[str]]]:
    """Return the files in which each constant has each of its values."""
    values: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in SOURCE.rglob("*.py"):
        for node in read(path).body:
            target = node.target if isinstance(node, ast.AnnAssign) and node.value else None
            if isinstance(target, ast.Name) and target.id.isupper():
                values[target.id][ast.unparse(node.value)].add(path.name)
    return values


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_no_files_of_a_package_import_one_another(package: Path) -> None:
    assert not circles(package)


def test_a_constant_has_one_meaning() -> None:
    several = {name: dict(values) for name, values in constants().items() if len(values) > 1}
    assert not several, several
