"""A text as token numbers: a vocabulary learnt from the training texts, rare words spelled in pieces.

Order matters ("a red anchor on green" is not "a green anchor on red"), so pairs of neighbouring tokens are
numbered too, by a hash into a fixed number of buckets: no pair is ever unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import torch
from jaxtyping import Int
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import NFKC, Lowercase
from tokenizers.normalizers import Sequence as Normalizers
from tokenizers.pre_tokenizers import ByteLevel, Punctuation, WhitespaceSplit
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from tokenizers.trainers import BpeTrainer
from torch import Tensor

PADDING: Final = 0
"""Token number that fills short rows and counts for nothing."""
_PAD: Final = "<pad>"
_MULTIPLIERS: Final = (1_000_003, 7_368_787)


def train_tokenizer(texts: Iterable[str], *, vocabulary: int) -> Tokenizer:
    """Learn a vocabulary of frequent words and word pieces; every byte is a token, so no text is unknown."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = Normalizers([NFKC(), Lowercase()])
    tokenizer.pre_tokenizer = PreTokenizers(
        [WhitespaceSplit(), Punctuation(), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=[_PAD],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_rows(tokenizer: Tokenizer, texts: Sequence[str], *, max_tokens: int) -> Int[Tensor, "items tokens"]:
    """Number the tokens of texts, cut and padded to ``max_tokens``."""
    rows = np.full((len(texts), max_tokens), PADDING, dtype=np.int32)
    for row, encoding in enumerate(tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)):
        ids = encoding.ids[:max_tokens]
        rows[row, : len(ids)] = ids
    return torch.from_numpy(rows)


def pair_rows(tokens: Int[Tensor, "items tokens"], *, buckets: int) -> Int[Tensor, "items pairs"]:
    """Number the pairs of neighbouring tokens: 1 to ``buckets``, or 0 where either is padding."""
    first, second = tokens[:, :-1].long(), tokens[:, 1:].long()
    mixed = first * _MULTIPLIERS[0] + second * _MULTIPLIERS[1]
    hashed = ((mixed ^ (mixed >> 15)) % buckets) + 1
    return torch.where((first == PADDING) | (second == PADDING), 0, hashed)
