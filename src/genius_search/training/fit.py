"""``genius fit``: encoder (if it is to be trained), features, quantizer, generator; one folder, in one go.

Run again after a kill it goes on where it stopped; run again with other settings it redoes only what depends
on them. Each part is also a stage of its own.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from genius_search.config import EncoderConfig, FitConfig, GeneratorConfig, QuantizerConfig, checked
from genius_search.data.features import Features, Pairs
from genius_search.data.mbeir import Instructions, MBeir, read_queries
from genius_search.embed import TrainingFeatures, embed_training
from genius_search.encoders.base import Encoder, load_encoder
from genius_search.errors import ArtifactMismatch, ArtifactMissing, BadData, UsageError
from genius_search.model import MODEL_FILE, Genius, KnownInstruction
from genius_search.nn.parallel import usable
from genius_search.nn.quantizer import TrainedQuantizer, load_quantizer
from genius_search.progress import Progress
from genius_search.records import Query
from genius_search.training.encoder import train_encoder
from genius_search.training.generator import train_generator
from genius_search.training.quantizer import train_quantizer

FOLDERS: Final = ("encoder", "features", "prepared", "quantizer", "generator", "ids", "evaluation")
"""What lies in a model's folder beside ``model.json``."""


class Embedded(NamedTuple):
    """An encoder and the training records it embedded."""

    encoder: Encoder
    features: TrainingFeatures


def fit(
    data: MBeir,
    encoder: str,
    folder: Path,
    config: FitConfig,
    *,
    progress: Progress,
    device: str = "cpu",
    download: bool = False,
) -> Genius:
    """Train a model on a data set in M-BEIR's layout.

    Parameters
    ----------
    encoder
        ``small`` trains one from scratch; anything else names one that exists.
    folder
        receives ``encoder/``, ``features/``, ``quantizer/``, ``generator/`` and, last, ``model.json``.

    Raises
    ------
    BadData
        the data set cannot be trained on.
    """
    config = checked(config)
    embedded = embed_with(
        data, encoder, folder, config.encoder, progress=progress, device=device, download=download
    )
    quantizer = fit_quantizer(
        data, embedded.features, folder, config.quantizer, progress=progress, device=device
    )
    return fit_generator(
        data, embedded, quantizer, folder, config.generator, progress=progress, device=device
    )


def embed_with(
    data: MBeir,
    encoder: str,
    folder: Path,
    config: EncoderConfig,
    *,
    progress: Progress,
    device: str = "cpu",
    download: bool = False,
) -> Embedded:
    """Train the encoder if it is ``small``, and embed the training records."""
    usable(device)
    refuse_foreign_folder(folder)
    if not data.training_queries():
        raise BadData(f"{data.root} has no training queries: neither query/union_train nor query/train")
    folder.mkdir(parents=True, exist_ok=True)
    if encoder == "small":
        trained = train_encoder(
            data,
            folder / "encoder",
            config,
            features_folder=folder / "features",
            progress=progress,
            device=device,
        )
        return Embedded(trained.encoder, trained.features)
    loaded = load_encoder(absolute_spec(encoder), download=download, device=device)
    return Embedded(loaded, embed_training(data, loaded, folder / "features", progress=progress))


def refuse_foreign_folder(folder: Path) -> None:
    """Check that a model can be written to a folder without mixing it with anything else.

    Raises
    ------
    UsageError
        it is a file, or a folder that holds an index or anything that is no part of a model.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; a model needs a folder")
    if not folder.is_dir() or (folder / MODEL_FILE).exists():
        return
    if (folder / "index.json").exists():
        raise UsageError(f"{folder} is an index; choose another folder for the model")
    foreign = [path.name for path in sorted(folder.iterdir()) if not _is_own(path.name)]
    if foreign:
        raise UsageError(
            f"{folder} holds {foreign[0]}, which is no part of a model; choose a new or an empty folder"
        )


def _is_own(name: str) -> bool:
    """Whether a file of this name may lie in the folder of an unfinished model."""
    return name in FOLDERS or (name.startswith(".") and name.split(".")[1] in FOLDERS)


def absolute_spec(spec: str) -> str:
    """A spec that names a file or folder, such that it can be opened from anywhere."""
    kind, colon, place = spec.partition(":")
    path = Path(place).expanduser()
    return f"{kind}{colon}{path.resolve()}" if place and path.exists() else spec


def reopen_embedded(folder: Path, *, device: str = "cpu", download: bool = False) -> Embedded:
    """What :func:`embed_with` left in a model's folder.

    Raises
    ------
    ArtifactMissing
        it left nothing there: the model was imported, refitted or pulled, or the folder is not its own.
    ArtifactMismatch
        the encoder is no longer what it was.
    """
    if not (folder / "features").is_dir():
        raise ArtifactMissing(
            f"{folder} has no features of training data, expected in its folder features/. `genius embed`, "
            "`genius train encoder` and `genius fit` leave them; a model that was imported, refitted or "
            "pulled has none: name the folder that it was trained in"
        )
    features = TrainingFeatures(
        Features.open(folder / "features" / "queries"), Features.open(folder / "features" / "candidates")
    )
    manifest = features.candidates.manifest
    encoder = load_encoder(str(manifest.notes["encoder"]), download=download, device=device)
    if encoder.fingerprint != manifest.inputs["encoder"]:
        raise ArtifactMismatch(
            f"{folder / 'features'} was made by another encoder than {encoder.spec} is now; embed again"
        )
    return Embedded(encoder, features)


def fit_quantizer(
    data: MBeir,
    features: TrainingFeatures,
    folder: Path,
    config: QuantizerConfig,
    *,
    progress: Progress,
    device: str = "cpu",
) -> TrainedQuantizer:
    """Stage 1 on embedded records."""
    return train_quantizer(
        _pairs(data, features), *features, folder / "quantizer", config, progress=progress, device=device
    )


def fit_generator(
    data: MBeir,
    embedded: Embedded,
    quantizer: TrainedQuantizer | None,
    folder: Path,
    config: GeneratorConfig,
    *,
    progress: Progress,
    device: str = "cpu",
) -> Genius:
    """Stage 2 on embedded records, then declare the parts to be one model."""
    quantizer = quantizer or load_quantizer(folder / "quantizer", device=device)
    generator = train_generator(
        _pairs(data, embedded.features),
        *embedded.features,
        quantizer,
        folder / "generator",
        config,
        progress=progress,
        device=device,
    )
    model = Genius.finish(
        folder, embedded.encoder, quantizer, generator, known_instructions(data.instructions)
    )
    shutil.rmtree(folder / "prepared", ignore_errors=True)
    return model


def _pairs(data: MBeir, features: TrainingFeatures) -> Pairs:
    return Pairs(_training_lines(data), features.queries, features.candidates)


def _training_lines(data: MBeir) -> Iterator[Query]:
    """Every line of the training files, repeats included."""
    for path in data.training_queries():
        yield from read_queries(path)


def known_instructions(instructions: Instructions) -> list[KnownInstruction]:
    """What a search without an instruction may use."""
    return [
        KnownInstruction(key.query.mbeir, key.candidate.mbeir, text)
        for key, texts in instructions.rows.items()
        for text in texts
    ]
