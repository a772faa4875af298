"""``genius train encoder``: the ``small`` encoder from scratch, as CLIP or as BLIP is trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from genius.artifact import ArtifactWriter, fingerprint_of, open_artifact
from genius.config import EncoderConfig, checked, to_json
from genius.data.features import ABSENT, FeatureBatch, Shard
from genius.data.mbeir import MBeir, read_pool, read_queries
from genius.data.pairs import Pairs
from genius.data.records import Query, format_text
from genius.encoders.protocol import ImageInput, TextInput
from genius.encoders.small import (
    AnySmallEncoder,
    SmallEncoder,
    SmallJointEncoder,
    create_small,
    load_small,
)
from genius.stages.embed import transform
from genius.stages.embed_records import (
    TrainingFeatures,
    embed_training,
    fingerprint_of_files,
    instruction_files,
)
from genius.stages.encoder_steps import step_of
from genius.stages.loop import CHECKPOINT, num_steps, train
from genius.stages.progress import Progress

KIND: Final = "encoder"
FORWARD_BATCH: Final = 2048


class TrainedEncoder(NamedTuple):
    """The encoder, and the training features it gives."""

    encoder: AnySmallEncoder
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
        config=_plan(config),
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
        encoder = create_small(config.network, _texts(data), seed=config.training.seed)
    prepared = embed_training(data, _Preparation(encoder), prepared_folder, progress=progress)
    if not done:
        pairs = Pairs(_queries(data), prepared.queries, prepared.candidates)
        step = step_of(encoder.network.to(device), pairs, prepared, config)
        train(
            step.module,
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


def load_trained_encoder(folder: Path, *, device: str = "cpu") -> AnySmallEncoder:
    """Open a finished encoder."""
    open_artifact(folder, kind=KIND)
    return load_small(folder, device=device)


def _plan(config: EncoderConfig) -> dict[str, Any]:
    """What the training depends on, without what only other kinds know."""
    told = {**to_json(config), "network": config.network.to_json()}
    if not config.network.has_momentum:
        del told["momentum"]
    return told


class _Preparation:
    """The frozen first half of ``small`` as an encoder of its own: descriptors and token numbers."""

    needs_pixels = True
    spec = "small, not yet trained"

    def __init__(self, encoder: AnySmallEncoder) -> None:
        self._encoder = encoder
        self.dim = 0
        self.fingerprint = fingerprint_of([encoder.config.max_tokens, encoder.tokenizer.to_str()])

    def image_features(self, images: Sequence[ImageInput]) -> Shaped[Tensor, "items pixels"]:
        return self._encoder.prepare_images([item.image for item in images if item.image is not None])

    def text_features(self, texts: Sequence[TextInput]) -> Shaped[Tensor, "items tokens"]:
        return self._encoder.prepare_texts([item.text for item in texts])


@torch.no_grad()
def _features(encoder: AnySmallEncoder, prepared: TrainingFeatures, folder: Path) -> TrainingFeatures:
    """The trained network applied to the prepared training records."""
    return TrainingFeatures(
        *(
            transform(
                source,
                folder / source.manifest.folder.name,
                change=lambda shard: (
                    _together(encoder, shard)
                    if isinstance(encoder, SmallJointEncoder)
                    else _apart(encoder, shard)
                ),
                inputs={"records": source.manifest.inputs["records"]},
                encoder=encoder,
            )
            for source in prepared
        )
    )


def _apart(encoder: SmallEncoder, shard: Shard) -> Shard:
    """Features of a shard's pictures and of its texts."""
    network = encoder.network
    image = [
        network.image(torch.from_numpy(part.astype(np.float32)).to(network.device)).cpu().numpy()
        for part in _parts(shard.image)
    ]
    text = [
        network.text(torch.from_numpy(part.astype(np.int64)).to(network.device)).cpu().numpy()
        for part in _parts(shard.text)
    ]
    nothing = np.zeros((0, encoder.dim), dtype=np.float16)
    return shard._replace(image=np.concatenate([nothing, *image]), text=np.concatenate([nothing, *text]))


def _together(encoder: SmallJointEncoder, shard: Shard) -> Shard:
    """One vector for each distinct picture and text of a shard; they stand where texts do."""
    both = np.stack([shard.image_index, shard.text_index], axis=1)
    distinct, rows = np.unique(both, axis=0, return_inverse=True)
    image, text = (torch.from_numpy(content.astype(np.float32)) for content in (shard.image, shard.text))
    vectors = [
        encoder.network.embedding(FeatureBatch.of(image, text, part[:, 0], part[:, 1])).cpu().numpy()
        for part in _parts(distinct)
    ]
    return shard._replace(
        image_index=np.full_like(shard.image_index, ABSENT),
        text_index=rows.astype(np.int64),
        image=np.zeros((0, encoder.dim), dtype=np.float16),
        text=np.concatenate(vectors),
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
