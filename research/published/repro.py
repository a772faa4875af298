"""``python -m research.published.repro``: reproduce a published row of M-BEIR, Flickr30K or COCO."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import tyro

from genius_search.cli.options import JsonOption, OptionalFolder, command
from genius_search.cli.terminal import TerminalProgress, print_json, print_text
from genius_search.data.mbeir import MBeir
from genius_search.errors import ArtifactMissing, UsageError
from genius_search.model import Genius
from genius_search.records import TASKS, Modality
from research.command import run
from research.evaluate import evaluate
from research.published.numbers import (
    CAPTION_RESULTS,
    COMPARABLE,
    PAPER_BEAM,
    SIZES,
    TOLERANCE,
    RowSize,
    expected_size,
    format_percent,
    references,
)
from research.results import ResultRow, in_order, print_results, published_beside, to_json
from research.settings import EvaluationConfig, Pool

UNION_POOL: Final = "cand_pool/global/mbeir_union_test_cand_pool.jsonl"
INSTRUCTIONS: Final = "instructions/query_instructions.tsv"
METHODS: Final = tuple(COMPARABLE)
INSTRUCTION_CHOICE: Final = "first"
SCORES: Final = "vocabulary"
"""Probabilities are normalised over the whole vocabulary, as the authors' code does."""


CAPTION_SETS: Final = {"flickr30k": "flickr30k_task0", "coco": "mscoco_task0"}
"""Data sets that `research.karpathy` makes, and the row of each that is compared."""
CAPTION_SIZES: Final = {"flickr30k": RowSize(5_000, 1_000), "coco": RowSize(24_809, 5_000)}
"""Different captions and pictures of the test split."""
NAMES: Final = (*SIZES, "all", *CAPTION_SETS)


def needed_files(name: str, pools: Sequence[Pool]) -> list[str]:
    """Return the files and folders that reproducing one of :data:`NAMES` needs.

    They are relative to the data set. Raises UsageError: there is no such row, or it has no such pool.
    """
    if name not in NAMES:
        raise UsageError(f"there is no row {name!r} to reproduce; choose one of {', '.join(NAMES)}")
    rows = rows_of(name)
    if name in CAPTION_SETS:
        if "global" in pools:
            raise UsageError(f"{name} has one pool; give --pools local")
        files = [f"mbeir_images/{rows[0].split('_')[0]}"]
    else:
        files = [INSTRUCTIONS, *picture_folders(rows)]
        if "global" in pools:
            files += [UNION_POOL, *picture_folders(tuple(SIZES))]
    return list(dict.fromkeys([*files, *(path for row in rows for path in row_files(row))]))


def rows_of(name: str) -> tuple[str, ...]:
    """Return the rows that a name stands for."""
    return tuple(SIZES) if name == "all" else (CAPTION_SETS.get(name, name),)


def row_files(name: str) -> tuple[str, str, str]:
    """Return the paths of a row's queries, local pool and qrels, relative to the data set."""
    split = "_test" if name.startswith(("mscoco", "flickr30k")) else ""
    return (
        f"query/test/mbeir_{name}_test.jsonl",
        f"cand_pool/local/mbeir_{name}{split}_cand_pool.jsonl",
        f"qrels/test/mbeir_{name}_test_qrels.txt",
    )


def picture_folders(rows: Sequence[str]) -> list[str]:
    """Return the folders of pictures that the queries and pools of some rows refer to."""
    pictured = [row for row in rows if set(TASKS[int(row.rpartition("_task")[2])]) != {Modality.TEXT}]
    # InfoSeek shows the pictures of OVEN.
    datasets = [row.split("_")[0].replace("infoseek", "oven") for row in pictured]
    return list(dict.fromkeys(f"mbeir_images/{name}_images" for name in datasets))


