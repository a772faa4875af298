"""``genius import clip-sf`` and its kin: a checkpoint of UniIR becomes a folder for ``uniir:FOLDER``.

The weights are mapped from the file, checked by name and shape, renamed and written in single precision;
nothing else of the file is read. For CLIP-SF the folder is an ordinary CLIP too, for transformers and for
``clip:FOLDER``.

For BLIP (specification, section 3.5) the file has an image tower (``visual_encoder``), BERT
(``text_encoder``), and for score fusion two projections. Momentum copies (``*_m``), queues and ``temp``
serve training only and are left out. Names of single tensors are those of BLIP's own code. For BLIP-FF
their sizes add up to the published file's 7.49 GB, but the file itself could not be opened for a test.
BLIP-SF was never published.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from genius_search.artifact import ArtifactWriter, file_fingerprint, fingerprint_of, write_json
from genius_search.config import EncoderKind
from genius_search.encoders.clip_tokens import END, START, VOCABULARY, stored_tokenizer
from genius_search.encoders.uniir import (
    ACTIVATION,
    ARTIFACT,
    BERT_SETTINGS,
    DESCRIPTION,
    FORMAT,
    MAX_BERT_TOKENS,
    T5_LAYERS,
    T5_SETTINGS,
    read_tokenizer,
)
from genius_search.errors import ArtifactMismatch, ArtifactMissing, UsageError
from genius_search.lab.published.checkpoint import (
    Checkpoint,
    check_names,
    is_tolerated,
    open_checkpoint,
    single_precision,
)
from genius_search.nn.weights import write_weights
from genius_search.progress import Progress

Shapes = dict[str, tuple[int, ...]]

WEIGHTS: Final = "model.safetensors"
PUBLISHED: Final[Mapping[str, str]] = {
    "clip-sf": "5e459b96e1ca6f3060372a136c91c8c3369eee3c77ede3fad6c35599ce701c4d"
}
"""SHA-256 of the authors' file, where it is known."""
HEAD: Final = 64
"""Numbers per attention head, in all of them."""
CLIP: Final = "clip_model."
CLIP_TEXT_LAYERS: Final = 12
LARGEST_SCALE: Final = 100.0
"""CLIP's own limit of exp(logit_scale); fine-tuning drifts a little above it."""
MIXER: Final = "t5_layers."
VISION: Final = "visual_encoder."
TEXT: Final = "text_encoder."
BLIP_TEXT_LAYERS: Final = 12
EXTRA_TOKENS: Final = 2
"""BLIP adds [DEC] and [ENC] to BERT's vocabulary; UniIR reads neither."""

