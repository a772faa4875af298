"""UniIR's CLIP-SF and CLIP-FF: OpenAI's CLIP with QuickGELU and its tokens (specification, 2.4 to 2.7)."""

from __future__ import annotations

import gzip
import html
import importlib.util
import re
from collections.abc import Sequence
from functools import cache, cached_property
from importlib import resources
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Int
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import NFC, Lowercase, Replace
from tokenizers.normalizers import Sequence as Normalizers
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from genius_search.artifact import Manifest
from genius_search.encoders.base import ImageInput, TextInput
from genius_search.encoders.pixels import middle_square, pixels_of
from genius_search.encoders.pretrained import ClipEncoder, read_json
from genius_search.encoders.uniir import FeatureFusion
from genius_search.errors import MissingExtra

__all__ = ["CONTEXT", "END", "START", "VOCABULARY", "clean", "stored_tokenizer", "token_rows"]

START: Final = 49406
END: Final = 49407
VOCABULARY: Final = 49408
"""256 bytes, the same at the end of a word, 48,894 merges, start and end."""
CONTEXT: Final = 77
"""Tokens per text, start and end included."""

_MERGES: Final = "clip_merges.txt.gz"
_WORD_END: Final = "</w>"
_NAMES: Final = {"<|startoftext|>": START, "<|endoftext|>": END}
# CLIP's pattern ignores case, so the iota below (U+0345) is neither letter nor other there, and is dropped.
_WORDS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[\\p{L}]+|[\\p{N}]|[^\\s\\p{L}\\p{N}\u0345]+"
_BLANKS: Final = re.compile(r"\s+")
# Where CLIP's own pattern would see a start or end written out in a text: at the start of a piece.
_PIECES: Final = re.compile(r"(<\|startoftext\|>|<\|endoftext\|>)|[^\W_]+|(?:[^\w\s\u0345]|_)+")


def token_rows(texts: Sequence[str], *, context: int = CONTEXT) -> Int[Tensor, "items tokens"]:
    """Number the tokens of texts: start, tokens, end, then zeros; a long text is cut and still ends in end.

    Raises
    ------
    MissingExtra
        ftfy is not installed.
    """
    rows = np.zeros((len(texts), context), dtype=np.int64)
    for row, tokens in enumerate(_numbers([clean(text) for text in texts])):
        kept = [START, *tokens[: context - 2], END]
        rows[row, : len(kept)] = kept
    return torch.from_numpy(rows)


def clean(text: str) -> str:
    """Mend wrong encodings, resolve HTML entities twice, single blanks, lower case; in CLIP's order."""
    if importlib.util.find_spec("ftfy") is None:
        raise MissingExtra(
            "CLIP's tokens need ftfy, which is not installed: pip install genius-retrieval[hf]"
        )
    import ftfy  # noqa: PLC0415  only this encoder needs it

    mended = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
    return _BLANKS.sub(" ", mended).strip().lower()


def stored_tokenizer() -> Tokenizer:
    """The vocabulary as other libraries open it (``tokenizer.json``); without ftfy, so not quite the same."""
    tokenizer = Tokenizer(_model())
    tokenizer.normalizer = Normalizers([NFC(), Replace(Regex(r"\s+"), " "), Lowercase()])
    tokenizer.pre_tokenizer = _splitter()
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in _NAMES])
    first, last = _NAMES
    tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} {first} $B {last}",
        special_tokens=list(_NAMES.items()),
    )
    return tokenizer


def _numbers(cleaned: Sequence[str]) -> list[list[int]]:
    tokenizer = _plain_tokenizer()
    encoded = tokenizer.encode_batch_fast(list(cleaned), add_special_tokens=False)
    found = [encoding.ids for encoding in encoded]
    for row, text in enumerate(cleaned):
        if any(name in text for name in _NAMES):
            found[row] = _with_names(tokenizer, text)
    return found


