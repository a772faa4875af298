"""``python -m research.published.models``: import the authors' published model.

Tensors are read by name and shape; no code in the files is executed, and optimizer state is not
read. The files do not say which of level 0's codes mean image, text and image-text; labelled
candidates, if there are any, show it (specification, section 3).
"""

from __future__ import annotations

import dataclasses
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from genius_search.artifact import Manifest, file_fingerprint, fingerprint_of
from genius_search.cli.options import DeviceOptions, OptionalFolder, command, read_toml
from genius_search.cli.terminal import TerminalProgress
from genius_search.config import FusionConfig, to_json, validate_settings
from genius_search.data.features import Features
from genius_search.data.mbeir import MBeir, read_candidates
from genius_search.encoders.base import Encoder
from genius_search.encoders.open import absolute_spec, load_encoder
from genius_search.encoders.store import embed
from genius_search.errors import ArtifactMismatch, BadData, UsageError
from genius_search.model import Genius
from genius_search.nn.codebooks import QUANTIZER_KIND as QUANTIZER
from genius_search.nn.codebooks import Codebooks, StoredQuantizer
from genius_search.nn.generator import Generator, write_generator
from genius_search.nn.packed import GENERATOR_KIND as GENERATOR
from genius_search.nn.parallel import check_device
from genius_search.nn.quantizer import Quantizer
from genius_search.progress import Progress
from genius_search.recipe import GeneratorConfig, QuantizerConfig
from genius_search.records import Candidate, Modality
from genius_search.training.codebooks import write_quantizer
from genius_search.training.fit import model_instructions
from genius_search.training.quantizer import LOW_PURITY, Health, measure_candidates
from genius_search.training.records import candidate_row
from genius_search.writing import ArtifactWriter, new_folder
from research.command import run
from research.published.checkpoint import (
    Checkpoint,
    check_names,
    is_tolerated,
    open_checkpoint,
    replace_parts,
    single_precision,
)

Config = TypeVar("Config", QuantizerConfig, GeneratorConfig)

RELEASED: Final = read_toml(Path(__file__).parents[2] / "recipes" / "reference.toml")
"""Settings of the authors' released code."""
QUANTIZER_FILE: Final = "rq_clip_large.pth"
GENERATOR_FILE: Final = "GENIUS_t5small.pth"
TOLERATED: Final = (
    re.compile(r"contra_projector\..*"),
    re.compile(r"(quantizer\.)?clip_model\..*"),
)
"""Tensors that files may contain: the encoder, and a layer that the released code never uses."""

NUM_MODALITIES: Final = 3
PUBLISHED_DIM: Final = 768
COPY_PREFIX: Final = "quantizer."
"""Prefix of the names of the quantizer's copy in the generator's file."""
EMBEDDING_TABLE: Final = "id_generator.shared.weight"
EMBEDDING_TABLE_COPIES: Final = tuple(
    f"id_generator.{part}.weight"
    for part in ("encoder.embed_tokens", "decoder.embed_tokens", "lm_head")
)
BOOK_TENSORS: Final = ("initted", "cluster_size", "embed_avg", "embed")
"""Names of the tensors of a codebook."""
GENERATOR_NAMES: Final = {
    "embedding.": "id_generator.shared.",
    "prefix_norm.": "id_generator.encoder.final_layer_norm.",
    "final_norm.": "id_generator.decoder.final_layer_norm.",
    "prefix_projection.": "embed_projector.0.",
    "position_bias.": "id_generator.decoder.block.0.layer.0.SelfAttention.relative_attention_bias.",
    "blocks.": "id_generator.decoder.block.",
    ".self_attention.": ".layer.0.SelfAttention.",
    ".self_norm.": ".layer.0.layer_norm.",
    ".cross_attention.": ".layer.1.EncDecAttention.",
    ".cross_norm.": ".layer.1.layer_norm.",
    ".wi.": ".layer.2.DenseReluDense.wi.",
    ".wo.": ".layer.2.DenseReluDense.wo.",
    ".feedforward_norm.": ".layer.2.layer_norm.",
}
"""Parts of our generator's names -> parts of the file's names."""

