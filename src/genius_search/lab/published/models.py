"""``genius import genius``: the authors' published model becomes a folder of ours.

The files are read by name and shape and nothing in them is run; optimizer state stays unread. No file says
which of level 0's codes stand for image, text and image-text; labelled candidates tell, where there are any
(specification, section 3).
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

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
from genius_search.model import MODEL_FILE, Genius, read_model_file
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
"""The encoder may be there, and a layer that the released code builds and never uses."""

NUM_MODALITIES: Final = 3
PUBLISHED_DIM: Final = 768
INSIDE: Final = "quantizer."
"""The prefix of the quantizer's names in the generator's file."""
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
    """A published quantizer under our names."""

    dim: int
    config: QuantizerConfig
    """The authors' settings, with the sizes of the file."""
    state: dict[str, Tensor]
    """The whole state but the meaning of level 0's codes, which no file says."""


class GeneratorParts(NamedTuple):
    """A published generator under our names."""

    dim: int
    sizes: tuple[int, ...]
    config: GeneratorConfig
    state: dict[str, Tensor]


def quantizer_parts(checkpoint: Checkpoint) -> QuantizerParts:
    """Read fusion and codebooks from a stage-1 file.

    Raises
    ------
    ArtifactMismatch
        Names or shapes are not those of this model, copies differ, or the codebooks were never started.
    """
    what = f"{checkpoint.path} as a GENIUS quantizer ({QUANTIZER_FILE})"
    tensors = checkpoint.tensors
    dim, config = _quantizer_sizes(tensors)
    check_names(tensors, _quantizer_shapes(tensors, dim, config), tolerated=TOLERATED, what=what)
    config = _possible(config, what)
    _check_books(tensors, config.levels, what)
    fusion = {
        f"encoder.{layer}.{kind}": f"fusion.{layer}.{kind}"
        for layer in FUSION_LAYERS
        for kind in ("weight", "bias")
    }
    books = {
        _book(level, kind): f"codebooks.{level}.{kind}"
        for level in range(1 + config.levels)
        for kind in ("embed", "cluster_size", "embed_avg")
    }
    used = single_precision(tensors, [*fusion, *books], what=what)
    state = {ours: used[name].contiguous() for name, ours in fusion.items()}
    state |= {ours: used[name].contiguous()[0] for name, ours in books.items()}
    return QuantizerParts(dim, config, state)


def generator_parts(checkpoint: Checkpoint, quantizer: Checkpoint) -> GeneratorParts:
    """Read the decoder from a stage-2 file, whose own copy of the quantizer must equal ``quantizer``.

    Raises
    ------
    ArtifactMismatch
        As in :func:`quantizer_parts`, or the two files do not belong together.
    """
    what = f"{checkpoint.path} as a GENIUS generator ({GENERATOR_FILE})"
    tensors = checkpoint.tensors
    copy = {name.removeprefix(INSIDE): tensors[name] for name in tensors if name.startswith(INSIDE)}
    dim, inner = _quantizer_sizes(copy)
    sizes = (NUM_MODALITIES, *[inner.codebook_size] * inner.levels)
    config = _generator_sizes(tensors)
    expected = {INSIDE + name: shape for name, shape in _quantizer_shapes(copy, dim, inner).items()}
    expected |= _generator_shapes(config, dim, sizes)
    check_names(tensors, expected, tolerated=TOLERATED, what=what)
    config = _possible(config, what)
    _check_same_quantizer(copy, checkpoint, quantizer)
    for name in TIED:
        if not _equal(tensors[name], tensors[SHARED]):
            raise ArtifactMismatch(f"{what}: {name} differs from {SHARED}, and they are one in this model")
    names = _generator_names(config.layers)
    used = single_precision(tensors, names, what=what)
    state = {ours: used[name].contiguous() for name, ours in names.items()}
    return GeneratorParts(dim, sizes, config, state)


def _quantizer_sizes(tensors: Mapping[str, Tensor]) -> tuple[int, QuantizerConfig]:
    """Read sizes off the shapes; a missing tensor, which is reported later, counts as the published one."""
    reference = preset("reference").quantizer
    projection = "encoder.text_projection_layer.weight"
    levels = [int(match[1]) for name in tensors if (match := _LEVEL.match(name))]
    return _size(tensors, projection, 1, PUBLISHED_DIM), dataclasses.replace(
        reference,
        levels=max(levels, default=reference.levels) or reference.levels,
        codebook_size=_size(tensors, _book(1, "embed"), 1, reference.codebook_size),
        fusion=FusionConfig(hidden=_size(tensors, projection, 0, reference.fusion.hidden)),
    )


def _generator_sizes(tensors: Mapping[str, Tensor]) -> GeneratorConfig:
    reference = preset("reference").generator
    blocks = [int(match[1]) for name in tensors if (match := _BLOCK.match(name))]
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
    layers = ((hidden, dim), (hidden, dim), (joint, joint), (dim, joint), (joint, joint), (1, joint))
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, (wide, narrow) in zip(FUSION_LAYERS, layers, strict=True):
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


