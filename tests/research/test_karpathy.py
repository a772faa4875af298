import json

import pytest
from PIL import Image

from genius_search.data.mbeir import MBeir, check, read_candidates, read_pool
from genius_search.errors import BadData
from genius_search.records import Modality
from research.karpathy import convert_karpathy


def row(name, split, *captions, **more):
    return {
        "filename": name,
        "split": split,
        "sentences": [{"raw": text, "tokens": text.split()} for text in captions],
        **more,
    }


ROWS = [
    row("a.jpg", "train", "A cat.", "A dog. ", "A cat.", "Four.", "Five.", "Six."),
    row("b.jpg", "restval", "A cat.", filepath="val2014"),
    row("c.jpg", "val", "A bird."),
    row("d.jpg", "test", "A fish.", "A pond."),
    row("e.jpg", "test", "A fish."),
]


@pytest.fixture
def source(tmp_path):
    images = tmp_path / "pictures"
    for entry in ROWS:
        path = images / entry.get("filepath", "") / entry["filename"]
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)
    return write(tmp_path, {"images": ROWS}), images


def write(tmp_path, body):
    path = tmp_path / "dataset.json"
    path.write_text(json.dumps(body))
    return path


def convert(source, out, **settings):
    return convert_karpathy(
        *source, out, **{"dataset_id": 10, "dataset_name": "flickr30k", **settings}
    )


def test_the_result_is_a_data_set_without_faults(source, tmp_path):
    counts = convert(source, tmp_path / "out")
    report = check(tmp_path / "out")
    assert not report.findings
    assert [tuple(count) for count in counts] == [
        ("train", 2, 4, 6),
        ("val", 1, 1, 2),
        ("test", 2, 2, 4),
    ]


def test_both_tasks_have_rows_pools_and_four_instructions(source, tmp_path):
    convert(source, tmp_path / "out")
    data = MBeir(tmp_path / "out")
    rows = data.rows("test")
    assert [(row.name, row.task_id) for row in rows] == [
        ("flickr30k_task0", 0),
        ("flickr30k_task3", 3),
    ]
    pictures, captions = (list(read_candidates(row.local_pool)) for row in rows)
    assert [candidate.modality for candidate in pictures] == [Modality.IMAGE] * 2
    assert [candidate.text for candidate in captions] == ["A fish.", "A pond."]
    assert len(list(read_pool(data.global_pool("test")))) == 4
    assert len(set(data.instructions.lookup(10, Modality.TEXT, Modality.IMAGE))) == 4
    assert len(set(data.instructions.lookup(10, Modality.IMAGE, Modality.TEXT))) == 4


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ([], "Karpathy"),
        ({"images": []}, "no pictures"),
        ({"images": [{"filename": "a.jpg"}]}, "Karpathy"),
        ({"images": [row("a.jpg", "train")]}, "no caption"),
        ({"images": [row("a.jpg", "dev", "A cat.")]}, "Karpathy"),
        ({"images": [row("../a.jpg", "train", "A cat.")]}, "is not in the folder"),
    ],
)
def test_a_file_of_another_format_is_refused(source, tmp_path, body, problem):
    with pytest.raises(BadData, match=problem):
        convert((write(tmp_path, body), source[1]), tmp_path / "out")
