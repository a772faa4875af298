"""A first look at M-BEIR's files before hours are spent: cheap, not all that `genius data check` does."""

from __future__ import annotations

import difflib
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, Literal, NamedTuple

from genius_search.data.mbeir import PAPER_ROWS, InstructionKey, MBeir, read_candidates, read_queries
from genius_search.embed import count_lines
from genius_search.errors import ArtifactMissing, UsageError
from genius_search.hub.files import ORIGINALS
from genius_search.lab.evaluate import EvaluationConfig, evaluate
from genius_search.lab.published_numbers import (
    CAPTION_RESULTS,
    COMPARABLE,
    PAPER_BEAM,
    SIZES,
    TOLERANCE,
    UNION_SIZE,
    CaptionResult,
    Reference,
    references,
)
from genius_search.lab.results import ResultRow, in_order, published_beside
from genius_search.model import Genius
from genius_search.model_file import MODEL_FILE
from genius_search.progress import Progress
from genius_search.records import TASKS, Modality, parse_id

DATA_REPOSITORY: Final = "TIGER-Lab/M-BEIR"
UNION_POOL: Final = "cand_pool/global/mbeir_union_test_cand_pool.jsonl"
INSTRUCTIONS: Final = "instructions/query_instructions.tsv"
ARCHIVE: Final = "mbeir_images.tar.gz.part-*"
ARCHIVE_GB: Final = 169.3
"""Four parts: 48.3 + 48.3 + 48.3 + 24.4."""

IMAGE_FOLDERS: Final = {
    **{name.split("_")[0]: f"mbeir_images/{name.split('_')[0]}_images" for name in PAPER_ROWS},
    "infoseek": "mbeir_images/oven_images",  # the same pictures
}
"""Data set -> the folder of the archive that holds its pictures."""

MTEB: Final = {
    "visualnews_task0": "6ba75433fbeb6a06d9fccb27031bcafdfb8b5de1",
    "mscoco_task0": "8dfc4d250094f4e241bcb93211d6c5fbc99bb0bd",
    "fashion200k_task0": "725e5e2ccb114089e0070e83cdc94b83bc104d40",
    "webqa_task1": "17d2f7d42f1b3ef9293fb545b9039fcec1deab91",
    "edis_task2": "afc3409142cdf1adab05336dd1bc5fd3c0a659dc",
    "webqa_task2": "8a9243d504a2039b3467abdef2208a127a5c0737",
    "visualnews_task3": "158d0c0ce9cdd4f292964393de7dd47dc3e87519",
    "mscoco_task3": "ec63d7122301171948387e757351fabd193fc39f",
    "fashion200k_task3": "74e9e63bf8f802f8cfb4ba6e01f48efc4f49032c",
    "nights_task4": "c798fa2f5173dc9fe0c727fd0abfd2f94cbc2f23",
    "oven_task6": "88994735625f4ebf646eaf42096f7ba204880ac2",
    "infoseek_task6": "4510aa3b456b23f39564694e053e70492cc1de9f",
    "fashioniq_task7": "469fba95d895f129f1d297619835d724db01904d",
    "cirr_task7": "bb0713ed1ed136b2974fce68df7e26388040b650",
    "oven_task8": "619847759581b2e57dfc1d68e2dadedc9599b283",
    "infoseek_task8": "3baeebfd742e4130d2a75a842740ebb31ea4e6e9",
}
"""Row -> revision of mteb's copy: the local pool with its pictures inside, so no archive is needed."""

IMAGE_TFLOP: Final = 0.162
"""A forward pass of CLIP ViT-L/14 over one picture of 224 x 224."""
TEXT_TFLOP: Final = 0.0133
"""Over one text of 77 tokens."""


class Machine(NamedTuple):
    """What hours are estimated for."""

    name: str
    tflops: float
    """That encoding sustains, in units of 10^12 operations a second."""
    queries_per_second: float
    """Of generation with a beam of 50."""
    basis: str


