import dataclasses
import json

import pytest
from PIL import Image

from genius_search.data.check import check
from genius_search.errors import BadData
from genius_search.records import Candidate, Modality, Query
from research.mbeir_files import (
    InstructionRow,
    write_candidates,
    write_instructions,
    write_qrels,
    write_queries,
)

TEXT, IMAGE = Modality.TEXT, Modality.IMAGE


def image(number, path=None):
    return Candidate(f"7:{number}", IMAGE, image=path or f"mbeir_images/{number}.png")


def asking(number, *positives, **more):
    return Query(
        f"7:{number}", TEXT, "red", positives=positives or (f"7:{number}",), **{"task_id": 0, **more}
    )


class DataSet:
    """A small data set without fault, to break in one place."""

    def __init__(self, root):
        self.root = root
        self.candidates = [image(number) for number in range(1, 4)]
        self.queries = [asking(number) for number in range(1, 4)]
        self.qrels = self.queries
        self.union = self.candidates
        self.training = self.queries
        self.upsampled = [*self.queries, self.queries[0]]
        self.instructions = [InstructionRow(TEXT, IMAGE, "toy", 7, ("Find it.",))]
        (root / "mbeir_images").mkdir(parents=True)
        for number in range(1, 4):
            Image.new("RGB", (8, 8)).save(root / f"mbeir_images/{number}.png")

    def write(self):
        root = self.root
        write_candidates(root / "cand_pool/local/mbeir_toy_task0_cand_pool.jsonl", self.candidates)
        for split in ("train", "test"):
            write_candidates(root / f"cand_pool/global/mbeir_union_{split}_cand_pool.jsonl", self.union)
        write_queries(root / "query/test/mbeir_toy_task0_test.jsonl", self.queries)
        write_queries(root / "query/train/mbeir_toy_train.jsonl", self.training)
        write_queries(root / "query/union_train/mbeir_union_up_train.jsonl", self.upsampled)
        write_qrels(root / "qrels/test/mbeir_toy_task0_test_qrels.txt", self.qrels)
        write_instructions(root / "instructions/query_instructions.tsv", self.instructions)

    def found(self, **settings):
        self.write()
        return found(self.root, **settings)


def found(root, **settings):
    return {finding.kind: finding for finding in check(root, **settings).findings}


@pytest.fixture
def data(tmp_path):
    return DataSet(tmp_path / "toy")


def test_a_data_set_without_fault_is_ok_and_counted(data):
    data.write()
    report = check(data.root)
    assert report.ok
    assert report.findings == ()
    assert [dataclasses.astuple(count) for count in report.queries] == [
        ("test", "toy", 7, 0, 3, 3),
        ("train", "toy", 7, 0, 3, 3),
        ("union_train", "union_up", 7, 0, 4, 4),
    ]
    first = report.pools[0]
    assert (first.pool, first.num_candidates, first.num_images) == (
        "local/mbeir_toy_task0_cand_pool.jsonl",
        3,
        3,
    )
    assert report.num_images == 3


def test_a_report_is_json(data):
    data.candidates = [*data.candidates, image(4)]
    data.write()
    body = json.loads(json.dumps(dataclasses.asdict(check(data.root))))
    assert body["findings"][0]["kind"] == "missing-image"
    assert body["name"] == "toy"


def test_missing_pictures_are_counted_once_each_and_named(data):
    data.candidates = [image(number) for number in range(1, 11)]
    finding = data.found()["missing-image"]
    assert (finding.severity, finding.count, len(finding.examples)) == ("error", 7, 5)
    assert "did 7:4" in finding.examples[0]
    assert "4.png" in finding.examples[0]


def test_missing_pictures_are_found_without_decoding_broken_ones_are_not(data):
    (data.root / "mbeir_images/1.png").write_bytes(b"no picture")
    (data.root / "mbeir_images/2.png").unlink()
    assert set(data.found(decode_images=False)) == {"missing-image"}
    assert set(data.found()) == {"missing-image", "broken-image"}


