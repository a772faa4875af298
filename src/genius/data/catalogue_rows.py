"""One split of the drawn world as rows: its candidates, its queries with their answers, its pictures.

Every row depends only on the seed and its product, never on what was written before it, so rows can be
made in any order and by any number of processes.
"""

from __future__ import annotations

import json
import random
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Int, UInt8
from numpy import ndarray

from genius.data import catalogue_wordings as wordings
from genius.data.catalogue_drawing import NUM_LOOKS, SHIFT, Pose
from genius.data.catalogue_world import (
    NUM_CODES,
    SPLITS,
    Change,
    Product,
    Split,
    changes,
    facts_of,
)
from genius.data.records import TASKS, Candidate, Modality, Query

DATASET_ID: Final = 50
"""Its number beside M-BEIR's data sets, whose numbers are 0 to 10."""
IMAGES: Final = "mbeir_images/catalogue_images"
SHARD: Final = 200
"""Products whose pictures share a folder and are drawn by one process in one go."""
Kind = Literal["image", "caption", "card", "fact"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
KIND_OF_TASK: Final[Mapping[int, Kind]] = {
    0: "image",
    1: "fact",
    2: "card",
    3: "caption",
    4: "image",
    6: "fact",
    7: "image",
    8: "card",
}
PER_PRODUCT: Final = 5
"""Candidates of a product: a picture, a caption, a card, two facts."""
Role = Literal["image", "card", "query3", "query4", "query6", "query7", "query8"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)
"""What a product's pictures are for; no two of them have the same size and rotation."""


class Ask(NamedTuple):
    """A query before it has words: its number, its task, where its answer's product stands in the split."""

    number: int
    task: int
    place: int
    reference: Change | None
    """What its picture shows, when that is not the wanted product itself."""


class Picture(NamedTuple):
    """What to draw into which file."""

    path: str
    product: Product
    pose: Pose


@dataclass(frozen=True, slots=True)
class SplitRows:
    """The rows of one split."""

    split: Split
    seed: int
    codes: Int[ndarray, " products"]
    first_did: int
    num_candidates: int
    """At least ``PER_PRODUCT`` for each product; what exceeds it are third facts of the first products."""
    asks: Mapping[int, Sequence[Ask]]
    """Queries of each task, in the order of their answers."""

    def candidates(self, kind: Kind) -> Iterator[Candidate]:
        """All candidates of a kind, ids ascending."""
        codes = self.codes.tolist()
        for place, code in enumerate(codes):
            match kind:
                case "image":
                    yield self._candidate(kind, place, code, None, _path(self.split, place, "image"))
                case "caption":
                    text = wordings.caption(Product.of(code), self._rng("caption", code))
                    yield self._candidate(kind, place, code, text, None)
                case "card":
                    yield self._candidate(
                        kind, place, code, self._card_text(code), _path(self.split, place, "card")
                    )
                case "fact":
                    yield from (self._fact_candidate(place, code, which) for which in (0, 1))
        if kind == "fact":
            extra = self.num_candidates - PER_PRODUCT * len(codes)
            yield from (self._fact_candidate(place, code, 2) for place, code in enumerate(codes[:extra]))

    def queries(self, task: int) -> Iterator[Query]:
        """All queries of a task with their answers, ids ascending."""
        return map(self._query, self.asks[task])

    def shards(self) -> Iterator[PictureShard]:
        """Its pictures, in shares small enough to be sent to another process."""
        for first in range(0, len(self.codes), SHARD):
            codes = tuple(self.codes[first : first + SHARD].tolist())
            asks = [
                ask
                for task, asked in self.asks.items()
                if TASKS[task][0] is not Modality.TEXT
                for ask in asked[
                    bisect_left(asked, first, key=_place) : bisect_left(asked, first + SHARD, key=_place)
                ]
            ]
            yield PictureShard(self.split, self.seed, first, codes, tuple(asks))

    def _query(self, ask: Ask) -> Query:
        code = int(self.codes[ask.place])
        product, rng = Product.of(code), self._rng(f"query {ask.task}", code)
        kind, modality = KIND_OF_TASK[ask.task], TASKS[ask.task][0]
        told: dict[str, object] = {"kind": kind, "product": product.words()}
        which = 0
        text = None
        if kind == "fact":
            which = rng.randrange(2)
            fact = facts_of(code, seed=self.seed)[which].kind
            told["fact"] = fact
            text = (
                wordings.question(product, fact, rng) if ask.task == 1 else wordings.image_question(fact, rng)
            )
        if ask.reference:
            changed = ask.reference.attribute
            told["changed"], told["reference"] = changed, Product.of(ask.reference.code).words()
            ways = {7: wordings.edit, 8: wordings.changed_card_request}
            text = ways[ask.task](product, changed, rng)
        elif ask.task == 8:
            text = wordings.card_request(rng)
        elif ask.task == 0:
            text = wordings.caption(product, rng)
        elif ask.task == 2:
            text = wordings.description(product, rng)
        return Query(
            qid=f"{DATASET_ID}:{ask.number}",
            modality=modality,
            text=text,
            image=None if modality is Modality.TEXT else _path(self.split, ask.place, _role(ask.task)),
            positives=(self._did(kind, ask.place, which),),
            task_id=ask.task,
            source=json.dumps(told),
        )

    def _candidate(self, kind: Kind, place: int, code: int, text: str | None, image: str | None) -> Candidate:
        modality = Modality.of(has_image=image is not None, has_text=text is not None)
        source = json.dumps({"kind": kind, "product": Product.of(code).words()})
        return Candidate(self._did(kind, place), modality, text, image, source)

    def _fact_candidate(self, place: int, code: int, which: int) -> Candidate:
        fact, product = facts_of(code, seed=self.seed)[which], Product.of(code)
        text = wordings.fact_text(product, fact, self._rng(f"fact {which}", code))
        source = json.dumps({"kind": "fact", "product": product.words(), "fact": fact.kind})
        return Candidate(self._did("fact", place, which), Modality.TEXT, text, None, source)

    def _card_text(self, code: int) -> str:
        rng = self._rng("card", code)
        number = f"{rng.randrange(10_000):04d}-{rng.randrange(100):02d}"
        price = next(fact.value for fact in facts_of(code, seed=self.seed) if fact.kind == "price")
        return wordings.card_text(Product.of(code), number=number, price=price, rng=rng)

    def _did(self, kind: Kind, place: int, which: int = 0) -> str:
        """The id of a candidate; ``which`` of the facts, and third facts come after all others."""
        products = len(self.codes)
        offset = KINDS.index(kind) * products + place
        if kind == "fact":
            facts = KINDS.index("fact") * products
            offset = facts + 2 * place + which if which < 2 else facts + 2 * products + place
        return f"{DATASET_ID}:{self.first_did + offset}"

    def _rng(self, purpose: str, code: int) -> random.Random:
        return random.Random(f"{self.seed} {purpose} {code}")


class PictureShard(NamedTuple):
    """What one process draws in one go."""

    split: Split
    seed: int
    first: int
    """Where its first product stands in the split."""
    codes: tuple[int, ...]
    asks: tuple[Ask, ...]
    """The queries with pictures whose answers are among these products."""

    def pictures(self) -> Iterator[Picture]:
        """What to draw, in any order."""
        poses = [self._poses(code) for code in self.codes]
        for place, code in enumerate(self.codes, start=self.first):
            for role in ("image", "card"):
                yield self._picture(place, role, code, poses[place - self.first])
        for ask in self.asks:
            shown = ask.reference.code if ask.reference else self.codes[ask.place - self.first]
            yield self._picture(ask.place, _role(ask.task), shown, poses[ask.place - self.first])

    def _poses(self, code: int) -> list[Pose]:
        """A pose for every role; no two have the same size and rotation."""
        rng = random.Random(f"{self.seed} poses {code}")
        looks = rng.sample(range(NUM_LOOKS), len(ROLES))
        return [Pose(look, rng.randint(-SHIFT, SHIFT), rng.randint(-SHIFT, SHIFT)) for look in looks]

    def _picture(self, place: int, role: Role, shown: int, poses: list[Pose]) -> Picture:
        return Picture(_path(self.split, place, role), Product.of(shown), poses[ROLES.index(role)])


def plan_asks(
    split: Split,
    codes: Int[ndarray, " products"],
    *,
    per_task: int,
    splits: UInt8[ndarray, " codes"],
    seed: int,
) -> dict[int, list[Ask]]:
    """Choose which products are asked for in each task, and what the pictures of changed ones show.

    A picture that differs from its answer shows another product of the same split; half of the time one that
    is in the pool too, where there is one, so that ignoring the change finds a wrong candidate.
    """
    allowed = splits == SPLITS.index(split)
    pool = np.zeros(NUM_CODES, dtype=bool)
    pool[codes] = True
    number = 0
    plan: dict[int, list[Ask]] = {}
    for task in TASKS:
        rng = random.Random(f"{seed} asks {split} {task}")
        places = rng.sample(range(len(codes)), len(codes))
        chosen: list[tuple[int, Change | None]] = []
        for place in places:
            if len(chosen) == per_task:
                break
            if task != 7 and not (task == 8 and rng.random() < 0.5):
                chosen.append((place, None))
                continue
            code = int(codes[place])
            change = next(changes(code, within=pool, rng=rng), None) if rng.random() < 0.5 else None
            change = change or next(changes(code, within=allowed, rng=rng), None)
            if change is not None:
                chosen.append((place, change))
        plan[task] = []
        for place, change in sorted(chosen):
            number += 1
            plan[task].append(Ask(number, task, place, change))
    return plan


def _place(ask: Ask) -> int:
    return ask.place


def _path(split: Split, place: int, role: Role) -> str:
    return f"{IMAGES}/{split}/{place // SHARD:04d}/{place:06d}-{role}.jpg"


def _role(task: int) -> Role:
    return next(role for role in ROLES if role == f"query{task}")
