"""M-BEIR at full size with stand-in data: memory and time of checking, indexing and evaluating.

    python benchmarks/full_size.py --out FOLDER [--share 1.0] [--queries 1000]

Draws a rehearsal (`genius data rehearsal`, no pictures), stand-in features in UniIR's layout (one 768-number
vector for each query and candidate), trains a small model on a rehearsal of half a percent, and runs the
commands one by one, each in a process of its own. Needs 30 GB of disk at share 1.

A candidate's vector is a function of its id (a coarse, a middle and a fine direction, looked up by hashes),
a query's is its first positive's and noise: enough structure for IDs to spread and for a rival to be
compared, and nothing more. The figures are memory and time; the scores say nothing about M-BEIR.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from genius_search.data.mbeir import MBeir, read_candidates, read_queries
from genius_search.encoders.base import load_encoder
from genius_search.model import Genius
from genius_search.nn.generator import load_generator
from genius_search.nn.quantizer import load_quantizer
from genius_search.presets import preset
from genius_search.progress import Silent
from genius_search.records import candidate_number, query_number
from genius_search.training.fit import fit

DIM = 768
BLOCK = 65_536


class Directions:
    """The vectors that ids are given."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.coarse, self.middle, self.fine, self.noise = (
            random.standard_normal((size, DIM)).astype(np.float32) * scale
            for size, scale in ((512, 0.3), (8192, 0.25), (65_536, 0.2), (65_536, 0.1))
        )

    def of_candidates(self, numbers: np.ndarray) -> np.ndarray:
        mixed = _mixed(numbers)
        return (
            self.coarse[mixed % 512]
            + self.middle[(mixed >> np.uint64(12)) % 8192]
            + self.fine[(mixed >> np.uint64(28)) % 65_536]
        )

    def of_queries(self, numbers: np.ndarray, positives: np.ndarray) -> np.ndarray:
        return self.of_candidates(positives) + self.noise[_mixed(numbers + 7) % 65_536]


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """A hash of each number (splitmix64's last steps)."""
    mixed = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def write_features(queries: Iterable[Path], pools: Iterable[Path], folder: Path) -> None:
    """UniIR's `*_embed.npy` and `*_ids.npy` for these files."""
    directions = Directions()
    for path in pools:
        numbers = np.fromiter((candidate_number(one.did) for one in read_candidates(path)), dtype=np.int64)
        _write(
            folder / "cand_pool",
            path.stem,
            numbers,
            lambda rows, n=numbers: directions.of_candidates(n[rows]),
        )
    for path in queries:
        pairs = np.array(
            sorted({(query_number(q.qid), candidate_number(q.positives[0])) for q in read_queries(path)}),
            dtype=np.int64,
        )
        _write(
            folder / "test",
            path.stem,
            pairs[:, 0],
            lambda rows, p=pairs: directions.of_queries(p[rows, 0], p[rows, 1]),
        )


def _write(folder: Path, stem: str, numbers: np.ndarray, vectors: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{stem}_embed.npy"
    out = np.lib.format.open_memmap(target, mode="w+", dtype=np.float16, shape=(len(numbers), DIM))
    for start in range(0, len(numbers), BLOCK):
        rows = slice(start, start + BLOCK)
        out[rows] = vectors(rows)
    out.flush()
    np.save(folder / f"{stem}_ids.npy", numbers)


def measured(
    name: str, command: list[str], log: list[dict[str, object]], *, json_out: Path | None = None
) -> None:
    """Run one command; its wall clock, CPU time, peak memory in all and without file-backed pages."""
    began = time.monotonic()
    stdout = json_out.open("w") if json_out else subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=stdout)
    anonymous = 0
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        anonymous = max(anonymous, _anonymous_kb(process.pid))
        time.sleep(0.2)
    code = os.waitstatus_to_exitcode(status)
    entry = {
        "step": name,
        "wall_s": round(time.monotonic() - began, 1),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_rss_mb": usage.ru_maxrss // 1024,
        "peak_own_mb": anonymous // 1024,
        "exit": code,
    }
    log.append(entry)
    print(json.dumps(entry), flush=True)
    if code:
        sys.exit(f"{name} failed: {' '.join(command)}")


def _anonymous_kb(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


def _small_model(out: Path) -> Path:
    """A model of the preset `small`, trained on a rehearsal of half a percent; goes on where it stopped."""
    folder = out / "model"
    data = MBeir(out / "training")
    features = out / "training-features"
    if not features.exists():
        write_features(data.training_queries(), data.training_pools(), features)
    model = fit(data, f"precomputed:{features}", folder, preset("small"), progress=Silent())
    # The same quantizer and generator, over the features of the full-size candidates.
    Genius.finish(
        folder,
        load_encoder(f"precomputed:{out / 'features'}"),
        load_quantizer(folder / "quantizer"),
        load_generator(folder / "generator"),
        model.instructions,
    )
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--queries", type=int, default=1000, help="test queries in all, spread over the rows")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    genius = [str(Path(sys.executable).with_name("genius"))]
    log: list[dict[str, object]] = []
    for name, share in (("data", arguments.share), ("training", 0.005)):
        if not (out / name).exists():
            command = [*genius, "data", "rehearsal", "--share", str(share), "--out", str(out / name)]
            measured(f"draw {name}", [*command, "--pictures", "none"], log)
    data = MBeir(out / "data")
    union = data.global_pool("test")
    if not (out / "features").exists():
        write_features(data.query_files("test"), union, out / "features.partial")
        (out / "features.partial").rename(out / "features")
    model = _small_model(out)
    measured("data check", [*genius, "data", "check", str(data.root), "--skip-images"], log)
    shutil.rmtree(out / "index", ignore_errors=True)
    create = [*genius, "index", "create", str(out / "index"), "--model", str(model)]
    measured("index create", [*create, "--pool", str(union[0])], log)
    limit = str(-(-arguments.queries // len(data.rows("test"))))
    shutil.rmtree(out / "evaluation", ignore_errors=True)
    evaluate = [*genius, "evaluate", str(data.root), "--model", str(model), "--out", str(out / "evaluation")]
    evaluate += ["--max-queries", limit, "--json"]
    measured("evaluate, all methods, both pools", evaluate, log, json_out=out / "results.json")
    (out / "measured.json").write_text(json.dumps(log, indent=2) + "\n")


if __name__ == "__main__":
    main()
