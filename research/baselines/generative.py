"""``python -m research.baselines.generative``: a model's decoder, trained to generate other IDs.

The decoder, its size, its input and its training are those of the model, so that a comparison
isolates the ID. Besides query -> ID, the decoder learns item -> ID over the pool that will be
searched (DSI's indexing, GRACE's learning to memorise), because it would hardly generate IDs that
it has never seen.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

import numpy as np
import safetensors.torch
import torch
import tyro
from jaxtyping import Float, Int64
from pydantic import ConfigDict
from torch import Tensor

from genius_search.artifact import file_fingerprint, open_artifact
from genius_search.cli.options import DataArgument, JsonOption, OptionalFolder, command
from genius_search.cli.terminal import TerminalProgress
from genius_search.config import PAPER_SEARCH, Count, Natural, Positive, validate_settings
from genius_search.data.features import Features, Pairs
from genius_search.data.mbeir import MBeir, read_pool
from genius_search.errors import UsageError
from genius_search.model import Genius
from genius_search.nn.generator import Generator
from genius_search.progress import Progress
from genius_search.recipe import GeneratorConfig
from genius_search.records import candidate_number, query_number
from genius_search.search import rank
from genius_search.search.beam import Decoder, GeometricDecoder, find_beams, rank_items
from genius_search.search.rank import Evidence
from genius_search.search.table import IdTable, SearchSegment
from genius_search.training.codebooks import encode_features, fuse_features
from genius_search.training.generator import augment
from genius_search.training.loop import Step, StepResult, num_steps, train
from genius_search.training.records import (
    TrainingRecords,
    embed_pool,
    embed_training,
    fingerprint_of_files,
)
from genius_search.writing import ArtifactWriter
from research.baselines.ids import (
    SCHEMES,
    Candidates,
    IdKind,
    Ids,
    TrainingSet,
    find_rows,
    fit_code_vectors,
)
from research.command import run
from research.evaluate import CANDIDATES, EvaluationResult, evaluate_pools
from research.id_files import read_id_file
from research.methods import DEPTH, SEARCH_BATCH, MethodHits, PoolCandidates, RowQueries
from research.settings import EvaluationConfig

KIND: Final = "baseline"
WEIGHTS: Final = "weights.safetensors"
NUMBERS: Final = "numbers.npy"
CODES: Final = "codes.npy"
VECTOR_KINDS: Final = ("genius", "file")
"""Kinds of IDs whose codes have vectors without training."""


@dataclass(frozen=True, kw_only=True)
class BaselineConfig:
    """Settings of a baseline, a decoder that generates other IDs; all others are the model's."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    kind: IdKind
    """Kind of the IDs."""

    epochs: Positive = 20.0
    """Passes over the training queries."""

    batch_size: Count = 256
    """Pairs in a batch, and number of items of the searched pool that are added to it."""

    seed: Natural = 0
    """Seed of IDs, initial weights, batches and augmentation."""

    id_file: str = ""
    """With kind file: the IDs of all candidates, as LETTER and MiniOneRec write them
    (research.id_files)."""

    router: Literal["generator", "geometry"] = "generator"
    """Train a decoder, or follow code vectors without training. The vectors of a file's codes are
    fitted to the embeddings of their items."""


@dataclass(frozen=True)
class Baseline:
    """A fitted baseline."""

    decoder: Decoder
    numbers: Int64[np.ndarray, " items"]
    """Numbers of the items that have IDs."""
    codes: Int64[Tensor, "items levels"]

    def id_table(self, numbers: Int64[np.ndarray, " pool"]) -> IdTable:
        """Return the table of the IDs of the items with the given numbers."""
        codes = self.codes.numpy()[find_rows(numbers, self.numbers)]
        return IdTable.build(codes, np.zeros(len(codes)))

    def search(
        self, table: IdTable, queries: Float[Tensor, "queries dim"], *, beam: int, k: int
    ) -> Iterator[rank.Candidates]:
        """Yield the ranking of each query, in the generator's order; items are rows of the table.

        Parameters
        ----------
        queries
            Fused embeddings, by the model.
        """
        config = dataclasses.replace(PAPER_SEARCH, beam=beam)
        tables = [SearchSegment(table)]
        for batch in queries.split(SEARCH_BATCH):
            beams = find_beams(self.decoder, tables, batch, config)
            for query in range(len(batch)):
                yield rank_items(
                    tables, beams, query, batch[query], config=config, evidence=Evidence(), k=k
                )


