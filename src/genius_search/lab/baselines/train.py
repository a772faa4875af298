"""``genius baseline fit``: IDs of another kind, and our decoder trained to write them.

The decoder, its size, its input and its training are the model's own, so that a comparison isolates the ID.
Beside query -> ID it learns item -> ID over the pool that will be searched (DSI's indexing, GRACE's learning
to memorise): IDs that it has never seen it would hardly write.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int16, Int64
from pydantic import ConfigDict
from safetensors.torch import load_file
from torch import Tensor

from genius_search.artifact import ArtifactWriter, Manifest, open_artifact, write_json
from genius_search.config import (
    Count,
    GeneratorConfig,
    Natural,
    Positive,
    TrainingConfig,
    checked,
    from_json,
    to_json,
)
from genius_search.data import features as features_on_disk
from genius_search.data.features import Features, Pairs
from genius_search.data.mbeir import MBeir, read_pool, read_queries
from genius_search.embed import (
    embed_pool,
    fingerprint_of_files,
    instruction_files,
)
from genius_search.errors import ArtifactError, ArtifactMismatch, UsageError
from genius_search.lab.baselines.ids import (
    NUMBERED,
    TRAITS,
    Giver,
    Items,
    Kind,
    KnownTexts,
    RetrievalTokenizer,
    State,
    giver_of,
    make_ids,
)
from genius_search.lab.evaluate import CANDIDATES
from genius_search.model import Genius
from genius_search.nn.generator import Generator
from genius_search.nn.quantizer import encode, fuse
from genius_search.nn.weights import write_weights
from genius_search.progress import Progress
from genius_search.records import candidate_number, query_number
from genius_search.training.embed import TrainingFeatures, TrainingRecords, embed_training
from genius_search.training.generator import augment
from genius_search.training.loop import Step, StepResult, num_steps, random_for, train


class Sources(NamedTuple):
    """Where items come from."""

    data: MBeir
    model: Genius
    evaluation: Path
    """Folder of the model's evaluation: it has, or will have, the features of the pools."""


def pool_items(sources: Sources, split: str, *, with_codes: bool, progress: Progress) -> Items:
    """Every candidate of a split's pools, in the order of the evaluation."""
    data = sources.data
    files = list(dict.fromkeys([*data.global_pool(split), *data.local_pools_of(split)]))
    place = sources.evaluation / CANDIDATES / "features"
    features = embed_pool(data, files, sources.model.encoder, place, progress=progress)
    return _items(sources, features, files, with_codes=with_codes)


def training_features(sources: Sources, folder: Path, *, progress: Progress) -> TrainingFeatures:
    """Features of the training records: those the model was trained on, if it has them still."""
    data, model = sources.data, sources.model
    own = model.folder / "features"
    asked = [*data.training_queries(), *instruction_files(data)]
    if _is_of(own / "candidates", data.training_pools(), model) and _is_of(own / "queries", asked, model):
        return TrainingFeatures(Features.open(own / "queries"), Features.open(own / "candidates"))
    return embed_training(TrainingRecords(data), model.encoder, folder, progress=progress)


def training_items(sources: Sources, candidates: Features, *, with_codes: bool) -> Items:
    """Every candidate of the training pool, in the order of its features."""
    return _items(sources, candidates, sources.data.training_pools(), with_codes=with_codes)


def known_texts(sources: Sources, queries: Features) -> KnownTexts:
    """The texts of the training queries, each under its first instruction."""
    texts = {
        query_number(query.qid): query.text
        for path in sources.data.training_queries()
        for query in read_queries(path)
        if query.text
    }
    _, first = np.unique(queries.ids, return_index=True)
    rows = np.array([row for row in first.tolist() if int(queries.ids[row]) in texts], dtype=np.int64)
    embeddings = fuse(sources.model.quantizer, queries)[torch.from_numpy(rows)].float()
    return KnownTexts([texts[int(queries.ids[row])] or "" for row in rows], embeddings)


