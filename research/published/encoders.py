"""``python -m research.published.encoders``: import a checkpoint of UniIR as an encoder's folder.

The weights are mapped from the file, checked by name and shape, renamed and written in single
precision; nothing else in the file is read. For CLIP-SF, the folder is also an ordinary CLIP, for
transformers and for ``clip:FOLDER``.

For BLIP-FF (specification, section 3.5) the file has an image tower (``visual_encoder``) and BERT
(``text_encoder``). Momentum copies (``*_m``), queues and ``temp`` are only for training and are
left out. The names of tensors come from BLIP's code. Their sizes add up to the 7.49 GB of the
published file, but the file itself was not available for a test. BLIP-SF was never published.
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
    replace_parts,
    single_precision,
)
from research.published.clip_tokens import START, VOCABULARY, clip_tokenizer
from research.published.fusions import ARTIFACT as FUSION
from research.published.fusions import MAX_BERT_TOKENS, BlipFusion, ClipFusion

Shapes = dict[str, tuple[int, ...]]
Architecture = Literal["clip-sf", "clip-ff", "blip-ff"]
"""CLIP or BLIP, fused by summing features (score fusion) or by layers (feature fusion)."""

WEIGHTS: Final = "model.safetensors"
HEAD_WIDTH: Final = 64
"""Width of an attention head, in all networks."""
CLIP: Final = "clip_model."
ACTIVATION: Final = "quick_gelu"
"""The activation of OpenAI's CLIP."""
T5_SETTINGS: Final[Mapping[str, Any]] = {
    "vocab_size": 1,
    "eos_token_id": None,
    "is_encoder_decoder": False,
    "use_cache": False,
}
"""Transformers' settings of CLIP-FF's layers, besides sizes and T5's defaults."""
BERT_SETTINGS: Final[Mapping[str, Any]] = {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "bos_token_id": None,
    "eos_token_id": None,
    "sep_token_id": None,
    "use_cache": False,
}
"""Transformers' settings of BLIP's BERT, besides sizes."""
EXTRA_TOKENS: Final = 2
"""BLIP adds [DEC] and [ENC] to BERT's vocabulary; UniIR uses neither."""

_BLIP_TRAINING: Final = (
    re.compile(r"(visual_encoder|text_encoder)_m\..*"),
    re.compile(r"(query|cand|idx|new_ptr)_queue|temp"),
    re.compile(r"text_encoder\.embeddings\.position_ids"),
)
_UNUSED: Final[Mapping[Architecture, tuple[re.Pattern[str], ...]]] = {
    "clip-sf": (),
    "clip-ff": (re.compile(r"t5_layers\.embed_tokens\.weight"),),
    "blip-ff": _BLIP_TRAINING,
}
"""Names of tensors that only training needs."""
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
"""Parts of our network's names -> parts of the checkpoint's names."""
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
    """An encoder from a checkpoint: weights in single precision, with transformers' names."""

    weights: Mapping[str, Tensor]
    config: Mapping[str, Any]
    """The contents of ``config.json``: the architecture."""
    pixels: Mapping[str, Any]
    """The contents of ``preprocessor_config.json``: how images are prepared."""
    left_out: tuple[str, ...]
    """Names of tensors that only training needs: momentum copies, queues, buffers."""


def import_encoder(
    file: Path,
    architecture: Architecture,
    folder: Path,
    *,
    progress: Progress,
    tokenizer: Path | None = None,
) -> Manifest:
    """Convert a checkpoint to a folder, unless it exists already, and return its manifest.

    Raises
    ------
    UsageError
        BLIP's vocabulary is missing, or was given for CLIP; or the folder contains something else.
    ArtifactMissing
        The checkpoint or the vocabulary does not exist.
    ArtifactMismatch
        The checkpoint or the vocabulary differs from the expected one; the message lists how.
    """
    is_blip = architecture.startswith("blip")
    if is_blip and tokenizer is None:
        raise UsageError(
            f"{architecture} reads BERT's tokens; give --tokenizer FOLDER with the vocabulary of "
            "bert-base-uncased"
        )
    if tokenizer is not None and not is_blip:
        raise UsageError(f"{architecture} includes a vocabulary; omit --tokenizer")
    checkpoint = open_checkpoint(file)
    progress.say(
        f"{file}: {file.stat().st_size / 1e9:.2f} GB; checking names, shapes and numbers, hashing"
    )
    encoder = convert(checkpoint, architecture)
    texts = _json_files(encoder, tokenizer)
    inputs = {"checkpoint": file_fingerprint(file), "texts": fingerprint_of(texts)}
    artifact = ARTIFACT if architecture == "clip-sf" else FUSION
    writer = ArtifactWriter(folder, kind=artifact, config={"kind": architecture}, inputs=inputs)
    manifest = writer.finished()
    if manifest is None:
        for name, text in texts.items():
            (writer.path / name).write_text(text)
        write_weights(writer.path / WEIGHTS, encoder.weights, metadata={"format": "pt"})
        manifest = writer.finish(facts={"left_out": list(encoder.left_out)})
    return manifest


