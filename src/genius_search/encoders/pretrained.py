"""`clip:` (CLIP, SigLIP) and `text:` (sentence embedders): pretrained encoders, run by transformers.

And networks of images alone, such as DINOv2, as the image side of ``small``.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from genius_search.artifact import fingerprint_of, read_json
from genius_search.encoders.base import ImageInput, PairOdds, TextInput, need_transformers, refuse_images
from genius_search.encoders.batches import BatchEncoder
from genius_search.encoders.static import StaticEncoder, is_static
from genius_search.encoders.texts import MAX_TOKENS, check_tokenizer, cut_texts
from genius_search.errors import ArtifactMismatch, ArtifactMissing, NetworkNeeded, need_packages
from genius_search.hub import contents_fingerprint, copy_checkpoint, find, pull
from genius_search.nn.weights import check_size

_NAME: Final = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
"""Form of a model's name; old ones have no owner."""
_WEIGHTS: Final = ("model.safetensors", "model.safetensors.index.json")
_SENTENCE_PIECES: Final = ("spiece.model", "tokenizer.model")
_TOKENIZERS: Final = ("tokenizer.json", "vocab.json", "vocab.txt", *_SENTENCE_PIECES)
_PROCESSORS: Final = ("preprocessor_config.json", "processor_config.json")
DEFAULT_TOKENS: Final = 512
"""Tokens that a sentence embedder reads of a text when its folder does not say."""
_PROMPTS: Final = {"query": ("query",), "candidate": ("document", "passage", "corpus")}
"""Names of a model's prompts in sentence-transformers' settings, by role."""
_MODULES: Final = frozenset({"Transformer", "Pooling", "Dense", "Normalize"})
"""Parts of a sentence embedder."""
_DATA: Final = frozenset({"tokenizer.json", "vocab.json", "added_tokens.json", _WEIGHTS[1]})
"""JSON files whose keys are words or names of tensors, not settings."""
_CODE: Final = frozenset({"auto_map", "custom_pipelines", "custom_generate"})
"""Settings by which transformers would run programs from the folder or the hub."""
_KERNELS: Final = frozenset({"attn_implementation", "_attn_implementation", "experts_implementation"})
"""Settings that may name a repository of compiled programs."""
MAX_LAYERS: Final = 256
MAX_SIDE: Final = 4096
"""Pixels along a side of a prepared image."""


