"""`small`: an encoder trained from scratch, in about a minute on one core for the drawn catalogue.

A picture is described once by fixed edges and colours (:mod:`genius.encoders.picture`), a text once by token
numbers (:mod:`genius.encoders.words`); what is learnt is a light network over each. So a stage caches both
and every training step costs a few matrix products. Deviation 24: the paper's encoder is a fine-tuned CLIP.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import torch
from jaxtyping import Float, Int
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from genius.artifact import fingerprint_of
from genius.encoders.picture import DESCRIPTOR_SIZE, describe, pixels_of
from genius.encoders.protocol import ImageInput, TextInput
from genius.encoders.small_config import SmallEncoderConfig
from genius.encoders.words import PADDING, pair_rows, token_rows, train_tokenizer
from genius.errors import ArtifactMismatch, ArtifactMissing
from genius.weights import write_weights

__all__ = ["SmallEncoder", "SmallEncoderConfig", "SmallNetwork"]

CONFIG_FILE: Final = "config.json"
TOKENIZER_FILE: Final = "tokenizer.json"
WEIGHTS_FILE: Final = "model.safetensors"
_BATCH: Final = 1024


class SmallNetwork(nn.Module):
    """The trainable part: descriptors and token numbers in, unnormalised features out."""

    def __init__(self, config: SmallEncoderConfig, *, vocabulary: int) -> None:
        super().__init__()
        self.pair_buckets = config.pair_buckets
        self.image_tower = _tower(DESCRIPTOR_SIZE, config.image_width, config.dim)
        self.words = nn.Embedding(vocabulary, config.text_width)
        self.pairs = nn.Embedding(config.pair_buckets + 1, config.text_width)
        self.text_tower = _tower(config.text_width, config.text_width, config.dim)
        for table in (self.words, self.pairs):
            nn.init.normal_(table.weight, std=0.5)

    def image(self, descriptors: Float[Tensor, "items pixels"]) -> Float[Tensor, "items dim"]:
        """Features of described pictures."""
        features: Tensor = self.image_tower(descriptors)
        return features

    def text(self, tokens: Int[Tensor, "items tokens"]) -> Float[Tensor, "items dim"]:
        """Features of numbered texts; padding does not count."""
        longest = int((tokens != PADDING).sum(dim=1).max()) if len(tokens) else 0
        tokens = tokens[:, : max(longest, 2)].long()
        pairs = pair_rows(tokens, buckets=self.pair_buckets)
        read = F.embedding_bag(tokens, self.words.weight, mode="sum", padding_idx=PADDING)
        read = read + F.embedding_bag(pairs, self.pairs.weight, mode="sum", padding_idx=PADDING)
        features: Tensor = self.text_tower(read)
        return features


def _tower(inputs: int, width: int, dim: int) -> nn.Sequential:
    """Layers with the same scale at their end for either modality, since features are summed."""
    return nn.Sequential(
        nn.LayerNorm(inputs),
        nn.Linear(inputs, width),
        nn.GELU(),
        nn.LayerNorm(width),
        nn.Linear(width, width),
        nn.GELU(),
        nn.LayerNorm(width),
        nn.Linear(width, dim),
    )


class SmallEncoder:
    """The trained network with the tokenizer it was trained with.

    >>> encoder = SmallEncoder.create(SmallEncoderConfig(), texts, seed=0)  # doctest: +SKIP
    >>> descriptors, tokens = encoder.prepare_images(pictures), encoder.prepare_texts(texts)  # doctest: +SKIP
    >>> features = encoder.network.image(descriptors)  # doctest: +SKIP
    """

    def __init__(
        self, config: SmallEncoderConfig, network: SmallNetwork, tokenizer: Tokenizer, *, spec: str = "small"
    ) -> None:
        self.config = config
        self.network = network
        self.tokenizer = tokenizer
        self._spec = spec

    @staticmethod
    def create(config: SmallEncoderConfig, texts: Iterable[str], *, seed: int) -> SmallEncoder:
        """Learn the vocabulary from the training texts and start from random weights."""
        tokenizer = train_tokenizer(texts, vocabulary=config.vocabulary)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = SmallNetwork(config, vocabulary=tokenizer.get_vocab_size())
        return SmallEncoder(config, network, tokenizer)

    @staticmethod
    def load(folder: Path, *, device: str = "cpu") -> SmallEncoder:
        """Open what :meth:`save` wrote.

        Raises
        ------
        ArtifactMissing
            the folder or one of its three files is not there.
        ArtifactMismatch
            the files do not belong together or are damaged.
        """
        missing = [
            name for name in (CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE) if not (folder / name).is_file()
        ]
        if missing:
            raise ArtifactMissing(
                f"{folder} is not a trained small encoder: it lacks {', '.join(missing)}. "
                "Train one with `genius train encoder`"
            )
        try:
            config = SmallEncoderConfig(**json.loads((folder / CONFIG_FILE).read_text()))
            tokenizer = Tokenizer.from_str((folder / TOKENIZER_FILE).read_text())
            network = SmallNetwork(config, vocabulary=tokenizer.get_vocab_size())
            network.load_state_dict(load_file(folder / WEIGHTS_FILE))
        except Exception as error:  # tokenizers raises plain Exception for a damaged file
            reason = str(error).splitlines()[0]
            raise ArtifactMismatch(
                f"{folder} cannot be read as a small encoder ({reason}); train it again"
            ) from error
        return SmallEncoder(config, network.to(device).eval(), tokenizer, spec=f"small:{folder}")

    def save(self, folder: Path) -> None:
        """Write weights, tokenizer and settings into a folder that exists."""
        write_weights(folder / WEIGHTS_FILE, self.network.state_dict())
        (folder / TOKENIZER_FILE).write_text(self.tokenizer.to_str())
        (folder / CONFIG_FILE).write_text(json.dumps(asdict(self.config), indent=2) + "\n")

    @property
    def spec(self) -> str:
        """``small:FOLDER`` once loaded, ``small`` before."""
        return self._spec

    @property
    def dim(self) -> int:
        """Width of its features."""
        return self.config.dim

    @property
    def fingerprint(self) -> str:
        """Hash of settings, tokenizer and weights, wherever they are kept."""
        state = self.network.state_dict()
        weights = {
            name: hashlib.sha256(state[name].cpu().contiguous().numpy().data).hexdigest() for name in state
        }
        return fingerprint_of([asdict(self.config), self.tokenizer.to_str(), weights])

    @property
    def needs_pixels(self) -> bool:
        """It looks at pictures."""
        return True

    def prepare_images(self, images: Sequence[Image.Image]) -> Float[Tensor, "items pixels"]:
        """Describe pictures; the part of the work that never changes, worth keeping between epochs."""
        return describe(images)

    def prepare_texts(self, texts: Sequence[str]) -> Int[Tensor, "items tokens"]:
        """Number the tokens of texts, padded to the longest allowed; worth keeping between epochs."""
        return token_rows(self.tokenizer, texts, max_tokens=self.config.max_tokens)

    @torch.inference_mode()
    def image_features(self, images: Sequence[ImageInput]) -> Float[Tensor, "items dim"]:
        """Features of pictures."""
        pictures = pixels_of(images)
        parts = [
            self.network.image(self.prepare_images(pictures[start : start + _BATCH]).to(self._device))
            for start in range(0, len(pictures), _BATCH)
        ]
        return torch.cat(parts).cpu() if parts else torch.zeros(0, self.dim)

    @torch.inference_mode()
    def text_features(self, texts: Sequence[TextInput]) -> Float[Tensor, "items dim"]:
        """Features of texts."""
        tokens = self.prepare_texts([text.text for text in texts])
        parts = [self.network.text(part.to(self._device)) for part in torch.split(tokens, _BATCH)]
        return torch.cat(parts).cpu()

    @property
    def _device(self) -> torch.device:
        return self.network.words.weight.device
