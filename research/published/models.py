"""``python -m research.published.models``: the authors' published model becomes a folder of ours.

The files are read by name and shape and nothing in them is run; optimizer state stays unread. No file says
which of level 0's codes stand for image, text and image-text; labelled candidates tell, where there are any
(specification, section 3).
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

from genius_search.artifact import file_fingerprint, fingerprint_of
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
from genius_search.nn.codebooks import Codebooks
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
    renamed,
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
"""The encoder may be there, and a layer that the released code builds and never uses."""

NUM_MODALITIES: Final = 3
PUBLISHED_DIM: Final = 768
INSIDE: Final = "quantizer."
"""The prefix of the quantizer's names in the generator's file."""
SHARED: Final = "id_generator.shared.weight"
TIED: Final = tuple(
    f"id_generator.{part}.weight"
    for part in ("encoder.embed_tokens", "decoder.embed_tokens", "lm_head")
)
BOOK: Final = ("initted", "cluster_size", "embed_avg", "embed")
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
"""Parts of the generator's names, and what the file has in their place."""


@dataclass(frozen=True, slots=True)
class Parts(Generic[Config]):
    """A published network under our names."""

    dim: int
    config: Config
    """The authors' settings, with the sizes of the file."""
    state: dict[str, Tensor]
    sizes: tuple[int, ...] = ()
    """Codes of each level, for the generator."""


def quantizer_parts(checkpoint: Checkpoint) -> Parts[QuantizerConfig]:
    """Read fusion and codebooks from a stage-1 file.

    Raises ArtifactMismatch: names or shapes are not those of this model, copies differ, or the codebooks were
    never started.
    """
    what = f"{checkpoint.path} as a GENIUS quantizer ({QUANTIZER_FILE})"
    tensors = checkpoint.tensors
    dim, config = _quantizer_sizes(tensors)
    names, shapes = _quantizer_tensors(tensors, dim, config)
    check_names(tensors, shapes, tolerated=TOLERATED, what=what)
    config = _possible(config, what)
    _check_books(tensors, config.levels, what)
    used = single_precision(tensors, names.values(), what=what)
    state = {ours: used[name].contiguous() for ours, name in names.items()}
    return Parts(
        dim, config, {o: t[0] if o.startswith("codebooks.") else t for o, t in state.items()}
    )


def generator_parts(checkpoint: Checkpoint, quantizer: Checkpoint) -> Parts[GeneratorConfig]:
    """Read the decoder from a stage-2 file, whose own copy of the quantizer must equal ``quantizer``.

    Raises ArtifactMismatch: as in :func:`quantizer_parts`, or the two files do not belong together.
    """
    what = f"{checkpoint.path} as a GENIUS generator ({GENERATOR_FILE})"
    tensors = checkpoint.tensors
    copy = {name.removeprefix(INSIDE): tensors[name] for name in tensors if name.startswith(INSIDE)}
    dim, inner = _quantizer_sizes(copy)
    sizes = (NUM_MODALITIES, *[inner.codebook_size] * inner.levels)
    config = _generator_sizes(tensors)
    _, inside = _quantizer_tensors(copy, dim, inner)
    with torch.device("meta"):
        ours = Generator(dim, sizes, config).state_dict()
    names = {name: renamed(name, GENERATOR_NAMES) for name in ours}
    expected = {INSIDE + name: shape for name, shape in inside.items()}
    expected |= {names[name]: tuple(tensor.shape) for name, tensor in ours.items()}
    expected |= dict.fromkeys(TIED, expected[SHARED])
    check_names(tensors, expected, tolerated=TOLERATED, what=what)
    config = _possible(config, what)
    _check_same_quantizer(copy, checkpoint, quantizer)
    for name in TIED:
        if not _equal(tensors[name], tensors[SHARED]):
            raise ArtifactMismatch(
                f"{what}: {name} differs from {SHARED}, and they are one in this model"
            )
    used = single_precision(tensors, names.values(), what=what)
    state = {name: used[published].contiguous() for name, published in names.items()}
    return Parts(dim, config, state, sizes)


