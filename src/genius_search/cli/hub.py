"""``genius pull`` and ``genius push``: from and to the Hugging Face hub."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from genius_search.cli.options import JsonOption, OptionalFile, OptionalFolder, command
from genius_search.cli.terminal import TerminalProgress, format_bytes, print_json
from genius_search.errors import ArtifactMissing, UsageError

if TYPE_CHECKING:
    from genius_search.hub.pull import Kind, PullPlan


@command
class ConfirmOptions(JsonOption):
    """A command that asks before it transfers files."""

    yes: bool = False
    """Do not ask for confirmation."""

    dry_run: bool = False
    """Show the files and transfer nothing."""

    def _confirm(self, question: str) -> None:
        """Ask a person on the terminal, unless --yes was given."""
        if self.yes:
            return
        if not sys.stdin.isatty():
            raise UsageError("no terminal to confirm on: give --yes, or --dry-run to transfer nothing")
        print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise UsageError("not confirmed; nothing was transferred")


@command
class Pull(ConfirmOptions):
    """Fetch a model, an index or an encoder from the hub: shows sizes, asks, verifies.

    Names are those of the hub: owner/name, or datasets/owner/name for an index. The authors' own checkpoints
    have short ones: clip-sf and genius. After an interruption, finished files are not fetched again.
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """owner/name, datasets/owner/name, clip-sf or genius."""

    out: OptionalFolder = None
    """Folder to fetch to; default: the hub library's cache, where the name finds it."""

    revision: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Branch, tag or commit; default: the main branch."""

    def run(self) -> None:
        """Fetch the files."""
        from huggingface_hub.utils.tqdm import disable_progress_bars

        from genius_search.hub.pull import plan_pull, pull

        if not sys.stderr.isatty():
            disable_progress_bars()
        with TerminalProgress() as progress:
            plan = plan_pull(self.name, revision=self.revision)
            progress.say(f"{plan.repository} ({plan.kind}, commit {plan.commit[:12]}) holds")
            files = [(file.path, file.bytes) for file in plan.files]
            _list(progress, files)
            if plan.skipped:
                progress.say(f"not needed, and not fetched: {', '.join(plan.skipped)}")
            to_fetch = plan.bytes if self.out else plan.bytes_to_fetch
            progress.say(f"to fetch: {format_bytes(to_fetch)} of {format_bytes(plan.bytes)}")
            folder = None
            if not self.dry_run:
                if to_fetch:
                    self._confirm(f"Fetch {format_bytes(to_fetch)}?")
                folder = pull(plan, self.out, check=partial(_check, plan.kind))
                progress.say(f"verified; it is in {folder}")
                progress.say(f"next: {_next_command(plan, folder)}")
        if self.json:
            print_json(
                {
                    "repository": plan.repository,
                    "what": plan.kind,
                    "commit": plan.commit,
                    "folder": folder,
                    "bytes": plan.bytes,
                    "files": [{"path": path, "bytes": size} for path, size in files],
                    "left_out": list(plan.skipped),
                }
            )


@command
class Push(ConfirmOptions):
    """Publish a model, or an index as a data set, with a card: shows the files, and asks.

    Training features, checkpoints and evaluation runs are never published. You must be logged in
    (`hf auth login`) or have set HF_TOKEN.
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Folder of the model or the index."""

    repository: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="REPOSITORY")]
    """owner/name; created if it does not exist."""

    private: bool = False
    """Make a new repository private."""

    license: str = "unknown"
    """Licence, by the hub's short name, such as mit or cc-by-4.0."""

    dataset: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[NAME ...]")] = ()
    """For a model: names of its training data."""

    results: OptionalFile = None
    """For a model: the results.json that `genius evaluate` wrote, for the card."""

    model: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """For an index: the name of its model on the hub."""

    dry_run: bool = False
    """Show the files and the card, and publish nothing."""

    def run(self) -> None:
        """Publish the folder."""
        from genius_search.hub.pull import LAYOUTS
        from genius_search.hub.push import check_repository, list_files, push_folder

        check_repository(self.repository)
        kind = self._kind()
        repo_type = LAYOUTS[kind].repo_type
        files: list[tuple[str, int]] = []
        address = None
        with TerminalProgress() as progress:

            def review(folder: Path) -> None:
                files.extend(list_files(folder))
                progress.say(f"to publish as {self.repository} ({repo_type}):")
                _list(progress, files)
                if kind == "index":
                    progress.say(
                        "Note: the items' texts, fields and ids are published, but not their pictures"
                    )
                if not self.dry_run:
                    self._confirm(f"Publish {format_bytes(sum(size for _, size in files))}?")

            if self.dry_run:
                with tempfile.TemporaryDirectory() as temporary:
                    folder = Path(temporary) / "folder"
                    self._write(kind, folder)
                    review(folder)
                    if not self.json:
                        print((folder / "README.md").read_text(encoding="utf-8"))
            else:
                from genius_search.index.publish import OBSOLETE

                address = push_folder(
                    partial(self._write, kind),
                    self.repository,
                    repo_type=repo_type,
                    private=self.private,
                    review=review,
                    obsolete=OBSOLETE if kind == "index" else (),
                )
                progress.say(f"published: {address}")
        if self.json:
            print_json(
                {
                    "repository": self.repository,
                    "kind": repo_type,
                    "address": address,
                    "files": [{"path": path, "bytes": size} for path, size in files],
                }
            )

    def _kind(self) -> Kind:
        """Return the kind of the folder, and refuse flags for the other kind."""
        from genius_search.hub.pull import LAYOUTS

        if (self.folder / LAYOUTS["index"].marker).exists():
            if self.dataset or self.results is not None:
                raise UsageError(
                    f"{self.folder} is an index, and --dataset and --results are for a model's card; leave "
                    "them out, or give the model's folder"
                )
            return "index"
        if (self.folder / LAYOUTS["model"].marker).exists():
            if self.model is not None:
                raise UsageError(
                    f"{self.folder} is a model, and --model names the model of an index; leave it out, or "
                    "give the index's folder"
                )
            return "model"
        raise ArtifactMissing(f"{self.folder} is neither a finished model nor an index")

    def _write(self, kind: Kind, folder: Path) -> None:
        """Write what is to be published to a folder."""
        if kind == "index":
            from genius_search.index.publish import save_index

            save_index(self.folder, folder, name=self.repository, license=self.license, model=self.model)
        else:
            from genius_search.model.publish import save_model

            save_model(
                self.folder,
                folder,
                name=self.repository,
                license=self.license,
                datasets=self.dataset,
                results=self.results,
            )


