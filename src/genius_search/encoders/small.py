"""`small`: an encoder trained from scratch, in about a minute on one core for the drawn catalogue.

A picture is described once by fixed edges and colours (:mod:`genius_search.encoders.pixels`), a text once by token
numbers (:mod:`genius_search.encoders.small`); what is learnt is a light network over each. So a stage caches both
and every training step costs a few matrix products. Deviation 24: the paper's encoder is a fine-tuned CLIP.

Four kinds are the paper's embedding baselines in small: clip-sf and blip-sf give features of either modality,
clip-ff and blip-ff one vector for both.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import NFKC, Lowercase
from tokenizers.normalizers import Sequence as Normalizers
from tokenizers.pre_tokenizers import ByteLevel, Punctuation, WhitespaceSplit
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from tokenizers.trainers import BpeTrainer
from torch import Tensor, nn
from torch.nn import functional as F

from genius_search.artifact import fingerprint_of
from genius_search.config import SmallEncoderConfig
from genius_search.data.features import FeatureBatch
from genius_search.encoders.base import ImageInput, JointInput, TextInput
from genius_search.encoders.pixels import DESCRIPTOR_SIZE, describe, pixels_of
from genius_search.encoders.pretrained import need_transformers
from genius_search.errors import ArtifactMismatch, ArtifactMissing, MissingExtra
from genius_search.nn.weights import write_weights

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


__all__ = ["EmbeddingNetwork", "SmallNetwork", "used_tokens"]


class EmbeddingNetwork(nn.Module):
    """What is trained: described pictures and numbered texts in, one unnormalised vector for each item."""

    dim: int
    """Width of the vectors."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where its weights are."""

    @abstractmethod
    def embedding(self, batch: FeatureBatch) -> Float[Tensor, "items dim"]:
        """The vector of each item; ``image`` holds descriptors, ``text`` token numbers."""


class SmallNetwork(EmbeddingNetwork):
    """The two towers: descriptors and token numbers in, unnormalised features out."""

    def __init__(self, config: SmallEncoderConfig, *, vocabulary: int) -> None:
        super().__init__()
        self.pair_buckets = config.pair_buckets
        self.dim = config.dim
        self.image_tower = _tower(DESCRIPTOR_SIZE, config.image_width, config.dim)
        self.words = nn.Embedding(vocabulary, config.text_width)
        self.pairs = nn.Embedding(config.pair_buckets + 1, config.text_width)
        self.text_tower = _tower(config.text_width, config.text_width, config.dim)
        for table in (self.words, self.pairs):
            nn.init.normal_(table.weight, std=0.5)

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.words.weight.device

    def image(self, descriptors: Float[Tensor, "items pixels"]) -> Float[Tensor, "items dim"]:
        """Features of described pictures."""
        features: Tensor = self.image_tower(descriptors)
        return features

    def text(self, tokens: Int[Tensor, "items tokens"]) -> Float[Tensor, "items dim"]:
        """Features of numbered texts; padding does not count."""
        tokens = used_tokens(tokens)
        pairs = pair_rows(tokens, buckets=self.pair_buckets)
        read = F.embedding_bag(tokens, self.words.weight, mode="sum", padding_idx=PADDING)
        read = read + F.embedding_bag(pairs, self.pairs.weight, mode="sum", padding_idx=PADDING)
        features: Tensor = self.text_tower(read)
        return features

    def embedding(self, batch: FeatureBatch) -> Float[Tensor, "items dim"]:
        """The sum of what is there of each item: score fusion."""
        total = torch.zeros(len(batch.image), self.dim, device=self.device)
        for present, read, content in (
            (batch.has_image, self.image, batch.image),
            (batch.has_text, self.text, batch.text.int()),
        ):
            places = present.nonzero().squeeze(1)
            if len(places):
                features = read(content[places].to(self.device)).float()
                total = total.index_add(0, places.to(self.device), features)
        return total


def used_tokens(tokens: Int[Tensor, "items tokens"]) -> Int[Tensor, "items used"]:
    """As many columns as the longest text fills, and at least two, so that there are pairs."""
    longest = int((tokens != PADDING).sum(dim=1).max()) if len(tokens) else 0
    return tokens[:, : max(longest, 2)].long()


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


__all__ = [
    "AnySmallEncoder",
    "SmallEncoder",
    "SmallEncoderConfig",
    "SmallJointEncoder",
    "create_small",
    "load_small",
]

CONFIG_FILE: Final = "config.json"
TOKENIZER_FILE: Final = "tokenizer.json"
WEIGHTS_FILE: Final = "model.safetensors"
_BATCH: Final = 1024


Network = TypeVar("Network", bound=EmbeddingNetwork)


class _Small(Generic[Network]):
    """A trained network with the tokenizer it was trained with."""

    def __init__(
        self, config: SmallEncoderConfig, network: Network, tokenizer: Tokenizer, *, spec: str = "small"
    ) -> None:
        self.config = config
        self.network = network
        self.tokenizer = tokenizer
        self._spec = spec

    def save(self, folder: Path) -> None:
        """Write weights, tokenizer and settings into a folder that exists."""
        write_weights(folder / WEIGHTS_FILE, self.network.state_dict())
        (folder / TOKENIZER_FILE).write_text(self.tokenizer.to_str())
        (folder / CONFIG_FILE).write_text(json.dumps(self.config.to_json(), indent=2) + "\n")

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
        return fingerprint_of([self.config.to_json(), self.tokenizer.to_str(), weights])

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


