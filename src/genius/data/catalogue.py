"""Draws a product-like world and writes it in M-BEIR's layout: all eight tasks, exact ground truth, offline.

Every product of a split has a picture, a caption, a card (picture and text) and two facts in the pool. What
answers a query is known by construction: texts name every attribute, pictures show every attribute, and no
two products are alike. ``src_content`` tells the product of each row, so that anybody can check this; no
encoder reads it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

from genius.artifact import write_json
from genius.data.catalogue_drawing import draw, font_file, save
from genius.data.catalogue_rows import (
    DATASET_ID,
    KIND_OF_TASK,
    KINDS,
    PER_PRODUCT,
    PictureShard,
    SplitRows,
    plan_asks,
)
from genius.data.catalogue_wordings import INSTRUCTIONS
from genius.data.catalogue_world import Split, sample_products, split_of_products
from genius.data.instructions import InstructionRow, write_instructions
from genius.data.records import TASKS
from genius.data.writing import write_candidates, write_qrels, write_queries
from genius.errors import UsageError

DATASET: Final = "catalogue"
VERSION: Final = 1
"""Raised whenever the same seed would give other bytes."""
MIN_ITEMS: Final = 1_000
MAX_ITEMS: Final = 1_000_000
MAX_TRAIN_PRODUCTS: Final = 60_000
"""Eight queries of each stay below M-BEIR's 500,000 query ids."""
MAX_QUERIES_PER_TASK: Final = 60_000
VAL_CANDIDATES: Final = 2_000
_ALONE: Final = 20_000
"""Up to this many pictures are drawn without starting other processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogueSummary:
    """What was drawn."""

    folder: Path
    items: int
    """Candidates of the test pool."""
    seed: int
    products: dict[str, int]
    """Products of each split."""
    candidates: dict[str, int]
    """Candidates of each split's union pool."""
    queries: dict[str, int]
    """Queries of each split, all tasks together."""
    pictures: int
    drawn: bool
    """False when the same catalogue was already there."""


def draw_catalogue(
    out: Path,
    *,
    items: int,
    seed: int = 0,
    train_products: int | None = None,
    queries_per_task: int = 1_000,
    workers: int | None = None,
) -> CatalogueSummary:
    """Draw a world whose test pool has ``items`` candidates, and write it in M-BEIR's layout.

    The same seed and sizes give the same bytes, whatever the number of ``workers`` (default: all processors
    when there is much to draw). ``train_products`` follows ``items`` between 2,000 and 12,000 if not given.
    When that very catalogue is already at ``out``, nothing is done.

    >>> draw_catalogue(Path("catalogue"), items=10_400, seed=1)  # doctest: +SKIP

    Raises
    ------
    UsageError
        ``items`` is not between 1,000 and 1,000,000, another number is out of range, or ``out`` holds
        something else.
    """
    if train_products is None:
        train_products = min(max(items, 2_000), 12_000)
    _check("items", items, MIN_ITEMS, MAX_ITEMS)
    _check("seed", seed, 0, 2**63 - 1)
    _check("train_products", train_products, 1, MAX_TRAIN_PRODUCTS)
    _check("queries_per_task", queries_per_task, 1, MAX_QUERIES_PER_TASK)
    if workers is not None:
        _check("workers", workers, 1, 1_024)
    plan = {
        "catalogue": VERSION,
        "items": items,
        "seed": seed,
        "train_products": train_products,
        "queries_per_task": queries_per_task,
    }
    found = _already_there(out, plan)
    if found is not None:
        return _summary(out, found, drawn=False)
    font_file()
    unfinished = out.parent / f".{out.name}.partial"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    worlds = _plan_splits(items, seed, train_products, queries_per_task)
    counts = {
        "products": {rows.split: len(rows.codes) for rows in worlds},
        "candidates": {rows.split: rows.num_candidates for rows in worlds},
        "queries": {rows.split: sum(map(len, rows.asks.values())) for rows in worlds},
        "pictures": _write(unfinished, worlds, workers),
    }
    facts = {"plan": plan, "counts": counts}
    write_json(unfinished / "catalogue.json", facts)
    unfinished.rename(out)
    return _summary(out, facts, drawn=True)