CORES: Final = 16
MACHINES: Final = (
    Machine(
        f"CPU, {CORES} cores",
        0.065 * CORES,
        CORES / 1.4,
        "0.4 pictures or 4.7 texts a second and core (ViT-L/14 on one core of a Xeon at 2.5 GHz, measured), "
        "1.4 core-seconds for generating (the authors' code, a million candidates)",
    ),
    Machine(
        "GPU",
        50.0,
        11.9,
        "50 TFLOP/s in 16 bits (about 300 pictures a second, if the disk keeps up), 11.9 queries a second "
        "for generating (an RTX 3090, GENIUS's supplement, table 4)",
    ),
)


class NeededFile(NamedTuple):
    """A file or folder, and whether it is there."""

    path: str
    """Relative to the data set's folder, or to the repository it is published in."""
    why: str
    gigabytes: float | None
    """Of a file that is there its own; else as published, None where no size is."""
    found: bool
    of_model: bool = False
    """The model, or a checkpoint that it is imported from."""


class Work(NamedTuple):
    """What has to be encoded for some rows in one pool."""

    pool: Literal["local", "global"]
    queries: int
    candidates: int
    images: int
    """Of queries and candidates together; an image-text is one of each."""
    texts: int

    def hours(self, machine: Machine) -> float:
        """An estimate: encoding, and generating for every query."""
        encoding = (self.images * IMAGE_TFLOP + self.texts * TEXT_TFLOP) / machine.tflops
        return (encoding + self.queries / machine.queries_per_second) / 3600


def pool_file(name: str) -> str:
    """A row's local pool; MSCOCO's and Flickr30K's have the split in their names."""
    split = "_test" if name.startswith(("mscoco", "flickr30k")) else ""
    return f"cand_pool/local/mbeir_{name}{split}_cand_pool.jsonl"


def query_file(name: str) -> str:
    """A row's queries."""
    return f"query/test/mbeir_{name}_test.jsonl"


def qrels_file(name: str) -> str:
    """What answers them."""
    return f"qrels/test/mbeir_{name}_test_qrels.txt"


def image_folders(rows: Sequence[str]) -> list[str]:
    """The folders of pictures that some rows' queries and pools refer to."""
    needed = [name for name in rows if any(modality is not Modality.TEXT for modality in _modalities(name))]
    return list(dict.fromkeys(IMAGE_FOLDERS[name.split("_")[0]] for name in needed))


def local_files(rows: Sequence[str], data: Path) -> list[NeededFile]:
    """What the local pools need."""
    files = [
        needed_file(data, INSTRUCTIONS, "instructions", published=6.14e-6),
        *(
            needed_file(data, path, why)
            for name in rows
            for path, why in (
                (query_file(name), "queries"),
                (pool_file(name), "local pool"),
                (qrels_file(name), "qrels"),
            )
        ),
    ]
    return files + [needed_file(data, folder, f"pictures, in {ARCHIVE}") for folder in image_folders(rows)]


def global_files(rows: Sequence[str], data: Path) -> list[NeededFile]:
    """What the global pool needs besides: the union's file or all local pools, and everybody's pictures."""
    folders = [folder for folder in image_folders(PAPER_ROWS) if folder not in image_folders(rows)]
    union = needed_file(data, UNION_POOL, "global pool (or all 16 local pools)", published=2.43)
    if not union.found and has_union(data):
        union = union._replace(path="the 16 local pools", why="global pool", gigabytes=None, found=True)
    return [union, *(needed_file(data, folder, f"pictures, in {ARCHIVE}") for folder in folders)]


def needed_file(data: Path, path: str, why: str, *, published: float | None = None) -> NeededFile:
    """A file or folder of the data; pictures are not counted, there are millions."""
    place = data / path
    size = place.stat().st_size / 1e9 if place.is_file() else None
    return NeededFile(path, why, size if place.exists() else published, place.exists())


def has_union(data: Path) -> bool:
    """Whether the global test pool can be read."""
    return (data / UNION_POOL).exists() or all((data / pool_file(name)).exists() for name in PAPER_ROWS)


