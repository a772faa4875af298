"""``genius import genius``: the authors' published model becomes a folder of ours.

The files are read by name and shape and nothing in them is run; optimizer state stays unread. What no file
says, which of level 0's codes stand for image, text and image-text, is found on labelled candidates if there
are any (specification, section 3).
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from genius_search.artifact import ArtifactWriter, file_fingerprint, fingerprint_of, open_artifact, write_json
from genius_search.config import FusionConfig, GeneratorConfig, QuantizerConfig, checked, preset, to_json
from genius_search.data.features import Features
from genius_search.data.mbeir import Instructions, MBeir, read_candidates
from genius_search.embed import candidate_row, embed
from genius_search.encoders.base import Encoder, load_encoder
from genius_search.errors import ArtifactMismatch, ArtifactMissing, BadData, UsageError
from genius_search.lab.published.checkpoint import (
    Checkpoint,
    check_names,
    is_tolerated,
    open_checkpoint,
    single_precision,
)
from genius_search.model import MODEL_FILE, Genius, KnownInstruction, read_model_file
from genius_search.nn.generator import KIND as GENERATOR
from genius_search.nn.generator import Generator, TrainedGenerator, load_generator, write_generator
from genius_search.nn.health import LOW_PURITY, Health
from genius_search.nn.parallel import usable
from genius_search.nn.quantizer import KIND as QUANTIZER
from genius_search.nn.quantizer import Quantizer, TrainedQuantizer, load_quantizer, write_quantizer
from genius_search.progress import Progress
from genius_search.records import Candidate, Modality
from genius_search.training.fit import absolute_spec, known_instructions
from genius_search.training.quantizer import settle

Config = TypeVar("Config", QuantizerConfig, GeneratorConfig)

QUANTIZER_FILE: Final = "rq_clip_large.pth"
GENERATOR_FILE: Final = "GENIUS_t5small.pth"
TOLERATED: Final = (re.compile(r"contra_projector\..*"), re.compile(r"(quantizer\.)?clip_model\..*"))
"""The encoder may come along, and a layer that the released code makes and never uses."""

NUM_MODALITIES: Final = 3
NUM_SPECIAL: Final = 3
NUM_BUCKETS: Final = 32
PUBLISHED_DIM: Final = 768
INSIDE: Final = "quantizer."
"""Before the names of the quantizer inside the generator's file."""
SHARED: Final = "id_generator.shared.weight"
TIED: Final = tuple(
    f"id_generator.{part}.weight" for part in ("encoder.embed_tokens", "decoder.embed_tokens", "lm_head")
)
FUSION_LAYERS: Final = (
    "text_projection_layer",
    "image_projection_layer",
    "combiner_layer",
    "output_layer",
    "dynamic_scalar.0",
    "dynamic_scalar.3",
)
BOOK: Final = ("initted", "cluster_size", "embed_avg", "embed")
BLOCK: Final = {
    "layer.0.SelfAttention": "self_attention",
    "layer.0.layer_norm": "self_norm",
    "layer.1.EncDecAttention": "cross_attention",
    "layer.1.layer_norm": "cross_norm",
    "layer.2.DenseReluDense.wi": "wi",
    "layer.2.DenseReluDense.wo": "wo",
    "layer.2.layer_norm": "feedforward_norm",
}
"""Parts of a decoder block: published name -> ours."""


class QuantizerParts(NamedTuple):
    """A published stage 1, under our names."""

    dim: int
    config: QuantizerConfig
    """The authors' settings, with the sizes found."""
    state: dict[str, Tensor]
    """Everything but what level 0's codes stand for, which no file says."""


class GeneratorParts(NamedTuple):
    """A published stage 2, under our names."""

    dim: int
    sizes: tuple[int, ...]
    config: GeneratorConfig
    state: dict[str, Tensor]


