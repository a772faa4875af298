"""Choices: queries and the items that were chosen for them, which raise these items for similar queries.

The log is an index of its own in the folder ``learned`` of an index: its items are queries' vectors, and each
names the item that was chosen. So a choice is found, stored and deleted as an item is, and survives a crash.
The vectors are the encoder's features, so that the log stays when codebooks or fusion are fitted anew.

An item that was chosen for the same query comes :data:`~genius_search.index.query.ABOVE` spreads of the
query's products above the best hit. For a similar query it goes a share of this way, exp((c − 1) /
:data:`TEMPERATURE`), with c the cosine of the query and the nearest one for which the item was chosen
(``docs/lab/log.md``, "Logged choices"). At most :data:`RAISED` items of a search are raised, and a choice
that is logged twice counts once, so that a few people cannot bury an item.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from jaxtyping import Float32

from genius_search.config import USUAL_SEARCH
from genius_search.errors import UsageError
from genius_search.index.query import EncodedQuery, Place, SnapshotSearcher
from genius_search.index.request import SearchRequest
from genius_search.index.snapshot import Snapshot, diagnose_corruption
from genius_search.index.store import CURRENT, LEARNED
from genius_search.model import Genius
from genius_search.records import Modality, composed
from genius_search.search.rank import Ranking

if TYPE_CHECKING:
    from genius_search.index.index import Index

TEMPERATURE: Final = 0.08
"""How fast an item's share falls with the cosine of the query and the nearest for which it was chosen."""
RAISED: Final = 3
"""Items that a search raises, those with the largest shares."""
NEAREST: Final = 16
"""Logged queries that are looked at."""
LEAST: Final = 0.01
"""Smaller shares are none."""
REFIT: Final = 4
"""The log's codebooks are fitted anew when it has this many times the queries they were fitted to."""
LOOKED_THROUGH: Final = 8
"""One in so many logged queries is compared, those with the nearest codes, for queries are like queries. Of
100,000 noisy captions the nearest is among them for every query, and .98 of the nearest sixteen."""
MOST: Final = 1_000_000
"""Choices that a log may have; of more the oldest are forgotten, a tenth of all at once."""
FIELD: Final = "chosen"
QUERY: Final = frozenset({"text", "image", "vector", "parts", "instruction"})
"""Keys of a choice's query, as of :class:`genius_search.SearchRequest`."""
BATCH: Final = 4096
"""Choices that are stored together."""
ENCODED: Final = 64
"""Queries that are encoded together, whose pictures are in memory."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A query of the log, and the item that was chosen."""

    chosen: str
    """The item's id."""
    text: str | None
    """None for a query of a picture, a vector or several parts."""
    cosine: float
    """With the query that it was found for."""


