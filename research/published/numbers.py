"""Published results on M-BEIR, Flickr30K and COCO in percent, read from CSV files in this folder.

On M-BEIR they are R@5, but R@10 for Fashion200K and FashionIQ. If two lines have the same system,
pool and weights, the first is the reference. Known misprints are corrected.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, NamedTuple

import pandas as pd

from research.settings import Pool

Weights = Literal["paper", "released"]
AVERAGE: Final = "average"
"""Name of the papers' last line."""
PAPER_BEAM: Final = 50
"""The beam of the published measurements of GENIUS."""


class RowSize(NamedTuple):
    """Size of one of M-BEIR's test rows."""

    queries: int
    pool: int
    """Candidates in its local pool."""


class Reference(NamedTuple):
    """A published number that ours can be compared with."""

    system: str
    weights: Weights
    """Whether the paper's model was measured, or weights that its authors released later."""
    value: float
    source: str


def _read(name: str) -> pd.DataFrame:
    return pd.read_csv(Path(__file__).with_name(name))


SIZES: Final = {name: RowSize(*size) for name, *size in _read("sizes.csv").to_numpy().tolist()}
"""M-BEIR's 16 test rows in the papers' order."""
UNION_SIZE: Final = sum(size.pool for size in SIZES.values())
"""Number of candidates in the global test pool, the concatenation of the 16 local pools."""
RESULTS: Final = _read("results.csv")
"""A line for each system, pool, weights and source, with a column for each row of :data:`SIZES`;
columns are empty if only the average was published."""
CAPTION_SIZES: Final = {
    "flickr30k_task0": RowSize(5_000, 1_000),
    "mscoco_task0": RowSize(24_809, 5_000),
}
"""Numbers of distinct captions and pictures of Karpathy's test splits, by `research.karpathy`."""

COMPARABLE: Final = {"exact-raw": "CLIP_SF", "generative": "GENIUS", "generative+raw": "GENIUS^R"}
"""Our method -> the equivalent published system: exact search over the encoder's summed features,
generation, and generation re-ranked by those features."""


def expected_size(name: str, pool: Pool) -> RowSize | None:
    """Return the published size of a row of M-BEIR; None for any other row."""
    size = SIZES.get(name)
    return size if size is None or pool == "local" else RowSize(size.queries, UNION_SIZE)


def references(name: str, pool: Pool, method: str) -> list[Reference]:
    """Return a row's published numbers that compare with our method, released weights first."""
    if name not in SIZES:
        return []
    results = RESULTS[(RESULTS["system"] == COMPARABLE.get(method)) & (RESULTS["pool"] == pool)]
    results = results.dropna(subset=name).drop_duplicates("weights")
    results = results.sort_values("weights", ascending=False)
    columns = ["system", "weights", name, "source"]
    return [Reference(*row) for row in results[columns].to_numpy().tolist()]


def caption_references(name: str, method: str) -> list[Reference]:
    """Return the published R@5 on one of :data:`CAPTION_SIZES` that compare with our method."""
    results = _read("captions.csv")
    results = results[results["system"] == COMPARABLE.get(method)]
    results = results[results["dataset"] == name.partition("_")[0]]
    systems = results["system"] + " trained on " + results["trained_on"]
    return [
        Reference(system, "paper", value, source)
        for system, value, source in zip(systems, results["R@5"], results["source"], strict=True)
    ]