# Two digits, because a name with a huge number is an unknown tensor, not the last of millions of
# levels, of which all others are missing.
_LEVEL: Final = re.compile(r"residual_rq\.layers\.([0-9]{1,2})\._codebook\.embed")
_BLOCK: Final = re.compile(r"id_generator\.decoder\.block\.([0-9]{1,2})\.")

SAMPLE_SIZE: Final = 512
"""Maximum number of candidates of each modality that show the meaning of level 0's codes."""
POOL_PREFIX: Final = 4 * SAMPLE_SIZE
"""Number of candidates at the start of each pool from which the sample is drawn."""

UNKNOWN_LEVEL0: Final = (
    "WARNING: without labelled candidates, the meaning of level 0's codes (image, text or "
    "image-text) is unknown. Search works; search for one modality (--modality) does not. To find "
    "the meaning, import again with --data FOLDER, any data set in M-BEIR's layout"
)


@dataclass(frozen=True, slots=True)
class PublishedNetwork(Generic[Config]):
    """A published network with our names."""

    dim: int
    config: Config
    """The authors' settings, with the sizes of the file."""
    state: dict[str, Tensor]
    sizes: tuple[int, ...] = ()
    """Number of codes at each level, for the generator."""


def import_genius(
    quantizer: Path,
    generator: Path,
    encoder: str,
    folder: Path,
    *,
    progress: Progress,
    data: MBeir | None = None,
    device: str = "cpu",
    download: bool = False,
) -> Genius:
    """Convert the published files to a model in a new folder.

    Parameters
    ----------
    encoder
        Spec of the encoder on whose features the model was trained, such as ``uniir:FOLDER``.
    data
        Labelled candidates, a sample of which shows the meaning of level 0's codes; and
        instructions, so that searches may omit them.

    Raises
    ------
    ArtifactMismatch
        A file differs from the expected one, or the encoder has another width.
    UsageError
        The folder is not empty; it remains unchanged.
    """
    check_device(device)
    files = {QUANTIZER: open_checkpoint(quantizer), GENERATOR: open_checkpoint(generator)}
    networks = read_quantizer(files[QUANTIZER]), read_generator(files[GENERATOR], files[QUANTIZER])
    fingerprints = {name: file_fingerprint(file.path) for name, file in files.items()}
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} already exists; a model needs a new or an empty folder")
    loaded_encoder = load_encoder(absolute_spec(encoder), download=download, device=device)
    if loaded_encoder.dim != networks[0].dim:
        raise ArtifactMismatch(
            f"encoder {loaded_encoder.spec} has features of {loaded_encoder.dim} numbers, but this "
            f"model reads {networks[0].dim}; give the encoder of its training (UniIR's CLIP-SF)"
        )
    with new_folder(folder) as work, tempfile.TemporaryDirectory() as scratch:
        sample = None
        if data is not None:
            sample = _embed_sample(
                data, loaded_encoder, Path(scratch) / "candidates", progress=progress
            )
        stored_quantizer, stored_generator = _write_stages(
            work, *networks, fingerprints, sample, device=device, progress=progress
        )
        instructions = [] if data is None else model_instructions(data.instructions)
        Genius.finish(work, loaded_encoder, stored_quantizer, stored_generator, instructions)
    return Genius.open(folder, device=device, download=download)


def _embed_sample(data: MBeir, encoder: Encoder, folder: Path, *, progress: Progress) -> Features:
    """Embed a fixed sample of candidates of each modality from the start of all pools."""
    offered: dict[Modality, dict[str, Candidate]] = {modality: {} for modality in Modality}
    for path in data.local_pools() or data.training_pools():
        for candidate in islice(read_candidates(path), POOL_PREFIX):
            offered[candidate.modality].setdefault(candidate.did, candidate)
    random = np.random.default_rng(0)
    sample: list[Candidate] = []
    for candidates in offered.values():
        pool = list(candidates.values())
        sample += [pool[row] for row in np.sort(random.permutation(len(pool))[:SAMPLE_SIZE])]
    if not sample:
        raise BadData(f"{data.root} has no candidates, which level 0 needs; omit --data")
    identity = [
        (candidate.did, candidate.modality.mbeir, candidate.text, candidate.image)
        for candidate in sample
    ]
    return embed(
        (candidate_row(data, candidate) for candidate in sample),
        encoder,
        folder,
        inputs={"sample": fingerprint_of(identity)},
        expected=len(sample),
        progress=progress,
        skip_bad_images=True,
    )