def _with_names(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a text that spells out a start or an end: CLIP takes it for one, and stops reading there."""
    tokens: list[int] = []
    begin = 0
    for piece in _PIECES.finditer(text):
        if piece[1]:
            tokens += tokenizer.encode(text[begin : piece.start()], add_special_tokens=False).ids
            tokens.append(_NAMES[piece[1]])
            begin = piece.end()
    return tokens + tokenizer.encode(text[begin:], add_special_tokens=False).ids


@cache
def _plain_tokenizer() -> Tokenizer:
    """Splits and merges, for texts that are clean already."""
    tokenizer = Tokenizer(_model())
    tokenizer.pre_tokenizer = _splitter()
    return tokenizer


def _splitter() -> PreTokenizers:
    words = Split(Regex(_WORDS), behavior="removed", invert=True)
    return PreTokenizers([words, ByteLevel(add_prefix_space=False, use_regex=False)])


def _model() -> BPE:
    packed = resources.files("genius_search.encoders").joinpath(_MERGES).read_bytes()
    lines = gzip.decompress(packed).decode().splitlines()
    merges = [(first, second) for first, second in (line.split() for line in lines)]
    symbols = _byte_symbols()
    names = [*symbols, *(symbol + _WORD_END for symbol in symbols)]
    names += [*(first + second for first, second in merges), *_NAMES]
    vocabulary = {name: number for number, name in enumerate(names)}
    return BPE(vocab=vocabulary, merges=merges, end_of_word_suffix=_WORD_END)


def _byte_symbols() -> list[str]:
    """A printable letter for each byte, in CLIP's order: printable Latin-1, then the others from 256 on."""
    ranges = (("!", "~"), ("¡", "¬"), ("®", "ÿ"))
    printable = [chr(code) for first, last in ranges for code in range(ord(first), ord(last) + 1)]
    return printable + [chr(256 + number) for number in range(256 - len(printable))]


__all__ = ["ClipScoreFusion", "clip_feature_fusion"]

_BATCH: Final = 64


class ClipScoreFusion(ClipEncoder):
    """Image and text features of CLIP-SF, to be summed; unnormalised, in full precision."""

    def __init__(self, manifest: Manifest, *, device: str) -> None:
        super().__init__(str(manifest.folder), device=device)
        self._manifest = manifest

    @property
    def spec(self) -> str:
        """``uniir:FOLDER``."""
        return f"uniir:{self._name}"

    @cached_property
    def fingerprint(self) -> str:
        """Hash of its settings, tokenizer and weights, as they were when it was imported."""
        return self._manifest.fingerprint

    def image_features(self, images: Sequence[ImageInput]) -> Float[Tensor, "items dim"]:
        """Features of the middle square of pictures."""
        side: int = self._model.config.vision_config.image_size
        pictures = zip(images, pixels_of(images), strict=True)
        squares = [ImageInput(middle_square(picture, side=side), image.key) for image, picture in pictures]
        return super().image_features(squares)

    @torch.inference_mode()
    def text_features(self, texts: Sequence[TextInput]) -> Float[Tensor, "items dim"]:
        """Features of texts, taken at their first end token; longer ones than 77 tokens are cut."""
        longest: int = self._model.config.text_config.max_position_embeddings
        rows = token_rows([text.text for text in texts], context=longest)
        features = [torch.zeros(0, self.dim)]
        for part in torch.split(rows, _BATCH) if texts else ():
            found = self._model.get_text_features(input_ids=_until_end(part).to(self._device))
            features.append(found.pooler_output.cpu())
        return torch.cat(features)


def clip_feature_fusion(manifest: Manifest, *, device: str) -> FeatureFusion:
    """CLIP-FF: the tokens of both towers, mixed and averaged."""
    from genius_search.encoders.uniir_networks import (
        ClipFusion,  # noqa: PLC0415  takes seconds to import
        filled,  # noqa: PLC0415  takes seconds to import
    )

    network = filled(ClipFusion(read_json(manifest.folder / "config.json")), manifest.folder)

    def read(texts: Sequence[str]) -> dict[str, Tensor]:
        return {"input_ids": token_rows(texts, context=network.context)}

    return FeatureFusion(manifest, network, read, device=device)


def _until_end(rows: Int[Tensor, "items tokens"]) -> Int[Tensor, "items _"]:
    """Drop what follows every row's first end: no token looks ahead, so it changes nothing."""
    ends = (rows == END).int().argmax(dim=1)
    return rows[:, : int(ends.max()) + 1]
