"""Data sets in M-BEIR's layout: paths, queries, candidates, qrels, instructions, and their check.

The layout follows M-BEIR's data card and UniIR's loader. Files are read line by line. ::

    DATA/query/test/mbeir_mscoco_task0_test.jsonl             queries, with their positives
    DATA/cand_pool/local/mbeir_mscoco_task0_cand_pool.jsonl   candidates of one task
    DATA/cand_pool/global/mbeir_union_test_cand_pool.jsonl    candidates of all tasks
    DATA/qrels/test/mbeir_mscoco_task0_test_qrels.txt         right answers
    DATA/instructions/query_instructions.tsv
"""

from __future__ import annotations

import codecs
import csv
import json
import os
import re
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from genius_search.artifact import first_problem
from genius_search.border import as_path
from genius_search.data.images import SHORTEST_SIDE, open_image
from genius_search.errors import BadData, BadRecord, UsageError
from genius_search.records import (
    CANDIDATE_CAP,
    TASKS,
    Candidate,
    Modality,
    Query,
    candidate_number,
    composed,
    query_number,
)

Record = TypeVar("Record")
OnBad = Callable[[BadRecord], None]
"""A function that is called for each bad line, which is left out.

Without it, the first bad line raises its :class:`BadRecord`."""

_ROW_NAME: Final = re.compile(r"^(?P<dataset>.+)_task(?P<task>\d+)$")
_RELEVANCE: Final = re.compile(r"-?[0-9]{1,9}")
MAX_FINDING_EXAMPLES: Final = 5
"""Maximum number of examples in a finding; all occurrences are counted."""
_CHECKED_AT_ONCE: Final = 256
"""Images that are decoded before their problems are added to the report."""


