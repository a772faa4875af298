"""Published results on M-BEIR, Flickr30K and COCO, in percent; the numbers are in the CSV files beside this.

On M-BEIR they are R@5, but R@10 for Fashion200K and FashionIQ. Of two lines with the same system, pool and
weights the first is the reference. Numbers that are printed wrong somewhere are corrected; the list of these
misprints is in docs/lab/results-published.md.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from importlib.resources import files
from typing import Any, Final, Literal, NamedTuple

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


class Published(NamedTuple):
    """Results of one system on M-BEIR in one setting, in percent."""

    system: str
    kind: Literal["generative", "embedding"]
    pool: Pool
    weights: Weights
    """Whether the paper's own model was measured, or weights that its authors released later."""
    source: str
    average: float
    rows: tuple[float, ...] = ()
    """In the order of :data:`SIZES`; empty where only the average is known."""

    def value(self, row: str) -> float | None:
        """Return the number of one row, or of ``average``, if it is known."""
        if row == AVERAGE:
            return self.average
        return dict(zip(SIZES, self.rows, strict=False)).get(row)


class Reference(NamedTuple):
    """A published number beside which ours may stand."""

    system: str
    weights: Weights
    value: float
    source: str


def _read(name: str) -> Iterator[dict[str, str]]:
    return csv.DictReader(files(__package__).joinpath(name).read_text(encoding="utf-8").splitlines())


SIZES: Final = {row["row"]: RowSize(int(row["queries"]), int(row["pool"])) for row in _read("sizes.csv")}
"""M-BEIR's 16 test rows in the papers' order."""
UNION_SIZE: Final = sum(size.pool for size in SIZES.values())
"""Candidates in the global test pool: the 16 local pools one after another."""


def _published(row: dict[str, Any]) -> Published:
    values = [row.pop(name) for name in SIZES]
    rows = tuple(float(value) for value in values if value)
    return Published(**{**row, "average": float(row["average"])}, rows=rows)


RESULTS: Final = tuple(map(_published, _read("results.csv")))
CAPTION_SIZES: Final = {"flickr30k_task0": RowSize(5_000, 1_000), "mscoco_task0": RowSize(24_809, 5_000)}
"""Different captions and pictures of Karpathy's test splits, as `research.karpathy` makes them."""

COMPARABLE: Final = {"exact-raw": "CLIP_SF", "generative": "GENIUS", "generative+raw": "GENIUS^R"}
"""Our method -> the published system that does the same: exact search over the encoder's own summed features,
generation, generation re-ranked by those features."""


def expected_size(name: str, pool: Pool) -> RowSize | None:
    """Return the queries and candidates of a row of M-BEIR's; None for any other row."""
    size = SIZES.get(name)
    return size if size is None or pool == "local" else RowSize(size.queries, UNION_SIZE)


def references(name: str, pool: Pool, method: str) -> list[Reference]:
    """Return what was published on one row (or ``average``) for our method, released weights first."""
    found: dict[str, Reference] = {}
    for result in RESULTS:
        value = result.value(name)
        if (result.system, result.pool) == (COMPARABLE.get(method), pool) and value is not None:
            found.setdefault(
                result.weights,
                Reference(result.system, result.weights, value, result.source),
            )
    return [found[weights] for weights in ("released", "paper") if weights in found]


def caption_references(name: str, method: str) -> list[Reference]:
    """Return the R@5 that was published on one of :data:`CAPTION_SIZES` for our method."""
    dataset = name.partition("_")[0]
    return [
        Reference(
            f"{one['system']} trained on {one['trained_on']}", "paper", float(one["R@5"]), one["source"]
        )
        for one in _read("captions.csv")
        if (one["system"], one["dataset"]) == (COMPARABLE.get(method), dataset)
    ]
