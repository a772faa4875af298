"""Count the files, functions and types on three ways through the package.

Usage: python benchmarks/ways.py [--photos FOLDER] [--encoder SPEC] [--list]

The ways are a warm search by text, another one by vector, a folder of texts and pictures into an
index (`Index.create`), and `fit` with the preset `tiny` on a drawn catalogue. `--photos` replaces
drawn pictures by the first pictures of a folder. For each way, the script prints

- files: files of the package with a function that is called;
- functions: distinct functions that are called; calls: how often;
- types: distinct types of the package that are constructed, or that the result consists of,
  without context managers;
- changes: calls from one file of the package into another.

`--list` prints the names of files and types, too. Functions at import do not count: each way runs
once before it is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
# `research`, which draws the catalogue, is not installed.
sys.path.append(str(Path(__file__).parents[1]))

import numpy as np
from PIL import Image

import genius_search
from genius_search import Index

PACKAGE = str(Path(genius_search.__file__).parent)
CONSTRUCTORS = ("__init__", "__new__", "_make", "<lambda>")
"""Code of the constructors of classes and dataclasses, and of named tuples (a lambda)."""
ENCODER = "text:wordllama"
WARM_SEARCHES = 3
NUM_TEXTS = 60
NUM_PICTURES = 20
WORDS = [
    "a",
    "red",
    "kite",
    "above",
    "the",
    "beach",
    "where",
    "two",
    "dogs",
    "run",
    "after",
    "one",
    "ball",
    "in",
    "the",
    "evening",
    "sun",
]


class Trace:
    """Files of the package that are entered, functions that are called, and types that are used."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.functions: set[tuple[str, str]] = set()
        self.types: set[str] = set()
        self.calls = 0
        self.changes = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE) and code.co_name != "<module>":
            self.calls += 1
            self.files.add(code.co_filename[len(PACKAGE) + 1 :])
            self.functions.add((code.co_filename, code.co_qualname))
            caller = frame.f_back
            while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
                caller = caller.f_back
            if caller is not None and caller.f_code.co_filename != code.co_filename:
                self.changes += 1
        if code.co_name in CONSTRUCTORS and code.co_argcount:
            first = frame.f_locals[code.co_varnames[0]]
            self._add_type(first if isinstance(first, type) else type(first))

    def add_result(self, result: Any) -> None:
        """Add the types of a result and its elements, which no Python code constructs."""
        self._add_type(type(result))
        for element in result if isinstance(result, list) else ():
            self._add_type(type(element))

    def _add_type(self, used: type) -> None:
        if hasattr(used, "__enter__"):
            return
        if used.__module__.startswith(f"{genius_search.__name__}."):
            self.types.add(used.__qualname__)

    def row(self, name: str) -> str:
        """Return a line of the printed table."""
        sizes = [*map(len, (self.files, self.functions, self.types)), self.calls, self.changes]
        return f"{name:12}" + "".join(f"{size:>11,}" for size in sizes)


@contextlib.contextmanager
def traced() -> Iterator[Trace]:
    """Trace the calls of this thread and of threads that it starts."""
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        yield trace
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  typeshed knows functions only


def trace_search(index: Index, **query: Any) -> Trace:
    """Trace a warm search."""
    for _ in range(WARM_SEARCHES):
        index.search(**query)
    with traced() as trace:
        hits = index.search(**query)
    trace.add_result(hits)
    return trace


def trace_second(run: Callable[[Path], object], folder: Path) -> Trace:
    """Trace the second run of a function that writes a folder."""
    run(folder / "first")
    with traced() as trace:
        run(folder / "second")
    return trace


def draw_folder(folder: Path, photos: Path | None) -> None:
    """Write texts, and pictures with a caption each."""
    random = np.random.default_rng(0)
    folder.mkdir()
    for number in range(NUM_TEXTS):
        (folder / f"note-{number}.txt").write_text(" ".join(random.permutation(WORDS)[:8]))
    photographs = sorted(photos.rglob("*.jpg"))[:NUM_PICTURES] if photos else []
    for number in range(NUM_PICTURES):
        name = folder / f"picture-{number}.jpg"
        if number < len(photographs):
            name.write_bytes(photographs[number].read_bytes())
        else:
            pixels = random.integers(0, 256, (48, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(name)
        name.with_suffix(".txt").write_text(" ".join(random.permutation(WORDS)[:5]))


def trace_fit(folder: Path) -> Trace:
    """Trace a training with the preset `tiny` on a small drawn catalogue, step after step."""
    # Only this way needs PyTorch, which takes a second to import.
    from genius_search.cli import main as run_command  # noqa: PLC0415
    from research.synth.catalogue import draw_catalogue  # noqa: PLC0415

    draw_catalogue(folder / "data", items=1_000, train_products=60, queries_per_task=12)
    arguments = ["fit", str(folder / "data"), "--encoder", "small", "--preset", "tiny", "--out"]
    with contextlib.redirect_stderr(None), contextlib.redirect_stdout(None):
        return trace_second(lambda out: run_command([*arguments, str(out)]), folder)


def main() -> None:
    """Trace the ways and print a row for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--photos", type=Path, help="a folder of .jpg files")
    parser.add_argument("--encoder", default=ENCODER, help=f"default: {ENCODER}")
    parser.add_argument("--list", action="store_true", help="print the names of files and types")
    options = parser.parse_args()
    names = ("files", "functions", "types", "calls", "changes")
    print(" " * 12 + "".join(f"{name:>11}" for name in names))
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        draw_folder(work / "pool", options.photos)
        (work / "indexes").mkdir()

        def create(folder: Path) -> Index:
            return Index.create(folder, work / "pool", encoder=options.encoder)

        trace_of_folder = trace_second(create, work / "indexes")
        index = Index.open(work / "indexes" / "second")
        vector = np.ones(index.model.dim, dtype=np.float32)
        traces = {
            "text": trace_search(index, query="a kite above the beach", k=5),
            "vector": trace_search(index, vector=vector, k=5),
            "folder": trace_of_folder,
            "fit": trace_fit(work),
        }
    for name, trace in traces.items():
        print(trace.row(name))
    for name, trace in traces.items() if options.list else ():
        print(f"\n{name}\n  files  {' '.join(sorted(trace.files))}")
        print(f"  types  {' '.join(sorted(trace.types))}")


if __name__ == "__main__":
    main()