_BIAS: Final = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
_UNUSED: Final[Mapping[EncoderKind, tuple[re.Pattern[str], ...]]] = {
    "clip-sf": (),
    "clip-ff": (re.compile(r"t5_layers\.embed_tokens\.weight"),),
    "blip-ff": (
        re.compile(r"(visual_encoder|text_encoder|vision_proj|text_proj)_m\..*"),
        re.compile(r"(query|cand|idx|new_ptr)_queue|temp"),
        re.compile(r"text_encoder\.embeddings\.position_ids"),
    ),
}
"""Tensors that only training needs."""
_CROSS_ATTENTION: Final = re.compile(r"text_encoder\.encoder\.layer\.\d+\.crossattention\..*")
_CLIP_BLOCK: Final = {
    "attn.out_proj": "self_attn.out_proj",
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
_CLIP_NORMS: Final = {
    "ln_final": "text_model.final_layer_norm",
    "visual.ln_pre": "vision_model.pre_layrnorm",
    "visual.ln_post": "vision_model.post_layernorm",
}
_CLIP_TENSORS: Final = {
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
}
_BLIP_BLOCK: Final = {
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "attn.qkv": "self_attn.qkv",
    "attn.proj": "self_attn.projection",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
_BLIP_MODULES: Final = {
    "cls_token": "embeddings.class_embedding",
    "pos_embed": "embeddings.position_embedding",
    "norm": "post_layernorm",
    "patch_embed.proj": "embeddings.patch_embedding",
}
_BERT_SPECIAL: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """An encoder taken from a checkpoint: weights in single precision, under transformers' names."""

    weights: Mapping[str, Tensor]
    config: Mapping[str, Any]
    """The contents of ``config.json``: the architecture."""
    pixels: Mapping[str, Any]
    """The contents of ``preprocessor_config.json``: how images are prepared."""
    tokens: int
    """Rows of the token table."""
    used: int
    """Tensors of the checkpoint that were needed."""
    left_out: tuple[str, ...]
    """Names of those that were not: momentum copies, queues, buffers."""
    remarks: tuple[str, ...] = ()
    """Warnings about the weights."""


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint that fits, and what an import of it would write."""

    sha256: str
    published: bool | None
    """Whether it is the authors' own file; None where that file's hash is not known."""
    weights: EncoderWeights
    texts: Mapping[str, str]
    """The small files to be written: settings and vocabulary."""

    @property
    def files(self) -> dict[str, int]:
        """Name and bytes of each file to be written; two short descriptions come on top."""
        weights = sum(tensor.nbytes for tensor in self.weights.weights.values())
        return {WEIGHTS: weights} | {name: len(text.encode()) for name, text in self.texts.items()}


@dataclass(frozen=True, slots=True)
class ImportedEncoder:
    """A finished folder."""

    folder: Path
    source: Source
    fingerprint: str
    """The fingerprint of the folder's manifest."""


def look(checkpoint: Checkpoint, kind: EncoderKind, *, tokenizer: Path | None = None) -> Source:
    """Check every name, shape and number of a checkpoint, and return what an import would write.

    Raises
    ------
    UsageError
        BLIP's vocabulary is needed and not given, or given and not needed.
    ArtifactMissing, ArtifactMismatch
        The checkpoint or the vocabulary is not what it should be; the message lists what differs.
    """
    is_blip = kind.startswith("blip")
    if is_blip and tokenizer is None:
        raise UsageError(
            f"{kind} reads BERT's tokens; give --tokenizer FOLDER with bert-base-uncased's vocabulary"
        )
    if tokenizer is not None and not is_blip:
        raise UsageError(f"{kind} brings its own vocabulary; leave --tokenizer out")
    weights = convert_blip(checkpoint, kind) if is_blip else convert_clip(checkpoint, kind)
    sha256 = file_fingerprint(checkpoint.path)
    known = PUBLISHED.get(kind)
    return Source(
        sha256, None if known is None else sha256 == known, weights, _small_files(weights, tokenizer)
    )


def import_encoder(
    file: Path, kind: EncoderKind, folder: Path, *, progress: Progress, tokenizer: Path | None = None
) -> ImportedEncoder:
    """Turn a checkpoint into a folder; one that is there already and came from the same file is kept.

    Raises
    ------
    UsageError
        As in :func:`look`, or the folder holds something else.
    ArtifactMissing, ArtifactMismatch
        As in :func:`look`.
    """
    checkpoint = open_checkpoint(file)
    progress.say(f"{file}: {checkpoint.bytes / 1e9:.2f} GB; checking names, shapes and numbers, hashing")
    source = look(checkpoint, kind, tokenizer=tokenizer)
    for remark in source.weights.remarks:
        progress.say(f"WARNING: {remark}")
    inputs = {"checkpoint": source.sha256, "texts": fingerprint_of(dict(source.texts))}
    writer = ArtifactWriter(folder, kind=ARTIFACT, config={"kind": kind}, inputs=inputs)
    manifest = writer.finished()
    if manifest is None:
        for name, text in source.texts.items():
            (writer.path / name).write_text(text)
        progress.say(f"writing {source.files[WEIGHTS] / 1e9:.2f} GB of weights")
        write_weights(writer.path / WEIGHTS, source.weights.weights, metadata={"format": "pt"})
        description = {
            "format": FORMAT,
            "kind": kind,
            "source": {"bytes": checkpoint.bytes, "sha256": source.sha256, "published": source.published},
            "left_out": list(source.weights.left_out),
        }
        write_json(writer.path / DESCRIPTION, description)
        manifest = writer.finish()
    return ImportedEncoder(folder, source, manifest.fingerprint)


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
        vocabulary = stored_tokenizer()
    else:
        settings = {"model_max_length": MAX_BERT_TOKENS, "tokenizer_class": "BertTokenizer"}
        vocabulary = find_bert_tokenizer(tokenizer, rows=weights.tokens)
    return {
        "config.json": json.dumps(weights.config, indent=2) + "\n",
        "preprocessor_config.json": json.dumps(weights.pixels, indent=2) + "\n",
        "tokenizer.json": vocabulary.to_str(),
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
    }


def find_bert_tokenizer(folder: Path, *, rows: int) -> Tokenizer:
    """Read a folder's ``tokenizer.json`` or ``vocab.txt`` and check that a checkpoint's ``rows`` fit it.

    Raises
    ------
    ArtifactMissing
        The folder has neither.
    ArtifactMismatch
        The file holds no BERT vocabulary, or one of another size.
    """
    ready, words_file = folder / "tokenizer.json", folder / "vocab.txt"
    if not (ready.is_file() or words_file.is_file()):
        raise ArtifactMissing(
            f"{folder} has neither tokenizer.json nor vocab.txt; give one with bert-base-uncased's vocabulary"
        )
    tokenizer = read_tokenizer(ready) if ready.is_file() else _bert_tokenizer(words_file)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    missing = [name for name in _BERT_SPECIAL if tokenizer.token_to_id(name) is None]
    if missing or size not in (rows, rows - EXTRA_TOKENS):
        problem = f"lacks {', '.join(missing)}" if missing else f"has {size:,} tokens"
        raise ArtifactMismatch(
            f"the vocabulary in {folder} {problem}, and the checkpoint was trained with "
            f"{rows - EXTRA_TOKENS:,} and two more; give a folder with bert-base-uncased's vocabulary"
        )
    return tokenizer


def _bert_tokenizer(file: Path) -> Tokenizer:
    words = {word: number for number, word in enumerate(file.read_text().splitlines())}
    tokenizer = Tokenizer(WordPiece(words, unk_token="[UNK]"))  # noqa: S106
    tokenizer.normalizer = BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in _BERT_SPECIAL if name in words])
    if {"[CLS]", "[SEP]"} <= words.keys():
        ends = [(name, words[name]) for name in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return tokenizer


def size_of(tensors: Mapping[str, Tensor], name: str, *, rank: int = 2, what: str) -> tuple[int, ...]:
    """Return the shape of a tensor that tells a size; raise :class:`ArtifactMismatch` where it cannot."""
    tensor = tensors.get(name)
    if tensor is None or tensor.dim() != rank:
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
        raise ArtifactMismatch(f"{what} has {positions} image positions, expected a square number and one")
    return side


def heads_of(width: int) -> int:
    """Return the attention heads of a tower of this width."""
    if width % HEAD:
        raise ArtifactMismatch(f"the checkpoint has layers {width} wide, expected a multiple of {HEAD}")
    return width // HEAD


def pixel_settings(processor: str, *, side: int, squash: bool) -> dict[str, Any]:
    """Return ``preprocessor_config.json``: bicubic to ``side``, squashed or cropped, CLIP's normalisation."""
    square = {"height": side, "width": side}
    crop = {"size": square} if squash else {"size": {"shortest_edge": side}, "crop_size": square}
    return {
        "image_processor_type": processor,
        "do_convert_rgb": True,
        "do_resize": True,
        "resample": 3,  # bicubic
        **crop,
        "do_center_crop": not squash,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }


class Tower(NamedTuple):
    """One transformer of a CLIP: of texts or of images."""

    theirs: str
    """The prefix of its layers' names in the checkpoint."""
    ours: str
    """The prefix in transformers."""
    layers: int
    width: int
    hidden: int


class ClipArchitecture(NamedTuple):
    """The sizes of a CLIP."""

    text: Tower
    vision: Tower
    dim: int
    context: int
    patch: int
    grid: int


def convert_clip(checkpoint: Checkpoint, kind: EncoderKind) -> EncoderWeights:
    """Check every name, shape and number of CLIP-SF or CLIP-FF, and give the weights transformers' names.

    Raises
    ------
    ArtifactMismatch
        A tensor is missing, unknown, of another shape, or holds no weights.
    """
    tensors, what = checkpoint.tensors, f"{checkpoint.path} as {kind}"
    sizes = clip_architecture(tensors, what=what)
    expected, config = clip_shapes(sizes), clip_config(sizes)
    if kind == "clip-sf":
        expected[f"{CLIP}text_projection"] = (sizes.text.width, sizes.dim)
    else:
        mixer = _mixer_config(tensors, what=what)
        if not sizes.text.width == sizes.dim == mixer["d_model"]:
            raise ArtifactMismatch(
                f"{what}: text tokens are {sizes.text.width} wide, image tokens {sizes.dim}, the "
                f"layers over both {mixer['d_model']}; all three must be equal"
            )
        expected |= mixer_shapes(mixer)
        config |= {"architectures": ["ClipFusion"], "mixer_config": mixer}
    check_names(tensors, expected, tolerated=_UNUSED[kind], what=what)
    used = single_precision(tensors, expected, what=what)
    clip = {name.removeprefix(CLIP): tensor for name, tensor in used.items() if name.startswith(CLIP)}
    weights = clip_weights(clip, sizes)
    if kind == "clip-sf":
        weights["logit_scale"] = clip["logit_scale"]
        weights["text_projection.weight"] = clip["text_projection"].t().contiguous()
    weights |= {name.replace(MIXER, "mixer."): used[name] for name in used if name.startswith(MIXER)}
    scale = float(clip["logit_scale"].exp())
    remark = (
        f"exp(logit_scale) is {scale:.4g}, and CLIP's lies between 1 and {LARGEST_SCALE:g}: the file may be "
        "damaged, or its training went wrong"
    )
    return EncoderWeights(
        weights=weights,
        config=config,
        pixels=pixel_settings("CLIPImageProcessor", side=sizes.patch * sizes.grid, squash=False),
        tokens=VOCABULARY,
        used=len(expected),
        left_out=tuple(name for name in tensors if is_tolerated(name, _UNUSED[kind])),
        remarks=() if 1.0 <= scale <= 1.1 * LARGEST_SCALE else (remark,),
    )


def clip_architecture(tensors: Mapping[str, Tensor], *, what: str) -> ClipArchitecture:
    """Read the sizes off the shapes of a few tensors."""

    def size(name: str, rank: int = 2) -> tuple[int, ...]:
        return size_of(tensors, CLIP + name, rank=rank, what=what)

    def tower(theirs: str, ours: str, layers: int, width: int) -> Tower:
        return Tower(theirs, ours, layers, width, size(f"{theirs}0.mlp.c_fc.weight")[0])

    layers = depth(tensors, f"{CLIP}visual.transformer.resblocks.")
    context, text = size("positional_embedding")
    positions, vision = size("visual.positional_embedding")
    return ClipArchitecture(
        text=tower("transformer.resblocks.", "text_model.encoder.layers.", CLIP_TEXT_LAYERS, text),
        vision=tower("visual.transformer.resblocks.", "vision_model.encoder.layers.", layers, vision),
        dim=size("visual.proj")[1],
        context=context,
        patch=size("visual.conv1.weight", 4)[2],
        grid=grid_of(positions, what=what),
    )


def clip_shapes(sizes: ClipArchitecture) -> Shapes:
    """Return every tensor of a checkpoint's CLIP but ``text_projection``, which CLIP-FF lacks."""
    text, vision, dim, context, patch, side = sizes
    shapes: Shapes = {
        "logit_scale": (),
        "token_embedding.weight": (VOCABULARY, text.width),
        "positional_embedding": (context, text.width),
        "visual.class_embedding": (vision.width,),
        "visual.positional_embedding": (side * side + 1, vision.width),
        "visual.conv1.weight": (vision.width, 3, patch, patch),
        "visual.proj": (vision.width, dim),
        **_norm("ln_final", text.width),
        **_norm("visual.ln_pre", vision.width),
        **_norm("visual.ln_post", vision.width),
    }
    for tower in (text, vision):
        width, hidden = tower.width, tower.hidden
        block: Shapes = {
            "attn.in_proj_weight": (3 * width, width),
            "attn.in_proj_bias": (3 * width,),
            **_linear("attn.out_proj", width, width),
            **_linear("mlp.c_fc", hidden, width),
            **_linear("mlp.c_proj", width, hidden),
            **_norm("ln_1", width),
            **_norm("ln_2", width),
        }
        shapes |= {
            f"{tower.theirs}{layer}.{name}": shape
            for layer in range(tower.layers)
            for name, shape in block.items()
        }
    return {CLIP + name: shape for name, shape in shapes.items()}


def clip_weights(clip: Mapping[str, Tensor], sizes: ClipArchitecture) -> dict[str, Tensor]:
    """Return the two towers and the image projection under transformers' names."""
    weights = {ours: clip[theirs] for theirs, ours in _CLIP_TENSORS.items()}
    weights["visual_projection.weight"] = clip["visual.proj"].t().contiguous()
    modules = dict(_CLIP_NORMS)
    for tower in (sizes.text, sizes.vision):
        for layer in range(tower.layers):
            theirs, ours = f"{tower.theirs}{layer}.", f"{tower.ours}{layer}."
            modules |= {theirs + name: ours + renamed for name, renamed in _CLIP_BLOCK.items()}
            for part in ("weight", "bias"):
                joined = clip[f"{theirs}attn.in_proj_{part}"]
                for name, third in zip("qkv", joined.chunk(3), strict=True):
                    weights[f"{ours}self_attn.{name}_proj.{part}"] = third
    return weights | {
        f"{ours}.{part}": clip[f"{theirs}.{part}"]
        for theirs, ours in modules.items()
        for part in ("weight", "bias")
    }


def clip_config(sizes: ClipArchitecture) -> dict[str, Any]:
    """Return ``config.json`` of transformers' CLIPModel."""
    text, vision, dim, context, patch, side = sizes

    def tower(sized: Tower) -> dict[str, Any]:
        return {
            "hidden_act": ACTIVATION,
            "hidden_size": sized.width,
            "intermediate_size": sized.hidden,
            "num_attention_heads": heads_of(sized.width),
            "num_hidden_layers": sized.layers,
            "projection_dim": dim,
        }

    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "dtype": "float32",
        "projection_dim": dim,
        "text_config": {
            **tower(text),
            "model_type": "clip_text_model",
            "vocab_size": VOCABULARY,
            "max_position_embeddings": context,
            "bos_token_id": START,
            "eos_token_id": END,
            "pad_token_id": END,
        },
        "vision_config": {
            **tower(vision),
            "model_type": "clip_vision_model",
            "image_size": patch * side,
            "patch_size": patch,
        },
    }