class TrainingData(NamedTuple):
    """Pairs and items that the decoder learns from."""

    pairs: Pairs
    queries: Float[Tensor, "queries dim"]
    items: Candidates
    """The items of the training pool, then the other items of the searched pool."""
    searched_rows: Int64[np.ndarray, " searched"]
    """Rows of ``items`` that belong to the searched pool."""


def fit_baseline(
    data: MBeir,
    model: Genius,
    config: BaselineConfig,
    *,
    split: str = "test",
    folder: Path,
    evaluation: Path,
    progress: Progress,
) -> Baseline:
    """Assign IDs and train the decoder, which takes minutes; open ``folder`` if it is finished.

    An interrupted training continues at its last checkpoint. The features of the pools of
    ``split``, which will be searched, are stored in ``evaluation``.
    """
    config = validate_settings(config)
    if (config.kind == "file") is not bool(config.id_file):
        raise UsageError("give --id-file with --kind file, and with no other kind")
    if config.router == "geometry" and config.kind not in VECTOR_KINDS:
        raise UsageError(f"IDs of kind {config.kind} have no code vectors; train a decoder")
    settings = None if config.router == "geometry" else generator_config(model, config)
    records = TrainingRecords(data)
    inputs = {
        "model": model.fingerprint,
        "queries": records.fingerprint,
        "pools": fingerprint_of_files([*data.training_pools(), *_pool_files(data, split)]),
    }
    if config.id_file:
        inputs["id_file"] = file_fingerprint(Path(config.id_file))
    plan = {**dataclasses.asdict(config), "id_file": "", "split": split}
    plan["generator"] = None if settings is None else dataclasses.asdict(settings)
    writer = ArtifactWriter(folder, kind=KIND, config=plan, inputs=inputs)
    if writer.finished() is None:
        work = writer.path
        if settings is None:  # only searched items need IDs
            items = _read_pool_items(
                data, model, split, evaluation, progress, with_codes=config.kind == "genius"
            )
            ids = _ids_with_vectors(model, config, items)
        else:
            ids, training_data = _assign_ids(
                data, model, work, config, settings, split, evaluation, progress
            )
            items = training_data.items
        weights = {f"table.{level}": table for level, table in enumerate(ids.tables or [])}
        if settings is not None:
            codes = torch.from_numpy(ids.codes).long()
            generator = _train(ids, codes, training_data, work, config.kind, settings, progress)
            weights |= {
                f"generator.{name}": value for name, value in generator.state_dict().items()
            }
        safetensors.torch.save_file(
            {name: value.contiguous().clone() for name, value in weights.items()}, work / WEIGHTS
        )
        np.save(work / NUMBERS, items.numbers)
        np.save(work / CODES, ids.codes)
        shutil.rmtree(work / "ids", ignore_errors=True)
        writer.finish(facts={"sizes": list(ids.sizes), "common_vocabulary": ids.common_vocabulary})
    return _open_baseline(folder, model.dim, settings)


def generator_config(model: Genius, config: BaselineConfig) -> GeneratorConfig:
    """Return the settings of the model's decoder, without dropout and without its guide.

    The guide needs residual codes. IDs are memorised sooner without dropout; the control is trained
    in the same way.
    """
    if model.generator is None:
        raise UsageError(
            f"{model.folder} has no generator to compare with; `genius fit` trains one"
        )
    decoder = model.generator.config
    training = dataclasses.replace(
        decoder.training,
        epochs=config.epochs,
        max_steps=0,
        batch_size=config.batch_size,
        seed=config.seed,
    )
    return dataclasses.replace(
        decoder,
        guide="none",
        softmax="level",
        dropout=0.0,
        head="per-level" if config.kind == "nci" else "tied",
        training=training,
    )


def _pool_files(data: MBeir, split: str) -> list[Path]:
    """Return the files of all pools that may be searched."""
    return list(
        dict.fromkeys([*data.global_pool(split), *(row.local_pool for row in data.rows(split))])
    )


def _read_pool_items(
    data: MBeir,
    model: Genius,
    split: str,
    evaluation: Path,
    progress: Progress,
    *,
    with_codes: bool,
) -> Candidates:
    """Embed the pools that may be searched; return their candidates."""
    files, folder = _pool_files(data, split), evaluation / CANDIDATES / "features"
    features = embed_pool(data, files, model.encoder, folder, progress=progress)
    return _read_items(model, features, files, with_codes=with_codes)


