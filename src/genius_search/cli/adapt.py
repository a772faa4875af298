"""``genius tune``, ``calibrate`` and ``refit``: adapt an index or a model to what is searched."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from genius_search.cli.options import DeviceOptions, JsonOption, ValidationOptions, command
from genius_search.cli.terminal import TerminalProgress, print_json, print_table
from genius_search.errors import UsageError

if TYPE_CHECKING:
    from genius_search.calibrate import Calibrated
    from genius_search.index.settings import Choice
    from genius_search.tune import Trial


@command
class Tune(ValidationOptions):
    """Choose router, beam, candidates and generator weight of an index by validation queries, and store them.

    The items of the index must be candidates of the data set, with their ids. The chosen settings become the
    defaults of every search of this index, and those of a kind of query (text that asks for images, ...) of
    such queries, if the kind has at least 50 and they are surely better for it. Tune again when the index has
    grown much.
    """

    data: Annotated[Path | None, tyro.conf.arg(metavar="DATA", help_behavior_hint="")] = None
    """Folder of the data set, in M-BEIR's layout. Without it, items of the index are the queries, and what
    ranking all other items finds is right; geometry finds the candidates."""

    recall: Annotated[float | None, tyro.conf.arg(metavar="SHARE", help_behavior_hint="")] = None
    """Choose the cheapest settings that reach this share of the R@5 of ranking every item; default: 0.97,
    unless --milliseconds is given."""

    milliseconds: Annotated[float | None, tyro.conf.arg(metavar="MS", help_behavior_hint="")] = None
    """Choose the best settings within this many CPU-milliseconds per query, without the encoder."""

    rerank: Annotated[Literal["codes", "embeddings"] | None, tyro.conf.arg(help_behavior_hint="")] = None
    """Rank the candidates by the codes' vectors, or by stored embeddings; default: as the index does."""

    queries: int = 300
    """Queries of each row at most, or items of each modality."""

    batch: int = 64
    """Queries searched together; 1 measures the time of single searches."""

    def run(self) -> None:
        """Measure, print and store the settings."""
        from genius_search.data.mbeir import MBeir
        from genius_search.tune import TuneConfig, tune

        if self.recall is not None and self.recall > 1:
            raise UsageError(f"--recall {self.recall:g}: give a share from 0 to 1 (0.97 for 97 %)")
        config = self.config(TuneConfig)
        if self.recall is None and self.milliseconds is None:
            config = dataclasses.replace(config, recall=0.97)
        with TerminalProgress() as progress:
            index = self.open_index()
            found = tune(index, None if self.data is None else MBeir(self.data), config, progress=progress)
            if not self.dry_run:
                index.keep_settings(found.best, wait_seconds=self.wait)
        best = found.best
        if self.json:
            print_json(
                {
                    "kept": not self.dry_run,
                    "best": dataclasses.asdict(best),
                    "ceiling": found.ceiling,
                    "left_out": found.left_out,
                    "tried": [dataclasses.asdict(one) for one in found.tried],
                }
            )
            return
        measure = "R@5" if self.data else "of first 10"
        names = ("router", "beam", "candidates")
        rows = [
            ("→" if one.search == best.search else "", *_describe(one), f"{one.touched:,.0f}", *_numbers(one))
            for one in found.tried
        ]
        print_table(("", *names, "items ranked", measure, "share", "CPU-ms"), rows)
        if best.kinds:
            kinds = [
                (f"{one.query} → {one.item}", f"{one.queries:,}", *_describe(one), *_numbers(one))
                for one in best.kinds
            ]
            print_table(("kind", "queries", *names, measure, "share", "CPU-ms"), kinds)
        print(
            f"{best.queries:,} queries of {best.data}; all {best.items:,} items ranked by "
            f"{best.search.rerank}: {measure} {found.ceiling:.3f}, to which the shares refer; "
            f"generator weight {best.search.generator_weight:g}. "
            + (
                "Nothing was changed."
                if self.dry_run
                else "Searches of this index use → from now on, those of a kind its own settings."
            )
        )


def _describe(one: Trial | Choice) -> tuple[str, ...]:
    """Return router, beam and candidates."""
    candidates = f"{one.search.candidates:,}" if one.search.candidates else "all levels"
    return one.search.router, f"{one.search.beam:,}", candidates


def _numbers(one: Trial | Choice) -> tuple[str, ...]:
    """Return recall, share and time."""
    return f"{one.recall:.3f}", f"{one.share:.3f}", f"{one.cpu_ms:.2f}"


