"""CLIP-FF and BLIP-FF in small: the layers that UniIR puts over tokens of both modalities, over our towers.

A ViT gives the class's vector and one per patch; a tower of `small` gives the whole picture's, and each cell
of the description becomes a token by a matrix of its own. Texts likewise: the whole text's vector, then each
word's. So a network of feature fusion has all that score fusion has, and layers on top. These are
transformers' own, those that the published weights are loaded into (:mod:`genius_search.encoders.uniir_networks`).

The authors' code masks nothing: padding, a blank picture, an empty text count (UniIR's issue 31). Here they
do not unless ``count_padding``: an item is read without what it does not have. (BERT leaves padding out in
the authors' BLIP-FF too.)
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Final, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BlipTextConfig
from transformers.models.blip.modeling_blip_text import BlipTextModel

from genius_search.config import SmallEncoderConfig
from genius_search.data.features import FeatureBatch
from genius_search.encoders.pixels import CELL_SIZE, CELLS, cells
from genius_search.encoders.small import PADDING, EmbeddingNetwork, SmallNetwork, pair_rows, used_tokens
from genius_search.encoders.uniir_networks import token_mixer
from genius_search.encoders.uniir_weights import mixer_settings, reader_config

__all__ = ["SmallBlipFusion", "SmallClipFusion", "SmallFusion"]

LAYERS: Final = 2
"""Over both modalities; the paper's CLIP-FF has as many, its BLIP-FF 12 (a BERT, of which two are kept)."""
BUCKETS: Final = 32
"""Of T5's relative positions."""
TOGETHER: Final = 256
"""Items that go through the layers at once: few enough to stay in a core's cache."""


class Words(NamedTuple):
    """Tokens of texts, the whole text's vector first."""

    tokens: Float[Tensor, "items tokens dim"]
    is_word: Bool[Tensor, "items tokens"]
    """False where there is only padding."""


class SmallFusion(EmbeddingNetwork):
    """One vector for image and text together, unnormalised."""

    def __init__(self, config: SmallEncoderConfig, *, vocabulary: int) -> None:
        super().__init__()
        self.dim = config.dim
        self.count_padding = config.count_padding
        self.towers = SmallNetwork(config, vocabulary=vocabulary)
        self.word = nn.Sequential(nn.LayerNorm(config.text_width), nn.Linear(config.text_width, config.dim))
        self.cell = nn.Linear(CELL_SIZE, config.dim)
        self.places = nn.Parameter(torch.zeros(CELLS, config.dim))

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.towers.device

    @abstractmethod
    def fuse(
        self, words: Words | None, picture: Float[Tensor, "items tokens dim"] | None
    ) -> Float[Tensor, "items dim"]:
        """One vector for each item; one of the two modalities may be missing from all of them."""

    def embedding(self, batch: FeatureBatch) -> Float[Tensor, "items dim"]:
        """One vector for each item."""
        total = torch.zeros(len(batch.image), self.dim, device=self.device)
        shortest_first = (batch.text != PADDING).sum(dim=1).argsort(stable=True)  # little padding together
        for has_image, has_text in ((True, True), (True, False), (False, True)):
            alike = (batch.has_image == has_image) & (batch.has_text == has_text)
            if self.count_padding:
                alike = torch.full_like(alike, has_image and has_text)
            for places in shortest_first[alike[shortest_first]].split(TOGETHER):
                if len(places):
                    words = self.words(batch.text[places]) if has_text else None
                    picture = self.picture(batch.image[places]) if has_image else None
                    total = total.index_add(0, places.to(self.device), self.fuse(words, picture).float())
        return total

    def words(self, numbers: Float[Tensor, "items tokens"] | Int[Tensor, "items tokens"]) -> Words:
        """The whole text's vector, and each word's, which knows the word before."""
        given = numbers.to(self.device).long()
        whole = self.towers.text(given)
        read = given if self.count_padding else used_tokens(given)
        pairs = F.pad(pair_rows(read, buckets=self.towers.pair_buckets), (1, 0))
        each = self.word(self.towers.words(read) + self.towers.pairs(pairs))
        is_word = F.pad(read != PADDING, (1, 0), value=True)
        return Words(torch.cat([whole[:, None], each], dim=1), is_word)

    def picture(self, descriptors: Float[Tensor, "items pixels"]) -> Float[Tensor, "items tokens dim"]:
        """The whole picture's vector, and each cell's."""
        given = descriptors.to(self.device)
        each = self.cell(cells(given)) + self.places
        return torch.cat([self.towers.image(given)[:, None], each], dim=1)


