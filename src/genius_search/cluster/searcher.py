"""Searching and changing a cluster: each shard is asked, and their hits are merged by score.

A cluster is a folder with ``cluster.json`` and ``shards/``, each an ordinary index of the items whose ids
hash to its number. The shards share one model, so their scores can be compared.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, Unpack, overload

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from genius_search.artifact import first_problem
from genius_search.border import as_id, as_id_list, as_path
from genius_search.config import SearchConfig
from genius_search.errors import ArtifactMismatch, ArtifactMissing
from genius_search.index.build import ChangeSummary, add_pool
from genius_search.index.filters import check_fields
from genius_search.index.index import Index, current_state
from genius_search.index.info import CheckReport
from genius_search.index.items import Item
from genius_search.index.pool import (
    NewItem,
    Pool,
    is_candidate_list,
    open_pool,
    open_roots,
    picture_bytes,
    read_new_item,
)
from genius_search.index.query import COMPARABLE, SAME, Part, interleave, merge, numbered
from genius_search.index.request import (
    Hits,
    HitsOfQueries,
    SearchHit,
    SearchOptions,
    SearchPart,
    SearchRequest,
    as_request,
)
from genius_search.index.roots import innermost_root, new_root
from genius_search.index.store import CLUSTER, Roots, absolute_folder, refuse_links
from genius_search.index.writer import Deleted, open_writer
from genius_search.model import Genius
from genius_search.progress import Silent
from genius_search.records import Modality, composed
from genius_search.writing import write_json

Ask: TypeAlias = Callable[..., Callable[[], Any]]
"""Begins to call a method of a :class:`Shard`, here or elsewhere; the result waits for the answer."""
MODEL: Final = "model"
BATCH: Final = 10_000
"""Items of a pool that are added together; each shard is changed once for all of its own."""
WAIT_SECONDS: Final = 60.0
"""Longest wait for another process that changes the same shard."""


class ClusterManifest(BaseModel):
    """The contents of ``cluster.json``: what was built. Later changes are in the shards."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[3] = 3
    model: str
    """Folder or name of the model; :data:`MODEL` if the cluster contains it."""
    model_fingerprint: str
    pool: str
    shards: int = Field(ge=1)
    items: int
    left_out: int
    roots: Roots = ()
    """The folders that were added; ids in the first one have no name before them."""


def read_cluster(folder: Path) -> ClusterManifest:
    """Read ``cluster.json``; raises :class:`ArtifactMissing` or :class:`ArtifactMismatch`."""
    path = folder / CLUSTER
    if not path.is_file():
        raise ArtifactMissing(
            f"{folder} holds no finished cluster; `genius cluster build` makes one"
        )
    try:
        return ClusterManifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ArtifactMismatch(
            f"{path} is damaged or of another version ({first_problem(error)}); build the cluster again"
        ) from None


def open_addition(
    cluster: Path, searcher: Searcher, given: Path, *, captions: bool, exclude: Sequence[str]
) -> Pool:
    """Open a pool that is to be added; the cluster remembers its folder, so that ids never meet.

    Raises
    ------
    BadData
        It is no pool.
    """
    manifest, place = read_cluster(cluster), as_path(given).resolve()
    if not place.exists() or is_candidate_list(place):
        return open_pool(place, captions=captions, exclude=exclude)
    roots = manifest.roots
    number = innermost_root(roots, place)
    if number is None:
        number, taken = len(roots), searcher.id_beginnings()
        roots = (*roots, new_root(place, roots, taken, captions=captions, exclude=exclude))
        write_json(
            cluster / CLUSTER, manifest.model_copy(update={"roots": roots}).model_dump(mode="json")
        )
    return open_roots(roots, [number], None if str(place) == roots[number].folder else place)