@command
class Calibrate(ValidationOptions):
    """Calibrate an index with validation queries, so that hits have the probability of being right.

    The items of the index must be candidates of the data set, with their ids. A search can then say that it
    has no good match. Half of the queries are used to fit, the other half to measure. Calibrate again after
    `genius tune`, and when the index has grown much.
    """

    data: Annotated[Path, tyro.conf.arg(metavar="DATA")]
    """Folder of the data set, in M-BEIR's layout."""

    precision: Annotated[float, tyro.conf.arg(metavar="SHARE")] = 0.8
    """Share of good matches that should be right; sets the threshold of a good match."""

    absent: Annotated[float, tyro.conf.arg(metavar="SHARE")] = 0.2
    """Expected share of queries without an answer in the index."""

    queries: int = 0
    """Queries of each row at most; 0 means all."""

    def run(self) -> None:
        """Fit, measure, print and store the calibration."""
        from genius_search.calibrate import CalibrateConfig, calibrate
        from genius_search.data.mbeir import MBeir
        from genius_search.index.settings import to_dict

        config = self.config(CalibrateConfig)
        with TerminalProgress() as progress:
            index = self.open_index()
            found = calibrate(index, MBeir(self.data), config, progress=progress)
            if not self.dry_run:
                index.keep_calibration(found.calibration, wait_seconds=self.wait)
        if self.json:
            print_json({"kept": not self.dry_run, "left_out": found.left_out, **to_dict(found.calibration)})
        else:
            self._print(found)

    def _print(self, found: Calibrated) -> None:
        from genius_search.index.settings import MANY_WORDS

        fitted, measured = found.calibration, found.calibration.held_out
        rows = [
            (f"{one.predicted:.2f}", f"{one.observed:.2f}", f"{one.queries:,.0f}") for one in measured.bins
        ]
        print_table(("probability", "right", "queries"), rows)
        print_table(
            ("kind", "words", "queries", "error", "good", "right", "refused"),
            [
                (
                    f"{one.query} → {one.item}",
                    f"{one.words}" if one.words < MANY_WORDS else f"{MANY_WORDS}+",
                    f"{one.held_out.queries:,}",
                    f"{one.held_out.error:.3f}",
                    f"{one.held_out.coverage:.0%}",
                    f"{one.held_out.precision:.0%}" if one.held_out.coverage else "",
                    f"{one.held_out.refused:.0%}",
                )
                for one in fitted.kinds
            ],
            left=("kind",),
        )
        if fitted.threshold is None:
            matched = (
                f"No probability is high enough for {fitted.wanted_precision:.0%} right first hits, so no "
                "match is ever called good; try a lower --precision. "
            )
        else:
            matched = (
                f"A first hit is a good match from {fitted.threshold:.2f} on: {measured.coverage:.0%} of "
                f"the queries have one, and {measured.precision:.0%} of those are right; "
                f"{measured.refused:.0%} of the queries without an answer have none. "
            )
        print(
            f"First hits of {measured.queries:,} held-out queries of {fitted.data}, each with and without "
            f"its answers among {fitted.items:,} items ({fitted.absent:.0%} without): calibration error "
            f"{measured.error:.3f}, Brier score {measured.brier:.3f} (constant: {measured.base_brier:.3f}). "
            + matched
            + ("Nothing was changed." if self.dry_run else "Hits of this index now have probabilities.")
        )


@command
class Refit(DeviceOptions, JsonOption):
    """Fit a model's codebooks to a pool unlike its training data, without training.

    Writes a new model. The printed table shows whether that was needed: unfamiliar items crowd under few
    codes and lie far from the vectors of their IDs. The new model has other IDs, so create indexes again.
    Give all items that will be searched, not only new ones.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder of the model, or the name under which it was pulled."""

    pool: Path
    """A folder of pictures and texts, or a .jsonl file of candidates in M-BEIR's layout."""

    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """Folder of the new model."""

    passes: Annotated[int, tyro.conf.arg(metavar="NUMBER")] = 20
    """Passes over the items."""

    seed: int = 0
    """Seed for the order of the items."""

    json: bool = False
    """Print JSON: {"before": {...}, "after": {...}, "model": FOLDER}."""

    def run(self) -> None:
        """Refit, and print how well the codes fit before and after."""
        from genius_search.model import Genius
        from genius_search.refit import refit

        with TerminalProgress() as progress:
            model = Genius.open(self.model, device=self.device, download=self.download)
            done = refit(model, self.pool, self.out, passes=self.passes, seed=self.seed, progress=progress)
            progress.say(
                f"the model is in {self.out}; `genius index create INDEX --model {self.out}` uses it"
            )
        healths = (done.before, done.after)
        if self.json:
            before, after = map(dataclasses.asdict, healths)
            print_json({"model": str(self.out), "before": before, "after": after})
            return
        rows = [
            ("mean cosine of an item to its ID", *(f"{one.reconstruction:.4f}" for one in healths)),
            ("items that share their ID", *(f"{one.collision_rate:.2%}" for one in healths)),
        ]
        for number, level in enumerate(done.before.levels):
            shares = (f"{one.levels[number].largest_share:.2%}" for one in healths)
            rows.append((f"level {level.level}: largest share of a code", *shares))
        print_table(("IDs of the pool", "before", "after"), rows, left=("IDs of the pool",))
        print(f"before: {done.before.verdict}\nafter: {done.after.verdict}")
