"""`clip:` (CLIP, SigLIP) by transformers, and `text:` (sentence embedders) by sentence-transformers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from genius_search.artifact import fingerprint_of, read_json
from genius_search.encoders.base import ImageInput, TextInput, need_transformers, refuse_images
from genius_search.encoders.batches import BatchEncoder
from genius_search.encoders.static import StaticEncoder, is_static
from genius_search.encoders.texts import cut_texts
from genius_search.errors import ArtifactMismatch, ArtifactMissing, NetworkNeeded, need_packages
from genius_search.hub import contents_fingerprint, find, pull

_NAME: Final = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?", re.ASCII)
"""Form of a model's name; old ones have no owner."""
_NEEDED: Final = (
    ("config.json",),
    ("model.safetensors", "model.safetensors.index.json"),
    ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model"),
)
"""Files of a model's folder, one of each row."""
_PROCESSORS: Final = ("preprocessor_config.json", "processor_config.json")
DEFAULT_TOKENS: Final = 512
"""Tokens that a sentence embedder reads of a text when its folder does not say."""
_PROMPTS: Final = {"query": ("query",), "candidate": ("document", "passage", "corpus")}
"""Names of a model's prompts in sentence-transformers' settings, by role."""


def find_checkpoint(name: str, *, download: bool) -> Path:
    """Return a model's folder: a path, or a name in the hub's local cache.

    Raises
    ------
    ArtifactMissing
        The name can only be a folder, and there is none.
    NetworkNeeded
        The model is not on this machine, and ``download`` is off or fails.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if not _NAME.fullmatch(name):
        raise ArtifactMissing(
            f"there is no folder {name!r}; give a model's folder, or its name as owner/model"
        )
    cached = find(name)
    if cached is not None and not (download and _missing_files(cached)):
        return cached
    if not download:
        raise NetworkNeeded(
            f"{name} is not on this machine, and nothing is downloaded unless you ask. "
            f"Run again with --download, or `genius pull {name}`, or give the folder of a copy"
        )
    return pull(name)


def check_files(folder: Path, *, image_processor: bool) -> None:
    """Raise :class:`ArtifactMissing` where a model's folder lacks files; the message names them."""
    missing = _missing_files(folder)
    if image_processor and not any((folder / name).is_file() for name in _PROCESSORS):
        missing.append(_PROCESSORS[0])
    if missing:
        of_images = " of images" if image_processor else ""
        raise ArtifactMissing(f"{folder} is not a complete model{of_images}: it lacks {', '.join(missing)}")


def _missing_files(folder: Path) -> list[str]:
    return [names[0] for names in _NEEDED if not any((folder / name).is_file() for name in names)]


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


def load_model(folder: Path, *, device: str) -> Any:
    """Load a folder's model in single precision.

    Raises
    ------
    ArtifactMismatch
        Weights of the network that the settings describe are missing; they would be random.
    """
    from transformers import AutoModel  # noqa: PLC0415  takes seconds to import

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
    return model.to(device).eval()


def load_image_processor(folder: Path) -> Any:
    """Open a folder's image processor, run by Pillow."""
    from transformers import AutoImageProcessor  # noqa: PLC0415  takes seconds to import

    return AutoImageProcessor.from_pretrained(
        folder, backend="pil", local_files_only=True, trust_remote_code=False
    )


