"""Texts of others on the terminal: shown, never obeyed."""

from __future__ import annotations

import pytest

from genius_search.cli.terminal import (
    TerminalProgress,
    print_facts,
    print_json,
    print_table,
    print_text,
)

CLEAR = "\x1b]0;pwned\x07\x1b[2J"
HOSTILE = f"kite{CLEAR}\x9b31m\u202egpj\r\udcff"


@pytest.mark.parametrize(
    "show",
    [
        print_text,
        lambda text: print_text(text, error=True),
        lambda text: print_json({text: [text]}),
        lambda text: print_facts({"text": text}),
        lambda text: print_table(("id", "text"), [(text, text)], fill=True),
        TerminalProgress().say,
    ],
)
def test_no_text_reaches_the_terminal_as_a_command(show, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    show(HOSTILE)
    printed = "".join(capsys.readouterr())
    assert "kite" in printed
    assert not set(printed) & set("\x1b\x07\x9b\u202e\r\udcff")
