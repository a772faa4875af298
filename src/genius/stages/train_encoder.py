"""``genius train encoder``: the ``small`` encoder from scratch, by the contrastive loss of equation 2."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional as F

from genius.artifact import ArtifactWriter, fingerprint_of, open_artifact
from genius.config import EncoderConfig, checked, to_json
from genius.data.features import Features
from genius.data.mbeir import MBeir, read_pool, read_queries
from genius.data.pairs import Pairs
from genius.data.records import Query, format_text
from genius.encoders.protocol import ImageInput, TextInput
from genius.encoders.small import SmallEncoder, SmallNetwork
from genius.models import parallel
from genius.models.losses import contrastive_loss
from genius.stages.embed import transform
from genius.stages.embed_records import (
    TrainingFeatures,
    embed_training,
    fingerprint_of_files,
    instruction_files,
)
from genius.stages.loop import CHECKPOINT, Moment, StepResult, num_steps, train
from genius.stages.progress import Progress

KIND: Final = "encoder"
FORWARD_BATCH: Final = 2048


class TrainedEncoder(NamedTuple):
    """The encoder, and the training features it gives."""

    encoder: SmallEncoder
    features: TrainingFeatures


def train_encoder(
    data: MBeir,
    folder: Path,
    config: EncoderConfig,
    *,
    features_folder: Path,
    progress: Progress,
    device: str = "cpu",
) -> TrainedEncoder:
    """Train ``small`` on a data set, or open the folder when this very training is already done.

    Pictures are described and texts tokenised once; training runs on those numbers, and so does the
    embedding of the training records afterwards.
    """
    config = checked(config)
    sources = [*data.training_pools(), *data.training_queries(), *instruction_files(data)]
    writer = ArtifactWriter(
        folder,
        kind=KIND,
        config=to_json(config),
        inputs={"records": fingerprint_of_files(sources)},
    )
    torch.manual_seed(config.training.seed)
    done = writer.finished() is not None
    prepared_folder = folder.parent / "prepared"
    if done:
        encoder = load_trained_encoder(folder, device=device)
        if not prepared_folder.exists():  # a finished model keeps only the features
            features = embed_training(data, encoder, features_folder, progress=progress)
            return TrainedEncoder(encoder, features)
    else:
        progress.say("learning the words of the training texts")
        encoder = SmallEncoder.create(config.network, _texts(data), seed=config.training.seed)
    prepared = embed_training(data, _Preparation(encoder), prepared_folder, progress=progress)
    if not done:
        pairs = Pairs(_queries(data), prepared.queries, prepared.candidates)
        encoder.network.to(device)
        step = _Step(encoder.network, pairs, prepared, config)
        train(
            encoder.network,
            step,
            total=num_steps(len(pairs), config.training),
            config=config.training,
            folder=writer.path,
            progress=progress,
            name="train encoder",
        )
        encoder.save(writer.path)
        writer.finish(scratch=(CHECKPOINT,))
        encoder = load_trained_encoder(folder, device=device)
    return TrainedEncoder(encoder, _features(encoder, prepared, features_folder))


def load_trained_encoder(folder: Path, *, device: str = "cpu") -> SmallEncoder:
    """Open a finished encoder."""
    open_artifact(folder, kind=KIND)
    return SmallEncoder.load(folder, device=device)


class _Preparation:
    """The frozen first half of ``small`` as an encoder of its own: descriptors and token numbers."""

    needs_pixels = True
    spec = "small, not yet trained"

    def __init__(self, encoder: SmallEncoder) -> None:
        self._encoder = encoder
        self.dim = 0
        self.fingerprint = fingerprint_of([to_json(encoder.config), encoder.tokenizer.to_str()])

    def image_features(self, images: Sequence[ImageInput]) -> Shaped[Tensor, "items pixels"]:
        return self._encoder.prepare_images([item.image for item in images if item.image is not None])

    def text_features(self, texts: Sequence[TextInput]) -> Shaped[Tensor, "items tokens"]:
        return self._encoder.prepare_texts([item.text for item in texts])


class _Step:
    """One step of equation 2, on prepared records."""

    def __init__(
        self, network: SmallNetwork, pairs: Pairs, prepared: TrainingFeatures, config: EncoderConfig
    ) -> None:
        self.network = network
        self.pairs = pairs
        self.prepared = prepared
        self.config = config

    def __call__(self, moment: Moment) -> StepResult:
        training = self.config.training
        batch = self.pairs.draw(moment.step, training.batch_size, seed=training.seed)
        asked = self._embedded(self.prepared.queries, batch.query_rows)
        wanted = self._embedded(self.prepared.candidates, batch.candidate_rows)
        loss = contrastive_loss(
            parallel.gather(asked),
            parallel.gather(wanted),
            batch.false_negatives.to(asked.device),
            temperature=self.config.temperature,
            direction="both",
        )
        return StepResult(loss, {})

    def _embedded(self, features: Features, rows: np.ndarray) -> Float[Tensor, "items dim"]:
        own = parallel.own_rows(torch.from_numpy(rows)).numpy()
        batch = features.gather(own)
        device = self.network.words.weight.device
        total = torch.zeros(len(own), self.config.network.dim, device=device)
        for present, read, content in (
            (batch.has_image, self.network.image, batch.image),
            (batch.has_text, self.network.text, batch.text.int()),
        ):
            places = present.nonzero().squeeze(1)
            if len(places):
                total = total.index_add(0, places.to(device), read(content[places].to(device)).float())
        return F.normalize(total, dim=-1)


@torch.no_grad()
def _features(encoder: SmallEncoder, prepared: TrainingFeatures, folder: Path) -> TrainingFeatures:
    """The trained network applied to the prepared training records."""
    network = encoder.network
    device = network.words.weight.device

    def image(descriptors: np.ndarray) -> np.ndarray:
        parts = [
            network.image(torch.from_numpy(part.astype(np.float32)).to(device)).cpu().numpy()
            for part in _parts(descriptors)
        ]
        return np.concatenate(parts) if parts else np.zeros((0, encoder.dim), dtype=np.float16)

    def text(tokens: np.ndarray) -> np.ndarray:
        parts = [
            network.text(torch.from_numpy(part.astype(np.int64)).to(device)).cpu().numpy()
            for part in _parts(tokens)
        ]
        return np.concatenate(parts) if parts else np.zeros((0, encoder.dim), dtype=np.float16)

    return TrainingFeatures(
        *(
            transform(
                source,
                folder / source.manifest.folder.name,
                image=image,
                text=text,
                inputs={"records": source.manifest.inputs["records"]},
                encoder=encoder,
            )
            for source in prepared
        )
    )


def _parts(array: np.ndarray) -> Iterator[np.ndarray]:
    return (array[start : start + FORWARD_BATCH] for start in range(0, len(array), FORWARD_BATCH))


def _texts(data: MBeir) -> Iterator[str]:
    """All texts that the encoder will read in training; instructions once, not with every query."""
    for candidate in read_pool(data.training_pools()):
        if candidate.text:
            yield format_text(candidate.text)
    for query in _queries(data):
        if query.text:
            yield format_text(query.text)
    for row in data.instructions.rows.values():
        # Twice, since a word seen once is spelled in pieces, and instructions go with every query.
        yield from (format_text(text) for text in (*row, *row))


def _queries(data: MBeir) -> Iterator[Query]:
    for path in data.training_queries():
        yield from read_queries(path)
