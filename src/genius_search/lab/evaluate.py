"""``genius doctor``: examine a model's IDs, on its training candidates or on a pool it has not seen."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Float16, Int8, Int16, Int64, UInt8
from pydantic import ConfigDict
from torch import Tensor
from torch.nn import functional as F

from genius_search.artifact import fingerprint_of, open_artifact, write_json
from genius_search.config import Count, Natural, NonNegative, SearchConfig, checked, from_json
from genius_search.data import features as features_on_disk
from genius_search.data.features import FeatureBatch, Features
from genius_search.data.mbeir import PAPER_ROWS, EvaluationRow, MBeir, read_pool, read_qrels, read_queries
from genius_search.embed import (
    InstructionChoice,
    choose_instruction,
    count_lines,
    embed,
    embed_pool,
    fingerprint_of_files,
    instruction_files,
    instructions_for,
    query_row,
)
from genius_search.encoders.base import Encoder
from genius_search.errors import ArtifactError, ArtifactMissing, BadData, UsageError
from genius_search.index.encode import encode_features, examine_items
from genius_search.index.store import ItemArrays, StoredEmbeddings
from genius_search.lab.results import METHODS, ResultRow, to_json
from genius_search.lab.runs import Hit, Qrels, Run, filter_to_pool, write_qrels, write_run
from genius_search.lab.runs import evaluate as measure
from genius_search.model import Genius
from genius_search.nn.density import decode_densities
from genius_search.nn.health import Health
from genius_search.progress import Progress
from genius_search.records import TASKS, Candidate, Modality, Query, candidate_number, did_of, task_name
from genius_search.search.beam import search
from genius_search.search.rank import Evidence, append_bias, append_one, exact_search, rank_items
from genius_search.search.table import IdTable, Part

DEPTH: Final = 50
"""Hits kept for each query."""
SEARCH_BATCH: Final = 64


class Way(NamedTuple):
    """How a method that searches by beams finds items, and what orders them."""

    by: Literal["generator", "geometry"]
    """What leads the beams."""
    rerank: Literal["none", "codes", "embeddings"]
    is_raw: bool = False
    """Whether the embeddings are the encoder's features and not the fused ones."""


WAYS: Final = {
    "routing+codes": Way("geometry", "codes"),
    "routing+embeddings": Way("geometry", "embeddings"),
    "generative": Way("generator", "none"),
    "generative+codes": Way("generator", "codes"),
    "generative+embeddings": Way("generator", "embeddings"),
    "generative+raw": Way("generator", "embeddings", is_raw=True),
}
"""The methods that touch only a part of the pool."""
FUSED: Final = frozenset(
    {"exact-fused", "exact-fused+hubness", "routing+embeddings", "generative+embeddings"}
)
"""Methods that need every candidate's fused embedding."""


class PoolItems:
    """The candidates of one pool and their features, which are read from disk when they are asked for.

    Parameters
    ----------
    features
        of many candidates; may be memory-mapped.
    rows
        which of them are in the pool, in its order.
    """

    def __init__(self, features: Features, rows: Int64[np.ndarray, " items"]) -> None:
        self._features = features
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, did: object) -> bool:
        if not isinstance(did, str):
            return False
        number = candidate_number(did)
        place = int(np.searchsorted(self._sorted_dids, number))
        return place < len(self) and int(self._sorted_dids[place]) == number

    @cached_property
    def dids(self) -> Int64[np.ndarray, " items"]:
        """Candidate ids as UniIR's integers."""
        numbers: np.ndarray = self._features.ids[self._rows]
        return numbers

    @cached_property
    def _sorted_dids(self) -> np.ndarray:
        return np.sort(self.dids)

    @property
    def modality(self) -> Int8[np.ndarray, " items"]:
        """Codes of the candidates' modalities."""
        modality: np.ndarray = self._features.modality[self._rows]
        return modality

    def raw(self, places: slice | np.ndarray) -> Float[Tensor, "items dim"]:
        """Unit sums of the encoder's features."""
        return F.normalize(self._features.gather(self._rows[places]).total(), dim=-1)


