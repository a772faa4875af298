"""``genius repro``: reproduce a published row of M-BEIR, Flickr30K or COCO and compare the numbers."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from genius_search.data.mbeir import MBeir
from genius_search.embed_mbeir import count_lines
from genius_search.errors import ArtifactMissing, UsageError
from genius_search.hub.checkpoints import CHECKPOINTS
from genius_search.lab.evaluate import EvaluationConfig, evaluate
from genius_search.lab.published_numbers import (
    CAPTION_RESULTS,
    COMPARABLE,
    MTEB_REVISIONS,
    PAPER_BEAM,
    SIZES,
    TOLERANCE,
    UNION_SIZE,
    CaptionResult,
    Pool,
    Reference,
    RowSize,
    references,
)
from genius_search.lab.results import ResultRow, in_order, published_beside
from genius_search.model import MODEL_FILE, Genius
from genius_search.progress import Progress
from genius_search.records import TASKS, Modality

DATA_REPOSITORY: Final = "TIGER-Lab/M-BEIR"
UNION_POOL: Final = "cand_pool/global/mbeir_union_test_cand_pool.jsonl"
INSTRUCTIONS: Final = "instructions/query_instructions.tsv"
ARCHIVE: Final = "mbeir_images.tar.gz.part-*"
"""Four parts, 169.3 GB together."""
METHODS: Final = tuple(COMPARABLE)
INSTRUCTION_CHOICE: Final = "first"
SCORES: Final = "vocabulary"
"""Probabilities are normalised over the whole vocabulary, as the authors' code does."""


class CaptionSet(NamedTuple):
    """A data set that `genius data karpathy` makes from Karpathy's JSON."""

    dataset: str
    dataset_id: int
    json: str
    size: RowSize
    """Different captions and pictures of the test split."""


CAPTION_SETS: Final = {
    "flickr30k": CaptionSet("flickr30k", 10, "dataset_flickr30k.json", RowSize(5_000, 1_000)),
    "coco": CaptionSet("mscoco", 9, "dataset_coco.json", RowSize(24_809, 5_000)),
}
NAMES: Final = (*SIZES, "all", *CAPTION_SETS)


def query_file(name: str) -> str:
    """Return the path of a row's queries, relative to the data set."""
    return f"query/test/mbeir_{name}_test.jsonl"


def pool_file(name: str) -> str:
    """Return the path of a row's local pool; MSCOCO's and Flickr30K's have the split in their names."""
    split = "_test" if name.startswith(("mscoco", "flickr30k")) else ""
    return f"cand_pool/local/mbeir_{name}{split}_cand_pool.jsonl"


def qrels_file(name: str) -> str:
    """Return the path of a row's qrels."""
    return f"qrels/test/mbeir_{name}_test_qrels.txt"


def picture_folders(rows: Sequence[str]) -> list[str]:
    """Return the folders of pictures that the queries and pools of some rows refer to."""
    pictured = [row for row in rows if set(TASKS[int(row.rpartition("_task")[2])]) != {Modality.TEXT}]
    datasets = [row.split("_")[0] for row in pictured]
    # InfoSeek shows the pictures of OVEN.
    return list(dict.fromkeys(f"mbeir_images/{name.replace('infoseek', 'oven')}_images" for name in datasets))