def _quantizer_sizes(tensors: Mapping[str, Tensor]) -> tuple[int, QuantizerConfig]:
    """Read sizes off the shapes; a missing tensor, which is reported later, counts as the published one."""
    reference = RELEASED.quantizer
    projection = "encoder.text_projection_layer.weight"
    levels = [int(match[1]) for name in tensors if (match := _LEVEL.match(name))]
    return _size(tensors, projection, 1, PUBLISHED_DIM), dataclasses.replace(
        reference,
        levels=max(levels, default=reference.levels) or reference.levels,
        codebook_size=_size(tensors, _book(1, "embed"), 1, reference.codebook_size),
        fusion=FusionConfig(hidden=_size(tensors, projection, 0, reference.fusion.hidden)),
    )


def _generator_sizes(tensors: Mapping[str, Tensor]) -> GeneratorConfig:
    reference = RELEASED.generator
    blocks = [int(match[1]) for name in tensors if (match := _BLOCK.match(name))]
    first = "id_generator.decoder.block.0.layer."
    width = _size(tensors, SHARED, 1, reference.width)
    heads = _size(
        tensors, f"{first}0.SelfAttention.relative_attention_bias.weight", 1, reference.heads
    )
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


def _quantizer_tensors(
    tensors: Mapping[str, Tensor], dim: int, config: QuantizerConfig
) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """Return the published name of each of our tensors, and the shape of every tensor of a stage-1 file."""
    with torch.device("meta"):
        ours = Quantizer(dim, config).state_dict()
    names, shapes = {}, {}
    for name in ours:
        names[name] = re.sub(
            r"^codebooks\.(\d+)", r"residual_rq.layers.\1._codebook", name
        ).replace("fusion.", "encoder.", 1)
        shape = tuple(ours[name].shape)
        shapes[names[name]] = (1, *shape) if name.startswith("codebooks.") else shape
    for kind in BOOK[1:]:
        shapes[_book(None, kind)] = shapes[_book(0, kind)]
    for level in (None, *range(1 + config.levels)):
        started = _book(
            level, "initted"
        )  # of one number or of no dimension, by the version of a library
        shapes[started] = () if started in tensors and tensors[started].shape == () else (1,)
    return names, shapes


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
            f"{checkpoint.path} was trained on another quantizer than {quantizer.path}: {len(differing)} "
            f"tensors of its copy differ, first {INSIDE}{differing[0]}; give the two files that were "
            "published together"
        )


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two copies hold the same numbers; a copy that is stored once is not read."""
    if (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
    ):
        return True
    return one.dtype == other.dtype and torch.equal(one.reshape(-1), other.reshape(-1))


def _possible(config: Config, what: str) -> Config:
    """Check that sizes are within the limits of our settings."""
    try:
        return validate_settings(config)
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


SAMPLE: Final = 512
"""Candidates of each modality that vote on the meaning of level 0's codes."""
OFFERED: Final = 4 * SAMPLE
"""Candidates read from the start of each pool to choose them from."""