class PoolCandidates(PoolItems):
    """The same with their IDs.

    Parameters
    ----------
    arrays
        of as many candidates as there are features; may be memory-mapped.
    """

    def __init__(self, features: Features, arrays: ItemArrays, rows: Int64[np.ndarray, " items"]) -> None:
        super().__init__(features, rows)
        self._arrays = arrays

    @cached_property
    def codes(self) -> Int16[np.ndarray, "items columns"]:
        """Codes of the IDs, then half norms and densities."""
        codes: np.ndarray = self._arrays.codes[self._rows]
        return codes

    @property
    def typicality(self) -> Float16[np.ndarray, " items"]:
        """Cosine between a candidate's embedding and the vector of its ID."""
        cosines: np.ndarray = self._arrays.typicality[self._rows]
        return cosines

    @cached_property
    def table(self) -> IdTable:
        """The ID table."""
        return IdTable.build(self.codes, self.typicality)

    @property
    def id_bytes(self) -> float:
        """Bytes of the table's IDs for each candidate."""
        return self.table.nbytes / len(self)

    def fused(self, places: slice | np.ndarray) -> Float[Tensor, "items dim"]:
        """The unit embeddings that IDs are made from, as stored in 16 bits."""
        if self._arrays.embeddings is None:
            raise ValueError("fused embeddings were not kept")
        return torch.from_numpy(self._arrays.embeddings[self._rows[places]]).float()

    @cached_property
    def densities(self) -> UInt8[np.ndarray, " items"] | None:
        """How crowded it is around candidates, where their fused embeddings are kept."""
        kept = self._arrays.densities
        return None if kept is None else kept[self._rows]


class RowQueries(NamedTuple):
    """The queries of one row of the table, embedded."""

    qids: list[str]
    raw: Float[Tensor, "queries dim"]
    """Unit sums of the encoder's features."""
    fused: Float[Tensor, "queries dim"]
    """What GENIUS searches with; the same for a rival that fuses by the sum alone."""


class Found(NamedTuple):
    """What one method found."""

    method: str
    hits: list[list[Hit]]
    """A ranking for each query."""
    bytes_per_item: float
    """What has to be stored."""
    touched: float
    """Candidates that were scored, on average over the queries."""


def find(
    model: Genius,
    rows: Sequence[RowQueries],
    pool: PoolCandidates,
    methods: Sequence[str],
    settings: SearchConfig,
) -> Iterator[list[Found]]:
    """Answer the queries of each row by each of these methods.

    Exact search goes through the candidates once, whichever the row: at millions of them that is what it
    costs.
    """
    vector_bytes = 2.0 * model.dim  # as they would be stored; exact search compares them in 32 bits
    nearest = {
        rival.method: exact_search(
            torch.cat([rival.queries(queries) for queries in rows]),
            rival.vectors,
            len(pool),
            k=DEPTH,
            device=model.quantizer.device,
        )
        for rival in _exact(model, pool, settings)
        if rival.method in methods
    }
    crowded_bytes = vector_bytes + 1  # the density around it is a byte
    sizes = {"exact-codes": pool.id_bytes, "exact-fused+hubness": crowded_bytes}
    searching = [method for method in WAYS if method in methods]
    start = 0
    for queries in rows:
        here = slice(start, start + len(queries.qids))
        start = here.stop
        found = []
        for method, everything in nearest.items():
            hits = [
                hits_of(pool, items, scores)
                for items, scores in zip(everything.items[here], everything.scores[here], strict=True)
            ]
            found.append(Found(method, hits, sizes.get(method, vector_bytes), float(len(pool))))
        if searching:
            searched = _search(model, queries, pool, searching, settings)
            for method in searching:
                size = pool.id_bytes
                if WAYS[method].rerank == "embeddings":
                    size += vector_bytes if WAYS[method].is_raw else crowded_bytes
                found.append(Found(method, searched[method].hits, size, searched[method].touched))
        yield found


