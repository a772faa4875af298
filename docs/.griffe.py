"""Docstrings as Markdown for the website: examples become code blocks, references to names become code."""

from __future__ import annotations

import re

from griffe import Extension, Object

EXAMPLE = re.compile(r"(?:^ *(?:>>>|\.\.\.) .*\n?)+", re.MULTILINE)
PROMPT = re.compile(r"^ *(?:>>>|\.\.\.) ", re.MULTILINE)
SKIP = re.compile(r" *# doctest: \+SKIP")
ROLE = re.compile(r":\w+:`~?(?:[\w.]*\.)?(\w+)`")


class Markdown(Extension):
    """Rewrites docstrings."""

    def on_object(self, *, obj: Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(_block, ROLE.sub(r"`\1`", obj.docstring.value))


def _block(example: re.Match[str]) -> str:
    return f"```python\n{SKIP.sub('', PROMPT.sub('', example.group())).rstrip()}\n```\n"
