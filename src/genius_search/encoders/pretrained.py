"""`st:` and, by other names, `clip:`, `siglip:`, `text:`: what sentence-transformers opens, in PyTorch.

Embedders of texts, of images and texts apart (CLIP, SigLIP), and of both together. `uniir:FOLDER` is UniIR's
CLIP-SF, which GENIUS was trained on, as research/published writes it.
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

_NEEDED: Final = (
    ("config.json",),
    ("model.safetensors", "model.safetensors.index.json"),
    ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model"),
)
"""Files of a model's folder, one of each row, unless its ``modules.json`` names other folders."""
_OF_IMAGES: Final = ("preprocessor_config.json", "processor_config.json")
DEFAULT_TOKENS: Final = 512
"""Tokens that an embedder reads of a text when its folder does not say."""
_PROMPTS: Final = {"query": ("query",), "candidate": ("document", "passage", "corpus")}
"""Names of a model's prompts in sentence-transformers' settings, by role."""
ARTIFACT: Final = "uniir"
"""The folder's kind in its manifest."""
CLIP_END: Final = 49407
"""The token behind a text, whose vector CLIP-SF takes."""
_BATCH: Final = 64


def check_files(folder: Path, *needed: Sequence[str]) -> None:
    """Raise :class:`ArtifactMissing` where a folder has no file of a row; the message names them."""
    missing = [names[0] for names in needed if not any((folder / name).is_file() for name in names)]
    if missing:
        raise ArtifactMissing(
            f"{folder} is not a complete model of its kind: it lacks {', '.join(missing)}"
        )


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


def open_pretrained(spec: str, folder: Path, *, device: str = "cpu") -> PretrainedEncoder:
    """Open a folder as an encoder, one with ``joint_features`` where it embeds image and text together.

    Raises as :func:`open_model`.
    """
    model = open_model(folder, device=device)
    is_joint = model.supports(("image", "text"))
    return (JointPretrainedEncoder if is_joint else PretrainedEncoder)(spec, folder, model)


def open_model(folder: Path, *, device: str) -> Any:
    """Open a folder by sentence-transformers, running no program of its own.

    Raises
    ------
    MissingExtra
        sentence-transformers is not installed.
    ArtifactMissing
        The folder lacks files.
    ArtifactMismatch
        It cannot be opened, weights are missing (they would be random), or parts are no library's.
    """
    modules = folder / "modules.json"
    kinds = [str(module["type"]) for module in read_json(modules)] if modules.is_file() else []
    for router in folder.rglob("router_config.json"):
        kinds += map(str, read_json(router).get("types", {}).values())
    # For parts of other packages, sentence-transformers would run programs from the folder.
    foreign = [kind for kind in kinds if not kind.startswith("sentence_transformers.")]
    if foreign:
        raise ArtifactMismatch(
            f"{folder} lists {', '.join(foreign)}; only parts of sentence-transformers are opened"
        )
    if not kinds:
        check_files(folder, *_NEEDED)
        if str(read_json(folder / "config.json").get("model_type")).startswith(("clip", "siglip")):
            check_files(folder, _OF_IMAGES)  # without it, only texts would be read
    with quietly():
        from sentence_transformers import SentenceTransformer  # noqa: PLC0415  takes seconds to import

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
    # transformers marks what it loads; embedders of texts come without a pooler, which nothing uses.
    missing = [
        name
        for name, weight in getattr(model[0], "model", torch.nn.Module()).named_parameters()
        if not getattr(weight, "_is_hf_initialized", False) and "pooler" not in name
    ]
    if missing:
        names = ", ".join(missing[:3])
        raise ArtifactMismatch(f"the weights of {folder} lack {names} of its settings' network")
    return model


