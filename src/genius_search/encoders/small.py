"""`small:FOLDER`: an encoder trained from scratch, in about a minute on one core for the drawn catalogue.

An image is described once by fixed edges and colours, a text once by token numbers; a light network over
each is trained. So training caches both, and every step costs a few matrix products. Deviation 24: the
paper's encoder is a fine-tuned CLIP.
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

BATCH: Final = 1024
"""Items that are encoded at once."""
PADDING: Final = 0
"""The token number that fills short rows and counts for nothing."""
CONFIG_FILE: Final = "config.json"
TOKENIZER_FILE: Final = "tokenizer.json"
WEIGHTS_FILE: Final = "model.safetensors"
_MULTIPLIERS: Final = (1_000_003, 7_368_787)

SIDE: Final = 64
"""Images are squeezed to this many pixels a side before they are described."""
ORIENTATIONS: Final = 9
"""Directions an edge can run in, over half a turn."""
_COLOUR_BITS: Final = 2  # of red, green and blue each, in the colour histogram
_GRIDS: Final = (8, 4)
_BLUR: Final = 7  # pixels of the box that blurs, twice; stripes and dots vanish and outlines stay
_THUMBNAIL: Final = 8
_MARGIN: Final = SIDE // 8
_DESCRIBED: Final = 16  # images at once: few enough that the steps between stay in a core's cache
DESCRIPTOR_SIZE: Final = (
    sum(grid * grid * ORIENTATIONS for grid in (*_GRIDS, _GRIDS[0]))
    + _THUMBNAIL * _THUMBNAIL * 3
    + 2 * 8**_COLOUR_BITS
)
"""Numbers that describe an image."""


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


class SmallNetwork(nn.Module):
    """Two towers from descriptors and token numbers to unnormalised features."""

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
        """Return the features of described images."""
        features: Tensor = self.image_tower(descriptors)
        return features

    def text(self, tokens: Int[Tensor, "items tokens"]) -> Float[Tensor, "items dim"]:
        """Return the features of numbered texts; padding does not count."""
        longest = int((tokens != PADDING).sum(dim=1).max()) if len(tokens) else 0
        tokens = tokens[:, : max(longest, 2)]  # at least two columns, so that there are pairs
        tokens = tokens.to(self.words.weight.device).long()
        pairs = pair_rows(tokens, buckets=self.pair_buckets)
        total = F.embedding_bag(tokens, self.words.weight, mode="sum", padding_idx=PADDING)
        total = total + F.embedding_bag(pairs, self.pairs.weight, mode="sum", padding_idx=PADDING)
        features: Tensor = self.text_tower(total)
        return features

    def towers(
        self, batch: FeatureBatch
    ) -> tuple[Float[Tensor, "items dim"], Float[Tensor, "items dim"]]:
        """Return the features of image and of text; ``image`` holds descriptors, ``text`` token numbers.

        Features of a modality that an item lacks are zero.
        """
        outputs = []
        for present, encode, content in (
            (batch.has_image, self.image, batch.image),
            (batch.has_text, self.text, batch.text.astype(np.int32)),
        ):
            features = torch.zeros(len(batch.image), self.dim, device=self.device)
            places = np.flatnonzero(present)
            if len(places):
                encoded = encode(torch.from_numpy(content[places]).to(self.device)).float()
                features = features.index_add(0, torch.from_numpy(places).to(self.device), encoded)
            outputs.append(features)
        return outputs[0], outputs[1]


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


def pair_rows(tokens: Int[Tensor, "items tokens"], *, buckets: int) -> Int[Tensor, "items pairs"]:
    """Number the pairs of neighbouring tokens: 1 to ``buckets``, or 0 where either is padding."""
    first, second = tokens[:, :-1], tokens[:, 1:]
    mixed = first * _MULTIPLIERS[0] + second * _MULTIPLIERS[1]
    return ((mixed ^ (mixed >> 15)) % buckets + 1) * ((first != PADDING) & (second != PADDING))


class SmallEncoder:
    """Features of images and of texts, by a network with the tokenizer and settings it was trained with.

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
        """``small:FOLDER`` once loaded, ``small`` before."""
        self.dim = config.dim
        self.max_tokens = config.max_tokens

    @cached_property
    def fingerprint(self) -> str:
        """A hash of settings, vocabulary and weights; ask for it after training."""
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
        """Return the number of tokens of a text, also of those that are not read."""
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def prepare_texts(self, texts: Sequence[str]) -> Int[Tensor, "items tokens"]:
        """Return token numbers, padded to the maximum length; they can be cached between epochs."""
        most = self.config.max_tokens
        rows = np.full((len(texts), most), PADDING, dtype=np.int32)
        beginnings = [text.lstrip()[: most * CHARACTERS_PER_TOKEN] for text in texts]
        for row, encoding in enumerate(
            self.tokenizer.encode_batch_fast(beginnings, add_special_tokens=False)
        ):
            ids = encoding.ids[:most]
            rows[row, : len(ids)] = ids
        return torch.from_numpy(rows)

    @torch.inference_mode()
    def image_features(
        self, images: Sequence[Image.Image], _: Keys = ()
    ) -> Float32[np.ndarray, "items dim"]:
        """Return the features of images."""
        described = describe(images).split(BATCH)
        features = [self.network.image(some.to(self.network.device)).cpu() for some in described]
        return torch.cat(features).numpy()

    @torch.inference_mode()
    def text_features(self, texts: Sequence[str], _: Keys = ()) -> Float32[np.ndarray, "items dim"]:
        """Return the features of texts, cut at the encoder's maximum length."""
        numbered = self.prepare_texts(texts).split(BATCH)
        return torch.cat([self.network.text(some).cpu() for some in numbered]).numpy()


