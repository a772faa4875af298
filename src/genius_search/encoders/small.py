"""`small:FOLDER`: an encoder trained from scratch, in about a minute on one core for the drawn catalogue.

An image is described once by fixed edges and colours (:mod:`genius_search.encoders.descriptors`) or by the
features of a pretrained network, a text once by token numbers; a light network over each is trained. So
training caches both, and every step costs a few matrix products. Deviation 24: the paper's encoder is a
fine-tuned CLIP.

The four kinds are the paper's embedding baselines in small: clip-sf and blip-sf give features of either
modality, clip-ff and blip-ff one vector for both.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Generic, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Float32, Int
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import NFKC, Lowercase
from tokenizers.normalizers import Sequence as Normalizers
from tokenizers.pre_tokenizers import ByteLevel, Punctuation, WhitespaceSplit
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from tokenizers.trainers import BpeTrainer
from torch import Tensor, nn
from torch.nn import functional as F

from genius_search.config import SmallEncoderConfig, to_json
from genius_search.data.features import FeatureBatch
from genius_search.encoders.base import (
    ImageInput,
    JointInput,
    need_transformers,
)
from genius_search.encoders.batches import BatchEncoder, BatchJointEncoder, decoded_images, in_batches
from genius_search.encoders.descriptors import describe, descriptor_size
from genius_search.encoders.pretrained import ImageTower
from genius_search.encoders.small_texts import (
    CONFIG_FILE,
    PADDING,
    PICTURES,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    fingerprint,
    knows_words,
    open_folder,
    pair_rows,
    token_rows,
)
from genius_search.encoders.static import WordVectors
from genius_search.nn.arrays import as_array
from genius_search.nn.weights import load_weights, write_weights

PICTURE_BATCH: Final = 64
"""Pictures that a pretrained network reads at once."""
WORD_SCALE: Final = 0.5
"""Standard deviation of the numbers of word vectors before training."""
PAIR_SHARE: Final = 0.2
"""Scale of the vectors of pairs of words beside given word vectors, as a share of the usual."""


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
        special_tokens=["<pad>"],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def trim_padding(tokens: Int[Tensor, "items tokens"]) -> Int[Tensor, "items used"]:
    """Keep as many columns as the longest text fills, and at least two, so that there are pairs."""
    longest = int((tokens != PADDING).sum(dim=1).max()) if len(tokens) else 0
    return tokens[:, : max(longest, 2)].long()


class EmbeddingNetwork(nn.Module):
    """A trainable network from described images and numbered texts to one unnormalised vector per item."""

    dim: int
    """The width of the vectors."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of the weights."""

    @abstractmethod
    def embedding(self, batch: FeatureBatch) -> Float[Tensor, "items dim"]:
        """Return the vector of each item; ``image`` holds descriptors, ``text`` token numbers."""


