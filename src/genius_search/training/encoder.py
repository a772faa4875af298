"""Stage 0, ``genius train encoder``: the ``small`` encoder from scratch, as CLIP or as BLIP is trained."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

from genius_search.artifact import fingerprint_of
from genius_search.config import checked, to_json
from genius_search.data.features import ABSENT, FeatureBatch, Features, Shard
from genius_search.data.mbeir import Instructions
from genius_search.data.pairs import Batch, Pairs
from genius_search.embed import transform
from genius_search.embed_mbeir import fingerprint_of_files
from genius_search.encoders.base import Encoder, ImageInput, TextInput, load_encoder
from genius_search.encoders.pretrained import ImageTower
from genius_search.encoders.small import (
    AnySmallEncoder,
    EmbeddingNetwork,
    SmallNetwork,
    create_small,
    load_small,
)
from genius_search.encoders.small_texts import PADDING
from genius_search.encoders.static import StaticEncoder, WordVectors
from genius_search.errors import UsageError
from genius_search.nn import parallel
from genius_search.nn.losses import contrastive_loss, phrase_loss, word_loss
from genius_search.presets import EncoderConfig
from genius_search.progress import Progress
from genius_search.records import Modality, format_text
from genius_search.training.embed import Embedded, TrainingFeatures, TrainingRecords, embed_training
from genius_search.training.loop import Stage, Step, StepResult, Watch, num_steps, random_for, train
from genius_search.training.validation import Validation, validation_files
from genius_search.writing import ArtifactWriter

KIND: Final = "encoder"
FORWARD_BATCH: Final = 2048
NUM_PHRASES: Final = 512
"""Phrases drawn from a batch, at most."""
MOST_WORDS: Final = 4
"""Words of a phrase, at most."""
PHRASE_SHARE: Final = 0.5
"""Weight of the loss of phrases, as a share of that of words."""
WORD_TEMPERATURE: Final = 0.1
"""Divides the cosines of images and words, of which many are right at once."""
NUM_EXAMPLES: Final = 8192
"""Candidates whose images are compared before training."""
NO_CANDIDATE: Final = -1
"""Candidate number of the random vectors that a queue begins with."""


class Views(NamedTuple):
    """Unit vectors of the pairs of a batch; row i of one belongs to row i of the other."""

    queries: Float[Tensor, "batch dim"]
    candidates: Float[Tensor, "batch dim"]


class WordQueries(NamedTuple):
    """The instructions that go before a word in a query for images, as tokens; one of them is empty."""

    instructions: Int64[Tensor, "instructions tokens"]
    stop: int
    """Token of the full stop, with which every query ends."""

    @staticmethod
    def of(encoder: AnySmallEncoder, instructions: Instructions) -> WordQueries:
        """Read the instructions of text queries that want an image."""
        texts = [
            format_text(text)
            for key, row in instructions.rows.items()
            if key.query is Modality.TEXT and key.candidate is not Modality.TEXT
            for text in row
        ]
        *rows, stop = encoder.prepare_texts(["", *texts, "."]).long()
        return WordQueries(torch.stack(rows), int(stop[0]))

    def write(
        self, words: Int64[Tensor, "queries words"], generator: torch.Generator
    ) -> Int64[Tensor, "queries tokens"]:
        """Return queries of these words, of which there may be fewer, with instructions drawn at random."""
        chosen = torch.randint(len(self.instructions), words.shape[:1], generator=generator)
        rows = F.pad(self.instructions[chosen], (0, words.shape[1] + 1))
        ends = (rows != PADDING).sum(dim=1, keepdim=True)
        rows.scatter_(1, ends + torch.arange(words.shape[1]), words)
        ends = (rows != PADDING).sum(dim=1, keepdim=True)
        return rows.scatter_(1, ends, self.stop)


class Phrases(NamedTuple):
    """Some words of images, and the images of the batch that have all of them."""

    words: Int64[Tensor, "phrases most"]
    """Columns of the batch's words; -1 after the last."""
    relevant: Bool[Tensor, "phrases images"]

    @staticmethod
    def draw(present: Bool[Tensor, "images words"], generator: torch.Generator) -> Phrases:
        """Draw up to ``NUM_PHRASES`` images and 1 to ``MOST_WORDS`` words of each, in any order.

        A word is drawn in proportion to one over the square root of the number of its images.
        """
        with_words = present.any(dim=1).nonzero().squeeze(1)
        drawn = with_words[torch.randperm(len(with_words), generator=generator)[:NUM_PHRASES]]
        own = present[drawn]
        # Weighted sampling without replacement (Efraimidis and Spirakis, 2006), in logarithms.
        keys = torch.rand(own.shape, generator=generator).log() * present.sum(dim=0).sqrt()
        most = min(MOST_WORDS, own.shape[1])
        words = keys.masked_fill(~own, float("-inf")).topk(most, dim=1).indices
        sizes = torch.randint(1, MOST_WORDS + 1, (len(drawn), 1), generator=generator)
        unused = torch.arange(most) >= sizes.minimum(own.sum(dim=1, keepdim=True))
        relevant = (present.T[words] | unused[:, :, None]).all(dim=1)
        return Phrases(words.masked_fill(unused, -1), relevant)


