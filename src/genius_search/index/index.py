"""The index: IDs and items of a pool in one folder, searched with the model that assigned the IDs."""

from __future__ import annotations

import contextlib
import copy
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Shaped

from genius_search.border import as_id, as_id_list, as_matrix, as_path
from genius_search.config import SearchConfig, SearchSettings
from genius_search.errors import ArtifactMismatch, ArtifactMissing, NetworkNeeded, UsageError
from genius_search.forks import free_in_children, renew_in_children
from genius_search.index.query import SnapshotSearcher
from genius_search.index.request import Hits, SearchHit, SearchRequest
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
    from genius_search.index.build import ChangeSummary
    from genius_search.index.explain import Explanation
    from genius_search.index.fit import Fitted
    from genius_search.index.info import CheckReport, IndexInfo
    from genius_search.index.items import Item
    from genius_search.index.learned import Choices
    from genius_search.index.pool import PoolSource
    from genius_search.index.writer import Deleted, Writer
    from genius_search.recipe import FitConfig

READ_AT_ONCE: Final = 1000
"""Items that are read together in an iteration."""
WATCH_SECONDS: Final = 30.0
"""Time between two looks at the files of an index that is served."""
log = logging.getLogger("genius_search")

Vectors: TypeAlias = Shaped[np.ndarray, "..."]
"""Of shape (rows, dim), which is checked."""


class _Opened(NamedTuple):
    """A state of an index and its model."""

    heads: tuple[bytes, ...]
    """Of the manifests of the index and of its log, before the state was opened (:func:`_read_heads`)."""
    searcher: SnapshotSearcher
    """With the default settings."""


