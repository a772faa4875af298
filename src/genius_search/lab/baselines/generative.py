"""``genius baseline``: IDs of another kind, and the model's decoder trained to write them and measured.

The decoder, its size, its input and its training are the model's own, so that a comparison isolates the ID.
Beside query -> ID it learns item -> ID over the pool that will be searched (DSI's indexing, GRACE's learning
to memorise): it would hardly write IDs that it has never seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from safetensors.torch import load_file
from torch import Tensor

from genius_search.artifact import Manifest, open_artifact
from genius_search.config import GeneratorConfig, SearchConfig, checked, from_json, to_json
from genius_search.data import features as features_on_disk
from genius_search.data.features import Features
from genius_search.data.mbeir import MBeir, read_pool
from genius_search.data.pairs import Pairs
from genius_search.errors import ArtifactError, ArtifactMismatch, UsageError
from genius_search.lab.baselines.ids import SCHEMES, Irgen, SpelledIds, find_rows, select
from genius_search.lab.baselines.schemes import Candidates, IdScheme, TrainingSet
from genius_search.lab.evaluate import CANDIDATES, RESULTS, evaluate_pools
from genius_search.lab.methods import DEPTH, SEARCH_BATCH, MethodHits, PoolCandidates, RowQueries
from genius_search.lab.results import ResultRow
from genius_search.lab.results import to_json as rows_to_json
from genius_search.lab.settings import BaselineConfig, EvaluationConfig
from genius_search.model import Genius
from genius_search.nn.generator import Generator
from genius_search.nn.quantizer import Quantizer, encode, fuse
from genius_search.nn.weights import write_weights
from genius_search.progress import Progress
from genius_search.records import candidate_number
from genius_search.search.beam import search as beam_search
from genius_search.search.decoder import T5Decoder
from genius_search.search.rank import Evidence, Ranking, rank_items
from genius_search.search.table import IdTable, SearchSegment
from genius_search.training.features import (
    TrainingFeatures,
    TrainingRecords,
    embed_pool,
    embed_training,
    fingerprint_of_files,
    instruction_files,
)
from genius_search.training.generator import augment
from genius_search.training.loop import Step, StepResult, num_steps, train
from genius_search.writing import ArtifactWriter, make_folder, write_json

KIND: Final = "id-baseline"
GENERATOR: Final = "generator.safetensors"
IDS: Final = "ids"
WORK: Final = "work"
SAMPLE: Final = 2000
"""Items whose IDs the finished decoder has to write."""
SEARCHED: Final = 500
"""Items that are searched with their own embedding."""


class Memorization(NamedTuple):
    """Shares of a sample of known IDs that the decoder writes without a fault."""

    pairs: float
    """For training queries, the ID of a positive."""
    items: float | None
    """For items of the searched pool, their own ID, given their embedding; None without indexing."""


class BaselineIndex(NamedTuple):
    """The IDs of a pool."""

    table: IdTable
    items: Int64[np.ndarray, " indexed"]
    """Places in the pool of the items that have an ID."""


@dataclass(frozen=True)
class Baseline:
    """A fitted baseline."""

    config: BaselineConfig
    generator: Generator
    scheme: IdScheme
    memorization: Memorization
    manifest: Manifest

    def name(self, split: str) -> str:
        """Return its method in tables and runs, which says whether the items of the split were learned.

        Raises UsageError: they were not, and such IDs cannot be given to new items.
        """
        config = self.config
        is_known = config.indexing == "yes" and config.split == split
        if not is_known and config.is_numbered:
            raise UsageError(
                f"{config.kind} IDs were given to the pools of split {config.split!r} and cannot be given to "
                f"other items; evaluate that split, or fit again with --split {split}"
            )
        return config.kind if is_known else f"{config.kind}-unindexed"

    def index(self, items: Candidates) -> BaselineIndex:
        """Return a table of the IDs of the items; without those that can have none."""
        rows = np.arange(len(items.embeddings))
        if self.config.is_numbered and isinstance(self.scheme, SpelledIds):
            rows = np.flatnonzero(self.scheme.knows(items))
        codes = self.scheme.assign(select(items, rows))
        return BaselineIndex(IdTable.build(codes, np.zeros(len(codes))), rows)

    def search(
        self, index: BaselineIndex, queries: Float[Tensor, "queries dim"], *, beam: int, k: int
    ) -> Iterator[Ranking]:
        """Yield the ranking of each query, in the generator's order; items are places in the pool.

        ``queries`` are the model's fused embeddings.
        """
        config = SearchConfig(beam=beam)
        tables, decoder = [SearchSegment(index.table)], T5Decoder(self.generator)
        for batch in queries.split(SEARCH_BATCH):
            beams = beam_search(decoder, tables, batch, config)
            for query in range(len(batch)):
                found = rank_items(
                    tables, beams, query, batch[query], config=config, evidence=Evidence(), k=k
                )
                yield found._replace(items=index.items[found.items])


class TrainingData(NamedTuple):
    """Pairs and, with indexing, items that the decoder learns from."""

    pairs: Pairs
    queries: Float[Tensor, "queries dim"]
    candidates: Float[Tensor, "candidates dim"]
    codes: Int64[Tensor, "candidates levels"]
    """IDs of the training pool."""
    pool: Float[Tensor, "items dim"]
    """Embeddings of the items to index; none without indexing."""
    pool_codes: Int64[Tensor, "items levels"]


def fit_baseline(
    data: MBeir,
    model: Genius,
    folder: Path,
    config: BaselineConfig,
    *,
    evaluation: Path | None = None,
    progress: Progress,
) -> Baseline:
    """Give IDs and train the decoder, or open the folder if this was done already.

    Features of the searched pools are kept in ``evaluation``, by default in the model's folder. Raises
    UsageError if such IDs cannot be searched without having been learned.
    """
    config = checked(config)
    if config.is_numbered and config.indexing == "no":
        raise UsageError(
            f"{config.kind} IDs do not follow from the items, so what was not learned cannot be found; leave "
            "indexing on, or take another kind"
        )
    settings = generator_config(model, config)
    pools = [*data.global_pool(config.split), *data.local_pools_of(config.split), *data.training_pools()]
    writer = ArtifactWriter(
        folder,
        kind=KIND,
        config={**to_json(config), "generator": to_json(settings)},
        inputs={
            "model": model.fingerprint,
            "pool": fingerprint_of_files(pools),
            "queries": fingerprint_of_files(data.training_queries()),
        },
    )
    if writer.finished() is not None:
        return load_baseline(folder, model.quantizer)
    scheme, training_data = _assign_ids(
        data, model, evaluation or model.folder / "evaluation", writer.path, config, settings, progress
    )
    generator = _train(scheme, training_data, writer.path, config.kind, settings, progress)
    memorization = _measure(generator, training_data, config.seed)
    items = "" if memorization.items is None else f", of its own pool {memorization.items:.1%}"
    progress.say(f"IDs written without a fault: of training queries {memorization.pairs:.1%}{items}")
    write_weights(writer.path / GENERATOR, generator.state_dict())
    make_folder(writer.path / IDS)
    scheme.save(writer.path / IDS)
    manifest = writer.finish(
        facts={
            "dim": model.dim,
            "sizes": list(scheme.sizes),
            "shares_codes": scheme.shares_codes,
            "memorization": memorization._asdict(),
        },
        scratch=(WORK,),
    )
    return Baseline(config, generator, scheme, memorization, manifest)


def load_baseline(folder: Path, quantizer: Quantizer) -> Baseline:
    """Open a fitted baseline; ``quantizer`` is that of the model that it was fitted on."""
    manifest = open_artifact(folder, kind=KIND)
    settings, facts = dict(manifest.config), dict[str, Any](manifest.facts)
    generator = Generator(
        facts["dim"],
        tuple(facts["sizes"]),
        from_json(GeneratorConfig, settings.pop("generator")),
        shares_codes=facts["shares_codes"],
    )
    generator.load_state_dict(load_file(folder / GENERATOR))
    config = from_json(BaselineConfig, settings)
    scheme = SCHEMES[config.kind].load(folder / IDS, quantizer)
    return Baseline(config, generator.eval(), scheme, Memorization(**facts["memorization"]), manifest)


def check_model(baseline: Baseline, model: Genius) -> None:
    """Raise ArtifactMismatch unless a model is the one that the baseline was fitted on."""
    wanted = baseline.manifest.inputs["model"]
    if wanted != model.fingerprint:
        raise ArtifactMismatch(
            f"{baseline.manifest.folder} was fitted on model {wanted[:12]}, and {model.folder} is "
            f"{model.fingerprint[:12]}; name that model, or fit again"
        )


def generator_config(model: Genius, config: BaselineConfig) -> GeneratorConfig:
    """Return the settings of the model's decoder without its guide, which needs residual codes, and dropout.

    IDs are memorised sooner without dropout; the control is trained in the same way.
    """
    own = model.trained_generator.config
    training = dataclasses.replace(
        own.training, epochs=config.epochs, max_steps=0, batch_size=config.batch_size, seed=config.seed
    )
    return dataclasses.replace(
        own,
        guide="none",
        softmax="level",
        dropout=0.0,
        head="per-level" if config.kind == "nci" else "tied",
        training=training,
    )


def pool_items(
    data: MBeir, model: Genius, split: str, evaluation: Path, *, with_codes: bool, progress: Progress
) -> Candidates:
    """Return every candidate of a split's pools, in the order of the evaluation."""
    files = list(dict.fromkeys([*data.global_pool(split), *data.local_pools_of(split)]))
    features = embed_pool(data, files, model.encoder, evaluation / CANDIDATES / "features", progress=progress)
    return _read_items(model, features, files, with_codes=with_codes)