def together(first: Items, second: Items) -> Items:
    """The items of both, each once."""
    seen = set(first.numbers.tolist())
    new = np.array(
        [row for row, number in enumerate(second.numbers.tolist()) if number not in seen], dtype=np.int64
    )
    codes = (
        None
        if first.codes is None or second.codes is None
        else np.concatenate([first.codes, second.codes[new]])
    )
    return Items(
        np.concatenate([first.numbers, second.numbers[new]]),
        torch.cat([first.embeddings, second.embeddings[torch.from_numpy(new)]]),
        [*first.texts, *(second.texts[row] for row in new.tolist())],
        codes,
    )


def rows_of(
    numbers: Int64[np.ndarray, " wanted"], among: Int64[np.ndarray, " known"]
) -> Int64[np.ndarray, " wanted"]:
    """Where each wanted number is among those known; −1 for one that is not."""
    if not len(among):
        return np.full(len(numbers), -1)
    order = np.argsort(among, kind="stable")
    found = order[np.searchsorted(among, numbers, sorter=order).clip(max=len(among) - 1)]
    return np.where(among[found] == numbers, found, -1)


def _items(sources: Sources, features: Features, files: list[Path], *, with_codes: bool) -> Items:
    texts = {candidate_number(candidate.did): candidate.text for candidate in read_pool(files)}
    quantizer = sources.model.quantizer
    return Items(
        features.ids,
        fuse(quantizer, features).float(),
        [texts[number] for number in features.ids.tolist()],
        encode(quantizer, features).codes.short().numpy() if with_codes else None,
    )


def _is_of(folder: Path, files: list[Path], model: Genius) -> bool:
    """Whether a finished folder of features was made from these files by the model's encoder."""
    try:
        manifest = open_artifact(folder, kind=features_on_disk.KIND)
    except ArtifactError:
        return False
    made_from = {"records": fingerprint_of_files(files), "encoder": model.encoder.fingerprint}
    return all(manifest.inputs.get(name) == value for name, value in made_from.items())


START: Final = 8192
"""Items that k-means begins from."""


def train_tokenizer(
    pairs: Pairs,
    queries: Float[Tensor, "queries dim"],
    candidates: Float[Tensor, "candidates dim"],
    folder: Path,
    training: TrainingConfig,
    *,
    progress: Progress,
) -> RetrievalTokenizer:
    """Train it; ``folder`` receives the checkpoint and the log.

    Parameters
    ----------
    queries, candidates
        embeddings, as rows of the features that the pairs point to.
    """
    torch.manual_seed(training.seed)
    tokenizer = RetrievalTokenizer(candidates.shape[1])
    random = random_for(training.seed, -1)
    sample = torch.randperm(len(candidates), generator=random)[:START]
    tokenizer.start(candidates[sample].float(), generator=random)

    def take_step(step: Step) -> StepResult:
        batch = pairs.draw(step.number, training.batch_size, seed=training.seed)
        loss, found = tokenizer.loss(
            queries[torch.from_numpy(batch.query_rows)].float(),
            candidates[torch.from_numpy(batch.candidate_rows)].float(),
            batch.false_negatives,
        )
        tokenizer.follow(found, generator=step.generator)
        return StepResult(loss, {"commitment": found.commitment.detach()})

    folder.mkdir(parents=True, exist_ok=True)
    train(
        tokenizer,
        take_step,
        total=num_steps(len(pairs), training),
        config=dataclasses.replace(training, precision="fp32"),
        folder=folder,
        progress=progress,
        name="train tokenizer",
    )
    return tokenizer


KIND: Final = "baseline"
GENERATOR: Final = "generator.safetensors"
GIVER: Final = "giver.safetensors"
WORDS: Final = "words.json"
KNOWN: Final = ("numbers", "codes")
TOKENIZER_EPOCHS: Final = 3.0
SAMPLE: Final = 2000
"""Items whose IDs the finished decoder is asked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaselineConfig:
    """Which rival, and how it is trained; all else is the model's."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    kind: Kind
    """Of its IDs."""

    indexing: bool = True
    """Learn the IDs of the pool that will be searched too, as many items a step as pairs; without it, the
    pool is unseen and gets its IDs afterwards, where that is possible."""

    split: str = "test"
    """Whose pools will be searched."""

    epochs: Positive = 20.0
    """Passes over the training queries."""

    batch_size: Count = 256
    """Pairs in a batch, and with indexing as many items."""

    seed: Natural = 0
    """Decides IDs, initial weights, batches and augmentation."""


