"""Stage 0: the ``small`` encoder from scratch, with the contrastive loss of CLIP (paper, equation 2)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Shaped
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from genius_search.artifact import fingerprint_of
from genius_search.config import to_json
from genius_search.data.features import FeatureBatch, Pairs, Shard, read_shards, to_float16
from genius_search.data.mbeir import Instructions
from genius_search.encoders.base import Encoder, Keys
from genius_search.encoders.small import (
    PADDING,
    SmallEncoder,
    SmallNetwork,
    create_small,
    describe,
    load_small,
)
from genius_search.nn import parallel
from genius_search.nn.losses import contrastive_loss, phrase_loss, word_loss
from genius_search.progress import Progress
from genius_search.recipe import AdapterConfig, EncoderConfig
from genius_search.records import Modality, format_text
from genius_search.training.features import (
    Embedded,
    TrainingRecords,
    embed_training,
    fingerprint_of_files,
    write_features,
)
from genius_search.training.loop import Stage, Step, StepResult, num_steps, train
from genius_search.writing import ArtifactWriter

ENCODER_KIND: Final = "encoder"
FORWARD_BATCH: Final = 2048
NUM_PHRASES: Final = 512
"""Phrases drawn from a batch, at most."""
MAX_PHRASE_WORDS: Final = 4
"""Words of a phrase, at most."""
PHRASE_SHARE: Final = 0.5
"""Weight of the loss of phrases, as a share of that of words."""
TEXT_SHARE: Final = 0.2
"""Weight of the loss of phrases that find texts, likewise. With .5, questions find fewer answers."""
WORD_TEMPERATURE: Final = 0.1
"""Divides the cosines of words and phrases with items, of which many are right at once."""


def train_encoder(
    records: TrainingRecords,
    folder: Path,
    config: EncoderConfig,
    *,
    progress: Progress,
    device: str = "cpu",
) -> Embedded:
    """Train ``small`` on a data set and embed the training records, or open what was done already.

    Pictures are described and texts tokenised once; training runs on those numbers, and so does the
    embedding of the training records afterwards.

    Parameters
    ----------
    folder
        folder of the model; receives ``encoder/`` and ``features/``, and meanwhile ``prepared/``.
    """
    home, features, prepared_folder = (
        folder / name for name in ("encoder", "features", "prepared")
    )
    stage = encoder_stage(records, home, config)
    if stage.is_finished:
        encoder = load_small(home, device=device)
        if not prepared_folder.exists():  # a finished model keeps only the features
            return parallel.run_in_rank_order(
                lambda: embed_training(records, encoder, features, progress=progress)
            )
    else:
        progress.say("learning the words of the training texts")
        encoder = create_small(config.network, records.all_texts(), seed=config.training.seed)
    frozen = _Preparation(encoder)
    prepared = parallel.run_in_rank_order(
        lambda: embed_training(records, frozen, prepared_folder, progress=progress)
    )
    if not stage.is_finished:
        encoder.network.to(device)
        pairs = Pairs(records.lines, prepared.queries, prepared.candidates)
        train(
            encoder.network,
            EncoderStep(encoder, pairs, config, records.data.instructions),
            total=num_steps(len(pairs), config.training),
            config=config.training,
            folder=stage.path,
            progress=progress,
            name="train encoder",
        )

        def write(writer: ArtifactWriter) -> None:
            encoder.save(writer.path)
            writer.finish()

        stage.write(write)
        encoder = load_small(home, device=device)
    with torch.no_grad():
        return parallel.run_in_rank_order(
            lambda: embed_prepared(encoder, prepared, features, partial(embed_shard, encoder))
        )


def encoder_stage(
    records: TrainingRecords, home: Path, config: EncoderConfig | AdapterConfig, **inputs: str
) -> Stage:
    """Return the stage of an encoder that is trained on these records."""
    pool = fingerprint_of_files(records.data.training_pools())
    inputs |= {"queries": records.fingerprint, "pool": pool}
    return Stage(home, kind=ENCODER_KIND, config=to_json(config), inputs=inputs)


def embed_prepared(
    encoder: Encoder, prepared: Embedded, folder: Path, make: Callable[[Shard], Shard]
) -> Embedded:
    """Write the features that an encoder makes of prepared ones, shard by shard."""
    queries, candidates = (
        write_features(
            folder / source.manifest.folder.name,
            read_shards(source.manifest.folder),
            make,
            encoder,
            inputs={"records": source.manifest.inputs["records"]},
        )
        for source in (prepared.queries, prepared.candidates)
    )
    return Embedded(encoder, queries, candidates)


class EncoderStep:
    """One step of stage 0: pairs and, with ``word_weight``, short queries of the batch's words."""

    def __init__(
        self, encoder: SmallEncoder, pairs: Pairs, config: EncoderConfig, instructions: Instructions
    ) -> None:
        self.network = encoder.network
        self.pairs = pairs
        self.config = config
        pictures = (Modality.IMAGE, Modality.IMAGE_TEXT)
        self.picture_queries = WordQueries(encoder, instructions, wanted=pictures)
        self.text_queries = WordQueries(encoder, instructions, wanted=(Modality.TEXT,))

    def __call__(self, step: Step) -> StepResult:
        """Return the loss of a batch."""
        config, network = self.config, self.network
        batch = self.pairs.draw(step.number, config.training.batch_size, seed=config.training.seed)
        queries = self.pairs.queries.gather(batch.query_rows)
        candidates = self.pairs.candidates.gather(batch.candidate_rows)
        pictures, views = [], []
        for items in (queries, candidates):
            image, text = network.towers(FeatureBatch(*map(parallel.rows_of_rank, items)))
            pictures.append(
                parallel.gather(image)[torch.from_numpy(items.has_image).to(network.device)]
            )
            views.append(parallel.gather(F.normalize(image + text, dim=-1)))
        contrastive = contrastive_loss(
            views[0],
            views[1],
            torch.from_numpy(batch.false_negatives).to(network.device),
            temperature=config.temperature,
            direction="both",
        )
        if not config.word_weight:
            return StepResult(contrastive, {})
        words, present = words_of_images(queries, candidates)
        described = present.any(dim=1)
        images = F.normalize(torch.cat(pictures)[described.to(network.device)], dim=-1)
        present = present[described]
        phrases, shown = draw_phrases(present, step.generator)
        is_text = torch.from_numpy(candidates.has_text & ~candidates.has_image)
        texts = views[1][is_text.to(network.device)]
        text_words, in_texts = number_words(torch.from_numpy(candidates.text).long()[is_text])
        text_phrases, told = draw_phrases(in_texts, step.generator)
        of_words, of_phrases, of_texts = self._embed(
            self.picture_queries.write(words[:, None], step.generator),
            self.picture_queries.write(tokens_of(phrases, words), step.generator),
            self.text_queries.write(tokens_of(text_phrases, text_words), step.generator),
        )
        present, shown, told = (part.to(network.device) for part in (present, shown, told))
        losses = {
            "contrastive": contrastive,
            "words": word_loss(images, of_words, present, temperature=WORD_TEMPERATURE),
            "phrases": phrase_loss(of_phrases, images, shown, temperature=WORD_TEMPERATURE),
            "texts": phrase_loss(of_texts, texts, told, temperature=WORD_TEMPERATURE),
        }
        of_all = losses["words"] + PHRASE_SHARE * losses["phrases"] + TEXT_SHARE * losses["texts"]
        loss = contrastive + config.word_weight * of_all
        return StepResult(loss, {name: value.detach() for name, value in losses.items()})

    def _embed(self, *queries: Int64[Tensor, "_ _"]) -> tuple[Float[Tensor, "_ dim"], ...]:
        """Return unit vectors of queries; one pass for all, since each costs whole word tables."""
        width = max(rows.shape[1] for rows in queries)
        together = torch.cat([F.pad(rows, (0, width - rows.shape[1])) for rows in queries])
        vectors = F.normalize(self.network.text(together), dim=-1)
        parts: tuple[Tensor, ...] = vectors.split([len(rows) for rows in queries])
        return parts