def _read_items(model: Genius, features: Features, files: list[Path], *, with_codes: bool) -> Candidates:
    texts = {candidate_number(candidate.did): candidate.text for candidate in read_pool(files)}
    codes = encode(model.quantizer, features).codes.short().numpy() if with_codes else None
    return Candidates(
        fuse(model.quantizer, features).float(),
        np.zeros((len(features), 0), dtype=np.int16) if codes is None else codes,
        features.ids,
        [texts[number] for number in features.ids.tolist()],
    )


def join(first: Candidates, second: Candidates) -> Candidates:
    """Return the items of both, each once."""
    if first.numbers is None or second.numbers is None:
        raise ValueError("items without numbers cannot be joined")
    new = select(second, np.flatnonzero(find_rows(second.numbers, first.numbers) < 0))
    return Candidates(
        torch.cat([first.embeddings, new.embeddings]),
        np.concatenate([first.codes, new.codes]),
        np.concatenate([first.numbers, new.numbers]) if new.numbers is not None else None,
        [*(first.texts or ()), *(new.texts or ())],
    )


def _training_features(
    records: TrainingRecords, model: Genius, evaluation: Path, progress: Progress
) -> TrainingFeatures:
    """Return the features that the model was trained on, if it still has them, or embed the records."""

    def open_own(name: str, files: list[Path]) -> Features | None:
        folder = model.folder / "features" / name
        try:
            manifest = open_artifact(folder, kind=features_on_disk.KIND)
        except ArtifactError:
            return None
        inputs = {"records": fingerprint_of_files(files), "encoder": model.encoder.fingerprint}
        is_same = all(manifest.inputs.get(name) == value for name, value in inputs.items())
        return Features.open(folder) if is_same else None

    data = records.data
    candidates = open_own("candidates", data.training_pools())
    queries = open_own("queries", [*data.training_queries(), *instruction_files(data)])
    if candidates is not None and queries is not None:
        return TrainingFeatures(queries, candidates)
    return embed_training(records, model.encoder, evaluation / "training", progress=progress)


