"""Choices: queries and the items that were chosen for them, which raise these items for similar queries.

The log is an index of its own in the folder ``learned`` of an index: its items are queries' vectors, and each
names the item that was chosen. So a choice is found, stored and deleted as an item is, and survives a crash.
The vectors are the encoder's features, so that the log stays when codebooks or fusion are fitted anew.

An item that was chosen for the same query comes :data:`~genius_search.index.query.ABOVE` spreads of the
query's products above the best hit. For a similar query it goes a share of this way, exp((c − 1) /
:data:`SHARE_TEMPERATURE`), with c the cosine of the query and the nearest one for which the item was chosen
(``docs/lab/log.md``, "Logged choices"). At most :data:`MAX_RAISED_CHOICES` items of a search are raised, and a choice
that is logged twice counts once, so that a few people cannot bury an item.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from jaxtyping import Float32

from genius_search.border import as_id, as_text
from genius_search.config import DEFAULT_SEARCH
from genius_search.errors import ArtifactError, ArtifactMismatch, UsageError
from genius_search.index.items import Item
from genius_search.index.match import split_excluded
from genius_search.index.query import EncodedQuery, SnapshotSearcher
from genius_search.index.request import SearchRequest
from genius_search.index.snapshot import Location, Snapshot, check_on_error
from genius_search.index.store import (
    CURRENT,
    LEARNED,
    LOCK,
    REMEDY,
    has_lost_manifest,
    read_manifest,
)
from genius_search.model import Genius
from genius_search.records import Modality
from genius_search.search.rank import Ranking
from genius_search.writing import DISK_FULL

if TYPE_CHECKING:
    from genius_search.index.index import Index

SHARE_TEMPERATURE: Final = 0.08
"""How fast an item's share falls with the cosine of the query and the nearest for which it was chosen."""
MAX_RAISED_CHOICES: Final = 3
"""Items that a search raises, those with the largest shares."""
NUM_NEAREST_QUERIES: Final = 16
"""Logged queries that are looked at."""
MIN_CHOICE_SHARE: Final = 0.01
"""Smaller shares are none."""
REFIT_GROWTH: Final = 4
"""The log's codebooks are fitted anew when it has this many times the queries they were fitted to."""
QUERIES_PER_CANDIDATE: Final = 8
"""One in so many logged queries is compared, those with the nearest codes, for queries are like queries. Of
100,000 noisy captions the nearest is among them for every query, and .98 of the nearest sixteen."""
MAX_CHOICES: Final = 1_000_000
"""Choices that a log may have; of more the oldest are forgotten, a tenth of all at once."""
CHOSEN_FIELD: Final = "chosen"
QUERY_KEYS: Final = frozenset({"text", "image", "vector", "parts", "instruction"})
"""Keys of a choice's query, as of :class:`genius_search.SearchRequest`."""
CHOICES_PER_BATCH: Final = 4096
"""Choices that are stored together."""
QUERIES_PER_ENCODING: Final = 64
"""Queries that are encoded together, whose pictures are in memory."""
log = logging.getLogger("genius_search")
T = TypeVar("T")


class DamagedLog(ArtifactMismatch):
    """The log of choices of an index cannot be read. Searches do without it."""


def has_log(folder: Path) -> bool:
    """Return whether the index in a folder has a log of choices, which may be damaged."""
    return (folder / LEARNED / CURRENT).exists() or has_lost_manifest(folder / LEARNED)


