"""``genius fit``: encoder (if it is to be trained), features, quantizer, IDs and generator, in one folder.

Run again after a kill, it goes on where it stopped; run again with other settings, it redoes only what
depends on them. Each part is also a stage of its own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from genius_search.artifact import recover
from genius_search.config import GeneratorConfig, TrainingConfig, checked, to_json
from genius_search.data.features import Features
from genius_search.data.mbeir import Instructions, MBeir, read_pool
from genius_search.data.pairs import Pairs
from genius_search.encoders.base import Encoder, load_encoder
from genius_search.errors import ArtifactMismatch, ArtifactMissing, BadData, UsageError
from genius_search.model import MODEL_FILE, Genius, KnownInstruction
from genius_search.nn import parallel
from genius_search.nn.ids import (
    KIND,
    RESIDUAL,
    SCHEMES,
    Candidates,
    TrainedIds,
    TrainingSet,
    load_ids,
    residual_ids,
    write_ids,
)
from genius_search.nn.quantizer import TrainedQuantizer, encode, fuse
from genius_search.presets import FitConfig, preset
from genius_search.progress import Progress, Silent
from genius_search.records import candidate_number
from genius_search.registry import find_part
from genius_search.training.embed import Embedded, TrainingFeatures, TrainingRecords, embed_training
from genius_search.training.encoder import train_encoder
from genius_search.training.generator import train_generator
from genius_search.training.quantizer import train_quantizer
from genius_search.writing import ArtifactWriter, acquire, new_folder, put_in_place, release, sync_tree

FOLDERS: Final = ("encoder", "features", "prepared", "quantizer", "ids", "generator", "evaluation")
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
        ``small`` trains one from scratch; anything else names one that exists.
    folder
        receives ``encoder/``, ``features/``, ``quantizer/``, ``generator/`` and, last, ``model.json``. If it
        holds a finished model, that one stays as it is until the new one replaces it.
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
    folder, progress = Path(folder), progress or Silent()
    config = checked(preset("small") if config is None else config)
    find_part("id_schemes", config.ids, SCHEMES)
    with replace_model(folder) as work:
        check_output(data, folder, device)
        _fit(data, relocate(encoder, folder, work), work, config, progress, device, download)
    return Genius.open(folder, device=device, download=download)


def _fit(
    data: MBeir,
    encoder: str,
    folder: Path,
    config: FitConfig,
    progress: Progress,
    device: str,
    download: bool,  # noqa: FBT001  passed on
) -> Genius:
    if encoder == "small":
        records = TrainingRecords(data)
        embedded = train_encoder(records, folder, config.encoder, progress=progress, device=device)
    else:
        opened = load_encoder(absolute_spec(encoder), download=download, device=device)
        records = TrainingRecords(data)
        features = parallel.in_turn(
            lambda: embed_training(records, opened, folder / "features", progress=progress)
        )
        embedded = Embedded(opened, features)
    pairs = Pairs(records.lines(), *embedded.features)
    quantizer = train_quantizer(
        pairs, folder / "quantizer", config.quantizer, progress=progress, device=device
    )
    return fit_generator(
        records,
        embedded.encoder,
        pairs,
        quantizer,
        folder,
        config.generator,
        ids=config.ids,
        progress=progress,
        device=device,
    )


@contextmanager
def replace_model(folder: Path) -> Iterator[Path]:
    """Yield the folder to train in, as :func:`_replace_model` does; ranks beyond the first get its path."""
    if parallel.rank():
        yield parallel.share(folder)
    else:
        with _replace_model(folder) as work:
            yield parallel.share(work)
    parallel.wait()


@contextmanager
def _replace_model(folder: Path) -> Iterator[Path]:
    """Yield the folder to train in; a finished model stays as it is until its successor is complete.

    Without a finished model, that is the folder itself. Otherwise it is one beside it, with the parts that
    may stay: the same files by hard links, as a stage never changes a file that is finished. It takes the
    model's place if it holds a model when the block ends, and is continued by the next stage if not.

    Raises
    ------
    UsageError
        the model cannot be replaced, or another process is training it.
    """
    home = folder.resolve()
    lock = acquire(home)
    try:
        recover(home)
        work = home.parent / f".{home.name}.next"
        if not (home / MODEL_FILE).exists():
            if work.exists():  # the model has been removed
                check_folder(work)
                shutil.rmtree(work)
            yield folder
            return
        if home.is_mount() or Path.cwd().is_relative_to(home):
            raise UsageError(
                f"{home} holds a finished model and cannot be replaced, because it is a disk of its own or "
                "the folder that you are in; choose another folder for the new model"
            )
        if not work.exists():
            ignored = shutil.ignore_patterns(".*", MODEL_FILE)
            with new_folder(work) as partial:
                shutil.copytree(home, partial, copy_function=_link, ignore=ignored, dirs_exist_ok=True)
        (work / MODEL_FILE).unlink(missing_ok=True)
        yield work
        if (work / MODEL_FILE).exists():
            sync_tree(work)
            put_in_place(work, home)
    finally:
        release(lock)


def relocate(spec: str, folder: Path, work: Path) -> str:
    """Return the spec of an encoder, in the folder to train in if it is in the model's."""
    kind, _, place = spec.partition(":")
    if place and Path(place).resolve().is_relative_to(folder.resolve()):
        return f"{kind}:{work / Path(place).resolve().relative_to(folder.resolve())}"
    return spec


