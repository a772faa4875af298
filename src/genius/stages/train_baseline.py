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

from genius.artifact import ArtifactWriter, Manifest, open_artifact, write_json
from genius.baselines.id_kinds import (
    NUMBERED,
    TRAITS,
    Giver,
    Items,
    Kind,
    State,
    giver_of,
    make_ids,
)
from genius.baselines.retrieval_tokenizer import RetrievalTokenizer
from genius.config import (
    Count,
    GeneratorConfig,
    Natural,
    Positive,
    TrainingConfig,
    checked,
    from_json,
    to_json,
)
from genius.data.mbeir import MBeir, read_queries
from genius.data.pairs import Pairs
from genius.errors import ArtifactMismatch, UsageError
from genius.model import Genius
from genius.models.generator import Generator
from genius.stages.baseline_items import (
    Sources,
    known_texts,
    pool_items,
    rows_of,
    together,
    training_features,
    training_items,
)
from genius.stages.embed_records import fingerprint_of_files
from genius.stages.loop import CHECKPOINT, Moment, StepResult, num_steps, train
from genius.stages.progress import Progress
from genius.stages.train_generator import augment
from genius.stages.train_quantizer import fuse
from genius.stages.train_tokenizer import train_tokenizer
from genius.weights import write_weights

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

    def step(moment: Moment) -> StepResult:
        batch = lessons.pairs.draw(moment.step, size, seed=training.seed)
        chosen = torch.from_numpy(batch.candidate_rows)
        asked = augment(
            lessons.asked[torch.from_numpy(batch.query_rows)].float(),
            lessons.wanted[chosen],
            settings,
            moment.generator,
        )
        wanted = codes[chosen]
        if lessons.pool is not None:
            rows = torch.from_numpy(drawn(len(lessons.pool.numbers), size, moment.step, training.seed))
            asked = torch.cat([asked, lessons.pool.embeddings[rows]])
            wanted = torch.cat([wanted, pool_codes[rows]])
        losses = generator.loss(asked, wanted)
        by_level = {f"level_{level}": value for level, value in enumerate(losses.detach())}
        return StepResult(losses.mean(), by_level)

    train(
        generator,
        step,
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
        scratch=(CHECKPOINT, "tokenizer"),
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
