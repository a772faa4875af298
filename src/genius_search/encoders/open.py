"""Specs of encoders, such as ``clip:openai/clip-vit-base-patch32``, and the encoders they open.

A spec is a scheme, a colon and a source. The scheme selects a function of this file, or one from
another package; the source, a folder or a name, is passed to that function. A function imports its
encoder's module only when it is called, so opening ``text:`` never imports PyTorch.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

from genius_search.border import as_path
from genius_search.encoders.adapters import ADAPTERS, AdapterEncoder, FrozenPair, read_specs
from genius_search.encoders.base import Encoder, VectorEncoder
from genius_search.errors import UsageError, need_packages

PLUGIN_GROUP: Final = "genius_search.encoders"
"""Entry points of this group are encoders that other packages provide."""
_BUILT_IN: Final = (
    "FOLDER, onnx:NAME or onnx-quantized:NAME; st:, clip:, siglip: or text: and a name or folder; "
    "small:, adapters: or uniir: and a folder; precomputed:PATH"
)
"""The list of specs in the error for an unknown one."""


def load_encoder(  # noqa: PLR0911  one return for each scheme
    spec: str, *, download: bool = False, device: str = "cpu"
) -> Encoder:
    """Open an encoder by its spec and import only the modules that it needs.

    Parameters
    ----------
    spec
        One of

        - a folder of ONNX graphs, or ``onnx:NAME-or-folder``; ``onnx-quantized:NAME-or-folder``
          takes the graphs in 8 bits
        - ``st:NAME-or-folder``, a model for sentence-transformers; ``clip:``, ``siglip:`` and
          ``text:`` are synonyms of ``st:``
        - ``text:wordllama``, ``text:universal-sentence-encoder``
        - ``small:FOLDER``, ``adapters:FOLDER``, ``uniir:FOLDER``
        - ``precomputed:PATH``
        - ``vectors:DIM``
        - ``NAME:SOURCE``, where NAME is an entry point of the group :data:`PLUGIN_GROUP`. It is
          called with SOURCE, ``download=`` and ``device=``.
    download
        Allow downloading a model by its name. Otherwise, nothing uses the network.
    device
        The torch device of the weights.

    Raises
    ------
    UsageError
        The scheme is unknown, or there is no source.
    ArtifactMissing, ArtifactMismatch, MissingExtra, NetworkNeeded, BadData
        The encoder cannot be opened.
    """
    if ":" not in spec and as_path(spec).is_dir():
        spec = f"onnx:{spec}"
    scheme, _, source = spec.partition(":")
    if not source:
        raise _unknown_encoder(spec)
    match scheme:
        case "onnx" | "onnx-quantized":
            return _open_onnx(scheme, source, download=download)
        case "st" | "clip" | "siglip" | "text":
            return _open_sentence_transformers(scheme, source, download=download, device=device)
        case "small":
            return _open_small(as_path(source), device=device)
        case "uniir":
            return _open_uniir(as_path(source), device=device)
        case "adapters":
            return _open_adapters(as_path(source), download=download, device=device)
        case "precomputed":
            return _open_precomputed(as_path(source))
        case "vectors":
            return VectorEncoder(source)
        case _:
            return _open_plugin(scheme, source, download=download, device=device)


def absolute_spec(spec: str) -> str:
    """Return an encoder's spec with an absolute path, valid in any working directory."""
    scheme, colon, source = spec.partition(":")
    if not colon and as_path(spec).is_dir():
        scheme, source = "onnx", spec
    path = as_path(source)
    return f"{scheme}:{path.resolve()}" if source and path.exists() else spec


def open_pair(
    image_spec: str, text_spec: str, *, download: bool = False, device: str = "cpu"
) -> FrozenPair:
    """Open an encoder of images and another one of texts, over which adapters are trained or run.

    Raises
    ------
    UsageError
        An encoder is itself ``adapters:``, or the image encoder reads no images.
    """
    for spec in (image_spec, text_spec):
        if spec.startswith(f"{ADAPTERS}:"):
            raise UsageError(
                f"{spec} cannot be inside adapters; give an encoder such as clip: or text:"
            )
    image = load_encoder(image_spec, download=download, device=device)
    text = load_encoder(text_spec, download=download, device=device)
    return FrozenPair(image, text, spec=f"{ADAPTERS}:{image_spec},{text_spec}")


