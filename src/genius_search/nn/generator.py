"""Decoder that generates IDs code by code (paper, section 4.3): T5's decoder in plain PyTorch.

It attends to a few prefix vectors computed from the query's embedding. Training reads all codes at once
(teacher forcing); a search reads them one after the other, and keeps keys and values of the earlier ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from genius_search.artifact import Manifest, open_artifact
from genius_search.config import settings_of
from genius_search.errors import UsageError
from genius_search.nn.packed import (
    EPSILON,
    GENERATOR_FILE,
    GENERATOR_KIND,
    NUM_BUCKETS,
    NUM_SPECIAL,
    bucket,
)
from genius_search.nn.weights import load_weights, write_weights
from genius_search.recipe import GeneratorConfig
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

    def score_ids(
        self,
        decoder_logits: Float[Tensor, "batch levels"],
        queries: Float[Tensor, "batch dim"],
        codes: Int[Tensor, "batch levels"],
    ) -> Float[Tensor, "batch levels"]:
        """Return the logit of each code of IDs; ``decoder_logits`` are of these codes alone."""
        rows = self._rows(codes)
        vectors = self.vectors[rows]
        nearness = (self.residuals(queries, codes) * vectors).sum(dim=2) - vectors.square().sum(
            dim=2
        ) / 2
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


class KeysValues(NamedTuple):
    """Keys and values of attention."""

    keys: Float[Tensor, "rows heads tokens head_width"]
    values: Float[Tensor, "rows heads tokens head_width"]

    def take(self, rows: Int[Tensor, " kept"]) -> KeysValues:
        """Return those of the chosen rows."""
        return KeysValues(self.keys[rows], self.values[rows])


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
        self.self_norm = nn.RMSNorm(config.width, eps=EPSILON)
        self.cross_attention = Attention(config)
        self.cross_norm = nn.RMSNorm(config.width, eps=EPSILON)
        self.wi = nn.Linear(config.width, config.feedforward, bias=False)
        self.wo = nn.Linear(config.feedforward, config.width, bias=False)
        self.feedforward_norm = nn.RMSNorm(config.width, eps=EPSILON)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        hidden: Float[Tensor, "rows tokens width"],
        prefixes: KeysValues,
        bias: Tensor,
        past: KeysValues | None,
    ) -> tuple[Float[Tensor, "rows tokens width"], KeysValues]:
        """Read tokens after the past ones; return their vectors, and keys and values of all tokens so far.

        Each query's ``prefixes`` serve as many adjacent rows.
        """
        normed = self.self_norm(hidden)
        present = self.self_attention.keys_values(normed)
        if past is not None:
            present = KeysValues(
                *(torch.cat(both, dim=2) for both in zip(past, present, strict=True))
            )
        hidden = hidden + self.dropout(self.self_attention(normed, present, bias))
        count, width = len(prefixes.keys), hidden.shape[2]
        by_query = self.cross_norm(hidden).view(
            count, hidden.numel() // max(1, count * width), width
        )
        hidden = hidden + self.dropout(
            self.cross_attention(by_query, prefixes, None).view_as(hidden)
        )
        inner = self.dropout(torch.relu(self.wi(self.feedforward_norm(hidden))))
        return hidden + self.dropout(self.wo(inner)), present


class GeneratorState(NamedTuple):
    """What a search keeps between levels: a row for each beam, query after query."""

    level: int
    """Number of tokens read, including the start token."""
    prefixes: tuple[KeysValues, ...]
    """Of each query's prefix vectors, by block."""
    past: tuple[KeysValues, ...]
    """Of the tokens of each row, by block; empty before the first."""

    def select(
        self, queries: Int[Tensor, " kept"] | None, rows: Int[Tensor, "kept beams"]
    ) -> GeneratorState:
        """Return the state of the chosen queries (None: all) and rows."""
        prefixes = (
            self.prefixes if queries is None else tuple(one.take(queries) for one in self.prefixes)
        )
        return GeneratorState(
            self.level, prefixes, tuple(one.take(rows.flatten()) for one in self.past)
        )


