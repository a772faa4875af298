"""Search and change a cluster: call every shard, and merge the hits by score.

A cluster is a folder with ``cluster.json`` and ``shards/000000``, ``shards/000001``, ... Each shard
is an ordinary index of the items whose ids hash to its number. All shards use the same model, so
their scores can be compared.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeAlias, Unpack, overload

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from genius_search.artifact import ManifestForm
from genius_search.border import as_id, as_id_list, as_path
from genius_search.config import SearchConfig
from genius_search.errors import ArtifactMismatch, ArtifactMissing, UsageError
from genius_search.index.build import ChangeSummary, add_pool
from genius_search.index.filters import check_fields
from genius_search.index.hits import Hits, HitsOfQueries, SearchHit
from genius_search.index.index import Index, current_state
from genius_search.index.info import CheckReport
from genius_search.index.items import Item
from genius_search.index.merge import (
    COMPARABLE_RANK,
    ModalityHits,
    interleave,
    merge_modalities,
    number_hits,
)
from genius_search.index.pool import (
    NewItem,
    Pool,
    is_candidate_list,
    open_pool,
    open_roots,
    picture_bytes,
    read_new_item,
)
from genius_search.index.request import SearchOptions, SearchPart, SearchRequest, as_request
from genius_search.index.roots import innermost_root, new_root
from genius_search.index.store import CLUSTER, Roots, absolute_folder, read_manifest, refuse_links
from genius_search.index.writer import Deleted, open_writer
from genius_search.model import Genius
from genius_search.progress import Silent
from genius_search.records import Modality, composed
from genius_search.writing import write_json

ShardCall: TypeAlias = Callable[..., Callable[[], Any]]
"""``call(method, *arguments, **options)`` starts a method of a :class:`Shard`, in this process or
on another machine. The returned function waits for the result."""
MODEL: Final = "model"
"""The folder of the model, if it is inside the cluster."""
ITEMS_PER_CHANGE: Final = 10_000
"""Number of items of a pool to add at a time. Each shard makes one change for its share of them."""
MAX_WRITER_WAIT_SECONDS: Final = 60.0
"""Maximum wait for another process that changes the same shard."""


CLUSTER_FORM: Final = ManifestForm(CLUSTER, 4, "build the cluster again")


class ClusterManifest(BaseModel):
    """The contents of ``cluster.json``: the cluster as it was built.

    Later changes are stored in the shards.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str
    """Folder or name of the model, or :data:`MODEL` if the cluster contains it."""
    model_fingerprint: str
    pool: str
    shards: int = Field(ge=1)
    items: int
    left_out: int
    roots: Roots = ()
    """The folders that were added. Ids in all but the first begin with the name of their folder."""


def read_cluster(folder: Path) -> ClusterManifest:
    """Read ``cluster.json``.

    Raises
    ------
    ArtifactMissing
        The folder does not contain a finished cluster.
    ArtifactMismatch
        The file is damaged or of another version.
    """
    if not (folder / CLUSTER).is_file():
        raise ArtifactMissing(
            f"{folder} contains no finished cluster; create one with `genius cluster build`"
        )
    body = CLUSTER_FORM.read(folder)
    del body["checksum"], body["format"]
    try:
        return ClusterManifest.model_validate_json(json.dumps(body))
    except ValidationError as error:
        raise CLUSTER_FORM.damaged(folder, error) from None


def write_cluster(folder: Path, manifest: ClusterManifest) -> None:
    """Replace ``cluster.json`` atomically."""
    write_json(folder / CLUSTER, CLUSTER_FORM.seal(manifest.model_dump(mode="json")))


