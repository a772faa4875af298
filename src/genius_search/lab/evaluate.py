"""``genius evaluate`` and ``genius doctor``: measure a model on a data set; examine its IDs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from torch.nn import functional as F

from genius_search.artifact import open_artifact
from genius_search.config import SearchConfig, checked, from_json
from genius_search.data import features as features_on_disk
from genius_search.data.features import Features
from genius_search.data.mbeir import PAPER_ROWS, EvaluationRow, MBeir, read_judgements, read_pool
from genius_search.data.pairs import look_up
from genius_search.encoders.base import Encoder
from genius_search.errors import ArtifactError, ArtifactMissing, BadData, UsageError
from genius_search.index.store import ItemArrays, StoredEmbeddings
from genius_search.lab.codes import encode_features, examine_items
from genius_search.lab.methods import FUSED, MethodHits, PoolCandidates, RowQueries, find
from genius_search.lab.results import ResultRow, to_json
from genius_search.lab.runs import Run, filter_to_pool, write_qrels, write_run
from genius_search.lab.runs import evaluate as measure
from genius_search.lab.settings import METHODS, EvaluationConfig, Pool
from genius_search.model import Genius
from genius_search.nn.health import Health
from genius_search.progress import Progress
from genius_search.records import candidate_number, did_of, task_name
from genius_search.training.features import count_lines, embed_pool, fingerprint_of_files
from genius_search.training.features import embed_queries as embed_query_features
from genius_search.writing import write_json

CANDIDATES: Final = "candidates"
"""Folder of the union's candidates; that of a local pool has the pool's name behind it."""
RESULTS: Final = "results.json"
KS: Final = (1, 5, 10)
KS_FASHION: Final = (1, 5, 10, 20, 50)
"""Depths of the fashion rows, for which M-BEIR reports 20 and 50 too (section 2.9)."""
Answer = Callable[[Sequence[RowQueries], PoolCandidates], Iterator[list[MethodHits]]]
"""A function that answers the queries of each row from a pool."""


class EvaluationResult(NamedTuple):
    """Rows of the table, and the health of the IDs of all candidates that were searched."""

    rows: list[ResultRow]
    health: Health
    about: dict[str, Any]
    """Fingerprint of the model, name of the data, split, settings."""

    def to_json(self) -> dict[str, Any]:
        """Return the result for scripts, and for a model's card."""
        return {**self.about, **to_json(self.rows), "health": dataclasses.asdict(self.health)}


class EvaluationPools:
    """The pools of an evaluation; every candidate is embedded, and encoded, when this is made.

    Parameters
    ----------
    model
        a model, or an encoder alone: then pools have no codes.
    rows
        rows whose local pools are wanted.
    folder
        where features and codes are kept, and found again.
    config
        its pools and methods decide what is embedded, and which embeddings are kept.
    """

    def __init__(
        self,
        data: MBeir,
        model: Genius | Encoder,
        rows: Sequence[EvaluationRow],
        folder: Path,
        config: EvaluationConfig,
        *,
        progress: Progress,
    ) -> None:
        self._model = model
        encoder = model.encoder if isinstance(model, Genius) else model
        keep: StoredEmbeddings = "fused" if FUSED & set(config.methods) else "none"

        def prepare(files: list[Path], place: Path) -> tuple[Features, ItemArrays | None]:
            features = embed_pool(data, files, encoder, place / "features", progress=progress)
            if not isinstance(model, Genius):
                return features, None
            codes = place / f"codes-{keep}"
            return features, encode_features(model, features, codes, embeddings=keep, progress=progress)

        union = data.global_pool(config.split)
        files = list(dict.fromkeys([*union, *data.local_pools_of(config.split)]))
        place = folder / CANDIDATES
        self._union = (
            prepare(files, place) if "global" in config.pools or _is_embedded(place, files) else None
        )
        own = dict.fromkeys(row.local_pool for row in rows) if self._union is None else {}
        names = {path: path.stem.removeprefix("mbeir_").removesuffix("_cand_pool") for path in own}
        self._own = {path: prepare([path], folder / f"{CANDIDATES}-{name}") for path, name in names.items()}
        # The union's candidates come first, in its order.
        self._union_size = count_lines(union) if len(union) == 1 else None

    def of(self, row: EvaluationRow, pool: Pool) -> PoolCandidates:
        """Return a row's local pool, or the global one."""
        if self._union is None:
            return PoolCandidates(*self._own[row.local_pool])
        features, arrays = self._union
        if pool == "global":
            size = len(features) if self._union_size is None else self._union_size
            return PoolCandidates(features, arrays, np.arange(size))
        numbers = np.fromiter(
            (candidate_number(candidate.did) for candidate in read_pool([row.local_pool])), dtype=np.int64
        )
        rows, exists = look_up(features.ids, np.argsort(features.ids, kind="stable"), numbers)
        absent = numbers[~exists]
        if len(absent):
            raise BadData(
                f"{len(absent)} candidates of a pool were not embedded with the others, for example "
                f"{did_of(int(absent[0]))}; its file changed meanwhile: run the same again"
            )
        return PoolCandidates(features, arrays, rows)

    def health(self) -> Health:
        """Return the health of the IDs of all candidates."""
        if not isinstance(self._model, Genius):
            raise TypeError("an encoder gives no IDs")
        encoded = [*self._own.values(), *([] if self._union is None else [self._union])]
        return examine_items(
            self._model, [(features, arrays) for features, arrays in encoded if arrays is not None]
        )


