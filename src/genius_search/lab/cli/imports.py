"""``genius import``: published checkpoints as folders of encoders and models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from genius_search.cli.options import DeviceOptions, JsonOption, OptionalFile, OptionalFolder, command
from genius_search.cli.terminal import TerminalProgress, print_json

if TYPE_CHECKING:
    from genius_search.lab.published.encoders import Source


@command
class ImportOptions(JsonOption):
    """A command that imports published checkpoints."""

    dry_run: bool = False
    """Describe the files and what would be written; write nothing."""


@command
class ImportEncoder(ImportOptions):
    """A command that imports one of UniIR's encoders."""

    kind: ClassVar[Literal["clip-sf", "clip-ff", "blip-sf", "blip-ff"]]

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """The checkpoint, as torch.save wrote it (.pth)."""

    out: OptionalFolder = None
    """Folder of the encoder, for --encoder uniir:FOLDER."""

    @property
    def vocabulary(self) -> Path | None:
        """Folder of BERT's vocabulary, which only BLIP needs."""
        folder: Path | None = getattr(self, "tokenizer", None)
        return folder

    def run(self) -> int | None:
        """Import the encoder, or describe the file."""
        if self.dry_run:
            return self._describe()
        from genius_search.errors import UsageError

        if self.out is None:
            raise UsageError("--out FOLDER is required without --dry-run")
        from genius_search.lab.published.encoders import import_encoder

        with TerminalProgress() as progress:
            made = import_encoder(
                self.file, self.kind, self.out, progress=progress, tokenizer=self.vocabulary
            )
            progress.say(_origin(made.source))
            progress.say(f"encoder {made.fingerprint[:12]} is in {self.out}; use it as uniir:{self.out}")
        if self.json:
            print_json({"encoder": self.out, "fingerprint": made.fingerprint, **_facts(made.source)})
        return None

    def _describe(self) -> int:
        """Print what the file contains, whether it fits, and what would be written."""
        from genius_search.errors import ArtifactMismatch
        from genius_search.lab.published.checkpoint import open_checkpoint
        from genius_search.lab.published.encoders import look

        checkpoint = open_checkpoint(self.file)
        contents = checkpoint.contents
        if not self.json:
            _print_contents(contents)
        try:
            source = look(checkpoint, self.kind, tokenizer=self.vocabulary)
        except ArtifactMismatch as error:
            if not self.json:
                raise
            print_json({"file": contents, "problem": str(error)})
            return error.exit_code
        if self.json:
            print_json({"file": contents, "problem": None, **_facts(source)})
            return 0
        left_out = source.weights.left_out
        print(f"every name and shape fits: {source.weights.used} tensors used, {len(left_out)} left out")
        if left_out:
            print(f"  left out: {', '.join(left_out[:4])}{', …' if len(left_out) > 4 else ''}")
        print(_origin(source))
        for remark in source.weights.remarks:
            print(f"WARNING: {remark}")
        for name, size in source.files.items():
            print(f"would write {self.out or 'OUT'}/{name}, {size / 1e6:,.1f} MB")
        return 0


@command
class ImportClipSf(ImportEncoder):
    """Import UniIR's CLIP-SF (clip_sf_large.pth), which GENIUS was trained on, as an encoder's folder.

    The file is read without running any code in it; every tensor must have its name and shape. The folder
    opens as uniir:FOLDER, and as an ordinary CLIP in transformers and as clip:FOLDER.
    """

    kind = "clip-sf"


@command
class ImportClipFf(ImportEncoder):
    """Import UniIR's CLIP-FF, a baseline of the paper, as an encoder's folder."""

    kind = "clip-ff"


@command
class ImportBlip(ImportEncoder):
    """A command that imports one of UniIR's BLIP encoders."""

    tokenizer: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """Folder with bert-base-uncased's vocabulary: vocab.txt or tokenizer.json."""


@command
class ImportBlipSf(ImportBlip):
    """Import UniIR's BLIP-SF, a baseline of the paper, as an encoder's folder."""

    kind = "blip-sf"