def _json_files(encoder: EncoderWeights, tokenizer: Path | None) -> dict[str, str]:
    """Return name and contents of the files besides weights."""
    settings: dict[str, Any]
    if tokenizer is None:
        settings = {
            "bos_token": "<|startoftext|>",
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "unk_token": "<|endoftext|>",
            "model_max_length": encoder.config["text_config"]["max_position_embeddings"],
            "tokenizer_class": "CLIPTokenizer",
        }
        vocabulary = clip_tokenizer()
    else:
        settings = {"model_max_length": MAX_BERT_TOKENS, "tokenizer_class": "BertTokenizer"}
        vocabulary = find_bert_tokenizer(
            tokenizer, rows=encoder.config["text_config"]["vocab_size"]
        )
    return {
        "config.json": json.dumps(encoder.config, indent=2) + "\n",
        "preprocessor_config.json": json.dumps(encoder.pixels, indent=2) + "\n",
        "tokenizer.json": vocabulary.to_str(),
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
    }


def find_bert_tokenizer(folder: Path, *, rows: int) -> Tokenizer:
    """Read a folder's ``tokenizer.json`` or ``vocab.txt``.

    Parameters
    ----------
    rows
        Number of token embeddings in the checkpoint.

    Raises
    ------
    ArtifactMissing
        The folder has neither file.
    ArtifactMismatch
        The file contains no BERT vocabulary, or one of another size.
    """
    from transformers import BertTokenizer  # noqa: PLC0415  takes seconds

    file = folder / "tokenizer.json"
    if not (file.is_file() or (folder / "vocab.txt").is_file()):
        raise ArtifactMissing(
            f"{folder} has neither tokenizer.json nor vocab.txt; give a folder with the vocabulary "
            "of bert-base-uncased"
        )
    if file.is_file():
        tokenizer = read_tokenizer(file)
    else:
        tokenizer = BertTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    missing = [name for name in _BERT_SPECIAL if tokenizer.token_to_id(name) is None]
    if missing or size not in (rows, rows - EXTRA_TOKENS):
        problem = f"lacks {', '.join(missing)}" if missing else f"has {size:,} tokens"
        raise ArtifactMismatch(
            f"the vocabulary in {folder} {problem}, but the checkpoint was trained with "
            f"{rows - EXTRA_TOKENS:,} tokens and two more; give a folder with the vocabulary of "
            "bert-base-uncased"
        )
    return tokenizer


def convert(checkpoint: Checkpoint, architecture: Architecture) -> EncoderWeights:
    """Check every name, shape and number of a checkpoint, and rename its weights.

    Raises
    ------
    ArtifactMismatch
        A tensor is missing, unknown, of another shape, or contains no weights.
    """
    tensors = checkpoint.tensors
    source = f"{checkpoint.path} as {architecture}"
    if architecture == "blip-ff":
        config = _blip_config(tensors, source=source)
    else:
        config = _clip_config(tensors, source=source)
        if architecture == "clip-ff":
            mixer = _mixer_config(tensors, config, source=source)
            config |= {"architectures": ["ClipFusion"], "mixer_config": mixer}
    network = network_shapes(architecture, config)
    expected = checkpoint_shapes(architecture, network)
    unused = _UNUSED[architecture]
    check_names(tensors, expected, tolerated=unused, source=source)
    published = single_precision(tensors, expected, source=source)
    return EncoderWeights(
        weights={
            name: _convert_tensor(name, published[_published_name(name, architecture)])
            for name in network
        },
        config=config,
        pixels=_pixel_settings(architecture, side=config["vision_config"]["image_size"]),
        left_out=tuple(name for name in tensors if is_tolerated(name, unused)),
    )


def checkpoint_shapes(architecture: Architecture, network: Shapes) -> Shapes:
    """Return name and shape of every tensor in a checkpoint of a network with the given tensors."""
    expected: Shapes = {f"{CLIP}logit_scale": ()} if architecture.startswith("clip") else {}
    for name, shape in network.items():
        published = _published_name(name, architecture)
        if name in _TRANSPOSED:
            expected[published] = shape[::-1]
        elif published.rpartition(".")[2].startswith("in_proj_"):
            expected[published] = (3 * shape[0], *shape[1:])
        else:
            expected[published] = shape
    return expected


