"""`small:FOLDER`: an encoder that is trained from scratch, within about a minute on one core.

An image becomes a fixed description of edges and colours, a text a row of token numbers. Small
networks over both are trained. Descriptions and numbers never change, so training caches them, and
a step is a few matrix products. Deviation 24: the paper's encoder is a fine-tuned CLIP.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from jaxtyping import Float, Float32, Int, UInt8
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

from genius_search.artifact import fingerprint_of, read_json
from genius_search.config import SmallEncoderConfig, from_json, to_json
from genius_search.encoders.base import CHARACTERS_PER_TOKEN, Keys, read_tokenizer
from genius_search.errors import ArtifactMismatch, ArtifactMissing
from genius_search.nn.codebooks import as_array
from genius_search.nn.weights import in_batches, load_weights, write_weights

if TYPE_CHECKING:
    from genius_search.data.features import FeatureBatch

_NETWORK_BATCH: Final = 1024
"""Inputs that pass through the network together."""
PADDING: Final = 0
"""The token number that fills short rows and is ignored."""
CONFIG_FILE: Final = "config.json"
TOKENIZER_FILE: Final = "tokenizer.json"
WEIGHTS_FILE: Final = "model.safetensors"
_MULTIPLIERS: Final = (1_000_003, 7_368_787)
"""Large primes of the hash of token pairs."""

_SIDE: Final = 64
"""Width and height in pixels to which images are resized before they are described."""
_ORIENTATIONS: Final = 9
"""Number of edge directions over half a turn."""
_COLOUR_BITS: Final = 2
"""Bits of red, green and blue each, in the colour histogram."""
_GRIDS: Final = (8, 4)
"""Numbers of cells per side in which edges are counted."""
_BLUR_SIZE: Final = 7
"""Width in pixels of the box that blurs twice: stripes and dots vanish, outlines remain."""
_THUMBNAIL_SIZE: Final = 8
_MARGIN: Final = _SIDE // 8
"""Width in pixels of the margin, which has a separate colour histogram."""
_DESCRIBED_AT_ONCE: Final = 16
"""Images that are described together, so that intermediate arrays fit into a core's cache."""
DESCRIPTOR_SIZE: Final = (
    sum(grid * grid * _ORIENTATIONS for grid in (*_GRIDS, _GRIDS[0]))
    + _THUMBNAIL_SIZE * _THUMBNAIL_SIZE * 3
    + 2 * 8**_COLOUR_BITS
)
"""Length of an image's description: edges, outlines, thumbnail and two histograms."""


def train_tokenizer(texts: Iterable[str], *, vocabulary: int) -> Tokenizer:
    """Learn a vocabulary of frequent words and word pieces, and of all bytes."""
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


class SmallNetwork(nn.Module):
    """Two towers, which map descriptions and token numbers to unnormalised features.

    The text tower reads the sum of the vectors of all tokens and of all pairs of neighbours::

        "red kite"  ->  words[red] + words[kite] + pairs[hash(red, kite)]
    """

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
        """The device of the weights."""
        return self.words.weight.device

    def image(self, descriptors: Float[Tensor, "items pixels"]) -> Float[Tensor, "items dim"]:
        """Return the features of images by their descriptions."""
        features: Tensor = self.image_tower(descriptors)
        return features

    def text(self, tokens: Int[Tensor, "items tokens"]) -> Float[Tensor, "items dim"]:
        """Return the features of texts by their token numbers; padding is ignored."""
        longest = int((tokens != PADDING).sum(dim=1).max()) if len(tokens) else 0
        tokens = tokens[:, : max(longest, 2)]  # at least two columns, so that pairs exist
        tokens = tokens.to(self.words.weight.device).long()
        pairs = pair_rows(tokens, buckets=self.pair_buckets)
        total = F.embedding_bag(tokens, self.words.weight, mode="sum", padding_idx=PADDING)
        total = total + F.embedding_bag(pairs, self.pairs.weight, mode="sum", padding_idx=PADDING)
        features: Tensor = self.text_tower(total)
        return features

    def towers(
        self, batch: FeatureBatch
    ) -> tuple[Float[Tensor, "items dim"], Float[Tensor, "items dim"]]:
        """Return the image features and the text features of items; zeros if an item lacks a part.

        Parameters
        ----------
        batch
            The inputs: descriptions in ``batch.image``, token numbers in ``batch.text``.
        """
        outputs = []
        for present, encode, content in (
            (batch.has_image, self.image, batch.image),
            (batch.has_text, self.text, batch.text.astype(np.int32)),
        ):
            features = torch.zeros(len(batch.image), self.dim, device=self.device)
            rows = np.flatnonzero(present)
            if len(rows):
                encoded = encode(torch.from_numpy(content[rows]).to(self.device)).float()
                features = features.index_add(0, torch.from_numpy(rows).to(self.device), encoded)
            outputs.append(features)
        return outputs[0], outputs[1]


