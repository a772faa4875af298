import dataclasses
import json

import pytest
from PIL import Image

from genius_search.data.mbeir import check
from genius_search.records import Candidate, Modality, Query
from research.mbeir_files import (
    InstructionRow,
    write_candidates,
    write_instructions,
    write_queries,
)

TEXT, IMAGE = Modality.TEXT, Modality.IMAGE


def image(number, path=None):
    return Candidate(f"7:{number}", IMAGE, image=path or f"mbeir_images/{number}.png")


def asking(number, *positives):
    return Query(f"7:{number}", TEXT, "red", positives=positives or (f"7:{number}",), task_id=0)


class DataSet:
    """A small data set without fault, to break in one place."""

    def __init__(self, root):
        self.root = root
        self.candidates = [image(number) for number in range(1, 4)]
        self.queries = [asking(number) for number in range(1, 4)]
        self.training = self.queries
        self.instructions = [InstructionRow(TEXT, IMAGE, "toy", 7, ("Find it.",))]
        (root / "mbeir_images").mkdir(parents=True)
        for number in range(1, 4):
            Image.new("RGB", (8, 8)).save(root / f"mbeir_images/{number}.png")

    def write(self):
        write_candidates(
            self.root / "cand_pool/local/mbeir_toy_task0_cand_pool.jsonl", self.candidates
        )
        write_queries(self.root / "query/test/mbeir_toy_task0_test.jsonl", self.queries)
        write_queries(self.root / "query/train/mbeir_toy_train.jsonl", self.training)
        write_instructions(self.root / "instructions/query_instructions.tsv", self.instructions)

    def findings(self):
        self.write()
        return findings_by_kind(self.root)


def findings_by_kind(root, **settings):
    return {finding.kind: finding for finding in check(root, **settings).findings}


@pytest.fixture
def data(tmp_path):
    return DataSet(tmp_path / "toy")


def test_a_data_set_without_fault_is_ok_and_counted(data):
    data.write()
    report = check(data.root)
    assert report.ok
    assert json.loads(json.dumps(dataclasses.asdict(report))) == {
        "records": {
            "cand_pool/local/mbeir_toy_task0_cand_pool.jsonl": 3,
            "query/test/mbeir_toy_task0_test.jsonl": 3,
            "query/train/mbeir_toy_train.jsonl": 3,
        },
        "findings": [],
    }


def test_pictures_that_cannot_be_read_are_counted_once_each_and_named(data):
    data.candidates = [image(1, "../secret.png"), *(image(number) for number in range(2, 11))]
    data.queries[0] = Query("7:1", IMAGE, image="gone.png", positives=("7:1",), task_id=4)
    (data.root / "mbeir_images/2.png").write_bytes(b"no picture")
    finding = data.findings()["bad-image"]
    assert (finding.severity, finding.count, len(finding.examples)) == ("error", 10, 5)
    assert "leads out" in finding.examples[0]
    assert "gone.png: missing" in finding.examples[1]
    assert "bad-image" not in findings_by_kind(data.root, images=False)


def test_an_instruction_that_is_missing_is_named_by_its_key(data):
    data.instructions = [InstructionRow(TEXT, TEXT, "toy", 7, ("x",))]
    finding = data.findings()["missing-instruction"]
    assert (finding.severity, finding.count) == ("error", 6)
    assert "add a row text<tab>image<tab>NAME<tab>7<tab>" in finding.examples[0]
    (data.root / "instructions/query_instructions.tsv").unlink()
    assert check(data.root).ok
    assert set(findings_by_kind(data.root)) == {"no-instructions"}


@pytest.mark.parametrize(
    ("broken", "kind", "count", "example"),
    [
        (
            {
                "queries": [asking(1, "7:99"), asking(2, "7:2", "8:1")],
                "training": [asking(1, "7:50")],
            },
            "positives-outside-pool",
            2,
            "7:99",
        ),
        ({"candidates": [image(1), image(2), image(3), image(1)]}, "duplicate-id", 1, "7:1"),
    ],
)
def test_records_that_do_not_fit_together_are_errors(data, broken, kind, count, example):
    for name, records in broken.items():
        setattr(data, name, records)
    finding = data.findings()[kind]
    assert (finding.severity, finding.count) == ("error", count)
    assert example in finding.examples[0]


def test_files_that_are_missing_or_cannot_be_used_are_named_and_the_rest_still_checked(data):
    data.write()
    (data.root / "cand_pool/local/mbeir_toy_task0_cand_pool.jsonl").unlink()
    assert "no local pool" in findings_by_kind(data.root)["layout"].examples[0]


def test_bad_lines_are_all_counted_and_named_by_file_and_line(data):
    data.write()
    pool = data.root / "cand_pool/local/mbeir_toy_task0_cand_pool.jsonl"
    pool.write_bytes(pool.read_bytes() + b"{broken\n" * 8)
    finding = findings_by_kind(data.root)["bad-line"]
    assert (finding.count, len(finding.examples)) == (8, 5)
    assert f"{pool}:4" in finding.examples[0]
