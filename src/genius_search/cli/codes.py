"""``genius codes`` and ``genius explain``: inspect the codes of an index."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import tyro

from genius_search.cli.options import (
    Conditions,
    IndexArgument,
    JsonOption,
    OpenIndexOptions,
    OptionalFolder,
    OptionalInt,
    QueryOptions,
    RouterOption,
    command,
)
from genius_search.cli.terminal import print_json, print_table, print_text
from genius_search.errors import UsageError, plural

if TYPE_CHECKING:
    from genius_search.index.explain import CodeNode, Explanation, LevelStep, SharedPage, Sibling
    from genius_search.index.items import Item

NUM_ALTERNATIVES: Final = 3
"""Other codes shown at each level of an explanation."""


@command
class Codes(IndexArgument, JsonOption):
    """Walk the tree of an index's codes: counts, examples, items that share codes.

    Without a prefix it shows the first level; with some codes, what follows them.
    """

    prefix: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[CODE ...]")] = ()
    """First codes of an ID, separated by spaces."""

    collisions: bool = False
    """List the items that share their whole ID instead."""

    duplicates: Annotated[int | None, tyro.conf.arg(metavar="LEVELS", help_behavior_hint="")] = None
    """List the items that share all codes but those of the last LEVELS levels instead."""

    examples: int = 4
    """Items shown for each code."""

    most: int = 20
    """Codes or groups shown at most."""

    offset: int = 0
    """Groups to skip."""

    model: OptionalFolder = None
    """Folder of the model; needed only if it was moved."""

    def run(self) -> None:
        """Print a node of the tree, or groups of items."""
        from genius_search.index.index import Index

        lists_groups = self.collisions or self.duplicates is not None
        if lists_groups and self.prefix:
            raise UsageError("--collisions and --duplicates are about all items; leave the prefix out")
        try:
            prefix = tuple(map(int, self.prefix))
        except ValueError:
            raise UsageError("codes are numbers, for example: 0 107") from None
        index = Index.open(self.index, model=self.model)
        if lists_groups:
            page = index.near_duplicates(self.duplicates or 0, offset=self.offset, limit=self.most)
            if self.json:
                print_json(_plain(asdict(page)))
            else:
                _print_groups(page)
        else:
            node = index.tree(prefix, examples=self.examples, most_children=self.most)
            if self.json:
                print_json(_plain(asdict(node)))
            else:
                _print_node(node)


@command
class Explain(QueryOptions, OpenIndexOptions, JsonOption):
    """Explain why a search finds an item, or does not: its way through the codes, level by level.

    Settings are those of the index, as in `genius search`.
    """

    item: Annotated[str, tyro.conf.arg(metavar="ID")]
    """Id of the item to follow."""

    where: Conditions = ()
    """Search only items whose fields meet a condition; as in `genius search`."""

    beam: OptionalInt = None
    """IDs kept at each level; default: the index's own setting."""

    router: RouterOption = None
    """What the search is led by; default: the index's own setting."""

    def run(self) -> None:
        """Follow the item and print its way."""
        index = self.open_index()
        config = index.settings if self.router is None else replace(index.settings, router=self.router)
        found = index.explain(
            self.item,
            self.text,
            image=self.image,
            instruction=self.instruction,
            modality=self.modality,
            where=self.where,
            beam=self.beam,
            config=config,
        )
        if self.json:
            print_json(_plain(asdict(found)))
        else:
            _print_explanation(found)


def _plain(value: Any) -> Any:
    """Return a value for JSON: items become objects with their fields."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if hasattr(value, "_asdict"):
        return {name: getattr(value, name) for name in ("id", "modality", "text", "image", "fields")}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _summary(item: Item) -> str:
    return " ".join((item.text or item.image or item.id).split())


def _print_node(node: CodeNode) -> None:
    prefix = " · ".join(map(str, node.prefix)) or "all IDs"
    print(
        f"{prefix}: {plural(node.items, 'item')} ({node.share:.2%}), followed by "
        f"{plural(node.num_children, 'code')}, "
        f"{node.entropy:.2f} bits"
    )
    if node.children:
        rows = [
            (str(one.code), f"{one.items:,}", f"{one.share:.1%}", "; ".join(map(_summary, one.examples)))
            for one in node.children
        ]
        print_table(("code", "items", "share", "for example"), rows, fill=True)
    else:
        for item in node.examples:
            print_text(f"{item.id}  {_summary(item)}")
    if node.truncated:
        print(f"and {plural(node.num_children - len(node.children), 'code')} more; --most shows more")


def _print_groups(page: SharedPage) -> None:
    rows = [
        (
            f"{group.items:,}",
            " · ".join(map(str, group.codes)),
            "; ".join(f"{item.id} {_summary(item)}" for item in group.examples),
        )
        for group in page.groups
    ]
    if rows:
        print_table(("items", "codes", "for example"), rows, fill=True)
    print(f"{plural(page.total, 'group')}, {plural(page.items, 'item')} in all")


def _print_explanation(found: Explanation) -> None:
    print_text(f"{found.item.id}  {_summary(found.item)}")
    rows = []
    for step in found.levels:
        others = [one for one in step.siblings if one.code != step.code][:NUM_ALTERNATIVES]
        rows.append(
            [
                step.name.removeprefix("level "),
                str(step.code),
                _probability(step),
                f"{step.rank:,} of {step.num_siblings:,}",
                f"{step.items:,}",
                "; ".join(
                    f"{one.code} {_probability(one)} ({plural(one.items, 'item')})".replace("  ", " ")
                    for one in others
                ),
            ]
        )
    columns = ["level", "code", "probability", "rank", "items", "more probable, or next"]
    if any(step.probability is None for step in found.levels):
        columns[-1] = "nearer to the query, or next"
        for row in (columns, *rows):
            del row[2]
    print_table(columns, rows, fill=True)
    if not found.is_allowed:
        print("The search may not find it: it has another modality, or a condition excludes it.")
    elif found.rank is not None:
        print(f"Found: rank {found.rank:,} of {found.touched:,} ranked items, score {found.score:.4f}.")
    else:
        print(
            f"Not found: it is not among the {found.touched:,} items that the search ranked with a beam of "
            f"{found.beam:,}; a wider --beam may reach it."
        )


def _probability(one: LevelStep | Sibling) -> str:
    return "" if one.probability is None else f"{one.probability:.3f}"