def create_small(config: SmallEncoderConfig, texts: Iterable[str], *, seed: int) -> SmallEncoder:
    """Learn the vocabulary from the training texts and start from random weights."""
    tokenizer = train_tokenizer(texts, vocabulary=config.vocabulary)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = SmallNetwork(config, vocabulary=tokenizer.get_vocab_size())
    return SmallEncoder(config, network, tokenizer, spec="small")


def load_small(folder: Path, *, device: str = "cpu") -> SmallEncoder:
    """Open what ``save`` wrote.

    Raises
    ------
    ArtifactMissing
        The folder or one of its three files does not exist.
    ArtifactMismatch
        The files do not belong together or are damaged.
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

    Outlines are the edges of the blurred image: without its stripes and dots, the shape is clearer. This part
    of the encoder never changes, so its results can be kept between epochs.
    """
    return in_batches(_describe_batch, images, size=_DESCRIBED, dim=DESCRIPTOR_SIZE)


def _describe_batch(images: Sequence[Image.Image]) -> Float[Tensor, "items pixels"]:
    squares = [
        rgb
        if rgb.size == (SIDE, SIDE)
        else rgb.resize((SIDE, SIDE), Image.Resampling.BILINEAR, reducing_gap=2.0)
        for rgb in (image if image.mode == "RGB" else image.convert("RGB") for image in images)
    ]
    stacked = torch.from_numpy(np.stack([np.asarray(square, dtype=np.uint8) for square in squares]))
    colours = stacked.permute(0, 3, 1, 2).contiguous().float().div_(255)
    thumbnail = F.avg_pool2d(colours, SIDE // _THUMBNAIL).flatten(1).sub_(0.5).mul_(3)
    parts = [*_edges(colours, _GRIDS), thumbnail, *_histograms(stacked)]
    # A box blurs rows and columns apart, so blurring is a product with a matrix on either side.
    distances = torch.arange(SIDE) - torch.arange(SIDE)[:, None]
    blur = F.normalize((distances.abs() <= _BLUR // 2).float(), p=1, dim=1).matrix_power(2)
    return torch.cat([*parts, *_edges(blur @ colours @ blur.T, _GRIDS[:1])], dim=1)


def _edges(
    colours: Float[Tensor, "items 3 side side"], grids: Sequence[int]
) -> list[Float[Tensor, "items _"]]:
    """Return histograms of edge directions in the overlapping cells of each grid.

    The slopes of the three colours are combined by their structure tensor (Di Zenzo, 1986), so that red on
    green of the same brightness has an edge. Its angle covers half a turn: an edge from dark to bright and
    one from bright to dark run the same way.
    """
    items = len(colours)
    # Central differences; the outermost pixels have no edge.
    across = colours[:, :, 1:-1, 2:] - colours[:, :, 1:-1, :-2]
    down = colours[:, :, 2:, 1:-1] - colours[:, :, :-2, 1:-1]
    mixed = (across * down).sum(dim=1).flatten(1).mul_(2)
    level, steep = across.square_().sum(dim=1).flatten(1), down.square_().sum(dim=1).flatten(1)
    strength = (level + steep).sqrt_()
    # From [-pi, pi] to [0, ORIENTATIONS]; the two ends are one direction.
    position = (
        torch.atan2(mixed, level.sub_(steep))
        .mul_(ORIENTATIONS / (2 * math.pi))
        .add_(ORIENTATIONS / 2)
    )
    lower = position.floor().clamp_(max=ORIENTATIONS - 1)
    upper_share = position.sub_(lower).mul_(strength)
    bins = lower.long()
    planes_of_bins = ORIENTATIONS + 1  # the last plane is the first one again
    fine = 16  # cells of 4 pixels, pooled below into larger ones that overlap
    rows = torch.arange(1, SIDE - 1) * fine // SIDE
    bins += ((rows[:, None] * fine + rows[None, :]) * planes_of_bins).flatten()
    counts = torch.zeros(items, fine * fine * planes_of_bins)
    counts.scatter_add_(1, bins, strength - upper_share)
    counts.scatter_add_(1, bins + 1, upper_share)
    planes = counts.view(items, fine, fine, planes_of_bins).permute(0, 3, 1, 2)
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


def _histograms(levels: UInt8[Tensor, "items side side 3"]) -> list[Float[Tensor, "items _"]]:
    """Return how much of each colour is in the middle and in the margin."""
    red, green, blue = (levels >> 8 - _COLOUR_BITS).unbind(dim=3)
    code = ((red << 2 * _COLOUR_BITS) | (green << _COLOUR_BITS) | blue).long()
    in_margin = torch.ones(SIDE, SIDE, dtype=torch.long)
    in_margin[_MARGIN:-_MARGIN, _MARGIN:-_MARGIN] = 0
    bins = 8**_COLOUR_BITS
    counts = torch.zeros(len(levels), 2 * bins)
    counts.scatter_add_(
        1, (code + in_margin * bins).flatten(1), torch.ones(len(levels), SIDE * SIDE)
    )
    return [
        (half / half.sum(dim=1, keepdim=True)).sqrt() * math.sqrt(bins)
        for half in torch.split(counts, bins, dim=1)
    ]