def _tower(inputs: int, width: int, dim: int) -> nn.Sequential:
    """Build a tower. Its normalisation gives both modalities the same scale."""
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


def pair_rows(tokens: Int[Tensor, "items tokens"], *, buckets: int) -> Int[Tensor, "items pairs"]:
    """Hash the pairs of neighbouring tokens to 1, ..., ``buckets``, or to 0 if either is padding.

    With the tokens a and b, and m = a · 1,000,003 + b · 7,368,787::

        pair(a, b) = (m xor (m >> 15)) mod buckets + 1
    """
    first, second = tokens[:, :-1], tokens[:, 1:]
    mixed = first * _MULTIPLIERS[0] + second * _MULTIPLIERS[1]
    return ((mixed ^ (mixed >> 15)) % buckets + 1) * ((first != PADDING) & (second != PADDING))


class SmallEncoder:
    """A network for images and texts, with the tokenizer and settings of its training.

    >>> encoder = create_small(SmallEncoderConfig(), texts, seed=0)  # doctest: +SKIP
    >>> descriptors, tokens = describe(images), encoder.prepare_texts(texts)  # doctest: +SKIP
    >>> features = encoder.network.image(descriptors)  # doctest: +SKIP
    """

    needs_pixels: bool = True

    def __init__(
        self, config: SmallEncoderConfig, network: SmallNetwork, tokenizer: Tokenizer, *, spec: str
    ) -> None:
        self.config = config
        self.network = network
        self.tokenizer = tokenizer
        self.spec = spec
        """``small:FOLDER`` if it was loaded, ``small`` before."""
        self.dim = config.dim
        self.max_tokens = config.max_tokens

    @cached_property
    def fingerprint(self) -> str:
        """A hash of settings, vocabulary and weights. It is cached, so read it after training."""
        hashes = {
            name: hashlib.sha256(np.ascontiguousarray(as_array(weight)).data).hexdigest()
            for name, weight in self.network.state_dict().items()
        }
        return fingerprint_of([to_json(self.config), self.tokenizer.to_str(), hashes])

    def save(self, folder: Path) -> None:
        """Write weights, tokenizer and settings into a folder that exists."""
        write_weights(folder / WEIGHTS_FILE, self.network.state_dict())
        (folder / TOKENIZER_FILE).write_text(self.tokenizer.to_str())
        (folder / CONFIG_FILE).write_text(json.dumps(to_json(self.config), indent=2) + "\n")

    def num_tokens(self, text: str) -> int:
        """Return the number of tokens of a whole text, also after the maximum length."""
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def prepare_texts(self, texts: Sequence[str]) -> Int[Tensor, "items tokens"]:
        """Return token numbers, padded to the maximum length; training caches them."""
        max_tokens = self.config.max_tokens
        rows = np.full((len(texts), max_tokens), PADDING, dtype=np.int32)
        beginnings = [text.lstrip()[: max_tokens * CHARACTERS_PER_TOKEN] for text in texts]
        encodings = self.tokenizer.encode_batch_fast(beginnings, add_special_tokens=False)
        for row, encoding in enumerate(encodings):
            ids = encoding.ids[:max_tokens]
            rows[row, : len(ids)] = ids
        return torch.from_numpy(rows)

    @torch.inference_mode()
    def image_features(
        self, images: Sequence[Image.Image], _: Keys = ()
    ) -> Float32[np.ndarray, "items dim"]:
        """Return the features of images."""
        batches = describe(images).split(_NETWORK_BATCH)
        device = self.network.device
        features = [self.network.image(descriptions.to(device)).cpu() for descriptions in batches]
        return torch.cat(features).numpy()

    @torch.inference_mode()
    def text_features(self, texts: Sequence[str], _: Keys = ()) -> Float32[np.ndarray, "items dim"]:
        """Return the features of texts, which are truncated at the maximum length."""
        batches = self.prepare_texts(texts).split(_NETWORK_BATCH)
        return torch.cat([self.network.text(tokens).cpu() for tokens in batches]).numpy()


