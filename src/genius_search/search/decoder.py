"""Decoders that predict IDs code by code: the generator's (paper, section 4.3), a geometric one, and both.

Beam search only uses the :class:`Decoder` protocol, so any other decoder can take their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor
from torch.nn import functional as F

from genius_search.errors import UsageError
from genius_search.nn.codebooks import as_floats
from genius_search.nn.folded import EPSILON
from genius_search.nn.generator import Generator, Guide
from genius_search.nn.spread import Spread


@runtime_checkable
class DecoderState(Protocol):
    """State of decoding a batch: one row per beam, query after query. Only its decoder knows the contents."""

    @property
    def level(self) -> int:
        """Number of tokens read, including the start token."""

    def select(
        self, queries: Int64[Tensor, " kept"] | None, rows: Int64[Tensor, "kept beams"]
    ) -> DecoderState:
        """Return the state of the chosen queries (None: all) and rows, in this order.

        ``rows`` has one line per kept query, with row numbers of this state; a row may occur repeatedly.
        """


class DecoderStep(NamedTuple):
    """A decoder's output after reading codes."""

    hidden: Float[Tensor, "rows tokens width"]
    """``hidden[:, t]`` predicts the code after token t."""
    state: DecoderState
    """The state after the last token."""


Level0: TypeAlias = Sequence[frozenset[int]]
"""Allowed level-0 codes of each query; empty means any."""


@runtime_checkable
class Decoder(Protocol):
    """A decoder of IDs."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of codes at each level."""

    @property
    def device(self) -> torch.device:
        """Device of the computation."""

    def start(self, queries: Float[Tensor, "queries dim"], level0: Level0 | None = None) -> DecoderState:
        """Return the initial state, before any token.

        Parameters
        ----------
        level0
            allowed level-0 codes of each query; empty means any, as None does for all queries.
        """

    def advance(self, state: Any, codes: Int64[Tensor, "rows tokens"]) -> DecoderStep:
        """Read codes, beginning with that of level ``state.level − 1``; each attends to those before it.

        ``state`` comes from this decoder. In the initial state the start token is read first: without any
        codes, the result predicts level 0; with one code, levels 0 and 1. The initial state may be continued
        by several adjacent rows per query, the same number for each query.

        Raises
        ------
        UsageError
            There are more codes than an ID has levels, or nothing to read.
        """

    def logits(self, hidden: Float[Tensor, "rows width"], level: int) -> Float[Tensor, "rows codes"]:
        """Return the unnormalised scores of one level's codes."""

    def log_probabilities(
        self, hidden: Float[Tensor, "rows width"], level: int, scores: Literal["level", "vocabulary"]
    ) -> Float[Tensor, "rows codes"]:
        """Return the scores of one level's codes, normalised over the level or over the whole vocabulary."""


def check_read(state: DecoderState, codes: Int64[Tensor, "rows tokens"], num_levels: int) -> int:
    """Check that codes can be read in a state; return the level of the state after them."""
    level = state.level + codes.shape[1] + (state.level == 0)
    if level == state.level or level > num_levels:
        raise UsageError(
            f"cannot read {codes.shape[1]} codes after {state.level} tokens of an ID of {num_levels} levels: "
            f"at least one token must be read, and at most {num_levels} in all, including the start token"
        )
    return level


OPENING_CODES: Final = 64
"""Most level-0 codes for which the self-attention of the first block is computed in advance."""


class T5State(NamedTuple):
    """State of a :class:`T5Decoder`."""

    level: int
    prefixes: Float[Tensor, "blocks two queries looks width"]
    """Keys and values of cross-attention for each block and each head and prefix vector of a query (a look),
    projected into the space of the tokens."""
    past: tuple[Float[Tensor, "two tokens rows inner"], ...]
    """Keys and values of the tokens read so far, by block; empty before the first."""
    rows: Int64[Tensor, " rows"] | None
    """Rows of ``past`` that the beams continue; None means all. They are copied when next needed."""

    def select(self, queries: Int64[Tensor, " kept"] | None, rows: Int64[Tensor, "kept beams"]) -> T5State:
        """Return the state of the chosen queries (None: all, without a copy) and rows."""
        state = self if queries is None else self._replace(prefixes=self.prefixes.index_select(2, queries))
        if not self.past:
            return state
        flat = rows.flatten()
        return state._replace(rows=flat if self.rows is None else self.rows[flat])


