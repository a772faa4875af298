from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from genius_search import __version__, cli, errors
from genius_search.cli import COMMANDS, main
from genius_search.cli.options import read_toml
from genius_search.recipe import preset

TWO_SCREENS = 60
"""Lines."""


def fails_with(monkeypatch, error: BaseException) -> None:
    """Make ``genius search`` raise an error."""

    @dataclasses.dataclass(frozen=True)
    class Failing:
        """Fails."""

        def run(self) -> None:
            raise error

    monkeypatch.setattr(cli, "command_class", lambda name: Failing)


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"], []])
def test_help_lists_the_commands_of_the_product_on_stdout(words, capsys):
    assert main(words) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert all(f"  genius {name} " in printed.out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_fits_two_screens(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as left:
        main([*name.split(), "--help"])
    assert left.value.code == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert f"genius {name}" in printed.out
    assert "None" not in printed.out
    assert len(printed.out.splitlines()) <= TWO_SCREENS


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["serach"], "search"),
        (["serch", "notes.index"], "search"),
        (["index", "creat"], "index create"),
        (["create"], "index create"),
        (["index"], "index info"),
    ],
)
def test_an_unknown_command_names_the_nearest(words, meant, capsys):
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"`genius {meant}`" in printed.err


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_version_is_printed(flag, capsys):
    assert main([flag]) == 0
    assert capsys.readouterr().out == f"genius {__version__}\n"


def test_settings_of_fit_are_printed_as_toml_and_read_again(tmp_path, capsys):
    (tmp_path / "own.toml").write_text('preset = "tiny"\nquantizer.levels = 5\n')
    assert main(["fit", "--config", str(tmp_path / "own.toml"), "--print-config"]) == 0
    (tmp_path / "printed.toml").write_text(capsys.readouterr().out)
    found = read_toml(tmp_path / "printed.toml")
    assert found.quantizer.levels == 5
    assert found.generator.layers == preset("tiny").generator.layers


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("quantizer.levles = 5", "quantizer.levles"),
        ('preset = "huge"', "'huge' is not one of"),
        ("x = ", "TOML"),
    ],
)
def test_a_file_of_settings_that_cannot_be_used_is_an_error_that_says_why(
    tmp_path, capsys, text, said
):
    (tmp_path / "own.toml").write_text(text)
    assert main(["fit", "data", "--config", str(tmp_path / "own.toml")]) == 2
    assert said in capsys.readouterr().err


ERRORS = [
    (errors.UsageError("no"), 2),
    (errors.MissingExtra("no"), 2),
    (errors.ArtifactMissing("no"), 4),
    (errors.NetworkNeeded("no"), 5),
    (errors.BadRecord(Path("file"), 1, "no"), 6),
    (errors.TrainingFailed("no"), 1),
]


@pytest.mark.parametrize(("error", "status"), ERRORS, ids=lambda value: type(value).__name__)
def test_an_error_is_one_line_on_stderr_and_its_own_exit_status(error, status, monkeypatch, capsys):
    fails_with(monkeypatch, error)
    assert main(["search"]) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"genius: {error}\n"


def test_a_missing_package_names_the_extra_that_installs_it(monkeypatch, capsys):
    fails_with(
        monkeypatch, ModuleNotFoundError("No module named 'ir_measures'", name="ir_measures")
    )
    assert main(["search"]) == 2
    assert "pip install 'genius-search[evaluate]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "bug", [ZeroDivisionError("a bug"), ModuleNotFoundError("a bug", name="genius_x")]
)
def test_a_bug_is_never_caught(bug, monkeypatch):
    fails_with(monkeypatch, bug)
    with pytest.raises(type(bug)):
        main(["search"])


@pytest.mark.parametrize("words", [["--help"], ["search", "--help"]])
def test_a_reader_that_goes_away_is_no_error(words):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "genius_search", *words]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)  # noqa: S603
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def alone(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


HEAVY = {"torch", "transformers", "matplotlib", "scipy", "pandas", "sklearn", "ir_measures", "PIL"}


@pytest.mark.parametrize("words", [["--help"], ["fit", "--help"], ["nonsense"]])
def test_help_imports_nothing_heavy(words):
    code = f"""
import sys
from genius_search.cli import main
try:
    main({words!r})
except SystemExit:
    pass
print(sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr)
"""
    assert alone(code).stderr.splitlines()[-1] == "[]"


def test_an_interrupted_process_leaves_with_130(tmp_path):
    code = f"""
import signal, time
from dataclasses import dataclass
from genius_search import cli

@dataclass
class Waiting:
    def run(self):
        open({str(tmp_path / "began")!r}, "w").close()
        time.sleep(60)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
cli.command_class = lambda name: Waiting
raise SystemExit(cli.main(["search"]))
"""
    with subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True
    ) as process:
        until = time.monotonic() + 30
        while not (tmp_path / "began").exists() and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=30)
    assert process.returncode == 130, printed
    assert printed == "genius: interrupted; run the same command again to continue\n"