class Index:
    """An index of your own items.

    >>> index = Index.open("photos.index")  # doctest: +SKIP
    >>> hits = index.search(text="a red bag", modality="image", where=["price<20"], k=3)  # doctest: +SKIP
    >>> for hit in hits:  # doctest: +SKIP
    ...     print(hit.id, hit.score)
    >>> index.add("more-photos/")  # doctest: +SKIP
    >>> index.delete("holiday/blurred.jpg")  # doctest: +SKIP
    >>> index.get("holiday/beach.jpg").fields, len(index)  # doctest: +SKIP
    """

    def __init__(self, folder: Path, model: Genius) -> None:
        self.folder = absolute_folder(folder)
        self._opening = free_in_children(Lock())
        self.damage: str | None = None
        """What :meth:`watch` has found to be damaged, and what to do."""
        self._log_damage: str | None = None
        """What the last warning about the log of choices said."""
        self._opened = self._open(_read_heads(self.folder), model)
        renew_in_children(self)

    def __repr__(self) -> str:
        searcher = self._opened.searcher
        count, fingerprint = searcher.snapshot.num_alive, searcher.model.fingerprint[:12]
        return f"<Index {self.folder}, {count:,} items, model fingerprint {fingerprint}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy the handle without what it has open: the folder is opened again."""
        searcher = self._opened.searcher
        manifest = searcher.snapshot.manifest
        model = None if manifest.has_own_model else searcher.model
        return _open_again, (self.folder, manifest.identity, model, searcher.model.device)

    def renew(self) -> None:
        """Have the state opened again, in a forked child."""
        self._opened = self._opened._replace(heads=())

    def __len__(self) -> int:
        """Return the number of items."""
        return self.snapshot.num_alive

    def __iter__(self) -> Iterator[Item]:
        """Yield every item, what was added last first."""
        snapshot = self.snapshot
        for number in reversed(range(len(snapshot.segments))):
            rows = snapshot.segments[number].alive_rows()
            for start in range(0, len(rows), READ_AT_ONCE):
                some = rows[start : start + READ_AT_ONCE]
                yield from snapshot.items_at(np.full(len(some), number), some)

    def __contains__(self, item_id: str | int) -> bool:
        """Return whether there is an item with this id."""
        return bool(self.snapshot.item_states([as_id(item_id)]))

    def get(self, item_id: str | int) -> Item:
        """Return an item by its id; raise :class:`UnknownItem` if it is not in the index."""
        snapshot = self.snapshot
        return snapshot.item_at(snapshot.locate(item_id))

    @staticmethod
    def create(
        folder: str | Path,
        *,
        pool: PoolSource | None = None,
        vectors: Vectors | None = None,
        ids: Iterable[str | int] | None = None,
        modalities: str | Modality | Sequence[str | Modality] = Modality.TEXT,
        texts: Sequence[str | None] | None = None,
        fields: Sequence[Mapping[str, object] | None] | None = None,
        model: str | Path | Genius | None = None,
        encoder: str | None = None,
        embeddings: StoredEmbeddings | None = None,
        embedding_bits: EmbeddingBits | None = None,
        levels: int | None = None,
        query_vectors: Vectors | None = None,
        captions: bool = True,
        exclude: Sequence[str] = (),
        device: str = "cpu",
        download: bool = False,
        progress: Progress | None = None,
        wait_seconds: float = 0.0,
    ) -> tuple[Index, ChangeSummary]:
        """Create an index of a folder of images and texts, a file of candidates, a list, or vectors.

        An interrupted run resumes when repeated. The index appears when it is complete.

        >>> Index.create("photos.index", pool="Pictures", encoder="clip:models/clip")  # doctest: +SKIP
        >>> Index.create("mine.index", vectors=np.load("vectors.npy"), ids=names)  # doctest: +SKIP

        Parameters
        ----------
        pool
            A folder, one picture or text, a ``.jsonl`` file in M-BEIR's layout; or a list whose elements are
            pictures (Pillow images, NumPy arrays, or the bytes of files), texts, :class:`pathlib.Path` of
            files, :class:`NewItem`, or dicts with the same keys. Elements without an id are numbered from 0.
            Pictures that are not files are stored in the index.
        vectors
            Instead of a pool, a matrix of shape (items, dim), a row for each item; it may be memory-mapped.
            Rows are scaled to unit length, so items are compared by cosine. Without model and encoder the
            index knows no encoder, and is searched by vectors.
        ids, modalities, texts, fields
            With vectors: a name for each item, a text or a whole number, by default that of its
            row; its modality, or one for all; its text, for ``match``; values to filter by.
        model
            A trained model, or its folder.
        encoder
            Instead of a model, the spec of an encoder (:func:`genius_search.encoders.base.load_encoder`).
            Nothing is trained: codebooks are fitted to the pool and stored in the index.
        embeddings
            Store an embedding for each item so that hits can be re-ranked: ``fused``, the vectors that IDs
            are made from, or ``raw``, the sums of the encoder's features (the paper's GENIUS^R). By default
            ``none`` with a model, and ``fused`` with an encoder.
        embedding_bits
            Bits of each number of an embedding: 16; or 8, 4, 2 or 1 of what the codes leave unexplained, for
            fused embeddings only. By default 16 with a model and for raw embeddings; with an encoder 4, and 2
            from a million items on.
        levels
            Number of codes in an ID beside the modality's, with an encoder only; each is a byte. With more,
            ranking by codes comes closer to exact search and takes longer. By default 12.
        query_vectors
            Without a trained model, the encoder's vectors of at least a hundred typical queries, of shape
            (queries, dim). Codes then keep more of what such queries ask for; it helps where queries are
            unlike the items, as words that look for pictures, and items are ranked by codes alone.
        captions
            Whether texts beside and inside pictures are read.
        exclude
            Patterns of what is left out of a folder, as in ``.gitignore``, beside those in files
            ``.geniusignore``.
        device, download
            For opening the model or encoder: where it runs, and whether it may be downloaded.
        wait_seconds
            How long to wait while another process writes to the folder.

        Raises
        ------
        UsageError
            An index or something else exists in its place, or not exactly one of model and encoder is given.
        BadData
            Nothing in the pool can be used; or a vector is zero, has a number that is not finite, or an id
            occurs twice: the message names the row.
        """
        from genius_search.index.build import create_index
        from genius_search.index.pool import open_pool, pool_from_vectors

        _require_one(pool, vectors)
        given = pool
        if given is None:
            given = pool_from_vectors(
                vectors, ids, modalities=modalities, texts=texts, fields=fields
            )
        elif isinstance(given, str | Path):
            given = open_pool(as_path(given), captions=captions, exclude=exclude)
        folder = absolute_folder(folder)
        opened, added = create_index(
            folder,
            pool=given,
            model=model,
            encoder=encoder,
            embeddings=embeddings,
            embedding_bits=embedding_bits,
            levels=levels,
            query_vectors=query_vectors,
            captions=captions,
            device=device,
            download=download,
            progress=progress or Silent(),
            wait_seconds=wait_seconds,
        )
        return Index(folder, opened), added

    @staticmethod
    def open(
        folder: str | Path,
        *,
        model: str | Path | Genius | None = None,
        device: str = "cpu",
        download: bool = False,
        with_encoder: bool = True,
    ) -> Index:
        """Open an index by its folder, or by its name on the Hugging Face hub, where it is a data set.

        Parameters
        ----------
        model
            The model, its folder, or its name on the hub; by default the one that the index names.
        device, download
            Where the model runs; whether the index, the model and its encoder may be downloaded if they are
            not here.
        with_encoder
            Open the encoder now, rather than when something is encoded.

        Raises
        ------
        ArtifactMissing
            There is no index, or its model has moved.
        ArtifactMismatch
            The model is not the one that assigned the IDs.
        NetworkNeeded
            The index or its model is not on this machine and may not or cannot be downloaded.
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
        opened = model or _open_named(folder, manifest.locate_model(folder), open_model)
        if not isinstance(opened, Genius):
            opened = open_model(opened)
        if opened.fingerprint != manifest.model_fingerprint:
            raise ArtifactMismatch(
                f"{folder} was made with another model than {opened.folder} (fingerprint "
                f"{manifest.model_fingerprint[:12]}, not {opened.fingerprint[:12]}); IDs of one model mean "
                "nothing to another: create the index again, or give the right `model=FOLDER`"
            )
        return Index(folder, opened)

    def add(
        self,
        pool: PoolSource | None = None,
        *,
        vectors: Vectors | None = None,
        ids: Iterable[str | int] | None = None,
        modalities: str | Modality | Sequence[str | Modality] = Modality.TEXT,
        texts: Sequence[str | None] | None = None,
        fields: Sequence[Mapping[str, object] | None] | None = None,
        captions: bool = True,
        exclude: Sequence[str] = (),
        progress: Progress | None = None,
        wait_seconds: float = 0.0,
    ) -> ChangeSummary:
        """Add a folder, a file, items from memory, or vectors of the index's encoder, without retraining.

        They are searchable at once. The index remembers a folder (:attr:`roots`), so that :meth:`sync`
        follows it. The ids of the first folder are paths in it; those of another begin with its name, such
        as ``more/dog.jpg``. A folder or file that lies in a remembered one is brought up to date. A file
        that lies in none is remembered alone, without its folder; its id is its name.

        Only what is new or has changed is encoded; files that were moved, renamed or touched are recognised
        by their contents, and so is a folder that was moved. Items with unreadable images are left out; if
        they are in the index already, they stay unchanged. In lists and vectors, an item replaces the one
        with the same id, but not one that was found in a folder. On return, everything is on disk.

        >>> index.add("more-photos/")  # doctest: +SKIP
        >>> index.add([NewItem("kite", "a red kite", photo, {"price": 12})])  # doctest: +SKIP

        Parameters
        ----------
        pool
            See :meth:`create`. Each item of a list needs an id; unusable ones are left out, with reasons.
        vectors, ids, modalities, texts, fields
            Instead of a pool; see :meth:`create`. Each item needs an id.
        captions, exclude
            Whether texts of pictures are read, and what is left out; see :meth:`create`. A remembered folder
            is read as it was at first.
        wait_seconds
            How long to wait while another process changes the index. Other threads of this process are
            waited for in any case.

        Raises
        ------
        BadData
            Nothing in the folder or file can be used: the message names files and reasons. Or a vector cannot
            be used: it names the row.
        """
        from genius_search.index.build import add_pool
        from genius_search.index.pool import (
            Pool,
            is_candidate_list,
            open_pool,
            pool_from_items,
            pool_from_vectors,
        )
        from genius_search.index.sync import update_from_roots

        progress = progress or Silent()
        _require_one(pool, vectors)
        if vectors is not None and ids is None:
            raise UsageError("vectors that are added need ids=, a name for each row")
        may_be_none = not isinstance(pool, str | Path | None)
        if pool is None:
            pool = pool_from_vectors(
                vectors, ids, modalities=modalities, texts=texts, fields=fields
            )
        elif isinstance(pool, str | Path) and is_candidate_list(as_path(pool)):
            pool = open_pool(as_path(pool), captions=captions)
        with self._open_writer(wait_seconds) as writer:
            if isinstance(pool, str | Path):
                return update_from_roots(
                    writer,
                    self.model,
                    as_path(pool),
                    captions=captions,
                    exclude=exclude,
                    deletes=False,
                    progress=progress,
                )
            if not isinstance(pool, Pool):
                pool = pool_from_items(pool, writer, captions=captions, has_ids=True)
            return add_pool(writer, self.model, pool, may_be_none=may_be_none, progress=progress)

    def sync(
        self,
        path: str | Path | None = None,
        *,
        delete_missing: int | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
        wait_seconds: float = 0.0,
    ) -> ChangeSummary:
        """Bring the index up to date with the folders that it follows (:attr:`roots`).

        New and changed files are added as :meth:`add` does, items of moved ones get their new ids, and items
        whose files are gone are deleted. But items stay whose file or folder cannot be read or whose disk is
        not there, and so do those of a folder of whose items more than half are gone: it says so, and counts
        them as missing. Items that came from lists, vectors or memory stay in any case.

        Parameters
        ----------
        path
            A remembered folder, a part of one, or its new place if it was moved; by default all of them.
        delete_missing
            Delete all items without files, even the missing, if they are at most so many.
        dry_run
            Change nothing; the result lists what would be done.

        Raises
        ------
        UsageError
            The index does not follow this path, or more than ``delete_missing`` items would be deleted;
            nothing has changed then.
        """
        from genius_search.index.sync import update_from_roots

        with self._open_writer(wait_seconds) as writer:
            return update_from_roots(
                writer,
                self.model,
                None if path is None else as_path(path),
                deletes=True,
                delete_missing=delete_missing,
                dry_run=dry_run,
                progress=progress or Silent(),
            )

    def delete(
        self, item_ids: str | int | Iterable[str | int], *, wait_seconds: float = 0.0
    ) -> Deleted:
        """Delete one or several items; unknown ids are returned."""
        ids = as_id_list(item_ids)
        with self._open_writer(wait_seconds) as writer:
            return writer.delete(ids)

    def learn(
        self, chosen: str | int, text: str | None = None, *, wait_seconds: float = 0.0, **query: Any
    ) -> None:
        """Remember that an item was chosen for a query, so that it is found earlier for similar queries.

        In effect at once, also for other processes. Nothing is learned unless this is called. How far an item
        rises is bounded, and the same choice counts once.

        >>> index.learn("kites/7.jpg", "something to fly")  # doctest: +SKIP

        Parameters
        ----------
        chosen
            The id of the item.
        text, query
            The query, with the names that :meth:`search` has: ``image``, ``vector``, ``parts``,
            ``instruction``.

        Raises
        ------
        UnknownItem
            The item is not in the index.
        """
        if self.learn_many([{"chosen": chosen, "text": text, **query}], wait_seconds=wait_seconds):
            raise UnknownItem(
                f"{self.folder} has no item {chosen!r}, so it cannot have been chosen"
            )

    def learn_many(
        self, choices: Iterable[Mapping[str, Any]], *, wait_seconds: float = 0.0
    ) -> list[str]:
        """Remember several choices in one step; return the chosen ids that the index does not have.

        Each choice is a mapping with ``chosen`` and the fields of a query, as in :meth:`learn`.
        """
        from genius_search.index.learned import learn

        unknown = learn(self, choices, wait_seconds=wait_seconds)
        self.current()
        return unknown

    def forget(
        self, *, chosen: str | int | None = None, text: str | None = None, wait_seconds: float = 0.0
    ) -> int:
        """Forget choices: of an item, of a query's text, of both together, or all; return their number."""
        from genius_search.index.learned import forget

        require_same_index(self.folder, self._opened.searcher.snapshot.manifest)
        return forget(self.folder, chosen=chosen, text=text, wait_seconds=wait_seconds)

    def choices(self) -> Iterator[dict[str, Any]]:
        """Yield all choices that were learned, as :meth:`learn_many` takes them.

        A query that was not a text alone is its feature, a vector.
        """
        from genius_search.index.learned import read_choices

        require_same_index(self.folder, self._opened.searcher.snapshot.manifest)
        return read_choices(self.folder)

    def compact(self, *, min_deleted: float = MIN_DELETED_SHARE, wait_seconds: float = 0.0) -> None:
        """Free the space of deleted items where they are many, in time proportional to their number.

        Commands and the service do so after each change.

        Parameters
        ----------
        min_deleted
            The least share of deleted items for which a part of the index is written anew. With 0 all of it
            is, unless nothing is deleted, and becomes a single segment.
        """
        from genius_search.index.writer import first_to_compact

        segments = self.snapshot.segments
        if min_deleted <= 0 or first_to_compact(segments, min_deleted) < len(segments):
            with self._open_writer(wait_seconds) as writer:
                writer.compact(min_deleted)

    def refit(
        self,
        *,
        levels: int | None = None,
        query_vectors: Vectors | None = None,
        progress: Progress | None = None,
        wait_seconds: float = 0.0,
    ) -> None:
        """Fit the codebooks anew, after an index that was created with an encoder has grown.

        All items get new IDs, computed from the stored embeddings, which lose a little each time if they have
        fewer than 8 bits. A calibration is removed. Searches go on.

        Parameters
        ----------
        levels
            Number of codes in an ID beside the modality's; by default it does not change.
        query_vectors
            Typical queries, as in :meth:`create`, in the place of earlier ones.

        Raises
        ------
        UsageError
            The index was created with a trained model, stores no fused embeddings, or has no items.
        """
        from genius_search.index.fit import refit_index

        with self._open_writer(wait_seconds) as writer:
            refit_index(
                writer,
                self.model,
                levels=levels,
                query_vectors=query_vectors,
                progress=progress or Silent(),
            )

    def fit(
        self,
        pairs: str | Path | None = None,
        *,
        config: FitConfig | None = None,
        force: bool = False,
        device: str = "cpu",
        progress: Progress | None = None,
        wait_seconds: float = 0.0,
    ) -> Fitted:
        """Train fusion on an index that was created with an encoder, and replace its model.

        Items keep their ids and fields, and get new IDs; a calibration is removed. Searches go on meanwhile.
        A tenth of the pairs is held out: unless the new model finds more of their answers than the old one by
        more than a standard error, nothing changes. The weight of densities is measured with them, too.

        Parameters
        ----------
        pairs
            Queries with right answers: a ``.jsonl`` file with ``text`` or ``image`` and ``id`` on each line,
            or a data set in M-BEIR's layout; by default the choices that were learned for texts.
        config
            Settings of the training; by default the preset ``small``.
        force
            Replace the model in any case.
        device
            Where the training runs.

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

    def verify(self) -> CheckReport:
        """Compare every file with its checksum.

        Raises
        ------
        ArtifactMismatch, ArtifactMissing
            A file is damaged or missing. The message names it.
        """
        from genius_search.index.info import check

        return check(self.folder, self.snapshot, model_folder=self.model.folder)

    def watch(self) -> None:
        """Compare all files but pictures with their checksums in the background, again and again.

        For a server. The files are read at about 2 GB a second, every half a minute, or in a tenth of the
        time if they are large. What is damaged is logged and stands in :attr:`damage`; searches raise an
        error until the index is opened again, or changed.
        """
        Thread(
            target=_watch, args=(weakref.ref(self),), name=f"watch {self.folder}", daemon=True
        ).start()

    def search(
        self, text: str | None = None, *, config: SearchConfig | None = None, **options: Any
    ) -> Hits:
        """Return the best items for a text, an image, both, a vector, or several weighted parts.

        >>> index.search("a red bag", k=3, modality="image", where=["price<20"])  # doctest: +SKIP
        >>> index.search("in red", image="bag.jpg")  # doctest: +SKIP
        >>> index.search(where=["folder=Norway"], offset=10)  # without a query: newest first # doctest: +SKIP

        Parameters
        ----------
        text
            What is searched for, alone or with the picture ``image``.
        config
            Options that this search changes in :attr:`settings`; or all settings, such as
            :data:`genius_search.PAPER_SEARCH`.
        options
            The fields of :class:`genius_search.SearchRequest`: ``image``, ``vector``, ``parts``, ``combine``,
            ``instruction``, ``modality``, ``where``, ``match``, ``hybrid``, ``k``, ``offset`` and ``beam``.

        Raises
        ------
        UsageError
            There is no query, an option is out of range, or a condition cannot be parsed.
        """
        return self._searcher(config).search([SearchRequest(text=text, **options)])[0]

    def search_many(
        self, requests: Sequence[SearchRequest], *, config: SearchConfig | None = None
    ) -> list[Hits]:
        """Search for several requests in one batch; return the hits of each. Faster than one by one."""
        return self._searcher(config).search(requests)

    def search_vectors(
        self, vectors: Vectors, *, config: SearchConfig | None = None, **options: Any
    ) -> list[Hits]:
        """Search for several vectors, of shape (queries, dim), in one batch; options as in :meth:`search`."""
        rows = as_matrix(vectors, "the vectors") if len(vectors) else ()
        return self.search_many(
            [SearchRequest(vector=one, **options) for one in rows], config=config
        )

    def explain(
        self,
        item_id: str | int,
        text: str | SearchRequest | None = None,
        *,
        config: SearchConfig | None = None,
        **options: Any,
    ) -> Explanation:
        """Explain, code by code, why a search finds an item or does not. Options as in :meth:`search`.

        If the query has alternatives, the one that ranks the item best is explained.

        Raises
        ------
        UnknownItem
            The item is not in the index.
        """
        from genius_search.index.explain import explain

        request = text if isinstance(text, SearchRequest) else SearchRequest(text=text, **options)
        return explain(self._searcher(config), request, item_id)

    def info(self) -> IndexInfo:
        """Return the numbers of items, IDs, collisions and bytes."""
        from genius_search.index.info import describe_index

        return describe_index(self.folder, self.snapshot)

    @property
    def snapshot(self) -> Snapshot:
        """The current state, opened anew if another handle or process has changed the index."""
        return self.current()[1]

    @property
    def roots(self) -> tuple[Root, ...]:
        """The folders and single files that the index follows, in the order in which they were added.

        The picture of an item that was found in one of them lies below its folder.
        """
        return self.snapshot.manifest.roots

    @property
    def model(self) -> Genius:
        """The model that assigned the IDs."""
        return self._opened.searcher.model

    def current(self) -> tuple[Genius, Snapshot]:
        """Return the model and the current state, which belong together.

        The state contains every change that was made before the call.
        """
        searcher = self._searcher()
        return searcher.model, searcher.snapshot

    @property
    def settings(self) -> SearchSettings:
        """The default search settings, which the ``config`` of a search changes.

        These are :func:`genius_search.config.default_search`; with a model of its own, or without a generator,
        hits are ranked by fused embeddings if the index stores them.
        """
        return self._searcher().config

    @property
    def calibration(self) -> Calibration | None:
        """The calibration stored by `genius calibrate`, if any."""
        return self.snapshot.manifest.calibration

    def keep_calibration(self, calibration: Calibration, *, wait_seconds: float = 0.0) -> None:
        """Store a calibration with the index, and the weight of densities that it was made with.

        From then on hits have probabilities, and searches use the weight.
        """
        with self._open_writer(wait_seconds) as writer:
            writer.update_manifest(
                calibration=calibration, density_weight=calibration.search.density_weight
            )

    def good_match(self, hits: Sequence[SearchHit]) -> bool | None:
        """Return whether there is a good match: the most probable hit reaches the calibration's threshold.

        Without a calibration, some hit must have a usual score (:attr:`SearchHit.least_score`). Without hits
        the result is False. It is None if the index does not know this for the hits' settings and query, if
        no probability was found from which enough hits are right (`genius calibrate --precision`), or if the
        first hit was found by its code, such as a product's number, or is one of a later page.
        """
        calibration = self._opened.searcher.snapshot.manifest.calibration
        if not hits:
            return False
        if hits[0].rank > 1:
            return None
        if calibration is None:
            if any(hit.least_score is not None and hit.score >= hit.least_score for hit in hits):
                return True
            return None if any(hit.least_score is None for hit in hits) else False
        if calibration.threshold is None or hits[0].probability is None:
            return None
        return max(hit.probability or 0.0 for hit in hits) >= calibration.threshold

    @contextlib.contextmanager
    def _open_writer(self, wait_seconds: float) -> Iterator[Writer]:
        """Lock the index and open its state to change it; then open the new one, and close removed files."""
        from genius_search.index.writer import open_writer

        before = self._opened.searcher.snapshot
        with open_writer(self.folder, wait_seconds=wait_seconds, before=before) as writer:
            self.current()
            yield writer
        self.current()

    def _searcher(self, config: SearchConfig | None = None) -> SnapshotSearcher:
        """Return what searches the current state, with the index's settings or options that change them."""
        opened = self._opened
        if _read_heads(self.folder) != opened.heads:
            with (
                self._opening
            ):  # by one thread, so that no older state takes the place of a newer one
                if (heads := _read_heads(self.folder)) != self._opened.heads:
                    self._opened = self._open(heads, self.model, self._opened)
                opened = self._opened
        searcher = opened.searcher
        if config is None:
            return searcher
        adjusted = SnapshotSearcher(searcher.model, searcher.snapshot, config, searcher.choices)
        return searcher if adjusted.config == searcher.config else adjusted

    def _open(
        self, heads: tuple[bytes, ...], model: Genius, before: _Opened | None = None
    ) -> _Opened:
        """Open the state that the manifests had when their heads were read, or a newer one.

        Raises
        ------
        ArtifactMissing, ArtifactMismatch
            The index was removed or is damaged, or another one was created in its place.
        """
        if before is not None and before.heads[:1] == heads[:1]:  # only the log has changed
            searcher = copy.copy(before.searcher)
            searcher.choices = self._open_log(heads, searcher.model, searcher.snapshot)
            return _Opened(heads, searcher)
        snapshot = Snapshot.open(self.folder, None if before is None else before.searcher.snapshot)
        manifest = snapshot.manifest
        if before is not None and manifest.identity != before.searcher.snapshot.manifest.identity:
            raise another_index(self.folder)
        if (
            manifest.model_fingerprint != model.fingerprint and manifest.has_own_model
        ):  # it was refitted
            model = Genius.open(manifest.locate_model(self.folder), device=model.device)
        if manifest.model_fingerprint != model.fingerprint:
            raise another_index(self.folder)
        snapshot.check_arrays(model.codebooks, model.unchecked_files)
        choices = self._open_log(heads, model, snapshot)
        return _Opened(heads, SnapshotSearcher(model, snapshot, choices=choices))

    def _open_log(
        self, heads: tuple[bytes, ...], model: Genius, snapshot: Snapshot
    ) -> Choices | None:
        """Open the log of choices; if it is damaged, searches do without it, and a warning is logged."""
        if not (heads[1] or has_lost_manifest(self.folder / LEARNED)):
            return None
        from genius_search.index.learned import Choices, DamagedLog, reading_log

        try:
            with reading_log(self.folder):
                logged = Index.open(self.folder / LEARNED)._opened.searcher  # noqa: SLF001  replaced at any time
                if logged.model.dim != model.dim:
                    raise ArtifactMismatch(
                        f"it has queries of {logged.model.dim} numbers, and the index has {model.dim}"
                    )
                return Choices(logged, snapshot) if logged.snapshot.num_alive else None
        except DamagedLog as error:
            if str(error) != self._log_damage:
                log.warning("%s", error)
            self._log_damage = str(error)
            return None


