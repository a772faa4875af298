"""``genius pull`` and ``genius push``: download from and publish to the Hugging Face hub."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from genius_search.cli.options import JsonOption, OptionalFolder, OptionalName, command
from genius_search.cli.terminal import TerminalProgress, print_json
from genius_search.errors import ArtifactMissing, UsageError

if TYPE_CHECKING:
    from huggingface_hub import RepoUrl


@command
class Pull(JsonOption):
    """Download a model, an index or an encoder from the Hugging Face hub.

    The main branch is downloaded; use `hf download` for other revisions. After an interruption, run
    the command again: finished files are not downloaded twice.
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """Name on the hub: owner/name, or datasets/owner/name for an index."""

    out: OptionalFolder = None
    """Folder to download to. Default: the cache of the hub's library, where other commands find the
    download by its name."""

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
            print(f"downloaded to {folder}", file=sys.stderr)


@command
class Push(JsonOption):
    """Publish a model or an index on the Hugging Face hub, after listing the files and asking.

    An index is published as a data set. Training features, checkpoints, evaluation results and the
    pictures of an index are never published. Log in with `hf auth login` or set HF_TOKEN first.
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Folder of the model or the index."""

    repository: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="REPOSITORY")]
    """Repository to publish to, as owner/name. It is created if it does not exist."""

    private: bool = False
    """Make a new repository private."""

    license: str = "unknown"
    """Licence: the hub's short name, such as mit or cc-by-4.0."""

    model: OptionalName = None
    """For an index: the name of its model on the hub."""

    yes: bool = False
    """Publish without asking for confirmation."""

    def run(self) -> None:
        from genius_search import hub
        from genius_search.index.store import CURRENT
        from genius_search.model import MODEL_FILE
        from genius_search.publish import save

        is_index = (self.folder / CURRENT).exists()
        if not is_index and not (self.folder / MODEL_FILE).exists():
            raise ArtifactMissing(f"{self.folder} is neither a finished model nor an index")
        if self.model is not None and not is_index:
            raise UsageError(
                f"{self.folder} is a model; leave out --model, which names the model of an index"
            )
        if not hub.is_name(self.repository):
            raise UsageError(
                f"{self.repository!r} is not the name of a repository; give owner/name"
            )
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
                self._confirm()
            url = self._upload(copy, is_index=is_index)
            progress.say(f"published at {url}")
        if self.json:
            print_json({"repository": self.repository, "address": url})

    def _confirm(self) -> None:
        """Ask whether to publish; raise :class:`UsageError` unless the answer is yes."""
        if not sys.stdin.isatty():
            raise UsageError("there is no terminal to confirm on; give --yes")
        question = f"Publish these files as {self.repository}? [y/N] "
        print(question, end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise UsageError("not confirmed; nothing was published")

    def _upload(self, folder: Path, *, is_index: bool) -> RepoUrl:
        """Upload a folder, and return the URL of the repository."""
        from huggingface_hub import HfApi

        from genius_search.hub import translate_errors
        from genius_search.publish import OBSOLETE_FILES

        api = HfApi()
        repo_type = "dataset" if is_index else "model"
        with translate_errors(self.repository):
            url = api.create_repo(
                self.repository, repo_type=repo_type, private=self.private, exist_ok=True
            )
            api.upload_folder(
                repo_id=url.repo_id,
                folder_path=folder,
                repo_type=repo_type,
                commit_message="Upload with genius",
                delete_patterns=OBSOLETE_FILES if is_index else None,
            )
        return url