def _generator_shapes(
    config: GeneratorConfig, dim: int, sizes: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        ours = Generator(dim, sizes, config).state_dict()
    shapes = {theirs: tuple(ours[name].shape) for theirs, name in _generator_names(config.layers).items()}
    return shapes | dict.fromkeys(TIED, shapes[SHARED])


def _generator_names(layers: int) -> dict[str, str]:
    """Return every tensor that is used, published name -> ours."""
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
    """Return whether two copies hold the same numbers; a copy that is stored once is not read."""
    if one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride():
        return True
    return one.dtype == other.dtype and torch.equal(one.reshape(-1), other.reshape(-1))


def _possible(config: Config, what: str) -> Config:
    """Check that sizes are within the limits of our settings."""
    try:
        return checked(config)
    except UsageError as error:
        raise ArtifactMismatch(f"{what}: {error}") from None


def _book(level: int | None, kind: str) -> str:
    """Return a codebook tensor's name; level None is the file's second copy of level 0."""
    place = "vq" if level is None else f"residual_rq.layers.{level}"
    return f"{place}._codebook.{kind}"


def _size(tensors: Mapping[str, Tensor], name: str, axis: int, otherwise: int) -> int:
    tensor = tensors.get(name)
    return otherwise if tensor is None or tensor.ndim <= axis else max(1, tensor.shape[axis])


# Two digits: a number that no model has is an unknown name, not millions of names that are missing.
_LEVEL: Final = re.compile(r"residual_rq\.layers\.([0-9]{1,2})\._codebook\.embed")
_BLOCK: Final = re.compile(r"id_generator\.decoder\.block\.([0-9]{1,2})\.")


WORK: Final = ".import"
"""A folder inside the model's folder while an import is under way."""
SOURCES: Final = "sources.json"
SAMPLE: Final = 512
"""Candidates of each modality that vote on the meaning of level 0's codes."""
OFFERED: Final = 4 * SAMPLE
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
    """The checked contents of the two files under our names; the tensors are still in the files."""

    quantizer: QuantizerParts
    generator: GeneratorParts

    @property
    def bytes(self) -> dict[str, int]:
        """The size of the weights that will be written, by part."""
        return {
            name: sum(tensor.nbytes for tensor in part.state.values())
            for name, part in self._asdict().items()
        }


def open_published(quantizer: Path, generator: Path) -> PublishedFiles:
    """Open both files without checking their contents."""
    return PublishedFiles(open_checkpoint(quantizer), open_checkpoint(generator))


def read_published(files: PublishedFiles) -> PublishedModel:
    """Check every name and shape, and that the two files belong together.

    Raises
    ------
    ArtifactMismatch
        The message lists what differs.
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

    A folder that holds an import of the same two files is kept, or continued; ``data`` then adds the meaning
    of level 0's codes.

    Parameters
    ----------
    encoder
        The spec of the encoder whose features the model was trained on, for example ``uniir:FOLDER``.
    data
        Labelled candidates, a few of which show the meaning of level 0's codes.
    instructions
        M-BEIR's ``query_instructions.tsv``; default: the data set's, if there is one.

    Raises
    ------
    ArtifactMismatch
        A file is not what it should be, or the encoder has another width.
    UsageError
        The folder holds something else; it is left as it is.
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
    sources = {name: file_fingerprint(file.path) for name, file in files._asdict().items()}
    _begin_import(folder, sources)
    sample = None
    if data is not None:
        sample = _sample(data, opened, folder / WORK / "candidates", progress=progress)
    ours = _import_quantizer(sources, published.quantizer, sample, folder, progress=progress, device=device)
    decoder = _import_generator(sources, published.generator, ours, folder, device=device)
    if known:
        model_instructions = known_instructions(known)
    else:  # those that an earlier import of the same files wrote
        written = (folder / MODEL_FILE).exists()
        model_instructions = list(read_model_file(folder).instructions) if written else []
    model = Genius.finish(folder, opened, ours, decoder, model_instructions)
    shutil.rmtree(folder / WORK)
    return model


def _begin_import(folder: Path, sources: Mapping[str, str]) -> None:
    """Mark a folder as an unfinished import of these files; refuse one that holds anything else."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; a model needs a folder")
    work = folder / WORK
    if folder.is_dir() and any(folder.iterdir()):
        try:
            unfinished = json.loads((work / SOURCES).read_text(encoding="utf-8")) == sources
        except (OSError, ValueError):
            unfinished = False
        finished = not work.exists() and all(_was_imported(folder, part, sources) for part in sources)
        if not (unfinished or finished):
            raise UsageError(
                f"{folder} holds something else than an import of these two files; expected an empty folder "
                "or none. Move it away, or choose another place"
            )
    work.mkdir(parents=True, exist_ok=True)
    write_json(work / SOURCES, sources)