def load_tokenizer(folder: Path) -> Any:
    """Open a folder's tokenizer, from ``tokenizer.json`` where there is one."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: PLC0415  takes seconds to import

    kind = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else AutoTokenizer
    return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


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
        try:
            find_checkpoint(self.spec.partition(":")[2], download=False)
        except NetworkNeeded:
            return False
        return True


IMAGES_AND_TEXTS: Final = Suggestion("siglip:google/siglip2-base-patch16-224", 1_540, "Apache-2.0")
"""Suggested for pools with images."""
TEXTS_ONLY: Final = Suggestion("text:sentence-transformers/all-MiniLM-L6-v2", 91, "Apache-2.0")
"""Suggested for pools of texts."""


class ClipEncoder(BatchEncoder):
    """CLIP or SigLIP: projected image and text features, not normalised.

    Parameters
    ----------
    name
        A folder in Hugging Face's layout, or a name on the hub.
    download
        Allow downloading a name that is not in the local cache.

    Raises
    ------
    MissingExtra
        transformers is not installed.
    NetworkNeeded
        The model is not on this machine, and ``download`` is off or fails.
    ArtifactMissing
        The folder does not exist or lacks files.
    ArtifactMismatch
        The folder holds another kind of model, or weights are missing.
    """

    kind: str = "clip"
    """What the encoder's spec begins with."""

    def __init__(self, name: str | Path, *, download: bool = False, device: str = "cpu") -> None:
        need_transformers()
        self.spec = f"{self.kind}:{name}"
        self._device = device
        self._folder = find_checkpoint(str(name), download=download)
        check_files(self._folder, image_processor=True)
        self._type = str(read_json(self._folder / "config.json").get("model_type"))
        if self._type not in ("clip", "siglip"):
            raise ArtifactMismatch(
                f"{self._folder} holds a {self._type!r} model; clip: reads clip and siglip"
            )
        self._model = load_model(self._folder, device=device)
        self._pixels = load_image_processor(self._folder)
        self._tokenizer = load_tokenizer(self._folder)
        config = self._model.config
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

    def encode_texts(self, texts: Sequence[str]) -> Float[Tensor, "items dim"]:
        """Return the features of a batch of texts, cut at the model's maximum length."""
        most = self._model.config.text_config.max_position_embeddings
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

    def __init__(self, name: str | Path, *, download: bool = False, device: str = "cpu") -> None:
        need_packages("sentence embedders need", "sentence_transformers")
        from sentence_transformers import SentenceTransformer  # noqa: PLC0415  takes seconds to import

        self.spec = f"text:{name}"
        self._folder = find_checkpoint(str(name), download=download)
        check_files(self._folder, image_processor=False)
        _check_modules(self._folder / "modules.json")
        with quietly():
            self._model = SentenceTransformer(
                str(self._folder),
                device=device,
                local_files_only=True,
                trust_remote_code=False,
                model_kwargs={"dtype": torch.float32, "use_safetensors": True},
            )
        if self._model.modalities != ["text"]:  # it would take a text that is a URL for an image
            kinds = ", ".join(map(str, self._model.modalities))
            raise ArtifactMismatch(f"{self._folder} reads {kinds}; text: opens encoders of texts only")
        self.dim = cast("int", self._model.get_embedding_dimension())
        limit = self._model.max_seq_length or DEFAULT_TOKENS
        positions = getattr(self._model[0].config, "max_position_embeddings", limit)
        self._max_tokens = self._model.max_seq_length = min(limit, positions)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of settings, tokenizer and weights, also of the parts in folders inside."""
        inside = sorted(folder for folder in self._folder.iterdir() if folder.is_dir())
        return fingerprint_of([contents_fingerprint(folder) for folder in (self._folder, *inside)])

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
                some = cut_texts([texts[row].text for row in rows], max_tokens=self._max_tokens)
                # Named, since encode_document takes an empty prompt for "document" before one for "passage".
                prompt = next(filter(None, map(self._model.prompts.get, _PROMPTS[role])), "")
                found = encode(some, prompt=prompt, convert_to_tensor=True, show_progress_bar=False)
                features[rows] = found.float().cpu()
        return features


def _check_modules(file: Path) -> None:
    """Refuse parts of other packages: sentence-transformers would run programs from a folder for them."""
    listed = read_json(file) if file.is_file() else []
    foreign = [one["type"] for one in listed if not str(one["type"]).startswith("sentence_transformers.")]
    if foreign:
        raise ArtifactMismatch(
            f"{file} lists {', '.join(map(str, foreign))}; text: opens parts of sentence-transformers only"
        )


def open_text_encoder(name: str, *, download: bool, device: str) -> SentenceEncoder | StaticEncoder:
    """Open the encoder that ``text:`` names and that is not in a folder of static embeddings.

    Raises
    ------
    ArtifactMissing, ArtifactMismatch, MissingExtra, NetworkNeeded
        The encoder cannot be opened.
    """
    folder = find_checkpoint(name, download=download)
    if is_static(folder):
        return StaticEncoder(name, folder)
    return SentenceEncoder(name, download=download, device=device)
