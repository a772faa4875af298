"""``genius fit``: encoder (if it is to be trained), features, quantizer, IDs and generator, in one folder.

Run again after a kill, it goes on where it stopped; run again with other settings, it redoes only what
depends on them.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from genius_search.border import as_path
from genius_search.config import validate_settings
from genius_search.data.features import Pairs
from genius_search.data.mbeir import Instructions, MBeir
from genius_search.encoders.adapters import KIND as ADAPTERS
from genius_search.encoders.adapters import FrozenPair
from genius_search.encoders.open import absolute_spec, load_encoder, open_pair
from genius_search.errors import BadData, UsageError
from genius_search.model import MODEL_FILE, Genius, ModelInstruction
from genius_search.nn import parallel
from genius_search.progress import Progress, Silent
from genius_search.recipe import FitConfig, preset
from genius_search.training.adapters import train_adapters
from genius_search.training.encoder import train_encoder
from genius_search.training.features import TrainingRecords, embed_training
from genius_search.training.generator import train_generator
from genius_search.training.quantizer import train_quantizer

FOLDERS: Final = ("encoder", "features", "prepared", "quantizer", "generator", "evaluation")
"""Contents of a model's folder beside ``model.json``."""


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
        ``small`` trains one from scratch, ``adapters:IMAGE,TEXT`` small networks over two that exist, such
        as ``adapters:clip:FOLDER,text:FOLDER``; anything else names one that exists.
    folder
        receives ``encoder/``, ``features/``, ``quantizer/``, ``generator/`` and, last, ``model.json``. A
        model that is trained again cannot be opened until that is finished.
    config
        by default the preset ``small``, as of `genius fit`.

    Raises
    ------
    BadData
        the data set cannot be trained on.
    UsageError
        a setting is out of range, or the folder holds something else than a model.
    """
    data = data if isinstance(data, MBeir) else MBeir(data)
    folder, progress = as_path(folder), progress or Silent()
    config = validate_settings(preset("small") if config is None else config)
    if config.quantizer.fusion.kind == "sum":
        raise UsageError(
            "quantizer.fusion.kind is sum, which is nothing to train; leave it out, or make an index without "
            "training: `genius index create`"
        )
    parallel.check_device(device)
    _check_folder(folder)
    if not data.training_queries():
        raise BadData(
            f"{data.root} has no training queries: neither query/union_train nor query/train"
        )
    pair = frozen_encoders(encoder, download=download, device=device)
    if encoder == "small":
        records = TrainingRecords(data)
        embedded = train_encoder(records, folder, config.encoder, progress=progress, device=device)
    elif pair is not None:
        records = TrainingRecords(data)
        embedded = train_adapters(
            records, folder, config.adapters, pair, progress=progress, device=device
        )
    else:
        opened = load_encoder(absolute_spec(encoder), download=download, device=device)
        records = TrainingRecords(data)
        embedded = parallel.run_in_rank_order(
            lambda: embed_training(records, opened, folder / "features", progress=progress)
        )
    pairs = Pairs(records.lines, embedded.queries, embedded.candidates)
    quantizer = train_quantizer(
        pairs, folder / "quantizer", config.quantizer, progress=progress, device=device
    )
    generator = train_generator(
        pairs, quantizer, folder / "generator", config.generator, progress=progress, device=device
    )
    instructions = model_instructions(data.instructions)
    parallel.run_in_rank_order(
        lambda: Genius.finish(folder, embedded.encoder, quantizer, generator, instructions)
    )
    shutil.rmtree(folder / "prepared", ignore_errors=True)
    return Genius.open(folder, device=device, download=download)


def frozen_encoders(spec: str, *, download: bool, device: str) -> FrozenPair | None:
    """Open the two encoders of ``adapters:IMAGE,TEXT``; None for other specs, trained adapters included.

    Raises
    ------
    UsageError
        There are not two encoders, or they cannot be combined.
    """
    kind, _, place = spec.partition(":")
    if kind != ADAPTERS or as_path(place).is_dir():
        return None
    parts = [absolute_spec(part) for part in place.split(",")]
    if len(parts) != 2 or not all(":" in part for part in parts):
        raise UsageError(
            f"{spec!r} names no two encoders; give adapters:IMAGE,TEXT, such as "
            "adapters:clip:FOLDER,text:FOLDER, or the folder of trained ones"
        )
    return open_pair(*parts, download=download, device=device)


def _check_folder(folder: Path) -> None:
    """Check that a model can be written to a folder without mixing it with anything else."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; a model needs a folder")
    if not folder.is_dir() or (folder / MODEL_FILE).exists():
        return
    for path in sorted(folder.iterdir()):
        if (
            path.name.removeprefix(".").split(".")[0] not in FOLDERS
        ):  # with a dot: unfinished or locked
            raise UsageError(
                f"{folder} holds {path.name}, which is no part of a model; choose a new or an empty folder"
            )


def model_instructions(instructions: Instructions) -> list[ModelInstruction]:
    """Return the instructions that a search without one may use."""
    return [
        ModelInstruction(key.query.mbeir, key.candidate.mbeir, text)
        for key, texts in instructions.rows.items()
        for text in texts
    ]