def _mixer_config(tensors: Mapping[str, Tensor], *, what: str) -> dict[str, Any]:
    """Read the settings of the T5 layers off the shapes of a few tensors."""
    first = f"{MIXER}block.0.layer."
    buckets, num_heads = size_of(tensors, MIXER + _BIAS, what=what)
    inner, width = size_of(tensors, f"{first}0.SelfAttention.q.weight", what=what)
    hidden, _ = size_of(tensors, f"{first}1.DenseReluDense.wi.weight", what=what)
    return {
        "d_model": width,
        "d_kv": inner // num_heads,
        "d_ff": hidden,
        "num_layers": T5_LAYERS,
        "num_heads": num_heads,
        "relative_attention_num_buckets": buckets,
        **T5_SETTINGS,
    }


def mixer_shapes(config: Mapping[str, Any]) -> Shapes:
    """Return every tensor of the T5 layers."""
    width, hidden, inner = config["d_model"], config["d_ff"], config["d_kv"] * config["num_heads"]
    shapes: Shapes = {
        _BIAS: (config["relative_attention_num_buckets"], config["num_heads"]),
        "final_layer_norm.weight": (width,),
    }
    for layer in range(T5_LAYERS):
        attention, dense = f"block.{layer}.layer.0", f"block.{layer}.layer.1"
        shapes |= {f"{attention}.SelfAttention.{name}.weight": (inner, width) for name in "qkv"}
        shapes |= {
            f"{attention}.SelfAttention.o.weight": (width, inner),
            f"{attention}.layer_norm.weight": (width,),
            f"{dense}.DenseReluDense.wi.weight": (hidden, width),
            f"{dense}.DenseReluDense.wo.weight": (width, hidden),
            f"{dense}.layer_norm.weight": (width,),
        }
    return {MIXER + name: shape for name, shape in shapes.items()}


