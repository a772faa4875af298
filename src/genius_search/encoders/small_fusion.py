"""CLIP-FF and BLIP-FF in small: the layers that UniIR puts over tokens of both modalities, over our towers.

A ViT gives a class vector and one vector per patch; a tower of `small` gives one vector for the whole
image, and each cell of the description becomes a token by a matrix of its own. Texts likewise: the whole
text's vector, then each word's. So a feature fusion network has all that score fusion has, and layers on
top. The layers are transformers' own, those that the published weights load into
(:mod:`genius_search.encoders.uniir`).

The authors' code masks nothing: padding, a blank image and an empty text count (UniIR's issue 31). In this
module they do not unless ``count_padding``. (BERT masks padding in the authors' BLIP-FF too.)
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
from genius_search.encoders.descriptors import CELL_SIZE, CELLS, OUTLINE_SIZE, cells
from genius_search.encoders.small import EmbeddingNetwork, SmallNetwork, trim_padding
from genius_search.encoders.small_texts import PADDING, pair_rows
from genius_search.encoders.uniir import BERT_SETTINGS, T5_LAYERS, T5_SETTINGS, t5_layers

LAYERS: Final = 2
"""BERT layers over both modalities; the paper's BLIP-FF has 12."""
BUCKETS: Final = 32
"""Buckets of T5's relative positions."""
CHUNK: Final = 256
"""Items that go through the layers at once: few enough to stay in a core's cache."""


class Words(NamedTuple):
    """The token vectors of texts, the whole text's vector first."""

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
        self.cell = nn.Linear(CELL_SIZE + config.outlines * OUTLINE_SIZE // CELLS, config.dim)
        self.places = nn.Parameter(torch.zeros(CELLS, config.dim))

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.towers.device

    @abstractmethod
    def fuse(
        self, words: Words | None, image: Float[Tensor, "items tokens dim"] | None
    ) -> Float[Tensor, "items dim"]:
        """Return one vector per item; one of the two modalities may be missing from all of them."""

    def embedding(self, batch: FeatureBatch) -> Float[Tensor, "items dim"]:
        """Return one vector per item."""
        total = torch.zeros(len(batch.image), self.dim, device=self.device)
        shortest_first = (batch.text != PADDING).sum(dim=1).argsort(stable=True)  # little padding together
        for has_image, has_text in ((True, True), (True, False), (False, True)):
            alike = (batch.has_image == has_image) & (batch.has_text == has_text)
            if self.count_padding:
                alike = torch.full_like(alike, has_image and has_text)
            for places in shortest_first[alike[shortest_first]].split(CHUNK):
                if len(places):
                    words = self.words(batch.text[places]) if has_text else None
                    image = self.images(batch.image[places]) if has_image else None
                    total = total.index_add(0, places.to(self.device), self.fuse(words, image).float())
        return total

    def words(self, numbers: Float[Tensor, "items tokens"] | Int[Tensor, "items tokens"]) -> Words:
        """Return the whole text's vector and each word's, which includes the pair with the word before."""
        tokens = numbers.to(self.device).long()
        text = self.towers.text(tokens)
        used = tokens if self.count_padding else trim_padding(tokens)
        pairs = F.pad(pair_rows(used, buckets=self.towers.pair_buckets), (1, 0))
        words = self.word(self.towers.words(used) + self.towers.pairs(pairs))
        is_word = F.pad(used != PADDING, (1, 0), value=True)
        return Words(torch.cat([text[:, None], words], dim=1), is_word)

    def images(self, descriptors: Float[Tensor, "items pixels"]) -> Float[Tensor, "items tokens dim"]:
        """Return the whole image's vector and each cell's."""
        moved = descriptors.to(self.device)
        vectors = self.cell(cells(moved)) + self.places
        return torch.cat([self.towers.image(moved)[:, None], vectors], dim=1)


class SmallClipFusion(SmallFusion):
    """T5 layers over both towers' tokens, averaged.

    Images come first: T5 uses the distance between tokens, and padding, which is then at the end, must not
    shift what follows it. (UniIR has texts first, all padded to one length.)
    """

    def __init__(self, config: SmallEncoderConfig, *, vocabulary: int) -> None:
        super().__init__(config, vocabulary=vocabulary)
        heads = math.gcd(config.dim, 4)
        self.mixer = t5_layers(
            {
                **T5_SETTINGS,
                "d_model": config.dim,
                "d_kv": config.dim // heads,
                # 2048 for a width of 768, and quick to multiply for any
                "d_ff": 16 * math.ceil(config.dim / 6),
                "num_layers": T5_LAYERS,
                "num_heads": heads,
                "relative_attention_num_buckets": BUCKETS,
                "dropout_rate": 0.0,
            }
        )

    def fuse(
        self, words: Words | None, image: Float[Tensor, "items tokens dim"] | None
    ) -> Float[Tensor, "items dim"]:
        """Return the mean of all tokens that count."""
        tokens, masks = [], []
        if image is not None:
            tokens.append(image)
            masks.append(torch.ones(image.shape[:2], dtype=torch.bool, device=image.device))
        if words is not None:
            tokens.append(words.tokens)
            masks.append(words.is_word | self.count_padding)
        mask = torch.cat(masks, dim=1)
        mixed: Tensor = self.mixer(
            inputs_embeds=torch.cat(tokens, dim=1), attention_mask=mask
        ).last_hidden_state
        weights = mask.to(mixed.dtype)[..., None]
        return (mixed * weights).sum(dim=1) / weights.sum(dim=1)


class SmallBlipFusion(SmallFusion):
    """BERT layers over the text that attend to the image's tokens; the pooled first token."""

    def __init__(self, config: SmallEncoderConfig, *, vocabulary: int) -> None:
        super().__init__(config, vocabulary=vocabulary)
        settings = {
            **BERT_SETTINGS,
            "vocab_size": 1,
            "hidden_size": config.dim,
            "encoder_hidden_size": config.dim,
            "intermediate_size": 4 * config.dim,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": math.gcd(config.dim, 4),
            "max_position_embeddings": config.max_tokens + 1,
            "is_decoder": True,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            # BERT's own 0.02 would leave so narrow a network nearly blind for the image at the start.
            "initializer_range": config.dim**-0.5,
        }
        self.reader = BlipTextModel(BlipTextConfig(**settings))
        self.reader.embeddings.word_embeddings = nn.Identity()  # it is given vectors, not tokens

    def fuse(
        self, words: Words | None, image: Float[Tensor, "items tokens dim"] | None
    ) -> Float[Tensor, "items dim"]:
        """Return the pooled vector; an image alone is read by the empty text's vector."""
        if words is None:
            if image is None:
                raise ValueError("there is neither a text nor an image")
            words = self.words(torch.full((len(image), 2), PADDING))
        pooled: Tensor = self.reader(
            inputs_embeds=words.tokens, attention_mask=words.is_word, encoder_hidden_states=image
        ).pooler_output
        return pooled
