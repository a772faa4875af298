"""All published numbers as one document: ``docs/results-published.md``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple

from genius_search.data.mbeir import PAPER_ROWS
from genius_search.lab.synth.rehearsal import ROWS

Pool = Literal["local", "global"]
AVERAGE: Final = "average"
"""The name of the papers' last line."""

PAPER_BEAM: Final = 50
"""The beam of the numbers of GENIUS below."""
TOLERANCE: Final = 0.3
"""Points by which a reproduction of the released CLIP_SF may differ; two independent runs differ by 0.12."""


class RowSize(NamedTuple):
    """What one of M-BEIR's test rows consists of."""

    queries: int
    pool: int
    """Candidates in its local pool."""


SIZES: Final = {row.name: RowSize(row.queries, row.pool) for row in ROWS}
"""The 16 test rows."""
UNION_SIZE: Final = sum(size.pool for size in SIZES.values())
"""The global test pool: the 16 local pools one after another."""


class Published(NamedTuple):
    """One system on M-BEIR in one setting."""

    system: str
    kind: Literal["generative", "embedding"]
    pool: Pool
    weights: Literal["paper", "released"]
    """What was measured: the paper's own model, or the weights that its authors released later."""
    source: str
    average: float
    rows: tuple[float, ...] = ()
    """In the order of ``PAPER_ROWS``; empty where only the average is known."""

    def value(self, row: str) -> float | None:
        """The number of one row, or of ``average``."""
        if row == AVERAGE:
            return self.average
        return self.rows[PAPER_ROWS.index(row)] if self.rows and row in PAPER_ROWS else None


class CaptionResult(NamedTuple):
    """One system, text to image on caption data: R@1, R@5, R@10."""

    system: str
    dataset: Literal["flickr30k", "mscoco"]
    recalls: tuple[float, float, float]
    trained_on: str
    source: str


class Misprint(NamedTuple):
    """A number that is printed wrong somewhere."""

    system: str
    pool: Pool
    weights: Literal["paper", "released"]
    row: str
    printed: float
    right: float
    where: str
    why: str

    def __str__(self) -> str:
        return (
            f"{self.row}: {self.where} prints {self.printed} for {self.system}, not {self.right}: {self.why}"
        )


class Reference(NamedTuple):
    """A published number beside which ours may stand."""

    system: str
    weights: Literal["paper", "released"]
    value: float
    source: str
    misprint: str
    """What is printed wrong, and where; empty if nothing."""


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split())


_SUPPLEMENT = "GENIUS (CVPR 2025), supplement, tables 8 and 9"
_README = "README of the authors' repository, released checkpoint"
_UNIIR = "UniIR (ECCV 2024), misprints of those who quote it corrected"
_PYSERINI = "pyserini's reproduction with the released weights, always the first instruction"
_UNNOTED = "source not noted"
_WIDE = "WIDE (ACM MM 2026, doi 10.1145/3767308.3835042)"