def open_new_pool(
    cluster: Path, searcher: Searcher, pool: Path, *, captions: bool, exclude: Sequence[str]
) -> Pool:
    """Open a pool to add to a cluster.

    The cluster remembers the folder of the pool as a root with a unique name, so that equal paths
    in two folders become different ids.

    Raises
    ------
    BadData
        The path is not a pool.
    """
    manifest = read_cluster(cluster)
    path = as_path(pool).resolve()
    if not path.exists() or is_candidate_list(path):
        return open_pool(path, captions=captions, exclude=exclude)
    roots = manifest.roots
    number = innermost_root(roots, path)
    if number is None:
        number = len(roots)
        used_names = searcher.id_prefixes()
        roots = (*roots, new_root(path, roots, used_names, captions=captions, exclude=exclude))
        write_cluster(cluster, manifest.model_copy(update={"roots": roots}))
    return open_roots(roots, [number], None if str(path) == roots[number].folder else path)


def shard_of(item_id: str, shards: int) -> int:
    """Return the number of the shard of an item: the BLAKE2b hash of its id, modulo the shards."""
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
    """An opened shard of a cluster, with the methods that a :class:`Searcher` calls."""

    def __init__(self, folder: Path, model: str | Genius) -> None:
        self._index = Index.open(folder, model=model)

    def begin(self, method: str, *arguments: Any, **options: Any) -> Callable[[], Any]:
        """Return a function that calls a method (:data:`ShardCall`)."""
        return partial(self.call, method, *arguments, **options)

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the shard, or of its index if the shard has no such method."""
        owner = self if hasattr(self, method) else self._index
        return getattr(owner, method)(*arguments, **options)

    def count(self) -> int:
        """Return the number of items."""
        return len(self._index)

    def id_prefixes(self) -> set[str]:
        """Return the parts of all ids before the first slash."""
        return {name.partition("/")[0] for name in current_state(self._index).snapshot.ids()}

    def splits_modalities(self) -> bool:
        """Return whether a search without modality or instruction treats modalities separately."""
        model, snapshot = current_state(self._index)
        return model.level0_is_exact and snapshot.manifest.reads_images

    def field_names(self) -> set[str]:
        """Return the names of all fields of the items, for checking conditions."""
        segments = current_state(self._index).snapshot.segments
        return set[str]().union(*(segment.items.field_names for segment in segments))

    def add_pool(
        self, items: Sequence[Item], *, has_files: bool, wait_seconds: float
    ) -> ChangeSummary:
        """Add items of a pool; see :func:`genius_search.index.build.add_pool`."""
        pool = Pool(partial(iter, items), has_files=has_files)
        model, snapshot = current_state(self._index)
        with open_writer(snapshot.folder, wait_seconds=wait_seconds, before=snapshot) as writer:
            summary = add_pool(writer, model, pool, may_be_empty=True, progress=Silent())
            writer.compact()
            return summary

    def delete(self, ids: Sequence[str], *, wait_seconds: float) -> Deleted:
        """Delete items by their ids, and free their space if there are many."""
        result = self._index.delete(ids, wait_seconds=wait_seconds)
        self._index.compact(wait_seconds=wait_seconds)
        return result


class Searcher:
    """Search and change a cluster, with the methods of :class:`Index`.

    >>> searcher = Searcher.open("X")  # doctest: +SKIP
    >>> for hit in searcher.search("a red bag", k=3):  # doctest: +SKIP
    ...     print(hit.id, hit.score)

    Parameters
    ----------
    shards
        for each shard, in order, a function that calls its methods.
    """

    def __init__(self, shards: Sequence[ShardCall]) -> None:
        self._shards = shards
        self._splits_modalities: bool = shards[0]("splits_modalities")()

    @staticmethod
    def open(folder: str | Path, *, device: str = "cpu", download: bool = False) -> Searcher:
        """Open all shards of a cluster in this process.

        Parameters and errors are those of :meth:`Index.open`.
        """
        folder = absolute_folder(folder)
        refuse_links(folder)
        model = Genius.open(model_of(folder), device=device, download=download)
        shards = [shard_folder(folder, number) for number in range(read_cluster(folder).shards)]
        _refuse_copies(shards)
        return Searcher([Shard(shard, model).begin for shard in shards])

    def __len__(self) -> int:
        """Return the number of items."""
        return sum(self._call_all("count"))

    def id_prefixes(self) -> set[str]:
        """Return the parts of all ids before the first slash."""
        return set[str]().union(*self._call_all("id_prefixes"))

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
        """Return the best items for a query, or for each query of a list.

        Parameters are those of :meth:`Index.search`. Each shard has default settings that depend on
        its number of items; ``config`` overrides them. A list of queries needs one call to each
        shard.

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
        if any(request.is_arranged for request in requests):
            raise UsageError(
                "a cluster does not sort, count or group (order_by, facets, group_by); leave them "
                "out, or search a single index"
            )
        # A request becomes one or more alternatives (combine="any"). Shards are sent the flat list
        # of all alternatives; the merged results are then dealt out to the requests again.
        alternatives = [self._alternatives(request) for request in requests]
        shard_requests = [request for group in alternatives for request in group]
        if not shard_requests:
            return []
        self._check_filters(shard_requests)
        results = self._call_all("search", shard_requests, config=config)
        has_scores = config is None or config.rerank != "none"  # otherwise log-probabilities
        merged = iter(
            [
                self._merge(request, shard_hits, has_scores=has_scores)
                for request, *shard_hits in zip(shard_requests, *results, strict=True)
            ]
        )
        hits = []
        for request, group in zip(requests, alternatives, strict=True):
            interleaved = interleave([next(merged) for _ in group], request.k + request.offset)
            hits.append(Hits(interleaved[request.offset :]))
        return hits

    def _check_filters(self, requests: Sequence[SearchRequest]) -> None:
        """Raise :class:`UsageError` for conditions on a field that no shard has."""
        filters = [request.filter for request in requests if request.filter is not None]
        if filters:
            names = set[str]().union(*self._call_all("field_names"))
            for each_filter in filters:
                check_fields(each_filter, names)

    def add(
        self,
        pool: Pool | Sequence[NewItem | Mapping[str, Any]],
        *,
        wait_seconds: float = MAX_WRITER_WAIT_SECONDS,
    ) -> ChangeSummary:
        """Add items of a pool or from memory, each to the shard of its id.

        See :meth:`Index.add`.
        """
        if not isinstance(pool, Pool):
            total = ChangeSummary()
            new_items = [read_new_item(item, number) for number, item in enumerate(pool)]
            self._add_to(total, self._call_owners("add", new_items, wait_seconds=wait_seconds))
            return total
        total = ChangeSummary(left_out=[*pool.left_out])
        items = pool.items()
        while batch := list(islice(items, ITEMS_PER_CHANGE)):
            # Without a root, since a cluster does not follow folders.
            rootless = [item._replace(root=None) for item in batch]
            options = {"has_files": pool.has_files, "wait_seconds": wait_seconds}
            self._add_to(total, self._call_owners("add_pool", rootless, **options))
        return total

    def _add_to(self, total: ChangeSummary, summaries: Mapping[int, ChangeSummary]) -> None:
        """Add the numbers of each shard's change to a total."""
        for summary in summaries.values():
            total.added += summary.added
            total.replaced += summary.replaced
            total.unchanged += summary.unchanged
            total.left_out += summary.left_out

    def delete(
        self,
        item_ids: str | int | Iterable[str | int],
        *,
        wait_seconds: float = MAX_WRITER_WAIT_SECONDS,
    ) -> Deleted:
        """Delete one or more items by their ids; the result names the ids that do not exist."""
        ids = as_id_list(item_ids)
        results = self._call_owners("delete", ids, wait_seconds=wait_seconds).values()
        num_deleted = sum(result.deleted for result in results)
        return Deleted(num_deleted, [name for result in results for name in result.missing])

    def check(self) -> CheckReport:
        """Compare all files of all shards with their checksums; raise like :meth:`Index.check`."""
        return CheckReport(*map(sum, zip(*self._call_all("check"), strict=True)))

    def _call_owners(
        self, method: str, items: Sequence[str | Item | NewItem], **options: Any
    ) -> dict[int, Any]:
        """Call a method of each shard that owns some of the items, with those items.

        Parameters
        ----------
        items
            items or ids.

        Returns
        -------
        Number of a shard -> the result of its call.
        """
        items_by_shard: dict[int, list[Any]] = defaultdict(list)
        for item in items:
            item_id = item if isinstance(item, str) else item.id
            items_by_shard[shard_of(as_id(item_id), len(self._shards))].append(item)
        # All calls start before the first result is waited for.
        pending = {
            number: self._shards[number](method, shard_items, **options)
            for number, shard_items in items_by_shard.items()
        }
        return {number: result() for number, result in pending.items()}

    def _call_all(self, method: str, *arguments: Any, **options: Any) -> list[Any]:
        """Call a method of every shard at the same time; return their results."""
        pending = [call(method, *arguments, **options) for call in self._shards]
        return [result() for result in pending]

    def _alternatives(self, request: SearchRequest) -> list[SearchRequest]:
        """Return the alternatives of a request, in a form that does not depend on this machine."""
        portable = dataclasses.replace(
            request,
            image=_read_picture(request.image),
            parts=tuple(map(self._read_part, request.parts)),
            k=max(request.k + request.offset, COMPARABLE_RANK),
            offset=0,
            where=dataclasses.replace(request.filter, ignores_unknown_fields=True)
            if request.filter
            else (),
            deadline=math.inf,  # monotonic clocks of two machines cannot be compared
        )
        return portable.alternatives()

    def _read_part(self, part: SearchPart) -> SearchPart:
        """Return a part with the bytes of its picture; an id is replaced by its item's contents."""
        if part.id is not None:
            number = shard_of(as_id(part.id), len(self._shards))
            item: Item = self._shards[number]("get", part.id)()
            part = dataclasses.replace(part, id=None, text=item.text, image=item.image)
        return dataclasses.replace(part, image=_read_picture(part.image))

    def _merge(
        self,
        request: SearchRequest,
        hits_by_shard: Sequence[Hits],
        *,
        has_scores: bool,
    ) -> list[SearchHit]:
        """Merge the hits of all shards by score, and the modalities as an index merges them.

        Scores are standardised by each shard, which has fewer items than the cluster.
        """
        is_open = request.modality is None and not request.instruction
        by_modality = self._splits_modalities and is_open and bool(request.query)
        groups: dict[Modality | None, list[tuple[float, SearchHit]]] = defaultdict(list)
        for hits in hits_by_shard:
            best_scores_below: dict[Modality | None, float] = {}
            for hit in reversed(hits):
                group = hit.modality if by_modality else None
                # A shard raises hits with words of the query above hits with better scores. A
                # raised hit is merged as if it had the best score below it in its shard, which
                # keeps the order of the shard: scores .5 (raised), .9, .7 become .9, .9, .7.
                merge_score = max(best_scores_below.get(group, -math.inf), hit.score)
                best_scores_below[group] = merge_score
                groups[group].append((merge_score, hit))
        hits_of_all: list[SearchHit] = []
        modalities = []
        for scored in groups.values():
            scored.sort(key=lambda scored_hit: (-scored_hit[0], scored_hit[1].rank))
            best_hits = number_hits([hit for _, hit in scored[: request.k]])
            scores = [score for score, _ in scored[: request.k]]
            best_scores = scores[:COMPARABLE_RANK] if has_scores else []
            hits_of_all += best_hits
            modalities.append(ModalityHits.of_hits(best_hits, scores, best_scores))
        return [hits_of_all[number] for number in merge_modalities(modalities, request.k)]


def _read_picture(image: Any) -> Any:
    """Return the bytes of a picture instead of its path, which may not exist on other machines."""
    return picture_bytes(Path(image)) if isinstance(image, str | Path) else image


def _refuse_copies(shards: Sequence[Path]) -> None:
    """Raise :class:`ArtifactMismatch` if a shard is a copy of another one, whose items it repeats.

    The items of the shard that it took the place of would be missing from all results.
    """
    shard_of_identity: dict[str, Path] = {}
    for shard in shards:
        other = shard_of_identity.setdefault(read_manifest(shard).identity, shard)
        if other is not shard:
            raise ArtifactMismatch(f"{shard} is a copy of {other}; restore it from a backup")
