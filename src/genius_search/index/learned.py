"""Choices: queries with the items that were chosen for them, which raise these items later.

The log of choices is an index in the folder ``learned`` of an index. Its items are the vectors of
queries, each of which names the chosen item. A choice is therefore found, stored and deleted as an
item is, and survives a crash. The vectors are the encoder's features, so that the log stays valid
when codebooks or fusion are fitted again.

An item that was chosen for the same query is placed
:data:`~genius_search.index.score.RAISE_SPREADS` spreads of the query's products above the best hit.
For a similar query it moves a share of this way (``docs/lab/log.md``, "Logged choices")::

    share = exp((c - 1) / SHARE_TEMPERATURE)

with c the cosine of the query and the nearest query for which the item was chosen. Cosines of 1,
.95 and .8 give shares of 1, .54 and .08. A search raises at most :data:`MAX_RAISED_CHOICES` items,
and a choice that is logged twice counts once, so that a few people cannot bury an item.
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
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float32

from genius_search.border import as_id, as_text
from genius_search.config import DEFAULT_SEARCH
from genius_search.errors import ArtifactError, ArtifactMismatch, UsageError
from genius_search.index.encode import EncodedQuery
from genius_search.index.items import Item
from genius_search.index.match import split_excluded
from genius_search.index.query import SnapshotSearcher
from genius_search.index.request import SearchRequest
from genius_search.index.snapshot import Location, Snapshot, check_files_on_error
from genius_search.index.store import (
    CURRENT,
    LEARNED,
    LOCK,
    REMEDY,
    has_lost_manifest,
    read_manifest,
)
from genius_search.model import Genius
from genius_search.progress import Silent
from genius_search.records import Modality
from genius_search.search.rank import Candidates
from genius_search.writing import DISK_FULL

if TYPE_CHECKING:
    from genius_search.index.pool import Pool
    from genius_search.index.writer import Writer

SHARE_TEMPERATURE: Final = 0.08
"""How slowly an item's share falls with the cosine of a query and the logged query."""
MAX_RAISED_CHOICES: Final = 3
"""Maximum number of items that a search raises: those with the largest shares."""
NUM_NEAREST_QUERIES: Final = 16
"""Number of logged queries that a search compares with its query."""
MIN_CHOICE_SHARE: Final = 0.01
"""Smaller shares raise no item."""
REFIT_GROWTH: Final = 4
"""The log's codebooks are fitted again when it has this many times the queries of the last fit."""
QUERIES_PER_CANDIDATE: Final = 8
"""One in this many logged queries, those with the nearest codes, is compared by its vector. Of
100,000 noisy captions this includes the nearest for every query, and .98 of the nearest sixteen."""
MAX_CHOICES: Final = 1_000_000
"""Maximum number of choices in a log; beyond it, the oldest tenth is forgotten at once."""
CHOSEN_FIELD: Final = "chosen"
"""The field of a logged query that has the id of the chosen item."""
QUERY_KEYS: Final = frozenset({"text", "image", "vector", "parts", "instruction"})
"""Keys of a choice's query, as in :class:`genius_search.SearchRequest`."""
CHOICES_PER_BATCH: Final = 4096
"""Number of choices that are stored together."""
QUERIES_PER_ENCODING: Final = 64
"""Number of queries that are encoded together, with their pictures in memory."""
log = logging.getLogger("genius_search")
T = TypeVar("T")


class DamagedLog(ArtifactMismatch):
    """The log of choices of an index cannot be read. Searches work without it."""


def has_log(folder: Path) -> bool:
    """Return whether the index in a folder has a log of choices, which may be damaged."""
    return (folder / LEARNED / CURRENT).exists() or has_lost_manifest(folder / LEARNED)


@contextlib.contextmanager
def reading_log(folder: Path) -> Iterator[None]:
    """Turn errors of reading an index's log into :class:`DamagedLog`, which says what to do."""
    try:
        yield
    except (ArtifactError, sqlite3.Error, OSError) as error:
        if getattr(error, "errno", None) in DISK_FULL:
            raise
        problem = str(error).removesuffix(f"; {REMEDY}")
        raise DamagedLog(
            f"the log of choices of {folder} is damaged: {problem}; searches do without it. "
            f"Restore {folder / LEARNED} from a backup, or remove it: "
            f"`genius index learn {folder} --forget-all`"
        ) from error


@dataclass(frozen=True, slots=True)
class Choice:
    """A query of the log, and the item that was chosen."""

    chosen: str
    """The item's id."""
    text: str | None
    """The query's text; None for a query of a picture, a vector or several parts."""
    cosine: float
    """The cosine of the logged query and the query of the search."""


