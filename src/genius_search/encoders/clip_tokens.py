"""CLIP's tokens, exactly as OpenAI's code numbers them (ftfy included), by the tokenizers library."""

from __future__ import annotations

import gzip
import html
import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Final

import numpy as np
import torch
from jaxtyping import Int
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import NFC, Lowercase, Replace
from tokenizers.normalizers import Sequence as Normalizers
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from genius_search.encoders.texts import cut_texts
from genius_search.errors import need_packages

START: Final = 49406
END: Final = 49407
VOCABULARY: Final = 49408
"""256 bytes, the same at the end of a word, 48,894 merges, start and end."""
CONTEXT: Final = 77
"""Tokens per text, start and end included."""

_SPECIAL: Final = {"<|startoftext|>": START, "<|endoftext|>": END}
_WORD_END: Final = "</w>"
# CLIP's pattern ignores case, so the iota below (U+0345) is neither letter nor other there, and is dropped.
_WORDS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[\\p{L}]+|[\\p{N}]|[^\\s\\p{L}\\p{N}\u0345]+"
# Where CLIP's own pattern would see a start or end written out in a text: at the start of a piece.
_PIECES: Final = re.compile(r"(<\|startoftext\|>|<\|endoftext\|>)|[^\W_]+|(?:[^\w\s\u0345]|_)+")


def token_rows(texts: Sequence[str], *, context: int = CONTEXT) -> Int[Tensor, "items tokens"]:
    """Number the tokens of texts: start, tokens, end, then zeros; a long text is cut and still ends in end.

    Raises
    ------
    MissingExtra
        ftfy is not installed.
    """
    tokenizer = _cached_tokenizer()
    cleaned = [clean(text) for text in cut_texts(texts, max_tokens=context)]
    rows = np.zeros((len(texts), context), dtype=np.int64)
    encoded = tokenizer.encode_batch_fast(cleaned, add_special_tokens=False)
    for row, (text, encoding) in enumerate(zip(cleaned, encoded, strict=True)):
        spelled_out = any(name in text for name in _SPECIAL)
        tokens = _with_special(tokenizer, text) if spelled_out else encoding.ids
        kept = [START, *tokens[: context - 2], END]
        rows[row, : len(kept)] = kept
    return torch.from_numpy(rows)


def clean(text: str) -> str:
    """Repair encodings, resolve HTML entities twice, collapse blanks and lower the case, in CLIP's order."""
    need_packages("CLIP's tokens need", "ftfy")
    import ftfy  # noqa: PLC0415  only this encoder needs it

    repaired = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
    return re.sub(r"\s+", " ", repaired).strip().lower()


def stored_tokenizer() -> Tokenizer:
    """Build the tokenizer that other libraries open (``tokenizer.json``); it lacks ftfy's repairs."""
    tokenizer = _build_tokenizer()
    tokenizer.normalizer = Normalizers([NFC(), Replace(Regex(r"\s+"), " "), Lowercase()])
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in _SPECIAL])
    first, last = _SPECIAL
    tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} {first} $B {last}",
        special_tokens=list(_SPECIAL.items()),
    )
    return tokenizer


def _with_special(tokenizer: Tokenizer, text: str) -> list[int]:
    """Number a text that spells out a start or an end token, which CLIP reads as that token."""
    tokens: list[int] = []
    begin = 0
    for piece in _PIECES.finditer(text):
        if piece[1]:
            tokens += tokenizer.encode(text[begin : piece.start()], add_special_tokens=False).ids
            tokens.append(_SPECIAL[piece[1]])
            begin = piece.end()
    return tokens + tokenizer.encode(text[begin:], add_special_tokens=False).ids


def _build_tokenizer() -> Tokenizer:
    """Build the tokenizer for texts that are clean already: it splits and merges."""
    packed = resources.files("genius_search.encoders").joinpath("clip_merges.txt.gz").read_bytes()
    lines = gzip.decompress(packed).decode().splitlines()
    merges = [(first, second) for first, second in (line.split() for line in lines)]
    # A printable letter for each byte, in CLIP's order: printable Latin-1, then the others from 256 on.
    printable = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
    symbols = printable + [chr(256 + number) for number in range(256 - len(printable))]
    names = [*symbols, *(symbol + _WORD_END for symbol in symbols)]
    names += [*(first + second for first, second in merges), *_SPECIAL]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, end_of_word_suffix=_WORD_END))
    words = Split(Regex(_WORDS), behavior="removed", invert=True)
    tokenizer.pre_tokenizer = PreTokenizers([words, ByteLevel(add_prefix_space=False, use_regex=False)])
    return tokenizer


_cached_tokenizer = cache(_build_tokenizer)
