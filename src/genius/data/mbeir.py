"""A data set in M-BEIR's layout: which files it has, and the queries and candidates in them.

Layout and fields: M-BEIR's data card and UniIR's loader. Files are read line by line, one record at a time.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from genius.data.ids import IdSet
from genius.data.instructions import Instructions
from genius.data.lines import BadLines, numbered_records, refuse
from genius.data.records import TASKS, Candidate, Query, parse_id
from genius.data.rows import parse_candidate, parse_query
from genius.errors import BadData, UsageError

_ROW_NAME: Final = re.compile(r"^(?P<dataset>.+)_task(?P<task>\d+)$")

PAPER_ROWS: Final = (
    "visualnews_task0",
    "mscoco_task0",
    "fashion200k_task0",
    "webqa_task1",
    "edis_task2",
    "webqa_task2",
    "visualnews_task3",
    "mscoco_task3",
    "fashion200k_task3",
    "nights_task4",
    "oven_task6",
    "infoseek_task6",
    "fashioniq_task7",
    "cirr_task7",
    "oven_task8",
    "infoseek_task8",
)
"""The order in which the papers print M-BEIR's rows."""

_HEADLINE_AT_10: Final = frozenset({"fashion200k", "fashioniq"})


def read_queries(path: Path, *, skip_bad: BadLines | None = None) -> Iterator[Query]:
    """The queries of one file, one at a time.

    Raises
    ------
    BadRecord
        a line is wrong and there is no ``skip_bad`` to collect it.
    BadData
        the file cannot be opened.
    """
    return (query for _, query in numbered_records(path, parse_query, skip_bad))


def read_candidates(path: Path, *, skip_bad: BadLines | None = None) -> Iterator[Candidate]:
    """The candidates of one file, one at a time; errors as for :func:`read_queries`."""
    return (candidate for _, candidate in numbered_records(path, parse_candidate, skip_bad))


def read_pool(paths: Iterable[Path], *, skip_bad: BadLines | None = None) -> Iterator[Candidate]:
    """The candidates of a pool kept in several files, each once: what came first stays.

    An id that occurs twice in one file is a bad line, since nobody can tell which of the two was meant.
    """
    earlier = IdSet()
    for path in paths:
        here = IdSet()
        for line, candidate in numbered_records(path, parse_candidate, skip_bad):
            if not here.add(candidate.did):
                refuse(path, line, f"did {candidate.did!r} occurs twice in this file", skip_bad)
            elif earlier.add(candidate.did):
                yield candidate


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """One line of the results table: the queries of one task of one data set and what answers them."""

    name: str
    """As in file names, for example ``mscoco_task0``."""
    dataset: str
    dataset_id: int
    task_id: int
    split: str
    queries: Path
    qrels: Path | None
    """None when there are only the queries' own positives."""
    local_pool: Path
    headline_k: int
    """The papers' cut-off for this row: 10 for Fashion200K and FashionIQ, else 5."""


