"""What happens to items unlike the training data: Flickr8k without the photos whose captions say dog or puppy.

Two models are trained, one on everything and one without these photos; the second is refitted to the whole pool with 1, 5
and 20 passes. Each is evaluated on the same test queries, and R@5 is told for queries about such photos and for the
others. Folders that are there already are used again, so an interrupted run goes on.

Usage: python benchmarks/unknown_items.py FLICKR8K OUT [--words dog,dogs,puppy,puppies] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from genius_search.data.features import Features
from genius_search.lab.report.evaluated import read_evaluation
from genius_search.model import Genius
from genius_search.nn.health import examine
from genius_search.nn.quantizer import encode
from genius_search.records import Modality, did_of

POOL = Path("cand_pool/global/mbeir_union_test_cand_pool.jsonl")
CAPTIONS = 5
"""Of each photo, with numbers that follow one another from 1."""
METHODS = (
    "exact-raw",
    "exact-fused",
    "exact-codes",
    "routing+codes",
    "generative+codes",
    "generative+embeddings",
)
PASSES = (1, 5, 20)


def genius(*words: object) -> None:
    """Run a command as a person does."""
    command = [str(word) for word in words]
    print("genius", *command, file=sys.stderr, flush=True)
    start = "import sys; from genius_search.cli import main; sys.exit(main())"
    subprocess.run([sys.executable, "-c", start, *command], check=True, stdout=sys.stderr)


def records(file: Path) -> Iterator[dict[str, object]]:
    """The lines of a JSONL file."""
    with file.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def photo_of(record: dict[str, object]) -> int:
    """Whose caption it is."""
    name = str(record.get("did") or record["qid"])
    return (int(name.split(":")[1]) - 1) // CAPTIONS


def unknown_photos(data: Path, words: list[str]) -> set[int]:
    """Photos with a caption that has one of the words."""
    said = re.compile(rf"\b({'|'.join(map(re.escape, words))})\b", re.IGNORECASE)
    files = [*(data / "cand_pool").rglob("*.jsonl"), *(data / "query").rglob("*.jsonl")]
    return {
        photo_of(one)
        for file in files
        for one in records(file)
        if said.search(str(one.get("txt") or one.get("query_txt") or ""))
    }


def write_without(data: Path, folder: Path, photos: set[int]) -> None:
    """The data set whose training knows none of these photos; what is tested stays as it is."""
    for file in (one for one in data.rglob("*") if one.is_file()):
        target = folder / file.relative_to(data)
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".jsonl" and "train" in file.name:
            kept = [json.dumps(one) for one in records(file) if photo_of(one) not in photos]
            target.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        elif not target.exists():
            target.symlink_to(file.resolve())


def row_of(name: str, model: Path, evaluation: Path, unknown: set[int]) -> str:
    """A line of the table."""
    cells = []
    evaluated = read_evaluation(evaluation)
    task = evaluated.rows[0].name
    for method in METHODS:
        found = evaluated.measures("global", method, task).per_query
        for wanted in (True, False):
            hits = [
                one["R@5"] for query, one in found.items() if (photo_of({"qid": query}) in unknown) is wanted
            ]
            cells.append(f"{np.mean(hits):.3f}")
    opened = Genius.open(model)
    features = Features.open(evaluation / "candidates" / "features")
    encoded = encode(opened.quantizer, features)
    rows = np.array([photo_of({"did": did_of(int(one))}) in unknown for one in features.ids])
    health = examine(
        encoded.codes.numpy()[rows],
        np.full(int(rows.sum()), Modality.TEXT.code),
        encoded.code_cosine.numpy()[rows],
        sizes=opened.quantizer.sizes,
        has_modality_level=opened.quantizer.has_modality_level,
    )
    first = health.levels[1 if opened.quantizer.has_modality_level else 0]
    return f"| {name} | {' | '.join(cells)} | {health.reconstruction:.3f} | {first.largest_share:.0%} |"


def main() -> None:
    """Train, refit, evaluate, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--words", default="dog,dogs,puppy,puppies")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    unknown = unknown_photos(asked.data, asked.words.split(","))
    without = asked.out / "data-without"
    write_without(asked.data, without, unknown)
    encoder = f"precomputed:{(asked.data / 'features' / 'text_features.npy').resolve()}"
    seeds = ("--quantizer.training.seed", asked.seed, "--generator.training.seed", asked.seed)
    models: dict[str, Path] = {}
    for name, data in (("everything", asked.data), ("without", without)):
        models[name] = asked.out / name
        if not (models[name] / "model.json").exists():
            genius("fit", data, "--encoder", encoder, "--preset", "small", *seeds, "--out", models[name])
    for passes in PASSES:
        name = f"refitted-{passes}"
        models[name] = asked.out / name
        if not (models[name] / "model.json").exists():
            genius(
                "refit",
                models["without"],
                "--pool",
                asked.data / POOL,
                "--passes",
                passes,
                "--out",
                models[name],
            )
    print(f"R@5 of queries about the {len(unknown):,} unknown photos, and about the others\n")
    print(
        f"| model | {' | '.join(f'{method} | others' for method in METHODS)} | cosine to ID | largest first code |"
    )
    print("|---" * (3 + 2 * len(METHODS)) + "|")
    for name, model in models.items():
        evaluation = asked.out / f"{name}.evaluation"
        if not (evaluation / "results.json").exists():
            genius(
                *("evaluate", asked.data, "--model", model, "--out", evaluation, "--pools", "global"),
                *("--beam", 50, "--candidates", 1500, "--methods", ",".join(METHODS)),
            )
        print(row_of(name, model, evaluation, unknown), flush=True)


if __name__ == "__main__":
    main()