class Memory(NamedTuple):
    """How well the decoder knows IDs that it was taught: shares of a sample that it writes faultlessly."""

    pairs: float
    """Of training queries, the ID of a positive."""
    items: float | None
    """Of the searched pool's items, their own ID, given their embedding; None without indexing."""


class Baseline(NamedTuple):
    """A rival that was fitted."""

    config: BaselineConfig
    generator: Generator
    numbers: Int64[np.ndarray, " known"]
    """Candidates, as numbers, that have an ID since it was fitted."""
    codes: Int16[np.ndarray, "known levels"]
    giver: Giver | None
    memory: Memory
    manifest: Manifest


def fit_baseline(
    data: MBeir,
    model: Genius,
    folder: Path,
    config: BaselineConfig,
    *,
    evaluation: Path | None = None,
    progress: Progress,
) -> Baseline:
    """Give IDs and train the decoder, or open the folder when this very training is already done.

    Parameters
    ----------
    evaluation
        of the model: where the features of the searched pools are, or go; default: in its folder.

    Raises
    ------
    UsageError
        such IDs cannot be searched without having been learned.
    """
    config = checked(config)
    if config.kind in NUMBERED and not config.indexing:
        raise UsageError(
            f"{config.kind} IDs say nothing of their items, so what was not learned cannot be found; leave "
            "indexing on, or take a kind that reads an ID off an item"
        )
    settings = generator_config(model, config)
    writer = ArtifactWriter(
        folder,
        kind=KIND,
        config={**to_json(config), "generator": to_json(settings)},
        inputs={
            "model": model.fingerprint,
            "pool": fingerprint_of_files(
                [*data.global_pool(config.split), *data.local_pools_of(config.split), *data.training_pools()]
            ),
            "queries": fingerprint_of_files(data.training_queries()),
        },
    )
    if writer.finished() is not None:
        return load_baseline(folder)
    sources = Sources(data, model, evaluation or model.folder / "evaluation")
    lessons = _prepare(sources, writer.path, config, settings.training, progress)
    return _train(lessons, writer, config, settings, progress)


def load_baseline(folder: Path) -> Baseline:
    """Open one that is finished."""
    manifest = open_artifact(folder, kind=KIND)
    settings = dict(manifest.config)
    generator_settings = from_json(GeneratorConfig, settings.pop("generator"))
    config = from_json(BaselineConfig, settings)
    facts: dict[str, Any] = dict(manifest.facts)
    sizes = tuple(facts["sizes"])
    shares = TRAITS[config.kind].shares_codes
    generator = Generator(int(facts["dim"]), sizes, generator_settings, shares_codes=shares)
    generator.load_state_dict(load_file(folder / GENERATOR))
    numbers, codes = (np.load(folder / f"{name}.npy") for name in KNOWN)
    words = json.loads((folder / WORDS).read_text(encoding="utf-8"))
    giver = giver_of(config.kind, State(load_file(folder / GIVER), words), levels=len(sizes))
    return Baseline(config, generator.eval(), numbers, codes, giver, Memory(**facts["memory"]), manifest)


def check_model(baseline: Baseline, model: Genius) -> None:
    """Queries must be embedded by the model that the rival learned from.

    Raises
    ------
    ArtifactMismatch
        it is another.
    """
    wanted = baseline.manifest.inputs["model"]
    if wanted != model.fingerprint:
        raise ArtifactMismatch(
            f"{baseline.manifest.folder} was fitted on model {wanted[:12]}, and {model.folder} is "
            f"{model.fingerprint[:12]}; name that model, or fit again"
        )


