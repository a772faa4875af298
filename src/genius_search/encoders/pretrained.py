"""`clip:` (CLIP, SigLIP) by transformers, and `text:` (sentence embedders) by sentence-transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from genius_search.artifact import fingerprint_of, read_json
from genius_search.encoders.base import ImageInput, TextInput, cut_texts, refuse_images
from genius_search.encoders.batches import BatchEncoder
from genius_search.errors import ArtifactMismatch, ArtifactMissing, need_packages
from genius_search.hub import contents_fingerprint, find

_NEEDED: Final = (
    ("config.json",),
    ("model.safetensors", "model.safetensors.index.json"),
    ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model"),
)
"""Files of a model's folder, one of each row."""
_OF_IMAGES: Final = ("preprocessor_config.json", "processor_config.json")
DEFAULT_TOKENS: Final = 512
"""Tokens that a sentence embedder reads of a text when its folder does not say."""
_PROMPTS: Final = {"query": ("query",), "candidate": ("document", "passage", "corpus")}
"""Names of a model's prompts in sentence-transformers' settings, by role."""


class Suggestion(NamedTuple):
    """A pretrained encoder on the Hugging Face hub."""

    spec: str
    megabytes: int
    """Size of the download."""
    license: str

    @property
    def description(self) -> str:
        """Spec, size and licence in one line."""
        return f"{self.spec} ({self.megabytes:,} MB, licence {self.license})"

    def is_downloaded(self) -> bool:
        """Return whether the encoder is on this machine."""
        return find(self.spec.partition(":")[2]) is not None


IMAGES_AND_TEXTS: Final = Suggestion("siglip:google/siglip2-base-patch16-224", 1_540, "Apache-2.0")
"""Suggested for pools with images."""
TEXTS_ONLY: Final = Suggestion("text:sentence-transformers/all-MiniLM-L6-v2", 91, "Apache-2.0")
"""Suggested for pools of texts."""


def check_files(folder: Path, *needed: Sequence[str]) -> None:
    """Raise :class:`ArtifactMissing` where a folder has no file of a row; the message names them."""
    missing = [names[0] for names in needed if not any((folder / name).is_file() for name in names)]
    if missing:
        raise ArtifactMissing(f"{folder} is not a complete model of its kind: it lacks {', '.join(missing)}")


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Switch transformers' progress bar and its report of missing weights off."""
    from transformers.utils import logging  # noqa: PLC0415  takes seconds to import

    was_enabled, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if was_enabled:
            logging.enable_progress_bar()


def load_image_processor(folder: Path) -> Any:
    """Open a folder's image processor, run by Pillow."""
    from transformers import AutoImageProcessor  # noqa: PLC0415  takes seconds to import

    return AutoImageProcessor.from_pretrained(
        folder, backend="pil", local_files_only=True, trust_remote_code=False
    )