class _Rival(NamedTuple):
    method: str
    queries: Callable[[RowQueries], Tensor]
    """The vectors it compares with."""
    vectors: Callable[[slice], Tensor]
    """Of a range of the pool's candidates."""


def _exact(model: Genius, pool: PoolCandidates, settings: SearchConfig) -> list[_Rival]:
    """Inner products, and less what the ranking by codes and by embeddings takes from an item's score."""

    def crowded(rows: slice) -> Tensor:
        if pool.densities is None:
            raise ValueError("fused embeddings were not kept")
        density = decode_densities(pool.densities[rows])
        return append_bias(pool.fused(rows), np.float32(settings.density_weight) * density)

    def of_codes(rows: slice) -> Tensor:
        codes = pool.codes[rows]
        vectors = model.quantizer.decode(torch.from_numpy(codes.astype(np.int64)))
        return append_bias(vectors, model.ranker.costs(codes, density_weight=settings.density_weight))

    return [
        _Rival("exact-raw", lambda queries: queries.raw, pool.raw),
        _Rival("exact-fused", lambda queries: queries.fused, pool.fused),
        _Rival("exact-fused+hubness", lambda queries: append_one(queries.fused), crowded),
        _Rival("exact-codes", lambda queries: append_one(queries.fused), of_codes),
    ]


class _Searched(NamedTuple):
    hits: list[list[Hit]]
    touched: float


class _Beams(NamedTuple):
    """What methods that share their beams have in common."""

    by: Literal["generator", "geometry"]
    config: SearchConfig


def _search(
    model: Genius,
    queries: RowQueries,
    pool: PoolCandidates,
    methods: Sequence[str],
    settings: SearchConfig,
) -> dict[str, _Searched]:
    """Search, and order what was found in each way."""
    parts = [Part(pool.table)]
    evidence = {
        False: Evidence(
            model.ranker, [pool.fused], densities=None if pool.densities is None else [pool.densities]
        ),
        True: Evidence(model.ranker, [pool.raw], is_raw=True),
    }
    configs = {method: _config(WAYS[method], settings) for method in methods}
    shared = {method: _beams(WAYS[method].by, config) for method, config in configs.items()}
    hits: dict[str, list[list[Hit]]] = {method: [] for method in methods}
    touched = dict.fromkeys(methods, 0)
    for start in range(0, len(queries.qids), SEARCH_BATCH):
        asked = queries.fused[start : start + SEARCH_BATCH]
        beams = {
            one: search(model.router if one.by == "geometry" else model.decoder, parts, asked, one.config)
            for one in set(shared.values())
        }
        for query in range(len(asked)):
            for method in methods:
                is_raw = WAYS[method].is_raw
                answer = rank_items(
                    parts,
                    beams[shared[method]],
                    query,
                    queries.raw[start + query] if is_raw else asked[query],
                    config=configs[method],
                    evidence=evidence[is_raw],
                    k=DEPTH,
                    for_codes=asked[query],
                )
                hits[method].append(hits_of(pool, answer.items, answer.scores))
                touched[method] += answer.touched
    return {method: _Searched(hits[method], touched[method] / len(queries.qids)) for method in methods}


def _config(way: Way, settings: SearchConfig) -> SearchConfig:
    """Geometry has no probabilities: none to normalise, and none to mix in."""
    own = dataclasses.replace(settings, rerank=way.rerank)
    return own if way.by == "generator" else dataclasses.replace(own, scores="level", generator_weight=0.0)


def _beams(by: Literal["generator", "geometry"], config: SearchConfig) -> _Beams:
    """All ways share one full search, unless a re-ranking depends on where its own would have stopped.

    So it does with a leaf budget, and where the beams' probabilities are mixed in.
    """
    stops_early = config.rerank != "none" and bool(config.candidates or config.generator_weight)
    return _Beams(by, dataclasses.replace(config, rerank="codes" if stops_early else "none"))