class SmallEncoder(_Small[SmallNetwork]):
    """CLIP-SF and BLIP-SF in small: features of images and of texts.

    >>> encoder = create_small(SmallEncoderConfig(), texts, seed=0)  # doctest: +SKIP
    >>> descriptors, tokens = encoder.prepare_images(pictures), encoder.prepare_texts(texts)  # doctest: +SKIP
    >>> features = encoder.network.image(descriptors)  # doctest: +SKIP
    """

    @torch.inference_mode()
    def image_features(self, images: Sequence[ImageInput]) -> Float[Tensor, "items dim"]:
        """Features of pictures."""
        pictures = pixels_of(images)
        parts = [
            self.network.image(self.prepare_images(pictures[start : start + _BATCH]).to(self.network.device))
            for start in range(0, len(pictures), _BATCH)
        ]
        return torch.cat(parts).cpu() if parts else torch.zeros(0, self.dim)

    @torch.inference_mode()
    def text_features(self, texts: Sequence[TextInput]) -> Float[Tensor, "items dim"]:
        """Features of texts."""
        tokens = self.prepare_texts([text.text for text in texts])
        parts = [self.network.text(part.to(self.network.device)) for part in torch.split(tokens, _BATCH)]
        return torch.cat(parts).cpu()


class SmallJointEncoder(_Small[EmbeddingNetwork]):
    """CLIP-FF and BLIP-FF in small: one vector for image and text together."""

    @torch.inference_mode()
    def joint_features(self, items: Sequence[JointInput]) -> Float[Tensor, "items dim"]:
        """One vector for each image and text together."""
        parts = [torch.zeros(0, self.dim)]
        for start in range(0, len(items), _BATCH):
            part = items[start : start + _BATCH]
            has_image = torch.tensor([item.has_image for item in part])
            descriptors = torch.zeros(len(part), DESCRIPTOR_SIZE)
            pictures = pixels_of([ImageInput(item.image, item.key) for item in part if item.has_image])
            descriptors[has_image] = self.prepare_images(pictures)
            tokens = self.prepare_texts([item.text for item in part])
            has_text = torch.tensor([bool(item.text) for item in part])
            batch = FeatureBatch(descriptors, tokens.float(), has_image, has_text)
            parts.append(self.network.embedding(batch).cpu())
        return torch.cat(parts)

    def image_features(self, images: Sequence[ImageInput]) -> Float[Tensor, "items dim"]:
        """Vectors of images without a text."""
        return self.joint_features(
            [JointInput(image.image, "", image.key, has_image=True) for image in images]
        )

    def text_features(self, texts: Sequence[TextInput]) -> Float[Tensor, "items dim"]:
        """Vectors of texts without an image."""
        return self.joint_features([JointInput(None, text.text, text.key, has_image=False) for text in texts])


AnySmallEncoder = SmallEncoder | SmallJointEncoder


def create_small(config: SmallEncoderConfig, texts: Iterable[str], *, seed: int) -> AnySmallEncoder:
    """Learn the vocabulary from the training texts and start from random weights.

    Raises
    ------
    MissingExtra
        clip-ff or blip-ff, and transformers is not installed.
    """
    if config.is_joint:
        need_transformers()
    tokenizer = train_tokenizer(texts, vocabulary=config.vocabulary)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _put_together(config, tokenizer, spec="small")


def load_small(folder: Path, *, device: str = "cpu") -> AnySmallEncoder:
    """Open what ``save`` wrote.

    Raises
    ------
    ArtifactMissing
        the folder or one of its three files is not there.
    ArtifactMismatch
        the files do not belong together or are damaged.
    MissingExtra
        it is clip-ff or blip-ff, and transformers is not installed.
    """
    missing = [name for name in (CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE) if not (folder / name).is_file()]
    if missing:
        raise ArtifactMissing(
            f"{folder} is not a trained small encoder: it lacks {', '.join(missing)}. "
            "Train one with `genius train encoder`"
        )
    try:
        config = SmallEncoderConfig(**json.loads((folder / CONFIG_FILE).read_text()))
        if config.is_joint:
            need_transformers()
        tokenizer = Tokenizer.from_str((folder / TOKENIZER_FILE).read_text())
        encoder = _put_together(config, tokenizer, spec=f"small:{folder}")
        encoder.network.load_state_dict(load_file(folder / WEIGHTS_FILE))
    except MissingExtra:
        raise
    except Exception as error:  # tokenizers raises plain Exception for a damaged file
        reason = str(error).splitlines()[0]
        raise ArtifactMismatch(
            f"{folder} cannot be read as a small encoder ({reason}); train it again"
        ) from error
    encoder.network.to(device).eval()
    return encoder


def _put_together(config: SmallEncoderConfig, tokenizer: Tokenizer, *, spec: str) -> AnySmallEncoder:
    vocabulary = tokenizer.get_vocab_size()
    match config.kind:
        case "clip-sf" | "blip-sf":
            return SmallEncoder(config, SmallNetwork(config, vocabulary=vocabulary), tokenizer, spec=spec)
        case "clip-ff":
            from genius_search.encoders.small_fusion import SmallClipFusion  # noqa: PLC0415  takes seconds

            network: EmbeddingNetwork = SmallClipFusion(config, vocabulary=vocabulary)
        case "blip-ff":
            from genius_search.encoders.small_fusion import SmallBlipFusion  # noqa: PLC0415

            network = SmallBlipFusion(config, vocabulary=vocabulary)
    return SmallJointEncoder(config, network, tokenizer, spec=spec)