class Choices:
    """The log of an index, open for searching.

    Parameters
    ----------
    log
        searches the index of queries.
    snapshot
        the state of the index whose items are raised.
    """

    def __init__(self, log: SnapshotSearcher, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        candidates = max(USUAL_SEARCH.candidates, log.snapshot.num_alive // LOOKED_THROUGH)
        config = replace(log.config, density_weight=0.0, candidates=candidates)
        self._searcher = SnapshotSearcher(log.model, log.snapshot, config)
        self._chosen: dict[Place, Place | None] = {}
        """Queries of the log, and the items that were chosen; None for those that were deleted."""

    def nearest(self, vectors: Float32[np.ndarray, "queries dim"]) -> list[list[Choice]]:
        """Return the most similar queries of the log, most similar first."""
        near = []
        for ranking in self._rank(vectors):
            items = self._searcher.snapshot.items(ranking.segments, ranking.items)
            cosines = ranking.scores.clip(max=1).tolist()
            near.append(
                [
                    Choice(str(item.fields.get(FIELD)), item.text, cosine)
                    for item, cosine in zip(items, cosines, strict=True)
                ]
            )
        return near

    def shares(self, vectors: Float32[np.ndarray, "queries dim"]) -> list[dict[Place, float]]:
        """Return the shares of items for each query by their places; deleted items have none."""
        shares = []
        for ranking in self._rank(vectors):
            values = shares_of(ranking.scores)
            large = values > LEAST
            logged = list(zip(ranking.segments[large].tolist(), ranking.items[large].tolist(), strict=True))
            self._look_up([place for place in logged if place not in self._chosen])
            own: dict[Place, float] = {}
            for place, share in zip(logged, values[large].tolist(), strict=True):  # in descending order
                if (chosen := self._chosen[place]) is not None and len(own) < RAISED:
                    own.setdefault(chosen, share)
            shares.append(own)
        return shares

    def _rank(self, vectors: Float32[np.ndarray, "queries dim"]) -> list[Ranking]:
        queries = [
            EncodedQuery(number, NEAREST, embedding=vector, evidence=vector)
            for number, vector in enumerate(vectors)
        ]
        with diagnose_corruption(self._searcher.snapshot):
            return self._searcher.rank(queries, at_least=1)

    def _look_up(self, logged: Sequence[Place]) -> None:
        """Find the items that were chosen for queries of the log."""
        if not logged:
            return
        segments, rows = np.array(logged).T
        chosen = [str(item.fields.get(FIELD)) for item in self._searcher.snapshot.items(segments, rows)]
        there = self._snapshot.known(chosen)
        for place, item_id in zip(logged, chosen, strict=True):
            self._chosen[place] = there[item_id].location if item_id in there else None


def shares_of(cosines: Float32[np.ndarray, "*queries logged"]) -> Float32[np.ndarray, "*queries logged"]:
    """Return items' shares by the cosines of a query and those for which they were chosen."""
    shares: np.ndarray = np.exp((cosines.clip(max=1) - 1) / TEMPERATURE)
    return shares


def learn(index: Index, choices: Iterable[Mapping[str, Any]], *, wait_seconds: float) -> list[str]:
    """Add choices to the log of an index; see :meth:`genius_search.Index.learn_many`."""
    choices = list(choices)
    searcher = SnapshotSearcher(*index.current())
    requests, kinds, chosen, unknown = [], [], [], []
    there = searcher.snapshot.known([chosen_id(choice) for choice in choices])
    for choice in choices:
        item_id = chosen_id(choice)
        if item_id not in there:
            unknown.append(item_id)
            continue
        kind = searcher.snapshot.item_at(there[item_id].location).modality
        query = {name: value for name, value in choice.items() if name != FIELD}
        if not query.keys() <= QUERY:
            raise UsageError(
                f"a choice has the keys {sorted(choice)}; expected {FIELD} and some of {sorted(QUERY)}"
            )
        if query.get("vector") is not None:
            query["vector"] = np.asarray(query["vector"], dtype=np.float32)
        request = SearchRequest(**query, modality=kind)
        requests.append(request)
        kinds.append(kind)
        chosen.append(item_id)
    for start in range(0, len(requests), BATCH):
        some = slice(start, start + BATCH)
        _add(
            index,
            np.stack(
                [
                    query.feature
                    for first in range(start, min(start + BATCH, len(requests)), ENCODED)
                    for query in searcher.encode(requests[first : min(first + ENCODED, start + BATCH)])
                ]
            ),
            [
                request.text if len(request.query) == 1 and request.image is None else None
                for request in requests[some]
            ],
            kinds[some],
            chosen[some],
            wait_seconds,
        )
    return unknown


def chosen_id(choice: Mapping[str, Any]) -> str:
    """Return the id of a choice's item; raise :class:`UsageError` if it names none."""
    item_id = choice.get(FIELD)
    if not isinstance(item_id, str):
        raise UsageError(
            f'a choice names the id of the chosen item, as in {{"text": "a red kite", "{FIELD}": "7"}}; '
            f"this one has the keys {sorted(choice)}"
        )
    return composed(item_id)


def _add(
    index: Index,
    vectors: Float32[np.ndarray, "choices dim"],
    texts: Sequence[str | None],
    kinds: Sequence[Modality],
    chosen: Sequence[str],
    wait_seconds: float,
) -> None:
    rows: dict[str, int] = {}
    for row, (vector, item_id) in enumerate(zip(vectors, chosen, strict=True)):
        query = json.dumps([item_id, texts[row]]).encode()
        query += b"" if texts[row] else vector.round(4).tobytes()
        rows[hashlib.sha256(query).hexdigest()[:24]] = row
    given: dict[str, Any] = {
        "vectors": vectors[[*rows.values()]],
        "ids": [*rows],
        "modalities": [kinds[row] for row in rows.values()],
        "texts": [texts[row] for row in rows.values()],
        "fields": [{FIELD: chosen[row]} for row in rows.values()],
    }
    folder = index.folder / LEARNED
    if not (folder / CURRENT).exists():
        try:
            index.create(folder, embedding_bits=8, **given)
        except UsageError:
            if not (folder / CURRENT).exists():
                raise  # otherwise another process was first
        else:
            return
    from genius_search.training.codebooks import FITTED  # noqa: PLC0415  with PyTorch, as adding is

    log = index.open(folder)
    log.add(**given, wait_seconds=wait_seconds)
    if len(log) > MOST:
        log.delete([item.id for item in log][MOST - MOST // 10 :], wait_seconds=wait_seconds)
        log.compact(wait_seconds=wait_seconds)
    fitted = int(log.model.quantizer_manifest.inputs[FITTED])
    if log.snapshot.num_alive >= REFIT * fitted:
        log.refit(wait_seconds=wait_seconds)


def forget(folder: Path, *, chosen: str | None, text: str | None, wait_seconds: float) -> int:
    """Delete choices of an index: of an item, of a text, of both, or all; return their number."""
    from genius_search.index.writer import one_writer  # noqa: PLC0415  not to search

    if not (folder / LEARNED / CURRENT).exists():
        return 0
    with one_writer(folder / LEARNED, wait_seconds=wait_seconds) as writer:
        ids = [
            item.id
            for item, _ in writer.snapshot.alive()
            if (chosen is None or item.fields[FIELD] == composed(chosen))
            and (text is None or item.text == text)
        ]
        return writer.delete(ids).deleted


def read_choices(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what the index in a folder has learned, as it can be learned again.

    A query that was not a text alone is its feature, a vector.
    """
    log = folder / LEARNED
    if not (log / CURRENT).exists():
        return
    snapshot = Snapshot.open(log)
    model = Genius.open(snapshot.manifest.locate_model(log))
    vectors = [segment.vectors(model.ranker) for segment in snapshot.segments]
    for item, place in snapshot.alive():
        query: dict[str, Any] = {"text": item.text}
        if item.text is None:
            query = {"vector": vectors[place.segment](np.array([place.row]))[0].tolist()}
        yield {**query, FIELD: item.fields[FIELD]}
