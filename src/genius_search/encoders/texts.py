"""Texts for encoders: cut before they are tokenized; and tokenizers from their files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from genius_search.errors import ArtifactMismatch

CHARACTERS_PER_TOKEN: Final = 64
"""Characters that are read of a text for each token that an encoder takes; words have about five."""


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
        It is damaged.
    """
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001  tokenizers raises plain Exception for a damaged file
        raise ArtifactMismatch(f"{file} cannot be read as a tokenizer ({error})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
