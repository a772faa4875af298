"""``genius import genius``: the authors' published model becomes a folder of ours.

The files are read by name and shape and nothing in them is run; optimizer state stays unread. What no file
says, which of level 0's codes stand for image, text and image-text, is found on labelled candidates if there
are any (specification, section 3).
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch

from genius.artifact import ArtifactWriter, fingerprint_of
from genius.config import to_json
from genius.data.features import Features
from genius.data.instructions import Instructions
from genius.data.mbeir import MBeir, read_candidates
from genius.data.records import Candidate, Modality
from genius.encoders.load import load_encoder
from genius.encoders.protocol import Encoder
from genius.errors import ArtifactMismatch, BadData
from genius.evaluation.health import LOW_PURITY, Health
from genius.model import Genius, KnownInstruction
from genius.models.device import usable
from genius.models.generator import Generator
from genius.models.quantizer import Quantizer
from genius.published.container import Checkpoint, open_checkpoint
from genius.published.genius_parts import GeneratorParts, QuantizerParts, generator_parts, quantizer_parts
from genius.stages.embed import embed
from genius.stages.embed_records import candidate_row
from genius.stages.fit import absolute_spec, known_instructions
from genius.stages.import_folder import Sources, begin_import, end_import
from genius.stages.model_file import MODEL_FILE, read_model_file
from genius.stages.progress import Progress
from genius.stages.train_generator import KIND as GENERATOR
from genius.stages.train_generator import TrainedGenerator, load_generator, write_generator
from genius.stages.train_quantizer import KIND as QUANTIZER
from genius.stages.train_quantizer import TrainedQuantizer, load_quantizer, settle, write_quantizer

SAMPLE: Final = 512
"""Candidates of each modality that vote on what level 0's codes stand for."""
LOOK_AT: Final = 4 * SAMPLE
"""Candidates read from the start of each pool to choose them from."""

UNKNOWN: Final = (
    "WARNING: without labelled candidates nobody knows which level-0 codes stand for image, text and "
    "image-text. Searching works; asking for one modality (--modality) does not. Import again with "
    "--data FOLDER, any data set in M-BEIR's layout, to find out"
)


class PublishedFiles(NamedTuple):
    """The two files of a published model, open."""

    quantizer: Checkpoint
    generator: Checkpoint


class PublishedModel(NamedTuple):
    """What the two files hold, checked, under our names; still in the files."""

    quantizer: QuantizerParts
    generator: GeneratorParts

    @property
    def quantizer_bytes(self) -> int:
        """Of the weights that will be written."""
        return sum(tensor.nbytes for tensor in self.quantizer.state.values())

    @property
    def generator_bytes(self) -> int:
        """Of the weights that will be written."""
        return sum(tensor.nbytes for tensor in self.generator.state.values())


def open_published(quantizer: Path, generator: Path) -> PublishedFiles:
    """Open both files; what is in them is not looked at yet."""
    return PublishedFiles(open_checkpoint(quantizer), open_checkpoint(generator))


def read_published(files: PublishedFiles) -> PublishedModel:
    """Check every name and shape, and that the two files belong together.

    Raises
    ------
    ArtifactMismatch
        lists what differs.
    """
    return PublishedModel(quantizer_parts(files.quantizer), generator_parts(files.generator, files.quantizer))


def import_genius(
    quantizer: Path,
    generator: Path,
    encoder: str,
    folder: Path,
    *,
    progress: Progress,
    data: MBeir | None = None,
    instructions: Path | None = None,
    device: str = "cpu",
    download: bool = False,
) -> Genius:
    """Turn the published files into a model's folder.

    A folder that holds an import of the same two files is kept, or gone on with; ``data`` then adds what
    level 0's codes stand for.

    Parameters
    ----------
    encoder
        the one whose features the model was trained on, for example ``uniir:FOLDER``.
    data
        labelled candidates: what level 0's codes stand for is found on a few of them.
    instructions
        M-BEIR's ``query_instructions.tsv``; default: the data set's, if there is one.

    Raises
    ------
    ArtifactMismatch
        a file is not what it should be, or the encoder is of another width.
    UsageError
        the folder holds something else; it is left as it is.
    """
    usable(device)
    files = open_published(quantizer, generator)
    published = read_published(files)
    known = Instructions.read(instructions) if instructions else (data.instructions if data else None)
    opened = load_encoder(absolute_spec(encoder), download=download, device=device)
    if opened.dim != published.quantizer.dim:
        raise ArtifactMismatch(
            f"encoder {opened.spec} gives features of {opened.dim} numbers and this model reads "
            f"{published.quantizer.dim}; give the encoder it was trained with (UniIR's CLIP-SF)"
        )
    sources = Sources.of(*files)
    work = begin_import(folder, sources)
    sample = None if data is None else _sample(data, opened, work / "candidates", progress=progress)
    ours = _import_quantizer(sources, published, sample, folder, progress=progress, device=device)
    decoder = _import_generator(sources, published, ours, folder, device=device)
    instructions_known = known_instructions(known) if known else _kept_instructions(folder)
    model = Genius.finish(folder, opened, ours, decoder, instructions_known)
    end_import(folder)
    return model