def quantizer_parts(checkpoint: Checkpoint) -> QuantizerParts:
    """Fusion and codebooks of a stage-1 file.

    Raises
    ------
    ArtifactMismatch
        names or shapes are not those of this model, copies differ, or the codebooks were never started.
    """
    what = f"{checkpoint.path} as a GENIUS quantizer ({QUANTIZER_FILE})"
    tensors = checkpoint.tensors
    dim, config = _quantizer_sizes(tensors)
    check_names(tensors, _quantizer_shapes(tensors, dim, config), tolerated=TOLERATED, what=what)
    config = _possible(config, what)
    _check_books(tensors, config.levels, what)
    state = {}
    for layer in FUSION_LAYERS:
        for kind in ("weight", "bias"):
            state[f"fusion.{layer}.{kind}"] = _sound(tensors, f"encoder.{layer}.{kind}", what)
    for level in range(1 + config.levels):
        for kind in ("embed", "cluster_size", "embed_avg"):
            state[f"codebooks.{level}.{kind}"] = _sound(tensors, _book(level, kind), what)[0]
    return QuantizerParts(dim, config, state)


def generator_parts(checkpoint: Checkpoint, quantizer: Checkpoint) -> GeneratorParts:
    """The decoder of a stage-2 file, whose own copy of the quantizer must be the one given.

    Raises
    ------
    ArtifactMismatch
        as for :func:`quantizer_parts`, or the two files do not belong together.
    """
    what = f"{checkpoint.path} as a GENIUS generator ({GENERATOR_FILE})"
    tensors = checkpoint.tensors
    copy = {name.removeprefix(INSIDE): tensors[name] for name in tensors if name.startswith(INSIDE)}
    dim, inner = _quantizer_sizes(copy)
    sizes = (NUM_MODALITIES, *[inner.codebook_size] * inner.levels)
    config = _generator_sizes(tensors)
    expected = {INSIDE + name: shape for name, shape in _quantizer_shapes(copy, dim, inner).items()}
    expected |= _generator_shapes(config, dim, NUM_SPECIAL + sum(sizes))
    check_names(tensors, expected, tolerated=TOLERATED, what=what)
    config = _possible(config, what)
    _check_same_quantizer(copy, checkpoint, quantizer)
    for name in TIED:
        if not _equal(tensors[name], tensors[SHARED]):
            raise ArtifactMismatch(f"{what}: {name} differs from {SHARED}, and they are one in this model")
    ours = _generator_names(config.layers)
    state = {ours[name]: _sound(tensors, name, what) for name in ours}
    return GeneratorParts(dim, sizes, config, state)


def _quantizer_sizes(tensors: Mapping[str, Tensor]) -> tuple[int, QuantizerConfig]:
    """Sizes by the shapes found; the published ones where a tensor is missing, which is then reported."""
    reference = preset("reference").quantizer
    projection = "encoder.text_projection_layer.weight"
    levels = [int(found[1]) for name in tensors if (found := _LEVEL.match(name))]
    return _size(tensors, projection, 1, PUBLISHED_DIM), dataclasses.replace(
        reference,
        levels=max(levels, default=reference.levels) or reference.levels,
        codebook_size=_size(tensors, _book(1, "embed"), 1, reference.codebook_size),
        fusion=FusionConfig(hidden=_size(tensors, projection, 0, reference.fusion.hidden)),
    )