def _write_stages(
    folder: Path,
    quantizer: PublishedNetwork[QuantizerConfig],
    generator: PublishedNetwork[GeneratorConfig],
    fingerprints: Mapping[str, str],
    sample: Features | None,
    *,
    device: str,
    progress: Progress,
) -> tuple[StoredQuantizer, Manifest]:
    """Write both stages of the model; the sample shows the meaning of level 0's codes."""
    with torch.device("meta"):
        network = Quantizer(quantizer.dim, quantizer.config)
        decoder = Generator(generator.dim, generator.sizes, generator.config)
    network.load_state_dict(quantizer.state, strict=True, assign=True)
    codebooks, messages = network.to_codebooks(), [UNKNOWN_LEVEL0]
    if sample is not None:
        codebooks, health = measure_candidates(network, sample)
        messages = _describe_level0(codebooks, health, len(sample))
    for message in messages:
        progress.say(message)
    inputs = {
        "published": fingerprints[QUANTIZER],
        "level0": "unknown" if sample is None else sample.fingerprint,
    }
    config = to_json(quantizer.config)
    writer = ArtifactWriter(folder / QUANTIZER, kind=QUANTIZER, config=config, inputs=inputs)
    stored_quantizer = write_quantizer(writer, codebooks)
    decoder.load_state_dict(generator.state, strict=True, assign=True)
    inputs = {
        "published": fingerprints[GENERATOR],
        "quantizer": stored_quantizer.manifest.fingerprint,
    }
    config = to_json(generator.config)
    writer = ArtifactWriter(folder / GENERATOR, kind=GENERATOR, config=config, inputs=inputs)
    stored_generator = write_generator(writer, decoder.to(device), dim=generator.dim)
    return stored_quantizer, stored_generator


def _describe_level0(codebooks: Codebooks, health: Health, num_candidates: int) -> list[str]:
    """Return messages about the meaning of level 0's codes, and warnings."""
    names = [
        [*Modality][code].value if code >= 0 else "unknown" for code in codebooks.level0_modality
    ]
    meaning = ", ".join(f"{code} = {name}" for code, name in enumerate(names))
    messages = [
        f"level 0: {meaning}; right for {health.purity:.1%} of {num_candidates:,} candidates"
    ]
    missing = [modality.value for modality in Modality if modality.value not in names]
    if missing:
        messages.append(f"WARNING: no level-0 code stands mostly for {' or '.join(missing)}")
    if health.purity is not None and health.purity < LOW_PURITY:
        messages.append(
            f"WARNING: level 0 separates modalities for only {health.purity:.1%} of candidates, "
            f"expected at least {LOW_PURITY:.0%}; check that this is the encoder of the training"
        )
    return messages


def read_quantizer(checkpoint: Checkpoint) -> PublishedNetwork[QuantizerConfig]:
    """Read fusion and codebooks from a stage-1 file.

    Raises
    ------
    ArtifactMismatch
        Names or shapes are not those of this model, copies differ, or codebooks are not trained.
    """
    source = f"{checkpoint.path} as a GENIUS quantizer ({QUANTIZER_FILE})"
    tensors = checkpoint.tensors
    dim, config = _quantizer_config(tensors)
    names, shapes = _quantizer_tensors(tensors, dim, config)
    check_names(tensors, shapes, tolerated=TOLERATED, source=source)
    config = _check_config(config, source)
    _check_books(tensors, config.levels, source)
    published = single_precision(tensors, names.values(), source=source)
    state = {}
    for ours, name in names.items():
        tensor = published[name].contiguous()
        state[ours] = tensor[0] if ours.startswith("codebooks.") else tensor
    return PublishedNetwork(dim, config, state)


