"""``genius codes`` and ``genius explain``: a look inside the codes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from genius_search.cli.terminal import print_json

if TYPE_CHECKING:
    from genius_search.index.explain import CodeNode, Explanation, SharedPage
    from genius_search.index.items import Item

Modality = Literal["image", "text", "image-text"]
SHOWN_SIBLINGS = 3


@dataclass(frozen=True, kw_only=True)
class Codes:
    """Walk the tree of an index's codes: counts, examples, items that share codes.

    Without a prefix the first level is shown; with some codes, what follows them.
    """

    index: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="INDEX")]
    """Folder of the index."""

    prefix: Annotated[tuple[int, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[CODE ...]")] = ()
    """The first codes of IDs, spaces between."""

    collisions: bool = False
    """List the items that share their whole ID instead."""

    duplicates: Annotated[int | None, tyro.conf.arg(metavar="LEVELS")] = None
    """List the items that share all codes but the last so many instead."""

    examples: int = 4
    """Items shown for each code."""

    most: int = 20
    """Codes or groups shown at most."""

    offset: int = 0
    """Groups to pass over."""

    model: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Where the model is now, if it moved."""

    json: bool = False
    """As JSON."""

    def run(self) -> None:
        """Look and print."""
        from genius_search.errors import UsageError
        from genius_search.index.index import Index

        if (self.collisions or self.duplicates is not None) and self.prefix:
            raise UsageError("--collisions and --duplicates are about all items; leave the prefix out")
        index = Index.open(self.index, model=self.model)
        if self.collisions or self.duplicates is not None:
            page = index.near_duplicates(self.duplicates or 0, offset=self.offset, limit=self.most)
            if self.json:
                print_json(_plain(asdict(page)))
            else:
                _print_groups(page)
            return
        node = index.tree(self.prefix, examples=self.examples, most_children=self.most)
        if self.json:
            print_json(_plain(asdict(node)))
        else:
            _print_node(node)


@dataclass(frozen=True, kw_only=True)
class Explain:
    """Say why a search finds an item, or does not: its way through the codes, level by level.

    Settings are the index's own, as in `genius search`.
    """

    index: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="INDEX")]
    """Folder of the index."""

    text: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="TEXT")] = None
    """What you look for, in words; put it in quotes."""

    item: Annotated[str, tyro.conf.arg(metavar="ID")]
    """The item to follow."""

    image: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A picture of what you look for, or that the text talks about."""

    instruction: Annotated[str | None, tyro.conf.arg(metavar="WORDS")] = None
    """What kind of result is wanted, in words."""

    modality: Annotated[Modality | None, tyro.conf.arg(metavar="{image,text,image-text}")] = None
    """Search only items of this modality."""

    where: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="CONDITION")] = ()
    """Search only items whose fields meet a condition; as in `genius search`."""

    beam: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """IDs kept at each level; the index's own setting if left out."""

    model: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Where the model is now, if it moved."""

    download: bool = False
    """Allow downloading the encoder's weights."""

    json: bool = False
    """As JSON."""

    def run(self) -> None:
        """Follow the item and print."""
        from genius_search.index.index import Index

        index = Index.open(self.index, model=self.model, download=self.download)
        found = index.explain(
            self.item,
            self.text,
            image=self.image,
            instruction=self.instruction,
            modality=self.modality,
            where=self.where,
            beam=self.beam,
        )
        if self.json:
            print_json(_plain(asdict(found)))
        else:
            _print_explanation(found)


def _plain(told: Any) -> Any:
    """The same for JSON: items as objects, modalities by their names."""
    match told:
        case dict():
            return {name: _plain(value) for name, value in told.items()}
        case tuple() if hasattr(told, "_asdict"):
            names = ("id", "modality", "text", "image", "fields")
            return _plain({name: getattr(told, name) for name in names})
        case list() | tuple():
            return [_plain(value) for value in told]
        case _:
            return told


def _shown(item: Item) -> str:
    return " ".join((item.text or item.image or item.id).split())


def _table(*headings: str) -> Table:
    """Numbers to the right, and one column of words that is cut where the terminal ends."""
    table = Table(box=None, padding=(0, 2, 0, 0), expand=True)
    for heading in headings[:-1]:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(headings[-1], no_wrap=True, overflow="ellipsis", ratio=1)
    return table


def _print_node(node: CodeNode) -> None:
    console = Console()
    where = " · ".join(map(str, node.prefix)) or "all IDs"
    console.print(
        f"{where}: {node.items:,} items ({node.share:.2%}); {node.num_children:,} codes follow, "
        f"{node.entropy:.2f} bits",
        highlight=False,
    )
    table = _table("code", "items", "share", "for example")
    for child in node.children:
        table.add_row(
            str(child.code),
            f"{child.items:,}",
            f"{child.share:.1%}",
            Text("; ".join(_shown(item) for item in child.examples)),
        )
    if node.children:
        console.print(table)
    else:
        for item in node.examples:
            console.print(Text(f"{item.id}  {_shown(item)}"), soft_wrap=True)
    if node.truncated:
        console.print(
            f"and {node.num_children - len(node.children):,} more codes; --most shows more", highlight=False
        )


def _print_groups(page: SharedPage) -> None:
    console = Console()
    table = _table("items", "codes", "for example")
    for group in page.groups:
        table.add_row(
            f"{group.items:,}",
            " · ".join(map(str, group.codes)),
            Text("; ".join(f"{item.id} {_shown(item)}" for item in group.examples)),
        )
    if page.groups:
        console.print(table)
    console.print(f"{page.total:,} groups, {page.items:,} items in all", highlight=False)


def _print_explanation(found: Explanation) -> None:
    console = Console()
    console.print(Text(f"{found.item.id}  {_shown(found.item)}"), soft_wrap=True)
    table = _table("level", "code", "probability", "rank", "items", "beam", "more probable, or next")
    for step in found.levels:
        others = [one for one in step.siblings if one.code != step.code][:SHOWN_SIBLINGS]
        table.add_row(
            step.name.removeprefix("level "),
            str(step.code),
            f"{step.probability:.3f}",
            f"{step.rank:,} of {step.num_siblings:,}",
            f"{step.items:,}",
            "" if step.beam_rank is None else f"{step.beam_rank:,}{'' if step.is_kept else ' lost'}",
            Text("; ".join(f"{one.code} {one.probability:.3f} ({one.items:,} items)" for one in others)),
        )
    console.print(table)
    console.print(_verdict(found), highlight=False)


def _verdict(found: Explanation) -> str:
    """What became of the item, in a sentence."""
    if not found.is_allowed:
        return "The search may not find it: it is of another modality, or a condition leaves it out."
    if found.rank is not None:
        return f"Found: rank {found.rank:,} of {found.touched:,} items looked at, score {found.score:.4f}."
    if found.lost_at is None:
        return "Not found, though no beam dropped it: the generator gives it no probability at all."
    remedy = (
        "no beam that was tried keeps it"
        if found.kept_by_beam is None
        else f"a beam of {found.kept_by_beam:,} keeps it (--beam)"
    )
    return f"Not found: the beam of {found.beam:,} drops it at {found.levels[found.lost_at].name}; {remedy}."
