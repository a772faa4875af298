"""The queries of every split, against pools, qrels, tasks and instructions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

from genius.data.check_findings import NUM_EXAMPLES, Findings, Kind
from genius.data.check_pictures import Pictures
from genius.data.check_pools import Checksums, Pools, content_of
from genius.data.ids import IdSet
from genius.data.instructions import InstructionKey
from genius.data.lines import BadLines
from genius.data.mbeir import PAPER_ROWS, EvaluationRow, MBeir, read_queries
from genius.data.qrels import read_qrels
from genius.data.records import TASKS, Modality, Query, parse_id
from genius.errors import BadData

_Pool = Literal["local", "global"]
_NONE_INSIDE: Final[dict[_Pool, Kind]] = {
    "local": "positives-outside-local-pool",
    "global": "positives-outside-global-pool",
}
_SOME_OUTSIDE: Final[dict[_Pool, Kind]] = {
    "local": "some-positives-outside-local-pool",
    "global": "some-positives-outside-global-pool",
}


@dataclass(frozen=True, slots=True)
class QueryCount:
    """Queries of one task in one split of one data set."""

    split: str
    dataset: str
    """As the file is named."""
    dataset_id: int
    task_id: int | None
    num_queries: int
    num_positives: int


class _CountKey(NamedTuple):
    split: str
    dataset: str
    dataset_id: int
    task_id: int | None


class _Place(NamedTuple):
    """Where answers are looked for."""

    members: Container[str]
    name: str


class Queries:
    """The queries of every split, against pools, qrels and instructions."""

    def __init__(
        self,
        data: MBeir,
        findings: Findings,
        pictures: Pictures,
        pools: Pools,
        members: dict[Path, IdSet],
    ) -> None:
        self._data = data
        self._findings = findings
        self._pictures = pictures
        self._pools = pools
        self._members = members
        self._num_queries: Counter[_CountKey] = Counter()
        self._num_positives: Counter[_CountKey] = Counter()
        self._asked: Counter[InstructionKey] = Counter()
        self._from_mbeir = False

    def read_split(self, split: str) -> None:
        """Read every file of queries in ``query/<split>``."""
        trains = split in {"train", "union_train"}
        files = self._data.query_files(split)
        self._find_orphans(split, files)
        for path in files:
            if trains:
                self._read(path, split, "train", None)
            elif split.startswith("union_"):
                self._read(path, split, split.removeprefix("union_"), None)
            else:
                try:
                    row = self._data.row(path, split)
                except BadData as error:
                    self._findings.add("layout", str(error))
                    row = None
                self._read(path, split, split, row)

    def report_instructions(self) -> None:
        """Name what is asked for and has no instruction."""
        if self._data.instructions.file is None:
            file = self._data.instructions_file
            if self._from_mbeir:
                self._findings.add(
                    "layout",
                    f"{file} is missing, and M-BEIR's queries ask for nothing without it; fetch it again",
                )
            else:
                self._findings.add("no-instructions", f"{file} is missing: queries are read without one")
            return
        for key, num_queries in sorted(self._asked.items(), key=str):
            if key not in self._data.instructions.rows:
                asked = f"data set {key.dataset_id}, {key.query.label} -> {key.candidate.label}"
                self._findings.add(
                    "missing-instruction",
                    f"{self._data.instructions.file}: no row for {asked} ({num_queries:,} queries); add "
                    f"{key.query.value}<tab>{key.candidate.value}<tab>NAME<tab>{key.dataset_id}"
                    "<tab>INSTRUCTION",
                )

    def counts(self) -> tuple[QueryCount, ...]:
        """How many queries there are."""
        return tuple(
            QueryCount(*key, num_queries=count, num_positives=self._num_positives[key])
            for key, count in self._num_queries.items()
        )

    def _read(self, path: Path, folder: str, split: str, row: EvaluationRow | None) -> None:
        """Read one file; ``row`` says what belongs to it, and is None for files of several tasks."""
        seen, checksums, bad = IdSet(), Checksums(), BadLines(NUM_EXAMPLES)
        dataset = row.dataset if row else path.stem.removeprefix("mbeir_").removesuffix(f"_{split}")
        qrels = self._qrels(row)
        union_file = self._data.root / "cand_pool" / "global" / f"mbeir_union_{split}_cand_pool.jsonl"
        union = _Place(
            self._members.get(union_file, self._pools),
            str(union_file) if union_file in self._members else f"any pool (there is no {union_file.name})",
        )
        local = None if row is None else _Place(self._members[row.local_pool], str(row.local_pool))
        if row is not None and row.name in PAPER_ROWS:
            self._from_mbeir = True
        for query in read_queries(path, skip_bad=bad):
            where = f"{path}: qid {query.qid}"
            again = not seen.add(query.qid)
            if not checksums.agree(query.qid, content_of(query)):
                self._findings.add("conflicting-id", f"{where} is something else in an earlier line")
            elif again and folder != "union_train":  # the union training file repeats rare data sets
                self._findings.add("duplicate-id", f"{where} occurs again")
            if query.image is not None:
                self._pictures.look_at(query.image, f"qid {query.qid}")
            task_id = self._task(query, row, where)
            key = _CountKey(folder, dataset, parse_id(query.qid)[0], task_id)
            self._num_queries[key] += 1
            self._num_positives[key] += len(query.positives)
            if not query.positives:
                self._findings.add("no-positives", where)
                continue
            if local is not None:
                self._find_positives(query, local, "local", where)
            self._find_positives(query, union, "global", where)
            if qrels is not None and row is not None:
                self._compare(query, qrels.pop(query.qid, None), row, where)
        for qid in qrels or ():
            self._findings.add(
                "qrels-disagree",
                f"{path}: qid {qid} is in {row and row.qrels} and not here; fetch both files again",
            )
        self._findings.add_bad_lines(bad)

    def _qrels(self, row: EvaluationRow | None) -> dict[str, set[str]] | None:
        if row is None:
            return None
        if row.qrels is None:
            folder = self._data.root / "qrels" / row.split
            file = folder / f"mbeir_{row.name}_{row.split}_qrels.txt"
            if any(folder.glob("*_qrels.txt")):
                self._findings.add(
                    "layout", f"{file} is missing, while other rows have theirs; fetch it again"
                )
            else:
                self._findings.add(
                    "missing-qrels", f"{file} is missing: the queries' own positives are taken"
                )
            return None
        try:
            qrels = read_qrels(row.qrels)
        except BadData as error:
            self._findings.add("bad-line", str(error))
            return None
        return {qid: {did for did, relevance in dids.items() if relevance > 0} for qid, dids in qrels.items()}

    def _task(self, query: Query, row: EvaluationRow | None, where: str) -> int | None:
        """The query's task, and whether everything that tells it agrees; counts what it asks for."""
        task_id = query.task_id
        if task_id is None and row is not None:
            task_id = row.task_id
        wanted = self._wanted(query)
        if wanted is not None:
            self._asked[InstructionKey(parse_id(query.qid)[0], query.modality, wanted)] += 1
        found = f"{query.modality.label} -> {wanted.label if wanted else 'unknown'}"
        if row is not None and task_id != row.task_id:
            self._findings.add("task-mismatch", f"{where} has task {task_id}, the file says {row.task_id}")
        elif task_id is not None and not _fits(task_id, query.modality, wanted):
            self._findings.add("task-mismatch", f"{where} has task {task_id} but is {found}")
        return task_id

    def _wanted(self, query: Query) -> Modality | None:
        """The modality of its first positive that any pool holds (the query's own data set comes first)."""
        found = (self._pools.modality(did) for did in query.positives)
        return next((modality for modality in found if modality is not None), None)

    def _find_orphans(self, split: str, files: Sequence[Path]) -> None:
        """Name query files that are missing, as far as the qrels know of them."""
        known = {f"{path.stem}_qrels.txt" for path in files}
        for path in sorted((self._data.root / "qrels" / split).glob("mbeir_*_qrels.txt")):
            if path.name not in known:
                absent = self._data.root / "query" / split / f"{path.stem.removesuffix('_qrels')}.jsonl"
                self._findings.add(
                    "layout", f"{absent} is missing, and {path} is there; fetch the one or remove the other"
                )

    def _compare(self, query: Query, judged: set[str] | None, row: EvaluationRow, where: str) -> None:
        """Whether the qrels say what the query says."""
        if judged is None:
            line = f"{query.qid} 0 {query.positives[0]} 1 {row.task_id}"
            self._findings.add("qrels-disagree", f"{where}: no line in {row.qrels}; add `{line}`")
        elif judged != set(query.positives):
            differs = ", ".join(sorted(judged ^ set(query.positives))[:3])
            self._findings.add(
                "qrels-disagree",
                f"{where}: {differs} stands in its positives or in {row.qrels}, and not in both",
            )

    def _find_positives(self, query: Query, pool: _Place, which: _Pool, where: str) -> None:
        outside = [did for did in query.positives if did not in pool.members]
        if len(outside) == len(query.positives):
            self._findings.add(
                _NONE_INSIDE[which],
                f"{where}: none of its positives ({', '.join(outside[:3])}) is in {pool.name}; add the "
                "candidate's line, or fetch the pool again",
            )
            return
        # OVEN and InfoSeek list each other's candidates, which a local pool need not hold (UniIR).
        own = parse_id(query.qid)[0]
        strays = [did for did in outside if which == "global" or parse_id(did)[0] == own]
        if strays:
            self._findings.add(_SOME_OUTSIDE[which], f"{where}: {', '.join(strays[:3])} not in {pool.name}")


def _fits(task_id: int, query: Modality, candidate: Modality | None) -> bool:
    expected = TASKS.get(task_id)
    return expected is not None and query is expected[0] and candidate in {expected[1], None}