def find_checkpoint(name: str, *, download: bool, reads_texts: bool = True) -> Path:
    """Return a model's folder: a path, or a name in the hub's local cache.

    A model that reads no texts needs no tokenizer.

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
    if name.startswith(".") or not _NAME.fullmatch(name):
        raise ArtifactMissing(
            f"there is no folder {name!r}; give a model's folder, or its name as owner/model"
        )
    cached = find(name)
    if cached is not None and not (download and _missing_files(cached, reads_texts=reads_texts)):
        return cached
    if not download:
        raise NetworkNeeded(
            f"{name} is not on this machine, and nothing is downloaded unless you ask. "
            f"Run again with --download, or `genius pull {name}`, or give the folder of a copy"
        )
    return pull(name)


def check_files(folder: Path, *, image_processor: bool, reads_texts: bool = True) -> None:
    """Check that a model's folder is complete and its settings can be trusted (:func:`check_settings`).

    Raises
    ------
    ArtifactMissing
        Files are missing; the message names them.
    """
    missing = _missing_files(folder, reads_texts=reads_texts)
    if image_processor and not any((folder / name).is_file() for name in _PROCESSORS):
        missing.append(_PROCESSORS[0])
    if missing:
        of_images = " of images" if image_processor else ""
        raise ArtifactMissing(f"{folder} is not a complete model{of_images}: it lacks {', '.join(missing)}")
    check_settings(folder)


def check_settings(folder: Path) -> None:
    """Check the settings of a model's folder before a library opens it.

    Raises
    ------
    ArtifactMismatch
        A file asks for code to be run, describes a network or an image that would fill the memory, or holds a
        tokenizer that would; the message names it.
    """
    if (folder / "adapter_config.json").exists():
        raise ArtifactMismatch(
            f"{folder} holds adapter_config.json, by which another model would be opened; merge the two first"
        )
    for file in sorted(set(folder.glob("*.json")) - {folder / name for name in _DATA}):
        waiting: list[tuple[str, Any]] = [("", read_json(file))]
        while waiting:
            name, value = waiting.pop()
            if isinstance(value, dict):
                waiting += value.items()
            elif isinstance(value, list):
                waiting += [(name, one) for one in value]
            if name in _CODE or (name in _KERNELS and "/" in str(value)):
                raise ArtifactMismatch(
                    f"{file} holds {name}, which asks for code from the model's folder or the hub to be run; "
                    "nothing was run. Use a model that transformers itself knows"
                )
            most = MAX_LAYERS if "layer" in name else MAX_SIDE if file.name in _PROCESSORS else None
            if most is not None and isinstance(value, int | float) and value > most:
                raise ArtifactMismatch(f"{file} says {name} {value}, expected at most {most}; do not use it")
    if (folder / "tokenizer.json").exists():
        check_tokenizer(folder / "tokenizer.json")


def _missing_files(folder: Path, *, reads_texts: bool) -> list[str]:
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    missing += [file.name for file in _weight_files(folder) if not file.is_file()]
    if reads_texts and not any((folder / name).is_file() for name in _TOKENIZERS):
        missing.append(_TOKENIZERS[0])
    return missing


def _weight_files(folder: Path) -> list[Path]:
    """Return the files of a model's weights: one, or those that an index lists."""
    index = folder / _WEIGHTS[1]
    if (folder / _WEIGHTS[0]).is_file() or not index.is_file():
        return [folder / _WEIGHTS[0]]
    try:
        names = sorted({*read_json(index)["weight_map"].values()})
    except (AttributeError, LookupError, TypeError) as error:
        raise ArtifactMismatch(f"{index} is damaged: it lists no weights ({error!r})") from None
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ArtifactMismatch(f"{index} names no files, or files outside its folder; do not use it")
    return [folder / name for name in names]


def check_network(folder: Path) -> None:
    """Check the network that a folder's settings describe before its weights are read.

    Raises
    ------
    ArtifactMismatch
        It is much larger than the weights.
    """
    from transformers import AutoConfig, AutoModel  # noqa: PLC0415  takes seconds to import

    def make() -> nn.Module:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        network: nn.Module = AutoModel.from_config(config, trust_remote_code=False)
        return network

    check_size(make, *_weight_files(folder))


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

    A layer on top whose weights were not saved, as of DINO's ViT, is left out: they would be random.

    Raises
    ------
    ArtifactMismatch
        The settings describe another network than that of the weights, or a much larger one.
    """
    from transformers import AutoModel  # noqa: PLC0415  takes seconds to import

    check_network(folder)
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
    pooling = [name for name in missing if name.startswith("pooler.")]
    if pooling:
        model.pooler = None
    if missing != pooling:
        raise ArtifactMismatch(
            f"the weights of {folder} lack {', '.join(missing[:3])} of its settings' network"
        )
    return model.to(device).eval()


def load_image_processor(folder: Path) -> Any:
    """Open a folder's image processor.

    Raises
    ------
    ArtifactMismatch
        transformers does not know it, or has it for torchvision only.
    """
    from transformers import AutoImageProcessor  # noqa: PLC0415  takes seconds to import

    try:
        return AutoImageProcessor.from_pretrained(
            folder, backend="pil", local_files_only=True, trust_remote_code=False
        )
    except (ImportError, ValueError) as error:
        reason = str(error).strip().partition(". ")[0]
        raise ArtifactMismatch(
            f"{folder} cannot be used for images: {reason}; choose a model whose images Pillow can prepare"
        ) from None


def load_tokenizer(folder: Path) -> Any:
    """Open a folder's tokenizer, from ``tokenizer.json`` where there is one."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: PLC0415  takes seconds to import

    kind = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else AutoTokenizer
    if kind is AutoTokenizer and any((folder / name).is_file() for name in _SENTENCE_PIECES):
        need_packages(f"the tokenizer of {folder} needs", "sentencepiece")
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


