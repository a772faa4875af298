"""Evaluation, baselines and reproductions; run from a clone as ``python -m research.NAME``."""

import os
import sys
from types import TracebackType
from typing import Final

# Threads of NumPy's BLAS wait busily, which costs more than they save next to PyTorch's.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

REQUIREMENTS: Final = (
    "python -m pip install --constraint constraints.txt --editable '.[evaluate,train]' "
    "--requirement research/requirements.txt"
)
"""The command that installs what all programs need; it runs in the clone's folder."""
MISSING_PACKAGE_STATUS: Final = 2
"""Exit status of a program without its packages, as of ``genius`` without an extra."""


def explain_missing_package(
    error_type: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Print one sentence if a package is missing, instead of a traceback; a ``sys.excepthook``."""
    name = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    # A missing module of this clone is a bug, and its traceback is needed.
    if not name or name.startswith(("research.", "genius_search.")):
        sys.__excepthook__(error_type, error, traceback)
        return
    package = name.partition(".")[0]
    sys.stderr.write(f"{package} is not installed; in the clone's folder, run: {REQUIREMENTS}\n")
    sys.stderr.flush()
    raise SystemExit(MISSING_PACKAGE_STATUS)


# `python -m research.NAME` imports this package before that module; the first argument is still
# "-m".
if sys.argv[:1] == ["-m"]:
    sys.excepthook = explain_missing_package