def generator_config(model: Genius, config: BaselineConfig) -> GeneratorConfig:
    """The model's decoder without its guide, which needs residual codes, and without dropout.

    What has to be learned by heart is learned sooner without; the control is trained in the same way.
    """
    own = model.generator.config
    training = dataclasses.replace(
        own.training, epochs=config.epochs, max_steps=0, batch_size=config.batch_size, seed=config.seed
    )
    return dataclasses.replace(
        own,
        guide="none",
        softmax="level",
        dropout=0.0,
        head=TRAITS[config.kind].head,
        training=training,
    )


class _Lessons(NamedTuple):
    """What the decoder learns from."""

    pairs: Pairs
    asked: Float[Tensor, "queries dim"]
    wanted: Float[Tensor, "candidates dim"]
    codes: Int16[np.ndarray, "candidates levels"]
    """IDs of the training pool."""
    pool: Items | None
    """Items to be indexed."""
    pool_codes: Int16[np.ndarray, "items levels"]
    known: Int64[np.ndarray, " known"]
    known_codes: Int16[np.ndarray, "known levels"]
    sizes: tuple[int, ...]
    giver: Giver | None
    tables: list[Float[Tensor, "_ dim"]]
    """Vectors of the codes at each level, where they have any."""


def _prepare(
    sources: Sources, folder: Path, config: BaselineConfig, training: TrainingConfig, progress: Progress
) -> _Lessons:
    """Embed everything, and give IDs."""
    needs = TRAITS[config.kind].needs
    features = training_features(sources, sources.evaluation / "training", progress=progress)
    pairs = Pairs(
        (query for path in sources.data.training_queries() for query in read_queries(path)),
        features.queries,
        features.candidates,
    )
    progress.say("reading the items")
    trained = training_items(sources, features.candidates, with_codes=needs == "codes")
    asked = fuse(sources.model.quantizer, features.queries)
    pool = None
    if config.indexing:
        pool = pool_items(sources, config.split, with_codes=needs == "codes", progress=progress)
    tokenizer = None
    if needs == "tokenizer":
        schedule = dataclasses.replace(training, epochs=TOKENIZER_EPOCHS, learning_rate=1e-3)
        tokenizer = train_tokenizer(
            pairs, asked, trained.embeddings, folder / "tokenizer", schedule, progress=progress
        )
    everything = trained if pool is None else together(trained, pool)
    progress.say(f"giving {config.kind} IDs to {len(everything.numbers):,} items")
    made = make_ids(
        config.kind,
        everything,
        seed=config.seed,
        texts=known_texts(sources, features.queries) if needs == "texts" else None,
        tokenizer=tokenizer,
        own_sizes=sources.model.quantizer.sizes,
    )
    own = rows_of(trained.numbers, everything.numbers)
    indexed = everything.numbers[:0] if pool is None else pool.numbers
    return _Lessons(
        pairs,
        asked,
        trained.embeddings,
        made.codes[own],
        pool,
        made.codes[rows_of(indexed, everything.numbers)],
        everything.numbers,
        made.codes,
        made.sizes,
        made.giver,
        _tables(sources.model, config.kind, tokenizer),
    )


def _tables(model: Genius, kind: Kind, tokenizer: RetrievalTokenizer | None) -> list[Tensor]:
    if kind == "genius":
        return model.quantizer.tables()
    return [] if tokenizer is None else tokenizer.tables()


