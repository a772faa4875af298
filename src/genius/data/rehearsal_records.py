"""Queries and candidates of a rehearsal as the rows of M-BEIR's files, each data set in its own habits.

Keys are absent or null, in one order or another, and sources are JSON inside JSON, as they are in the real
files (spec, sections 1.3 to 1.10).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from genius.data.records import TASKS, Modality
from genius.data.rehearsal_concepts import Concepts, Told
from genius.data.rehearsal_layout import Asking, Member, Shelf
from genius.data.rehearsal_pictures import Pictures, candidate_picture, query_picture, wikidata_id
from genius.data.rehearsal_sizes import LONGEST_TEXT

Row = dict[str, Any]

_WITHOUT_TASK: Final = frozenset({"nights", "fashioniq", "cirr"})
"""Data sets whose training files do not say the task."""
_LONG_EVERY: Final = 8
"""Of so many articles, one is as long as they really are; the others are short to save room."""
_MORE: Final = (
    " Visitors have described it many times, and the accounts agree in most respects. Its history is told in"
    " several books, none of which is easy to come by today. A second part of the article is about the people"
    " who found it, and a third about those who wrote of it later. What is known for certain is little."
    " Further reading is listed below, together with the sources of the figures that were given above."
)


class Records:
    """Makes the rows of every file, and puts pictures where the rows say that they are."""

    def __init__(self, concepts: Concepts, pictures: Pictures, *, seed: int) -> None:
        self._concepts = concepts
        self._pictures = pictures
        self._seed = seed

    def candidates(self, shelf: Shelf) -> Iterator[Row]:
        """All of a pool."""
        return (self.candidate(shelf, member) for member in shelf.members())

    def candidate(self, shelf: Shelf, member: Member) -> Row:
        """One candidate."""
        place, block = member
        dataset = shelf.row.dataset
        modality = TASKS[shelf.row.task_id][1]
        concept = self._concept(shelf, block)
        row: Row = {"txt": None, "img_path": None, "modality": modality.value, "did": shelf.did(place)}
        if modality is not Modality.IMAGE:
            row["txt"] = _candidate_text(shelf, member, self._concepts.told(concept))
        if modality is not Modality.TEXT:
            path = candidate_picture(shelf, place, block)
            row["img_path"] = self._pictures.place(path, concept, dataset)
            if shelf.row.name == "oven_task8" and _last(shelf, place):
                self._pictures.place_widest(path)
        elif dataset == "webqa":
            del row["img_path"]
        if dataset != "visualnews":
            row["src_content"] = _candidate_source(shelf, member)
        return row if place % 2 else dict(reversed(row.items()))

    def queries(self, asking: Asking) -> Iterator[Row]:
        """All of a row in a split."""
        return (self.query(asking, number) for number in range(asking.size))

    def query(self, asking: Asking, number: int) -> Row:
        """One query."""
        block = asking.block(number)
        modality = TASKS[asking.row.task_id][0]
        concept = self._concept(asking.shelf, block)
        text = image = None
        if modality is not Modality.IMAGE:
            text = _query_text(asking, number, self._concepts.told(concept))
        if modality is not Modality.TEXT:
            shown = self._concepts.lookalike(concept) if asking.row.task_id == 7 else concept
            image = self._pictures.place(query_picture(asking, number), shown, asking.row.dataset)
        row: Row = {
            "qid": asking.qid(number),
            "query_txt": text,
            "query_img_path": image,
            "query_modality": modality.value,
            "query_src_content": None,
            "pos_cand_list": asking.positives(block),
            "neg_cand_list": asking.negatives(block),
            "task_id": asking.row.task_id,
        }
        row["query_src_content"] = _query_source(asking, number, row)
        if asking.split == "train" and asking.row.dataset in _WITHOUT_TASK:
            del row["task_id"]
        return row if number % 2 else dict(reversed(row.items()))

    def _concept(self, shelf: Shelf, block: int) -> int:
        return shelf.concept(block, seed=self._seed, concepts=len(self._concepts))


def _last(shelf: Shelf, place: int) -> bool:
    return shelf.kind == "local" and place == shelf.size - 1


def _candidate_text(shelf: Shelf, member: Member, told: Told) -> str:
    place, block = member
    match shelf.row.dataset:
        case "visualnews":
            text = f"Reporters saw a {told.thing} {told.surroundings}."
        case "mscoco":
            text = f"{('A', 'One', 'Some', 'That', 'This')[place % 5]} {told.thing} {told.surroundings}."
        case "fashion200k":
            text = f"{told.thing.capitalize()} print {told.surroundings}."
        case "webqa":
            if shelf.row.task_id == 2:
                text = f"{told.thing.capitalize()} {told.surroundings}."
            else:
                text = _fact(told, place - shelf.places(block).start)
        case "edis":
            text = f"Headline: {told.thing} {told.surroundings} is found."
        case "oven":
            text = f"{told.thing.capitalize()}. It stands {told.surroundings}, as the article says."
        case _:
            text = f"{told.thing.capitalize()}. {_fact(told, _part(shelf, member))}"
    if shelf.row.dataset in {"oven", "infoseek"} and block % _LONG_EVERY == 0:
        text += _MORE
    if shelf.row.name == "oven_task6" and _last(shelf, place):
        text += _MORE * (LONGEST_TEXT // len(_MORE))
        text = text[: LONGEST_TEXT - 1].ljust(LONGEST_TEXT - 1, "m") + "."
    return text


def _part(shelf: Shelf, member: Member) -> int:
    """Which fact a chunk of an article tells: the first one, if it answers what is asked."""
    places = shelf.places(member.block)
    answers = shelf.row.answers
    number = member.place - places.start
    return 0 if answers is None or number < answers.of(member.block) else number


def _fact(told: Told, number: int) -> str:
    fact = told.facts[number % len(told.facts)]
    return f"The {fact.kind} of the {told.thing} {told.surroundings} is {fact.value}."


def _query_text(asking: Asking, number: int, told: Told) -> str:
    match asking.row.dataset:
        case "visualnews":
            text = f"{told.thing.capitalize()} {told.surroundings}, seen by our correspondent."
        case "mscoco":
            text = f"There is a {told.thing} {told.surroundings}."
        case "fashion200k":
            text = f"{told.thing.capitalize()} {told.surroundings}."
        case "webqa" if asking.row.task_id == 1:
            text = f"What is the {told.facts[0].kind} of the {told.thing} {told.surroundings}?"
        case "webqa":
            text = f"Where does the {told.thing} {told.surroundings} stand?"
        case "edis":
            text = f"The {told.thing} {told.surroundings} that was in the news."
        case "oven":
            text = ("What is this?", "Which thing is shown?")[number % 2]
        case "infoseek":
            text = f"What is the {told.facts[0].kind} of this?"
        case "fashioniq":
            text = f"Is {told.changed} and is otherwise alike."
        case _:
            text = f"Make it one that is {told.changed}."
    return text


def _candidate_source(shelf: Shelf, member: Member) -> str | None:
    """What the data set says about where it came from: JSON in a string."""
    place, block = member
    number = shelf.first_did + place
    source: Row
    match shelf.row.dataset:
        case "cirr":
            source = {"id": f"dev-{number}"}
        case "edis":
            source = {"candidate_id" if place % 2 else "id": f"e{number}"}
        case "fashioniq":
            source = {"img_id": f"B{number:09d}"}
        case "nights":
            source = {"image_id": f"{number:06d}"}
        case "webqa":
            source = {"snippet_id" if shelf.row.task_id == 1 else "image_id": number}
        case "oven" | "infoseek":
            source = {"wikidata_id": wikidata_id(shelf, block), "wikipedia_title": f"Thing {block}"}
        case _:
            return None
    return json.dumps(source)


def _query_source(asking: Asking, number: int, row: Row) -> str | None:
    """What the data set says about a query: JSON in a string."""
    count = asking.first_qid + number
    entity = wikidata_id(asking.shelf, asking.block(number))
    positives, negatives = row["pos_cand_list"], row["neg_cand_list"]
    source: Row
    match asking.row.dataset:
        case "cirr":
            source = {"id": count}
        case "edis":
            source = {
                "id": count,
                "pos_cand_candidate_id_scores": [{"candidate_id": did, "score": 3} for did in positives],
                "neg_cand_candidate_id_scores": [{"candidate_id": did, "score": 1} for did in negatives],
            }
        case "fashioniq":
            source = {"candidate_img_id": f"B{count:09d}"}
        case "nights":
            source = {"id": count, "target": count % 2, "split": asking.split, "is_imagenet": False}
        case "webqa":
            source = {"Guid": f"g{count}", "Qcate": "text" if asking.row.task_id == 1 else "color"}
        case "oven":
            source = {
                "data_id": f"oven_{count:08d}",
                "image_id": f"oven_{count:08d}",
                "entity_id": entity,
                "data_split": asking.split,
            }
        case "infoseek":
            source = {
                "data_id": f"infoseek_{count:08d}",
                "answer": [entity],
                "answer_eval": [entity],
                "data_split": asking.split,
                "entity_id": entity,
            }
        case _:
            return None
    return json.dumps(source)