class IdColumn:
    """A mapping from numbers of candidates to small non-negative integers, 0 by default.

    The ids of a data set are almost consecutive, so one array per data set replaces a dict, which
    would take forty times the memory: 5.6 million candidates fit into 12 MB. For the id 9:12::

        column[90_000_012] = 1   ->   {9: array([0, 0, ..., 1])}, where the 1 is element 12
    """

    def __init__(self) -> None:
        self._arrays: dict[int, array[int]] = {}

    def __getitem__(self, candidate: int) -> int:
        dataset, number = divmod(candidate, CANDIDATE_CAP)
        values = self._arrays.get(dataset, ())
        return values[number] if number < len(values) else 0

    def __setitem__(self, candidate: int, value: int) -> None:
        dataset, number = divmod(candidate, CANDIDATE_CAP)
        values = self._arrays.setdefault(dataset, array("H"))
        if number >= len(values):
            values.frombytes(bytes(values.itemsize * (number + 1 - len(values))))
        values[number] = value


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the numbers and the UTF-8 bytes of non-blank lines, without a byte order mark.

    A file in UTF-16 with a byte order mark is converted to UTF-8.

    Raises
    ------
    BadData
        The file cannot be opened, or has another encoding.
    """
    if path.exists() and not path.is_file():  # a pipe or a device may never end
        raise BadData(f"{path}: is not a file; expected lines in a file")
    try:
        file = path.open("rb")
    except OSError as error:
        raise BadData(f"{path}: cannot be read: {error.strerror}") from None
    with file:
        lines: Iterable[bytes] = file
        head = file.peek(4)[:4]
        if head[2:] != b"\0\0" and head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            try:
                lines = BytesIO(file.read().decode("utf-16").encode())
            except UnicodeDecodeError:
                raise BadData(f"{path}: is damaged UTF-16; save it as UTF-8") from None
        elif b"\0" in head:
            raise BadData(
                f"{path}: is not UTF-8, nor UTF-16 with a byte order mark; save it as UTF-8"
            )
        for number, raw in enumerate(lines, start=1):
            line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            if line.strip():
                yield number, line.rstrip(b"\r\n")


def read_json_lines(
    path: Path, parse: Callable[[dict[str, Any]], Record], on_bad: OnBad | None = None
) -> Iterator[tuple[int, Record]]:
    """Parse the JSON object on each line, and yield line numbers and results.

    Raises
    ------
    BadRecord
        A line is invalid, and ``on_bad`` is None.
    BadData
        The file cannot be opened.
    """
    for line, raw in numbered_lines(path):
        try:
            row = json.loads(raw.decode())
            if not isinstance(row, dict):
                raise BadData(f"is a JSON {type(row).__name__}, expected an object {{...}}")
            if b"\\u" in raw:
                json.dumps(row, ensure_ascii=False).encode()  # fails for half a surrogate pair
            record = parse(row)
        except UnicodeDecodeError as error:
            problem = f"is not UTF-8 (byte {error.start + 1} of the line)"
        except json.JSONDecodeError as error:
            problem = f"is not valid JSON: {error.msg} at column {error.colno}"
        except ValidationError as error:
            problem = f"{first_problem(error)} (the line has {', '.join(row)[:80] or 'nothing'})"
        except (ValueError, RecursionError) as error:
            problem = str(error)
        else:
            yield line, record
            continue
        bad = BadRecord(path, line, problem)
        if on_bad is None:
            raise bad
        on_bad(bad)


class _CandidateRow(BaseModel):
    model_config = ConfigDict(strict=True)

    did: str
    modality: str
    txt: str | None = None
    img_path: str | None = None
    src_content: Any = None


class _QueryRow(BaseModel):
    model_config = ConfigDict(strict=True)

    qid: str
    query_modality: str
    query_txt: str | None = None
    query_img_path: str | None = None
    query_src_content: Any = None
    pos_cand_list: list[str] | None = None
    task_id: int | None = None


def read_queries(path: Path, *, on_bad: OnBad | None = None) -> Iterator[Query]:
    """Read the queries of one file lazily; raises like :func:`read_json_lines`."""
    return (query for _, query in read_json_lines(path, _parse_query, on_bad))


def read_candidates(path: Path, *, on_bad: OnBad | None = None) -> Iterator[Candidate]:
    """Read the candidates of one file lazily; raises like :func:`read_json_lines`."""
    return (candidate for _, candidate in read_json_lines(path, _parse_candidate, on_bad))


def read_pool(paths: Iterable[Path], *, is_checked: bool = False) -> Iterator[Candidate]:
    """Read the candidates of a pool in several files; the first file with an id is used.

    Parameters
    ----------
    is_checked
        The pool is a single file that has been read before, so that its ids need not be parsed.

    Raises
    ------
    BadRecord
        A line is invalid, or an id occurs twice in the same file, which makes it ambiguous.
    """
    last_file = IdColumn()  # number of the last file with an id, from 1
    if is_checked:
        for path in paths:
            yield from (entry for _, entry in read_json_lines(path, _parse_checked_candidate))
        return
    for number, path in enumerate(paths, start=1):
        for line, candidate in read_json_lines(path, _parse_candidate):
            earlier = last_file[candidate.number]
            last_file[candidate.number] = number
            if earlier == number:
                raise BadRecord(path, line, f"did {candidate.did!r} occurs twice in this file")
            if not earlier:
                yield candidate


def _parse_query(fields: Mapping[str, Any]) -> Query:
    row = _QueryRow.model_validate(fields)
    number = query_number(row.qid)
    positives = tuple(row.pos_cand_list or ())
    for did in positives:
        candidate_number(did)
    modality, text, image = _content(row.query_modality, row.query_txt, row.query_img_path)
    source = _source(row.query_src_content)
    return Query(row.qid, modality, text, image, positives, row.task_id, source, number)


def _parse_candidate(fields: Mapping[str, Any]) -> Candidate:
    row = _CandidateRow.model_validate(fields)
    return _candidate_of(row, candidate_number(row.did))


def _parse_checked_candidate(fields: Mapping[str, Any]) -> Candidate:
    return _candidate_of(_CandidateRow.model_validate(fields), number=-1)


def _candidate_of(row: _CandidateRow, number: int) -> Candidate:
    content = _content(row.modality, row.txt, row.img_path)
    return Candidate(row.did, *content, _source(row.src_content), number)


def _content(
    declared: str, text: str | None, image: str | None
) -> tuple[Modality, str | None, str | None]:
    """Return modality, text and image path of a record; blank parts become None.

    Raises
    ------
    BadData
        The parts do not fit the declared modality.
    """
    modality = Modality.parse(declared)
    text = composed(text) if text and text.strip() else None
    image = image if image and image.strip() else None
    has_image = image is not None
    has_text = text is not None
    needs_image = modality is not Modality.TEXT
    needs_text = modality is not Modality.IMAGE
    if (has_image, has_text) != (needs_image, needs_text):
        parts = {
            (True, True): "image and text",
            (True, False): "image",
            (False, True): "text",
            (False, False): "neither image nor text",
        }
        raise BadData(f"the modality is {declared!r}, and there is {parts[has_image, has_text]}")
    if "\0" in (image or ""):
        raise BadData(f"the image is {image!r}, and no file's name contains a NUL character")
    return modality, text, image


def _source(value: object) -> str | None:
    """Return ``src_content`` as a text; other values than texts become JSON."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def read_qrels(path: Path) -> dict[str, dict[str, int]]:
    """Read the relevance of candidates for queries.

    Lines are ``qid 0 did relevance [task]``: five columns in M-BEIR (section 1.5), four in TREC.
    Ids are any words, and a relevance above 0 means relevant.

    Raises
    ------
    BadRecord
        A line has the wrong number of columns, a relevance is not an integer, or a pair occurs
        twice with different relevance.
    """
    qrels: dict[str, dict[str, int]] = {}
    for line, raw in numbered_lines(path):
        columns = composed(raw.decode(errors="replace")).split()  # composed like ids of items
        if len(columns) not in {4, 5}:
            expected = "4 (TREC) or 5 (M-BEIR): qid 0 did relevance [task]"
            raise BadRecord(path, line, f"has {len(columns)} columns, expected {expected}")
        qid, _, did, relevance = columns[:4]
        if not _RELEVANCE.fullmatch(relevance):
            problem = f"relevance {relevance[:20]!r} is not a whole number of at most nine digits"
            raise BadRecord(path, line, problem)
        if qrels.setdefault(qid, {}).setdefault(did, int(relevance)) != int(relevance):
            raise BadRecord(path, line, f"{qid} {did} has another relevance in an earlier line")
    return qrels