def test_broken_and_oversized_pictures_are_told_apart(data):
    (data.root / "mbeir_images/1.png").write_bytes(b"")
    Image.new("1", (50_001, 1_000)).save(data.root / "mbeir_images/2.png")
    kinds = data.found(workers=1)
    assert "empty" in kinds["broken-image"].examples[0]
    assert "50,001 x 1,000" in kinds["oversized-image"].examples[0]


def test_a_picture_outside_the_data_set_is_not_looked_at(data):
    data.candidates[0] = image(1, "../secret.png")
    assert "leads out" in data.found()["missing-image"].examples[0]


def test_pictures_of_queries_are_looked_at_too(data):
    data.queries[0] = Query("7:1", IMAGE, image="gone.png", positives=("7:1",), task_id=4)
    assert any("qid 7:1" in example for example in data.found()["missing-image"].examples)


def test_an_instruction_that_is_missing_is_named_by_its_key(data):
    data.instructions = [InstructionRow(TEXT, TEXT, "toy", 7, ("x",))]
    finding = data.found()["missing-instruction"]
    assert (finding.severity, finding.count) == ("error", 1)
    (example,) = finding.examples
    assert example.startswith(str(data.root / "instructions" / "query_instructions.tsv"))
    assert "data set 7, text -> image (10 queries); add text<tab>image<tab>NAME<tab>7<tab>" in example


def test_a_data_set_without_instructions_is_usable(data):
    data.write()
    (data.root / "instructions/query_instructions.tsv").unlink()
    report = check(data.root)
    assert report.ok
    assert [finding.kind for finding in report.findings] == ["no-instructions"]


def test_a_query_that_nothing_in_the_pools_answers_is_an_error(data):
    data.queries = [asking(1, "7:99"), asking(2)]
    data.qrels = data.queries
    kinds = data.found()
    assert kinds["positives-outside-local-pool"].severity == "error"
    assert kinds["positives-outside-local-pool"].count == 1
    assert "7:99" in kinds["positives-outside-global-pool"].examples[0]


def test_a_positive_of_another_data_set_may_be_outside_the_local_pool(data):
    data.queries = [asking(1, "7:1", "8:1")]
    data.qrels = data.queries
    data.union = [*data.candidates, Candidate("8:1", IMAGE, image="mbeir_images/1.png")]
    assert data.found() == {}


def test_a_positive_of_the_own_data_set_outside_the_pools_is_a_warning(data):
    data.queries = [asking(1, "7:1", "7:9")]
    data.qrels = data.queries
    kinds = data.found()
    assert set(kinds) == {"some-positives-outside-local-pool", "some-positives-outside-global-pool"}
    assert {finding.severity for finding in kinds.values()} == {"warning"}


def test_training_positives_are_looked_for_in_the_training_pool(data):
    data.training = [asking(1, "7:50")]
    assert set(data.found()) == {"positives-outside-global-pool"}


def test_without_union_files_any_pool_counts_as_the_global_one(data):
    data.training = [asking(1, "7:50"), asking(2)]
    data.write()
    for path in (data.root / "cand_pool/global").iterdir():
        path.unlink()
    assert found(data.root)["positives-outside-global-pool"].count == 1


def test_an_id_twice_in_a_pool_or_among_test_queries_is_an_error(data):
    data.candidates = [*data.candidates, data.candidates[0]]
    data.queries = [*data.queries, data.queries[0]]
    data.qrels = data.queries[:3]
    finding = data.found()["duplicate-id"]
    assert (finding.severity, finding.count) == ("error", 2)


def test_one_id_for_two_things_is_a_conflict_also_across_pools(data):
    data.union = [image(1, "mbeir_images/2.png"), *data.candidates[1:]]
    data.upsampled = [*data.queries, Query("7:1", TEXT, "blue", positives=("7:1",), task_id=0)]
    finding = data.found()["conflicting-id"]
    assert (finding.severity, finding.count) == ("error", 3)  # two union pools and the training file


