"""Validation of a data set before training: missing files and contradictions.

Files are read line by line. Only a byte per id and pool, a byte and a checksum per id, and a hash per image
are kept in memory, so that M-BEIR's millions of records fit on a small machine.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from genius_search.data.images import SHORTEST_SIDE, TooManyPixels, open_image
from genius_search.data.mbeir import (
    PAPER_ROWS,
    BadLines,
    EvaluationRow,
    IdColumn,
    InstructionKey,
    MBeir,
    read_candidates,
    read_qrels,
    read_queries,
)
from genius_search.errors import BadData, BadImage
from genius_search.records import TASKS, Candidate, Modality, Query, parse_id

_WARNINGS: Final = frozenset(
    {
        "missing-qrels",
        "no-images",
        "no-instructions",
        "no-positives",
        "some-positives-outside-global-pool",
        "some-positives-outside-local-pool",
    }
)
"""Kinds of findings with which a data set can be used; all others are errors."""
NUM_EXAMPLES: Final = 5
"""Maximum number of examples per kind of finding; all are counted."""
_IMAGE_FOLDER: Final = "mbeir_images"
"""Folder that M-BEIR's images are unpacked to."""
_QUEUE_SIZE: Final = 64
"""Images that wait for a thread at most."""
_MODALITIES: Final = tuple(Modality)


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of problem, with its number of occurrences and the first examples."""

    severity: Literal["error", "warning"]
    kind: str
    """Name in lower case, for example ``missing-image`` or ``duplicate-id``."""
    count: int
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PoolCount:
    """The number of candidates of one pool file, by modality."""

    pool: str
    num_candidates: int
    num_images: int
    num_texts: int
    num_image_texts: int


@dataclass(frozen=True, slots=True)
class QueryCount:
    """The number of queries of one task in one split of one data set."""

    split: str
    dataset: str
    """Name as in the file names."""
    dataset_id: int
    task_id: int | None
    num_queries: int
    num_positives: int


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The result of a check; JSON-able through ``dataclasses.asdict``."""

    root: str
    name: str
    queries: tuple[QueryCount, ...]
    pools: tuple[PoolCount, ...]
    num_images: int
    """Number of distinct images referred to."""
    images_decoded: bool
    """False if only the existence of images was checked."""
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """True if there are no errors, only warnings."""
        return all(finding.severity != "error" for finding in self.findings)


def check(root: Path, *, decode_images: bool = True, workers: int = 2) -> CheckReport:
    """Check a folder in M-BEIR's layout.

    Parameters
    ----------
    decode_images
        decode every image; otherwise only check that the files exist.
    workers
        number of decoding threads, at least 1.

    Raises
    ------
    BadData
        The folder is not in M-BEIR's layout.
    """
    with ThreadPoolExecutor(workers) as threads:
        run = _Check(MBeir(root), threads, decode=decode_images)
        pools = [*run.data.local_pools(), *sorted((root / "cand_pool" / "global").glob("*_cand_pool.jsonl"))]
        for path in pools:
            run.check_pool(path)
        if not run.pools:
            run.add("layout", f"{root / 'cand_pool'}: there is no pool")
        for folder in sorted(path.name for path in (root / "query").iterdir() if path.is_dir()):
            run.check_split(folder)
        run.check_instructions()
        run.finish_images()
    return CheckReport(
        root=str(root),
        name=run.data.name,
        queries=tuple(
            QueryCount(*key, num_queries=count, num_positives=run.num_positives[key])
            for key, count in run.num_queries.items()
        ),
        pools=tuple(run.pools),
        num_images=len(run.images),
        images_decoded=decode_images,
        findings=run.findings(),
    )


