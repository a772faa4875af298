"""The tokenizer of OpenAI's CLIP, as the tokenizers library stores it."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import NFC, Lowercase, Replace
from tokenizers.normalizers import Sequence as Normalizers
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from tokenizers.processors import TemplateProcessing

START: Final = 49406
VOCABULARY: Final = 49408
"""256 bytes, 256 bytes at the end of a word, 48,894 merges, start and end."""

_MERGES: Final = Path(__file__).with_name("clip_merges.txt.gz")
_SPECIAL: Final = {"<|startoftext|>": START, "<|endoftext|>": START + 1}
_WORD_END: Final = "</w>"
# CLIP's pattern ignores case, so that the combining iota below (U+0345) matches no part, and is
# dropped.
_WORDS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[\\p{L}]+|[\\p{N}]|[^\\s\\p{L}\\p{N}\u0345]+"


def clip_tokenizer() -> Tokenizer:
    """Build CLIP's ``tokenizer.json``; it expects texts that ftfy has repaired."""
    lines = gzip.decompress(_MERGES.read_bytes()).decode().splitlines()
    merges = [(first, second) for first, second in (line.split() for line in lines)]
    # A letter for each byte, in CLIP's order: printable Latin-1, then letters from 256 on.
    printable = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
    symbols = printable + [chr(256 + number) for number in range(256 - len(printable))]
    names = [*symbols, *(symbol + _WORD_END for symbol in symbols)]
    names += [*(first + second for first, second in merges), *_SPECIAL]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, end_of_word_suffix=_WORD_END))
    tokenizer.normalizer = Normalizers([NFC(), Replace(Regex(r"\s+"), " "), Lowercase()])
    words = Split(Regex(_WORDS), behavior="removed", invert=True)
    tokenizer.pre_tokenizer = PreTokenizers(
        [words, ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(
        [AddedToken(name, normalized=False, special=True) for name in _SPECIAL]
    )
    first, last = _SPECIAL
    tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} {first} $B {last}",
        special_tokens=list(_SPECIAL.items()),
    )
    return tokenizer