@pytest.mark.parametrize("qrels", [[asking(1, "7:2"), asking(2), asking(3)], [asking(1), asking(2)]])
def test_qrels_that_say_something_else_are_an_error(data, qrels):
    data.qrels = qrels
    finding = data.found()["qrels-disagree"]
    assert (finding.severity, finding.count) == ("error", 1)
    assert len(qrels) == 3 or "add `7:3 0 7:3 1 0`" in finding.examples[0]


def test_qrels_of_a_query_that_is_not_there_are_an_error(data):
    data.qrels = [*data.queries, asking(9, "7:1")]
    assert "7:9" in data.found()["qrels-disagree"].examples[0]


def test_missing_and_broken_qrels_are_named(data):
    data.write()
    path = data.root / "qrels/test/mbeir_toy_task0_test_qrels.txt"
    path.write_text("7:1 0\n")
    assert "columns" in found(data.root)["bad-line"].examples[0]
    path.unlink()
    assert found(data.root)["missing-qrels"].severity == "warning"


def test_a_file_that_others_imply_is_named(data):
    data.write()
    qrels = data.root / "qrels/test/mbeir_toy_task0_test_qrels.txt"
    qrels.rename(qrels.with_name("mbeir_toy_task3_test_qrels.txt"))
    examples = found(data.root)["layout"].examples
    for name in ("mbeir_toy_task3_test.jsonl", "mbeir_toy_task0_test_qrels.txt"):
        assert any(f"{name} is missing" in example for example in examples)


def test_a_row_of_m_beir_needs_its_instructions(data):
    data.write()
    for path in list(data.root.rglob("mbeir_toy_task0*")):
        path.rename(path.with_name(path.name.replace("toy", "mscoco")))
    (data.root / "instructions/query_instructions.tsv").unlink()
    (example,) = found(data.root)["layout"].examples
    assert "query_instructions.tsv is missing" in example


def test_bad_lines_are_all_counted_and_named_by_file_and_line(data):
    data.write()
    pool = data.root / "cand_pool/local/mbeir_toy_task0_cand_pool.jsonl"
    pool.write_bytes(pool.read_bytes() + b"{broken\n" * 8)
    finding = found(data.root)["bad-line"]
    assert (finding.count, len(finding.examples)) == (8, 5)
    assert f"{pool}:4" in finding.examples[0]


def test_a_task_that_does_not_fit_is_an_error(data):
    data.queries = [asking(1, task_id=3), asking(2, task_id=None)]
    data.qrels = [asking(1), asking(2)]
    data.training = [asking(1, task_id=1), asking(2, task_id=5)]
    finding = data.found()["task-mismatch"]
    assert (finding.severity, finding.count) == ("error", 3)


def test_queries_without_positives_are_a_warning(data):
    data.queries = [Query("7:1", TEXT, "red", task_id=0), asking(2)]
    data.qrels = data.queries
    assert data.found()["no-positives"].severity == "warning"


def test_a_row_without_its_pool_is_named_and_the_rest_still_checked(data):
    data.write()
    (data.root / "cand_pool/local/mbeir_toy_task0_cand_pool.jsonl").unlink()
    (data.root / "mbeir_images/1.png").unlink()
    assert set(found(data.root)) == {"layout", "missing-image"}


def test_a_data_set_without_pools_is_named(data):
    data.candidates, data.union = [], []
    data.write()
    for path in (data.root / "cand_pool").rglob("*.jsonl"):
        path.unlink()
    assert any("no pool" in example for example in found(data.root)["layout"].examples)


def test_union_files_of_evaluation_splits_are_read_like_the_others(data):
    data.write()
    write_queries(data.root / "query/union_test/mbeir_union_test.jsonl", data.queries)
    assert found(data.root) == {}


def test_a_folder_of_another_layout_is_refused(tmp_path):
    with pytest.raises(BadData, match="layout"):
        check(tmp_path)


def test_many_pictures_and_few_threads_still_see_all(data):
    data.candidates = [image(number) for number in range(1, 200)]
    assert data.found(workers=1)["missing-image"].count == 196
