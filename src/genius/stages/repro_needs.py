"""What reproducing published numbers needs: files with their sizes, encodings, hours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from genius.data.mbeir import PAPER_ROWS
from genius.data.records import TASKS, Modality
from genius.evaluation.published import SIZES
from genius.stages.model_file import MODEL_FILE

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
