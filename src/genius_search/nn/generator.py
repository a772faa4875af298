"""Decoder that generates IDs code by code (paper, section 4.3): T5's decoder in plain PyTorch.

It attends to a few prefix vectors computed from the query's embedding. Training computes all levels at once
(teacher forcing); search uses the same weights one level at a time (:mod:`genius_search.search.decoder`).
"""

from __future__ import annotations

import math
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from genius_search.artifact import Manifest, open_artifact
from genius_search.config import GeneratorConfig
from genius_search.errors import UsageError
from genius_search.nn.codebooks import as_floats
from genius_search.nn.folded import (
    EPSILON,
    KIND,
    NUM_BUCKETS,
    WEIGHTS,
    FoldedGenerator,
    bucket,
    offsets_of,
)
from genius_search.nn.stored import dim_of, settings_of, sizes_of
from genius_search.nn.weights import load_weights, write_weights
from genius_search.writing import ArtifactWriter

CODE_ROW_STD: Final = 2.08
"""Initial scale of code rows: the released code's 100 x nn.Linear of a unit vector at width 768."""
FIRST_SCALE: Final = 20.0
"""Initial scale of distances as logits: a cosine higher by 0.05 multiplies the probability by e."""
FIRST_GATE: Final = 0.1
"""Initial weight of the decoder's logits, which are random when training begins."""


