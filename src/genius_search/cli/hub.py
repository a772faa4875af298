"""``genius pull`` and ``genius push``: from and to the Hugging Face hub."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import tyro

from genius_search.cli.options import JsonOption, OptionalFolder, Words, command
from genius_search.cli.terminal import TerminalProgress, print_json
from genius_search.errors import ArtifactMissing, UsageError


@command
class Pull(JsonOption):
    """Fetch a model, an index or an encoder from the hub.

    Names are those of the hub: owner/name, or datasets/owner/name for an index. After an interruption,
    finished files are not fetched again. `hf download` fetches other revisions than the main branch.
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """owner/name or datasets/owner/name."""

    out: OptionalFolder = None
    """Folder to fetch to; default: the hub library's cache, where the name finds it."""

    def run(self) -> None:
        from huggingface_hub.utils.tqdm import disable_progress_bars

        from genius_search import hub
        from genius_search.index.info import check
        from genius_search.index.store import CURRENT, refuse_links

        if not sys.stderr.isatty():
            disable_progress_bars()
        if self.out is not None:
            refuse_links(self.out)
        folder = hub.pull(self.name, out=self.out)
        if (folder / CURRENT).exists():
            check(folder)
        if self.json:
            print_json({"name": self.name, "folder": folder})
        else:
            print(f"it is in {folder}", file=sys.stderr)


@command
class Push(JsonOption):
    """Publish a model, or an index as a data set, with a card: shows the files, and asks.

    Training features, checkpoints and evaluation runs are never published, and of an index no pictures. You
    must be logged in (`hf auth login`) or have set HF_TOKEN.
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Folder of the model or the index."""

    repository: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="REPOSITORY")]
    """owner/name; created if it does not exist."""

    private: bool = False
    """Make a new repository private."""

    license: str = "unknown"
    """Licence, by the hub's short name, such as mit or cc-by-4.0."""

    model: Words = None
    """For an index: the name of its model on the hub."""

    yes: bool = False
    """Do not ask for confirmation."""

    def run(self) -> None:
        from huggingface_hub import HfApi

        from genius_search import hub
        from genius_search.index.store import CURRENT
        from genius_search.model import MODEL_FILE
        from genius_search.publish import OBSOLETE_FILES, save

        is_index = (self.folder / CURRENT).exists()
        if not is_index and not (self.folder / MODEL_FILE).exists():
            raise ArtifactMissing(f"{self.folder} is neither a finished model nor an index")
        if self.model is not None and not is_index:
            raise UsageError(
                f"{self.folder} is a model; --model names the model of an index, leave it out"
            )
        if not hub.is_name(self.repository):
            raise UsageError(f"{self.repository!r} is not a repository's name; give owner/name")
        with tempfile.TemporaryDirectory() as temporary, TerminalProgress() as progress:
            copy = Path(temporary) / "copy"
            save(self.folder, copy, name=self.repository, license=self.license, model=self.model)
            if is_index:
                progress.say(
                    "Note: the items' texts, fields and ids are published, but not their pictures"
                )
            for file in sorted(file for file in copy.rglob("*") if file.is_file()):
                progress.say(f"  {file.stat().st_size / 1e6:>10,.3f} MB  {file.relative_to(copy)}")
            if not self.yes:
                if not sys.stdin.isatty():
                    raise UsageError("no terminal to confirm on: give --yes")
                print(
                    f"Publish these as {self.repository}? [y/N] ",
                    end="",
                    file=sys.stderr,
                    flush=True,
                )
                if sys.stdin.readline().strip().lower() not in ("y", "yes"):
                    raise UsageError("not confirmed; nothing was published")
            api, kind = HfApi(), "dataset" if is_index else "model"
            with hub.translate_errors(self.repository):
                address = api.create_repo(
                    self.repository, repo_type=kind, private=self.private, exist_ok=True
                )
                api.upload_folder(
                    repo_id=address.repo_id,
                    folder_path=copy,
                    repo_type=kind,
                    commit_message="Upload with genius",
                    delete_patterns=OBSOLETE_FILES if is_index else None,
                )
            progress.say(f"published: {address}")
        if self.json:
            print_json({"repository": self.repository, "address": address})