def model_files(model: Path | None) -> list[NeededFile]:
    """The model, or what it is imported from."""
    if model is not None and (model / MODEL_FILE).exists():
        parts = [path for path in model.rglob("*") if path.relative_to(model).parts[0] != "evaluation"]
        size = sum(path.stat().st_size for path in parts if path.is_file()) / 1e9
        return [NeededFile(str(model), "model", size, found=True, of_model=True)]
    return [
        NeededFile(path, why, size, found=False, of_model=True)
        for path, why, size in (
            ("TIGER-Lab/UniIR: checkpoint/CLIP_SF/clip_sf_large.pth", "encoder", 5.13),
            ("Sungyeon/GENIUS: checkpoint/rq_clip_large.pth", "fusion and codebooks", None),
            ("Sungyeon/GENIUS: checkpoint/GENIUS_t5small.pth", "generator", None),
        )
    ]


def work_of(rows: Sequence[str], pool: Literal["local", "global"]) -> Work:
    """Encodings for M-BEIR's rows; the global pool is the same whatever the rows."""
    images = texts = queries = candidates = 0
    for name in rows:
        asked, _ = _modalities(name)
        queries += SIZES[name].queries
        images += SIZES[name].queries * (asked is not Modality.TEXT)
        texts += SIZES[name].queries  # every query has an instruction
    for name in rows if pool == "local" else PAPER_ROWS:
        _, answered = _modalities(name)
        candidates += SIZES[name].pool
        images += SIZES[name].pool * (answered is not Modality.TEXT)
        texts += SIZES[name].pool * (answered is not Modality.IMAGE)
    return Work(pool, queries, candidates, images, texts)


def _modalities(name: str) -> tuple[Modality, Modality]:
    return TASKS[int(name.rpartition("_task")[2])]


def commands_for(
    name: str, data: Path, model: Path | None, *, get_data: Sequence[str], pools: Sequence[str]
) -> tuple[str, ...]:
    """All in order; ``pools`` are those that were asked for, if any."""
    chosen = f" --pools {','.join(pools)}" if pools else ""
    place = _shown(model or Path("MODEL"))
    run = f"genius repro {name} --data {_shown(data)} --model {place}{chosen} --run"
    return (*get_data, *_get_model(data, model), run)


def get_data(data: Path, missing: Sequence[NeededFile]) -> list[str]:
    """Download what is missing of M-BEIR, and the pictures' archive only where a folder of it is."""
    folders = set(IMAGE_FOLDERS.values())
    files = [file.path for file in missing if file.path not in folders]
    fetch = f"hf download {DATA_REPOSITORY} --repo-type dataset --local-dir {_shown(data)}"
    commands = []
    if files:
        patterns = _patterns(files)
        commands.append(f"{fetch} {' '.join(f'--include {_quoted(pattern)}' for pattern in patterns)}")
    if any(file.path in folders for file in missing):
        if not has_archive(data):
            commands.append(f"{fetch} --include {_quoted(ARCHIVE)}")
        commands.append(f"cat {_shown(data)}/{ARCHIVE} | tar -xzf - -C {_shown(data)}")
    return [*commands, f"genius data check {_shown(data)} --skip-images"] if commands else []


def get_captions(data: Path, json: str, *, dataset: str, dataset_id: int) -> str:
    """Make a data set from Karpathy's JSON."""
    return (
        f"genius data karpathy {json} --images PICTURES --out {_shown(data)} "
        f"--dataset-id {dataset_id} --dataset-name {dataset}"
    )


def has_archive(data: Path) -> bool:
    """Whether the archive of pictures was downloaded."""
    return any(data.glob(ARCHIVE))


def _patterns(files: Sequence[str]) -> list[str]:
    """The files themselves, or their folders where nearly all of them are wanted."""
    if len(files) < 3 * len(PAPER_ROWS):
        return list(files)
    union = ["cand_pool/global/*test*"] if UNION_POOL in files else []
    return ["query/test/*", "cand_pool/local/*", *union, "qrels/test/*", "instructions/*"]


