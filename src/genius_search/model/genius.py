"""A trained model: encoder, fusion and quantizer, generator."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Float32, Int, UInt8

from genius_search.artifact import open_artifact
from genius_search.config import SearchConfig, usual_search
from genius_search.encoders.base import Encoder, load_encoder
from genius_search.errors import ArtifactMismatch, UsageError
from genius_search.model.file import (
    FORMAT,
    EncoderPart,
    KnownInstruction,
    ModelFile,
    ModelPart,
    read_model_file,
)
from genius_search.nn.arrays import as_array, as_floats, normalize
from genius_search.nn.codebooks import KIND as QUANTIZER
from genius_search.nn.codebooks import Codebooks, StoredQuantizer
from genius_search.nn.folded import KIND as GENERATOR
from genius_search.nn.folded import StoredGenerator
from genius_search.records import Modality
from genius_search.search.find import quick_search
from genius_search.search.rank import CodeRanker

if TYPE_CHECKING:  # searching needs no PyTorch, unless the model has parts that NumPy does not know
    from torch import Tensor

    from genius_search.data.features import FeatureBatch
    from genius_search.nn.generator import Generator, TrainedGenerator
    from genius_search.nn.quantizer import EncodedItems, Quantizer, TrainedQuantizer
    from genius_search.search.compiled import CompiledSearch
    from genius_search.search.decoder import Decoder, GeometricDecoder


class Genius:
    """A model: encodes items into IDs, and queries into embeddings from which IDs are generated.

    A model whose codebooks were fitted to a pool without training has no generator; its IDs are found by the
    distances between the query and the code vectors.

    >>> model = Genius.open("model")  # doctest: +SKIP
    >>> model.save_pretrained("my-model", license="mit")  # doctest: +SKIP
    """

    def __init__(
        self,
        folder: Path,
        encoder: Encoder,
        quantizer: TrainedQuantizer | StoredQuantizer,
        generator: TrainedGenerator | StoredGenerator | None,
        instructions: Sequence[KnownInstruction],
        fingerprint: str,
        *,
        device: str = "cpu",
    ) -> None:
        self.folder = folder
        self.encoder = encoder
        self.device = device
        self._quantizer = quantizer
        self.quantizer_manifest = quantizer.manifest
        self._generator = generator
        self.generator_manifest = None if generator is None else generator.manifest
        self.instructions = tuple(instructions)
        self.fingerprint = fingerprint

    @staticmethod
    def open(folder: str | Path, *, device: str = "cpu", download: bool = False) -> Genius:
        """Open a finished model by its folder, or by its name on the hub after `genius pull`.

        ``download`` allows downloading the encoder's weights. To download the model itself, use
        :meth:`from_pretrained`.

        Raises
        ------
        ArtifactMissing
            The folder contains no finished model, and none was pulled under this name.
        ArtifactMismatch
            The parts do not belong together, for example because a later training was interrupted.
        """
        folder = Path(folder)
        if not folder.exists():
            from genius_search import hub  # noqa: PLC0415  opening a folder needs none of it

            folder = (hub.find(str(folder)) if hub.is_name(str(folder)) else None) or folder
        if device != "cpu":
            from genius_search.nn.parallel import usable  # noqa: PLC0415  as below

            usable(device)
        parts = read_model_file(folder)
        encoder = load_encoder(parts.encoder.in_folder(folder), download=download, device=device)
        quantizer = StoredQuantizer(open_artifact(folder / "quantizer", kind=QUANTIZER), device=device)
        generator = None
        if parts.generator is not None:
            generator = StoredGenerator(open_artifact(folder / "generator", kind=GENERATOR), device=device)
        found = {"encoder": encoder.fingerprint, "quantizer": quantizer.manifest.fingerprint}
        if generator is not None:
            found["generator"] = generator.manifest.fingerprint
        for part, fingerprint in found.items():
            if parts.parts[part].fingerprint != fingerprint:
                raise ArtifactMismatch(
                    f"{folder}: the {part} is not the one this model was finished with (a later training was "
                    "interrupted, or the file changed); run `genius fit` again"
                )
        return Genius(
            folder,
            encoder,
            quantizer,
            generator,
            parts.instructions,
            parts.fingerprint,
            device=device,
        )

    @staticmethod
    def from_pretrained(
        name_or_folder: str | Path,
        *,
        revision: str | None = None,
        device: str = "cpu",
        download: bool = True,
        token: str | None = None,
    ) -> Genius:
        """Open a model by its folder, or by its name on the Hugging Face hub.

        A folder, or a model that was pulled before, is opened without the network; `genius pull` updates it.
        Any other model is downloaded to the cache of huggingface_hub, unless ``download=False`` or
        ``HF_HUB_OFFLINE=1``.

        Raises
        ------
        NetworkNeeded
            The model is not on this machine and cannot be downloaded.
        ArtifactMissing
            There is no such folder or repository.
        ArtifactMismatch
            The parts do not belong together.
        """
        from genius_search.hub import find_or_pull  # noqa: PLC0415  as above

        folder = find_or_pull(name_or_folder, revision=revision, download=download, token=token)
        return Genius.open(folder, device=device, download=download)

    @staticmethod
    def finish(
        folder: Path,
        encoder: Encoder,
        quantizer: TrainedQuantizer,
        generator: TrainedGenerator | None,
        instructions: Sequence[KnownInstruction],
    ) -> Genius:
        """Finish a model by writing the ``model.json`` of its parts; the generator may be missing."""
        kind, _, place = encoder.spec.partition(":")
        spec, home = encoder.spec, folder.resolve()
        if Path(place).exists() and Path(place).resolve().is_relative_to(home):
            spec = f"{kind}:./{Path(place).resolve().relative_to(home)}"  # so that the folder can be moved
        parts = ModelFile(
            format=FORMAT,
            encoder=EncoderPart(spec=spec, fingerprint=encoder.fingerprint),
            quantizer=ModelPart(fingerprint=quantizer.manifest.fingerprint),
            generator=None if generator is None else ModelPart(fingerprint=generator.manifest.fingerprint),
            instructions=list(instructions),
            fingerprint="",
        )
        parts = parts.model_copy(update={"fingerprint": parts.fingerprint_of_parts()})
        parts.write(folder)
        return Genius(folder, encoder, quantizer, generator, instructions, parts.fingerprint)

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        name: str | None = None,
        license: str = "unknown",  # noqa: A002  the word of every model card
    ) -> Path:
        """Save the model as a self-contained folder with a model card.

        See :func:`genius_search.model.publish.save_model` for the parameters and errors.
        """
        from genius_search.model.publish import save_model  # noqa: PLC0415  as above

        return save_model(self.folder, Path(folder), name=name, license=license)

    def push_to_hub(
        self,
        repository: str,
        *,
        private: bool = False,
        license: str = "unknown",  # noqa: A002  as above
        token: str | None = None,
    ) -> str:
        """Publish the model as ``owner/name`` and return its address.

        Raises
        ------
        NetworkNeeded
            The hub cannot be reached.
        ArtifactMissing
            You have no permission to write there; log in first.
        """
        from genius_search.hub import push  # noqa: PLC0415  as above

        with tempfile.TemporaryDirectory() as temporary:
            saved = self.save_pretrained(Path(temporary) / "model", name=repository, license=license)
            return push(saved, repository, repo_type="model", private=private, token=token)

    def __repr__(self) -> str:
        sizes = " × ".join(str(size) for size in self.sizes)
        return f"<Genius {self.folder}, fingerprint {self.fingerprint[:12]}, ID {sizes}>"

    @cached_property
    def quantizer(self) -> Quantizer:
        """The quantizer in PyTorch, which encodes items."""
        return self._quantizer.quantizer

    @cached_property
    def codebooks(self) -> Codebooks:
        """The quantizer in NumPy."""
        return self._quantizer.codebooks

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of codes at each level of an ID."""
        return self.codebooks.sizes

    @property
    def num_levels(self) -> int:
        """Codes in an ID."""
        return len(self.sizes)

    @property
    def has_modality_level(self) -> bool:
        """True if the first code of an ID encodes the modality."""
        return self.codebooks.has_modality_level

    @property
    def dim(self) -> int:
        """Width of features and embeddings."""
        return self.codebooks.dim

    @property
    def has_generator(self) -> bool:
        """Whether a generator was trained; otherwise IDs are found by the distances of code vectors."""
        return self._generator is not None

    @cached_property
    def generator(self) -> Generator | None:
        """The generator in PyTorch, if there is one."""
        return None if self._generator is None else self._generator.generator

    @property
    def trained_generator(self) -> Generator:
        """The generator; :class:`UsageError` if the model has none."""
        if self.generator is None:
            raise UsageError(
                f"{self.folder} was fitted to a pool without training and has no generator; `genius fit` "
                "trains a model with one"
            )
        return self.generator

    @cached_property
    def decoder(self) -> Decoder:
        """The generator's decoder for search; without a generator, :attr:`router`."""
        if self.generator is None:
            return self.router
        from genius_search.search.decoder import GuidedDecoder, T5Decoder  # noqa: PLC0415  needs PyTorch

        decoder = T5Decoder(self.generator)
        guide = self.generator.guide
        return decoder if guide is None else GuidedDecoder(decoder, guide, self.ranker.spread)

    @cached_property
    def router(self) -> GeometricDecoder:
        """A decoder that uses the geometry of the code vectors instead of the generator."""
        from genius_search.search.decoder import GeometricDecoder  # noqa: PLC0415  needs PyTorch

        return GeometricDecoder(self.quantizer.tables(), self.ranker.spread)

    def uses_generator(self, config: SearchConfig) -> bool:
        """Return whether a search with these settings asks the generator."""
        needs = config.rerank == "none" or config.generator_weight > 0
        return self.has_generator and (config.router == "generator" or needs)

    def decoder_for(self, config: SearchConfig) -> Decoder:
        """Return :attr:`decoder`, or :attr:`router` if the settings do without the generator."""
        return self.decoder if self.uses_generator(config) else self.router

    def fast_for(self, config: SearchConfig) -> CompiledSearch | None:
        """Return a quicker search with the results of :meth:`decoder_for`, if there is one."""
        return self.fast if self.uses_generator(config) else self._fast_router

    @cached_property
    def _fast_router(self) -> CompiledSearch | None:
        """A quicker search with the results of :attr:`router`."""
        return quick_search(self.ranker)

    @cached_property
    def fast(self) -> CompiledSearch | None:
        """A quicker search with the results of :attr:`decoder`; None if there is none for this model."""
        if self._generator is None:
            return self._fast_router
        folded = None if self.device != "cpu" else self._generator.folded
        if folded is None:
            return None
        combination = folded.combination(self.ranker.tables())
        return quick_search(self.ranker, (folded.weights, combination))

    @cached_property
    def ranker(self) -> CodeRanker:
        """Scores IDs by their code vectors."""
        return CodeRanker(self.codebooks.tables(), self.codebooks.spread)

    def usual_search(self, items: int) -> SearchConfig:
        """Return the default search settings of an index of so many items."""
        return usual_search(items)

    def embed(self, features: FeatureBatch) -> Float[Tensor, "items dim"]:
        """Return fused unit embeddings, on the CPU."""
        import torch  # noqa: PLC0415  only here

        device = self.quantizer.device
        with torch.no_grad():
            fused: Tensor = self.quantizer.fusion(features.image.to(device), features.text.to(device))
        return fused.cpu()

    @property
    def sums_features(self) -> bool:
        """Whether embeddings are sums of the encoder's features, without a trained fusion."""
        return self.codebooks.config.fusion.kind == "sum"

    def fuse(
        self, image: Float32[np.ndarray, "items dim"], text: Float32[np.ndarray, "items dim"]
    ) -> Float32[np.ndarray, "items dim"]:
        """Return the fused unit embeddings of a few queries; absent features are 0."""
        if self.sums_features:
            return normalize(normalize(image) + normalize(text))
        import torch  # noqa: PLC0415  a model without a trained fusion needs none

        device = self.quantizer.device
        with torch.inference_mode():
            image_part, text_part = (torch.from_numpy(rows).to(device) for rows in (image, text))
            return as_floats(self.quantizer.fusion(image_part, text_part))

    def encode(
        self,
        features: FeatureBatch,
        modalities: Int[np.ndarray, " items"],
    ) -> EncodedItems:
        """Return the embeddings and IDs of items."""
        import torch  # noqa: PLC0415  only here

        codes = torch.from_numpy(modalities.astype(np.int64))
        return self.quantizer.encode_items(features.image, features.text, codes)

    def item_density(
        self, embeddings: Float[Tensor, "items dim"], codes: Int[Tensor, "items levels"]
    ) -> UInt8[Tensor, " items"]:
        """Return the densities of items as stored in an index."""
        return self.quantizer.norm_and_density.item_density(embeddings, codes)

    @property
    def level0_is_exact(self) -> bool:
        """True if level-0 codes always match the modality of their items."""
        return self.has_modality_level and self.codebooks.config.level0 == "assigned"

    def level0_codes(self, modality: Modality) -> frozenset[int]:
        """Return the level-0 codes of a modality.

        Raises
        ------
        UsageError
            The model has no modality level, or never saw this modality.
        """
        if not self.has_modality_level:
            raise UsageError(
                "this model has no modality level, so a modality cannot be forced; describe it in the "
                "instruction instead"
            )
        known = as_array(self.codebooks.level0_modality).tolist()
        wanted = modality.code
        codes = frozenset(code for code, own in enumerate(known) if own == wanted)
        if not codes:
            raise UsageError(
                f"no level-0 code of this model is known to stand for {modality.value}; describe it in the "
                "instruction instead. An imported model learns it by importing again with --data"
            )
        return codes

    def instruction_for(self, query: Modality, candidate: Modality) -> str | None:
        """Return an instruction the model was trained with for this kind of query and result."""
        for known in self.instructions:
            if Modality.parse(known.query) is query and Modality.parse(known.candidate) is candidate:
                return known.text
        return None