def hits_of(pool: PoolItems, items: np.ndarray, scores: np.ndarray) -> list[Hit]:
    """Items of a pool with their scores, for a run."""
    return [
        Hit(did_of(int(pool.dids[item])), float(score)) for item, score in zip(items, scores, strict=True)
    ]


Pool = Literal["local", "global"]
ALL: Final = "candidates"
"""Folder of the union's candidates; a local pool's has its name behind it."""


Candidates = TypeVar("Candidates", bound=PoolItems)


@dataclass(frozen=True, slots=True)  # beartype knows no generic named tuples
class _Opened(Generic[Candidates]):
    """Candidates that were embedded together, and how some of them become a pool."""

    features: Features
    rows: Callable[[Int64[np.ndarray, " items"]], Candidates]

    def part(self, pool: Iterable[Candidate]) -> Candidates:
        """A pool's candidates, in the pool's order."""
        numbers = np.fromiter((candidate_number(candidate.did) for candidate in pool), dtype=np.int64)
        order = np.argsort(self.features.ids, kind="stable")
        place = np.searchsorted(self.features.ids, numbers, sorter=order).clip(max=len(order) - 1)
        chosen = order[place]
        absent = numbers[self.features.ids[chosen] != numbers]
        if len(absent):
            raise BadData(
                f"{len(absent)} candidates of a pool were not embedded with the others, for example "
                f"{did_of(int(absent[0]))}; its file changed meanwhile: run the same again"
            )
        return self.rows(chosen)


class Pools(Generic[Candidates]):
    """Gives the pools of an evaluation; everything is embedded when it is made.

    Parameters
    ----------
    rows
        whose local pools are wanted.
    pools
        that will be evaluated: local ones alone, or the union of all.
    folder
        where features are kept, and found again.
    prepare
        embeds the candidates of some files into a folder.
    """

    def __init__(
        self,
        data: MBeir,
        rows: Sequence[EvaluationRow],
        folder: Path,
        *,
        split: str,
        pools: Sequence[Pool],
        prepare: Callable[[list[Path], Path], _Opened[Candidates]],
    ) -> None:
        union = data.global_pool(split)
        files = list(dict.fromkeys([*union, *data.local_pools_of(split)]))
        self._all = (
            prepare(files, folder / ALL) if "global" in pools or _is_there(folder / ALL, files) else None
        )
        own = dict.fromkeys(row.local_pool for row in rows) if self._all is None else {}
        self._own = {path: prepare([path], folder / _name_of(path)) for path in own}
        # The union's candidates come first, in its order.
        self._union_rows = np.arange(count_lines(union)) if len(union) == 1 else None

    def of(self, row: EvaluationRow, pool: Pool) -> Candidates:
        """A row's local pool, or the global one."""
        if self._all is None:
            own = self._own[row.local_pool]
            return own.rows(np.arange(len(own.features)))
        if pool == "local":
            return self._all.part(read_pool([row.local_pool]))
        everyone = np.arange(len(self._all.features)) if self._union_rows is None else self._union_rows
        return self._all.rows(everyone)


class EmbeddedPools(Pools[PoolItems]):
    """Pools of an encoder's features alone."""

    def __init__(
        self,
        data: MBeir,
        encoder: Encoder,
        rows: Sequence[EvaluationRow],
        folder: Path,
        *,
        split: str,
        pools: Sequence[Pool],
        progress: Progress,
    ) -> None:
        def prepare(chosen: list[Path], place: Path) -> _Opened[PoolItems]:
            features = embed_pool(data, chosen, encoder, place / "features", progress=progress)
            return _Opened(features, lambda rows: PoolItems(features, rows))

        super().__init__(data, rows, folder, split=split, pools=pools, prepare=prepare)


