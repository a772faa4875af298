"""A generator that starts from geometry, laid out for search: two decoders in step.

What the generator's decoder says and how near the code vectors are (``search/geometry.py``) become one, as
in training (``models/guide.py``). Either decoder may be any that beam search takes.
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
class DecodingState(Protocol):
    """A half-written batch of IDs; rows are places of beams, query after query."""

    @property
    def level(self) -> int:
        """Tokens read: the start, then codes; so the level that the last of them foretold, plus one."""

    def select(
        self, queries: Int64[Tensor, " kept"] | None, rows: Int64[Tensor, "kept beams"]
    ) -> DecodingState:
        """The state of these queries (None: of all), and for each of them of these of its rows."""


@runtime_checkable
class DecodingStep(Protocol):
    """What a decoder says after reading codes."""

    @property
    def hidden(self) -> Float[Tensor, "rows tokens width"]:
        """Of each row and token: what follows it."""

    @property
    def state(self) -> DecodingState:
        """What later steps need."""


@runtime_checkable
class Decoding(Protocol):
    """A decoder of IDs."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Codes at each level."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    def start(self, queries: Float[Tensor, "queries dim"]) -> DecodingState:
        """The state before any code."""

    def advance(self, state: Any, codes: Int64[Tensor, "rows tokens"]) -> DecodingStep:
        """Read codes; on a fresh state the start token comes before them.

        ``state`` is one of its own. A fresh one may be continued by several rows of each query, equally many.
        """

    def logits(self, hidden: Float[Tensor, "rows width"], level: int) -> Float[Tensor, "rows codes"]:
        """Of one level's codes."""

    def log_probabilities(
        self, hidden: Float[Tensor, "rows width"], level: int, scores: Literal["level", "vocabulary"]
    ) -> Float[Tensor, "rows codes"]:
        """Of one level's codes, normalised over the level or over the whole vocabulary."""


EPSILON: Final = 1e-6
"""Of T5's norm."""
OPENING_CODES: Final = 64
"""Up to so many codes at level 0, what the first block makes of each is computed once for all queries."""


class DecoderState(NamedTuple):
    """Half-written IDs: what later levels need of the earlier ones. Nobody looks inside but the decoder."""

    level: int
    """Tokens written so far; the last of them predicts level ``level − 1``."""
    prefixes: Float[Tensor, "blocks two queries looks width"]
    """What each block compares a token with, for each head and prefix of a query (a look), and what it then
    adds to the token."""
    past: tuple[Float[Tensor, "two tokens rows inner"], ...]
    """Keys and values of the tokens, by block; empty before the first."""
    rows: Int64[Tensor, " rows"] | None
    """Rows of ``past`` that the beams continue, in order; None: all of them. Copied when next needed."""

    def select(
        self, queries: Int64[Tensor, " kept"] | None, rows: Int64[Tensor, "kept width"]
    ) -> DecoderState:
        """The state of some queries, and of each some of its beams, in this order.

        Parameters
        ----------
        queries
            which are kept; None: all, which saves copying what their prefixes say.
        rows
            for each kept query the beams to continue, as rows of this state (those of a query are
            neighbours); a beam may be continued more than once.
        """
        state = self
        if queries is not None:
            state = self._replace(prefixes=self.prefixes.index_select(2, queries))
        if not self.past:
            return state
        flat = rows.flatten()
        return state._replace(rows=flat if self.rows is None else self.rows[flat])


class Step(NamedTuple):
    """What the decoder says after each token it was given, and the state after the last."""

    hidden: Float[Tensor, "rows tokens width"]
    """``hidden[:, t]`` predicts the level after token t; of unit length, the rest is in the head."""
    state: DecoderState


class _Block(NamedTuple):
    """One block's matrices, each to be multiplied from the right."""

    token: Float[Tensor, "width three_inner"]
    """Queries, keys and values of self-attention."""
    token_out: Float[Tensor, "inner width"]
    up: Float[Tensor, "width feedforward"]
    down: Float[Tensor, "feedforward width"]


