"""Every program of `research` says in one sentence what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import research

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for path in (ROOT / "research").rglob("*.py")
    if "__main__" in path.read_text(encoding="utf-8") or path.name == "__main__.py"
)


def test_programs_without_packages_say_in_one_sentence_what_to_install():
    assert len(PROGRAMS) > 10
    # Without the module site, -S, Python finds no installed package.
    processes = {
        program: subprocess.Popen(  # noqa: S603
            [sys.executable, "-S", "-m", program, "--help"],
            cwd=ROOT,
            env={"PATH": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for program in PROGRAMS
    }
    for program, process in processes.items():
        output, errors = process.communicate(timeout=60)
        assert (output, process.returncode) == ("", research.MISSING_PACKAGE_STATUS), program
        assert errors.endswith(f"in the clone's folder, run: {research.REQUIREMENTS}\n"), program
        assert errors.count("\n") == 1, errors


def test_documents_have_the_command_that_installs_packages():
    for page in ("docs/research.md", "research/README.md"):
        assert f"$ {research.REQUIREMENTS}\n" in (ROOT / page).read_text(encoding="utf-8")


def test_a_missing_module_of_the_clone_is_a_bug_with_a_traceback(capsys):
    error = ModuleNotFoundError("No module named 'research.lost'", name="research.lost")
    research.explain_missing_package(type(error), error, None)
    assert "No module named 'research.lost'" in capsys.readouterr().err


def test_a_missing_package_is_named_by_its_first_part(capsys):
    error = ModuleNotFoundError("No module named 'faiss.contrib'", name="faiss.contrib")
    with pytest.raises(SystemExit):
        research.explain_missing_package(type(error), error, None)
    assert capsys.readouterr().err.startswith("faiss is not installed; ")