class ClipEncoder(BatchEncoder):
    """CLIP or SigLIP in Hugging Face's layout: projected image and text features, not normalised.

    Raises
    ------
    MissingExtra
        transformers is not installed.
    ArtifactMissing
        The folder lacks files.
    ArtifactMismatch
        The folder holds another kind of model, or weights are missing; they would be random.
    """

    def __init__(self, spec: str, folder: Path, *, device: str = "cpu") -> None:
        need_packages("pretrained encoders need", "transformers")
        from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerFast  # noqa: PLC0415  as above

        self.spec = spec
        self._folder = folder
        self._device = device
        check_files(folder, *_NEEDED, _OF_IMAGES)
        self._type = str(read_json(folder / "config.json").get("model_type"))
        if self._type not in ("clip", "siglip"):
            raise ArtifactMismatch(f"{folder} holds a {self._type!r} model; clip: reads clip and siglip")
        with quietly():
            model, loading = AutoModel.from_pretrained(
                folder,
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        missing = sorted(loading["missing_keys"])
        if missing:
            raise ArtifactMismatch(
                f"the weights of {folder} lack {', '.join(missing[:3])} of its settings' network"
            )
        self._model = model.to(device).eval()
        self._pixels = load_image_processor(folder)
        tokenizer = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else AutoTokenizer
        self._tokenizer = tokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config = self._model.config
        self.max_tokens = int(config.text_config.max_position_embeddings)
        self.dim = int(config.projection_dim if self._type == "clip" else config.text_config.projection_size)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of settings, tokenizer and weights."""
        return contents_fingerprint(self._folder)

    def encode_images(self, images: Sequence[Image.Image]) -> Float[Tensor, "items dim"]:
        """Return the features of a batch of images."""
        pixels = self._pixels(images=list(images), return_tensors="pt")["pixel_values"].to(self._device)
        features: Tensor = self._model.get_image_features(pixel_values=pixels).pooler_output
        return features

    def num_tokens(self, text: str) -> int:
        """Return the number of tokens of a text, at most one more than ``max_tokens``."""
        return len(self._tokenizer(text, truncation=True, max_length=self.max_tokens + 1)["input_ids"])

    def encode_texts(self, texts: Sequence[str]) -> Float[Tensor, "items dim"]:
        """Return the features of a batch of texts, cut at the model's maximum length."""
        most = self.max_tokens
        if self._type == "siglip":  # trained on lower case, which the tokenizers of SigLIP 2 do not make
            texts = [text.lower() for text in texts]
        tokens = self._tokenizer(
            cut_texts(texts, max_tokens=most),
            # SigLIP was trained on texts padded to its full length, and reads the padding.
            padding="max_length" if self._type == "siglip" else "longest",
            truncation=True,
            max_length=most,
            return_tensors="pt",
        )
        inputs = {"input_ids": tokens["input_ids"].to(self._device)}
        if self._type == "clip":
            inputs["attention_mask"] = tokens["attention_mask"].to(self._device)
        features: Tensor = self._model.get_text_features(**inputs).pooler_output
        return features


class SentenceEncoder:
    """A sentence embedder, run by sentence-transformers; it reads texts only.

    The model's prompts for queries and documents are put before the texts. Without ``modules.json``, token
    vectors are averaged and not normalised. Raises as :class:`ClipEncoder`.
    """

    needs_pixels = False
    reads_images = False

    def __init__(self, name: str, folder: Path, *, device: str = "cpu") -> None:
        need_packages("sentence embedders need", "sentence_transformers")
        from sentence_transformers import SentenceTransformer  # noqa: PLC0415  takes seconds to import

        self.spec = f"text:{name}"
        self._folder = folder
        check_files(folder, *_NEEDED)
        modules = folder / "modules.json"
        kinds = [str(module["type"]) for module in read_json(modules)] if modules.is_file() else []
        # For parts of other packages, sentence-transformers would run programs from the folder.
        foreign = [kind for kind in kinds if not kind.startswith("sentence_transformers.")]
        if foreign:
            raise ArtifactMismatch(
                f"{modules} lists {', '.join(foreign)}; text: opens parts of sentence-transformers only"
            )
        with quietly():
            self._model = SentenceTransformer(
                str(folder),
                device=device,
                local_files_only=True,
                trust_remote_code=False,
                model_kwargs={"dtype": torch.float32, "use_safetensors": True},
            )
        if self._model.modalities != ["text"]:  # it would take a text that is a URL for an image
            reads = ", ".join(map(str, self._model.modalities))
            raise ArtifactMismatch(f"{folder} reads {reads}; text: opens encoders of texts only")
        self.dim = cast("int", self._model.get_embedding_dimension())
        limit = self._model.max_seq_length or DEFAULT_TOKENS
        positions = getattr(self._model[0].config, "max_position_embeddings", limit)
        self.max_tokens = self._model.max_seq_length = min(limit, positions)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of settings, tokenizer and weights, also of the parts in folders inside."""
        inside = sorted(folder for folder in self._folder.iterdir() if folder.is_dir())
        return fingerprint_of([contents_fingerprint(folder) for folder in (self._folder, *inside)])

    def num_tokens(self, text: str) -> int:
        """Return the number of tokens of a text, at most one more than ``max_tokens``."""
        tokens = self._model.tokenizer(text, truncation=True, max_length=self.max_tokens + 1)
        return len(tokens["input_ids"])

    def image_features(self, images: Sequence[ImageInput]) -> Float[Tensor, "items dim"]:
        """Raise :class:`UsageError` for any image."""
        refuse_images(images)
        return torch.zeros(0, self.dim)

    def text_features(self, texts: Sequence[TextInput]) -> Float[Tensor, "items dim"]:
        """Return the features of texts, cut at the model's maximum length."""
        features = torch.zeros(len(texts), self.dim)
        for role, encode in (("query", self._model.encode_query), ("candidate", self._model.encode_document)):
            rows = [row for row, text in enumerate(texts) if text.key.role == role]
            if rows:
                some = cut_texts([texts[row].text for row in rows], max_tokens=self.max_tokens)
                # Named, since encode_document takes an empty prompt for "document" before one for "passage".
                prompt = next(filter(None, map(self._model.prompts.get, _PROMPTS[role])), "")
                found = encode(some, prompt=prompt, convert_to_tensor=True, show_progress_bar=False)
                features[rows] = found.float().cpu()
        return features
