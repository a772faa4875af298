"""``python -m research.published.encoders``: a checkpoint of UniIR becomes a folder.

The weights are mapped from the file, checked by name and shape, renamed and written in single precision;
nothing else of the file is read. For CLIP-SF the folder is an ordinary CLIP too, for transformers and for
``clip:FOLDER``.

For BLIP-FF (specification, section 3.5) the file has an image tower (``visual_encoder``) and BERT
(``text_encoder``). Momentum copies (``*_m``), queues and ``temp`` serve training only and are left out.
Names of single tensors are those of BLIP's own code. Their sizes add up to the published file's 7.49 GB,
but the file itself could not be opened for a test. BLIP-SF was never published.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import torch
import tyro
from tokenizers import Tokenizer
from torch import Tensor, nn

from genius_search.artifact import Manifest, file_fingerprint, fingerprint_of
from genius_search.cli.options import OptionalFolder, command
from genius_search.cli.terminal import TerminalProgress
from genius_search.encoders.base import read_tokenizer
from genius_search.encoders.pretrained import ARTIFACT, CLIP_END
from genius_search.errors import ArtifactMismatch, ArtifactMissing, UsageError
from genius_search.nn.weights import write_weights
from genius_search.progress import Progress
from genius_search.writing import ArtifactWriter
from research.command import run
from research.published.checkpoint import (
    Checkpoint,
    check_names,
    is_tolerated,
    open_checkpoint,
    renamed,
    single_precision,
)
from research.published.clip_tokens import START, VOCABULARY, clip_tokenizer
from research.published.fusions import ARTIFACT as FUSION
from research.published.fusions import MAX_BERT_TOKENS, BlipFusion, ClipFusion

Shapes = dict[str, tuple[int, ...]]
EncoderKind = Literal["clip-sf", "clip-ff", "blip-ff"]
"""CLIP or BLIP, fused by summing features (score) or by layers over both (feature)."""

WEIGHTS: Final = "model.safetensors"
HEAD: Final = 64
"""Numbers per attention head, in all of them."""
CLIP: Final = "clip_model."
ACTIVATION: Final = "quick_gelu"
"""The activation of OpenAI's CLIP."""
T5_SETTINGS: Final[Mapping[str, Any]] = {
    "vocab_size": 1,
    "eos_token_id": None,
    "is_encoder_decoder": False,
    "use_cache": False,
}
"""Transformers' settings of CLIP-FF's layers beside their sizes; the rest are T5's defaults."""
BERT_SETTINGS: Final[Mapping[str, Any]] = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "bos_token_id": None,
    "eos_token_id": None,
    "sep_token_id": None,
    "use_cache": False,
}
"""Transformers' settings of BLIP's BERT beside its sizes; ``is_decoder`` makes it attend to images."""
EXTRA_TOKENS: Final = 2
"""BLIP adds [DEC] and [ENC] to BERT's vocabulary; UniIR reads neither."""