RESULTS: Final = (
    Published("GENIUS", "generative", "local", "paper", _SUPPLEMENT, 29.69,
              _numbers("18.5 68.1 13.7 32.5 37.0 49.7 18.7 83.2 12.8 8.2 36.6 11.2 13.2 20.7 36.4 14.6")),
    Published("GENIUS", "generative", "global", "paper", _SUPPLEMENT, 28.43,
              _numbers("18.5 55.1 13.7 31.1 36.6 49.0 18.4 82.7 12.8 8.1 34.6 10.4 13.1 20.1 36.5 14.2")),
    Published("GENIUS", "generative", "global", "released", _README, 28.56,
              _numbers("18.5 55.3 14.0 31.9 37.0 49.0 18.2 83.0 12.9 8.1 34.5 10.5 13.1 20.1 36.6 14.3")),
    Published("GENIUS^R", "generative", "local", "paper", _SUPPLEMENT, 40.07,
              _numbers("27.4 78.0 16.2 44.6 44.3 60.6 28.4 91.1 16.3 30.2 41.9 20.7 19.3 39.5 52.5 30.1")),
    Published("GENIUS^R", "generative", "global", "paper", _SUPPLEMENT, 38.29,
              _numbers("27.3 68.0 16.2 42.9 44.1 59.7 26.8 90.6 16.2 30.2 38.0 18.0 19.2 38.3 48.6 28.6")),
    Published("GENIUS^R", "generative", "global", "released", _README, 38.29,
              _numbers("27.3 68.0 15.9 43.6 44.1 59.3 26.8 90.7 16.6 30.0 38.0 18.0 19.3 38.1 48.3 28.7")),
    Published("GENIUS, beam 30", "generative", "global", "paper", _SUPPLEMENT, 28.1),
    Published("GENIUS^R, beam 30", "generative", "global", "paper", _SUPPLEMENT, 35.4),
    Published("CLIP_SF", "embedding", "local", "released", _PYSERINI, 50.18,
              _numbers("42.84 80.84 18.03 83.87 53.19 78.53 42.61 92.02 18.10 31.75 46.00 27.23 24.55 45.32 "
                       "68.88 49.06")),
    Published("CLIP_SF", "embedding", "global", "released", _PYSERINI, 47.51,
              _numbers("42.54 71.73 17.86 83.42 52.51 77.62 38.67 91.60 18.06 31.70 39.60 22.22 24.25 43.84 "
                       "60.19 44.35")),
    Published("CLIP_SF, random instructions", "embedding", "global", "released", "UniIR, issue 27", 47.50,
              _numbers("42.55 71.74 17.74 83.42 52.51 77.70 38.71 91.60 18.08 31.65 39.61 22.21 24.19 43.79 "
                       "60.16 44.37")),
    Published("CLIP_SF", "embedding", "local", "paper", _UNIIR, 50.57,
              _numbers("42.6 81.1 18.0 84.7 59.4 78.7 43.1 92.3 18.3 32.0 45.5 27.9 24.4 44.6 67.6 48.9")),
    Published("CLIP_SF", "embedding", "global", "paper", _UNIIR, 48.90,
              _numbers("42.6 77.9 17.8 84.7 59.4 78.8 42.8 92.3 17.9 32.0 39.2 24.0 24.3 43.9 60.2 44.6")),
    Published("BLIP_FF", "embedding", "local", "paper", _UNIIR, 46.76,
              _numbers("23.4 79.7 26.1 80.0 50.9 79.8 22.8 89.9 28.9 33.0 41.0 22.4 29.2 52.2 55.8 33.0")),
    Published("BLIP_FF", "embedding", "global", "paper", _UNIIR, 45.49,
              _numbers("23.0 75.6 25.4 79.5 50.3 79.7 21.1 88.8 27.6 33.0 38.7 19.7 28.5 51.4 57.8 27.7")),
    Published("BLIP_FF", "embedding", "local", "released", _PYSERINI, 46.45),
    Published("BLIP_FF", "embedding", "global", "released", _PYSERINI, 44.33),
    Published("BLIP_SF", "embedding", "global", "paper", _UNIIR, 42.71,
              _numbers("20.9 71.6 24.3 78.9 47.2 76.8 19.4 88.2 24.3 33.4 35.2 16.7 26.2 43.0 51.8 25.4")),
    Published("CLIP_FF", "embedding", "global", "paper", _UNIIR, 43.26,
              _numbers("28.8 74.7 15.5 78.4 50.0 75.3 28.6 89.0 13.7 31.9 34.7 17.5 20.5 40.9 55.8 36.8")),
    Published("WIDE", "generative", "local", "paper", _WIDE, 41.51,
              _numbers("30.2 79.8 17.6 46.2 44.8 63.1 30.2 89.8 18.1 31.5 42.7 21.4 21.7 41.5 53.2 32.4")),
    Published("GENIUS retrained by WIDE's authors", "generative", "local", "paper", _WIDE, 37.23),
    Published("U-MARVEL (7B)", "embedding", "local", "paper", f"quoted by {_WIDE}; re-ranked?", 63.24),
    Published("LamRA (7B), re-ranked", "embedding", "local", "paper", "LamRA", 63.7),
    Published("LamRA (7B)", "embedding", "local", "paper", "LamRA", 56.6),
    Published("LamRA (2B), re-ranked", "embedding", "local", "paper", "LamRA", 58.3),
    Published("LamRA (2B)", "embedding", "local", "paper", "LamRA", 51.6),
    Published("LamRA (7B), re-ranked", "embedding", "global", "paper", "LamRA", 61.4),
    Published("LamRA (7B)", "embedding", "global", "paper", "LamRA", 54.9),
    Published("TRACE (7B)", "embedding", "local", "paper", "TRACE (2026)", 58.8),
    Published("MM-Embed", "embedding", "local", "paper", "MM-Embed; not checked against the paper", 52.7),
    Published("CLIP-L, zero-shot", "embedding", "local", "paper", _UNNOTED, 32.5),
    Published("SigLIP, zero-shot", "embedding", "local", "paper", _UNNOTED, 37.2),
    Published("Qwen2.5-VL-7B, zero-shot", "embedding", "local", "paper", _UNNOTED, 23.0),
)  # fmt: skip
"""What is known of M-BEIR; of two entries of one system, pool and weights the first is the reference."""

