"""The commands of a reproduction, from what is there to the numbers; none whose result is there."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from genius.data.mbeir import PAPER_ROWS
from genius.hub.originals import ORIGINALS
from genius.stages.model_file import MODEL_FILE
from genius.stages.repro_needs import ARCHIVE, DATA_REPOSITORY, IMAGE_FOLDERS, UNION_POOL, NeededFile


def commands_for(
    name: str, data: Path, model: Path | None, *, get_data: Sequence[str], pools: Sequence[str]
) -> tuple[str, ...]:
    """All in order; ``pools`` are those that were asked for, if any."""
    chosen = f" --pools {','.join(pools)}" if pools else ""
    place = _shown(model or Path("MODEL"))
    run = f"genius repro {name} --data {_shown(data)} --model {place}{chosen} --run"
    return (*get_data, *_get_model(data, model), run)


def get_data(data: Path, missing: Sequence[NeededFile]) -> list[str]:
    """Download what is missing of M-BEIR, and the pictures' archive only where a folder of it is."""
    folders = set(IMAGE_FOLDERS.values())
    files = [file.path for file in missing if file.path not in folders]
    fetch = f"hf download {DATA_REPOSITORY} --repo-type dataset --local-dir {_shown(data)}"
    commands = []
    if files:
        patterns = _patterns(files)
        commands.append(f"{fetch} {' '.join(f'--include {_quoted(pattern)}' for pattern in patterns)}")
    if any(file.path in folders for file in missing):
        if not has_archive(data):
            commands.append(f"{fetch} --include {_quoted(ARCHIVE)}")
        commands.append(f"cat {_shown(data)}/{ARCHIVE} | tar -xzf - -C {_shown(data)}")
    return [*commands, f"genius data check {_shown(data)} --skip-images"] if commands else []


def get_captions(data: Path, json: str, *, dataset: str, dataset_id: int) -> str:
    """Make a data set from Karpathy's JSON."""
    return (
        f"genius data karpathy {json} --images PICTURES --out {_shown(data)} "
        f"--dataset-id {dataset_id} --dataset-name {dataset}"
    )


def has_archive(data: Path) -> bool:
    """Whether the archive of pictures was downloaded."""
    return any(data.glob(ARCHIVE))


def _patterns(files: Sequence[str]) -> list[str]:
    """The files themselves, or their folders where nearly all of them are wanted."""
    if len(files) < 3 * len(PAPER_ROWS):
        return list(files)
    union = ["cand_pool/global/*test*"] if UNION_POOL in files else []
    return ["query/test/*", "cand_pool/local/*", *union, "qrels/test/*", "instructions/*"]


def _get_model(data: Path, model: Path | None) -> list[str]:
    """Each name is pulled to a folder of its own: a pull never adds to one that is there."""
    if model is not None and (model / MODEL_FILE).exists():
        return []
    place = model or Path("MODEL")
    (clip,) = (f"published/clip-sf/{path}" for path in ORIGINALS["clip-sf"].files)
    quantizer, generator = (f"published/genius/{path}" for path in ORIGINALS["genius"].files)
    return [
        *(f"genius pull {name} --out published/{name} --yes" for name in ("clip-sf", "genius")),
        f"genius import clip-sf {clip} --out clip-sf",
        (
            f"genius import genius --quantizer {quantizer} --generator {generator} --encoder uniir:clip-sf "
            f"--data {_shown(data)} --out {_shown(place)}"
        ),
    ]


def _shown(path: Path) -> str:
    """A path as a shell takes it."""
    return shlex.quote(str(path))


def _quoted(pattern: str) -> str:
    return f"'{pattern}'" if "*" in pattern else pattern
