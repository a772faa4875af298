"""From query embeddings to ranked items: the quickest way that covers model, tables and settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float32

from genius_search.config import SearchConfig
from genius_search.errors import UsageError
from genius_search.native.library import open_library
from genius_search.nn.codebooks import normalize
from genius_search.nn.folded import Combination, FoldedWeights
from genius_search.search.compiled import CODES, MAX_LEVELS, Compared, CompiledSearch
from genius_search.search.rank import NO_EMBEDDINGS, CodeRanker, Evidence, Found, Wanted, rank_items
from genius_search.search.table import SearchSegment

if TYPE_CHECKING:  # most searches need no decoder in PyTorch
    from genius_search.search.decoder import Decoder


def quick_search(
    ranker: CodeRanker, generator: tuple[FoldedWeights, Combination] | None = None
) -> CompiledSearch | None:
    """Return the compiled search by code vectors, or by a generator.

    None without the compiled library, with over 256 codes at a level, or if the generator has other code
    vectors than the ranker.
    """
    tables = ranker.tables()
    if max(map(len, tables)) > CODES or len(tables) > MAX_LEVELS:
        return None
    own = tables if generator is None else generator[1].tables
    if not all(np.array_equal(mine, other) for mine, other in zip(own, tables, strict=True)):
        return None
    opened = open_library()
    return None if opened is None else CompiledSearch(ranker, opened, generator)


def find(
    decoder: Callable[[], Decoder],
    fast: CompiledSearch | None,
    segments: Sequence[SearchSegment],
    queries: Float32[np.ndarray, "queries dim"],
    wanted: Sequence[Wanted],
    config: SearchConfig,
    *,
    evidence: Evidence,
    embeddings: Sequence[Float32[np.ndarray, " dim"]],
) -> list[Found]:
    """Search for queries and rank the items under their beams.

    Parameters
    ----------
    decoder
        returns the decoder of the general search; called only if ``fast`` cannot take its place.
    fast
        a search that finds what the decoder does, for the settings and tables that it covers.
    embeddings
        each query's vector in the space of the stored embeddings; see :func:`rank_items`.

    Raises
    ------
    UsageError
        The data that the re-ranking needs is not available.
    """
    by_embeddings = config.rerank == "embeddings"
    if by_embeddings and evidence.embeddings is None:
        raise UsageError(NO_EMBEDDINGS)
    if fast is not None and fast.covers(segments, config):
        if not by_embeddings:
            return fast.search(segments, queries, wanted, config)
        if evidence.embeddings is not None and fast.can_compare(evidence.embeddings, segments):
            compared = Compared(embeddings, evidence.embeddings, evidence.densities, is_raw=evidence.is_raw)
            return fast.search(segments, queries, wanted, config, compared)
    return _find_generally(decoder(), segments, queries, wanted, config, evidence, embeddings)


def _find_generally(
    decoder: Decoder,
    segments: Sequence[SearchSegment],
    queries: Float32[np.ndarray, "queries dim"],
    wanted: Sequence[Wanted],
    config: SearchConfig,
    evidence: Evidence,
    embeddings: Sequence[Float32[np.ndarray, " dim"]],
) -> list[Found]:
    import torch  # noqa: PLC0415  only here

    from genius_search.search.beam import search  # noqa: PLC0415
    from genius_search.search.decoder import GeometricDecoder  # noqa: PLC0415

    # A generator was trained with queries of unit length.
    given = queries if isinstance(decoder, GeometricDecoder) else normalize(queries)

    beams = search(
        decoder,
        segments,
        torch.from_numpy(given),
        config,
        level0=[one.level0 for one in wanted],
        restrictions=[one.restriction for one in wanted],
        widths=[one.width for one in wanted],
    )
    found = []
    for number, (one, vector) in enumerate(zip(wanted, embeddings, strict=True)):
        ranking = rank_items(
            segments,
            beams,
            number,
            vector,
            config=config,
            evidence=evidence,
            k=one.k,
            restriction=one.restriction,
            level0=one.level0,
            for_codes=queries[number],
        )
        found.append(Found(ranking, beams.log_probabilities[number, ranking.beams]))
    return found