class Guide(nn.Module):
    """Combines the decoder's logits with the distances between the query and the code vectors.

    The logits of level l are scale_l · (r·e − |e|²/2) + bias + gate_l · (the decoder's logits), where r is
    the query's scaled embedding (:mod:`genius_search.nn.spread`) minus the code vectors of earlier levels,
    and e is the vector of a code. Up to a constant, the bracket is minus half the squared distance from the
    embedding to the vector of the prefix with this code. Scales, gates and biases are learned with the
    decoder; the code vectors are the quantizer's and fixed.

    Parameters
    ----------
    sizes
        number of codes at each level.
    """

    vectors: Tensor

    def __init__(self, dim: int, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.sizes = sizes
        self.register_buffer("vectors", torch.zeros(sum(sizes), dim))
        self.log_scale = nn.Parameter(torch.full((len(sizes),), math.log(FIRST_SCALE)))
        self.gate = nn.Parameter(torch.full((len(sizes),), FIRST_GATE))
        self.bias = nn.Parameter(torch.zeros(sum(sizes)))

    def tables(self) -> list[Float[Tensor, "_ dim"]]:
        """Return the code vectors of each level."""
        return list(self.vectors.split(self.sizes))

    def vectors_of(self, codes: Int[Tensor, "batch levels"]) -> Float[Tensor, "batch dim"]:
        """Return the vectors of IDs."""
        return self.vectors[self._rows(codes)].sum(dim=1)

    def _rows(self, codes: Int[Tensor, "batch levels"]) -> Int[Tensor, "batch levels"]:
        return codes + torch.tensor([0, *accumulate(self.sizes)][:-1], device=codes.device)

    def residuals(
        self, queries: Float[Tensor, "batch dim"], codes: Int[Tensor, "batch levels"]
    ) -> Float[Tensor, "batch levels dim"]:
        """Return the residual at each level: the query minus the code vectors before it."""
        before = self.vectors[self._rows(codes)[:, :-1]]
        return torch.cat([queries[:, None], -before], dim=1).cumsum(dim=1)

    def score_paths(
        self,
        decoder_logits: Float[Tensor, "batch levels"],
        queries: Float[Tensor, "batch dim"],
        codes: Int[Tensor, "batch levels"],
    ) -> Float[Tensor, "batch levels"]:
        """Return the logit of each code of IDs; ``decoder_logits`` are of these codes alone."""
        rows = self._rows(codes)
        vectors = self.vectors[rows]
        nearness = (self.residuals(queries, codes) * vectors).sum(dim=2) - vectors.square().sum(dim=2) / 2
        return self.log_scale.exp() * nearness + self.bias[rows] + self.gate * decoder_logits

    def combine(
        self,
        decoder_logits: Float[Tensor, "rows codes"],
        residuals: Float[Tensor, "rows dim"],
        level: int,
    ) -> Float[Tensor, "rows codes"]:
        """Return the logits of one level's codes."""
        start = sum(self.sizes[:level])
        rows = slice(start, start + self.sizes[level])
        vectors = self.vectors[rows]
        nearness = residuals @ vectors.T - vectors.square().sum(dim=1) / 2
        scaled = self.log_scale[level].exp() * nearness
        return scaled + self.bias[rows] + self.gate[level] * decoder_logits


class RMSNorm(nn.Module):
    """T5's layer norm: no mean, no bias, epsilon 1e-6."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        """Scale each row to unit root mean square, then by the weight."""
        scale = torch.rsqrt(hidden.float().square().mean(dim=-1, keepdim=True) + EPSILON)
        return self.weight * (hidden.float() * scale).to(hidden.dtype)


class KeysValues(NamedTuple):
    """Keys and values of attention."""

    keys: Float[Tensor, "rows heads tokens head_width"]
    values: Float[Tensor, "rows heads tokens head_width"]


class Attention(nn.Module):
    """T5's attention: without biases, and scaled by the initial weights instead of by 1/√width."""

    def __init__(self, config: GeneratorConfig) -> None:
        super().__init__()
        inner = config.heads * config.head_width
        self.heads = config.heads
        self.q = nn.Linear(config.width, inner, bias=False)
        self.k = nn.Linear(config.width, inner, bias=False)
        self.v = nn.Linear(config.width, inner, bias=False)
        self.o = nn.Linear(inner, config.width, bias=False)

    def keys_values(self, source: Float[Tensor, "rows tokens width"]) -> KeysValues:
        """Project a source to keys and values."""
        return KeysValues(self._split(self.k(source)), self._split(self.v(source)))

    def forward(
        self, hidden: Float[Tensor, "rows tokens width"], memory: KeysValues, bias: Tensor | None
    ) -> Float[Tensor, "rows tokens width"]:
        """Attend from each token to the memory; ``bias`` is added to the scores."""
        queries = self._split(self.q(hidden))
        attended = F.scaled_dot_product_attention(queries, *memory, attn_mask=bias, scale=1.0)
        output: Tensor = self.o(attended.transpose(1, 2).flatten(2))
        return output

    def _split(self, projected: Tensor) -> Tensor:
        heads: Tensor = projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return heads


class Block(nn.Module):
    """Self-attention, cross-attention to the prefixes and feed-forward, each pre-normed and residual."""

    def __init__(self, config: GeneratorConfig) -> None:
        super().__init__()
        self.self_attention = Attention(config)
        self.self_norm = RMSNorm(config.width)
        self.cross_attention = Attention(config)
        self.cross_norm = RMSNorm(config.width)
        self.wi = nn.Linear(config.width, config.feedforward, bias=False)
        self.wo = nn.Linear(config.feedforward, config.width, bias=False)
        self.feedforward_norm = RMSNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, prefixes: KeysValues, bias: Tensor) -> Tensor:
        """Return the block's output."""
        normed = self.self_norm(hidden)
        present = self.self_attention.keys_values(normed)
        hidden = hidden + self.dropout(self.self_attention(normed, present, bias))
        hidden = hidden + self.dropout(self.cross_attention(self.cross_norm(hidden), prefixes, None))
        inner = self.dropout(torch.relu(self.wi(self.feedforward_norm(hidden))))
        output: Tensor = hidden + self.dropout(self.wo(inner))
        return output


