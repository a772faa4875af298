"""An index: a pool's IDs and items in one folder, tied to the model that made the IDs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from torch.nn import functional as F

from genius.config import SearchConfig
from genius.data.features import LeftOut
from genius.data.images import open_image
from genius.data.records import Modality, instructed
from genius.encoders.protocol import ItemKey
from genius.errors import ArtifactMismatch, ArtifactMissing, BadData, UsageError
from genius.hub.listing import is_name
from genius.model import Genius
from genius.search.beam import search as beam_search
from genius.search.items import Item
from genius.search.rank import CodeRanker
from genius.search.searcher import Evidence, rank_items
from genius.search.snapshot import (
    LOCK,
    SNAPSHOT,
    ItemArrays,
    Snapshot,
    StoredEmbeddings,
    commit_snapshot,
    one_writer,
    open_current,
    read_facts,
)
from genius.stages.embed import SHORTEST_SIDE, features_of
from genius.stages.items import WORK, encode_items, read_items, remove_work
from genius.stages.progress import Progress, Silent
from genius.stages.pull import find_index, model_folder
from genius.stages.push import push
from genius.stages.save import About


@dataclass(frozen=True, slots=True)
class SearchHit:
    """One found item."""

    rank: int
    """From 1."""
    item_id: str
    score: float
    """Of the evidence that ordered the hits: log-probability, or an inner product of unit vectors."""
    modality: Modality
    text: str | None
    image: str | None
    """Path of its picture."""
    codes: tuple[int, ...]
    """Its ID."""
    log_probabilities: tuple[float, ...]
    """What the generator gave each code."""


@dataclass(frozen=True, slots=True)
class Added:
    """What became of items that were to be added."""

    added: int
    replaced: int
    """Of those, how many took the place of an item with the same id."""
    left_out: tuple[LeftOut, ...]
    """Files that could not be used, each with its reason."""


@dataclass(frozen=True, slots=True)
class IndexInfo:
    """What an index holds."""

    folder: str
    model: str
    model_fingerprint: str
    items: int
    by_modality: dict[str, int]
    distinct_ids: int
    collision_rate: float
    """Share of the items whose ID is shared."""
    id_bytes_per_item: float
    """The codes alone."""
    table_bytes_per_item: float
    """The codes and which items they stand for."""
    embedding_bytes_per_item: float
    item_store_bytes_per_item: float


class Index:
    """Search over one's own items.

    >>> index = Index.open("photos.index")  # doctest: +SKIP
    >>> for hit in index.search(text="a red leather bag", modality="image", k=3):  # doctest: +SKIP
    ...     print(hit.item_id, hit.score)
    >>> index.add("more-photos/")  # doctest: +SKIP
    """

    def __init__(self, folder: Path, model: Genius) -> None:
        self.folder = folder
        self.model = model
        self._facts, self._snapshot = open_current(folder)
        self._usual: Modality | None = None
        self._ranker = CodeRanker(model.quantizer.tables())

    @staticmethod
    def create(
        folder: str | Path,
        *,
        model: str | Path | Genius,
        pool: str | Path,
        embeddings: StoredEmbeddings = "none",
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

        Raises
        ------
        UsageError
            there is an index already.
        BadData
            nothing in the pool can be used; nothing is left behind then.
        """
        folder = Path(folder)
        if (folder / "index.json").exists():
            raise UsageError(f"{folder} holds an index already; `genius index add` adds to it")
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is a file; an index needs a folder")
        if folder.exists() and not all(_is_ours(entry.name) for entry in folder.iterdir()):
            raise UsageError(f"{folder} holds other things; an index needs a folder of its own")
        opened = model if isinstance(model, Genius) else Genius.open(model)
        read = read_items(Path(pool), captions=captions)
        with one_writer(folder):
            try:
                new = encode_items(opened, read, folder, embeddings=embeddings, progress=progress or Silent())
                commit_snapshot(folder, None, new, new.arrays, model=_model_name(opened))
            except BadData:
                with contextlib.suppress(OSError):  # what a writer that was killed left there
                    (folder / LOCK).unlink()
                    folder.rmdir()
                raise
            remove_work(folder)
        return Index(folder, opened), Added(len(new), 0, (*read.left_out, *new.left_out))

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
        return (
            f"<Index {self.folder}, {self._snapshot.table.num_items:,} items, model fingerprint "
            f"{self._facts.model_fingerprint[:12]}>"
        )

    def _refresh(self) -> None:
        """Follow what another handle or process changed: the state before is gone by then."""
        if read_facts(self.folder) == self._facts:
            return
        facts, snapshot = open_current(self.folder)
        if facts.model_fingerprint != self.model.fingerprint:
            raise ArtifactMismatch(f"{self.folder} was made anew with another model meanwhile; open it again")
        self._facts, self._snapshot, self._usual = facts, snapshot, None

    def add(self, pool: str | Path, *, captions: bool = True, progress: Progress | None = None) -> Added:
        """Add items, without retraining; an item whose id is already here is replaced. Searchable at once."""
        read = read_items(Path(pool), captions=captions)
        with one_writer(self.folder):
            self._refresh()
            new = encode_items(
                self.model,
                read,
                self.folder,
                embeddings=self._facts.embeddings,
                progress=progress or Silent(),
            )
            old = self._snapshot.arrays()
            replaced = self._snapshot.items.rows_of(item.item_id for item in new)
            kept = np.setdiff1d(np.arange(len(old.codes)), replaced)
            merged = ItemArrays(
                np.concatenate([old.codes[kept], new.arrays.codes]),
                np.concatenate([old.typicality[kept], new.arrays.typicality]),
                None
                if old.embeddings is None or new.arrays.embeddings is None
                else np.concatenate([old.embeddings[kept], new.arrays.embeddings]),
                old.stored,
            )
            commit_snapshot(
                self.folder,
                self._facts,
                _merged(self._snapshot, set(replaced.tolist()), new),
                merged,
                model=(self._facts.model, self._facts.model_fingerprint),
            )
            remove_work(self.folder)
        self._refresh()
        return Added(len(new), len(replaced), (*read.left_out, *new.left_out))

    def search(
        self,
        text: str | None = None,
        *,
        image: str | Path | Image.Image | None = None,
        instruction: str | None = None,
        modality: str | Modality | None = None,
        k: int = 10,
        config: SearchConfig | None = None,
    ) -> list[SearchHit]:
        """The ``k`` best items for a text, a picture, or both.

        Parameters
        ----------
        instruction
            what is wanted, in words. Without one the model's own training instruction for this kind of
            query and the wanted modality is used, if it has one.
        modality
            ``image``, ``text`` or ``image-text``: only such items are found. Left out, the instruction
            decides; without an instruction too, the index's most frequent modality is asked for.
        config
            beam width, re-ranking; the default is the generator's own order.
        """
        if k < 1:
            raise UsageError(f"k is {k}, it must be at least 1")
        if not (text and text.strip()) and image is None:
            raise UsageError("a query needs a text, an image, or both")
        self._refresh()
        settings = config or SearchConfig()
        wanted = Modality.parse(modality) if isinstance(modality, str) else modality
        words = instruction or self._usual_instruction(text, image, wanted)
        picture = (
            open_image(Path(image), shortest_side=SHORTEST_SIDE) if isinstance(image, str | Path) else image
        )
        features = features_of(
            self.model.encoder, image=picture, text=instructed(words, text), key=ItemKey("query", "")
        )
        embedding = self.model.embed(features)
        raw = self._facts.embeddings == "raw" and settings.rerank == "embeddings"
        codes = None if wanted is None else [self.model.level0_codes(wanted)]
        table = self._snapshot.table
        beams = beam_search(self.model.generator, table, embedding, settings, level0=codes)
        answer = rank_items(
            table,
            beams,
            0,
            F.normalize(features.total(), dim=-1)[0] if raw else embedding[0],
            rerank=settings.rerank,
            evidence=Evidence(self._ranker, self._snapshot.vectors()),
            k=k if wanted is None else table.num_items,
        )
        items = self._snapshot.items.get(answer.items.tolist())
        # A level-0 code that was learned may stand for a few items of another modality too.
        found = [
            (item, score, beam)
            for item, score, beam in zip(items, answer.scores, answer.beams, strict=True)
            if wanted is None or item.modality is wanted
        ]
        return [
            SearchHit(
                rank=place + 1,
                item_id=item.item_id,
                score=float(score),
                modality=item.modality,
                text=item.text,
                image=item.image,
                codes=tuple(int(code) for code in table.ids[beams.rows[0, beam]]),
                log_probabilities=tuple(float(value) for value in beams.log_probabilities[0, beam]),
            )
            for place, (item, score, beam) in enumerate(found[:k])
        ]

    def info(self) -> IndexInfo:
        """Items, IDs, collisions, bytes."""
        self._refresh()
        table = self._snapshot.table
        sizes = np.diff(table.bucket_starts)
        embeddings = self._snapshot.embeddings
        store = (self._snapshot.folder / "items.sqlite").stat().st_size
        count = table.num_items
        return IndexInfo(
            folder=str(self.folder),
            model=self._facts.model,
            model_fingerprint=self._facts.model_fingerprint,
            items=count,
            by_modality={
                modality.label: number
                for modality, number in self._snapshot.items.count_by_modality().items()
            },
            distinct_ids=len(table),
            collision_rate=float(sizes[sizes > 1].sum() / count),
            id_bytes_per_item=table.nbytes / count,
            table_bytes_per_item=(table.nbytes + table.bucket_starts.nbytes + table.items.nbytes) / count,
            embedding_bytes_per_item=0.0 if embeddings is None else embeddings.nbytes / count,
            item_store_bytes_per_item=store / count,
        )

    def _usual_instruction(
        self, text: str | None, image: object | None, wanted: Modality | None
    ) -> str | None:
        query = Modality.of(has_image=image is not None, has_text=text is not None)
        if wanted is None:
            if self._usual is None:
                counts = self._snapshot.items.count_by_modality()
                self._usual = max(counts, key=lambda modality: counts[modality])
            wanted = self._usual
        return self.model.instruction_for(query, wanted)


def _is_ours(name: str) -> bool:
    """Whether an index may have left this in its folder."""
    return name in (LOCK, WORK, "index.json.tmp") or SNAPSHOT.match(name.lstrip(".")) is not None


def _merged(snapshot: Snapshot, dropped: set[int], new: Iterable[Item]) -> Iterator[Item]:
    for row, item in enumerate(snapshot.items.all()):
        if row not in dropped:
            yield item
    yield from new


def _model_name(model: Genius) -> tuple[str, str]:
    return str(model.folder.resolve()), model.fingerprint