def create_small(config: SmallEncoderConfig, texts: Iterable[str], *, seed: int) -> SmallEncoder:
    """Create an encoder with random weights, and a vocabulary learned from the training texts."""
    tokenizer = train_tokenizer(texts, vocabulary=config.vocabulary)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = SmallNetwork(config, vocabulary=tokenizer.get_vocab_size())
    return SmallEncoder(config, network, tokenizer, spec="small")


def load_small(folder: Path, *, device: str = "cpu") -> SmallEncoder:
    """Open an encoder that :meth:`SmallEncoder.save` wrote.

    Raises
    ------
    ArtifactMissing
        The folder or one of its three files does not exist.
    ArtifactMismatch
        A file is damaged, or the files come from different encoders.
    """
    missing = [
        name
        for name in (CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE)
        if not (folder / name).is_file()
    ]
    if missing:
        raise ArtifactMissing(
            f"{folder} is not a trained small encoder: it lacks {', '.join(missing)}. "
            "`genius fit DATA --encoder small` trains one"
        )
    try:
        config = from_json(SmallEncoderConfig, read_json(folder / CONFIG_FILE))
    except (TypeError, ValueError) as error:
        raise ArtifactMismatch(
            f"{folder / CONFIG_FILE} cannot be used ({error}); train the encoder again"
        ) from None
    tokenizer = read_tokenizer(folder / TOKENIZER_FILE)
    network = load_weights(
        folder / WEIGHTS_FILE, lambda: SmallNetwork(config, vocabulary=tokenizer.get_vocab_size())
    )
    network.to(device).eval()
    return SmallEncoder(config, network, tokenizer, spec=f"small:{folder}")


def describe(images: Sequence[Image.Image]) -> Float[Tensor, "items pixels"]:
    """Describe images by edges, outlines and colours; each part has a root mean square near 1.

    Outlines are the edges of the blurred image: without stripes and dots, the shape is clearer.
    This part of the encoder is not trained, so its results can be cached.
    """
    return in_batches(_describe_batch, images, size=_DESCRIBED_AT_ONCE, dim=DESCRIPTOR_SIZE)


def _describe_batch(images: Sequence[Image.Image]) -> Float[Tensor, "items pixels"]:
    pixels = torch.from_numpy(np.stack([_resize(image) for image in images]))
    colours = pixels.permute(0, 3, 1, 2).contiguous().float().div_(255)
    thumbnail = F.avg_pool2d(colours, _SIDE // _THUMBNAIL_SIZE).flatten(1).sub_(0.5).mul_(3)
    edges = _edges(colours, _GRIDS)
    outlines = _edges(_blur(colours), _GRIDS[:1])
    return torch.cat([*edges, thumbnail, *_histograms(pixels), *outlines], dim=1)


def _resize(image: Image.Image) -> UInt8[np.ndarray, "side side 3"]:
    rgb = image if image.mode == "RGB" else image.convert("RGB")
    size = (_SIDE, _SIDE)
    if rgb.size != size:
        rgb = rgb.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0)
    return np.asarray(rgb, dtype=np.uint8)