CAPTION_RESULTS: Final = (
    CaptionResult("GRACE", "flickr30k", (37.4, 59.5, 66.2), "Flickr30K", "GENIUS, table 3"),
    CaptionResult("IRGen", "flickr30k", (49.0, 68.9, 72.5), "Flickr30K", "GENIUS, table 3"),
    CaptionResult("GENIUS", "flickr30k", (60.6, 84.0, 90.5), "Flickr30K", "GENIUS, table 3"),
    CaptionResult("GENIUS^R", "flickr30k", (74.1, 92.0, 94.8), "Flickr30K", "GENIUS, table 3"),
    CaptionResult("GENIUS", "flickr30k", (51.5, 74.6, 80.3), "M-BEIR", "GENIUS, table 3"),
    CaptionResult("GENIUS^R", "flickr30k", (63.7, 80.4, 83.2), "M-BEIR", "GENIUS, table 3"),
    CaptionResult("TIGeR, SEED-LLaMA", "flickr30k", (71.70, 91.82, 95.44), "not noted", "TIGeR"),
    CaptionResult("TIGeR, LaVIT", "flickr30k", (68.84, 82.92, 86.44), "not noted", "TIGeR"),
    CaptionResult("CLIP ViT-B/32 (embedding)", "flickr30k", (68.7, 90.6, 95.2), "not noted", "TIGeR"),
    CaptionResult("GRACE", "mscoco", (16.7, 39.2, 50.3), "COCO", "GENIUS, table 3"),
    CaptionResult("IRGen", "mscoco", (29.6, 50.7, 56.3), "COCO", "GENIUS, table 3"),
    CaptionResult("GENIUS", "mscoco", (40.1, 66.2, 75.8), "COCO", "GENIUS, table 3"),
    CaptionResult("GENIUS", "mscoco", (41.2, 67.8, 77.8), "COCO", "GENIUS, supplement"),
    CaptionResult("GENIUS^R", "mscoco", (46.1, 74.0, 82.7), "COCO", "GENIUS, table 3"),
    CaptionResult("TIGeR, SEED-LLaMA", "mscoco", (46.11, 69.02, 76.13), "not noted", "TIGeR"),
    CaptionResult("TIGeR, LaVIT", "mscoco", (44.81, 62.61, 68.28), "not noted", "TIGeR"),
    CaptionResult("CLIP ViT-B/32 (embedding)", "mscoco", (37.8, 62.4, 72.2), "not noted", "TIGeR"),
)
"""Text to image, Karpathy's test split."""

_TABLE_2 = "GENIUS's table 2 (and README)"
_TABLE_8 = "GENIUS's supplement (table 8)"
_PAPER = "GENIUS's paper"
_OF_BLIP_SF = "that is BLIP_SF's number"
MISPRINTS: Final = (
    Misprint("GENIUS", "global", "paper", "fashioniq_task7", 18.9, 13.1, _PAPER,
             "the README has 13.1 and the local pool 13.2"),
    Misprint("GENIUS", "global", "paper", AVERAGE, 28.79, 28.43, _PAPER,
             "its average holds the misprinted FashionIQ"),
    Misprint("CLIP_SF", "global", "paper", "nights_task4", 33.4, 32.0, _TABLE_2, _OF_BLIP_SF),
    Misprint("CLIP_SF", "global", "paper", "fashioniq_task7", 26.2, 24.3, _TABLE_2, _OF_BLIP_SF),
    Misprint("CLIP_SF", "global", "paper", "cirr_task7", 43.0, 43.9, _TABLE_2, _OF_BLIP_SF),
    Misprint("BLIP_FF", "global", "paper", "oven_task6", 34.7, 38.7, _TABLE_2, "that is CLIP_FF's number"),
    Misprint("CLIP_SF", "local", "paper", "infoseek_task6", 23.9, 27.9, _TABLE_8,
             "only 27.9 fits the average of 50.57"),
    Misprint("BLIP_FF", "local", "paper", "mscoco_task0", 67.5, 79.7, _TABLE_8,
             "only 79.7 fits the average of 46.76"),
)  # fmt: skip
"""Numbers printed wrong, and the right ones, which are what :data:`RESULTS` holds."""

COMPARABLE: Final = {"exact-raw": "CLIP_SF", "generative": "GENIUS", "generative+raw": "GENIUS^R"}
"""Our method -> the published system that does the same: exact search over the encoder's own summed features,
generation, generation re-ranked by those features."""