def _get_model(data: Path, model: Path | None) -> list[str]:
    """Each name is pulled to a folder of its own: a pull never adds to one that is there."""
    if model is not None and (model / MODEL_FILE).exists():
        return []
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


def _shown(path: Path) -> str:
    """A path as a shell takes it."""
    return shlex.quote(str(path))


def _quoted(pattern: str) -> str:
    return f"'{pattern}'" if "*" in pattern else pattern


Pool = Literal["local", "global"]
METHODS: Final = tuple(COMPARABLE)
INSTRUCTION_CHOICE: Final = "first"
"""Of each query, always."""
SCORES: Final = "vocabulary"
"""Normalised over all of it, as the authors' code does."""


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
ALIASES: Final = {"mscoco": "coco"}
FEATURE_BYTES: Final = 2 * 768
"""Of one picture or text on disk."""


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
    model: Path | None
    asked: tuple[Pool, ...]
    """Pools that were asked for; none means those whose files are there."""
    files: tuple[NeededFile, ...]
    """For the local pools, the model among them."""
    global_files: tuple[NeededFile, ...]
    """For the global pool, besides."""
    work: tuple[Work, ...]
    """For each pool that is meant."""
    download_gigabytes: float
    """Of the pictures' archive; 0 where it is there, or not needed."""
    unpacked_gigabytes: float
    """An estimate of what will be unpacked from it."""
    commands: tuple[str, ...]
    """From what is there to the numbers."""
    mteb: tuple[str, ...]
    """Copies of single rows with their pictures inside."""
    published: tuple[PublishedNumber, ...]
    captions: tuple[CaptionResult, ...]

    @property
    def needed(self) -> tuple[NeededFile, ...]:
        """What has to be there to run: for the local pools, and for the global one if it was asked for."""
        return (*self.files, *self.global_files) if "global" in self.asked else self.files

    @property
    def missing(self) -> list[NeededFile]:
        """What of it is not there."""
        return [file for file in self.needed if not file.found]

    @property
    def has_model(self) -> bool:
        """Whether a finished model is there."""
        return self.model is not None and (self.model / MODEL_FILE).exists()

    @property
    def pools(self) -> tuple[Pool, ...]:
        """Those that a run evaluates: asked for, or their files are there."""
        if self.missing:
            return ()
        if self.asked:
            return self.asked
        has_global = self.global_files and all(file.found for file in self.global_files)
        return ("local", "global") if has_global else ("local",)

    @property
    def file_gigabytes(self) -> float:
        """Of the missing files whose sizes are published."""
        meant = (*self.files, *self.global_files) if self.means_global else self.files
        return math.fsum(file.gigabytes or 0.0 for file in meant if not file.found)

    @property
    def feature_gigabytes(self) -> float:
        """Of the features; what one pool encodes the other does not encode again."""
        return max((work.images + work.texts) * FEATURE_BYTES / 1e9 for work in self.work)

    @property
    def means_global(self) -> bool:
        """Whether the global pool is among those that work and commands are for."""
        return any(work.pool == "global" for work in self.work)

    def require(self) -> None:
        """Raise ArtifactMissing if there is no model, or a file that a run needs is not there."""
        problems = []
        if self.model is not None and not self.has_model:
            problems.append(f"no model at {self.model} (it has no {MODEL_FILE})")
        lost = [file for file in self.missing if not file.of_model]
        if lost:
            total = sum(not file.of_model for file in self.needed)
            first = f"{lost[0].path}, …" if len(lost) > 1 else lost[0].path
            problems.append(f"{len(lost)} of {total} files are missing in {self.data} ({first})")
        if problems:
            raise ArtifactMissing(
                f"{self.name} cannot be reproduced yet: {'; '.join(problems)}; without --run the command "
                "lists what is missing and how to get it"
            )