def _link(source: str, target: str) -> None:
    """Give a file another name, or copy it where the file system knows no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def absolute_spec(spec: str) -> str:
    """Return an encoder's spec such that it can be opened from any working directory."""
    kind, colon, place = spec.partition(":")
    path = Path(place).expanduser()
    return f"{kind}{colon}{path.resolve()}" if place and path.exists() else spec


def reopen_embedded(
    folder: Path, *, home: Path | None = None, device: str = "cpu", download: bool = False
) -> Embedded:
    """Open the encoder and the features that an earlier stage left in a model's folder.

    Parameters
    ----------
    home
        the model's folder, if the given one is going to replace it (:func:`replace_model`).

    Raises
    ------
    ArtifactMissing
        there are no features: the model was imported, refitted or pulled, or was trained elsewhere.
    ArtifactMismatch
        the encoder has changed since.
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
    spec = relocate(str(manifest.notes["encoder"]), home or folder, folder)
    kind, _, place = spec.partition(":")
    if kind == "small" and not Path(place).exists():  # trained here, and the folder was moved since
        spec = f"small:{folder / 'encoder'}"
    encoder = load_encoder(spec, download=download, device=device)
    if encoder.fingerprint != manifest.inputs["encoder"]:
        raise ArtifactMismatch(
            f"{folder / 'features'} was made by another encoder than {encoder.spec} is now; embed again"
        )
    return Embedded(encoder, features)


def fit_generator(
    records: TrainingRecords,
    encoder: Encoder,
    pairs: Pairs,
    quantizer: TrainedQuantizer,
    folder: Path,
    config: GeneratorConfig,
    *,
    ids: str = RESIDUAL,
    progress: Progress,
    device: str = "cpu",
) -> Genius:
    """Train IDs and generator (stage 2), and declare the parts in the folder to be one model."""
    scheme = train_ids(ids, records, pairs, quantizer, folder / "ids", config.training, progress=progress)
    generator = train_generator(
        pairs, quantizer, folder / "generator", config, ids=scheme, progress=progress, device=device
    )
    instructions = known_instructions(records.data.instructions)
    model = parallel.in_turn(
        lambda: Genius.finish(folder, encoder, quantizer, generator, instructions, scheme)
    )
    shutil.rmtree(folder / "prepared", ignore_errors=True)
    if scheme.manifest is None:
        shutil.rmtree(folder / "ids", ignore_errors=True)
    return model


def train_ids(
    name: str,
    records: TrainingRecords,
    pairs: Pairs,
    quantizer: TrainedQuantizer,
    folder: Path,
    training: TrainingConfig,
    *,
    progress: Progress,
) -> TrainedIds:
    """Train a scheme by its name, or open the folder if this was done already.

    Raises
    ------
    UsageError
        there is no such scheme.
    """
    scheme = find_part("id_schemes", name, SCHEMES)
    if name == RESIDUAL:
        return residual_ids(quantizer.quantizer)
    if parallel.num_ranks() > 1:
        raise UsageError(f"--ids {name} trains in one process; start it without torchrun")
    writer = ArtifactWriter(
        folder,
        kind=KIND,
        config={"scheme": name, "training": to_json(training)},
        inputs={**pairs.fingerprints, "quantizer": quantizer.manifest.fingerprint},
    )
    if writer.finished() is not None:
        return load_ids(folder, quantizer.quantizer)
    candidates = pairs.candidates
    encoded = encode(quantizer.quantizer, candidates)
    pool = read_pool(records.data.training_pools())
    texts = {candidate_number(candidate.did): candidate.text for candidate in pool}
    data = TrainingSet(
        candidates=Candidates(
            encoded.embeddings,
            encoded.codes.numpy(),
            candidates.ids,
            [texts[number] for number in candidates.ids.tolist()],
        ),
        queries=fuse(quantizer.quantizer, pairs.queries),
        query_numbers=pairs.queries.ids,
        query_texts=records.texts(),
        pairs=pairs,
        quantizer=quantizer.quantizer,
        training=training,
        folder=writer.path,
        progress=progress,
    )
    return write_ids(writer, name, scheme.fit(data))


def check_output(data: MBeir, folder: Path, device: str) -> None:
    """Raise an error if training cannot begin, before anything is written."""
    parallel.usable(device)
    check_folder(folder)
    if not data.training_queries():
        raise BadData(f"{data.root} has no training queries: neither query/union_train nor query/train")


def check_folder(folder: Path) -> None:
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
    for path in sorted(folder.iterdir()):
        hidden = path.name.startswith(".") and path.name.split(".")[1] in FOLDERS  # unfinished or locked
        if path.name not in FOLDERS and not hidden:
            raise UsageError(
                f"{folder} holds {path.name}, which is no part of a model; choose a new or an empty folder"
            )


def known_instructions(instructions: Instructions) -> list[KnownInstruction]:
    """Return the instructions that a search without one may use."""
    return [
        KnownInstruction(key.query.mbeir, key.candidate.mbeir, text)
        for key, texts in instructions.rows.items()
        for text in texts
    ]
