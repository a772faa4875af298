"""A model: encoder, fusion, quantizer and perhaps a generator, joined by ``model.json``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from jaxtyping import Float32, Integer
from pydantic import BaseModel, ValidationError

from genius_search.artifact import (
    FileFact,
    Manifest,
    ManifestForm,
    fingerprint_of,
    open_artifact,
)
from genius_search.border import as_path
from genius_search.config import SearchSettings
from genius_search.encoders.base import Encoder, LateEncoder
from genius_search.encoders.open import load_encoder
from genius_search.errors import ArtifactMismatch, ArtifactMissing, UsageError
from genius_search.forks import renew_in_children
from genius_search.nn.codebooks import StoredQuantizer
from genius_search.records import Modality
from genius_search.search.kernel import open_compiled_search
from genius_search.search.rank import CodeRanker

# Opening a model and searching with it must not import PyTorch, the hub, or modules that write
# files.
# ruff: noqa: PLC0415
if TYPE_CHECKING:
    from genius_search.data.features import FeatureBatch
    from genius_search.encoders.inputs import ModelInput
    from genius_search.nn.coder import Coder, EncodedItems
    from genius_search.nn.generator import Generator
    from genius_search.search.beam import Decoder, GeometricDecoder
    from genius_search.search.kernel import CompiledSearch

MODEL_FILE: Final = "model.json"
MODEL_FORM: Final = ManifestForm(
    MODEL_FILE, 5, "train the model again, or `genius pull` it if it was pulled"
)
INPUTS_PER_BATCH: Final = 64
"""Inputs that :meth:`Genius.embed` encodes together; their pictures are in memory."""


@dataclass(frozen=True, slots=True)
class ModelInstruction:
    """An instruction of the model's training, and the modalities that it applies to."""

    query: str
    """Modality of the query, in M-BEIR's spelling or ours."""
    candidate: str
    """Modality of the result, in the same spelling."""
    text: str
    """The instruction."""


class ModelPart(BaseModel, frozen=True):
    """A part of a model: its fingerprint, and for the encoder, its spec."""

    fingerprint: str
    """Fingerprint of the part's folder, or of the encoder."""
    spec: str = ""
    """The encoder's spec; a path that begins with ``./`` is relative to the model's folder."""

    def spec_in(self, folder: Path) -> str:
        """Return the encoder's spec for a model in ``folder``, with an absolute path."""
        prefix, _, argument = self.spec.partition(":")
        return f"{prefix}:{folder / argument}" if argument.startswith("./") else self.spec


class ModelFile(BaseModel, frozen=True):
    """Contents of ``model.json``."""

    encoder: ModelPart
    quantizer: ModelPart
    generator: ModelPart | None = None
    """None if searches use the geometry of the code vectors alone."""
    instructions: list[ModelInstruction]
    fingerprint: str

    @property
    def parts(self) -> dict[str, ModelPart]:
        """The parts, by the names of their folders."""
        parts = {"encoder": self.encoder, "quantizer": self.quantizer}
        return parts if self.generator is None else parts | {"generator": self.generator}

    def fingerprint_of_parts(self) -> str:
        """Compute the model's fingerprint from those of its parts; paths have no effect."""
        return fingerprint_of({name: part.fingerprint for name, part in self.parts.items()})

    def write(self, folder: Path) -> None:
        """Write the file into a folder."""
        from genius_search.writing import write_json

        body = self.model_dump(mode="json", exclude_defaults=True)
        write_json(folder / MODEL_FILE, MODEL_FORM.seal(body))


def read_model_file(folder: Path) -> ModelFile:
    """Read the ``model.json`` of a folder.

    Raises
    ------
    ArtifactMissing
        The folder contains no finished model.
    ArtifactMismatch
        The file is damaged, or was written by another version.
    """
    if (folder / "index.json").exists():
        raise ArtifactMissing(f"{folder} is an index, not a model; give the model's folder")
    if not (folder / MODEL_FILE).exists():
        raise ArtifactMissing(
            f"no finished model at {folder}: it has no {MODEL_FILE}. `genius fit` trains a model, "
            "and resumes an interrupted training when run again"
        )
    body = MODEL_FORM.read(folder)
    try:
        return ModelFile.model_validate(body)
    except ValidationError as error:
        raise MODEL_FORM.damaged(folder, error) from None