class _Weights(NamedTuple):
    """:class:`genius_search.nn.folded.BlockWeights` as tensors."""

    token: Float[Tensor, "width three_inner"]
    token_out: Float[Tensor, "inner width"]
    up: Float[Tensor, "width feedforward"]
    down: Float[Tensor, "feedforward width"]


class _SelfAttended(NamedTuple):
    """A block's hidden states after self-attention, before cross-attention; independent of the query."""

    hidden: Float[Tensor, "written width"]
    normed: Float[Tensor, "written width"]
    """``hidden`` at unit length, the input of cross-attention."""
    present: Float[Tensor, "two tokens rows inner"]
    """Keys and values of all tokens so far."""


class T5Decoder:
    """The generator, rearranged for fast inference on CPU and CUDA.

    It computes the same function with fewer and larger matrix products: the gains of norms are folded into
    the matrices that follow them and the projections of cross-attention into the prefixes of a query, and the
    keys and values of earlier tokens are cached. Dropout is never active.

    The weights are copied, so construct a new decoder after further training.
    """

    @torch.no_grad()
    def __init__(self, generator: Generator) -> None:
        w, like = generator.folded().weights, generator.embedding.weight

        def tensor(array: Float32[np.ndarray, ...]) -> Tensor:
            return torch.from_numpy(array).to(like)

        self.sizes: tuple[int, ...] = generator.sizes
        self._heads, self._num_prefixes, self._width = w.heads, w.prefixes, like.shape[1]
        self._blocks = tuple(_Weights(*map(tensor, block)) for block in w.blocks)
        self._prefix_weight, self._prefix_bias = tensor(w.prefix_weights), tensor(w.prefix_biases)
        self._prefix_keys_values, self._prefix_sides = tensor(w.prefix_keys_values), tensor(w.prefix_sides)
        self._rows = tensor(w.embeddings)
        self._level_rows = self._rows[1:].split(self.sizes)
        self._offsets = torch.tensor([*accumulate(self.sizes, initial=1)][:-1], device=self.device)
        self._level_heads = tuple(map(tensor, w.codes))
        self._special_head = tensor(w.specials)
        self._bias = generator.position_biases(len(self.sizes))[0].detach().clone()
        self._floor = torch.tensor((self._width * EPSILON) ** 0.5, device=self.device)
        self._opening = self._compute_opening()

    @property
    def device(self) -> torch.device:
        """Device of the computation."""
        return self._rows.device

    def start(
        self,
        queries: Float[Tensor, "queries dim"],
        level0: Level0 | None = None,  # noqa: ARG002  the generator is not asked for a modality
    ) -> T5State:
        """Return the initial state, before any token."""
        vectors = torch.addmm(self._prefix_bias, queries.detach(), self._prefix_weight)
        vectors = self._normed(vectors.view(-1, self._width))
        both = torch.mm(vectors, self._prefix_keys_values)
        both = both.view(len(both), len(self._prefix_sides), -1).transpose(0, 1)
        sides = torch.bmm(both, self._prefix_sides)
        sides = sides.view(
            len(self._blocks), 2, self._heads, len(queries), self._num_prefixes, self._width
        ).transpose(2, 3)
        prefixes = sides.reshape(len(self._blocks), 2, len(queries), -1, self._width)
        return T5State(level=0, prefixes=prefixes, past=(), rows=None)

    def advance(self, state: T5State, codes: Int64[Tensor, "rows tokens"]) -> DecoderStep:
        """Read codes, see :meth:`Decoder.advance`.

        ``hidden`` has unit length; the gain of the final norm is folded into the output matrices. Control
        flow depends on shapes only, so ``torch.compile(decoder.advance, fullgraph=True)`` works.
        """
        level = check_read(state, codes, len(self.sizes))
        rows, tokens = len(codes), level - state.level
        if self._opening is not None and state.level == 0 and tokens <= 2:
            attended = self._look_up_opening(self._opening, codes)
        else:
            attended = self._self_attend(0, state, self._embedded(state.level, codes), rows)
        hidden = self._cross_attend(0, attended, state.prefixes[0])
        past = [attended.present]
        for index in range(1, len(self._blocks)):
            attended = self._self_attend(index, state, hidden, rows)
            hidden = self._cross_attend(index, attended, state.prefixes[index])
            past.append(attended.present)
        after = T5State(level=level, prefixes=state.prefixes, past=tuple(past), rows=None)
        return DecoderStep(self._normed(hidden).view(rows, tokens, -1), after)

    def logits(self, hidden: Float[Tensor, "rows width"], level: int) -> Float[Tensor, "rows codes"]:
        """Return the unnormalised scores of one level's codes."""
        return torch.mm(hidden, self._level_heads[level]).float()

    def log_probabilities(
        self, hidden: Float[Tensor, "rows width"], level: int, scores: Literal["level", "vocabulary"]
    ) -> Float[Tensor, "rows codes"]:
        """Return log-probabilities of one level's codes, normalised over the level or the vocabulary."""
        logits = self.logits(hidden, level)
        if scores == "level":
            return torch.log_softmax(logits, dim=-1)
        others = (*self._level_heads[:level], *self._level_heads[level + 1 :], self._special_head)
        totals = [torch.mm(hidden, head).float().logsumexp(dim=-1) for head in others]
        return logits - torch.stack([logits.logsumexp(dim=-1), *totals]).logsumexp(dim=0)[:, None]

    def _normed(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        """Scale each row to unit length; the norm's gain, times √width, is folded into the next matrix."""
        length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        return hidden / torch.hypot(length, self._floor)

    def _embedded(self, level: int, codes: Int64[Tensor, "rows codes"]) -> Float[Tensor, "written width"]:
        first = max(level - 1, 0)
        count = codes.shape[1]
        if count == 1:
            written = F.embedding(codes, self._level_rows[first])
        else:
            written = F.embedding(codes + self._offsets[first : first + count], self._rows)
        if level == 0:
            written = torch.cat([self._rows[:1].expand(len(codes), 1, -1), written], dim=1)
        return written.view(-1, self._width)

    def _self_attend(
        self, index: int, state: T5State, hidden: Float[Tensor, "written width"], rows: int
    ) -> _SelfAttended:
        """Run the first part of a block: causal self-attention."""
        weights = self._blocks[index]
        inner = len(weights.token_out)
        projected = torch.mm(self._normed(hidden), weights.token).view(rows, -1, 3, inner)
        tokens = projected.shape[1]
        before = state.past[index] if state.past else None
        present = _append(before, state.rows, projected[:, :, 1:])
        total = present.shape[1]
        bias = self._bias[:, total - tokens : total, :total]
        head_width = inner // self._heads
        queries = projected[:, :, 0].reshape(rows, tokens, self._heads, head_width).transpose(1, 2)
        queries = queries.reshape(rows * self._heads, tokens, head_width)
        keys, values = present.view(2, total, rows * self._heads, head_width)
        scores = torch.bmm(queries, keys.permute(1, 2, 0)).view(rows, self._heads, tokens, total)
        shares = torch.softmax(scores.add_(bias), dim=-1).view(rows * self._heads, tokens, total)
        attended = torch.bmm(shares, values.transpose(0, 1)).view(rows, self._heads, tokens, head_width)
        attended = attended.transpose(1, 2).reshape(rows * tokens, inner)
        hidden = torch.addmm(hidden, attended, weights.token_out)
        return _SelfAttended(hidden, self._normed(hidden), present)

    def _cross_attend(
        self, index: int, attended: _SelfAttended, prefixes: Float[Tensor, "two queries looks width"]
    ) -> Float[Tensor, "written width"]:
        """Run the second part of a block: cross-attention, batched by query, and feed-forward."""
        weights = self._blocks[index]
        keys, values = prefixes
        count, per_query = len(keys), (len(keys), -1, self._width)
        scores = torch.bmm(attended.normed.view(per_query), keys.transpose(1, 2))
        shares = torch.softmax(scores.view(count, -1, self._heads, self._num_prefixes), dim=-1)
        hidden = torch.baddbmm(attended.hidden.view(per_query), shares.flatten(2), values).flatten(0, 1)
        inner = torch.mm(self._normed(hidden), weights.up).relu_()
        return torch.addmm(hidden, inner, weights.down)

    def _compute_opening(self) -> Float[Tensor, "codes tokens features"] | None:
        """Compute the first block's self-attention for the start token and each level-0 code."""
        if len(self.sizes) == 1 or self.sizes[0] > OPENING_CODES:
            return None
        codes = torch.arange(self.sizes[0], device=self.device)[:, None]
        fresh = T5State(level=0, prefixes=self._rows.new_empty(0), past=(), rows=None)
        attended = self._self_attend(0, fresh, self._embedded(0, codes), len(codes))
        present = attended.present.permute(2, 1, 0, 3).flatten(2)
        joined = torch.cat([attended.hidden, attended.normed, present.flatten(0, 1)], dim=1)
        return joined.view(len(codes), 2, -1)

    def _look_up_opening(self, opening: Tensor, codes: Int64[Tensor, "rows codes"]) -> _SelfAttended:
        """Look up the first block's self-attention for the start token, alone or with one code."""
        rows, count = codes.shape
        if count == 0:
            opened = opening[:1, :1].expand(rows, 1, -1)
        else:
            opened = opening.index_select(0, codes.flatten())
        inner = len(self._blocks[0].token_out)
        hidden, normed, present = opened.flatten(0, 1).split((self._width, self._width, 2 * inner), dim=1)
        return _SelfAttended(hidden, normed, present.view(rows, -1, 2, inner).permute(2, 1, 0, 3))


def _append(
    past: Float[Tensor, "two before rows_before inner"] | None,
    rows: Int64[Tensor, " rows"] | None,
    now: Float[Tensor, "rows tokens two inner"],
) -> Float[Tensor, "two after rows inner"]:
    """Append the keys and values of new tokens to those of the chosen rows."""
    new = now.permute(2, 1, 0, 3)
    if past is None:
        return new.contiguous()
    before = past.shape[1]
    present = past.new_empty(2, before + new.shape[1], *new.shape[2:])
    if rows is None:
        present[:, :before] = past
    else:
        for side in range(2):
            torch.index_select(past[side], 1, rows, out=present[side, :before])
    present[:, before:] = new
    return present


class GeometricState(NamedTuple):
    """State of a :class:`GeometricDecoder`."""

    level: int
    residuals: Float[Tensor, "rows dim"]
    """The query's embedding minus the vectors of the codes read; one row per query before the first token."""

    def select(
        self, queries: Int64[Tensor, " kept"] | None, rows: Int64[Tensor, "kept beams"]
    ) -> GeometricState:
        """Return the state of the chosen queries (None: all) and rows."""
        if self.level:
            return self._replace(residuals=self.residuals[rows.flatten()])
        return self if queries is None else self._replace(residuals=self.residuals[queries])


class GeometricDecoder:
    """Decoder without a network that prefers the IDs whose vectors are nearest to the query.

    With the residual r, a code with the vector e scores r·e − |e|²/2. Over the levels this adds up to
    (|q|² − |q − v|²) / 2, where v is the vector of the prefix, so prefixes are ranked by distance, as in
    quantization. The query is scaled first (:mod:`genius_search.nn.spread`). Beam search uses these scores in
    place of log-probabilities; they are not normalised.

    The vectors are copied, so construct a new decoder after further training.

    Parameters
    ----------
    tables
        the code vectors of each level.
    spread
        by which queries are scaled; if absent, they are not.
    """

    def __init__(self, tables: list[Float[Tensor, "_ dim"]], spread: Spread | None = None) -> None:
        self._spread = spread or Spread.none(len(tables[0]))
        self.sizes: tuple[int, ...] = tuple(len(table) for table in tables)
        self._vectors = torch.cat([table.detach().float() for table in tables])
        self._offsets = torch.tensor([0, *accumulate(self.sizes)][:-1], device=self.device)
        levels = self._vectors.split(self.sizes)
        self._columns = tuple(level.t().contiguous() for level in levels)
        self._costs = tuple(level.square().sum(dim=1) / -2 for level in levels)

    @property
    def device(self) -> torch.device:
        """Device of the computation."""
        return self._vectors.device

    def start(self, queries: Float[Tensor, "queries dim"], level0: Level0 | None = None) -> GeometricState:
        """Return the initial state, before any token."""
        queries = queries.detach().float()
        products = as_floats(queries @ self._columns[self._spread.level])
        scales = np.ones(len(queries), dtype=np.float32)
        given = [frozenset[int]()] * len(queries) if level0 is None else list(level0)
        for allowed in set(given):
            own = [number for number, one in enumerate(given) if one == allowed]
            scales[own] = self._spread.among(allowed).scale(products[own])
        return GeometricState(level=0, residuals=queries * torch.from_numpy(scales).to(queries)[:, None])

    def advance(self, state: GeometricState, codes: Int64[Tensor, "rows tokens"]) -> DecoderStep:
        """Read codes; ``hidden`` is the residual, which the next code's vector should approximate."""
        level = check_read(state, codes, len(self.sizes))
        rows, count = codes.shape
        first = max(state.level - 1, 0)
        vectors = F.embedding(codes + self._offsets[first : first + count], self._vectors)
        before = state.residuals.repeat_interleave(rows // max(len(state.residuals), 1), dim=0)
        residuals = torch.cat([before[:, None], -vectors], dim=1).cumsum(dim=1)
        hidden = residuals[:, 1:] if state.level else residuals
        return DecoderStep(hidden, GeometricState(level, hidden[:, -1]))

    def logits(self, hidden: Float[Tensor, "rows dim"], level: int) -> Float[Tensor, "rows codes"]:
        """Return the scores of one level's codes."""
        return torch.addmm(self._costs[level], hidden, self._columns[level])

    def log_probabilities(
        self,
        hidden: Float[Tensor, "rows dim"],
        level: int,
        scores: Literal["level", "vocabulary"],  # noqa: ARG002  nothing is normalised
    ) -> Float[Tensor, "rows codes"]:
        """Return the scores of one level's codes, which are not normalised."""
        return self.logits(hidden, level)


class GuidedState(NamedTuple):
    """State of a :class:`GuidedDecoder`."""

    generated: DecoderState
    geometric: DecoderState

    @property
    def level(self) -> int:
        """Number of tokens read, including the start token."""
        return self.generated.level

    def select(
        self, queries: Int64[Tensor, " kept"] | None, rows: Int64[Tensor, "kept beams"]
    ) -> GuidedState:
        """Return the state of the chosen queries (None: all) and rows."""
        return GuidedState(self.generated.select(queries, rows), self.geometric.select(queries, rows))


class GuidedDecoder:
    """Combines a generator's decoder with a :class:`GeometricDecoder`, as the guide does in training.

    The guide's weights are copied, so construct a new decoder after further training.

    Parameters
    ----------
    decoder
        the generator's decoder without its guide, in PyTorch or ONNX Runtime.
    guide
        the weights of both (:class:`genius_search.nn.generator.Guide`).
    spread
        by which queries are scaled.
    """

    @torch.no_grad()
    def __init__(self, decoder: Decoder, guide: Guide, spread: Spread | None = None) -> None:
        self._decoder = decoder
        self._geometry = GeometricDecoder(guide.tables(), spread)
        self.sizes: tuple[int, ...] = decoder.sizes
        self._dim = guide.vectors.shape[1]
        self._scales = guide.log_scale.exp().tolist()
        self._gates = guide.gate.tolist()
        self._biases = guide.bias.detach().clone().split(guide.sizes)

    @property
    def device(self) -> torch.device:
        """Device of the computation."""
        return self._decoder.device

    def start(self, queries: Float[Tensor, "queries dim"], level0: Level0 | None = None) -> GuidedState:
        """Return the initial state, before any token."""
        return GuidedState(self._decoder.start(queries, level0), self._geometry.start(queries, level0))

    def advance(self, state: Any, codes: Int64[Tensor, "rows tokens"]) -> DecoderStep:
        """Read codes; ``hidden`` is the generator's hidden state followed by the residual."""
        generated = self._decoder.advance(state.generated, codes)
        geometric = self._geometry.advance(state.geometric, codes)
        hidden = torch.cat([generated.hidden, geometric.hidden], dim=-1)
        return DecoderStep(hidden, GuidedState(generated.state, geometric.state))

    def logits(self, hidden: Float[Tensor, "rows width"], level: int) -> Float[Tensor, "rows codes"]:
        """Return the unnormalised scores of one level's codes."""
        generated, residual = hidden.split([hidden.shape[1] - self._dim, self._dim], dim=1)
        near = self._geometry.logits(residual, level).mul_(self._scales[level]).add_(self._biases[level])
        return near.add_(self._decoder.logits(generated, level), alpha=self._gates[level])

    def log_probabilities(
        self, hidden: Float[Tensor, "rows width"], level: int, scores: Literal["level", "vocabulary"]
    ) -> Float[Tensor, "rows codes"]:
        """Return the log-probabilities of one level's codes, normalised over the level.

        Raises
        ------
        UsageError
            ``scores`` is ``vocabulary``, which would compare distances at different levels.
        """
        if scores == "vocabulary":
            raise UsageError(
                "this model's generator is guided by geometry, level by level; its scores cannot be "
                'normalised over the whole vocabulary. Use scores="level"'
            )
        return torch.log_softmax(self.logits(hidden, level), dim=-1)