_BLIP_TRAINING: Final = (
    re.compile(r"(visual_encoder|text_encoder)_m\..*"),
    re.compile(r"(query|cand|idx|new_ptr)_queue|temp"),
    re.compile(r"text_encoder\.embeddings\.position_ids"),
)
_UNUSED: Final[Mapping[EncoderKind, tuple[re.Pattern[str], ...]]] = {
    "clip-sf": (),
    "clip-ff": (re.compile(r"t5_layers\.embed_tokens\.weight"),),
    "blip-ff": _BLIP_TRAINING,
}
"""Tensors that only training needs."""
_CLIP_NAMES: Final = {
    "text_model.embeddings.token_embedding": "token_embedding",
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "text_model.encoder.layers.": "transformer.resblocks.",
    "text_model.final_layer_norm": "ln_final",
    "text_projection.weight": "text_projection",
    "vision_model.embeddings.class_embedding": "visual.class_embedding",
    "vision_model.embeddings.patch_embedding": "visual.conv1",
    "vision_model.embeddings.position_embedding.weight": "visual.positional_embedding",
    "vision_model.pre_layrnorm": "visual.ln_pre",
    "vision_model.encoder.layers.": "visual.transformer.resblocks.",
    "vision_model.post_layernorm": "visual.ln_post",
    "visual_projection.weight": "visual.proj",
    "self_attn.q_proj.": "attn.in_proj_",
    "self_attn.k_proj.": "attn.in_proj_",
    "self_attn.v_proj.": "attn.in_proj_",
    "self_attn.out_proj": "attn.out_proj",
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "mixer.": "t5_layers.",
}
"""Parts of our network's names, and what the checkpoint has in their place."""
_BLIP_NAMES: Final = {
    "vision_model.embeddings.class_embedding": "visual_encoder.cls_token",
    "vision_model.embeddings.position_embedding": "visual_encoder.pos_embed",
    "vision_model.embeddings.patch_embedding": "visual_encoder.patch_embed.proj",
    "vision_model.encoder.layers.": "visual_encoder.blocks.",
    "vision_model.post_layernorm": "visual_encoder.norm",
    "self_attn.qkv": "attn.qkv",
    "self_attn.projection": "attn.proj",
    "layer_norm1": "norm1",
    "layer_norm2": "norm2",
}
_TRANSPOSED: Final = ("text_projection.weight", "visual_projection.weight")
_BERT_SPECIAL: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """An encoder taken from a checkpoint: weights in single precision, under transformers' names."""

    weights: Mapping[str, Tensor]
    config: Mapping[str, Any]
    """The contents of ``config.json``: the architecture."""
    pixels: Mapping[str, Any]
    """The contents of ``preprocessor_config.json``: how images are prepared."""
    left_out: tuple[str, ...]
    """Tensors that only training needs: momentum copies, queues, buffers."""


def import_encoder(
    file: Path,
    kind: EncoderKind,
    folder: Path,
    *,
    progress: Progress,
    tokenizer: Path | None = None,
) -> Manifest:
    """Turn a checkpoint into a folder, and return its manifest; one of the same file is kept.

    Raises UsageError: BLIP's vocabulary is needed and not given, or given and not needed; or the folder holds
    something else. Raises ArtifactMissing, ArtifactMismatch: the checkpoint or the vocabulary is not what it
    should be; the message lists what differs.
    """
    is_blip = kind.startswith("blip")
    if is_blip is (tokenizer is None):
        raise UsageError(
            f"{kind} reads BERT's tokens; give --tokenizer FOLDER with bert-base-uncased's vocabulary"
            if is_blip
            else f"{kind} brings its own vocabulary; leave --tokenizer out"
        )
    checkpoint = open_checkpoint(file)
    progress.say(
        f"{file}: {file.stat().st_size / 1e9:.2f} GB; checking names, shapes and numbers, hashing"
    )
    weights = convert(checkpoint, kind)
    texts = _small_files(weights, tokenizer)
    inputs = {"checkpoint": file_fingerprint(file), "texts": fingerprint_of(texts)}
    artifact = ARTIFACT if kind == "clip-sf" else FUSION
    writer = ArtifactWriter(folder, kind=artifact, config={"kind": kind}, inputs=inputs)
    manifest = writer.finished()
    if manifest is None:
        for name, text in texts.items():
            (writer.path / name).write_text(text)
        write_weights(writer.path / WEIGHTS, weights.weights, metadata={"format": "pt"})
        manifest = writer.finish(facts={"left_out": list(weights.left_out)})
    return manifest


def _small_files(weights: EncoderWeights, tokenizer: Path | None) -> dict[str, str]:
    settings: dict[str, Any]
    if tokenizer is None:
        settings = {
            "bos_token": "<|startoftext|>",
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "unk_token": "<|endoftext|>",
            "model_max_length": weights.config["text_config"]["max_position_embeddings"],
            "tokenizer_class": "CLIPTokenizer",
        }
        vocabulary = clip_tokenizer()
    else:
        settings = {"model_max_length": MAX_BERT_TOKENS, "tokenizer_class": "BertTokenizer"}
        vocabulary = find_bert_tokenizer(
            tokenizer, rows=weights.config["text_config"]["vocab_size"]
        )
    return {
        "config.json": json.dumps(weights.config, indent=2) + "\n",
        "preprocessor_config.json": json.dumps(weights.pixels, indent=2) + "\n",
        "tokenizer.json": vocabulary.to_str(),
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
    }


