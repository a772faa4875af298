"""What is searched with where no trained model is given: weights that were drawn, of a known size.

They decode as fast as trained ones. Their rankings mean nothing, and they spread a query's beams wider than
training would.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, assert_never

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from genius.config import GeneratorConfig
from genius.model import Genius
from genius.models.generator import Generator
from genius.models.quantizer import NUM_MODALITIES
from genius.search.decoder import Decoder
from genius.search.decoding import Decoding
from genius.search.rank import CodeRanker

DIM: Final = 768
"""Width of the embeddings of CLIP's large model, which the paper uses."""
LEVELS: Final = 8
"""Semantic ones; the modality's is on top."""
REFERENCE_SIZES: Final = (NUM_MODALITIES, *[4096] * LEVELS)
TINY_SIZES: Final = (NUM_MODALITIES, *[256] * LEVELS)
TINY: Final = GeneratorConfig(
    layers=1, width=128, feedforward=256, heads=4, head_width=32, prefixes=8, dropout=0.0
)

DecoderName = Literal["reference", "tiny"]


class Subject(NamedTuple):
    """Something to search with."""

    name: str
    generator: Generator
    decoder: Decoding
    ranker: CodeRanker
    dim: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Codes at each level."""
        return self.decoder.sizes

    def fixed_bytes(self) -> int:
        """What is stored once, however large the pool: the generator's weights and the code vectors."""
        weights = sum(weight.nbytes for weight in self.generator.parameters())
        return weights + 4 * self.dim * sum(self.sizes)


def stand_in(name: DecoderName, *, seed: int, sizes: tuple[int, ...] | None = None) -> Subject:
    """A decoder of the paper's size (T5-small's), or of one narrow layer.

    Parameters
    ----------
    sizes
        codes at each level, if other than the decoder usually goes with.
    """
    match name:
        case "reference":
            config, usual = GeneratorConfig(), REFERENCE_SIZES
        case "tiny":
            config, usual = TINY, TINY_SIZES
        case _:
            assert_never(name)
    sizes = sizes or usual
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        generator = Generator(DIM, sizes, config).eval()
        tables = [torch.randn(size, DIM) * (0.5 / DIM**0.5) * 0.7**level for level, size in enumerate(sizes)]
    return Subject(name, generator, Decoder(generator), CodeRanker(tables), DIM)


def subject_of(model: Genius) -> Subject:
    """A trained model."""
    return Subject(
        f"model {model.fingerprint[:12]}", model.generator.eval(), model.decoder, model.ranker, model.dim
    )


def random_queries(count: int, dim: int, *, seed: int) -> Float[Tensor, "queries dim"]:
    """Unit vectors that ask for nothing."""
    random = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, dim, generator=random), dim=-1)