class PretrainedEncoder:
    """A model of sentence-transformers; features are as it gives them, normalised only if it does so.

    The model's own prompts for queries and documents are put before the inputs.
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
        if self._is_siglip:
            model.tokenizer.model_input_names = [
                "input_ids"
            ]  # it was trained to read the padding, too
        own = config.get_text_config() if hasattr(config, "get_text_config") else config
        limit = model.max_seq_length or DEFAULT_TOKENS
        self.max_tokens = min(limit, getattr(own, "max_position_embeddings", None) or limit)
        model.max_seq_length = self.max_tokens
        self.dim = int(
            model.get_embedding_dimension() or len(self._encode([{"text": "a"}], "query")[0])
        )

    @cached_property
    def fingerprint(self) -> str:
        """A hash of settings, tokenizer and weights, also of the parts in folders inside."""
        inside = sorted(folder for folder in self._folder.iterdir() if folder.is_dir())
        return fingerprint_of([contents_fingerprint(folder) for folder in (self._folder, *inside)])

    def num_tokens(self, text: str) -> int:
        """Return the number of tokens of a text, at most one more than ``max_tokens``."""
        tokens = self._model.tokenizer(text, truncation=True, max_length=self.max_tokens + 1)
        return len(tokens["input_ids"])

    def image_features(
        self, images: Sequence[Image.Image], keys: Keys = ()
    ) -> Float[Tensor, "items dim"]:
        """Return the features of images; raise :class:`UsageError` if the model reads texts only."""
        if not self.reads_images:
            refuse_images(keys)
        return self._encode([{"image": image} for image in images], _role(keys))

    def text_features(self, texts: Sequence[str], keys: Keys = ()) -> Float[Tensor, "items dim"]:
        """Return the features of texts, cut at the model's maximum length."""
        return self._encode([{"text": text} for text in self._texts(texts)], _role(keys))

    def _texts(self, texts: Sequence[str]) -> list[str]:
        cut = cut_texts(texts, max_tokens=self.max_tokens)
        # SigLIP was trained on lower case, which the tokenizers of SigLIP 2 do not make.
        return [text.lower() for text in cut] if self._is_siglip else cut

    def _encode(self, inputs: list[dict[str, Any]], role: str) -> Float[Tensor, "items dim"]:
        """Encode inputs of one kind. Each names its parts, or a text that is an address would be fetched."""
        if not inputs:
            return torch.zeros(0, self.dim)
        encode = self._model.encode_query if role == "query" else self._model.encode_document
        # Named, since encode_document takes an empty prompt for "document" before one for "passage".
        prompt = next(filter(None, map(self._model.prompts.get, _PROMPTS[role])), "")
        padding = {"text": {"padding": "max_length", "max_length": self.max_tokens}}
        options = {"processing_kwargs": padding} if self._is_siglip and "text" in inputs[0] else {}
        found: Tensor = encode(
            inputs, prompt=prompt, convert_to_tensor=True, show_progress_bar=False, **options
        )
        return found.float().cpu()


class JointPretrainedEncoder(PretrainedEncoder):
    """One that reads image and text together; others are given each apart, and their features are added."""

    def joint_features(
        self, images: Sequence[Image.Image | None], texts: Sequence[str], keys: Keys = ()
    ) -> Float[Tensor, "items dim"]:
        """Return one vector for each image and text together; inputs of the same parts are one batch."""
        inputs = [
            ({} if image is None else {"image": image}) | ({"text": text} if text else {})
            for image, text in zip(images, self._texts(texts), strict=True)
        ]
        features = torch.zeros(len(inputs), self.dim)
        for parts in dict.fromkeys(map(tuple, inputs)):
            rows = [row for row, own in enumerate(inputs) if tuple(own) == parts]
            features[rows] = self._encode([inputs[row] for row in rows], _role(keys))
        return features


def _role(keys: Keys) -> str:
    return keys[0].role if keys else "candidate"


def clip_reader(
    folder: Path, context: int
) -> Callable[[Sequence[str]], Int64[Tensor, "texts context"]]:
    """Number texts as OpenAI's code does: start, tokens, end, then zeros up to ``context`` tokens.

    The name of a start or end token within a text is read as that token.
    """
    import ftfy  # noqa: PLC0415  optional

    tokenizer = read_tokenizer(folder / "tokenizer.json")
    tokenizer.normalizer = None  # it does a part of what ``clean`` does
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
    """Resize the shorter side to ``side``, bicubic, and crop the middle.

    Where an odd number of pixels is cut, half of it is rounded to an even number, as torchvision does and so
    UniIR; transformers rounds down, which shifts a quarter of all images by one pixel.
    """
    width, height = image.size
    shorter = min(width, height)
    size = (side * width // shorter, side * height // shorter)
    resized = image.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    left, top = (round((length - side) / 2) for length in size)
    return resized.crop((left, top, left + side, top + side))


class ClipScoreFusion(PretrainedEncoder):
    """CLIP-SF: image and text features, to be summed; unnormalised, in single precision.

    Raises
    ------
    MissingExtra
        sentence-transformers or ftfy is not installed.
    ArtifactMissing
        The folder does not exist or was never finished.
    ArtifactMismatch
        The folder is of another kind, or damaged.
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
        """Encode the middle squares of images, or texts by their first end token."""
        if inputs and "image" in inputs[0]:
            side: int = self._clip.config.vision_config.image_size
            squares = [{"image": middle_square(content["image"], side=side)} for content in inputs]
            return super()._encode(squares, role)

        def encode(texts: Sequence[str]) -> Tensor:
            rows = self._read(texts)
            # Nothing after the first end token counts: no token looks ahead.
            last = int((rows == CLIP_END).int().argmax(dim=1).max())
            inside = rows[:, : last + 1].to(self._clip.device)
            features: Tensor = self._clip.get_text_features(input_ids=inside).pooler_output
            return features

        return in_batches(
            encode, [content["text"] for content in inputs], size=_BATCH, dim=self.dim
        )