def differing_rows(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Return the rows of exact search that are not within the tolerance of the released CLIP_SF."""
    return [
        row
        for row in in_order(rows)
        if row.method == "exact-raw" and row.score is not None
        for one in published_beside(row)
        if one.weights == "released" and abs(100 * row.score - one.value) > TOLERANCE
    ]


def why_not_compared(name: str, rows: Sequence[ResultRow]) -> str | None:
    """Return why no published number stands beside any of ours; None where at least one does."""
    sizes = [CAPTION_SIZES.get(name) or expected_size(row.name, row.pool) for row in rows]
    if any((row.queries, row.pool_size) == size for row, size in zip(rows, sizes, strict=True)):
        return None
    first, size = rows[0], sizes[0] or RowSize(0, 0)
    return (
        f"nothing was compared: no row has the size of the published test data ({first.name}, {first.pool}: "
        f"{first.queries:,} of {size.queries:,} queries, pool {first.pool_size:,} of {size.pool:,})"
    )


@command
class Repro(JsonOption):
    """Reproduce a published row: list the files it needs; with --model, evaluate and compare.

    ROW is one of M-BEIR's 16 rows as in its file names (mscoco_task3), all, flickr30k or coco. Exit status 1
    if exact search differs from the released CLIP_SF by more than 0.3 points, or if nothing was compared
    because the data has other sizes than the published numbers are for; 4 if files are missing.
    """

    row: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ROW")]
    """Name of a row, all, flickr30k or coco."""

    data: Path
    """M-BEIR, or the converted captions."""

    model: OptionalFolder = None
    """Folder of the model: the published checkpoints, imported."""

    out: OptionalFolder = None
    """Folder for features and runs; default: evaluation/ in the model's folder."""

    pools: tuple[Pool, ...] = ("local",)
    """Each row's own pool, the union of all pools, or both."""

    device: str = "cpu"
    """Device of the model: cpu or cuda."""

    def run(self) -> int:
        """List what a reproduction needs, or reproduce as the published numbers were measured.

        That is with the first instruction of each query (as pyserini does), a beam of 50, and the released
        code's scores.
        """
        files, rows = needed_files(self.row, self.pools), rows_of(self.row)
        missing = [path for path in files if not (self.data / path).exists()]
        if self.model is None:
            print_text(f"Files in {self.data} for the {' and the '.join(self.pools)} pool:")
            for path in files:
                print_text(f"  {'missing' if path in missing else 'there  '}  {path}")
            self.print_published(rows)
            return 0
        if missing:
            raise ArtifactMissing(
                f"{len(missing)} of {len(files)} files are missing in {self.data}, first {missing[0]}; "
                "research/README.md says how to get them"
            )
        config = EvaluationConfig(
            pools=self.pools,
            methods=METHODS,
            rows=rows,
            beam=PAPER_BEAM,
            scores=SCORES,
            instructions=INSTRUCTION_CHOICE,
        )
        with TerminalProgress() as progress:
            model = Genius.open(self.model, device=self.device)
            folder = self.out or self.model / "evaluation"
            found = in_order(evaluate(MBeir(self.data), model, config, folder, progress=progress).rows)
            reason = why_not_compared(self.row, found)
            if reason:
                progress.say(reason)
        if self.json:
            print_json({**to_json(found), "compared": reason is None})
        else:
            print_results(found)
            if self.row in CAPTION_SETS:
                self.print_published(rows)
        differing = differing_rows(found)
        for row in differing:
            print_text(f"{row.name}, {row.pool}: exact search differs from the released CLIP_SF", error=True)
        return 1 if reason or differing else 0

    def print_published(self, rows: Sequence[str]) -> None:
        """Print the numbers that a reproduction is compared with."""
        print_text(f"Published (exact-raw has to lie within {TOLERANCE} of the released weights):")
        for row in rows:
            for pool in self.pools:
                for method in METHODS:
                    for one in references(row, pool, method):
                        number = f"{format_percent(one.value)} ({one.system}, {one.weights})"
                        print_text(f"  {row}, {pool}, {method}: {number}")
        for result in CAPTION_RESULTS if self.row in CAPTION_SETS else ():
            if rows[0].startswith(result.dataset):
                recalls = " / ".join(map(format_percent, result.recalls))
                print_text(f"  {result.system}, trained on {result.trained_on}: R@1/5/10 {recalls}")


main = partial(run, Repro, "published.repro")


if __name__ == "__main__":
    sys.exit(main())