class PretrainedEncoder:
    """A network and its tokenizer from a folder in Hugging Face's layout.

    Parameters
    ----------
    name
        A folder, or a name on the Hugging Face hub.
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
        The folder holds another kind of model, or asks for code to be run.
    """

    kind: str
    """What the encoder's spec begins with."""
    reads_images: bool = True
    reads_texts: bool = True

    def __init__(self, name: str | Path, *, download: bool = False, device: str = "cpu") -> None:
        need_transformers()
        self._name = name
        self._device = device
        self._folder = find_checkpoint(str(name), download=download, reads_texts=self.reads_texts)
        check_files(self._folder, image_processor=self.reads_images, reads_texts=self.reads_texts)
        self._check_kind()

    @property
    def spec(self) -> str:
        """The kind, and the name or folder."""
        return f"{self.kind}:{self._name}"

    @cached_property
    def fingerprint(self) -> str:
        """A hash of settings, tokenizer and weights."""
        return contents_fingerprint(self._folder)

    def _check_kind(self) -> None:
        """Check what the folder says about its model, before the weights are read."""


class ImageTower(PretrainedEncoder):
    """The image side of CLIP or SigLIP, or a network of images alone, such as DINOv2.

    A network that does not pool its features, or whose pooling was not saved, gives those of its first token.
    """

    reads_texts = False
    dim: int

    def __init__(self, name: str | Path, *, download: bool = False, device: str = "cpu") -> None:
        super().__init__(name, download=download, device=device)
        self._model = load_model(self._folder, device=device)
        self._pixels = load_image_processor(self._folder)
        self.dim = self._width()

    @torch.no_grad()
    def _width(self) -> int:
        """Return the width of an image's features; raise :class:`ArtifactMismatch` if there are none."""
        try:
            return self.encode_images([Image.new("RGB", (224, 224))]).shape[1]
        except Exception as error:  # noqa: BLE001  a network of texts or sounds may raise anything
            kind = self._model.config.model_type
            raise ArtifactMismatch(
                f"{self._folder} holds a {kind!r} model, which gives no feature of an image ({error!r}); "
                "give one of images, such as CLIP, SigLIP or DINOv2"
            ) from None

    def encode_images(self, images: Sequence[Image.Image]) -> Float[Tensor, "items dim"]:
        """Return the features of a batch of images."""
        pixels = self._pixels(images=list(images), return_tensors="pt")["pixel_values"].to(self._device)
        found = getattr(self._model, "get_image_features", self._model)(pixel_values=pixels)
        pooled: Tensor | None = found.pooler_output
        return found.last_hidden_state[:, 0] if pooled is None else pooled.flatten(1)

    def save(self, folder: Path) -> None:
        """Copy the model's files into a folder."""
        copy_checkpoint(self._folder, folder)


class ClipEncoder(ImageTower, BatchEncoder):
    """CLIP or SigLIP: projected image and text features, not normalised."""

    kind = "clip"
    reads_texts = True

    def __init__(self, name: str | Path, *, download: bool = False, device: str = "cpu") -> None:
        super().__init__(name, download=download, device=device)
        self._tokenizer = load_tokenizer(self._folder)

    def _check_kind(self) -> None:
        self._type = str(read_json(self._folder / "config.json").get("model_type"))
        if self._type not in ("clip", "siglip"):
            raise ArtifactMismatch(
                f"{self._folder} holds a {self._type!r} model; clip: reads clip and siglip"
            )

    def _width(self) -> int:
        config = self._model.config
        width: int = config.projection_dim if self._type == "clip" else config.text_config.projection_size
        return width

    @cached_property
    def pair_odds(self) -> PairOdds | None:
        """How SigLIP rates an image with a text; CLIP only compares texts with one another."""
        if self._type != "siglip":
            return None
        return PairOdds(math.exp(self._model.logit_scale.item()), self._model.logit_bias.item())

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


