"""Stage 0: training ``small`` from scratch with CLIP's contrastive loss (paper, equation 2)."""

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

from genius_search.artifact import fingerprint_of, open_artifact
from genius_search.config import to_json
from genius_search.data.features import (
    FEATURES_KIND,
    FeatureBatch,
    Features,
    Pairs,
    Shard,
    to_float16,
)
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
from genius_search.encoders.store import write_features
from genius_search.nn import parallel
from genius_search.nn.losses import contrastive_loss, phrase_loss, word_loss
from genius_search.progress import Progress
from genius_search.recipe import AdapterConfig, EncoderConfig
from genius_search.records import Modality, format_text
from genius_search.training.loop import Stage, Step, StepResult, num_steps, share_of_rank, train
from genius_search.training.records import (
    TrainingRecords,
    embed_training,
    fingerprint_of_files,
)

ENCODER_KIND: Final = "encoder"
FORWARD_BATCH: Final = 2048
"""Number of items in a forward pass when features are written."""
PREPARED_PART_ROWS: Final = 8192
"""Number of prepared rows that are encoded and saved together."""
MAX_PHRASES: Final = 512
"""Maximum number of phrases drawn from a batch."""
MAX_PHRASE_WORDS: Final = 4
"""Maximum number of words in a phrase."""
PHRASE_SHARE: Final = 0.5
"""Weight of the loss of phrases that find images, relative to the loss of words."""
TEXT_SHARE: Final = 0.2
"""Weight of the loss of phrases that find texts, relative to the loss of words. With .5, questions
find fewer answers."""
WORD_TEMPERATURE: Final = 0.1
"""Divides the cosines of words and phrases with items; it is high, since many items are right."""


def train_encoder(
    records: TrainingRecords,
    folder: Path,
    config: EncoderConfig,
    *,
    progress: Progress,
    device: str = "cpu",
) -> tuple[Encoder, Pairs]:
    """Train ``small`` on a data set, and return it with the pairs of the records that it embedded.

    If the folder holds a finished encoder or features, they are opened. Pictures are turned into
    descriptors and texts into tokens once; training and the final embedding of the records run on
    those numbers.

    Parameters
    ----------
    folder
        folder of the model; receives ``encoder/`` and ``features/``, and until training ends
        ``prepared/`` with descriptors and tokens.
    """
    home = folder / "encoder"
    features = folder / "features"
    prepared_folder = folder / "prepared"
    stage = encoder_stage(records, home, config)
    if stage.is_finished:
        encoder = load_small(home, device=device)
        if not prepared_folder.exists():  # a finished model keeps only the features
            return encoder, embed_training(
                records, encoder, features, progress=progress, share=share_of_rank()
            )
    else:
        progress.say("learning the words of the training texts")
        encoder = create_small(config.network, records.all_texts(), seed=config.training.seed)
    frozen = _Preparation(encoder)
    prepared = embed_training(
        records, frozen, prepared_folder, progress=progress, share=share_of_rank()
    )
    if not stage.is_finished:
        encoder.network.to(device)
        train(
            encoder.network,
            EncoderStep(encoder, prepared, config, records.data.instructions),
            total=num_steps(len(prepared), config.training),
            config=config.training,
            folder=stage.path,
            progress=progress,
            name="train encoder",
        )

        if stage.writer is not None:
            encoder.save(stage.writer.path)
            stage.writer.finish()
        stage.wait()
        encoder = load_small(home, device=device)
    with torch.no_grad():
        return encoder, embed_prepared(encoder, prepared, features, partial(embed_shard, encoder))


def encoder_stage(
    records: TrainingRecords, home: Path, config: EncoderConfig | AdapterConfig, **inputs: str
) -> Stage:
    """Return the stage of training an encoder on the records, with further ``inputs``."""
    pool = fingerprint_of_files(records.data.training_pools())
    inputs |= {"queries": records.fingerprint, "pool": pool}
    return Stage(home, kind=ENCODER_KIND, config=to_json(config), inputs=inputs)


