"""Instructions of a rehearsal, in our own words: 16 rows of four, with the traps of the real file.

WebQA's and EDIS's task 2 say only "image" though pictures with text are wanted, and OVEN and InfoSeek share
their texts (spec, section 1.11).
"""

from __future__ import annotations

from typing import Final

from genius.data.instructions import InstructionRow
from genius.data.records import TASKS
from genius.data.rehearsal_sizes import ROWS

_PAGE_TEXT: Final = (
    "Give me the encyclopedia paragraph that settles the question about this picture.",
    "Which passage tells what is asked about the thing shown?",
    "Look up the paragraph that answers the question on the image.",
    "Fetch the passage of an article that goes with this picture and question.",
)
_PAGE: Final = (
    "Give me the encyclopedia picture with its paragraph that settles the question about this picture.",
    "Which illustrated passage tells what is asked about the thing shown?",
    "Look up the article image and text that answer the question on the image.",
    "Fetch the picture and passage of an article that go with this picture and question.",
)
_TEXTS: Final[dict[str, tuple[str, str, str, str]]] = {
    "visualnews_task0": (
        "Which press photo goes with this news caption?",
        "Give me the newspaper picture that was printed above these words.",
        "Look up the news photo to this caption.",
        "Fetch the reporter's picture that the line describes.",
    ),
    "mscoco_task0": (
        "Give me the snapshot that this caption describes.",
        "Which everyday photo shows this?",
        "Look up the common scene that fits the sentence.",
        "Fetch an ordinary picture with what is said here.",
    ),
    "fashion200k_task0": (
        "Which garment photo does this shop text describe?",
        "Give me the fashion picture with this style.",
        "Look up the product photo of these clothes.",
        "Fetch the picture of a piece of clothing like this.",
    ),
    "webqa_task1": (
        "Give me the encyclopedia passage that answers the question.",
        "Which paragraph holds the answer?",
        "Look up the text with the fact that is asked for.",
        "Fetch a passage in which the answer is written.",
    ),
    "edis_task2": (
        "Which news image is the one described here?",
        "Give me the press image that matches the headline.",
        "Look up the image that the report is about.",
        "Fetch the news image to these words.",
    ),
    "webqa_task2": (
        "Give me the encyclopedia image that answers the question.",
        "Which image holds the answer?",
        "Look up the image in which the answer can be seen.",
        "Fetch an article's image that settles the question.",
    ),
    "visualnews_task3": (
        "Which caption was printed under this press photo?",
        "Give me the newspaper line that goes with the picture.",
        "Look up the news caption of this photo.",
        "Fetch the words that the reporter wrote about this picture.",
    ),
    "mscoco_task3": (
        "Give me a caption of this snapshot.",
        "Which sentence describes this everyday photo?",
        "Look up the words for this common scene.",
        "Fetch a line that says what the ordinary picture shows.",
    ),
    "fashion200k_task3": (
        "Which shop text describes the clothes in this photo?",
        "Give me the style of this garment in words.",
        "Look up the product text of this fashion picture.",
        "Fetch a description of the piece of clothing.",
    ),
    "nights_task4": (
        "Give me the picture that looks most like this one.",
        "Which image resembles this one?",
        "Look up a photo that people would call the same.",
        "Fetch the nearest look-alike of this picture.",
    ),
    "oven_task6": _PAGE_TEXT,
    "infoseek_task6": _PAGE_TEXT,
    "fashioniq_task7": (
        "Which garment is like this one, but changed as told?",
        "Give me the fashion photo that differs from this one as described.",
        "Look up the clothes with this alteration.",
        "Fetch the product photo after the wish is granted.",
    ),
    "cirr_task7": (
        "Give me the everyday photo that is like this one, but changed as told.",
        "Which common picture differs from this one as described?",
        "Look up the scene with this modification.",
        "Fetch the snapshot that this one becomes.",
    ),
    "oven_task8": _PAGE,
    "infoseek_task8": _PAGE,
}

INSTRUCTIONS: Final = tuple(
    InstructionRow(*TASKS[row.task_id], row.dataset, row.dataset_id, _TEXTS[row.name]) for row in ROWS
)
