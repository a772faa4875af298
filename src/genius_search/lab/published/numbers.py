"""Published results on M-BEIR, Flickr30K and COCO, in percent; the numbers are in the CSV files beside this.

On M-BEIR they are R@5, but R@10 for Fashion200K and FashionIQ. Of two lines with the same system, pool and
weights the first is the reference.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files
from typing import Any, Final, Literal, NamedTuple

from pydantic import TypeAdapter

from genius_search.lab.settings import Pool

Weights = Literal["paper", "released"]
AVERAGE: Final = "average"
"""The name of the papers' last line."""
PAPER_BEAM: Final = 50
"""The beam with which the published numbers of GENIUS were measured."""
TOLERANCE: Final = 0.3
"""Points by which a reproduction of the released CLIP_SF may differ; two independent runs differ by 0.12."""


class RowSize(NamedTuple):
    """Size of one of M-BEIR's test rows."""

    queries: int
    pool: int
    """Candidates in its local pool."""


class Misprint(NamedTuple):
    """A number that is printed wrong somewhere."""

    system: str
    pool: Pool
    weights: Weights
    row: str
    printed: float
    right: float
    where: str
    why: str

    def __str__(self) -> str:
        return (
            f"{self.row}: {self.where} prints {self.printed} for {self.system}, not {self.right}: {self.why}"
        )


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

    @property
    def title(self) -> str:
        """The system's name in a table."""
        return f"{self.system}, released" if self.weights == "released" else self.system

    def value(self, row: str) -> float | None:
        """Return the number of one row, or of ``average``, if it is known."""
        if row == AVERAGE:
            return self.average
        return dict(zip(SIZES, self.rows, strict=False)).get(row)

    def misprint(self, row: str) -> str:
        """Return a note on a number that is printed wrong somewhere, or an empty string."""
        key = (self.system, self.pool, self.weights, row)
        return "; ".join(str(one) for one in MISPRINTS if one[:4] == key)


class CaptionResult(NamedTuple):
    """Recall of one system, text to image, on Karpathy's test split."""

    system: str
    dataset: Literal["flickr30k", "mscoco"]
    recalls: tuple[float, float, float]
    """R@1, R@5, R@10."""
    trained_on: str
    source: str


class Reference(NamedTuple):
    """A published number beside which ours may stand."""

    system: str
    weights: Weights
    value: float
    source: str
    misprint: str


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


def _caption_result(row: dict[str, Any]) -> CaptionResult:
    first, fifth, tenth = (float(row.pop(f"R@{k}")) for k in (1, 5, 10))
    return CaptionResult(**row, recalls=(first, fifth, tenth))


MISPRINTS: Final = TypeAdapter(tuple[Misprint, ...]).validate_python([*_read("misprints.csv")])
"""Where results.csv has the right numbers."""
RESULTS: Final = tuple(map(_published, _read("results.csv")))
CAPTION_RESULTS: Final = tuple(map(_caption_result, _read("captions.csv")))

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
                Reference(result.system, result.weights, value, result.source, result.misprint(name)),
            )
    return [found[weights] for weights in ("released", "paper") if weights in found]


_INTRODUCTION: Final = """\
# Published results

Written by `genius repro --list`; a test fails when it is stale. In percent: on M-BEIR R@5, but R@10 for
Fashion200K and FashionIQ, where R@k is the share of queries with any right answer among the first k; the
average gives all 16 rows the same weight. *local* is each row's own pool of candidates, *global* the union of
all 16. *released* are measurements of weights that were published later than the paper: those of CLIP_SF were
trained again and score below the paper's, so a reproduction from the published files is compared with them. A
star marks a number that is printed wrong somewhere and corrected here; the misprints are listed at the end.
"""


def format_percent(value: float) -> str:
    """Format a number with as many decimals as were published, one or two."""
    return f"{value:.1f}" if round(value, 1) == value else f"{value:.2f}"


def page() -> str:
    """Return all published numbers as a Markdown document."""

    def cell(result: Published, row: str) -> str:
        value = result.value(row)
        return "" if value is None else f"{format_percent(value)}{'*' if result.misprint(row) else ''}"

    parts = [_INTRODUCTION]
    for pool in ("local", "global"):
        systems = [one for one in RESULTS if one.pool == pool]
        complete = [one for one in systems if one.rows]
        parts += [
            f"## M-BEIR, {pool} pool\n",
            _table(
                ["row", *(one.title for one in complete)],
                [(name, *(cell(one, name) for one in complete)) for name in SIZES],
            ),
            _table(
                ["system", "kind", "average", "source"],
                [(one.title, one.kind, cell(one, AVERAGE), one.source) for one in systems],
            ),
        ]
    captions = [
        (one.dataset, one.system, one.trained_on, *map(format_percent, one.recalls), one.source)
        for one in CAPTION_RESULTS
    ]
    sizes = {**SIZES, "all": (sum(size.queries for size in SIZES.values()), UNION_SIZE)}
    parts += [
        "## Text to image, Flickr30K and COCO\n",
        _table(["data set", "system", "trained on", "R@1", "R@5", "R@10", "source"], captions),
        "## M-BEIR's test rows\n",
        _table(
            ["row", "queries", "local pool"],
            [(name, *(f"{count:,}" for count in size)) for name, size in sizes.items()],
        ),
        "## Misprints\n",
        "\n".join(f"- {one} ({one.pool} pool)" for one in MISPRINTS) + "\n",
    ]
    return "\n".join(parts)


def to_json() -> dict[str, object]:
    """Return all published numbers for scripts."""
    return {
        "rows": [{"name": name, **size._asdict()} for name, size in SIZES.items()],
        "results": [
            {**one._asdict(), "rows": dict(zip(SIZES, one.rows, strict=True)) if one.rows else {}}
            for one in RESULTS
        ],
        "captions": [one._asdict() for one in CAPTION_RESULTS],
        "misprints": [one._asdict() for one in MISPRINTS],
    }


def _table(header: list[str], lines: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, ["---"] * len(header), *lines))