def _assign_ids(
    data: MBeir,
    model: Genius,
    evaluation: Path,
    folder: Path,
    config: BaselineConfig,
    settings: GeneratorConfig,
    progress: Progress,
) -> tuple[IdScheme, TrainingData]:
    """Embed everything and fit the ID scheme."""
    with_codes = config.kind == "genius"
    records = TrainingRecords(data)
    features = _training_features(records, model, evaluation, progress)
    pairs = Pairs(records.lines(), *features)
    progress.say("reading the items")
    trained = _read_items(model, features.candidates, data.training_pools(), with_codes=with_codes)
    pool = select(trained, np.zeros(0, dtype=np.int64))
    if config.indexing == "yes":
        pool = pool_items(data, model, config.split, evaluation, with_codes=with_codes, progress=progress)
    everything = join(trained, pool)
    progress.say(f"giving {config.kind} IDs to {len(everything.embeddings):,} items")
    make_folder(folder / WORK)
    kind = SCHEMES[config.kind]
    training_set = TrainingSet(
        # IRGen's tokenizer learns from pairs; the other schemes name each item that they know.
        candidates=trained if issubclass(kind, Irgen) else everything,
        queries=fuse(model.quantizer, features.queries),
        query_numbers=features.queries.ids,
        query_texts=records.texts(),
        pairs=pairs,
        quantizer=model.quantizer,
        training=settings.training,
        folder=folder / WORK,
        progress=progress,
    )
    scheme = kind.fit(training_set)
    codes = torch.from_numpy(scheme.assign(everything)).long()
    rows = find_rows(np.asarray(pool.numbers), np.asarray(everything.numbers))
    return scheme, TrainingData(
        pairs,
        training_set.queries,
        trained.embeddings,
        codes[: len(trained.embeddings)],
        pool.embeddings,
        codes[torch.from_numpy(rows)],
    )