def embed_prepared(
    encoder: Encoder, prepared: Pairs, folder: Path, embed: Callable[[Shard], Shard]
) -> Pairs:
    """Encode prepared features part by part, and write the encoder's features to a folder.

    Ranks share the parts.
    """
    queries = _embed_prepared(encoder, prepared.queries, folder / "queries", embed)
    candidates = _embed_prepared(encoder, prepared.candidates, folder / "candidates", embed)
    return prepared.with_features(queries, candidates)


def _embed_prepared(
    encoder: Encoder, source: Features, folder: Path, embed: Callable[[Shard], Shard]
) -> Features:
    """Encode prepared features of queries or candidates."""
    manifest = open_artifact(source.folder or folder, kind=FEATURES_KIND)
    return write_features(
        folder,
        zip(source.keys.tolist(), range(len(source)), strict=True),
        lambda keyed_rows: embed(source.shard(np.array(keyed_rows, dtype=np.int64)[:, 1])),
        encoder,
        inputs={"records": manifest.inputs["records"]},
        part_rows=PREPARED_PART_ROWS,
        share=share_of_rank(),
    )


class EncoderStep:
    """A step of stage 0: pairs and, with ``word_weight``, short queries of the batch's words.

    The loss is L_cl + word_weight · (L_words + 0.5 L_phrases + 0.2 L_texts) (deviation 31).
    """

    def __init__(
        self, encoder: SmallEncoder, pairs: Pairs, config: EncoderConfig, instructions: Instructions
    ) -> None:
        self.network = encoder.network
        self.pairs = pairs
        self.config = config
        pictures = (Modality.IMAGE, Modality.IMAGE_TEXT)
        self.picture_queries = WordQueries(encoder, instructions, targets=pictures)
        self.text_queries = WordQueries(encoder, instructions, targets=(Modality.TEXT,))

    def __call__(self, step: Step) -> StepResult:
        """Return the loss of a batch."""
        config = self.config
        batch = self.pairs.draw(step.number, config.training.batch_size, seed=config.training.seed)
        queries = self.pairs.queries.gather(batch.query_rows)
        candidates = self.pairs.candidates.gather(batch.candidate_rows)
        query_images, query_vectors = self._embed_items(queries)
        candidate_images, candidate_vectors = self._embed_items(candidates)
        contrastive = contrastive_loss(
            query_vectors,
            candidate_vectors,
            torch.from_numpy(batch.false_negatives).to(self.network.device),
            temperature=config.temperature,
            direction="both",
        )
        if not config.word_weight:
            return StepResult(contrastive, {})
        images = torch.cat([query_images, candidate_images])
        losses = self._word_losses(queries, candidates, images, candidate_vectors, step.generator)
        word_losses = (
            losses["words"] + PHRASE_SHARE * losses["phrases"] + TEXT_SHARE * losses["texts"]
        )
        loss = contrastive + config.word_weight * word_losses
        losses = {"contrastive": contrastive, **losses}
        return StepResult(loss, {name: value.detach() for name, value in losses.items()})

    def _embed_items(
        self, items: FeatureBatch
    ) -> tuple[Float[Tensor, "images dim"], Float[Tensor, "items dim"]]:
        """Return the vectors of the images of items, and the unit vectors of all items."""
        image, text = self.network.towers(FeatureBatch(*map(parallel.rows_of_rank, items)))
        has_image = torch.from_numpy(items.has_image).to(self.network.device)
        images = parallel.gather(image)[has_image]
        return images, parallel.gather(F.normalize(image + text, dim=-1))

    def _word_losses(
        self,
        queries: FeatureBatch,
        candidates: FeatureBatch,
        images: Float[Tensor, "images dim"],
        candidate_vectors: Float[Tensor, "candidates dim"],
        random: torch.Generator,
    ) -> dict[str, Float[Tensor, ""]]:
        """Return the losses of words and phrases of images, and of phrases of texts."""
        device = self.network.device
        words, in_images = words_of_images(queries, candidates)
        has_words = in_images.any(dim=1)
        images = F.normalize(images[has_words.to(device)], dim=-1)
        in_images = in_images[has_words]
        image_phrases, fits_image = draw_phrases(in_images, random)
        is_text = torch.from_numpy(candidates.has_text & ~candidates.has_image)
        texts = candidate_vectors[is_text.to(device)]
        text_words, in_texts = number_words(torch.from_numpy(candidates.text).long()[is_text])
        text_phrases, fits_text = draw_phrases(in_texts, random)
        word_vectors, image_phrase_vectors, text_phrase_vectors = self._embed_queries(
            self.picture_queries.write(words[:, None], random),
            self.picture_queries.write(tokens_of(image_phrases, words), random),
            self.text_queries.write(tokens_of(text_phrases, text_words), random),
        )
        return {
            "words": word_loss(
                images, word_vectors, in_images.to(device), temperature=WORD_TEMPERATURE
            ),
            "phrases": phrase_loss(
                image_phrase_vectors, images, fits_image.to(device), temperature=WORD_TEMPERATURE
            ),
            "texts": phrase_loss(
                text_phrase_vectors, texts, fits_text.to(device), temperature=WORD_TEMPERATURE
            ),
        }

    def _embed_queries(self, *queries: Int64[Tensor, "_ _"]) -> tuple[Float[Tensor, "_ dim"], ...]:
        """Return unit vectors of queries, which are embedded together.

        A pass costs the gradients of whole word tables, so one pass is cheaper than several.
        """
        width = max(rows.shape[1] for rows in queries)
        joined = torch.cat([F.pad(rows, (0, width - rows.shape[1])) for rows in queries])
        vectors = F.normalize(self.network.text(joined), dim=-1)
        parts: tuple[Tensor, ...] = vectors.split([len(rows) for rows in queries])
        return parts


