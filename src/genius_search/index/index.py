"""An index: a pool's IDs and items in one folder, tied to the model that made the IDs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from genius_search.config import USUAL_SEARCH, SearchConfig
from genius_search.data.features import LeftOut
from genius_search.errors import ArtifactMismatch, ArtifactMissing, BadData, UsageError
from genius_search.explain import CodeNode, Explanation, SharedPage, explain, look_at, sharing
from genius_search.hub.files import is_name
from genius_search.hub.pull import find_index, model_folder
from genius_search.hub.push import About, push
from genius_search.index.adding import (
    NewItem,
    NothingReadable,
    Outcome,
    add_new_items,
    encode_items,
    read_items,
    without_unchanged,
)
from genius_search.index.filters import Filter
from genius_search.index.items import fields_of
from genius_search.index.snapshot import OpenedIndex
from genius_search.index.store import (
    CURRENT,
    DELETED,
    DEPTH,
    SEGMENTS,
    Calibration,
    EmbeddingType,
    IndexFacts,
    StoredEmbeddings,
    Tuned,
    open_current,
    read_facts,
)
from genius_search.index.verify import IndexInfo, Verified, describe, naming_damage, verify
from genius_search.index.writer import LOCK, WORK, Deleted, one_writer, remove_work
from genius_search.model import Genius
from genius_search.progress import Progress, Silent
from genius_search.query import Asked, SearchPart, SearchRequest, embed_requests
from genius_search.records import Modality
from genius_search.search.beam import Beams, search
from genius_search.search.rank import Answer, Evidence, rank_items

__all__ = ["Found", "SearchHit", "SearchPart", "SearchRequest", "answer", "embed_requests", "find"]


@dataclass(frozen=True, slots=True)
class SearchHit:
    """One found item."""

    rank: int
    """From 1."""
    item_id: str
    score: float
    """Of the evidence that ordered the hits: log-probability, or how near the item is to the query. By codes
    that is the inner product with its ID's vector less half the square of this, by embeddings the cosine;
    either minus density_weight × density, plus generator_weight × log-probability."""
    modality: Modality
    text: str | None
    image: str | None
    """Path of its picture."""
    codes: tuple[int, ...]
    """Its ID."""
    log_probabilities: tuple[float, ...]
    """What the generator gave each code that it decoded; fewer than codes where a re-ranking decided."""
    source: str | None = None
    """Whatever came with it."""
    probability: float | None = None
    """That it answers the query, where `genius calibrate` measured what the scores of this index are worth.
    None too where hits are ordered otherwise than they were then, and for requests of several parts."""

    @property
    def fields(self) -> dict[str, Any]:
        """What came with it, by name, if that is a JSON object."""
        return fields_of(self.source)


class Found(NamedTuple):
    """What a request found."""

    hits: list[SearchHit]
    """Best first."""
    touched: int
    """Items that were looked at, under all beams."""


def answer(
    model: Genius, opened: OpenedIndex, requests: Sequence[SearchRequest], config: SearchConfig
) -> list[list[SearchHit]]:
    """Hits of each request, best first: :func:`embed_requests`, then :func:`find`.

    A beam is never narrower than the number of hits asked for.

    Raises
    ------
    UsageError
        a request has nothing to look for, asks for fewer than one hit or for more than a billion, is no
        text, or names an item that is not there.
    """
    return [
        found.hits for found in find(model, opened, embed_requests(model, opened, requests, config), config)
    ]


def find(model: Genius, opened: OpenedIndex, asked: Sequence[Asked], config: SearchConfig) -> list[Found]:
    """Search for what was understood, all of it together."""
    if not asked or not opened.segments:
        return [Found([], 0) for _ in asked]
    requests = [one.request for one in asked]
    beams = search(
        model.decoder,
        opened.parts,
        torch.cat([one.embedding for one in asked]),
        config,
        level0=[one.level0 for one in asked],
        restrictions=[one.restriction for one in asked],
        widths=[max(request.beam or config.beam, request.k) for request in requests],
    )
    is_raw = opened.state.facts.embeddings == "raw"
    evidence = Evidence(model.ranker, opened.vectors, is_raw, opened.densities)
    calibration = opened.state.calibration
    if calibration is not None and not calibration.applies_to(config):
        calibration = None
    answers = [
        rank_items(
            opened.parts,
            beams,
            query,
            one.evidence,
            config=config,
            evidence=evidence,
            k=one.request.k if calibration is None else max(one.request.k, DEPTH),
            restriction=one.restriction,
            for_codes=one.embedding[0],
        )
        for query, one in enumerate(asked)
    ]
    return [
        Found(
            _hits(
                model,
                opened,
                beams,
                query,
                found.first(request.k),
                None
                if calibration is None or request.parts
                else calibration.probabilities(found.scores).tolist(),
            ),
            found.touched,
        )
        for query, (request, found) in enumerate(zip(requests, answers, strict=True))
    ]


def _hits(
    model: Genius,
    opened: OpenedIndex,
    beams: Beams,
    query: int,
    found: Answer,
    probabilities: Sequence[float] | None,
) -> list[SearchHit]:
    items = opened.items(found.parts, found.items)
    num_levels = model.quantizer.num_levels  # half norm and density stand behind an ID's codes
    hits = []
    for place, item in enumerate(items):
        table = opened.parts[found.parts[place]].table
        decoded = beams.log_probabilities[query, found.beams[place]]
        hits.append(
            SearchHit(
                rank=place + 1,
                item_id=item.item_id,
                score=float(found.scores[place]),
                modality=item.modality,
                text=item.text,
                image=item.image,
                codes=tuple(table.ids[found.rows[place], :num_levels].tolist()),
                log_probabilities=tuple(decoded[~np.isnan(decoded)].tolist()),
                source=item.source,
                probability=None if probabilities is None else probabilities[place],
            )
        )
    return hits


__all__ = [
    "Added",
    "Index",
    "IndexInfo",
    "NewItem",
    "Outcome",
    "SearchHit",
    "SearchPart",
    "SearchRequest",
]


@dataclass(frozen=True, slots=True)
class Added:
    """What became of items that were to be added."""

    added: int
    replaced: int
    """Of those, how many took the place of an item with the same id."""
    unchanged: int
    """Items that are here already, as they are; nothing was done for them."""
    left_out: tuple[LeftOut, ...]
    """Files that could not be used, each with its reason."""


class Index:
    """Search over one's own items.

    >>> index = Index.open("photos.index")  # doctest: +SKIP
    >>> hits = index.search(text="a red bag", modality="image", where=["price<20"], k=3)  # doctest: +SKIP
    >>> for hit in hits:  # doctest: +SKIP
    ...     print(hit.item_id, hit.score)
    >>> index.add("more-photos/")  # doctest: +SKIP
    >>> index.delete(["holiday/blurred.jpg"])  # doctest: +SKIP
    """

    def __init__(self, folder: Path, model: Genius) -> None:
        self.folder = folder
        self.model = model
        self._seen = _stamp(folder)
        self._opened = OpenedIndex(open_current(folder))

    @staticmethod
    def create(
        folder: str | Path,
        *,
        model: str | Path | Genius,
        pool: str | Path,
        embeddings: StoredEmbeddings = "none",
        embedding_type: EmbeddingType = "float16",
        captions: bool = True,
        progress: Progress | None = None,
    ) -> tuple[Index, Added]:
        """Make an index of a pool: a folder of pictures and texts, or a ``.jsonl`` file of M-BEIR candidates.

        What was embedded before a kill is not embedded again. The index is there when it is complete.

        Parameters
        ----------
        embeddings
            ``fused`` or ``raw`` are stored beside the IDs so that hits can be re-ranked by them: the vectors
            that IDs are made from, or the sums of the encoder's features (the paper's GENIUS^R).
        embedding_type
            two bytes a number, or one (``int8``, with a scale for each vector).

        Raises
        ------
        UsageError
            there is an index already, or something else is in its place.
        BadData
            nothing in the pool can be used; nothing is left behind then.
        """
        folder = Path(folder)
        if (folder / CURRENT).exists():
            raise UsageError(f"{folder} holds an index already; `genius index add` adds to it")
        place = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        if not place.is_dir():
            raise UsageError(f"{place} is a file, or a link to nothing; an index needs a folder")
        if folder.exists() and not all(entry.name in _OURS for entry in folder.iterdir()):
            raise UsageError(f"{folder} holds other things; an index needs a folder of its own")
        opened = model if isinstance(model, Genius) else Genius.open(model)
        read = read_items(Path(pool), captions=captions)
        facts = IndexFacts(str(opened.folder.resolve()), opened.fingerprint, embeddings, embedding_type)
        try:
            with one_writer(folder) as writer:
                new = encode_items(opened, read, folder, embeddings=embeddings, progress=progress or Silent())
                writer.create(facts, new, new.arrays)
                remove_work(folder)
        except BadData:
            with contextlib.suppress(OSError):  # what a writer that was killed left there
                (folder / LOCK).unlink()
                folder.rmdir()
            raise
        return Index(folder, opened), Added(len(new), 0, 0, (*read.left_out, *new.left_out))

    @staticmethod
    def open(
        folder: str | Path,
        *,
        model: str | Path | Genius | None = None,
        device: str = "cpu",
        download: bool = False,
    ) -> Index:
        """Open an index; ``model`` says where its model is now, if it moved.

        A model is a folder here, or a name that `genius pull` fetched before; nothing is downloaded for it.
        ``device`` and ``download`` are for the model, unless it is open already.

        Raises
        ------
        ArtifactMissing
            there is no index, or its model is not where it was.
        ArtifactMismatch
            the model is not the one that made the IDs.
        """
        folder = Path(folder)
        facts = read_facts(folder)
        place = facts.model if model is None else model
        if not place:
            raise ArtifactMissing(
                f"{folder} does not say where its model is; say it with --model (in Python: model=)"
            )
        if model is None and is_name(facts.model) and not model_folder(facts.model).exists():
            raise ArtifactMissing(
                f"the model of {folder} is {facts.model}, which is not on this machine; `genius pull "
                f"{facts.model}` fetches it, or say where it is with --model (in Python: model=)"
            )
        if model is None and not is_name(facts.model) and not Path(facts.model).exists():
            raise ArtifactMissing(
                f"the model of {folder} is not at {facts.model} any more; say where it is now with --model "
                "(in Python: model=)"
            )
        opened = place if isinstance(place, Genius) else Genius.open(place, device=device, download=download)
        if opened.fingerprint != facts.model_fingerprint:
            raise ArtifactMismatch(
                f"{folder} was made with another model than {opened.folder} (fingerprint "
                f"{facts.model_fingerprint[:12]}, not {opened.fingerprint[:12]}); IDs of one model mean "
                "nothing to another: create the index again, or give the right --model"
            )
        return Index(folder, opened)

    @staticmethod
    def from_pretrained(
        name_or_folder: str | Path,
        *,
        model: str | Path | Genius | None = None,
        revision: str | None = None,
        device: str = "cpu",
        download: bool = True,
        token: str | None = None,
    ) -> Index:
        """Open an index by its folder, or by its name on the Hugging Face hub (a data set there).

        Its model is taken from where the index says it is; ``model`` (a folder, a model's name on the hub, or
        an open one) says otherwise. Raises as :meth:`genius.Genius.from_pretrained` does.
        """
        folder = find_index(name_or_folder, revision=revision, download=download, token=token)
        if isinstance(model, Genius):
            return Index.open(folder, model=model)
        named = read_facts(folder).model if model is None else model
        if not named:
            raise ArtifactMissing(f"{folder} does not say which model made it; say it with model=")
        opened = Genius.from_pretrained(named, device=device, download=download, token=token)
        return Index.open(folder, model=opened)

    def push_to_hub(
        self,
        repository: str,
        *,
        model: str,
        license: str = "unknown",  # noqa: A002  the hub's word
        private: bool = False,
        token: str | None = None,
    ) -> str:
        """Publish the index as a data set ``owner/name`` on the Hugging Face hub; returns its address.

        The texts of the items and the paths of their pictures go along; the pictures do not. ``model`` is the
        name of its model on the hub, so that whoever pulls the index finds it.
        """
        return push(
            self.folder, repository, About(license=license, model=model), private=private, token=token
        )

    def __repr__(self) -> str:
        state = self._opened.state
        return (
            f"<Index {self.folder}, {state.num_alive:,} items, model fingerprint "
            f"{state.facts.model_fingerprint[:12]}>"
        )

    def add(
        self,
        pool: str | Path,
        *,
        captions: bool = True,
        progress: Progress | None = None,
        wait_seconds: float = 0.0,
    ) -> Added:
        """Add items, without retraining; searchable at once.

        An item whose id is already here takes the other's place; one that has not changed since it was added
        is passed over, so that a folder can be given again and again. A picture that cannot be read is left
        out; if its item is here already it stays as it was.

        Parameters
        ----------
        wait_seconds
            how long to wait while somebody else changes the index.

        Raises
        ------
        BadData
            nothing in the pool can be used; the message names files and reasons.
        """
        read = read_items(Path(pool), captions=captions)
        with one_writer(self.folder, wait_seconds=wait_seconds) as writer:
            self._refresh()
            changed, unchanged = without_unchanged(read, self._opened.stamps)
            if not changed.count:
                remove_work(self.folder)
                return Added(0, 0, unchanged, tuple(read.left_out))
            try:
                new = encode_items(
                    self.model,
                    changed,
                    self.folder,
                    embeddings=self._opened.state.facts.embeddings,
                    progress=progress or Silent(),
                )
            except NothingReadable as nothing:
                if not unchanged:
                    raise
                return Added(0, 0, unchanged, (*read.left_out, *nothing.left_out))
            done = writer.add(new, new.arrays)
            remove_work(self.folder)
        self._refresh()
        return Added(done.added, done.replaced, unchanged, (*read.left_out, *new.left_out))

    def add_items(self, items: Sequence[NewItem], *, wait_seconds: float = 0.0) -> list[Outcome]:
        """Add items that are in memory; what became of each, in order. Searchable at once.

        As :meth:`add`, one whose id is here takes the other's place, and one that has not changed is passed
        over; of two with one id the last is meant. Pictures are kept in the index. When this returns, all of
        it is on the disk. An item that cannot be used is left out, and says why.

        >>> index.add_items([NewItem("kite", "a red kite", photo, {"price": 12})])  # doctest: +SKIP
        """
        with one_writer(self.folder, wait_seconds=wait_seconds) as writer:
            self._refresh()
            outcomes = add_new_items(writer, self.model, self._opened, items)
        self._refresh()
        return outcomes

    def delete(self, item_ids: str | Iterable[str], *, wait_seconds: float = 0.0) -> Deleted:
        """Delete items, or one; they are not found from now on. Ids that are not here are returned."""
        with one_writer(self.folder, wait_seconds=wait_seconds) as writer:
            done = writer.delete([item_ids] if isinstance(item_ids, str) else item_ids)
        self._refresh()
        return done

    def compact(self, *, wait_seconds: float = 0.0) -> None:
        """Give back the room of deleted items, and make one segment of all; in bounded memory."""
        with one_writer(self.folder, wait_seconds=wait_seconds) as writer:
            writer.compact()
            remove_work(self.folder)
        self._refresh()

    def verify(self) -> Verified:
        """Read every file and compare it with what was written.

        Raises
        ------
        ArtifactMismatch, ArtifactMissing
            a file is damaged or gone; the message names it.
        """
        return verify(self.folder)

    def search(
        self,
        text: str | None = None,
        *,
        image: str | Path | Image.Image | None = None,
        parts: Sequence[SearchPart] = (),
        instruction: str | None = None,
        modality: str | Modality | None = None,
        where: Sequence[str] | Mapping[str, object] = (),
        match: str | None = None,
        k: int = 10,
        config: SearchConfig | None = None,
    ) -> list[SearchHit]:
        """The ``k`` best items for a text, a picture, both, or several parts.

        Parameters
        ----------
        parts
            texts, pictures and items of the index that count with a weight, which may be negative:
            ``[SearchPart(item_id="7"), SearchPart(text="in red"), SearchPart(text="a logo", weight=-0.5)]``.
        instruction
            what is wanted, in words. Without one the model's own training instruction for this kind of
            query and the wanted modality is used, if it has one.
        modality
            ``image``, ``text`` or ``image-text``: only such items are found. Left out, the instruction
            decides; without an instruction too, the index's most frequent modality is asked for (deleted
            items count for that until :meth:`compact`).
        where
            conditions on the items' fields, all of which hold: ``["price<20", "brand=acme"]``, or
            ``{"brand": "acme"}``; :meth:`genius_search.index.filters.Filter.parse` says the rest.
        match
            words that the items' texts contain.
        config
            beam width, re-ranking; the default is :attr:`settings`: what `genius tune` chose for this index,
            else :data:`genius_search.config.USUAL_SEARCH`: the generator says where to look, codes order what is
            there. The beam is never narrower than ``k``.
        """
        request = SearchRequest(
            text=text,
            image=image,
            parts=tuple(parts),
            instruction=instruction,
            modality=Modality.parse(modality) if isinstance(modality, str) else modality,
            only=Filter.parse(where, match),
            k=k,
        )
        return self.search_many([request], config=config)[0]

    def search_many(
        self, requests: Sequence[SearchRequest], *, config: SearchConfig | None = None
    ) -> list[list[SearchHit]]:
        """Answer several requests together, which is cheaper than one by one; hits of each, in order.

        Without a ``config`` the index's own :attr:`settings` are used.
        """
        self._refresh()
        with naming_damage(self.folder):
            return answer(self.model, self._opened, requests, config or self._settings())

    @property
    def settings(self) -> SearchConfig:
        """How it is searched unless one says otherwise; to change some: ``dataclasses.replace``."""
        self._refresh()
        return self._settings()

    @property
    def opened(self) -> OpenedIndex:
        """Its state now, for measuring."""
        self._refresh()
        return self._opened

    @property
    def seen(self) -> OpenedIndex:
        """Its state when it was last looked at: for those who cannot wait until a new one is opened."""
        return self._opened

    def keep_settings(self, tuned: Tuned, *, wait_seconds: float = 0.0) -> None:
        """Search with these settings from now on, here and elsewhere, unless a search says otherwise."""
        with one_writer(self.folder, wait_seconds=wait_seconds) as writer:
            writer.tune(tuned)
        self._refresh()

    @property
    def calibration(self) -> Calibration | None:
        """What its scores are worth, if `genius calibrate` measured it."""
        self._refresh()
        return self._opened.state.calibration

    def keep_calibration(self, calibration: Calibration, *, wait_seconds: float = 0.0) -> None:
        """Give hits probabilities by it from now on."""
        with one_writer(self.folder, wait_seconds=wait_seconds) as writer:
            writer.calibrate(calibration)
        self._refresh()

    def good_match(self, hits: Sequence[SearchHit]) -> bool | None:
        """Whether the first of a search's hits is likely enough to answer it; None: that is not known.

        Likely enough is what `genius calibrate --precision` was told. No hits are no good match.
        """
        calibration = self.seen.state.calibration  # that of the search
        if calibration is None or calibration.threshold is None:
            return None
        if not hits:
            return False
        best = hits[0].probability
        return None if best is None else calibration.is_good(best)

    def info(self) -> IndexInfo:
        """Items, IDs, collisions, bytes."""
        self._refresh()
        return describe(self.folder, self._opened.state)

    def tree(self, prefix: Sequence[int] = (), *, examples: int = 4, most_children: int = 64) -> CodeNode:
        """What lies below a prefix of IDs: how many items, which codes follow and how they share the items.

        Raises
        ------
        UnknownPrefix
            no ID begins so.
        """
        self._refresh()
        with naming_damage(self.folder):
            return look_at(
                self._opened,
                self.model.quantizer.num_levels,
                prefix,
                examples=examples,
                most_children=most_children,
            )

    def collisions(self, *, offset: int = 0, limit: int = 50) -> SharedPage:
        """Items that share their whole ID, a page of groups, largest first."""
        return self.near_duplicates(0, offset=offset, limit=limit)

    def near_duplicates(self, levels: int = 1, *, offset: int = 0, limit: int = 50) -> SharedPage:
        """Items that share all codes of their IDs but the last so many, a page of groups, largest first."""
        num_levels = self.model.quantizer.num_levels
        if not 0 <= levels < num_levels:
            raise UsageError(f"all but the last {levels} of {num_levels} codes cannot be shared")
        self._refresh()
        with naming_damage(self.folder):
            return sharing(self._opened, num_levels - levels, offset=offset, limit=limit)

    def explain(
        self, request: SearchRequest, item_id: str, *, config: SearchConfig | None = None
    ) -> Explanation:
        """Why a search finds an item, or does not: its ID's way through the levels, code by code.

        Raises
        ------
        UnknownItem
            it is not here.
        """
        self._refresh()
        with naming_damage(self.folder):
            wanted = config or self._settings()
            self._opened.place_of(item_id)  # before anything is encoded
            (asked,) = embed_requests(self.model, self._opened, [request], wanted)
            return explain(self.model, self._opened, asked, item_id, wanted)

    def _settings(self) -> SearchConfig:
        tuned = self._opened.state.tuned
        return USUAL_SEARCH if tuned is None else tuned.search

    def _refresh(self) -> None:
        """Follow what another handle or process changed."""
        now = _stamp(self.folder)
        if now == self._seen:
            return
        opened = OpenedIndex(open_current(self.folder))
        if opened.state.facts.model_fingerprint != self.model.fingerprint:
            raise ArtifactMismatch(f"{self.folder} was made anew with another model meanwhile; open it again")
        self._opened, self._seen = opened, now


_OURS = frozenset({LOCK, WORK, SEGMENTS, DELETED, f"{CURRENT}.tmp"})
"""What a writer that was killed may have left in the folder of an index."""


def _stamp(folder: Path) -> tuple[int, int, int]:
    """Changes whenever the index does: its manifest is a new file then."""
    try:
        status = (folder / CURRENT).stat()
    except OSError:
        read_facts(folder)  # says what is wrong
        raise
    return status.st_ino, status.st_mtime_ns, status.st_size
