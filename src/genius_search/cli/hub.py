"""``genius pull`` and ``genius push``: from and to the Hugging Face hub."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from genius_search.cli.terminal import TerminalProgress, print_json

if TYPE_CHECKING:
    from genius_search.hub.pull import PullPlan


@dataclass(frozen=True, kw_only=True)
class Pull:
    """Fetch a model, an index or an encoder from the hub: shows sizes, asks, resumes, verifies.

    Names are those of the hub: owner/name, or datasets/owner/name for an index. The authors' own checkpoints
    have short ones: clip-sf and genius.
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """owner/name, datasets/owner/name, clip-sf or genius."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """A plain folder to fetch to; default: the hub library's cache, where the name finds it."""

    revision: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """A branch, tag or commit; default: the main branch."""

    yes: bool = False
    """Do not ask."""

    dry_run: bool = False
    """Only say what would be fetched."""

    json: bool = False
    """Say what was fetched as JSON on stdout."""

    def run(self) -> None:
        """Fetch it."""
        from genius_search.errors import NetworkNeeded
        from genius_search.hub.files import HubNotAsked
        from genius_search.hub.pull import plan_pull, pull, pulled_before

        with TerminalProgress() as progress:
            try:
                plan = plan_pull(self.name, revision=self.revision)
            except NetworkNeeded as error:
                here = None if self.out else pulled_before(self.name, revision=self.revision)
                if here is None:
                    raise
                reason = (
                    f"the hub was not asked because {error.reason}"
                    if isinstance(error, HubNotAsked)
                    else f"whether the hub has a newer one is not known: {error}"
                )
                progress.say(f"{self.name} is here, in {here.folder}; {reason}")
                if self.json:
                    print_json(_fetched(here.repository, here.what, here.commit, here.folder, here.files, ()))
                return
            progress.say(f"{plan.listing.repository} ({plan.what}, commit {plan.listing.commit[:12]}) holds")
            _show(progress, [(file.path, file.bytes) for file in plan.listing.files])
            if plan.left_out:
                progress.say(f"left out, since nothing of it needs them: {', '.join(plan.left_out)}")
            to_come = plan.bytes if self.out else plan.bytes_to_come
            progress.say(f"to fetch: {size(to_come)} of {size(plan.bytes)}")
            folder = None
            if not self.dry_run:
                if to_come:
                    _ask(f"Fetch {size(to_come)}?", yes=self.yes)
                folder = pull(plan, self.out, progress=progress)
                progress.say(f"verified; it is in {folder}")
                progress.say(f"next: {_next(plan, folder)}")
        if self.json:
            files = [(file.path, file.bytes) for file in plan.listing.files]
            listing = plan.listing
            print_json(_fetched(listing.repository, plan.what, listing.commit, folder, files, plan.left_out))


@dataclass(frozen=True, kw_only=True)
class Push:
    """Publish a model, or an index as a data set, with a card: shows what goes out, and asks.

    Training features, checkpoints and evaluation runs never go out. You must be logged in (`hf auth login`)
    or have set HF_TOKEN.
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Folder of the model or the index."""

    repository: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="REPOSITORY")]
    """owner/name; it is made when it is not there."""

    private: bool = False
    """Make a new repository private."""

    license: str = "unknown"
    """Licence of what goes out, by the hub's short name, such as mit or cc-by-4.0."""

    dataset: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[NAME ...]")] = ()
    """Of a model: names of its training data."""

    results: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Of a model: the results.json that `genius evaluate` wrote, for the card."""

    model: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Of an index: where its model is on the hub."""

    yes: bool = False
    """Do not ask."""

    dry_run: bool = False
    """Only say what would go out, and print the card."""

    json: bool = False
    """Say what went out as JSON on stdout."""

    def run(self) -> None:
        """Publish it."""
        from genius_search.hub.push import About, Staged, push, staged

        about = About(license=self.license, datasets=self.dataset, results=self.results, model=self.model)
        seen: list[Staged] = []
        with TerminalProgress() as progress:

            def review(ready: Staged) -> None:
                seen.append(ready)
                progress.say(f"to publish as {self.repository} ({ready.kind}):")
                _show(progress, ready.files)
                if ready.kind == "dataset":
                    progress.say(
                        "Beware: the items' texts, fields and ids and the paths of their pictures go out too"
                    )
                if not self.dry_run:
                    _ask(f"Publish {size(sum(count for _, count in ready.files))}?", yes=self.yes)

            address = None
            if self.dry_run:
                with staged(self.folder, self.repository, about, progress=progress) as ready:
                    review(ready)
                    if not self.json:
                        print((ready.folder / "README.md").read_text(encoding="utf-8"))
            else:
                address = push(
                    self.folder,
                    self.repository,
                    about,
                    private=self.private,
                    review=review,
                    progress=progress,
                )
                progress.say(f"published: {address}")
        if self.json:
            print_json(
                {
                    "repository": self.repository,
                    "kind": seen[0].kind,
                    "address": address,
                    "files": [{"path": path, "bytes": count} for path, count in seen[0].files],
                }
            )


def _fetched(
    repository: str,
    what: str,
    commit: str,
    folder: Path | None,
    files: Sequence[tuple[str, int]],
    left_out: Sequence[str],
) -> dict[str, object]:
    """What a pull answers to --json, whether it asked the hub or not."""
    return {
        "repository": repository,
        "what": what,
        "commit": commit,
        "folder": None if folder is None else str(folder),
        "bytes": sum(count for _, count in files),
        "files": [{"path": path, "bytes": count} for path, count in files],
        "left_out": list(left_out),
    }


def size(count: int) -> str:
    """Bytes as a person reads them: ``5.13 GB``."""
    for unit, power in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= power:
            return f"{count / power:.2f} {unit}"
    return f"{count} bytes"


def _show(progress: TerminalProgress, files: Sequence[tuple[str, int]]) -> None:
    for path, count in files:
        progress.say(f"  {size(count):>10}  {path}")


def _ask(question: str, *, yes: bool) -> None:
    """Go on only when a person, or --yes, says so."""
    from genius_search.errors import UsageError

    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError("nobody is there to be asked; say --yes to go on, or --dry-run to only look")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("not confirmed; nothing was done")


def _next(plan: PullPlan, folder: Path) -> str:
    """What one would do now."""
    from genius_search.hub.files import ORIGINALS
    from genius_search.model_file import read_model_file

    match plan.what:
        case "original":
            original = ORIGINALS[plan.name]
            return original.next.format(*(folder / path for path in original.files))
        case "model":
            spec = str(read_model_file(folder)["encoder"]["spec"])
            if not spec.partition(":")[2].startswith("./"):
                return f"genius pull {spec.partition(':')[2]}, which is its encoder"
            return f"genius index create photos.index --model {folder} --pool PHOTOS"
        case "index":
            return f'genius search {folder} "what you look for" --model MODEL'
        case _:
            return f"genius fit DATA --encoder clip:{plan.name} --out MODEL"