def read_generator(
    checkpoint: Checkpoint, quantizer: Checkpoint
) -> PublishedNetwork[GeneratorConfig]:
    """Read the decoder from a stage-2 file, whose copy of the quantizer must equal ``quantizer``.

    Raises
    ------
    ArtifactMismatch
        As in :func:`read_quantizer`, or the files were not published together.
    """
    source = f"{checkpoint.path} as a GENIUS generator ({GENERATOR_FILE})"
    tensors = checkpoint.tensors
    copy = {
        name.removeprefix(COPY_PREFIX): tensor
        for name, tensor in tensors.items()
        if name.startswith(COPY_PREFIX)
    }
    dim, quantizer_config = _quantizer_config(copy)
    sizes = (NUM_MODALITIES, *[quantizer_config.codebook_size] * quantizer_config.levels)
    config = _generator_config(tensors)
    with torch.device("meta"):
        state = Generator(dim, sizes, config).state_dict()
    names = {name: replace_parts(name, GENERATOR_NAMES) for name in state}
    _, quantizer_shapes = _quantizer_tensors(copy, dim, quantizer_config)
    expected = {COPY_PREFIX + name: shape for name, shape in quantizer_shapes.items()}
    expected |= {names[name]: tuple(tensor.shape) for name, tensor in state.items()}
    expected |= dict.fromkeys(EMBEDDING_TABLE_COPIES, expected[EMBEDDING_TABLE])
    check_names(tensors, expected, tolerated=TOLERATED, source=source)
    config = _check_config(config, source)
    _check_same_quantizer(copy, checkpoint, quantizer)
    for name in EMBEDDING_TABLE_COPIES:
        if not _equal(tensors[name], tensors[EMBEDDING_TABLE]):
            raise ArtifactMismatch(
                f"{source}: {name} differs from {EMBEDDING_TABLE}, but they are copies in this "
                "model"
            )
    published = single_precision(tensors, names.values(), source=source)
    state = {ours: published[name].contiguous() for ours, name in names.items()}
    return PublishedNetwork(dim, config, state, sizes)


def _quantizer_config(tensors: Mapping[str, Tensor]) -> tuple[int, QuantizerConfig]:
    """Return width and settings of a quantizer, from the shapes of its tensors.

    A missing tensor, which is reported later, counts as the published one.
    """
    reference = RELEASED.quantizer
    projection = "encoder.text_projection_layer.weight"
    levels = [int(match[1]) for name in tensors if (match := _LEVEL.match(name))]
    return _size(tensors, projection, 1, PUBLISHED_DIM), dataclasses.replace(
        reference,
        levels=max(levels, default=reference.levels) or reference.levels,
        codebook_size=_size(tensors, _book_tensor(1, "embed"), 1, reference.codebook_size),
        fusion=FusionConfig(hidden=_size(tensors, projection, 0, reference.fusion.hidden)),
    )