class BlipArchitecture(NamedTuple):
    """The sizes of a BLIP."""

    layers: int
    width: int
    hidden: int
    patch: int
    grid: int
    text_width: int
    text_hidden: int
    tokens: int
    positions: int


def convert_blip(checkpoint: Checkpoint, kind: EncoderKind) -> EncoderWeights:
    """Convert BLIP-SF (two projected towers) or BLIP-FF (BERT attends to images) as :func:`convert_clip`."""
    tensors, what = checkpoint.tensors, f"{checkpoint.path} as {kind}"
    sizes = blip_architecture(tensors, what=what)
    fused = kind == "blip-ff"
    expected = blip_shapes(sizes, fused=fused)
    dim = sizes.text_width
    tolerated = _UNUSED["blip-ff"]
    if not fused:
        dim, _ = size_of(tensors, "vision_proj.weight", what=what)
        expected |= _linear("vision_proj", dim, sizes.width) | _linear("text_proj", dim, sizes.text_width)
        # For score fusion BERT's attention to images is in the file, frozen and unused.
        tolerated = (*tolerated, _CROSS_ATTENTION)
    check_names(tensors, expected, tolerated=tolerated, what=what)
    used = single_precision(tensors, expected, what=what)
    return EncoderWeights(
        weights={_blip_name(name): tensor for name, tensor in used.items()},
        config={**_blip_config(sizes, fused=fused), "projection_dim": dim},
        pixels=pixel_settings("BlipImageProcessor", side=sizes.patch * sizes.grid, squash=True),
        tokens=sizes.tokens,
        used=len(expected),
        left_out=tuple(name for name in tensors if is_tolerated(name, tolerated)),
    )


