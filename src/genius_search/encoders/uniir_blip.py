"""UniIR's BLIP-SF and BLIP-FF: pictures squashed to a square, texts in BERT's tokens (specification, 3.5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
from jaxtyping import Float
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from genius_search.artifact import Manifest
from genius_search.encoders.base import ImageInput, TextInput
from genius_search.encoders.pixels import pixels_of
from genius_search.encoders.pretrained import read_json
from genius_search.encoders.uniir import BATCH, FeatureFusion, UniirFolder
from genius_search.encoders.uniir_weights import EXTRA_TOKENS
from genius_search.errors import ArtifactMismatch, ArtifactMissing

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


__all__ = ["BlipScoreFusion", "blip_feature_fusion"]


class BlipScoreFusion(UniirFolder):
    """Image and text features of BLIP-SF, to be summed; unnormalised, in full precision."""

    def __init__(self, manifest: Manifest, *, device: str) -> None:
        super().__init__(manifest, device=device)
        folder = manifest.folder
        from genius_search.encoders.uniir_networks import (
            BlipTowers,  # noqa: PLC0415  takes seconds to import
            filled,  # noqa: PLC0415  takes seconds to import
        )

        self._network = filled(BlipTowers(read_json(folder / "config.json")), folder).to(device).eval()
        self._read = _reader(open_bert_tokenizer(folder / "tokenizer.json"))

    @property
    def dim(self) -> int:
        """Width of its features."""
        return self._network.dim

    @torch.inference_mode()
    def image_features(self, images: Sequence[ImageInput]) -> Float[Tensor, "items dim"]:
        """Features of pictures."""
        pictures = pixels_of(images)
        parts = [
            self._network.image(self.prepare(pictures[start : start + BATCH])).cpu()
            for start in range(0, len(pictures), BATCH)
        ]
        return torch.cat([torch.zeros(0, self.dim), *parts])

    @torch.inference_mode()
    def text_features(self, texts: Sequence[TextInput]) -> Float[Tensor, "items dim"]:
        """Features of texts; longer ones than 100 tokens are cut."""
        features = [torch.zeros(0, self.dim)]
        for start in range(0, len(texts), BATCH):
            read = self._read([text.text for text in texts[start : start + BATCH]])
            features.append(
                self._network.text({name: rows.to(self._device) for name, rows in read.items()}).cpu()
            )
        return torch.cat(features)


def blip_feature_fusion(manifest: Manifest, *, device: str) -> FeatureFusion:
    """BLIP-FF: BERT looks at the image while it reads the text."""
    from genius_search.encoders.uniir_networks import (
        BlipFusion,  # noqa: PLC0415  takes seconds to import
        filled,  # noqa: PLC0415  takes seconds to import
    )

    folder = manifest.folder
    network = filled(BlipFusion(read_json(folder / "config.json")), folder)
    read = _reader(open_bert_tokenizer(folder / "tokenizer.json"))
    return FeatureFusion(manifest, network, read, device=device)


def _reader(tokenizer: Tokenizer) -> Callable[[Sequence[str]], dict[str, Tensor]]:
    """Token numbers and which of them are no padding, which BERT does not look at."""

    def read(texts: Sequence[str]) -> dict[str, Tensor]:
        encoded = tokenizer.encode_batch(list(texts))
        return {
            "input_ids": torch.tensor([encoding.ids for encoding in encoded]),
            "attention_mask": torch.tensor([encoding.attention_mask for encoding in encoded]),
        }

    return read