class DecoderStep(NamedTuple):
    """What a decoder says after reading codes."""

    hidden: Float[Tensor, "rows tokens width"]
    """``hidden[:, t]`` predicts the code after token t."""
    state: Any
    """The state after the last token; only its decoder knows the contents."""


class Generator(nn.Module):
    """Decoder that generates the ID of a query's target.

    The vocabulary is T5's three special tokens, then the codes of level 0, level 1, and so on: code c of
    level l is row ``offsets[l] + c``.

    It is also constructed on the "meta" device, to compare its size with that of its file.

    Parameters
    ----------
    sizes
        number of codes at each level.
    common_vocabulary
        whether all levels share one vocabulary, as positions in a text do.
    """

    def __init__(
        self,
        dim: int,
        sizes: tuple[int, ...],
        config: GeneratorConfig,
        *,
        common_vocabulary: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.sizes = sizes
        before = [0] * len(sizes) if common_vocabulary else [0, *accumulate(sizes)]
        self.offsets = tuple(NUM_SPECIAL + before[level] for level in range(len(sizes)))
        vocabulary = max(offset + size for offset, size in zip(self.offsets, sizes, strict=True))
        self.prefix_projection = nn.Linear(dim, config.prefixes * config.width)
        self.prefix_norm = nn.RMSNorm(config.width, eps=EPSILON)
        self.embedding = nn.Embedding(vocabulary, config.width)
        self.position_bias = nn.Embedding(NUM_BUCKETS, config.heads)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.RMSNorm(config.width, eps=EPSILON)
        self.dropout = nn.Dropout(config.dropout)
        self.head = (
            None if config.head == "tied" else nn.Linear(config.width, vocabulary, bias=False)
        )
        self.guide = Guide(dim, sizes) if config.guide == "geometry" else None
        self._initialise()

    def start_codes(
        self, tables: list[Float[Tensor, "_ dim"]], *, generator: torch.Generator
    ) -> None:
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
        hidden: Tensor = self.dropout(self.advance(self.start(queries), codes[:, :-1]).hidden)
        return hidden

    def start(
        self,
        queries: Float[Tensor, "queries dim"],
        level0: Sequence[frozenset[int]] | None = None,  # noqa: ARG002  it is not asked for a modality
    ) -> GeneratorState:
        """Return the state before any token."""
        # Deviation 11: one linear layer and a norm, as in the released code; the paper says MLP.
        prefixes = self.prefix_projection(queries).unflatten(
            -1, (self.config.prefixes, self.config.width)
        )
        prefixes = self.dropout(self.prefix_norm(self.dropout(prefixes)))
        blocks = self.decoder_blocks()
        return GeneratorState(
            0, tuple(block.cross_attention.keys_values(prefixes) for block in blocks), ()
        )

    def advance(self, state: GeneratorState, codes: Int[Tensor, "rows codes"]) -> DecoderStep:
        """Read further codes, or in the initial state the start token and the first codes."""
        first = max(state.level - 1, 0)
        offsets = self.offsets[first : first + codes.shape[1]]
        tokens = codes + torch.tensor(offsets, dtype=codes.dtype, device=codes.device)
        if state.level == 0:
            tokens = torch.cat([tokens.new_zeros(len(tokens), 1), tokens], dim=1)
        level = state.level + tokens.shape[1]
        bias = self.position_biases(level)[:, :, state.level :]
        hidden, present = self.dropout(self.embedding(tokens)), []
        for block, prefixes, past in zip_longest(self.decoder_blocks(), state.prefixes, state.past):
            hidden, kept = block(hidden, prefixes, bias, past)
            present.append(kept)
        return DecoderStep(
            self.final_norm(hidden), GeneratorState(level, state.prefixes, tuple(present))
        )

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
                logits = self.logits(hidden[:, level], level)
                logits = self.guide.combine(logits, residuals[:, level], level)
                losses.append(F.cross_entropy(logits, codes[:, level]))
            else:
                scores = self.log_probabilities(hidden[:, level], level, self.config.softmax)
                losses.append(F.nll_loss(scores, codes[:, level]))
        return torch.stack(losses)

    def score_ids(
        self,
        queries: Float[Tensor, "batch dim"],
        codes: Int[Tensor, "batch levels"],
        scaled: Float[Tensor, "batch dim"],
    ) -> Float[Tensor, "batch levels"]:
        """Return the guided logit of each code of IDs, not normalised over the level; see :meth:`loss`."""
        guide = self.require_guide()
        rows = codes + torch.tensor(self.offsets, device=codes.device)
        if self.head is not None:
            outputs = F.embedding(rows, self.head.weight)
        else:
            outputs = self.embedding(rows) * self.config.width**-0.5
        logits = (self.forward(queries, codes) * outputs).sum(dim=2)
        return guide.score_ids(logits, scaled, codes)

    def require_guide(self) -> Guide:
        """Return the guide; raise :class:`UsageError` without one."""
        if self.guide is None:
            raise UsageError(
                "this generator has no guide, which scores of whole IDs need: set guide to geometry"
            )
        return self.guide

    def logits(
        self, hidden: Float[Tensor, "rows width"], level: int
    ) -> Float[Tensor, "rows codes"]:
        """Return the logits of one level's codes, without the guide."""
        start = self.offsets[level]
        return self.row_logits(hidden, slice(start, start + self.sizes[level]))

    def log_probabilities(
        self,
        hidden: Float[Tensor, "rows width"],
        level: int,
        scores: Literal["level", "vocabulary"],
    ) -> Float[Tensor, "rows codes"]:
        """Return log-probabilities of a level's codes, normalised over the level or the whole vocabulary."""
        if scores == "vocabulary":
            start, stop = self.offsets[level], self.offsets[level] + self.sizes[level]
            return torch.log_softmax(self.row_logits(hidden, slice(None)), dim=-1)[:, start:stop]
        return torch.log_softmax(self.logits(hidden, level), dim=-1)

    def row_logits(
        self, hidden: Float[Tensor, "rows width"], rows: slice
    ) -> Float[Tensor, "rows codes"]:
        """Return the logits of a slice of the vocabulary."""
        if self.head is not None:
            return F.linear(hidden, self.head.weight[rows]).float()
        return F.linear(hidden * self.config.width**-0.5, self.embedding.weight[rows]).float()

    @property
    def device(self) -> torch.device:
        """Device of the computation."""
        return self.embedding.weight.device

    def decoder_blocks(self) -> list[Block]:
        """Return the blocks, first to last."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def position_biases(self, tokens: int) -> Float[Tensor, "1 heads tokens keys"]:
        """Return the relative-position bias between each token and those up to itself.

        As in T5, all blocks share one bias.
        """
        positions = np.arange(tokens)
        distance = positions[:, None] - positions[None, :]
        device = self.position_bias.weight.device
        bias: Tensor = self.position_bias(
            torch.from_numpy(bucket(np.maximum(distance, 0))).to(device)
        )
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


def write_generator(writer: ArtifactWriter, generator: Generator, *, dim: int) -> Manifest:
    """Write weights and manifest of a generator; ``dim`` is the width of the embeddings."""
    write_weights(writer.path / GENERATOR_FILE, generator.state_dict())
    return writer.finish(facts={"dim": dim, "sizes": list(generator.sizes)})


def load_generator(folder: Path, *, device: str = "cpu") -> Generator:
    """Load a generator from its folder; raise :class:`ArtifactMismatch` where its files do not fit."""
    manifest = open_artifact(folder, kind=GENERATOR_KIND)
    config, facts = settings_of(GeneratorConfig, manifest), manifest.facts
    generator = load_weights(
        folder / GENERATOR_FILE, lambda: Generator(facts["dim"], tuple(facts["sizes"]), config)
    )
    return generator.to(device).eval()
