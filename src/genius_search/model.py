"""A trained model: encoder, fusion and quantizer, generator, tied together by ``model.json``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import numpy as np
from jaxtyping import Float32, Integer
from pydantic import BaseModel, ValidationError

from genius_search.artifact import (
    FileFact,
    Manifest,
    fingerprint_of,
    first_problem,
    open_artifact,
    read_json,
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

# Opening a model and searching with it need no PyTorch, no hub and nothing that writes.
# ruff: noqa: PLC0415
if TYPE_CHECKING:
    from genius_search.data.features import FeatureBatch
    from genius_search.encoders.inputs import ModelInput
    from genius_search.nn.generator import Generator
    from genius_search.nn.kmeans import Coder, EncodedItems
    from genius_search.search.beam import Decoder, GeometricDecoder
    from genius_search.search.kernel import CompiledSearch

MODEL_FILE: Final = "model.json"
INPUTS_PER_BATCH: Final = 64
"""Inputs that :meth:`Genius.embed` encodes together; their pictures are in memory."""


@dataclass(frozen=True, slots=True)
class ModelInstruction:
    """An instruction the model was trained with, and when it applies."""

    query: str
    """Modality of the query, in M-BEIR's spelling or ours."""
    candidate: str
    """Modality of the result, likewise."""
    text: str


class ModelPart(BaseModel, frozen=True):
    """The fingerprint of a part's folder."""

    fingerprint: str
    spec: str = ""
    """Of the encoder; a path with ``./`` is relative to the model's folder."""

    def spec_in(self, folder: Path) -> str:
        """Return the encoder's spec with an absolute path."""
        kind, _, place = self.spec.partition(":")
        return f"{kind}:{folder / place}" if place.startswith("./") else self.spec


class ModelFile(BaseModel, frozen=True):
    """Contents of ``model.json``."""

    format: Literal[4]
    """Version of the file."""
    encoder: ModelPart
    quantizer: ModelPart
    generator: ModelPart | None = None
    """None if the model is searched by the geometry of its code vectors alone."""
    instructions: list[ModelInstruction]
    fingerprint: str
    checksum: str | None = None
    """Of the instructions; None in older files."""

    @property
    def parts(self) -> dict[str, ModelPart]:
        """The parts by the names of their folders."""
        parts = {"encoder": self.encoder, "quantizer": self.quantizer}
        return parts if self.generator is None else parts | {"generator": self.generator}

    def fingerprint_of_parts(self) -> str:
        """Compute the fingerprint from those of the parts; the encoder's path does not matter."""
        return fingerprint_of({name: part.fingerprint for name, part in self.parts.items()})

    def sum_up(self) -> str:
        """Compute the checksum of the instructions."""
        return fingerprint_of(self.model_dump(mode="json")["instructions"])

    def write(self, folder: Path) -> None:
        """Write the file into a folder."""
        from genius_search.writing import write_json

        body = self.model_dump(exclude_defaults=True)
        write_json(folder / MODEL_FILE, body | {"checksum": self.sum_up()})


def read_model_file(folder: Path) -> ModelFile:
    """Read the ``model.json`` of a folder.

    Raises
    ------
    ArtifactMissing
        The folder contains no finished model.
    ArtifactMismatch
        The file is damaged, or was written by another version.
    """
    path = folder / MODEL_FILE
    if (folder / "index.json").exists():
        raise ArtifactMissing(f"{folder} is an index, not a model; give the model's folder")
    if not path.exists():
        raise ArtifactMissing(
            f"no finished model at {folder}: it has no {MODEL_FILE}. `genius fit` makes one, and goes on "
            "where it stopped when run again"
        )
    try:
        file = ModelFile.model_validate(read_json(path))
        problem = "its contents do not match its checksums"
    except ValidationError as error:
        problem = first_problem(error)
    else:
        if file.fingerprint == file.fingerprint_of_parts() and file.checksum in (
            None,
            file.sum_up(),
        ):
            return file
    raise ArtifactMismatch(
        f"{path} is damaged or of another version ({problem}); train the model again, or `genius pull` it if "
        "it was pulled"
    )