def network_shapes(architecture: Architecture, config: Mapping[str, Any]) -> Shapes:
    """Return name and shape of the tensors of our network, which is built without memory."""
    from transformers import CLIPConfig, CLIPModel  # noqa: PLC0415  takes seconds

    with torch.device("meta"):
        network: nn.Module
        match architecture:
            case "clip-sf":
                network = CLIPModel(CLIPConfig(**config))
            case "clip-ff":
                network = ClipFusion(config)
            case "blip-ff":
                network = BlipFusion(config)
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


def _published_name(name: str, architecture: Architecture) -> str:
    """Return the checkpoint's name of one of our network's tensors."""
    if architecture.startswith("blip"):
        return replace_parts(name, _BLIP_NAMES)
    name = replace_parts(name, _CLIP_NAMES)
    return name if name.startswith("t5_layers.") else CLIP + name


def _convert_tensor(name: str, tensor: Tensor) -> Tensor:
    """Return a checkpoint's tensor as our network stores it: transposed, or one of q, k and v."""
    if name in _TRANSPOSED:
        return tensor.t().contiguous()
    attention = re.search(r"self_attn\.([qkv])_proj\.", name)
    return tensor.chunk(3)["qkv".index(attention[1])] if attention else tensor


def _pixel_settings(architecture: Architecture, *, side: int) -> dict[str, Any]:
    """Return ``preprocessor_config.json``: images are cropped for CLIP, squashed for BLIP."""
    is_clip = architecture.startswith("clip")
    square = {"height": side, "width": side}
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


def _clip_config(tensors: Mapping[str, Tensor], *, source: str) -> dict[str, Any]:
    """Read the settings of transformers' CLIPModel from the shapes of a few tensors."""

    def shape(name: str, rank: int = 2) -> tuple[int, ...]:
        return shape_of(tensors, name, rank=rank, source=source)

    def tower(prefix: str, layers: int, width: int) -> dict[str, Any]:
        return {
            "hidden_act": ACTIVATION,
            "hidden_size": width,
            "intermediate_size": shape(f"{CLIP}{prefix}0.mlp.c_fc.weight")[0],
            "num_attention_heads": num_heads(width, source=source),
            "num_hidden_layers": layers,
            "projection_dim": dim,
        }

    context, text_width = shape(f"{CLIP}positional_embedding")
    positions, image_width = shape(f"{CLIP}visual.positional_embedding")
    dim = shape(f"{CLIP}visual.proj")[1]
    patch = shape(f"{CLIP}visual.conv1.weight", 4)[2]
    image_layers = "visual.transformer.resblocks."
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "dtype": "float32",
        "projection_dim": dim,
        "text_config": {
            **tower("transformer.resblocks.", 12, text_width),
            "model_type": "clip_text_model",
            "vocab_size": VOCABULARY,
            "max_position_embeddings": context,
            "bos_token_id": START,
            "eos_token_id": CLIP_END,
            "pad_token_id": CLIP_END,
        },
        "vision_config": {
            **tower(image_layers, num_layers(tensors, CLIP + image_layers), image_width),
            "model_type": "clip_vision_model",
            "image_size": patch * grid_side(positions, source=source),
            "patch_size": patch,
        },
    }


def _mixer_config(
    tensors: Mapping[str, Tensor], clip_config: Mapping[str, Any], *, source: str
) -> dict[str, Any]:
    """Read the settings of CLIP-FF's T5 layers, which mix text tokens and image tokens."""

    def shape(name: str) -> tuple[int, ...]:
        return shape_of(tensors, f"t5_layers.block.0.layer.{name}.weight", source=source)

    buckets, heads = shape("0.SelfAttention.relative_attention_bias")
    attention_width, width = shape("0.SelfAttention.q")
    text_width = clip_config["text_config"]["hidden_size"]
    image_width = clip_config["projection_dim"]
    if not text_width == image_width == width:
        raise ArtifactMismatch(
            f"{source}: the widths of text tokens ({text_width}), image tokens ({image_width}) and "
            f"the layers that mix them ({width}) must be equal"
        )
    return {
        "d_model": width,
        "d_kv": attention_width // heads,
        "d_ff": shape("1.DenseReluDense.wi")[0],
        "num_layers": 2,
        "num_heads": heads,
        "relative_attention_num_buckets": buckets,
        **T5_SETTINGS,
    }