def _check(kind: Kind, folder: Path) -> None:
    """Check a folder that was made elsewhere."""
    if kind == "model":
        from genius_search.model.publish import check_model

        check_model(folder, verify=True)
    elif kind == "index":
        from genius_search.index.publish import check_index

        check_index(folder, read_all=True)


def _list(progress: TerminalProgress, files: Sequence[tuple[str, int]]) -> None:
    for path, size in files:
        progress.say(f"  {format_bytes(size):>10}  {path}")


def _next_command(plan: PullPlan, folder: Path) -> str:
    """Return the command that uses what was pulled."""
    from genius_search.hub.checkpoints import CHECKPOINTS

    match plan.kind:
        case "original":
            checkpoint = CHECKPOINTS[plan.name]
            return checkpoint.next_command.format(
                *(shlex.quote(str(folder / path)) for path in checkpoint.files)
            )
        case "model":
            from genius_search.model import read_model_file

            place = read_model_file(folder).encoder.spec.partition(":")[2]
            if not place.startswith("./"):
                return f"genius pull {place}, which is its encoder"
            return f"genius index create photos.index --model {shlex.quote(str(folder))} --pool PHOTOS"
        case "index":
            return f'genius search {shlex.quote(str(folder))} "what you look for" --model MODEL'
        case _:
            return f"genius fit DATA --encoder clip:{plan.name} --out MODEL"