def tokens_of(
    phrases: Int64[Tensor, "phrases most"], words: Int64[Tensor, " words"]
) -> Int64[Tensor, "phrases most"]:
    """Return the tokens of phrases, whose columns number the words; -1 becomes padding."""
    return F.pad(words, (0, 1), value=PADDING)[phrases]


class WordQueries:
    """Queries of words, each after an instruction for the wanted modalities or none, as tokens."""

    def __init__(
        self, encoder: SmallEncoder, instructions: Instructions, *, wanted: Collection[Modality]
    ) -> None:
        texts = [
            format_text(text)
            for key, row in instructions.rows.items()
            if key.query is Modality.TEXT and key.candidate in wanted
            for text in row
        ]
        *rows, stop = encoder.prepare_texts(["", *texts, "."]).long()
        self._instructions = torch.stack(rows)
        self._stop = int(stop[0])  # every query ends with a full stop

    def write(
        self, words: Int64[Tensor, "queries words"], generator: torch.Generator
    ) -> Int64[Tensor, "queries tokens"]:
        """Return queries of these words, of which there may be fewer, with instructions drawn at random."""
        chosen = torch.randint(len(self._instructions), words.shape[:1], generator=generator)
        rows = F.pad(self._instructions[chosen], (0, words.shape[1] + 1))
        ends = (rows != PADDING).sum(dim=1, keepdim=True)
        rows.scatter_(1, ends + torch.arange(words.shape[1]), words)
        ends = (rows != PADDING).sum(dim=1, keepdim=True)
        return rows.scatter_(1, ends, self._stop)