class SmallClipFusion(SmallFusion):
    """Both towers' tokens through T5 layers, and averaged.

    Pictures come first: T5 knows where tokens stand from one another, and padding, which is at the end then,
    must not move what follows it. (UniIR has texts first, all padded to one length.)
    """

    def __init__(self, config: SmallEncoderConfig, *, vocabulary: int) -> None:
        super().__init__(config, vocabulary=vocabulary)
        heads = num_heads(config.dim)
        settings = mixer_settings(
            width=config.dim,
            head=config.dim // heads,
            hidden=16 * math.ceil(config.dim / 6),  # 2048 for a width of 768, and quick to multiply for any
            num_heads=heads,
            buckets=BUCKETS,
        )
        self.mixer = token_mixer({**settings, "dropout_rate": 0.0})

    def fuse(
        self, words: Words | None, picture: Float[Tensor, "items tokens dim"] | None
    ) -> Float[Tensor, "items dim"]:
        """The mean of all tokens that count."""
        tokens, counts = [], []
        if picture is not None:
            tokens.append(picture)
            counts.append(torch.ones(picture.shape[:2], dtype=torch.bool, device=picture.device))
        if words is not None:
            tokens.append(words.tokens)
            counts.append(words.is_word | self.count_padding)
        counted = torch.cat(counts, dim=1)
        mixed: Tensor = self.mixer(
            inputs_embeds=torch.cat(tokens, dim=1), attention_mask=counted
        ).last_hidden_state
        weights = counted.to(mixed.dtype)[..., None]
        return (mixed * weights).sum(dim=1) / weights.sum(dim=1)


class SmallBlipFusion(SmallFusion):
    """Layers that read the text and look at the image's tokens; the pooled first token."""

    def __init__(self, config: SmallEncoderConfig, *, vocabulary: int) -> None:
        super().__init__(config, vocabulary=vocabulary)
        settings = reader_config(
            tokens=1,
            width=config.dim,
            seen=config.dim,
            hidden=4 * config.dim,
            layers=LAYERS,
            num_heads=num_heads(config.dim),
            positions=config.max_tokens + 1,
            fused=True,
        )
        from_scratch = {
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            # BERT's own 0.02 would leave so narrow a network nearly blind for the picture at the start.
            "initializer_range": config.dim**-0.5,
        }
        self.reader = BlipTextModel(BlipTextConfig(**settings, **from_scratch))
        self.reader.embeddings.word_embeddings = nn.Identity()  # it is given vectors, not tokens

    def fuse(
        self, words: Words | None, picture: Float[Tensor, "items tokens dim"] | None
    ) -> Float[Tensor, "items dim"]:
        """The pooled vector; a picture alone is looked at by the empty text's vector."""
        if words is None:
            if picture is None:
                raise ValueError("there is neither a text nor a picture")
            words = self.words(torch.full((len(picture), 2), PADDING))
        pooled: Tensor = self.reader(
            inputs_embeds=words.tokens, attention_mask=words.is_word, encoder_hidden_states=picture
        ).pooler_output
        return pooled


def num_heads(width: int) -> int:
    """Four heads, or as many as divide the width."""
    return math.gcd(width, 4)
