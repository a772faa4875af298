"""`st:` and its synonyms `clip:`, `siglip:`, `text:`: models for sentence-transformers, in PyTorch.

They read texts only, images and texts separately (CLIP, SigLIP), or both together. `uniir:FOLDER`
is UniIR's CLIP-SF, on which GENIUS was trained; research/published writes the folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from html import unescape
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Float, Int64
from PIL import Image
from torch import Tensor

from genius_search.artifact import fingerprint_of, open_artifact, read_json
from genius_search.encoders.base import Keys, cut_texts, read_tokenizer, refuse_images
from genius_search.errors import ArtifactMismatch, ArtifactMissing, need_packages
from genius_search.hub import contents_fingerprint
from genius_search.nn.weights import in_batches

_REQUIRED_FILES: Final = (
    ("config.json",),
    ("model.safetensors", "model.safetensors.index.json"),
    ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model"),
)
"""Files of a model without ``modules.json``, one from each row."""
_IMAGE_FILES: Final = ("preprocessor_config.json", "processor_config.json")
"""Settings of a model that reads images; either file."""
DEFAULT_MAX_TOKENS: Final = 512
"""Maximum number of tokens of a text if the model's settings do not limit it."""
_PROMPTS: Final = {"query": ("query",), "candidate": ("document", "passage", "corpus")}
"""Names of a model's prompts in sentence-transformers' settings, by role."""
ARTIFACT: Final = "uniir"
"""The folder's kind in its manifest."""
CLIP_END: Final = 49407
"""The token at the end of a text, whose vector is CLIP's text feature."""
_TEXTS_AT_ONCE: Final = 64
"""Texts that pass through UniIR's network together."""


def require_files(folder: Path, *alternatives: Sequence[str]) -> None:
    """Raise :class:`ArtifactMissing` unless a folder has at least one file of each row."""
    missing = [names[0] for names in alternatives if not _has_any(folder, names)]
    if missing:
        raise ArtifactMissing(
            f"{folder} is not a complete model of its kind: it lacks {', '.join(missing)}"
        )


def _has_any(folder: Path, names: Sequence[str]) -> bool:
    return any((folder / name).is_file() for name in names)


@contextlib.contextmanager
def without_reports() -> Iterator[None]:
    """Disable transformers' progress bar and its report of missing weights."""
    from transformers.utils import logging  # noqa: PLC0415  takes seconds to import

    was_enabled = logging.is_progress_bar_enabled()
    level = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if was_enabled:
            logging.enable_progress_bar()


def open_pretrained(spec: str, folder: Path, *, device: str = "cpu") -> PretrainedEncoder:
    """Open a folder as an encoder; it has ``joint_features`` if it reads images and texts together.

    Raises like :func:`open_model`.
    """
    model = open_model(folder, device=device)
    if model.supports(("image", "text")):
        return JointPretrainedEncoder(spec, folder, model)
    return PretrainedEncoder(spec, folder, model)