def tokens_of(
    phrases: Int64[Tensor, "phrases length"], words: Int64[Tensor, " words"]
) -> Int64[Tensor, "phrases length"]:
    """Return the tokens of phrases, which hold numbers of words; −1 becomes padding."""
    # Index −1 selects the last element, which is the appended padding.
    return F.pad(words, (0, 1), value=PADDING)[phrases]


class WordQueries:
    """Writes words as the tokens of queries, after an instruction for target modalities or none."""

    def __init__(
        self, encoder: SmallEncoder, instructions: Instructions, *, targets: Collection[Modality]
    ) -> None:
        texts: list[str] = []
        for (_, query, candidate), row in instructions.rows.items():
            if query is Modality.TEXT and candidate in targets:
                texts += map(format_text, row)
        *rows, stop = encoder.prepare_texts(["", *texts, "."]).long()
        self._instructions = torch.stack(rows)
        self._stop = int(stop[0])  # every query ends with a full stop

    def write(
        self, words: Int64[Tensor, "queries words"], generator: torch.Generator
    ) -> Int64[Tensor, "queries tokens"]:
        """Return queries: an instruction drawn at random, the words, and a full stop.

        Rows with fewer words end with padding.
        """
        chosen = torch.randint(len(self._instructions), words.shape[:1], generator=generator)
        rows = F.pad(self._instructions[chosen], (0, words.shape[1] + 1))
        ends = (rows != PADDING).sum(dim=1, keepdim=True)
        rows.scatter_(1, ends + torch.arange(words.shape[1]), words)
        # Padding among the words moves the end forward.
        ends = (rows != PADDING).sum(dim=1, keepdim=True)
        return rows.scatter_(1, ends, self._stop)