def find_bert_tokenizer(folder: Path, *, rows: int) -> Tokenizer:
    """Read a folder's ``tokenizer.json`` or ``vocab.txt`` and check that a checkpoint's ``rows`` fit it.

    Raises ArtifactMissing: the folder has neither. Raises ArtifactMismatch: the file holds no BERT
    vocabulary, or one of another size.
    """
    from transformers import BertTokenizer  # noqa: PLC0415  takes seconds

    ready = folder / "tokenizer.json"
    if not (ready.is_file() or (folder / "vocab.txt").is_file()):
        raise ArtifactMissing(
            f"{folder} has neither tokenizer.json nor vocab.txt; give one with bert-base-uncased's vocabulary"
        )
    if ready.is_file():
        tokenizer = read_tokenizer(ready)
    else:
        tokenizer = BertTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    missing = [name for name in _BERT_SPECIAL if tokenizer.token_to_id(name) is None]
    if missing or size not in (rows, rows - EXTRA_TOKENS):
        problem = f"lacks {', '.join(missing)}" if missing else f"has {size:,} tokens"
        raise ArtifactMismatch(
            f"the vocabulary in {folder} {problem}, and the checkpoint was trained with "
            f"{rows - EXTRA_TOKENS:,} and two more; give a folder with bert-base-uncased's vocabulary"
        )
    return tokenizer


def size_of(
    tensors: Mapping[str, Tensor], name: str, *, rank: int = 2, what: str
) -> tuple[int, ...]:
    """Return the shape of a tensor that tells a size; raise :class:`ArtifactMismatch` where it cannot."""
    tensor = tensors.get(name)
    if tensor is None or tensor.dim() != rank or 0 in tensor.shape:
        shape = "it is missing" if tensor is None else f"its shape is {tuple(tensor.shape)}"
        raise ArtifactMismatch(
            f"{what} needs a tensor {name} with {rank} dimensions, and {shape}; this is another model"
        )
    return tuple(tensor.shape)


def depth(tensors: Mapping[str, Tensor], prefix: str) -> int:
    """Return the layers of an image tower: 24 (ViT-L) where a name has layer 12 or above, else 12 (ViT-B)."""
    later = tuple(f"{prefix}{layer}." for layer in range(12, 24))
    return 24 if any(name.startswith(later) for name in tensors) else 12


def grid_of(positions: int, *, what: str) -> int:
    """Return the patches along one side, from the number of positions: the patches and one for the class."""
    side = math.isqrt(max(positions - 1, 0))
    if side * side + 1 != positions:
        raise ArtifactMismatch(
            f"{what} has {positions} image positions, expected a square number and one"
        )
    return side


def heads_of(width: int) -> int:
    """Return the attention heads of a tower of this width."""
    if width % HEAD:
        raise ArtifactMismatch(
            f"the checkpoint has layers {width} wide, expected a multiple of {HEAD}"
        )
    return width // HEAD


def _pixel_settings(kind: EncoderKind, *, side: int) -> dict[str, Any]:
    """Return ``preprocessor_config.json``: bicubic to ``side``, cropped (CLIP) or squashed (BLIP)."""
    is_clip, square = kind.startswith("clip"), {"height": side, "width": side}
    return {
        "image_processor_type": "CLIPImageProcessor" if is_clip else "BlipImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "resample": 3,  # bicubic
        **({"size": {"shortest_edge": side}, "crop_size": square} if is_clip else {"size": square}),
        "do_center_crop": is_clip,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }


