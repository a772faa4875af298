"""``python -m research.evaluate``: measure a model or an encoder on M-BEIR or data like it."""

from __future__ import annotations

import hashlib
import heapq
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import torch
import tyro
from torch.nn import functional as F

from genius_search.artifact import fingerprint_of
from genius_search.cli.options import (
    DataArgument,
    DeviceOptions,
    JsonOption,
    OptionalFolder,
    command,
)
from genius_search.cli.terminal import TerminalProgress, print_json
from genius_search.config import PAPER_SEARCH, validate_settings
from genius_search.data.features import Features, rows_of_ids
from genius_search.data.mbeir import EvaluationRow, MBeir, read_judgements, read_pool
from genius_search.encoders.base import Encoder
from genius_search.encoders.open import absolute_spec
from genius_search.errors import BadData, UsageError
from genius_search.index.evaluate import KS
from genius_search.index.store import StoredEmbeddings
from genius_search.index.writer import ItemArrays
from genius_search.model import Genius
from genius_search.progress import Progress
from genius_search.records import candidate_number, did_of, task_name
from genius_search.training.records import (
    choose_queries,
    count_lines,
    embed_pool,
    embed_queries,
)
from genius_search.writing import write_json
from research.codes import encode_features
from research.command import run
from research.methods import FUSED, MethodHits, PoolCandidates, RowQueries, find
from research.published.fusions import open_encoder
from research.published.numbers import SIZES
from research.results import ResultRow, print_results, to_json
from research.runs import filter_to_pool, measure_run, write_qrels, write_run
from research.settings import EvaluationConfig, Pool

CANDIDATES: Final = "candidates"
"""Folder of the global pool's candidates; for local pools, their name is appended."""
RESULTS: Final = "results.json"
KS_FASHION: Final = (1, 5, 10, 20, 50)
"""Depths of the fashion rows; M-BEIR also reports 20 and 50 (section 2.9)."""
Answer = Callable[[Sequence[RowQueries], PoolCandidates], Iterator[list[MethodHits]]]
"""A function that returns the hits of the queries of each row in a pool."""
_EncodedPool = tuple[Features, ItemArrays | None]
"""Features of candidates and, with a model, their codes."""


