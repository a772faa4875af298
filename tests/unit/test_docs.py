"""Documents are tested like code: what they say must exist."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import genius_search

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "genius_search"
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("benchmarks/*.md"),
        *ROOT.glob("research/*.md"),
        *ROOT.glob("skills/*/*.md"),
    ]
)
TEXTS = sorted(
    path
    for path in [
        *(path for path in ROOT.glob("*") if path.is_file() and path.name != ".git"),
        *(
            path
            for folder in (".ci", "src", "research", "tests", "docs", "recipes", "benchmarks")
            for path in (ROOT / folder).rglob("*")
        ),
    ]
    if path.suffix
    in {".py", ".md", ".sh", ".toml", ".txt", ".cff", ".html", ".js", ".css", ".json", ""}
    and path.is_file()
    and "__pycache__" not in path.parts
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(kind):
    return [
        (path.name, body)
        for path in PAGES
        for language, body in FENCE.findall(path.read_text(encoding="utf-8"))
        if language == kind
    ]


def commands_shown():
    """Every ``genius …`` line of a console block, without its prompt, comment and redirection."""
    shown = []
    for name, body in blocks("console"):
        for line in body.splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if line.startswith("$ ") and words[:1] == ["genius"]:
                upto = next(
                    (place for place, word in enumerate(words) if word in {">", "|"}), len(words)
                )
                shown.append((name, words[1:upto]))
    return shown


def prose(path):
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def anchors(path):
    """The anchors that a page's headings have on GitHub."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


PARSE = """
import contextlib, io, json, sys
from genius_search.cli import COMMANDS, command_class, run_command

for kind in map(command_class, COMMANDS):
    kind.run = lambda self: 0
problems = []
for words in json.load(sys.stdin):
    name = next((" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in COMMANDS), None)
    said = io.StringIO("" if name else "no such command")
    if name:
        with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
            problems.append(None if run_command(name, words[len(name.split()) :]) == 0 else "not parsed")
            continue
    problems.append(said.getvalue() or "not parsed")
json.dump(problems, sys.stdout)
"""
"""Parses commands without running them; in a process of its own, where types are not checked: a command that
waits for its arguments holds placeholders."""


def python(*arguments, **options):
    return subprocess.run(  # noqa: S603  this interpreter, on our own code
        [sys.executable, *arguments], capture_output=True, encoding="utf-8", check=True, **options
    ).stdout


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_relative_link_leads_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if "://" in target:
            continue
        place, _, anchor = target.partition("#")
        linked = path if not place else path.parent / place
        assert linked.exists(), f"{path.name} links to {target}"
        if anchor:
            assert anchor in anchors(linked), f"{path.name} links to {target}"


def test_what_agents_read_is_written_from_its_source_and_is_short():
    for path, text in runpy.run_path(str(ROOT / "docs" / ".agents.py"))["documents"]().items():
        assert path.read_text(encoding="utf-8") == text, "run python docs/.agents.py"
        assert len(text.split()) < 700, path


def test_the_list_of_pages_for_agents_has_the_format_of_llms_txt():
    text = (ROOT / "docs" / "llms.txt").read_text(encoding="utf-8")
    title, summary, *_ = text.split("\n\n")
    assert re.fullmatch("# .+", title)
    assert re.fullmatch("> .+", summary)
    sections = re.split("^## .+\n\n", text, flags=re.MULTILINE)[1:]
    lines = [line for section in sections for line in section.strip().splitlines()]
    linked = [re.fullmatch(r"- \[[^\]]+\]\(([\w-]+\.md)\): .+", line) for line in lines]
    assert len(linked) > 5
    assert all(link and (ROOT / "docs" / link[1]).exists() for link in linked)


def test_the_skill_begins_with_its_name_and_when_to_use_it():
    (skill,) = ROOT.glob("skills/*/SKILL.md")
    _, front, body = skill.read_text(encoding="utf-8").split("---\n", 2)
    described = yaml.safe_load(front)
    assert described["name"] == skill.parent.name
    assert "Use when" in described["description"]
    assert len(described["description"]) <= 1_024
    assert body.strip()


def test_every_command_that_is_shown_can_be_parsed():
    shown = commands_shown()
    problems = json.loads(python("-c", PARSE, input=json.dumps([words for _, words in shown])))
    assert len(shown) > 50
    assert [found for found in zip(shown, problems, strict=True) if found[1] is not None] == []


def test_the_container_copies_what_there_is_and_runs_a_command_that_can_be_parsed():
    lines = [
        line.split(maxsplit=1) for line in (ROOT / "Containerfile").read_text().splitlines() if line
    ]
    said = dict(line for line in lines if len(line) == 2)
    assert json.loads(said["ENTRYPOINT"]) == ["genius"]
    assert json.loads(python("-c", PARSE, input=json.dumps([json.loads(said["CMD"])]))) == [None]
    copied = [name for word, *rest in lines if word == "COPY" for name in rest[0].split()[:-1]]
    assert copied
    assert all((ROOT / name).exists() for name in copied)