def _import_quantizer(
    sources: Sources,
    published: PublishedModel,
    sample: Features | None,
    folder: Path,
    *,
    progress: Progress,
    device: str,
) -> TrainedQuantizer:
    if sample is None and sources.made(folder, QUANTIZER):
        return load_quantizer(folder / QUANTIZER, device=device)  # what is known of level 0 stays known
    parts = published.quantizer
    writer = ArtifactWriter(
        folder / QUANTIZER,
        kind=QUANTIZER,
        config=to_json(parts.config),
        inputs={
            "published": sources.quantizer,
            "level0": "unknown" if sample is None else sample.manifest.fingerprint,
        },
    )
    if writer.finished() is not None:
        return load_quantizer(folder / QUANTIZER, device=device)
    with torch.device("meta"):
        quantizer = Quantizer(parts.dim, parts.config)
    unknown = torch.full_like(quantizer.level0_modality, -1, device="cpu")
    quantizer.load_state_dict({**parts.state, "level0_modality": unknown}, strict=True, assign=True)
    quantizer.to(device)
    health = None if sample is None else settle(quantizer, sample)
    for line in _about_level0(health, sample):
        progress.say(line)
    return write_quantizer(writer, quantizer, health)


def _import_generator(
    sources: Sources,
    published: PublishedModel,
    quantizer: TrainedQuantizer,
    folder: Path,
    *,
    device: str,
) -> TrainedGenerator:
    parts = published.generator
    writer = ArtifactWriter(
        folder / GENERATOR,
        kind=GENERATOR,
        config=to_json(parts.config),
        inputs={
            "published": sources.generator,
            "quantizer": quantizer.manifest.fingerprint,
        },
    )
    if writer.finished() is not None:
        return load_generator(folder / GENERATOR, device=device)
    with torch.device("meta"):
        generator = Generator(parts.dim, parts.sizes, parts.config)
    generator.load_state_dict(parts.state, strict=True, assign=True)
    return write_generator(writer, generator.to(device), dim=parts.dim)


def _kept_instructions(folder: Path) -> list[KnownInstruction]:
    """Those that an earlier import of the same files wrote."""
    if not (folder / MODEL_FILE).exists():
        return []
    return [KnownInstruction(**entry) for entry in read_model_file(folder)["instructions"]]


def _sample(data: MBeir, encoder: Encoder, folder: Path, *, progress: Progress) -> Features:
    """Embed a few candidates of each modality, from the start of every pool; the same ones every time."""
    offered: dict[Modality, dict[str, Candidate]] = {modality: {} for modality in Modality}
    for path in data.local_pools() or data.training_pools():
        for candidate in islice(read_candidates(path), LOOK_AT):
            offered[candidate.modality].setdefault(candidate.did, candidate)
    random = np.random.default_rng(0)
    chosen: list[Candidate] = []
    for candidates in offered.values():
        everyone = list(candidates.values())
        chosen += [everyone[place] for place in np.sort(random.permutation(len(everyone))[:SAMPLE])]
    if not chosen:
        raise BadData(f"{data.root} has no candidates: level 0 cannot be told from it; leave --data out")
    features = embed(
        (candidate_row(data, candidate) for candidate in chosen),
        encoder,
        folder,
        inputs={
            "sample": fingerprint_of(
                [(each.did, each.modality.value, each.text, each.image) for each in chosen]
            )
        },
        expected=len(chosen),
        progress=progress,
        skip_bad_images=True,
    )
    if features.left_out:
        first = features.left_out[0]
        progress.say(
            f"{len(features.left_out)} of {len(chosen)} candidates have no readable picture and do not vote "
            f"on level 0, first {first.file}: {first.reason}"
        )
    return features


def _about_level0(health: Health | None, sample: Features | None) -> list[str]:
    """What a person must know of the modality level."""
    if health is None or sample is None:
        return [UNKNOWN]
    meaning = ", ".join(f"{code} = {name}" for code, name in enumerate(health.level0_modality))
    lines = [f"level 0: {meaning}; right for {health.purity:.1%} of {health.candidates:,} candidates"]
    present = {int(code) for code in np.unique(sample.modality)}
    absent = [modality.label for modality in Modality if modality.code not in present]
    if absent:
        lines.append(
            f"WARNING: there was no candidate to tell which level-0 code stands for {' or '.join(absent)}"
        )
    lost = [
        modality.label
        for modality in Modality
        if modality.code in present and modality.label not in health.level0_modality
    ]
    if lost:
        lines.append(f"WARNING: no level-0 code stands mostly for {' or '.join(lost)}")
    if health.purity is not None and health.purity < LOW_PURITY:
        lines.append(
            f"WARNING: level 0 tells modalities apart for only {health.purity:.1%} of the candidates, "
            f"expected at least {LOW_PURITY:.0%}: is this the encoder that the model was trained with?"
        )
    return lines