@dataclass(frozen=True, kw_only=True, slots=True)
class Reproduction:
    """A published row to reproduce: the files it needs and the numbers it is compared with."""

    name: str
    rows: tuple[str, ...]
    data: Path
    model: Path | None
    pools: tuple[Pool, ...]
    """Pools to evaluate: those asked for, or every pool whose files are there (the local one if none is)."""
    files: tuple[str, ...]
    """Files and folders that the pools need, relative to ``data``."""
    captions: CaptionSet | None = None

    @property
    def missing(self) -> list[str]:
        """Files and folders that are not there."""
        return [path for path in self.files if not (self.data / path).exists()]

    @property
    def has_model(self) -> bool:
        """True if there is a finished model."""
        return self.model is not None and (self.model / MODEL_FILE).exists()

    @property
    def targets(self) -> list[tuple[str, Pool, str, Reference]]:
        """Row, pool, method and published number of each comparison."""
        return [
            (row, pool, method, reference)
            for pool in self.pools
            for row in self.rows
            for method in METHODS
            for reference in references(row, pool, method)
        ]

    @property
    def caption_targets(self) -> list[CaptionResult]:
        """Published recalls on the caption data set, if it is one."""
        name = None if self.captions is None else self.captions.dataset
        return [one for one in CAPTION_RESULTS if one.dataset == name]

    @property
    def mteb_copies(self) -> list[str]:
        """Repositories and revisions of mteb's copies: the local pools with their pictures."""
        if self.name == "flickr30k":
            return ["mteb/flickr30kt2i@e819702b287bfbe084e129a61f308a802b7c108e"]
        names = {"infoseek_task8": "InfoSeekIT2ITRetrieval"}
        known = [row for row in self.rows if row in MTEB_REVISIONS]
        return [f"mteb/{names.get(row, f'mbeir_{row}')}@{MTEB_REVISIONS[row]}" for row in known]

    @property
    def commands(self) -> list[str]:
        """Shell commands that lead from what is there to the numbers."""
        return [*self._data_commands(), *self._model_commands(), self._run_command()]

    def require(self) -> None:
        """Raise ArtifactMissing if the model or a file is missing."""
        problems: list[str] = []
        if not self.has_model:
            problems.append(f"no model at {self.model} (it has no {MODEL_FILE})")
        if self.missing:
            count = f"{len(self.missing)} of {len(self.files)}"
            problems.append(f"{count} files are missing in {self.data}, the first is {self.missing[0]}")
        if problems:
            raise ArtifactMissing(
                f"{self.name} cannot be reproduced yet: {'; '.join(problems)}; without --run the command "
                "lists what is missing and how to get it"
            )

    def _data_commands(self) -> list[str]:
        data = shlex.quote(str(self.data))
        if not self.missing:
            return []
        if self.captions is not None:
            captions = self.captions
            command = f"genius data karpathy {captions.json} --images PICTURES --out {data}"
            return [f"{command} --dataset-id {captions.dataset_id} --dataset-name {captions.dataset}"]
        fetch = f"hf download {DATA_REPOSITORY} --repo-type dataset --local-dir {data}"
        folders = [path for path in self.missing if path.startswith("mbeir_images/")]
        files = [path for path in self.missing if path not in folders]
        if len(files) > 3 * len(SIZES):
            all_of = "query/test/*", "cand_pool/local/*", "cand_pool/global/*test*", "qrels/test/*"
            files = [*all_of, INSTRUCTIONS]
        includes = " ".join(f"--include {shlex.quote(path)}" for path in files)
        commands = [f"{fetch} {includes}"] if files else []
        if folders:
            if not any(self.data.glob(ARCHIVE)):
                commands.append(f"{fetch} --include {shlex.quote(ARCHIVE)}")
            commands.append(f"cat {data}/{ARCHIVE} | tar -xzf - -C {data}")
        return [*commands, f"genius data check {data} --skip-images"]

    def _model_commands(self) -> list[str]:
        if self.has_model:
            return []
        (clip,) = CHECKPOINTS["clip-sf"].files
        quantizer, generator = CHECKPOINTS["genius"].files
        return [
            *(f"genius pull {name} --out published/{name} --yes" for name in ("clip-sf", "genius")),
            f"genius import clip-sf published/clip-sf/{clip} --out clip-sf",
            (
                f"genius import genius --quantizer published/genius/{quantizer} "
                f"--generator published/genius/{generator} --encoder uniir:clip-sf "
                f"--data {shlex.quote(str(self.data))} --out {shlex.quote(str(self.model or 'MODEL'))}"
            ),
        ]

    def _run_command(self) -> str:
        model, pools = str(self.model or "MODEL"), ",".join(self.pools)
        words = ("repro", self.name, "--data", str(self.data), "--model", model, "--pools", pools, "--run")
        return shlex.join(("genius", *words))