def draw_phrases(
    present: Bool[Tensor, "items words"], generator: torch.Generator
) -> tuple[Int64[Tensor, "phrases most"], Bool[Tensor, "phrases items"]]:
    """Draw up to ``NUM_PHRASES`` items and 1 to ``MAX_PHRASE_WORDS`` words of each, in any order.

    A word is drawn in proportion to one over the square root of the number of its items.

    Returns
    -------
    tuple
        columns of the batch's words, -1 after the last; and the items that have all words of each
        phrase.
    """
    with_words = present.any(dim=1).nonzero().squeeze(1)
    drawn = with_words[torch.randperm(len(with_words), generator=generator)[:NUM_PHRASES]]
    own = present[drawn]
    # Weighted sampling without replacement (Efraimidis and Spirakis, 2006), in logarithms.
    keys = torch.rand(own.shape, generator=generator).log() * present.sum(dim=0).sqrt()
    most = min(MAX_PHRASE_WORDS, own.shape[1])
    words = keys.masked_fill(~own, float("-inf")).topk(most, dim=1).indices
    sizes = torch.randint(1, MAX_PHRASE_WORDS + 1, (len(drawn), 1), generator=generator)
    unused = torch.arange(most) >= sizes.minimum(own.sum(dim=1, keepdim=True))
    # An item has all words of a phrase if it has as many of them as the phrase has.
    used = torch.zeros(len(drawn), present.shape[1]).scatter_(1, words, (~unused).float())
    relevant = used @ present.T.float() == used.sum(dim=1, keepdim=True)
    return words.masked_fill(unused, -1), relevant


def words_of_images(
    queries: FeatureBatch, candidates: FeatureBatch
) -> tuple[Int64[Tensor, " words"], Bool[Tensor, "images words"]]:
    """Return the words that go with some image of a batch of pairs, and which go with each image.

    With a query's image go the words of the candidate's text, but not its own, which may ask for a
    change. With a candidate's image go its own words and those of a query that is text alone. An
    image without words may show anything.

    Returns
    -------
    tuple
        the tokens, ascending; and a row for each query with an image, then for each candidate
        with one.
    """
    asked, shown = (torch.from_numpy(items.text).long() for items in (queries, candidates))
    asks_by_image, has_image = map(torch.from_numpy, (queries.has_image, candidates.has_image))
    asked = asked.masked_fill(asks_by_image[:, None], PADDING)
    described = torch.cat([shown, asked], dim=1)
    return number_words(torch.cat([described[asks_by_image], described[has_image]]))


def number_words(
    rows: Int64[Tensor, "items tokens"],
) -> tuple[Int64[Tensor, " words"], Bool[Tensor, "items words"]]:
    """Return the distinct tokens of some texts, ascending, and which of them each text has."""
    words, columns = rows.unique(return_inverse=True)
    present = torch.zeros(len(rows), len(words), dtype=torch.bool).scatter_(1, columns, value=True)
    is_word = words != PADDING
    return words[is_word], present[:, is_word]


class _Preparation:
    """The frozen first half of ``small`` as an encoder of its own: descriptors and token numbers."""

    needs_pixels = True
    spec = "small, not yet trained"

    def __init__(self, encoder: SmallEncoder) -> None:
        self._encoder = encoder
        self.dim = 0
        self.fingerprint = fingerprint_of([encoder.config.max_tokens, encoder.tokenizer.to_str()])

    def image_features(
        self, images: Sequence[Image.Image], _: Keys = ()
    ) -> Shaped[Tensor, "items pixels"]:
        return describe(images)

    def text_features(self, texts: Sequence[str], _: Keys = ()) -> Shaped[Tensor, "items tokens"]:
        return self._encoder.prepare_texts(texts)


def embed_shard(encoder: SmallEncoder, shard: Shard) -> Shard:
    """Replace a shard's prepared pictures and texts by their features."""
    network: SmallNetwork = encoder.network

    def apply(forward: Callable[[Tensor], Tensor], prepared: np.ndarray) -> np.ndarray:
        rows = torch.from_numpy(prepared.astype(np.float32)).split(FORWARD_BATCH)
        parts = [forward(part.to(network.device)).cpu() for part in rows if len(part)]
        return to_float16(torch.cat([torch.zeros(0, encoder.dim), *parts]).numpy())

    return shard._replace(
        image=apply(network.image, shard.image),
        text=apply(lambda tokens: network.text(tokens.long()), shard.text),
    )