def blip_architecture(tensors: Mapping[str, Tensor], *, what: str) -> BlipArchitecture:
    """Read the sizes off the shapes of a few tensors."""

    def size(name: str, rank: int = 2) -> tuple[int, ...]:
        return size_of(tensors, name, rank=rank, what=what)

    width, _, patch, _ = size(f"{VISION}patch_embed.proj.weight", 4)
    tokens, text_width = size(f"{TEXT}embeddings.word_embeddings.weight")
    return BlipArchitecture(
        layers=depth(tensors, f"{VISION}blocks."),
        width=width,
        hidden=size(f"{VISION}blocks.0.mlp.fc1.weight")[0],
        patch=patch,
        grid=grid_of(size(f"{VISION}pos_embed", 3)[1], what=what),
        text_width=text_width,
        text_hidden=size(f"{TEXT}encoder.layer.0.intermediate.dense.weight")[0],
        tokens=tokens,
        positions=size(f"{TEXT}embeddings.position_embeddings.weight")[0],
    )


def blip_shapes(sizes: BlipArchitecture, *, fused: bool) -> Shapes:
    """Return every tensor that encodes, but the projections of score fusion."""
    width, hidden, patch = sizes.width, sizes.hidden, sizes.patch
    shapes: Shapes = {
        f"{VISION}cls_token": (1, 1, width),
        f"{VISION}pos_embed": (1, sizes.grid**2 + 1, width),
        f"{VISION}patch_embed.proj.weight": (width, 3, patch, patch),
        f"{VISION}patch_embed.proj.bias": (width,),
        **_norm(f"{VISION}norm", width),
    }
    for layer in range(sizes.layers):
        block = f"{VISION}blocks.{layer}."
        shapes |= _norm(f"{block}norm1", width) | _norm(f"{block}norm2", width)
        shapes |= _linear(f"{block}attn.qkv", 3 * width, width) | _linear(f"{block}attn.proj", width, width)
        shapes |= _linear(f"{block}mlp.fc1", hidden, width) | _linear(f"{block}mlp.fc2", width, hidden)
    width, hidden = sizes.text_width, sizes.text_hidden
    shapes |= {
        f"{TEXT}embeddings.word_embeddings.weight": (sizes.tokens, width),
        f"{TEXT}embeddings.position_embeddings.weight": (sizes.positions, width),
        **_norm(f"{TEXT}embeddings.LayerNorm", width),
    }
    if fused:
        shapes |= _linear(f"{TEXT}pooler.dense", width, width)
    for layer in range(BLIP_TEXT_LAYERS):
        block = f"{TEXT}encoder.layer.{layer}."
        shapes |= _attention(f"{block}attention.", width, keys=width)
        if fused:
            shapes |= _attention(f"{block}crossattention.", width, keys=sizes.width)
        shapes |= _linear(f"{block}intermediate.dense", hidden, width)
        shapes |= _linear(f"{block}output.dense", width, hidden) | _norm(f"{block}output.LayerNorm", width)
    return shapes


