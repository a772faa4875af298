"""Docstrings as Markdown for the website: examples become code blocks, references become code."""

from __future__ import annotations

import re
import textwrap

from griffe import Extension, Object

EXAMPLE = re.compile(r"^ *>>> .*\n?(?:^ *\S.*\n?)*", re.MULTILINE)
"""Lines from a prompt to the next blank line: code, perhaps with its output."""
PROMPT = re.compile(r"^ *(?:>>>|\.\.\.) ", re.MULTILINE)
SKIP = re.compile(r" *# doctest: \+SKIP")
ROLE = re.compile(r":\w+:`~?(?:[\w.]*\.)?(\w+)`")


class Markdown(Extension):
    """Rewrites docstrings."""

    def on_object(self, *, obj: Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(_block, ROLE.sub(r"`\1`", obj.docstring.value))


def _block(example: re.Match[str]) -> str:
    """Return an example as a code block, which has prompts only if it shows output."""
    lines = SKIP.sub("", textwrap.dedent(example.group())).rstrip().splitlines()
    if all(PROMPT.match(line) for line in lines):
        return "```python\n" + "\n".join(PROMPT.sub("", line) for line in lines) + "\n```\n"
    return "```pycon\n" + "\n".join(lines) + "\n```\n"
