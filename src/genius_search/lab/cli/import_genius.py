"""``genius import genius``: the authors' checkpoints, looked at or turned into a model's folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from genius_search.cli.terminal import TerminalProgress, print_json

File = Annotated[Path, tyro.conf.arg(metavar="FILE")]


@dataclass(frozen=True, kw_only=True)
class ImportGenius:
    """Turn the published GENIUS checkpoints into a model's folder; `--dry-run` only looks at them.

    The files are read without running anything in them. Every tensor must have its name and shape.
    """

    quantizer: File
    """The published stage 1, rq_clip_large.pth."""

    generator: File
    """The published stage 2, GENIUS_t5small.pth."""

    encoder: Annotated[str | None, tyro.conf.arg(metavar="ENCODER")] = None
    """The one the model was trained on: uniir:FOLDER (UniIR's CLIP-SF, imported), or any other encoder."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder of the model: a new one, or an import of the same two files, to go on with or to add --data."""

    data: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """A data set in M-BEIR's layout; a few of its candidates tell what the codes of level 0 stand for."""

    instructions: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """query_instructions.tsv, so that a search may leave the instruction out; default: the data set's."""

    device: str = "cpu"
    """Or cuda."""

    download: bool = False
    """Allow downloading the encoder's weights."""

    dry_run: bool = False
    """Say what is in the files and what would be written; write nothing."""

    json: bool = False
    """Say what was found or made as JSON."""

    def run(self) -> int | None:
        """Look, or import."""
        from genius_search.errors import UsageError

        if self.dry_run:
            return self._look()
        if self.encoder is None or self.out is None:
            raise UsageError("give --encoder and --out; only --dry-run does without")
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
            print_json({"model": str(self.out), "fingerprint": model.fingerprint, "level0_modality": meaning})
        return None

    def _look(self) -> int:
        """What is in the files, whether it fits, what would be written."""
        from genius_search.errors import ArtifactMismatch
        from genius_search.lab.published.models import open_published, read_published

        files = open_published(self.quantizer, self.generator)
        found = [dataclasses.asdict(checkpoint.contents) for checkpoint in files]
        writes: dict[str, int] = {}
        problem = None
        try:
            published = read_published(files)
            writes = published.bytes
        except ArtifactMismatch as error:
            problem = error
        if self.json:
            print_json({"files": found, "writes_bytes": writes, "problem": problem and str(problem)})
            return 0 if problem is None else problem.exit_code
        _print_found(found)
        if problem is not None:
            raise problem
        print("every name and shape fits, and the files belong together")
        for part, size in writes.items():
            print(f"would write {self.out or 'OUT'}/{part}/{part}.safetensors, {size / 1e6:,.1f} MB")
        return 0


def _print_found(found: Sequence[Mapping[str, Any]]) -> None:
    for file in found:
        print(f"{file['file']}  {file['bytes'] / 1e6:,.1f} MB")
        print(
            f"  weights: {file['tensors']} tensors, {file['parameters']:,} numbers, "
            f"{file['parameter_bytes'] / 1e6:,.1f} MB"
        )
        for other in file["others"]:
            size = f", {other['bytes'] / 1e6:,.1f} MB" if other["bytes"] else ""
            print(f"  {other['name']}: {other['what']}{size} (not read)")