UNKNOWN: Final = (
    "WARNING: without labelled candidates nobody knows which level-0 codes stand for image, text and "
    "image-text. Searching works; asking for one modality (--modality) does not. Import again with "
    "--data FOLDER, any data set in M-BEIR's layout, to find out"
)


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
    """Turn the published files into a model's folder, a new one.

    Raises ArtifactMismatch: a file is not what it should be, or the encoder has another width. Raises
    UsageError: the folder holds something; it is left as it is.

    Parameters
    ----------
    encoder
        The spec of the encoder whose features the model was trained on, for example ``uniir:FOLDER``.
    data
        Labelled candidates, a few of which show the meaning of level 0's codes; and instructions, so that a
        search may omit them.
    """
    check_device(device)
    files = {QUANTIZER: open_checkpoint(quantizer), GENERATOR: open_checkpoint(generator)}
    quantizer_part = quantizer_parts(files[QUANTIZER])
    generator_part = generator_parts(files[GENERATOR], files[QUANTIZER])
    sources = {name: file_fingerprint(file.path) for name, file in files.items()}
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is there already; a model needs a new or an empty folder")
    opened = load_encoder(absolute_spec(encoder), download=download, device=device)
    if opened.dim != quantizer_part.dim:
        raise ArtifactMismatch(
            f"encoder {opened.spec} gives features of {opened.dim} numbers and this model reads "
            f"{quantizer_part.dim}; give the encoder it was trained with (UniIR's CLIP-SF)"
        )
    with new_folder(folder) as work, tempfile.TemporaryDirectory() as scratch:
        sample = (
            _sample(data, opened, Path(scratch) / "candidates", progress=progress) if data else None
        )
        with torch.device("meta"):
            network = Quantizer(quantizer_part.dim, quantizer_part.config)
            decoder = Generator(generator_part.dim, generator_part.sizes, generator_part.config)
        network.load_state_dict(quantizer_part.state, strict=True, assign=True)
        codebooks, lines = network.to_codebooks(), [UNKNOWN]
        if sample is not None:
            codebooks, health = measure_candidates(network, sample)
            lines = _describe_level0(codebooks, health, len(sample))
        for line in lines:
            progress.say(line)
        inputs = {
            "published": sources[QUANTIZER],
            "level0": "unknown" if sample is None else sample.fingerprint,
        }
        config = to_json(quantizer_part.config)
        writer = ArtifactWriter(work / QUANTIZER, kind=QUANTIZER, config=config, inputs=inputs)
        ours = write_quantizer(writer, codebooks)
        decoder.load_state_dict(generator_part.state, strict=True, assign=True)
        inputs = {"published": sources[GENERATOR], "quantizer": ours.manifest.fingerprint}
        config = to_json(generator_part.config)
        writer = ArtifactWriter(work / GENERATOR, kind=GENERATOR, config=config, inputs=inputs)
        trained = write_generator(writer, decoder.to(device), dim=generator_part.dim)
        Genius.finish(
            work, opened, ours, trained, model_instructions(data.instructions) if data else []
        )
    return Genius.open(folder, device=device, download=download)


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
    return embed(
        (candidate_row(data, candidate) for candidate in chosen),
        encoder,
        folder,
        inputs={"sample": fingerprint_of(identity)},
        expected=len(chosen),
        progress=progress,
        skip_bad_images=True,
    )


def _describe_level0(codebooks: Codebooks, health: Health, candidates: int) -> list[str]:
    """Return what a person must know of the modality level, line by line."""
    names = [
        [*Modality][code].value if code >= 0 else "unknown" for code in codebooks.level0_modality
    ]
    meaning = ", ".join(f"{code} = {name}" for code, name in enumerate(names))
    lines = [f"level 0: {meaning}; right for {health.purity:.1%} of {candidates:,} candidates"]
    lost = [one.value for one in Modality if one.value not in names]
    if lost:
        lines.append(f"WARNING: no level-0 code stands mostly for {' or '.join(lost)}")
    if health.purity is not None and health.purity < LOW_PURITY:
        lines.append(
            f"WARNING: level 0 separates modalities for only {health.purity:.1%} of the candidates, "
            f"expected at least {LOW_PURITY:.0%}: is this the encoder that the model was trained with?"
        )
    return lines


@command
class ImportGenius(DeviceOptions):
    """Import the published GENIUS checkpoints as a model's folder.

    The files are read without running any code in them. Every tensor must have its name and shape.
    """

    quantizer: Path
    """The published stage 1, rq_clip_large.pth."""

    generator: Path
    """The published stage 2, GENIUS_t5small.pth."""

    encoder: str
    """Encoder that the model was trained on: uniir:FOLDER (UniIR's CLIP-SF, imported), or any other."""

    out: Path
    """Folder of the model, a new one."""

    data: OptionalFolder = None
    """Data set in M-BEIR's layout; a few of its candidates show which modality each level-0 code means."""

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
