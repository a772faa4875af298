"""``genius explain``: the way of an item through a search."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import tyro

from genius_search.cli.options import (
    Conditions,
    JsonOption,
    OpenIndexOptions,
    OptionalInt,
    QueryOptions,
    RouterOption,
    command,
)
from genius_search.cli.terminal import print_json, print_table, print_text
from genius_search.errors import plural

if TYPE_CHECKING:
    from genius_search.index.explain import Explanation, LevelStep, Sibling

NUM_ALTERNATIVES: Final = 3
"""Other codes shown at each level of an explanation."""


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


def _print_explanation(found: Explanation) -> None:
    item = found.item
    print_text(f"{item.id}  {' '.join((item.text or item.image or '').split())}".rstrip())
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
