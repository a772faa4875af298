"""``genius import clip-sf``, ``clip-ff``, ``blip-sf``, ``blip-ff``: UniIR's encoders, seen or imported."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from genius_search.cli.terminal import TerminalProgress, print_json

if TYPE_CHECKING:
    from genius_search.lab.published.checkpoint import Contents
    from genius_search.lab.published.encoders import Source

File = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
Folder = Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")]


@dataclass(frozen=True, kw_only=True)
class OneImport:
    """What the four commands have in common."""

    kind: ClassVar[Literal["clip-sf", "clip-ff", "blip-sf", "blip-ff"]]

    file: File
    """The checkpoint, as torch.save wrote it (.pth)."""

    out: Folder = None
    """Folder of the encoder, for --encoder uniir:FOLDER."""

    dry_run: bool = False
    """Say what is in the file and what would be written; write nothing."""

    json: bool = False
    """Say what was found or made as JSON."""

    @property
    def vocabulary(self) -> Path | None:
        """Folder of BERT's vocabulary, where the model needs one."""
        return None

    def run(self) -> int | None:
        """Look, or import."""
        if self.dry_run:
            return self._look()
        from genius_search.errors import UsageError

        if self.out is None:
            raise UsageError("give --out FOLDER; only --dry-run does without")
        from genius_search.lab.published.encoders import import_encoder

        with TerminalProgress() as progress:
            made = import_encoder(
                self.file, self.kind, self.out, progress=progress, tokenizer=self.vocabulary
            )
            progress.say(_origin(made.source))
            progress.say(f"encoder {made.fingerprint[:12]} is in {self.out}; use it as uniir:{self.out}")
        if self.json:
            print_json({"encoder": str(self.out), "fingerprint": made.fingerprint, **_told(made.source)})
        return None

    def _look(self) -> int:
        """What is in the file, whether it fits, what would be written."""
        from genius_search.errors import ArtifactMismatch
        from genius_search.lab.published.checkpoint import open_checkpoint
        from genius_search.lab.published.encoders import look

        checkpoint = open_checkpoint(self.file)
        contents = checkpoint.contents
        try:
            source = look(checkpoint, self.kind, tokenizer=self.vocabulary)
        except ArtifactMismatch as error:
            if not self.json:
                _print_contents(contents)
                raise
            print_json({"file": dataclasses.asdict(contents), "problem": str(error)})
            return error.exit_code
        if self.json:
            print_json({"file": dataclasses.asdict(contents), "problem": None, **_told(source)})
            return 0
        _print_contents(contents)
        _print_source(source, self.out)
        return 0


@dataclass(frozen=True, kw_only=True)
class ImportClipSf(OneImport):
    """Turn UniIR's CLIP-SF (clip_sf_large.pth), which GENIUS was trained on, into an encoder's folder.

    The file is read without running anything in it; every tensor must have its name and shape. The folder
    opens as uniir:FOLDER, and as an ordinary CLIP in transformers and as clip:FOLDER.
    """

    kind = "clip-sf"


@dataclass(frozen=True, kw_only=True)
class ImportClipFf(OneImport):
    """Turn UniIR's CLIP-FF, a baseline of the paper, into an encoder's folder."""

    kind = "clip-ff"


@dataclass(frozen=True, kw_only=True)
class _OfBlip(OneImport):
    tokenizer: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """Folder with bert-base-uncased's vocabulary: vocab.txt or tokenizer.json."""

    @property
    def vocabulary(self) -> Path | None:
        """As given."""
        return self.tokenizer


@dataclass(frozen=True, kw_only=True)
class ImportBlipSf(_OfBlip):
    """Turn UniIR's BLIP-SF, a baseline of the paper, into an encoder's folder."""

    kind = "blip-sf"


@dataclass(frozen=True, kw_only=True)
class ImportBlipFf(_OfBlip):
    """Turn UniIR's BLIP-FF (blip_ff_large.pth), a baseline of the paper, into an encoder's folder."""

    kind = "blip-ff"


def _told(source: Source) -> dict[str, Any]:
    return {
        "sha256": source.sha256,
        "published": source.published,
        "used": source.weights.used,
        "left_out": list(source.weights.left_out),
        "remarks": list(source.weights.remarks),
        "writes_bytes": source.files,
    }


def _origin(source: Source) -> str:
    match source.published:
        case True:
            word = "the file that UniIR's authors published"
        case False:
            word = "not the file that UniIR's authors published"
        case None:
            word = "whether that is the published file is not known"
    return f"sha256 {source.sha256}: {word}"


def _print_contents(contents: Contents) -> None:
    print(f"{contents.file}  {contents.bytes / 1e6:,.1f} MB")
    print(
        f"  weights: {contents.tensors} tensors, {contents.parameters:,} numbers, "
        f"{contents.parameter_bytes / 1e6:,.1f} MB"
    )
    for other in contents.others:
        size = f", {other.bytes / 1e6:,.1f} MB" if other.bytes else ""
        print(f"  {other.name}: {other.what}{size} (not read)")


def _print_source(source: Source, out: Path | None) -> None:
    left = source.weights.left_out
    print(f"every name and shape fits: {source.weights.used} tensors used, {len(left)} left out")
    if left:
        print(f"  left out: {', '.join(left[:4])}{', …' if len(left) > 4 else ''}")
    print(_origin(source))
    for remark in source.weights.remarks:
        print(f"WARNING: {remark}")
    for name, size in source.files.items():
        print(f"would write {out or 'OUT'}/{name}, {size / 1e6:,.1f} MB")