def _read_items(
    model: Genius, features: Features, files: list[Path], *, with_codes: bool
) -> Candidates:
    """Return the candidates of the files; without codes, their IDs have no levels."""
    texts = {candidate_number(candidate.did): candidate.text for candidate in read_pool(files)}
    codes = np.zeros((len(features), 0), dtype=np.int16)
    if with_codes:
        codes = encode_features(model.codebooks, features).codes.astype(np.int16)
    return Candidates(
        torch.from_numpy(fuse_features(model.codebooks, features)).float(),
        codes,
        features.ids,
        [texts[number] for number in features.ids.tolist()],
    )


def _ids_with_vectors(model: Genius, config: BaselineConfig, items: Candidates) -> Ids:
    """Return the items' IDs by the model, or from a file, with code vectors."""
    if config.kind == "genius":
        tables = [torch.from_numpy(table) for table in model.codebooks.tables()]
        return Ids(items.codes, model.codebooks.sizes, tables=tables)
    item_ids = read_id_file(Path(config.id_file))
    codes = item_ids.codes[item_ids.rows_of(items.numbers)]
    tables = fit_code_vectors(items.embeddings, codes, item_ids.sizes)
    return Ids(codes, item_ids.sizes, tables=tables)


def _assign_ids(
    data: MBeir,
    model: Genius,
    folder: Path,
    config: BaselineConfig,
    settings: GeneratorConfig,
    split: str,
    evaluation: Path,
    progress: Progress,
) -> tuple[Ids, TrainingData]:
    """Embed training records and pools, and assign IDs to all items."""
    with_codes = config.kind == "genius"
    records = TrainingRecords(data)
    pairs = embed_training(records, model.encoder, evaluation / "training", progress=progress)
    trained = _read_items(model, pairs.candidates, data.training_pools(), with_codes=with_codes)
    pool = _read_pool_items(data, model, split, evaluation, progress, with_codes=with_codes)
    items = merge_candidates(trained, pool)
    queries = torch.from_numpy(fuse_features(model.codebooks, pairs.queries))
    progress.say(f"assigning {config.kind} IDs to {len(items.embeddings):,} items")
    if config.kind in VECTOR_KINDS:
        ids = _ids_with_vectors(model, config, items)
    else:
        training_set = TrainingSet(
            candidates=items,
            num_training=len(trained.numbers),
            queries=queries,
            query_numbers=pairs.queries.ids,
            query_texts={
                query_number(query.qid): query.text
                for query in records.queries.values()
                if query.text
            },
            pairs=pairs,
            training=settings.training,
            folder=folder / "ids",
            progress=progress,
        )
        (folder / "ids").mkdir(parents=True, exist_ok=True)
        ids = SCHEMES[config.kind](training_set)
    return ids, TrainingData(pairs, queries, items, find_rows(pool.numbers, items.numbers))


def merge_candidates(first: Candidates, second: Candidates) -> Candidates:
    """Return the candidates of both; a candidate of both occurs once."""
    new = second.select(np.flatnonzero(find_rows(second.numbers, first.numbers) < 0))
    return Candidates(
        torch.cat([first.embeddings, new.embeddings]),
        np.concatenate([first.codes, new.codes]),
        np.concatenate([first.numbers, new.numbers]),
        [*first.texts, *new.texts],
    )


def _train(
    ids: Ids,
    codes: Int64[Tensor, "items levels"],
    data: TrainingData,
    folder: Path,
    name: str,
    settings: GeneratorConfig,
    progress: Progress,
) -> Generator:
    """Train the decoder; half of each batch is query -> ID, half is item -> ID."""
    training = settings.training
    size, seed = training.batch_size, training.seed
    torch.manual_seed(seed)
    embeddings = data.items.embeddings
    generator = Generator(
        embeddings.shape[1], ids.sizes, settings, common_vocabulary=ids.common_vocabulary
    )
    if ids.tables is not None:
        generator.start_codes(ids.tables, generator=torch.Generator().manual_seed(seed))

    def take_step(step: Step) -> StepResult:
        batch = data.pairs.draw(step.number, size, seed=seed)
        targets = torch.from_numpy(batch.candidate_rows)
        queries = data.queries[torch.from_numpy(batch.query_rows)].float()
        augmented = augment(queries, embeddings[targets], settings, step.generator)
        drawn = draw_items(len(data.searched_rows), size, step.number, seed)
        items = torch.from_numpy(data.searched_rows[drawn])
        losses = generator.loss(
            torch.cat([augmented, embeddings[items]]), torch.cat([codes[targets], codes[items]])
        )
        level_losses = {f"level_{level}": value for level, value in enumerate(losses.detach())}
        return StepResult(losses.mean(), level_losses)

    train(
        generator,
        take_step,
        total=num_steps(len(data.pairs), training),
        config=training,
        folder=folder,
        progress=progress,
        name=f"train {name}",
    )
    return generator.eval()