def _train(
    scheme: IdScheme,
    data: TrainingData,
    folder: Path,
    name: str,
    settings: GeneratorConfig,
    progress: Progress,
) -> Generator:
    """Train query -> ID on pairs and item -> ID on as many items of the pool in the same batch."""
    training = settings.training
    size, seed = training.batch_size, training.seed
    torch.manual_seed(seed)
    generator = Generator(data.candidates.shape[1], scheme.sizes, settings, shares_codes=scheme.shares_codes)
    tables = scheme.tables()
    if tables is not None:
        generator.start_codes(tables, generator=torch.Generator().manual_seed(seed))

    def take_step(step: Step) -> StepResult:
        batch = data.pairs.draw(step.number, size, seed=seed)
        chosen = torch.from_numpy(batch.candidate_rows)
        inputs = augment(
            data.queries[torch.from_numpy(batch.query_rows)].float(),
            data.candidates[chosen],
            settings,
            step.generator,
        )
        targets = data.codes[chosen]
        if len(data.pool):
            rows = torch.from_numpy(draw_items(len(data.pool), size, step.number, seed))
            inputs = torch.cat([inputs, data.pool[rows]])
            targets = torch.cat([targets, data.pool_codes[rows]])
        losses = generator.loss(inputs, targets)
        by_level = {f"level_{level}": value for level, value in enumerate(losses.detach())}
        return StepResult(losses.mean(), by_level)

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


def draw_items(items: int, size: int, step: int, seed: int) -> Int64[np.ndarray, " rows"]:
    """Return the items that a step indexes: all of them in a new order, pass after pass."""
    places = np.arange(step * size, (step + 1) * size)
    passes = places // items
    orders = {
        number: np.random.default_rng([seed, number, 2]).permutation(items)
        for number in np.unique(passes).tolist()
    }
    return np.array([orders[number][place % items] for number, place in zip(passes, places, strict=True)])


@torch.inference_mode()
def share_written(
    generator: Generator, embeddings: Float[Tensor, "items dim"], codes: Int64[Tensor, "items levels"]
) -> float:
    """Return the share of items whose ID consists of the codes that the decoder finds most probable."""
    hidden = generator(embeddings, codes)
    is_right = torch.ones(len(codes), dtype=torch.bool)
    for level in range(len(generator.sizes)):
        is_right &= generator.level_logits(hidden[:, level], level).argmax(dim=1) == codes[:, level]
    return float(is_right.float().mean())


def _measure(generator: Generator, data: TrainingData, seed: int) -> Memorization:
    batch = data.pairs.draw(0, SAMPLE, seed=seed + 1)
    queries = data.queries[torch.from_numpy(batch.query_rows)].float()
    pairs = share_written(generator, queries, data.codes[torch.from_numpy(batch.candidate_rows)])
    if not len(data.pool):
        return Memorization(pairs, None)
    rows = torch.from_numpy(draw_items(len(data.pool), min(SAMPLE, len(data.pool)), 0, seed + 1))
    return Memorization(pairs, share_written(generator, data.pool[rows], data.pool_codes[rows]))