def evaluate(
    data: MBeir, model: Genius, config: EvaluationConfig, folder: Path, *, progress: Progress
) -> EvaluationResult:
    """Evaluate rows of a split; features and codes are kept under ``folder``, runs are written to it.

    No pool is held in memory: candidates' features and embeddings stay on disk.

    Raises BadData: a positive, a query or a candidate is missing somewhere; never a silent zero.
    """
    config = checked(config)
    unknown = [method for method in config.methods if method not in METHODS]
    if unknown:
        raise UsageError(f"methods {unknown} are not known; choose from {', '.join(METHODS)}")
    settings = SearchConfig(
        beam=config.beam,
        scores=config.scores,
        candidates=config.candidates,
        shortlist=config.shortlist,
        generator_weight=config.generator_weight,
        density_weight=config.density_weight,
    )
    results, pools = evaluate_pools(
        data,
        model,
        config,
        lambda rows, pool: find(model, rows, pool, config.methods, settings),
        folder,
        evaluation=folder,
        progress=progress,
    )
    about = {"model": model.fingerprint, "data": data.name, "split": config.split, "config": asdict(config)}
    result = EvaluationResult(results, pools.health(), about)
    write_json(folder / RESULTS, result.to_json())
    return result


def evaluate_pools(
    data: MBeir,
    model: Genius | Encoder,
    config: EvaluationConfig,
    answer: Answer,
    folder: Path,
    *,
    evaluation: Path,
    with_codes: bool = True,
    progress: Progress,
) -> tuple[list[ResultRow], EvaluationPools]:
    """Answer each row's queries from each pool, write the runs to ``folder``, and measure them.

    Parameters
    ----------
    model
        embeds queries and candidates.
    answer
        answers the queries of each row from a pool.
    evaluation
        folder of features and codes, which are made unless they exist.
    with_codes
        whether a model gives the candidates of pools their codes too; an encoder alone never does.
    """
    rows = chosen_rows(data, config)
    encodes = model if with_codes or not isinstance(model, Genius) else model.encoder
    pools = EvaluationPools(data, encodes, rows, evaluation, config, progress=progress)
    queries = [(row, embed_queries(data, model, row, config, evaluation, progress)) for row in rows]
    folder.mkdir(parents=True, exist_ok=True)
    results: list[ResultRow] = []
    progress.begin("evaluate", len(queries) * len(config.pools))
    for pool in config.pools:
        # The global pool is read once for the queries of all rows.
        for group in [queries] if pool == "global" else [[one] for one in queries]:
            candidates = pools.of(group[0][0], pool)
            for lines in _evaluate_pool(group, pool, candidates, answer, config, folder / "runs"):
                results += lines
                progress.advance(len(results) // len(config.methods), {})
    return results, pools


def chosen_rows(data: MBeir, config: EvaluationConfig) -> list[EvaluationRow]:
    """Return the rows of a split that are evaluated.

    Raises BadData, UsageError: something that they need is missing; a choice is empty or names something
    twice.
    """
    for name, chosen in (("pools", config.pools), ("methods", config.methods), ("rows", config.rows)):
        if len(set(chosen)) < len(chosen) or (not chosen and name != "rows"):
            raise UsageError(f"{name} is {list(chosen)}, expected each at most once, and at least one")
    rows = data.rows(config.split, names=config.rows)
    without_queries = [] if config.rows else data.rows_without_queries(config.split)
    if without_queries:
        raise BadData(
            f"{data.root}: there are qrels for {without_queries[0]} in split {config.split}, and no queries; "
            "restore its query file, or name the rows to evaluate (--rows)"
        )
    without_qrels = [row for row in rows if row.qrels is None]
    if without_qrels and data.has_qrels(config.split):
        name = without_qrels[0].name
        raise BadData(
            f"{data.root}: {name} has no qrels, and other rows of split {config.split} have; "
            f"restore qrels/{config.split}/mbeir_{name}_{config.split}_qrels.txt"
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
    model: Genius | Encoder,
    row: EvaluationRow,
    config: EvaluationConfig,
    folder: Path,
    progress: Progress,
) -> list[RowQueries]:
    """Embed the queries of a row, once for each way of instructing them: one way, unless it is ``all``."""
    found = embed_query_features(
        data,
        model.encoder if isinstance(model, Genius) else model,
        row,
        folder,
        instructions=config.instructions,
        max_queries=config.max_queries,
        seed=config.seed,
        progress=progress,
    )
    queries = []
    for qids, features in found:
        raw = F.normalize(features.total(), dim=-1)
        queries.append(RowQueries(qids, raw, model.embed(features) if isinstance(model, Genius) else raw))
    return queries


def doctor(model: Path, data: Path | None, *, split: str, progress: Progress) -> Health:
    """Return the health found after training, or measure it anew on the global pool of a data set's split."""
    opened = Genius.open(model)
    if data is None:
        health = opened.quantizer_manifest.facts["health"]
        if health is None:
            raise ArtifactMissing(
                f"{model} was imported without labelled candidates, so its IDs were never examined; "
                "give a data set with --data FOLDER"
            )
        return from_json(Health, health)
    if not model.is_dir():
        raise UsageError(f"features are kept beside the model: give the folder of {model}, not its name")
    source = MBeir(data)
    place = model / "doctor" / f"{source.name}-{split}"
    features = embed_pool(
        source, source.global_pool(split), opened.encoder, place / "features", progress=progress
    )
    arrays = encode_features(opened, features, place / "codes", embeddings="none", progress=progress)
    return examine_items(opened, [(features, arrays)])


def _is_embedded(place: Path, files: Sequence[Path]) -> bool:
    """Return whether all candidates of these files were embedded before."""
    try:
        manifest = open_artifact(place / "features", kind=features_on_disk.KIND)
    except ArtifactError:
        return False
    return manifest.inputs.get("records") == fingerprint_of_files(files)


def _evaluate_pool(
    group: list[tuple[EvaluationRow, list[RowQueries]]],
    pool: Pool,
    candidates: PoolCandidates,
    answer: Answer,
    config: EvaluationConfig,
    runs: Path,
) -> Iterator[list[ResultRow]]:
    """Yield the results of each of some rows that share a pool; over several instructions, their mean."""
    runs.mkdir(parents=True, exist_ok=True)
    qrels = {}
    for row, variants in group:
        try:
            qrels[row.name] = filter_to_pool(read_judgements(row, variants[0].qids), candidates)
        except BadData as error:
            where = row.local_pool if pool == "local" else "global pool"
            raise BadData(f"{row.name}, {where}: {error}") from None
        # As they were cut to the pool: with these any TREC tool measures the runs alike.
        write_qrels(runs / f"{row.name}_{config.split}.{pool}.qrels", qrels[row.name])
    answers = answer([queries for _, variants in group for queries in variants], candidates)
    for row, variants in group:
        lines: dict[str, list[ResultRow]] = {}
        for number, queries in enumerate(variants, start=1):
            for found in next(answers):
                run = Run(found.method, dict(zip(queries.qids, found.hits, strict=True)))
                label = f".instruction-{number}" if config.instructions == "all" else ""
                write_run(runs / f"{row.name}_{config.split}.{pool}.{found.method}{label}.trec", run)
                measures = measure(qrels[row.name], run, ks=KS_FASHION if row.headline_k == 10 else KS)
                lines.setdefault(found.method, []).append(
                    ResultRow(
                        dataset=row.dataset,
                        name=row.name,
                        task=task_name(row.task_id),
                        task_id=row.task_id,
                        pool=pool,
                        method=found.method,
                        queries=measures.queries,
                        pool_size=len(candidates),
                        headline_k=row.headline_k,
                        measures=measures.means,
                        bytes_per_item=found.bytes_per_item,
                        candidates_touched=found.touched,
                    )
                )
        yield [_mean(own) for own in lines.values()]


def _mean(lines: list[ResultRow]) -> ResultRow:
    """Return the same row with the mean of each measure."""
    return dataclasses.replace(
        lines[0],
        measures={
            name: math.fsum(line.measures[name] for line in lines) / len(lines) for name in lines[0].measures
        },
        candidates_touched=math.fsum(line.candidates_touched for line in lines) / len(lines),
    )