OPTIONS = """
import contextlib, io, json, re, sys
from genius_search.cli import COMMANDS, run_command

options = set()
for name in COMMANDS:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        run_command(name, ["--help"])
    for line in said.getvalue().splitlines():
        described = re.match(r"[│ ]*((?:-[a-z-]+(?: [A-Z|]+)?(?:, )?)+)", line)
        options.update(re.findall("--[a-z-]+", described[1]) if described else [])
json.dump(sorted(options), sys.stdout)
"""


def test_every_option_that_the_text_names_exists():
    options = {*json.loads(python("-c", OPTIONS)), "--help"}
    assert {"--k", "--where", "--no-hybrid", "--encoder", "--json"} <= options
    assert "--density-weight" not in options
    named = {
        (path.name, option)
        for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]
        if path.name != "research.md"
        for code in re.findall("`((?:genius [^`]*)?--[^`]*)`", prose(path))
        for option in re.findall("--[a-z-]+", code)
    }
    assert len(named) > 20
    assert [found for found in sorted(named) if found[1] not in options] == []


PROGRAM = re.compile(
    r"python\s+(?:-m\s+(research[a-z_.]*[a-z])|((?:benchmarks|tests)/[\w/]+\.py))((?:\s+[^\s`]+)*)"
)


def programs_shown():
    """Every ``python -m research.…`` or ``python benchmarks/…`` of the documents and of the source."""
    for path in TEXTS:
        text = path.read_text(encoding="utf-8")
        lines = re.findall(r"^\$ (.*)$", text, re.MULTILINE)
        spans = re.findall("``?([^`]+)`", FENCE.sub("", text))
        for command in [*lines, *spans]:
            for module, script, arguments in PROGRAM.findall(command.replace("\\", " ")):
                options = re.findall(r"(?<=\s)--[a-z][a-z.-]*", arguments)
                yield path.name, module, script, options


def test_every_program_of_the_clone_that_is_named_exists_and_has_the_options():
    sources = [*ROOT.glob("research/**/*.py"), *ROOT.glob("benchmarks/*.py")]
    source = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    fields = set(re.findall(r"^    (\w+): ", source, re.MULTILINE))
    flags = set(re.findall(r'"(--[a-z-]+)"', source)) | {"--help"}
    programs = list(programs_shown())
    assert len(programs) > 50
    for name, module, script, options in programs:
        base = ROOT.joinpath(*module.split("."))
        file = ROOT / script if script else base.with_suffix(".py")
        assert file.exists() or (base / "__main__.py").exists(), f"{name}: {module or script}"
        for option in options:
            field = option.removeprefix("--").rpartition(".")[2].replace("-", "_")
            assert field in fields or option in flags, f"{name}: {module or script} {option}"


def test_every_document_that_the_source_names_exists():
    named = {
        (path.name, document)
        for path in TEXTS
        if path.suffix in {".py", ".toml", ".sh"}
        for document in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 5
    assert [pair for pair in sorted(named) if not (ROOT / pair[1]).exists()] == []


def test_the_reference_of_python_has_every_public_name():
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    described = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE)}
    assert set(genius_search.__all__) - described == {"GeniusError"}  # one of genius_search.errors


def test_the_reference_of_python_names_what_is_defined_there():
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    for path in re.findall(r"^::: (\S+)$", page, re.MULTILINE):
        module, _, name = path.rpartition(".")
        if path != "genius_search.errors":
            owner = getattr(importlib.import_module(module), name).__module__
            assert owner == module, f"{path} is defined in {owner}"


def test_deviations_are_numbered_alike_in_the_code_and_in_the_document():
    in_code = {
        int(number)
        for path in SOURCE.rglob("*.py")
        for number in re.findall(r"[Dd]eviation (\d+)", path.read_text(encoding="utf-8"))
    }
    text = (ROOT / "docs" / "deviations.md").read_text(encoding="utf-8")
    in_document = [int(number) for number in re.findall(r"^\| (\d+)\. ", text, re.MULTILINE)]
    assert in_document == sorted(in_code)


def test_no_file_names_a_package_registry_or_a_place_on_one_machine():
    registries = "|".join(
        ["py" + r"pi\.org", "python" + "hosted", "npm" + r"js\.(?:org|com)", "ana" + r"conda\.org"]
    )
    places = "|".join(["wo" + "rk", "ro" + "ot"])
    forbidden = re.compile(rf"https?://[^\s/]*(?:{registries})|(?<![\w.~}}$])/(?:{places})/\w")
    found = {
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in TEXTS
        for match in forbidden.finditer(path.read_text(encoding="utf-8"))
    }
    assert not found
