"""The front door: :class:`Index`, with the methods that users call, from create to search.

A method checks its arguments, locks the folder or reopens the state if another process has changed
it, and calls another module of this package for the work.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Unpack, overload

import numpy as np

from genius_search.border import as_id, as_id_list, as_matrix, as_numbers, as_path
from genius_search.config import SearchConfig, SearchSettings
from genius_search.errors import (
    ArtifactMismatch,
    ArtifactMissing,
    BadData,
    NetworkNeeded,
    UsageError,
)
from genius_search.forks import free_in_children, renew_in_children
from genius_search.index.hits import Hits, HitsOfQueries
from genius_search.index.query import SnapshotSearcher
from genius_search.index.request import (
    Combine,
    ModalityName,
    SearchOptions,
    SearchPart,
    SearchRequest,
    Vector,
    Vectors,
    as_request,
)
from genius_search.index.snapshot import Snapshot, UnknownItem
from genius_search.index.store import (
    CURRENT,
    LEARNED,
    MIN_DELETED_SHARE,
    Calibration,
    Root,
    StoredEmbeddings,
    absolute_folder,
    another_index,
    has_lost_manifest,
    read_head,
    read_manifest,
    require_same_index,
)
from genius_search.model import Genius
from genius_search.progress import Progress, Silent
from genius_search.records import Modality
from genius_search.search.vectors import EmbeddingBits

if TYPE_CHECKING:
    from genius_search.data.mbeir import MBeir
    from genius_search.index.build import ChangeSummary
    from genius_search.index.evaluate import Evaluation
    from genius_search.index.explain import Explanation
    from genius_search.index.filters import Filter
    from genius_search.index.fit import Fitted
    from genius_search.index.info import CheckReport, IndexInfo
    from genius_search.index.items import Item
    from genius_search.index.learned import Choices
    from genius_search.index.listing import Page
    from genius_search.index.pool import Pool, PoolSource
    from genius_search.index.request import Picture
    from genius_search.index.update import Updated, UpdatedFields, UpdatedText
    from genius_search.index.writer import Deleted, Writer
    from genius_search.recipe import FitConfig

DEFAULT_OPTIONS: Final[dict[str, Any]] = {
    "parts": (),
    "combine": "sum",
    "instruction": None,
    "modality": None,
    "where": (),
    "match": None,
    "offset": 0,
    "order_by": None,
    "facets": (),
    "group_by": None,
}
"""The options with which a search for a vector alone needs no request."""
READ_AT_ONCE: Final = 1000
"""Items that an iteration reads together."""
log = logging.getLogger("genius_search")


class State(NamedTuple):
    """A snapshot of an index, and the model that computed its IDs."""

    model: Genius
    snapshot: Snapshot


class _OpenState(NamedTuple):
    """A state of an index that is open for searching."""

    heads: tuple[bytes, ...]
    """First bytes of the manifests of the index and of its log of choices, read before the state
    was opened. They differ after every change, so a comparison shows whether the state is
    current."""
    searcher: SnapshotSearcher
    """Searches the state with the default settings."""


class Index:
    """An index of your items, in one folder.

    >>> index = Index.create("mine.index", "Pictures", encoder="clip:models/clip")  # doctest: +SKIP
    >>> print(index.search("a red bag", where={"price": {"<": 20}}, k=5))  # doctest: +SKIP
    >>> index.add("more-photos/")  # doctest: +SKIP
    >>> index.delete("holiday/blurred.jpg")  # doctest: +SKIP
    >>> index.get("holiday/beach.jpg").fields, len(index)  # doctest: +SKIP
    """

    def __init__(
        self, folder: Path, model: Genius, *, last_change: ChangeSummary | None = None
    ) -> None:
        self.folder = absolute_folder(folder)
        self._manifests = f"{self.folder}/{CURRENT}", f"{self.folder}/{LEARNED}/{CURRENT}"
        """The manifests of the index and of its log of choices. Texts, since each search opens
        both, and a Path takes longer."""
        self._last_change = last_change
        self._opening = free_in_children(Lock())
        self._log_damage: str | None = None
        """Text of the last warning about the log of choices, so that it is logged once."""
        self._state = self._open(_read_heads(self._manifests), model)
        renew_in_children(self)

    @property
    def last_change(self) -> ChangeSummary:
        """Summary of the last create, add, sync or delete of this handle, with files left out."""
        from genius_search.index.build import ChangeSummary

        return self._last_change or ChangeSummary()

    def __repr__(self) -> str:
        searcher = self._state.searcher
        count, fingerprint = searcher.snapshot.num_alive, searcher.model.fingerprint[:12]
        return f"<Index {self.folder}, {count:,} items, model fingerprint {fingerprint}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy the handle without its open files; the copy opens the folder again."""
        searcher = self._state.searcher
        manifest = searcher.snapshot.manifest
        model = None if manifest.has_own_model else searcher.model
        return _open_again, (self.folder, manifest.identity, model, searcher.model.device)

    def _renew(self) -> None:
        """Reopen the state on next use, in a forked child."""
        self._state = self._state._replace(heads=())

    def __len__(self) -> int:
        """Return the number of items."""
        return self._snapshot.num_alive

    def __iter__(self) -> Iterator[Item]:
        """Yield every item, the newest first."""
        snapshot = self._snapshot
        for number in reversed(range(len(snapshot.segments))):
            rows = snapshot.segments[number].alive_rows()
            for start in range(0, len(rows), READ_AT_ONCE):
                batch = rows[start : start + READ_AT_ONCE]
                yield from snapshot.items_at(np.full(len(batch), number), batch)

    def __contains__(self, item_id: str | int) -> bool:
        """Return whether there is an item with this id."""
        return bool(self._snapshot.item_states([as_id(item_id)]))

    def get(self, item_id: str | int) -> Item:
        """Return an item by its id; raise :class:`UnknownItem` if it is not in the index."""
        snapshot = self._snapshot
        return snapshot.item_at(snapshot.locate(item_id))

    def get_vectors(self, item_ids: str | int | Iterable[str | int]) -> np.ndarray:
        """Return the stored embeddings of items, of shape (items, dim), each of length 1.

        With fewer than 16 bits per number, they approximate the vectors that were added.

        >>> index.get_vectors(["a", "b"]) @ index.get_vectors("c")[0]  # cosines  # doctest: +SKIP

        Raises
        ------
        UnknownItem
            An item is not in the index.
        UsageError
            The index stores no embeddings.
        """
        from genius_search.index.listing import stored_vectors

        model, snapshot = self._current_state()
        return stored_vectors(snapshot, model, as_id_list(item_ids))

    def count(
        self,
        where: Filter | Sequence[str] | Mapping[str, object] = (),
        *,
        match: str | None = None,
        modality: Modality | ModalityName | None = None,
    ) -> int:
        """Return the number of items that meet conditions, as in :meth:`search`.

        >>> index.count("price<10 and brand=acme")  # doctest: +SKIP
        """
        from genius_search.index.listing import as_filter, count_items

        return count_items(self._snapshot, as_filter(where, match, modality))

    def scroll(
        self,
        cursor: str | None = None,
        *,
        limit: int = 1000,
        where: Filter | Sequence[str] | Mapping[str, object] = (),
        match: str | None = None,
        modality: Modality | ModalityName | None = None,
    ) -> Page:
        """Return a page of the items that meet conditions, or of all items, ordered by id.

        Items may be added, updated and deleted between pages: each item that exists from the first
        page to the last is returned exactly once.

        >>> page = index.scroll()  # doctest: +SKIP
        >>> page = index.scroll(page.cursor)  # until the cursor is None  # doctest: +SKIP

        Parameters
        ----------
        cursor
            :attr:`Page.cursor` of the page before. Default: the first page.
        limit
            Maximum number of items.
        where, match, modality
            Conditions as in :meth:`search`.
        """
        from genius_search.index.listing import as_filter, list_page

        return list_page(self._snapshot, as_filter(where, match, modality), cursor, limit)

    @staticmethod
    def create(
        folder: str | Path,
        pool: PoolSource,
        *,
        encoder: str | None = None,
        model: str | Path | Genius | None = None,
        embeddings: StoredEmbeddings | None = None,
        embedding_bits: EmbeddingBits | None = None,
        levels: int | None = None,
        recall: float | None = None,
        query_vectors: np.ndarray | None = None,
        captions: bool = True,
        exclude: Sequence[str] = (),
        device: str = "cpu",
        download: bool = False,
        progress: Progress | None = None,
        wait_seconds: float = 0.0,
    ) -> Index:
        """Create an index of a folder of images and texts, of a file of candidates, or of a list.

        An interrupted run resumes when it is repeated; the index appears once it is complete.
        :attr:`last_change` counts the items, and lists unusable files with the reasons.

        >>> Index.create("photos.index", "Pictures", encoder="clip:models/clip")  # doctest: +SKIP

        Parameters
        ----------
        folder
            Folder of the new index.
        pool
            A folder, a single picture or text, or a ``.jsonl`` file in M-BEIR's layout; or a list
            of pictures (Pillow images, NumPy arrays, or the bytes of files), texts, files as
            :class:`pathlib.Path`, :class:`NewItem`, or dicts with its fields. Elements without an
            id are numbered from 0. Pictures that are not files are stored in the index.
        encoder
            Spec of an encoder (:func:`genius_search.encoders.open.load_encoder`), instead of a
            model. Nothing is trained: codebooks are fitted to the pool and stored in the index.
        model
            A trained model, or its folder.
        embeddings
            Store an embedding of each item, so that hits can be re-ranked: ``fused``, the vectors
            that IDs are computed from, or ``raw``, the sums of the encoder's features (the paper's
            GENIUS^R). Default: ``none`` with a model, ``fused`` with an encoder.
        embedding_bits
            Bits per number of a stored embedding. 16 stores the embedding; 8, 4, 2 or 1 store the
            residual, for fused embeddings only. Default: 16 with a model and for raw embeddings;
            with an encoder, 8 bits, 4 from 16,385 items on, or 2 from a million on; more where
            these keep too few of the nearest items.
        levels
            Number of semantic codes in an ID, one byte each; only with an encoder. By default, IDs
            have one or two codes, and fine codes of four bits follow them, which a search without a
            generator scans in less time. Without stored embeddings, the default is 12 codes.
        recall
            Share of exact search's first ten that a search shall find, such as 0.95; only with an
            encoder and fused embeddings. The bits, the shortlist and the margin of the search are
            chosen for it (:meth:`info` says what was measured). By default 0.975 up to 100,000
            items, and 0.9 beyond.
        query_vectors
            The encoder's vectors of at least a hundred typical queries, of shape (queries, dim);
            only with an encoder. Codes then preserve more of the directions in which such queries
            differ. This helps if queries are unlike items, such as words that look for pictures,
            and items are ranked by codes alone.
        captions
            Read the captions next to pictures and inside their files.
        exclude
            Patterns of files to leave out of a folder, as in ``.gitignore``. Files named
            ``.geniusignore`` may contain more patterns.
        device, download
            Device of the model or encoder; whether it may be downloaded.
        wait_seconds
            How long to wait while another process writes to the folder.

        Raises
        ------
        UsageError
            The folder exists already, or not exactly one of model and encoder is given.
        BadData
            Nothing in the pool can be used.
        """
        from genius_search.index.build import create_index
        from genius_search.index.pool import open_pool

        if isinstance(pool, str | Path):
            pool = open_pool(_as_pool_path(pool), captions=captions, exclude=exclude)
        _refuse_matrix(pool, "Index.from_vectors(folder, X)")
        folder = absolute_folder(folder)
        opened_model, summary = create_index(
            folder,
            pool=pool,
            model=model,
            encoder=encoder,
            embeddings=embeddings,
            embedding_bits=embedding_bits,
            levels=levels,
            recall=recall,
            query_vectors=query_vectors,
            captions=captions,
            device=device,
            download=download,
            progress=progress or Silent(),
            wait_seconds=wait_seconds,
        )
        return Index(folder, opened_model, last_change=summary)

    @staticmethod
    def from_vectors(
        folder: str | Path,
        vectors: Vectors,
        *,
        ids: Iterable[str | int] | None = None,
        modalities: Modality | ModalityName | Sequence[Modality | ModalityName] = Modality.TEXT,
        texts: Sequence[str | None] | None = None,
        fields: Sequence[Mapping[str, object] | None] | None = None,
        encoder: str | None = None,
        model: str | Path | Genius | None = None,
        embeddings: StoredEmbeddings | None = None,
        embedding_bits: EmbeddingBits | None = None,
        levels: int | None = None,
        recall: float | None = None,
        query_vectors: np.ndarray | None = None,
        device: str = "cpu",
        download: bool = False,
        progress: Progress | None = None,
        wait_seconds: float = 0.0,
    ) -> Index:
        """Create an index of vectors that you have.

        >>> Index.from_vectors("mine.index", np.load("vectors.npy"), ids=names)  # doctest: +SKIP

        Parameters
        ----------
        folder
            Folder of the new index.
        vectors
            Matrix of shape (items, dim); it may be memory-mapped. Rows are scaled to unit length,
            so items are compared by cosine.
        ids
            Id of each item, a text or a whole number. Default: the numbers of the rows.
        modalities
            Modality of each item, or one for all.
        texts
            Text of each item, for ``match`` and ``hybrid``.
        fields
            Values of each item, for ``where``.
        encoder, model
            Encoder or trained model that the vectors come from. Without either, the index has no
            encoder and is searched by vectors.
        embeddings, embedding_bits, levels, recall, query_vectors, device, download, wait_seconds
            See :meth:`create`.

        Raises
        ------
        UsageError
            The folder exists already, or the number of ids, texts or fields is not that of the
            vectors.
        BadData
            A vector is zero or has a number that is not finite, or an id occurs twice. The message
            names the row.
        """
        from genius_search.index.pool import pool_from_vectors

        return Index.create(
            folder,
            pool_from_vectors(vectors, ids, modalities=modalities, texts=texts, fields=fields),
            encoder=encoder,
            model=model,
            embeddings=embeddings,
            embedding_bits=embedding_bits,
            levels=levels,
            recall=recall,
            query_vectors=query_vectors,
            device=device,
            download=download,
            progress=progress,
            wait_seconds=wait_seconds,
        )

    @staticmethod
    def open(
        folder: str | Path,
        *,
        model: str | Path | Genius | None = None,
        device: str = "cpu",
        download: bool = False,
        with_encoder: bool = True,
    ) -> Index:
        """Open an index by its folder, or by the name of its data set on the Hugging Face hub.

        Parameters
        ----------
        model
            The model, its folder, or its name on the hub. Default: the model that the index names.
        device
            Device of the model.
        download
            Download the index, the model and its encoder if they are not on this machine.
        with_encoder
            Open the encoder now, instead of when it is first used.

        Raises
        ------
        ArtifactMissing
            There is no index, or its model has moved.
        ArtifactMismatch
            The model is not the one that computed the IDs.
        NetworkNeeded
            The index or its model is not on this machine, and must not or cannot be downloaded.
        """
        name, folder = str(folder), absolute_folder(folder)
        if not folder.exists():
            from genius_search.hub import DATASETS, find_or_pull, is_name

            if is_name(name):
                folder = absolute_folder(find_or_pull(f"{DATASETS}{name}", download=download))
        manifest = read_manifest(folder)
        open_model = partial(
            Genius.open, device=device, download=download, with_encoder=with_encoder
        )
        if model is None:
            model = _open_named_model(folder, manifest.locate_model(folder), open_model)
        elif not isinstance(model, Genius):
            model = open_model(model)
        if model.fingerprint != manifest.model_fingerprint:
            fingerprints = f"{manifest.model_fingerprint[:12]}, not {model.fingerprint[:12]}"
            raise ArtifactMismatch(
                f"the IDs of {folder} were computed by another model than {model.folder} "
                f"(fingerprint {fingerprints}), so this model cannot search them: create the index "
                "again, or give the right `model=FOLDER`"
            )
        return Index(folder, model)

    def add(
        self,
        pool: PoolSource,
        *,
        captions: bool = True,
        exclude: Sequence[str] = (),
        progress: Progress | None = None,
        wait_seconds: float = 0.0,
    ) -> ChangeSummary:
        """Add a folder, a file, or a list of items, without retraining.

        New items can be searched at once. Only new and changed items are encoded: files that were
        moved, renamed or touched are recognised by their contents. Items with unreadable images are
        left out; if they are in the index already, they stay unchanged. When this returns, all
        changes are on the disk.

        The index remembers an added folder (:attr:`roots`), so that :meth:`sync` follows it. Ids of
        the first folder are paths within it; ids of further folders start with the folder's name,
        as in ``more/dog.jpg``. Adding a folder or file inside a remembered one updates that part.
        Any other single file is remembered without its folder; its id is its name.

        An item of a list replaces the item with the same id, unless that came from a folder.

        >>> index.add("more-photos/")  # doctest: +SKIP
        >>> index.add([NewItem("kite", "a red kite", photo, {"price": 12})])  # doctest: +SKIP

        Parameters
        ----------
        pool
            See :meth:`create`. Each item of a list needs an id; unusable items are left out, with
            reasons.
        captions, exclude
            See :meth:`create`. A remembered folder keeps the settings it was first added with.
        wait_seconds
            How long to wait while another process changes the index. Changes by other threads of
            this process are always waited for.

        Raises
        ------
        BadData
            Nothing in the folder or file can be used. The message names files and reasons.
        """
        from genius_search.index.pool import Pool, is_candidate_list, open_pool, pool_from_items
        from genius_search.index.sync import update_from_roots

        if not isinstance(pool, str | Path):
            _refuse_matrix(pool, "index.add_vectors(X, ids=...)")
            with self._open_writer(wait_seconds) as writer:
                if not isinstance(pool, Pool):
                    pool = pool_from_items(pool, writer, captions=captions, has_ids=True)
                return self._add_pool(writer, pool, may_be_empty=True, progress=progress)
        path = _as_pool_path(pool)
        candidates = open_pool(path, captions=captions) if is_candidate_list(path) else None
        with self._open_writer(wait_seconds) as writer:
            if candidates is not None:
                return self._add_pool(writer, candidates, may_be_empty=False, progress=progress)
            self._last_change = update_from_roots(
                writer,
                self.model,
                path,
                captions=captions,
                exclude=exclude,
                deletes=False,
                progress=progress or Silent(),
            )
            return self._last_change

    def add_vectors(
        self,
        vectors: Vectors,
        *,
        ids: Iterable[str | int],
        modalities: Modality | ModalityName | Sequence[Modality | ModalityName] = Modality.TEXT,
        texts: Sequence[str | None] | None = None,
        fields: Sequence[Mapping[str, object] | None] | None = None,
        progress: Progress | None = None,
        wait_seconds: float = 0.0,
    ) -> ChangeSummary:
        """Add vectors of the index's encoder, of shape (items, dim).

        An item replaces the one with the same id, unless that came from a folder.

        >>> index.add_vectors(vectors, ids=["a", "b"], texts=["a kite", "a boat"])  # doctest: +SKIP

        Parameters
        ----------
        vectors, ids, modalities, texts, fields
            See :meth:`from_vectors`. Each item needs an id.
        wait_seconds
            See :meth:`add`.

        Raises
        ------
        BadData
            A vector cannot be used. The message names the row.
        """
        from genius_search.index.pool import pool_from_vectors

        pool = pool_from_vectors(vectors, ids, modalities=modalities, texts=texts, fields=fields)
        with self._open_writer(wait_seconds) as writer:
            return self._add_pool(writer, pool, may_be_empty=False, progress=progress)

    def _add_pool(
        self, writer: Writer, pool: Pool, *, may_be_empty: bool, progress: Progress | None
    ) -> ChangeSummary:
        """Add an open pool; ``may_be_empty`` accepts a pool without usable items."""
        from genius_search.index.build import add_pool

        self._last_change = add_pool(
            writer, self.model, pool, may_be_empty=may_be_empty, progress=progress or Silent()
        )
        return self._last_change

    def sync(
        self,
        path: str | Path | None = None,
        *,
        delete_missing: int | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
        wait_seconds: float = 0.0,
    ) -> ChangeSummary:
        """Update the index from the folders that it follows (:attr:`roots`).

        New and changed files are added as by :meth:`add`, items of moved files get new ids, and
        items whose files are gone are deleted. Items stay if their file, folder or disk cannot be
        read, or if more than half of the items of their folder are gone; these are counted as
        ``missing``.
        Items that were added as lists or vectors always stay.

        Parameters
        ----------
        path
            A remembered folder, a part of one, or the new path of a folder that was moved. Default:
            all folders.
        delete_missing
            Delete every item whose file is gone, even the missing ones, if there are at most this
            many.
        dry_run
            Change nothing, and list the changes in the result.

        Raises
        ------
        UsageError
            The index does not follow this path, or more than ``delete_missing`` items would be
            deleted. Nothing has changed then.
        """
        from genius_search.index.sync import update_from_roots

        with self._open_writer(wait_seconds) as writer:
            changes = update_from_roots(
                writer,
                self.model,
                None if path is None else as_path(path),
                deletes=True,
                delete_missing=delete_missing,
                dry_run=dry_run,
                progress=progress or Silent(),
            )
            if not dry_run:
                self._last_change = changes
            return changes

    def update(
        self,
        item_ids: str | int | Iterable[str | int],
        *,
        fields: UpdatedFields = None,
        text: UpdatedText = None,
        progress: Progress | None = None,
        wait_seconds: float = 0.0,
    ) -> Updated:
        """Change fields and texts of one or several items in one step, without their vectors.

        When this returns, the change is on the disk. An updated item is listed as a new one.

        >>> index.update("kite", fields={"price": 9, "sale": None})  # doctest: +SKIP
        >>> index.update(["a", "b"], fields=[{"price": 1}, {"price": 2}])  # doctest: +SKIP

        Parameters
        ----------
        fields
            New values by name for all items, or a list with those of each. None removes a field;
            fields without a new value stay. The fields of a file stay until the file changes.
        text
            The new text, or a list with that of each item. An empty text removes it. An item that
            was added as a vector keeps the vector; any other one is encoded again.
        wait_seconds
            See :meth:`add`.

        Raises
        ------
        UsageError
            A field has no form in JSON, the text is that of a file, or there is nothing to update.
        """
        from genius_search.index.build import ChangeSummary
        from genius_search.index.update import read_updates, update_items

        updates = read_updates(item_ids, fields, text)
        with self._open_writer(wait_seconds) as writer:
            done = update_items(writer, self.model, updates, progress or Silent())
            self._last_change = ChangeSummary(done.updated, done.updated, left_out=done.left_out)
            return done

    def delete(
        self,
        item_ids: str | int | Iterable[str | int] | None = None,
        *,
        where: Filter | Sequence[str] | Mapping[str, object] = (),
        match: str | None = None,
        modality: Modality | ModalityName | None = None,
        wait_seconds: float = 0.0,
    ) -> Deleted:
        """Delete one or several items, or all items that meet conditions.

        The result has the number of deleted items, and lists ids that are not in the index.

        >>> index.delete(where="price<10 and brand=acme").deleted  # doctest: +SKIP

        Parameters
        ----------
        where, match, modality
            Conditions as in :meth:`search`, instead of ids.

        Raises
        ------
        UsageError
            There are neither ids nor conditions, or both.
        """
        from genius_search.index.build import ChangeSummary
        from genius_search.index.listing import as_delete_filter
        from genius_search.index.writer import Deleted

        conditions = as_delete_filter(where, match, modality, has_ids=item_ids is not None)
        ids = [] if item_ids is None else as_id_list(item_ids)
        with self._open_writer(wait_seconds) as writer:
            if conditions is None:
                done = writer.delete(ids)
            else:
                done = Deleted(writer.delete_where(conditions), [])
            self._last_change = ChangeSummary(deleted=done.deleted)
            return done

    def learn(
        self,
        chosen: str | int,
        text: str | None = None,
        *,
        image: Picture | None = None,
        vector: Vector | None = None,
        parts: Sequence[SearchPart] = (),
        instruction: str | None = None,
        wait_seconds: float = 0.0,
    ) -> None:
        """Remember that an item was chosen for a query, so that similar queries find it earlier.

        The choice takes effect at once, also in other processes. Nothing is learned unless this is
        called. The rise of an item is bounded, and a repeated choice counts once.

        >>> index.learn("kites/7.jpg", "something to fly")  # doctest: +SKIP

        Parameters
        ----------
        chosen
            Id of the item.
        text, image, vector, parts, instruction
            The query, as in :meth:`search`.

        Raises
        ------
        UnknownItem
            The item is not in the index.
        """
        choice = {
            "chosen": chosen,
            "text": text,
            "image": image,
            "vector": vector,
            "parts": parts,
            "instruction": instruction,
        }
        if self.learn_many([choice], wait_seconds=wait_seconds):
            raise UnknownItem(
                f"{self.folder} has no item {chosen!r}, so it cannot have been chosen"
            )

    def learn_many(
        self, choices: Iterable[Mapping[str, Any]], *, wait_seconds: float = 0.0
    ) -> list[str]:
        """Remember several choices in one step; return the chosen ids that are not in the index.

        Each choice is a mapping with ``chosen`` and the query's parameters, as in :meth:`learn`.
        """
        from genius_search.index.learned import learn

        unknown_ids = learn(
            self.folder,
            *self._current_state(),
            choices,
            refit=lambda log: Index.open(log).refit(wait_seconds=wait_seconds),
            wait_seconds=wait_seconds,
        )
        self._current_state()
        return unknown_ids

    def forget(
        self, *, chosen: str | int | None = None, text: str | None = None, wait_seconds: float = 0.0
    ) -> int:
        """Forget choices, and return their number.

        With ``chosen``, the choices of this item; with ``text``, those for this query; with both,
        the choices of this item for this query; with neither, all choices.
        """
        from genius_search.index.learned import forget

        require_same_index(self.folder, self._state.searcher.snapshot.manifest)
        return forget(self.folder, chosen=chosen, text=text, wait_seconds=wait_seconds)

    def choices(self) -> Iterator[dict[str, Any]]:
        """Yield all learned choices in the form that :meth:`learn_many` takes.

        A query that is not a text alone is represented by its feature, a vector.
        """
        from genius_search.index.learned import read_choices

        require_same_index(self.folder, self._state.searcher.snapshot.manifest)
        return read_choices(self.folder)

    def compact(self, *, min_deleted: float = MIN_DELETED_SHARE, wait_seconds: float = 0.0) -> None:
        """Free the space of deleted items, in time proportional to their number.

        Commands and the service compact after each change.

        Parameters
        ----------
        min_deleted
            Rewrite segments in which at least this share of the items is deleted. With 0, the whole
            index is rewritten as one segment, if anything is deleted.
        """
        from genius_search.index.writer import first_to_compact

        segments = self._snapshot.segments
        if min_deleted <= 0 or first_to_compact(segments, min_deleted) < len(segments):
            with self._open_writer(wait_seconds) as writer:
                writer.compact(min_deleted)

    def refit(
        self,
        *,
        encoder: str | None = None,
        levels: int | None = None,
        recall: float | None = None,
        query_vectors: np.ndarray | None = None,
        device: str = "cpu",
        download: bool = False,
        progress: Progress | None = None,
        wait_seconds: float = 0.0,
    ) -> int:
        """Fit the codebooks again, after an index has grown, or for another encoder.

        All items get new IDs, computed from the stored embeddings; below 8 bits, each refit loses a
        little accuracy. A calibration is removed. Searches continue meanwhile.

        With an encoder, all items are encoded with it; ids, fields, texts and choices stay. Return
        the number of choices that could not be encoded again: those for pictures or vectors.

        Parameters
        ----------
        encoder
            Spec of another encoder, as in :meth:`create`; an index of words over pictures becomes
            one that finds them by their contents.
        levels
            Number of semantic codes in an ID. Default: unchanged.
        recall
            Share of exact search's first ten to find, as in :meth:`create`. Default: unchanged. The
            bits of embeddings stay as they are.
        query_vectors
            Typical queries, as in :meth:`create`, which replace earlier ones.
        device, download
            Device of the new encoder; whether it may be downloaded.

        Raises
        ------
        UsageError
            The index was created with a trained model, stores no fused embeddings, or has no items.
        BadData
            The new encoder cannot read an item; nothing is changed.
        """
        from genius_search.index.fit import refit_index

        if encoder is not None:
            settings = {"levels": levels, "recall": recall, "query_vectors": query_vectors}
            opener = {"device": device, "download": download}
            return self._reencode(encoder, settings, opener, progress or Silent(), wait_seconds)
        with self._open_writer(wait_seconds) as writer:
            refit_index(
                writer,
                self.model,
                levels=levels,
                recall=recall,
                query_vectors=query_vectors,
                progress=progress or Silent(),
            )
        return 0

    def _reencode(
        self,
        spec: str,
        settings: Mapping[str, Any],
        opener: Mapping[str, Any],
        progress: Progress,
        wait_seconds: float,
    ) -> int:
        """Encode all items and choices with another encoder."""
        from genius_search.encoders.open import absolute_spec, load_encoder
        from genius_search.index.reencode import reencode_choices, reencode_index

        encoder = load_encoder(absolute_spec(spec), **opener)
        with self._open_writer(wait_seconds) as writer:
            # A run that was killed before the choices were encoded is continued.
            if self.model.encoder.fingerprint != encoder.fingerprint:
                reencode_index(writer, encoder, **settings, progress=progress)
            model = Genius.open(writer.snapshot.manifest.locate_model(self.folder))
            return reencode_choices(self.folder, model, writer.snapshot, wait_seconds)

    def read_pictures(self, *, progress: Progress | None = None, wait_seconds: float = 0.0) -> int:
        """Read the texts in pictures that were added since the last call; return their number.

        The texts are found by their words, in :meth:`search` and with ``match``, and by meaning if
        the encoder reads texts only; :attr:`Item.picture_text` has the lines with their boxes.
        Searches continue meanwhile, and an interrupted call can be repeated.

        Raises
        ------
        MissingExtra
            The extra ``ocr`` is not installed.
        """
        from genius_search.index.picture_text import read_pictures

        model, snapshot = self._current_state()
        return read_pictures(
            snapshot, model, partial(self._open_writer, wait_seconds), progress or Silent()
        )

    def train(
        self,
        pairs: str | Path | None = None,
        *,
        config: FitConfig | None = None,
        force: bool = False,
        device: str = "cpu",
        progress: Progress | None = None,
        wait_seconds: float = 0.0,
    ) -> Fitted:
        """Train the fusion on queries with right answers, and replace the model of the index.

        Only for an index that was created with an encoder. Items get new IDs; ids and fields stay.
        A calibration is removed. Searches continue meanwhile. A tenth of the pairs is held out: the
        new model is adopted only if it finds more of their answers than the old one, by over a
        standard error. The held-out pairs also choose the weight of densities.

        Parameters
        ----------
        pairs
            Queries with right answers: a ``.jsonl`` file with ``text`` or ``image``, and ``id``, on
            each line, or a data set in M-BEIR's layout. Default: the learned choices for texts.
        config
            Settings of the training. Default: the preset ``small``.
        force
            Adopt the new model in any case.
        device
            Device of the training.

        Raises
        ------
        UsageError
            The index was created with a trained model.
        BadData
            There are too few pairs.
        """
        from genius_search.index.fit import fit_index
        from genius_search.recipe import preset

        with self._open_writer(wait_seconds) as writer:
            return fit_index(
                writer,
                self.model,
                None if pairs is None else as_path(pairs),
                config or preset("small"),
                force=force,
                device=device,
                progress=progress or Silent(),
            )

    def calibrate(
        self,
        pairs: str | Path | None = None,
        *,
        split: str = "val",
        precision: float = 0.8,
        progress: Progress | None = None,
        wait_seconds: float = 0.0,
    ) -> Calibration:
        """Calibrate scores with queries of known answers, so that hits have probabilities.

        Half of the queries fit the calibration, and the other half measures it. The weight of
        densities that finds the most answers becomes the index's default. Calibrate again when the
        index has grown much.

        >>> index.calibrate("pairs.jsonl").threshold  # doctest: +SKIP

        Parameters
        ----------
        pairs
            Queries whose right answers are items of the index: a ``.jsonl`` file or a data set in
            M-BEIR's layout, as in :meth:`train`. Default: the learned choices.
        split
            Split of the data set.
        precision
            Share of good matches that should be right; sets the threshold of
            :attr:`Hits.good_match`.

        Raises
        ------
        UsageError
            The precision is not between 0 and 1.
        BadData
            Too few queries have a right answer in the index.
        """
        from genius_search.index.calibrate import calibrate, describe_source, read_pairs

        source = None if pairs is None else as_path(pairs)
        searcher = self._current_searcher()
        calibration = calibrate(
            searcher.model,
            searcher.snapshot,
            searcher.config,
            read_pairs(self.folder, source, split=split),
            source=describe_source(source, split),
            precision=precision,
            progress=progress or Silent(),
        )
        self._keep_calibration(calibration, wait_seconds=wait_seconds)
        return calibration

    def evaluate(
        self,
        data: str | Path | MBeir,
        *,
        split: str = "test",
        max_queries: int = 0,
        progress: Progress | None = None,
    ) -> Evaluation:
        """Measure searches with the queries of a data set, next to exact search.

        The items of the index must be candidates of the data set, with their ids.

        >>> index.evaluate("data").rows[0].measures["R@5"]  # doctest: +SKIP

        Parameters
        ----------
        data
            Data set in M-BEIR's layout, or its folder.
        split
            Split of the data set.
        max_queries
            Number of queries of each row at most, evenly spaced; 0 means all.

        Raises
        ------
        BadData
            The data set is incomplete, or no query has a right answer in the index.
        """
        from genius_search.data.mbeir import MBeir
        from genius_search.index.evaluate import evaluate_index

        data = data if isinstance(data, MBeir) else MBeir(as_path(data))
        return evaluate_index(
            *self._current_state(),
            data,
            split=split,
            max_queries=max_queries,
            progress=progress or Silent(),
        )

    def check(self) -> CheckReport:
        """Compare every file with its checksum.

        Raises
        ------
        ArtifactMismatch, ArtifactMissing
            A file is damaged or missing. The message names it.
        """
        from genius_search.index.info import check

        return check(self.folder, self._snapshot, model_folder=self.model.folder)

    @overload
    def search(
        self,
        query: str | SearchRequest | None = None,
        *,
        image: Picture | None = None,
        vector: Vector | None = None,
        parts: Sequence[SearchPart] = (),
        combine: Combine = "sum",
        instruction: str | None = None,
        modality: Modality | ModalityName | None = None,
        where: Filter | Sequence[str] | Mapping[str, object] = (),
        match: str | None = None,
        hybrid: bool = True,
        k: int = 10,
        offset: int = 0,
        order_by: str | None = None,
        facets: Sequence[str] | Mapping[str, Sequence[float]] = (),
        group_by: str | None = None,
        config: SearchConfig | None = None,
    ) -> Hits: ...

    @overload
    def search(
        self,
        query: list[str] | list[SearchRequest] | list[str | SearchRequest],
        **options: Unpack[SearchOptions],
    ) -> list[Hits]: ...

    def search(
        self,
        query: str | SearchRequest | Sequence[str | SearchRequest] | None = None,
        *,
        image: Picture | None = None,
        vector: Vector | None = None,
        parts: Sequence[SearchPart] = (),
        combine: Combine = "sum",
        instruction: str | None = None,
        modality: Modality | ModalityName | None = None,
        where: Filter | Sequence[str] | Mapping[str, object] = (),
        match: str | None = None,
        hybrid: bool = True,
        k: int = 10,
        offset: int = 0,
        order_by: str | None = None,
        facets: Sequence[str] | Mapping[str, Sequence[float]] = (),
        group_by: str | None = None,
        config: SearchConfig | None = None,
    ) -> Hits | list[Hits]:
        """Return the best items for a text, an image, both, a vector, or weighted parts.

        A list of queries returns a list with the hits of each; that is faster than one search after
        another. The options apply to each query of a list.

        >>> index.search("a red bag", k=3, modality="image", where=["price<20"])  # doctest: +SKIP
        >>> index.search("in red", image="bag.jpg")  # doctest: +SKIP
        >>> index.search(["a bag", "a kite"], k=5)  # doctest: +SKIP
        >>> index.search(where=["folder=Norway"], offset=10)  # newest first # doctest: +SKIP
        >>> index.search("a bag", order_by="-date", facets=["brand"]).facets  # doctest: +SKIP

        Parameters
        ----------
        query
            A text, alone or together with ``image``; a :class:`SearchRequest`, which contains its
            options; or a list of texts or requests.
        image, vector, parts, combine
            Further parts of the query; see :class:`SearchRequest`.
        instruction, modality, where, match
            Which items to find. Without a query, all items that meet these conditions are returned,
            the newest first.
        hybrid, k, offset
            How to search, and which hits to return.
        order_by, facets, group_by
            Sort by a field (``price``, ``-price``), count values, return one hit for each value.
        config
            Settings that differ from :attr:`settings` in this search; or a full set of settings,
            such as :data:`genius_search.PAPER_SEARCH`.

        Raises
        ------
        UsageError
            There is no query, an option is out of range, or a condition cannot be parsed.
        """
        searcher = self._current_searcher(config)
        options: dict[str, Any] = {
            "parts": parts,
            "combine": combine,
            "instruction": instruction,
            "modality": modality,
            "where": where,
            "match": match,
            "offset": offset,
            "order_by": order_by,
            "facets": facets,
            "group_by": group_by,
        }
        if vector is not None and query is None and image is None and options == DEFAULT_OPTIONS:
            return searcher.search_vector(vector, k)
        options |= {"image": image, "vector": vector, "hybrid": hybrid, "k": k}
        if not isinstance(query, list | tuple):
            return searcher.search([as_request(query, options)])[0]
        return HitsOfQueries(searcher.search([as_request(part, options) for part in query]))

    def search_vectors(self, vectors: Vectors, **options: Unpack[SearchOptions]) -> list[Hits]:
        """Search with each row of a matrix of shape (queries, dim); options as in :meth:`search`.

        >>> index.search_vectors(np.load("queries.npy"), k=10)  # doctest: +SKIP
        """
        config = options.pop("config", None)
        vectors = as_numbers(vectors, "the vectors")
        rows = as_matrix(vectors, "the vectors") if len(np.atleast_1d(vectors)) else ()
        searcher = self._current_searcher(config)
        if not options.keys() - {"k"}:
            k = options.get("k", 10)
            if len(rows) == 1:
                return HitsOfQueries([searcher.search_vector(row, k) for row in rows])
            return HitsOfQueries(searcher.search_vectors(rows, k))
        requests = [SearchRequest(**{**options, "vector": row}) for row in rows]
        return HitsOfQueries(searcher.search(requests))

    def explain(
        self,
        item_id: str | int,
        query: str | SearchRequest | None = None,
        **options: Unpack[SearchOptions],
    ) -> Explanation:
        """Explain, code by code, why a search finds an item or does not.

        Options are those of :meth:`search`. If the query has alternatives (``combine="any"``), the
        one that ranks the item best is explained.

        >>> print(index.explain("kites/7.jpg", "something to fly").rank)  # doctest: +SKIP

        Raises
        ------
        UnknownItem
            The item is not in the index.
        """
        from genius_search.index.explain import explain

        config = options.pop("config", None)
        return explain(self._current_searcher(config), as_request(query, {**options}), item_id)

    def info(self) -> IndexInfo:
        """Return the number of items, IDs, collisions and bytes."""
        from genius_search.index.info import describe_index

        return describe_index(self.folder, self._snapshot)

    @property
    def roots(self) -> tuple[Root, ...]:
        """Folders and single files that the index follows, in the order they were added."""
        return self._snapshot.manifest.roots

    @property
    def model(self) -> Genius:
        """The model that assigned the IDs."""
        return self._state.searcher.model

    @property
    def settings(self) -> SearchSettings:
        """Default search settings, which the ``config`` of a search changes.

        See :func:`genius_search.index.settings.default_settings`. Without a generator, or with
        codebooks that were fitted to the pool, hits are ranked by fused embeddings if the index
        stores them.
        """
        return self._current_searcher().config

    @property
    def calibration(self) -> Calibration | None:
        """The calibration made by :meth:`calibrate`, if any."""
        return self._snapshot.manifest.calibration

    def _current_state(self) -> State:
        """Return the model and the snapshot with every change that was made before the call."""
        searcher = self._current_searcher()
        return State(searcher.model, searcher.snapshot)

    @property
    def _snapshot(self) -> Snapshot:
        """The current snapshot; reopened if another handle or process has changed the index."""
        return self._current_searcher().snapshot

    def _keep_calibration(self, calibration: Calibration, *, wait_seconds: float = 0.0) -> None:
        """Store a calibration, and make the weight of densities it was made with the default."""
        with self._open_writer(wait_seconds) as writer:
            writer.update_manifest(
                calibration=calibration, density_weight=calibration.search.density_weight
            )

    @contextlib.contextmanager
    def _open_writer(self, wait_seconds: float) -> Iterator[Writer]:
        """Lock the index to change it.

        The state is reopened before, to see the changes of other writers, and after, to close
        removed files.
        """
        from genius_search.index.writer import open_writer

        before = self._state.searcher.snapshot
        with open_writer(self.folder, wait_seconds=wait_seconds, before=before) as writer:
            self._current_state()
            yield writer
        self._current_state()

    def _current_searcher(self, config: SearchConfig | None = None) -> SnapshotSearcher:
        """Return the searcher of the current state, with settings changed by ``config``.

        If the manifests have changed, one thread reopens the state while others wait, so that an
        older state never replaces a newer one.
        """
        state = self._state
        if _read_heads(self._manifests) != state.heads:
            with self._opening:
                heads = _read_heads(self._manifests)
                if heads != self._state.heads:
                    self._state = self._open(heads, self.model, self._state)
                state = self._state
        searcher = state.searcher
        if config is None:
            return searcher
        adjusted = SnapshotSearcher(searcher.model, searcher.snapshot, config, searcher.choices)
        return searcher if adjusted.config == searcher.config else adjusted

    def _open(
        self, heads: tuple[bytes, ...], model: Genius, before: _OpenState | None = None
    ) -> _OpenState:
        """Open the state that the manifests had when their heads were read, or a newer one.

        Raises
        ------
        ArtifactMissing, ArtifactMismatch
            The index was removed or is damaged, or another one was created in its place.
        """
        if before is not None and before.heads[:1] == heads[:1]:  # only the log has changed
            searcher = copy.copy(before.searcher)
            searcher.choices = self._open_log(searcher.model, searcher.snapshot)
            return _OpenState(heads, searcher)
        snapshot = Snapshot.open(self.folder, None if before is None else before.searcher.snapshot)
        manifest = snapshot.manifest
        if before is not None and manifest.identity != before.searcher.snapshot.manifest.identity:
            raise another_index(self.folder)
        if manifest.model_fingerprint != model.fingerprint and manifest.has_own_model:
            # the index was refitted or trained
            model = Genius.open(manifest.locate_model(self.folder), device=model.device)
        if manifest.model_fingerprint != model.fingerprint:
            raise another_index(self.folder)
        snapshot.check_arrays(model.codebooks, model.unchecked_files)
        choices = self._open_log(model, snapshot)
        return _OpenState(heads, SnapshotSearcher(model, snapshot, choices=choices))

    def _open_log(self, model: Genius, snapshot: Snapshot) -> Choices | None:
        """Open the log of choices, itself an index of queries; None if there is no choice.

        If the log is damaged, a warning is logged, and searches do without it.
        """
        log_folder = self.folder / LEARNED
        # An empty manifest has the same head as a missing one.
        if not ((log_folder / CURRENT).exists() or has_lost_manifest(log_folder)):
            return None
        from genius_search.index.learned import Choices, DamagedLog, reading_log

        try:
            with reading_log(self.folder):
                log_index = Index.open(log_folder)
                log_searcher = log_index._state.searcher  # noqa: SLF001  without reopening it
                if log_searcher.model.dim != model.dim:
                    raise ArtifactMismatch(
                        f"it has queries of {log_searcher.model.dim} numbers, and the index has "
                        f"{model.dim}"
                    )
                return Choices(log_searcher, snapshot) if log_searcher.snapshot.num_alive else None
        except DamagedLog as error:
            if str(error) != self._log_damage:
                log.warning("%s", error)
            self._log_damage = str(error)
            return None