def open_model(folder: Path, *, device: str) -> Any:
    """Open a folder with sentence-transformers, without running code from the folder.

    Raises
    ------
    MissingExtra
        sentence-transformers is not installed.
    ArtifactMissing
        The folder lacks files.
    ArtifactMismatch
        The folder cannot be opened, lacks weights (which would be random), or has modules from
        other packages.
    """
    _check_folder(folder)
    with without_reports():
        from sentence_transformers import SentenceTransformer  # noqa: PLC0415  takes seconds

        try:
            model: Any = SentenceTransformer(
                str(folder),
                device=device,
                local_files_only=True,
                trust_remote_code=False,
                model_kwargs={"dtype": torch.float32, "use_safetensors": True},
                processor_kwargs={"backend": "pil"},
            )
        except (OSError, ValueError, TypeError, LookupError, RuntimeError, ImportError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ArtifactMismatch(
                f"{folder} cannot be opened by sentence-transformers: {reason}"
            ) from None
    # transformers marks the weights that it loads. Text models often lack a pooler; it is not used.
    missing: list[str] = []
    for name, weight in getattr(model[0], "model", torch.nn.Module()).named_parameters():
        if not getattr(weight, "_is_hf_initialized", False) and "pooler" not in name:
            missing.append(name)
    if missing:
        names = ", ".join(missing[:3])
        raise ArtifactMismatch(f"the weights of {folder} lack {names} of its settings' network")
    return model


def _check_folder(folder: Path) -> None:
    """Check that a folder is complete and that nothing in it would be run as a program."""
    modules_file = folder / "modules.json"
    modules = read_json(modules_file) if modules_file.is_file() else []
    module_types = [str(module["type"]) for module in modules]
    for router in folder.rglob("router_config.json"):
        module_types += map(str, read_json(router).get("types", {}).values())
    # For modules of other packages, sentence-transformers would run programs from the folder.
    foreign = [name for name in module_types if not name.startswith("sentence_transformers.")]
    if foreign:
        raise ArtifactMismatch(
            f"{folder} lists {', '.join(foreign)}; only modules of sentence-transformers are opened"
        )
    if not module_types:
        require_files(folder, *_REQUIRED_FILES)
        if str(read_json(folder / "config.json").get("model_type")).startswith(("clip", "siglip")):
            require_files(folder, _IMAGE_FILES)  # without them, the model would read only texts


class PretrainedEncoder:
    """A model for sentence-transformers, with the model's prompts for queries and documents.

    Features are normalised only if the model itself normalises them.
    """

    def __init__(self, spec: str, folder: Path, model: Any) -> None:
        self.spec = spec
        self._folder = folder
        self._model = model
        self.needs_pixels = self.reads_images = "image" in model.modalities
        if "text" not in model.modalities and "message" not in model.modalities:
            raise ArtifactMismatch(
                f"{folder} reads {', '.join(map(str, model.modalities))} and no texts"
            )
        config: Any = getattr(model[0], "config", None)
        self._is_siglip = str(getattr(config, "model_type", "")).startswith("siglip")
        if self._is_siglip:  # without an attention mask: it was trained to read the padding, too
            model.tokenizer.model_input_names = ["input_ids"]
        text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
        limit = model.max_seq_length or DEFAULT_MAX_TOKENS
        num_positions = getattr(text_config, "max_position_embeddings", None)
        self.max_tokens = min(limit, num_positions or limit)
        model.max_seq_length = self.max_tokens
        self.dim = int(
            model.get_embedding_dimension() or len(self._encode([{"text": "a"}], "query")[0])
        )

    @cached_property
    def fingerprint(self) -> str:
        """A hash of settings, tokenizer and weights, including the modules in subfolders."""
        subfolders = sorted(folder for folder in self._folder.iterdir() if folder.is_dir())
        folders = (self._folder, *subfolders)
        return fingerprint_of([contents_fingerprint(folder) for folder in folders])

    def num_tokens(self, text: str) -> int:
        """Return the number of tokens of a text, at most one more than ``max_tokens``."""
        tokens = self._model.tokenizer(text, truncation=True, max_length=self.max_tokens + 1)
        return len(tokens["input_ids"])

    def image_features(
        self, images: Sequence[Image.Image], keys: Keys = ()
    ) -> Float[Tensor, "items dim"]:
        """Return the features of images; raise :class:`UsageError` for a text-only model."""
        if not self.reads_images:
            refuse_images(keys)
        return self._encode([{"image": image} for image in images], _role(keys))

    def text_features(self, texts: Sequence[str], keys: Keys = ()) -> Float[Tensor, "items dim"]:
        """Return the features of texts, which are truncated at the model's maximum length."""
        return self._encode([{"text": text} for text in self._texts(texts)], _role(keys))

    def _texts(self, texts: Sequence[str]) -> list[str]:
        cut = cut_texts(texts, max_tokens=self.max_tokens)
        # SigLIP was trained on lower case, which SigLIP 2's tokenizer does not convert to.
        return [text.lower() for text in cut] if self._is_siglip else cut

    def _encode(self, inputs: list[dict[str, Any]], role: str) -> Float[Tensor, "items dim"]:
        """Encode inputs, dicts with the same keys: ``{"text": …}``, ``{"image": …}``, or both.

        Dicts are used because sentence-transformers would download a bare text that is a URL.
        """
        if not inputs:
            return torch.zeros(0, self.dim)
        encode = self._model.encode_query if role == "query" else self._model.encode_document
        # encode_document would prefer an empty prompt "document" to a prompt "passage" with words.
        prompt = next(filter(None, map(self._model.prompts.get, _PROMPTS[role])), "")
        padding = {"text": {"padding": "max_length", "max_length": self.max_tokens}}
        options = {"processing_kwargs": padding} if self._is_siglip and "text" in inputs[0] else {}
        features: Tensor = encode(
            inputs, prompt=prompt, convert_to_tensor=True, show_progress_bar=False, **options
        )
        return features.float().cpu()


class JointPretrainedEncoder(PretrainedEncoder):
    """A model that reads an image and a text together, instead of adding their features."""

    def joint_features(
        self, images: Sequence[Image.Image | None], texts: Sequence[str], keys: Keys = ()
    ) -> Float[Tensor, "items dim"]:
        """Return one vector per pair; the image may be None, or the text empty."""
        inputs = [
            ({} if image is None else {"image": image}) | ({"text": text} if text else {})
            for image, text in zip(images, self._texts(texts), strict=True)
        ]
        features = torch.zeros(len(inputs), self.dim)
        # One batch for each combination of parts: images, texts, pairs.
        for parts in dict.fromkeys(map(tuple, inputs)):
            rows = [row for row, pair in enumerate(inputs) if tuple(pair) == parts]
            features[rows] = self._encode([inputs[row] for row in rows], _role(keys))
        return features


def _role(keys: Keys) -> str:
    return keys[0].role if keys else "candidate"


def clip_reader(
    folder: Path, context: int
) -> Callable[[Sequence[str]], Int64[Tensor, "texts context"]]:
    """Return a function that tokenizes texts as OpenAI's code for CLIP does.

    A row has ``context`` numbers: the start token, the text's tokens, the end token, and zeros. A
    text that contains the name of a start or end token gets this token.
    """
    import ftfy  # noqa: PLC0415  optional

    tokenizer = read_tokenizer(folder / "tokenizer.json")
    tokenizer.normalizer = None  # ``clean`` normalises
    tokenizer.enable_truncation(context)
    tokenizer.enable_padding(length=context)

    def clean(text: str) -> str:
        return " ".join(unescape(unescape(ftfy.fix_text(text))).split()).lower()

    def read(texts: Sequence[str]) -> Tensor:
        encoded = tokenizer.encode_batch(
            [clean(text) for text in cut_texts(texts, max_tokens=context)]
        )
        return torch.tensor([encoding.ids for encoding in encoded])

    return read


def middle_square(image: Image.Image, *, side: int) -> Image.Image:
    """Resize the shorter side to ``side`` (bicubic), and crop the middle.

    If an odd number of pixels is cropped, half of it is rounded to an even number, as in
    torchvision and therefore UniIR. transformers rounds down, which shifts a quarter of all images
    by a pixel.
    """
    width, height = image.size
    shorter = min(width, height)
    size = (side * width // shorter, side * height // shorter)
    resized = image.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    left, top = (round((length - side) / 2) for length in size)
    return resized.crop((left, top, left + side, top + side))


class ClipScoreFusion(PretrainedEncoder):
    """CLIP-SF: unnormalised image and text features in single precision, which are to be added.

    Raises
    ------
    MissingExtra
        sentence-transformers or ftfy is not installed.
    ArtifactMissing
        The folder does not exist or was never finished.
    ArtifactMismatch
        The folder holds something else, or is damaged.
    """

    def __init__(self, folder: Path, *, device: str = "cpu") -> None:
        need_packages("pretrained encoders need", "sentence_transformers", "ftfy")
        manifest = open_artifact(folder, kind=ARTIFACT)
        model = open_model(manifest.folder, device=device)
        self._clip = model[0].model
        self._read = clip_reader(
            manifest.folder, self._clip.config.text_config.max_position_embeddings
        )
        super().__init__(f"uniir:{manifest.folder}", manifest.folder, model)
        self.fingerprint = manifest.fingerprint

    @torch.inference_mode()
    def _encode(self, inputs: list[dict[str, Any]], role: str) -> Float[Tensor, "items dim"]:
        """Encode the middle squares of images, or texts by the vector of their first end token."""
        if inputs and "image" in inputs[0]:
            side: int = self._clip.config.vision_config.image_size
            squares = [{"image": middle_square(content["image"], side=side)} for content in inputs]
            return super()._encode(squares, role)

        def encode(texts: Sequence[str]) -> Tensor:
            rows = self._read(texts)
            # No token attends to later ones, so columns after every first end token are dropped.
            last_end = int((rows == CLIP_END).int().argmax(dim=1).max())
            columns = rows[:, : last_end + 1].to(self._clip.device)
            features: Tensor = self._clip.get_text_features(input_ids=columns).pooler_output
            return features

        texts = [content["text"] for content in inputs]
        return in_batches(encode, texts, size=_TEXTS_AT_ONCE, dim=self.dim)