def is_comparable(name: str, pool: Pool, queries: int, pool_size: int) -> bool:
    """Whether a row was measured on as many queries and candidates as the published numbers."""
    size = SIZES.get(name)
    if size is None:
        return False
    return (queries, pool_size) == (size.queries, size.pool if pool == "local" else UNION_SIZE)


def references(name: str, pool: Pool, method: str) -> list[Reference]:
    """Published numbers of one row (or ``average``) for one of our methods; released weights first."""
    system = COMPARABLE.get(method)
    found: list[Reference] = []
    for weights in ("released", "paper"):
        for result in RESULTS:
            value = result.value(name)
            if (result.system, result.pool, result.weights) == (system, pool, weights) and value is not None:
                found.append(
                    Reference(result.system, result.weights, value, result.source, misprint_of(result, name))
                )
                break
    return found


def misprint_of(result: Published, row: str) -> str:
    """What is printed wrong about one number; empty if nothing."""
    return "; ".join(
        str(one)
        for one in MISPRINTS
        if (one.system, one.pool, one.weights, one.row) == (result.system, result.pool, result.weights, row)
    )


_INTRODUCTION: Final = """\
# Published results

Written by `genius repro --list`; a test fails when it is stale. Percent throughout. On M-BEIR R@5, but R@10
for Fashion200K and FashionIQ, where R@k is the share of queries with any right answer among the first k; the
average gives all 16 rows the same weight. *local* is each row's own pool of candidates, *global* the union of
all 16. *released* are measurements of weights that were published later than the paper: those of CLIP_SF were
trained again and score below the paper's, so a reproduction from the published files is compared with them. A
star marks a number that is printed wrong somewhere and corrected here; what is wrong where stands at the end.
"""


def page() -> str:
    """The whole document, Markdown."""
    parts = [_INTRODUCTION]
    for pool in ("local", "global"):
        systems = [one for one in RESULTS if one.pool == pool]
        parts += [
            f"## M-BEIR, {pool} pool\n",
            _by_row([one for one in systems if one.rows]),
            _averages(systems),
        ]
    parts += [
        "## Text to image, Flickr30K and COCO\n",
        _table(
            ("data set", "system", "trained on", "R@1", "R@5", "R@10", "source"),
            (
                (
                    one.dataset,
                    one.system,
                    one.trained_on,
                    *(shown(recall) for recall in one.recalls),
                    one.source,
                )
                for one in CAPTION_RESULTS
            ),
        ),
        "## What M-BEIR's test rows consist of\n",
        _table(
            ("row", "queries", "local pool"),
            [
                *((name, f"{size.queries:,}", f"{size.pool:,}") for name, size in SIZES.items()),
                ("all", f"{sum(size.queries for size in SIZES.values()):,}", f"{UNION_SIZE:,}"),
            ],
        ),
        "## Misprints\n",
        "\n".join(f"- {one} ({one.pool} pool)" for one in MISPRINTS) + "\n",
    ]
    return "\n".join(parts)


def to_json() -> dict[str, object]:
    """The same for scripts."""
    return {
        "rows": [{"name": name, **SIZES[name]._asdict()} for name in PAPER_ROWS],
        "results": [
            {**one._asdict(), "rows": dict(zip(PAPER_ROWS, one.rows, strict=True)) if one.rows else {}}
            for one in RESULTS
        ],
        "captions": [one._asdict() for one in CAPTION_RESULTS],
        "misprints": [one._asdict() for one in MISPRINTS],
    }


def _by_row(systems: Sequence[Published]) -> str:
    """The papers' table: a line for each row, a column for each system."""
    lines = ((name, *(_value(one, name) for one in systems)) for name in PAPER_ROWS)
    return _table(("row", *(_titled(one) for one in systems)), lines)


def _averages(systems: Sequence[Published]) -> str:
    return _table(
        ("system", "kind", "average", "source"),
        ((_titled(one), one.kind, _value(one, "average"), one.source) for one in systems),
    )


def _titled(one: Published) -> str:
    return f"{one.system}, released" if one.weights == "released" else one.system


def _value(one: Published, row: str) -> str:
    value = one.value(row)
    return "" if value is None else f"{shown(value)}{'*' if misprint_of(one, row) else ''}"


def shown(value: float) -> str:
    """With as many decimals as were published, one or two."""
    return f"{value:.1f}" if round(value, 1) == value else f"{value:.2f}"


def _table(header: Sequence[str], lines: Iterator[tuple[str, ...]] | Sequence[tuple[str, ...]]) -> str:
    rows = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*rows, *("| " + " | ".join(line) + " |" for line in lines)]) + "\n"
