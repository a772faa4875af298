"""Names, shapes and sentences of the product: `python tests/test_style.py FILE...` prints what is wrong.

The words that say nothing and the patterns of translated English are lists: extend them when a reader stumbles.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("src/genius_search", "research", "benchmarks")
VAGUE = re.compile(
    "own|one|found|some|known|given|wanted|places?|kept|opened|usual|told|several|others|rest|much|many"
    "|things?|its?|them|kind"
)
MAX_VAGUE = 0.01
MAX_LINE = 100
MAX_FUNCTION = 60
PATTERNS = (
    r"(?:^|[.:;] )What [a-z]|\b(?:of|by|from|for|with|in|than|as|beside|behind) what\b",
    r"\bso (?:many|few) (?!that)|\bas many as\b|\bof these\b|\bamong these\b|\bby which\b",
    r"\bbehind\b|\bbeside\b|\btells? (?!(?:the|a) user)|\banew\b|\blies?\b(?! about)",
    r"\bthose that\b|\bthe same in\b|\b(?:are|is) there\b",
    r"\bits own\b|\btheir own\b|\bof one's own\b",
)
DATA = {
    "Show me a picture of what is described here.",
    "The keys of the cabin hang behind the blue shutter. Bring firewood.",
}
"""Texts of data sets, whose published results would change with them."""


@functools.cache
def read(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def assigned_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of every assignment and parameter."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id.lstrip("_")
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg.lstrip("_")


def sentences(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring, message, and block of comments."""
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(read(path)):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "X" for part in node.values]
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def bad_sentences(path: Path) -> Iterator[str]:
    for line, text in sentences(path):
        plain = " ".join(text.split())
        if plain.count(" ") <= 2 or plain in DATA:
            continue
        for match in re.finditer("|".join(PATTERNS), plain):
            context = plain[max(match.start() - 30, 0) : match.end() + 30]
            yield f"{path}:{line}: {match.group()}: …{context}…"


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of a function after the first, without its docstring."""
    length = function.end_lineno - function.lineno
    docstring = function.body[0] if ast.get_docstring(function) else None
    return length if docstring is None else length - (docstring.end_lineno - docstring.lineno + 1)


def bad_shapes(path: Path) -> Iterator[str]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if len(line) > MAX_LINE:
            yield f"{path}:{number}: {len(line)} characters"
    for node in ast.walk(read(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if (length := code_lines(node)) > MAX_FUNCTION:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines"
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            if len(node.value.elts) > 2 and isinstance(node.targets[0], ast.Tuple):
                yield f"{path}:{node.lineno}: {len(node.value.elts)} values in one assignment"
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            inner = [loop for child in ast.walk(node) for loop in getattr(child, "generators", ())]
            if len(inner) > 1 and any(loop.ifs for loop in inner):
                yield f"{path}:{node.lineno}: a nested comprehension with a condition"


FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PACKAGES = sorted({path.parent for path in FILES})


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_names_say_something(package: Path) -> None:
    names = [(path, *name) for path in package.glob("*.py") for name in assigned_names(read(path))]
    vague = [f"{path}:{line}: {name}" for path, line, name in names if VAGUE.fullmatch(name)]
    assert len(vague) <= MAX_VAGUE * len(names), "\n".join(vague)


@pytest.mark.parametrize("faults", [bad_shapes, bad_sentences], ids=lambda check: check.__name__)
def test_shapes_and_sentences(faults: Callable[[Path], Iterator[str]]) -> None:
    assert not (bad := [fault for path in FILES for fault in faults(path)]), "\n".join(bad)


if __name__ == "__main__":
    for path in [Path(name).resolve() for name in sys.argv[1:]] or FILES:
        vague = [
            f"{path}:{n}: vague: {name}"
            for n, name in assigned_names(read(path))
            if VAGUE.fullmatch(name)
        ]
        sys.stdout.writelines(
            f"{fault}\n" for fault in [*vague, *bad_shapes(path), *bad_sentences(path)]
        )