InstructionKey: TypeAlias = tuple[int, Modality, Modality]
"""The number of a data set, and the modalities of its queries and of their answers."""


@dataclass(frozen=True, slots=True)
class Instructions:
    """Instructions by data set, query modality and candidate modality."""

    file: Path | None = None
    """File of the instructions; None if the data set has none, and every lookup returns ``()``."""
    rows: Mapping[InstructionKey, tuple[str, ...]] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> Instructions:
        """Read ``query_instructions.tsv``, by column position as in UniIR, and skip a header.

        ::

            text <tab> image <tab> MSCOCO <tab> 9 <tab> Find an image ... <tab> Show a photo ...
        """
        rows: dict[InstructionKey, tuple[str, ...]] = {}
        for line, raw in numbered_lines(path):
            try:
                cells = [cell.strip() for cell in next(csv.reader([raw.decode()], delimiter="\t"))]
                has_number = len(cells) > 3 and cells[3].isdecimal()
                if line == 1 and not has_number:
                    continue
                instructions = tuple(filter(None, cells[4:]))
                if not has_number or not instructions:
                    raise BadData(
                        "expected query modality, candidate modality, data set, its number and at "
                        "least one instruction, with tabs between them"
                    )
                key = (int(cells[3]), Modality.parse(cells[0]), Modality.parse(cells[1]))
            except (ValueError, csv.Error) as error:
                raise BadRecord(
                    path, line, f"cannot be used as a row of instructions: {error}"
                ) from None
            rows[key] = tuple(dict.fromkeys((*rows.get(key, ()), *instructions)))
        return Instructions(path, rows)

    def lookup(self, dataset_id: int, query: Modality, candidate: Modality) -> tuple[str, ...]:
        """Return all instructions for a data set and its modalities.

        Raises
        ------
        BadData
            The file has no row for them.
        """
        instructions = self.rows.get((dataset_id, query, candidate), ())
        if self.file is not None and not instructions:
            raise BadData(
                f"{self.file}: no instruction for data set {dataset_id}, {query} -> {candidate}; "
                f"add a row {query.mbeir}<tab>{candidate.mbeir}<tab>NAME<tab>{dataset_id}<tab>"
                "INSTRUCTION"
            )
        return instructions


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """One row of the results table: the files of one task of one data set."""

    name: str
    """Name as in file names, for example ``mscoco_task0``."""
    dataset: str
    task_id: int
    queries: Path
    qrels: Path | None
    """Path of the qrels; None if the query file itself names the positives."""
    local_pool: Path


