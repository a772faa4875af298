"""``genius repro``: what reproducing a published row needs, and the reproduction when it is all there."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

from genius.data.mbeir import PAPER_ROWS, MBeir
from genius.errors import ArtifactMissing, UsageError
from genius.evaluation.published import (
    CAPTION_RESULTS,
    COMPARABLE,
    PAPER_BEAM,
    TOLERANCE,
    CaptionResult,
    Reference,
    references,
)
from genius.evaluation.tables import ResultRow, in_order, published_beside
from genius.hub.originals import ORIGINALS
from genius.model import Genius
from genius.stages.evaluate import EvaluationConfig, evaluate
from genius.stages.progress import Progress
from genius.stages.repro_needs import (
    ARCHIVE,
    ARCHIVE_GB,
    DATA_REPOSITORY,
    INSTRUCTIONS,
    MTEB,
    UNION_POOL,
    NeededFile,
    Work,
    global_files,
    image_folders,
    local_files,
    model_files,
    pool_file,
    qrels_file,
    query_file,
    work_of,
)

Pool = Literal["local", "global"]
METHODS: Final = tuple(COMPARABLE)


class CaptionSet(NamedTuple):
    """A data set that is made from Karpathy's JSON."""

    dataset: Literal["flickr30k", "mscoco"]
    dataset_id: int
    json: str
    queries: int
    """Different captions of the test split."""
    images: int


CAPTION_SETS: Final = {
    "flickr30k": CaptionSet("flickr30k", 10, "dataset_flickr30k.json", 5_000, 1_000),
    "coco": CaptionSet("mscoco", 9, "dataset_coco.json", 24_809, 5_000),
}
NAMES: Final = (*PAPER_ROWS, "all", *CAPTION_SETS)


class PublishedNumber(NamedTuple):
    """What a row will be compared with."""

    row: str
    pool: Pool
    method: str
    reference: Reference


@dataclass(frozen=True, kw_only=True, slots=True)
class ReproPlan:
    """What one reproduction needs, what is there of it, and what it will be compared with."""

    name: str
    rows: tuple[str, ...]
    """Of the evaluation."""
    data: Path
    files: tuple[NeededFile, ...]
    """For the local pools, the model among them."""
    global_files: tuple[NeededFile, ...]
    """For the global pool, besides."""
    work: tuple[Work, ...]
    """For each pool."""
    archive_gigabytes: float
    """Of the pictures' archive; 0 where none is needed."""
    commands: tuple[str, ...]
    """From nothing to the numbers."""
    mteb: tuple[str, ...]
    """Copies of single rows with their pictures inside."""
    published: tuple[PublishedNumber, ...]
    captions: tuple[CaptionResult, ...]

    @property
    def missing(self) -> list[NeededFile]:
        """What is not there for the local pools."""
        return [file for file in self.files if not file.found]

    @property
    def pools(self) -> tuple[Pool, ...]:
        """Those whose files are there."""
        if self.missing:
            return ()
        has_global = self.global_files and all(file.found for file in self.global_files)
        return ("local", "global") if has_global else ("local",)

    def require(self) -> None:
        """Raise ArtifactMissing if a file that the local pools need is not there."""
        if self.missing:
            raise ArtifactMissing(
                f"{self.name} cannot be reproduced yet: {len(self.missing)} of {len(self.files)} files "
                f"are missing ({self.missing[0].path}, …); without --run the command lists them all"
            )


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
    """For exact-raw beside the released CLIP_SF: within the tolerance; None where nothing is promised."""


class Reproduction(NamedTuple):
    """What came out."""

    rows: list[ResultRow]
    verdicts: list[Verdict]


def plan(name: str, data: Path, model: Path | None) -> ReproPlan:
    """What reproducing a row of M-BEIR, ``all`` of them, ``flickr30k`` or ``coco`` needs."""
    if name not in NAMES:
        raise UsageError(f"there is no row {name!r} to reproduce; choose one of: {', '.join(NAMES)}")
    if name in CAPTION_SETS:
        return _plan_captions(name, data, model)
    rows = PAPER_ROWS if name == "all" else (name,)
    folders = image_folders(rows)
    return ReproPlan(
        name=name,
        rows=rows,
        data=data,
        files=(*local_files(rows, data), *model_files(model)),
        global_files=tuple(global_files(rows, data)),
        work=(work_of(rows, "local"), work_of(rows, "global")),
        archive_gigabytes=ARCHIVE_GB if folders else 0.0,
        commands=(*_get_data(rows, data, folders), *_get_model(data, model), *_evaluate(name, data, model)),
        mteb=tuple(f"mteb/{_mteb_name(row)}@{MTEB[row]}" for row in rows),
        published=tuple(
            PublishedNumber(row, pool, method, reference)
            for pool in ("local", "global")
            for row in rows
            for method in METHODS
            for reference in references(row, pool, method)
        ),
        captions=(),
    )