@contextlib.contextmanager
def reading_log(folder: Path) -> Iterator[None]:
    """Raise :class:`DamagedLog`, which says what to do, if the log of the index in a folder is damaged."""
    try:
        yield
    except (ArtifactError, sqlite3.Error, OSError) as error:
        if getattr(error, "errno", None) in DISK_FULL:
            raise
        problem = str(error).removesuffix(f"; {REMEDY}")
        raise DamagedLog(
            f"the log of choices of {folder} is damaged: {problem}; searches do without it. Restore "
            f"{folder / LEARNED} from a backup, or remove it: `genius index learn {folder} --forget-all`"
        ) from error


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
        self._folder = log.snapshot.folder.parent
        self._is_damaged = False
        candidates = max(DEFAULT_SEARCH.candidates, log.snapshot.num_alive // QUERIES_PER_CANDIDATE)
        config = replace(log.config, density_weight=0.0, candidates=candidates)
        self._searcher = SnapshotSearcher(log.model, log.snapshot, config)
        self._chosen: dict[Location, Location | None] = {}
        """Queries of the log, and the items that were chosen; None for those that were deleted."""

    def nearest(self, vectors: Float32[np.ndarray, "queries dim"]) -> list[list[Choice]]:
        """Return the most similar queries of the log, most similar first."""
        near = []
        for ranking in self._rank(vectors):
            items = self._items(ranking.segments, ranking.items)
            cosines = ranking.scores.clip(max=1).tolist()
            near.append(
                [
                    Choice(str(item.fields.get(CHOSEN_FIELD)), item.text, cosine)
                    for item, cosine in zip(items, cosines, strict=bool(items))
                ]
            )
        return near or [[] for _ in vectors]

    def shares(self, vectors: Float32[np.ndarray, "queries dim"]) -> list[dict[Location, float]]:
        """Return the shares of items for each query by their places; deleted items have none.

        There are none from when the log is found to be damaged, which is logged once.
        """
        shares = []
        for ranking in self._rank(vectors):
            values = shares_from_cosines(ranking.scores)
            large = values > MIN_CHOICE_SHARE
            segments, rows = ranking.segments[large].tolist(), ranking.items[large].tolist()
            logged = list(map(Location, segments, rows))
            self._look_up([place for place in logged if place not in self._chosen])
            own: dict[Location, float] = {}
            for place, share in zip(
                logged, values[large].tolist(), strict=True
            ):  # in descending order
                if (chosen := self._chosen.get(place)) is not None and len(
                    own
                ) < MAX_RAISED_CHOICES:
                    own.setdefault(chosen, share)
            shares.append(own)
        return shares or [{} for _ in vectors]

    def _rank(self, vectors: Float32[np.ndarray, "queries dim"]) -> list[Ranking]:
        queries = [
            EncodedQuery(number, NUM_NEAREST_QUERIES, embedding=vector, evidence=vector)
            for number, vector in enumerate(vectors)
        ]
        return self._read(lambda: self._searcher.rank(queries, at_least=1))

    def _items(self, segments: np.ndarray, rows: np.ndarray) -> list[Item]:
        return self._read(lambda: self._searcher.snapshot.items_at(segments, rows))

    def _read(self, read: Callable[[], list[T]]) -> list[T]:
        """Return what is read of the log; nothing if it is damaged, which is logged once."""
        try:
            with reading_log(self._folder), check_on_error(self._searcher.snapshot):
                return read()
        except DamagedLog as error:
            if not self._is_damaged:
                log.warning("%s", error)
            self._is_damaged = True
            return []

    def _look_up(self, logged: Sequence[Location]) -> None:
        """Find the items that were chosen for queries of the log."""
        if not logged:
            return
        segments, rows = np.array(logged).T
        chosen = [str(item.fields.get(CHOSEN_FIELD)) for item in self._items(segments, rows)]
        there = self._snapshot.item_states(chosen)
        for place, item_id in zip(logged, chosen, strict=bool(chosen)):
            self._chosen[place] = there[item_id].location if item_id in there else None


def shares_from_cosines(
    cosines: Float32[np.ndarray, "*queries logged"],
) -> Float32[np.ndarray, "*queries logged"]:
    """Return items' shares by the cosines of a query and those for which they were chosen."""
    shares: np.ndarray = np.exp((cosines.clip(max=1) - 1) / SHARE_TEMPERATURE)
    return shares


def learn(
    index: Index,
    model: Genius,
    snapshot: Snapshot,
    choices: Iterable[Mapping[str, Any]],
    *,
    wait_seconds: float,
) -> list[str]:
    """Add choices to the log of an index; see :meth:`genius_search.Index.learn_many`."""
    choices = list(choices)
    searcher = SnapshotSearcher(model, snapshot)
    requests, kinds, chosen, unknown = [], [], [], []
    there = searcher.snapshot.item_states([chosen_id(choice) for choice in choices])
    for choice in choices:
        item_id = chosen_id(choice)
        if item_id not in there:
            unknown.append(item_id)
            continue
        kind = searcher.snapshot.item_at(there[item_id].location).modality
        query = {name: value for name, value in choice.items() if name != CHOSEN_FIELD}
        if not query.keys() <= QUERY_KEYS:
            raise UsageError(
                f"a choice has the keys {sorted(choice)}; expected {CHOSEN_FIELD} and some of {sorted(QUERY_KEYS)}"
            )
        request = SearchRequest(**query, modality=kind)
        requests.append(request)
        kinds.append(kind)
        chosen.append(item_id)
    for start in range(0, len(requests), CHOICES_PER_BATCH):
        some = slice(start, start + CHOICES_PER_BATCH)
        _add(
            index,
            np.stack(
                [
                    query.feature
                    for first in range(
                        start, min(start + CHOICES_PER_BATCH, len(requests)), QUERIES_PER_ENCODING
                    )
                    for query in searcher.encode(
                        requests[
                            first : min(first + QUERIES_PER_ENCODING, start + CHOICES_PER_BATCH)
                        ]
                    )
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
    if choice.get(CHOSEN_FIELD) is None:
        raise UsageError(
            f'a choice names the id of the chosen item, as in {{"text": "a red kite", "{CHOSEN_FIELD}": "7"}}; '
            f"this one has the keys {sorted(choice)}"
        )
    return as_id(choice[CHOSEN_FIELD], "the id of a chosen item")


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
        "fields": [{CHOSEN_FIELD: chosen[row]} for row in rows.values()],
    }
    folder = index.folder / LEARNED
    while not has_log(index.folder):
        try:
            index.from_vectors(folder, embedding_bits=8, **given, wait_seconds=wait_seconds)
        except UsageError:
            if not has_log(index.folder):
                raise  # otherwise another process or thread was first
        else:
            return
    from genius_search.training.codebooks import FITTED_ITEMS  # noqa: PLC0415  with PyTorch, as adding is

    with reading_log(index.folder):
        logged = index.open(folder)
        logged.add_vectors(**given, wait_seconds=wait_seconds)
        if len(logged) > MAX_CHOICES:
            logged.delete(
                [item.id for item in logged][MAX_CHOICES - MAX_CHOICES // 10 :],
                wait_seconds=wait_seconds,
            )
            logged.compact(wait_seconds=wait_seconds)
        fitted = int(logged.model.quantizer_manifest.inputs[FITTED_ITEMS])
        if len(logged) >= REFIT_GROWTH * fitted:
            logged.refit(wait_seconds=wait_seconds)


def forget(folder: Path, *, chosen: str | int | None, text: str | None, wait_seconds: float) -> int:
    """Delete choices of an index: of an item, of a text, of both, or all; return their number.

    All of a damaged log are deleted, too, though their number may be unknown, and 0.
    """
    from genius_search.index.writer import open_writer  # noqa: PLC0415  not to search

    chosen = None if chosen is None else as_id(chosen)
    text = None if text is None else as_text(text, "the text of a query")
    if text is not None:  # the log has it as it is searched for
        text, _ = split_excluded(text)
    if not has_log(folder):
        return 0
    try:
        with (
            reading_log(folder),
            open_writer(folder / LEARNED, wait_seconds=wait_seconds) as writer,
        ):
            with check_on_error(writer.snapshot):
                ids = [
                    item.id
                    for item, _ in writer.snapshot.alive()
                    if (chosen is None or item.fields[CHOSEN_FIELD] == chosen)
                    and (text is None or item.text == text)
                ]
            return writer.delete(ids).deleted
    except DamagedLog:
        if chosen is None and text is None:
            return _remove_log(folder / LEARNED, wait_seconds)
        raise


def _remove_log(folder: Path, wait_seconds: float) -> int:
    """Remove a log whose files are damaged; return the number of its choices, or 0 if it is unknown."""
    from genius_search.index.writer import writing_lock  # noqa: PLC0415  not to search

    with writing_lock(folder, wait_seconds=wait_seconds):
        count = 0
        with contextlib.suppress(ArtifactError):
            count = sum(one.items - len(one.dead_rows()) for one in read_manifest(folder).segments)
        # The manifest last: until then, an interrupted removal is a damaged log, which can be removed.
        for path in sorted(folder.iterdir(), key=lambda path: path.name == CURRENT):
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()
    return count


def read_choices(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what the index in a folder has learned, as it can be learned again.

    A query that was not a text alone is its feature, a vector.
    """
    if not has_log(folder):
        return
    with reading_log(folder):
        snapshot = Snapshot.open(folder / LEARNED)
        model = Genius.open(snapshot.manifest.locate_model(folder / LEARNED))
    with reading_log(folder), check_on_error(snapshot):
        vectors = [segment.vectors(model.ranker) for segment in snapshot.segments]
        for item, place in snapshot.alive():
            query: dict[str, Any] = {"text": item.text}
            if item.text is None:
                query = {"vector": vectors[place.segment](np.array([place.row]))[0].tolist()}
            yield {**query, CHOSEN_FIELD: item.fields[CHOSEN_FIELD]}