def _require_one(pool: PoolSource | None, vectors: Vectors | None) -> None:
    if isinstance(pool, str) and not pool:
        raise UsageError(
            "the pool has an empty name; give a folder or a file, or Path('.') for this folder"
        )
    if (pool is None) is (vectors is None):
        raise UsageError("give either a pool, or vectors")


def _watch(watched: weakref.ref[Index]) -> None:
    """Verify an index from time to time, as long as somebody holds it."""
    from genius_search.index.info import check

    while (index := watched()) is not None:
        started, before = time.monotonic(), index.damage
        try:
            check(
                index.folder, index.snapshot, model_folder=index.model.folder, with_pictures=False
            )
            index.damage = index.snapshot.damage
        except Exception as error:  # noqa: BLE001  whatever it is, the index cannot be read
            index.damage = str(error)
            if index.damage != before:
                log.error("%s", error)  # noqa: TRY400  the message says all
        del index
        time.sleep(max(WATCH_SECONDS, 9 * (time.monotonic() - started)))


def _open_named(folder: Path, named: str, open_model: Callable[[str], Genius]) -> Genius:
    """Open the model that an index names."""
    remedy = "say where it is with `model=FOLDER`"
    if not named:
        raise ArtifactMissing(f"{folder} does not say where its model is; {remedy}")
    try:
        return open_model(named)
    except (ArtifactMissing, NetworkNeeded) as error:
        raise type(error)(f"the model of {folder}: {error}; or {remedy}") from None


def _open_again(folder: Path, identity: str, model: Genius | None, device: str) -> Index:
    """Open the index of a pickled handle; its encoder is opened when something is encoded."""
    index = Index.open(folder, model=model, device=device, with_encoder=False)
    if index.snapshot.manifest.identity != identity:
        raise another_index(folder)
    return index


def _read_heads(folder: Path) -> tuple[bytes, bytes]:
    """Return the first bytes of the manifests of an index and of its log, which differ after every change."""
    index, log = f"{folder}/{CURRENT}", f"{folder}/{LEARNED}/{CURRENT}"  # faster than a Path
    return read_head(index), read_head(log)
