"""``genius export onnx``: a model's query side and its decoder as ONNX files in one folder."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Final, NamedTuple

from genius.artifact import ArtifactWriter, Manifest, write_json
from genius.encoders.clip import ClipEncoder
from genius.encoders.protocol import Encoder
from genius.encoders.small import CONFIG_FILE, TOKENIZER_FILE, SmallEncoder
from genius.encoders.uniir_clip import ClipScoreFusion
from genius.errors import MissingExtra
from genius.model import Genius
from genius.search.onnx_decoder import GUIDE, KIND
from genius.stages.progress import Progress
from genius.weights import write_weights

__all__ = ["export_onnx"]

_NEEDED: Final = ("onnx", "onnxruntime")


class _Encoder(NamedTuple):
    """What became of the model's encoder."""

    kind: str | None
    why_not: str | None


def export_onnx(model: Genius, folder: Path, *, int8: bool = False, progress: Progress) -> Manifest:
    """Write a model's encoder where that is possible, its fusion and its decoder; a finished folder stays.

    Parameters
    ----------
    int8
        write 8-bit versions of all graphs too.

    Raises
    ------
    MissingExtra
        the extra ``onnx`` is not installed.
    UsageError
        the folder holds something else.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtra(
            f"exporting needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            "installed: pip install genius-retrieval[onnx]"
        )
    from genius.export.decoder import write_decoder  # noqa: PLC0415  these need the extra
    from genius.export.int8 import quantize  # noqa: PLC0415
    from genius.export.query import write_fusion  # noqa: PLC0415

    writer = ArtifactWriter(folder, kind=KIND, config={"int8": int8}, inputs={"model": model.fingerprint})
    finished = writer.finished()
    if finished is not None:
        return finished
    for part in writer.path.iterdir():  # of a killed run; writing it all again takes no longer than checking
        if part.is_dir():
            shutil.rmtree(part)
    plain = writer.path / "fp32"
    plain.mkdir()
    progress.say("writing the decoder and the fusion")
    decoder = write_decoder(model.generator, plain)
    write_fusion(model.quantizer.fusion, model.dim, plain)
    if model.generator.guide is not None:
        write_weights(writer.path / GUIDE, model.generator.guide.state_dict())
    encoder = _write_encoder(model.encoder, writer.path, progress)
    if int8:
        (writer.path / "int8").mkdir()
        paths = sorted(plain.iterdir())
        progress.begin("8 bits", len(paths))
        for done, path in enumerate(paths, start=1):
            quantize(path, writer.path / "int8" / path.name)
            progress.advance(done, {})
    return writer.finish(facts={"decoder": decoder.to_json(), "encoder": encoder._asdict()})


def _write_encoder(encoder: Encoder, folder: Path, progress: Progress) -> _Encoder:
    """Write an encoder's towers and what reads for them, or say why not."""
    from genius.export.places import READER  # noqa: PLC0415  as above
    from genius.export.query import write_small  # noqa: PLC0415

    match encoder:
        case SmallEncoder():
            write_small(encoder.network, encoder.dim, folder / "fp32")
            (folder / READER).mkdir()
            (folder / READER / TOKENIZER_FILE).write_text(encoder.tokenizer.to_str())
            write_json(folder / READER / CONFIG_FILE, asdict(encoder.config))
            return _Encoder("small", None)
        case ClipEncoder():
            from genius.export.traced import copy_reader, write_towers  # noqa: PLC0415

            progress.say(f"tracing {encoder.spec}, which takes a minute or more")
            write_towers(encoder, folder / "fp32")
            copy_reader(encoder, folder / READER)
            return _Encoder("clip-sf" if isinstance(encoder, ClipScoreFusion) else "clip", None)
        case _:
            reason = _why_not(encoder)
            progress.say(f"the encoder is not exported: {reason}")
            return _Encoder(None, reason)


def _why_not(encoder: Encoder) -> str:
    if not encoder.needs_pixels and encoder.spec.startswith("precomputed:"):
        return f"{encoder.spec} looks features up, and has no network"
    return (
        f"{encoder.spec} is of a kind that cannot be exported; small (but clip-ff and blip-ff), clip and "
        "uniir's CLIP-SF can"
    )