def shard_of(item_id: str, shards: int) -> int:
    """Return the number of an item's shard: 8 bytes of BLAKE2b of its id, modulo the number of shards."""
    digest = hashlib.blake2b(composed(item_id).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % shards


def shard_folder(cluster: Path, number: int) -> Path:
    """Return the folder of a shard."""
    return cluster / "shards" / f"{number:06d}"


def model_of(cluster: Path) -> str:
    """Return the folder or name of a cluster's model."""
    model = read_cluster(cluster).model
    return str(cluster / model) if model == MODEL else model


class Shard:
    """One shard: the index in a folder, opened with the cluster's model, and what it is asked for."""

    def __init__(self, folder: Path, model: str | Genius) -> None:
        self._index = Index.open(folder, model=model)

    def begin(self, method: str, *arguments: Any, **options: Any) -> Callable[[], Any]:
        """Return a call of a method, which is made when its answer is wanted (:data:`Ask`)."""
        return partial(self.call, method, *arguments, **options)

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the shard, or the one that its index has of that name."""
        owner = self if hasattr(self, method) else self._index
        return getattr(owner, method)(*arguments, **options)

    def count(self) -> int:
        """Return the number of items."""
        return len(self._index)

    def id_beginnings(self) -> set[str]:
        """Return what ids begin with, up to the first slash."""
        return {name.partition("/")[0] for name in current_state(self._index).snapshot.ids()}

    def splits_modalities(self) -> bool:
        """Return whether a search without modality and instruction takes every modality by itself."""
        return self._index.model.level0_is_exact

    def field_names(self) -> set[str]:
        """Return the fields of the items here, as conditions are checked against them."""
        return set[str]().union(
            *(segment.items.field_names for segment in current_state(self._index).snapshot.segments)
        )

    def add_pool(
        self, items: Sequence[Item], *, has_files: bool, wait_seconds: float
    ) -> ChangeSummary:
        """Add items of a pool; see :func:`genius_search.index.build.add_pool`."""
        pool = Pool(partial(iter, items), has_files=has_files)
        model, snapshot = current_state(self._index)
        with open_writer(snapshot.folder, wait_seconds=wait_seconds, before=snapshot) as writer:
            done = add_pool(writer, model, pool, may_be_none=True, progress=Silent())
            writer.compact()
            return done

    def delete(self, ids: Sequence[str], *, wait_seconds: float) -> Deleted:
        """Delete items by their ids."""
        done = self._index.delete(ids, wait_seconds=wait_seconds)
        self._index.compact(wait_seconds=wait_seconds)
        return done


class Searcher:
    """Searches and changes a cluster as :class:`Index` does an index, given how to ask each of its shards.

    >>> searcher = Searcher.open("X")  # doctest: +SKIP
    >>> for hit in searcher.search("a red bag", k=3):  # doctest: +SKIP
    ...     print(hit.id, hit.score)
    """

    def __init__(self, shards: Sequence[Ask]) -> None:
        self._shards = shards
        self._splits_modalities: bool = shards[0]("splits_modalities")()

    @staticmethod
    def open(folder: str | Path, *, device: str = "cpu", download: bool = False) -> Searcher:
        """Open all shards of a cluster in this process; parameters and errors as of :meth:`Index.open`."""
        folder = absolute_folder(folder)
        refuse_links(folder)
        model = Genius.open(model_of(folder), device=device, download=download)
        shards = range(read_cluster(folder).shards)
        return Searcher([Shard(shard_folder(folder, number), model).begin for number in shards])

    def __len__(self) -> int:
        """Return the number of items."""
        return sum(self._ask_all("count"))

    def id_beginnings(self) -> set[str]:
        """Return what ids begin with, up to the first slash."""
        return set[str]().union(*self._ask_all("id_beginnings"))

    @overload
    def search(
        self, query: str | SearchRequest | None = None, **options: Unpack[SearchOptions]
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
        **options: Unpack[SearchOptions],
    ) -> Hits | list[Hits]:
        """Return the best items; parameters as of :meth:`Index.search`.

        Each shard uses the settings for its number of items, changed by ``config``. A list of queries
        is one call to each shard.

        Raises
        ------
        UsageError
            A request is invalid, or refers to a field or an item that the cluster does not have.
        DeadlinePassed
            A shard does not answer.
        """
        config = options.pop("config", None)
        if isinstance(query, list | tuple):
            requests = [as_request(element, options) for element in query]
            return HitsOfQueries(self._search(requests, config))
        return self._search([as_request(query, options)], config)[0]

    def _search(self, requests: Sequence[SearchRequest], config: SearchConfig | None) -> list[Hits]:
        """Search for several requests with one call to each shard; return the hits of each."""
        alternatives = [self._alternatives(request) for request in requests]
        asked = [one for several in alternatives for one in several]
        if not asked:
            return []
        if conditions := [one.filter for one in asked if one.filter is not None]:
            names = set[str]().union(*self._ask_all("field_names"))
            for one in conditions:
                check_fields(one, names)
        answers = zip(asked, *self._ask_all("search", asked, config=config), strict=True)
        has_scores = config is None or config.rerank != "none"  # and not log-probabilities
        merge_hits = partial(self._merge, has_scores=has_scores)
        merged = iter([merge_hits(request, found) for request, *found in answers])
        return [
            Hits(
                interleave([next(merged) for _ in several], request.k + request.offset)[
                    request.offset :
                ]
            )
            for request, several in zip(requests, alternatives, strict=True)
        ]

    def add(
        self,
        pool: Pool | Sequence[NewItem | Mapping[str, Any]],
        *,
        wait_seconds: float = WAIT_SECONDS,
    ) -> ChangeSummary:
        """Add items of a pool or from memory, each to the shard of its id; see :meth:`Index.add`."""
        if not isinstance(pool, Pool):
            total = ChangeSummary()
            given = [read_new_item(item, number) for number, item in enumerate(pool)]
            self._add_to(total, self._ask_owners("add", given, wait_seconds=wait_seconds))
            return total
        total, items = ChangeSummary(left_out=[*pool.left_out]), pool.items()
        while batch := list(islice(items, BATCH)):
            own = [item._replace(root=None) for item in batch]  # a cluster does not follow folders
            options = {"has_files": pool.has_files, "wait_seconds": wait_seconds}
            self._add_to(total, self._ask_owners("add_pool", own, **options))
        return total

    def _add_to(self, total: ChangeSummary, answers: Mapping[int, ChangeSummary]) -> None:
        for done in answers.values():
            total.added += done.added
            total.replaced += done.replaced
            total.unchanged += done.unchanged
            total.left_out += done.left_out

    def delete(
        self, item_ids: str | int | Iterable[str | int], *, wait_seconds: float = WAIT_SECONDS
    ) -> Deleted:
        """Delete one or several items; unknown ids are returned."""
        ids = as_id_list(item_ids)
        done = self._ask_owners("delete", ids, wait_seconds=wait_seconds).values()
        return Deleted(
            sum(one.deleted for one in done), [name for one in done for name in one.missing]
        )

    def check(self) -> CheckReport:
        """Compare every file of every shard with its checksum; raises like :meth:`Index.check`."""
        return CheckReport(*map(sum, zip(*self._ask_all("check"), strict=True)))

    def _ask_owners(
        self, method: str, things: Sequence[str | Item | NewItem], **options: Any
    ) -> dict[int, Any]:
        """Call a method of the shards of ids or items, with those of each; return all answers."""
        divided: dict[int, list[Any]] = defaultdict(list)
        for one in things:
            item_id = one if isinstance(one, str) else one.id
            divided[shard_of(as_id(item_id), len(self._shards))].append(one)
        waiting = {
            number: self._shards[number](method, own, **options) for number, own in divided.items()
        }
        return {number: answer() for number, answer in waiting.items()}

    def _ask_all(self, method: str, *arguments: Any, **options: Any) -> list[Any]:
        """Call a method of every shard; return their answers."""
        waiting = [ask(method, *arguments, **options) for ask in self._shards]
        return [answer() for answer in waiting]

    def _alternatives(self, request: SearchRequest) -> list[SearchRequest]:
        """Return what the shards are asked for: each alternative of a request, with all that it refers to."""
        complete = dataclasses.replace(
            request,
            image=_read(request.image),
            parts=tuple(map(self._read_part, request.parts)),
            k=max(request.k + request.offset, COMPARABLE),
            offset=0,
            where=dataclasses.replace(request.filter, ignores_unknown_fields=True)
            if request.filter
            else (),
            deadline=math.inf,  # the clock of another machine tells other times
        )
        return complete.alternatives()

    def _read_part(self, part: SearchPart) -> SearchPart:
        """Return a part with the bytes of its picture; an item becomes its text and picture."""
        if part.id is not None:
            number = shard_of(as_id(part.id), len(self._shards))
            item: Item = self._shards[number]("get", part.id)()
            part = dataclasses.replace(part, id=None, text=item.text, image=item.image)
        return dataclasses.replace(part, image=_read(part.image))

    def _merge(
        self,
        request: SearchRequest,
        found: Sequence[Hits],
        *,
        has_scores: bool,
    ) -> list[SearchHit]:
        """Merge the hits of all shards by score; of several modalities as an index does.

        How far hits stand out is what their shard says, which has fewer items than the cluster.
        """
        is_open = request.modality is None and not request.instruction
        by_modality = self._splits_modalities and is_open and bool(request.query)
        groups: dict[Modality | None, list[tuple[float, SearchHit]]] = defaultdict(list)
        for hits in found:
            best: dict[Modality | None, float] = {}
            for hit in reversed(hits):
                group = hit.modality if by_modality else None
                # What a shard puts before better scores, for its words, counts like the best behind it.
                best[group] = max(best.get(group, -math.inf), hit.score)
                groups[group].append((best[group], hit))
        parts = []
        for scored in groups.values():
            scored.sort(key=lambda one: (-one[0], one[1].rank))
            best_hits = numbered([hit for _, hit in scored[: request.k]])
            scores = [score for score, _ in scored[: request.k]]
            best_scores = scores[:COMPARABLE] if has_scores else []
            is_same = [score >= SAME for score in scores]
            parts.append(Part(best_hits, 0, best_scores, scores, is_same))
        return merge(parts, request.k)


def _read(image: Any) -> Any:
    """Return a picture's bytes instead of its path, which may lead nowhere on other machines."""
    return picture_bytes(Path(image)) if isinstance(image, str | Path) else image