class EvaluationPools(Pools[PoolCandidates]):
    """Pools of a model: features and codes.

    Parameters
    ----------
    methods
        that will be evaluated; they decide what has to be kept of each candidate.
    """

    def __init__(
        self,
        data: MBeir,
        model: Genius,
        rows: Sequence[EvaluationRow],
        folder: Path,
        *,
        split: str,
        pools: Sequence[Pool],
        methods: Sequence[str],
        progress: Progress,
    ) -> None:
        self._model = model
        self._encoded: list[_Encoded] = []
        keep: StoredEmbeddings = "fused" if FUSED & set(methods) else "none"

        def prepare(chosen: list[Path], place: Path) -> _Opened[PoolCandidates]:
            features = embed_pool(data, chosen, model.encoder, place / "features", progress=progress)
            codes = place / f"codes-{keep}"
            arrays = encode_features(model, features, codes, embeddings=keep, progress=progress)
            self._encoded.append(_Encoded(features, arrays))
            return _Opened(features, lambda rows: PoolCandidates(features, arrays, rows))

        super().__init__(data, rows, folder, split=split, pools=pools, prepare=prepare)

    def health(self) -> Health:
        """Of the IDs of all candidates here."""
        return examine_items(self._model, self._encoded)


class _Encoded(NamedTuple):
    """Candidates with their features and codes."""

    features: Features
    arrays: ItemArrays


def _name_of(local_pool: Path) -> str:
    return f"{ALL}-{local_pool.stem.removeprefix('mbeir_').removesuffix('_cand_pool')}"


def _is_there(place: Path, files: Sequence[Path]) -> bool:
    """Whether all candidates of these files were embedded before."""
    try:
        manifest = open_artifact(place / "features", kind=features_on_disk.KIND)
    except ArtifactError:
        return False
    return manifest.inputs.get("records") == fingerprint_of_files(files)


RESULTS: Final = "results.json"
KS: Final = (1, 5, 10)
KS_FASHION: Final = (1, 5, 10, 20, 50)
"""Where M-BEIR looks at rank 10 first, it reports 20 and 50 too (section 2.9)."""
EvaluateCandidates = TypeVar("Candidates", bound=PoolItems)
Answer = Callable[[Sequence[RowQueries], EvaluateCandidates], Iterator[list[Found]]]
"""What each of some methods finds in a pool, for the queries of each row."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """What is evaluated, and how."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    split: str = "test"
    """Of the data set."""

    pools: tuple[Pool, ...] = ("local", "global")
    """Each query against its own task's pool, against the union of all pools, or both."""

    methods: tuple[str, ...] = METHODS
    """Rows to make."""

    rows: tuple[str, ...] = ()
    """Rows to evaluate, named as in file names (``mscoco_task0``); none named means all."""

    beam: Count = 50
    """IDs kept at each level."""

    scores: Literal["level", "vocabulary", "children"] = "level"
    """How the generator's steps are normalised."""

    candidates: Natural = 0
    """Where hits are re-ranked: stop decoding at so many IDs under the beams; 0 decodes all levels."""

    shortlist: Natural = 0
    """Where hits are re-ranked by embeddings: only so many, the best by codes; 0 means all."""

    generator_weight: NonNegative = 0.0
    """Where hits are ordered by codes: so many times the log-probability of their beam is added."""

    density_weight: NonNegative = SearchConfig.density_weight
    """Where hits are ordered by codes or by fused embeddings: so many times the density around each is taken
    from its score; not in ``exact-fused``."""

    instructions: InstructionChoice = "hashed"
    """One of the data set's instructions per query, chosen by a hash; or the first; or none; or each of them
    in turn, and the mean of the measures."""

    max_queries: Natural = 0
    """At most this many queries of each row, spread evenly; 0 means all."""

    seed: Natural = 0
    """Of the choice of instructions."""