def _generator_config(tensors: Mapping[str, Tensor]) -> GeneratorConfig:
    reference = RELEASED.generator
    blocks = [int(match[1]) for name in tensors if (match := _BLOCK.match(name))]
    layer = "id_generator.decoder.block.0.layer."
    width = _size(tensors, EMBEDDING_TABLE, 1, reference.width)
    heads = _size(
        tensors, f"{layer}0.SelfAttention.relative_attention_bias.weight", 1, reference.heads
    )
    attention_width = _size(
        tensors, f"{layer}0.SelfAttention.q.weight", 0, heads * reference.head_width
    )
    prefixes_width = _size(tensors, "embed_projector.0.weight", 0, reference.prefixes * width)
    return dataclasses.replace(
        reference,
        layers=max(blocks, default=reference.layers - 1) + 1,
        width=width,
        feedforward=_size(tensors, f"{layer}2.DenseReluDense.wi.weight", 0, reference.feedforward),
        heads=heads,
        head_width=max(1, attention_width // heads),
        prefixes=max(1, prefixes_width // width),
    )


def _size(tensors: Mapping[str, Tensor], name: str, axis: int, default: int) -> int:
    """Return the size of an axis of a tensor, at least 1; the default if there is no such axis."""
    tensor = tensors.get(name)
    return default if tensor is None or tensor.ndim <= axis else max(1, tensor.shape[axis])


def _quantizer_tensors(
    tensors: Mapping[str, Tensor], dim: int, config: QuantizerConfig
) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """Return our names -> published names, and the shapes of all tensors of a stage-1 file."""
    with torch.device("meta"):
        state = Quantizer(dim, config).state_dict()
    names, shapes = {}, {}
    for name, tensor in state.items():
        published = re.sub(r"^codebooks\.(\d+)", r"residual_rq.layers.\1._codebook", name)
        names[name] = published.replace("fusion.", "encoder.", 1)
        shape = tuple(tensor.shape)
        shapes[names[name]] = (1, *shape) if name.startswith("codebooks.") else shape
    for part in BOOK_TENSORS[1:]:
        shapes[_book_tensor(None, part)] = shapes[_book_tensor(0, part)]
    for level in (None, *range(1 + config.levels)):
        # The authors' library stores a scalar in some versions, an array of one number in others.
        flag = _book_tensor(level, "initted")
        shapes[flag] = () if flag in tensors and tensors[flag].shape == () else (1,)
    return names, shapes


def _book_tensor(level: int | None, part: str) -> str:
    """Return the name of a codebook's tensor; level None is the file's second copy of level 0."""
    book = "vq" if level is None else f"residual_rq.layers.{level}"
    return f"{book}._codebook.{part}"


def _check_config(config: Config, source: str) -> Config:
    """Check that the sizes of a file are within the limits of our settings."""
    try:
        return validate_settings(config)
    except UsageError as error:
        raise ArtifactMismatch(f"{source}: {error}") from None


def _check_books(tensors: Mapping[str, Tensor], levels: int, source: str) -> None:
    """Check that all codebooks are trained, and that both copies of level 0 are equal."""
    for level in (None, *range(1 + levels)):
        flag = _book_tensor(level, "initted")
        if not bool(tensors[flag]):
            raise ArtifactMismatch(
                f"{source}: {flag} is 0, so k-means never initialised its codes; this model is "
                "not trained"
            )
    for part in BOOK_TENSORS:
        copy, original = _book_tensor(None, part), _book_tensor(0, part)
        if not _equal(tensors[copy], tensors[original]):
            raise ArtifactMismatch(
                f"{source}: {copy} differs from {original}, but they are copies in this model"
            )


def _check_same_quantizer(
    copy: Mapping[str, Tensor], checkpoint: Checkpoint, quantizer: Checkpoint
) -> None:
    differing = [
        name
        for name, tensor in quantizer.tensors.items()
        if not is_tolerated(name, TOLERATED) and not (name in copy and _equal(copy[name], tensor))
    ]
    if differing:
        raise ArtifactMismatch(
            f"{checkpoint.path} was trained on another quantizer than {quantizer.path}: "
            f"{len(differing)} tensors of its copy differ, the first is "
            f"{COPY_PREFIX}{differing[0]}; give two files that were published together"
        )


def _equal(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors contain the same numbers; shared memory is not read."""
    if (
        first.data_ptr() == second.data_ptr()
        and first.shape == second.shape
        and first.stride() == second.stride()
    ):
        return True
    return first.dtype == second.dtype and torch.equal(first.reshape(-1), second.reshape(-1))


@command
class ImportGenius(DeviceOptions):
    """Import the published GENIUS checkpoints as a model's folder.

    The files are read without executing code in them. Every tensor must have the expected name and
    shape.
    """

    quantizer: Path
    """The published stage 1, rq_clip_large.pth."""

    generator: Path
    """The published stage 2, GENIUS_t5small.pth."""

    encoder: str
    """Encoder of the model's training: uniir:FOLDER (UniIR's CLIP-SF, imported), or any other."""

    out: Path
    """New folder of the model."""

    data: OptionalFolder = None
    """Data set in M-BEIR's layout; some of its candidates show the meaning of level 0's codes."""

    def run(self) -> None:
        """Import the model."""
        with TerminalProgress() as progress:
            model = import_genius(
                self.quantizer,
                self.generator,
                self.encoder,
                self.out,
                progress=progress,
                data=None if self.data is None else MBeir(self.data),
                device=self.device,
                download=self.download,
            )
            progress.say(f"model {model.fingerprint[:12]} is in {self.out}")


main = partial(run, ImportGenius, "published.models")


if __name__ == "__main__":
    sys.exit(main())