def named(name: str) -> str:
    """What can be reproduced under a name that a person gives.

    Raises
    ------
    UsageError
        nothing has this name; says the nearest.
    """
    name = ALIASES.get(name, name)
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.4)
        advice = f"did you mean {near[0]}? All names" if near else "choose one of"
        raise UsageError(f"there is no row {name!r} to reproduce; {advice}: {', '.join(NAMES)}")
    return name


def plan(name: str, data: Path, model: Path | None, *, pools: Sequence[Pool] = ()) -> ReproPlan:
    """What reproducing a row of M-BEIR, ``all`` of them, ``flickr30k`` or ``coco`` needs.

    Without ``pools`` it is for both, or for the local pools alone once all that they need is there.
    """
    name = named(name)
    if name in CAPTION_SETS:
        return _plan_captions(name, data, model, tuple(pools))
    rows = PAPER_ROWS if name == "all" else (name,)
    files = (*local_files(rows, data), *model_files(model))
    besides = tuple(global_files(rows, data))
    meant = _meant(pools, files, besides)
    wanted = [*files, *(besides if "global" in meant else ())]
    missing = [file for file in wanted if not file.found and not file.of_model]
    unpacks = any(file.path in IMAGE_FOLDERS.values() for file in missing)
    return ReproPlan(
        name=name,
        rows=rows,
        data=data,
        model=model,
        asked=tuple(pools),
        files=files,
        global_files=besides,
        work=tuple(work_of(rows, pool) for pool in meant),
        download_gigabytes=ARCHIVE_GB if unpacks and not has_archive(data) else 0.0,
        unpacked_gigabytes=ARCHIVE_GB if unpacks else 0.0,
        commands=commands_for(name, data, model, get_data=get_data(data, missing), pools=pools),
        mteb=tuple(f"mteb/{_mteb_name(row)}@{MTEB[row]}" for row in rows) if missing else (),
        published=tuple(
            PublishedNumber(row, pool, method, reference)
            for pool in meant
            for row in rows
            for method in METHODS
            for reference in references(row, pool, method)
        ),
        captions=(),
    )


def _meant(
    asked: Sequence[Pool], files: Sequence[NeededFile], besides: Sequence[NeededFile]
) -> tuple[Pool, ...]:
    """The pools that a plan is for."""
    if asked:
        return tuple(asked)
    only_local = all(file.found for file in files) and not all(file.found for file in besides)
    return ("local",) if only_local else ("local", "global")


def _plan_captions(name: str, data: Path, model: Path | None, pools: tuple[Pool, ...]) -> ReproPlan:
    if "global" in pools:
        raise UsageError(f"--pools {','.join(pools)}: {name} has one pool; give local, or nothing")
    kind = CAPTION_SETS[name]
    row = f"{kind.dataset}_task0"
    files = [
        needed_file(data, path, why)
        for path, why in (
            (query_file(row), f"made from {kind.json}"),
            (pool_file(row), f"made from {kind.json}"),
            (qrels_file(row), f"made from {kind.json}"),
            (f"mbeir_images/{kind.dataset}", "link to the pictures"),
        )
    ]
    convert = get_captions(data, kind.json, dataset=kind.dataset, dataset_id=kind.dataset_id)
    missing = not all(file.found for file in files)
    copies = ("mteb/flickr30kt2i@e819702b287bfbe084e129a61f308a802b7c108e",) if name == "flickr30k" else ()
    return ReproPlan(
        name=name,
        rows=(row,),
        data=data,
        model=model,
        asked=pools,
        files=(*files, *model_files(model)),
        global_files=(),
        work=(Work("local", kind.queries, kind.images, kind.images, kind.queries),),
        download_gigabytes=0.0,
        unpacked_gigabytes=0.0,
        commands=commands_for(name, data, model, get_data=[convert] if missing else [], pools=pools),
        mteb=copies if missing else (),
        published=(),
        captions=tuple(one for one in CAPTION_RESULTS if one.dataset == kind.dataset),
    )


def _mteb_name(row: str) -> str:
    return "InfoSeekIT2ITRetrieval" if row == "infoseek_task8" else f"mbeir_{row}"


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