class Genius:
    """A model: encodes items into IDs, and queries into embeddings from which IDs are generated.

    A model whose codebooks were fitted to a pool without training has no generator; searches find
    its IDs by the distances between the query and the code vectors.

    >>> model = Genius.open("model")  # doctest: +SKIP
    >>> model.embed(["a dog", Path("dog.jpg")]).shape  # doctest: +SKIP
    (2, 512)
    >>> model.ids(["a dog"]).tolist()  # doctest: +SKIP
    [[1, 17, 203, 5]]
    """

    def __init__(
        self,
        folder: Path,
        encoder: Encoder,
        quantizer: StoredQuantizer,
        generator: Manifest | None,
        instructions: Sequence[ModelInstruction],
        fingerprint: str,
        *,
        device: str = "cpu",
    ) -> None:
        self.folder = folder
        self.encoder = encoder
        self.device = device
        self.codebooks = quantizer.codebooks
        self.quantizer_manifest = quantizer.manifest
        self.generator_manifest = generator
        self.instructions = tuple(instructions)
        self.fingerprint = fingerprint
        renew_in_children(self)

    @staticmethod
    def open(
        folder: str | Path,
        *,
        device: str = "cpu",
        download: bool = False,
        with_encoder: bool = True,
    ) -> Genius:
        """Open a finished model by its folder, or by its name on the Hugging Face hub.

        A model that was pulled before is opened without the network; `genius pull` updates it.

        Parameters
        ----------
        device
            PyTorch's name of the device that the model runs on.
        download
            Whether the model, and the weights of its encoder, may be downloaded if they are not on
            this machine.
        with_encoder
            Open the encoder now, rather than when an item or a query is encoded.

        Raises
        ------
        ArtifactMissing
            The folder contains no finished model, or the hub has no model of this name.
        NetworkNeeded
            The model is not on this machine and may not or cannot be downloaded.
        ArtifactMismatch
            The parts do not belong together, for example because a later training was interrupted.
        """
        folder = _model_folder(folder, download=download)
        if device != "cpu":
            from genius_search.nn.parallel import check_device

            check_device(device)
        file = read_model_file(folder)
        quantizer = StoredQuantizer(folder / "quantizer")
        generator = None
        if file.generator is not None:
            generator = open_artifact(folder / "generator", kind="generator")

        def open_encoder() -> Encoder:
            spec = file.encoder.spec_in(folder)
            encoder = load_encoder(spec, download=download, device=device)
            _check_part(folder, "encoder", file.encoder, encoder.fingerprint)
            return encoder

        encoder = open_encoder() if with_encoder else cast("Encoder", LateEncoder(open_encoder))
        _check_part(folder, "quantizer", file.quantizer, quantizer.manifest.fingerprint)
        if file.generator is not None and generator is not None:
            _check_part(folder, "generator", file.generator, generator.fingerprint)
        return Genius(
            folder,
            encoder,
            quantizer,
            generator,
            file.instructions,
            file.fingerprint,
            device=device,
        )

    @staticmethod
    def finish(
        folder: Path,
        encoder: Encoder,
        quantizer: StoredQuantizer,
        generator: Manifest | None,
        instructions: Sequence[ModelInstruction],
    ) -> Genius:
        """Finish a model by writing ``model.json``; ``generator`` may be None."""
        # An encoder within the model's folder gets a relative path, so that the folder can be
        # moved.
        spec = encoder.spec
        home = folder.resolve()
        prefix, _, argument = spec.partition(":")
        if Path(argument).exists() and Path(argument).resolve().is_relative_to(home):
            spec = f"{prefix}:./{Path(argument).resolve().relative_to(home)}"
        file = ModelFile(
            encoder=ModelPart(fingerprint=encoder.fingerprint, spec=spec),
            quantizer=ModelPart(fingerprint=quantizer.manifest.fingerprint),
            generator=None if generator is None else ModelPart(fingerprint=generator.fingerprint),
            instructions=list(instructions),
            fingerprint="",
        )
        file = file.model_copy(update={"fingerprint": file.fingerprint_of_parts()})
        file.write(folder)
        return Genius(folder, encoder, quantizer, generator, instructions, file.fingerprint)

    def __repr__(self) -> str:
        sizes = " × ".join(map(str, self.codebooks.sizes))
        return f"<Genius {self.folder}, fingerprint {self.fingerprint[:12]}, ID {sizes}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the model as the name of its folder, from which it is opened again."""
        return _open_again, (self.folder, self.fingerprint, self.device)

    def _renew(self) -> None:
        """Let PyTorch compute in one thread, in a forked child, which has none of the parent's."""
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)

    @cached_property
    def unchecked_files(self) -> dict[Path, FileFact]:
        """Files of quantizer and generator that are not yet compared with their checksums."""
        files: dict[Path, FileFact] = {}
        for manifest in (self.quantizer_manifest, self.generator_manifest):
            if manifest is not None:
                files |= {manifest.folder / name: fact for name, fact in manifest.files.items()}
        return files

    @property
    def num_levels(self) -> int:
        """Number of codes in an ID."""
        return len(self.codebooks.sizes)

    @property
    def dim(self) -> int:
        """Width of features and embeddings."""
        return self.codebooks.dim

    @property
    def has_generator(self) -> bool:
        """Whether a generator was trained; without one, searches find IDs by code vectors."""
        return self.generator_manifest is not None

    @cached_property
    def generator(self) -> Generator | None:
        """The generator in PyTorch; None if the model has no generator."""
        if self.generator_manifest is None:
            return None
        from genius_search.nn.generator import load_generator

        return load_generator(self.generator_manifest.folder, device=self.device)

    @cached_property
    def ranker(self) -> CodeRanker:
        """The ranker, which scores IDs by their code vectors."""
        codebooks = self.codebooks
        norm_weight = codebooks.config.norm_weight
        return CodeRanker(codebooks.tables(), codebooks.spread, norm_weight, codebooks.fine)

    @cached_property
    def decoder(self) -> Decoder:
        """The decoder of the generator; without a generator, :attr:`router`."""
        if self.generator is None:
            return self.router
        if self.generator.guide is None:
            return self.generator
        from genius_search.search.beam import GuidedDecoder

        return GuidedDecoder(self.generator, self.ranker.spread)

    @cached_property
    def router(self) -> GeometricDecoder:
        """A decoder that follows the geometry of the code vectors, without the generator."""
        import torch

        from genius_search.search.beam import GeometricDecoder

        tables = [torch.from_numpy(table).to(self.device) for table in self.codebooks.tables()]
        return GeometricDecoder(tables, self.ranker.spread, self.ranker.norm_weight)

    def uses_generator(self, config: SearchSettings) -> bool:
        """Return whether a search with these settings uses the generator."""
        return self.has_generator and (config.router == "generator" or config.rerank == "none")

    def decoder_for(self, config: SearchSettings) -> Decoder:
        """Return :attr:`decoder` for settings that use the generator, otherwise :attr:`router`."""
        return self.decoder if self.uses_generator(config) else self.router

    def compiled_search_for(self, config: SearchSettings) -> CompiledSearch | None:
        """Return the compiled search, which finds the same as :meth:`decoder_for`, if possible."""
        return self._compiled_generator if self.uses_generator(config) else self._compiled_search

    @cached_property
    def _compiled_generator(self) -> CompiledSearch | None:
        if self.generator_manifest is None or self.device != "cpu":
            return None
        from genius_search.nn.packed import read_packed

        packed = read_packed(self.generator_manifest)
        return None if packed is None else open_compiled_search(self.ranker, packed)

    @cached_property
    def _compiled_search(self) -> CompiledSearch | None:
        return open_compiled_search(self.ranker)

    @cached_property
    def fuse(self) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        """A function from features of images and of texts to unit embeddings.

        All are 32-bit floats of shape (items, dim). Features of an absent modality are zeros.
        """
        return self.codebooks.fuse

    @cached_property
    def coder(self) -> Coder:
        """The coder, which assigns IDs to items."""
        from genius_search.nn.coder import Coder

        return Coder(self.codebooks)

    def embed(self, inputs: Sequence[ModelInput]) -> Float32[np.ndarray, "inputs dim"]:
        """Return unit embeddings of texts, pictures, and pairs of both.

        They are those of items without an instruction. A text that is longer than the encoder reads
        is cut.

        >>> model.embed(["a dog", Path("dog.jpg"), ("a dog", image)]).shape  # doctest: +SKIP
        (3, 512)

        Parameters
        ----------
        inputs
            Texts; pictures, each a :class:`pathlib.Path`, the bytes of a file, a Pillow image or an
            array of ``uint8`` of shape (height, width, 3); or tuples of a text and a picture.

        Raises
        ------
        UsageError
            An input is of another type.
        BadImage
            A picture cannot be read.
        """
        return self._encode_inputs(inputs)[0]

    def ids(self, inputs: Sequence[ModelInput]) -> Integer[np.ndarray, "inputs levels"]:
        """Return the IDs of texts, pictures, and pairs of both: a row of codes for each.

        These are the IDs that the inputs would get as items of an index of this model. The first
        code is the modality. Parameters and errors are those of :meth:`embed`.

        >>> model.ids(["a dog"]).shape  # doctest: +SKIP
        (1, 13)
        """
        embeddings, modalities = self._encode_inputs(inputs)
        return self.coder.assign_ids(embeddings, modalities)

    def _encode_inputs(
        self, inputs: Sequence[ModelInput]
    ) -> tuple[Float32[np.ndarray, "inputs dim"], Integer[np.ndarray, " inputs"]]:
        """Return embeddings and modality codes, reading :data:`INPUTS_PER_BATCH` inputs at once."""
        from genius_search.encoders.inputs import encode_inputs, modality_codes, read_input

        if isinstance(inputs, str | bytes | Path):
            raise UsageError(f"give a list of texts and pictures, such as [{inputs!r:.60}]")
        inputs = list(inputs)
        embeddings = np.zeros((len(inputs), self.dim), dtype=np.float32)
        modalities = np.zeros(len(inputs), dtype=np.int8)
        for start in range(0, len(inputs), INPUTS_PER_BATCH):
            rows = slice(start, start + INPUTS_PER_BATCH)
            batch = [read_input(model_input) for model_input in inputs[rows]]
            embeddings[rows] = self.embed_features(encode_inputs(self.encoder, batch))
            modalities[rows] = modality_codes(batch)
        return embeddings, modalities

    def embed_features(self, features: FeatureBatch) -> Float32[np.ndarray, "items dim"]:
        """Return the fused unit embeddings of features."""
        return self.fuse(features.image, features.text)

    def encode(
        self, features: FeatureBatch, modalities: Integer[np.ndarray, " items"]
    ) -> EncodedItems:
        """Return the embeddings and IDs of items with the given modalities."""
        return self.coder.encode_items(self.embed_features(features), modalities)

    @property
    def level0_is_exact(self) -> bool:
        """Whether level-0 codes always match the modality of their items."""
        return self.codebooks.config.level0 == "assigned"

    def level0_codes(self, modality: Modality) -> frozenset[int]:
        """Return the level-0 codes of a modality.

        Raises
        ------
        UsageError
            The model has no modality level, or no code that stands for this modality.
        """
        if not self.codebooks.has_modality_level:
            raise UsageError(
                "this model has no modality level, so the modality of results cannot be chosen; "
                "describe it in the instruction instead"
            )
        modalities = self.codebooks.level0_modality.tolist()
        codes = frozenset(code for code, number in enumerate(modalities) if number == modality.code)
        if not codes:
            raise UsageError(
                f"no level-0 code of this model is known to stand for {modality.value}; describe "
                "it in the instruction instead. For an imported model, import it again with --data"
            )
        return codes

    def instruction_for(self, query: Modality, candidate: Modality) -> str | None:
        """Return the first instruction of the training for these modalities of query and result."""
        for instruction in self.instructions:
            is_for_query = Modality.parse(instruction.query) is query
            if is_for_query and Modality.parse(instruction.candidate) is candidate:
                return instruction.text
        return None


def _model_folder(folder: str | Path, *, download: bool) -> Path:
    """Return the absolute path of a model's folder; a name of the hub is pulled if necessary."""
    path = as_path(folder)
    if not path.exists():
        from genius_search.hub import find_or_pull, is_name

        path = find_or_pull(path, download=download) if is_name(str(path)) else path
    return path.absolute()  # the encoder may be opened later, after `os.chdir`


def _check_part(folder: Path, name: str, part: ModelPart, fingerprint: str) -> None:
    """Check that a part of a model has the fingerprint with which the model was finished."""
    if part.fingerprint != fingerprint:
        raise ArtifactMismatch(
            f"{folder}: the {name} is not the one this model was finished with (a later training "
            "was interrupted, or the file changed); run `genius fit` again"
        )


def _open_again(folder: Path, fingerprint: str, device: str) -> Genius:
    """Open a pickled model again; its encoder is opened when it is first used."""
    model = Genius.open(folder, device=device, with_encoder=False)
    if model.fingerprint != fingerprint:
        raise ArtifactMismatch(
            f"{folder} contains another model than the one that was pickled (fingerprint "
            f"{model.fingerprint[:12]}, not {fingerprint[:12]}); open it again"
        )
    return model
