"""`small`: an encoder trained from scratch, in about a minute on one core for the drawn catalogue.

A picture is described once by fixed edges and colours (:mod:`genius.encoders.picture`), a text once by token
numbers (:mod:`genius.encoders.words`); what is learnt is a light network over each. So a stage caches both
and every training step costs a few matrix products. Deviation 24: the paper's encoder is a fine-tuned CLIP.

Four kinds are the paper's embedding baselines in small: clip-sf and blip-sf give features of either modality,
clip-ff and blip-ff one vector for both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

import torch
from jaxtyping import Float, Int
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from genius.artifact import fingerprint_of
from genius.data.features import FeatureBatch
from genius.encoders.checkpoint import need_transformers
from genius.encoders.picture import DESCRIPTOR_SIZE, describe, pixels_of
from genius.encoders.protocol import ImageInput, JointInput, TextInput
from genius.encoders.small_config import SmallEncoderConfig
from genius.encoders.small_network import EmbeddingNetwork, SmallNetwork
from genius.encoders.words import token_rows, train_tokenizer
from genius.errors import ArtifactMismatch, ArtifactMissing, MissingExtra
from genius.weights import write_weights

__all__ = [
    "AnySmallEncoder",
    "SmallEncoder",
    "SmallEncoderConfig",
    "SmallJointEncoder",
    "create_small",
    "load_small",
]

CONFIG_FILE: Final = "config.json"
TOKENIZER_FILE: Final = "tokenizer.json"
WEIGHTS_FILE: Final = "model.safetensors"
_BATCH: Final = 1024


Network = TypeVar("Network", bound=EmbeddingNetwork)


class _Small(Generic[Network]):
    """A trained network with the tokenizer it was trained with."""

    def __init__(
        self, config: SmallEncoderConfig, network: Network, tokenizer: Tokenizer, *, spec: str = "small"
    ) -> None:
        self.config = config
        self.network = network
        self.tokenizer = tokenizer
        self._spec = spec

    def save(self, folder: Path) -> None:
        """Write weights, tokenizer and settings into a folder that exists."""
        write_weights(folder / WEIGHTS_FILE, self.network.state_dict())
        (folder / TOKENIZER_FILE).write_text(self.tokenizer.to_str())
        (folder / CONFIG_FILE).write_text(json.dumps(self.config.to_json(), indent=2) + "\n")

    @property
    def spec(self) -> str:
        """``small:FOLDER`` once loaded, ``small`` before."""
        return self._spec

    @property
    def dim(self) -> int:
        """Width of its features."""
        return self.config.dim

    @property
    def fingerprint(self) -> str:
        """Hash of settings, tokenizer and weights, wherever they are kept."""
        state = self.network.state_dict()
        weights = {
            name: hashlib.sha256(state[name].cpu().contiguous().numpy().data).hexdigest() for name in state
        }
        return fingerprint_of([self.config.to_json(), self.tokenizer.to_str(), weights])

    @property
    def needs_pixels(self) -> bool:
        """It looks at pictures."""
        return True

    def prepare_images(self, images: Sequence[Image.Image]) -> Float[Tensor, "items pixels"]:
        """Describe pictures; the part of the work that never changes, worth keeping between epochs."""
        return describe(images)

    def prepare_texts(self, texts: Sequence[str]) -> Int[Tensor, "items tokens"]:
        """Number the tokens of texts, padded to the longest allowed; worth keeping between epochs."""
        return token_rows(self.tokenizer, texts, max_tokens=self.config.max_tokens)


class SmallEncoder(_Small[SmallNetwork]):
    """CLIP-SF and BLIP-SF in small: features of images and of texts.

    >>> encoder = create_small(SmallEncoderConfig(), texts, seed=0)  # doctest: +SKIP
    >>> descriptors, tokens = encoder.prepare_images(pictures), encoder.prepare_texts(texts)  # doctest: +SKIP
    >>> features = encoder.network.image(descriptors)  # doctest: +SKIP
    """

    @torch.inference_mode()
    def image_features(self, images: Sequence[ImageInput]) -> Float[Tensor, "items dim"]:
        """Features of pictures."""
        pictures = pixels_of(images)
        parts = [
            self.network.image(self.prepare_images(pictures[start : start + _BATCH]).to(self.network.device))
            for start in range(0, len(pictures), _BATCH)
        ]
        return torch.cat(parts).cpu() if parts else torch.zeros(0, self.dim)

    @torch.inference_mode()
    def text_features(self, texts: Sequence[TextInput]) -> Float[Tensor, "items dim"]:
        """Features of texts."""
        tokens = self.prepare_texts([text.text for text in texts])
        parts = [self.network.text(part.to(self.network.device)) for part in torch.split(tokens, _BATCH)]
        return torch.cat(parts).cpu()


class SmallJointEncoder(_Small[EmbeddingNetwork]):
    """CLIP-FF and BLIP-FF in small: one vector for image and text together."""

    @torch.inference_mode()
    def joint_features(self, items: Sequence[JointInput]) -> Float[Tensor, "items dim"]:
        """One vector for each image and text together."""
        parts = [torch.zeros(0, self.dim)]
        for start in range(0, len(items), _BATCH):
            part = items[start : start + _BATCH]
            has_image = torch.tensor([item.has_image for item in part])
            descriptors = torch.zeros(len(part), DESCRIPTOR_SIZE)
            pictures = pixels_of([ImageInput(item.image, item.key) for item in part if item.has_image])
            descriptors[has_image] = self.prepare_images(pictures)
            tokens = self.prepare_texts([item.text for item in part])
            has_text = torch.tensor([bool(item.text) for item in part])
            batch = FeatureBatch(descriptors, tokens.float(), has_image, has_text)
            parts.append(self.network.embedding(batch).cpu())
        return torch.cat(parts)

    def image_features(self, images: Sequence[ImageInput]) -> Float[Tensor, "items dim"]:
        """Vectors of images without a text."""
        return self.joint_features(
            [JointInput(image.image, "", image.key, has_image=True) for image in images]
        )

    def text_features(self, texts: Sequence[TextInput]) -> Float[Tensor, "items dim"]:
        """Vectors of texts without an image."""
        return self.joint_features([JointInput(None, text.text, text.key, has_image=False) for text in texts])


AnySmallEncoder = SmallEncoder | SmallJointEncoder


def create_small(config: SmallEncoderConfig, texts: Iterable[str], *, seed: int) -> AnySmallEncoder:
    """Learn the vocabulary from the training texts and start from random weights.

    Raises
    ------
    MissingExtra
        clip-ff or blip-ff, and transformers is not installed.
    """
    if config.is_joint:
        need_transformers()
    tokenizer = train_tokenizer(texts, vocabulary=config.vocabulary)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _put_together(config, tokenizer, spec="small")


def load_small(folder: Path, *, device: str = "cpu") -> AnySmallEncoder:
    """Open what ``save`` wrote.

    Raises
    ------
    ArtifactMissing
        the folder or one of its three files is not there.
    ArtifactMismatch
        the files do not belong together or are damaged.
    MissingExtra
        it is clip-ff or blip-ff, and transformers is not installed.
    """
    missing = [name for name in (CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE) if not (folder / name).is_file()]
    if missing:
        raise ArtifactMissing(
            f"{folder} is not a trained small encoder: it lacks {', '.join(missing)}. "
            "Train one with `genius train encoder`"
        )
    try:
        config = SmallEncoderConfig(**json.loads((folder / CONFIG_FILE).read_text()))
        if config.is_joint:
            need_transformers()
        tokenizer = Tokenizer.from_str((folder / TOKENIZER_FILE).read_text())
        encoder = _put_together(config, tokenizer, spec=f"small:{folder}")
        encoder.network.load_state_dict(load_file(folder / WEIGHTS_FILE))
    except MissingExtra:
        raise
    except Exception as error:  # tokenizers raises plain Exception for a damaged file
        reason = str(error).splitlines()[0]
        raise ArtifactMismatch(
            f"{folder} cannot be read as a small encoder ({reason}); train it again"
        ) from error
    encoder.network.to(device).eval()
    return encoder


def _put_together(config: SmallEncoderConfig, tokenizer: Tokenizer, *, spec: str) -> AnySmallEncoder:
    vocabulary = tokenizer.get_vocab_size()
    match config.kind:
        case "clip-sf" | "blip-sf":
            return SmallEncoder(config, SmallNetwork(config, vocabulary=vocabulary), tokenizer, spec=spec)
        case "clip-ff":
            from genius.encoders.small_fusion import SmallClipFusion  # noqa: PLC0415  takes seconds

            network: EmbeddingNetwork = SmallClipFusion(config, vocabulary=vocabulary)
        case "blip-ff":
            from genius.encoders.small_fusion import SmallBlipFusion  # noqa: PLC0415

            network = SmallBlipFusion(config, vocabulary=vocabulary)
    return SmallJointEncoder(config, network, tokenizer, spec=spec)
