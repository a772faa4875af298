"""BERT's tokens for UniIR's BLIP: lower-cased word pieces, at most 100 (specification, section 3.5).

BLIP adds [DEC] and [ENC] to BERT's vocabulary; UniIR starts every text with [CLS], as plain BERT does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing

from genius.errors import ArtifactMismatch, ArtifactMissing
from genius.published.blip import EXTRA_TOKENS

__all__ = ["LONGEST", "find_bert_tokenizer", "open_bert_tokenizer"]

LONGEST: Final = 100
_SPECIAL: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def find_bert_tokenizer(folder: Path, *, rows: int) -> Tokenizer:
    """Read ``tokenizer.json`` or ``vocab.txt`` of a folder and check that a checkpoint's ``rows`` fit it.

    Raises
    ------
    ArtifactMissing
        the folder has neither.
    ArtifactMismatch
        it is no BERT vocabulary, or of another size.
    """
    ready, words = folder / "tokenizer.json", folder / "vocab.txt"
    if not (ready.is_file() or words.is_file()):
        raise ArtifactMissing(
            f"{folder} has neither tokenizer.json nor vocab.txt; give one with bert-base-uncased's vocabulary"
        )
    tokenizer = _from_json(ready) if ready.is_file() else _from_words(words)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    lacking = [name for name in _SPECIAL if tokenizer.token_to_id(name) is None]
    if lacking or size not in (rows, rows - EXTRA_TOKENS):
        problem = f"lacks {', '.join(lacking)}" if lacking else f"has {size:,} tokens"
        raise ArtifactMismatch(
            f"the vocabulary in {folder} {problem}, and the checkpoint was trained with "
            f"{rows - EXTRA_TOKENS:,} and two more; give a folder with bert-base-uncased's vocabulary"
        )
    return tokenizer


def open_bert_tokenizer(file: Path) -> Tokenizer:
    """Open ``tokenizer.json`` so that texts are cut at 100 tokens and padded to the longest of a batch."""
    tokenizer = _from_json(file)
    tokenizer.enable_truncation(LONGEST)
    tokenizer.enable_padding(pad_id=tokenizer.token_to_id("[PAD]"), pad_token="[PAD]")  # noqa: S106  no password
    return tokenizer


def _from_json(file: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(file.read_text())
    except Exception as error:  # noqa: BLE001  tokenizers raises plain Exception for a damaged file
        raise ArtifactMismatch(f"{file} cannot be read as a tokenizer ({error})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _from_words(file: Path) -> Tokenizer:
    words = {word: number for number, word in enumerate(file.read_text().splitlines())}
    tokenizer = Tokenizer(WordPiece(words, unk_token="[UNK]"))  # noqa: S106
    tokenizer.normalizer = BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    known = [name for name in _SPECIAL if name in words]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in known])
    if {"[CLS]", "[SEP]"} <= words.keys():
        ends = [(name, words[name]) for name in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return tokenizer
