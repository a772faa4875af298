"""``genius score``: measure a run file against a qrels file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from genius_search.cli.options import JsonOption, OptionalFile, command
from genius_search.cli.terminal import TerminalProgress, print_json


@command
class Score(JsonOption):
    """Measure any TREC run against any qrels, with the measures of `genius evaluate`.

    R@k is M-BEIR's: the share of queries with any right answer among the first k. recall@k is the share of a
    query's right answers that are among them. Ids are any words.
    """

    run_file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Lines of `qid Q0 did rank score name`, or UniIR's, with the task as a seventh column."""

    qrels: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="QRELS")]
    """Lines of `qid 0 did relevance`, or M-BEIR's, with the task as a fifth column; above 0 is right."""

    ks: str = "1,5,10"
    """Depths at which to measure, separated by commas."""

    missing: Literal["error", "zero"] = "error"
    """Treat a query of the qrels that the run lacks as an error, or count it as 0: TREC has no line for a
    query that found nothing."""

    order: Literal["ranks", "scores"] = "ranks"
    """Keep the order of the lines, whose ranks must be 1, 2, 3, …; or sort them by score as trec_eval does,
    equal scores by candidate id, last first."""

    hashed: bool = False
    """Read the run's ids as UniIR's whole numbers, as in the run files of GENIUS's authors."""

    pool: OptionalFile = None
    """Restrict the qrels to these candidates, and refuse other hits: a .jsonl of M-BEIR candidates, or one
    id on each line."""

    json: bool = False
    """Print JSON: {"run", "queries", "missing", "short_rankings", "measures"}."""

    def run(self) -> None:
        """Read, measure and print."""
        from genius_search.data.mbeir import read_qrels
        from genius_search.errors import BadData
        from genius_search.lab.runs import evaluate, filter_to_pool, first_few, read_run

        ks = parse_depths(self.ks)
        qrels = read_qrels(self.qrels, layout="trec")
        ranked = read_run(self.run_file, hashed=self.hashed, order=self.order)
        known = None if self.pool is None else read_pool(self.pool)
        judged = qrels if known is None else filter_to_pool(qrels, known)
        absent = [qid for qid in judged if qid not in ranked.hits]
        if self.missing == "zero":
            ranked = dataclasses.replace(ranked, hits={**ranked.hits, **{qid: [] for qid in absent}})
        elif absent:
            raise BadData(
                f"{self.run_file} lacks {len(absent)} of the {len(judged)} queries of {self.qrels}: "
                f"{first_few(absent)}. If nothing was found for them, --missing zero counts them as 0; if "
                "ids are UniIR's whole numbers, give --hashed"
            )
        found = evaluate(judged, ranked, ks=ks, known=known)
        if self.json:
            print_json(
                {
                    "run": ranked.name,
                    "queries": found.queries,
                    "missing": len(absent),
                    "short_rankings": found.short_rankings,
                    "measures": found.means,
                }
            )
        else:
            for measure, value in found.means.items():
                print(f"{measure:<11} {value:.4f}")
        with TerminalProgress() as progress:
            progress.say(f"run {ranked.name}: {found.queries} queries")
            if absent:
                progress.say(f"{len(absent)} of them are not in the run and count as 0")
            if found.short_rankings:
                progress.say(f"{found.short_rankings} rankings have fewer than {max(ks)} hits")


def parse_depths(text: str) -> tuple[int, ...]:
    """Parse depths such as ``1,5,10``."""
    from genius_search.errors import UsageError

    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() and 0 < int(word) < 1_000_000 for word in words):
        raise UsageError(f"--ks {text!r}: expected numbers from 1 up separated by commas, such as 1,5,10")
    return tuple(dict.fromkeys(map(int, words)))


def read_pool(path: Path) -> set[str]:
    """Return the candidate ids of a pool: M-BEIR's ``.jsonl``, or one id on each line."""
    from genius_search.data.mbeir import numbered_lines, read_candidates
    from genius_search.errors import BadData, BadRecord

    if path.suffix == ".jsonl":
        found = {candidate.did for candidate in read_candidates(path)}
    else:
        found = set()
        for line, raw in numbered_lines(path):
            words = raw.decode(errors="replace").split()
            if len(words) != 1:
                raise BadRecord(path, line, f"{len(words)} words, expected one candidate id on each line")
            found.add(words[0])
    if not found:
        raise BadData(f"{path} has no candidates")
    return found
