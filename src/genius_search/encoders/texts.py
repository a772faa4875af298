"""Texts and tokenizers of others: what is read of a text is bounded, and no rule may make it grow."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic_core import from_json
from tokenizers import Tokenizer

from genius_search.errors import ArtifactMismatch

CHARACTERS_PER_TOKEN: Final = 64
"""Characters that are read of a text for each token that an encoder takes; words have about five."""
MAX_TOKENS: Final = 8192
"""Tokens that are read of a text, whatever a model's folder says."""
MAX_BYTES: Final = 1 << 26
"""Largest ``tokenizer.json`` that is read; one of 256,000 tokens has 34 MB."""
MAX_GROWING: Final = 4
"""Rules of a tokenizer that may lengthen a text, each at most twofold; known models have up to two."""
MAX_TEMPLATE: Final = 64
"""Tokens that a tokenizer may add around a text."""
MAX_EXPANSION: Final = 40
"""Bytes that a rule of SentencePiece may write for a character; Unicode's longest has 33."""


def cut_texts(texts: Sequence[str], *, max_tokens: int) -> list[str]:
    """Return the beginnings of texts, long enough for ``max_tokens`` tokens, without white space before them.

    A tokenizer takes about 200 bytes of memory for each character, and drops most of a long text afterwards.
    """
    most = max_tokens * CHARACTERS_PER_TOKEN
    return [text if len(text) <= most else text.lstrip()[:most] for text in texts]


def read_tokenizer(file: Path) -> Tokenizer:
    """Open a ``tokenizer.json``, without the truncation and padding that it may ask for.

    Raises
    ------
    ArtifactMismatch
        It is damaged, or its rules make texts grow.
    """
    check_tokenizer(file)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001  tokenizers raises plain Exception for a damaged file
        raise ArtifactMismatch(f"{file} cannot be read as a tokenizer ({error})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def check_tokenizer(file: Path) -> None:
    """Check a ``tokenizer.json`` before a library opens it, since opening it applies its rules.

    Raises
    ------
    ArtifactMismatch
        It is too large or not JSON, or its rules could make a short text fill the memory.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ArtifactMismatch(f"{file} has more than {MAX_BYTES:,} bytes, too many for a tokenizer")
        rules = from_json(content)
        growing = sum(map(_grows, _parts(rules.get("normalizer"), rules.get("pre_tokenizer"))))
        added = sum(map(_added, _parts(rules.get("post_processor"))))
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        if isinstance(error, ArtifactMismatch):
            raise
        raise ArtifactMismatch(f"{file} cannot be read as a tokenizer ({error})") from None
    if growing > MAX_GROWING or added > MAX_TEMPLATE:
        raise ArtifactMismatch(
            f"{file} has {growing} rules that lengthen texts and adds {added} tokens to each, expected at "
            f"most {MAX_GROWING} and {MAX_TEMPLATE}; a short text could fill the memory, do not use it"
        )


def _parts(*values: Any) -> Iterator[dict[str, Any]]:
    """Yield rules and the rules in them."""
    for value in values:
        if isinstance(value, dict):
            yield value
            yield from _parts(*value.values())
        elif isinstance(value, list):
            yield from _parts(*value)


def _grows(rule: dict[str, Any]) -> int:
    """Return 1 if a rule can make a text longer, more than allowed if by more than twofold, otherwise 0."""
    match rule.get("type"):
        case "Replace":
            written, pattern = len(rule["content"]), rule["pattern"]
            read = len(pattern["String"]) if "String" in pattern else 0
            return 0 if written <= read else 1 if written <= max(2 * read, 1) else MAX_GROWING + 1
        case "ByteLevel":
            return 1
        case "Precompiled":  # a trie and its size, then what it may write, each followed by NUL
            data = base64.b64decode(rule["precompiled_charsmap"])
            longest = max(map(len, data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")))
            return MAX_GROWING - 1 if longest <= MAX_EXPANSION else MAX_GROWING + 1
        case _:
            return 0


def _added(rule: dict[str, Any]) -> int:
    """Return how many tokens a rule adds to a text at most; more than allowed if it repeats the text."""
    match rule.get("type"):
        case "TemplateProcessing":
            single, pair = rule["single"], rule["pair"]
            longest = max([1, *(len(one["ids"]) for one in rule["special_tokens"].values())])
            repeats = sum("Sequence" in piece for piece in single) > 1
            return MAX_TEMPLATE + 1 if repeats else max(len(single), len(pair)) * longest
        case "BertProcessing" | "RobertaProcessing":
            return 4
        case _:
            return 0