def draw_phrases(
    present: Bool[Tensor, "items words"], generator: torch.Generator
) -> tuple[Int64[Tensor, "phrases length"], Bool[Tensor, "phrases items"]]:
    """Draw up to ``MAX_PHRASES`` items and 1 to ``MAX_PHRASE_WORDS`` words of each, in any order.

    A word that n items have is drawn with a weight of 1 / √n.

    Returns
    -------
    tuple
        the numbers of each phrase's words (columns of ``present``), −1 after the last word; and the
        items that have all words of each phrase.
    """
    with_words = present.any(dim=1).nonzero().squeeze(1)
    drawn = with_words[torch.randperm(len(with_words), generator=generator)[:MAX_PHRASES]]
    has_word = present[drawn]
    # Weighted sampling without replacement (Efraimidis and Spirakis, 2006): the words with the
    # largest u^(1/weight), with u uniform in 0 to 1. In logarithms, log(u) · √n.
    keys = torch.rand(has_word.shape, generator=generator).log() * present.sum(dim=0).sqrt()
    length = min(MAX_PHRASE_WORDS, has_word.shape[1])
    words = keys.masked_fill(~has_word, float("-inf")).topk(length, dim=1).indices
    sizes = torch.randint(1, MAX_PHRASE_WORDS + 1, (len(drawn), 1), generator=generator)
    is_unused = torch.arange(length) >= sizes.minimum(has_word.sum(dim=1, keepdim=True))
    # An item has all words of a phrase if the number of common words equals the phrase's length.
    in_phrase = torch.zeros(len(drawn), present.shape[1]).scatter_(1, words, (~is_unused).float())
    relevant = in_phrase @ present.T.float() == in_phrase.sum(dim=1, keepdim=True)
    return words.masked_fill(is_unused, -1), relevant


def words_of_images(
    queries: FeatureBatch, candidates: FeatureBatch
) -> tuple[Int64[Tensor, " words"], Bool[Tensor, "images words"]]:
    """Return the words that go with the images of a batch of pairs, and which go with each image.

    ====================  =========================================================
    image of              words
    ====================  =========================================================
    a query               the candidate's text, but not the query's, which may ask
                          for a change of the image
    a candidate           the candidate's text, and the query's if it has no image
    ====================  =========================================================

    Returns
    -------
    tuple
        the tokens of the words, ascending; and a row for each query with an image, then for each
        candidate with an image, true for its words.
    """
    query_words = torch.from_numpy(queries.text).long()
    candidate_words = torch.from_numpy(candidates.text).long()
    query_has_image = torch.from_numpy(queries.has_image)
    candidate_has_image = torch.from_numpy(candidates.has_image)
    query_words = query_words.masked_fill(query_has_image[:, None], PADDING)
    pair_words = torch.cat([candidate_words, query_words], dim=1)
    return number_words(torch.cat([pair_words[query_has_image], pair_words[candidate_has_image]]))


def number_words(
    rows: Int64[Tensor, "items tokens"],
) -> tuple[Int64[Tensor, " words"], Bool[Tensor, "items words"]]:
    """Return the distinct tokens of texts, ascending, and which tokens each text has."""
    words, columns = rows.unique(return_inverse=True)
    present = torch.zeros(len(rows), len(words), dtype=torch.bool).scatter_(1, columns, value=True)
    is_word = words != PADDING
    return words[is_word], present[:, is_word]


class _Preparation:
    """The untrained first half of ``small`` as an encoder: image descriptors and token numbers."""

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
    """Replace a shard's descriptors and tokens by features."""
    network: SmallNetwork = encoder.network

    def apply(forward: Callable[[Tensor], Tensor], prepared: object, dtype: type) -> np.ndarray:
        outputs = [torch.zeros(0, encoder.dim)]
        rows = torch.from_numpy(np.array(prepared, dtype=dtype))
        for start in range(0, len(rows), FORWARD_BATCH):
            part = rows[start : start + FORWARD_BATCH].to(network.device)
            outputs.append(forward(part).cpu())
        return to_float16(torch.cat(outputs).numpy())

    return shard._replace(
        image=apply(network.image, shard.image, np.float32),
        text=apply(network.text, shard.text, np.int64),
    )
