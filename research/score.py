"""``python -m research.score``: measure any run file against any qrels file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from genius_search.cli.options import JsonOption, command
from genius_search.cli.terminal import print_json, print_text
from genius_search.data.mbeir import read_qrels
from genius_search.errors import BadData
from genius_search.evaluate import KS, first_few
from research.command import run
from research.runs import measure, read_run


@command
class Score(JsonOption):
    """Measure a TREC run with the measures of `genius evaluate`; ids are any words."""

    run_file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Lines of `qid Q0 did rank score name`, or UniIR's, with the task as a seventh column."""

    qrels: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="QRELS")]
    """Lines of `qid 0 did relevance`, or M-BEIR's, with the task as a fifth column; above 0 is right."""

    ks: tuple[int, ...] = KS
    """Depths at which to measure."""

    missing: Literal["error", "zero"] = "error"
    """Treat a query of the qrels that the run lacks as an error, or count it as 0: TREC has no line for a
    query that found nothing."""

    order: Literal["ranks", "scores"] = "ranks"
    """Keep the order of the lines, whose ranks must be 1, 2, 3, …; or sort them by score as trec_eval does,
    equal scores by candidate id, last first."""

    hashed: bool = False
    """Read the run's ids as UniIR's whole numbers, as in the run files of GENIUS's authors."""

    def run(self) -> None:
        """Read, measure and print."""
        qrels = read_qrels(self.qrels, layout="trec")
        ranked = read_run(self.run_file, hashed=self.hashed, order=self.order)
        absent = [qid for qid in qrels if qid not in ranked.hits]
        if absent and self.missing == "error":
            raise BadData(
                f"{self.run_file} lacks {len(absent)} of the {len(qrels)} queries of {self.qrels}: "
                f"{first_few(absent)}. If nothing was found for them, --missing zero counts them as 0; if "
                "ids are UniIR's whole numbers, give --hashed"
            )
        complete = replace(ranked, hits={**dict.fromkeys(absent, ()), **ranked.hits})
        found = measure(qrels, complete, ks=self.ks)
        if self.json:
            facts = {"run": ranked.name, "queries": found.queries, "missing": len(absent)}
            print_json({**facts, "measures": found.means})
            return
        for name, value in found.means.items():
            print_text(f"{name:<11} {value:.4f}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as the command line says."""
    return run(Score, "score", arguments)


if __name__ == "__main__":
    sys.exit(main())
