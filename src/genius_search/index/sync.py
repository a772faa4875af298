"""Bringing an index up to date with its folders: which files were added, changed, moved or deleted.

An item is never deleted because a disk, a folder or a file cannot be read, or because most of a
folder is missing; nor while a folder that files may have moved into cannot be read.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from genius_search.data.folder import IGNORE_FILE
from genius_search.errors import BadData, UsageError, plural
from genius_search.index.build import (
    ChangeSummary,
    PlannedChange,
    PoolChanges,
    find_changes,
    write_changes,
)
from genius_search.index.items import Item
from genius_search.index.pool import open_roots
from genius_search.index.roots import file_of_item, find_moved, innermost_root, is_gone, new_root
from genius_search.index.snapshot import Snapshot
from genius_search.index.source import item_encoder
from genius_search.index.store import Root
from genius_search.index.writer import Writer
from genius_search.model import Genius
from genius_search.progress import Progress
from genius_search.records import composed

Fate: TypeAlias = Literal["stays", "moved", "excluded", "unreadable", "lost"]
"""Fate of a stored item that was not read; see :meth:`_FateRules.fate`."""


class _UnreadItems(NamedTuple):
    """Stored items whose files were not among the files that were read."""

    moved: dict[str, str]
    """New id of an item -> its present id."""
    deleted: list[Item]
    missing: list[Item]
    """Items that stay unless the user allows to delete missing ones."""


class _Selection(NamedTuple):
    """The roots of an index after a change, and the part of them to read."""

    roots: tuple[Root, ...]
    numbers: list[int]
    """Numbers of the roots to read."""
    within: Path | None = None
    """Path that items are read below; None reads the whole roots."""


def update_from_roots(
    writer: Writer,
    model: Genius,
    path: Path | None,
    *,
    captions: bool = True,
    exclude: Sequence[str] = (),
    deletes: bool,
    delete_missing: int | None = None,
    dry_run: bool = False,
    progress: Progress,
) -> ChangeSummary:
    """Add new and changed files of the roots, and with ``deletes`` delete items of removed files.

    See :meth:`genius_search.Index.add` and :meth:`genius_search.Index.sync`.

    Parameters
    ----------
    path
        The folder or file to read, which may be a new root; None reads all roots.
    delete_missing
        Delete missing items, too, unless more items than this would be deleted.
    """
    snapshot = writer.snapshot
    selection = _select_roots(
        writer, path, captions=captions, exclude=exclude, may_be_new=not deletes, progress=progress
    )
    pool, divides = open_roots(*selection), snapshot.manifest.has_own_model
    pool_changes = find_changes(writer.folder, pool, model.encoder, snapshot, divides=divides)
    unread = _find_unread_items(
        snapshot, pool_changes, selection.numbers if deletes else (), selection.within
    )
    if delete_missing is not None:
        unread = _UnreadItems(unread.moved, unread.deleted + unread.missing, [])
        if len(unread.deleted) > delete_missing:
            raise UsageError(
                f"{plural(len(unread.deleted), 'item')} would be deleted, more than the "
                f"{delete_missing} that you allow, so nothing is changed; a dry run lists them"
            )
    _report_missing(writer, selection.roots, unread.missing, progress)
    if dry_run:
        summary = _plan(pool_changes, unread)
    else:
        with item_encoder(writer.folder, model.encoder) as work:
            pool_changes.compute_features(work, progress)
            if not deletes:
                pool_changes.require_any()
            if selection.roots != snapshot.manifest.roots:
                writer.update_manifest(roots=selection.roots)
            old_ids = [*unread.moved.values(), *(item.id for item in unread.deleted)]
            summary = write_changes(writer, model, pool_changes, progress, delete=old_ids)
    summary.moved = len(unread.moved)
    summary.deleted = len(unread.deleted)
    summary.missing = len(unread.missing)
    return summary


def _select_roots(
    writer: Writer,
    given_path: Path | None,
    *,
    captions: bool,
    exclude: Sequence[str],
    may_be_new: bool,
    progress: Progress,
) -> _Selection:
    """Return the roots to read: all, those at or below a path, a moved one, or a new one."""
    snapshot = writer.snapshot
    roots = snapshot.manifest.roots
    if given_path is None:
        if not roots:
            raise UsageError(f"{writer.folder} follows no folder; `genius index add` adds one")
        return _Selection(roots, [*range(len(roots))])
    path = Path(os.path.abspath(given_path))  # noqa: PTH100  links are kept
    if innermost_root(roots, path) is None:
        path = Path(os.path.realpath(given_path))  # Path.resolve raises for links in a circle
    number = innermost_root(roots, path)
    inner_numbers = [inner for inner, root in enumerate(roots) if path in Path(root.folder).parents]
    must_exist = number is None or may_be_new
    if must_exist and not os.path.exists(path):  # noqa: PTH110  False whatever the error
        raise BadData(f"{given_path}: there is no such file or folder")
    if number is not None:
        _check_rules(roots[number], captions=captions, exclude=exclude)
        is_whole_root = str(path) == roots[number].folder
        return _Selection(roots, [number, *inner_numbers], None if is_whole_root else path)
    moved_number = find_moved(roots, path, snapshot)
    if moved_number is not None:
        progress.say(f"{roots[moved_number].folder} has moved to {path}")
        moved_root = roots[moved_number].model_copy(update={"folder": str(path)})
        roots = (*roots[:moved_number], moved_root, *roots[moved_number + 1 :])
        return _Selection(roots, [moved_number, *inner_numbers])
    if may_be_new:
        prefixes = {item_id.partition("/")[0] for item_id in snapshot.ids()}
        root = new_root(path, roots, prefixes, captions=captions, exclude=exclude)
        if root.name:
            progress.say(f"the ids of files in {path} begin with {root.name}")
        return _Selection((*roots, root), [*inner_numbers, len(roots)])
    if inner_numbers:
        return _Selection(roots, inner_numbers)
    followed = ", ".join(root.folder for root in roots) or "none"
    raise UsageError(
        f"{given_path} is in no folder that {writer.folder} follows ({followed}); add it first"
    )


def _check_rules(root: Root, *, captions: bool, exclude: Sequence[str]) -> None:
    """Raise :class:`UsageError` for rules that a root was not added with."""
    if not {*exclude} <= {*root.exclude} or captions < root.captions:
        raise UsageError(
            f"{root.folder} was added with other rules; to leave out more of it, write patterns "
            f"into {root.folder}/{IGNORE_FILE}"
        )


def _report_missing(
    writer: Writer, roots: Sequence[Root], missing: Sequence[Item], progress: Progress
) -> None:
    """Say how many items of each root are missing, and how to delete them."""
    counts = Counter(roots[item.root or 0].folder for item in missing)
    for folder, count in counts.items():
        progress.say(
            f"{folder}: the files of {plural(count, 'item')} are missing or cannot be read, and "
            "nothing is deleted; if the folder has moved, sync its new location; "
            f"`genius index sync {writer.folder} --delete-missing {len(missing)}` deletes all "
            "such items"
        )


class _FateRules:
    """Rules for stored items whose files were not among the files that were read."""

    def __init__(
        self,
        pool_changes: PoolChanges,
        numbers: Collection[int],
        within: Path | None,
    ) -> None:
        self._roots = pool_changes.pool.roots
        self._numbers = numbers
        self._within = None if within is None else composed(str(within))
        self._unreadable = {composed(entry.file) for entry in pool_changes.left_out}
        self.new_ids: dict[str | None, list[str]] = defaultdict(list)
        """Content of a stored item -> ids of new files with that content."""
        for change, item in pool_changes.items():
            if change.source is not None and change.stored is None:
                self.new_ids[change.source.content].append(item.id)

    def fate(self, item: Item) -> Fate:
        """Return the fate of an item of a root that was not read.

        The first row that applies counts:

        ================================================ ========== ==============================
        The item's file                                  Fate       Effect on the item
        ================================================ ========== ==============================
        is gone, and a new file has the same content     moved      gets the id of the new file
        is not in the roots, or the path, to synchronise stays      none
        exists, but a folder above it is unreadable      stays      none
        exists                                           excluded   is deleted
        is missing, and a folder above is unreadable     unreadable is reported as missing
        is missing                                       lost       is deleted, unless most of its
                                                                    root is lost
        ================================================ ========== ==============================

        A file is excluded if a pattern leaves it out, or if another root contains it now.
        """
        if self.new_ids.get(item.content) and is_gone(self._roots, item):
            return "moved"
        file = composed(file_of_item(self._roots, item))
        file_and_folders = {file, *map(str, Path(file).parents)}
        if item.root not in self._numbers:
            return "stays"
        if self._within is not None and self._within not in file_and_folders:
            return "stays"
        exists = os.path.lexists(item.image or file)
        if not file_and_folders.isdisjoint(self._unreadable):
            return "stays" if exists else "unreadable"
        return "excluded" if exists else "lost"


def _find_unread_items(
    snapshot: Snapshot,
    pool_changes: PoolChanges,
    numbers: Collection[int],
    within: Path | None,
) -> _UnreadItems:
    """Return moved items, and the items of some roots to delete and to report as missing.

    The lost items of a root are deleted only if they are at most half of it, and every folder could
    be read: a file from this root may have moved into one that could not.
    """
    rules = _FateRules(pool_changes, numbers, within)
    read_ids = {item.id for item in pool_changes.pool.items()}
    root_sizes: Counter[int] = Counter()
    lost: dict[int, list[Item]] = {number: [] for number in numbers}
    unread = _UnreadItems({}, [], [])
    for item, _ in snapshot.alive():
        if item.root is None:
            continue
        root_sizes[item.root] += 1
        if item.id in read_ids:
            continue
        fate = rules.fate(item)
        if fate == "moved":
            unread.moved[rules.new_ids[item.content].pop()] = item.id
        elif fate == "excluded":
            unread.deleted.append(item)
        elif fate == "unreadable":
            unread.missing.append(item)
        elif fate == "lost":
            lost[item.root].append(item)
    can_read_all = not any(
        os.path.isdir(entry.file)  # noqa: PTH112  False whatever the error
        for entry in pool_changes.left_out
    )
    for number, items in lost.items():
        is_minority = 2 * len(items) <= root_sizes[number]
        (unread.deleted if can_read_all and is_minority else unread.missing).extend(items)
    return unread


def _plan(pool_changes: PoolChanges, unread: _UnreadItems) -> ChangeSummary:
    """Return the summary of a dry run."""
    planned = [*_planned_changes(pool_changes, unread)]
    counts = Counter(change.kind for change in planned)
    return ChangeSummary(
        counts["add"] + counts["update"] + counts["move"],
        counts["update"],
        pool_changes.num_unchanged,
        pool_changes.left_out,
        changes=planned,
    )


def _planned_changes(pool_changes: PoolChanges, unread: _UnreadItems) -> Iterator[PlannedChange]:
    """Yield the changes that a dry run lists; a touched file is not a change."""
    for change, item in pool_changes.items():
        if item.id in unread.moved:
            yield PlannedChange("move", item.id, unread.moved[item.id])
        elif change.action != "touch":
            yield PlannedChange(change.action, item.id)
    for item in unread.deleted:
        yield PlannedChange("delete", item.id)
