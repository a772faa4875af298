"""Draws a stand-in for M-BEIR: its files and field conventions, all 16 rows, at any share of its size.

With it a whole run (check, fit, evaluate, index) can be rehearsed before 169 GB are downloaded. Every query
and candidate is computed from its number, so files of any size are written without keeping anything.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

from genius.artifact import write_json
from genius.data.catalogue_drawing import font_file
from genius.data.instructions import write_instructions
from genius.data.rehearsal_concepts import Concepts
from genius.data.rehearsal_layout import SPLITS, Asking, Layout, lay_out
from genius.data.rehearsal_pictures import Pictures
from genius.data.rehearsal_records import Records, Row
from genius.data.rehearsal_sizes import ROWS, UPSAMPLED
from genius.data.rehearsal_wordings import INSTRUCTIONS
from genius.data.writing import appearing_whole
from genius.errors import UsageError

VERSION: Final = 1
"""Raised whenever the same seed would give other bytes."""
CONCEPTS: Final = 100_000
"""Different things at full size; a share of M-BEIR has that share of them."""
FEWEST_CONCEPTS: Final = 48


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsalSummary:
    """What was drawn."""

    folder: Path
    share: float
    """Of M-BEIR's size; small rows have some dozens of everything all the same."""
    seed: int
    rows: int
    concepts: int
    """Different things, each with its own picture."""
    candidates: dict[str, int]
    """Candidates of each split's union pool."""
    queries: dict[str, int]
    """Queries of each split, all rows together."""
    training_lines: int
    """Of the union training file, which repeats the queries of small data sets."""
    pictures: int
    """Picture files; 0 without pictures."""
    drawn: bool
    """False when the same rehearsal was already there."""


def draw_rehearsal(
    out: Path, *, share: float, seed: int = 0, pictures: int | None = None
) -> RehearsalSummary:
    """Write a stand-in for M-BEIR at a share of its size.

    Parameters
    ----------
    share
        0.01 has 56,000 candidates, 1.0 all 5,609,079.
    pictures
        different things to tell apart, each drawn once for news, fashion, encyclopedia and everyday
        pictures; the files of the data set are links to these drawings. 0 writes the paths and no files:
        then only an encoder that looks features up by id (``precomputed:``) can be used. Default: 100,000
        times the share, and 48 at least.

    >>> draw_rehearsal(Path("rehearsal"), share=0.01)  # doctest: +SKIP

    Raises
    ------
    UsageError
        a number is out of range, or ``out`` holds something else.
    """
    _check(share, seed, pictures)
    wanted = pictures != 0
    plan = {"rehearsal": VERSION, "share": share, "seed": seed, "pictures": pictures}
    found = _already_there(out, plan)
    if found is not None:
        return _summary(out, found, drawn=False)
    if wanted:
        font_file()
    unfinished = out.parent / f".{out.name}.partial"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    layout = lay_out([row.scaled(share) for row in ROWS])
    concepts = Concepts(pictures or max(FEWEST_CONCEPTS, round(CONCEPTS * share)), seed=seed)
    placed = Pictures(unfinished, concepts, wanted=wanted)
    counts = _Writer(unfinished, layout, Records(concepts, placed, seed=seed)).write()
    placed.finish()
    facts = {"plan": plan, "counts": {"concepts": len(concepts), "pictures": placed.count, **counts}}
    write_json(unfinished / "rehearsal.json", facts)
    if out.exists():
        out.rmdir()
    unfinished.rename(out)
    return _summary(out, facts, drawn=True)