class IdFacts(NamedTuple):
    """Quality of the IDs of all candidates."""

    candidates: int
    levels: int
    distinct_ids: int
    collision_rate: float
    """Share of the candidates that share their ID."""
    largest_bucket: int
    absent: int
    """Candidates without an ID."""
    not_found: float
    """Share of a sample that is not among the first hits for its own embedding."""
    pairs_known: float
    """Share of training queries whose positive's ID is written without a fault."""
    items_known: float | None
    """Share of the indexed items whose own ID is; None without indexing."""


class BaselineResult(NamedTuple):
    """Rows of the results table, and facts about the IDs."""

    rows: list[ResultRow]
    ids: IdFacts
    about: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the result as ``genius evaluate`` does, with ``ids`` in place of ``health``."""
        return {**self.about, **rows_to_json(self.rows), "ids": self.ids._asdict()}


def evaluate_baseline(
    data: MBeir,
    model: Genius,
    baseline: Baseline,
    config: EvaluationConfig,
    folder: Path,
    *,
    evaluation: Path | None = None,
    progress: Progress,
) -> BaselineResult:
    """Measure a baseline as ``genius evaluate`` measures a model; ``folder`` receives runs and results.

    Of ``config`` only rows, pools, split, beam, instructions, and the number of queries count. Features are
    kept in ``evaluation``, by default in the model's folder. Raises ArtifactMismatch if the baseline was
    fitted on another model, UsageError if it knows no item of this split and can give none an ID.
    """
    check_model(baseline, model)
    method = baseline.name(checked(config).split)
    config = dataclasses.replace(checked(config), methods=(method,))
    place = evaluation or model.folder / "evaluation"
    with_codes = baseline.config.kind == "genius"
    items = pool_items(data, model, config.split, place, with_codes=with_codes, progress=progress)

    def answer(queries: Sequence[RowQueries], pool: PoolCandidates) -> Iterator[list[MethodHits]]:
        index = baseline.index(select(items, find_rows(pool.dids, np.asarray(items.numbers))))
        for of_row in queries:
            rankings = list(baseline.search(index, of_row.fused, beam=config.beam, k=DEPTH))
            hits = [pool.hits(found.items, found.scores) for found in rankings]
            touched = sum(found.touched for found in rankings) / max(1, len(rankings))
            yield [MethodHits(method, hits, index.table.nbytes / len(pool), touched)]

    rows, _ = evaluate_pools(
        data, model, config, answer, folder, evaluation=place, with_codes=False, progress=progress
    )
    about = {
        "model": model.fingerprint,
        "baseline": baseline.manifest.fingerprint,
        "data": data.name,
        "split": config.split,
        "config": dataclasses.asdict(config),
    }
    result = BaselineResult(rows, examine_ids(baseline, items, beam=config.beam), about)
    write_json(folder / RESULTS, result.to_json())
    return result


def examine_ids(baseline: Baseline, items: Candidates, *, beam: int) -> IdFacts:
    """Count collisions, items without an ID, and items that are not found even by their own embedding."""
    index = baseline.index(items)
    num_items = len(items.embeddings)
    sizes = np.diff(index.table.bucket_starts)
    rows = np.linspace(0, num_items - 1, min(SEARCHED, num_items)).astype(np.int64)
    rankings = baseline.search(index, items.embeddings[torch.from_numpy(rows)], beam=beam, k=DEPTH)
    lost = sum(row not in found.items for row, found in zip(rows, rankings, strict=True))
    memorization = baseline.memorization
    return IdFacts(
        candidates=num_items,
        levels=index.table.num_levels,
        distinct_ids=len(index.table),
        collision_rate=float(sizes[sizes > 1].sum() / max(1, num_items)),
        largest_bucket=int(sizes.max(initial=0)),
        absent=num_items - len(index.items),
        not_found=lost / max(1, len(rows)),
        pairs_known=memorization.pairs,
        items_known=memorization.items,
    )
