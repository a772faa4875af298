"""How large the real M-BEIR is, row by row, and what a share of it is.

Queries, pools and positives: the exact table of the test rows (spec, section 1.12); training and validation
sizes: the paper's, in thousands.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Final, NamedTuple


class Counts(NamedTuple):
    """How many of something each block of a row has: the first the most, the others the average."""

    thousandths: int
    """The average, times a thousand."""
    most: int

    def of(self, block: int) -> int:
        """How many this block has; at least one."""
        if block == 0:
            return self.most
        return (block + 1) * self.thousandths // 1000 - block * self.thousandths // 1000

    def before(self, block: int) -> int:
        """How many all earlier blocks have together."""
        if block == 0:
            return 0
        return self.most + block * self.thousandths // 1000 - self.thousandths // 1000

    def fitting(self, room: int) -> int:
        """How many whole blocks fit into so many places; at least one."""
        return max(1, bisect.bisect_right(range(room + 2), room, key=self.before) - 1)

    def within(self, room: int) -> Counts:
        """The same average, and no more than an eighth of the room at once."""
        average = -(-self.thousandths // 1000)
        return Counts(self.thousandths, min(self.most, max(average, room // 8)))


_ONE: Final = Counts(1000, 1)


@dataclass(frozen=True, slots=True)
class RowSizes:
    """One of M-BEIR's 16 rows."""

    dataset: str
    dataset_id: int
    task_id: int
    queries: int
    """In the test split."""
    pool: int
    """Candidates of its local pool."""
    val: int
    train: int
    train_pool: int
    block: Counts = _ONE
    """Candidates that show the same thing and stand next to one another."""
    answers: Counts | None = None
    """How many of a block answer a query, where that is not all of it."""
    val_pool: int = 0
    """Of the validation split, where it has a pool of its own."""

    @property
    def name(self) -> str:
        """As in file names, for example ``webqa_task1``."""
        return f"{self.dataset}_task{self.task_id}"

    def scaled(self, share: float) -> RowSizes:
        """The row at a share of its size, with a few dozen of everything at least."""

        def size(real: int, least: int) -> int:
            return max(min(real, least), round(real * share))

        pool, train_pool = size(self.pool, 48), size(self.train_pool, 48)
        room = min(pool, train_pool)
        block = self.block.within(room)
        answers = self.answers and self.answers.within(room)
        return RowSizes(
            dataset=self.dataset,
            dataset_id=self.dataset_id,
            task_id=self.task_id,
            queries=size(self.queries, 24),
            pool=pool,
            val=size(self.val, 12),
            train=size(self.train, 48),
            train_pool=train_pool,
            block=block,
            answers=answers,
            val_pool=size(self.val_pool, 48),
        )


ROWS: Final = (
    RowSizes("visualnews", 0, 0, 19_995, 542_246, 20_000, 99_000, 99_000, Counts(1000, 2)),
    RowSizes("mscoco", 9, 0, 24_809, 5_000, 24_800, 100_000, 20_000, Counts(1006, 8), val_pool=5_000),
    RowSizes("fashion200k", 1, 0, 1_719, 201_824, 1_700, 15_000, 15_000, Counts(2802, 35)),
    RowSizes("webqa", 2, 1, 2_455, 544_457, 1_700, 16_000, 16_000, Counts(2039, 4)),
    RowSizes("edis", 3, 2, 3_241, 1_047_067, 3_200, 26_000, 52_000, Counts(2569, 8)),
    RowSizes("webqa", 2, 2, 2_511, 403_196, 1_700, 17_000, 17_000, Counts(1440, 2)),
    RowSizes("visualnews", 0, 3, 20_000, 537_568, 20_000, 100_000, 100_000),
    RowSizes("mscoco", 9, 3, 5_000, 24_809, 5_000, 113_000, 113_000, Counts(4998, 5), val_pool=24_800),
    RowSizes("fashion200k", 1, 3, 4_889, 61_707, 4_800, 15_000, 15_000),
    RowSizes("nights", 4, 4, 2_120, 40_038, 2_000, 16_000, 16_000),
    RowSizes("oven", 5, 6, 50_004, 676_667, 50_000, 150_000, 150_000),
    RowSizes(
        "infoseek", 6, 6, 11_323, 611_651, 11_000, 141_000, 141_000, Counts(8852, 173), Counts(5520, 65)
    ),
    RowSizes("fashioniq", 7, 7, 6_003, 74_381, 2_000, 16_000, 16_000, Counts(1001, 4)),
    RowSizes("cirr", 8, 7, 4_170, 21_551, 2_000, 26_000, 26_000, Counts(1010, 3)),
    RowSizes("oven", 5, 8, 14_741, 335_135, 14_700, 157_000, 157_000),
    RowSizes(
        "infoseek", 6, 8, 17_593, 481_782, 17_600, 143_203, 143_203, Counts(16_712, 127), Counts(6463, 127)
    ),
)
"""In the order of the papers' tables, which is the order of the pools in the union pool."""

UPSAMPLED: Final = {"webqa": 100_000, "edis": 50_000, "nights": 50_000, "fashioniq": 50_000, "cirr": 50_000}
"""Lines that these data sets have in the union training file, where their queries are repeated."""

LONGEST_TEXT: Final = 60_546
"""Characters of one OVEN article, the longest text there is."""

LONGEST_SIDE: Final = 51_200
"""Pixels of the widest picture; its shorter side is 256."""
