"""Bringing an index up to date with the folders that it follows: what was added, changed, moved, deleted.

Nothing is deleted because a disk, a folder or a file cannot be read, or because most of a folder is gone; nor
while a folder cannot be read into which files may have been moved.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from genius_search.data.folder import IGNORE_FILE
from genius_search.errors import BadData, UsageError, plural
from genius_search.index.build import (
    Changes,
    ChangeSummary,
    PlannedChange,
    find_changes,
    write_changes,
)
from genius_search.index.items import Item
from genius_search.index.pool import open_roots
from genius_search.index.roots import file_of_item, find_moved, innermost_root, is_gone, new_root
from genius_search.index.snapshot import Snapshot
from genius_search.index.source import saved_features
from genius_search.index.store import Root
from genius_search.index.writer import Writer
from genius_search.model import Genius
from genius_search.progress import Progress
from genius_search.records import composed


class _Gone(NamedTuple):
    """Items of the roots that were read, whose files were not found."""

    moved: dict[str, str]
    """Id that an item has now -> the one that it had."""
    deleted: list[Item]
    kept: list[Item]
    """Items that are not deleted unless the user says so."""


def update_from_roots(
    writer: Writer,
    model: Genius,
    given: Path | None,
    *,
    captions: bool = True,
    exclude: Sequence[str] = (),
    deletes: bool,
    delete_missing: int | None = None,
    dry_run: bool = False,
    progress: Progress,
) -> ChangeSummary:
    """Add what is new in the roots, or in one path; with ``deletes``, delete what is not there any more.

    See :meth:`genius_search.Index.add` and :meth:`genius_search.Index.sync`.
    """
    snapshot = writer.snapshot
    roots, numbers, within = _choose(
        writer, given, captions=captions, exclude=exclude, may_be_new=not deletes, progress=progress
    )
    pool, divides = open_roots(roots, numbers, within), snapshot.manifest.has_own_model
    changes = find_changes(writer.folder, pool, model.encoder, snapshot, divides=divides)
    gone = _find_gone(snapshot, changes, numbers if deletes else (), within)
    if delete_missing is not None:
        gone = _Gone(gone.moved, gone.deleted + gone.kept, [])
        if len(gone.deleted) > delete_missing:
            raise UsageError(
                f"{plural(len(gone.deleted), 'item')} would be deleted, more than the {delete_missing} that "
                "you allow, so nothing is changed; a dry run lists them"
            )
    for folder, count in Counter(roots[item.root or 0].folder for item in gone.kept).items():
        progress.say(
            f"{folder}: files of {plural(count, 'item')} are not there or cannot be read, and nothing is "
            f"deleted; if it moved, sync its new place; `genius index sync {writer.folder} --delete-missing "
            f"{len(gone.kept)}` deletes all such items"
        )
    if dry_run:
        listed = [*_list_changes(changes, gone)]
        kinds = Counter(change.kind for change in listed)
        added = kinds["add"] + kinds["update"] + kinds["move"]
        done = ChangeSummary(
            added, kinds["update"], changes.num_unchanged, changes.left_out, changes=listed
        )
    else:
        with saved_features(writer.folder, model.encoder) as work:
            changes.encode(work, progress)
            if not deletes:
                changes.require_any()
            if roots != snapshot.manifest.roots:
                writer.update_manifest(roots=roots)
            ids = [*gone.moved.values(), *(item.id for item in gone.deleted)]
            done = write_changes(writer, model, changes, progress, delete=ids)
    done.moved, done.deleted, done.missing = len(gone.moved), len(gone.deleted), len(gone.kept)
    return done


def _choose(
    writer: Writer,
    given: Path | None,
    *,
    captions: bool,
    exclude: Sequence[str],
    may_be_new: bool,
    progress: Progress,
) -> tuple[tuple[Root, ...], list[int], Path | None]:
    """Return the roots, with a new or moved one, those to read, and the path within which they are read."""
    snapshot = writer.snapshot
    roots = snapshot.manifest.roots
    if given is None:
        if not roots:
            raise UsageError(f"{writer.folder} follows no folder; `genius index add` adds one")
        return roots, [*range(len(roots))], None
    path = Path(os.path.abspath(given))  # noqa: PTH100  links are kept
    if innermost_root(roots, path) is None:
        path = given.resolve()
    number = innermost_root(roots, path)
    inside = [one for one, root in enumerate(roots) if path in Path(root.folder).parents]
    if (number is None or may_be_new) and not os.path.exists(path):  # noqa: PTH110  False whatever the error
        raise BadData(f"{given}: there is no such file or folder")
    if number is not None:
        _check_rules(roots[number], captions=captions, exclude=exclude)
        return roots, [number, *inside], None if str(path) == roots[number].folder else path
    moved = find_moved(roots, path, snapshot)
    if moved is not None:
        progress.say(f"{roots[moved].folder} has moved to {path}")
        place = roots[moved].model_copy(update={"folder": str(path)})
        return (*roots[:moved], place, *roots[moved + 1 :]), [moved, *inside], None
    if may_be_new:
        taken = {name.partition("/")[0] for name in snapshot.ids()}
        new = new_root(path, roots, taken, captions=captions, exclude=exclude)
        if new.name:
            progress.say(f"ids of what is in {path} begin with {new.name}")
        return (*roots, new), [*inside, len(roots)], None
    if inside:
        return roots, inside, None
    followed = ", ".join(root.folder for root in roots) or "none"
    raise UsageError(
        f"{given} is in no folder that {writer.folder} follows ({followed}); add it first"
    )


def _check_rules(root: Root, *, captions: bool, exclude: Sequence[str]) -> None:
    if not {*exclude} <= {*root.exclude} or captions < root.captions:
        raise UsageError(
            f"{root.folder} is followed already, as it was asked for first; to leave out more of it, write "
            f"patterns into {root.folder}/{IGNORE_FILE}"
        )


def _find_gone(
    snapshot: Snapshot, changes: Changes, numbers: Collection[int], within: Path | None
) -> _Gone:
    """Find items that were not read: moved ones, and those of some roots to delete and to keep."""
    roots = changes.pool.roots
    present = {item.id for item in changes.pool.items()}
    blocked = {composed(one.file) for one in changes.left_out}
    new: dict[str | None, list[str]] = {}
    for number, item in changes.changed():
        if number in changes.reused and number not in changes.known:
            new.setdefault(changes.reused[number].content, []).append(item.id)
    moved: dict[str, str] = {}
    lost: dict[int, list[Item]] = {number: [] for number in numbers}
    kept: list[Item] = []
    excluded: list[Item] = []
    """Those whose files are there, and left out by a pattern or read with another root."""
    sizes: Counter[int] = Counter()
    for item, _ in snapshot.alive():
        if item.root is None:
            continue
        sizes[item.root] += 1
        if item.id in present:
            continue
        file = composed(file_of_item(roots, item))
        above = {file, *map(str, Path(file).parents)}
        if new.get(item.content) and is_gone(roots, item):
            moved[new[item.content].pop()] = item.id
        elif item.root in lost and (within is None or composed(str(within)) in above):
            is_there = os.path.lexists(item.image or file)
            if above.isdisjoint(blocked):
                (excluded if is_there else lost[item.root]).append(item)
            elif not is_there:
                kept.append(item)
    is_whole = not any(os.path.isdir(one.file) for one in changes.left_out)  # noqa: PTH112  never raises
    few = [number for number, items in lost.items() if is_whole and 2 * len(items) <= sizes[number]]
    deleted = [*excluded, *(item for number in few for item in lost.pop(number))]
    return _Gone(moved, deleted, [*kept, *itertools.chain.from_iterable(lost.values())])


def _list_changes(changes: Changes, gone: _Gone) -> Iterator[PlannedChange]:
    for number, item in changes.changed():
        if item.id in gone.moved:
            yield PlannedChange("move", item.id, gone.moved[item.id])
        elif number not in changes.known:
            yield PlannedChange("add", item.id)
        elif not changes.is_touched(number):
            yield PlannedChange("update", item.id)
    yield from (PlannedChange("delete", item.id) for item in gone.deleted)