def _was_imported(folder: Path, part: str, sources: Mapping[str, str]) -> bool:
    """Return whether a finished part of a model was imported from its file."""
    try:
        manifest = open_artifact(folder / part, kind=part)
    except (ArtifactMissing, ArtifactMismatch):
        return False
    return bool(manifest.inputs.get("published") == sources[part])


def _import_quantizer(
    sources: Mapping[str, str],
    parts: QuantizerParts,
    sample: Features | None,
    folder: Path,
    *,
    progress: Progress,
    device: str,
) -> TrainedQuantizer:
    if sample is None and _was_imported(folder, QUANTIZER, sources):
        return load_quantizer(folder / QUANTIZER, device=device)  # what is known of level 0 stays known
    level0 = "unknown" if sample is None else sample.manifest.fingerprint
    inputs = {"published": sources[QUANTIZER], "level0": level0}
    writer = ArtifactWriter(folder / QUANTIZER, kind=QUANTIZER, config=to_json(parts.config), inputs=inputs)
    if writer.finished() is not None:
        return load_quantizer(folder / QUANTIZER, device=device)
    with torch.device("meta"):
        quantizer = Quantizer(parts.dim, parts.config)
    unknown = torch.full_like(quantizer.level0_modality, -1, device="cpu")
    quantizer.load_state_dict({**parts.state, "level0_modality": unknown}, strict=True, assign=True)
    quantizer.to(device)
    health = None if sample is None else settle(quantizer, sample)
    for line in _describe_level0(health, sample):
        progress.say(line)
    return write_quantizer(writer, quantizer, health)


def _import_generator(
    sources: Mapping[str, str],
    parts: GeneratorParts,
    quantizer: TrainedQuantizer,
    folder: Path,
    *,
    device: str,
) -> TrainedGenerator:
    inputs = {"published": sources[GENERATOR], "quantizer": quantizer.manifest.fingerprint}
    writer = ArtifactWriter(folder / GENERATOR, kind=GENERATOR, config=to_json(parts.config), inputs=inputs)
    if writer.finished() is not None:
        return load_generator(folder / GENERATOR, device=device)
    with torch.device("meta"):
        generator = Generator(parts.dim, parts.sizes, parts.config)
    generator.load_state_dict(parts.state, strict=True, assign=True)
    return write_generator(writer, generator.to(device), dim=parts.dim)


def _sample(data: MBeir, encoder: Encoder, folder: Path, *, progress: Progress) -> Features:
    """Embed the same few candidates of each modality every time, from the start of every pool."""
    offered: dict[Modality, dict[str, Candidate]] = {modality: {} for modality in Modality}
    for path in data.local_pools() or data.training_pools():
        for candidate in islice(read_candidates(path), OFFERED):
            offered[candidate.modality].setdefault(candidate.did, candidate)
    random = np.random.default_rng(0)
    chosen: list[Candidate] = []
    for candidates in offered.values():
        pool = list(candidates.values())
        chosen += [pool[place] for place in np.sort(random.permutation(len(pool))[:SAMPLE])]
    if not chosen:
        raise BadData(f"{data.root} has no candidates, which level 0 needs; leave --data out")
    identity = [(each.did, each.modality.mbeir, each.text, each.image) for each in chosen]
    features = embed(
        (candidate_row(data, candidate) for candidate in chosen),
        encoder,
        folder,
        inputs={"sample": fingerprint_of(identity)},
        expected=len(chosen),
        progress=progress,
        skip_bad_images=True,
    )
    if features.left_out:
        first = features.left_out[0]
        progress.say(
            f"{len(features.left_out)} of {len(chosen)} candidates have no readable image and do not vote "
            f"on level 0, first {first.file}: {first.reason}"
        )
    return features


def _describe_level0(health: Health | None, sample: Features | None) -> list[str]:
    """Return what a person must know of the modality level, line by line."""
    if health is None or sample is None:
        return [UNKNOWN]
    meaning = ", ".join(f"{code} = {name}" for code, name in enumerate(health.level0_modality))
    lines = [f"level 0: {meaning}; right for {health.purity:.1%} of {health.candidates:,} candidates"]
    present = set(np.unique(sample.modality).tolist())
    absent = [modality.value for modality in Modality if modality.code not in present]
    if absent:
        lines.append(f"WARNING: no candidate shows which level-0 code stands for {' or '.join(absent)}")
    lost = [
        modality.value
        for modality in Modality
        if modality.code in present and modality.value not in health.level0_modality
    ]
    if lost:
        lines.append(f"WARNING: no level-0 code stands mostly for {' or '.join(lost)}")
    if health.purity is not None and health.purity < LOW_PURITY:
        lines.append(
            f"WARNING: level 0 separates modalities for only {health.purity:.1%} of the candidates, "
            f"expected at least {LOW_PURITY:.0%}: is this the encoder that the model was trained with?"
        )
    return lines