def plan(name: str, data: Path, model: Path | None, *, pools: Sequence[Pool] = ()) -> Reproduction:
    """Return what reproducing a row of M-BEIR, ``all`` of them, ``flickr30k`` or ``coco`` needs.

    Raises
    ------
    UsageError
        there is no such row, or it has no such pool.
    """
    name = {"mscoco": "coco"}.get(name, name)
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.4)
        advice = f"did you mean {near[0]}? All names" if near else "choose one of"
        raise UsageError(f"there is no row {name!r} to reproduce; {advice}: {', '.join(NAMES)}")
    captions = CAPTION_SETS.get(name)
    if captions is not None:
        if "global" in pools:
            raise UsageError(f"--pools {','.join(pools)}: {name} has one pool; give local, or nothing")
        rows: tuple[str, ...] = (f"{captions.dataset}_task0",)
        folders = [f"mbeir_images/{captions.dataset}"]
        local: list[str] = []
        union: list[str] | None = None
    else:
        rows = tuple(SIZES) if name == "all" else (name,)
        folders = picture_folders(rows)
        local = [INSTRUCTIONS]
        all_pools = [pool_file(row) for row in SIZES]
        has_all_pools = all((data / path).exists() for path in all_pools) and not (data / UNION_POOL).exists()
        union = [*(all_pools if has_all_pools else [UNION_POOL]), *picture_folders(tuple(SIZES))]
    local += [path for row in rows for path in (query_file(row), pool_file(row), qrels_file(row))] + folders
    has_union = union is not None and all((data / path).exists() for path in union)
    chosen: tuple[Pool, ...] = tuple(pools) or (("local", "global") if has_union else ("local",))
    files = dict.fromkeys([*local, *((union or []) if "global" in chosen else [])])
    return Reproduction(
        name=name, rows=rows, data=data, model=model, pools=chosen, files=tuple(files), captions=captions
    )


def reproduce(plan: Reproduction, model: Genius, folder: Path, *, progress: Progress) -> list[ResultRow]:
    """Evaluate the rows as the published numbers were measured.

    The first instruction of each query (as pyserini does), a beam of 50, and the released code's scores.

    Raises
    ------
    ArtifactMissing
        a file that is needed is not there.
    """
    plan.require()
    config = EvaluationConfig(
        pools=plan.pools,
        methods=METHODS,
        rows=plan.rows,
        beam=PAPER_BEAM,
        scores=SCORES,
        instructions=INSTRUCTION_CHOICE,
    )
    return in_order(evaluate(MBeir(plan.data), model, config, folder, progress=progress).rows)


class Verdict(NamedTuple):
    """One of our numbers beside the published ones."""

    row: str
    pool: Pool
    method: str
    score: float
    """Percent."""
    references: list[Reference]
    """Empty when queries or candidates are not as many as the published numbers are for."""
    ok: bool | None
    """Whether exact-raw lies within the tolerance of the released CLIP_SF; None for everything else."""


def verdicts(rows: Sequence[ResultRow]) -> list[Verdict]:
    """Compare our numbers with the published ones."""
    found = []
    for row in in_order(rows):
        if row.method not in METHODS or row.score is None:
            continue
        score = 100 * row.score
        published = published_beside(row)
        released = [one.value for one in published if one.weights == "released"]
        ok = abs(score - released[0]) <= TOLERANCE if row.method == "exact-raw" and released else None
        found.append(Verdict(row.name, row.pool, row.method, score, published, ok))
    return found


def why_not_compared(plan: Reproduction, rows: Sequence[ResultRow]) -> str | None:
    """Return why no published number stands beside any of ours; None where at least one does."""
    first = in_order(rows)[0]
    if plan.captions is not None:
        expected = plan.captions.size
        comparable = any((row.queries, row.pool_size) == expected for row in rows)
    else:
        queries, local = SIZES[first.name]
        expected = RowSize(queries, local if first.pool == "local" else UNION_SIZE)
        comparable = any(verdict.references for verdict in verdicts(rows))
    if comparable:
        return None
    return (
        f"nothing was compared: no row has the size of the published test data ({first.name}, {first.pool}: "
        f"{first.queries:,} of {expected.queries:,} queries, pool {first.pool_size:,} of {expected.pool:,})"
    )


def check_sizes(plan: Reproduction) -> list[str]:
    """Return a line for each file that has another number of records than M-BEIR's."""
    expected = {UNION_POOL: UNION_SIZE}
    for row in plan.rows:
        size = SIZES.get(row) if plan.captions is None else plan.captions.size
        if size is not None:
            expected |= {query_file(row): size.queries, pool_file(row): size.pool}
    problems = []
    for path in plan.files:
        if path in expected and (plan.data / path).exists():
            count = count_lines([plan.data / path])
            if count != expected[path]:
                problems.append(f"{path}: {count:,} records, expected {expected[path]:,}")
    return problems