def _attention(prefix: str, width: int, *, keys: int) -> Shapes:
    return {
        **_linear(f"{prefix}self.query", width, width),
        **_linear(f"{prefix}self.key", width, keys),
        **_linear(f"{prefix}self.value", width, keys),
        **_linear(f"{prefix}output.dense", width, width),
        **_norm(f"{prefix}output.LayerNorm", width),
    }


def _linear(name: str, outputs: int, inputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _blip_name(name: str) -> str:
    """Return transformers' name of a tensor; its BERT has BLIP's own names."""
    if not name.startswith(VISION):
        return name
    rest = name.removeprefix(VISION)
    if rest in _BLIP_MODULES:
        return f"vision_model.{_BLIP_MODULES[rest]}"
    module, _, part = rest.rpartition(".")
    if module in _BLIP_MODULES:
        return f"vision_model.{_BLIP_MODULES[module]}.{part}"
    _, layer, inside = module.split(".", 2)
    return f"vision_model.encoder.layers.{layer}.{_BLIP_BLOCK[inside]}.{part}"


def _blip_config(sizes: BlipArchitecture, *, fused: bool) -> dict[str, Any]:
    return {
        "architectures": ["BlipFusion" if fused else "BlipTowers"],
        "model_type": "blip",
        "text_config": {
            "vocab_size": sizes.tokens,
            "hidden_size": sizes.text_width,
            "encoder_hidden_size": sizes.width,
            "intermediate_size": sizes.text_hidden,
            "num_hidden_layers": BLIP_TEXT_LAYERS,
            "num_attention_heads": heads_of(sizes.text_width),
            "max_position_embeddings": sizes.positions,
            **BERT_SETTINGS,
            "is_decoder": fused,  # transformers' word for "attends to images"; nothing is decoded
        },
        "vision_config": {
            "hidden_size": sizes.width,
            "intermediate_size": sizes.hidden,
            "num_hidden_layers": sizes.layers,
            "num_attention_heads": heads_of(sizes.width),
            "image_size": sizes.patch * sizes.grid,
            "patch_size": sizes.patch,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-6,
        },
    }