def convert(checkpoint: Checkpoint, kind: EncoderKind) -> EncoderWeights:
    """Check every name, shape and number of a checkpoint, and give the weights our network's names.

    Raises ArtifactMismatch: a tensor is missing, unknown, of another shape, or holds no weights.
    """
    tensors, what = checkpoint.tensors, f"{checkpoint.path} as {kind}"
    config = (
        _blip_config(tensors, what=what)
        if kind == "blip-ff"
        else _clip_config(tensors, kind, what=what)
    )
    network = network_shapes(kind, config)
    expected = checkpoint_shapes(kind, network)
    check_names(tensors, expected, tolerated=_UNUSED[kind], what=what)
    used = single_precision(tensors, expected, what=what)
    return EncoderWeights(
        weights={name: _converted(name, used[_published_name(name, kind)]) for name in network},
        config=config,
        pixels=_pixel_settings(kind, side=config["vision_config"]["image_size"]),
        left_out=tuple(name for name in tensors if is_tolerated(name, _UNUSED[kind])),
    )


def checkpoint_shapes(kind: EncoderKind, network: Shapes) -> Shapes:
    """Return every tensor of a checkpoint that a network with these tensors needs."""
    expected: Shapes = {f"{CLIP}logit_scale": ()} if kind.startswith("clip") else {}
    for name, shape in network.items():
        published = _published_name(name, kind)
        if name in _TRANSPOSED:
            shape = shape[::-1]  # noqa: PLW2901
        elif published.rpartition(".")[2].startswith("in_proj_"):
            shape = (3 * shape[0], *shape[1:])  # noqa: PLW2901
        expected[published] = shape
    return expected


def network_shapes(kind: EncoderKind, config: Mapping[str, Any]) -> Shapes:
    """Return the tensors of the network that will load the weights, which is built without memory."""
    from transformers import CLIPConfig, CLIPModel  # noqa: PLC0415  takes seconds

    with torch.device("meta"):
        network: nn.Module
        match kind:
            case "clip-sf":
                network = CLIPModel(CLIPConfig(**config))
            case "clip-ff":
                network = ClipFusion(config)
            case "blip-ff":
                network = BlipFusion(config)
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


def _published_name(name: str, kind: EncoderKind) -> str:
    """Return the name in the checkpoint of one of our network's tensors."""
    if kind.startswith("blip"):
        return renamed(name, _BLIP_NAMES)
    name = renamed(name, _CLIP_NAMES)
    return name if name.startswith("t5_layers.") else CLIP + name


def _converted(name: str, tensor: Tensor) -> Tensor:
    if name in _TRANSPOSED:
        return tensor.t().contiguous()
    attention = re.search(r"self_attn\.([qkv])_proj\.", name)
    return tensor.chunk(3)["qkv".index(attention[1])] if attention else tensor


def _clip_config(tensors: Mapping[str, Tensor], kind: EncoderKind, *, what: str) -> dict[str, Any]:
    """Read ``config.json`` off the shapes of a few tensors: transformers' CLIPModel, or our ClipFusion."""

    def size(name: str, rank: int = 2) -> tuple[int, ...]:
        return size_of(tensors, name, rank=rank, what=what)

    def tower(prefix: str, layers: int, width: int) -> dict[str, Any]:
        return {
            "hidden_act": ACTIVATION,
            "hidden_size": width,
            "intermediate_size": size(f"{CLIP}{prefix}0.mlp.c_fc.weight")[0],
            "num_attention_heads": heads_of(width),
            "num_hidden_layers": layers,
            "projection_dim": dim,
        }

    context, text = size(f"{CLIP}positional_embedding")
    positions, vision = size(f"{CLIP}visual.positional_embedding")
    dim, patch = size(f"{CLIP}visual.proj")[1], size(f"{CLIP}visual.conv1.weight", 4)[2]
    images = "visual.transformer.resblocks."
    config = {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "dtype": "float32",
        "projection_dim": dim,
        "text_config": {
            **tower("transformer.resblocks.", 12, text),
            "model_type": "clip_text_model",
            "vocab_size": VOCABULARY,
            "max_position_embeddings": context,
            "bos_token_id": START,
            "eos_token_id": CLIP_END,
            "pad_token_id": CLIP_END,
        },
        "vision_config": {
            **tower(images, depth(tensors, CLIP + images), vision),
            "model_type": "clip_vision_model",
            "image_size": patch * grid_of(positions, what=what),
            "patch_size": patch,
        },
    }
    if kind == "clip-sf":
        return config
    first = "t5_layers.block.0.layer."
    buckets, num_heads = size(f"{first}0.SelfAttention.relative_attention_bias.weight")
    inner, width = size(f"{first}0.SelfAttention.q.weight")
    if not text == dim == width:
        raise ArtifactMismatch(
            f"{what}: text tokens are {text} wide, image tokens {dim}, the layers over both {width}; all "
            "three must be equal"
        )
    mixer = {
        "d_model": width,
        "d_kv": inner // num_heads,
        "d_ff": size(f"{first}1.DenseReluDense.wi.weight")[0],
        "num_layers": 2,
        "num_heads": num_heads,
        "relative_attention_num_buckets": buckets,
        **T5_SETTINGS,
    }
    return config | {"architectures": ["ClipFusion"], "mixer_config": mixer}