def reproduce(plan: ReproPlan, model: Genius, folder: Path, *, progress: Progress) -> Reproduction:
    """Evaluate the rows in every pool whose files are there.

    As the published numbers were measured: the first instruction of each query (pyserini), a beam of 50, and
    the released code's scores.

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
        scores="vocabulary",
        instructions="first",
    )
    rows = evaluate(MBeir(plan.data), model, config, folder, progress=progress).rows
    return Reproduction(in_order(rows), verdicts(rows))


def verdicts(rows: Sequence[ResultRow]) -> list[Verdict]:
    """Our numbers beside the published ones."""
    found = []
    for row in in_order(rows):
        if row.method not in METHODS or row.score is None:
            continue
        score = 100 * row.score
        published = published_beside(row)
        target = next((one for one in published if one.weights == "released"), None)
        promised = row.method == "exact-raw" and target is not None
        ok = abs(score - target.value) <= TOLERANCE if promised and target is not None else None
        found.append(Verdict(row.name, row.pool, row.method, score, published, ok))
    return found


def _plan_captions(name: str, data: Path, model: Path | None) -> ReproPlan:
    kind = CAPTION_SETS[name]
    row = f"{kind.dataset}_task0"
    files = [
        NeededFile(path, why, None, (data / path).exists())
        for path, why in (
            (query_file(row), f"made from {kind.json}"),
            (pool_file(row), f"made from {kind.json}"),
            (qrels_file(row), f"made from {kind.json}"),
            (f"mbeir_images/{kind.dataset}", "link to the pictures"),
        )
    ]
    convert = (
        f"genius data karpathy {kind.json} --images PICTURES --out {_shown(data)} "
        f"--dataset-id {kind.dataset_id} --dataset-name {kind.dataset}"
    )
    return ReproPlan(
        name=name,
        rows=(row,),
        data=data,
        files=(*files, *model_files(model)),
        global_files=(),
        work=(Work("local", kind.queries, kind.images, kind.images, kind.queries),),
        archive_gigabytes=0.0,
        commands=(convert, *_get_model(data, model), *_evaluate(name, data, model)),
        mteb=("mteb/flickr30kt2i@e819702b287bfbe084e129a61f308a802b7c108e",) if name == "flickr30k" else (),
        published=(),
        captions=tuple(one for one in CAPTION_RESULTS if one.dataset == kind.dataset),
    )


def _get_data(rows: Sequence[str], data: Path, folders: Sequence[str]) -> list[str]:
    files = [INSTRUCTIONS, *(path for name in rows for path in (query_file(name), pool_file(name)))]
    patterns = (
        ["query/test/*", "cand_pool/local/*", "cand_pool/global/*test*", "qrels/test/*", "instructions/*"]
        if len(rows) == len(PAPER_ROWS)
        else [*files, *(qrels_file(name) for name in rows), UNION_POOL]
    )
    fetch = f"hf download {DATA_REPOSITORY} --repo-type dataset --local-dir {_shown(data)}"
    commands = [f"{fetch} {' '.join(f'--include {_quoted(pattern)}' for pattern in patterns)}"]
    if folders:
        commands += [
            f"{fetch} --include {_quoted(ARCHIVE)}",
            f"cat {_shown(data)}/{ARCHIVE} | tar -xzf - -C {_shown(data)}",
        ]
    return [*commands, f"genius data check {_shown(data)} --skip-images"]


def _get_model(data: Path, model: Path | None) -> list[str]:
    """Each name is pulled to a folder of its own: a pull never adds to one that is there."""
    place = model or Path("MODEL")
    (clip,) = (f"published/clip-sf/{path}" for path in ORIGINALS["clip-sf"].files)
    quantizer, generator = (f"published/genius/{path}" for path in ORIGINALS["genius"].files)
    return [
        *(f"genius pull {name} --out published/{name} --yes" for name in ("clip-sf", "genius")),
        f"genius import clip-sf {clip} --out clip-sf",
        (
            f"genius import genius --quantizer {quantizer} --generator {generator} --encoder uniir:clip-sf "
            f"--data {_shown(data)} --out {_shown(place)}"
        ),
    ]


def _evaluate(name: str, data: Path, model: Path | None) -> list[str]:
    return [f"genius repro {name} --data {_shown(data)} --model {_shown(model or Path('MODEL'))} --run"]


def _shown(path: Path) -> str:
    """A path as a shell takes it."""
    return shlex.quote(str(path))


def _quoted(pattern: str) -> str:
    return f"'{pattern}'" if "*" in pattern else pattern


def _mteb_name(row: str) -> str:
    return "InfoSeekIT2ITRetrieval" if row == "infoseek_task8" else f"mbeir_{row}"