def reproduce(plan: ReproPlan, model: Genius, folder: Path, *, progress: Progress) -> Reproduction:
    """Evaluate the rows in the pools that were asked for, or in every pool whose files are there.

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
        scores=SCORES,
        instructions=INSTRUCTION_CHOICE,
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


def nothing_compared(plan: ReproPlan, rows: Sequence[ResultRow]) -> str | None:
    """Why no published number stands beside any of ours; None where at least one does."""
    kind = CAPTION_SETS.get(plan.name)
    if kind is not None:
        same = any((row.queries, row.pool_size) == (kind.queries, kind.images) for row in rows)
        whose, expected = "Karpathy's test split", (kind.queries, kind.images)
    else:
        same = any(verdict.references for verdict in verdicts(rows))
        first = in_order(rows)[0]
        size = SIZES[first.name]
        whose, expected = "M-BEIR", (size.queries, size.pool if first.pool == "local" else UNION_SIZE)
    if same:
        return None
    first = in_order(rows)[0]
    return (
        f"nothing was compared: no row here is as large as {whose}'s ({first.name}, {first.pool}: "
        f"{first.queries:,} of {expected[0]:,} queries, pool {first.pool_size:,} of {expected[1]:,}); "
        "published numbers are for the whole test data"
    )


SAMPLE: Final = 20
"""Records of each file whose pictures are looked for."""


class Check(NamedTuple):
    """Something cheap to look at before hours are spent (M-BEIR, section 7)."""

    what: str
    expected: str
    found: str
    ok: bool


def checks(folder: Path, rows: Sequence[str], *, pools: Sequence[str]) -> list[Check]:
    """Cheap looks at the files that are there: numbers of records, instructions, columns, some pictures."""
    data = MBeir(folder)
    found = []
    for name in rows:
        size = SIZES.get(name)
        if size is not None:
            for path, count in ((query_file(name), size.queries), (pool_file(name), size.pool)):
                found += _count(folder, path, count)
        found += _instructions(data, name)
        found += _columns(folder / qrels_file(name))
        found += _pictures(data, name)
    if "global" in pools:
        found += _count(folder, UNION_POOL, UNION_SIZE)
    return found


def _count(data: Path, path: str, expected: int) -> list[Check]:
    if not (data / path).exists():
        return []
    found = count_lines([data / path])
    return [Check(f"{path}: records", f"{expected:,}", f"{found:,}", found == expected)]


def _instructions(data: MBeir, name: str) -> list[Check]:
    """Every key that this row's queries look up."""
    if not data.instructions_file.exists() or not (data.root / query_file(name)).exists():
        return []
    asked, wanted = TASKS[int(name.rpartition("_task")[2])]
    first = next(read_queries(data.root / query_file(name)), None)
    if first is None:
        return [Check(f"{query_file(name)}: a first query", "one", "none", ok=False)]
    dataset_id = parse_id(first.qid)[0]
    offered = data.instructions.rows.get(InstructionKey(dataset_id, asked, wanted), ())
    return [
        Check(f"{name}: instructions", "4", str(len(offered)), len(offered) == 4),
        Check(
            f"{name}: modality of the first query", asked.value, first.modality.value, first.modality is asked
        ),
    ]


def _columns(path: Path) -> list[Check]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        columns = len(file.readline().split())
    return [Check(f"{path.name}: columns", "5", str(columns), columns == 5)]


def _pictures(data: MBeir, name: str) -> list[Check]:
    """Whether the first records' pictures are there."""
    paths = []
    if (data.root / query_file(name)).exists():
        paths += [query.image for query in islice(read_queries(data.root / query_file(name)), SAMPLE)]
    if (data.root / pool_file(name)).exists():
        paths += [one.image for one in islice(read_candidates(data.root / pool_file(name)), SAMPLE)]
    wanted = [path for path in paths if path is not None]
    if not wanted:
        return []
    there = sum(data.image_path(path).is_file() for path in wanted)
    return [Check(f"{name}: first pictures", str(len(wanted)), str(there), there == len(wanted))]