@command
class ImportBlipFf(ImportBlip):
    """Import UniIR's BLIP-FF (blip_ff_large.pth), a baseline of the paper, as an encoder's folder."""

    kind = "blip-ff"


@command
class ImportGenius(DeviceOptions, ImportOptions):
    """Import the published GENIUS checkpoints as a model's folder; `--dry-run` only describes them.

    The files are read without running any code in them. Every tensor must have its name and shape.
    """

    quantizer: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """The published stage 1, rq_clip_large.pth."""

    generator: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """The published stage 2, GENIUS_t5small.pth."""

    encoder: Annotated[str | None, tyro.conf.arg(metavar="ENCODER", help_behavior_hint="")] = None
    """Encoder that the model was trained on: uniir:FOLDER (UniIR's CLIP-SF, imported), or any other."""

    out: OptionalFolder = None
    """Folder of the model, a new one."""

    data: OptionalFolder = None
    """Data set in M-BEIR's layout; a few of its candidates show which modality each level-0 code means."""

    instructions: OptionalFile = None
    """query_instructions.tsv, so that a search may omit the instruction; default: the data set's."""

    def run(self) -> int | None:
        """Import the model, or describe the files."""
        if self.dry_run:
            return self._describe()
        from genius_search.errors import UsageError

        if self.encoder is None or self.out is None:
            raise UsageError("--encoder and --out are required without --dry-run")
        from genius_search.data.mbeir import MBeir
        from genius_search.lab.published.models import import_genius

        with TerminalProgress() as progress:
            model = import_genius(
                self.quantizer,
                self.generator,
                self.encoder,
                self.out,
                progress=progress,
                data=None if self.data is None else MBeir(self.data),
                instructions=self.instructions,
                device=self.device,
                download=self.download,
            )
            progress.say(f"model {model.fingerprint[:12]} is in {self.out}")
        if self.json:
            meaning = model.quantizer.level0_modality.tolist()
            print_json({"model": self.out, "fingerprint": model.fingerprint, "level0_modality": meaning})
        return None

    def _describe(self) -> int:
        """Print what the files contain, whether they fit, and what would be written."""
        from genius_search.errors import ArtifactMismatch
        from genius_search.lab.published.checkpoint import open_checkpoint
        from genius_search.lab.published.models import read_published

        files = open_checkpoint(self.quantizer), open_checkpoint(self.generator)
        found = [checkpoint.contents for checkpoint in files]
        if not self.json:
            for contents in found:
                _print_contents(contents)
        try:
            quantizer, generator = read_published(*files)
        except ArtifactMismatch as error:
            if not self.json:
                raise
            print_json({"files": found, "writes_bytes": {}, "problem": str(error)})
            return error.exit_code
        writes = {"quantizer": quantizer.bytes, "generator": generator.bytes}
        if self.json:
            print_json({"files": found, "writes_bytes": writes, "problem": None})
            return 0
        print("every name and shape fits, and the files belong together")
        for part, size in writes.items():
            print(f"would write {self.out or 'OUT'}/{part}/{part}.safetensors, {size / 1e6:,.1f} MB")
        return 0


def _facts(source: Source) -> dict[str, Any]:
    return {
        "sha256": source.sha256,
        "published": source.published,
        "used": source.weights.used,
        "left_out": list(source.weights.left_out),
        "remarks": list(source.weights.remarks),
        "writes_bytes": source.files,
    }


def _origin(source: Source) -> str:
    origin = {
        True: "the file that UniIR's authors published",
        False: "not the file that UniIR's authors published",
        None: "whether that is the published file is not known",
    }[source.published]
    return f"sha256 {source.sha256}: {origin}"


def _print_contents(contents: Mapping[str, Any]) -> None:
    print(f"{contents['file']}  {contents['bytes'] / 1e6:,.1f} MB")
    print(
        f"  weights: {contents['tensors']} tensors, {contents['parameters']:,} numbers, "
        f"{contents['parameter_bytes'] / 1e6:,.1f} MB"
    )
    if contents["others"]:
        print(f"  not read: {', '.join(contents['others'])}")