class _Writer:
    """Writes the files; the pictures come along with the rows."""

    def __init__(self, root: Path, layout: Layout, records: Records) -> None:
        self._root = root
        self._layout = layout
        self._records = records

    def write(self) -> dict[str, Any]:
        """Write everything; what there is."""
        write_instructions(self._root / "instructions" / "query_instructions.tsv", INSTRUCTIONS)
        pools = {"train": self._training_pool(), "test": self._local_pools(), "val": self._validation_pool()}
        queries = {split: sum(asking.size for asking in self._layout.of(split)) for split in SPLITS}
        lines = self._training_queries()
        for split in ("val", "test"):
            self._queries(split)
        union = self._root / "query" / "union_val" / "mbeir_union_val.jsonl"
        _concatenate(union, sorted((self._root / "query" / "val").glob("*.jsonl")))
        return {
            "candidates": {split: pools[split] for split in SPLITS},
            "queries": queries,
            "training_lines": lines,
        }

    def _local_pools(self) -> int:
        """Every row's own pool; the union of the test pools, in the order of the papers' tables."""
        own, total = [], 0
        for shelf in self._layout.shelves:
            if shelf.kind == "train":
                continue
            has_two = bool(shelf.row.val_pool)
            split = "" if not has_two else "_val" if shelf.kind == "val" else "_test"
            path = self._root / "cand_pool" / "local" / f"mbeir_{shelf.row.name}{split}_cand_pool.jsonl"
            count = _write_lines(path, self._records.candidates(shelf))
            if shelf.kind == "local":
                own.append(path)
                total += count
        _concatenate(self._union("test"), own)
        return total

    def _training_pool(self) -> int:
        shelves = [shelf for shelf in self._layout.shelves if shelf.kind == "train"]
        return _write_lines(self._union("train"), chain.from_iterable(map(self._records.candidates, shelves)))

    def _validation_pool(self) -> int:
        """What the validation queries ask for."""
        return _write_lines(
            self._union("val"),
            (
                self._records.candidate(asking.shelf, member)
                for asking in self._layout.of("val")
                for member in asking.shelf.part(asking.first_block, asking.blocks)
            ),
        )

    def _union(self, split: str) -> Path:
        return self._root / "cand_pool" / "global" / f"mbeir_union_{split}_cand_pool.jsonl"

    def _queries(self, split: str) -> None:
        for asking in self._layout.askings:
            if asking.split != split:
                continue
            name = f"mbeir_{asking.row.name}_{split}"
            _write_lines(self._root / "query" / split / f"{name}.jsonl", self._records.queries(asking))
            self._qrels(split, f"{name}_qrels.txt", [asking])

    def _training_queries(self) -> int:
        """A file for each data set, and all in one, where small data sets are repeated."""
        askings: dict[str, list[Asking]] = {}
        for asking in self._layout.of("train"):
            askings.setdefault(asking.row.dataset, []).append(asking)
        lines: dict[Path, int] = {}
        for dataset, some in askings.items():
            path = self._root / "query" / "train" / f"mbeir_{dataset}_train.jsonl"
            size = _write_lines(path, chain.from_iterable(map(self._records.queries, some)))
            real = sum(row.train for row in ROWS if row.dataset == dataset)
            lines[path] = round(size * max(1.0, UPSAMPLED.get(dataset, 0) / real))
            self._qrels("train", f"mbeir_{dataset}_train_qrels.txt", some)
        whole = self._root / "query" / "union_train" / "mbeir_union_up_train.jsonl"
        with appearing_whole(whole) as union:
            for path, count in lines.items():
                union.writelines(islice(_repeated(path), count))
        return sum(lines.values())

    def _qrels(self, split: str, name: str, askings: Iterable[Asking]) -> None:
        with appearing_whole(self._root / "qrels" / split / name) as file:
            for asking in askings:
                for number in range(asking.size):
                    qid, task = asking.qid(number), asking.row.task_id
                    file.writelines(
                        f"{qid} 0 {did} 1 {task}\n" for did in asking.positives(asking.block(number))
                    )


def _repeated(path: Path) -> Iterator[str]:
    """The lines of a file, from the beginning again when it ends."""
    while True:
        with path.open(encoding="utf-8") as file:
            yield from file


def _write_lines(path: Path, rows: Iterable[Row]) -> int:
    count = 0
    with appearing_whole(path) as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            count += 1
    return count


def _concatenate(path: Path, parts: Iterable[Path]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as whole:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, whole, 1 << 20)


def _check(share: float, seed: int, pictures: int | None) -> None:
    if not 0 < share <= 1:
        raise UsageError(f"share is {share}; give a number above 0 and up to 1, the whole of M-BEIR's size")
    if seed < 0:
        raise UsageError(f"seed is {seed}; give a number from 0 up")
    if pictures is not None and not 0 <= pictures <= CONCEPTS:
        raise UsageError(f"pictures is {pictures:,}; give a number up to {CONCEPTS:,}, or none")


def _already_there(out: Path, plan: dict[str, Any]) -> dict[str, Any] | None:
    """What is known about the same rehearsal at ``out``; None if the place is free."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; give a folder that does not exist yet")
    if not out.exists() or not any(out.iterdir()):
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        found: dict[str, Any] = json.loads((out / "rehearsal.json").read_text())
        if found["plan"] == plan:
            return found
    raise UsageError(
        f"{out} is not empty and does not hold this rehearsal (share {plan['share']}, seed {plan['seed']}); "
        "give another folder, or remove this one"
    )


def _summary(out: Path, facts: dict[str, Any], *, drawn: bool) -> RehearsalSummary:
    plan = facts["plan"]
    return RehearsalSummary(
        folder=out, share=plan["share"], seed=plan["seed"], rows=len(ROWS), drawn=drawn, **facts["counts"]
    )