class SentenceEncoder(PretrainedEncoder):
    """A sentence embedder in sentence-transformers' layout, run by sentence-transformers.

    Without ``modules.json``, token vectors are averaged and not normalised. The model's prompts for queries
    and documents are put before the texts.
    """

    kind = "text"
    needs_pixels = False
    reads_images = False

    def __init__(self, name: str | Path, *, download: bool = False, device: str = "cpu") -> None:
        super().__init__(name, download=download, device=device)
        need_packages("sentence embedders need", "sentence_transformers")
        from sentence_transformers import SentenceTransformer  # noqa: PLC0415  takes seconds to import

        check_network(self._folder)
        with quietly():
            self._model = SentenceTransformer(
                str(self._folder),
                device=device,
                local_files_only=True,
                trust_remote_code=False,
                model_kwargs={"dtype": torch.float32, "use_safetensors": True},
                config_kwargs={"trust_remote_code": False},
            )
        if self._model.modalities != ["text"]:  # it would take a text that is a URL for an image
            kinds = ", ".join(map(str, self._model.modalities))
            raise ArtifactMismatch(f"{self._folder} reads {kinds}; text: opens encoders of texts only")
        self.dim = cast("int", self._model.get_embedding_dimension())
        positions = getattr(self._model[0].config, "max_position_embeddings", MAX_TOKENS)
        limit = self._model.max_seq_length or DEFAULT_TOKENS
        self._max_tokens = self._model.max_seq_length = min(limit, positions, MAX_TOKENS)

    def _check_kind(self) -> None:
        """Check what ``modules.json`` lists."""
        self._modules: dict[str, Path] = {}
        file = self._folder / "modules.json"
        if not file.is_file():
            return
        listed = read_json(file)
        try:
            kinds = [str(module["type"]) for module in listed]
            places = [self._folder / module["path"] for module in listed]
        except (TypeError, LookupError) as error:
            raise ArtifactMismatch(f"{file} lists no modules ({error!r})") from None
        if not all(place.resolve().is_relative_to(self._folder.resolve()) for place in places):
            raise ArtifactMismatch(f"{file} names files outside its folder")
        names = [kind.rpartition(".")[2] for kind in kinds]
        unknown = {kind for kind, name in zip(kinds, names, strict=True) if not _is_known(kind, name)}
        if unknown or names[:1] != ["Transformer"] or places[0] != self._folder:
            raise ArtifactMismatch(
                f"{self._folder} consists of {', '.join(kinds)}; text: knows sentence-transformers' "
                f"{', '.join(sorted(_MODULES))}, the transformer first, in the folder itself"
            )
        self._modules = dict(zip(names, places, strict=True))
        for name, place in list(zip(names, places, strict=True))[1:]:
            check_settings(place)
            if name == "Dense":
                _check_dense(place)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of settings, tokenizer and weights."""
        contents: list[object] = [contents_fingerprint(self._folder)]
        modules = dict(self._modules)
        pooling = modules.pop("Pooling", None)
        modes = set() if pooling is None else _pooling(pooling)
        if modules.keys() <= {"Transformer", "Normalize"} and modes in (
            set(),
            {"mean_tokens"},
            {"cls_token"},
        ):
            return fingerprint_of([*contents, modes != {"cls_token"}, "Normalize" in modules])  # as in 0.1
        places = [place for place in self._modules.values() if place != self._folder and place.is_dir()]
        return fingerprint_of([*contents, *self._modules, *map(contents_fingerprint, places)])

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


def _is_known(kind: str, name: str) -> bool:
    return kind.startswith("sentence_transformers.") and name in _MODULES


def _pooling(folder: Path) -> set[str]:
    """Return how token vectors are pooled; settings of sentence-transformers from 5.4 on have one word."""
    settings = read_json(folder / "config.json")
    mode = settings.get("pooling_mode")
    if mode is not None:
        return {{"mean": "mean_tokens", "cls": "cls_token"}.get(str(mode), str(mode))}
    prefix = "pooling_mode_"
    return {
        name.removeprefix(prefix) for name, chosen in settings.items() if name.startswith(prefix) and chosen
    }


def _check_dense(folder: Path) -> None:
    """Check that a layer is stored without pickles and is no larger than its weights."""
    weights, settings = folder / _WEIGHTS[0], read_json(folder / "config.json")
    if not weights.is_file():
        raise ArtifactMissing(f"{folder} is not a complete layer: it lacks {weights.name}")
    inputs, outputs = (settings.get(name) for name in ("in_features", "out_features"))
    if not (isinstance(inputs, int) and isinstance(outputs, int)) or (
        not 0 < 2 * inputs * outputs <= weights.stat().st_size
    ):
        raise ArtifactMismatch(
            f"{folder} says {inputs} by {outputs} numbers, expected as many as {weights.name} holds; do not "
            "use it"
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
