"""Decoder that generates IDs code by code (paper, section 4.3): T5's decoder in plain PyTorch.

It attends to a few prefix vectors computed from the query's embedding. Training reads all codes at
once (teacher forcing); a search reads them one after the other, and caches the keys and values of
earlier ones.

Position t of the decoder reads token t and predicts the code of level t:

    position   0      1      2      3
    token      start  c_0    c_1    c_2
    predicts   c_0    c_1    c_2    c_3
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
"""Initial scale of the codes' embeddings: the released code's 100 · nn.Linear of a unit vector at
width 768."""
FIRST_SCALE: Final = 20.0
"""Initial scale of the guide's nearness: a cosine higher by 0.05 multiplies the probability by
e."""
FIRST_GATE: Final = 0.1
"""Initial weight of the decoder's logits in the guide's, since they are random when training
begins."""


class Guide(nn.Module):
    """Combines the decoder's logits with the distances between the query and the code vectors.

    The logit of code c at level l is

        scale_l · (r·e_c − |e_c|²/2) + bias_c + gate_l · (the decoder's logit)

    where r is the query's scaled embedding (:mod:`genius_search.nn.spread`) minus the code vectors
    of earlier levels, and e_c is the vector of the code. Up to a constant, the bracket, called
    nearness, is minus half the squared distance from the embedding to the vector of the prefix that
    ends with c. Scales, gates and biases are learned with the decoder; the code vectors are the
    quantizer's and fixed (deviation 29).

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
        """Return the rows of codes in ``vectors``, where the tables follow one another."""
        return codes + torch.tensor([0, *accumulate(self.sizes)][:-1], device=codes.device)

    def residuals(
        self, queries: Float[Tensor, "batch dim"], codes: Int[Tensor, "batch levels"]
    ) -> Float[Tensor, "batch levels dim"]:
        """Return the residual at each level: the query minus the code vectors of earlier levels."""
        earlier = self.vectors[self._rows(codes)[:, :-1]]
        return torch.cat([queries[:, None], -earlier], dim=1).cumsum(dim=1)

    def score_ids(
        self,
        decoder_logits: Float[Tensor, "batch levels"],
        queries: Float[Tensor, "batch dim"],
        codes: Int[Tensor, "batch levels"],
    ) -> Float[Tensor, "batch levels"]:
        """Return the logit of each code of IDs, from the decoder's logits for the same codes."""
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
        """Return the logits of all codes of a level."""
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

    def take(self, rows: Int[Tensor, " chosen"]) -> KeysValues:
        """Return the keys and values of the chosen rows."""
        return KeysValues(self.keys[rows], self.values[rows])


class Attention(nn.Module):
    """T5's attention: without biases; initial weights replace the factor 1/√width of the scores."""

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
        """Reshape (rows, tokens, heads · width) to (rows, heads, tokens, width)."""
        heads: Tensor = projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return heads


class Block(nn.Module):
    """Self-attention, cross-attention to the prefixes, feed-forward; each pre-norm and residual."""

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
        """Read tokens after the past ones; return their vectors, and all tokens' keys and values.

        The rows of a query, its beams, are adjacent: with n queries and m rows, row i belongs to
        query i // (m / n) and attends to its ``prefixes``.
        """
        normed = self.self_norm(hidden)
        present = self.self_attention.keys_values(normed)
        if past is not None:
            present = KeysValues(
                *(torch.cat(both, dim=2) for both in zip(past, present, strict=True))
            )
        hidden = hidden + self.dropout(self.self_attention(normed, present, bias))
        # (rows, tokens, width) becomes (queries, rows per query · tokens, width).
        num_queries, width = len(prefixes.keys), hidden.shape[2]
        tokens_per_query = hidden.numel() // max(1, num_queries * width)
        by_query = self.cross_norm(hidden).view(num_queries, tokens_per_query, width)
        hidden = hidden + self.dropout(
            self.cross_attention(by_query, prefixes, None).view_as(hidden)
        )
        inner = self.dropout(torch.relu(self.wi(self.feedforward_norm(hidden))))
        return hidden + self.dropout(self.wo(inner)), present


class GeneratorState(NamedTuple):
    """State of a search between levels: a row for each beam, query after query."""

    level: int
    """Number of tokens read, including the start token."""
    prefixes: tuple[KeysValues, ...]
    """Keys and values of each query's prefix vectors, by block."""
    past: tuple[KeysValues, ...]
    """Keys and values of the tokens of each row, by block; empty before the first token."""

    def select(
        self, queries: Int[Tensor, " chosen"] | None, rows: Int[Tensor, "chosen beams"]
    ) -> GeneratorState:
        """Return the state of the chosen queries (None: all) and rows."""
        prefixes = self.prefixes
        if queries is not None:
            prefixes = tuple(memory.take(queries) for memory in prefixes)
        past = tuple(memory.take(rows.flatten()) for memory in self.past)
        return GeneratorState(self.level, prefixes, past)


class DecoderStep(NamedTuple):
    """Output of a decoder after reading codes."""

    hidden: Float[Tensor, "rows tokens width"]
    """``hidden[:, t]`` predicts the code after token t."""
    state: Any
    """State after the last token; only the decoder that returned it reads it."""


class Generator(nn.Module):
    """Decoder that generates the ID of a query's target.

    The vocabulary is T5's three special tokens, then the codes of level 0, level 1, and so on: code
    c of level l is token ``offsets[l] + c``. With levels of 3, 256 and 256 codes:

        token   0    1    2        3–5      6–261    262–517
        means   pad  end  unknown  level 0  level 1  level 2

    Padding is also the start token. Loading constructs a generator on the "meta" device, too, to
    compare its tensors with those of its file.

    Parameters
    ----------
    sizes
        number of codes at each level.
    common_vocabulary
        whether all levels use the same tokens, as all positions of a text do.
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
        starts = [0] * len(sizes) if common_vocabulary else [0, *accumulate(sizes)]
        self.offsets = tuple(NUM_SPECIAL + starts[level] for level in range(len(sizes)))
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

        As in the released code, codes with similar vectors start with similar embeddings.
        Deviation 12: the scale is the same for every feature width, and there is no bias. A guide
        gets the code vectors themselves.
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
        """Return the hidden state at every level, given the target's earlier codes."""
        hidden: Tensor = self.dropout(self.advance(self.start(queries), codes[:, :-1]).hidden)
        return hidden

    def start(
        self,
        queries: Float[Tensor, "queries dim"],
        level0: Sequence[frozenset[int]] | None = None,  # noqa: ARG002  other decoders use it
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
        """Read codes; in the initial state, the start token and then the codes.

        The codes are those of the levels that follow the ones in ``state``.
        """
        first = max(state.level - 1, 0)
        offsets = self.offsets[first : first + codes.shape[1]]
        tokens = codes + torch.tensor(offsets, dtype=codes.dtype, device=codes.device)
        if state.level == 0:
            tokens = torch.cat([tokens.new_zeros(len(tokens), 1), tokens], dim=1)
        level = state.level + tokens.shape[1]
        bias = self.position_biases(level)[:, :, state.level :]
        hidden = self.dropout(self.embedding(tokens))
        present: list[KeysValues] = []
        for block, prefixes, past in zip_longest(self.decoder_blocks(), state.prefixes, state.past):
            hidden, keys_values = block(hidden, prefixes, bias, past)
            present.append(keys_values)
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

        Level l contributes −log p(c_l | c_0, …, c_{l−1}, query).

        Parameters
        ----------
        codes
            IDs of the targets.
        scaled
            the queries, scaled for the comparison with a guide's code vectors
            (:mod:`genius_search.nn.spread`); by default they are not scaled.
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
        """Return the guided logit of each code of IDs, not normalised over its level.

        It computes the logits of the codes of the given IDs alone. See :meth:`loss` for ``scaled``.
        """
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
                "this generator has no guide, which scoring whole IDs needs; set guide to geometry"
            )
        return self.guide

    def logits(
        self, hidden: Float[Tensor, "rows width"], level: int
    ) -> Float[Tensor, "rows codes"]:
        """Return the decoder's logits of a level's codes, without the guide."""
        start = self.offsets[level]
        return self.row_logits(hidden, slice(start, start + self.sizes[level]))

    def log_probabilities(
        self,
        hidden: Float[Tensor, "rows width"],
        level: int,
        scores: Literal["level", "vocabulary"],
    ) -> Float[Tensor, "rows codes"]:
        """Return the log-probabilities of a level's codes.

        ``scores`` selects whether they are normalised over the level or over the whole vocabulary.
        """
        if scores == "vocabulary":
            start, stop = self.offsets[level], self.offsets[level] + self.sizes[level]
            return torch.log_softmax(self.row_logits(hidden, slice(None)), dim=-1)[:, start:stop]
        return torch.log_softmax(self.logits(hidden, level), dim=-1)

    def row_logits(
        self, hidden: Float[Tensor, "rows width"], rows: slice
    ) -> Float[Tensor, "rows codes"]:
        """Return the logits of a slice of the vocabulary."""
        # T5 scales the hidden state by 1/√width if input and output embeddings are the same matrix.
        if self.head is not None:
            return F.linear(hidden, self.head.weight[rows]).float()
        return F.linear(hidden * self.config.width**-0.5, self.embedding.weight[rows]).float()

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.embedding.weight.device

    def decoder_blocks(self) -> list[Block]:
        """Return the decoder's blocks, first to last."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def position_biases(self, tokens: int) -> Float[Tensor, "1 heads tokens keys"]:
        """Return the bias of attention by the distance between tokens; −∞ for later tokens.

        As in T5, all blocks share one bias.
        """
        positions = np.arange(tokens)
        distance = positions[:, None] - positions[None, :]
        device = self.position_bias.weight.device
        buckets = torch.from_numpy(bucket(np.maximum(distance, 0))).to(device)
        bias: Tensor = self.position_bias(buckets)
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
    """Write a generator's weights and manifest; ``dim`` is the width of query embeddings."""
    write_weights(writer.path / GENERATOR_FILE, generator.state_dict())
    return writer.finish(facts={"dim": dim, "sizes": list(generator.sizes)})


def load_generator(folder: Path, *, device: str = "cpu") -> Generator:
    """Load a generator from its folder.

    Raises
    ------
    ArtifactMismatch
        The weights do not fit the settings in the manifest.
    """
    manifest = open_artifact(folder, kind=GENERATOR_KIND)
    config = settings_of(GeneratorConfig, manifest)
    facts = manifest.facts
    generator = load_weights(
        folder / GENERATOR_FILE, lambda: Generator(facts["dim"], tuple(facts["sizes"]), config)
    )
    return generator.to(device).eval()