class EvaluationResult(NamedTuple):
    """Rows of the table, and the health of the IDs of all candidates that were searched."""

    rows: list[ResultRow]
    health: Health
    about: dict[str, Any]
    """Fingerprint of the model, name of the data, split, settings."""

    def to_json(self) -> dict[str, Any]:
        """For scripts, and for a model's card."""
        return {**self.about, **to_json(self.rows), "health": dataclasses.asdict(self.health)}


def evaluate(
    data: MBeir, model: Genius, config: EvaluationConfig, folder: Path, *, progress: Progress
) -> EvaluationResult:
    """Evaluate rows of a split; features and codes are kept under ``folder``, runs are written to it.

    No pool is held in memory: candidates' features and embeddings stay on disk.

    Raises
    ------
    BadData
        a positive, a query or a candidate is missing somewhere; never a silent zero.
    """
    config = checked(config)
    unknown = [method for method in config.methods if method not in METHODS]
    if unknown:
        raise UsageError(f"methods {unknown} are not known; choose from {', '.join(METHODS)}")
    rows = chosen_rows(data, config)
    pools = EvaluationPools(
        data,
        model,
        rows,
        folder,
        split=config.split,
        pools=config.pools,
        methods=config.methods,
        progress=progress,
    )
    settings = SearchConfig(
        beam=config.beam,
        scores=config.scores,
        candidates=config.candidates,
        shortlist=config.shortlist,
        generator_weight=config.generator_weight,
        density_weight=config.density_weight,
    )

    def answer(queries: Sequence[RowQueries], candidates: PoolCandidates) -> Iterator[list[Found]]:
        return find(model, queries, candidates, config.methods, settings)

    asked = [embed_queries(data, model, row, config, folder, progress) for row in rows]
    results = evaluate_rows(list(zip(rows, asked, strict=True)), pools, answer, config, folder, progress)
    about = {"model": model.fingerprint, "data": data.name, "split": config.split, "config": asdict(config)}
    result = EvaluationResult(results, pools.health(), about)
    write_json(folder / RESULTS, result.to_json())
    return result