def draw_items(num_items: int, size: int, step: int, seed: int) -> Int64[np.ndarray, " rows"]:
    """Return the items that a step memorises: each pass takes all items in a new order."""
    draws = np.arange(step * size, (step + 1) * size)
    passes, positions = np.divmod(draws, num_items)
    orders = {
        number: np.random.default_rng([seed, number, 2]).permutation(num_items)
        for number in np.unique(passes).tolist()
    }
    return np.array(
        [orders[number][position] for number, position in zip(passes, positions, strict=True)]
    )


def _open_baseline(folder: Path, dim: int, settings: GeneratorConfig | None) -> Baseline:
    """Open a fitted baseline; with settings None, it follows code vectors."""
    facts = open_artifact(folder, kind=KIND).facts
    sizes = tuple(facts["sizes"])
    weights = safetensors.torch.load_file(folder / WEIGHTS)
    decoder: Decoder
    if settings is None:
        decoder = GeometricDecoder([weights[f"table.{level}"] for level in range(len(sizes))])
    else:
        decoder = Generator(
            dim, sizes, settings, common_vocabulary=facts["common_vocabulary"]
        ).eval()
        prefix = "generator."
        decoder.load_state_dict(
            {
                name.removeprefix(prefix): value
                for name, value in weights.items()
                if name.startswith(prefix)
            }
        )
    codes = torch.from_numpy(np.load(folder / CODES)).long()
    return Baseline(decoder, np.load(folder / NUMBERS), codes)


def evaluate_baseline(
    data: MBeir,
    model: Genius,
    baseline_config: BaselineConfig,
    config: EvaluationConfig,
    folder: Path,
    *,
    evaluation: Path,
    progress: Progress,
) -> EvaluationResult:
    """Fit a baseline, measure it as ``research.evaluate`` measures a model, and write the results.

    Only rows, pools, split, beam, instructions and the number of queries of ``config`` are used.
    """
    config = validate_settings(config)
    baseline = fit_baseline(
        data,
        model,
        baseline_config,
        split=config.split,
        folder=folder / "decoder",
        evaluation=evaluation,
        progress=progress,
    )

    def answer(queries: Sequence[RowQueries], pool: PoolCandidates) -> Iterator[list[MethodHits]]:
        table = baseline.id_table(pool.dids)
        for row_queries in queries:
            rankings = list(baseline.search(table, row_queries.fused, beam=config.beam, k=DEPTH))
            hits = [pool.hits(ranking.items, ranking.scores) for ranking in rankings]
            num_ranked = sum(ranking.num_ranked for ranking in rankings) / max(1, len(rankings))
            yield [MethodHits(baseline_config.kind, hits, table.nbytes / len(pool), num_ranked)]

    rows = evaluate_pools(
        data,
        model,
        config,
        answer,
        folder,
        evaluation=evaluation,
        with_codes=False,
        progress=progress,
    )
    about = {
        "model": model.fingerprint,
        "data": data.name,
        "split": config.split,
        "config": dataclasses.asdict(config),
        "baseline": dataclasses.asdict(baseline_config),
    }
    return EvaluationResult(rows, about).write(folder)


@command
class Generative(JsonOption):
    """Train a model's decoder to generate the IDs of GRACE, DSI, NCI or IRGen, and measure it.

    Input, decoder, training and evaluation are the model's, so that a comparison isolates the ID.
    The kind genius trains the decoder on the model's IDs in the same way, as the control.
    """

    data: DataArgument
    """Folder of the data set, in M-BEIR's layout."""

    model: Path
    """Folder of the model, whose encoder, fusion and decoder sizes are used."""

    out: Path
    """Folder of the runs and results.json."""

    baseline_config: Annotated[BaselineConfig, tyro.conf.arg(name="")]

    options: EvaluationConfig = EvaluationConfig()
    """Rows, pools, queries and beam."""

    evaluation: OptionalFolder = None
    """Folder for the features of the pools; default: evaluation/ in the model's folder."""

    def run(self) -> None:
        """Assign IDs, train, search, measure, print the table."""
        with TerminalProgress() as progress:
            result = evaluate_baseline(
                MBeir(self.data),
                Genius.open(self.model),
                self.baseline_config,
                self.options,
                self.out,
                evaluation=self.evaluation or self.model / "evaluation",
                progress=progress,
            )
        result.print(as_json=self.json)


main = partial(run, Generative, "baselines.generative")


if __name__ == "__main__":
    sys.exit(main())