class MomentumPair(nn.Module):
    """A network, its slow copy and their queue, all of which is part of a checkpoint (BLIP).

    Parameters
    ----------
    dim
        width of the vectors.
    queue
        number of earlier pairs to compare with.
    decay
        share of itself that the copy keeps at a step.
    """

    queued_queries: Tensor
    queued_candidates: Tensor
    queued_numbers: Tensor

    def __init__(
        self, network: nn.Module, *, dim: int, queue: int, decay: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.network = network
        self.slow = copy.deepcopy(network).requires_grad_(requires_grad=False)
        self.decay = decay
        for name in ("queued_queries", "queued_candidates"):
            vectors = F.normalize(torch.randn(queue, dim, generator=generator), dim=-1)
            self.register_buffer(name, vectors)
        self.register_buffer("queued_numbers", torch.full((queue,), NO_CANDIDATE))

    @torch.no_grad()
    def follow(self) -> None:
        """Move the copy towards the network."""
        for slow, fast in zip(self.slow.parameters(), self.network.parameters(), strict=True):
            slow.lerp_(fast, 1 - self.decay)

    @torch.no_grad()
    def remember(self, slow: Views, numbers: Int64[Tensor, " batch"]) -> None:
        """Put a batch in front of the queue; the oldest pairs drop out."""
        for name, new in (
            ("queued_queries", slow.queries),
            ("queued_candidates", slow.candidates),
            ("queued_numbers", numbers),
        ):
            queue = getattr(self, name)
            queue.copy_(torch.cat([new, queue])[: len(queue)])

    def loss(
        self,
        fast: Views,
        slow: Views,
        numbers: Int64[Tensor, " batch"],
        false_negatives: Bool[Tensor, "batch batch"],
        *,
        temperature: float,
        softness: float,
    ) -> Float[Tensor, ""]:
        """Return the cross-entropy in both directions against soft targets.

        Parameters
        ----------
        numbers
            candidate numbers; pairs of the same candidate share the hard target.
        false_negatives
            true for candidates of the batch that answer another query too; they share its hard target.
        softness
            share of the targets that is the copy's own similarities (BLIP's alpha).
        """
        same = numbers[:, None] == torch.cat([numbers, self.queued_numbers])[None]
        batch = len(numbers)
        to_candidates, to_queries = same.clone(), same.clone()
        to_candidates[:, :batch] |= false_negatives
        to_queries[:, :batch] |= false_negatives.T
        candidates = torch.cat([slow.candidates, self.queued_candidates])
        queries = torch.cat([slow.queries, self.queued_queries])
        with torch.autocast(numbers.device.type, enabled=False):  # a low temperature magnifies rounding
            return (
                _soft_loss(fast.queries, slow.queries, candidates, to_candidates, temperature, softness)
                + _soft_loss(fast.candidates, slow.candidates, queries, to_queries, temperature, softness)
            ) / 2


def _soft_loss(
    fast: Float[Tensor, "batch dim"],
    slow: Float[Tensor, "batch dim"],
    others: Float[Tensor, "others dim"],
    positive: Bool[Tensor, "batch others"],
    temperature: float,
    softness: float,
) -> Float[Tensor, ""]:
    hard = F.normalize(positive.float(), p=1, dim=1)
    with torch.no_grad():
        soft = (slow @ others.T / temperature).softmax(dim=1)
    return F.cross_entropy(fast @ others.T / temperature, softness * soft + (1 - softness) * hard)


def train_encoder(
    records: TrainingRecords,
    folder: Path,
    config: EncoderConfig,
    *,
    progress: Progress,
    device: str = "cpu",
    download: bool = False,
) -> Embedded:
    """Train ``small`` on a data set and embed the training records, or open what was done already.

    Pictures are described and texts tokenised once; training runs on those numbers, and so does the
    embedding of the training records afterwards.

    Parameters
    ----------
    folder
        folder of the model; receives ``encoder/`` and ``features/``, and meanwhile ``prepared/``.
    download
        allow downloading the pretrained network of pictures.
    """
    config = checked(config)
    settings = to_json(config)
    if not config.network.has_momentum:
        del settings["momentum"]
    home, prepared_folder = folder / "encoder", folder / "prepared"
    watched = validation_files(records.data) if config.patience else []
    validated = {"validation": fingerprint_of_files(watched)} if watched else {}
    stage = Stage(home, kind=KIND, config=settings, inputs={"records": records.fingerprint, **validated})
    torch.manual_seed(config.training.seed)

    def embed(encoder: Encoder, target: Path) -> TrainingFeatures:
        return parallel.in_turn(lambda: embed_training(records, encoder, target, progress=progress))

    if stage.is_finished:
        encoder = load_small(home, device=device)
        if not prepared_folder.exists():  # a finished model keeps only the features
            return Embedded(encoder, embed(encoder, folder / "features"))
    else:
        if not config.words:
            progress.say("learning the words of the training texts")
        pictures = ImageTower(config.pictures, download=download, device=device) if config.pictures else None
        encoder = create_small(
            config.network,
            records.all_texts(),
            words=_open_words(config.words),
            pictures=pictures,
            seed=config.training.seed,
        )
    preparation = _Preparation(encoder)
    prepared = embed(preparation, prepared_folder)
    if not stage.is_finished:
        place = prepared_folder / "validation"
        validation = _prepare_validation(records, preparation, place, progress) if watched else None
        pairs = Pairs(records.lines(), *prepared)
        _train_on(pairs, encoder, stage.path, config, records, validation, progress, device)

        def write(writer: ArtifactWriter) -> None:
            encoder.save(writer.path)
            writer.finish()

        stage.write(write)
        encoder = load_small(home, device=device)

    @torch.no_grad()
    def embed_prepared() -> TrainingFeatures:
        queries, candidates = (
            transform(
                source,
                folder / "features" / source.manifest.folder.name,
                change=partial(embed_shard, encoder),
                inputs={"records": source.manifest.inputs["records"]},
                encoder=encoder,
            )
            for source in prepared
        )
        return TrainingFeatures(queries, candidates)

    return Embedded(encoder, parallel.in_turn(embed_prepared))


def _prepare_validation(
    records: TrainingRecords, encoder: Encoder, folder: Path, progress: Progress
) -> Validation:
    return parallel.in_turn(lambda: Validation.prepare(records.data, encoder, folder, progress=progress))


def _train_on(
    pairs: Pairs,
    encoder: AnySmallEncoder,
    folder: Path,
    config: EncoderConfig,
    records: TrainingRecords,
    validation: Validation | None,
    progress: Progress,
    device: str,
) -> None:
    """Train the network of an encoder; the folder receives the checkpoint and the log."""
    network = encoder.network
    epoch = math.ceil(len(pairs) / config.training.batch_size)
    if isinstance(network, SmallNetwork):
        network.begin_with_images(_some_descriptions(pairs.candidates, config.training.seed))
    word_queries = WordQueries.of(encoder, records.data.instructions)
    module, take_step = _training(network.to(device), pairs, config, word_queries)
    train(
        module,
        take_step,
        total=num_steps(len(pairs), config.training),
        config=config.training,
        folder=folder,
        progress=progress,
        name="train encoder",
        watch=validation and Watch(partial(validation.measure, network.embedding), epoch, config.patience),
    )
    if isinstance(network, SmallNetwork):
        network.keep_word_lengths()


def _some_descriptions(candidates: Features, seed: int) -> Float[Tensor, "items pixels"]:
    """Return the descriptions of the images among ``NUM_EXAMPLES`` candidates drawn at random."""
    drawn = np.random.default_rng(seed).permutation(len(candidates))[:NUM_EXAMPLES]
    batch = candidates.gather(np.sort(drawn))
    return batch.image[batch.has_image]


def _open_words(spec: str) -> WordVectors | None:
    """Open the word vectors to begin with; raise :class:`UsageError` if the spec names something else."""
    if not spec:
        return None
    opened = load_encoder(spec)
    if not isinstance(opened, StaticEncoder):
        raise UsageError(
            f"words {spec!r} are not static embeddings; give text:wordllama or text:FOLDER of some"
        )
    return opened.words()


def _training(
    network: EmbeddingNetwork, pairs: Pairs, config: EncoderConfig, word_queries: WordQueries
) -> tuple[nn.Module, Callable[[Step], StepResult]]:
    """Return the module to optimise, and the step: contrastive (equation 2) or with a slow copy (BLIP)."""
    training = config.training

    def draw(step: Step) -> Batch:
        return pairs.draw(step.number, training.batch_size, seed=training.seed)

    def views(network: EmbeddingNetwork, batch: Batch) -> Views:
        """Return the unit vectors of a batch, of all ranks."""

        def embed(features: Features, rows: np.ndarray) -> Tensor:
            own = features.gather(parallel.own_rows(rows))
            return parallel.gather(F.normalize(network.embedding(own), dim=-1))

        return Views(embed(pairs.queries, batch.query_rows), embed(pairs.candidates, batch.candidate_rows))

    def contrastive(step: Step) -> StepResult:
        batch = draw(step)
        if config.word_weight and isinstance(network, SmallNetwork):
            return _learn_words(network, pairs, batch, config, word_queries, step.generator)
        return StepResult(_contrast(views(network, batch), batch, config), {})

    if not config.network.has_momentum:
        return network, contrastive
    device = network.device
    pair = MomentumPair(
        network,
        dim=network.dim,
        queue=config.momentum.queue,
        decay=config.momentum.decay,
        generator=random_for(training.seed, 0),
    ).to(device)
    steps_per_epoch = len(pairs) / training.batch_size

    def with_momentum(step: Step) -> StepResult:
        batch = draw(step)
        pair.follow()
        with torch.no_grad():
            slow = views(pair.slow, batch)  # type: ignore[arg-type]
        numbers = torch.from_numpy(batch.candidate_rows).to(device)
        loss = pair.loss(
            views(network, batch),
            slow,
            numbers,
            batch.false_negatives.to(device),
            temperature=config.temperature,
            softness=config.momentum.softness * min(1.0, step.number / steps_per_epoch),
        )
        pair.remember(slow, numbers)
        return StepResult(loss, {})

    return pair, with_momentum


def _contrast(both: Views, batch: Batch, config: EncoderConfig) -> Tensor:
    return contrastive_loss(
        both.queries,
        both.candidates,
        batch.false_negatives.to(both.queries.device),
        temperature=config.temperature,
        direction="both",
    )


def _learn_words(
    network: SmallNetwork,
    pairs: Pairs,
    batch: Batch,
    config: EncoderConfig,
    word_queries: WordQueries,
    generator: torch.Generator,
) -> StepResult:
    """Return the contrastive loss, plus the weighted losses of the words of images and of phrases."""
    device = network.device
    queries = pairs.queries.gather(batch.query_rows)
    candidates = pairs.candidates.gather(batch.candidate_rows)
    pictures, views = [], []
    for items in (queries, candidates):
        image, text = network.towers(FeatureBatch(*map(parallel.own_rows, items)))
        pictures.append(parallel.gather(image)[items.has_image.to(device)])
        views.append(parallel.gather(F.normalize(image + text, dim=-1)))
    contrastive = _contrast(Views(*views), batch, config)
    words, present = words_of_images(queries, candidates)
    phrases = Phrases.draw(present, generator)
    images = F.normalize(torch.cat(pictures), dim=-1)

    def embed(tokens: Tensor) -> Tensor:
        return F.normalize(network.text(word_queries.write(tokens, generator).to(device)), dim=-1)

    of_words = word_loss(images, embed(words[:, None]), present.to(device), temperature=WORD_TEMPERATURE)
    of_phrases = phrase_loss(
        embed(F.pad(words, (0, 1), value=PADDING)[phrases.words]),
        images,
        phrases.relevant.to(device),
        temperature=config.temperature,
    )
    measures = {"contrastive": contrastive, "words": of_words, "phrases": of_phrases}
    loss = contrastive + config.word_weight * (of_words + PHRASE_SHARE * of_phrases)
    return StepResult(loss, {name: value.detach() for name, value in measures.items()})


def words_of_images(
    queries: FeatureBatch, candidates: FeatureBatch
) -> tuple[Int64[Tensor, " words"], Bool[Tensor, "images words"]]:
    """Return the words that go with some image of a batch of pairs, and which go with each image.

    With a candidate's image go its own text and the query's; with a query's image goes the candidate's text,
    but not its own, which may ask for a change.

    Returns
    -------
    tuple
        the tokens, ascending; and a row for each query with an image, then for each candidate
        with one.
    """
    wanted, own = queries.text.long(), candidates.text.long()
    nothing = torch.full_like(wanted, PADDING)
    rows = torch.cat(
        [
            torch.cat([own, nothing], dim=1)[queries.has_image],
            torch.cat([own, wanted], dim=1)[candidates.has_image],
        ]
    )
    words, places = rows.unique(return_inverse=True)
    present = torch.zeros(len(rows), len(words), dtype=torch.bool).scatter_(1, places, value=True)
    keep = words != PADDING
    return words[keep], present[:, keep]


class _Preparation:
    """The frozen first half of ``small`` as an encoder of its own: descriptors and token numbers."""

    needs_pixels = True
    spec = "small, not yet trained"

    def __init__(self, encoder: AnySmallEncoder) -> None:
        self._encoder = encoder
        self.dim = 0
        self.fingerprint = fingerprint_of(
            [
                encoder.config.max_tokens,
                encoder.tokenizer.to_str(),
                *(["outlines"] if encoder.config.outlines else []),
                *([encoder.pictures.fingerprint] if encoder.pictures else []),
            ]
        )

    def image_features(self, images: Sequence[ImageInput]) -> Shaped[Tensor, "items pixels"]:
        return self._encoder.prepare_images([item.image for item in images if item.image is not None])

    def text_features(self, texts: Sequence[TextInput]) -> Shaped[Tensor, "items tokens"]:
        return self._encoder.prepare_texts([item.text for item in texts])


def embed_shard(encoder: AnySmallEncoder, shard: Shard) -> Shard:
    """Replace a shard's prepared pictures and texts by their features.

    A joint encoder's vectors are stored as texts, one for each distinct combination of picture and text.
    """
    network = encoder.network
    image, text = (torch.from_numpy(content.astype(np.float32)) for content in (shard.image, shard.text))
    nothing = torch.zeros(0, encoder.dim, dtype=torch.float16)

    def join(forward: Callable[[Tensor], Tensor], prepared: Tensor) -> np.ndarray:
        parts = [
            forward(part.to(network.device)).cpu() for part in prepared.split(FORWARD_BATCH) if len(part)
        ]
        return torch.cat([nothing, *parts]).numpy()

    if isinstance(network, SmallNetwork):
        return shard._replace(image=join(network.image, image), text=join(network.text, text.long()))
    both = np.stack([shard.image_index, shard.text_index], axis=1)
    distinct, rows = np.unique(both, axis=0, return_inverse=True)
    return shard._replace(
        image_index=np.full_like(shard.image_index, ABSENT),
        text_index=rows.astype(np.int64),
        image=nothing.numpy(),
        text=join(
            lambda part: network.embedding(FeatureBatch.of(image, text, *part.cpu().numpy().T)),
            torch.from_numpy(distinct),
        ),
    )