class Generator(nn.Module):
    """Decoder that generates the ID of a query's target.

    The vocabulary is T5's three special tokens, then the codes of level 0, level 1, and so on: code c of
    level l is row ``offsets[l] + c``.

    It is also constructed on the "meta" device, to compare its size with that of its file.

    Parameters
    ----------
    sizes
        number of codes at each level.
    shares_codes
        whether all levels share one vocabulary, as positions in a text do.
    """

    def __init__(
        self, dim: int, sizes: tuple[int, ...], config: GeneratorConfig, *, shares_codes: bool = False
    ) -> None:
        super().__init__()
        self.config = config
        self.sizes = sizes
        self.shares_codes = shares_codes
        self.offsets = offsets_of(sizes, shares_codes=shares_codes)
        vocabulary = max(offset + size for offset, size in zip(self.offsets, sizes, strict=True))
        self.prefix_projection = nn.Linear(dim, config.prefixes * config.width)
        self.prefix_norm = RMSNorm(config.width)
        self.embedding = nn.Embedding(vocabulary, config.width)
        self.position_bias = nn.Embedding(NUM_BUCKETS, config.heads)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = RMSNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.head = None if config.head == "tied" else nn.Linear(config.width, vocabulary, bias=False)
        self.guide = Guide(dim, sizes) if config.guide == "geometry" else None
        self._initialise()

    def start_codes(self, tables: list[Float[Tensor, "_ dim"]], *, generator: torch.Generator) -> None:
        """Initialise the codes' embeddings by a random linear map of their unit code vectors.

        As in the released code, codes with similar vectors start with similar embeddings. Deviation 12: the
        scale is the same for every feature width, and there is no bias. The guide, if there is one, gets the
        code vectors themselves.
        """
        if self.guide is not None:
            self.guide.vectors.copy_(torch.cat(tables))
        projection = torch.randn(tables[0].shape[1], self.config.width, generator=generator)
        with torch.no_grad():
            for offset, table in zip(self.offsets, tables, strict=True):
                rows = CODE_ROW_STD * F.normalize(table.cpu().float(), dim=1) @ projection
                rows = rows.to(self.embedding.weight.device)
                self.embedding.weight[offset : offset + len(rows)] = rows
                if self.head is not None:
                    self.head.weight[offset : offset + len(rows)] = rows * self.config.width**-0.5

    def forward(
        self, queries: Float[Tensor, "batch dim"], codes: Int[Tensor, "batch levels"]
    ) -> Float[Tensor, "batch levels width"]:
        """Return the hidden state at every level, given the target's earlier codes (teacher forcing)."""
        rows = codes + torch.tensor(self.offsets, device=codes.device)
        start = torch.zeros_like(rows[:, :1])
        hidden = self.dropout(self.embedding(torch.cat([start, rows[:, :-1]], dim=1)))
        bias = self.position_biases(hidden.shape[1])
        # Deviation 11: one linear layer and a norm, as in the released code; the paper says MLP.
        prefixes = self.prefix_projection(queries).unflatten(-1, (self.config.prefixes, self.config.width))
        prefixes = self.dropout(self.prefix_norm(self.dropout(prefixes)))
        for block in self.decoder_blocks():
            hidden = block(hidden, block.cross_attention.keys_values(prefixes), bias)
        normed: Tensor = self.dropout(self.final_norm(hidden))
        return normed

    def loss(
        self,
        queries: Float[Tensor, "batch dim"],
        codes: Int[Tensor, "batch levels"],
        scaled: Float[Tensor, "batch dim"] | None = None,
    ) -> Float[Tensor, " levels"]:
        """Return the cross-entropy of each level (equation 10), averaged over the batch.

        Parameters
        ----------
        scaled
            the queries as a guide compares them with code vectors (:mod:`genius_search.nn.spread`).
        """
        hidden = self.forward(queries, codes)
        compared = queries if scaled is None else scaled
        residuals = None if self.guide is None else self.guide.residuals(compared, codes)
        losses: list[Tensor] = []
        for level in range(len(self.sizes)):
            if self.guide is not None and residuals is not None:
                logits = self.level_logits(hidden[:, level], level)
                logits = self.guide.combine(logits, residuals[:, level], level)
                losses.append(F.cross_entropy(logits, codes[:, level]))
            else:
                scores = self.log_probabilities(hidden[:, level], level, self.config.softmax)
                losses.append(F.nll_loss(scores, codes[:, level]))
        return torch.stack(losses)

    def path_scores(
        self,
        queries: Float[Tensor, "batch dim"],
        codes: Int[Tensor, "batch levels"],
        scaled: Float[Tensor, "batch dim"],
    ) -> Float[Tensor, "batch levels"]:
        """Return the guided logit of each code of IDs, not normalised over the level; see :meth:`loss`."""
        guide = self.required_guide()
        hidden = self.forward(queries, codes)
        logits = (hidden * self._output_rows(codes + torch.tensor(self.offsets, device=codes.device))).sum(
            dim=2
        )
        return guide.score_paths(logits, scaled, codes)

    def required_guide(self) -> Guide:
        """Return the guide; raise :class:`UsageError` without one."""
        if self.guide is None:
            raise UsageError(
                "this generator has no guide, which scores of whole IDs need: set guide to geometry"
            )
        return self.guide

    def _output_rows(self, rows: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch width"]:
        if self.head is not None:
            return F.embedding(rows, self.head.weight)
        scaled: Tensor = self.embedding(rows) * self.config.width**-0.5
        return scaled

    def logits(self, hidden: Float[Tensor, "rows width"], rows: slice) -> Float[Tensor, "rows codes"]:
        """Return the logits of a slice of the vocabulary."""
        if self.head is not None:
            return F.linear(hidden, self.head.weight[rows])
        return F.linear(hidden * self.config.width**-0.5, self.embedding.weight[rows])

    def log_probabilities(
        self, hidden: Float[Tensor, "rows width"], level: int, scores: Literal["level", "vocabulary"]
    ) -> Float[Tensor, "rows codes"]:
        """Return log-probabilities of a level's codes, normalised over the level or the whole vocabulary."""
        if scores == "vocabulary":
            start, stop = self.offsets[level], self.offsets[level] + self.sizes[level]
            return torch.log_softmax(self.logits(hidden, slice(None)).float(), dim=-1)[:, start:stop]
        return torch.log_softmax(self.level_logits(hidden, level), dim=-1)

    def level_logits(self, hidden: Float[Tensor, "rows width"], level: int) -> Float[Tensor, "rows codes"]:
        """Return the decoder's logits of one level's codes, without the guide."""
        start = self.offsets[level]
        return self.logits(hidden, slice(start, start + self.sizes[level])).float()

    def decoder_blocks(self) -> list[Block]:
        """Return the blocks, first to last."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def folded(self) -> FoldedGenerator:
        """Return copies of the weights, rearranged for searching."""
        weights = {name: as_floats(weight).copy() for name, weight in self.state_dict().items()}
        return FoldedGenerator(self.config, self.sizes, weights, shares_codes=self.shares_codes)

    def position_biases(self, tokens: int) -> Float[Tensor, "1 heads tokens keys"]:
        """Return the relative-position bias between each token and those up to itself.

        As in T5, all blocks share one bias.
        """
        positions = np.arange(tokens)
        distance = positions[:, None] - positions[None, :]
        device = self.position_bias.weight.device
        bias: Tensor = self.position_bias(torch.from_numpy(bucket(np.maximum(distance, 0))).to(device))
        bias = bias.masked_fill(torch.from_numpy(distance < 0).to(device)[..., None], float("-inf"))
        return bias.permute(2, 0, 1)[None]

    def _initialise(self) -> None:
        """Initialise the weights as T5 does (factor 1)."""
        config = self.config
        nn.init.normal_(self.embedding.weight, std=1.0)
        nn.init.normal_(self.position_bias.weight, std=config.width**-0.5)
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=config.width**-0.5)
        for block in self.decoder_blocks():
            for attention in (block.self_attention, block.cross_attention):
                nn.init.normal_(attention.q.weight, std=(config.width * config.head_width) ** -0.5)
                nn.init.normal_(attention.k.weight, std=config.width**-0.5)
                nn.init.normal_(attention.v.weight, std=config.width**-0.5)
                nn.init.normal_(attention.o.weight, std=(config.heads * config.head_width) ** -0.5)
            nn.init.normal_(block.wi.weight, std=config.width**-0.5)
            nn.init.normal_(block.wo.weight, std=config.feedforward**-0.5)


class TrainedGenerator(NamedTuple):
    """A generator and the manifest of its folder."""

    generator: Generator
    manifest: Manifest

    @property
    def folded(self) -> FoldedGenerator:
        """The weights for searching."""
        return self.generator.folded()


def write_generator(writer: ArtifactWriter, generator: Generator, *, dim: int) -> TrainedGenerator:
    """Write weights and manifest of a generator; ``dim`` is the width of the embeddings."""
    write_weights(writer.path / WEIGHTS, generator.state_dict())
    facts: dict[str, object] = {"dim": dim, "sizes": list(generator.sizes)}
    if generator.shares_codes:
        facts["shares_codes"] = True
    manifest = writer.finish(facts=facts)
    return TrainedGenerator(generator.eval(), manifest)


def load_generator(folder: Path, *, device: str = "cpu") -> TrainedGenerator:
    """Load a generator from its folder; raise :class:`ArtifactMismatch` where its files do not fit."""
    manifest = open_artifact(folder, kind=KIND)
    make = partial(
        Generator,
        dim_of(manifest),
        sizes_of(manifest),
        settings_of(GeneratorConfig, manifest),
        shares_codes=bool(manifest.facts.get("shares_codes")),
    )
    return TrainedGenerator(load_weights(folder / WEIGHTS, make).to(device).eval(), manifest)