class SmallNetwork(EmbeddingNetwork):
    """Two towers from descriptors and token numbers to unnormalised features."""

    def __init__(self, config: SmallEncoderConfig, *, vocabulary: int, num_descriptors: int = 0) -> None:
        super().__init__()
        self.pair_buckets = config.pair_buckets
        self.dim = config.dim
        self.num_descriptors = num_descriptors or descriptor_size(outlines=config.outlines)
        self.dropout = config.dropout
        self.image_tower = _tower(self.num_descriptors, config.image_width, config.dim)
        self.words = nn.Embedding(vocabulary, config.text_width)
        self.pairs = nn.Embedding(config.pair_buckets + 1, config.text_width)
        self.text_tower = _tower(config.text_width, config.text_width, config.dim)
        for table in (self.words, self.pairs):
            nn.init.normal_(table.weight, std=WORD_SCALE)
        self.word_gains: nn.Parameter | None = None
        """Logarithms of what given word vectors are multiplied by, while they are trained."""
        self.image_shortcut = self.text_shortcut = None
        if config.shortcuts:
            self.image_shortcut = nn.Linear(self.num_descriptors, config.dim)
            self.text_shortcut = nn.Linear(config.text_width, config.dim)
            nn.init.orthogonal_(self.text_shortcut.weight)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.words.weight.device

    def image(self, descriptors: Float[Tensor, "items pixels"]) -> Float[Tensor, "items dim"]:
        """Return the features of described images."""
        return self._through(self.image_tower, self.image_shortcut, descriptors)

    def text(self, tokens: Int[Tensor, "items tokens"]) -> Float[Tensor, "items dim"]:
        """Return the features of numbered texts; padding does not count."""
        tokens = trim_padding(tokens)
        pairs = pair_rows(tokens, buckets=self.pair_buckets)
        gains = None if self.word_gains is None else self.word_gains[tokens].squeeze(2).exp()
        total = F.embedding_bag(
            tokens, self.words.weight, mode="sum", padding_idx=PADDING, per_sample_weights=gains
        )
        total = total + F.embedding_bag(pairs, self.pairs.weight, mode="sum", padding_idx=PADDING)
        return self._through(self.text_tower, self.text_shortcut, total)

    def _through(
        self, tower: nn.Sequential, shortcut: nn.Linear | None, inputs: Float[Tensor, "items _"]
    ) -> Float[Tensor, "items dim"]:
        """Apply the layers of a tower, with dropout in training; the shortcut leads from its first norm."""
        first, *layers = tower
        hidden: Tensor = first(inputs)
        normed = hidden
        for layer in layers:
            hidden = layer(hidden)
            if isinstance(layer, nn.LayerNorm):
                hidden = F.dropout(hidden, self.dropout, training=self.training)
        return hidden if shortcut is None else hidden + shortcut(normed)

    @torch.no_grad()
    def begin_with_images(self, descriptors: Float[Tensor, "items pixels"]) -> None:
        """Let the shortcut of images begin with the principal components of some descriptions."""
        if self.image_shortcut is None or not len(descriptors):
            return
        normed = self.image_tower[0](descriptors.to(self.device))
        centred = normed - normed.mean(dim=0)
        variances, directions = torch.linalg.eigh(centred.T @ centred / len(centred))
        scale = variances[-self.dim :].mean().clamp(min=1e-6).sqrt()
        weight = directions[:, -self.dim :].T / scale
        self.image_shortcut.weight[: len(weight)] = weight
        self.image_shortcut.bias[: len(weight)] = -(weight @ normed.mean(dim=0))

    @torch.no_grad()
    def begin_with_words(self, vectors: Float32[np.ndarray, "tokens dim"]) -> None:
        """Give words these vectors, of which training changes only the lengths."""
        weight = self.words.requires_grad_(requires_grad=False).weight
        weight.copy_(torch.from_numpy(vectors * (WORD_SCALE / vectors.std())))
        self.pairs.weight.mul_(PAIR_SHARE)
        self.word_gains = nn.Parameter(torch.zeros(len(weight), 1))

    @torch.no_grad()
    def keep_word_lengths(self) -> None:
        """Multiply given word vectors by what was learned; called after training."""
        if self.word_gains is not None:
            self.words.weight.mul_(self.word_gains.exp())
            self.word_gains = None

    def towers(self, batch: FeatureBatch) -> tuple[Float[Tensor, "items dim"], Float[Tensor, "items dim"]]:
        """Return each item's features of image and of text; zero where there is none."""
        outputs = []
        for present, encode, content in (
            (batch.has_image, self.image, batch.image),
            (batch.has_text, self.text, batch.text.int()),
        ):
            features = torch.zeros(len(batch.image), self.dim, device=self.device)
            places = present.nonzero().squeeze(1)
            if len(places):
                found = encode(content[places].to(self.device)).float()
                features = features.index_add(0, places.to(self.device), found)
            outputs.append(features)
        return outputs[0], outputs[1]

    def embedding(self, batch: FeatureBatch) -> Float[Tensor, "items dim"]:
        """Return the sum of each item's features (score fusion)."""
        image, text = self.towers(batch)
        return image + text


def _tower(inputs: int, width: int, dim: int) -> nn.Sequential:
    """Build layers whose output has the same scale for either modality, since features are summed."""
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


Network = TypeVar("Network", bound=EmbeddingNetwork)


class _TrainedNetwork(Generic[Network]):
    """A network with the tokenizer and the settings it was trained with."""

    batch_size: int = 1024

    def __init__(
        self,
        config: SmallEncoderConfig,
        network: Network,
        tokenizer: Tokenizer,
        *,
        spec: str,
        pictures: ImageTower | None = None,
    ) -> None:
        self.config = config
        self.network = network
        self.tokenizer = tokenizer
        self.spec = spec
        """``small:FOLDER`` once loaded, ``small`` before."""
        self.pictures = pictures
        """The pretrained network whose features stand for pictures; None if they are described."""
        self.dim = config.dim

    @property
    def fingerprint(self) -> str:
        """A hash of settings, vocabulary and weights."""
        weights = {name: as_array(weight) for name, weight in self.network.state_dict().items()}
        pictures = None if self.pictures is None else self.pictures.fingerprint
        return fingerprint(self.config, self.tokenizer, weights, pictures)

    def knows_words(self, text: str) -> bool:
        """Return whether the training texts had words like those of a text."""
        return knows_words(self.tokenizer, text)

    def save(self, folder: Path) -> None:
        """Write weights, tokenizer, settings and the network of pictures into a folder that exists."""
        write_weights(folder / WEIGHTS_FILE, self.network.state_dict())
        (folder / TOKENIZER_FILE).write_text(self.tokenizer.to_str())
        (folder / CONFIG_FILE).write_text(json.dumps(to_json(self.config), indent=2) + "\n")
        if self.pictures is not None:
            self.pictures.save(folder / PICTURES)

    @torch.no_grad()
    def prepare_images(self, images: Sequence[Image.Image]) -> Float[Tensor, "items pixels"]:
        """Describe images; this part never changes and can be cached between epochs."""
        if self.pictures is None:
            return describe(images, outlines=self.config.outlines)
        return in_batches(self.pictures.encode_images, images, size=PICTURE_BATCH, dim=self.pictures.dim)

    def prepare_texts(self, texts: Sequence[str]) -> Int[Tensor, "items tokens"]:
        """Return token numbers, padded to the maximum length; they can be cached between epochs."""
        rows = token_rows(self.tokenizer, texts, max_tokens=self.config.max_tokens)
        return torch.from_numpy(rows)