def _train(
    lessons: _Lessons,
    writer: ArtifactWriter,
    config: BaselineConfig,
    settings: GeneratorConfig,
    progress: Progress,
) -> Baseline:
    """Query -> ID on pairs and, with indexing, item -> ID on as many items of the pool in the same batch."""
    training = settings.training
    size = training.batch_size
    dim = lessons.wanted.shape[1]
    torch.manual_seed(training.seed)
    shares = TRAITS[config.kind].shares_codes
    generator = Generator(dim, lessons.sizes, settings, shares_codes=shares)
    if lessons.tables:
        generator.start_codes(lessons.tables, generator=torch.Generator().manual_seed(training.seed))
    codes = torch.from_numpy(lessons.codes).long()
    pool_codes = torch.from_numpy(lessons.pool_codes).long()

    def take_step(step: Step) -> StepResult:
        batch = lessons.pairs.draw(step.number, size, seed=training.seed)
        chosen = torch.from_numpy(batch.candidate_rows)
        asked = augment(
            lessons.asked[torch.from_numpy(batch.query_rows)].float(),
            lessons.wanted[chosen],
            settings,
            step.generator,
        )
        wanted = codes[chosen]
        if lessons.pool is not None:
            rows = torch.from_numpy(drawn(len(lessons.pool.numbers), size, step.number, training.seed))
            asked = torch.cat([asked, lessons.pool.embeddings[rows]])
            wanted = torch.cat([wanted, pool_codes[rows]])
        losses = generator.loss(asked, wanted)
        by_level = {f"level_{level}": value for level, value in enumerate(losses.detach())}
        return StepResult(losses.mean(), by_level)

    train(
        generator,
        take_step,
        total=num_steps(len(lessons.pairs), training),
        config=training,
        folder=writer.path,
        progress=progress,
        name=f"train {config.kind}",
    )
    memory = _memory(generator.eval(), lessons, training.seed)
    items = "" if memory.items is None else f", of its own pool {memory.items:.1%}"
    progress.say(f"IDs written without a fault: of training queries {memory.pairs:.1%}{items}")
    return _write(writer, generator, lessons, memory, config, dim)


def _write(
    writer: ArtifactWriter,
    generator: Generator,
    lessons: _Lessons,
    memory: Memory,
    config: BaselineConfig,
    dim: int,
) -> Baseline:
    state = State({}, ()) if lessons.giver is None else lessons.giver.state()
    write_weights(writer.path / GENERATOR, generator.state_dict())
    write_weights(writer.path / GIVER, state.tensors)
    write_json(writer.path / WORDS, list(state.words))
    for name, values in zip(KNOWN, (lessons.known, lessons.known_codes), strict=True):
        np.save(writer.path / f"{name}.npy", values)
    manifest = writer.finish(
        facts={"dim": dim, "sizes": list(lessons.sizes), "memory": memory._asdict()},
        scratch=("tokenizer",),
    )
    return Baseline(config, generator, lessons.known, lessons.known_codes, lessons.giver, memory, manifest)


def drawn(items: int, size: int, step: int, seed: int) -> Int64[np.ndarray, " rows"]:
    """The items that a step indexes: all of them in a new order, pass after pass."""
    places = np.arange(step * size, (step + 1) * size)
    passes = places // items
    orders = {
        number: np.random.default_rng([seed, number, 2]).permutation(items)
        for number in np.unique(passes).tolist()
    }
    return np.array([orders[number][place % items] for number, place in zip(passes, places, strict=True)])


@torch.inference_mode()
def writes(
    generator: Generator, embeddings: Float[Tensor, "items dim"], codes: Int64[Tensor, "items levels"]
) -> float:
    """Share of the items whose whole ID is what the decoder finds most probable, code by code."""
    hidden = generator(embeddings, codes)
    is_right = torch.ones(len(codes), dtype=torch.bool)
    for level in range(len(generator.sizes)):
        is_right &= generator.level_logits(hidden[:, level], level).argmax(dim=1) == codes[:, level]
    return float(is_right.float().mean())


def _memory(generator: Generator, lessons: _Lessons, seed: int) -> Memory:
    batch = lessons.pairs.draw(0, SAMPLE, seed=seed + 1)
    asked = lessons.asked[torch.from_numpy(batch.query_rows)].float()
    of_pairs = writes(generator, asked, torch.from_numpy(lessons.codes[batch.candidate_rows]).long())
    if lessons.pool is None:
        return Memory(of_pairs, None)
    rows = drawn(len(lessons.pool.numbers), min(SAMPLE, len(lessons.pool.numbers)), 0, seed + 1)
    embeddings = lessons.pool.embeddings[torch.from_numpy(rows)]
    return Memory(of_pairs, writes(generator, embeddings, torch.from_numpy(lessons.pool_codes[rows]).long()))
