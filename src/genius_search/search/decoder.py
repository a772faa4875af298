"""Decoders write IDs code by code: the generator's (paper, section 4.3), geometry alone, and both together.

Beam search needs nothing but the :class:`Decoder` protocol, so any other decoder may take their place.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Final, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from genius_search.errors import UsageError
from genius_search.nn.generator import NUM_SPECIAL, Block, Generator, Guide, RMSNorm


@runtime_checkable
class DecoderState(Protocol):
    """A batch of half-written IDs, a row for each beam, query after query. Only its decoder looks inside."""

    @property
    def level(self) -> int:
        """Number of tokens read, the start included: one more than the level that the last one predicted."""

    def select(
        self, queries: Int64[Tensor, " kept"] | None, rows: Int64[Tensor, "kept beams"]
    ) -> DecoderState:
        """Return the state of some queries (None: all), and of each some of its rows, in this order.

        ``rows`` are rows of this state, those of a query in its line; one may be continued more than once.
        """


class DecoderStep(NamedTuple):
    """A decoder's output after reading codes."""

    hidden: Float[Tensor, "rows tokens width"]
    """``hidden[:, t]`` predicts the level after token t."""
    state: DecoderState
    """The state after the last token."""


@runtime_checkable
class Decoder(Protocol):
    """A decoder of IDs."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of codes at each level."""

    @property
    def device(self) -> torch.device:
        """Device that it computes on."""

    def start(self, queries: Float[Tensor, "queries dim"]) -> DecoderState:
        """Return the state before any code."""

    def advance(self, state: Any, codes: Int64[Tensor, "rows tokens"]) -> DecoderStep:
        """Read the codes of level ``state.level − 1`` and on; each sees those before it.

        ``state`` is one of the decoder's own. On a fresh one the start token is read first, so no code gives
        what predicts level 0, and one code what predicts levels 0 and 1; it may be continued by several rows
        of each query, equally many and next to one another.

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
    """Return the level of a state after reading codes, if they can be read."""
    level = state.level + codes.shape[1] + (state.level == 0)
    if level == state.level or level > num_levels:
        raise UsageError(
            f"{codes.shape[1]} codes after {state.level} tokens of an ID of {num_levels} levels; the start "
            "and the code of each level but the last are read, at least one at a time"
        )
    return level


EPSILON: Final = 1e-6
"""T5's norm adds it to the mean square."""
OPENING_CODES: Final = 64
"""With up to so many codes at level 0, self-attention of the first block is computed once for all queries."""


class T5State(NamedTuple):
    """Half-written IDs of a :class:`T5Decoder`."""

    level: int
    prefixes: Float[Tensor, "blocks two queries looks width"]
    """What each block compares a token with, for each head and prefix vector of a query (a look), and what it
    then adds to the token."""
    past: tuple[Float[Tensor, "two tokens rows inner"], ...]
    """Keys and values of the tokens, by block; empty before the first."""
    rows: Int64[Tensor, " rows"] | None
    """Rows of ``past`` that the beams continue; None: all of them. They are copied when next needed."""

    def select(self, queries: Int64[Tensor, " kept"] | None, rows: Int64[Tensor, "kept beams"]) -> T5State:
        """Return the state of some queries (None: all, without a copy), and of each some of its rows."""
        state = self if queries is None else self._replace(prefixes=self.prefixes.index_select(2, queries))
        if not self.past:
            return state
        flat = rows.flatten()
        return state._replace(rows=flat if self.rows is None else self.rows[flat])


class _Weights(NamedTuple):
    """The matrices of one block, each to be multiplied from the right."""

    token: Float[Tensor, "width three_inner"]
    """Queries, keys and values of self-attention."""
    token_out: Float[Tensor, "inner width"]
    up: Float[Tensor, "width feedforward"]
    down: Float[Tensor, "feedforward width"]