def evaluate_rows(
    asked: Sequence[tuple[EvaluationRow, list[RowQueries]]],
    pools: Pools[EvaluateCandidates],
    answer: Answer[EvaluateCandidates],
    config: EvaluationConfig,
    folder: Path,
    progress: Progress,
) -> list[ResultRow]:
    """Ask each row's queries in each pool, write the runs, and measure them."""
    results: list[ResultRow] = []
    progress.begin("evaluate", len(asked) * len(config.pools))
    for pool in config.pools:
        # The global pool is gone through once for the queries of all rows.
        for together in [list(asked)] if pool == "global" else [[one] for one in asked]:
            candidates = pools.of(together[0][0], pool)
            for lines in _evaluate(together, pool, candidates, answer, config, folder):
                results += lines
                progress.advance(len(results) // len(config.methods), {})
    return results


def chosen_rows(data: MBeir, config: EvaluationConfig) -> list[EvaluationRow]:
    """The rows of a split that are evaluated.

    Raises
    ------
    BadData, UsageError
        something that they need is missing; a choice is empty or names something twice.
    """
    for name, chosen in (("pools", config.pools), ("methods", config.methods), ("rows", config.rows)):
        if len(set(chosen)) < len(chosen) or (not chosen and name != "rows"):
            raise UsageError(f"{name} is {list(chosen)}, expected each at most once, and at least one")
    rows = data.rows(config.split, names=config.rows)
    if not config.rows:
        unasked = data.rows_without_queries(config.split)
        if unasked:
            raise BadData(
                f"{data.root}: there are qrels for {unasked[0]} in split {config.split}, and no queries; "
                "restore its query file, or name the rows to evaluate (--rows)"
            )
    lacking = [row for row in rows if row.qrels is None]
    if lacking and data.has_qrels(config.split):
        raise BadData(
            f"{data.root}: {lacking[0].name} has no qrels, and other rows of split {config.split} have; "
            f"restore qrels/{config.split}/mbeir_{lacking[0].name}_{config.split}_qrels.txt"
        )
    if (
        config.instructions != "none"
        and data.instructions.file is None
        and any(row.name in PAPER_ROWS for row in rows)
    ):
        raise BadData(
            f"{data.instructions_file} is missing, and M-BEIR's queries need instructions; restore it, or "
            "evaluate without any (--instructions none)"
        )
    return rows


def embed_queries(
    data: MBeir,
    model: Genius,
    row: EvaluationRow,
    config: EvaluationConfig,
    folder: Path,
    progress: Progress,
) -> list[RowQueries]:
    """The queries of a row, once for each way of instructing them: one way, unless all are asked for."""
    return [
        RowQueries(asked.qids, F.normalize(asked.features.total(), dim=-1), model.embed(asked.features))
        for asked in query_features(data, model.encoder, row, config, folder, progress)
    ]


class AskedQueries(NamedTuple):
    """The queries of a row under one way of instructing them."""

    qids: list[str]
    features: FeatureBatch


def query_features(
    data: MBeir,
    encoder: Encoder,
    row: EvaluationRow,
    config: EvaluationConfig,
    folder: Path,
    progress: Progress,
) -> list[AskedQueries]:
    """What an encoder gives for the queries of a row, kept under ``folder``; as :func:`embed_queries`."""
    wanted = TASKS[row.task_id][1]
    chosen = _spread(list(read_queries(row.queries)), config.max_queries)
    twice = [qid for qid, times in Counter(query.qid for query in chosen).items() if times > 1]
    if twice:
        raise BadData(
            f"{row.queries}: query {twice[0]} occurs twice ({len(twice)} such); a ranking needs one query"
        )
    ways = _ways(data, chosen, wanted, config)
    features = embed(
        (
            query_row(data, query, wanted, instruction, variant, split=row.split)
            for variant, instructions in enumerate(ways)
            for query, instruction in zip(chosen, instructions, strict=True)
        ),
        encoder,
        folder
        / f"queries-{fingerprint_of([config.instructions, config.seed, config.max_queries])[:8]}"
        / row.name,
        inputs={"records": fingerprint_of_files([row.queries, *instruction_files(data)])},
        expected=len(chosen) * len(ways),
        progress=progress,
    )
    return [
        AskedQueries(
            [query.qid for query in chosen], features.gather(np.flatnonzero(features.variant == variant))
        )
        for variant in range(len(ways))
    ]


def _ways(
    data: MBeir, queries: list[Query], wanted: Modality, config: EvaluationConfig
) -> list[list[str | None]]:
    """Ways of instructing the queries: for each way, one instruction (or none) a query."""
    choice = config.instructions
    if choice != "all":
        return [
            [
                choose_instruction(data.instructions, query, wanted, choice, seed=config.seed)
                for query in queries
            ]
        ]
    offered = [instructions_for(data.instructions, query, wanted) for query in queries]
    if len({len(texts) for texts in offered}) > 1:
        raise BadData("the queries of a row have different numbers of instructions; choose hashed or first")
    ways: list[list[str | None]] = [list(way) for way in zip(*offered, strict=True)]
    return ways or [[None] * len(queries)]


def _spread(queries: list[Query], limit: int) -> list[Query]:
    """So many of them, evenly; all without a limit."""
    if not limit or limit >= len(queries):
        return queries
    return [queries[int(number)] for number in np.linspace(0, len(queries) - 1, limit)]


def judgements(row: EvaluationRow, qids: list[str]) -> Qrels:
    """Right answers of these queries of a row.

    Raises
    ------
    BadData
        there are none for one of them.
    """
    if row.qrels is not None:
        everything: Qrels = read_qrels(row.qrels)
    else:
        everything = {query.qid: dict.fromkeys(query.positives, 1) for query in read_queries(row.queries)}
    missing = [qid for qid in qids if qid not in everything]
    if missing:
        raise BadData(f"{row.qrels}: no line for query {missing[0]} and {len(missing) - 1} others")
    return {qid: everything[qid] for qid in qids}


def _evaluate(
    together: list[tuple[EvaluationRow, list[RowQueries]]],
    pool: Pool,
    candidates: EvaluateCandidates,
    answer: Answer[EvaluateCandidates],
    config: EvaluationConfig,
    folder: Path,
) -> Iterator[list[ResultRow]]:
    """The lines of each of some rows that share a pool; over several ways of instructing, their mean."""
    runs = folder / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    judged = {}
    ways_of = {row.name: ways for row, ways in together}
    for row, ways in together:
        judged[row.name] = _inside(row, pool, candidates, judgements(row, ways[0].qids))
        # As they were cut to the pool: with these any TREC tool measures the runs alike.
        write_qrels(runs / f"{row.name}_{config.split}.{pool}.qrels", judged[row.name])
    asked = [(row, way, queries) for row, ways in together for way, queries in enumerate(ways, start=1)]
    answers = answer([queries for _, _, queries in asked], candidates)
    lines: dict[str, list[ResultRow]] = {}
    for (row, way, queries), found in zip(asked, answers, strict=True):
        if way == 1:
            lines = {one.method: [] for one in found}
        for one in found:
            run = Run(one.method, dict(zip(queries.qids, one.hits, strict=True)))
            measures = measure(judged[row.name], run, ks=KS_FASHION if row.headline_k == 10 else KS)
            label = f".instruction-{way}" if config.instructions == "all" else ""
            write_run(runs / f"{row.name}_{config.split}.{pool}.{one.method}{label}.trec", run)
            lines[one.method].append(
                ResultRow(
                    dataset=row.dataset,
                    name=row.name,
                    task=task_name(row.task_id),
                    task_id=row.task_id,
                    pool=pool,
                    method=one.method,
                    queries=measures.queries,
                    pool_size=len(candidates),
                    headline_k=row.headline_k,
                    measures=measures.flat(),
                    bytes_per_item=one.bytes_per_item,
                    candidates_touched=one.touched,
                )
            )
        if way == len(ways_of[row.name]):
            yield [_mean(ways) for ways in lines.values()]


def _inside(row: EvaluationRow, pool: Pool, candidates: PoolItems, qrels: Qrels) -> Qrels:
    try:
        return filter_to_pool(qrels, candidates)
    except BadData as error:
        where = row.local_pool if pool == "local" else "global pool"
        raise BadData(f"{row.name}, {where}: {error}") from None


def _mean(lines: list[ResultRow]) -> ResultRow:
    """The same row with the mean of each measure."""
    return dataclasses.replace(
        lines[0],
        measures={
            name: math.fsum(line.measures[name] for line in lines) / len(lines) for name in lines[0].measures
        },
        candidates_touched=math.fsum(line.candidates_touched for line in lines) / len(lines),
    )


def doctor(model: Path, data: Path | None, *, split: str, progress: Progress) -> Health:
    """The health found after training, or measured anew on the global pool of a data set's split."""
    opened = Genius.open(model)
    if data is None:
        health = opened.quantizer_manifest.facts["health"]
        if health is None:
            raise ArtifactMissing(
                f"{model} was imported without labelled candidates, so nobody has examined its IDs; "
                "give a data set with --data FOLDER"
            )
        return from_json(Health, health)
    if not model.is_dir():
        raise UsageError(
            f"what is examined is kept beside the model: give the folder of {model}, not its name"
        )
    source = MBeir(data)
    place = model / "doctor" / f"{source.name}-{split}"
    pool = embed_pool(
        source, source.global_pool(split), opened.encoder, place / "features", progress=progress
    )
    arrays = encode_features(opened, pool, place / "codes", embeddings="none", progress=progress)
    return examine_items(opened, [(pool, arrays)])