class SmallEncoder(_TrainedNetwork[SmallNetwork], BatchEncoder):
    """CLIP-SF or BLIP-SF in small: features of images and of texts.

    >>> encoder = create_small(SmallEncoderConfig(), texts, seed=0)  # doctest: +SKIP
    >>> descriptors, tokens = encoder.prepare_images(images), encoder.prepare_texts(texts)  # doctest: +SKIP
    >>> features = encoder.network.image(descriptors)  # doctest: +SKIP
    """

    def encode_images(self, images: Sequence[Image.Image]) -> Float[Tensor, "items dim"]:
        """Return the features of a batch of images."""
        return self.network.image(self.prepare_images(images).to(self.network.device))

    def encode_texts(self, texts: Sequence[str]) -> Float[Tensor, "items dim"]:
        """Return the features of a batch of texts."""
        return self.network.text(self.prepare_texts(texts).to(self.network.device))


class SmallJointEncoder(_TrainedNetwork[EmbeddingNetwork], BatchJointEncoder):
    """CLIP-FF or BLIP-FF in small: one vector for image and text together."""

    def encode_items(self, items: Sequence[JointInput]) -> Float[Tensor, "items dim"]:
        """Return the vectors of a batch of items."""
        has_image = torch.tensor([item.has_image for item in items])
        images = decoded_images([ImageInput(item.image, item.key) for item in items if item.has_image])
        described = self.prepare_images(images)
        descriptors = torch.zeros(len(items), described.shape[1])
        descriptors[has_image] = described
        tokens = self.prepare_texts([item.text for item in items])
        has_text = torch.tensor([bool(item.text) for item in items])
        return self.network.embedding(FeatureBatch(descriptors, tokens.float(), has_image, has_text))


AnySmallEncoder = SmallEncoder | SmallJointEncoder


def create_small(
    config: SmallEncoderConfig,
    texts: Iterable[str],
    *,
    words: WordVectors | None = None,
    pictures: ImageTower | None = None,
    seed: int,
) -> AnySmallEncoder:
    """Learn the vocabulary from the training texts and start from random weights.

    Parameters
    ----------
    words
        a vocabulary and word vectors to use instead; their width replaces ``text_width``. The token with the
        number 0 counts as padding.
    pictures
        a pretrained network whose features take the place of the descriptions of pictures.

    Raises
    ------
    MissingExtra
        The kind is clip-ff or blip-ff, and transformers is not installed.
    """
    if config.is_joint:
        need_transformers()
    if words is None:
        tokenizer = train_tokenizer(texts, vocabulary=config.vocabulary)
    else:
        tokenizer = words.tokenizer
        config = replace(config, text_width=words.vectors.shape[1])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = _network(config, tokenizer, pictures)
    if words is not None and isinstance(network, SmallNetwork):
        network.begin_with_words(words.vectors)
    return _assemble(config, network, tokenizer, spec="small", pictures=pictures)


def load_small(folder: Path, *, device: str = "cpu") -> AnySmallEncoder:
    """Open what ``save`` wrote.

    Raises
    ------
    ArtifactMissing
        The folder or one of its three files does not exist.
    ArtifactMismatch
        The files do not belong together or are damaged.
    MissingExtra
        The kind is clip-ff or blip-ff, or there is a network of pictures, and transformers is not installed.
    """
    _, config, tokenizer = opened = open_folder(folder)
    if config.is_joint:
        need_transformers()
    pictures = None if opened.pictures is None else ImageTower(opened.pictures, device=device)
    network = load_weights(opened.weights_file, lambda: _network(config, tokenizer, pictures))
    encoder = _assemble(config, network, tokenizer, spec=opened.spec, pictures=pictures)
    encoder.network.to(device).eval()
    return encoder


def _network(
    config: SmallEncoderConfig, tokenizer: Tokenizer, pictures: ImageTower | None
) -> EmbeddingNetwork:
    vocabulary = tokenizer.get_vocab_size()
    if not config.is_joint:
        size = 0 if pictures is None else pictures.dim
        return SmallNetwork(config, vocabulary=vocabulary, num_descriptors=size)
    from genius_search.encoders.small_fusion import SmallBlipFusion, SmallClipFusion  # noqa: PLC0415  seconds

    kind = SmallClipFusion if config.kind == "clip-ff" else SmallBlipFusion
    return kind(config, vocabulary=vocabulary)


def _assemble(
    config: SmallEncoderConfig,
    network: EmbeddingNetwork,
    tokenizer: Tokenizer,
    *,
    spec: str,
    pictures: ImageTower | None,
) -> AnySmallEncoder:
    if isinstance(network, SmallNetwork):
        return SmallEncoder(config, network, tokenizer, spec=spec, pictures=pictures)
    return SmallJointEncoder(config, network, tokenizer, spec=spec, pictures=pictures)