class Genius:
    """A model: encodes items into IDs, and queries into embeddings from which IDs are generated.

    A model whose codebooks were fitted to a pool without training has no generator; its IDs are found by the
    distances between the query and the code vectors.

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

        What was pulled before is opened without the network; `genius pull` updates it.

        Parameters
        ----------
        device
            Where it runs.
        download
            Whether the model, and the weights of its encoder, may be downloaded if they are not here.
        with_encoder
            Open the encoder now, rather than when something is encoded.

        Raises
        ------
        ArtifactMissing
            The folder contains no finished model, or the hub has none of this name.
        NetworkNeeded
            The model is not on this machine and may not or cannot be downloaded.
        ArtifactMismatch
            The parts do not belong together, for example because a later training was interrupted.
        """
        folder = as_path(folder)
        if not folder.exists():
            from genius_search.hub import find_or_pull, is_name

            folder = find_or_pull(folder, download=download) if is_name(str(folder)) else folder
        folder = folder.absolute()  # some parts are opened later, perhaps after `os.chdir`
        if device != "cpu":
            from genius_search.nn.parallel import check_device

            check_device(device)
        file = read_model_file(folder)
        quantizer = StoredQuantizer(folder / "quantizer")
        generator = None
        if file.generator is not None:
            generator = open_artifact(folder / "generator", kind="generator")

        def check(part: str, fingerprint: str) -> None:
            if file.parts[part].fingerprint != fingerprint:
                raise ArtifactMismatch(
                    f"{folder}: the {part} is not the one this model was finished with (a later training was "
                    "interrupted, or the file changed); run `genius fit` again"
                )

        def open_encoder() -> Encoder:
            opened = load_encoder(file.encoder.spec_in(folder), download=download, device=device)
            check("encoder", opened.fingerprint)
            return opened

        encoder = open_encoder() if with_encoder else cast("Encoder", LateEncoder(open_encoder))
        check("quantizer", quantizer.manifest.fingerprint)
        if generator is not None:
            check("generator", generator.fingerprint)
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
        """Finish a model by writing the ``model.json`` of its parts; the generator may be missing."""
        kind, _, place = encoder.spec.partition(":")
        spec, home = encoder.spec, folder.resolve()
        if Path(place).exists() and Path(place).resolve().is_relative_to(home):
            spec = f"{kind}:./{Path(place).resolve().relative_to(home)}"  # so that the folder can be moved
        file = ModelFile(
            format=4,
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
        """Pickle and copy the model by its folder, which is opened again."""
        return _open_again, (self.folder, self.fingerprint, self.device)

    def renew(self) -> None:
        """Let PyTorch compute in one thread, in a forked child, which has none of the parent's."""
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)

    @cached_property
    def unchecked_files(self) -> dict[Path, FileFact]:
        """Files that were not compared with their checksums since the model was opened; not the encoder's."""
        parts = (self.quantizer_manifest, self.generator_manifest)
        return {
            part.folder / name: fact for part in parts if part for name, fact in part.files.items()
        }

    @property
    def num_levels(self) -> int:
        """Codes in an ID."""
        return len(self.codebooks.sizes)

    @property
    def dim(self) -> int:
        """Width of features and embeddings."""
        return self.codebooks.dim

    @property
    def has_generator(self) -> bool:
        """Whether a generator was trained; otherwise IDs are found by the distances of code vectors."""
        return self.generator_manifest is not None

    @cached_property
    def generator(self) -> Generator | None:
        """The generator in PyTorch, if there is one."""
        if self.generator_manifest is None:
            return None
        from genius_search.nn.generator import load_generator

        return load_generator(self.generator_manifest.folder, device=self.device)

    @cached_property
    def ranker(self) -> CodeRanker:
        """Scores IDs by their code vectors."""
        codebooks = self.codebooks
        return CodeRanker(codebooks.tables(), codebooks.spread, codebooks.config.norm_weight)

    @cached_property
    def decoder(self) -> Decoder:
        """The generator's decoder for search; without a generator, :attr:`router`."""
        if self.generator is None:
            return self.router
        if self.generator.guide is None:
            return self.generator
        from genius_search.search.beam import GuidedDecoder

        return GuidedDecoder(self.generator, self.ranker.spread)

    @cached_property
    def router(self) -> GeometricDecoder:
        """A decoder that uses the geometry of the code vectors instead of the generator."""
        import torch

        from genius_search.search.beam import GeometricDecoder

        tables = [torch.from_numpy(table).to(self.device) for table in self.codebooks.tables()]
        return GeometricDecoder(tables, self.ranker.spread, self.ranker.norm_weight)

    def uses_generator(self, config: SearchSettings) -> bool:
        """Return whether a search with these settings asks the generator."""
        return self.has_generator and (config.router == "generator" or config.rerank == "none")

    def decoder_for(self, config: SearchSettings) -> Decoder:
        """Return :attr:`decoder`, or :attr:`router` if the settings do without the generator."""
        return self.decoder if self.uses_generator(config) else self.router

    def compiled_search_for(self, config: SearchSettings) -> CompiledSearch | None:
        """Return a quicker search with the results of :meth:`decoder_for`, if there is one."""
        return self._compiled_generator if self.uses_generator(config) else self._compiled_router

    @cached_property
    def _compiled_generator(self) -> CompiledSearch | None:
        if self.generator_manifest is None or self.device != "cpu":
            return None
        from genius_search.nn.packed import read_packed

        packed = read_packed(self.generator_manifest)
        return None if packed is None else open_compiled_search(self.ranker, packed)

    @cached_property
    def _compiled_router(self) -> CompiledSearch | None:
        return open_compiled_search(self.ranker)

    @cached_property
    def fuse(self) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        """A function from the features of images and of texts, 0 where absent, to unit embeddings.

        Features and embeddings are 32-bit floats of shape (items, dim).
        """
        return self.codebooks.fuse

    @cached_property
    def coder(self) -> Coder:
        """Gives items their IDs."""
        from genius_search.nn.kmeans import Coder

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
            An input is none of these.
        BadImage
            A picture cannot be read.
        """
        return self._encode_inputs(inputs)[0]

    def ids(self, inputs: Sequence[ModelInput]) -> Integer[np.ndarray, "inputs levels"]:
        """Return the IDs of texts, pictures, and pairs of both: a row of codes for each.

        These are the IDs that the inputs would get as items of an index of this model. The first code
        is the modality. Parameters and errors are those of :meth:`embed`.

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
        """Return the embeddings and IDs of items."""
        return self.coder.encode_items(self.embed_features(features), modalities)

    @property
    def level0_is_exact(self) -> bool:
        """True if level-0 codes always match the modality of their items."""
        return self.codebooks.config.level0 == "assigned"

    def level0_codes(self, modality: Modality) -> frozenset[int]:
        """Return the level-0 codes of a modality.

        Raises
        ------
        UsageError
            The model has no modality level, or never saw this modality.
        """
        if not self.codebooks.has_modality_level:
            raise UsageError(
                "this model has no modality level, so a modality cannot be forced; describe it in the "
                "instruction instead"
            )
        known = self.codebooks.level0_modality.tolist()
        codes = frozenset(code for code, holder in enumerate(known) if holder == modality.code)
        if not codes:
            raise UsageError(
                f"no level-0 code of this model is known to stand for {modality.value}; describe it in the "
                "instruction instead. An imported model learns it by importing again with --data"
            )
        return codes

    def instruction_for(self, query: Modality, candidate: Modality) -> str | None:
        """Return an instruction the model was trained with for this kind of query and result."""
        for known in self.instructions:
            if (
                Modality.parse(known.query) is query
                and Modality.parse(known.candidate) is candidate
            ):
                return known.text
        return None


def _open_again(folder: Path, fingerprint: str, device: str) -> Genius:
    """Open a pickled model; its encoder is opened when something is encoded."""
    model = Genius.open(folder, device=device, with_encoder=False)
    if model.fingerprint != fingerprint:
        raise ArtifactMismatch(
            f"{folder} is another model than the one that was opened (fingerprint "
            f"{model.fingerprint[:12]}, not {fingerprint[:12]}); open it again"
        )
    return model