class EvaluationResult(NamedTuple):
    """Rows of the table, and their model, data, split and settings."""

    rows: list[ResultRow]
    about: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the result for scripts."""
        return {**self.about, **to_json(self.rows)}

    def write(self, folder: Path) -> EvaluationResult:
        """Write ``results.json``; return the result."""
        write_json(folder / RESULTS, self.to_json())
        return self

    def print(self, *, as_json: bool) -> None:
        """Print the result as JSON, or as tables."""
        if as_json:
            print_json(self.to_json())
        else:
            print_results(self.rows)


class EvaluationPools:
    """The pools of an evaluation; the constructor embeds and encodes all candidates.

    Each candidate is embedded once: with the global pool, which contains the local pools, or with
    all local pools that share candidates. If candidates are sampled, each pool is embedded alone.

    Parameters
    ----------
    model
        a model, or an encoder alone: then pools have no codes.
    rows
        rows whose local pools are evaluated.
    folder
        receives features and codes; existing ones are used again.
    config
        its pools, methods and limits decide which candidates are embedded, and which embeddings
        are stored.
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
        self._data = data
        self._model = model
        self._folder = folder
        self._config = config
        self._progress = progress
        self._union: _EncodedPool | None = None
        self._local: dict[Path, _EncodedPool] = {}
        union = data.global_pool(config.split)
        # The union's candidates come first, in its order.
        self._union_size = count_lines(union) if len(union) == 1 else None
        local_pools = list(dict.fromkeys(row.local_pool for row in rows))
        if config.max_candidates:
            if "global" in config.pools:
                self._union = self._sample(union, rows, CANDIDATES)
                self._union_size = None
            if "local" in config.pools:
                for path in local_pools:
                    pool_rows = [row for row in rows if row.local_pool == path]
                    self._local[path] = self._sample([path], pool_rows, _folder_name([path]))
        elif "global" in config.pools:
            all_local_pools = [row.local_pool for row in data.rows(config.split)]
            files = list(dict.fromkeys([*union, *all_local_pools]))
            self._union = self._encode(files, CANDIDATES)
        else:
            for group in group_pools(local_pools):
                self._local |= dict.fromkeys(group, self._encode(group, _folder_name(group)))

    def _encode(
        self, files: list[Path], name: str, only: Collection[str] | None = None
    ) -> _EncodedPool:
        """Embed and encode the candidates of pool files, or ``only`` those with certain ids."""
        model, folder = self._model, self._folder / name
        encoder = model.encoder if isinstance(model, Genius) else model
        features = embed_pool(
            self._data, files, encoder, folder / "features", only=only, progress=self._progress
        )
        if not isinstance(model, Genius):
            return features, None
        stored: StoredEmbeddings = "fused" if FUSED & set(self._config.methods) else "none"
        arrays = encode_features(
            model, features, folder / f"codes-{stored}", embeddings=stored, progress=self._progress
        )
        return features, arrays

    def _sample(self, files: list[Path], rows: Sequence[EvaluationRow], name: str) -> _EncodedPool:
        """Embed and encode right answers of the rows' queries and a sample of other candidates."""
        config = self._config
        answers: set[str] = set()
        for row in rows:
            qids = [query.qid for query in choose_queries(row, config.max_queries)]
            for judged in read_judgements(row, qids).values():
                answers |= {did for did, relevance in judged.items() if relevance > 0}
        only = sample_candidates(
            (candidate.did for candidate in read_pool(files)),
            answers,
            config.max_candidates,
            seed=config.seed,
        )
        self._progress.say(
            f"{name}: a sample of {len(only):,} candidates; recall is higher than in the whole pool"
        )
        return self._encode(files, f"{name}-sample-{fingerprint_of(sorted(only))[:8]}", only)

    def of(self, row: EvaluationRow, pool: Pool) -> PoolCandidates:
        """Return a row's local pool, or the global one."""
        if pool == "global" and self._union is not None:
            features, arrays = self._union
            size = len(features) if self._union_size is None else self._union_size
            return PoolCandidates(features, arrays, np.arange(size))
        is_sampled = bool(self._config.max_candidates)
        if self._union is None or is_sampled:
            features, arrays = self._local[row.local_pool]
        else:
            features, arrays = self._union
        if is_sampled:
            return PoolCandidates(features, arrays)
        numbers = np.fromiter(
            (candidate_number(candidate.did) for candidate in read_pool([row.local_pool])),
            dtype=np.int64,
        )
        rows, exists = rows_of_ids(features.ids, numbers)
        absent = numbers[~exists]
        if len(absent):
            raise BadData(
                f"{len(absent)} candidates of {row.local_pool} were not embedded, for example "
                f"{did_of(int(absent[0]))}; the file changed meanwhile: run the same command again"
            )
        return PoolCandidates(features, arrays, rows)


def _folder_name(pools: Sequence[Path]) -> str:
    """Return the name of the folder of one or several local pools' features."""
    names = [path.stem.removeprefix("mbeir_").removesuffix("_cand_pool") for path in pools]
    return f"{CANDIDATES}-{names[0] if len(names) == 1 else fingerprint_of(names)[:8]}"


def group_pools(pools: Sequence[Path]) -> list[list[Path]]:
    """Return groups of pools; pools with a common candidate are in the same group.

    M-BEIR's local pools are disjoint, so that each is a group, whichever rows are chosen.
    """
    groups: list[tuple[list[Path], np.ndarray]] = []
    for path in pools:
        members = [path]
        numbers = np.fromiter(
            (candidate_number(candidate.did) for candidate in read_pool([path])), dtype=np.int64
        )
        separate = []
        for other, other_numbers in groups:
            if np.isin(numbers, other_numbers).any():
                members = [*other, *members]
                numbers = np.union1d(other_numbers, numbers)
            else:
                separate.append((other, other_numbers))
        groups = [*separate, (members, numbers)]
    return [members for members, _ in groups]