def _generator_sizes(tensors: Mapping[str, Tensor]) -> GeneratorConfig:
    reference = preset("reference").generator
    blocks = [int(found[1]) for name in tensors if (found := _BLOCK.match(name))]
    first = "id_generator.decoder.block.0.layer."
    width = _size(tensors, SHARED, 1, reference.width)
    heads = _size(tensors, f"{first}0.SelfAttention.relative_attention_bias.weight", 1, reference.heads)
    inside = _size(tensors, f"{first}0.SelfAttention.q.weight", 0, heads * reference.head_width)
    prefixed = _size(tensors, "embed_projector.0.weight", 0, reference.prefixes * width)
    return dataclasses.replace(
        reference,
        layers=max(blocks, default=reference.layers - 1) + 1,
        width=width,
        feedforward=_size(tensors, f"{first}2.DenseReluDense.wi.weight", 0, reference.feedforward),
        heads=heads,
        head_width=max(1, inside // heads),
        prefixes=max(1, prefixed // width),
    )


def _quantizer_shapes(
    tensors: Mapping[str, Tensor], dim: int, config: QuantizerConfig
) -> dict[str, tuple[int, ...]]:
    hidden, joint = config.fusion.hidden, 2 * config.fusion.hidden
    layers = dict(
        zip(
            FUSION_LAYERS,
            ((hidden, dim), (hidden, dim), (joint, joint), (dim, joint), (joint, joint), (1, joint)),
            strict=True,
        )
    )
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, (wide, narrow) in layers.items():
        shapes[f"encoder.{layer}.weight"] = (wide, narrow)
        shapes[f"encoder.{layer}.bias"] = (wide,)
    for level in (None, *range(1 + config.levels)):
        size = config.codebook_size if level else NUM_MODALITIES
        for kind, shape in zip(BOOK, ((1,), (1, size), (1, size, dim), (1, size, dim)), strict=True):
            shapes[_book(level, kind)] = shape
        started = _book(level, "initted")
        if started in tensors and tensors[started].shape == ():  # older and newer versions of a library
            shapes[started] = ()
    return shapes


def _generator_shapes(config: GeneratorConfig, dim: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    width, inside = config.width, config.heads * config.head_width
    kinds = {
        "q": (inside, width),
        "k": (inside, width),
        "v": (inside, width),
        "o": (width, inside),
        "relative_attention_bias": (NUM_BUCKETS, config.heads),
        "wi": (config.feedforward, width),
        "wo": (width, config.feedforward),
        "layer_norm": (width,),
        "final_layer_norm": (width,),
        "shared": (vocabulary, width),
    }
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(TIED, (vocabulary, width))
    for name in _generator_names(config.layers):
        if not name.startswith("embed_projector."):
            shapes[name] = kinds[name.split(".")[-2]]
    shapes["embed_projector.0.weight"] = (config.prefixes * width, dim)
    shapes["embed_projector.0.bias"] = (config.prefixes * width,)
    return shapes


def _generator_names(layers: int) -> dict[str, str]:
    """Every tensor that is used, published name -> ours."""
    first = "id_generator.decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    names = {
        SHARED: "embedding.weight",
        "id_generator.encoder.final_layer_norm.weight": "prefix_norm.weight",
        "id_generator.decoder.final_layer_norm.weight": "final_norm.weight",
        "embed_projector.0.weight": "prefix_projection.weight",
        "embed_projector.0.bias": "prefix_projection.bias",
        first: "position_bias.weight",
    }
    for block in range(layers):
        for theirs, ours in BLOCK.items():
            inner = [f".{part}" for part in "qkvo"] if theirs.endswith("Attention") else [""]
            for part in inner:
                published = f"id_generator.decoder.block.{block}.{theirs}{part}.weight"
                names[published] = f"blocks.{block}.{ours}{part}.weight"
    return names


def _check_books(tensors: Mapping[str, Tensor], levels: int, what: str) -> None:
    for level in (None, *range(1 + levels)):
        started = _book(level, "initted")
        if not bool(tensors[started]):
            raise ArtifactMismatch(
                f"{what}: {started} is 0, so its codes were never started by k-means: an untrained model"
            )
    for kind in BOOK:
        if not _equal(tensors[_book(None, kind)], tensors[_book(0, kind)]):
            raise ArtifactMismatch(
                f"{what}: {_book(None, kind)} differs from {_book(0, kind)}, and they are one in this model"
            )


def _check_same_quantizer(copy: Mapping[str, Tensor], checkpoint: Checkpoint, quantizer: Checkpoint) -> None:
    differing = [
        name
        for name, tensor in quantizer.tensors.items()
        if not is_tolerated(name, TOLERATED) and not (name in copy and _equal(copy[name], tensor))
    ]
    if differing:
        raise ArtifactMismatch(
            f"{checkpoint.path} was trained on another quantizer than {quantizer.path}: {len(differing)} "
            f"tensors of its copy differ, first {INSIDE}{differing[0]}; give the two files that were "
            "published together"
        )


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two copies hold the same numbers; a copy that is stored once is not read."""
    if one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride():
        return True
    return one.dtype == other.dtype and torch.equal(one.reshape(-1), other.reshape(-1))


def _sound(tensors: Mapping[str, Tensor], name: str, what: str) -> Tensor:
    return single_precision(tensors, [name], what=what)[name].contiguous()


def _possible(config: Config, what: str) -> Config:
    """Sizes within the limits of our settings."""
    try:
        return checked(config)
    except UsageError as error:
        raise ArtifactMismatch(f"{what}: {error}") from None


def _book(level: int | None, kind: str) -> str:
    """A codebook's tensor; level None is the file's second copy of level 0."""
    place = "vq" if level is None else f"residual_rq.layers.{level}"
    return f"{place}._codebook.{kind}"


def _size(tensors: Mapping[str, Tensor], name: str, axis: int, otherwise: int) -> int:
    tensor = tensors.get(name)
    return otherwise if tensor is None or tensor.ndim <= axis else max(1, tensor.shape[axis])


# Two digits: a number that no model has is an unknown name, not millions of names that are missing.
_LEVEL: Final = re.compile(r"residual_rq\.layers\.([0-9]{1,2})\._codebook\.embed")
_BLOCK: Final = re.compile(r"id_generator\.decoder\.block\.([0-9]{1,2})\.")


WORK: Final = ".import"
"""Folder inside the model's folder while an import is under way."""
SOURCES: Final = "sources.json"


class Sources(NamedTuple):
    """SHA-256 of the two published files."""

    quantizer: str
    generator: str

    @staticmethod
    def of(quantizer: Checkpoint, generator: Checkpoint) -> Sources:
        """Read both files to the end."""
        return Sources(file_fingerprint(quantizer.path), file_fingerprint(generator.path))

    def made(self, folder: Path, part: str) -> bool:
        """Whether a finished part of a model was imported from its file."""
        try:
            manifest = open_artifact(folder / part, kind=part)
        except (ArtifactMissing, ArtifactMismatch):
            return False
        return bool(manifest.inputs.get("published") == self._asdict()[part])


def begin_import(folder: Path, sources: Sources) -> Path:
    """Declare that an import of these files goes on in a folder; gives the folder for its own work.

    Raises
    ------
    UsageError
        the folder holds anything but an import of the same two files, finished or not.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; a model needs a folder")
    work = folder / WORK
    if folder.is_dir() and any(folder.iterdir()):
        unfinished = _read(work / SOURCES) == sources._asdict()
        finished = not work.exists() and all(sources.made(folder, part) for part in Sources._fields)
        if not (unfinished or finished):
            raise UsageError(
                f"{folder} holds something else than an import of these two files; expected an empty folder "
                "or none. Move it away, or choose another place"
            )
    work.mkdir(parents=True, exist_ok=True)
    write_json(work / SOURCES, sources._asdict())
    return work


def end_import(folder: Path) -> None:
    """Take the import's own work away."""
    shutil.rmtree(folder / WORK)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


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
    return read_model_file(folder).instructions


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
                [(each.did, each.modality.mbeir, each.text, each.image) for each in chosen]
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
    absent = [modality.value for modality in Modality if modality.code not in present]
    if absent:
        lines.append(
            f"WARNING: there was no candidate to tell which level-0 code stands for {' or '.join(absent)}"
        )
    lost = [
        modality.value
        for modality in Modality
        if modality.code in present and modality.value not in health.level0_modality
    ]
    if lost:
        lines.append(f"WARNING: no level-0 code stands mostly for {' or '.join(lost)}")
    if health.purity is not None and health.purity < LOW_PURITY:
        lines.append(
            f"WARNING: level 0 tells modalities apart for only {health.purity:.1%} of the candidates, "
            f"expected at least {LOW_PURITY:.0%}: is this the encoder that the model was trained with?"
        )
    return lines