class _SelfAttended(NamedTuple):
    """A block after self-attention and before cross-attention; no query has been seen in it yet."""

    hidden: Float[Tensor, "written width"]
    normed: Float[Tensor, "written width"]
    """The same at unit length, to be compared with the prefixes."""
    present: Float[Tensor, "two tokens rows inner"]
    """Keys and values of all tokens so far."""


class T5Decoder:
    """The generator laid out for search; the same code on CPU and CUDA, dropout never active.

    It computes what the generator does with fewer and larger products: gains of norms are multiplied into the
    matrices that follow them, projections of cross-attention into the prefixes of a query, keys and values of
    earlier tokens are kept.

    It holds copies of the weights: make it anew after training further.
    """

    @torch.no_grad()
    def __init__(self, generator: Generator) -> None:
        config = generator.config
        self.sizes: tuple[int, ...] = generator.sizes
        self._heads = config.heads
        self._width = config.width
        self._num_prefixes = config.prefixes
        blocks = generator.decoder_blocks()
        self._blocks = tuple(
            _Weights(
                token=_fold_norm(
                    block.self_norm, block.self_attention.q, block.self_attention.k, block.self_attention.v
                ),
                token_out=_transposed(block.self_attention.o.weight),
                up=_fold_norm(block.feedforward_norm, block.wi),
                down=_transposed(block.wo.weight),
            )
            for block in blocks
        )
        projection = generator.prefix_projection
        self._prefix_weight = _transposed(projection.weight)
        self._prefix_bias = projection.bias.detach().clone()
        layers = (layer for block in blocks for layer in (block.cross_attention.k, block.cross_attention.v))
        self._prefix_keys_values = _fold_norm(generator.prefix_norm, *layers)
        self._prefix_sides = torch.cat([_cross_projections(block, config.heads) for block in blocks])
        bounds = [(start, start + size) for start, size in zip(generator.offsets, self.sizes, strict=True)]
        self._rows = generator.embedding.weight.detach().clone()
        self._level_rows = tuple(self._rows[start:stop] for start, stop in bounds)
        self._offsets = torch.tensor(generator.offsets, device=self.device)
        head = self._rows if generator.head is None else generator.head.weight
        gain = generator.final_norm.weight * (1.0 if generator.head is None else config.width**0.5)
        self._level_heads = tuple(_transposed(head[start:stop] * gain) for start, stop in bounds)
        self._special_head = _transposed(head[:NUM_SPECIAL] * gain)
        self._bias = generator.position_biases(len(self.sizes))[0].detach().clone()
        self._floor = torch.tensor((config.width * EPSILON) ** 0.5, device=self.device)
        self._opening = self._compute_opening()

    @property
    def device(self) -> torch.device:
        """Device that it computes on."""
        return self._rows.device

    def start(self, queries: Float[Tensor, "queries dim"]) -> T5State:
        """Return the state before any code."""
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
        """Read codes, as :meth:`Decoder.advance` says; ``hidden`` is of unit length, the rest is in the head.

        Nothing depends on what tensors hold, so that this can be traced into one graph by
        ``torch.compile(decoder.advance, fullgraph=True)`` for each shape.
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
        """Return the log-probabilities of one level's codes, among them or in the whole vocabulary."""
        logits = self.logits(hidden, level)
        if scores == "level":
            return torch.log_softmax(logits, dim=-1)
        others = (*self._level_heads[:level], *self._level_heads[level + 1 :], self._special_head)
        totals = [torch.mm(hidden, head).float().logsumexp(dim=-1) for head in others]
        return logits - torch.stack([logits.logsumexp(dim=-1), *totals]).logsumexp(dim=0)[:, None]

    def _normed(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        """Scale each row to unit length; the norm's gain, times √width, is in the matrix that follows."""
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
        """Run the first part of a block: each row looks at its own tokens, up to the current one."""
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
        """Run the rest of a block: cross-attention, all tokens of a query at once, and feed-forward."""
        weights = self._blocks[index]
        keys, values = prefixes
        count, per_query = len(keys), (len(keys), -1, self._width)
        scores = torch.bmm(attended.normed.view(per_query), keys.transpose(1, 2))
        shares = torch.softmax(scores.view(count, -1, self._heads, self._num_prefixes), dim=-1)
        hidden = torch.baddbmm(attended.hidden.view(per_query), shares.flatten(2), values).flatten(0, 1)
        inner = torch.mm(self._normed(hidden), weights.up).relu_()
        return torch.addmm(hidden, inner, weights.down)

    def _compute_opening(self) -> Float[Tensor, "codes tokens features"] | None:
        """Compute the first block's self-attention for the start and each code of level 0."""
        if len(self.sizes) == 1 or self.sizes[0] > OPENING_CODES:
            return None
        codes = torch.arange(self.sizes[0], device=self.device)[:, None]
        fresh = T5State(level=0, prefixes=self._rows.new_empty(0), past=(), rows=None)
        attended = self._self_attend(0, fresh, self._embedded(0, codes), len(codes))
        present = attended.present.permute(2, 1, 0, 3).flatten(2)
        joined = torch.cat([attended.hidden, attended.normed, present.flatten(0, 1)], dim=1)
        return joined.view(len(codes), 2, -1)

    def _look_up_opening(self, opening: Tensor, codes: Int64[Tensor, "rows codes"]) -> _SelfAttended:
        """Look up the first block's self-attention for the start alone, or the start and one code."""
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
    """Return the keys and values of the chosen rows with those of the new tokens behind them."""
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


def _cross_projections(block: Block, heads: int) -> Float[Tensor, "two_heads head_width width"]:
    """Return the matrices that turn a prefix's keys and values into the space of tokens.

    So tokens need no projections in cross-attention: they are multiplied into the prefixes of a query once.
    """
    cross = block.cross_attention
    query = (cross.q.weight * block.cross_norm.weight * block.cross_norm.weight.numel() ** 0.5).detach()
    out = cross.o.weight.detach().t()
    return torch.cat([matrix.unflatten(0, (heads, -1)) for matrix in (query, out)])


def _fold_norm(norm: RMSNorm, *layers: nn.Linear) -> Float[Tensor, "width out"]:
    """Return the joint matrix of layers behind a norm, to be applied to rows of unit length instead."""
    gain = norm.weight * len(norm.weight) ** 0.5
    return _transposed(torch.cat([layer.weight for layer in layers]) * gain)


def _transposed(weight: Float[Tensor, "out in"]) -> Float[Tensor, "in out"]:
    """Transpose in memory: a few rows are multiplied by it up to twice as fast."""
    return weight.detach().t().contiguous()


class GeometricState(NamedTuple):
    """Half-written IDs of a :class:`GeometricDecoder`."""

    level: int
    residuals: Float[Tensor, "rows dim"]
    """Each query's embedding minus the vectors of its codes; before the first token a row for each query."""

    def select(
        self, queries: Int64[Tensor, " kept"] | None, rows: Int64[Tensor, "kept beams"]
    ) -> GeometricState:
        """Return the state of some queries (None: all), and of each some of its rows."""
        if self.level:
            return self._replace(residuals=self.residuals[rows.flatten()])
        return self if queries is None else self._replace(residuals=self.residuals[queries])


class GeometricDecoder:
    """Writes the IDs whose vectors, the sums of their codes' vectors, are nearest to the query.

    With the residual r and a code vector e, the code gains r·e − |e|²/2. Over the levels that adds up to
    (|q|² − |q − v|²) / 2, where v is the prefix's vector: the order by distance, as the quantizer chose the
    codes. Gains stand where beam search expects log-probabilities, without being normalised.

    It copies the vectors: make it anew after training further.

    Parameters
    ----------
    tables
        the code vectors of each level.
    """

    def __init__(self, tables: list[Float[Tensor, "_ dim"]]) -> None:
        self.sizes: tuple[int, ...] = tuple(len(table) for table in tables)
        self._vectors = torch.cat([table.detach().float() for table in tables])
        self._offsets = torch.tensor([0, *accumulate(self.sizes)][:-1], device=self.device)
        levels = self._vectors.split(self.sizes)
        self._columns = tuple(level.t().contiguous() for level in levels)
        self._costs = tuple(level.square().sum(dim=1) / -2 for level in levels)

    @property
    def device(self) -> torch.device:
        """Device that it computes on."""
        return self._vectors.device

    def start(self, queries: Float[Tensor, "queries dim"]) -> GeometricState:
        """Return the state before any code."""
        return GeometricState(level=0, residuals=queries.detach().float())

    def advance(self, state: GeometricState, codes: Int64[Tensor, "rows tokens"]) -> DecoderStep:
        """Read codes; ``hidden`` is the residual that the next code's vector should be near to."""
        level = check_read(state, codes, len(self.sizes))
        rows, count = codes.shape
        first = max(state.level - 1, 0)
        vectors = F.embedding(codes + self._offsets[first : first + count], self._vectors)
        before = state.residuals.repeat_interleave(rows // max(len(state.residuals), 1), dim=0)
        residuals = torch.cat([before[:, None], -vectors], dim=1).cumsum(dim=1)
        hidden = residuals[:, 1:] if state.level else residuals
        return DecoderStep(hidden, GeometricState(level, hidden[:, -1]))

    def logits(self, hidden: Float[Tensor, "rows dim"], level: int) -> Float[Tensor, "rows codes"]:
        """Return what each code of a level gains."""
        return torch.addmm(self._costs[level], hidden, self._columns[level])

    def log_probabilities(
        self,
        hidden: Float[Tensor, "rows dim"],
        level: int,
        scores: Literal["level", "vocabulary"],  # noqa: ARG002  nothing is normalised
    ) -> Float[Tensor, "rows codes"]:
        """Return the same; gains are not normalised."""
        return self.logits(hidden, level)


class GuidedState(NamedTuple):
    """Half-written IDs of a :class:`GuidedDecoder`."""

    generated: DecoderState
    geometric: DecoderState

    @property
    def level(self) -> int:
        """Number of tokens read, the start included."""
        return self.generated.level

    def select(
        self, queries: Int64[Tensor, " kept"] | None, rows: Int64[Tensor, "kept beams"]
    ) -> GuidedState:
        """Return the state of some queries (None: all), and of each some of its rows."""
        return GuidedState(self.generated.select(queries, rows), self.geometric.select(queries, rows))


class GuidedDecoder:
    """A generator that starts from geometry: its decoder and nearness in step, as in training.

    It copies the guide's weights: make it anew after training further.

    Parameters
    ----------
    decoder
        the generator's, without its guide: PyTorch's or ONNX Runtime's.
    guide
        what weighs the two (:class:`genius_search.nn.generator.Guide`).
    """

    @torch.no_grad()
    def __init__(self, decoder: Decoder, guide: Guide) -> None:
        self._decoder = decoder
        self._geometry = GeometricDecoder(guide.tables())
        self.sizes: tuple[int, ...] = decoder.sizes
        self._dim = guide.vectors.shape[1]
        self._scales = guide.log_scale.exp().tolist()
        self._gates = guide.gate.tolist()
        self._biases = guide.bias.detach().clone().split(guide.sizes)

    @property
    def device(self) -> torch.device:
        """Device that it computes on."""
        return self._decoder.device

    def start(self, queries: Float[Tensor, "queries dim"]) -> GuidedState:
        """Return the state before any code."""
        return GuidedState(self._decoder.start(queries), self._geometry.start(queries))

    def advance(self, state: Any, codes: Int64[Tensor, "rows tokens"]) -> DecoderStep:
        """Read codes; ``hidden`` is the generator's, then the residual."""
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
            They are to be normalised over the whole vocabulary, where distances at different levels would be
            compared.
        """
        if scores == "vocabulary":
            raise UsageError(
                "this model's generator is guided by geometry, level by level; its scores cannot be "
                "normalised over the whole vocabulary. Use --scores level (or children)"
            )
        return torch.log_softmax(self.logits(hidden, level), dim=-1)