class Choices:
    """The log of an index, open for searching.

    Parameters
    ----------
    log
        Searches the index of logged queries.
    snapshot
        The snapshot of the index whose items are raised.
    """

    def __init__(self, log: SnapshotSearcher, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._folder = log.snapshot.folder.parent
        self._is_damaged = False
        candidates = max(DEFAULT_SEARCH.candidates, log.snapshot.num_alive // QUERIES_PER_CANDIDATE)
        settings = replace(log.config, density_weight=0.0, candidates=candidates)
        self._searcher = SnapshotSearcher(log.model, log.snapshot, settings)
        self._chosen_items: dict[Location, Location | None] = {}
        """Location of the chosen item, by that of the logged query; None for a deleted item."""

    def nearest(self, vectors: Float32[np.ndarray, "queries dim"]) -> list[list[Choice]]:
        """Return the most similar queries of the log for each query, most similar first."""
        choices = []
        for ranking in self._rank(vectors):
            queries = self._read_queries(ranking.segments, ranking.items)
            cosines = ranking.scores.clip(max=1).tolist()
            # If the log is found to be damaged, there are no queries.
            pairs = zip(queries, cosines, strict=bool(queries))
            choices.append(
                [
                    Choice(str(query.fields.get(CHOSEN_FIELD)), query.text, cosine)
                    for query, cosine in pairs
                ]
            )
        return choices or [[] for _ in vectors]

    def shares(self, vectors: Float32[np.ndarray, "queries dim"]) -> list[dict[Location, float]]:
        """Return for each query the shares of the items to raise, by location.

        Deleted items have no share. If the log is found to be damaged, which is logged once, no
        item has.
        """
        shares_of_queries = []
        for ranking in self._rank(vectors):
            shares = shares_from_cosines(ranking.scores)
            is_large = shares > MIN_CHOICE_SHARE
            segments = ranking.segments[is_large].tolist()
            rows = ranking.items[is_large].tolist()
            queries = list(map(Location, segments, rows))
            self._look_up([query for query in queries if query not in self._chosen_items])
            share_of_item: dict[Location, float] = {}
            # The nearest query comes first, so that an item keeps its largest share.
            for query, share in zip(queries, shares[is_large].tolist(), strict=True):
                item = self._chosen_items.get(query)
                if item is not None and len(share_of_item) < MAX_RAISED_CHOICES:
                    share_of_item.setdefault(item, share)
            shares_of_queries.append(share_of_item)
        return shares_of_queries or [{} for _ in vectors]

    def _rank(self, vectors: Float32[np.ndarray, "queries dim"]) -> list[Candidates]:
        """Search for the nearest logged queries; an empty list if the log is damaged."""
        queries = [EncodedQuery.of_vector(vector, NUM_NEAREST_QUERIES) for vector in vectors]
        return self._read(lambda: self._searcher.rank(queries))

    def _read_queries(self, segments: np.ndarray, rows: np.ndarray) -> list[Item]:
        return self._read(lambda: self._searcher.snapshot.items_at(segments, rows))

    def _read(self, read: Callable[[], list[T]]) -> list[T]:
        """Read from the log; if it is damaged, warn once and return an empty list."""
        try:
            with reading_log(self._folder), check_files_on_error(self._searcher.snapshot):
                return read()
        except DamagedLog as error:
            if not self._is_damaged:
                log.warning("%s", error)
            self._is_damaged = True
            return []

    def _look_up(self, queries: Sequence[Location]) -> None:
        """Look up the items that were chosen for logged queries, and remember them."""
        if not queries:
            return
        segments, rows = np.array(queries).T
        logged = self._read_queries(segments, rows)
        chosen_ids = [str(query.fields.get(CHOSEN_FIELD)) for query in logged]
        states = self._snapshot.item_states(chosen_ids)
        for query, item_id in zip(queries, chosen_ids, strict=bool(chosen_ids)):
            self._chosen_items[query] = states[item_id].location if item_id in states else None


def shares_from_cosines(
    cosines: Float32[np.ndarray, "*queries logged"],
) -> Float32[np.ndarray, "*queries logged"]:
    """Return items' shares from the cosines of a query and the queries they were chosen for."""
    shares: np.ndarray = np.exp((cosines.clip(max=1) - 1) / SHARE_TEMPERATURE)
    return shares


class NewChoice(NamedTuple):
    """A choice to log."""

    request: SearchRequest
    item_id: str
    modality: Modality
    """The modality of the chosen item."""


def learn(
    folder: Path,
    model: Genius,
    snapshot: Snapshot,
    choices: Iterable[Mapping[str, Any]],
    *,
    refit: Callable[[Path], object],
    wait_seconds: float,
) -> list[str]:
    """Add choices to the log of an index; return the chosen ids that the index does not have.

    Parameters
    ----------
    folder, model, snapshot
        The index and its current state.
    choices
        See :meth:`genius_search.Index.learn_many`.
    refit
        Fits the codebooks of the index in a folder again; called when the log has grown to
        :data:`REFIT_GROWTH` times its size at the last fit.
    """
    new_choices, unknown_ids = _check_choices(snapshot, [*choices])
    searcher = SnapshotSearcher(model, snapshot)
    for start in range(0, len(new_choices), CHOICES_PER_BATCH):
        batch = new_choices[start : start + CHOICES_PER_BATCH]
        pool = _pool_of_choices(batch, encode_queries(searcher, batch))
        if _create_log(folder, pool, wait_seconds):
            continue
        if _add_to_log(folder, pool, wait_seconds):
            with reading_log(folder):
                refit(folder / LEARNED)
    return unknown_ids


def _check_choices(
    snapshot: Snapshot, choices: Sequence[Mapping[str, Any]]
) -> tuple[list[NewChoice], list[str]]:
    """Return the choices of items in the index as requests, and the ids of other chosen items."""
    chosen_ids = [chosen_id(choice) for choice in choices]
    states = snapshot.item_states(chosen_ids)
    new_choices = []
    unknown_ids = []
    for choice, item_id in zip(choices, chosen_ids, strict=True):
        if item_id not in states:
            unknown_ids.append(item_id)
            continue
        query = {name: value for name, value in choice.items() if name != CHOSEN_FIELD}
        if not query.keys() <= QUERY_KEYS:
            raise UsageError(
                f"a choice has the keys {sorted(choice)}; expected {CHOSEN_FIELD} and some of "
                f"{sorted(QUERY_KEYS)}"
            )
        modality = snapshot.item_at(states[item_id].location).modality
        request = SearchRequest(**query, modality=modality)
        new_choices.append(NewChoice(request, item_id, modality))
    return new_choices, unknown_ids


def chosen_id(choice: Mapping[str, Any]) -> str:
    """Return the id of a choice's item; raise :class:`UsageError` if it names none."""
    if not isinstance(choice, Mapping):
        raise UsageError(
            f"a choice is of type {type(choice).__qualname__}; expected a list of mappings with "
            f"{CHOSEN_FIELD} and the query"
        )
    if choice.get(CHOSEN_FIELD) is None:
        raise UsageError(
            f'a choice names the id of the chosen item, as in {{"text": "a red kite", '
            f'"{CHOSEN_FIELD}": "7"}}; this one has the keys {sorted(choice)}'
        )
    return as_id(choice[CHOSEN_FIELD], "the id of a chosen item")


def encode_queries(
    searcher: SnapshotSearcher, choices: Sequence[NewChoice]
) -> Float32[np.ndarray, "choices dim"]:
    """Return the features of the queries of some choices."""
    features = []
    for start in range(0, len(choices), QUERIES_PER_ENCODING):
        requests = [choice.request for choice in choices[start : start + QUERIES_PER_ENCODING]]
        features += [query.feature for [query] in searcher.encode(requests)]
    return np.stack(features)


def _pool_of_choices(
    choices: Sequence[NewChoice], vectors: Float32[np.ndarray, "choices dim"]
) -> Pool:
    """Return choices as items of the log, each once.

    The id of an item is a hash of the chosen id and the query, so that a choice that is logged
    twice replaces itself. A query that is not a text alone is identified by its rounded feature.
    """
    from genius_search.index.pool import pool_from_vectors  # noqa: PLC0415  not to search

    texts = []
    rows_by_id: dict[str, int] = {}
    for row, (request, item_id, _) in enumerate(choices):
        is_text = len(request.query) == 1 and request.image is None
        text = request.text if is_text else None
        texts.append(text)
        identity = json.dumps([item_id, text]).encode()
        if not text:
            identity += vectors[row].round(4).tobytes()
        rows_by_id[hashlib.sha256(identity).hexdigest()[:24]] = row
    rows = [*rows_by_id.values()]
    return pool_from_vectors(
        vectors[rows],
        [*rows_by_id],
        modalities=[choices[row].modality for row in rows],
        texts=[texts[row] for row in rows],
        fields=[{CHOSEN_FIELD: choices[row].item_id} for row in rows],
    )


def _create_log(folder: Path, pool: Pool, wait_seconds: float) -> bool:
    """Create the log of an index with its first choices; return False if there is a log already."""
    from genius_search.index.build import create_index  # noqa: PLC0415  with PyTorch

    while not has_log(folder):
        try:
            create_index(
                folder / LEARNED,
                pool=pool,
                model=None,
                encoder=None,
                embeddings=None,
                embedding_bits=8,
                levels=None,
                recall=None,
                query_vectors=None,
                captions=True,
                device="cpu",
                download=False,
                progress=Silent(),
                wait_seconds=wait_seconds,
            )
        except UsageError:
            if not has_log(folder):
                raise  # otherwise another process or thread was first
        else:
            return True
    return False


def _add_to_log(folder: Path, pool: Pool, wait_seconds: float) -> bool:
    """Add choices to the log of an index; return whether its codebooks should be fitted again.

    If the log has too many choices, the oldest are removed.
    """
    from genius_search.index.build import add_pool  # noqa: PLC0415  with PyTorch, as adding is
    from genius_search.index.writer import open_writer  # noqa: PLC0415  not to search
    from genius_search.training.codebooks import FITTED_ITEMS  # noqa: PLC0415

    with reading_log(folder), open_writer(folder / LEARNED, wait_seconds=wait_seconds) as writer:
        model = _open_log_model(folder / LEARNED, writer.snapshot)
        add_pool(writer, model, pool, progress=Silent())
        if writer.snapshot.num_alive > MAX_CHOICES:
            _remove_oldest_choices(writer)
        num_fitted = int(model.quantizer_manifest.inputs[FITTED_ITEMS])
        return writer.snapshot.num_alive >= REFIT_GROWTH * num_fitted


def _open_log_model(folder: Path, snapshot: Snapshot) -> Genius:
    """Open the model of a log, and check the log against it."""
    model = Genius.open(snapshot.manifest.locate_model(folder))
    if model.fingerprint != snapshot.manifest.model_fingerprint:
        raise ArtifactMismatch(f"{folder} was made with another model than {model.folder}")
    snapshot.check_arrays(model.codebooks, model.unchecked_files)
    return model


def _remove_oldest_choices(writer: Writer) -> None:
    """Remove the oldest choices, so that a tenth of the log is free, and their space."""
    newest_first = sorted(
        (-location.segment, location.row, item.id) for item, location in writer.snapshot.alive()
    )
    num_remaining = MAX_CHOICES - MAX_CHOICES // 10
    writer.delete([item_id for _, _, item_id in newest_first[num_remaining:]])
    writer.compact()


def forget(folder: Path, *, chosen: str | int | None, text: str | None, wait_seconds: float) -> int:
    """Delete choices of an index: of an item, of a text, of both, or all; return their number.

    A damaged log can be deleted as a whole; if its number of choices is unknown, return 0.
    """
    from genius_search.index.writer import open_writer  # noqa: PLC0415  not to search

    chosen = None if chosen is None else as_id(chosen)
    if text is not None:  # the log has a query's text without its excluded words
        text, _ = split_excluded(as_text(text, "the text of a query"))
    if not has_log(folder):
        return 0
    try:
        with (
            reading_log(folder),
            open_writer(folder / LEARNED, wait_seconds=wait_seconds) as writer,
        ):
            if chosen is None and text is None:
                _open_log_model(folder / LEARNED, writer.snapshot)  # it may be damaged, too
            with check_files_on_error(writer.snapshot):
                ids = [
                    query.id
                    for query, _ in writer.snapshot.alive()
                    if (chosen is None or query.fields[CHOSEN_FIELD] == chosen)
                    and (text is None or query.text == text)
                ]
            return writer.delete(ids).deleted
    except DamagedLog:
        if chosen is None and text is None:
            return _remove_log(folder / LEARNED, wait_seconds)
        raise


def _remove_log(folder: Path, wait_seconds: float) -> int:
    """Remove a log whose files are damaged; return the number of its choices, or 0 if unknown."""
    from genius_search.index.writer import writing_lock  # noqa: PLC0415  not to search

    with writing_lock(folder, wait_seconds=wait_seconds):
        count = 0
        with contextlib.suppress(ArtifactError):
            for segment in read_manifest(folder).segments:
                count += segment.items - len(segment.dead_rows())
        # Remove the manifest last: until then, an interrupted removal is a damaged log, which can
        # be removed.
        for path in sorted(folder.iterdir(), key=lambda path: path.name == CURRENT):
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()
    return count


def read_choices(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the choices of the index in a folder, as they can be learned again.

    A query that was not a text alone is exported as its feature, a vector::

        {"text": "a red kite", "chosen": "kites/7.jpg"}
        {"vector": [0.12, -0.03, ...], "chosen": "kites/7.jpg"}
    """
    if not has_log(folder):
        return
    with reading_log(folder):
        snapshot = Snapshot.open(folder / LEARNED)
        model = Genius.open(snapshot.manifest.locate_model(folder / LEARNED))
    with reading_log(folder), check_files_on_error(snapshot):
        vectors = [segment.vectors(model.ranker) for segment in snapshot.segments]
        for item, (segment, row) in snapshot.alive():
            query: dict[str, Any] = {"text": item.text}
            if item.text is None:
                query = {"vector": vectors[segment](np.array([row]))[0].tolist()}
            yield {**query, CHOSEN_FIELD: item.fields[CHOSEN_FIELD]}
