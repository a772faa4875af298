"""A trained model: encoder, fusion and quantizer, generator; one folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from genius_search.artifact import fingerprint_of, write_json
from genius_search.data.features import FeatureBatch
from genius_search.encoders.base import Encoder, load_encoder
from genius_search.errors import ArtifactMismatch, UsageError
from genius_search.hub.pull import model_folder
from genius_search.model_file import FORMAT, MODEL_FILE, encoder_spec, read_model_file, relative_spec
from genius_search.nn.generator import Generator, TrainedGenerator, load_generator
from genius_search.nn.parallel import usable
from genius_search.nn.quantizer import EncodedItems, Quantizer, TrainedQuantizer, load_quantizer
from genius_search.pretrained import Genius as Named
from genius_search.records import Modality
from genius_search.search.decoder import Decoder, Decoding, GeometricDecoder, GuidedDecoder
from genius_search.search.rank import CodeRanker


@dataclass(frozen=True, slots=True)
class KnownInstruction:
    """An instruction the model was trained with, and when it applies."""

    query: str
    candidate: str
    text: str


class Genius(Named):
    """A model that turns items into IDs and queries into the IDs of what they ask for.

    >>> model = Genius.open("model")  # doctest: +SKIP
    >>> model.fingerprint  # doctest: +SKIP
    """

    def __init__(
        self,
        folder: Path,
        encoder: Encoder,
        quantizer: TrainedQuantizer,
        generator: TrainedGenerator,
        instructions: Sequence[KnownInstruction],
        fingerprint: str,
    ) -> None:
        self.folder = folder
        self.encoder = encoder
        self.quantizer: Quantizer = quantizer.quantizer
        self.quantizer_manifest = quantizer.manifest
        self.generator: Generator = generator.generator
        self.generator_manifest = generator.manifest
        self.instructions = tuple(instructions)
        self.fingerprint = fingerprint

    @staticmethod
    def open(folder: str | Path, *, device: str = "cpu", download: bool = False) -> Genius:
        """Open a finished model by its folder, or by the name under which `genius pull` fetched it.

        ``download`` is for the encoder's weights; the model itself is never downloaded here, but by
        :meth:`from_pretrained`.

        Raises
        ------
        ArtifactMissing
            there is no finished model in the folder, and none was pulled by this name.
        ArtifactMismatch
            its parts do not belong together, for example because a later training was interrupted.
        """
        folder = model_folder(folder)
        usable(device)
        body = read_model_file(folder)
        encoder = load_encoder(
            encoder_spec(folder, body["encoder"]["spec"]), download=download, device=device
        )
        quantizer = load_quantizer(folder / "quantizer", device=device)
        generator = load_generator(folder / "generator", device=device)
        found = {
            "encoder": encoder.fingerprint,
            "quantizer": quantizer.manifest.fingerprint,
            "generator": generator.manifest.fingerprint,
        }
        for part, fingerprint in found.items():
            if body[part]["fingerprint"] != fingerprint:
                raise ArtifactMismatch(
                    f"{folder}: the {part} is not the one this model was finished with (a later training was "
                    "interrupted, or the file changed); run `genius fit` again"
                )
        instructions = [KnownInstruction(**entry) for entry in body["instructions"]]
        return Genius(folder, encoder, quantizer, generator, instructions, body["fingerprint"])

    @staticmethod
    def finish(
        folder: Path,
        encoder: Encoder,
        quantizer: TrainedQuantizer,
        generator: TrainedGenerator,
        instructions: Sequence[KnownInstruction],
    ) -> Genius:
        """Declare the parts in a folder to be one model."""
        body = {
            "format": FORMAT,
            "encoder": {"spec": relative_spec(folder, encoder.spec), "fingerprint": encoder.fingerprint},
            "quantizer": {"fingerprint": quantizer.manifest.fingerprint},
            "generator": {"fingerprint": generator.manifest.fingerprint},
            "instructions": [
                {"query": known.query, "candidate": known.candidate, "text": known.text}
                for known in instructions
            ],
        }
        # The encoder's spec may be a path; a model stays the same when it is moved.
        identity = {part: body[part]["fingerprint"] for part in ("encoder", "quantizer", "generator")}  # type: ignore[index]
        fingerprint = fingerprint_of(identity)
        write_json(folder / MODEL_FILE, {**body, "fingerprint": fingerprint})
        return Genius(folder, encoder, quantizer, generator, instructions, fingerprint)

    def __repr__(self) -> str:
        sizes = " × ".join(str(size) for size in self.quantizer.sizes)
        return f"<Genius {self.folder}, fingerprint {self.fingerprint[:12]}, ID {sizes}>"

    @property
    def dim(self) -> int:
        """Width of features and embeddings."""
        return self.quantizer.dim

    @cached_property
    def decoder(self) -> Decoding:
        """The generator, laid out for search."""
        decoder = Decoder(self.generator)
        guide = self.generator.guide
        return decoder if guide is None else GuidedDecoder(decoder, guide)

    @cached_property
    def router(self) -> GeometricDecoder:
        """The generator's rival: its code vectors' geometry in place of what it learned."""
        return GeometricDecoder(self.quantizer.tables())

    @cached_property
    def ranker(self) -> CodeRanker:
        """Scores IDs by their code vectors."""
        return CodeRanker(self.quantizer.tables())

    @torch.no_grad()
    def embed(self, features: FeatureBatch) -> Float[Tensor, "items dim"]:
        """Fused unit embeddings, on the CPU."""
        device = self.quantizer.device
        fused: Tensor = self.quantizer.fusion(features.image.to(device), features.text.to(device))
        return fused.cpu()

    def encode(self, features: FeatureBatch, modalities: Int[np.ndarray, " items"]) -> EncodedItems:
        """IDs of items."""
        own = torch.from_numpy(modalities.astype(np.int64))
        return self.quantizer.encode_items(features.image, features.text, own)

    @property
    def level0_is_exact(self) -> bool:
        """Whether an item's level-0 code is its modality for certain."""
        return self.quantizer.config.level0 == "assigned"

    def level0_codes(self, modality: Modality) -> frozenset[int]:
        """Level-0 codes that stand for a modality.

        Raises
        ------
        UsageError
            the model has no modality level, or never saw this modality.
        """
        if not self.quantizer.has_modality_level:
            raise UsageError(
                "this model has no modality level, so a modality cannot be forced; name what you want in the "
                "instruction instead"
            )
        codes = np.flatnonzero(self.quantizer.level0_modality.cpu().numpy() == modality.code)
        if len(codes) == 0:
            raise UsageError(
                f"no level-0 code of this model is known to stand for {modality.value}; `genius doctor` "
                "shows what they stand for. An imported model learns it by importing again with --data"
            )
        return frozenset(int(code) for code in codes)

    def instruction_for(self, query: Modality, candidate: Modality) -> str | None:
        """An instruction it was trained with for this kind of query and result."""
        for known in self.instructions:
            if Modality.parse(known.query) is query and Modality.parse(known.candidate) is candidate:
                return known.text
        return None