def _check(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UsageError(f"{name} is {value:,}; give a number from {low:,} to {high:,}")


def _already_there(out: Path, plan: dict[str, int]) -> dict[str, Any] | None:
    """What is known about the same catalogue at ``out``; None if the place is free."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; give a folder that does not exist yet")
    if not out.exists() or not any(out.iterdir()):
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        found: dict[str, Any] = json.loads((out / "catalogue.json").read_text())
        if found["plan"] == plan:
            return found
    raise UsageError(
        f"{out} is not empty and does not hold this catalogue ({plan['items']:,} items, seed {plan['seed']}, "
        f"{plan['train_products']:,} training products, {plan['queries_per_task']:,} queries per task); "
        "give another folder, or remove this one"
    )


def _summary(out: Path, facts: dict[str, Any], *, drawn: bool) -> CatalogueSummary:
    plan, counts = facts["plan"], facts["counts"]
    return CatalogueSummary(folder=out, items=plan["items"], seed=plan["seed"], drawn=drawn, **counts)


def _plan_splits(items: int, seed: int, train_products: int, queries_per_task: int) -> list[SplitRows]:
    """Decide what each split holds; candidate ids run through test, val, train."""
    splits = split_of_products(seed)
    wanted: dict[Split, int] = {
        "test": items,
        "val": min(VAL_CANDIDATES, items // 4),
        "train": train_products * PER_PRODUCT,
    }
    rows, first_did = [], 1
    for split, num_candidates in wanted.items():
        codes = sample_products(split, num_candidates // PER_PRODUCT, splits=splits, seed=seed)
        per_task = len(codes) if split == "train" else min(queries_per_task, len(codes))
        asks = plan_asks(split, codes, per_task=per_task, splits=splits, seed=seed)
        rows.append(SplitRows(split, seed, codes, first_did, num_candidates, asks))
        first_did += num_candidates
    return rows


def _write_split(root: Path, rows: SplitRows) -> None:
    """Write a split's pools, queries and qrels; the training split has them in one piece only."""
    pools, split = root / "cand_pool", rows.split
    if split == "train":
        write_candidates(
            pools / "global" / "mbeir_union_train_cand_pool.jsonl",
            chain.from_iterable(map(rows.candidates, KINDS)),
        )
        write_queries(
            root / "query" / "union_train" / "mbeir_union_up_train.jsonl",
            chain.from_iterable(map(rows.queries, TASKS)),
        )
        return
    files = {task: pools / "local" / f"mbeir_{DATASET}_task{task}_{split}_cand_pool.jsonl" for task in TASKS}
    union = pools / "global" / f"mbeir_union_{split}_cand_pool.jsonl"
    union.parent.mkdir(parents=True, exist_ok=True)
    with union.open("wb") as whole:
        for kind in KINDS:
            first, *others = (file for task, file in files.items() if KIND_OF_TASK[task] == kind)
            write_candidates(first, rows.candidates(kind))
            for other in others:
                shutil.copyfile(first, other)
            with first.open("rb") as part:
                shutil.copyfileobj(part, whole)
    for task in TASKS:
        name = f"mbeir_{DATASET}_task{task}_{split}"
        write_queries(root / "query" / split / f"{name}.jsonl", rows.queries(task))
        write_qrels(root / "qrels" / split / f"{name}_qrels.txt", rows.queries(task))
    write_queries(
        root / "query" / f"union_{split}" / f"mbeir_union_{split}.jsonl",
        chain.from_iterable(map(rows.queries, TASKS)),
    )


def _write(root: Path, worlds: list[SplitRows], workers: int | None) -> int:
    """Write all files; how many pictures there are. Other processes, if any, draw while this one writes."""
    if workers is None:
        few = sum(2 * len(rows.codes) + sum(map(len, rows.asks.values())) for rows in worlds) <= _ALONE
        workers = 1 if few else os.cpu_count() or 1
    shards = chain.from_iterable(rows.shards() for rows in worlds)
    draw_shard = partial(_draw_shard, root)
    if workers == 1:
        _write_texts(root, worlds)
        return sum(map(draw_shard, shards))
    with multiprocessing.Pool(workers) as pool:
        drawn = pool.imap_unordered(draw_shard, shards)
        _write_texts(root, worlds)
        return sum(drawn)


def _write_texts(root: Path, worlds: list[SplitRows]) -> None:
    write_instructions(
        root / "instructions" / "query_instructions.tsv",
        (InstructionRow(*TASKS[task], DATASET, DATASET_ID, texts) for task, texts in INSTRUCTIONS.items()),
    )
    for rows in worlds:
        _write_split(root, rows)


def _draw_shard(root: Path, shard: PictureShard) -> int:
    """Draw one share; how many pictures there were."""
    pictures = list(shard.pictures())
    for folder in {(root / picture.path).parent for picture in pictures}:
        folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        save(draw(picture.product, picture.pose), root / picture.path)
    return len(pictures)
