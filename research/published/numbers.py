"""Published results on M-BEIR, Flickr30K and COCO, in percent; the numbers are in the CSV files beside this.

On M-BEIR they are R@5, but R@10 for Fashion200K and FashionIQ. Of two lines with the same system, pool and
weights the first is the reference. Numbers that are printed wrong somewhere are corrected.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal, NamedTuple

import pandas as pd

from research.settings import Pool

Weights = Literal["paper", "released"]
AVERAGE: Final = "average"
"""The name of the papers' last line."""
PAPER_BEAM: Final = 50
"""The beam with which the published numbers of GENIUS were measured."""


class RowSize(NamedTuple):
    """Size of one of M-BEIR's test rows."""

    queries: int
    pool: int
    """Candidates in its local pool."""


class Reference(NamedTuple):
    """A published number beside which ours may stand."""

    system: str
    weights: Weights
    """Whether the paper's own model was measured, or weights that its authors released later."""
    value: float
    source: str


def _read(name: str) -> pd.DataFrame:
    return pd.read_csv(Path(__file__).with_name(name))


SIZES: Final = {name: RowSize(*size) for name, *size in _read("sizes.csv").to_numpy().tolist()}
"""M-BEIR's 16 test rows in the papers' order."""
UNION_SIZE: Final = sum(size.pool for size in SIZES.values())
"""Candidates in the global test pool: the 16 local pools one after another."""
RESULTS: Final = _read("results.csv")
"""A line for each system, pool, weights and source, with a column for each row of :data:`SIZES`, empty where
only the average is known."""
CAPTION_SIZES: Final = {
    "flickr30k_task0": RowSize(5_000, 1_000),
    "mscoco_task0": RowSize(24_809, 5_000),
}
"""Different captions and pictures of Karpathy's test splits, as `research.karpathy` makes them."""

COMPARABLE: Final = {"exact-raw": "CLIP_SF", "generative": "GENIUS", "generative+raw": "GENIUS^R"}
"""Our method -> the published system that does the same: exact search over the encoder's own summed features,
generation, generation re-ranked by those features."""


def expected_size(name: str, pool: Pool) -> RowSize | None:
    """Return the queries and candidates of a row of M-BEIR's; None for any other row."""
    size = SIZES.get(name)
    return size if size is None or pool == "local" else RowSize(size.queries, UNION_SIZE)


def references(name: str, pool: Pool, method: str) -> list[Reference]:
    """Return what was published on one row for our method, released weights first."""
    if name not in SIZES:
        return []
    own = RESULTS[(RESULTS["system"] == COMPARABLE.get(method)) & (RESULTS["pool"] == pool)]
    own = own.dropna(subset=name).drop_duplicates("weights").sort_values("weights", ascending=False)
    return [
        Reference(*one) for one in own[["system", "weights", name, "source"]].to_numpy().tolist()
    ]


def caption_references(name: str, method: str) -> list[Reference]:
    """Return the R@5 that was published on one of :data:`CAPTION_SIZES` for our method."""
    captions = _read("captions.csv")
    own = captions[
        (captions["system"] == COMPARABLE.get(method))
        & (captions["dataset"] == name.partition("_")[0])
    ]
    systems = own["system"] + " trained on " + own["trained_on"]
    return [
        Reference(system, "paper", value, source)
        for system, value, source in zip(systems, own["R@5"], own["source"], strict=True)
    ]