class Layout:
    """Paths of the files in M-BEIR's layout."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def local_pool(self, name: str) -> Path:
        """Return the path of the pool of a single task."""
        return self.root / "cand_pool" / "local" / f"mbeir_{name}_cand_pool.jsonl"

    def union_pool(self, split: str) -> Path:
        """Return the path of the union pool of a split."""
        return self.root / "cand_pool" / "global" / f"mbeir_union_{split}_cand_pool.jsonl"

    def qrels(self, split: str, name: str) -> Path:
        """Return the path of a query file's qrels."""
        return self.root / "qrels" / split / f"mbeir_{name}_qrels.txt"


class MBeir(Layout):
    """A data set in M-BEIR's layout.

    >>> data = MBeir("M-BEIR")  # doctest: +SKIP
    >>> for row in data.rows("test"):  # doctest: +SKIP
    ...     print(row.name, row.local_pool)
    """

    def __init__(self, root: str | Path) -> None:
        root = as_path(root)
        if not root.is_dir():
            raise BadData(f"{root}: there is no such folder")
        absent = [name for name in ("query", "cand_pool") if not (root / name).is_dir()]
        if absent:
            raise BadData(
                f"{root} is not in M-BEIR's layout: it has no {' and no '.join(absent)} folder; "
                "expected query/<split>, cand_pool/local, and optionally qrels/<split> and "
                "instructions"
            )
        super().__init__(root)
        self.name = root.resolve().name
        self.instructions_file = root / "instructions" / "query_instructions.tsv"
        has_instructions = self.instructions_file.exists()
        self.instructions = (
            Instructions.read(self.instructions_file) if has_instructions else Instructions()
        )

    def training_queries(self) -> list[Path]:
        """Return the union training file, or the files of all data sets if it does not exist."""
        query = self.root / "query"
        return _files(query / "union_train", "*.jsonl") or _files(query / "train", "*.jsonl")

    def training_pools(self) -> list[Path]:
        """Return the union training pool, or all local pools if it does not exist."""
        union = self.union_pool("train")
        return [union] if union.exists() else self.local_pools()

    def local_pools(self) -> list[Path]:
        """Return all local pools, of all splits."""
        return _files(self.root / "cand_pool" / "local", "*_cand_pool.jsonl")

    def global_pool(self, split: str) -> list[Path]:
        """Return a split's union pool, or the local pools of its rows if it does not exist."""
        union = self.union_pool(split)
        if union.exists():
            return [union]
        return list(dict.fromkeys(row.local_pool for row in self.rows(split)))

    def query_files(self, split: str) -> dict[str, Path]:
        """Return a split's query files by the names of their rows, sorted."""
        files = _files(self.root / "query" / split, "*.jsonl")
        return {_row_name(path, split): path for path in files}

    def rows(self, split: str, *, names: Collection[str] = ()) -> list[EvaluationRow]:
        """Return the rows of a split, sorted by name: all rows, or only the ones in ``names``.

        Raises
        ------
        BadData
            The split has no queries, or a row has no local pool.
        UsageError
            No row has one of the names.
        """
        files = self.query_files(split)
        if not files:
            splits = sorted(path.name for path in (self.root / "query").iterdir())
            raise BadData(
                f"{self.root}: no queries for split {split!r}; there are: {', '.join(splits)}"
            )
        absent = [name for name in names if name not in files]
        if absent:
            raise UsageError(
                f"there is no row {absent[0]!r} in {self.root}; there are: {', '.join(files)}"
            )
        return [self.row(path, split) for name, path in files.items() if not names or name in names]

    def row(self, queries: Path, split: str) -> EvaluationRow:
        """Return the row of a query file; raises like :meth:`rows`."""
        name = _row_name(queries, split)
        parts = _ROW_NAME.match(name)
        if parts is None or int(parts["task"]) not in TASKS:
            raise BadData(
                f"{queries}: the name does not say which task it is; expected "
                f"mbeir_<data set>_task<N>_{split}.jsonl with N one of {', '.join(map(str, TASKS))}"
            )
        pools = map(self.local_pool, (f"{name}_{split}", name))
        pool = next((path for path in pools if path.exists()), None)
        if pool is None:
            raise BadData(
                f"{queries}: no local pool for it; expected {self.local_pool(name)} "
                f"(or mbeir_{name}_{split}_cand_pool.jsonl)"
            )
        qrels = self.qrels(split, f"{name}_{split}")
        return EvaluationRow(
            name=name,
            dataset=parts["dataset"],
            task_id=int(parts["task"]),
            queries=queries,
            qrels=qrels if qrels.exists() else None,
            local_pool=pool,
        )

    def image_path(self, relative: str) -> Path:
        """Return the absolute path of an image.

        Raises
        ------
        BadData
            The path leads out of the data set's folder.
        """
        if relative.startswith("/") or ".." in relative.split("/"):
            raise BadData(
                f"{self.root}: image path {relative!r} leads out of the data set's folder"
            )
        return self.root / relative


