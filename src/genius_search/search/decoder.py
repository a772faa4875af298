"""Decoders that predict IDs code by code: the geometric one, and the generator's with its guide.

A :class:`genius_search.nn.generator.Generator` without a guide is a decoder itself (paper, section 4.3). Beam
search only uses the :class:`Decoder` protocol, so any other decoder can take their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from genius_search.errors import UsageError
from genius_search.nn.codebooks import as_floats
from genius_search.nn.generator import DecoderStep, Generator, GeneratorState
from genius_search.nn.spread import Spread

Level0: TypeAlias = Sequence[frozenset[int]]
"""Allowed level-0 codes of each query; empty means any."""


@runtime_checkable
class Decoder(Protocol):
    """A decoder of IDs.

    Its state has one row per beam, query after query, and a method ``select(queries, rows)``, which returns
    the state of the chosen queries (None: all) and rows, in this order. ``rows`` has one line per kept query,
    with row numbers of the state; a row may occur repeatedly.
    """

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of codes at each level."""

    @property
    def device(self) -> torch.device:
        """Device of the computation."""

    def start(self, queries: Float[Tensor, "queries dim"], level0: Level0 | None = None) -> Any:
        """Return the initial state, before any token.

        Parameters
        ----------
        level0
            allowed level-0 codes of each query; empty means any, as None does for all queries.
        """

    def advance(self, state: Any, codes: Int64[Tensor, "rows tokens"]) -> DecoderStep:
        """Read further codes; each attends to those before it.

        In the initial state the start token is read first: without any codes, the result predicts level 0;
        with one code, levels 0 and 1. The initial state may be continued by several adjacent rows per query,
        the same number for each query.
        """

    def log_probabilities(
        self, hidden: Float[Tensor, "rows width"], level: int, scores: Literal["level", "vocabulary"]
    ) -> Float[Tensor, "rows codes"]:
        """Return the scores of one level's codes, normalised over the level or over the whole vocabulary."""


class GeometricState(NamedTuple):
    """State of a :class:`GeometricDecoder`."""

    level: int
    residuals: Float[Tensor, "rows dim"]
    """The query's embedding minus the weighted vectors of the codes read; one row per query before the first
    token."""

    def select(
        self, queries: Int64[Tensor, " kept"] | None, rows: Int64[Tensor, "kept beams"]
    ) -> GeometricState:
        """Return the state of the chosen queries (None: all) and rows."""
        if self.level:
            return self._replace(residuals=self.residuals[rows.flatten()])
        return self if queries is None else self._replace(residuals=self.residuals[queries])


class GeometricDecoder:
    """Decoder without a network that prefers the IDs whose vectors are nearest to the query.

    A prefix whose code vectors sum up to v scores q·v − w|v|²/2: with w = 1 prefixes are ranked by
    distance, as in quantization. So a code with the vector e adds (q − wv)·e − w|e|²/2. The query is scaled
    first (:mod:`genius_search.nn.spread`). Beam search uses these scores in place of log-probabilities; they
    are not normalised.

    The vectors are copied, so construct a new decoder after further training.

    Parameters
    ----------
    tables
        the code vectors of each level.
    spread
        by which queries are scaled; if absent, they are not.
    norm_weight
        the weight w of half norms.
    """

    def __init__(
        self, tables: list[Float[Tensor, "_ dim"]], spread: Spread | None = None, norm_weight: float = 1.0
    ) -> None:
        self._spread = spread or Spread.none(len(tables[0]))
        self.sizes: tuple[int, ...] = tuple(len(table) for table in tables)
        vectors = torch.cat([table.detach().float() for table in tables])
        self._vectors = norm_weight * vectors
        self._offsets = torch.tensor([0, *accumulate(self.sizes)][:-1], device=self.device)
        levels = vectors.split(self.sizes)
        self._columns = tuple(level.t().contiguous() for level in levels)
        self._costs = tuple(level.square().sum(dim=1) * (norm_weight / -2) for level in levels)

    @property
    def device(self) -> torch.device:
        """Device of the computation."""
        return self._vectors.device

    def start(self, queries: Float[Tensor, "queries dim"], level0: Level0 | None = None) -> GeometricState:
        """Return the initial state, before any token."""
        queries = queries.detach().float()
        products = as_floats(queries @ self._columns[self._spread.level])
        scales = self._spread.scales(products, level0 or [frozenset()] * len(queries))
        return GeometricState(level=0, residuals=queries * torch.from_numpy(scales).to(queries)[:, None])

    def advance(self, state: GeometricState, codes: Int64[Tensor, "rows tokens"]) -> DecoderStep:
        """Read codes; ``hidden`` is the residual, which the next code's vector should approximate."""
        rows, count = codes.shape
        first = max(state.level - 1, 0)
        vectors = F.embedding(codes + self._offsets[first : first + count], self._vectors)
        before = state.residuals.repeat_interleave(rows // max(len(state.residuals), 1), dim=0)
        residuals = torch.cat([before[:, None], -vectors], dim=1).cumsum(dim=1)
        hidden = residuals[:, 1:] if state.level else residuals
        level = state.level + hidden.shape[1]
        return DecoderStep(hidden, GeometricState(level, hidden[:, -1]))

    def log_probabilities(
        self,
        hidden: Float[Tensor, "rows dim"],
        level: int,
        scores: Literal["level", "vocabulary"],  # noqa: ARG002  nothing is normalised
    ) -> Float[Tensor, "rows codes"]:
        """Return the scores of one level's codes, which are not normalised."""
        return torch.addmm(self._costs[level], hidden, self._columns[level])


class GuidedState(NamedTuple):
    """State of a :class:`GuidedDecoder`."""

    generated: GeneratorState
    geometric: GeometricState

    def select(
        self, queries: Int64[Tensor, " kept"] | None, rows: Int64[Tensor, "kept beams"]
    ) -> GuidedState:
        """Return the state of the chosen queries (None: all) and rows."""
        return GuidedState(self.generated.select(queries, rows), self.geometric.select(queries, rows))


class GuidedDecoder:
    """A generator with its guide: logits and distances, combined as in training.

    Parameters
    ----------
    spread
        by which queries are scaled.
    """

    @torch.no_grad()
    def __init__(self, generator: Generator, spread: Spread | None = None) -> None:
        self._generator = generator
        self._guide = generator.required_guide()
        self._geometry = GeometricDecoder(self._guide.tables(), spread)
        self.sizes: tuple[int, ...] = generator.sizes
        self.device: torch.device = generator.device

    def start(self, queries: Float[Tensor, "queries dim"], level0: Level0 | None = None) -> GuidedState:
        """Return the initial state, before any token."""
        return GuidedState(self._generator.start(queries), self._geometry.start(queries, level0))

    def advance(self, state: GuidedState, codes: Int64[Tensor, "rows tokens"]) -> DecoderStep:
        """Read codes; ``hidden`` is the generator's hidden state followed by the residual."""
        generated = self._generator.advance(state.generated, codes)
        geometric = self._geometry.advance(state.geometric, codes)
        hidden = torch.cat([generated.hidden, geometric.hidden], dim=-1)
        return DecoderStep(hidden, GuidedState(generated.state, geometric.state))

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
        generated, residual = hidden.tensor_split([self._generator.config.width], dim=1)
        logits = self._guide.combine(self._generator.logits(generated, level), residual, level)
        return torch.log_softmax(logits, dim=-1)
