"""``genius index update``, ``count`` and ``scroll``: change, count and list stored items."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro

from genius_search.cli.options import (
    IndexArgument,
    JsonOption,
    OpenIndexOptions,
    OptionalFile,
    OptionalInt,
    OptionalName,
    WaitOption,
    Words,
    command,
    optional,
)
from genius_search.cli.terminal import print_json, print_text, to_json
from genius_search.errors import BadData, UsageError, plural


@command
class ConditionOptions:
    """A command on the items that meet conditions."""

    where: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="CONDITION")
    ] = ()
    """Only items whose fields meet all conditions: 'price<20 and brand=acme'."""

    match: Words = None
    """Only items whose text contains these words: this OR that -without "a phrase" begin*."""

    def conditions(self) -> dict[str, Any]:
        """Return the conditions as arguments of the methods of an index."""
        return {"where": self.where, "match": self.match}


@command
class Update(WaitOption, OpenIndexOptions, JsonOption):
    """Change fields and texts of items without their vectors.

    An item that was added as a vector keeps it if its text changes; any other one is encoded again.
    The exit status is 3 if the index has none of the ids.
    """

    ids: Annotated[tuple[str, ...], tyro.conf.Positional, optional("[ID ...]")] = ()
    """Ids of the items to change alike."""

    field: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="NAME=VALUE")
    ] = ()
    """New value of a field: price=9.5, 'tags=["new", "red"]', a text, or nothing to remove the
    field: sale=. Other fields stay."""

    text: Words = None
    """New text."""

    changes: OptionalFile = None
    """Instead of ids: a file with a JSON object per line: {"id": "a", "fields": {"price": 9,
    "sale": null}, "text": "new"}, without fields or text if they stay."""

    def run(self) -> int:
        if (self.changes is None) is not bool(self.ids):
            raise UsageError("give either ids, or a file of changes with --changes")
        if self.changes is not None and (self.field or self.text is not None):
            raise UsageError("--changes has the fields and texts; leave out --field and --text")
        ids: list[str] = [*self.ids]
        options: dict[str, Any] = {"text": self.text}
        if self.field:
            options["fields"] = dict(map(_parse_assignment, self.field))
        if self.changes is not None:
            ids, options = _read_changes(self.changes)
        result = self.open_index().update(ids, **options, wait_seconds=self.wait)
        if self.json:
            left_out = [{"id": entry.file, "reason": entry.reason} for entry in result.left_out]
            print_json({**result._asdict(), "left_out": left_out})
        else:
            for missing_id in result.missing:
                print_text(f"not in the index: {missing_id}", error=True)
            for entry in result.left_out:
                print_text(f"unchanged: {entry.file}: {entry.reason}", error=True)
            print(f"{plural(result.updated, 'item')} updated", file=sys.stderr)
        return 3 if len(result.missing) == len(set(ids)) else 0


def _parse_assignment(assignment: str) -> tuple[str, Any]:
    """Return the name and the value of a field; a value that is not JSON is a text."""
    name, separator, value = assignment.partition("=")
    if not (name and separator):
        raise UsageError(f"--field {assignment!r}: expected NAME=VALUE")
    try:
        return name, json.loads(value) if value else None
    except ValueError:
        return name, value


def _read_changes(file: Path) -> tuple[list[str], dict[str, Any]]:
    """Return the ids of a file of changes, and the fields and texts of each."""
    from pydantic import BaseModel, BeforeValidator

    from genius_search.border import as_id
    from genius_search.data.mbeir import read_json_lines

    class Line(BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
        id: Annotated[str, BeforeValidator(as_id)]
        fields: dict[str, Any] | None = None
        text: str | None = None

    lines = [line for _, line in read_json_lines(file, Line.model_validate)]
    if not lines:
        raise BadData(f"{file} contains no changes")
    options = {"fields": [line.fields for line in lines], "text": [line.text for line in lines]}
    return [line.id for line in lines], options


@command
class Count(ConditionOptions, JsonOption, IndexArgument):
    """Print the number of items that meet conditions, or of all items."""

    def run(self) -> None:
        from genius_search.index.listing import as_filter, count_items
        from genius_search.index.snapshot import Snapshot

        count = count_items(Snapshot.open(self.index), as_filter(**self.conditions()))
        print_json({"items": count}) if self.json else print(count)


@command
class Scroll(ConditionOptions, IndexArgument):
    """Print items as JSON, one per line, in the order of their ids.

    Without --limit, all items are printed. With it, a last line has the cursor of the next page, if
    there is one: each item that exists from the first page to the last is printed exactly once,
    whatever changes in between.
    """

    limit: OptionalInt = None
    """Number of items of the page."""

    cursor: OptionalName = None
    """Cursor of the page before."""

    def run(self) -> None:
        from genius_search.index.listing import as_filter, list_page
        from genius_search.index.snapshot import Snapshot

        conditions = as_filter(**self.conditions())
        snapshot = Snapshot.open(self.index)
        cursor = self.cursor
        while True:
            page = list_page(snapshot, conditions, cursor, self.limit or 1000)
            for item in page.items:
                names = ("id", "modality", "text", "image", "fields")
                print(to_json({name: getattr(item, name) for name in names}))
            cursor = page.cursor
            if cursor is None or self.limit is not None:
                break
        if cursor is not None:
            print(to_json({"cursor": cursor}))