def sample_candidates(
    dids: Iterable[str], answers: Collection[str], size: int, *, seed: int
) -> frozenset[str]:
    """Return ``size`` candidates: all right answers, and other candidates with the lowest hashes.

    There can be more than ``size`` if there are more right answers.

    >>> sorted(sample_candidates(["1:1", "1:2", "1:3"], {"1:3"}, 2, seed=0))
    ['1:1', '1:3']
    """
    present_answers: set[str] = set()
    wrong: list[str] = []
    for did in dids:
        if did in answers:
            present_answers.add(did)
        else:
            wrong.append(did)
    sample = heapq.nsmallest(
        max(0, size - len(present_answers)),
        wrong,
        key=lambda did: hashlib.sha256(f"{seed} {did}".encode()).digest(),
    )
    return frozenset([*present_answers, *sample])


def evaluate(
    data: MBeir,
    model: Genius | Encoder,
    config: EvaluationConfig,
    folder: Path,
    *,
    evaluation: Path | None = None,
    progress: Progress,
) -> EvaluationResult:
    """Evaluate rows of a split.

    An encoder alone is measured by ``exact-raw``, as UniIR's encoders are. Features and embeddings
    of candidates stay on disk.

    Parameters
    ----------
    folder
        receives the runs and ``results.json``.
    evaluation
        receives features and codes; default: ``folder``.

    Raises
    ------
    BadData
        A positive, a query or a candidate is missing.
    """
    config = validate_settings(config)
    if not isinstance(model, Genius):
        config = replace(config, methods=("exact-raw",))
    names = {field.name for field in fields(PAPER_SEARCH)}
    names &= {field.name for field in fields(config)}
    settings = replace(PAPER_SEARCH, **{name: getattr(config, name) for name in names})
    rows = evaluate_pools(
        data,
        model,
        config,
        lambda rows, pool: find(model, rows, pool, config.methods, settings),
        folder,
        evaluation=evaluation or folder,
        progress=progress,
    )
    about = {
        "model": model.fingerprint,
        "data": data.name,
        "split": config.split,
        "config": asdict(config),
    }
    return EvaluationResult(rows, about).write(folder)


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
) -> list[ResultRow]:
    """Search each row's queries in each pool, write the runs to ``folder``, and measure them.

    Parameters
    ----------
    model
        embeds queries and candidates.
    answer
        returns the hits of the queries of each row in a pool.
    evaluation
        folder of features and codes; existing ones are used.
    with_codes
        whether a model also encodes the candidates; an encoder alone never does.
    """
    rows = chosen_rows(data, config)
    pool_model = model if with_codes or not isinstance(model, Genius) else model.encoder
    pools = EvaluationPools(data, pool_model, rows, evaluation, config, progress=progress)
    queries = [
        (row, embed_row_queries(data, model, row, evaluation, config, progress=progress))
        for row in rows
    ]
    folder.mkdir(parents=True, exist_ok=True)
    results: list[ResultRow] = []
    num_done = 0
    progress.begin("evaluate", len(queries) * len(config.pools))
    for pool in config.pools:
        # The global pool is read once for the queries of all rows.
        groups = [queries] if pool == "global" else [[row_queries] for row_queries in queries]
        for group in groups:
            candidates = pools.of(group[0][0], pool)
            evaluated = _evaluate_pool(group, pool, candidates, answer, config, folder / "runs")
            for row_results in evaluated:
                results += row_results
                num_done += 1
                progress.advance(num_done, {})
    return results


def embed_row_queries(
    data: MBeir,
    model: Genius | Encoder,
    row: EvaluationRow,
    folder: Path,
    config: EvaluationConfig,
    *,
    progress: Progress,
) -> RowQueries:
    """Embed the queries of a row that are evaluated; ``folder`` receives their features."""
    qids, features = embed_queries(
        data,
        model.encoder if isinstance(model, Genius) else model,
        row,
        folder,
        instructions=config.instructions,
        max_queries=config.max_queries,
        seed=config.seed,
        progress=progress,
    )
    raw = F.normalize(torch.from_numpy(features.total()), dim=-1)
    fused = torch.from_numpy(model.embed_features(features)) if isinstance(model, Genius) else raw
    return RowQueries(qids, raw, fused)