class MBeir:
    """A data set in M-BEIR's layout.

    >>> data = MBeir(Path("M-BEIR"))  # doctest: +SKIP
    >>> for row in data.rows("test"):  # doctest: +SKIP
    ...     print(row.name, row.local_pool)
    """

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise BadData(f"{root}: there is no such folder")
        absent = [name for name in ("query", "cand_pool") if not (root / name).is_dir()]
        if absent:
            raise BadData(
                f"{root} is not in M-BEIR's layout: it has no {' and no '.join(absent)} folder; expected "
                "query/<split>, cand_pool/local, and if there are any qrels/<split> and instructions"
            )
        self.root = root
        self.name = root.resolve().name
        self.instructions_file = root / "instructions" / "query_instructions.tsv"
        self.instructions = (
            Instructions.read(self.instructions_file)
            if self.instructions_file.exists()
            else Instructions.empty()
        )

    def splits(self) -> list[str]:
        """Splits that have queries by task, usually test and val; the training files are not among them."""
        return [
            folder.name
            for folder in sorted((self.root / "query").iterdir())
            if folder.is_dir()
            and not folder.name.startswith("union_")
            and folder.name != "train"
            and any(folder.glob("*.jsonl"))
        ]

    def training_queries(self) -> list[Path]:
        """The union training file where there is one, else every data set's own."""
        union = _files(self.root / "query" / "union_train", "*.jsonl")
        return union or _files(self.root / "query" / "train", "*.jsonl")

    def training_pools(self) -> list[Path]:
        """The union training pool where there is one, else all local pools; for :func:`read_pool`."""
        return self._union_pool("train") or self.local_pools()

    def local_pools(self) -> list[Path]:
        """Every local pool, of all splits."""
        return _files(self.root / "cand_pool" / "local", "*_cand_pool.jsonl")

    def local_pools_of(self, split: str) -> list[Path]:
        """The local pools of a split's rows, as far as they are there."""
        found = (self._local_pool(_row_name(path, split), split) for path in self.query_files(split))
        return list(dict.fromkeys(path for path in found if path is not None))

    def global_pool(self, split: str) -> list[Path]:
        """The union pool of a split, else the local pools of its rows; for :func:`read_pool`."""
        union = self._union_pool(split)
        return union or list(dict.fromkeys(row.local_pool for row in self.rows(split)))

    def query_files(self, split: str) -> list[Path]:
        """The files of queries of one split, in the order of the papers' tables, others after them."""

        def place(path: Path) -> tuple[int, str]:
            name = _row_name(path, split)
            return (PAPER_ROWS.index(name) if name in PAPER_ROWS else len(PAPER_ROWS), name)

        return sorted(_files(self.root / "query" / split, "*.jsonl"), key=place)

    def rows(self, split: str, *, names: Collection[str] = ()) -> list[EvaluationRow]:
        """What there is to evaluate in a split, in the order of the papers' tables; or these of it only.

        Raises
        ------
        BadData
            the split has no queries, or a row has no local pool.
        UsageError
            a name is not that of a row.
        """
        files = self.query_files(split)
        if not files:
            raise BadData(
                f"{self.root}: no queries for split {split!r} in {self.root / 'query' / split}; "
                f"there are: {', '.join(self.splits()) or 'none'}"
            )
        known = [_row_name(path, split) for path in files]
        absent = [name for name in names if name not in known]
        if absent:
            raise UsageError(f"there is no row {absent[0]!r} in {self.root}; there are: {', '.join(known)}")
        return [
            self.row(path, split)
            for path, name in zip(files, known, strict=True)
            if not names or name in names
        ]

    def has_qrels(self, split: str) -> bool:
        """Whether the split has any qrels."""
        return bool(self._qrels_files(split))

    def rows_without_queries(self, split: str) -> list[str]:
        """Names of rows that have qrels and no query file: something was lost, or not fetched."""
        known = {_row_name(path, split) for path in self.query_files(split)}
        named = [
            path.stem.removeprefix("mbeir_").removesuffix(f"_{split}_qrels")
            for path in self._qrels_files(split)
        ]
        return [name for name in named if name not in known and _ROW_NAME.match(name)]

    def row(self, queries: Path, split: str) -> EvaluationRow:
        """One file of queries with the files that belong to it; raises as :meth:`rows`."""
        name = _row_name(queries, split)
        parts = _ROW_NAME.match(name)
        if parts is None or int(parts["task"]) not in TASKS:
            raise BadData(
                f"{queries}: the name does not say which task it is; expected "
                f"mbeir_<data set>_task<N>_{split}.jsonl with N one of {', '.join(map(str, TASKS))}"
            )
        pool = self._local_pool(name, split)
        if pool is None:
            local = self.root / "cand_pool" / "local"
            raise BadData(
                f"{queries}: no local pool for it; expected {local / f'mbeir_{name}_cand_pool.jsonl'} "
                f"(or mbeir_{name}_{split}_cand_pool.jsonl)"
            )
        first = next(read_queries(queries), None)
        if first is None:
            raise BadData(f"{queries}: has no queries")
        qrels = self.root / "qrels" / split / f"mbeir_{name}_{split}_qrels.txt"
        return EvaluationRow(
            name=name,
            dataset=parts["dataset"],
            dataset_id=parse_id(first.qid)[0],
            task_id=int(parts["task"]),
            split=split,
            queries=queries,
            qrels=qrels if qrels.exists() else None,
            local_pool=pool,
            headline_k=10 if parts["dataset"] in _HEADLINE_AT_10 else 5,
        )

    def image_path(self, relative: str) -> Path:
        """Where an image of this data set lies; a path that leaves the data set's folder is refused."""
        if relative.startswith("/") or ".." in relative.split("/"):
            raise BadData(f"{self.root}: image path {relative!r} leads out of the data set's folder")
        return self.root / relative

    def _local_pool(self, name: str, split: str) -> Path | None:
        local = self.root / "cand_pool" / "local"
        names = [f"mbeir_{name}_{split}_cand_pool.jsonl", f"mbeir_{name}_cand_pool.jsonl"]
        return next((local / one for one in names if (local / one).exists()), None)

    def _qrels_files(self, split: str) -> list[Path]:
        return _files(self.root / "qrels" / split, "*_qrels.txt")

    def _union_pool(self, split: str) -> list[Path]:
        path = self.root / "cand_pool" / "global" / f"mbeir_union_{split}_cand_pool.jsonl"
        return [path] if path.exists() else []


def _row_name(queries: Path, split: str) -> str:
    return queries.stem.removeprefix("mbeir_").removesuffix(f"_{split}")


def _files(folder: Path, pattern: str) -> list[Path]:
    return sorted(path for path in folder.glob(pattern) if not path.name.startswith("."))