def _blip_config(tensors: Mapping[str, Tensor], *, what: str) -> dict[str, Any]:
    """Read the settings of BLIP-FF: BERT attends to images."""

    def size(name: str, rank: int = 2) -> tuple[int, ...]:
        return size_of(tensors, name, rank=rank, what=what)

    width, _, patch, _ = size("visual_encoder.patch_embed.proj.weight", 4)
    tokens, text_width = size("text_encoder.embeddings.word_embeddings.weight")
    grid = grid_of(size("visual_encoder.pos_embed", 3)[1], what=what)
    return {
        "architectures": ["BlipFusion"],
        "model_type": "blip",
        "text_config": {
            "vocab_size": tokens,
            "hidden_size": text_width,
            "encoder_hidden_size": width,
            "intermediate_size": size("text_encoder.encoder.layer.0.intermediate.dense.weight")[0],
            "num_hidden_layers": 12,
            "num_attention_heads": heads_of(text_width),
            "max_position_embeddings": size("text_encoder.embeddings.position_embeddings.weight")[
                0
            ],
            **BERT_SETTINGS,
            "is_decoder": True,  # transformers' word for "attends to images"; nothing is decoded
        },
        "vision_config": {
            "hidden_size": width,
            "intermediate_size": size("visual_encoder.blocks.0.mlp.fc1.weight")[0],
            "num_hidden_layers": depth(tensors, "visual_encoder.blocks."),
            "num_attention_heads": heads_of(width),
            "image_size": patch * grid,
            "patch_size": patch,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-6,
        },
        "projection_dim": text_width,
    }


@command
class ImportEncoder:
    """Import one of UniIR's encoders: CLIP-SF, of GENIUS, for uniir:FOLDER; another one for fusion:FOLDER.

    The file is read without running any code in it; every tensor must have its name and shape. CLIP-SF's
    folder opens as an ordinary CLIP in transformers and as clip:FOLDER, too.
    """

    kind: Annotated[EncoderKind, tyro.conf.Positional]
    """Which of the three."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """The checkpoint, as torch.save wrote it (.pth)."""

    out: Path
    """Folder of the encoder."""

    tokenizer: OptionalFolder = None
    """For BLIP: folder with bert-base-uncased's vocabulary, vocab.txt or tokenizer.json."""

    def run(self) -> None:
        """Import the encoder."""
        with TerminalProgress() as progress:
            made = import_encoder(
                self.file, self.kind, self.out, progress=progress, tokenizer=self.tokenizer
            )
            progress.say(f"sha256 of the checkpoint: {made.inputs['checkpoint']}")
            spec = f"{'uniir' if self.kind == 'clip-sf' else 'fusion'}:{self.out}"
            progress.say(f"encoder {made.fingerprint[:12]} is in {self.out}; use it as {spec}")


main = partial(run, ImportEncoder, "published.encoders")


if __name__ == "__main__":
    sys.exit(main())
