"""``genius import clip-sf`` and its kin: a checkpoint of UniIR becomes a folder for ``uniir:FOLDER``.

The weights are mapped from the file, renamed and written in single precision; nothing else of the file is
read. For CLIP-SF the folder is an ordinary CLIP too, for transformers and for ``clip:FOLDER``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from genius_search.artifact import ArtifactWriter, file_fingerprint, fingerprint_of, write_json
from genius_search.config import EncoderKind
from genius_search.encoders import uniir_weights as blip
from genius_search.encoders import uniir_weights as clip_ff
from genius_search.encoders import uniir_weights as clip_sf
from genius_search.encoders.pickles import Checkpoint, open_checkpoint
from genius_search.encoders.uniir import ARTIFACT, DESCRIPTION, FORMAT
from genius_search.encoders.uniir_blip import find_bert_tokenizer
from genius_search.encoders.uniir_clip import stored_tokenizer
from genius_search.encoders.uniir_weights import EncoderWeights
from genius_search.errors import UsageError
from genius_search.nn.weights import write_weights
from genius_search.progress import Progress

__all__ = ["ImportedEncoder", "Source", "import_encoder", "look"]

WEIGHTS: Final = "model.safetensors"
PUBLISHED: Final[dict[str, str]] = {"clip-sf": clip_sf.PUBLISHED}
"""SHA-256 of the authors' file, where it is known."""
_CONVERT: Final[dict[EncoderKind, Callable[[Checkpoint], EncoderWeights]]] = {
    "clip-sf": clip_sf.convert,
    "clip-ff": clip_ff.clip_ff_convert,
    "blip-sf": blip.convert_score_fusion,
    "blip-ff": blip.convert_feature_fusion,
}


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint that fits, and what an import of it would write."""

    sha256: str
    published: bool | None
    """Whether it is the authors' own file; None where nobody knows that file's hash."""
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
    """Of the folder's manifest."""


def look(checkpoint: Checkpoint, kind: EncoderKind, *, tokenizer: Path | None = None) -> Source:
    """Check every name, shape and number of an open checkpoint, and say what an import would write.

    Raises
    ------
    UsageError
        BLIP's vocabulary is needed and not given, or given and not needed.
    ArtifactMissing, ArtifactMismatch
        the checkpoint or the vocabulary is not what it should be; the message lists what differs.
    """
    _need_vocabulary(kind, tokenizer)
    weights = _CONVERT[kind](checkpoint)
    texts = _texts(weights, tokenizer)
    sha256 = file_fingerprint(checkpoint.path)
    known = PUBLISHED.get(kind)
    return Source(sha256, None if known is None else sha256 == known, weights, texts)


def import_encoder(
    file: Path, kind: EncoderKind, folder: Path, *, progress: Progress, tokenizer: Path | None = None
) -> ImportedEncoder:
    """Turn a checkpoint into a folder; one that is there already and came from the same file is kept.

    Raises
    ------
    UsageError
        as :func:`look` does, or the folder holds something else.
    ArtifactMissing, ArtifactMismatch
        as :func:`look` does.
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
        described = {
            "format": FORMAT,
            "kind": kind,
            "source": {"bytes": checkpoint.bytes, "sha256": source.sha256, "published": source.published},
            "left_out": list(source.weights.left_out),
        }
        write_json(writer.path / DESCRIPTION, described)
        manifest = writer.finish()
    return ImportedEncoder(folder, source, manifest.fingerprint)


def _need_vocabulary(kind: EncoderKind, tokenizer: Path | None) -> None:
    needed = kind.startswith("blip")
    if needed and tokenizer is None:
        raise UsageError(
            f"{kind} reads BERT's tokens; give --tokenizer FOLDER with bert-base-uncased's vocabulary"
        )
    if tokenizer is not None and not needed:
        raise UsageError(f"{kind} brings its own vocabulary; leave --tokenizer out")


def _texts(weights: EncoderWeights, tokenizer: Path | None) -> dict[str, str]:
    """The small files of the folder."""
    if tokenizer is None:
        names = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>"}
        settings = {
            **names,
            "pad_token": "<|endoftext|>",
            "unk_token": "<|endoftext|>",
            "model_max_length": weights.config["text_config"]["max_position_embeddings"],
            "tokenizer_class": "CLIPTokenizer",
        }
        vocabulary = stored_tokenizer()
    else:
        settings = {"model_max_length": 100, "tokenizer_class": "BertTokenizer"}
        vocabulary = find_bert_tokenizer(tokenizer, rows=weights.tokens)
    return {
        "config.json": _json(weights.config),
        "preprocessor_config.json": _json(weights.pixels),
        "tokenizer.json": vocabulary.to_str(),
        "tokenizer_config.json": _json(settings),
    }


def _json(value: Mapping[str, object]) -> str:
    return json.dumps(value, indent=2) + "\n"
