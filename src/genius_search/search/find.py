"""From query embeddings to ranked items: the quickest way that covers model, tables and settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float32

from genius_search.config import SearchConfig
from genius_search.errors import UsageError
from genius_search.native.library import open_library
from genius_search.search.beams import topk
from genius_search.search.compiled import CODES, MAX_LEVELS, Compared, CompiledSearch
from genius_search.search.fast import Found, NumpyGenerator, NumpySearch, Wanted
from genius_search.search.rank import NO_EMBEDDINGS, CodeRanker, Evidence, by_embeddings, rank_items
from genius_search.search.table import SearchSegment

if TYPE_CHECKING:  # most searches need no decoder in PyTorch
    from genius_search.search.decoder import Decoder


def quick_search(ranker: CodeRanker, generator: NumpyGenerator | None = None) -> NumpySearch | None:
    """Return the quickest search on this machine by code vectors, or by a generator.

    None if there is none: there are over 256 codes at a level, or the generator has other code vectors than
    the ranker.
    """
    tables = ranker.tables()
    if max(map(len, tables)) > CODES or len(tables) > MAX_LEVELS:
        return None
    own = tables if generator is None else generator.combination.tables
    if not all(np.array_equal(mine, other) for mine, other in zip(own, tables, strict=True)):
        return None
    opened = open_library()
    return NumpySearch(ranker, generator) if opened is None else CompiledSearch(ranker, opened, generator)


def find(
    decoder: Callable[[], Decoder],
    fast: NumpySearch | None,
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
    if fast is None or len(queries) > fast.most_queries or not fast.covers(segments, config):
        return _find_generally(decoder(), segments, queries, wanted, config, evidence, embeddings)
    if config.rerank == "codes":
        return fast.search(segments, queries, wanted, config)
    if evidence.embeddings is None:
        raise UsageError(NO_EMBEDDINGS)
    if isinstance(fast, CompiledSearch) and fast.can_compare(evidence.embeddings, segments):
        weight = 0.0 if evidence.is_raw else config.density_weight
        compared = Compared(embeddings, evidence.embeddings, evidence.densities, weight)
        return fast.search(segments, queries, wanted, config, compared)
    listed = [one._replace(k=config.shortlist and max(one.k, config.shortlist)) for one in wanted]
    results = []
    for found, one, vector in zip(
        fast.search(segments, queries, listed, config), wanted, embeddings, strict=True
    ):
        scores = by_embeddings(segments, found.ranking, vector, evidence, config)
        best = topk(scores, one.k)
        ranking = found.ranking._replace(scores=scores).take(best)
        results.append(Found(ranking, found.log_probabilities[best]))
    return results


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

    beams = search(
        decoder,
        segments,
        torch.from_numpy(queries),
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
            for_codes=queries[number],
        )
        found.append(Found(ranking, beams.log_probabilities[number, ranking.beams]))
    return found