def current_state(index: Index) -> State:
    """Return the model and the current snapshot of an index.

    Other packages of the product use them; users have the methods of :class:`Index`.
    """
    return index._current_state()  # noqa: SLF001  see above


def is_current(index: Index) -> bool:
    """Return whether a search needs no new state: the index has not changed since the last one."""
    return _read_heads(index._manifests) == index._state.heads  # noqa: SLF001  see above


def current_searcher(index: Index, config: SearchConfig | None = None) -> SnapshotSearcher:
    """Return the searcher of the current state, with settings changed by ``config``."""
    return index._current_searcher(config)  # noqa: SLF001  see above


def _as_pool_path(pool: str | Path) -> Path:
    """Return the path of a pool; refuse an empty name, which would be the current folder.

    Raises
    ------
    BadData
        There is no such file or folder.
    """
    if not str(pool):
        raise UsageError(
            "the pool has an empty name; give a folder or a file, or Path('.') for this folder"
        )
    path = as_path(pool)
    if not os.path.exists(path):  # noqa: PTH110  False whatever the error
        raise BadData(f"{path}: there is no such file or folder")
    return path


def _refuse_matrix(pool: object, remedy: str) -> None:
    """Refuse a matrix of vectors in place of a pool; its rows would be read as pictures."""
    if isinstance(pool, np.ndarray) and pool.ndim <= 2:
        raise UsageError(
            f"the pool is an array of shape {pool.shape}; add vectors with {remedy}; pictures have "
            "the shape (height, width, 3)"
        )


def _open_named_model(
    index_folder: Path, model_name: str, open_model: Callable[[str], Genius]
) -> Genius:
    """Open the model that the manifest of an index names; errors say how to name another one."""
    remedy = "say where it is with `model=FOLDER`"
    if not model_name:
        raise ArtifactMissing(f"{index_folder} does not say where its model is; {remedy}")
    try:
        return open_model(model_name)
    except (ArtifactMissing, NetworkNeeded) as error:
        raise type(error)(f"the model of {index_folder}: {error}; or {remedy}") from None


def _open_again(folder: Path, identity: str, model: Genius | None, device: str) -> Index:
    """Open the index of a pickled handle; the encoder is opened when it is first used."""
    index = Index.open(folder, model=model, device=device, with_encoder=False)
    if current_state(index).snapshot.manifest.identity != identity:
        raise another_index(folder)
    return index


def _read_heads(manifests: tuple[str, str]) -> tuple[bytes, bytes]:
    """Return the first bytes of the manifests of an index and of its log of choices.

    Every change of an index or of its log changes them.
    """
    manifest, log_manifest = manifests
    return read_head(manifest), read_head(log_manifest)