def _row_name(queries: Path, split: str) -> str:
    """Return ``mscoco_task0`` for ``mbeir_mscoco_task0_test.jsonl``."""
    return queries.stem.removeprefix("mbeir_").removesuffix(f"_{split}")


def _files(folder: Path, pattern: str) -> list[Path]:
    """Return the files that match a pattern, sorted and without hidden files."""
    return sorted(path for path in folder.glob(pattern) if not path.name.startswith("."))


def read_judgements(row: EvaluationRow, qids: Sequence[str]) -> dict[str, Mapping[str, int]]:
    """Return the relevance judgements of queries, from a row's qrels or else its query file.

    Raises
    ------
    BadData
        A query has no judgements.
    """
    judgements: Mapping[str, Mapping[str, int]]
    if row.qrels is not None:
        judgements = read_qrels(row.qrels)
    else:
        queries = read_queries(row.queries)
        judgements = {query.qid: dict.fromkeys(query.positives, 1) for query in queries}
    missing = [qid for qid in qids if qid not in judgements]
    if missing:
        raise BadData(f"{row.qrels}: no line for query {missing[0]} and {len(missing) - 1} others")
    return {qid: judgements[qid] for qid in qids}


@dataclass(slots=True)
class Finding:
    """A type of problem, with the number of its occurrences and the first examples."""

    kind: str
    """Name of the type in lower case, such as ``bad-image`` or ``duplicate-id``."""
    severity: Literal["error", "warning"]
    """Severity; a data set with warnings can be used."""
    count: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The result of a check; JSON-able through ``dataclasses.asdict``."""

    records: dict[str, int]
    """Number of usable queries or candidates in each file, by its path in the folder."""
    findings: list[Finding]
    """Errors, then warnings, both in alphabetical order."""

    @property
    def ok(self) -> bool:
        """Whether the data set has no errors; it may have warnings."""
        return all(finding.severity != "error" for finding in self.findings)


def check(root: Path, *, images: bool = True) -> CheckReport:
    """Check a folder in M-BEIR's layout; with ``images``, decode every image.

    Raises
    ------
    BadData
        The folder is not in M-BEIR's layout.
    """
    data = MBeir(root)
    checker = _Checker(data)
    global_pools = sorted((root / "cand_pool" / "global").glob("*_cand_pool.jsonl"))
    for path in [*data.local_pools(), *global_pools]:
        checker.check_pool(path)
    for split in sorted(path.name for path in (root / "query").iterdir() if path.is_dir()):
        for path in data.query_files(split).values():
            checker.check_queries(path, split)
    if data.instructions.file is None:
        missing = f"{data.instructions_file} is missing: queries are read without instructions"
        checker.add_problem("no-instructions", missing, severity="warning")
    if images:
        checker.check_images()
    findings = sorted(
        checker.findings.values(), key=lambda finding: (finding.severity, finding.kind)
    )
    return CheckReport(dict(checker.records), findings)


class _Checker:
    """Checks pools, then queries against pools and instructions, and each picture once."""

    def __init__(self, data: MBeir) -> None:
        self.data = data
        self.records: Counter[str] = Counter()
        self.images: set[str] = set()
        self.findings: dict[str, Finding] = {}
        self._pools: dict[Path, IdColumn] = {}
        """For each pool, 1 for the ids of its candidates."""
        self._modalities = IdColumn()
        """Modality codes of the candidates of all pools, plus 1; 0 for unknown ids."""

    def add_problem(
        self, name: str, example: str, severity: Literal["error", "warning"] = "error"
    ) -> None:
        """Count a problem, and keep the first examples of its type."""
        finding = self.findings.setdefault(name, Finding(name, severity))
        finding.count += 1
        if finding.count <= MAX_FINDING_EXAMPLES:
            finding.examples.append(example)

    def check_pool(self, path: Path) -> None:
        """Check one file of candidates."""
        members = self._pools[path] = IdColumn()
        for candidate in read_candidates(path, on_bad=self._add_bad_line):
            self._count_record(path, candidate.image)
            if members[candidate.number]:
                self.add_problem("duplicate-id", f"{path}: did {candidate.did} occurs again")
            members[candidate.number] = 1
            self._modalities[candidate.number] = candidate.modality.code + 1

    def check_queries(self, path: Path, split: str) -> None:
        """Check one file of queries; in an evaluation split, also against the pool of its row."""
        pool = self._modalities
        if split != "train" and not split.startswith("union_"):
            try:
                pool = self._pools[self.data.row(path, split).local_pool]
            except BadData as error:
                self.add_problem("layout", str(error))
        for query in read_queries(path, on_bad=self._add_bad_line):
            location = f"{path}: qid {query.qid}"
            self._count_record(path, query.image)
            if not query.positives:
                self.add_problem("no-positives", location, severity="warning")
            elif not any(pool[candidate_number(did)] for did in query.positives):
                self.add_problem(
                    "positives-outside-pool",
                    f"{location}: none of its positives ({', '.join(query.positives[:3])}) is in "
                    "the pool; add the candidate's line, or fetch the pool again",
                )
            self._check_instruction(query, location)

    def _check_instruction(self, query: Query, location: str) -> None:
        """Check that a query has an instruction for its first positive in any pool."""
        codes = (self._modalities[candidate_number(did)] for did in query.positives)
        code = next(filter(None, codes), 0)
        if not code:
            return
        target = list(Modality)[code - 1]
        try:
            self.data.instructions.lookup(query.dataset, query.modality, target)
        except BadData as error:
            self.add_problem("missing-instruction", f"{location}: {error}")

    def check_images(self) -> None:
        """Decode all images."""

        def problem_of(relative: str) -> str | None:
            try:
                open_image(self.data.image_path(relative), shortest_side=SHORTEST_SIDE)
            except BadData as error:
                return str(error)
            return None

        names = sorted(self.images)
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for start in range(0, len(names), _CHECKED_AT_ONCE):
                batch = names[start : start + _CHECKED_AT_ONCE]
                for problem in filter(None, threads.map(problem_of, batch)):
                    self.add_problem("bad-image", problem)

    def _add_bad_line(self, error: BadRecord) -> None:
        self.add_problem("bad-line", str(error))

    def _count_record(self, path: Path, image: str | None) -> None:
        self.records[path.relative_to(self.data.root).as_posix()] += 1
        if image is not None:
            self.images.add(image)