def _blip_config(tensors: Mapping[str, Tensor], *, source: str) -> dict[str, Any]:
    """Read the settings of BLIP-FF, whose BERT attends to images."""

    def shape(name: str, rank: int = 2) -> tuple[int, ...]:
        return shape_of(tensors, name, rank=rank, source=source)

    width, _, patch, _ = shape("visual_encoder.patch_embed.proj.weight", 4)
    tokens, text_width = shape("text_encoder.embeddings.word_embeddings.weight")
    max_tokens = shape("text_encoder.embeddings.position_embeddings.weight")[0]
    grid = grid_side(shape("visual_encoder.pos_embed", 3)[1], source=source)
    return {
        "architectures": ["BlipFusion"],
        "model_type": "blip",
        "text_config": {
            "vocab_size": tokens,
            "hidden_size": text_width,
            "encoder_hidden_size": width,
            "intermediate_size": shape("text_encoder.encoder.layer.0.intermediate.dense.weight")[0],
            "num_hidden_layers": 12,
            "num_attention_heads": num_heads(text_width, source=source),
            "max_position_embeddings": max_tokens,
            **BERT_SETTINGS,
            "is_decoder": True,  # makes BERT attend to images; nothing is decoded
        },
        "vision_config": {
            "hidden_size": width,
            "intermediate_size": shape("visual_encoder.blocks.0.mlp.fc1.weight")[0],
            "num_hidden_layers": num_layers(tensors, "visual_encoder.blocks."),
            "num_attention_heads": num_heads(width, source=source),
            "image_size": patch * grid,
            "patch_size": patch,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-6,
        },
        "projection_dim": text_width,
    }


def shape_of(
    tensors: Mapping[str, Tensor], name: str, *, rank: int = 2, source: str
) -> tuple[int, ...]:
    """Return the shape of a tensor; ArtifactMismatch if it is missing, empty or of another rank."""
    tensor = tensors.get(name)
    if tensor is None or tensor.dim() != rank or 0 in tensor.shape:
        problem = "it is missing" if tensor is None else f"its shape is {tuple(tensor.shape)}"
        raise ArtifactMismatch(
            f"{source} needs a tensor {name} with {rank} dimensions, but {problem}; this is "
            "another model"
        )
    return tuple(tensor.shape)


def num_layers(tensors: Mapping[str, Tensor], prefix: str) -> int:
    """Return the number of layers of an image tower: 24 (ViT-L) or 12 (ViT-B)."""
    later_layers = tuple(f"{prefix}{layer}." for layer in range(12, 24))
    return 24 if any(name.startswith(later_layers) for name in tensors) else 12


def num_heads(width: int, *, source: str) -> int:
    """Return the number of attention heads of a tower; ArtifactMismatch for an impossible width."""
    if width % HEAD_WIDTH:
        raise ArtifactMismatch(
            f"{source} has layers of width {width}, expected a multiple of {HEAD_WIDTH}"
        )
    return width // HEAD_WIDTH


def grid_side(positions: int, *, source: str) -> int:
    """Return the number of patches in a row of the image.

    Positions are those of all patches, and one for the class.
    """
    side = math.isqrt(max(positions - 1, 0))
    if side * side + 1 != positions:
        raise ArtifactMismatch(
            f"{source} has {positions} image positions, expected a square number plus one"
        )
    return side


@command
class ImportEncoder:
    """Import one of UniIR's encoders: CLIP-SF as uniir:FOLDER, CLIP-FF or BLIP-FF as fusion:FOLDER.

    GENIUS was trained on CLIP-SF. The file is read without executing code in it; every tensor must
    have the expected name and shape. The folder of CLIP-SF also opens as an ordinary CLIP in
    transformers and as clip:FOLDER.
    """

    kind: Annotated[Architecture, tyro.conf.Positional]
    """Architecture of the encoder."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """The checkpoint, a file of torch.save (.pth)."""

    out: Path
    """Folder of the encoder."""

    tokenizer: OptionalFolder = None
    """For BLIP: folder with bert-base-uncased's vocabulary, vocab.txt or tokenizer.json."""

    def run(self) -> None:
        """Import the encoder."""
        with TerminalProgress() as progress:
            manifest = import_encoder(
                self.file, self.kind, self.out, progress=progress, tokenizer=self.tokenizer
            )
            progress.say(f"sha256 of the checkpoint: {manifest.inputs['checkpoint']}")
            spec = f"{'uniir' if self.kind == 'clip-sf' else 'fusion'}:{self.out}"
            progress.say(f"encoder {manifest.fingerprint[:12]} is in {self.out}; use it as {spec}")


main = partial(run, ImportEncoder, "published.encoders")


if __name__ == "__main__":
    sys.exit(main())