class _Check:
    """Checks pools, then queries against pools, qrels and instructions, and every picture once."""

    def __init__(self, data: MBeir, threads: ThreadPoolExecutor, *, decode: bool) -> None:
        self.data = data
        self._threads, self._decode = threads, decode
        self._counts: Counter[str] = Counter()
        self._examples: defaultdict[str, list[str]] = defaultdict(list)
        self._members: dict[Path, IdColumn] = {}
        self._modalities = IdColumn()  # code + 1
        self._checksums = IdColumn("I")
        self._requested: Counter[InstructionKey] = Counter()
        self._from_mbeir = False
        self._queue: deque[Future[tuple[str, str] | None]] = deque()
        self._is_unpacked = decode or (data.root / _IMAGE_FOLDER).exists()
        self._num_packed = 0
        self.images: set[int] = set()  # 64-bit hashes: M-BEIR's names themselves would take a gigabyte
        self.pools: list[PoolCount] = []
        # By split, data set, its number and the task.
        self.num_queries: Counter[tuple[str, str, int, int | None]] = Counter()
        self.num_positives: Counter[tuple[str, str, int, int | None]] = Counter()

    def add(self, kind: str, *examples: str, count: int = 1) -> None:
        """Count a problem, and keep the first examples of its kind."""
        self._counts[kind] += count
        room = NUM_EXAMPLES - len(self._examples[kind])
        self._examples[kind].extend(examples[:room])

    def findings(self) -> tuple[Finding, ...]:
        """Return errors first, each kind in alphabetical order."""
        found = [
            Finding("warning" if kind in _WARNINGS else "error", kind, count, tuple(self._examples[kind]))
            for kind, count in self._counts.items()
            if count
        ]
        return tuple(sorted(found, key=lambda finding: (finding.severity, finding.kind)))

    def check_pool(self, path: Path) -> None:
        members = self._members[path] = IdColumn()
        bad = BadLines(NUM_EXAMPLES)
        counts: Counter[Modality] = Counter()
        for candidate in read_candidates(path, skip_bad=bad):
            did = candidate.did
            counts[candidate.modality] += 1
            if members[did]:
                self.add("duplicate-id", f"{path}: did {did} occurs again")
            members[did] = 1
            if not _agrees(self._checksums, did, candidate):
                self.add("conflicting-id", f"{path}: did {did} is something else in an earlier line or pool")
            self._modalities[did] = candidate.modality.code + 1
            if candidate.image is not None:
                self._check_image(candidate.image, f"did {did}")
        self.add("bad-line", *map(str, bad.problems), count=bad.count)
        name = path.relative_to(self.data.root / "cand_pool").as_posix()
        self.pools.append(PoolCount(name, counts.total(), *(counts[modality] for modality in _MODALITIES)))

    def check_split(self, folder: str) -> None:
        """Check every file in ``query/<folder>``."""
        files = self.data.query_files(folder)
        known = {f"{path.stem}_qrels.txt" for path in files}
        for path in sorted((self.data.root / "qrels" / folder).glob("mbeir_*_qrels.txt")):
            if path.name not in known:
                absent = self.data.root / "query" / folder / f"{path.stem.removesuffix('_qrels')}.jsonl"
                self.add(
                    "layout", f"{absent} is missing, and {path} is there; fetch the one or remove the other"
                )
        for path in files:
            row = None
            if folder != "train" and not folder.startswith("union_"):
                try:
                    row = self.data.row(path, folder)
                except BadData as error:
                    self.add("layout", str(error))
            self._check_queries(path, folder, row)

    def check_instructions(self) -> None:
        """Report combinations of data set and modalities without an instruction."""
        instructions, file = self.data.instructions, self.data.instructions_file
        if instructions.file is None and self._from_mbeir:
            problem = f"{file} is missing, and M-BEIR's queries are ambiguous without it; fetch it again"
            self.add("layout", problem)
        elif instructions.file is None:
            self.add("no-instructions", f"{file} is missing: queries are read without one")
        else:
            for key, num_queries in sorted(self._requested.items()):
                if key not in instructions.rows:
                    self.add(
                        "missing-instruction",
                        f"{file}: no row for data set {key.dataset_id}, {key.query} -> "
                        f"{key.candidate} ({num_queries:,} queries); add {key.query.mbeir}<tab>"
                        f"{key.candidate.mbeir}<tab>NAME<tab>{key.dataset_id}<tab>INSTRUCTION",
                    )

    def _check_queries(self, path: Path, folder: str, row: EvaluationRow | None) -> None:
        """Check one query file; ``row`` is None for files of several tasks."""
        checksums, bad = IdColumn("I"), BadLines(NUM_EXAMPLES)
        split = folder.removeprefix("union_")
        dataset = row.dataset if row else path.stem.removeprefix("mbeir_").removesuffix(f"_{split}")
        qrels = self._read_qrels(row) if row else None
        union_file = self.data.layout.union_pool(split)
        has_union = union_file in self._members
        union = self._members.get(union_file, self._modalities)
        union_name = str(union_file) if has_union else f"any pool (there is no {union_file.name})"
        if row is not None and row.name in PAPER_ROWS:
            self._from_mbeir = True
        for query in read_queries(path, skip_bad=bad):
            where = f"{path}: qid {query.qid}"
            is_repeated = bool(checksums[query.qid])
            if not _agrees(checksums, query.qid, query):
                self.add("conflicting-id", f"{where} is something else in an earlier line")
            elif is_repeated and folder != "union_train":  # the union training file repeats rare data sets
                self.add("duplicate-id", f"{where} occurs again")
            if query.image is not None:
                self._check_image(query.image, f"qid {query.qid}")
            key = (folder, dataset, parse_id(query.qid)[0], self._check_task(query, row, where))
            self.num_queries[key] += 1
            self.num_positives[key] += len(query.positives)
            if not query.positives:
                self.add("no-positives", where)
                continue
            if row is not None:
                local = self._members[row.local_pool]
                self._check_positives(query, "local", local, str(row.local_pool), where)
            self._check_positives(query, "global", union, union_name, where)
            if qrels is not None and row is not None:
                self._compare(query, qrels.pop(query.qid, None), row, where)
        for qid in qrels or ():
            self.add(
                "qrels-disagree",
                f"{path}: qid {qid} is in {row and row.qrels} and not in this file; fetch both files again",
            )
        self.add("bad-line", *map(str, bad.problems), count=bad.count)

    def _read_qrels(self, row: EvaluationRow) -> dict[str, set[str]] | None:
        if row.qrels is None:
            file = self.data.layout.qrels(row.split, f"{row.name}_{row.split}")
            if self.data.has_qrels(row.split):
                self.add("layout", f"{file} is missing, while other rows have theirs; fetch it again")
            else:
                self.add("missing-qrels", f"{file} is missing: the queries' own positives are used")
            return None
        try:
            qrels = read_qrels(row.qrels)
        except BadData as error:
            self.add("bad-line", str(error))
            return None
        return {qid: {did for did, relevance in dids.items() if relevance > 0} for qid, dids in qrels.items()}

    def _check_task(self, query: Query, row: EvaluationRow | None, where: str) -> int | None:
        """Return the query's task, and record the instruction that it needs."""
        task_id = row.task_id if query.task_id is None and row is not None else query.task_id
        # The modality of its first positive that is in any pool; the query's own data set comes first.
        code = next((code for did in query.positives if (code := self._modalities[did])), 0)
        target = _MODALITIES[code - 1] if code else None
        if target is not None:
            self._requested[InstructionKey(parse_id(query.qid)[0], query.modality, target)] += 1
        if row is not None and task_id != row.task_id:
            self.add("task-mismatch", f"{where} has task {task_id}, the file says {row.task_id}")
        elif task_id is not None:
            expected = TASKS.get(task_id)
            if expected is None or query.modality is not expected[0] or target not in (expected[1], None):
                self.add(
                    "task-mismatch",
                    f"{where} has task {task_id} but is {query.modality} -> {target or 'unknown'}",
                )
        return task_id

    def _check_positives(
        self, query: Query, which: Literal["local", "global"], pool: IdColumn, name: str, where: str
    ) -> None:
        outside = [did for did in query.positives if not pool[did]]
        if len(outside) == len(query.positives):
            self.add(
                f"positives-outside-{which}-pool",
                f"{where}: none of its positives ({', '.join(outside[:3])}) is in {name}; add the "
                "candidate's line, or fetch the pool again",
            )
            return
        # OVEN and InfoSeek list each other's candidates, which a local pool need not hold (UniIR).
        own = parse_id(query.qid)[0]
        strays = [did for did in outside if which == "global" or parse_id(did)[0] == own]
        if strays:
            self.add(
                f"some-positives-outside-{which}-pool",
                f"{where}: {', '.join(strays[:3])} not in {name}",
            )

    def _compare(self, query: Query, judged: set[str] | None, row: EvaluationRow, where: str) -> None:
        """Check that the qrels agree with the query's positives."""
        if judged is None:
            line = f"{query.qid} 0 {query.positives[0]} 1 {row.task_id}"
            self.add("qrels-disagree", f"{where}: no line in {row.qrels}; add `{line}`")
        elif judged != set(query.positives):
            differing = ", ".join(sorted(judged ^ set(query.positives))[:3])
            self.add(
                "qrels-disagree",
                f"{where}: {differing} is in its positives or in {row.qrels}, and not in both",
            )

    def _check_image(self, relative: str, owner: str) -> None:
        """Queue an image at its first reference."""
        key = hash(relative)
        if key in self.images:
            return
        self.images.add(key)
        if not self._is_unpacked and relative.startswith(f"{_IMAGE_FOLDER}/"):
            self._num_packed += 1
            return
        self._queue.append(self._threads.submit(self._image_problem, relative, owner))
        if len(self._queue) >= _QUEUE_SIZE:
            self._collect()

    def finish_images(self) -> None:
        """Wait for the queued images."""
        while self._queue:
            self._collect()
        if self._num_packed:
            self.add(
                "no-images",
                f"{self.data.root / _IMAGE_FOLDER} is missing, so no picture was looked for; unpack the "
                "archive of M-BEIR's pictures there, or use an encoder that needs none (precomputed:)",
                count=self._num_packed,
            )

    def _collect(self) -> None:
        problem = self._queue.popleft().result()
        if problem is not None:
            self.add(*problem)

    def _image_problem(self, relative: str, owner: str) -> tuple[str, str] | None:
        try:
            path = self.data.image_path(relative)
            if not path.exists():
                advice = "put the picture there, or drop the record"
                return "missing-image", f"{owner}: {path} is missing; {advice}"
            if self._decode:
                open_image(path, shortest_side=SHORTEST_SIDE).close()
        except TooManyPixels as error:
            return "oversized-image", f"{owner}: {error}"
        except BadImage as error:
            return "broken-image", f"{owner}: {error}"
        except BadData as error:
            return "missing-image", f"{owner}: {error}"
        return None


def _agrees(checksums: IdColumn, id_: str, record: Candidate | Query) -> bool:
    """Return whether an id has the same content as at its first occurrence."""
    content = "\0".join((record.modality, record.text or "", record.image or ""))
    checksum = zlib.crc32(content.encode()) or 1
    checksums[id_] = checksums[id_] or checksum
    return checksums[id_] == checksum