def _blur(colours: Float[Tensor, "items 3 side side"]) -> Float[Tensor, "items 3 side side"]:
    """Blur images twice by a box.

    A box blurs rows and columns independently, so the result is B X Bᵀ, with the banded matrix B =
    A², A[i, j] = 1 / (number of pixels in the box) if |i − j| ≤ 3, else 0.
    """
    distances = torch.arange(_SIDE) - torch.arange(_SIDE)[:, None]
    box = (distances.abs() <= _BLUR_SIZE // 2).float()
    blur = F.normalize(box, p=1, dim=1).matrix_power(2)
    return blur @ colours @ blur.T


def _edges(
    colours: Float[Tensor, "items 3 side side"], grids: Sequence[int]
) -> list[Float[Tensor, "items _"]]:
    """Return histograms of edge directions in the overlapping cells of each grid.

    The slopes of the three colours are combined by their structure tensor (Di Zenzo, 1986), so that
    red on green of the same brightness has an edge::

        angle    = atan2(2 Σ x y, Σ x² − Σ y²)    sums over colours of the slopes x across, y down
        strength = sqrt(Σ x² + Σ y²)

    The angle is twice the edge's direction, so edges from dark to bright and from bright to dark
    have the same direction.
    """
    items = len(colours)
    # Central differences; the outermost pixels have no edge.
    across = colours[:, :, 1:-1, 2:] - colours[:, :, 1:-1, :-2]
    down = colours[:, :, 2:, 1:-1] - colours[:, :, :-2, 1:-1]
    mixed = (across * down).sum(dim=1).flatten(1).mul_(2)
    across_squared = across.square_().sum(dim=1).flatten(1)
    down_squared = down.square_().sum(dim=1).flatten(1)
    strength = (across_squared + down_squared).sqrt_()
    # From [-pi, pi] to [0, _ORIENTATIONS]; the two ends are the same direction.
    angle = torch.atan2(mixed, across_squared.sub_(down_squared))
    position = angle.mul_(_ORIENTATIONS / (2 * math.pi)).add_(_ORIENTATIONS / 2)
    # An edge between two directions counts for both: position 3.2 is .8 for 3 and .2 for 4.
    lower = position.floor().clamp_(max=_ORIENTATIONS - 1)
    upper_strength = position.sub_(lower).mul_(strength)
    bins = lower.long()
    num_planes = _ORIENTATIONS + 1  # the last plane is the first one again
    fine = 16  # 16 x 16 cells of 4 pixels, pooled below into larger ones that overlap
    rows = torch.arange(1, _SIDE - 1) * fine // _SIDE
    # Bin of a pixel: (row of its cell * 16 + column of its cell) * 10 + direction
    bins += ((rows[:, None] * fine + rows[None, :]) * num_planes).flatten()
    counts = torch.zeros(items, fine * fine * num_planes)
    counts.scatter_add_(1, bins, strength - upper_strength)
    counts.scatter_add_(1, bins + 1, upper_strength)
    planes = counts.view(items, fine, fine, num_planes).permute(0, 3, 1, 2)
    planes[:, 0] += planes[:, -1]
    planes = planes[:, :-1].contiguous()
    histograms = []
    for grid in grids:
        stride = fine // grid
        pooled = F.avg_pool2d(planes, 2 * stride - 1, stride, padding=(2 * stride - 2) // 2)
        # Square roots, then one scale for the whole image: faint images look like strong ones.
        rooted = pooled.flatten(1).sqrt()
        histograms.append(rooted / (rooted.square().mean(dim=1, keepdim=True) + 1e-4).sqrt())
    return histograms


def _histograms(pixels: UInt8[Tensor, "items side side 3"]) -> list[Float[Tensor, "items _"]]:
    """Return the histograms of colours in the middle and in the margin of images.

    A colour is a number of 6 bits, ``rrggbb``; numbers in the margin are increased by 64.
    """
    red, green, blue = (pixels >> 8 - _COLOUR_BITS).unbind(dim=3)
    colour = ((red << 2 * _COLOUR_BITS) | (green << _COLOUR_BITS) | blue).long()
    is_in_margin = torch.ones(_SIDE, _SIDE, dtype=torch.long)
    is_in_margin[_MARGIN:-_MARGIN, _MARGIN:-_MARGIN] = 0
    num_colours = 8**_COLOUR_BITS
    bins = (colour + is_in_margin * num_colours).flatten(1)
    counts = torch.zeros(len(pixels), 2 * num_colours)
    counts.scatter_add_(1, bins, torch.ones(len(pixels), _SIDE * _SIDE))
    middle, margin = torch.split(counts, num_colours, dim=1)
    return [
        (histogram / histogram.sum(dim=1, keepdim=True)).sqrt() * math.sqrt(num_colours)
        for histogram in (middle, margin)
    ]
