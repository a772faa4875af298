"""The ``genius`` command. Flags come from the settings classes; nothing heavy is imported for ``--help``."""

from __future__ import annotations

import dataclasses
import difflib
import errno
import importlib
import inspect
import sys
from collections.abc import Sequence
from typing import Any, Final, Protocol, runtime_checkable

import tyro

from genius_search import __version__
from genius_search.config import preset
from genius_search.errors import GeniusError

COMMANDS: Final[dict[str, str]] = {
    "demo": "genius_search.lab.cli.demo:Demo",
    "search": "genius_search.cli.search:Search",
    "explain": "genius_search.cli.codes:Explain",
    "codes": "genius_search.cli.codes:Codes",
    "serve": "genius_search.cli.serve:Serve",
    "keys add": "genius_search.cli.serve:AddKey",
    "index create": "genius_search.cli.index:Create",
    "index add": "genius_search.cli.index:Add",
    "index delete": "genius_search.cli.index:Delete",
    "index compact": "genius_search.cli.index:Compact",
    "index verify": "genius_search.cli.index:Verify",
    "index info": "genius_search.cli.index:Info",
    "refit": "genius_search.cli.refit:Refit",
    "tune": "genius_search.cli.tune:Tune",
    "calibrate": "genius_search.cli.calibrate:Calibrate",
    "fit": "genius_search.cli.train:Fit",
    "evaluate": "genius_search.lab.cli.evaluate:Evaluate",
    "score": "genius_search.lab.cli.score:Score",
    "sweep": "genius_search.lab.cli.sweep:Sweep",
    "report": "genius_search.lab.cli.report:Report",
    "baseline fit": "genius_search.lab.cli.baseline:Fit",
    "baseline evaluate": "genius_search.lab.cli.baseline:Evaluate",
    "baseline dense": "genius_search.lab.cli.baseline_dense:Dense",
    "repro": "genius_search.lab.cli.repro:Repro",
    "doctor": "genius_search.lab.cli.evaluate:Doctor",
    "bench decode": "genius_search.lab.cli.bench:Decode",
    "bench scale": "genius_search.lab.cli.bench:Scale",
    "bench rivals": "genius_search.lab.cli.bench:Rivals",
    "bench quality": "genius_search.lab.cli.bench:Quality",
    "embed": "genius_search.cli.train:Embed",
    "train encoder": "genius_search.cli.train:TrainEncoder",
    "train quantizer": "genius_search.cli.train:TrainQuantizer",
    "train generator": "genius_search.cli.train:TrainGenerator",
    "import genius": "genius_search.lab.cli.import_genius:ImportGenius",
    "import clip-sf": "genius_search.lab.cli.import_encoder:ImportClipSf",
    "import clip-ff": "genius_search.lab.cli.import_encoder:ImportClipFf",
    "import blip-sf": "genius_search.lab.cli.import_encoder:ImportBlipSf",
    "import blip-ff": "genius_search.lab.cli.import_encoder:ImportBlipFf",
    "pull": "genius_search.cli.hub:Pull",
    "push": "genius_search.cli.hub:Push",
    "export onnx": "genius_search.cli.export:Onnx",
    "data catalogue": "genius_search.cli.data:Catalogue",
    "data check": "genius_search.cli.data:Check",
    "data rehearsal": "genius_search.lab.cli.rehearsal:Rehearsal",
    "data karpathy": "genius_search.cli.data:Karpathy",
}
"""Command -> module and function, in the order in which help lists them."""

OF_THE_MACHINE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM})
"""What a system refuses without a fault of the program: full, read-only, not allowed."""
INTERRUPTED: Final = 130
"""Exit status after Ctrl-C."""


@runtime_checkable
class Command(Protocol):
    """A command: a dataclass whose fields are its flags."""

    def __init__(self, **fields: Any) -> None: ...

    def run(self) -> int | None:
        """Do it; the exit status, if not 0."""
        ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status. Errors a person can mend are one line on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words in (["--version"], ["-V"]):
        print(f"genius {__version__}")
        return 0
    name = _command(words)
    if name is None:
        return _overview(words)
    try:
        return run(name, words[len(name.split()) :])
    except (GeniusError, OSError, KeyboardInterrupt) as error:
        return _failed(error)


def _failed(error: GeniusError | OSError | KeyboardInterrupt) -> int:
    """One line for whoever can do something about it; the exit status. A bug is raised again."""
    match error:
        case GeniusError():
            said, status = str(error), error.exit_code
        case KeyboardInterrupt():
            said, status = "interrupted; run the same command again to go on", INTERRUPTED
        case BrokenPipeError():
            return 0
        case OSError() if error.errno in OF_THE_MACHINE:
            said, status = f"{error.strerror}{f': {error.filename}' if error.filename else ''}", 1
        case _:
            raise error
    print(f"genius: {said}", file=sys.stderr)
    return status


def run(name: str, arguments: Sequence[str]) -> int:
    """Parse the flags of one command and run it."""
    kind = find(name)
    parsed = tyro.cli(
        kind,
        prog=f"genius {name}",
        args=list(arguments),
        default=_preset_default(kind, arguments),
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    return parsed.run() or 0


def find(name: str) -> type[Command]:
    """The class of a command: its fields are the flags."""
    module, _, kind = COMMANDS[name].partition(":")
    found: type[Command] = getattr(importlib.import_module(module), kind)
    return found


def _preset_default(kind: type[Command], arguments: Sequence[str]) -> Any:
    """A command with a preset shows and uses that preset's values as its defaults."""
    choose = getattr(kind, "settings_of", None)
    if choose is None:
        return None
    name = "small"
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if word == "--preset":
            name = following
        elif word.startswith("--preset="):
            name = word.partition("=")[2]
    if not name or name.startswith("-"):
        name = "small"  # the flag has no value, and tyro says so
    required = {
        field.name: tyro.MISSING
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
        if field.default is dataclasses.MISSING
    }
    shown = object.__new__(kind)  # not by __init__, whose types MISSING does not have
    for field, value in {**required, "preset": name, "settings": choose(preset(name))}.items():
        object.__setattr__(shown, field, value)
    return shown


def _command(words: Sequence[str]) -> str | None:
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in COMMANDS:
            return name
    return None


def _overview(words: Sequence[str]) -> int:
    """What can be asked; an unknown command is an error that names the nearest."""
    asked = " ".join(word for word in words[:2] if not word.startswith("-"))
    inside = [name for name in COMMANDS if name.startswith(f"{asked} ")] if asked else list(COMMANDS)
    if asked and not inside:
        near = difflib.get_close_matches(asked, COMMANDS, n=1, cutoff=0.4)
        advice = f"; did you mean `genius {near[0]}`?" if near else ""
        print(f"genius: {asked!r} is not a command{advice}; see `genius --help`", file=sys.stderr)
        return 2
    lines = [
        "Generative multimodal search: a model generates the ID of what matches.",
        "",
        "  genius demo                                 draw, train, index, search; leaves a page to open",
        '  genius search photos.index "a red kite"     search',
        "",
        "Commands:",
    ]
    for name in inside:
        summary = (inspect.getdoc(find(name)) or "").splitlines()[0]
        lines.append(f"  genius {name:<18} {summary}")
    lines += ["", "`genius COMMAND --help` tells more. Most commands take --json."]
    help_asked = not words or any(word in ("-h", "--help") for word in words)
    print("\n".join(lines), file=sys.stdout if help_asked else sys.stderr)
    return 0 if help_asked else 2
