"""``genius fit``: train encoder (if requested), quantizer and generator of a model in one folder.

Run again after a kill, it resumes where it stopped; run again with other settings, it repeats only
the stages that depend on them.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from genius_search.border import as_path
from genius_search.config import validate_settings
from genius_search.data.features import Pairs
from genius_search.data.mbeir import Instructions, MBeir
from genius_search.encoders.adapters import ADAPTERS, FrozenPair
from genius_search.encoders.base import Encoder
from genius_search.encoders.open import absolute_spec, load_encoder, open_pair
from genius_search.errors import BadData, UsageError
from genius_search.model import MODEL_FILE, Genius, ModelInstruction
from genius_search.nn import parallel
from genius_search.progress import Progress, Silent
from genius_search.recipe import FitConfig, preset
from genius_search.training.adapters import train_adapters
from genius_search.training.encoder import train_encoder
from genius_search.training.generator import train_generator
from genius_search.training.loop import share_of_rank
from genius_search.training.quantizer import train_quantizer
from genius_search.training.records import TrainingRecords, embed_training

FOLDERS: Final = ("encoder", "features", "prepared", "quantizer", "generator", "evaluation")
"""Folders that a model's folder may contain, in addition to ``model.json``."""


def fit(
    data: MBeir | str | Path,
    encoder: str,
    folder: str | Path,
    config: FitConfig | None = None,
    *,
    progress: Progress | None = None,
    device: str = "cpu",
    download: bool = False,
) -> Genius:
    """Train a model on a data set in M-BEIR's layout.

    >>> model = fit("catalogue", "small", "model", preset("small"))  # doctest: +SKIP

    Parameters
    ----------
    data
        the data set, or its folder.
    encoder
        ``small`` trains an encoder from scratch, and ``adapters:IMAGE,TEXT`` trains small networks
        over two existing encoders, such as ``adapters:clip:FOLDER,text:FOLDER``. Any other value
        names an existing encoder.
    folder
        receives ``encoder/``, ``features/``, ``quantizer/``, ``generator/`` and, last,
        ``model.json``. While a model is trained again, it cannot be opened.
    config
        by default the preset ``small``, as for `genius fit`.

    Raises
    ------
    BadData
        The data set has no training queries, or a file of it cannot be read.
    UsageError
        A setting is out of range, or the folder contains something other than a model.
    """
    data = data if isinstance(data, MBeir) else MBeir(data)
    folder = as_path(folder)
    progress = progress or Silent()
    config = validate_settings(preset("small") if config is None else config)
    parallel.check_device(device)
    _check_inputs(data, config)
    _check_folder(folder)
    trained_encoder, pairs = _embed_records(
        data, encoder, folder, config, progress=progress, device=device, download=download
    )
    quantizer = train_quantizer(
        pairs, folder / "quantizer", config.quantizer, progress=progress, device=device
    )
    generator = train_generator(
        pairs, quantizer, folder / "generator", config.generator, progress=progress, device=device
    )
    instructions = model_instructions(data.instructions)
    parallel.run_in_rank_order(
        lambda: Genius.finish(folder, trained_encoder, quantizer, generator, instructions)
    )
    shutil.rmtree(folder / "prepared", ignore_errors=True)
    return Genius.open(folder, device=device, download=download)


def _check_inputs(data: MBeir, config: FitConfig) -> None:
    """Check that the fusion can be trained, and that the data set has training queries."""
    if config.quantizer.fusion.kind == "sum":
        raise UsageError(
            "quantizer.fusion.kind is sum, which has nothing to train; leave it out, or create an "
            "index without training: `genius index create`"
        )
    if not data.training_queries():
        raise BadData(
            f"{data.root} has no training queries: neither query/union_train nor query/train"
        )


def _check_folder(folder: Path) -> None:
    """Check that a folder can receive a model: that it is new, empty, or contains a model."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; a model needs a folder")
    if not folder.is_dir() or (folder / MODEL_FILE).exists():
        return
    for path in sorted(folder.iterdir()):
        # Unfinished and locked folders have names such as .encoder.partial.
        if path.name.removeprefix(".").split(".")[0] not in FOLDERS:
            raise UsageError(
                f"{folder} contains {path.name}, which is not part of a model; choose a new or an "
                "empty folder"
            )


def _embed_records(
    data: MBeir,
    encoder: str,
    folder: Path,
    config: FitConfig,
    *,
    progress: Progress,
    device: str,
    download: bool,
) -> tuple[Encoder, Pairs]:
    """Train the encoder, if requested; return it with the pairs of the records that it embedded."""
    if encoder == "small":
        records = TrainingRecords(data)
        return train_encoder(records, folder, config.encoder, progress=progress, device=device)
    pair = frozen_encoders(encoder, download=download, device=device)
    if pair is not None:
        records = TrainingRecords(data)
        return train_adapters(
            records, folder, config.adapters, pair, progress=progress, device=device
        )
    existing = load_encoder(absolute_spec(encoder), download=download, device=device)
    return existing, embed_training(
        TrainingRecords(data),
        existing,
        folder / "features",
        progress=progress,
        share=share_of_rank(),
    )


def frozen_encoders(spec: str, *, download: bool, device: str) -> FrozenPair | None:
    """Open the two encoders of ``adapters:IMAGE,TEXT``.

    Return None for any other spec, such as the folder of trained adapters.

    Raises
    ------
    UsageError
        The spec does not name two encoders, or they cannot be combined.
    """
    prefix, _, argument = spec.partition(":")
    if prefix != ADAPTERS or as_path(argument).is_dir():
        return None
    parts = [absolute_spec(part) for part in argument.split(",")]
    if len(parts) != 2 or not all(":" in part for part in parts):
        raise UsageError(
            f"{spec!r} does not name two encoders; give adapters:IMAGE,TEXT, such as "
            "adapters:clip:FOLDER,text:FOLDER, or the folder of trained adapters"
        )
    return open_pair(*parts, download=download, device=device)


def model_instructions(instructions: Instructions) -> list[ModelInstruction]:
    """Return the instructions of the training, which a search uses if the user gives none."""
    return [
        ModelInstruction(query.mbeir, candidate.mbeir, text)
        for (_, query, candidate), texts in instructions.rows.items()
        for text in texts
    ]