def chosen_rows(data: MBeir, config: EvaluationConfig) -> list[EvaluationRow]:
    """Return the rows of a split that are evaluated.

    Raises
    ------
    BadData
        M-BEIR's instructions are missing.
    UsageError
        A setting is empty or names something twice.
    """
    for name, chosen in (
        ("pools", config.pools),
        ("methods", config.methods),
        ("rows", config.rows),
    ):
        if len(set(chosen)) < len(chosen) or (not chosen and name != "rows"):
            raise UsageError(
                f"{name} is {list(chosen)}; expected at least one name, and each only once"
            )
    order = [*SIZES]
    rows = data.rows(config.split, names=config.rows)
    rows.sort(key=lambda row: order.index(row.name) if row.name in order else len(order))
    is_mbeir = any(row.name in order for row in rows)
    if config.instructions != "none" and data.instructions.file is None and is_mbeir:
        raise BadData(
            f"{data.instructions_file} is missing, and M-BEIR's queries need instructions; restore "
            "it, or use --instructions none"
        )
    return rows


def _evaluate_pool(
    group: list[tuple[EvaluationRow, RowQueries]],
    pool: Pool,
    candidates: PoolCandidates,
    answer: Answer,
    config: EvaluationConfig,
    runs: Path,
) -> Iterator[list[ResultRow]]:
    """Yield the results of each row of a group of rows that share a pool."""
    runs.mkdir(parents=True, exist_ok=True)
    qrels = {}
    for row, queries in group:
        try:
            qrels[row.name] = filter_to_pool(read_judgements(row, queries.qids), candidates)
        except BadData as error:
            name = row.local_pool if pool == "local" else "global pool"
            raise BadData(f"{row.name}, {name}: {error}") from None
        # Judgements of the pool only, so that TREC's tools measure the runs as we do.
        write_qrels(runs / f"{row.name}_{config.split}.{pool}.qrels", qrels[row.name])
    answers = answer([queries for _, queries in group], candidates)
    for (row, queries), methods in zip(group, answers, strict=True):
        headline = 10 if row.dataset in ("fashion200k", "fashioniq") else 5
        ks = KS_FASHION if headline == 10 else KS
        results: list[ResultRow] = []
        for method_hits in methods:
            method = method_hits.method
            run = dict(zip(queries.qids, method_hits.hits, strict=True))
            write_run(runs / f"{row.name}_{config.split}.{pool}.{method}.trec", method, run)
            measures = measure_run(qrels[row.name], run, ks=ks)
            results.append(
                ResultRow(
                    dataset=row.dataset,
                    name=row.name,
                    task=task_name(row.task_id),
                    task_id=row.task_id,
                    pool=pool,
                    method=method,
                    queries=measures.queries,
                    pool_size=len(candidates),
                    headline=f"R@{headline}",
                    measures=measures.means,
                    bytes_per_item=method_hits.bytes_per_item,
                    num_ranked=method_hits.num_ranked,
                )
            )
        yield results


@command
class Evaluate(DeviceOptions, JsonOption):
    """Evaluate a model on a data set by several methods, and by exact search.

    An encoder alone is searched exactly, by the sums of its features. R@k is M-BEIR's: the share of
    queries with any right answer among the first k. Results are compared with published numbers for
    the same numbers of queries and candidates.
    """

    data: DataArgument
    """Folder of the data set, in M-BEIR's layout."""

    model: OptionalFolder = None
    """Folder of the model."""

    encoder: str = ""
    """Instead of a model: an encoder, such as clip:NAME, or fusion:FOLDER for UniIR's fusions."""

    options: Annotated[EvaluationConfig, tyro.conf.arg(name="")] = EvaluationConfig()

    out: OptionalFolder = None
    """Folder for features, runs and results.json; default: evaluation/ in the model's folder."""

    def run(self) -> None:
        """Evaluate and print the table."""
        folder = self.out or (self.model and self.model / "evaluation")
        if (self.model is None) is not bool(self.encoder) or folder is None:
            raise UsageError("give either --model, or --encoder with --out")
        model: Genius | Encoder
        with TerminalProgress() as progress:
            if self.model is None:
                model = open_encoder(
                    absolute_spec(self.encoder), download=self.download, device=self.device
                )
            else:
                model = Genius.open(self.model, device=self.device, download=self.download)
            result = evaluate(MBeir(self.data), model, self.options, folder, progress=progress)
        result.print(as_json=self.json)


main = partial(run, Evaluate, "evaluate")


if __name__ == "__main__":
    sys.exit(main())