class _Asked(NamedTuple):
    """A block after self-attention, before it looks at the prefixes; no query has been seen in it yet."""

    hidden: Float[Tensor, "written width"]
    normed: Float[Tensor, "written width"]
    """The same at unit length, to be compared with the prefixes."""
    present: Float[Tensor, "two tokens rows inner"]
    """Keys and values of all tokens so far."""


class Decoder:
    """A generator ready to search; same code on CPU and CUDA, dropout never active.

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
        self._blocks = tuple(_block(block) for block in blocks)
        projection = generator.prefix_projection
        self._prefix_weight = _columns(projection.weight)
        self._prefix_bias = projection.bias.detach().clone()
        layers = (layer for block in blocks for layer in (block.cross_attention.k, block.cross_attention.v))
        self._prefix_keys_values = _behind(generator.prefix_norm, *layers)
        self._prefix_sides = torch.cat([_sides(block, config.heads) for block in blocks])
        bounds = [(start, start + size) for start, size in zip(generator.offsets, self.sizes, strict=True)]
        self._rows = generator.embedding.weight.detach().clone()
        self._level_rows = tuple(self._rows[start:stop] for start, stop in bounds)
        self._offsets = torch.tensor(generator.offsets, device=self.device)
        head = self._rows if generator.head is None else generator.head.weight
        gain = generator.final_norm.weight * (1.0 if generator.head is None else config.width**0.5)
        self._level_heads = tuple(_columns(head[start:stop] * gain) for start, stop in bounds)
        self._special_head = _columns(head[:NUM_SPECIAL] * gain)
        self._bias = generator.position_biases(len(self.sizes))[0].detach().clone()
        self._floor = torch.tensor((config.width * EPSILON) ** 0.5, device=self.device)
        self._opening = self._opened()

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._rows.device

    def start(self, queries: Float[Tensor, "queries dim"]) -> DecoderState:
        """The state before anything is written."""
        vectors = torch.addmm(self._prefix_bias, queries.detach(), self._prefix_weight)
        vectors = self._normed(vectors.view(-1, self._width))
        both = torch.mm(vectors, self._prefix_keys_values)
        both = both.view(len(both), len(self._prefix_sides), -1).transpose(0, 1)
        sides = torch.bmm(both, self._prefix_sides)
        sides = sides.view(
            len(self._blocks), 2, self._heads, len(queries), self._num_prefixes, self._width
        ).transpose(2, 3)
        prefixes = sides.reshape(len(self._blocks), 2, len(queries), -1, self._width)
        return DecoderState(level=0, prefixes=prefixes, past=(), rows=None)

    def advance(self, state: DecoderState, codes: Int64[Tensor, "rows tokens"]) -> Step:
        """Write these codes behind what is written: the code of level ``state.level − 1`` and on.

        Rows are queries × beams, those of a query being neighbours. In a fresh state the start token is put
        in front, so no code gives what level 0 predicts, and one code what levels 0 and 1 predict. Several
        codes see those before them, not those behind.

        Nothing depends on what tensors hold, so that this can be traced into one graph by
        ``torch.compile(decoder.advance, fullgraph=True)`` for each shape.
        """
        rows, tokens = len(codes), codes.shape[1] + (0 if state.level else 1)
        level = state.level + tokens
        if tokens < 1 or level > len(self.sizes):
            raise UsageError(
                f"{codes.shape[1]} codes after {state.level} tokens of an ID of {len(self.sizes)} levels; "
                "the start and the code of each level but the last are written, at least one at a time"
            )
        if self._opening is not None and state.level == 0 and tokens <= 2:
            asked = self._look_up(self._opening, codes)
        else:
            asked = self._ask(0, state, self._embedded(state.level, codes), rows)
        hidden = self._answer(0, asked, state.prefixes[0])
        past = [asked.present]
        for index in range(1, len(self._blocks)):
            asked = self._ask(index, state, hidden, rows)
            hidden = self._answer(index, asked, state.prefixes[index])
            past.append(asked.present)
        written = DecoderState(level=level, prefixes=state.prefixes, past=tuple(past), rows=None)
        return Step(self._normed(hidden).view(rows, tokens, -1), written)

    def logits(self, hidden: Float[Tensor, "rows width"], level: int) -> Float[Tensor, "rows codes"]:
        """Unnormalised scores of one level's codes."""
        return torch.mm(hidden, self._level_heads[level]).float()

    def log_probabilities(
        self, hidden: Float[Tensor, "rows width"], level: int, scores: Literal["level", "vocabulary"]
    ) -> Float[Tensor, "rows codes"]:
        """Log-probabilities of one level's codes, normalised over the level or the whole vocabulary."""
        logits = self.logits(hidden, level)
        if scores == "level":
            return torch.log_softmax(logits, dim=-1)
        others = (*self._level_heads[:level], *self._level_heads[level + 1 :], self._special_head)
        totals = [torch.mm(hidden, head).float().logsumexp(dim=-1) for head in others]
        return logits - torch.stack([logits.logsumexp(dim=-1), *totals]).logsumexp(dim=0)[:, None]

    def _normed(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        """Each row at unit length; the norm's weight, times √width, is in the matrix that follows."""
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

    def _ask(
        self, index: int, state: DecoderState, hidden: Float[Tensor, "written width"], rows: int
    ) -> _Asked:
        """The first half of a block: self-attention."""
        block = self._blocks[index]
        mixed = torch.mm(self._normed(hidden), block.token).view(rows, -1, 3, block.token.shape[1] // 3)
        before = state.past[index] if state.past else None
        present = _appended(before, state.rows, mixed[:, :, 1:])
        attended = self._look_back(mixed[:, :, 0], present)
        hidden = torch.addmm(hidden, attended, block.token_out)
        return _Asked(hidden, self._normed(hidden), present)

    def _answer(
        self, index: int, asked: _Asked, prefixes: Float[Tensor, "two queries looks width"]
    ) -> Float[Tensor, "written width"]:
        """The second half: cross-attention and feed-forward.

        All tokens of a query's beams look at its prefixes in one product.
        """
        block = self._blocks[index]
        keys, values = prefixes
        count, per_query = len(keys), (len(keys), -1, self._width)
        scores = torch.bmm(asked.normed.view(per_query), keys.transpose(1, 2))
        shares = torch.softmax(scores.view(count, -1, self._heads, self._num_prefixes), dim=-1)
        hidden = torch.baddbmm(asked.hidden.view(per_query), shares.flatten(2), values).flatten(0, 1)
        inner = torch.mm(self._normed(hidden), block.up).relu_()
        return torch.addmm(hidden, inner, block.down)

    def _opened(self) -> Float[Tensor, "codes tokens features"] | None:
        """What the first block asks after the start and each code of level 0; no query changes it."""
        if len(self.sizes) == 1 or self.sizes[0] > OPENING_CODES:
            return None
        codes = torch.arange(self.sizes[0], device=self.device)[:, None]
        nothing = self._rows.new_empty(0)
        fresh = DecoderState(level=0, prefixes=nothing, past=(), rows=None)
        asked = self._ask(0, fresh, self._embedded(0, codes), len(codes))
        present = asked.present.permute(2, 1, 0, 3).flatten(2)
        joined = torch.cat([asked.hidden, asked.normed, present.flatten(0, 1)], dim=1)
        return joined.view(len(codes), 2, -1)

    def _look_up(self, opening: Tensor, codes: Int64[Tensor, "rows codes"]) -> _Asked:
        """What the first block asks after the start alone, or the start and one code."""
        rows, count = codes.shape
        if count == 0:
            opened = opening[:1, :1].expand(rows, 1, -1)
        else:
            opened = opening.index_select(0, codes.flatten())
        inner = len(self._blocks[0].token_out)
        hidden, normed, present = opened.flatten(0, 1).split((self._width, self._width, 2 * inner), dim=1)
        return _Asked(hidden, normed, present.view(rows, -1, 2, inner).permute(2, 1, 0, 3))

    def _look_back(
        self, asked: Float[Tensor, "rows tokens inner"], present: Float[Tensor, "two total rows inner"]
    ) -> Float[Tensor, "written inner"]:
        """Self-attention: each row looks at its own tokens, up to itself."""
        rows, tokens, inner = asked.shape
        total = present.shape[1]
        bias = self._bias[:, total - tokens : total, :total]
        head_width = inner // self._heads
        queries = asked.reshape(rows, tokens, self._heads, head_width).transpose(1, 2)
        queries = queries.reshape(rows * self._heads, tokens, head_width)
        keys, values = present.view(2, total, rows * self._heads, head_width)
        scores = torch.bmm(queries, keys.permute(1, 2, 0)).view(rows, self._heads, tokens, total)
        shares = torch.softmax(scores.add_(bias), dim=-1).view(rows * self._heads, tokens, total)
        attended = torch.bmm(shares, values.transpose(0, 1)).view(rows, self._heads, tokens, head_width)
        return attended.transpose(1, 2).reshape(rows * tokens, inner)


def _appended(
    past: Float[Tensor, "two before rows_before inner"] | None,
    rows: Int64[Tensor, " rows"] | None,
    now: Float[Tensor, "rows tokens two inner"],
) -> Float[Tensor, "two after rows inner"]:
    """Keys and values of the chosen rows with the new tokens behind them."""
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


def _block(block: Block) -> _Block:
    attention = block.self_attention
    return _Block(
        token=_behind(block.self_norm, attention.q, attention.k, attention.v),
        token_out=_columns(attention.o.weight),
        up=_behind(block.feedforward_norm, block.wi),
        down=_columns(block.wo.weight),
    )


def _sides(block: Block, heads: int) -> Float[Tensor, "two_heads head_width width"]:
    """From a prefix's keys to what a token is compared with, and from its values to what it is given."""
    cross = block.cross_attention
    asking = (cross.q.weight * block.cross_norm.weight * block.cross_norm.weight.numel() ** 0.5).detach()
    giving = cross.o.weight.detach().t()
    return torch.cat([matrix.unflatten(0, (heads, -1)) for matrix in (asking, giving)])


def _behind(norm: RMSNorm, *layers: nn.Linear) -> Float[Tensor, "width out"]:
    """The matrix of these layers for rows of unit length in place of normed ones."""
    gain = norm.weight * len(norm.weight) ** 0.5
    return _columns(torch.cat([layer.weight for layer in layers]) * gain)


def _columns(weight: Float[Tensor, "out in"]) -> Float[Tensor, "in out"]:
    """Transposed in memory: a few rows multiply it up to twice as fast."""
    return weight.detach().t().contiguous()


class GeometricState(NamedTuple):
    """Half-written IDs: what of the query no code read so far explains."""

    level: int
    """Tokens read: the start, then codes."""
    residuals: Float[Tensor, "rows dim"]
    """Each query's embedding less the vectors of its codes; before the first token a row for each query."""

    def select(
        self, queries: Int64[Tensor, " kept"] | None, rows: Int64[Tensor, "kept beams"]
    ) -> GeometricState:
        """The state of these queries (None: of all), and for each of them of these of its rows."""
        if self.level:
            return self._replace(residuals=self.residuals[rows.flatten()])
        return self if queries is None else self._replace(residuals=self.residuals[queries])


class GeometricStep(NamedTuple):
    """What follows each code that was read, and the state after the last."""

    hidden: Float[Tensor, "rows tokens dim"]
    """The residual that the next code's vector should be near to."""
    state: GeometricState


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
        """Where it computes."""
        return self._vectors.device

    def start(self, queries: Float[Tensor, "queries dim"]) -> GeometricState:
        """The state before any code."""
        return GeometricState(level=0, residuals=queries.detach().float())

    def advance(self, state: GeometricState, codes: Int64[Tensor, "rows tokens"]) -> GeometricStep:
        """Read codes; on a fresh state the start token comes before them.

        A fresh state may be continued by several rows of each query, equally many; those of a query are
        neighbours.
        """
        rows, count = codes.shape
        is_fresh = state.level == 0
        level = state.level + count + is_fresh
        if level == state.level or level > len(self.sizes):
            raise UsageError(
                f"{count} codes after {state.level} tokens of an ID of {len(self.sizes)} levels; the start "
                "and the code of each level but the last are read, at least one at a time"
            )
        first = max(state.level - 1, 0)
        vectors = F.embedding(codes + self._offsets[first : first + count], self._vectors)
        before = state.residuals.repeat_interleave(rows // max(len(state.residuals), 1), dim=0)
        residuals = torch.cat([before[:, None], -vectors], dim=1).cumsum(dim=1)
        hidden = residuals if is_fresh else residuals[:, 1:]
        return GeometricStep(hidden, GeometricState(level, hidden[:, -1]))

    def logits(self, hidden: Float[Tensor, "rows dim"], level: int) -> Float[Tensor, "rows codes"]:
        """What each code of a level gains."""
        return torch.addmm(self._costs[level], hidden, self._columns[level])

    def log_probabilities(
        self,
        hidden: Float[Tensor, "rows dim"],
        level: int,
        scores: Literal["level", "vocabulary"],  # noqa: ARG002  nothing is normalised
    ) -> Float[Tensor, "rows codes"]:
        """The same, however they are asked for."""
        return self.logits(hidden, level)


class GuidedState(NamedTuple):
    """Half-written IDs, as both see them."""

    written: DecodingState
    located: DecodingState

    @property
    def level(self) -> int:
        """Tokens read: the start, then codes."""
        return self.written.level

    def select(
        self, queries: Int64[Tensor, " kept"] | None, rows: Int64[Tensor, "kept beams"]
    ) -> GuidedState:
        """The state of these queries (None: of all), and for each of them of these of its rows."""
        return GuidedState(self.written.select(queries, rows), self.located.select(queries, rows))


class GuidedStep(NamedTuple):
    """What follows each code that was read, and the state after the last."""

    hidden: Float[Tensor, "rows tokens width"]
    """What the decoder says, then what is left of the query's embedding."""
    state: GuidedState


class GuidedDecoder:
    """A decoder and its guide.

    It copies the guide's numbers: make it anew after training further.

    Parameters
    ----------
    decoder
        the generator's, without its guide: PyTorch's or ONNX Runtime's.
    """

    @torch.no_grad()
    def __init__(self, decoder: Decoding, guide: Guide) -> None:
        self._decoder = decoder
        self._geometry = GeometricDecoder(guide.tables())
        self.sizes: tuple[int, ...] = decoder.sizes
        self._dim = guide.vectors.shape[1]
        self._scales = guide.log_scale.exp().tolist()
        self._gates = guide.gate.tolist()
        self._biases = guide.bias.detach().clone().split(guide.sizes)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._decoder.device

    def start(self, queries: Float[Tensor, "queries dim"]) -> GuidedState:
        """The state before any code."""
        return GuidedState(self._decoder.start(queries), self._geometry.start(queries))

    def advance(self, state: Any, codes: Int64[Tensor, "rows tokens"]) -> GuidedStep:
        """Read codes; on a fresh state the start token comes before them."""
        written = self._decoder.advance(state.written, codes)
        located = self._geometry.advance(state.located, codes)
        hidden = torch.cat([written.hidden, located.hidden], dim=-1)
        return GuidedStep(hidden, GuidedState(written.state, located.state))

    def logits(self, hidden: Float[Tensor, "rows width"], level: int) -> Float[Tensor, "rows codes"]:
        """Of one level's codes."""
        said, left = hidden.split([hidden.shape[1] - self._dim, self._dim], dim=1)
        near = self._geometry.logits(left, level).mul_(self._scales[level]).add_(self._biases[level])
        return near.add_(self._decoder.logits(said, level), alpha=self._gates[level])

    def log_probabilities(
        self, hidden: Float[Tensor, "rows width"], level: int, scores: Literal["level", "vocabulary"]
    ) -> Float[Tensor, "rows codes"]:
        """Of one level's codes, normalised over the level.

        Raises
        ------
        UsageError
            it is asked to normalise over the whole vocabulary, where distances at different levels would
            be compared.
        """
        if scores == "vocabulary":
            raise UsageError(
                "this model's generator is guided by geometry, level by level; its scores cannot be "
                "normalised over the whole vocabulary. Use --scores level (or children)"
            )
        return torch.log_softmax(self.logits(hidden, level), dim=-1)