def hub_files(scheme: str) -> tuple[str, ...]:
    """Return the patterns of the files on the hub that an encoder with this scheme reads."""
    from genius_search.hub import FILES, QUANTIZED_FILES  # noqa: PLC0415  not for folders

    return QUANTIZED_FILES if scheme == "onnx-quantized" else FILES


def _open_onnx(scheme: str, source: str, *, download: bool) -> Encoder:
    from genius_search.encoders.onnx import OnnxEncoder  # noqa: PLC0415
    from genius_search.hub import find_or_pull  # noqa: PLC0415

    folder = find_or_pull(source, download=download, files=hub_files(scheme))
    return OnnxEncoder(f"{scheme}:{source}", folder, quantized=scheme == "onnx-quantized")


def _open_sentence_transformers(
    scheme: str, source: str, *, download: bool, device: str
) -> Encoder:
    """Open a model for sentence-transformers; static embeddings are opened without that library."""
    from genius_search.encoders.static import WORDLLAMA, StaticEncoder, is_static  # noqa: PLC0415
    from genius_search.encoders.universal import UNIVERSAL, UniversalEncoder  # noqa: PLC0415

    if scheme == "text" and source == WORDLLAMA:
        return StaticEncoder(source)
    if scheme == "text" and source == UNIVERSAL:
        return UniversalEncoder()
    folder = as_path(source)
    if not folder.is_dir():
        from genius_search.hub import find_or_pull  # noqa: PLC0415  a folder needs no hub

        folder = find_or_pull(source, download=download)
    if scheme in ("st", "text") and is_static(folder):
        return StaticEncoder(source, folder)
    need_packages(f"the encoder {scheme}:{source} needs", "sentence_transformers")
    from genius_search.encoders.pretrained import open_pretrained  # noqa: PLC0415

    return open_pretrained(f"{scheme}:{source}", folder, device=device)


def _open_small(folder: Path, *, device: str) -> Encoder:
    need_packages(f"the encoder small:{folder} needs", "torch")
    from genius_search.encoders.small import load_small  # noqa: PLC0415

    return load_small(folder, device=device)


def _open_uniir(folder: Path, *, device: str) -> Encoder:
    need_packages(f"the encoder uniir:{folder} needs", "torch")
    from genius_search.encoders.pretrained import ClipScoreFusion  # noqa: PLC0415

    return ClipScoreFusion(folder, device=device)


def _open_adapters(folder: Path, *, download: bool, device: str) -> Encoder:
    """Open trained adapters and the two encoders that their folder names."""
    image_spec, text_spec = read_specs(folder)
    pair = open_pair(image_spec, text_spec, download=download, device=device)
    return AdapterEncoder(folder, pair)


def _open_precomputed(path: Path) -> Encoder:
    from genius_search.encoders.precomputed import PrecomputedEncoder  # noqa: PLC0415

    return PrecomputedEncoder(path)


def _open_plugin(scheme: str, source: str, *, download: bool, device: str) -> Encoder:
    """Open an encoder of another package.

    Raises
    ------
    UsageError
        No package has an entry point of this name, or the entry point cannot be imported.
    """
    plugins = entry_points(group=PLUGIN_GROUP)
    if scheme not in plugins.names:
        raise _unknown_encoder(f"{scheme}:{source}")
    plugin = plugins[scheme]
    try:
        opener = plugin.load()
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{scheme!r} ({plugin.value}) cannot be imported: {error}") from error
    encoder: Encoder = opener(source, download=download, device=device)
    return encoder


def _unknown_encoder(spec: str) -> UsageError:
    plugins = sorted(entry_points(group=PLUGIN_GROUP).names)
    expected = "; ".join([_BUILT_IN, *(f"{name}:SOURCE" for name in plugins)])
    return UsageError(f"there is no encoder {spec!r}; expected {expected}")
